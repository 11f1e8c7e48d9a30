package torture

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math/rand/v2"

	"github.com/sluice-ml/sluice"
)

// makeSample makes the sample of a position: everything in it follows from its id, so whoever reads it can tell whether it is the right one.
func makeSample(runID, id string) *sluice.Sample {
	r := randomOf(id)
	length := 32 + r.Int64N(992)
	width := int64(3 * 128)
	if r.IntN(16) == 0 {
		width *= 10 // up to 8 MB, so that some uploads take long enough to be killed in
	}
	i64 := func(name string, value func(i int64) int64) sluice.Feature {
		data := make([]byte, 8*length)
		for i := range length {
			binary.LittleEndian.PutUint64(data[8*i:], uint64(value(i)))
		}
		return feature(name, sluice.Int64, data, 1, length)
	}
	hidden := make([]byte, 2*length*width)
	for i := 0; i+8 <= len(hidden); i += 8 {
		binary.LittleEndian.PutUint64(hidden[i:], r.Uint64())
	}
	return &sluice.Sample{
		SampleID: id, RunID: runID, Algorithm: sluice.DFlash, SchemaVersion: 1, NumTokens: length,
		Attributes: map[string]string{"shift": "0", "aux_layers": "hf:1,2,3"},
		Features: []sluice.Feature{
			feature("hidden_states", sluice.BFloat16, hidden, 1, length, width),
			i64("input_ids", func(int64) int64 { return r.Int64N(1 << 17) }),
			i64("attention_mask", func(int64) int64 { return 1 }),
			i64("loss_mask", func(i int64) int64 { return min(i, 1) }),
		},
	}
}

func feature(name string, d sluice.DType, data []byte, shape ...int64) sluice.Feature {
	return sluice.Feature{Name: name, Tensor: sluice.Tensor{Spec: sluice.Spec{Shape: shape, DType: d}, Data: data}}
}

func randomOf(id string) *rand.Rand {
	h := fnv.New128a()
	h.Write([]byte(id))
	sum := h.Sum(nil)
	return rand.New(rand.NewPCG(binary.BigEndian.Uint64(sum), binary.BigEndian.Uint64(sum[8:])))
}

// differs says in what the features are not those of the sample, or "".
func differs(runID, id string, got []sluice.Feature) string {
	want := makeSample(runID, id).Features
	if len(got) != len(want) {
		return fmt.Sprintf("%d features, want %d", len(got), len(want))
	}
	for i := range want {
		w, g := &want[i], &got[i]
		switch {
		case w.Name != g.Name:
			return fmt.Sprintf("feature %d is %s, want %s", i, g.Name, w.Name)
		case !bytes.Equal(w.Data, g.Data):
			at := 0
			for at < min(len(w.Data), len(g.Data)) && w.Data[at] == g.Data[at] {
				at++
			}
			return fmt.Sprintf("%s differs from byte %d of %d", w.Name, at, len(w.Data))
		}
	}
	return ""
}
