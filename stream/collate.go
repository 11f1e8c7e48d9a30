package stream

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-ml/sluice"
)

// Sample is one sample as [Collate] takes it.
type Sample struct {
	Ref      sluice.Ref
	Features []sluice.Feature // all of the ref, in its order
	// Pad says that the sample stands in for another one: its rows are in the batch, but their loss_mask and position_mask are 0 and they count nowhere.
	Pad bool
	// Shift is how the features are aligned: "0" or "1", or empty for what the ref says. A [CollateFunc] gets samples that say "1" where the batch is shifted;
	// handing them to Collate again is an error.
	Shift string
	// LastNorm is the norm state of the last hidden state as it is in Features, or empty for what the ref says. A [CollateFunc] gets samples that say "post" where they were normed,
	// so that nothing norms them again.
	LastNorm sluice.Norm
}

// Feature returns the tensor with the given name.
func (s *Sample) Feature(name string) (sluice.Tensor, bool) {
	return sluice.FindFeature(s.Features, name)
}

// Collator joins samples to a batch: [PadTo], [Pack] or [CollateFunc].
type Collator interface {
	// check refuses a schema of which it can't join n samples, whatever they are.
	check(s *sluice.Schema, n int) error
	join(s *sluice.Schema, items []*item) (*joined, error)
}

// joined is what a collator made.
type joined struct {
	features []sluice.Feature
	places   [][2]int64 // row and column where each item begins
	lengths  [][]int64  // of each item: how many tokens of its rows are in the batch; nil is all of them
	aliases  bool       // whether a feature shares memory with an item
}

// PadTo joins samples along the batch axis and pads every feature at the right end of S with zeros, to the longest sample, rounded up to a multiple (of 1 if it is 0).
// All samples must have the same features. One sample that needs neither shift nor padding is handed on without a copy. The schema must have a feature with the axes [B,S,...], and for
// batches of more than one sample a B in front of every required feature.
func PadTo(multiple int64) Collator { return padTo{multiple} }

// PackOptions bound the rows that [Pack] makes.
type PackOptions struct {
	MaxTokens int64 // real tokens a row at most; all samples go into one row if 0
	Multiple  int64 // rows are padded to a multiple of this; 1 if 0
}

// Pack puts the real tokens of several samples into one row, in order, and opens another row where MaxTokens would be exceeded. position_ids restart with every document, seq_lens
// lists the documents, filled up with zeros, and doc_remaining counts the real tokens that a document still has behind each one. Each row of a sample
// is shifted by itself before it is packed. The schema must have the packing features; samples may be packed already.
func Pack(o PackOptions) Collator { return pack{o.MaxTokens, o.Multiple} }

// CollateFunc joins samples by a function. Their features are shifted already, so nothing is left to do wrong; they may be changed, and end with the batch. It takes any schema.
func CollateFunc(f func(samples []Sample) ([]sluice.Feature, error)) Collator { return collateFunc{f} }

// itemError says which sample of a batch is at fault.
type itemError struct {
	index int
	err   error
}

func (e *itemError) Error() string { return e.err.Error() }
func (e *itemError) Unwrap() error { return e.err }

// CollateOptions tune [Collate].
type CollateOptions struct {
	// FinalNorm norms last hidden states that the schema wants post-norm, of samples that say that theirs are pre-norm. Without it such samples are refused.
	FinalNorm *FinalNorm
}

// Collate makes one batch of samples of one schema. It is where shifting, norm, the check of alignment and norm, padding and packing happen, and the only place. The
// batch may share memory with the samples. opts may be nil.
//
// Errors: ErrSchema where a ref breaks the schema, where samples disagree in what must not be mixed (target or tokenizer fingerprint, and
// every attribute that the schema names: layers, norm), where their features don't fit together, or where one would be shifted twice; ErrCorrupt where features differ from their ref.
func Collate(schema *sluice.Schema, c Collator, samples []Sample, opts *CollateOptions) (*Batch, error) {
	if schema == nil || c == nil || len(samples) == 0 {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: "stream: collate", Detail: "wants a schema, a collator and at least one sample"}
	}
	if err := c.check(schema, len(samples)); err != nil {
		return nil, err
	}
	if opts == nil {
		opts = &CollateOptions{}
	}
	norm, err := opts.FinalNorm.prepare("stream: collate")
	if err != nil {
		return nil, err
	}
	items := make([]*item, len(samples))
	var id identity
	for i := range samples {
		it, err := newItem(schema, norm, &samples[i])
		if err == nil {
			err = id.check(schema, samples[i].Ref)
		}
		if err != nil {
			return nil, &itemError{i, err}
		}
		id.adopt(schema, samples[i].Ref)
		items[i] = it
	}
	return collate(schema, c, norm, items)
}

func collate(schema *sluice.Schema, c Collator, norm *rmsNorm, items []*item) (*Batch, error) {
	for i, it := range items {
		ready, err := it.normed(norm)
		if err != nil {
			return nil, &itemError{i, err}
		}
		if ready != it {
			items = slices.Clone(items)
			items[i] = ready
		}
	}
	j, err := c.join(schema, items)
	if err != nil {
		return nil, err
	}
	b := &Batch{Features: j.features, Shift: "0", LastNorm: items[0].lastNorm, aliases: j.aliases}
	if shifts(schema) {
		b.Shift = "1"
	}
	for i, it := range items {
		s := BatchSample{Ref: it.s.Ref, Pad: it.s.Pad}
		if i < len(j.places) {
			s.Row, s.Column = j.places[i][0], j.places[i][1]
		}
		b.Samples = append(b.Samples, s)
		if it.lastNorm != b.LastNorm {
			b.LastNorm = sluice.NoLast
		}
		if !it.s.Pad {
			var lengths []int64
			if j.lengths != nil {
				lengths = j.lengths[i]
			}
			b.Tokens += it.s.Ref.NumTokens()
			b.SupervisedTokens += it.supervised(schema, lengths)
		}
	}
	return b, nil
}

// shifts reports whether batches of the schema are shifted.
func shifts(s *sluice.Schema) bool {
	return slices.ContainsFunc(s.Features, func(f sluice.SchemaFeature) bool { return f.Shift })
}

// ofOneSample are attributes that differ from sample to sample, whatever the schema says of them.
var ofOneSample = []string{"shift", "source", "ids", "supervised_tokens", "row_lengths"}

// identity is what samples that are trained on together have in common.
type identity struct {
	version string // target_model_version of the sample that was adopted last
	values  map[string]string
	from    map[string]string // the sample that said so first
}

func identifying(schema *sluice.Schema) []string {
	names := []string{"target", "tokenizer"}
	for i := range schema.Attributes {
		if n := schema.Attributes[i].Name; !slices.Contains(ofOneSample, n) && !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	return names
}

// check compares a ref with what came before.
func (id *identity) check(schema *sluice.Schema, r sluice.Ref) error {
	for _, n := range identifying(schema) {
		v, ok := r.Attribute(n)
		if !ok {
			continue
		}
		if have, ok := id.values[n]; ok && have != v {
			return &sluice.Error{Kind: sluice.SchemaError, Op: "stream: collate", Subject: r.SampleID(), Detail: fmt.Sprintf("attribute %q is %q, but sample %q says %q; they must not be mixed", n, v, id.from[n], have)}
		}
	}
	return nil
}

// adopt adds what a ref says that was checked.
func (id *identity) adopt(schema *sluice.Schema, r sluice.Ref) {
	if id.values == nil {
		id.values, id.from = map[string]string{}, map[string]string{}
	}
	id.version = r.TargetModelVersion()
	for _, n := range identifying(schema) {
		if v, ok := r.Attribute(n); ok && id.from[n] == "" {
			id.values[n], id.from[n] = v, r.SampleID()
		}
	}
}

// item is a sample that was checked, with what collation needs to know of it.
type item struct {
	s          *Sample
	shift      bool // whether flagged features still have to move
	rows, cols int64
	docs       [][]int64 // of each row, where it is packed: lengths
	lastNorm   sluice.Norm
	toNorm     int // the feature that is still to be normed, or -1
}

func newItem(schema *sluice.Schema, norm *rmsNorm, s *Sample) (*item, error) {
	bad := func(format string, args ...any) error {
		return &sluice.Error{Kind: sluice.SchemaError, Op: "stream: collate", Subject: s.Ref.SampleID(), Detail: fmt.Sprintf(format, args...)}
	}
	if err := schema.Validate(s.Ref); err != nil {
		return nil, err
	}
	if err := s.Ref.CheckFeatures("stream: collate", s.Features); err != nil {
		return nil, err
	}
	it := &item{s: s, toNorm: -1}
	said, ok := s.Ref.Attribute("shift")
	if !ok && (!shifts(schema) || !slices.ContainsFunc(schema.Attributes, func(a sluice.AttributeRule) bool { return a.Name == "shift" })) {
		said = "0" // nothing is shifted, or the schema does not speak of it
	}
	if said != "0" && said != "1" {
		return nil, bad("attribute \"shift\" is %q, want \"0\" or \"1\"", said)
	}
	switch {
	case said == "1" && !shifts(schema):
		return nil, bad("says shift 1, but batches of %s are not shifted", schema.Name)
	case s.Shift != "" && s.Shift != said:
		return nil, bad("says shift %s, and its features were shifted since; a second shift would misalign them", said)
	}
	it.shift = said == "0" && shifts(schema)
	if err := it.readNorm(schema, norm, bad); err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(schema.Features, inRows) {
		return it, nil // for a CollateFunc; the others have refused the schema
	}
	for i := range s.Features {
		if inRows(*schema.Feature(s.Features[i].Name)) {
			it.rows, it.cols = s.Features[i].Shape[0], s.Features[i].Shape[1]
			break
		}
	}
	if it.rows == 0 || it.cols == 0 {
		return nil, bad("has no feature with the axes [B,S,...], or an empty one")
	}
	return it, it.readDocs(schema, bad)
}

// inRows reports whether the feature has rows of a sequence.
func inRows(f sluice.SchemaFeature) bool {
	return len(f.Axes) > 1 && f.Axes[0] == "B" && f.Axes[1] == "S"
}

// readNorm compares the norm state that the sample speaks of with the one that the schema gives the feature: the head, or the loss, would be fed with the wrong states
// otherwise. A pre-norm state can be normed; nothing else can be mended. A sample that has both states can't say which one it speaks of.
func (it *item) readNorm(schema *sluice.Schema, norm *rmsNorm, bad func(string, ...any) error) error {
	said := it.s.LastNorm
	if v, ok := it.s.Ref.Attribute("last_norm"); ok && said == sluice.NoLast {
		said = sluice.Norm(v)
	}
	if said == sluice.NoLast {
		return nil
	}
	var last, aux *sluice.SchemaFeature
	at := -1
	for i := range it.s.Features {
		switch f := schema.Feature(it.s.Features[i].Name); {
		case f.From == sluice.RoleLast && last != nil:
			return nil
		case f.From == sluice.RoleLast:
			last, at = f, i
		case f.From == sluice.RoleAux && f.FinalLayerNorm == sluice.PostNorm:
			aux = f
		}
	}
	switch {
	case last == nil:
		return nil
	case said == last.Norm:
		it.lastNorm = said
		return nil
	case said != sluice.PreNorm:
		return bad("attribute \"last_norm\" is %q, want %q for %s", said, last.Norm, last.Name)
	case aux != nil:
		// How many layers the target has is not known here, so nobody can tell whether there is a block to norm. Norming the last state alone would make a batch that
		// contradicts itself.
		return bad("attribute \"last_norm\" is %q, want %q for %s; a FinalNorm does not help, since nothing says whether %s holds the final layer, which would have to be normed too: let the producer store both post-norm", said, last.Norm, last.Name, aux.Name)
	case norm == nil:
		return bad("attribute \"last_norm\" is %q, want %q for %s; a FinalNorm would make it so", said, last.Norm, last.Name)
	}
	if err := norm.fits(it.s.Features[at].Spec); err != nil {
		return bad("feature %q %v", last.Name, err)
	}
	it.lastNorm, it.toNorm = last.Norm, at
	return nil
}

// normed returns the item with its last hidden state normed, or the item itself if there is nothing to do. The item stays as it was: it may become part of another batch, if making
// this one fails.
func (it *item) normed(norm *rmsNorm) (*item, error) {
	if it.toNorm < 0 {
		return it, nil
	}
	t, err := norm.apply(it.s.Features[it.toNorm].Tensor)
	if err != nil {
		return nil, &sluice.Error{Kind: sluice.SchemaError, Op: "stream: collate", Subject: it.s.Ref.SampleID(), Detail: fmt.Sprintf("feature %q %v", it.s.Features[it.toNorm].Name, err)}
	}
	s, out := *it.s, *it
	s.Features = slices.Clone(s.Features)
	s.Features[it.toNorm].Tensor = t
	out.s, out.toNorm = &s, -1
	return &out, nil
}

// readDocs reads the documents of packed rows. Upstream counts the padding of a row to its last document; where an attention mask tells them apart, that is undone.
func (it *item) readDocs(schema *sluice.Schema, bad func(string, ...any) error) error {
	f := schema.Role(sluice.RoleSeqLens)
	if f == nil {
		return nil
	}
	t, ok := it.s.Feature(f.Name)
	if !ok {
		return nil
	}
	if t.DType != sluice.Int64 || len(t.Shape) != 2 || t.Shape[0] != it.rows {
		return bad("%s is %s, want int64 [%d,docs]", f.Name, t.Spec, it.rows)
	}
	lens, width := int64s(t), t.Shape[1]
	mask := it.rowsOf(schema, sluice.RoleAttentionMask)
	for r := range it.rows {
		var row []int64
		left, real := it.cols, it.cols
		if mask != nil {
			real = 0
			for _, v := range mask[r*it.cols : (r+1)*it.cols] {
				real += v
			}
		}
		for _, n := range lens[r*width : (r+1)*width] {
			if n < 0 || n > left {
				return bad("%s of row %d has the length %d where %d of %d tokens are left", f.Name, r, n, left, it.cols)
			}
			left -= n
			if n = min(n, real); n > 0 {
				row = append(row, n)
			}
			real -= n
		}
		it.docs = append(it.docs, row)
	}
	return nil
}

// lengths gives the real tokens of each row: of its documents, its attention mask, or the attribute that stands for one.
func (it *item) lengths(schema *sluice.Schema) ([]int64, error) {
	out := make([]int64, it.rows)
	if it.docs != nil {
		for r, row := range it.docs {
			for _, n := range row {
				out[r] += n
			}
		}
		return out, nil
	}
	bad := func(format string, args ...any) error {
		return &sluice.Error{Kind: sluice.SchemaError, Op: "stream: pack", Subject: it.s.Ref.SampleID(), Detail: fmt.Sprintf(format, args...)}
	}
	if mask := it.rowsOf(schema, sluice.RoleAttentionMask); mask != nil {
		for i, v := range mask {
			r, c := int64(i)/it.cols, int64(i)%it.cols
			if v == 0 {
				continue
			}
			if out[r] != c {
				return nil, bad("row %d has a token after padding at %d; rows must be padded at the right", r, c)
			}
			out[r]++
		}
		return out, nil
	}
	if list, ok := it.s.Ref.Attribute("row_lengths"); ok {
		parts := strings.Split(list, ",")
		if int64(len(parts)) != it.rows {
			return nil, bad("attribute \"row_lengths\" has %d entries, want %d", len(parts), it.rows)
		}
		for r, p := range parts {
			n, err := strconv.ParseInt(p, 10, 64)
			if err != nil || n < 0 || n > it.cols {
				return nil, bad("attribute \"row_lengths\" has the entry %q, want 0 to %d", p, it.cols)
			}
			out[r] = n
		}
		return out, nil
	}
	for r := range out {
		out[r] = it.cols
	}
	return out, nil
}

// supervised counts the tokens that the loss mask supervises in the batch, the first ones of documents left out. lengths says how many tokens of each row are in the batch;
// nil is all of them. The mask of a sample that came shifted is taken as it is: which token a slot stands for was its producer's decision.
func (it *item) supervised(schema *sluice.Schema, lengths []int64) (n int64) {
	mask := it.rowsOf(schema, sluice.RoleLossMask)
	if mask == nil {
		return 0
	}
	shift, _ := it.s.Ref.Attribute("shift")
	for r := range it.rows {
		row := mask[r*it.cols : (r+1)*it.cols]
		if lengths != nil {
			row = row[:lengths[r]]
		}
		for _, v := range row {
			n += v
		}
		switch {
		case shift == "1" || len(row) == 0:
		case it.docs == nil:
			n -= row[0]
		default:
			at := int64(0)
			for _, length := range it.docs[r] {
				n -= row[at]
				at += length
			}
		}
	}
	return n
}

// rowsOf is the mask of a role, one number a token; nil if the sample has none, or one of another form, as a schema of a user's own may.
func (it *item) rowsOf(schema *sluice.Schema, role sluice.Role) []int64 {
	f := schema.Role(role)
	if f == nil {
		return nil
	}
	t, ok := it.s.Feature(f.Name)
	if !ok || t.DType != sluice.Int64 || !slices.Equal(t.Shape, []int64{it.rows, it.cols}) {
		return nil
	}
	return int64s(t)
}

// isMask reports whether the feature says which positions count in the loss.
func isMask(f *sluice.SchemaFeature) bool {
	return f.From == sluice.RoleLossMask || f.From == sluice.RolePositionMask
}

// silence zeroes a mask where it must not count: everywhere for a stand-in, in the last slot of each document of a packed row that was shifted here. data is n
// rows of the given length.
func silence(data []byte, size int64, cols, length int64, pad, shifted bool, docs [][]int64) {
	if pad {
		clear(data)
		return
	}
	if !shifted || cols == 0 {
		return
	}
	for r, row := range docs {
		at := int64(0)
		for _, n := range row {
			at += n
			i := (int64(r)*length + at - 1) * size
			clear(data[i : i+size])
		}
	}
}

type padTo struct{ multiple int64 }

// grows tells along which axis a feature is padded: S, or the documents of seq_lens; -1 for none.
func grows(f *sluice.SchemaFeature) int {
	if f.From == sluice.RoleSeqLens && len(f.Axes) > 1 {
		return 1
	}
	return slices.Index(f.Axes, "S")
}

func (p padTo) check(schema *sluice.Schema, n int) error {
	if !slices.ContainsFunc(schema.Features, inRows) {
		return &sluice.Error{Kind: sluice.SchemaError, Op: "stream: pad", Subject: string(schema.Name), Detail: "has no feature with the axes [B,S,...], so its samples have no rows to pad", Hint: "let a CollateFunc join them (LoaderConfig.Collate)"}
	}
	for i := range schema.Features {
		if f := &schema.Features[i]; n > 1 && f.Required && (len(f.Axes) == 0 || f.Axes[0] != "B") {
			return noBatchAxis(f.Name)
		}
	}
	return notNegative("stream: pad", "multiple", p.multiple)
}

func noBatchAxis(feature string) error {
	return &sluice.Error{Kind: sluice.SchemaError, Op: "stream: collate", Subject: feature, Detail: "has no batch axis, so samples can't be joined; use a batch of 1 or a CollateFunc"}
}

func notNegative(op, field string, v int64) error {
	if v < 0 {
		return &sluice.Error{Kind: sluice.Invalid, Op: op, Subject: field, Detail: fmt.Sprintf("is %d, want 0 or more", v)}
	}
	return nil
}

// upTo rounds n up to a multiple, of 1 if it is 0.
func upTo(n, multiple int64) int64 {
	multiple = max(multiple, 1)
	return (n + multiple - 1) / multiple * multiple
}

func (p padTo) join(schema *sluice.Schema, items []*item) (*joined, error) {
	first := items[0].s
	j := &joined{places: make([][2]int64, len(items))}
	var rows, cols int64
	for i, it := range items {
		j.places[i][0] = rows
		rows += it.rows
		cols = max(cols, it.cols)
		if err := sameFeatures(first, it.s); err != nil {
			return nil, &itemError{i, err}
		}
	}
	cols = upTo(cols, p.multiple)
	for k := range first.Features {
		f := schema.Feature(first.Features[k].Name)
		t, shared, err := p.joinFeature(f, k, items, cols)
		if err != nil {
			return nil, err
		}
		j.aliases = j.aliases || shared
		j.features = append(j.features, sluice.Feature{Name: f.Name, Tensor: t})
	}
	return j, nil
}

func sameFeatures(a, b *Sample) error {
	bad := func(detail string) error {
		return &sluice.Error{Kind: sluice.SchemaError, Op: "stream: collate", Subject: b.Ref.SampleID(), Detail: detail}
	}
	if len(a.Features) != len(b.Features) {
		return bad(fmt.Sprintf("has the features %v, but sample %q has %v", b.Ref.FeatureNames(), a.Ref.SampleID(), a.Ref.FeatureNames()))
	}
	for i := range a.Features {
		switch x, y := &a.Features[i], &b.Features[i]; {
		case x.Name != y.Name:
			return bad(fmt.Sprintf("has the features %v, but sample %q has %v", b.Ref.FeatureNames(), a.Ref.SampleID(), a.Ref.FeatureNames()))
		case x.DType != y.DType || len(x.Shape) != len(y.Shape):
			return bad(fmt.Sprintf("feature %q is %s, but sample %q has %s", y.Name, y.Spec, a.Ref.SampleID(), x.Spec))
		}
	}
	return nil
}

// joinFeature joins the kth feature of all items. shared says that the result is an item's own memory.
func (p padTo) joinFeature(f *sluice.SchemaFeature, k int, items []*item, cols int64) (out sluice.Tensor, shared bool, err error) {
	first := items[0].s.Features[k]
	axis := grows(f)
	shape := slices.Clone(first.Shape)
	if axis >= 0 {
		shape[axis] = 0
	}
	if len(items) > 1 {
		if len(f.Axes) == 0 || f.Axes[0] != "B" {
			return out, false, noBatchAxis(f.Name)
		}
		shape[0] = 0
	}
	moved := false
	for i, it := range items {
		t := it.s.Features[k]
		for a := range shape {
			switch {
			case a == 0 && len(items) > 1:
				shape[0] += t.Shape[0]
			case a == axis:
				shape[a] = max(shape[a], t.Shape[a])
			case shape[a] != t.Shape[a]:
				return out, false, &itemError{i, &sluice.Error{Kind: sluice.SchemaError, Op: "stream: collate", Subject: it.s.Ref.SampleID(), Detail: fmt.Sprintf("feature %q is %s, but sample %q has %s", f.Name, t.Spec, items[0].s.Ref.SampleID(), first.Spec)}}
			}
		}
		moved = moved || it.shift && f.Shift || it.s.Pad && isMask(f)
	}
	if axis >= 0 && f.Axes[axis] == "S" && cols > 0 { // it is 0 where no feature has rows, and the sample is alone
		shape[axis] = cols
	}
	if len(items) == 1 && !moved && slices.Equal(shape, first.Shape) {
		return first.Tensor, true, nil
	}
	out = sluice.NewTensor(first.DType, shape...)
	if axis < 0 {
		axis = len(shape)
	}
	size := first.DType.Size()
	length, inner := int64(1), size
	if axis < len(shape) {
		length = shape[axis]
		for _, n := range shape[axis+1:] {
			inner *= n
		}
	}
	at := int64(0)
	for _, it := range items {
		t := it.s.Features[k]
		have := int64(1)
		if axis < len(shape) {
			have = t.Shape[axis]
		}
		outer := int64(1)
		for _, n := range t.Shape[:axis] {
			outer *= n
		}
		begin := at
		for o := range outer {
			src := t.Data[o*have*inner:][:have*inner]
			if it.shift && f.Shift && len(src) > 0 {
				src = src[inner:]
			}
			copy(out.Data[at:], src)
			at += length * inner
		}
		if isMask(f) {
			silence(out.Data[begin:at], inner, have, length, it.s.Pad, it.shift && f.Shift, it.docs)
		}
	}
	return out, false, nil
}

type pack struct{ maxTokens, multiple int64 }

func (p pack) check(schema *sluice.Schema, _ int) error {
	bad := func(what, detail string) error {
		return &sluice.Error{Kind: sluice.SchemaError, Op: "stream: pack", Subject: what, Detail: detail}
	}
	if err := cmp.Or(notNegative("stream: pack", "MaxTokens", p.maxTokens), notNegative("stream: pack", "Multiple", p.multiple)); err != nil {
		return err
	}
	for _, r := range []sluice.Role{sluice.RolePositionIDs, sluice.RoleSeqLens, sluice.RoleDocRemaining} {
		f := schema.Role(r)
		if f == nil || !slices.Contains(schema.Packing, f.Name) {
			return bad(string(r), "is no packing feature of the schema "+string(schema.Name)+", so its samples can't be packed")
		}
		if !slices.Contains(f.DTypes, sluice.Int64) {
			return bad(f.Name, "can't be int64")
		}
	}
	for i := range schema.Features {
		f := &schema.Features[i]
		switch f.From {
		case sluice.RolePositionIDs, sluice.RoleSeqLens, sluice.RoleDocRemaining:
		default:
			if slices.Contains(schema.Packing, f.Name) {
				return bad(f.Name, "is a packing feature of the schema "+string(schema.Name)+", and nothing says how it is made of several samples")
			}
		}
		if f.From != sluice.RoleSeqLens && (len(f.Axes) < 2 || f.Axes[0] != "B" || f.Axes[1] != "S") {
			return bad(f.Name, fmt.Sprintf("has the axes %v, want [B,S,...]", f.Axes))
		}
	}
	return nil
}

// segment is one row of one item in its place in the batch.
type segment struct {
	it       *item
	row      int64 // of the item
	n        int64 // real tokens
	docs     []int64
	out, col int64 // where it goes
}

func (p pack) join(schema *sluice.Schema, items []*item) (*joined, error) {
	j := &joined{places: make([][2]int64, len(items))}
	segments, rows, cols, docs, err := p.lay(schema, items, j)
	if err != nil {
		return nil, err
	}
	isPacking := func(name string) bool { return slices.Contains(schema.Packing, name) }
	content := func(s *Sample) []sluice.Feature {
		return slices.DeleteFunc(slices.Clone(s.Features), func(f sluice.Feature) bool { return isPacking(f.Name) })
	}
	first := content(items[0].s)
	contents := make([][]sluice.Feature, len(items))
	for i, it := range items {
		contents[i] = content(it.s)
		if err := sameFeatures(&Sample{Ref: items[0].s.Ref, Features: first}, &Sample{Ref: it.s.Ref, Features: contents[i]}); err != nil {
			return nil, &itemError{i, err}
		}
		for k := range first {
			if !slices.Equal(first[k].Shape[2:], contents[i][k].Shape[2:]) {
				return nil, &itemError{i, &sluice.Error{Kind: sluice.SchemaError, Op: "stream: pack", Subject: it.s.Ref.SampleID(), Detail: fmt.Sprintf("feature %q is %s, but sample %q has %s", first[k].Name, contents[i][k].Spec, items[0].s.Ref.SampleID(), first[k].Spec)}}
			}
		}
	}
	index := map[*item]int{}
	for i, it := range items {
		index[it] = i
	}
	for k := range first {
		f := schema.Feature(first[k].Name)
		t := sluice.NewTensor(first[k].DType, append([]int64{rows, cols}, first[k].Shape[2:]...)...)
		width := t.DType.Size()
		for _, n := range first[k].Shape[2:] {
			width *= n
		}
		for _, s := range segments {
			src := contents[index[s.it]][k].Data[s.row*s.it.cols*width:][:s.n*width]
			dst := t.Data[(s.out*cols+s.col)*width:][:s.n*width]
			shifted := s.it.shift && f.Shift
			if shifted {
				src = src[width:]
			}
			copy(dst, src)
			if isMask(f) {
				silence(dst, width, s.n, s.n, s.it.s.Pad, shifted, [][]int64{s.docs})
			}
		}
		j.features = append(j.features, sluice.Feature{Name: f.Name, Tensor: t})
	}
	j.features = append(j.features, packing(schema, segments, rows, cols, docs)...)
	return j, nil
}

// lay puts the rows of all items in their places: as many rows of output, of so many columns and documents.
func (p pack) lay(schema *sluice.Schema, items []*item, j *joined) (segments []segment, rows, cols, docs int64, err error) {
	row, col, rowDocs := int64(0), int64(0), int64(0)
	for i, it := range items {
		lengths, err := it.lengths(schema)
		if err != nil {
			return nil, 0, 0, 0, &itemError{i, err}
		}
		j.lengths = append(j.lengths, lengths)
		for r, n := range lengths {
			s := segment{it: it, row: int64(r), n: n, docs: []int64{n}}
			if it.docs != nil {
				s.docs = it.docs[r]
			}
			if p.maxTokens > 0 && n > p.maxTokens {
				return nil, 0, 0, 0, &itemError{i, &sluice.Error{Kind: sluice.SchemaError, Op: "stream: pack", Subject: it.s.Ref.SampleID(), Detail: fmt.Sprintf("row %d has %d tokens, and packed rows hold %d at most", r, n, p.maxTokens)}}
			}
			if p.maxTokens > 0 && col+n > p.maxTokens {
				row, col, rowDocs = row+1, 0, 0
			}
			s.out, s.col = row, col
			if r == 0 {
				j.places[i] = [2]int64{row, col}
			}
			if n == 0 {
				continue
			}
			segments = append(segments, s)
			col += n
			rowDocs += int64(len(s.docs))
			cols, docs = max(cols, col), max(docs, rowDocs)
		}
	}
	if len(segments) == 0 {
		return nil, 0, 0, 0, &itemError{0, &sluice.Error{Kind: sluice.SchemaError, Op: "stream: pack", Subject: items[0].s.Ref.SampleID(), Detail: "has no real token, and nor have the others of its batch"}}
	}
	cols = upTo(cols, p.multiple)
	return segments, row + 1, cols, docs, nil
}

// packing makes the three features that describe the rows, in the schema's order.
func packing(schema *sluice.Schema, segments []segment, rows, cols, docs int64) []sluice.Feature {
	made := map[sluice.Role]sluice.Tensor{
		sluice.RolePositionIDs:  sluice.NewTensor(sluice.Int64, rows, cols),
		sluice.RoleSeqLens:      sluice.NewTensor(sluice.Int64, rows, docs),
		sluice.RoleDocRemaining: sluice.NewTensor(sluice.Int64, rows, cols),
	}
	pos, lens, rem := int64s(made[sluice.RolePositionIDs]), int64s(made[sluice.RoleSeqLens]), int64s(made[sluice.RoleDocRemaining])
	used := make([]int64, rows)
	for _, s := range segments {
		at := s.out*cols + s.col
		for _, n := range s.docs {
			lens[s.out*docs+used[s.out]] = n
			used[s.out]++
			for t := range n {
				pos[at+t], rem[at+t] = t, n-1-t
			}
			at += n
		}
	}
	var out []sluice.Feature
	for i := range schema.Features {
		if t, ok := made[schema.Features[i].From]; ok {
			out = append(out, sluice.Feature{Name: schema.Features[i].Name, Tensor: t})
		}
	}
	return out
}

type collateFunc struct {
	f func([]Sample) ([]sluice.Feature, error)
}

func (c collateFunc) check(*sluice.Schema, int) error {
	if c.f == nil {
		return &sluice.Error{Kind: sluice.Invalid, Op: "stream: collate", Detail: "the function is nil"}
	}
	return nil
}

func (c collateFunc) join(schema *sluice.Schema, items []*item) (*joined, error) {
	samples := make([]Sample, len(items))
	for i, it := range items {
		one, err := padTo{1}.join(schema, items[i:i+1])
		if err != nil {
			return nil, &itemError{i, err}
		}
		samples[i] = Sample{Ref: it.s.Ref, Features: one.features, Pad: it.s.Pad, Shift: "0", LastNorm: it.lastNorm}
		if shifts(schema) {
			samples[i].Shift = "1"
		}
	}
	var out []sluice.Feature
	err := guard(sluice.Invalid, "stream: collate function", func() (err error) {
		out, err = c.f(samples)
		return err
	})
	if err != nil {
		return nil, err
	}
	for i := range out {
		if err := out[i].Validate(); err != nil {
			return nil, &sluice.Error{Kind: sluice.Invalid, Op: "stream: collate function", Subject: out[i].Name, Err: err}
		}
	}
	// What it returns may be the samples' own memory.
	return &joined{features: out, aliases: true}, nil
}
