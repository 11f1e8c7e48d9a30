package wire

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"math"
	"reflect"
	"strconv"

	"github.com/sluice-ml/sluice"
)

// Append appends what encoding/json makes of v, without escapes for HTML; v is best a pointer. encoding/json would read each ref twice more, and refs are nearly all of what is said.
func Append(b []byte, v any) ([]byte, error) {
	at := reflect.ValueOf(v)
	if at.Kind() == reflect.Pointer {
		at = at.Elem()
	} else { // it has no address, which some are written by
		at = reflect.New(at.Type()).Elem()
		at.Set(reflect.ValueOf(v))
	}
	return appendValue(b, shapeOf(at.Type()), at)
}

func appendValue(b []byte, s *shape, v reflect.Value) ([]byte, error) {
	switch s.kind {
	case objects:
		return appendObject(b, s, v)
	case lists:
		if v.IsNil() {
			return append(b, "null"...), nil
		}
		b = append(b, '[')
		for i := range v.Len() {
			if i > 0 {
				b = append(b, ',')
			}
			var err error
			if b, err = appendValue(b, s.elem, v.Index(i)); err != nil {
				return nil, err
			}
		}
		return append(b, ']'), nil
	case pointers:
		if v.IsNil() {
			return append(b, "null"...), nil
		}
		return appendValue(b, s.elem, v.Elem())
	case texts:
		if text := v.String(); isPlain(text) {
			return append(append(append(b, '"'), text...), '"'), nil
		}
	case integers:
		return strconv.AppendInt(b, v.Int(), 10), nil
	case numbers:
		if f := v.Float(); f == 0 || math.Abs(f) >= 1e-6 && math.Abs(f) < 1e21 { // the others have an exponent, or no form
			return strconv.AppendFloat(b, f, 'f', -1, 64), nil
		}
	case truths:
		return strconv.AppendBool(b, v.Bool()), nil
	case leases:
		id := v.Addr().Interface().(*sluice.LeaseID)
		return append(hex.AppendEncode(append(b, '"'), id[:]), '"'), nil
	case refs:
		if ref := v.Addr().Interface().(*sluice.Ref); !ref.IsZero() {
			return ref.AppendCanonical(b), nil
		}
	}
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetEscapeHTML(false)
	if err := e.Encode(v.Addr().Interface()); err != nil {
		return nil, err
	}
	return append(b, bytes.TrimSuffix(text.Bytes(), []byte("\n"))...), nil
}

func appendObject(b []byte, s *shape, v reflect.Value) ([]byte, error) {
	next := byte('{')
	for i := range s.fields {
		f := &s.fields[i]
		of := v.Field(f.index)
		if f.omit && isEmpty(of) {
			continue
		}
		b = append(append(append(append(b, next), '"'), f.name...), '"', ':')
		next = ','
		var err error
		if b, err = appendValue(b, f.of, of); err != nil {
			return nil, err
		}
	}
	if next == '{' {
		b = append(b, '{')
	}
	return append(b, '}'), nil
}

// isEmpty is what omitempty means.
func isEmpty(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Slice, reflect.Map, reflect.Array:
		return v.Len() == 0
	case reflect.Struct:
		return false
	}
	return v.IsZero()
}

// isPlain reports whether a string needs no escapes.
func isPlain(text string) bool {
	for i := range len(text) {
		if c := text[i]; c < 0x20 || c > 0x7e || c == '"' || c == '\\' {
			return false
		}
	}
	return true
}
