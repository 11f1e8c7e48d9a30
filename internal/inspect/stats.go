package inspect

import (
	"encoding/binary"
	"math"
	"sync"

	"github.com/sluice-ml/sluice"
)

// Stats is a quick look at a float tensor. Min, max and mean are those of its finite values, null if it has none.
type Stats struct {
	Elements int64    `json:"elements"`
	Finite   bool     `json:"finite"`
	NaN      int64    `json:"nan"`
	Inf      int64    `json:"inf"`
	Min      *float64 `json:"min"`
	Max      *float64 `json:"max"`
	Mean     *float64 `json:"mean"`

	dtype    sluice.DType
	min, max float64
	sum      float64
	scale    float64 // of the terms of sum, so that large float64 values don't overflow it
}

func newStats(d sluice.DType, elements int64) *Stats {
	s := &Stats{dtype: d, Elements: elements, min: math.Inf(1), max: math.Inf(-1), scale: 1}
	if d == sluice.Float64 && elements > 0 {
		s.scale = 1 / float64(elements)
	}
	return s
}

// add takes whole elements.
func (s *Stats) add(b []byte) {
	switch s.dtype {
	case sluice.Float64:
		for ; len(b) >= 8; b = b[8:] {
			s.value(math.Float64frombits(binary.LittleEndian.Uint64(b)))
		}
	case sluice.Float32:
		for ; len(b) >= 4; b = b[4:] {
			s.value(float64(math.Float32frombits(binary.LittleEndian.Uint32(b))))
		}
	case sluice.BFloat16:
		for ; len(b) >= 2; b = b[2:] {
			s.value(float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(b)) << 16)))
		}
	case sluice.Float16:
		table := float16s()
		for ; len(b) >= 2; b = b[2:] {
			s.value(float64(table[binary.LittleEndian.Uint16(b)]))
		}
	case sluice.Float8E4M3FN:
		table := float8E4M3FNs()
		for _, x := range b {
			s.value(float64(table[x]))
		}
	case sluice.Float8E5M2:
		table := float16s() // its values are the upper halves of float16
		for _, x := range b {
			s.value(float64(table[uint16(x)<<8]))
		}
	}
}

func (s *Stats) value(v float64) {
	if v-v != 0 {
		if v != v {
			s.NaN++
		} else {
			s.Inf++
		}
		return
	}
	s.sum += v * s.scale
	if v < s.min {
		s.min = v
	}
	if v > s.max {
		s.max = v
	}
}

func (s *Stats) finish() {
	s.Finite = s.NaN+s.Inf == 0
	n := s.Elements - s.NaN - s.Inf
	if n <= 0 {
		return
	}
	mean := s.sum / s.scale / float64(n)
	if s.scale != 1 {
		mean = s.sum * (float64(s.Elements) / float64(n))
	}
	mean = min(max(mean, s.min), s.max) // rounding
	s.Min, s.Max, s.Mean = &s.min, &s.max, &mean
}

// small decodes a float of the IEEE form with the given widths.
func small(x uint32, exponentBits, fractionBits int) float32 {
	bias := 1<<(exponentBits-1) - 1
	sign := 1.0
	if x>>(exponentBits+fractionBits)&1 != 0 {
		sign = -1
	}
	e, f := int(x>>fractionBits&(1<<exponentBits-1)), float64(x&(1<<fractionBits-1))/float64(int(1)<<fractionBits)
	if e == 0 {
		return float32(math.Copysign(math.Ldexp(f, 1-bias), sign))
	}
	return float32(sign * math.Ldexp(1+f, e-bias))
}

var float16s = sync.OnceValue(func() *[1 << 16]float32 {
	t := new([1 << 16]float32)
	for x := range t {
		switch e, f := x>>10&31, x&1023; {
		case e == 31 && f != 0:
			t[x] = float32(math.NaN())
		case e == 31:
			t[x] = float32(math.Inf(1 - x>>15<<1))
		default:
			t[x] = small(uint32(x), 5, 10)
		}
	}
	return t
})

var float8E4M3FNs = sync.OnceValue(func() *[1 << 8]float32 {
	t := new([1 << 8]float32)
	for x := range t {
		if x&0x7f == 0x7f { // the one NaN, and no infinity
			t[x] = float32(math.NaN())
			continue
		}
		t[x] = small(uint32(x), 4, 3)
	}
	return t
})
