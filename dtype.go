package sluice

import "fmt"

// DType is the element type of a tensor. Its text form, on the wire and in every message, is torch's own
// name for the type. The zero DType is no type at all and is refused everywhere.
type DType uint8

// The element types that a feature may have.
const (
	Float64 DType = iota + 1
	Float32
	Float16
	BFloat16
	Float8E4M3FN
	Float8E5M2
	Int64
	Int32
	Int16
	Int8
	UInt8
	UInt16
	UInt32
	UInt64
	Bool
)

var dtypes = [...]struct {
	name string
	size int64
}{
	Float64:      {"float64", 8},
	Float32:      {"float32", 4},
	Float16:      {"float16", 2},
	BFloat16:     {"bfloat16", 2},
	Float8E4M3FN: {"float8_e4m3fn", 1},
	Float8E5M2:   {"float8_e5m2", 1},
	Int64:        {"int64", 8},
	Int32:        {"int32", 4},
	Int16:        {"int16", 2},
	Int8:         {"int8", 1},
	UInt8:        {"uint8", 1},
	UInt16:       {"uint16", 2},
	UInt32:       {"uint32", 4},
	UInt64:       {"uint64", 8},
	Bool:         {"bool", 1},
}

// DTypes lists every valid element type.
func DTypes() []DType {
	all := make([]DType, 0, len(dtypes)-1)
	for d := Float64; d.Valid(); d++ {
		all = append(all, d)
	}
	return all
}

// ParseDType returns the type with the given torch name, such as "bfloat16".
func ParseDType(name string) (DType, error) {
	for d := Float64; d.Valid(); d++ {
		if dtypes[d].name == name {
			return d, nil
		}
	}
	return 0, &Error{Kind: Invalid, Op: "dtype", Subject: name, Detail: "is not a torch dtype name that a feature may have"}
}

// Valid reports whether d is one of the declared types.
func (d DType) Valid() bool { return d > 0 && int(d) < len(dtypes) }

// Size is the size of one element in bytes, or 0 if d is not valid.
func (d DType) Size() int64 {
	if !d.Valid() {
		return 0
	}
	return dtypes[d].size
}

// Float reports whether d is a floating-point type.
func (d DType) Float() bool { return d >= Float64 && d <= Float8E5M2 }

func (d DType) String() string {
	if !d.Valid() {
		return fmt.Sprintf("dtype(%d)", uint8(d))
	}
	return dtypes[d].name
}

// MarshalText gives the torch name.
func (d DType) MarshalText() ([]byte, error) {
	if !d.Valid() {
		return nil, &Error{Kind: Invalid, Op: "dtype", Subject: d.String(), Detail: "is not a valid dtype"}
	}
	return []byte(d.String()), nil
}

// UnmarshalText accepts a torch name.
func (d *DType) UnmarshalText(text []byte) error {
	v, err := ParseDType(string(text))
	if err != nil {
		return err
	}
	*d = v
	return nil
}
