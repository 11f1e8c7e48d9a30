package stream

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-ml/sluice"
	"pgregory.net/rapid"
)

// sampleOf makes an unpacked eagle3 sample of rows of ids, all attended, whose states count up.
func sampleOf(t testing.TB, id string, loss []int64, change func(*sluice.Sample), rows ...[]int64) Sample {
	t.Helper()
	n := int64(len(rows[0]))
	b := int64(len(rows))
	ids, attn, mask := sluice.NewTensor(sluice.Int64, b, n), sluice.NewTensor(sluice.Int64, b, n), sluice.NewTensor(sluice.Int64, b, n)
	aux, last := sluice.NewTensor(sluice.BFloat16, b, n, 3), sluice.NewTensor(sluice.BFloat16, b, n, 1)
	for r, row := range rows {
		for i, v := range row {
			at := r*len(row) + i
			sluice.View[int64](ids)[at] = v
			sluice.View[int64](attn)[at] = 1
			sluice.View[uint16](last)[at] = uint16(v)
			for k := range 3 {
				sluice.View[uint16](aux)[3*at+k] = uint16(10*int(v) + k)
			}
		}
		copy(sluice.View[int64](mask)[r*len(row):], loss)
	}
	x := &sluice.Sample{SampleID: id, RunID: "r", Algorithm: sluice.EAGLE3, SchemaVersion: 1, NumTokens: b * n,
		Attributes: map[string]string{"shift": "0", "aux_layers": "hf:1,2,3", "last_norm": "post", "target": "t1", "tokenizer": "k1"},
		Features:   []sluice.Feature{{Name: "aux_hidden_states", Tensor: aux}, {Name: "input_ids", Tensor: ids}, {Name: "attention_mask", Tensor: attn}, {Name: "loss_mask", Tensor: mask}, {Name: "last_hidden_states", Tensor: last}}}
	if change != nil {
		change(x)
	}
	return Sample{Ref: refOf(t, x), Features: x.Features}
}

func ints(t testing.TB, b *Batch, name string) []int64 {
	t.Helper()
	x, ok := b.Feature(name)
	if !ok {
		t.Fatalf("the batch has no %s", name)
	}
	return sluice.View[int64](x)
}

func shorts(t testing.TB, b *Batch, name string) []uint16 {
	t.Helper()
	x, ok := b.Feature(name)
	if !ok {
		t.Fatalf("the batch has no %s", name)
	}
	return sluice.View[uint16](x)
}

func mustCollate(t testing.TB, c Collator, samples ...Sample) *Batch {
	t.Helper()
	b, err := Collate(schema(t, sluice.EAGLE3), c, samples, nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestShiftingMovesWhatTheSchemaFlagsAndNothingElse(t *testing.T) {
	t.Parallel()
	b := mustCollate(t, PadTo(0), sampleOf(t, "s", []int64{0, 0, 0, 1, 1, 1}, nil, []int64{10, 11, 12, 13, 14, 15}))
	for name, want := range map[string][]int64{"input_ids": {11, 12, 13, 14, 15, 0}, "loss_mask": {0, 0, 1, 1, 1, 0}, "attention_mask": {1, 1, 1, 1, 1, 1}} {
		if got := ints(t, b, name); !slices.Equal(got, want) {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	if got := shorts(t, b, "last_hidden_states"); !slices.Equal(got, []uint16{11, 12, 13, 14, 15, 0}) {
		t.Errorf("last_hidden_states %v", got)
	}
	if got := shorts(t, b, "aux_hidden_states")[:4]; !slices.Equal(got, []uint16{100, 101, 102, 110}) {
		t.Errorf("aux_hidden_states %v", got)
	}
	if b.Shift != "1" || b.Tokens != 6 || b.SupervisedTokens != 3 {
		t.Errorf("shift %s, %d tokens, %d supervised", b.Shift, b.Tokens, b.SupervisedTokens)
	}
}

func TestASampleThatComesShiftedIsNotShiftedAgain(t *testing.T) {
	t.Parallel()
	s := sampleOf(t, "s", []int64{0, 1, 0}, func(x *sluice.Sample) { x.Attributes["shift"] = "1" }, []int64{11, 12, 0})
	b := mustCollate(t, PadTo(0), s)
	if got := ints(t, b, "input_ids"); !slices.Equal(got, []int64{11, 12, 0}) {
		t.Errorf("input_ids %v", got)
	}
	for i := range s.Features {
		if &b.Features[i].Data[0] != &s.Features[i].Data[0] {
			t.Errorf("%s was copied, though one sample that needs nothing done is handed on", s.Features[i].Name)
		}
	}
}

func TestASecondShiftIsAnError(t *testing.T) {
	t.Parallel()
	var inner error
	s := sampleOf(t, "s", []int64{0, 1, 1}, nil, []int64{1, 2, 3})
	mustCollate(t, CollateFunc(func(samples []Sample) ([]sluice.Feature, error) {
		if got := samples[0].Features[1]; samples[0].Shift != "1" || !slices.Equal(sluice.View[int64](got.Tensor), []int64{2, 3, 0}) {
			t.Errorf("the function got shift %q and %s %v", samples[0].Shift, got.Name, sluice.View[int64](got.Tensor))
		}
		_, inner = Collate(schema(t, sluice.EAGLE3), PadTo(0), samples, nil)
		return samples[0].Features, nil
	}), s)
	wantRefused(t, inner, sluice.ErrSchema, `stream: collate "s": says shift 0, and its features were shifted since; a second shift would misalign them`)

	dflash := &sluice.Sample{SampleID: "d", RunID: "r", Algorithm: sluice.DFlash, SchemaVersion: 1, Attributes: map[string]string{"shift": "1", "aux_layers": "unknown"},
		Features: []sluice.Feature{{Name: "hidden_states", Tensor: sluice.NewTensor(sluice.Float32, 1, 2, 4)}, {Name: "input_ids", Tensor: sluice.NewTensor(sluice.Int64, 1, 2)},
			{Name: "attention_mask", Tensor: sluice.NewTensor(sluice.Int64, 1, 2)}, {Name: "loss_mask", Tensor: sluice.NewTensor(sluice.Int64, 1, 2)}}}
	_, err := Collate(schema(t, sluice.DFlash), PadTo(0), []Sample{{Ref: refOf(t, dflash), Features: dflash.Features}}, nil)
	wantRefused(t, err, sluice.ErrSchema, `stream: collate "d": says shift 1, but batches of dflash are not shifted`)
}

func TestWhatMustNotBeMixedIsNamedTwice(t *testing.T) {
	t.Parallel()
	a := sampleOf(t, "first", []int64{0, 1}, nil, []int64{1, 2})
	for attr, v := range map[string]string{"target": "t2", "tokenizer": "k2", "aux_layers": "hf:1,2,4"} {
		b := sampleOf(t, "second", []int64{0, 1}, func(x *sluice.Sample) { x.Attributes[attr] = v }, []int64{1, 2})
		_, err := Collate(schema(t, sluice.EAGLE3), PadTo(0), []Sample{a, b}, nil)
		wantKind(t, err, sluice.ErrSchema)
		for _, part := range []string{"first", "second", v} {
			if err != nil && !strings.Contains(err.Error(), part) {
				t.Errorf("error %q does not name %s", err, part)
			}
		}
	}
}

// normOf is the norm of the tests' states, which have one element.
func normOf(weight float32) *FinalNorm {
	return &FinalNorm{Weight: sluice.TensorOf(sluice.Float32, []float32{weight}, 1), Epsilon: 1e-6}
}

func preNorm(x *sluice.Sample) { x.Attributes["last_norm"] = "pre" }

func TestStatesOfAnotherNormThanTheSchemasAreRefused(t *testing.T) {
	t.Parallel()
	pre := sampleOf(t, "s", []int64{0, 1}, preNorm, []int64{1, 2})
	_, err := Collate(schema(t, sluice.EAGLE3), PadTo(0), []Sample{pre}, nil)
	wantKind(t, err, sluice.ErrSchema)
	for _, part := range []string{`"s"`, "last_norm", "pre", "post", "last_hidden_states", "FinalNorm"} {
		if err != nil && !strings.Contains(err.Error(), part) {
			t.Errorf("error %q does not name %s", err, part)
		}
	}
	wide := &FinalNorm{Weight: sluice.TensorOf(sluice.Float32, []float32{1, 1}, 2), Epsilon: 1e-6}
	if _, err = Collate(schema(t, sluice.EAGLE3), PadTo(0), []Sample{pre}, &CollateOptions{FinalNorm: wide}); !errors.Is(err, sluice.ErrSchema) || !strings.Contains(err.Error(), "2 weights") {
		t.Errorf("a norm of another width: %v", err)
	}
	// A schema that wants the residual stream can't have it of a sample that has it no more.
	raw, err := sluice.ParseSchema([]byte(`{"name":"x","version":1,"features":[{"name":"last","from":"last","norm":"pre","axes":["B","S","H"],"dtypes":["bfloat16","float64"],"required":true}],
		"attributes":[{"name":"shift","required":true}]}`))
	if err != nil {
		t.Fatal(err)
	}
	x := &sluice.Sample{SampleID: "p", RunID: "r", Algorithm: "x", SchemaVersion: 1, Attributes: map[string]string{"shift": "0", "last_norm": "post"},
		Features: []sluice.Feature{{Name: "last", Tensor: sluice.NewTensor(sluice.BFloat16, 1, 2, 1)}}}
	if _, err := Collate(raw, PadTo(0), []Sample{{Ref: refOf(t, x), Features: x.Features}}, &CollateOptions{FinalNorm: normOf(1)}); !errors.Is(err, sluice.ErrSchema) || strings.Contains(err.Error(), "FinalNorm") {
		t.Errorf("post for pre: %v", err)
	}
	raw.Features[0].Norm = sluice.PostNorm
	x.Attributes["last_norm"], x.Features[0].Tensor = "pre", sluice.NewTensor(sluice.Float64, 1, 2, 1)
	if _, err := Collate(raw, PadTo(0), []Sample{{Ref: refOf(t, x), Features: x.Features}}, &CollateOptions{FinalNorm: normOf(1)}); !errors.Is(err, sluice.ErrSchema) || !strings.Contains(err.Error(), "float64") {
		t.Errorf("float64: %v", err)
	}
}

func TestPreNormStatesAreNormedOnceAndPostNormStatesNever(t *testing.T) {
	t.Parallel()
	const one, two, three = 0x3f80, 0x4000, 0x4040 // in bfloat16
	states := func(x *sluice.Sample) {
		copy(sluice.View[uint16](x.Features[4].Tensor), []uint16{one, two, three})
	}
	pre := sampleOf(t, "pre", []int64{0, 1, 1}, func(x *sluice.Sample) { preNorm(x); states(x) }, []int64{1, 2, 3})
	post := sampleOf(t, "post", []int64{0, 1, 1}, states, []int64{1, 2, 3})
	opts := &CollateOptions{FinalNorm: normOf(2)}
	var handed Sample
	keep := CollateFunc(func(samples []Sample) ([]sluice.Feature, error) {
		handed = samples[0]
		return samples[0].Features, nil
	})
	for _, c := range []Collator{PadTo(0), Pack(PackOptions{}), keep} {
		for range 2 { // the sample itself stays as it was
			b, err := Collate(schema(t, sluice.EAGLE3), c, []Sample{pre}, opts)
			if err != nil {
				t.Fatal(err)
			}
			if got := shorts(t, b, "last_hidden_states"); !slices.Equal(got, []uint16{two, two, 0}) || b.LastNorm != sluice.PostNorm || b.Clone().LastNorm != sluice.PostNorm {
				t.Errorf("%T: pre-norm states became %x, %q", c, got, b.LastNorm)
			}
		}
		b, err := Collate(schema(t, sluice.EAGLE3), c, []Sample{post}, opts)
		if err != nil {
			t.Fatal(err)
		}
		if got := shorts(t, b, "last_hidden_states"); !slices.Equal(got, []uint16{two, three, 0}) || b.LastNorm != sluice.PostNorm {
			t.Errorf("%T: post-norm states became %x, %q", c, got, b.LastNorm)
		}
	}

	// Where nothing is shifted, what a CollateFunc got can be collated once more; its ref still says "pre".
	s, err := sluice.ParseSchema([]byte(`{"name":"x","version":1,"features":[{"name":"last","from":"last","norm":"post","axes":["B","S","H"],"dtypes":["float32"],"required":true}],
		"attributes":[{"name":"shift","required":true}]}`))
	if err != nil {
		t.Fatal(err)
	}
	x := &sluice.Sample{SampleID: "x", RunID: "r", Algorithm: "x", SchemaVersion: 1, Attributes: map[string]string{"shift": "0", "last_norm": "pre"},
		Features: []sluice.Feature{{Name: "last", Tensor: sluice.TensorOf(sluice.Float32, []float32{3, 4, 1, 1}, 1, 2, 2)}}}
	opts = &CollateOptions{FinalNorm: &FinalNorm{Weight: sluice.TensorOf(sluice.BFloat16, []uint16{two, one}, 2), Epsilon: 1e-9}}
	if _, err := Collate(s, keep, []Sample{{Ref: refOf(t, x), Features: x.Features}}, opts); err != nil {
		t.Fatal(err)
	}
	b, err := Collate(s, PadTo(0), []Sample{handed}, opts)
	if err != nil {
		t.Fatal(err)
	}
	want := []float32{3 * 2 / 3.5355339, 4 / 3.5355339, 2, 1}
	for i, v := range sluice.View[float32](b.Features[0].Tensor) {
		if d := v - want[i]; d < -1e-6 || d > 1e-6 {
			t.Errorf("element %d is %g, want %g", i, v, want[i])
		}
	}
}

// Whether aux holds the final layer, which would have to be normed too, nothing says.
func TestAPreNormSampleWithAPostNormFinalLayerIsRefused(t *testing.T) {
	t.Parallel()
	x := &sluice.Sample{SampleID: "d", RunID: "r", Algorithm: sluice.DSpark, SchemaVersion: 1, Attributes: map[string]string{"shift": "0", "aux_layers": "hf:0,5", "last_norm": "pre"},
		Features: []sluice.Feature{{Name: "target_hidden_states", Tensor: sluice.NewTensor(sluice.Float32, 1, 2, 2)}, {Name: "target_last_hidden_states", Tensor: sluice.NewTensor(sluice.Float32, 1, 2, 1)},
			{Name: "input_ids", Tensor: sluice.NewTensor(sluice.Int64, 1, 2)}, {Name: "loss_mask", Tensor: sluice.NewTensor(sluice.Int64, 1, 2)}}}
	_, err := Collate(schema(t, sluice.DSpark), PadTo(0), []Sample{{Ref: refOf(t, x), Features: x.Features}}, &CollateOptions{FinalNorm: normOf(1)})
	wantKind(t, err, sluice.ErrSchema)
	for _, part := range []string{`"d"`, "target_last_hidden_states", "target_hidden_states", "final layer", "FinalNorm does not help"} {
		if err != nil && !strings.Contains(err.Error(), part) {
			t.Errorf("error %q does not name %s", err, part)
		}
	}
}

func TestImpossibleFinalNormsAreRefused(t *testing.T) {
	t.Parallel()
	ones := sluice.TensorOf(sluice.Float32, []float32{1}, 1)
	for name, n := range map[string]*FinalNorm{
		"no weight":       {Epsilon: 1e-6},
		"a matrix":        {Weight: sluice.NewTensor(sluice.Float32, 2, 2), Epsilon: 1e-6},
		"integers":        {Weight: sluice.NewTensor(sluice.Int64, 2), Epsilon: 1e-6},
		"short data":      {Weight: sluice.Tensor{Spec: sluice.Spec{DType: sluice.Float32, Shape: []int64{2}}, Data: make([]byte, 4)}, Epsilon: 1e-6},
		"not a number":    {Weight: sluice.TensorOf(sluice.Float32, []float32{float32(math.NaN())}, 1), Epsilon: 1e-6},
		"no epsilon":      {Weight: ones},
		"epsilon is NaN":  {Weight: ones, Epsilon: math.NaN()},
		"endless epsilon": {Weight: ones, Epsilon: math.Inf(1)},
	} {
		_, err := Collate(schema(t, sluice.EAGLE3), PadTo(0), []Sample{sampleOf(t, "s", []int64{0, 1}, nil, []int64{1, 2})}, &CollateOptions{FinalNorm: n})
		if !errors.Is(err, sluice.ErrInvalid) || !strings.Contains(err.Error(), "FinalNorm") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestANormedStateThatFloat16CannotHoldIsRefused(t *testing.T) {
	t.Parallel()
	s := sampleOf(t, "s", []int64{0, 1}, func(x *sluice.Sample) {
		preNorm(x)
		x.Features[4].Tensor = sluice.TensorOf(sluice.Float16, []uint16{0x3c00, 0x4000}, 1, 2, 1)
	}, []int64{1, 2})
	b, err := Collate(schema(t, sluice.EAGLE3), PadTo(0), []Sample{s}, &CollateOptions{FinalNorm: normOf(0.5)})
	if err != nil {
		t.Fatal(err)
	}
	if got := shorts(t, b, "last_hidden_states"); !slices.Equal(got, []uint16{0x3800, 0}) {
		t.Errorf("%x", got)
	}
	_, err = Collate(schema(t, sluice.EAGLE3), PadTo(0), []Sample{s}, &CollateOptions{FinalNorm: normOf(1e5)})
	wantKind(t, err, sluice.ErrSchema)
}

func TestWhatCountsAsSupervisedIsWhatTheMaskSupervises(t *testing.T) {
	t.Parallel()
	s := schema(t, sluice.EAGLE3)
	rapid.Check(t, func(rt *rapid.T) {
		var samples []Sample
		for i := range rapid.IntRange(1, 3).Draw(rt, "samples") {
			shift := rapid.SampledFrom([]string{"0", "1"}).Draw(rt, "shift")
			lens := rapid.SliceOfN(rapid.Int64Range(1, 4), 1, 4).Draw(rt, "lens")
			cols := rapid.Int64Range(0, 3).Draw(rt, "padding")
			real := int64(0)
			for _, n := range lens {
				real += n
			}
			cols += real
			packed := rapid.Bool().Draw(rt, "packed")
			loss := rapid.SliceOfN(rapid.Int64Range(0, 1), int(cols), int(cols)).Draw(rt, "loss")
			if shift == "0" {
				clear(loss[real:])
			} // of what came shifted, padding may be supervised
			x := packedOf(t, shift, int(real), lens, make([]int64, cols)...)
			copy(sluice.View[int64](x.Features[3].Tensor), loss)
			if !packed {
				y := sampleOf(t, fmt.Sprint(i), loss, func(y *sluice.Sample) {
					y.Attributes["shift"] = shift
					clear(sluice.View[int64](y.Features[2].Tensor)[real:])
				}, make([]int64, cols))
				x = y
			}
			if len(samples) > 0 && len(x.Features) != len(samples[0].Features) {
				continue
			}
			samples = append(samples, x)
		}
		for _, c := range []Collator{PadTo(4), Pack(PackOptions{MaxTokens: 20})} {
			b, err := Collate(s, c, samples, nil)
			if err != nil {
				rt.Fatal(err)
			}
			sum := int64(0)
			for _, v := range ints(t, b, "loss_mask") {
				sum += v
			}
			if b.SupervisedTokens != sum {
				rt.Fatalf("%T: %d count as supervised, the mask supervises %d", c, b.SupervisedTokens, sum)
			}
		}
	})
}

func TestAttributesOfOneSampleMayDifferInABatchThoughTheSchemaAsksForThem(t *testing.T) {
	t.Parallel()
	s, err := sluice.ParseSchema([]byte(`{"name":"x","version":1,"features":[{"name":"ids","from":"input_ids","axes":["B","S"],"dtypes":["int64"],"required":true}],
		"attributes":[{"name":"shift","required":true},{"name":"source","required":true},{"name":"ids","required":true},{"name":"supervised_tokens","required":true},{"name":"row_lengths","required":true}]}`))
	if err != nil {
		t.Fatal(err)
	}
	var samples []Sample
	for i := range 2 {
		v := fmt.Sprint(i)
		x := &sluice.Sample{SampleID: "s" + v, RunID: "r", Algorithm: "x", SchemaVersion: 1, Attributes: map[string]string{"shift": "0", "source": "set@0/" + v, "ids": v, "supervised_tokens": v, "row_lengths": "2"},
			Features: []sluice.Feature{{Name: "ids", Tensor: sluice.NewTensor(sluice.Int64, 1, 2)}}}
		samples = append(samples, Sample{Ref: refOf(t, x), Features: x.Features})
	}
	if _, err := Collate(s, PadTo(0), samples, nil); err != nil {
		t.Error(err)
	}
}

// packedOf makes an eagle3 sample of one packed row of the given lengths, of which so many tokens are attended.
func packedOf(t testing.TB, shift string, attended int, lens []int64, ids ...int64) Sample {
	t.Helper()
	loss := make([]int64, len(ids))
	return sampleOf(t, "p", loss, func(x *sluice.Sample) {
		x.Attributes["shift"] = shift
		clear(sluice.View[int64](x.Features[2].Tensor)[attended:])
		n := int64(len(ids))
		x.Features = append(x.Features, sluice.Feature{Name: "position_ids", Tensor: sluice.NewTensor(sluice.Int64, 1, n)},
			sluice.Feature{Name: "seq_lens", Tensor: sluice.TensorOf(sluice.Int64, lens, 1, int64(len(lens)))}, sluice.Feature{Name: "doc_remaining", Tensor: sluice.NewTensor(sluice.Int64, 1, n)})
	}, ids)
}

// Upstream folds a row's padding into its last document: seq_lens add up to the row's width.
func TestPaddingThatWasCountedToADocumentIsNotPacked(t *testing.T) {
	t.Parallel()
	b := mustCollate(t, Pack(PackOptions{}), packedOf(t, "1", 5, []int64{2, 6}, 1, 2, 3, 4, 5, 0, 0, 0), packedOf(t, "1", 2, []int64{2}, 6, 7))
	for name, want := range map[string][]int64{
		"input_ids": {1, 2, 3, 4, 5, 6, 7}, "attention_mask": {1, 1, 1, 1, 1, 1, 1}, "position_ids": {0, 1, 0, 1, 2, 0, 1},
		"seq_lens": {2, 3, 2}, "doc_remaining": {1, 0, 2, 1, 0, 1, 0},
	} {
		if got := ints(t, b, name); !slices.Equal(got, want) {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
}

func TestLengthsThatDoNotFitTheirRowAreRefused(t *testing.T) {
	t.Parallel()
	for _, lens := range [][]int64{{2, 3}, {-1, 2}} {
		_, err := Collate(schema(t, sluice.EAGLE3), PadTo(0), []Sample{packedOf(t, "0", 4, lens, 1, 2, 3, 4)}, nil)
		wantKind(t, err, sluice.ErrSchema)
		if err != nil && !strings.Contains(err.Error(), "seq_lens of row 0") {
			t.Errorf("error %q", err)
		}
	}
}

func TestARowWithoutARealTokenTakesNoPlace(t *testing.T) {
	t.Parallel()
	empty := sampleOf(t, "e", []int64{0, 0}, func(x *sluice.Sample) { clear(x.Features[2].Data) }, []int64{8, 9})
	b := mustCollate(t, Pack(PackOptions{}), sampleOf(t, "a", []int64{0, 1}, nil, []int64{1, 2}), empty, sampleOf(t, "b", []int64{0, 1}, nil, []int64{3, 4}))
	if got := ints(t, b, "seq_lens"); !slices.Equal(got, []int64{2, 2}) {
		t.Errorf("seq_lens %v", got)
	}
	_, err := Collate(schema(t, sluice.EAGLE3), Pack(PackOptions{}), []Sample{empty}, nil)
	wantKind(t, err, sluice.ErrSchema)
}

// A feature in a mapped file may begin anywhere.
func TestFeaturesNeedNotBeAligned(t *testing.T) {
	t.Parallel()
	for _, c := range []Collator{PadTo(4), Pack(PackOptions{})} {
		s := packedOf(t, "0", 4, []int64{2, 2}, 1, 2, 3, 4)
		want := mustCollate(t, c, s)
		for i := range s.Features {
			data := append([]byte{0}, s.Features[i].Data...)
			s.Features[i].Data = data[1:]
		}
		got := mustCollate(t, c, s)
		for _, f := range want.Features {
			if x, _ := got.Feature(f.Name); !bytes.Equal(x.Data, f.Data) {
				t.Errorf("%s differs", f.Name)
			}
		}
	}
}

func TestNegativeSizesAreRefusedByName(t *testing.T) {
	t.Parallel()
	for field, c := range map[string]Collator{"multiple": PadTo(-4), "MaxTokens": Pack(PackOptions{MaxTokens: -1}), "Multiple": Pack(PackOptions{Multiple: -1})} {
		_, err := Collate(schema(t, sluice.EAGLE3), c, []Sample{sampleOf(t, "s", []int64{0, 1}, nil, []int64{1, 2})}, nil)
		wantKind(t, err, sluice.ErrInvalid)
		if err != nil && !strings.Contains(err.Error(), field) {
			t.Errorf("error %q does not name %s", err, field)
		}
	}
}

func TestPackingRefusesAPackingFeatureThatItWouldLose(t *testing.T) {
	t.Parallel()
	s, err := sluice.ParseSchema([]byte(`{"name":"x","version":1,"features":[
		{"name":"ids","from":"input_ids","axes":["B","S"],"dtypes":["int64"],"required":true},
		{"name":"pos","from":"position_ids","axes":["B","S"],"dtypes":["int64"]},
		{"name":"lens","from":"seq_lens","axes":["B","docs"],"dtypes":["int64"]},
		{"name":"left","from":"doc_remaining","axes":["B","S"],"dtypes":["int64"]},
		{"name":"tree","axes":["B","S"],"dtypes":["int64"]}],
		"packing":["pos","lens","left","tree"],"attributes":[{"name":"shift","required":true}]}`))
	if err != nil {
		t.Fatal(err)
	}
	_, err = NewLoader(LoaderConfig{Queue: newQueue(newStore(t, 1)), Store: newStore(t, 1), Schema: s, Collate: Pack(PackOptions{})})
	wantKind(t, err, sluice.ErrSchema)
	if err != nil && !strings.Contains(err.Error(), "tree") {
		t.Errorf("error %q does not name the feature", err)
	}
}

func TestSamplesThatDoNotFitTogetherAreRefused(t *testing.T) {
	t.Parallel()
	a := sampleOf(t, "a", []int64{0, 1}, nil, []int64{1, 2})
	wide := sampleOf(t, "b", []int64{0, 1}, func(x *sluice.Sample) {
		x.Features[0].Tensor = sluice.NewTensor(sluice.BFloat16, 1, 2, 6)
		x.Features[4].Tensor = sluice.NewTensor(sluice.BFloat16, 1, 2, 2)
	}, []int64{1, 2})
	float := sampleOf(t, "c", []int64{0, 1}, func(x *sluice.Sample) { x.Features[4].Tensor = sluice.NewTensor(sluice.Float32, 1, 2, 1) }, []int64{1, 2})
	logits := sampleOf(t, "d", []int64{0, 1}, func(x *sluice.Sample) {
		x.Features[4] = sluice.Feature{Name: "logits", Tensor: sluice.NewTensor(sluice.Float32, 1, 2, 5)}
	}, []int64{1, 2})
	truncated := sampleOf(t, "e", []int64{0, 1}, nil, []int64{1, 2})
	truncated.Features = truncated.Features[:4]
	for _, c := range []Collator{PadTo(0), Pack(PackOptions{})} {
		for _, b := range []Sample{wide, float, logits} {
			_, err := Collate(schema(t, sluice.EAGLE3), c, []Sample{a, b}, nil)
			wantKind(t, err, sluice.ErrSchema)
		}
		_, err := Collate(schema(t, sluice.EAGLE3), c, []Sample{a, truncated}, nil)
		wantKind(t, err, sluice.ErrCorrupt)
	}
	if _, err := Collate(schema(t, sluice.EAGLE3), PadTo(0), nil, nil); !errors.Is(err, sluice.ErrInvalid) {
		t.Errorf("error %v for no samples, want ErrInvalid", err)
	}
}

func TestPaddingFillsWithZerosUpToTheMultiple(t *testing.T) {
	t.Parallel()
	b := mustCollate(t, PadTo(4), sampleOf(t, "a", []int64{0, 1, 1}, nil, []int64{1, 2, 3}, []int64{4, 5, 6}), sampleOf(t, "b", []int64{0, 1, 1, 1, 1}, nil, []int64{7, 8, 9, 10, 11}))
	x, _ := b.Feature("input_ids")
	if want := []int64{3, 8}; !slices.Equal(x.Shape, want) {
		t.Errorf("shape %v, want %v", x.Shape, want)
	}
	want := []int64{2, 3, 0, 0, 0, 0, 0, 0, 5, 6, 0, 0, 0, 0, 0, 0, 8, 9, 10, 11, 0, 0, 0, 0}
	if got := ints(t, b, "input_ids"); !slices.Equal(got, want) {
		t.Errorf("input_ids %v, want %v", got, want)
	}
	want = []int64{1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0}
	if got := ints(t, b, "attention_mask"); !slices.Equal(got, want) {
		t.Errorf("attention_mask %v, want %v", got, want)
	}
	if b.Samples[1].Row != 2 {
		t.Errorf("the second sample begins in row %d, want 2", b.Samples[1].Row)
	}
}

func TestAStandInCountsNowhere(t *testing.T) {
	t.Parallel()
	for _, c := range []Collator{PadTo(0), Pack(PackOptions{})} {
		real, pad := sampleOf(t, "a", []int64{0, 1, 1}, nil, []int64{1, 2, 3}), sampleOf(t, "b", []int64{0, 1, 1}, nil, []int64{4, 5, 6})
		pad.Pad = true
		b := mustCollate(t, c, real, pad)
		if got := ints(t, b, "loss_mask"); !slices.Equal(got, []int64{1, 1, 0, 0, 0, 0}) {
			t.Errorf("loss_mask %v", got)
		}
		if b.Tokens != 3 || b.SupervisedTokens != 2 || !b.Samples[1].Pad {
			t.Errorf("%d tokens, %d supervised", b.Tokens, b.SupervisedTokens)
		}
		if mask, _ := pad.Feature("loss_mask"); sluice.View[int64](mask)[1] != 1 {
			t.Error("the sample itself was written to")
		}
	}
}

func TestAStandInAloneCountsNowhereEvenWhereNothingIsShifted(t *testing.T) {
	t.Parallel()
	x := &sluice.Sample{SampleID: "d", RunID: "r", Algorithm: sluice.DFlash, SchemaVersion: 1, Attributes: map[string]string{"shift": "0", "aux_layers": "unknown"},
		Features: []sluice.Feature{{Name: "hidden_states", Tensor: sluice.NewTensor(sluice.Float32, 1, 2, 4)}, {Name: "input_ids", Tensor: sluice.NewTensor(sluice.Int64, 1, 2)},
			{Name: "attention_mask", Tensor: sluice.NewTensor(sluice.Int64, 1, 2)}, {Name: "loss_mask", Tensor: sluice.TensorOf(sluice.Int64, []int64{0, 1}, 1, 2)}}}
	b, err := Collate(schema(t, sluice.DFlash), PadTo(0), []Sample{{Ref: refOf(t, x), Features: x.Features, Pad: true}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := ints(t, b, "loss_mask"); !slices.Equal(got, []int64{0, 0}) || b.Shift != "0" {
		t.Errorf("loss_mask %v, shift %s", got, b.Shift)
	}
}

func TestPackingRestartsPositionsAndLeaksNothing(t *testing.T) {
	t.Parallel()
	b := mustCollate(t, Pack(PackOptions{MaxTokens: 6, Multiple: 4}), sampleOf(t, "a", []int64{1, 1, 1}, nil, []int64{1, 2, 3}), sampleOf(t, "b", []int64{1, 1}, nil, []int64{4, 5}), sampleOf(t, "c", []int64{1, 1}, nil, []int64{6, 7}))
	for name, want := range map[string][]int64{
		"input_ids":      {2, 3, 0, 5, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0},
		"loss_mask":      {1, 1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0},
		"attention_mask": {1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0},
		"position_ids":   {0, 1, 2, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0},
		"doc_remaining":  {2, 1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0},
		"seq_lens":       {3, 2, 2, 0},
	} {
		if got := ints(t, b, name); !slices.Equal(got, want) {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	if s := b.Samples; s[1].Row != 0 || s[1].Column != 3 || s[2].Row != 1 || s[2].Column != 0 {
		t.Errorf("places %+v", s)
	}
	// The packing tensors pass the check that catches swapped ones.
	x := func(name string) sluice.Tensor { t, _ := b.Feature(name); return t }
	pb := sluice.PromptBatch{InputIDs: x("input_ids"), AttentionMask: x("attention_mask"), LossMask: x("loss_mask"), PositionIDs: x("position_ids"), SeqLens: x("seq_lens"), DocRemaining: x("doc_remaining")}
	if err := pb.Validate(0); err != nil {
		t.Error(err)
	}
}

func TestPackingRefusesWhatItCannotPlace(t *testing.T) {
	t.Parallel()
	long := sampleOf(t, "a", []int64{0, 1, 1}, nil, []int64{1, 2, 3})
	_, err := Collate(schema(t, sluice.EAGLE3), Pack(PackOptions{MaxTokens: 2}), []Sample{long}, nil)
	wantKind(t, err, sluice.ErrSchema)
	left := sampleOf(t, "a", []int64{0, 1, 1}, func(x *sluice.Sample) { copy(sluice.View[int64](x.Features[2].Tensor), []int64{0, 1, 1}) }, []int64{1, 2, 3})
	_, err = Collate(schema(t, sluice.EAGLE3), Pack(PackOptions{}), []Sample{left}, nil)
	wantKind(t, err, sluice.ErrSchema)
	bare, err := sluice.ParseSchema([]byte(`{"name":"x","version":1,"features":[{"name":"ids","from":"input_ids","axes":["B","S"],"dtypes":["int64"]}]}`))
	if err != nil {
		t.Fatal(err)
	}
	_, err = NewLoader(LoaderConfig{Queue: newQueue(newStore(t, 1)), Store: newStore(t, 1), Schema: bare, Collate: Pack(PackOptions{})})
	wantKind(t, err, sluice.ErrSchema)
}

func TestAPanicOfTheCollateFunctionIsAnError(t *testing.T) {
	t.Parallel()
	s := sampleOf(t, "a", []int64{0, 1}, nil, []int64{1, 2})
	_, err := Collate(schema(t, sluice.EAGLE3), CollateFunc(func([]Sample) ([]sluice.Feature, error) { panic("x") }), []Sample{s}, nil)
	wantKind(t, err, sluice.ErrInvalid)
	_, err = Collate(schema(t, sluice.EAGLE3), CollateFunc(func([]Sample) ([]sluice.Feature, error) {
		return []sluice.Feature{{Name: "x", Tensor: sluice.Tensor{Spec: sluice.Spec{DType: sluice.Bool, Shape: []int64{3}}}}}, nil
	}), []Sample{s}, nil)
	wantKind(t, err, sluice.ErrInvalid)
}

func TestACloneOutlivesItsBatch(t *testing.T) {
	t.Parallel()
	b := mustCollate(t, PadTo(0), sampleOf(t, "a", []int64{0, 1}, nil, []int64{1, 2}))
	c := b.Clone()
	for i := range b.Features {
		if !bytes.Equal(b.Features[i].Data, c.Features[i].Data) {
			t.Errorf("%s differs", b.Features[i].Name)
		}
		clear(b.Features[i].Data)
	}
	if got := ints(t, c, "input_ids"); !slices.Equal(got, []int64{2, 0}) {
		t.Errorf("the clone has %v", got)
	}
}

// Moves are by bytes: whatever the width, the padded batch is the samples' rows one behind the other, each shifted and filled up.
func TestMovesKeepEveryWidth(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		dtype := rapid.SampledFrom(sluice.DTypes()).Draw(rt, "dtype")
		shift := rapid.Bool().Draw(rt, "shift")
		width := rapid.Int64Range(1, 3).Draw(rt, "width")
		multiple := rapid.Int64Range(1, 5).Draw(rt, "multiple")
		doc := fmt.Sprintf(`{"name":"x","version":1,"features":[{"name":"f","axes":["B","S","W"],"dtypes":["%s"],"shift":%v}],"attributes":[{"name":"shift"}]}`, dtype, shift)
		s, err := sluice.ParseSchema([]byte(doc))
		if err != nil {
			rt.Fatal(err)
		}
		var samples []Sample
		var longest int64
		for i := range rapid.IntRange(1, 3).Draw(rt, "samples") {
			rows, cols := rapid.Int64Range(1, 2).Draw(rt, "rows"), rapid.Int64Range(1, 6).Draw(rt, "cols")
			x := sluice.NewTensor(dtype, rows, cols, width)
			for k := range x.Data {
				x.Data[k] = byte(1 + (i*31+k*7)%250)
			}
			sm := &sluice.Sample{SampleID: fmt.Sprint("s", i), RunID: "r", Algorithm: "x", SchemaVersion: 1, Attributes: map[string]string{"shift": "0"}, Features: []sluice.Feature{{Name: "f", Tensor: x}}}
			samples = append(samples, Sample{Ref: refOf(t, sm), Features: sm.Features})
			longest = max(longest, cols)
		}
		to := (longest + multiple - 1) / multiple * multiple
		b, err := Collate(s, PadTo(multiple), samples, nil)
		if err != nil {
			rt.Fatal(err)
		}
		var want []byte
		for _, sm := range samples {
			x := sm.Features[0]
			step := width * dtype.Size()
			for r := range x.Shape[0] {
				row := bytes.Clone(x.Data[r*x.Shape[1]*step : (r+1)*x.Shape[1]*step])
				if shift {
					row = row[step:]
				}
				want = append(want, append(row, make([]byte, to*step-int64(len(row)))...)...)
			}
		}
		if got := b.Features[0]; !bytes.Equal(got.Data, want) || got.Shape[1] != to {
			rt.Fatalf("got %v %v\nwant %v", got.Spec, got.Data, want)
		}
	})
}

func BenchmarkCollate(b *testing.B) {
	s := schema(b, sluice.EAGLE3)
	for name, c := range map[string]Collator{"pad": PadTo(64), "pack": Pack(PackOptions{})} {
		for _, n := range []int{1, 4} {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				var samples []Sample
				for i := range n {
					const tokens, hidden = 500, 1024
					ids, mask := sluice.NewTensor(sluice.Int64, 1, tokens), sluice.NewTensor(sluice.Int64, 1, tokens)
					for k := range sluice.View[int64](mask) {
						sluice.View[int64](mask)[k] = 1
					}
					x := &sluice.Sample{SampleID: fmt.Sprint("s", i), RunID: "r", Algorithm: sluice.EAGLE3, SchemaVersion: 1,
						Attributes: map[string]string{"shift": "0", "aux_layers": "hf:1,2,3", "last_norm": "post"},
						Features: []sluice.Feature{{Name: "aux_hidden_states", Tensor: sluice.NewTensor(sluice.BFloat16, 1, tokens, 3*hidden)}, {Name: "input_ids", Tensor: ids},
							{Name: "attention_mask", Tensor: mask}, {Name: "loss_mask", Tensor: mask}, {Name: "last_hidden_states", Tensor: sluice.NewTensor(sluice.BFloat16, 1, tokens, hidden)}}}
					samples = append(samples, Sample{Ref: refOf(b, x), Features: x.Features})
				}
				for b.Loop() {
					batch, err := Collate(s, c, samples, nil)
					if err != nil {
						b.Fatal(err)
					}
					b.SetBytes(batch.Bytes())
				}
			})
		}
	}
}
