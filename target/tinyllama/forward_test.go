package tinyllama

import (
	"bytes"
	"context"
	"errors"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/target/targettest"
)

// The harness allows no tolerance: batching, padding and packing must not change one bit.
func TestTheModelPassesTheSuite(t *testing.T) {
	t.Parallel()
	tied := small
	tied.Tied, tied.KVHeads, tied.Layers = true, 4, 6
	noTokenizer := small
	noTokenizer.Vocab = 50
	for name, s := range map[string]shape{"small": small, "tied": tied, "no tokenizer": noTokenizer} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			folder := s.folder(s.random(1))
			targettest.Run(t, targettest.Harness{
				New: func(t *testing.T) sluice.Target {
					m, err := Load(folder)
					if err != nil {
						t.Fatal(err)
					}
					return m
				},
				LongestRow: 90,
			})
		})
	}
}

// bits cuts n tokens of one output row.
func bits(t sluice.Tensor, row, from, n int) []byte {
	width := t.Shape[2] * t.DType.Size()
	start := (int64(row)*t.Shape[1] + int64(from)) * width
	return t.Data[start : start+int64(n)*width]
}

// A row's bits are the same alone and anywhere in any batch, packed or padded in any way.
func TestARowsBitsDoNotDependOnItsBatch(t *testing.T) {
	t.Parallel()
	wide := small
	wide.Hidden, wide.Intermediate, wide.HeadDim, wide.MaxTokens, wide.Layers = 72, 200, 40, 260, 2 // more than a tile in every direction
	models := []*Model{small.model(t), wide.model(t)}
	want := sluice.Want{AuxLayers: []int{-1, 1}, Last: sluice.PostNorm, Logits: true}
	rapid.Check(t, func(t *rapid.T) {
		m := rapid.SampledFrom(models).Draw(t, "model")
		limit := m.cfg.maxTokens
		var docs [][]int64
		var rows [][][]int64
		packed := rapid.Bool().Draw(t, "packed")
		for range rapid.IntRange(1, 3).Draw(t, "rows") {
			row, room := [][]int64{}, limit
			for range rapid.IntRange(1, map[bool]int{true: 4, false: 1}[packed]).Draw(t, "documents") {
				if room == 0 {
					break
				}
				doc := small.text(rapid.Uint64().Draw(t, "text"), rapid.IntRange(1, room).Draw(t, "tokens"))
				room -= len(doc)
				row, docs = append(row, doc), append(docs, doc)
			}
			rows = append(rows, row)
		}
		var batch *sluice.PromptBatch
		cols := rapid.IntRange(0, limit).Draw(t, "columns")
		if packed {
			batch = targettest.Pack(cols, rows...)
		} else {
			batch = targettest.Batch(cols, docs...)
		}
		together, err := m.Forward(t.Context(), batch, want)
		if err != nil {
			t.Fatal(err)
		}
		for r, row := range rows {
			at := 0
			for _, doc := range row {
				alone, err := m.Forward(t.Context(), targettest.Batch(0, doc), want)
				if err != nil {
					t.Fatal(err)
				}
				for i, pair := range [][2]sluice.Tensor{{together.Aux, alone.Aux}, {together.Last, alone.Last}, {together.Logits, alone.Logits}} {
					if !bytes.Equal(bits(pair[0], r, at, len(doc)), bits(pair[1], 0, 0, len(doc))) {
						t.Fatalf("output %d of row %d, tokens %d to %d, differs from the document alone", i, r, at, at+len(doc))
					}
				}
				at += len(doc)
			}
		}
	})
}

// It sets GOMAXPROCS, so it is not parallel.
func TestBitsDoNotDependOnGOMAXPROCS(t *testing.T) {
	big := shape{Hidden: 256, Intermediate: 700, Layers: 2, Heads: 4, KVHeads: 2, HeadDim: 64, Vocab: 300, MaxTokens: 512}
	m := big.model(t)
	batch := targettest.Batch(0, big.text(1, 300), big.text(2, 17), big.text(3, 64))
	want := sluice.Want{AuxLayers: []int{-1, 0, 1}, Last: sluice.PreNorm, Logits: true}
	var first *sluice.TargetOutput
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for _, procs := range []int{1, 2, 3, 16} {
		runtime.GOMAXPROCS(procs)
		out, err := m.Forward(t.Context(), batch, want)
		if err != nil {
			t.Fatal(err)
		}
		if first == nil {
			first = out
		}
		if !bytes.Equal(out.Aux.Data, first.Aux.Data) || !bytes.Equal(out.Last.Data, first.Last.Data) || !bytes.Equal(out.Logits.Data, first.Logits.Data) {
			t.Errorf("other bits with GOMAXPROCS=%d", procs)
		}
	}
}

func TestPaddedPositionsAreZero(t *testing.T) {
	t.Parallel()
	out, err := small.model(t).Forward(t.Context(), targettest.Batch(9, small.text(1, 5)), sluice.Want{AuxLayers: []int{2}, Last: sluice.PostNorm, Logits: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range []sluice.Tensor{out.Aux, out.Last, out.Logits} {
		if tail := bits(o, 0, 5, 4); slices.ContainsFunc(tail, func(b byte) bool { return b != 0 }) {
			t.Errorf("%s is not zero at padded positions", o.Spec)
		}
	}
}

func TestLogitsAreTheHeadTimesThePostNormState(t *testing.T) {
	t.Parallel()
	m := small.model(t)
	out, err := m.Forward(t.Context(), targettest.Batch(0, small.text(1, 20)), sluice.Want{Last: sluice.PostNorm, Logits: true})
	if err != nil {
		t.Fatal(err)
	}
	h, v := small.Hidden, small.Vocab
	last, head := sluice.View[float32](out.Last), sluice.View[float32](m.Head())
	again := make([]float32, 20*v)
	for t := range 20 {
		for i := range v {
			for j := range h {
				again[t*v+i] += last[t*h+j] * head[i*h+j]
			}
		}
	}
	if d := deviation(again, sluice.View[float32](out.Logits)); d > 1e-5 {
		t.Errorf("recomputed logits deviate by %.2g", d)
	}

	pre, err := m.Forward(t.Context(), targettest.Batch(0, small.text(1, 20)), sluice.Want{Last: sluice.PreNorm})
	if err != nil {
		t.Fatal(err)
	}
	weight, eps := m.FinalNorm()
	post := make([]float32, h)
	rmsNorm(post, sluice.View[float32](pre.Last)[:h], sluice.View[float32](weight), eps)
	if !slices.Equal(post, last[:h]) {
		t.Error("FinalNorm of the pre-norm state is not the post-norm state")
	}
}

func TestTheCallerOwnsEmbeddingsAndHead(t *testing.T) {
	t.Parallel()
	m := small.model(t)
	for name, get := range map[string]func() sluice.Tensor{"Embeddings": m.Embeddings, "Head": m.Head} {
		before := get()
		if want := (sluice.Spec{DType: sluice.Float32, Shape: []int64{264, 24}}); !before.Equal(want) {
			t.Errorf("%s is %s, want %s", name, before.Spec, want)
		}
		scribbled := get()
		clear(scribbled.Data)
		if !bytes.Equal(get().Data, before.Data) {
			t.Errorf("writing to %s changed the model", name)
		}
	}
}

func TestANonFiniteOutputIsATargetFault(t *testing.T) {
	t.Parallel()
	w := small.random(1)
	// A token whose state overflows in layer 3 only.
	for _, name := range []string{"mlp.up_proj", "mlp.down_proj"} {
		v := sluice.View[float32](w[layerTensor(3, name)])
		for i := range v {
			v[i] *= 1e25
		}
	}
	m, err := Load(small.folder(w))
	if err != nil {
		t.Fatal(err)
	}
	batch := targettest.Batch(0, nil, small.text(1, 4))
	out, err := m.Forward(t.Context(), batch, sluice.Want{Last: sluice.PostNorm})
	if out != nil || !errors.Is(err, sluice.ErrTargetFault) || !strings.Contains(err.Error(), "row 1, token 0: the output of layer 3 is not finite") {
		t.Errorf("output %v, error %v, want a fault that names row 1 and layer 3", out, err)
	}
	if _, err := m.Forward(t.Context(), batch, sluice.Want{AuxLayers: []int{2}}); err != nil {
		t.Errorf("up to layer 2: %v", err)
	}
}

func TestANonFiniteHeadOutputIsATargetFault(t *testing.T) {
	t.Parallel()
	w := small.random(1)
	v := sluice.View[float32](w["lm_head.weight"])
	for i := range v[:small.Hidden] {
		v[i] = math.MaxFloat32
	}
	m, err := Load(small.folder(w))
	if err != nil {
		t.Fatal(err)
	}
	_, err = m.Forward(t.Context(), targettest.Batch(0, small.text(1, 40)), sluice.Want{Logits: true})
	if !errors.Is(err, sluice.ErrTargetFault) || !strings.Contains(err.Error(), "row 0, token ") || !strings.Contains(err.Error(), "the head") {
		t.Errorf("error %v, want a fault that names the head", err)
	}
}

// expiring is a context that is done after its error was asked for n times.
type expiring struct {
	context.Context
	left atomic.Int64
}

func (e *expiring) Err() error {
	if e.left.Add(-1) < 0 {
		return context.Canceled
	}
	return nil
}

func TestForwardStopsBetweenBlocksOfTokens(t *testing.T) {
	t.Parallel()
	m := small.model(t)
	batch, want := targettest.Batch(0, small.text(1, 90), small.text(2, 90)), sluice.Want{Last: sluice.PostNorm}
	for n := range int64(40) {
		ctx := &expiring{Context: t.Context()}
		ctx.left.Store(n)
		if out, err := m.Forward(ctx, batch, want); !errors.Is(err, context.Canceled) || out != nil {
			t.Fatalf("a context that was done at its %dth look: output %v, error %v", n, out, err)
		}
	}
}

func TestAPanicOfAWorkerReachesTheCaller(t *testing.T) {
	t.Parallel()
	defer func() {
		if r, _ := recover().(string); !strings.Contains(r, "slipped") {
			t.Errorf("recovered %q", r)
		}
	}()
	_ = parallel(t.Context(), 4, 100, func(_, i int) {
		if i == 50 {
			panic("slipped")
		}
	})
}

func TestExp32(t *testing.T) {
	t.Parallel()
	for x := -87.0; x < 88; x += 0.0103 {
		want := math.Exp(float64(float32(x)))
		if got := float64(exp32(float32(x))); math.Abs(got-want) > 3e-7*want {
			t.Errorf("exp32(%v) = %v, want %v", float32(x), got, want)
		}
	}
	inf := float32(math.Inf(1))
	if exp32(0) != 1 || exp32(-inf) != 0 || exp32(inf) != inf || exp32(-1e30) != 0 || exp32(1e30) != inf || exp32(float32(math.NaN())) == exp32(float32(math.NaN())) {
		t.Error("exp32 at its ends")
	}
}
