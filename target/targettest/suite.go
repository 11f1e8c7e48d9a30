package targettest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"

	"github.com/sluice-ml/sluice"
)

// Harness tells the suite how to make the target and what it cannot do.
type Harness struct {
	// New returns a target that is ready for use. The suite closes it. It is called many times, so it should be cheap or share
	// what is expensive; targets that it returns are not used at the same time.
	New func(t *testing.T) sluice.Target

	// Tolerance is the largest difference, relative to the largest value of the tensor, that batching, padding and
	// packing may make. 0 asks for equal bits.
	Tolerance float64

	// Unsupported reports whether the target may answer ErrUnsupported to this want, or to a packed batch. Nil means that it
	// can do everything. The suite checks that it says so with that kind, and leaves such checks out.
	Unsupported func(want sluice.Want, packed bool) bool

	// LongestRow bounds the rows that the suite tries, for targets that are slow. 0 is 48. The target must take rows of at least 16 tokens.
	LongestRow int
}

// Run checks the target against the contract of [sluice.Target], and of [sluice.Tokenizer] if it implements that.
func Run(t *testing.T, h Harness) {
	t.Helper()
	for _, c := range []struct {
		name string
		run  func(*suite)
	}{
		{"info is complete and the same every time", (*suite).info},
		{"outputs have the shape and dtype that were asked for", (*suite).shapes},
		{"what is asked for beside an output does not change it", (*suite).wants},
		{"aux states come in the order asked for", (*suite).auxOrder},
		{"a row's first tokens do not depend on the rest", (*suite).prefix},
		{"row t is position t", (*suite).noShift},
		{"padding changes nothing", (*suite).padding},
		{"neighbours change nothing", (*suite).batch},
		{"a packed document equals the document alone", (*suite).packed},
		{"the loss mask changes nothing", (*suite).lossMask},
		{"the same call gives the same bits", (*suite).deterministic},
		{"inputs are not written to and outputs are the caller's", (*suite).ownership},
		{"bad input is refused by kind", (*suite).badInput},
		{"a context that is done stops it", (*suite).cancelled},
		{"forwards may overlap if it says so", (*suite).concurrent},
		{"close is idempotent and final", (*suite).closing},
		{"a tokeniser's ids are the model's", (*suite).tokenizer},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &suite{T: t, h: h, target: h.New(t)}
			defer func() {
				if err := s.target.Close(); err != nil {
					t.Errorf("Close: %v", err)
				}
			}()
			s.about = s.target.Info()
			s.longest = int(min(int64(max(h.LongestRow, 16)), s.about.MaxTokens))
			if h.LongestRow == 0 {
				s.longest = int(min(48, s.about.MaxTokens))
			}
			if s.longest < 16 || s.about.VocabSize < 4 {
				t.Fatalf("the target takes rows of %d tokens of %d ids; the suite needs at least 16 of 4", s.about.MaxTokens, s.about.VocabSize)
			}
			c.run(s)
		})
	}
}

type suite struct {
	*testing.T
	h       Harness
	target  sluice.Target
	about   sluice.TargetInfo
	longest int
}

// row makes ids that look random and are the same every time.
func (s *suite) row(seed, n int) []int64 {
	ids := make([]int64, n)
	for i := range ids {
		ids[i] = int64(mix(uint64(seed), uint64(i)) % uint64(s.about.VocabSize))
	}
	return ids
}

// Batch makes a batch of rows of different lengths, padded at the right to cols, or to the longest if cols is 0. All tokens supervise. Padding has id 0.
func Batch(cols int, rows ...[]int64) *sluice.PromptBatch {
	for _, r := range rows {
		cols = max(cols, len(r))
	}
	ids, mask := make([]int64, len(rows)*cols), make([]int64, len(rows)*cols)
	for i, r := range rows {
		copy(ids[i*cols:], r)
		for j := range r {
			mask[i*cols+j] = 1
		}
	}
	shape := []int64{int64(len(rows)), int64(cols)}
	return &sluice.PromptBatch{
		InputIDs:      sluice.TensorOf(sluice.Int64, ids, shape...),
		AttentionMask: sluice.TensorOf(sluice.Int64, mask, shape...),
		LossMask:      sluice.TensorOf(sluice.Int64, mask, shape...),
	}
}

// Pack makes a batch with several documents in each row, padded at the right to cols, or to the longest row if cols is 0.
func Pack(cols int, rows ...[][]int64) *sluice.PromptBatch {
	joined := make([][]int64, len(rows))
	docs := 1
	for i, r := range rows {
		joined[i] = slices.Concat(r...)
		docs = max(docs, len(r))
	}
	b := Batch(cols, joined...)
	n := b.InputIDs.Shape[1]
	b.PositionIDs = sluice.NewTensor(sluice.Int64, b.InputIDs.Shape...)
	b.DocRemaining = sluice.NewTensor(sluice.Int64, b.InputIDs.Shape...)
	b.SeqLens = sluice.NewTensor(sluice.Int64, b.InputIDs.Shape[0], int64(docs))
	pos, rem, lens := sluice.View[int64](b.PositionIDs), sluice.View[int64](b.DocRemaining), sluice.View[int64](b.SeqLens)
	for i, r := range rows {
		at := int64(i) * n
		for d, doc := range r {
			lens[i*docs+d] = int64(len(doc))
			for j := range doc {
				pos[at], rem[at] = int64(j), int64(len(doc)-1-j)
				at++
			}
		}
	}
	return b
}

// everything is all that can be asked for at once: all layers in the order of the model.
func (s *suite) everything(last sluice.Norm) sluice.Want {
	w := sluice.Want{Last: last, Logits: true}
	for l := -1; l < s.about.Layers; l++ {
		w.AuxLayers = append(w.AuxLayers, l)
	}
	return w
}

func (s *suite) unsupported(w sluice.Want, packed bool) bool {
	return s.h.Unsupported != nil && s.h.Unsupported(w, packed)
}

// want is the largest want that the target supports for the batch; it skips the check if there is none.
func (s *suite) want(packed bool) sluice.Want {
	s.Helper()
	for _, w := range []sluice.Want{s.everything(sluice.PostNorm), s.everything(sluice.PreNorm)} {
		for _, v := range []sluice.Want{w, {AuxLayers: w.AuxLayers, Last: w.Last}, {AuxLayers: w.AuxLayers}, {AuxLayers: []int{0}}, {Last: w.Last}, {Logits: true}} {
			if !s.unsupported(v, packed) {
				return v
			}
		}
	}
	s.Skip("the harness says that the target supports nothing of this")
	return sluice.Want{}
}

// forward runs the target and checks that the outputs have their form and finite values.
func (s *suite) forward(b *sluice.PromptBatch, w sluice.Want) *sluice.TargetOutput {
	s.Helper()
	out, err := s.target.Forward(s.Context(), b, w)
	if err != nil {
		s.Fatalf("Forward(%s, %+v): %v", b.InputIDs.Spec, w, err)
	}
	if problem := s.malformed(out, b, w); problem != "" {
		s.Fatalf("Forward(%s, %+v): %s", b.InputIDs.Spec, w, problem)
	}
	return out
}

func (s *suite) malformed(out *sluice.TargetOutput, b *sluice.PromptBatch, w sluice.Want) string {
	if out == nil {
		return "no output and no error"
	}
	check := func(name string, t sluice.Tensor, asked bool, dtype sluice.DType, width int64) string {
		if !asked {
			if t.DType.Valid() || t.Data != nil || t.Shape != nil {
				return fmt.Sprintf("%s is %s, want a zero tensor, since it was not asked for", name, t.Spec)
			}
			return ""
		}
		want := sluice.Spec{DType: dtype, Shape: []int64{b.InputIDs.Shape[0], b.InputIDs.Shape[1], width}}
		if !t.Equal(want) {
			return fmt.Sprintf("%s is %s, want %s", name, t.Spec, want)
		}
		if err := t.Validate(); err != nil {
			return fmt.Sprintf("%s: %v", name, err)
		}
		for i, v := range floats(t) {
			if math.IsNaN(v) || math.IsInf(v, 0) {
				return fmt.Sprintf("%s has %v at element %d; values must be finite, on padding too", name, v, i)
			}
		}
		return ""
	}
	h, v := s.about.HiddenSize, s.about.VocabSize
	for _, problem := range []string{
		check("aux", out.Aux, len(w.AuxLayers) > 0, s.about.DType, int64(len(w.AuxLayers))*h),
		check("last", out.Last, w.Last != sluice.NoLast, s.about.DType, h),
		check("logits", out.Logits, w.Logits, sluice.Float32, v),
	} {
		if problem != "" {
			return problem
		}
	}
	return ""
}

// floats widens the values of a tensor of a type that hidden states come in.
func floats(t sluice.Tensor) []float64 {
	values := make([]float64, t.Elements())
	switch t.DType {
	case sluice.Float64:
		copy(values, sluice.View[float64](t))
	case sluice.Float32:
		for i, v := range sluice.View[float32](t) {
			values[i] = float64(v)
		}
	case sluice.BFloat16:
		for i, v := range sluice.View[uint16](t) {
			values[i] = float64(math.Float32frombits(uint32(v) << 16))
		}
	case sluice.Float16:
		for i, v := range sluice.View[uint16](t) {
			values[i] = half(v)
		}
	default:
		panic("targettest: hidden states of dtype " + t.DType.String())
	}
	return values
}

func half(b uint16) float64 {
	v := math.Ldexp(float64(b&0x3ff|0x400), int(b>>10&0x1f)-25)
	switch b >> 10 & 0x1f {
	case 0:
		v = math.Ldexp(float64(b&0x3ff), -24)
	case 0x1f:
		v = math.Inf(1)
		if b&0x3ff != 0 {
			v = math.NaN()
		}
	}
	if b>>15 != 0 {
		return -v
	}
	return v
}

// tokens cuts n tokens of a row, from the given one on, out of a [B,S,W] tensor.
func tokens(t sluice.Tensor, row, from, n int) sluice.Tensor {
	if !t.DType.Valid() {
		return t
	}
	width := t.Shape[2] * t.DType.Size()
	start := (int64(row)*t.Shape[1] + int64(from)) * width
	out := sluice.NewTensor(t.DType, 1, int64(n), t.Shape[2])
	copy(out.Data, t.Data[start:start+int64(n)*width])
	return out
}

// same compares n tokens of one output, from the given one on, with the first n of another.
func (s *suite) same(what string, a *sluice.TargetOutput, rowA, from int, b *sluice.TargetOutput, rowB, n int, tolerance float64) {
	s.Helper()
	for _, p := range []struct {
		name string
		a, b sluice.Tensor
	}{{"aux", a.Aux, b.Aux}, {"last", a.Last, b.Last}, {"logits", a.Logits, b.Logits}} {
		if d := difference(tokens(p.a, rowA, from, n), tokens(p.b, rowB, 0, n)); d > tolerance || math.IsNaN(d) {
			s.Errorf("%s: %s differs by %.3g of its largest value, at most %.3g is allowed", what, p.name, d, tolerance)
		}
	}
}

// difference is max|a-b| / max|b|. Equal bits are 0; where anything differs, it is more.
func difference(a, b sluice.Tensor) float64 {
	if slices.Equal(a.Data, b.Data) {
		return 0
	}
	va, vb := floats(a), floats(b)
	most, scale := 0.0, 0.0
	for i := range va {
		most, scale = max(most, math.Abs(va[i]-vb[i])), max(scale, math.Abs(vb[i]))
	}
	return max(most, math.SmallestNonzeroFloat64) / max(scale, math.SmallestNonzeroFloat64)
}

func (s *suite) info() {
	i := s.about
	switch {
	case i.Name == "":
		s.Error("Name is empty")
	case i.Fingerprint == "":
		s.Error("Fingerprint is empty")
	case i.Layers < 1 || i.HiddenSize < 1 || i.VocabSize < 1 || i.MaxTokens < 1:
		s.Errorf("sizes must be positive: %+v", i)
	case !i.DType.Float():
		s.Errorf("DType is %s, want a float", i.DType)
	}
	s.forward(Batch(0, s.row(1, 4)), s.want(false))
	if again := s.target.Info(); again != i {
		s.Errorf("Info is %+v after a forward, was %+v", again, i)
	}
	other := s.h.New(s.T)
	defer func() { _ = other.Close() }() // checked elsewhere
	if again := other.Info(); again != i {
		s.Errorf("Info of a second target of the same weights is %+v, want %+v", again, i)
	}
}

func (s *suite) shapes() {
	n := s.about.Layers
	rows := Batch(0, s.row(1, 5), s.row(2, 9), s.row(3, 1))
	for _, w := range []sluice.Want{
		{},
		{AuxLayers: []int{-1}}, {AuxLayers: []int{0}}, {AuxLayers: []int{n - 1}}, {AuxLayers: []int{n - 1, -1}},
		{Last: sluice.PreNorm}, {Last: sluice.PostNorm}, {Logits: true},
		{AuxLayers: []int{0}, Last: sluice.PostNorm}, {AuxLayers: []int{0}, Last: sluice.PreNorm, Logits: true}, {Last: sluice.PostNorm, Logits: true},
		s.everything(sluice.PreNorm), s.everything(sluice.PostNorm),
	} {
		if s.unsupported(w, false) {
			if _, err := s.target.Forward(s.Context(), rows, w); !errors.Is(err, sluice.ErrUnsupported) {
				s.Errorf("Forward(%+v): %v, want ErrUnsupported as the harness says", w, err)
			}
			continue
		}
		s.forward(rows, w)
		s.forward(Batch(0, s.row(4, 1)), w)
		s.forward(Batch(0, s.row(5, s.longest)), w)
	}
}

func (s *suite) wants() {
	b, n := Batch(0, s.row(1, 7), s.row(2, 5)), s.about.Layers
	for _, w := range []sluice.Want{
		{AuxLayers: []int{0}}, {AuxLayers: []int{n - 1}}, {Last: sluice.PreNorm}, {Last: sluice.PostNorm}, {Logits: true}, {Last: sluice.PreNorm, Logits: true},
	} {
		full := s.everything(w.Last)
		if s.unsupported(w, false) || s.unsupported(full, false) {
			continue
		}
		part, all := s.forward(b, w), s.forward(b, full)
		if len(w.AuxLayers) > 0 {
			all.Aux = s.auxSlot(all.Aux, n+1, w.AuxLayers[0]+1)
		} else {
			all.Aux = sluice.Tensor{}
		}
		if w.Last == sluice.NoLast {
			all.Last = sluice.Tensor{}
		}
		if !w.Logits {
			all.Logits = sluice.Tensor{}
		}
		for r, n := range []int{7, 5} {
			s.same(fmt.Sprintf("%+v, row %d", w, r), part, r, 0, all, r, n, s.h.Tolerance)
		}
	}
	pre, post := sluice.Want{Last: sluice.PreNorm}, sluice.Want{Last: sluice.PostNorm}
	if s.unsupported(pre, false) || s.unsupported(post, false) {
		return
	}
	if difference(s.forward(b, pre).Last, s.forward(b, post).Last) < 1e-3 {
		s.Error("the last hidden state is the same before and after the norm")
	}
}

// auxSlot cuts one of k layers out of concatenated states.
func (s *suite) auxSlot(aux sluice.Tensor, k, slot int) sluice.Tensor {
	h := aux.Shape[2] / int64(k) * aux.DType.Size()
	out := sluice.NewTensor(aux.DType, aux.Shape[0], aux.Shape[1], aux.Shape[2]/int64(k))
	for t := range aux.Shape[0] * aux.Shape[1] {
		copy(out.Data[t*h:(t+1)*h], aux.Data[(t*int64(k)+int64(slot))*h:])
	}
	return out
}

func (s *suite) auxOrder() {
	n := s.about.Layers
	layers := []int{n - 1, -1, n / 2}
	if s.unsupported(sluice.Want{AuxLayers: layers}, false) {
		s.Skip("the harness says that the target does not support it")
	}
	b := Batch(0, s.row(1, 6), s.row(2, 6))
	together := s.forward(b, sluice.Want{AuxLayers: layers}).Aux
	for slot, l := range layers {
		alone := s.forward(b, sluice.Want{AuxLayers: []int{l}}).Aux
		if d := difference(s.auxSlot(together, len(layers), slot), alone); d > s.h.Tolerance {
			s.Errorf("slot %d of %v is not layer %d: it differs by %.3g of its largest value", slot, layers, l, d)
		}
		for other, m := range layers[:slot] {
			if l != m && difference(s.auxSlot(together, len(layers), other), alone) < 1e-3 {
				s.Errorf("layers %d and %d are the same", l, m)
			}
		}
	}
}

func (s *suite) prefix() {
	w := s.want(false)
	row := s.row(1, s.longest)
	whole := s.forward(Batch(0, row), w)
	for _, n := range []int{1, 2, 3, s.longest / 2, s.longest - 1} {
		s.same(fmt.Sprintf("first %d of %d tokens", n, len(row)), s.forward(Batch(0, row[:n]), w), 0, 0, whole, 0, n, s.h.Tolerance)
	}
}

// noShift changes one token: outputs before it must stay, the output at it must change.
func (s *suite) noShift() {
	w := s.want(false)
	row := s.row(1, 12)
	before := s.forward(Batch(0, row), w)
	for _, at := range []int{0, 5, 11} {
		changed := slices.Clone(row)
		changed[at] = (changed[at] + 1) % s.about.VocabSize
		after := s.forward(Batch(0, changed), w)
		s.same(fmt.Sprintf("tokens before %d, which changed", at), after, 0, 0, before, 0, at, s.h.Tolerance)
		for _, p := range []struct {
			name string
			a, b sluice.Tensor
		}{{"aux", after.Aux, before.Aux}, {"last", after.Last, before.Last}, {"logits", after.Logits, before.Logits}} {
			if p.a.DType.Valid() && difference(tokens(p.a, 0, at, 1), tokens(p.b, 0, at, 1)) == 0 {
				s.Errorf("token %d changed, but %s at that position did not; are rows shifted?", at, p.name)
			}
		}
	}
}

func (s *suite) padding() {
	w := s.want(false)
	row := s.row(1, s.longest/2)
	alone := s.forward(Batch(0, row), w)
	for _, cols := range []int{len(row) + 1, len(row) + 3, s.longest} {
		b := Batch(cols, row)
		what := fmt.Sprintf("%d tokens padded to %d", len(row), cols)
		s.same(what, s.forward(b, w), 0, 0, alone, 0, len(row), s.h.Tolerance)
		// The ids below the padding mean nothing.
		for i := len(row); i < cols; i++ {
			sluice.View[int64](b.InputIDs)[i] = s.about.VocabSize - 1
		}
		s.same(what+" with other ids there", s.forward(b, w), 0, 0, alone, 0, len(row), s.h.Tolerance)
	}
	// A row of padding only has no values that mean anything, but must not harm its neighbours.
	s.same("beside an empty row", s.forward(Batch(0, nil, row), w), 1, 0, alone, 0, len(row), s.h.Tolerance)
}

func (s *suite) batch() {
	w := s.want(false)
	rows := [][]int64{s.row(1, 3), s.row(2, s.longest), s.row(3, s.longest/2+1), s.row(1, 3), s.row(4, 1)}
	together := s.forward(Batch(0, rows...), w)
	for i, r := range rows {
		s.same(fmt.Sprintf("row %d of %d", i, len(rows)), together, i, 0, s.forward(Batch(0, r), w), 0, len(r), s.h.Tolerance)
	}
}

func (s *suite) packed() {
	if s.unsupported(s.everything(sluice.PostNorm), true) && s.unsupported(sluice.Want{AuxLayers: []int{0}}, true) {
		if _, err := s.target.Forward(s.Context(), Pack(0, [][]int64{s.row(1, 3)}), s.want(false)); !errors.Is(err, sluice.ErrUnsupported) {
			s.Errorf("a packed batch: %v, want ErrUnsupported as the harness says", err)
		}
		return
	}
	w := s.want(true)
	rows := [][][]int64{
		{s.row(1, 5), s.row(2, s.longest-9), s.row(3, 1), s.row(1, 3)},
		{s.row(4, 7)},
		{s.row(5, 1), s.row(5, 1)},
	}
	together := s.forward(Pack(s.longest, rows...), w)
	for i, docs := range rows {
		at := 0
		for d, doc := range docs {
			s.same(fmt.Sprintf("row %d, document %d", i, d), together, i, at, s.forward(Batch(0, doc), w), 0, len(doc), s.h.Tolerance)
			at += len(doc)
		}
	}
}

func (s *suite) lossMask() {
	w := s.want(false)
	b := Batch(0, s.row(1, 8))
	all := s.forward(b, w)
	clear(b.LossMask.Data)
	s.same("without supervision", s.forward(b, w), 0, 0, all, 0, 8, s.h.Tolerance)
}

func (s *suite) deterministic() {
	w := s.want(false)
	b := Batch(0, s.row(1, s.longest), s.row(2, 3))
	first := s.forward(b, w)
	for range 3 {
		again := s.forward(b, w)
		for r, n := range []int{s.longest, 3} {
			s.same("the same call again", again, r, 0, first, r, n, s.h.Tolerance)
		}
	}
}

func (s *suite) ownership() {
	w := s.want(false)
	b := Batch(10, s.row(1, 8))
	ids, mask := slices.Clone(b.InputIDs.Data), slices.Clone(b.AttentionMask.Data)
	first := s.forward(b, w)
	kept := &sluice.TargetOutput{Aux: tokens(first.Aux, 0, 0, 8), Last: tokens(first.Last, 0, 0, 8), Logits: tokens(first.Logits, 0, 0, 8)}
	if !slices.Equal(ids, b.InputIDs.Data) || !slices.Equal(mask, b.AttentionMask.Data) {
		s.Error("Forward wrote to its input")
	}
	other := s.forward(Batch(0, s.row(2, 8)), w)
	clear(b.InputIDs.Data)
	s.same("after another forward and a change of the input", first, 0, 0, kept, 0, 8, 0)
	for _, t := range []sluice.Tensor{first.Aux, first.Last, first.Logits, other.Aux, other.Last, other.Logits} {
		for i := range t.Data {
			t.Data[i] = 0x55
		}
	}
	s.same("after the caller wrote to its outputs", s.forward(Batch(0, s.row(1, 8)), w), 0, 0, kept, 0, 8, s.h.Tolerance)
}

func (s *suite) badInput() {
	w, v := s.want(false), s.about.VocabSize
	good := func() *sluice.PromptBatch { return Batch(8, s.row(1, 6), s.row(2, 8)) }
	ids := func(b *sluice.PromptBatch) []int64 { return sluice.View[int64](b.InputIDs) }
	attended := func(b *sluice.PromptBatch) []int64 { return sluice.View[int64](b.AttentionMask) }
	type bad struct {
		name  string
		batch *sluice.PromptBatch
		want  sluice.Want
	}
	with := func(name string, change func(*sluice.PromptBatch)) bad {
		b := good()
		change(b)
		return bad{name, b, w}
	}
	cases := []bad{
		{"no batch", nil, w},
		{"an empty batch", &sluice.PromptBatch{}, w},
		with("an id of the vocabulary's size", func(b *sluice.PromptBatch) { ids(b)[3] = v }),
		with("a negative id", func(b *sluice.PromptBatch) { ids(b)[0] = -1 }),
		with("a mask of 2", func(b *sluice.PromptBatch) { attended(b)[1] = 2 }),
		with("padding at the left", func(b *sluice.PromptBatch) { attended(b)[0] = 0; sluice.View[int64](b.LossMask)[0] = 0 }),
		with("ids of another dtype", func(b *sluice.PromptBatch) { b.InputIDs = sluice.NewTensor(sluice.Int32, 2, 8) }),
		with("a mask of another shape", func(b *sluice.PromptBatch) { b.AttentionMask = sluice.NewTensor(sluice.Int64, 2, 7) }),
		with("position ids alone", func(b *sluice.PromptBatch) { b.PositionIDs = sluice.NewTensor(sluice.Int64, 2, 8) }),
		{"a layer above the last", good(), sluice.Want{AuxLayers: []int{s.about.Layers}}},
		{"layer -2", good(), sluice.Want{AuxLayers: []int{-2}}},
		{"an unknown norm", good(), sluice.Want{Last: "mid"}},
	}
	if s.about.MaxTokens <= 1<<16 {
		cases = append(cases, bad{"a row that is too long", Batch(0, s.row(1, int(s.about.MaxTokens)+1)), w})
	}
	swapped := Pack(8, [][]int64{s.row(1, 3), s.row(2, 4)})
	swapped.PositionIDs, swapped.DocRemaining = swapped.DocRemaining, swapped.PositionIDs
	if !s.unsupported(w, true) {
		cases = append(cases, bad{"swapped packing fields", swapped, w})
	}
	for _, c := range cases {
		out, err := s.target.Forward(s.Context(), c.batch, c.want)
		if !errors.Is(err, sluice.ErrInvalid) {
			s.Errorf("%s: %v, want ErrInvalid", c.name, err)
		}
		if out != nil {
			s.Errorf("%s: an output beside the error", c.name)
		}
	}
	s.forward(good(), w) // it still works
}

func (s *suite) cancelled() {
	w := s.want(false)
	ctx, cancel := context.WithCancel(s.Context())
	cancel()
	if out, err := s.target.Forward(ctx, Batch(0, s.row(1, 8)), w); !errors.Is(err, context.Canceled) || out != nil {
		s.Errorf("with a cancelled context: output %v, error %v, want context.Canceled", out != nil, err)
	}
	s.forward(Batch(0, s.row(1, 8)), w)
}

func (s *suite) concurrent() {
	if !s.about.Concurrent {
		s.Skip("the target does not claim it")
	}
	w := s.want(false)
	rows := make([][]int64, 8)
	alone := make([]*sluice.TargetOutput, len(rows))
	for i := range rows {
		rows[i] = s.row(i, 3+i)
		alone[i] = s.forward(Batch(0, rows[i]), w)
	}
	together, errs := make([]*sluice.TargetOutput, len(rows)), make([]error, len(rows))
	var wg sync.WaitGroup
	for i := range rows {
		wg.Go(func() { together[i], errs[i] = s.target.Forward(s.Context(), Batch(0, rows[i]), w) })
	}
	wg.Wait()
	for i := range rows {
		if errs[i] != nil {
			s.Errorf("forward %d: %v", i, errs[i])
			continue
		}
		s.same(fmt.Sprintf("forward %d among others", i), together[i], 0, 0, alone[i], 0, len(rows[i]), s.h.Tolerance)
	}
}

func (s *suite) closing() {
	target := s.h.New(s.T)
	for range 2 {
		if err := target.Close(); err != nil {
			s.Errorf("Close: %v", err)
		}
	}
	if _, err := target.Forward(s.Context(), Batch(0, s.row(1, 4)), s.want(false)); !errors.Is(err, sluice.ErrClosed) {
		s.Errorf("Forward after Close: %v, want ErrClosed", err)
	}
	if i := target.Info(); i != s.about {
		s.Errorf("Info after Close is %+v, want %+v", i, s.about)
	}
}

func (s *suite) tokenizer() {
	tok, ok := s.target.(sluice.Tokenizer)
	if !ok {
		s.Skip("the target does not tokenise")
	}
	talk := []sluice.Message{{Role: "user", Content: "What is 2 + 2?"}, {Role: "assistant", Content: "4."}}
	ids, mask, err := tok.Encode(talk)
	if s.about.Tokenizer == "" {
		if !errors.Is(err, sluice.ErrUnsupported) {
			s.Errorf("Encode without a tokenizer fingerprint: %v, want ErrUnsupported", err)
		}
		return
	}
	if err != nil {
		s.Fatalf("Encode: %v", err)
	}
	if len(ids) == 0 || len(ids) != len(mask) {
		s.Fatalf("Encode gives %d ids and %d mask values", len(ids), len(mask))
	}
	supervised := 0
	for i := range ids {
		if ids[i] < 0 || ids[i] >= s.about.VocabSize {
			s.Errorf("id %d at %d is outside the vocabulary of %d", ids[i], i, s.about.VocabSize)
		}
		if mask[i] != 0 && mask[i] != 1 {
			s.Errorf("mask %d at %d, want 0 or 1", mask[i], i)
		}
		supervised += int(mask[i])
	}
	if supervised == 0 || supervised == len(ids) {
		s.Errorf("the mask supervises %d of %d tokens, want the assistant's only", supervised, len(ids))
	}
	if _, m, err := tok.Encode(talk[:1]); err != nil || slices.Contains(m, 1) {
		s.Errorf("Encode of a user's turn: mask %v, error %v, want no supervision", m, err)
	}
	for name, talk := range map[string][]sluice.Message{
		"no turns":        {},
		"an unknown role": {{Role: "narrator", Content: "x"}},
		"invalid UTF-8":   {{Role: "user", Content: "\xff"}},
	} {
		if _, _, err := tok.Encode(talk); !errors.Is(err, sluice.ErrInvalid) {
			s.Errorf("Encode of %s: %v, want ErrInvalid", name, err)
		}
	}
}
