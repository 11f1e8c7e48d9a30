package tinyllama

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/fstest"

	"go.uber.org/goleak"

	"github.com/sluice-ml/sluice"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// shape is what a test's model looks like.
type shape struct {
	Hidden, Intermediate, Layers, Heads, KVHeads, HeadDim, Vocab, MaxTokens int
	Tied                                                                    bool
}

var small = shape{Hidden: 24, Intermediate: 40, Layers: 5, Heads: 4, KVHeads: 2, HeadDim: 8, Vocab: 264, MaxTokens: 96}

func (s shape) config() map[string]any {
	return map[string]any{
		"architectures": []string{"LlamaForCausalLM"}, "model_type": "llama", "hidden_act": "silu",
		"hidden_size": s.Hidden, "intermediate_size": s.Intermediate, "num_hidden_layers": s.Layers,
		"num_attention_heads": s.Heads, "num_key_value_heads": s.KVHeads, "head_dim": s.HeadDim,
		"vocab_size": s.Vocab, "max_position_embeddings": s.MaxTokens,
		"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": s.Tied,
	}
}

// weights are tensors by name, in float32.
type weights map[string]sluice.Tensor

// random makes weights of a size that keeps activations near 1 but lets attention choose.
func (s shape) random(seed uint64) weights {
	rng := rand.New(rand.NewPCG(seed, 1))
	w := weights{}
	add := func(name string, scale, offset float64, shape ...int64) {
		t := sluice.NewTensor(sluice.Float32, shape...)
		v := sluice.View[float32](t)
		for i := range v {
			v[i] = float32(rng.NormFloat64()*scale + offset)
		}
		w[name] = t
	}
	h, qw, kw, in, v := int64(s.Hidden), int64(s.Heads*s.HeadDim), int64(s.KVHeads*s.HeadDim), int64(s.Intermediate), int64(s.Vocab)
	by := func(n int64) float64 { return 1.5 / math.Sqrt(float64(n)) }
	add("model.embed_tokens.weight", 1, 0, v, h)
	if !s.Tied {
		add("lm_head.weight", by(h), 0, v, h)
	}
	add("model.norm.weight", 0.2, 1, h)
	for i := range s.Layers {
		add(layerTensor(i, "input_layernorm"), 0.2, 1, h)
		add(layerTensor(i, "self_attn.q_proj"), by(h), 0, qw, h)
		add(layerTensor(i, "self_attn.k_proj"), by(h), 0, kw, h)
		add(layerTensor(i, "self_attn.v_proj"), by(h), 0, kw, h)
		add(layerTensor(i, "self_attn.o_proj"), by(qw), 0, h, qw)
		add(layerTensor(i, "post_attention_layernorm"), 0.2, 1, h)
		add(layerTensor(i, "mlp.gate_proj"), by(h), 0, in, h)
		add(layerTensor(i, "mlp.up_proj"), by(h), 0, in, h)
		add(layerTensor(i, "mlp.down_proj"), by(in), 0, h, in)
	}
	return w
}

// folder is a checkpoint as Load reads it.
func (s shape) folder(w weights) fstest.MapFS {
	return fstest.MapFS{
		configFile: {Data: toJSON(s.config())},
		modelFile:  {Data: w.file()},
	}
}

func toJSON(v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return data
}

// file writes the tensors as the format's description has it, without the codec.
func (w weights) file() []byte {
	header, data := map[string]any{}, []byte{}
	for _, name := range slices.Sorted(maps.Keys(w)) {
		t := w[name]
		dtype := map[sluice.DType]string{sluice.Float32: "F32", sluice.Float16: "F16", sluice.BFloat16: "BF16", sluice.Float64: "F64"}[t.DType]
		header[name] = map[string]any{"dtype": dtype, "shape": t.Shape, "data_offsets": []int{len(data), len(data) + len(t.Data)}}
		data = append(data, t.Data...)
	}
	text := toJSON(header)
	return slices.Concat(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text, data)
}

func (s shape) model(t testing.TB) *Model {
	t.Helper()
	m, err := Load(s.folder(s.random(1)))
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// text makes n ids.
func (s shape) text(seed uint64, n int) []int64 {
	rng := rand.New(rand.NewPCG(seed, 2))
	ids := make([]int64, n)
	for i := range ids {
		ids[i] = rng.Int64N(int64(s.Vocab))
	}
	return ids
}

// deviation is max|a-b| / max|b|.
func deviation[T float32 | float64](a []float32, b []T) float64 {
	if len(a) != len(b) {
		panic(fmt.Sprintf("%d values and %d", len(a), len(b)))
	}
	most, scale := 0.0, 0.0
	for i := range a {
		d := math.Abs(float64(a[i]) - float64(b[i]))
		if math.IsNaN(d) {
			return math.Inf(1)
		}
		most, scale = max(most, d), max(scale, math.Abs(float64(b[i])))
	}
	if most == 0 {
		return 0
	}
	return most / max(scale, math.SmallestNonzeroFloat64)
}
