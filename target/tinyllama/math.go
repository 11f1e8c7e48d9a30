package tinyllama

import "math"

// exp32 is e^x with a relative error below 3e-7, about four times as fast as math.Exp. Attention and the
// gate call it for every score and every intermediate value.
func exp32(x float32) float32 {
	switch {
	case x != x:
		return x
	case x < -87.3:
		return 0
	case x > 88:
		return float32(math.Inf(1))
	}
	const (
		log2e = 1.44269504088896341
		ln2Hi = 0.693359375
		ln2Lo = -2.12194440e-4
		// Added and taken away again, it rounds to an integer, which is then in the low bits.
		magic = 3 << 22
	)
	shifted := x*log2e + magic
	n := shifted - magic
	r := x - n*ln2Hi - n*ln2Lo
	p := float32(1.9875691500e-4)
	p = p*r + 1.3981999507e-3
	p = p*r + 8.3334519073e-3
	p = p*r + 4.1665795894e-2
	p = p*r + 1.6666665459e-1
	p = p*r + 5.0000001201e-1
	p = p*r*r + r + 1
	return p * math.Float32frombits(uint32(int32(n)+127)<<23)
}

// silu is x * sigmoid(x).
func silu(x float32) float32 { return x / (1 + exp32(-x)) }

// rmsNorm sets dst to x scaled to unit root mean square, times weight.
func rmsNorm(dst, x, weight []float32, eps float64) {
	// Four sums hide the latency of the addition. Their order is fixed, like everything that decides bits.
	var s [4]float64
	i := 0
	for ; i+4 <= len(x); i += 4 {
		a, b, c, d := float64(x[i]), float64(x[i+1]), float64(x[i+2]), float64(x[i+3])
		s[0] += a * a
		s[1] += b * b
		s[2] += c * c
		s[3] += d * d
	}
	for ; i < len(x); i++ {
		s[0] += float64(x[i]) * float64(x[i])
	}
	scale := float32(1 / math.Sqrt((s[0]+s[1]+s[2]+s[3])/float64(len(x))+eps))
	weight, dst = weight[:len(x)], dst[:len(x)]
	for i, v := range x {
		dst[i] = weight[i] * (v * scale)
	}
}

// rotary is the table of rotations for the positions of one forward: row p holds cos and sin of p times each frequency.
type rotary struct {
	half     int
	cos, sin []float32
}

// newRotary computes angles in float32, as Hugging Face does: a better angle would be another model.
func newRotary(positions, headDim int, theta float64) rotary {
	half := headDim / 2
	r := rotary{half: half, cos: make([]float32, positions*half), sin: make([]float32, positions*half)}
	for i := range half {
		freq := float32(1 / math.Pow(theta, float64(2*i)/float64(headDim)))
		for p := range positions {
			sin, cos := math.Sincos(float64(float32(p) * freq))
			r.cos[p*half+i], r.sin[p*half+i] = float32(cos), float32(sin)
		}
	}
	return r
}

// apply rotates one head in place: element i pairs with element i+half (Hugging Face's rotate_half).
func (r *rotary) apply(head []float32, position int) {
	cos, sin := r.cos[position*r.half:(position+1)*r.half], r.sin[position*r.half:(position+1)*r.half]
	lo, hi := head[:r.half], head[r.half:2*r.half]
	for i, c := range cos {
		s, a, b := sin[i], lo[i], hi[i]
		lo[i], hi[i] = a*c-b*s, b*c+a*s
	}
}

// notFinite returns the index of the first element that is NaN or infinite, or -1.
func notFinite(x []float32) int {
	const exponent = 0xff << 23
	for i, v := range x {
		if math.Float32bits(v)&exponent == exponent {
			return i
		}
	}
	return -1
}
