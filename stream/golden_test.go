package stream

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-ml/sluice"
)

// golden is one file of testdata/golden, which tools/golden/batches.py made.
type golden struct {
	meta    map[string]string
	tensors map[string]sluice.Tensor
}

func readGolden(t *testing.T, path string) golden {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	n := binary.LittleEndian.Uint64(data)
	var header map[string]json.RawMessage
	if err := json.Unmarshal(data[8:8+n], &header); err != nil {
		t.Fatal(err)
	}
	g := golden{tensors: map[string]sluice.Tensor{}}
	if err := json.Unmarshal(header["__metadata__"], &g.meta); err != nil {
		t.Fatal(err)
	}
	delete(header, "__metadata__")
	dtypes := map[string]sluice.DType{"I64": sluice.Int64, "F32": sluice.Float32, "BF16": sluice.BFloat16, "BOOL": sluice.Bool}
	for name, raw := range header {
		var e struct {
			DType   string
			Shape   []int64
			Offsets [2]int64 `json:"data_offsets"`
		}
		if err := json.Unmarshal(raw, &e); err != nil {
			t.Fatal(err)
		}
		x := sluice.NewTensor(dtypes[e.DType], e.Shape...)
		copy(x.Data, data[8+int64(n)+e.Offsets[0]:8+int64(n)+e.Offsets[1]])
		g.tensors[name] = x
	}
	return g
}

func (g golden) int(t *testing.T, key string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(g.meta[key], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// features gives the tensors under a prefix, without it.
func (g golden) features(prefix string) map[string]sluice.Tensor {
	out := map[string]sluice.Tensor{}
	for name, t := range g.tensors {
		if rest, ok := strings.CutPrefix(name, prefix); ok {
			out[rest] = t
		}
	}
	return out
}

// recorded is a target that returns what the file says it returned.
type recorded struct {
	info sluice.TargetInfo
	next []map[string]sluice.Tensor
}

func (r *recorded) Info() sluice.TargetInfo { return r.info }
func (r *recorded) Close() error            { return nil }
func (r *recorded) Forward(_ context.Context, _ *sluice.PromptBatch, w sluice.Want) (*sluice.TargetOutput, error) {
	x := r.next[0]
	r.next = r.next[1:]
	out := &sluice.TargetOutput{Aux: x["aux"]}
	if w.Last == sluice.PostNorm {
		out.Last = x["last"]
	}
	if w.Logits {
		out.Logits = x["logits"]
	}
	// The caller owns the memory, and writes to it.
	for _, t := range []*sluice.Tensor{&out.Aux, &out.Last, &out.Logits} {
		t.Data = bytes.Clone(t.Data)
	}
	return out, nil
}

// near compares float32 to 1e-6 of the value, bfloat16 to one unit in the last place.
func near(t *testing.T, what string, got, want sluice.Tensor) {
	t.Helper()
	if !got.Equal(want.Spec) {
		t.Errorf("%s is %s, want %s", what, got.Spec, want.Spec)
		return
	}
	if want.DType == sluice.BFloat16 {
		g, w := sluice.View[uint16](got), sluice.View[uint16](want)
		order := func(v uint16) int { // so that neighbours differ by 1, and both zeros are equal
			if v >= 0x8000 {
				return 0x8000 - int(v)
			}
			return int(v)
		}
		for i := range w {
			if d := order(g[i]) - order(w[i]); d < -1 || d > 1 {
				t.Errorf("%s[%d] is %#x, want %#x", what, i, g[i], w[i])
				return
			}
		}
		return
	}
	g, w := sluice.View[float32](got), sluice.View[float32](want)
	for i := range w {
		if d := math.Abs(float64(g[i] - w[i])); !(d <= 1e-6*math.Abs(float64(w[i]))) {
			t.Errorf("%s[%d] is %g, want %g", what, i, g[i], w[i])
			return
		}
	}
}

// same compares bit for bit; probabilities to 1e-6 of their value.
func same(t *testing.T, what string, got, want sluice.Tensor) {
	t.Helper()
	if !got.Equal(want.Spec) {
		t.Errorf("%s is %s, want %s", what, got.Spec, want.Spec)
		return
	}
	if strings.HasSuffix(what, "target_probs") {
		near(t, what, got, want)
		return
	}
	if !bytes.Equal(got.Data, want.Data) {
		if want.DType == sluice.Int64 {
			t.Errorf("%s is\n%v, want\n%v", what, sluice.View[int64](got), sluice.View[int64](want))
			return
		}
		for i := range want.Data {
			if got.Data[i] != want.Data[i] {
				t.Errorf("%s differs from element %d of %s on", what, int64(i)/want.DType.Size(), want.Spec)
				return
			}
		}
	}
}

func TestBatchesAreWhatPyTorchMakes(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/golden/*.safetensors")
	if err != nil || len(files) < 46 {
		t.Fatalf("%d golden files, %v", len(files), err)
	}
	for _, path := range files {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".safetensors"), func(t *testing.T) {
			t.Parallel()
			g := readGolden(t, path)
			s := schema(t, sluice.Algorithm(g.meta["algorithm"]))
			var samples []Sample
			opts := &CollateOptions{}
			if weight, ok := g.tensors["final_norm"]; ok {
				epsilon, err := strconv.ParseFloat(g.meta["epsilon"], 64)
				if err != nil {
					t.Fatal(err)
				}
				opts.FinalNorm = &FinalNorm{Weight: weight, Epsilon: epsilon}
			}
			if g.meta["shift"] == "0" && g.meta["last_norm"] == "" {
				samples = produceGolden(t, g, s)
			} else {
				samples = importGolden(t, g, s)
			}
			var c Collator
			switch g.meta["mode"] {
			case "padded", "packed":
				c = PadTo(g.int(t, "pad_to"))
			default:
				c = Pack(PackOptions{MaxTokens: g.int(t, "limit"), Multiple: g.int(t, "pad_to")})
			}
			b, err := Collate(s, c, samples, opts)
			if err != nil {
				t.Fatal(err)
			}
			want := g.features("batch.")
			if len(b.Features) != len(want) {
				t.Errorf("the batch has %d features, want %d", len(b.Features), len(want))
			}
			for _, f := range b.Features {
				if opts.FinalNorm != nil && f.Name == "last_hidden_states" {
					near(t, f.Name, f.Tensor, want[f.Name])
					continue
				}
				same(t, f.Name, f.Tensor, want[f.Name])
			}
			norm := sluice.NoLast
			if s.Name == sluice.DSpark || g.meta["encoding"] == "last_hidden_states" {
				norm = sluice.PostNorm
			}
			if b.LastNorm != norm {
				t.Errorf("the last hidden states are %q-norm, want %q", b.LastNorm, norm)
			}
			if s.Name == sluice.EAGLE3 {
				supervised := int64(0)
				for _, v := range ints(t, b, "loss_mask") {
					supervised += v
				}
				if b.SupervisedTokens != supervised {
					t.Errorf("%d tokens count as supervised, and the mask supervises %d", b.SupervisedTokens, supervised)
				}
			}
			shift := "0"
			if s.Name == sluice.EAGLE3 {
				shift = "1"
			}
			if b.Shift != shift || b.Tokens != g.int(t, "tokens") || b.SupervisedTokens != g.int(t, "supervised") {
				t.Errorf("shift %s, %d tokens, %d supervised; want %s, %s, %s", b.Shift, b.Tokens, b.SupervisedTokens, shift, g.meta["tokens"], g.meta["supervised"])
			}
		})
	}
}

// produceGolden runs the producer on the file's prompts and compares what is in the store.
func produceGolden(t *testing.T, g golden, s *sluice.Schema) (samples []Sample) {
	t.Helper()
	target := &recorded{info: sluice.TargetInfo{Fingerprint: "golden", Layers: int(g.int(t, "layers")), HiddenSize: g.int(t, "hidden"), VocabSize: g.int(t, "vocab"), DType: sluice.BFloat16}}
	var layers []int
	for _, l := range strings.Split(g.meta["aux_layers"], ",") {
		n, _ := strconv.Atoi(l)
		layers = append(layers, n)
	}
	store := newStore(t, plenty)
	p, err := NewProducer(ProducerConfig{Target: target, Store: store, Schema: s, RunID: "golden", Encoding: g.meta["encoding"], AuxLayers: layers, DraftVocab: sluice.View[int64](g.tensors["draft_vocab"])})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var order []string
	if err := json.Unmarshal([]byte(g.meta["order"]), &order); err != nil {
		t.Fatal(err)
	}
	supervised := int64(0)
	for i := range g.int(t, "samples") {
		in := g.features("prompt." + strconv.FormatInt(i, 10) + ".")
		b := &sluice.PromptBatch{InputIDs: in["input_ids"], AttentionMask: in["attention_mask"], LossMask: in["loss_mask"],
			PositionIDs: in["position_ids"], SeqLens: in["seq_lens"], DocRemaining: in["doc_remaining"]}
		target.next = append(target.next, g.features("target."+strconv.FormatInt(i, 10)+"."))
		ref, err := p.Produce(t.Context(), b)
		if err != nil {
			t.Fatal(err)
		}
		x, err := store.Get(t.Context(), ref)
		if err != nil {
			t.Fatal(err)
		}
		if names := ref.FeatureNames(); !slices.Equal(names, order) {
			t.Errorf("features %v, want %v", names, order)
		}
		for name, want := range g.features("sample." + strconv.FormatInt(i, 10) + ".") {
			got, _ := x.Feature(name)
			same(t, "sample "+name, got, want)
		}
		v, _ := ref.Attribute("supervised_tokens")
		n, _ := strconv.ParseInt(v, 10, 64)
		supervised += n
		samples = append(samples, Sample{Ref: ref, Features: x.Features})
	}
	if supervised != g.int(t, "supervised") {
		t.Errorf("the attributes add up to %d supervised tokens, want %s", supervised, g.meta["supervised"])
	}
	return samples
}

// importGolden takes the file's samples as another producer's.
func importGolden(t *testing.T, g golden, s *sluice.Schema) (samples []Sample) {
	t.Helper()
	var order []string
	if err := json.Unmarshal([]byte(g.meta["order"]), &order); err != nil {
		t.Fatal(err)
	}
	for i := range g.int(t, "samples") {
		prefix := strconv.FormatInt(i, 10) + "."
		x := &sluice.Sample{SampleID: "s" + strconv.FormatInt(i, 10), RunID: "golden", Algorithm: s.Name, SchemaVersion: s.Version,
			Attributes: map[string]string{"shift": g.meta["shift"], "last_norm": cmp.Or(g.meta["last_norm"], "post"), "aux_layers": "hf:" + g.meta["aux_layers"]}}
		for _, name := range order {
			x.Features = append(x.Features, sluice.Feature{Name: name, Tensor: g.tensors["sample."+prefix+name]})
		}
		for _, v := range sluice.View[int64](g.tensors["prompt."+prefix+"attention_mask"]) {
			x.NumTokens += v
		}
		samples = append(samples, Sample{Ref: refOf(t, x), Features: x.Features})
	}
	return samples
}

func refOf(t testing.TB, x *sluice.Sample) sluice.Ref {
	t.Helper()
	f, err := x.RefFields("mem:fake", "g")
	if err != nil {
		t.Fatal(err)
	}
	ref, err := sluice.NewRef(f)
	if err != nil {
		t.Fatal(err)
	}
	return ref
}
