package sluice

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Spec is the shape and element type of a tensor. Shape is in the producer's axis order, outermost first, as
// in torch; an empty shape is a scalar of one element.
type Spec struct {
	Shape []int64
	DType DType
}

// maxRank bounds the number of axes, so that a hostile shape cannot make validation slow.
const maxRank = 16

// Validate checks that every axis is non-negative, that the dtype is known, and that neither the number of elements nor
// the number of bytes overflows.
func (s Spec) Validate() error {
	_, err := s.checkedBytes()
	return err
}

func (s Spec) checkedBytes() (int64, error) {
	if !s.DType.Valid() {
		return 0, &Error{Kind: Invalid, Op: "spec", Detail: "the dtype is missing or unknown (" + s.DType.String() + ")"}
	}
	if len(s.Shape) > maxRank {
		return 0, &Error{Kind: Invalid, Op: "spec", Detail: fmt.Sprintf("has %d axes, at most %d are allowed", len(s.Shape), maxRank)}
	}
	for i, d := range s.Shape {
		if d < 0 {
			return 0, &Error{Kind: Invalid, Op: "spec", Detail: fmt.Sprintf("shape[%d] is %d, want 0 or more", i, d)}
		}
		if d >= maxInteger {
			return 0, &Error{Kind: Invalid, Op: "spec", Detail: fmt.Sprintf("shape[%d] is %d, want less than 2^53", i, d)}
		}
	}
	// A zero anywhere makes the product zero, but the other axes must still not overflow on their own:
	// the readers of other languages multiply in any order.
	n := s.DType.Size()
	zero := false
	for _, d := range s.Shape {
		if d == 0 {
			zero = true
			continue
		}
		if n > math.MaxInt64/d {
			return 0, &Error{Kind: Invalid, Op: "spec", Detail: "the product of shape " + shapeString(s.Shape) + " overflows"}
		}
		n *= d
	}
	if zero {
		return 0, nil
	}
	if n >= maxInteger {
		return 0, &Error{Kind: Invalid, Op: "spec", Detail: fmt.Sprintf("%s is %d bytes, want less than 2^53", s, n)}
	}
	return n, nil
}

// Bytes is the size of the tensor in bytes. It is 0 for a Spec that does not validate.
func (s Spec) Bytes() int64 {
	n, err := s.checkedBytes()
	if err != nil {
		return 0
	}
	return n
}

// Elements is the number of elements. It is 0 for a Spec that does not validate.
func (s Spec) Elements() int64 {
	if !s.DType.Valid() {
		return 0
	}
	return s.Bytes() / s.DType.Size()
}

// Equal reports whether both have the same dtype and the same shape.
func (s Spec) Equal(t Spec) bool { return s.DType == t.DType && slices.Equal(s.Shape, t.Shape) }

// String shows a spec as bfloat16[1,2048,4096].
func (s Spec) String() string { return s.DType.String() + shapeString(s.Shape) }

func shapeString(shape []int64) string {
	var b strings.Builder
	b.WriteByte('[')
	for i, d := range shape {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.FormatInt(d, 10))
	}
	b.WriteByte(']')
	return b.String()
}
