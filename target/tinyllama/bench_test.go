package tinyllama

import (
	"testing"
	"time"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/target/targettest"
)

// BenchmarkForward reports tokens a second, and as "floor-ratio" how that compares with gonum's own matrix products of the same
// shapes, all processors, measured in the same run: 1 would mean that attention over the context, norms and all else cost nothing.
func BenchmarkForward(b *testing.B) {
	shipped := shape{Hidden: 128, Intermediate: 352, Layers: 8, Heads: 4, KVHeads: 2, HeadDim: 32, Vocab: 264, MaxTokens: 2048}
	larger := shape{Hidden: 512, Intermediate: 1408, Layers: 8, Heads: 8, KVHeads: 4, HeadDim: 64, Vocab: 264, MaxTokens: 2048}
	for _, c := range []struct {
		name       string
		shape      shape
		rows, cols int
		want       sluice.Want
	}{
		{"shipped/4x512/hidden", shipped, 4, 512, sluice.Want{AuxLayers: []int{1, 3, 4}, Last: sluice.PostNorm}},
		{"shipped/4x512/logits", shipped, 4, 512, sluice.Want{AuxLayers: []int{1, 3, 4}, Logits: true}},
		{"shipped/1x128/hidden", shipped, 1, 128, sluice.Want{AuxLayers: []int{1, 3, 4}, Last: sluice.PostNorm}},
		{"larger/2x512/hidden", larger, 2, 512, sluice.Want{AuxLayers: []int{1, 3, 4}, Last: sluice.PostNorm}},
	} {
		b.Run(c.name, func(b *testing.B) {
			m := c.shape.model(b)
			rows := make([][]int64, c.rows)
			for i := range rows {
				rows[i] = c.shape.text(uint64(i), c.cols)
			}
			batch := targettest.Batch(0, rows...)
			tokens := c.rows * c.cols
			var floor, spent time.Duration
			n := 0
			// Turn and turn about, so that a neighbour on the machine slows both.
			for b.Loop() {
				start := time.Now()
				if _, err := m.Forward(b.Context(), batch, c.want); err != nil {
					b.Fatal(err)
				}
				spent += time.Since(start)
				b.StopTimer()
				floor += c.shape.products(tokens, c.want.Logits)
				b.StartTimer()
				n++
			}
			b.ReportMetric(float64(tokens*n)/spent.Seconds(), "tokens/s")
			b.ReportMetric(floor.Seconds()/spent.Seconds(), "floor-ratio")
		})
	}
}

// products is the time that gonum takes for the products of weights of one forward.
func (s shape) products(tokens int, logits bool) time.Duration {
	qkv := (s.Heads + 2*s.KVHeads) * s.HeadDim
	shapes := [][2]int{{s.Hidden, qkv}, {s.Heads * s.HeadDim, s.Hidden}, {s.Hidden, 2 * s.Intermediate}, {s.Intermediate, s.Hidden}}
	var total time.Duration
	time1 := func(in, out int) time.Duration {
		x := blas32.General{Rows: tokens, Cols: in, Stride: in, Data: ones(tokens * in)}
		w := blas32.General{Rows: in, Cols: out, Stride: out, Data: ones(in * out)}
		y := blas32.General{Rows: tokens, Cols: out, Stride: out, Data: make([]float32, tokens*out)}
		start := time.Now()
		blas32.Gemm(blas.NoTrans, blas.NoTrans, 1, x, w, 0, y)
		return time.Since(start)
	}
	for _, p := range shapes {
		total += time.Duration(s.Layers) * time1(p[0], p[1])
	}
	if logits {
		total += time1(s.Hidden, s.Vocab)
	}
	return total
}

func ones(n int) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = 1
	}
	return v
}

func BenchmarkLoad(b *testing.B) {
	s := shape{Hidden: 128, Intermediate: 352, Layers: 8, Heads: 4, KVHeads: 2, HeadDim: 32, Vocab: 264, MaxTokens: 2048}
	folder := s.folder(s.random(1))
	b.SetBytes(int64(len(folder[modelFile].Data)))
	for b.Loop() {
		if _, err := Load(folder); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkExp32(b *testing.B) {
	x := float32(0)
	for i := range b.N {
		x += exp32(-float32(i&1023) / 64)
	}
	if x < 0 {
		b.Fatal(x)
	}
}
