package sluice

import (
	"fmt"
	"unsafe"
)

// Tensor is a dense, row-major, little-endian array. Data has exactly Spec.Bytes() bytes.
//
// A Tensor is a view: copying the struct does not copy Data. Who may write to Data is said where a Tensor is handed over.
type Tensor struct {
	Spec
	Data []byte
}

// Validate checks the spec and that Data has the length that the spec asks for.
func (t Tensor) Validate() error {
	n, err := t.checkedBytes()
	if err != nil {
		return err
	}
	if int64(len(t.Data)) != n {
		return &Error{Kind: Invalid, Op: "tensor", Detail: fmt.Sprintf("%s needs %d bytes, has %d", t.Spec, n, len(t.Data))}
	}
	return nil
}

// Feature is one named tensor of a sample.
type Feature struct {
	Name string
	Tensor
}

// FindFeature returns the tensor with the given name.
func FindFeature(features []Feature, name string) (Tensor, bool) {
	for i := range features {
		if features[i].Name == name {
			return features[i].Tensor, true
		}
	}
	return Tensor{}, false
}

// Element is a Go type that can view the elements of a tensor: the types of a width that some DType has. 16-bit and 8-bit
// floats have no Go type; view them as uint16 and uint8.
type Element interface {
	~float64 | ~float32 | ~int64 | ~int32 | ~int16 | ~int8 | ~uint8 | ~uint16 | ~uint32 | ~uint64
}

// View returns t's elements as a slice of E that shares t's memory. The width of E must be the dtype's, and the data must
// be aligned to it, which it is for everything that a store hands out. View panics where that does not hold, since it is a fault of the program, never of the data.
func View[E Element](t Tensor) []E {
	var e E
	size := int64(unsafe.Sizeof(e))
	if t.DType.Size() != size {
		panic(fmt.Sprintf("sluice: View of %s as elements of %d bytes", t.Spec, size))
	}
	if len(t.Data) == 0 {
		return nil
	}
	if !t.aligned() {
		panic("sluice: View of a tensor that is not aligned to its elements")
	}
	return unsafe.Slice((*E)(unsafe.Pointer(unsafe.SliceData(t.Data))), int64(len(t.Data))/size)
}

// aligned reports whether the data of a valid tensor can be viewed.
func (t Tensor) aligned() bool {
	return len(t.Data) == 0 || uintptr(unsafe.Pointer(unsafe.SliceData(t.Data)))%uintptr(t.DType.Size()) == 0
}

// NewTensor returns a zeroed tensor whose data is aligned to 8 bytes. It panics if the spec does not validate.
func NewTensor(dtype DType, shape ...int64) Tensor {
	s := Spec{Shape: shape, DType: dtype}
	n, err := s.checkedBytes()
	if err != nil {
		panic(err)
	}
	words := make([]uint64, (n+7)/8)
	if n == 0 {
		return Tensor{Spec: s}
	}
	return Tensor{Spec: s, Data: unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), n)}
}

// TensorOf copies values into a new tensor of the given type and shape.
// It panics if the width or the number of values does not fit.
func TensorOf[E Element](dtype DType, values []E, shape ...int64) Tensor {
	t := NewTensor(dtype, shape...)
	v := View[E](t)
	if len(v) != len(values) {
		panic(fmt.Sprintf("sluice: %d values for %s", len(values), t.Spec))
	}
	copy(v, values)
	return t
}
