package sluice

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

func goldenRefs(t testing.TB) map[string][]byte {
	t.Helper()
	files, err := filepath.Glob("testdata/refs/*.json")
	if err != nil || len(files) < 6 {
		t.Fatalf("golden refs: %v, %v", files, err)
	}
	refs := map[string][]byte{}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		refs[filepath.Base(f)] = data
	}
	return refs
}

func testFields() RefFields {
	return RefFields{
		SampleID: "r1-0-17", RunID: "r1", StoreURI: "mem:test", Generation: "g1", Algorithm: EAGLE3, SchemaVersion: 1, NumTokens: 4,
		EstimatedBytes: 2*4*6*2 + 2*4*8, TargetModelVersion: "0", DraftWeightVersion: "0",
		Features: []RefFeature{
			{Name: "aux", Key: "r1-0-17/aux", Spec: Spec{Shape: []int64{2, 4, 6}, DType: BFloat16}},
			{Name: "ids", Key: "r1-0-17/ids", Spec: Spec{Shape: []int64{2, 4}, DType: Int64}},
		},
		Attributes: map[string]string{"shift": "0"},
	}
}

func TestRefGivesGoldenBytesBack(t *testing.T) {
	t.Parallel()
	for name, data := range goldenRefs(t) {
		r, err := ParseRef(data)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if r.Canonical() != string(data) {
			t.Errorf("%s:\n got %s\nwant %s", name, r.Canonical(), data)
		}
		again, err := NewRef(r.Fields())
		if err != nil || !again.Equal(r) {
			t.Errorf("%s: NewRef(Fields()) is not the same ref: %v", name, err)
		}
	}
}

func TestRefSurvivesEncodingJSON(t *testing.T) {
	t.Parallel()
	for name, data := range goldenRefs(t) {
		r, err := ParseRef(data)
		if err != nil {
			t.Fatal(err)
		}
		wire, err := json.Marshal(map[string]any{"ref": r})
		if err != nil {
			t.Fatal(err)
		}
		var back struct{ Ref Ref }
		if err := json.Unmarshal(wire, &back); err != nil || !back.Ref.Equal(r) {
			t.Errorf("%s: came back as %v, %v", name, back.Ref, err)
		}
	}
	if _, err := json.Marshal(Ref{}); !errors.Is(err, ErrInvalid) {
		t.Errorf("the zero Ref marshals: %v", err)
	}
}

func TestRefParseTakesAnySpacingOrderAndEscapes(t *testing.T) {
	t.Parallel()
	data := goldenRefs(t)["scalar-and-text.json"]
	want, err := ParseRef(data)
	if err != nil {
		t.Fatal(err)
	}
	var m map[string]json.RawMessage
	if err := json.Unmarshal(data, &m); err != nil {
		t.Fatal(err)
	}
	m["store_uri"] = json.RawMessage(`"\u006dem:\u0022quoted\""`)
	m["attributes"] = json.RawMessage(strings.Replace(string(m["attributes"]), "é漢😀", `\u00e9\u6f22\ud83d\ude00`, 1))
	spaced, err := json.MarshalIndent(m, "\t", "  ") // sorted by name, indented
	if err != nil {
		t.Fatal(err)
	}
	got, err := ParseRef(spaced)
	if err != nil || !got.Equal(want) {
		t.Fatalf("got %v, %v\nwant %v", got.Canonical(), err, want.Canonical())
	}
}

func TestRefRefusesBadFields(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		edit func(*RefFields)
		want string
	}{
		{"empty sample id", func(f *RefFields) { f.SampleID = "" }, `sample_id is "", want [A-Za-z0-9_][A-Za-z0-9._:-]{0,199}`},
		{"path in the id", func(f *RefFields) { f.SampleID = "a/b" }, `sample_id is "a/b"`},
		{"dots in the id", func(f *RefFields) { f.SampleID = "a..b" }, `without ".."`},
		{"hidden file", func(f *RefFields) { f.SampleID = ".a" }, `sample_id is ".a"`},
		{"long id", func(f *RefFields) { f.RunID = strings.Repeat("x", 201) }, "run_id is"},
		{"control bytes are not echoed", func(f *RefFields) { f.RunID = "a\x1b[31m" }, `run_id is "a?[31m"`},
		{"no generation", func(f *RefFields) { f.Generation = "" }, "generation is"},
		{"no algorithm", func(f *RefFields) { f.Algorithm = "" }, "algorithm is"},
		{"no store", func(f *RefFields) { f.StoreURI = "" }, "store_uri is empty"},
		{"newline in the uri", func(f *RefFields) { f.StoreURI = "mem:\n" }, `store_uri contains the control character '\n'`},
		{"line separator", func(f *RefFields) { f.Attributes["shift"] = "a\u2028b" }, "attributes.shift contains the control character"},
		{"not UTF-8", func(f *RefFields) { f.TargetModelVersion = "\xff" }, "target_model_version is not valid UTF-8"},
		{"no draft version", func(f *RefFields) { f.DraftWeightVersion = "" }, "draft_weight_version is empty"},
		{"schema version 0", func(f *RefFields) { f.SchemaVersion = 0 }, "schema_version is 0, want 1 or more"},
		{"negative tokens", func(f *RefFields) { f.NumTokens = -1 }, "num_tokens is -1, want 0 or more"},
		{"tokens 2^53", func(f *RefFields) { f.NumTokens = 1 << 53 }, "less than 2^53"},
		{"wrong bytes", func(f *RefFields) { f.EstimatedBytes++ }, "estimated_bytes is 161, but the features add up to 160"},
		{"no features", func(f *RefFields) { f.Features = nil }, "features is empty"},
		{"twice the same", func(f *RefFields) { f.Features[1].Name = "aux" }, `features[1].name is "aux", which features[0] has too`},
		{"bad feature name", func(f *RefFields) { f.Features[1].Name = "a b" }, `features[1].name is "a b"`},
		{"empty key", func(f *RefFields) { f.Features[0].Key = "" }, "features[0].key is empty"},
		{"negative axis", func(f *RefFields) { f.Features[0].Shape[1] = -4 }, "shape[1] is -4, want 0 or more"},
		{"no dtype", func(f *RefFields) { f.Features[0].DType = 0 }, "the dtype is missing or unknown"},
		{"overflow", func(f *RefFields) { f.Features[0].Shape = []int64{1 << 40, 1 << 40} }, "overflows"},
		{"overflow beside a zero", func(f *RefFields) { f.Features[0].Shape = []int64{0, 1 << 40, 1 << 40} }, "overflows"},
		{"attribute key", func(f *RefFields) { f.Attributes["a b"] = "" }, `attributes has the key "a b"`},
		{"too long", func(f *RefFields) { f.Attributes["a"] = strings.Repeat("x", MaxRefBytes) }, "at most 65536 are allowed"},
		{"too many features", func(f *RefFields) { f.Features = make([]RefFeature, 65) }, "features has 65 entries, at most 64"},
	} {
		f := testFields()
		tc.edit(&f)
		_, err := NewRef(f)
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want ...%s...", tc.name, err, tc.want)
		}
	}
}

func TestRefParseIsStrict(t *testing.T) {
	t.Parallel()
	r, err := NewRef(testFields())
	if err != nil {
		t.Fatal(err)
	}
	good := r.Canonical()
	replace := func(old, new string) string {
		if !strings.Contains(good, old) {
			t.Fatalf("%q is not in %s", old, good)
		}
		return strings.Replace(good, old, new, 1)
	}
	for _, tc := range []struct{ name, in, want string }{
		{"empty", "", "ends where '{' is wanted"},
		{"unknown field", replace(`"run_id"`, `"runid"`), `unknown field "runid"`},
		{"other case", replace(`"run_id"`, `"Run_ID"`), `unknown field "Run_ID"`},
		{"twice", replace(`"run_id":"r1"`, `"run_id":"r1","run_id":"r2"`), `the field "run_id" is there twice`},
		{"missing", replace(`"run_id":"r1",`, ``), `the field "run_id" is missing`},
		{"missing in a feature", replace(`,"dtype":"bfloat16"`, ``), `the field "dtype" is missing`},
		{"unknown in a feature", replace(`"dtype":"bfloat16"`, `"dtype":"bfloat16","x":1`), `unknown field "x"`},
		{"bool as integer", replace(`"num_tokens":4`, `"num_tokens":true`), "want a non-negative integer in plain digits"},
		{"float as integer", replace(`"num_tokens":4`, `"num_tokens":4.0`), "want a non-negative integer"},
		{"exponent", replace(`"num_tokens":4`, `"num_tokens":4e0`), "want a non-negative integer"},
		{"string as integer", replace(`"num_tokens":4`, `"num_tokens":"4"`), "want a non-negative integer"},
		{"leading zero", replace(`"num_tokens":4`, `"num_tokens":04`), "want a non-negative integer"},
		{"negative", replace(`"num_tokens":4`, `"num_tokens":-4`), "want a non-negative integer"},
		{"2^53", replace(`"num_tokens":4`, `"num_tokens":9007199254740992`), "is 2^53 or more"},
		{"huge", replace(`"num_tokens":4`, `"num_tokens":`+strings.Repeat("9", 400)), "is 2^53 or more"},
		{"bool in a shape", replace(`[2,4,6]`, `[2,true,6]`), "want a non-negative integer"},
		{"null", replace(`"run_id":"r1"`, `"run_id":null`), `found 'n' where '"' is wanted`},
		{"unknown dtype", replace(`"bfloat16"`, `"bfloat"`), "is not a torch dtype name"},
		{"safetensors dtype", replace(`"bfloat16"`, `"BF16"`), "is not a torch dtype name"},
		{"trailing comma", replace(`"shift":"0"}`, `"shift":"0",}`), `found '}' where '"' is wanted`},
		{"attribute twice", replace(`"shift":"0"`, `"shift":"0","shift":"0"`), `the attribute "shift" is there twice`},
		{"number as attribute", replace(`"shift":"0"`, `"shift":0`), `found '0' where '"' is wanted`},
		{"more behind", good + "{}", "there is more after the ref"},
		{"NUL behind", good + "\x00", "there is more after the ref"},
		{"cut", good[:len(good)-1], "ends where ',' is wanted"},
		{"cut in a string", good[:20], "ends inside a string"},
		{"lone surrogate", replace(`"r1"`, `"\ud800"`), "broken \\u escape"},
		{"bad escape", replace(`"r1"`, `"\q"`), "unknown escape"},
		{"raw control", replace(`"r1"`, "\"r\n\""), "raw control character"},
		{"not UTF-8", replace(`"shift":"0"`, "\"shift\":\"\xff\""), "is not valid UTF-8"},
		{"deep", strings.Repeat("[", 100000), "found '[' where '{' is wanted"},
		{"too long", strings.Repeat(" ", 4*MaxRefBytes+1), "at most 262144 are allowed"},
	} {
		_, err := ParseRef([]byte(tc.in))
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want ...%s...", tc.name, err, tc.want)
		}
	}
}

func TestRefIsImmutable(t *testing.T) {
	t.Parallel()
	f := testFields()
	r, err := NewRef(f)
	if err != nil {
		t.Fatal(err)
	}
	before := r.Canonical()
	f.Features[0].Shape[0] = 99 // what it was made of
	f.Features[0].Name = "changed"
	f.Attributes["shift"] = "1"
	for ft := range r.Features() { // and what it hands out
		ft.Shape[0] = 98
	}
	ft, _ := r.Feature("aux")
	ft.Shape[0] = 97
	r.FeatureNames()[0] = "changed"
	g := r.Fields()
	g.Features[1].Shape[0] = 96
	g.Attributes["new"] = "x"
	again, err := NewRef(r.Fields())
	if err != nil || again.Canonical() != before || r.Canonical() != before {
		t.Fatalf("the ref changed: %v\n got %s\nwant %s", err, again.Canonical(), before)
	}
}

func TestRefFeatureOrderIsPartOfTheValue(t *testing.T) {
	t.Parallel()
	f := testFields()
	a, err := NewRef(f)
	if err != nil {
		t.Fatal(err)
	}
	slices.Reverse(f.Features)
	b, err := NewRef(f)
	if err != nil {
		t.Fatal(err)
	}
	if a.Equal(b) || !cmp.Equal(b.FeatureNames(), []string{"ids", "aux"}) {
		t.Fatalf("order is lost: %v, %v", a.FeatureNames(), b.FeatureNames())
	}
}

func TestZeroRefIsSafe(t *testing.T) {
	t.Parallel()
	var r Ref
	if !r.IsZero() || r.SampleID() != "" || r.NumFeatures() != 0 || r.Canonical() != "" || len(r.FeatureNames()) != 0 || !r.Equal(Ref{}) {
		t.Fatal("the zero Ref says something")
	}
	if _, ok := r.Attribute("x"); ok {
		t.Fatal("the zero Ref has an attribute")
	}
	r.Attributes()(func(string, string) bool { t.Fatal("the zero Ref has an attribute"); return false })
}

func TestRefCheckFeaturesNamesTheDifference(t *testing.T) {
	t.Parallel()
	r, err := NewRef(testFields())
	if err != nil {
		t.Fatal(err)
	}
	good := func() []Feature {
		return []Feature{{"aux", NewTensor(BFloat16, 2, 4, 6)}, {"ids", NewTensor(Int64, 2, 4)}}
	}
	if err := r.CheckFeatures("get", good()); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		want string
		edit func([]Feature) []Feature
	}{
		{"has 1 features, the ref promises 2", func(f []Feature) []Feature { return f[:1] }},
		{`feature 0 is "ids", the ref promises "aux"`, func(f []Feature) []Feature { slices.Reverse(f); return f }},
		{`feature "aux" is bfloat16[4,2,6], the ref promises bfloat16[2,4,6]`, func(f []Feature) []Feature { f[0].Shape = []int64{4, 2, 6}; return f }},
		{`feature "aux" is float16[2,4,6]`, func(f []Feature) []Feature { f[0].DType = Float16; return f }},
		{`feature "ids" has 63 bytes, int64[2,4] needs 64`, func(f []Feature) []Feature { f[1].Data = f[1].Data[1:]; return f }},
	} {
		if err := r.CheckFeatures("get", tc.edit(good())); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("got %v, want %s", err, tc.want)
		}
	}
}

func drawRef(t *rapid.T) RefFields {
	id := rapid.StringMatching(`[A-Za-z0-9_]([A-Za-z0-9_:-]{0,20})`)
	text := rapid.StringMatching(`[^\x00-\x1f\x7f-\x9f\x{2028}\x{2029}\x{d800}-\x{dfff}]{1,30}`)
	f := RefFields{
		SampleID: id.Draw(t, "sample"), RunID: id.Draw(t, "run"), StoreURI: text.Draw(t, "uri"), Generation: id.Draw(t, "generation"),
		Algorithm: Algorithm(id.Draw(t, "algorithm")), SchemaVersion: rapid.Int64Range(1, maxInteger-1).Draw(t, "version"),
		NumTokens: rapid.Int64Range(0, maxInteger-1).Draw(t, "tokens"), TargetModelVersion: text.Draw(t, "target"), DraftWeightVersion: text.Draw(t, "draft"),
		Attributes: rapid.MapOfN(id, text, 0, 5).Draw(t, "attributes"),
	}
	for _, name := range rapid.SliceOfNDistinct(id, 1, 6, rapid.ID[string]).Draw(t, "features") {
		f.Features = append(f.Features, RefFeature{Name: name, Key: text.Draw(t, "key"), Spec: Spec{
			Shape: rapid.SliceOfN(rapid.Int64Range(0, 1000), 0, 4).Draw(t, "shape"), DType: rapid.SampledFrom(DTypes()).Draw(t, "dtype")}})
	}
	f.EstimatedBytes, _ = SumBytes(f.Features)
	return f
}

func TestRefRoundTripsWhateverIsValid(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := drawRef(t)
		r, err := NewRef(f)
		if err != nil {
			t.Fatal(err)
		}
		back, err := ParseRef([]byte(r.Canonical()))
		if err != nil || back.Canonical() != r.Canonical() {
			t.Fatalf("%v\n got %s\nwant %s", err, back.Canonical(), r.Canonical())
		}
		if !json.Valid([]byte(r.Canonical())) {
			t.Fatalf("not JSON: %s", r.Canonical())
		}
	})
}

func FuzzParseRef(f *testing.F) {
	for _, data := range goldenRefs(f) {
		f.Add(data)
	}
	f.Add([]byte(`{"sample_id":"a","features":[{"shape":[1,2],"name":"\ud83d\ude00"}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := ParseRef(data)
		if err != nil {
			if KindOf(err) != Invalid {
				t.Fatalf("an error of kind %q: %v", KindOf(err), err)
			}
			return
		}
		if !json.Valid(data) {
			t.Fatalf("accepted what is not JSON: %q", data)
		}
		again, err := ParseRef([]byte(r.Canonical()))
		if err != nil || again.Canonical() != r.Canonical() {
			t.Fatalf("canonical form does not parse to itself: %v\n%s", err, r.Canonical())
		}
	})
}

// A hundred thousand of them are kept by a queue that is full.
func TestParsedRefsShareWhatIsTheSame(t *testing.T) {
	f := testFields()
	const n = 5000
	refs := make([]Ref, n)
	live := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	for name, most := range map[string]uint64{"the same shapes": 400, "lengths": 600, "other shapes": 1200} {
		before := live()
		for i := range refs {
			id := fmt.Sprintf("shard-%03d-row-%07d", i/100, i)
			for j := range f.Features {
				ft := &f.Features[j]
				ft.Key = id + "/" + ft.Name
				if name != "the same shapes" {
					ft.Shape = slices.Clone(ft.Shape)
					ft.Shape[1] = int64(1 + i%97)
				}
				if name == "lengths" {
					f.NumTokens = ft.Shape[1]
				}
			}
			f.SampleID, f.Generation = id, NewGeneration()
			f.EstimatedBytes, _ = SumBytes(f.Features)
			r, err := NewRef(f)
			if err != nil {
				t.Fatal(err)
			}
			if refs[i], err = ParseRef([]byte(r.Canonical())); err != nil {
				t.Fatal(err)
			}
		}
		each := (live() - before) / n
		t.Logf("%s: %d bytes each", name, each)
		if each > most {
			t.Errorf("%s: a ref takes %d bytes, want at most %d", name, each, most)
		}
		clear(refs)
	}
}

// Whatever refs share, each says what it was made of.
func TestRefsThatShareSayWhatTheyWereMadeOf(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var refs []Ref
		var fields []RefFields
		for range rapid.IntRange(2, 12).Draw(t, "refs") {
			f := testFields()
			few := func(of string) string { return of + rapid.SampledFrom([]string{"", "1", "2"}).Draw(t, of) }
			f.SampleID, f.Generation, f.RunID, f.StoreURI = few("id"), few("gen"), few("run"), few("mem:x")
			f.Algorithm, f.TargetModelVersion, f.DraftWeightVersion = Algorithm(few("alg")), few("t"), few("d")
			switch rapid.IntRange(0, 3).Draw(t, "attributes") {
			case 0:
				f.Attributes = nil
			case 1:
				f.Attributes = map[string]string{}
			case 2:
				f.Attributes = map[string]string{few("a"): few("v"), "b": few("w")}
			}
			f.Features = f.Features[:rapid.IntRange(1, len(f.Features)).Draw(t, "features")]
			for i := range f.Features {
				ft := &f.Features[i]
				ft.Shape = slices.Clone(ft.Shape)
				switch rapid.IntRange(0, 5).Draw(t, "feature") {
				case 0:
					ft.Shape = append(ft.Shape, int64(rapid.IntRange(1, 2).Draw(t, "axis")))
				case 1:
					ft.Name = ft.Name + "x"
				case 2:
					ft.Key = rapid.SampledFrom([]string{"k", "id/", "id1/" + ft.Name, "/" + ft.Name}).Draw(t, "key")
				case 3:
					ft.Shape = nil
				default:
					ft.Key = f.SampleID + "/" + ft.Name
				}
			}
			var err error
			if f.EstimatedBytes, err = SumBytes(f.Features); err != nil {
				t.Fatal(err)
			}
			r, err := NewRef(f)
			if err == nil && rapid.Bool().Draw(t, "parsed") {
				r, err = ParseRef([]byte(r.Canonical()))
			}
			if err != nil {
				t.Fatal(err)
			}
			was := f
			was.Features, was.Attributes = slices.Clone(f.Features), maps.Clone(f.Attributes)
			for i := range was.Features {
				was.Features[i].Shape = slices.Clone(f.Features[i].Shape)
			}
			refs, fields = append(refs, r), append(fields, was)
			for i := range f.Features { // what the caller does with it later is its own affair
				for j := range f.Features[i].Shape {
					f.Features[i].Shape[j] = 77
				}
				f.Features[i].Key = "changed"
			}
			for k := range f.Attributes {
				f.Attributes[k] = "changed"
			}
		}
		for i, r := range refs {
			if d := cmp.Diff(fields[i], r.Fields(), cmpopts.EquateEmpty()); d != "" {
				t.Fatalf("ref %d: -was +is\n%s", i, d)
			}
			for _, ft := range fields[i].Features {
				if got, ok := r.Feature(ft.Name); !ok || got.Key != ft.Key || !got.Equal(ft.Spec) {
					t.Fatalf("ref %d: feature %q is %+v, want %+v", i, ft.Name, got, ft)
				}
			}
			if again, err := ParseRef([]byte(r.Canonical())); err != nil || again.Canonical() != r.Canonical() {
				t.Fatalf("ref %d: %v\n%s", i, err, r.Canonical())
			}
			for j, s := range refs {
				if got, want := r.Equal(s), r.Canonical() == s.Canonical(); got != want {
					t.Fatalf("refs %d and %d: equal is %v, want %v", i, j, got, want)
				}
			}
		}
	})
}

func BenchmarkRef(b *testing.B) {
	data := goldenRefs(b)["eagle3.json"]
	r, err := ParseRef(data)
	if err != nil {
		b.Fatal(err)
	}
	fields := r.Fields()
	b.Run("parse", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := ParseRef(data); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("new", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := NewRef(fields); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func TestEveryAccessorGivesItsField(t *testing.T) {
	t.Parallel()
	f := testFields()
	f.SchemaVersion, f.TargetModelVersion, f.DraftWeightVersion, f.Attributes = 7, "t-3", "12", map[string]string{"shift": "0", "a": "x"}
	r, err := NewRef(f)
	if err != nil {
		t.Fatal(err)
	}
	got := RefFields{
		SampleID: r.SampleID(), RunID: r.RunID(), StoreURI: r.StoreURI(), Generation: r.Generation(), Features: slices.Collect(r.Features()), Algorithm: r.Algorithm(),
		SchemaVersion: r.SchemaVersion(), NumTokens: r.NumTokens(), EstimatedBytes: r.EstimatedBytes(), TargetModelVersion: r.TargetModelVersion(),
		DraftWeightVersion: r.DraftWeightVersion(), Attributes: map[string]string{},
	}
	var keys []string
	for k, v := range r.Attributes() {
		keys = append(keys, k)
		got.Attributes[k] = v
	}
	if d := cmp.Diff(f, got); d != "" || !slices.IsSorted(keys) {
		t.Errorf("(-want +got):\n%s\nattributes in the order %v", d, keys)
	}
	if d := cmp.Diff(f, r.Fields()); d != "" {
		t.Errorf("Fields (-want +got):\n%s", d)
	}
	if _, ok := r.Feature("nothing"); ok {
		t.Error("there is a feature of any name")
	}
	byRef := map[string]int{r.Canonical(): 1} // a ref keys a map by its canonical form
	if again, err := ParseRef([]byte(r.Canonical())); err != nil || byRef[again.Canonical()] != 1 {
		t.Errorf("an equal ref is another key: %v", err)
	}
}
