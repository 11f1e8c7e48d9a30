package tinyllama

import (
	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/gonum"
)

// kernel is gonum's own implementation, taken directly: blas32.Gemm would run whatever a program gave to
// blas32.Use, and the order in which another library adds is not ours to promise.
var kernel gonum.Implementation

// The tile of one kernel call. gonum multiplies A*B as c[i] += a[i,k]*b[k] for k = 0, 1, 2, ..., a vector operation over the
// columns, so every element is the sum of its products in the order of k, whatever the tile, the row and the number of rows: that is
// what makes Forward's bits independent of batching. The products are split over columns and k only for the cache, and stay so
// small that gonum does not start goroutines of its own, which it does from four blocks of 64 by 64.
const (
	tileCols = 192
	tileK    = 64
)

// multiply sets c = a*b for a [m,k], b [k,n] and c [m,n], row-major with the given strides; m is at most chunkTokens.
func multiply(m, n, k int, a []float32, lda int, b []float32, ldb int, c []float32, ldc int) {
	for j := 0; j < n; j += tileCols {
		w := min(tileCols, n-j)
		for p := 0; p < k; p += tileK {
			kernel.Sgemm(blas.NoTrans, blas.NoTrans, m, w, min(tileK, k-p), 1, a[p:], lda, b[p*ldb+j:], ldb, beta(p), c[j:], ldc)
		}
	}
}

// beta overwrites the result with the first tile of a sum and adds the others to it.
func beta(p int) float32 {
	if p == 0 {
		return 0
	}
	return 1
}

// matrix is a weight [in,out], stored in panels of adjacent columns so that a tile is contiguous.
type matrix struct {
	in, out, width int
	data           []float32
}

// newMatrix lays out the stacked rows of weights in torch's order: each is [out_i,in], and the result multiplies by all of them at once.
func newMatrix(in int, stacked ...[]float32) matrix {
	out := 0
	for _, w := range stacked {
		out += len(w) / in
	}
	panels := (out + tileCols - 1) / tileCols
	width := (out + panels - 1) / panels
	width = min((width+15)&^15, tileCols)
	m := matrix{in: in, out: out, width: width, data: make([]float32, in*out)}
	col := 0
	for _, w := range stacked {
		for r := 0; r < len(w)/in; r, col = r+1, col+1 {
			panel := col / width * width
			w0 := min(width, out-panel)
			dst := m.data[panel*in+col-panel:]
			for i, v := range w[r*in : (r+1)*in] {
				dst[i*w0] = v
			}
		}
	}
	return m
}

// mul sets dst [n,out] = src [n,in] * m; n is at most chunkTokens.
func (m *matrix) mul(n int, src []float32, lds int, dst []float32, ldd int) {
	for j := 0; j < m.out; j += m.width {
		w := min(m.width, m.out-j)
		panel := m.data[j*m.in:]
		for p := 0; p < m.in; p += tileK {
			kernel.Sgemm(blas.NoTrans, blas.NoTrans, n, w, min(tileK, m.in-p), 1, src[p:], lds, panel[p*w:], w, beta(p), dst[j:], ldd)
		}
	}
}
