package service

import (
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"sync"

	"github.com/sluice-ml/sluice"
)

// exact holds JSON that encoding/json has taken against the names of its type: that package also takes them in other cases, and twice, when the last one counts. A caller who writes such a
// body means something else than what would be done.
func exact(data []byte, t reflect.Type) error {
	s := scanner{data: data}
	return s.value(t)
}

// scanner goes over JSON that is known to be well formed.
type scanner struct {
	data []byte
	at   int
}

// value passes over a value of type t; nil is one whose names are not our matter.
func (s *scanner) value(t reflect.Type) error {
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t != nil && (reflect.PointerTo(t).Implements(unmarshaler) || reflect.PointerTo(t).Implements(textUnmarshaler)) {
		t = nil // it looks after itself
	}
	switch s.next() {
	case '{':
		return s.object(t)
	case '[':
		if t != nil {
			t = t.Elem()
		}
		for s.at++; s.next() != ']'; {
			if err := s.value(t); err != nil {
				return err
			}
			s.comma()
		}
		s.at++
	case '"':
		s.text()
	default:
		for s.at < len(s.data) && strings.IndexByte(" \t\r\n,]}", s.data[s.at]) < 0 {
			s.at++
		}
	}
	return nil
}

func (s *scanner) object(t reflect.Type) error {
	var fields map[string]reflect.Type
	var seen map[string]bool
	if t != nil {
		seen = make(map[string]bool, 8)
		if t.Kind() == reflect.Struct {
			fields = fieldsOf(t)
		}
	}
	for s.at++; s.next() != '}'; s.comma() {
		quoted := s.text()
		s.next()
		s.at++ // the colon
		var of reflect.Type
		if t != nil {
			var name string
			if err := json.Unmarshal(quoted, &name); err != nil {
				return err
			}
			if seen[name] {
				return &sluice.Error{Kind: sluice.Invalid, Op: "body", Subject: plain(name), Detail: "is there twice in one object"}
			}
			seen[name] = true
			if fields == nil {
				of = t.Elem() // of a map
			} else if of = fields[name]; of == nil {
				return &sluice.Error{Kind: sluice.Invalid, Op: "body", Detail: fmt.Sprintf("unknown field %q", plain(name))}
			}
		}
		if err := s.value(of); err != nil {
			return err
		}
	}
	s.at++
	return nil
}

// next is the byte that comes after white space.
func (s *scanner) next() byte {
	for s.at < len(s.data) && strings.IndexByte(" \t\r\n", s.data[s.at]) >= 0 {
		s.at++
	}
	return s.data[s.at]
}

func (s *scanner) comma() {
	if s.next() == ',' {
		s.at++
	}
}

// text passes over a string and returns it with its quotes.
func (s *scanner) text() []byte {
	s.next()
	from := s.at
	for s.at++; s.data[s.at] != '"'; s.at++ {
		if s.data[s.at] == '\\' {
			s.at++
		}
	}
	s.at++
	return s.data[from:s.at]
}

var (
	unmarshaler     = reflect.TypeFor[json.Unmarshaler]()
	textUnmarshaler = reflect.TypeFor[encoding.TextUnmarshaler]()
	knownFields     sync.Map // by reflect.Type
)

// fieldsOf is the types of a struct's fields by their names in JSON.
func fieldsOf(t reflect.Type) map[string]reflect.Type {
	if known, ok := knownFields.Load(t); ok {
		return known.(map[string]reflect.Type)
	}
	fields := map[string]reflect.Type{}
	for i := range t.NumField() {
		f := t.Field(i)
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && name != "-" {
			fields[name] = f.Type
		}
	}
	knownFields.Store(t, fields)
	return fields
}
