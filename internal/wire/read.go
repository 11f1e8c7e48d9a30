package wire

import (
	"bytes"
	"reflect"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/sluice-ml/sluice"
)

// Read reads a JSON object into the struct that v points to, which must be zero, in one pass. It does so only for text of the form that programs write: names as they are declared
// and each once, numbers in plain digits, strings without escapes, no null, nothing behind the object; and only for types as the bodies of the hot calls have them. What it takes, encoding/json takes for the same. If it
// returns false, v is zero again and the text is to be read by encoding/json, which can say what is wrong with it, if anything is.
func Read(data []byte, v any) bool {
	to := reflect.ValueOf(v).Elem()
	r := reader{data: data}
	s := shapeOf(to.Type())
	if s.kind == objects && r.value(s, to) && r.peek() == 0 && r.at == len(data) {
		return true
	}
	to.SetZero()
	return false
}

// reader goes over JSON once.
type reader struct {
	data []byte
	at   int
}

// peek is the next byte that is not white space, or 0.
func (r *reader) peek() byte {
	for r.at < len(r.data) {
		switch c := r.data[r.at]; c {
		case ' ', '\t', '\n', '\r':
			r.at++
		default:
			return c
		}
	}
	return 0
}

func (r *reader) skip(c byte) bool {
	if r.peek() != c {
		return false
	}
	r.at++
	return true
}

func (r *reader) value(s *shape, v reflect.Value) bool {
	switch s.kind {
	case objects:
		return r.object(s, v)
	case lists:
		return r.list(s, v)
	case pointers:
		v.Set(reflect.New(v.Type().Elem()))
		return r.value(s.elem, v.Elem())
	case texts:
		text, ok := r.text()
		v.SetString(string(text))
		return ok
	case integers:
		return r.integer(v)
	case numbers:
		return r.number(v)
	case truths:
		return r.truth(v)
	case leases:
		text, ok := r.text()
		return ok && v.Addr().Interface().(*sluice.LeaseID).UnmarshalText(text) == nil
	case refs:
		return r.ref(v)
	}
	return false
}

func (r *reader) object(s *shape, v reflect.Value) bool {
	if !r.skip('{') {
		return false
	}
	if r.skip('}') {
		return true
	}
	var seen uint64
	next := 0 // most objects have their fields in order
	for {
		name, ok := r.text()
		if !ok || !r.skip(':') {
			return false
		}
		at := -1
		for range s.fields {
			if next == len(s.fields) {
				next = 0
			}
			if s.fields[next].name == string(name) {
				at = next
				break
			}
			next++
		}
		if at < 0 || seen&(1<<at) != 0 {
			return false
		}
		seen |= 1 << at
		if f := &s.fields[at]; !r.value(f.of, v.Field(f.index)) {
			return false
		}
		switch r.peek() {
		case '}':
			r.at++
			return true
		case ',':
			r.at++
		default:
			return false
		}
	}
}

func (r *reader) list(s *shape, v reflect.Value) bool {
	if !r.skip('[') {
		return false
	}
	if r.skip(']') {
		v.Set(reflect.MakeSlice(v.Type(), 0, 0))
		return true
	}
	for n := 0; ; n++ {
		v.Grow(1)
		v.SetLen(n + 1)
		item := v.Index(n)
		if !r.value(s.elem, item) {
			return false
		}
		switch r.peek() {
		case ']':
			r.at++
			return true
		case ',':
			r.at++
		default:
			return false
		}
	}
}

// text is what a string without escapes holds.
func (r *reader) text() ([]byte, bool) {
	if !r.skip('"') {
		return nil, false
	}
	from, ascii := r.at, true
	for ; r.at < len(r.data); r.at++ {
		switch c := r.data[r.at]; {
		case c == '"':
			text := r.data[from:r.at]
			r.at++
			return text, ascii || utf8.Valid(text)
		case c == '\\' || c < 0x20:
			return nil, false
		case c >= utf8.RuneSelf:
			ascii = false
		}
	}
	return nil, false
}

// digits passes over a number: its sign and digits, and what makes it a fraction if that may be.
func (r *reader) digits(fraction bool) (text []byte, ok bool) {
	r.peek()
	from := r.at
	run := func() int {
		begun := r.at
		for r.at < len(r.data) && r.data[r.at] >= '0' && r.data[r.at] <= '9' {
			r.at++
		}
		return r.at - begun
	}
	one := func(of string) bool {
		if r.at == len(r.data) || strings.IndexByte(of, r.data[r.at]) < 0 {
			return false
		}
		r.at++
		return true
	}
	one("-")
	first := r.at
	n := run()
	if n == 0 || n > 18 || n > 1 && r.data[first] == '0' {
		return nil, false
	}
	if fraction {
		if one(".") && run() == 0 {
			return nil, false
		}
		if one("eE") {
			if one("+-"); run() == 0 {
				return nil, false
			}
		}
	}
	return r.data[from:r.at], true // where it goes on, a comma or the end of an object or list is wanted
}

func (r *reader) integer(v reflect.Value) bool {
	text, ok := r.digits(false)
	if !ok {
		return false
	}
	n, err := strconv.ParseInt(string(text), 10, 64)
	v.SetInt(n)
	return err == nil && !v.OverflowInt(n)
}

func (r *reader) number(v reflect.Value) bool {
	text, ok := r.digits(true)
	if !ok {
		return false
	}
	n, err := strconv.ParseFloat(string(text), 64)
	v.SetFloat(n)
	return err == nil
}

func (r *reader) truth(v reflect.Value) bool {
	r.peek()
	switch rest := r.data[r.at:]; {
	case bytes.HasPrefix(rest, []byte("true")):
		r.at += len("true")
		v.SetBool(true)
		return true
	case bytes.HasPrefix(rest, []byte("false")):
		r.at += len("false")
		return true
	}
	return false
}

// ref finds the end of a ref, which is strict by itself.
func (r *reader) ref(v reflect.Value) bool {
	if r.peek() != '{' {
		return false
	}
	from, depth := r.at, 0
	for ; r.at < len(r.data); r.at++ {
		switch r.data[r.at] {
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				r.at++
				ref, err := sluice.ParseRef(r.data[from:r.at])
				if err != nil {
					return false
				}
				*v.Addr().Interface().(*sluice.Ref) = ref
				return true
			}
		case '"':
			end := bytes.IndexByte(r.data[r.at+1:], '"')
			if end < 0 || bytes.IndexByte(r.data[r.at+1:r.at+1+end], '\\') >= 0 {
				return false
			}
			r.at += 1 + end
		}
	}
	return false
}
