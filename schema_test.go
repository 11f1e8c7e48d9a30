package sluice

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// eagleRef is a good eagle3 sample that a test may spoil.
func eagleRef() RefFields {
	spec := func(d DType, shape ...int64) Spec { return Spec{shape, d} }
	return RefFields{
		SampleID: "s-1", RunID: "r", StoreURI: "mem:x", Generation: "g", Algorithm: EAGLE3, SchemaVersion: 1, TargetModelVersion: "0", DraftWeightVersion: "0",
		Features: []RefFeature{
			{"aux_hidden_states", "k", spec(BFloat16, 1, 5, 96)}, {"input_ids", "k", spec(Int64, 1, 5)}, {"attention_mask", "k", spec(Int64, 1, 5)},
			{"loss_mask", "k", spec(Int64, 1, 5)}, {"last_hidden_states", "k", spec(BFloat16, 1, 5, 32)},
		},
		Attributes: map[string]string{"shift": "0", "aux_layers": "hf:1,3,4", "last_norm": "post"},
	}
}

func buildRef(t *testing.T, f RefFields) Ref {
	t.Helper()
	var err error
	if f.EstimatedBytes, err = SumBytes(f.Features); err != nil {
		t.Fatal(err)
	}
	r, err := NewRef(f)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestBuiltInSchemasAreOneFileEach(t *testing.T) {
	t.Parallel()
	if got := Algorithms(); !slices.Equal(got, []Algorithm{DFlash, DSpark, EAGLE3}) {
		t.Fatalf("algorithms: %v", got)
	}
	for _, a := range Algorithms() {
		s, err := SchemaOf(a)
		if err != nil || s.Name != a {
			t.Fatal(s, err)
		}
		data, err := os.ReadFile("schemas/" + string(a) + ".json")
		if err != nil {
			t.Fatal(err)
		}
		// What is parsed says all that the file says: it survives its own JSON form.
		wire, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseSchema(wire)
		if err != nil {
			t.Fatal(err)
		}
		wire2, err := json.Marshal(again)
		if err != nil || string(wire) != string(wire2) || len(data) == 0 {
			t.Errorf("%s does not survive its JSON form: %v", a, err)
		}
	}
	if _, err := SchemaOf("eagle9"); !errors.Is(err, ErrNotFound) || !strings.Contains(err.Error(), "dflash, dspark, eagle3") {
		t.Errorf("got %v", err)
	}
}

func TestGoldenRefsAgreeWithTheirSchema(t *testing.T) {
	t.Parallel()
	for name, data := range goldenRefs(t) {
		r, err := ParseRef(data)
		if err != nil {
			t.Fatal(err)
		}
		s, err := SchemaOf(r.Algorithm())
		if err != nil {
			continue // made for the codec
		}
		if err := s.Validate(r); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSchemaRefusesWhatDisagrees(t *testing.T) {
	t.Parallel()
	s, err := SchemaOf(EAGLE3)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Validate(buildRef(t, eagleRef())); err != nil {
		t.Fatal(err)
	}
	add := func(f *RefFields, name string, d DType, shape ...int64) {
		f.Features = append(f.Features, RefFeature{name, "k", Spec{shape, d}})
	}
	drop := func(f *RefFields, name string) {
		f.Features = slices.DeleteFunc(f.Features, func(ft RefFeature) bool { return ft.Name == name })
	}
	for _, tc := range []struct {
		name string
		edit func(*RefFields)
		want string
	}{
		{"other algorithm", func(f *RefFields) { f.Algorithm = DFlash }, "is a sample of dflash version 1, want eagle3 version 1"},
		{"other version", func(f *RefFields) { f.SchemaVersion = 2 }, "eagle3 version 2, want eagle3 version 1"},
		{"missing feature", func(f *RefFields) { drop(f, "loss_mask") }, `lacks the required feature "loss_mask"`},
		{"unknown feature", func(f *RefFields) { add(f, "extra", Float32, 1) }, `has the feature "extra", which the schema does not know`},
		{"wrong dtype", func(f *RefFields) { f.Features[1].DType = Int32 }, `feature "input_ids" is int32, want one of [int64]`},
		{"wrong rank", func(f *RefFields) { f.Features[1].Shape = []int64{5} }, `feature "input_ids" is int64[5], want the axes [B,S]`},
		{"other S", func(f *RefFields) { f.Features[3].Shape = []int64{1, 6} }, `feature "loss_mask" is int64[1,6]: axis S is 6, want 5`},
		{"K*H does not work out", func(f *RefFields) { f.Features[0].Shape = []int64{1, 5, 64} }, `axis K*H is 64, want 96`},
		{"K from the attribute", func(f *RefFields) { f.Attributes["aux_layers"] = "hf:1,3" }, `axis K*H is 96, want 64`},
		{"not K states", func(f *RefFields) {
			drop(f, "last_hidden_states")
			add(f, "logits", Float32, 1, 5, 264)
			f.Features[0].Shape[2] = 97
		}, "axis K*H is 97, which is no multiple of 3"},
		{"no supervision", func(f *RefFields) { drop(f, "last_hidden_states") }, "has no supervision, want exactly one of [last_hidden_states logits target_probs]"},
		{"two", func(f *RefFields) { add(f, "logits", Float32, 1, 5, 264) }, `has the supervision "last_hidden_states" and "logits", want one`},
		{"half of one", func(f *RefFields) { drop(f, "last_hidden_states"); add(f, "target_probs", Float32, 1, 5, 8) }, "has 1 of the features [target_probs position_mask]"},
		{"position mask rank", func(f *RefFields) {
			drop(f, "last_hidden_states")
			add(f, "target_probs", Float32, 1, 5, 8)
			add(f, "position_mask", Bool, 1, 5, 2)
		}, "axis 1 is 2, want 1"},
		{"some packing", func(f *RefFields) { add(f, "position_ids", Int64, 1, 5); add(f, "doc_remaining", Int64, 1, 5) }, "has 2 of the packing features [position_ids seq_lens doc_remaining], want all or none"},
		{"no shift", func(f *RefFields) { delete(f.Attributes, "shift") }, `lacks the required attribute "shift"`},
		{"shift 2", func(f *RefFields) { f.Attributes["shift"] = "2" }, `attribute "shift" is "2", want 0|1`},
		{"layers without a convention", func(f *RefFields) { f.Attributes["aux_layers"] = "1,3,4" }, `attribute "aux_layers" is "1,3,4", want unknown|(hf|vllm)`},
		{"no norm", func(f *RefFields) { delete(f.Attributes, "last_norm") }, `lacks the required attribute "last_norm"`},
	} {
		f := eagleRef()
		tc.edit(&f)
		if err := s.Validate(buildRef(t, f)); !errors.Is(err, ErrSchema) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want ...%s...", tc.name, err, tc.want)
		}
	}
}

func TestSchemaKnowsEncodingAndPacking(t *testing.T) {
	t.Parallel()
	s, err := SchemaOf(EAGLE3)
	if err != nil {
		t.Fatal(err)
	}
	f := eagleRef()
	if e, err := s.EncodingOf(buildRef(t, f)); err != nil || e != "last_hidden_states" || s.Packed(buildRef(t, f)) {
		t.Errorf("%q, %v", e, err)
	}
	for _, name := range s.Packing {
		shape := []int64{1, 5}
		if name == "seq_lens" {
			shape = []int64{1, 2}
		}
		f.Features = append(f.Features, RefFeature{name, "k", Spec{shape, Int64}})
	}
	if r := buildRef(t, f); s.Validate(r) != nil || !s.Packed(r) {
		t.Errorf("a packed sample is refused: %v", s.Validate(r))
	}
	if s.Role(RoleAux).Name != "aux_hidden_states" || s.Role("nothing") != nil {
		t.Error("roles are confused")
	}
}

func TestUserSchemaNeedsNoRebuild(t *testing.T) {
	t.Parallel()
	s, err := ParseSchema([]byte(`{"name":"medusa","version":3,"features":[
		{"name":"h","from":"last","norm":"post","axes":["B","S","H"],"dtypes":["bfloat16"],"required":true},
		{"name":"heads","axes":["B","S","4","H"],"dtypes":["float32"],"required":true}]}`))
	if err != nil {
		t.Fatal(err)
	}
	f := RefFields{SampleID: "s", RunID: "r", StoreURI: "m:", Generation: "g", Algorithm: "medusa", SchemaVersion: 3, TargetModelVersion: "0", DraftWeightVersion: "0",
		Features: []RefFeature{{"h", "k", Spec{[]int64{1, 2, 8}, BFloat16}}, {"heads", "k", Spec{[]int64{1, 2, 4, 8}, Float32}}}}
	if err := s.Validate(buildRef(t, f)); err != nil {
		t.Error(err)
	}
	f.Features[1].Shape = []int64{1, 2, 5, 8}
	if err := s.Validate(buildRef(t, f)); !errors.Is(err, ErrSchema) {
		t.Errorf("got %v", err)
	}
}

func TestParseSchemaRefusesBadDocuments(t *testing.T) {
	t.Parallel()
	feature := `{"name":"x","axes":["B","S"],"dtypes":["int64"]}`
	doc := func(features, rest string) string {
		return `{"name":"a","version":1,"features":[` + features + `]` + rest + `}`
	}
	if _, err := ParseSchema([]byte(doc(feature, ""))); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct{ name, in, want string }{
		{"not JSON", "x", "invalid character"},
		{"more behind", doc(feature, "") + "{}", "there is more after the document"},
		{"unknown field", doc(feature, `,"extra":1`), `unknown field "extra"`},
		{"bad name", strings.Replace(doc(feature, ""), `"a"`, `"../a"`, 1), "name wants"},
		{"no version", strings.Replace(doc(feature, ""), `"version":1,`, ``, 1), "version is 0, want 1 or more"},
		{"no features", doc("", ""), "features has 0 entries"},
		{"twice", doc(feature+","+feature, ""), "features[1] (x) is there twice"},
		{"unknown role", doc(`{"name":"x","from":"y","axes":[],"dtypes":["int64"]}`, ""), `has from "y"`},
		{"no dtypes", doc(`{"name":"x","axes":["B"],"dtypes":[]}`, ""), "has no dtypes"},
		{"unknown dtype", doc(`{"name":"x","axes":["B"],"dtypes":["int65"]}`, ""), "is not a torch dtype name"},
		{"bad axis", doc(`{"name":"x","axes":["B-1"],"dtypes":["int64"]}`, ""), `has the axis "B-1"`},
		{"shift without S", doc(`{"name":"x","axes":["B"],"dtypes":["int64"],"shift":true}`, ""), "is shifted but its second axis is not S"},
		{"last without norm", doc(`{"name":"x","from":"last","axes":["B"],"dtypes":["int64"]}`, ""), `has norm ""`},
		{"norm on ids", doc(`{"name":"x","norm":"post","axes":["B"],"dtypes":["int64"]}`, ""), `has norm "post"`},
		{"final norm on ids", doc(`{"name":"x","final_layer_norm":"post","axes":["B"],"dtypes":["int64"]}`, ""), `has final_layer_norm "post"`},
		{"encoding of nothing", doc(feature, `,"supervision":{"rule":"at_most_one","encodings":[{"name":"e","features":["y"]}]}`), `names "y", which is not an optional feature`},
		{"unknown rule", doc(feature, `,"supervision":{"rule":"some","encodings":[{"name":"e","features":["x"]}]}`), `is "some", want exactly_one or at_most_one`},
		{"no default", doc(feature, `,"supervision":{"rule":"exactly_one","encodings":[{"name":"e","features":["x"]}]}`), "supervision.default is missing"},
		{"default of nothing", doc(feature, `,"supervision":{"rule":"at_most_one","default":"d","encodings":[{"name":"e","features":["x"]}]}`), "which is no encoding"},
		{"rule without encodings", doc(feature, `,"supervision":{"rule":"exactly_one"}`), "but no encodings"},
		{"packing of nothing", doc(feature, `,"packing":["y"]`), `packing names "y"`},
		{"another case", strings.Replace(doc(feature, ""), `"version"`, `"Version"`, 1), `unknown field "Version"`},
		{"another case by folding", strings.Replace(doc(feature, ""), `"version"`, `"ver\u017fion"`, 1), `unknown field "verſion"`},
		{"a field twice", doc(feature, `,"version":2`), `the field "version" is there twice`},
		{"a nested field twice", doc(`{"name":"x","axes":["B"],"dtypes":["int64"],"required":true,"required":false}`, ""), `the field "required" is there twice`},
		{"not UTF-8", doc(feature, `,"attributes":[{"name":"a","pattern":"`+"\xff"+`"}]`), "not valid UTF-8"},
		{"many axes", doc(`{"name":"x","axes":["a"`+strings.Repeat(`,"a"`, 16)+`],"dtypes":["int64"]}`, ""), "has 17 axes, want at most 16"},
		{"a pattern that gets out of its group", doc(feature, `,"attributes":[{"name":"a","pattern":"0)|(?:1"}]`), `has the pattern "0)|(?:1", which is no regular expression`},
		{"a long pattern", doc(feature, `,"attributes":[{"name":"a","pattern":"`+strings.Repeat("a", 501)+`"}]`), "a pattern of 501 bytes, want at most 500"},
		{"bad pattern", doc(feature, `,"attributes":[{"name":"a","pattern":"("}]`), "no regular expression"},
		{"attribute with nothing", doc(feature, `,"attributes":[{"name":"a","required_with":"y"}]`), `is required with "y"`},
		{"negative admission", doc(feature, `,"admission":{"min_tokens":-1}`), "admission has the count -1, want 0 or more"},
		{"long", strings.Repeat(" ", maxSchemaBytes+1), "at most 65536 are allowed"},
	} {
		if _, err := ParseSchema([]byte(tc.in)); !errors.Is(err, ErrSchema) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want ...%s...", tc.name, err, tc.want)
		}
	}
}

func TestASchemaWithinADocumentIsCheckedAndEnforced(t *testing.T) {
	t.Parallel()
	s, err := SchemaOf(EAGLE3)
	if err != nil {
		t.Fatal(err)
	}
	wire, err := json.Marshal(RunConfig{RunID: "r", Schema: s})
	if err != nil {
		t.Fatal(err)
	}
	var run RunConfig
	if err := json.Unmarshal(wire, &run); err != nil {
		t.Fatal(err)
	}
	byHand := *s
	byHand.Attributes = []AttributeRule{{Name: "shift", Required: true, Pattern: "0|1"}}
	f := eagleRef()
	f.Attributes["shift"] = "11"
	for what, schema := range map[string]*Schema{"read with its run": run.Schema, "made by hand": &byHand} {
		if err := schema.Validate(buildRef(t, f)); !errors.Is(err, ErrSchema) || !strings.Contains(err.Error(), `attribute "shift" is "11", want 0|1`) {
			t.Errorf("a schema that was %s: %v", what, err)
		}
	}
	if err := json.Unmarshal([]byte(`{"run_id":"r","schema":{"name":"a","version":1,"features":[]}}`), &run); !errors.Is(err, ErrSchema) {
		t.Errorf("a bad schema within a run: %v", err)
	}
}

func TestProductsAreCheckedWhateverTheirOrder(t *testing.T) {
	t.Parallel()
	s, err := ParseSchema([]byte(`{"name":"x","version":1,"features":[
		{"name":"a","axes":["K*H"],"dtypes":["int8"],"required":true},{"name":"b","axes":["2*H"],"dtypes":["int8"],"required":true}]}`))
	if err != nil {
		t.Fatal(err)
	}
	for n, want := range map[int64]string{96: "", 97: "axis K*H is 97, which is no multiple of 32"} {
		features := []RefFeature{{"a", "k", Spec{[]int64{n}, Int8}}, {"b", "k", Spec{[]int64{64}, Int8}}}
		for range 2 {
			slices.Reverse(features)
			err := s.Validate(buildRef(t, RefFields{SampleID: "s", RunID: "r", StoreURI: "m:", Generation: "g", Algorithm: "x", SchemaVersion: 1,
				TargetModelVersion: "0", DraftWeightVersion: "0", Features: features}))
			if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("%d, %q first: got %v, want %q", n, features[0].Name, err, want)
			}
		}
	}
}

// A ref that is like the last one which passed is not checked again: whatever the refs are, the answer must be that of a schema which remembers none.
func TestWhatASchemaRemembersChangesNoAnswer(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := eagleRef()
		data, err := schemaFiles.ReadFile("schemas/eagle3.json")
		if err != nil {
			t.Fatal(err)
		}
		s, err := ParseSchema(data)
		if err != nil {
			t.Fatal(err)
		}
		edit := func(f RefFields, how, which int) RefFields {
			f.Features, f.Attributes = slices.Clone(f.Features), maps.Clone(f.Attributes)
			ft := &f.Features[which%len(f.Features)]
			ft.Shape = slices.Clone(ft.Shape)
			switch how {
			case 1:
				f.Algorithm = DFlash
			case 2:
				f.SchemaVersion = 2
			case 3:
				ft.Name = "other"
			case 4:
				ft.DType = Int16
			case 5:
				ft.Shape[which%len(ft.Shape)]++
			case 6:
				ft.Shape = append(ft.Shape, 1)
			case 7:
				f.Features = f.Features[:len(f.Features)-1]
			case 8:
				f.Features = append(f.Features, RefFeature{"more", "k", Spec{[]int64{1}, Int8}})
			case 9:
				delete(f.Attributes, s.Attributes[which%len(s.Attributes)].Name)
			case 10:
				f.Attributes[s.Attributes[which%len(s.Attributes)].Name] = ""
			case 11:
				f.Attributes["aux_layers"] = "hf:1,2"
			case 12: // what nothing is said of
				ft.Key, f.SampleID, f.NumTokens, f.Attributes["note"] = "elsewhere", "another", 1, "x"
			}
			f.EstimatedBytes, err = SumBytes(f.Features)
			if err != nil {
				t.Fatal(err)
			}
			return f
		}
		for range 20 {
			r, err := NewRef(edit(f, rapid.IntRange(0, 12).Draw(t, "how"), rapid.IntRange(0, 30).Draw(t, "which")))
			if err != nil {
				t.Fatal(err)
			}
			forgetful := *s // a copy remembers nothing
			if got, want := s.Validate(r), forgetful.Validate(r); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Fatalf("%s: got %v, want %v", r.Canonical(), got, want)
			}
		}
	})
}

func TestAChangedCopyOfASchemaIsNotAnsweredByItsOriginal(t *testing.T) {
	data, err := schemaFiles.ReadFile("schemas/eagle3.json")
	if err != nil {
		t.Fatal(err)
	}
	s, err := ParseSchema(data)
	if err != nil {
		t.Fatal(err)
	}
	r := buildRef(t, eagleRef())
	if err := s.Validate(r); err != nil {
		t.Fatal(err)
	}
	changed := *s
	changed.Version++
	if err := changed.Validate(r); !errors.Is(err, ErrSchema) {
		t.Errorf("a ref of version 1 passed as one of version 2: %v", err)
	}
	if n := testing.AllocsPerRun(100, func() { _ = s.Validate(r) }); n != 0 {
		t.Errorf("to see that a ref is like the last takes %v allocations, want none", n)
	}
}

func FuzzParseSchema(f *testing.F) {
	for _, a := range Algorithms() {
		data, err := schemaFiles.ReadFile("schemas/" + string(a) + ".json")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	golden, err := ParseRef(goldenRefs(f)["eagle3.json"])
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		s, err := ParseSchema(data)
		if err != nil {
			if KindOf(err) != SchemaError {
				t.Fatalf("an error of kind %q: %v", KindOf(err), err)
			}
			return
		}
		fields := golden.Fields()
		fields.Algorithm, fields.SchemaVersion = s.Name, s.Version
		r, err := NewRef(fields)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Validate(r); err != nil && KindOf(err) != SchemaError {
			t.Fatalf("an error of kind %q: %v", KindOf(err), err)
		}
	})
}

func BenchmarkSchemaValidate(b *testing.B) {
	s, err := SchemaOf(EAGLE3)
	if err != nil {
		b.Fatal(err)
	}
	r, err := ParseRef(goldenRefs(b)["eagle3.json"])
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := s.Validate(r); err != nil {
			b.Fatal(err)
		}
	}
}
