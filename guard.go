package sluice

import (
	"fmt"
	"reflect"
	"strconv"
)

const (
	guardDepth   = 32
	guardNumbers = 16
	guardBytes   = 4 << 10
)

// AssertNoTensors checks that v carries no tensors, at any depth, and nothing that could hide one: the control plane's guard. path names v in the
// error, which says where the offender sits: ref.features[2].key. (Upstream's assert_no_tensors.)
//
// It walks structs (unexported fields too), pointers, interfaces, maps with string keys, slices and arrays, at most 32 deep. It refuses a Tensor or whatever quacks like one
// (a shape together with data, by field or by method), slices of more than 16 numbers or bools, as they are or behind interfaces and pointers, byte slices and
// strings over 4 KiB, cycles, sets (maps to struct{} or bool) and opaque objects: channels, functions, unsafe pointers.
func AssertNoTensors(v any, path string) error {
	if path == "" {
		path = "ref"
	}
	return (&guard{}).walk(reflect.ValueOf(v), path, 0)
}

type guard struct {
	onPath map[guardStep]bool // pointers, maps and slices between the root and here
}

// guardStep has the type and the length beside the address, since a struct and its first field share theirs.
type guardStep struct {
	at  uintptr
	t   reflect.Type
	len int
}

func (g *guard) walk(v reflect.Value, path string, depth int) error {
	fail := func(format string, args ...any) error {
		return &Error{Kind: Invalid, Op: "assert no tensors", Subject: path, Detail: fmt.Sprintf(format, args...)}
	}
	if !v.IsValid() {
		return nil
	}
	t := v.Type()
	switch t {
	case reflect.TypeFor[Ref](): // checked at construction
		return nil
	case reflect.TypeFor[DType]():
		return nil
	}
	if depth > guardDepth {
		return fail("nested more than %d deep", guardDepth)
	}
	if quacksLikeTensor(t) {
		return fail("a tensor (%s); the control plane carries refs only", t)
	}
	switch v.Kind() {
	case reflect.Bool, reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64,
		reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64, reflect.Float32, reflect.Float64:
		return nil
	case reflect.String:
		if v.Len() > guardBytes {
			return fail("a string of %d bytes, at most %d are allowed", v.Len(), guardBytes)
		}
		return nil
	case reflect.Pointer, reflect.Map, reflect.Slice:
		if v.IsNil() {
			return nil
		}
		step := guardStep{at: v.Pointer(), t: t}
		if v.Kind() == reflect.Slice {
			step.len = v.Len()
		}
		if g.onPath[step] && (v.Kind() != reflect.Slice || step.len > 0) {
			return fail("a cycle")
		}
		if g.onPath == nil {
			g.onPath = map[guardStep]bool{}
		}
		g.onPath[step] = true
		defer delete(g.onPath, step)
	}
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if v.IsNil() {
			return nil
		}
		return g.walk(v.Elem(), path, depth+1)
	case reflect.Struct:
		for i := range v.NumField() {
			if t.Field(i).Type.Size() == 0 {
				continue // markers such as [0]func()
			}
			if err := g.walk(v.Field(i), path+"."+t.Field(i).Name, depth+1); err != nil {
				return err
			}
		}
		return nil
	case reflect.Slice, reflect.Array:
		switch k := t.Elem().Kind(); {
		case k == reflect.Uint8:
			if v.Len() > guardBytes {
				return fail("%d bytes, at most %d are allowed", v.Len(), guardBytes)
			}
			return nil
		case k >= reflect.Bool && k <= reflect.Complex128:
			if v.Len() > guardNumbers {
				return fail("%d numbers (%s), at most %d are allowed", v.Len(), t, guardNumbers)
			}
			return nil
		}
		numbers := 0
		for i := range v.Len() {
			if isNumber(v.Index(i)) { // a tensor that came through JSON is a []any of float64
				if numbers++; numbers > guardNumbers {
					return fail("more than %d numbers (%s), at most %d are allowed", guardNumbers, t, guardNumbers)
				}
			}
			if err := g.walk(v.Index(i), path+"["+strconv.Itoa(i)+"]", depth+1); err != nil {
				return err
			}
		}
		return nil
	case reflect.Map:
		if t.Key().Kind() != reflect.String {
			return fail("a map with keys of type %s, want string keys", t.Key())
		}
		if e := t.Elem(); e.Kind() == reflect.Bool || e.Kind() == reflect.Struct && e.NumField() == 0 {
			return fail("a set (%s)", t)
		}
		for it := v.MapRange(); it.Next(); {
			if len(it.Key().String()) > guardBytes {
				return fail("a key of %d bytes, at most %d are allowed", len(it.Key().String()), guardBytes)
			}
			if err := g.walk(it.Value(), path+"["+strconv.Quote(it.Key().String())+"]", depth+1); err != nil {
				return err
			}
		}
		return nil
	}
	return fail("an opaque object (%s)", t)
}

// isNumber reports whether v is, or leads to, a number or a bool.
func isNumber(v reflect.Value) bool {
	for range guardDepth {
		if k := v.Kind(); k != reflect.Interface && k != reflect.Pointer || v.IsNil() {
			return k >= reflect.Bool && k <= reflect.Complex128
		}
		v = v.Elem()
	}
	return false
}

// quacksLikeTensor looks at the type alone: a shape with data, as fields or as methods, by any capitalisation that is usual for them.
func quacksLikeTensor(t reflect.Type) bool {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == reflect.TypeFor[Tensor]() || t == reflect.TypeFor[Feature]() || t == reflect.TypeFor[Tensors]() {
		return true
	}
	has := func(names ...string) bool {
		for _, n := range names {
			if t.Kind() == reflect.Struct {
				if _, ok := t.FieldByName(n); ok {
					return true
				}
			}
			if _, ok := t.MethodByName(n); ok {
				return true
			}
			if _, ok := reflect.PointerTo(t).MethodByName(n); ok {
				return true
			}
		}
		return false
	}
	if t.Name() == "" && t.Kind() != reflect.Struct && t.Kind() != reflect.Interface || t.PkgPath() == "reflect" {
		return false
	}
	return has("Shape", "Dims", "Size", "shape", "dims") && has("Data", "DataPtr", "RawData", "Bytes", "data", "values", "Values") && !isSpec(t)
}

// isSpec exempts the types whose Bytes is a count.
func isSpec(t reflect.Type) bool {
	return t == reflect.TypeFor[Spec]() || t == reflect.TypeFor[RefFeature]()
}
