package sluice

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"unicode/utf8"
)

// Algorithm names a draft family: the stable wire string by which a sample finds its schema. A run may bring a schema, and with it an
// algorithm, of its own.
type Algorithm string

// The built-in algorithms. (Upstream's FeatureAlgorithm.)
const (
	EAGLE3 Algorithm = "eagle3"
	DFlash Algorithm = "dflash"
	DSpark Algorithm = "dspark"
)

// Role says where a producer takes a feature from, so that nothing outside a schema has to know an algorithm by name.
type Role string

// The roles. The first three and the packing roles come from the prompt, the others from the target.
const (
	RoleInputIDs      Role = "input_ids"
	RoleAttentionMask Role = "attention_mask"
	RoleLossMask      Role = "loss_mask"
	RoleAux           Role = "aux"           // concatenated states of the aux layers
	RoleLast          Role = "last"          // last hidden state, with the norm state that the feature names
	RoleLogits        Role = "logits"        // full-vocabulary logits
	RoleTargetProbs   Role = "target_probs"  // softmax over the draft vocabulary
	RolePositionMask  Role = "position_mask" // whether the target's choice lies in the draft vocabulary, and is supervised
	RolePositionIDs   Role = "position_ids"
	RoleSeqLens       Role = "seq_lens"
	RoleDocRemaining  Role = "doc_remaining"
)

var roles = []Role{RoleInputIDs, RoleAttentionMask, RoleLossMask, RoleAux, RoleLast, RoleLogits, RoleTargetProbs, RolePositionMask, RolePositionIDs, RoleSeqLens, RoleDocRemaining}

// SchemaFeature describes a feature that samples of a schema have or may have.
type SchemaFeature struct {
	Name string `json:"name"`
	// From is where a producer takes it from; empty for a feature that only its owner's producer knows how to make.
	From Role `json:"from,omitempty"`
	// Axes names the axes, outermost first. Equal names must have equal lengths in one sample; a number is that
	// length; a product such as K*H must work out. The axis S is the sequence: collation pads and packs along it.
	Axes   []string `json:"axes"`
	DTypes []DType  `json:"dtypes"`
	// Required features are in every sample; others are part of an encoding, of packing, or plainly optional.
	Required bool `json:"required,omitempty"`
	// Shift says that a batch has this feature shifted left by one along S, zero at the tail.
	Shift bool `json:"shift,omitempty"`
	// Norm is the norm state in which a producer takes RoleLast.
	Norm Norm `json:"norm,omitempty"`
	// FinalLayerNorm is the norm state that RoleAux has for the target's final layer; pre-norm if empty.
	FinalLayerNorm Norm `json:"final_layer_norm,omitempty"`
}

// Encoding is one way in which a sample can carry its supervision: a set of features that belong together.
type Encoding struct {
	Name     string   `json:"name"`
	Features []string `json:"features"`
}

// Supervision lists a schema's encodings and says how many of them a sample has.
type Supervision struct {
	Rule      string     `json:"rule,omitempty"` // "exactly_one", "at_most_one", or empty where there are no encodings
	Default   string     `json:"default,omitempty"`
	Encodings []Encoding `json:"encodings,omitempty"`
}

// AttributeRule says what a ref's attribute must look like.
type AttributeRule struct {
	Name         string `json:"name"`
	Required     bool   `json:"required,omitempty"`
	RequiredWith string `json:"required_with,omitempty"` // required in samples that have this feature
	Pattern      string `json:"pattern,omitempty"`       // regular expression that the whole value matches
	// Counts binds an axis name to the number of comma-separated entries of the value (behind an optional "prefix:").
	Counts string `json:"counts,omitempty"`

	re *regexp.Regexp
}

// Admission says which rows are worth a sample. Both counts are of one row; the first token of a document is never
// predicted and does not count as supervised.
type Admission struct {
	MinTokens     int64 `json:"min_tokens,omitempty"`
	MinSupervised int64 `json:"min_supervised,omitempty"`
}

// Schema is what the samples of an algorithm must look like: a document, not code. The built-in ones are the files in schemas/; a run may
// be created with any other document of the same form. A Schema is read-only once parsed.
type Schema struct {
	Name        Algorithm       `json:"name"`
	Version     int64           `json:"version"`
	Features    []SchemaFeature `json:"features"`
	Supervision Supervision     `json:"supervision,omitzero"`
	Packing     []string        `json:"packing,omitempty"` // all of these or none
	Attributes  []AttributeRule `json:"attributes,omitempty"`
	Admission   Admission       `json:"admission,omitzero"`

	passed *passed // nil in a schema that was made by hand
}

// passed is the last ref that agreed with a schema. Those that follow it are mostly alike, and to see that is far less work than to check them again.
type passed struct {
	by  *Schema // not a copy of it, which may have been changed
	ref atomic.Pointer[refData]
}

//go:embed schemas/*.json
var schemaFiles embed.FS

var builtin = func() map[Algorithm]*Schema {
	m := map[Algorithm]*Schema{}
	entries, err := schemaFiles.ReadDir("schemas")
	if err != nil {
		panic(err)
	}
	for _, e := range entries {
		data, err := schemaFiles.ReadFile("schemas/" + e.Name())
		if err != nil {
			panic(err)
		}
		s, err := ParseSchema(data)
		if err != nil {
			panic(err)
		}
		m[s.Name] = s
	}
	return m
}()

// SchemaOf returns the built-in schema of an algorithm.
func SchemaOf(a Algorithm) (*Schema, error) {
	if s := builtin[a]; s != nil {
		return s, nil
	}
	return nil, &Error{Kind: NotFound, Op: "schema", Subject: string(a), Detail: "is not built in (those are " + builtinNames() + ")", Hint: "give the run a schema document of its own"}
}

// Algorithms lists the built-in algorithms, sorted.
func Algorithms() []Algorithm {
	var all []Algorithm
	for a := range builtin {
		all = append(all, a)
	}
	slices.Sort(all)
	return all
}

func builtinNames() string {
	var b strings.Builder
	for i, a := range Algorithms() {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(string(a))
	}
	return b.String()
}

const maxSchemaBytes = 64 << 10

// ParseSchema reads and checks a schema document.
func ParseSchema(data []byte) (*Schema, error) {
	fail := func(detail string) error {
		return &Error{Kind: SchemaError, Op: "schema: parse", Detail: detail}
	}
	if len(data) > maxSchemaBytes {
		return nil, fail(fmt.Sprintf("the document is %d bytes, at most %d are allowed", len(data), maxSchemaBytes))
	}
	if err := checkDocument(data); err != nil {
		return nil, fail(err.Error())
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	type document Schema // without UnmarshalJSON
	s := new(Schema)
	if err := dec.Decode((*document)(s)); err != nil {
		return nil, fail(err.Error())
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, fail("there is more after the document")
	}
	if err := s.check(); err != nil {
		return nil, err
	}
	s.passed = &passed{by: s}
	return s, nil
}

// UnmarshalJSON is [ParseSchema], so that a schema within a larger document, such as a run's, is checked too.
func (s *Schema) UnmarshalJSON(data []byte) error {
	v, err := ParseSchema(data)
	if err != nil {
		return err
	}
	*s = *v
	s.passed = &passed{by: s}
	return nil
}

// checkDocument refuses what encoding/json would let pass and readers in other languages would not: names in other letters than ours, one name twice in
// an object, broken UTF-8.
func checkDocument(data []byte) error {
	if !utf8.Valid(data) {
		return errors.New("the document is not valid UTF-8")
	}
	type level struct {
		names map[string]bool // nil in an array
		value bool            // the next token is the value behind a name
	}
	var open []level
	dec := json.NewDecoder(bytes.NewReader(data))
	for {
		token, err := dec.Token()
		if err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if token == json.Delim('}') || token == json.Delim(']') {
			open = open[:len(open)-1]
			continue
		}
		if n := len(open); n > 0 && open[n-1].names != nil {
			if at := &open[n-1]; at.value {
				at.value = false
			} else {
				name, _ := token.(string)
				if !fieldName.MatchString(name) {
					return fmt.Errorf("unknown field %q, want lower-case letters and _", printable(name, 60))
				}
				if at.names[name] {
					return fmt.Errorf("the field %q is there twice", printable(name, 60))
				}
				at.names[name], at.value = true, true
				continue
			}
		}
		switch token {
		case json.Delim('{'):
			open = append(open, level{names: map[string]bool{}})
		case json.Delim('['):
			open = append(open, level{})
		}
	}
}

var fieldName = regexp.MustCompile(`^[a-z][a-z_]*$`)

func (s *Schema) check() error {
	fail := func(field, detail string) error {
		return &Error{Kind: SchemaError, Op: "schema: parse", Subject: string(s.Name), Detail: field + " " + detail}
	}
	if ValidateID(string(s.Name)) != nil {
		return fail("name", "wants [A-Za-z0-9_][A-Za-z0-9._:-]{0,199}")
	}
	if s.Version < 1 || s.Version >= maxInteger {
		return fail("version", fmt.Sprintf("is %d, want 1 or more", s.Version))
	}
	if len(s.Features) == 0 || len(s.Features) > maxFeatures {
		return fail("features", fmt.Sprintf("has %d entries, want 1 to %d", len(s.Features), maxFeatures))
	}
	for i := range s.Features {
		f := &s.Features[i]
		at := fmt.Sprintf("features[%d] (%s)", i, printable(f.Name, 60))
		switch {
		case ValidateID(f.Name) != nil:
			return fail(at, "has no valid name, want [A-Za-z0-9_][A-Za-z0-9._:-]{0,199} without \"..\"")
		case slices.ContainsFunc(s.Features[:i], func(g SchemaFeature) bool { return g.Name == f.Name }):
			return fail(at, "is there twice")
		case f.From != "" && !slices.Contains(roles, f.From):
			return fail(at, fmt.Sprintf("has from %q, want one of %v", printable(string(f.From), 60), roles))
		case f.From != "" && slices.ContainsFunc(s.Features[:i], func(g SchemaFeature) bool { return g.From == f.From && g.Norm == f.Norm }):
			return fail(at, "takes the same output as another feature")
		case len(f.DTypes) == 0:
			return fail(at, "has no dtypes")
		case len(f.Axes) > maxRank:
			return fail(at, fmt.Sprintf("has %d axes, want at most %d", len(f.Axes), maxRank))
		case (f.From == RoleLast) != (f.Norm != NoLast) || f.Norm != NoLast && f.Norm != PreNorm && f.Norm != PostNorm:
			return fail(at, fmt.Sprintf("has norm %q, want \"pre\" or \"post\" on the role last and nothing elsewhere", printable(string(f.Norm), 20)))
		case f.FinalLayerNorm != NoLast && (f.From != RoleAux || f.FinalLayerNorm != PreNorm && f.FinalLayerNorm != PostNorm):
			return fail(at, fmt.Sprintf("has final_layer_norm %q, want \"pre\" or \"post\" on the role aux and nothing elsewhere", printable(string(f.FinalLayerNorm), 20)))
		case f.Shift && (len(f.Axes) < 2 || f.Axes[1] != "S"):
			return fail(at, "is shifted but its second axis is not S")
		}
		for _, d := range f.DTypes {
			if !d.Valid() {
				return fail(at, "has an unknown dtype")
			}
		}
		for _, axis := range f.Axes {
			for _, factor := range strings.Split(axis, "*") {
				if !axisFactor.MatchString(factor) {
					return fail(at, fmt.Sprintf("has the axis %q, want names or numbers, joined by *", printable(axis, 60)))
				}
			}
		}
	}
	known := func(name string) bool {
		return slices.ContainsFunc(s.Features, func(f SchemaFeature) bool { return f.Name == name })
	}
	v := &s.Supervision
	switch {
	case len(v.Encodings) == 0 && (v.Rule != "" || v.Default != ""):
		return fail("supervision", "has a rule or a default but no encodings")
	case len(v.Encodings) > 0 && v.Rule != "exactly_one" && v.Rule != "at_most_one":
		return fail("supervision.rule", fmt.Sprintf("is %q, want exactly_one or at_most_one", printable(v.Rule, 40)))
	case v.Rule == "exactly_one" && v.Default == "":
		return fail("supervision.default", "is missing")
	case v.Default != "" && !slices.ContainsFunc(v.Encodings, func(e Encoding) bool { return e.Name == v.Default }):
		return fail("supervision.default", fmt.Sprintf("is %q, which is no encoding", printable(v.Default, 40)))
	}
	for i, e := range v.Encodings {
		if e.Name == "" || len(e.Features) == 0 || slices.ContainsFunc(v.Encodings[:i], func(o Encoding) bool { return o.Name == e.Name }) {
			return fail(fmt.Sprintf("supervision.encodings[%d]", i), "wants a name of its own and at least one feature")
		}
		for _, name := range e.Features {
			if f := s.Feature(name); f == nil || f.Required {
				return fail("supervision."+e.Name, fmt.Sprintf("names %q, which is not an optional feature", printable(name, 60)))
			}
		}
	}
	for _, name := range s.Packing {
		if f := s.Feature(name); f == nil || f.Required {
			return fail("packing", fmt.Sprintf("names %q, which is not an optional feature", printable(name, 60)))
		}
	}
	for i := range s.Attributes {
		a := &s.Attributes[i]
		at := fmt.Sprintf("attributes[%d] (%s)", i, printable(a.Name, 60))
		if ValidateID(a.Name) != nil || slices.ContainsFunc(s.Attributes[:i], func(o AttributeRule) bool { return o.Name == a.Name }) {
			return fail(at, "wants a valid name of its own")
		}
		if a.RequiredWith != "" && !known(a.RequiredWith) {
			return fail(at, fmt.Sprintf("is required with %q, which is no feature", printable(a.RequiredWith, 60)))
		}
		if a.Counts != "" && !axisName.MatchString(a.Counts) {
			return fail(at, fmt.Sprintf("counts %q, want the name of an axis", printable(a.Counts, 60)))
		}
		if a.Pattern != "" {
			if len(a.Pattern) > 500 {
				return fail(at, fmt.Sprintf("has a pattern of %d bytes, want at most 500", len(a.Pattern)))
			}
			re, err := wholePattern(a.Pattern)
			if err != nil {
				return fail(at, fmt.Sprintf("has the pattern %q, which is no regular expression: %v", a.Pattern, err))
			}
			a.re = re
		}
	}
	if n := min(s.Admission.MinTokens, s.Admission.MinSupervised); n < 0 {
		return fail("admission", fmt.Sprintf("has the count %d, want 0 or more", n))
	}
	return nil
}

// wholePattern compiles a pattern that the whole value must match. The pattern must be one by itself: a stray parenthesis could end the group around it.
func wholePattern(pattern string) (*regexp.Regexp, error) {
	if _, err := regexp.Compile(pattern); err != nil {
		return nil, err
	}
	return regexp.Compile("^(?:" + pattern + ")$")
}

var (
	axisName   = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,30}$`)
	axisFactor = regexp.MustCompile(`^([A-Za-z_][A-Za-z0-9_]{0,30}|[1-9][0-9]{0,9})$`)
)

// Feature returns the feature with the given name, or nil.
func (s *Schema) Feature(name string) *SchemaFeature {
	for i := range s.Features {
		if s.Features[i].Name == name {
			return &s.Features[i]
		}
	}
	return nil
}

// Role returns the feature that is taken from the given role, or nil.
func (s *Schema) Role(r Role) *SchemaFeature {
	for i := range s.Features {
		if s.Features[i].From == r {
			return &s.Features[i]
		}
	}
	return nil
}

// Validate reports, as ErrSchema, the first thing in which the ref does not agree with the schema.
func (s *Schema) Validate(r Ref) error {
	d := r.data()
	last := s.passed
	if last == nil || last.by != s {
		return s.validate(&d.f)
	}
	if known := last.ref.Load(); known != nil && s.alike(&known.f, &d.f) {
		return nil
	}
	err := s.validate(&d.f)
	if err == nil {
		last.ref.Store(d)
	}
	return err
}

// alike reports whether validate says the same of both: they do not differ in anything that it looks at.
func (s *Schema) alike(a, b *RefFields) bool {
	if a.Algorithm != b.Algorithm || a.SchemaVersion != b.SchemaVersion || len(a.Features) != len(b.Features) {
		return false
	}
	for i := range a.Features {
		if x, y := &a.Features[i], &b.Features[i]; x.Name != y.Name || !x.Equal(y.Spec) {
			return false
		}
	}
	for i := range s.Attributes {
		name := s.Attributes[i].Name
		v, ok := a.Attributes[name]
		if w, too := b.Attributes[name]; v != w || ok != too {
			return false
		}
	}
	return true
}

func (s *Schema) validate(f *RefFields) error {
	fail := func(format string, args ...any) error {
		return &Error{Kind: SchemaError, Op: "schema " + string(s.Name), Subject: f.SampleID, Detail: fmt.Sprintf(format, args...)}
	}
	if f.Algorithm != s.Name || f.SchemaVersion != s.Version {
		return fail("is a sample of %s version %d, want %s version %d", f.Algorithm, f.SchemaVersion, s.Name, s.Version)
	}
	has := func(name string) bool {
		return slices.ContainsFunc(f.Features, func(ft RefFeature) bool { return ft.Name == name })
	}
	for i := range s.Features {
		if sf := &s.Features[i]; sf.Required && !has(sf.Name) {
			return fail("lacks the required feature %q", sf.Name)
		}
	}
	axes := make(axisLengths, 0, 16)
	for i := range s.Attributes {
		var err error
		if axes, err = s.Attributes[i].check(f, has, axes, fail); err != nil {
			return err
		}
	}
	var described [maxFeatures]*SchemaFeature
	for i := range f.Features {
		ft := &f.Features[i]
		sf := s.Feature(ft.Name)
		described[i] = sf
		switch {
		case sf == nil:
			return fail("has the feature %q, which the schema does not know", ft.Name)
		case !slices.Contains(sf.DTypes, ft.DType):
			return fail("feature %q is %s, want one of %v", ft.Name, ft.DType, sf.DTypes)
		case len(ft.Shape) != len(sf.Axes):
			return fail("feature %q is %s, want the axes [%s]", ft.Name, ft.Spec, strings.Join(sf.Axes, ","))
		}
	}
	if err := checkAxes(f, described[:len(f.Features)], axes, fail); err != nil {
		return err
	}
	if n := countPresent(s.Packing, has); n != 0 && n != len(s.Packing) {
		return fail("has %d of the packing features %v, want all or none", n, s.Packing)
	}
	_, err := s.encodingOf(has, fail)
	return err
}

// Packed reports whether the ref carries the schema's packing features.
func (s *Schema) Packed(r Ref) bool {
	return len(s.Packing) > 0 && slices.Contains(r.FeatureNames(), s.Packing[0])
}

// EncodingOf returns the name of the supervision encoding that the ref carries, or "" if it has none.
func (s *Schema) EncodingOf(r Ref) (string, error) {
	names := r.FeatureNames()
	return s.encodingOf(func(name string) bool { return slices.Contains(names, name) }, func(format string, args ...any) error {
		return &Error{Kind: SchemaError, Op: "schema " + string(s.Name), Subject: r.SampleID(), Detail: fmt.Sprintf(format, args...)}
	})
}

func (s *Schema) encodingOf(has func(string) bool, fail func(string, ...any) error) (string, error) {
	found := ""
	for _, e := range s.Supervision.Encodings {
		switch n := countPresent(e.Features, has); {
		case n == 0:
		case n < len(e.Features):
			return "", fail("has %d of the features %v of the supervision %q, want all or none", n, e.Features, e.Name)
		case found != "":
			return "", fail("has the supervision %q and %q, want one", found, e.Name)
		default:
			found = e.Name
		}
	}
	if found == "" && s.Supervision.Rule == "exactly_one" {
		var names []string
		for _, e := range s.Supervision.Encodings {
			names = append(names, e.Name)
		}
		return "", fail("has no supervision, want exactly one of %v", names)
	}
	return found, nil
}

func countPresent(names []string, has func(string) bool) int {
	n := 0
	for _, name := range names {
		if has(name) {
			n++
		}
	}
	return n
}

// axisLengths are the axis names that a sample has bound so far. There are few, so a list is looked through faster than a map is made: Validate is part of every put.
type axisLengths []struct {
	name string
	n    int64
}

func (a axisLengths) find(name string) (int64, bool) {
	for i := range a {
		if a[i].name == name {
			return a[i].n, true
		}
	}
	return 0, false
}

func (a axisLengths) bind(name string, n int64) axisLengths {
	for i := range a {
		if a[i].name == name {
			a[i].n = n
			return a
		}
	}
	return append(a, struct {
		name string
		n    int64
	}{name, n})
}

// check returns the axes with what the attribute binds.
func (a *AttributeRule) check(f *RefFields, has func(string) bool, axes axisLengths, fail func(string, ...any) error) (axisLengths, error) {
	v, ok := f.Attributes[a.Name]
	if !ok {
		if a.Required || a.RequiredWith != "" && has(a.RequiredWith) {
			return nil, fail("lacks the required attribute %q", a.Name)
		}
		return axes, nil
	}
	re := a.re
	if re == nil && a.Pattern != "" { // a rule that was made by hand
		var err error
		if re, err = wholePattern(a.Pattern); err != nil {
			return nil, fail("attribute %q has a rule with the pattern %q, which is no regular expression: %v", a.Name, a.Pattern, err)
		}
	}
	if re != nil && !re.MatchString(v) {
		return nil, fail("attribute %q is %q, want %s", a.Name, printable(v, 60), a.Pattern)
	}
	// A value that lists nothing, such as "unknown", binds nothing.
	if _, list, ok := strings.Cut(v, ":"); ok && a.Counts != "" {
		axes = axes.bind(a.Counts, int64(strings.Count(list, ","))+1)
	}
	return axes, nil
}

// checkAxes binds axis names to lengths, plain names first, then products, which may settle one unknown factor each: again, for as long as that
// binds another name, since it may be the missing one of a product that was looked at before.
func checkAxes(f *RefFields, described []*SchemaFeature, axes axisLengths, fail func(string, ...any) error) error {
	bound, some := -1, false
	for products := false; !products || some && len(axes) > bound; products = true {
		if products {
			bound = len(axes)
		}
		for i := range f.Features {
			ft := &f.Features[i]
			for j, axis := range described[i].Axes {
				product := strings.Contains(axis, "*")
				some = some || product
				if product != products {
					continue
				}
				known, unknown := int64(1), ""
				for rest, more := axis, true; more; {
					var name string
					name, rest, more = strings.Cut(rest, "*")
					n, ok := axes.find(name)
					if name != "" && name[0] >= '0' && name[0] <= '9' {
						v, err := strconv.ParseInt(name, 10, 64)
						n, ok = v, err == nil
					}
					if ok && n > 0 && known > maxInteger/n {
						return fail("feature %q: axis %s is too long", ft.Name, axis)
					}
					if ok {
						known *= n
					} else if unknown == "" {
						unknown = name
					} else {
						unknown = "*" // two unknown factors: any length will do
					}
				}
				n := ft.Shape[j]
				switch {
				case unknown == "*":
				case unknown == "" && n != known:
					return fail("feature %q is %s: axis %s is %d, want %d as elsewhere in the sample", ft.Name, ft.Spec, axis, n, known)
				case unknown != "" && (known == 0 || n%known != 0):
					return fail("feature %q is %s: axis %s is %d, which is no multiple of %d", ft.Name, ft.Spec, axis, n, known)
				case unknown != "":
					axes = axes.bind(unknown, n/known)
				}
			}
		}
	}
	return nil
}
