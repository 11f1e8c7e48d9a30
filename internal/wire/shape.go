package wire

import (
	"encoding"
	"encoding/json"
	"reflect"
	"strings"
	"sync"

	"github.com/sluice-ml/sluice"
)

// kind is how a value is read and written.
type kind int

const (
	others kind = iota // by encoding/json alone
	objects
	lists
	pointers
	texts
	integers
	numbers
	truths
	leases
	refs
)

// shape is what [Read] and [Append] know of a type.
type shape struct {
	kind   kind
	elem   *shape  // of lists and pointers
	fields []field // of objects, all that they have
}

type field struct {
	name  string
	index int
	omit  bool // where it is empty
	of    *shape
}

var (
	shapes sync.Map // *shape by reflect.Type
	ways   = []reflect.Type{reflect.TypeFor[json.Unmarshaler](), reflect.TypeFor[json.Marshaler](), reflect.TypeFor[encoding.TextUnmarshaler](), reflect.TypeFor[encoding.TextMarshaler]()}
)

func shapeOf(t reflect.Type) *shape {
	if s, ok := shapes.Load(t); ok {
		return s.(*shape)
	}
	s := newShape(t, map[reflect.Type]*shape{})
	shapes.Store(t, s)
	return s
}

// newShape makes the shape of a type; begun are those that it is part of.
func newShape(t reflect.Type, begun map[reflect.Type]*shape) *shape {
	if s := begun[t]; s != nil {
		return s
	}
	s := &shape{}
	begun[t] = s
	switch t {
	case reflect.TypeFor[sluice.Ref]():
		s.kind = refs
		return s
	case reflect.TypeFor[sluice.LeaseID]():
		s.kind = leases
		return s
	}
	for _, way := range ways {
		if t.Kind() != reflect.Pointer && reflect.PointerTo(t).Implements(way) {
			return s // a way of its own
		}
	}
	switch t.Kind() {
	case reflect.Struct:
		for i := range t.NumField() {
			name, options, _ := strings.Cut(t.Field(i).Tag.Get("json"), ",")
			if name == "" || name == "-" || options != "" && options != "omitempty" || i == 64 {
				s.fields = nil
				return s
			}
			s.fields = append(s.fields, field{name: name, index: i, omit: options != "", of: newShape(t.Field(i).Type, begun)})
		}
		s.kind = objects
	case reflect.Slice:
		if t.Elem().Kind() != reflect.Uint8 {
			s.kind, s.elem = lists, newShape(t.Elem(), begun)
		}
	case reflect.Pointer:
		s.kind, s.elem = pointers, newShape(t.Elem(), begun)
	case reflect.String:
		s.kind = texts
	case reflect.Int, reflect.Int64:
		s.kind = integers
	case reflect.Float64:
		s.kind = numbers
	case reflect.Bool:
		s.kind = truths
	}
	return s
}
