package sluice

import (
	"encoding/hex"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"
)

const (
	// maxInteger bounds every integer on the wire: below it, a number survives a reader that keeps it in a float64.
	maxInteger = 1 << 53

	// MaxRefBytes bounds the canonical form of a ref.
	MaxRefBytes = 64 << 10

	maxFeatures   = 64
	maxAttributes = 64
)

// RefFeature describes one feature of a sample: its name, the key under which its store keeps it, its shape and dtype.
type RefFeature struct {
	Name string
	Key  string
	Spec
}

// RefFields are the fields of a [Ref], for building one and for reading all of them at once.
type RefFields struct {
	SampleID           string            // unique in its store; [ValidateID]
	RunID              string            // the run it was made for; [ValidateID]
	StoreURI           string            // the store that holds the tensors: "mem:...", "file://..."
	Generation         string            // fresh for every put, so that a ref never reads a later put of the same id; [ValidateID]
	Features           []RefFeature      // in the producer's order, which every hop keeps
	Algorithm          Algorithm         // names the schema
	SchemaVersion      int64             // of that schema, from 1
	NumTokens          int64             // sum of the attention mask, or of the loss mask where there is none
	EstimatedBytes     int64             // sum of the features' bytes; [SumBytes]
	TargetModelVersion string            // version of the target's weights, "0" at first
	DraftWeightVersion string            // version of the draft's weights, "0" at first
	Attributes         map[string]string // what else must be right: see the schema
}

// Ref is the tensor-free description of one produced sample: what travels on the control plane while the tensors stay in a
// store. It is checked once, when it is made, and cannot change afterwards, to the depths; copying one is cheap and safe.
//
// Compare refs with [Ref.Equal]; the compiler refuses ==. To key a map, use [Ref.Canonical] or, within one store,
// [Ref.SampleID] with [Ref.Generation].
type Ref struct {
	_ [0]func() // == would compare pointers
	d *refData
}

// refData shares with refs that were made before it what is the same in both; see [RefFields.shrink]. The canonical form is not kept, since it takes more than all the rest: it is written when it
// is asked for.
type refData struct{ f RefFields }

var noRef refData

func (r Ref) data() *refData {
	if r.d == nil {
		return &noRef
	}
	return r.d
}

// NewRef checks the fields and returns the ref made of a deep copy of them.
func NewRef(f RefFields) (Ref, error) { return newRef(f, MaxRefBytes+1) }

// newRef is NewRef for fields whose canonical form has most bytes at most.
func newRef(f RefFields, most int) (Ref, error) {
	if err := f.validate(); err != nil {
		return Ref{}, err
	}
	if most > MaxRefBytes {
		b := canonBuffers.Get().(*[]byte)
		*b = f.appendCanonical((*b)[:0])
		n := len(*b)
		canonBuffers.Put(b)
		if n > MaxRefBytes {
			return Ref{}, refError(f.SampleID, "", fmt.Sprintf("is %d bytes in canonical form, at most %d are allowed", n, MaxRefBytes))
		}
	}
	return Ref{d: f.shrink()}, nil
}

var canonBuffers = sync.Pool{New: func() any { return new([]byte) }}

// SumBytes is the sum of the features' bytes, checked against overflow: what EstimatedBytes must be.
func SumBytes(features []RefFeature) (int64, error) {
	var sum int64
	for i := range features {
		n, err := features[i].checkedBytes()
		if err != nil {
			return 0, &Error{Kind: Invalid, Op: "feature", Subject: features[i].Name, Err: err}
		}
		if sum += n; sum >= maxInteger {
			return 0, &Error{Kind: Invalid, Op: "feature", Subject: features[i].Name, Detail: "the features add up to 2^53 bytes or more"}
		}
	}
	return sum, nil
}

// ValidateID checks an id (of a sample, run, generation, consumer or producer): a letter, digit or underscore, then up to 199 of those or . : -
// with no two dots in a row. Such an id is a safe file name.
func ValidateID(id string) error {
	ok := len(id) >= 1 && len(id) <= 200 && !strings.Contains(id, "..")
	for i := 0; ok && i < len(id); i++ {
		c := id[i]
		alnum := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_'
		ok = alnum || i > 0 && (c == '.' || c == ':' || c == '-')
	}
	if !ok {
		return &Error{Kind: Invalid, Op: "id", Subject: id, Detail: "wants [A-Za-z0-9_][A-Za-z0-9._:-]{0,199} without \"..\""}
	}
	return nil
}

// checkText checks a free string of the wire: valid UTF-8 without control characters, line or paragraph separators.
func checkText(s string) error {
	if !utf8.ValidString(s) {
		return &Error{Kind: Invalid, Detail: "is not valid UTF-8"}
	}
	for _, r := range s {
		if r < 0x20 || r >= 0x7f && r < 0xa0 || r == 0x2028 || r == 0x2029 {
			return &Error{Kind: Invalid, Detail: "contains the control character " + strconv.QuoteRuneToASCII(r)}
		}
	}
	return nil
}

func refError(sample, field, detail string) error {
	if field != "" {
		detail = field + " " + detail
	}
	return &Error{Kind: Invalid, Op: "ref", Subject: sample, Detail: detail}
}

func (f *RefFields) validate() error {
	fail := func(field, detail string) error { return refError(f.SampleID, field, detail) }
	for _, id := range [...]struct{ field, value string }{{"sample_id", f.SampleID}, {"run_id", f.RunID}, {"generation", f.Generation}, {"algorithm", string(f.Algorithm)}} {
		if ValidateID(id.value) != nil {
			return fail(id.field, fmt.Sprintf("is %q, want [A-Za-z0-9_][A-Za-z0-9._:-]{0,199} without \"..\"", printable(id.value, 200)))
		}
	}
	for _, s := range [...]struct{ field, value string }{{"store_uri", f.StoreURI}, {"target_model_version", f.TargetModelVersion}, {"draft_weight_version", f.DraftWeightVersion}} {
		if s.value == "" {
			return fail(s.field, "is empty")
		}
		if err := checkText(s.value); err != nil {
			return fail(s.field, err.Error())
		}
	}
	for _, n := range [...]struct {
		field      string
		value, min int64
	}{{"schema_version", f.SchemaVersion, 1}, {"num_tokens", f.NumTokens, 0}, {"estimated_bytes", f.EstimatedBytes, 0}} {
		if n.value < n.min || n.value >= maxInteger {
			return fail(n.field, fmt.Sprintf("is %d, want %d or more and less than 2^53", n.value, n.min))
		}
	}
	if len(f.Features) == 0 {
		return fail("features", "is empty, want at least one feature")
	}
	if len(f.Features) > maxFeatures {
		return fail("features", fmt.Sprintf("has %d entries, at most %d are allowed", len(f.Features), maxFeatures))
	}
	for i := range f.Features {
		ft := &f.Features[i]
		failAt := func(field, detail string) error { return fail(fmt.Sprintf("features[%d]%s", i, field), detail) }
		if ValidateID(ft.Name) != nil {
			return failAt(".name", fmt.Sprintf("is %q, want [A-Za-z0-9_][A-Za-z0-9._:-]{0,199} without \"..\"", printable(ft.Name, 200)))
		}
		for j := range i {
			if f.Features[j].Name == ft.Name {
				return failAt(".name", fmt.Sprintf("is %q, which features[%d] has too", ft.Name, j))
			}
		}
		if ft.Key == "" {
			return failAt(".key", "is empty")
		}
		if err := checkText(ft.Key); err != nil {
			return failAt(".key", err.Error())
		}
		if err := ft.Validate(); err != nil {
			return failAt(" ("+ft.Name+")", "has a bad "+err.Error())
		}
	}
	sum, err := SumBytes(f.Features)
	if err != nil {
		return fail("features", err.Error())
	}
	if sum != f.EstimatedBytes {
		return fail("estimated_bytes", fmt.Sprintf("is %d, but the features add up to %d", f.EstimatedBytes, sum))
	}
	if len(f.Attributes) > maxAttributes {
		return fail("attributes", fmt.Sprintf("has %d entries, at most %d are allowed", len(f.Attributes), maxAttributes))
	}
	for k, v := range f.Attributes {
		if ValidateID(k) != nil {
			return fail("attributes", fmt.Sprintf("has the key %q, want [A-Za-z0-9_][A-Za-z0-9._:-]{0,199} without \"..\"", printable(k, 200)))
		}
		if err := checkText(v); err != nil {
			return fail("attributes."+k, err.Error())
		}
	}
	return nil
}

// IsZero reports whether r is the zero Ref, which describes nothing.
func (r Ref) IsZero() bool { return r.d == nil }

// SampleID identifies the sample in its store.
func (r Ref) SampleID() string { return r.data().f.SampleID }

// RunID identifies the run the sample was made for.
func (r Ref) RunID() string { return r.data().f.RunID }

// StoreURI identifies the store that holds the tensors.
func (r Ref) StoreURI() string { return r.data().f.StoreURI }

// Generation is the fresh id of the put that made the sample.
func (r Ref) Generation() string { return r.data().f.Generation }

// Algorithm names the schema of the sample.
func (r Ref) Algorithm() Algorithm { return r.data().f.Algorithm }

// SchemaVersion is the version of that schema.
func (r Ref) SchemaVersion() int64 { return r.data().f.SchemaVersion }

// NumTokens is the number of attended tokens (of supervised ones where the sample has no attention mask).
func (r Ref) NumTokens() int64 { return r.data().f.NumTokens }

// EstimatedBytes is the size of all features together, in bytes: the unit of every cap and mark.
func (r Ref) EstimatedBytes() int64 { return r.data().f.EstimatedBytes }

// TargetModelVersion is the version of the target's weights.
func (r Ref) TargetModelVersion() string { return r.data().f.TargetModelVersion }

// DraftWeightVersion is the version of the draft's weights.
func (r Ref) DraftWeightVersion() string { return r.data().f.DraftWeightVersion }

// Attribute returns the attribute with the given key, or "" and false.
func (r Ref) Attribute(key string) (string, bool) {
	v, ok := r.data().f.Attributes[key]
	return v, ok
}

// Attributes iterates over the attributes, sorted by key.
func (r Ref) Attributes() iter.Seq2[string, string] {
	m := r.data().f.Attributes
	return func(yield func(string, string) bool) {
		for _, k := range slices.Sorted(maps.Keys(m)) {
			if !yield(k, m[k]) {
				return
			}
		}
	}
}

// NumFeatures is the number of features.
func (r Ref) NumFeatures() int { return len(r.data().f.Features) }

// FeatureNames returns the names of the features in the producer's order. (Upstream's feature_names.)
func (r Ref) FeatureNames() []string {
	names := make([]string, 0, r.NumFeatures())
	for i := range r.data().f.Features {
		names = append(names, r.d.f.Features[i].Name)
	}
	return names
}

// Features iterates over the features in the producer's order. Each value is the caller's own copy.
func (r Ref) Features() iter.Seq[RefFeature] {
	return func(yield func(RefFeature) bool) {
		for _, f := range r.data().f.Features {
			f.Key, f.Shape = r.d.f.key(&f), slices.Clone(f.Shape)
			if !yield(f) {
				return
			}
		}
	}
}

// Feature returns the description of one feature.
func (r Ref) Feature(name string) (RefFeature, bool) {
	for _, f := range r.data().f.Features {
		if f.Name == name {
			f.Key, f.Shape = r.d.f.key(&f), slices.Clone(f.Shape)
			return f, true
		}
	}
	return RefFeature{}, false
}

// CheckFeatures reports, as ErrCorrupt, the first difference between what the ref promises and the given tensors: names, order, shapes,
// dtypes, lengths. Stores call it on every get.
func (r Ref) CheckFeatures(op string, features []Feature) error {
	fail := func(detail string) error { return &Error{Kind: Corrupt, Op: op, Subject: r.SampleID(), Detail: detail} }
	want := r.data().f.Features
	if len(features) != len(want) {
		return fail(fmt.Sprintf("has %d features, the ref promises %d", len(features), len(want)))
	}
	for i := range want {
		switch got := &features[i]; {
		case got.Name != want[i].Name:
			return fail(fmt.Sprintf("feature %d is %q, the ref promises %q", i, got.Name, want[i].Name))
		case !got.Equal(want[i].Spec):
			return fail(fmt.Sprintf("feature %q is %s, the ref promises %s", got.Name, got.Spec, want[i].Spec))
		case got.Validate() != nil:
			return fail(fmt.Sprintf("feature %q has %d bytes, %s needs %d", got.Name, len(got.Data), want[i].Spec, want[i].Bytes()))
		}
	}
	return nil
}

// Fields returns a deep copy of all fields.
func (r Ref) Fields() RefFields {
	f := r.data().f
	f.Features = slices.Collect(r.Features())
	f.Attributes = maps.Clone(f.Attributes)
	return f
}

// Equal reports whether both refs say the same in every field.
func (r Ref) Equal(s Ref) bool { return r.d == s.d || r.data().f.equal(&s.data().f) }

// Canonical returns the canonical JSON of the ref: fixed field order, sorted attributes, no spaces, byte for byte the same from Go and
// from Python. It is "" for the zero Ref.
func (r Ref) Canonical() string {
	b := canonBuffers.Get().(*[]byte)
	defer canonBuffers.Put(b)
	*b = r.AppendCanonical((*b)[:0])
	return string(*b)
}

// AppendCanonical appends the canonical JSON to b; nothing for the zero Ref.
func (r Ref) AppendCanonical(b []byte) []byte {
	if r.IsZero() {
		return b
	}
	return r.d.f.appendCanonical(b)
}

// String shows the ref in a few words for logs.
func (r Ref) String() string {
	return fmt.Sprintf("%s/%s (%s, %d features, %d tokens, %d bytes)", r.RunID(), r.SampleID(), r.Algorithm(), r.NumFeatures(), r.NumTokens(), r.EstimatedBytes())
}

// MarshalJSON gives the canonical form. Note that encoding/json by default escapes <, > and & on top; where bytes matter, use Canonical.
func (r Ref) MarshalJSON() ([]byte, error) {
	if r.IsZero() {
		return nil, &Error{Kind: Invalid, Op: "ref", Detail: "the zero Ref has no JSON form"}
	}
	return r.AppendCanonical(make([]byte, 0, 1024)), nil
}

// UnmarshalJSON is [ParseRef].
func (r *Ref) UnmarshalJSON(data []byte) error {
	v, err := ParseRef(data)
	if err != nil {
		return err
	}
	*r = v
	return nil
}

func (f *RefFields) appendCanonical(b []byte) []byte {
	str := func(field, v string) {
		b = append(b, ',', '"')
		b = append(b, field...)
		b = append(b, '"', ':')
		b = appendString(b, v)
	}
	num := func(field string, v int64) {
		b = append(b, ',', '"')
		b = append(b, field...)
		b = append(b, '"', ':')
		b = strconv.AppendInt(b, v, 10)
	}
	b = append(b, `{"sample_id":`...)
	b = appendString(b, f.SampleID)
	str("run_id", f.RunID)
	str("store_uri", f.StoreURI)
	str("generation", f.Generation)
	b = append(b, `,"features":[`...)
	for i := range f.Features {
		ft := &f.Features[i]
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `{"name":`...)
		b = appendString(b, ft.Name)
		if ft.Key == "" { // see shrink
			b = append(b, `,"key":"`...)
			b = append(append(append(b, f.SampleID...), '/'), ft.Name...) // neither needs an escape
			b = append(b, '"')
		} else {
			str("key", ft.Key)
		}
		b = append(b, `,"shape":[`...)
		for j, d := range ft.Shape {
			if j > 0 {
				b = append(b, ',')
			}
			b = strconv.AppendInt(b, d, 10)
		}
		b = append(b, ']')
		str("dtype", ft.DType.String())
		b = append(b, '}')
	}
	b = append(b, ']')
	str("algorithm", string(f.Algorithm))
	num("schema_version", f.SchemaVersion)
	num("num_tokens", f.NumTokens)
	num("estimated_bytes", f.EstimatedBytes)
	str("target_model_version", f.TargetModelVersion)
	str("draft_weight_version", f.DraftWeightVersion)
	b = append(b, `,"attributes":{`...)
	for i, k := range slices.Sorted(maps.Keys(f.Attributes)) {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendString(b, k)
		b = append(b, ':')
		b = appendString(b, f.Attributes[k])
	}
	return append(b, "}}"...)
}

// appendString quotes s, which has passed checkText, escaping only the quote and the backslash.
func appendString(b []byte, s string) []byte {
	b = append(b, '"')
	for i := range len(s) {
		if s[i] == '"' || s[i] == '\\' {
			b = append(b, '\\')
		}
		b = append(b, s[i])
	}
	return append(b, '"')
}

// randomID returns 128 random bits in hex.
func randomID(bits [16]byte) string { return hex.EncodeToString(bits[:]) }
