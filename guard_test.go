package sluice

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"
)

type duck struct {
	Shape []int
	Data  []float32
}

type methodDuck struct{}

func (*methodDuck) Shape() []int     { return nil }
func (*methodDuck) DataPtr() uintptr { return 0 }

// handleDuck is what a binding to a tensor library may be: a number that leads to memory elsewhere.
type handleDuck int

func (handleDuck) Shape() []int { return nil }
func (handleDuck) Data() []byte { return nil }

type node struct {
	Name string
	Next *node
	Any  any
}

func TestGuardLetsTheControlPlanePass(t *testing.T) {
	t.Parallel()
	r, err := NewRef(testFields())
	if err != nil {
		t.Fatal(err)
	}
	shared := &node{Name: "shared"}
	for _, v := range []any{
		nil, 1, "text", 1.5, true, []byte("small"), r, &r, []Ref{r, r}, r.Fields(),
		Lease{ID: NewLeaseID(), Ref: r, Window: &WindowSlot{}, Deadline: time.Time{}}, Delivery{Leases: []Lease{{Ref: r}}},
		PutRequest{Ref: r, Positions: []Position{{Source: "s"}}}, SettleRequest{Settlements: make([]Settlement, 100)}, Status{}, Handle{}, Reservation{},
		map[string]any{"a": []int{1, 2, 3}, "b": map[string]string{"c": "d"}}, []any{shared, shared}, make([]float64, 16), [16]int{}, Spec{Shape: []int64{1}},
	} {
		if err := AssertNoTensors(v, "v"); err != nil {
			t.Errorf("%T: %v", v, err)
		}
	}
}

func TestGuardRefusesTensorsAndWhatCouldHideOne(t *testing.T) {
	t.Parallel()
	cycle := &node{}
	cycle.Next = &node{Next: cycle}
	slice := make([]any, 1)
	slice[0] = slice
	deep := &node{}
	for range 40 {
		deep = &node{Next: deep}
	}
	x := NewTensor(Float32, 2)
	var decoded any
	if err := json.Unmarshal([]byte(`{"h":[0.5`+strings.Repeat(",1", 16)+`]}`), &decoded); err != nil {
		t.Fatal(err)
	}
	pointers := make([]*float32, 17)
	for i := range pointers {
		pointers[i] = new(float32)
	}
	for _, tc := range []struct {
		name string
		v    any
		want string
	}{
		{"a tensor", x, `"ref": a tensor (sluice.Tensor)`},
		{"a pointer to one", &x, "a tensor"},
		{"a tensor in a struct", struct{ Features []any }{[]any{0, 1, struct{ Key any }{x}}}, `"ref.Features[2].Key": a tensor`},
		{"a tensor in a map", map[string]any{"k": &x}, `"ref["k"]": a tensor`},
		{"an unexported tensor", struct{ hidden any }{x}, `"ref.hidden": a tensor`},
		{"a sample", Sample{Features: []Feature{{"x", x}}}, `"ref.Features[0]": a tensor`},
		{"a duck with fields", duck{}, "a tensor (sluice.duck)"},
		{"a duck with methods", &methodDuck{}, "a tensor (*sluice.methodDuck)"},
		{"a duck that is a number", struct{ X handleDuck }{}, `"ref.X": a tensor (sluice.handleDuck)`},
		{"many numbers that came through JSON", decoded, `"ref["h"]": more than 16 numbers ([]interface {}), at most 16 are allowed`},
		{"many pointers to numbers", pointers, "more than 16 numbers"},
		{"a long mask", make([]bool, 17), "17 numbers ([]bool)"},
		{"many numbers", make([]float32, 17), "17 numbers ([]float32), at most 16 are allowed"},
		{"many numbers in an array", [17]int16{}, "17 numbers"},
		{"many bytes", make([]byte, 4097), "4097 bytes, at most 4096"},
		{"a long string", strings.Repeat("x", 4097), "a string of 4097 bytes"},
		{"a long key", map[string]int{strings.Repeat("x", 4097): 1}, "a key of 4097 bytes"},
		{"a cycle", cycle, "a cycle"},
		{"a cycle of slices", slice, "a cycle"},
		{"too deep", deep, "nested more than 32 deep"},
		{"integer keys", map[int]string{1: "a"}, "keys of type int, want string keys"},
		{"a set", map[string]struct{}{}, ""},
		{"a set of bools", map[string]bool{"a": true}, "a set"},
		{"a set with members", map[string]struct{}{"a": {}}, "a set"},
		{"a channel", make(chan int), "an opaque object (chan int)"},
		{"a function", struct{ F func() }{func() {}}, `"ref.F": an opaque object`},
	} {
		err := AssertNoTensors(tc.v, "")
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want ...%s...", tc.name, err, tc.want)
		}
	}
}
