package stream

import (
	"encoding/binary"
	"math"
	"unsafe"

	"github.com/sluice-ml/sluice"
)

// lanes describes how to find values that are not finite, in eight bytes at a time: of each element the exponent bits are kept, and adding step carries into the
// top bit exactly when they are all ones. No carry leaves its element.
type lanes struct{ mask, step, top uint64 }

func spread(v uint64, size int64) uint64 {
	for ; size < 8; size *= 2 {
		v |= v << (8 * size)
	}
	return v
}

func lanesOf(d sluice.DType) (l lanes, ok bool) {
	switch d {
	case sluice.Float64:
		l = lanes{0x7ff << 52, 1 << 52, 1 << 63}
	case sluice.Float32:
		l = lanes{0x7f80_0000, 0x80_0000, 1 << 31}
	case sluice.Float16:
		l = lanes{0x7c00, 0x400, 1 << 15}
	case sluice.BFloat16:
		l = lanes{0x7f80, 0x80, 1 << 15}
	case sluice.Float8E5M2:
		l = lanes{0x7c, 4, 1 << 7}
	case sluice.Float8E4M3FN: // has no infinities, and one NaN: all ones but the sign
		l = lanes{0x7f, 1, 1 << 7}
	default:
		return l, false
	}
	size := d.Size()
	return lanes{spread(l.mask, size), spread(l.step, size), spread(l.top, size)}, true
}

// firstNotFinite returns the index of the first element that is NaN or infinite, or -1.
func firstNotFinite(t sluice.Tensor) int64 {
	l, ok := lanesOf(t.DType)
	if !ok {
		return -1
	}
	data, size := t.Data, t.DType.Size()
	var i int
	for ; i+8 <= len(data); i += 8 {
		if (binary.LittleEndian.Uint64(data[i:])&l.mask+l.step)&l.top != 0 {
			break
		}
	}
	var one [8]byte
	for ; i < len(data); i += int(size) {
		one = [8]byte{}
		copy(one[:], data[i:i+int(size)])
		width := uint64(math.MaxUint64) >> (64 - 8*uint(size))
		if (binary.LittleEndian.Uint64(one[:])&l.mask&width+l.step&width)&(l.top&width) != 0 {
			return int64(i) / size
		}
	}
	return -1
}

// convert stores float32 values in the given dtype, rounding to the nearest, ties to even.
func convert(values []float32, dtype sluice.DType, shape ...int64) sluice.Tensor {
	t := sluice.NewTensor(dtype, shape...)
	narrow(t, 0, values)
	return t
}

// narrow stores float32 values from the element at on, rounding to the nearest, ties to even.
func narrow(t sluice.Tensor, at int64, values []float32) {
	switch t.DType {
	case sluice.Float32:
		copy(sluice.View[float32](t)[at:], values)
	case sluice.BFloat16:
		out := sluice.View[uint16](t)[at:]
		for i, v := range values {
			b := math.Float32bits(v)
			if v != v {
				out[i] = uint16(b>>16) | 0x40
				continue
			}
			out[i] = uint16((b + 0x7fff + b>>16&1) >> 16)
		}
	case sluice.Float16:
		out := sluice.View[uint16](t)[at:]
		for i, v := range values {
			out[i] = half(v)
		}
	default:
		panic("stream: no conversion of float32 to " + t.DType.String())
	}
}

// widen reads elements as float32, from the one at on.
func widen(values []float32, t sluice.Tensor, at int64) {
	switch t.DType {
	case sluice.Float32:
		copy(values, sluice.View[float32](t)[at:])
	case sluice.BFloat16:
		in := sluice.View[uint16](t)[at:]
		for i := range values {
			values[i] = math.Float32frombits(uint32(in[i]) << 16)
		}
	case sluice.Float16:
		in := sluice.View[uint16](t)[at:]
		for i := range values {
			values[i] = single(in[i])
		}
	default:
		panic("stream: no conversion of " + t.DType.String() + " to float32")
	}
}

// half rounds to IEEE binary16; what is too large becomes infinite.
func half(v float32) uint16 {
	b := math.Float32bits(v)
	sign := uint16(b >> 16 & 0x8000)
	b &= 0x7fff_ffff
	switch {
	case b > 0x7f80_0000:
		return sign | 0x7e00
	case b >= 0x4780_0000: // 65536
		return sign | 0x7c00
	case b < 0x3880_0000: // below 2^-14: adding 0.5 leaves the subnormal's bits at the low end, rounded by the adder
		return sign | uint16(math.Float32bits(math.Float32frombits(b)+0.5)-0x3f00_0000)
	}
	b += 0xc800_0fff + b>>13&1 // rebias the exponent by -112, round
	return sign | uint16(b>>13)
}

// single is the value of an IEEE binary16.
func single(h uint16) float32 {
	sign, exponent, fraction := uint32(h&0x8000)<<16, uint32(h>>10&0x1f), uint32(h&0x3ff)
	switch exponent {
	case 0: // zero or subnormal: a multiple of 2^-24, which float32 has exactly
		return math.Float32frombits(sign | math.Float32bits(float32(fraction)*0x1p-24))
	case 0x1f:
		return math.Float32frombits(sign | 0x7f80_0000 | fraction<<13)
	}
	return math.Float32frombits(sign | (exponent+112)<<23 | fraction<<13)
}

// float32s returns the elements of a float32 tensor, copied only if they are not aligned.
func float32s(t sluice.Tensor) []float32 {
	return sluice.View[float32](aligned(t))
}

func int64s(t sluice.Tensor) []int64 { return sluice.View[int64](aligned(t)) }

// draftProbs gives each row the softmax over the selected columns of its logits: in float32, with the largest logit subtracted first and the
// sum kept in float64, so that the error is that of one exp and one division.
func draftProbs(logits []float32, vocab int64, selected []int64) []float32 {
	rows := int64(len(logits)) / vocab
	out := make([]float32, rows*int64(len(selected)))
	for r := range rows {
		row, probs := logits[r*vocab:(r+1)*vocab], out[r*int64(len(selected)):]
		top := row[selected[0]]
		for _, id := range selected {
			top = max(top, row[id])
		}
		sum := 0.0
		for i, id := range selected {
			e := math.Exp(float64(row[id] - top))
			probs[i] = float32(e)
			sum += e
		}
		for i := range selected {
			probs[i] = float32(float64(probs[i]) / sum)
		}
	}
	return out
}

// positionMask says for each row whether the target's choice (the first largest logit) is selected, and the row is supervised.
func positionMask(logits []float32, vocab int64, inDraft []bool, loss []int64, shape ...int64) sluice.Tensor {
	t := sluice.NewTensor(sluice.Bool, shape...)
	for r := range loss {
		if loss[r] == 0 {
			continue
		}
		row := logits[int64(r)*vocab : int64(r+1)*vocab]
		best := 0
		for i, v := range row {
			if v > row[best] {
				best = i
			}
		}
		if inDraft[best] {
			t.Data[r] = 1
		}
	}
	return t
}

// aligned returns t, or a copy of it where its data can't be viewed as elements.
func aligned(t sluice.Tensor) sluice.Tensor {
	if !misaligned(t) {
		return t
	}
	c := sluice.NewTensor(t.DType, t.Shape...)
	copy(c.Data, t.Data)
	return c
}

func misaligned(t sluice.Tensor) bool {
	return len(t.Data) > 0 && uintptr(unsafe.Pointer(unsafe.SliceData(t.Data)))%uintptr(t.DType.Size()) != 0
}
