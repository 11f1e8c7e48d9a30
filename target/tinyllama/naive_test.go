package tinyllama

import (
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/target/targettest"
)

// naive is the architecture written down as plainly as possible, in float64, for one document.
// hidden[i+1] is the output of layer i.
func (s shape) naive(w weights, ids []int64) (hidden [][]float64, post, logits []float64) {
	get := func(name string) []float32 { return sluice.View[float32](w[name]) }
	n, h := len(ids), s.Hidden
	linear := func(x []float64, in int, weight []float32) []float64 {
		out := len(weight) / in
		y := make([]float64, n*out)
		for t := range n {
			for o := range out {
				for i := range in {
					y[t*out+o] += x[t*in+i] * float64(weight[o*in+i])
				}
			}
		}
		return y
	}
	norm := func(x []float64, weight []float32) []float64 {
		y := make([]float64, len(x))
		for t := range n {
			sum := 0.0
			for _, v := range x[t*h : (t+1)*h] {
				sum += v * v
			}
			for i := range h {
				y[t*h+i] = x[t*h+i] / math.Sqrt(sum/float64(h)+1e-5) * float64(weight[i])
			}
		}
		return y
	}
	rotate := func(x []float64, heads int) {
		d := s.HeadDim
		for t := range n {
			for head := range heads {
				v := x[(t*heads+head)*d:][:d]
				for i := range d / 2 {
					angle := float64(t) / math.Pow(10000, float64(2*i)/float64(d))
					a, b := v[i], v[i+d/2]
					v[i], v[i+d/2] = a*math.Cos(angle)-b*math.Sin(angle), b*math.Cos(angle)+a*math.Sin(angle)
				}
			}
		}
	}

	x := make([]float64, n*h)
	for t, id := range ids {
		for i := range h {
			x[t*h+i] = float64(get("model.embed_tokens.weight")[int(id)*h+i])
		}
	}
	hidden = append(hidden, append([]float64(nil), x...))
	for l := range s.Layers {
		normed := norm(x, get(layerTensor(l, "input_layernorm")))
		q := linear(normed, h, get(layerTensor(l, "self_attn.q_proj")))
		k := linear(normed, h, get(layerTensor(l, "self_attn.k_proj")))
		v := linear(normed, h, get(layerTensor(l, "self_attn.v_proj")))
		rotate(q, s.Heads)
		rotate(k, s.KVHeads)
		mixed := make([]float64, n*s.Heads*s.HeadDim)
		for t := range n {
			for head := range s.Heads {
				kv := head / (s.Heads / s.KVHeads)
				probs, sum := make([]float64, t+1), 0.0
				for u := range probs {
					dot := 0.0
					for i := range s.HeadDim {
						dot += q[(t*s.Heads+head)*s.HeadDim+i] * k[(u*s.KVHeads+kv)*s.HeadDim+i]
					}
					probs[u] = math.Exp(dot / math.Sqrt(float64(s.HeadDim)))
					sum += probs[u]
				}
				for u, p := range probs {
					for i := range s.HeadDim {
						mixed[(t*s.Heads+head)*s.HeadDim+i] += p / sum * v[(u*s.KVHeads+kv)*s.HeadDim+i]
					}
				}
			}
		}
		for i, v := range linear(mixed, s.Heads*s.HeadDim, get(layerTensor(l, "self_attn.o_proj"))) {
			x[i] += v
		}
		normed = norm(x, get(layerTensor(l, "post_attention_layernorm")))
		gate, up := linear(normed, h, get(layerTensor(l, "mlp.gate_proj"))), linear(normed, h, get(layerTensor(l, "mlp.up_proj")))
		for i, g := range gate {
			gate[i] = g / (1 + math.Exp(-g)) * up[i]
		}
		for i, v := range linear(gate, s.Intermediate, get(layerTensor(l, "mlp.down_proj"))) {
			x[i] += v
		}
		hidden = append(hidden, append([]float64(nil), x...))
	}
	post = norm(x, get("model.norm.weight"))
	head := "lm_head.weight"
	if s.Tied {
		head = "model.embed_tokens.weight"
	}
	return hidden, post, linear(post, h, get(head))
}

func TestForwardComputesTheArchitecture(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		kv := rapid.IntRange(1, 3).Draw(t, "kv heads")
		s := shape{
			Hidden: rapid.IntRange(8, 40).Draw(t, "hidden"), Intermediate: rapid.IntRange(1, 80).Draw(t, "intermediate"), Layers: rapid.IntRange(1, 3).Draw(t, "layers"),
			KVHeads: kv, Heads: kv * rapid.IntRange(1, 3).Draw(t, "group"), HeadDim: 2 * rapid.IntRange(1, 9).Draw(t, "half head dim"),
			Vocab: rapid.IntRange(2, 300).Draw(t, "vocab"), MaxTokens: 100, Tied: rapid.Bool().Draw(t, "tied"),
		}
		w := s.random(rapid.Uint64().Draw(t, "seed"))
		m, err := Load(s.folder(w))
		if err != nil {
			t.Fatal(err)
		}
		ids := s.text(rapid.Uint64().Draw(t, "text"), rapid.IntRange(1, 70).Draw(t, "tokens"))
		hidden, post, logits := s.naive(w, ids)
		check := func(name string, got sluice.Tensor, want []float64) {
			// Float32 loses a few bits a layer, more where a state is close to zero before a norm; a wrong formula is off by far more.
			if d := deviation(sluice.View[float32](got), want); d > 1e-3 {
				t.Errorf("%s deviates by %.2g of its largest value", name, d)
			}
		}
		for l := -1; l < s.Layers; l++ {
			out, err := m.Forward(t.Context(), targettest.Batch(0, ids), sluice.Want{AuxLayers: []int{l}})
			if err != nil {
				t.Fatal(err)
			}
			check("hidden state", out.Aux, hidden[l+1])
		}
		for norm, want := range map[sluice.Norm][]float64{sluice.PreNorm: hidden[s.Layers], sluice.PostNorm: post} {
			out, err := m.Forward(t.Context(), targettest.Batch(0, ids), sluice.Want{Last: norm, Logits: true})
			if err != nil {
				t.Fatal(err)
			}
			check("last "+string(norm), out.Last, want)
			check("logits", out.Logits, logits)
		}
	})
}
