package storetest

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-ml/sluice"
)

var putTests = []test{
	{"PutCopiesSoThatTheCallerMayScribble", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		for i, n := range []int64{9, 5000, 300_001} {
			sample := sampleSized(fmt.Sprintf("s-%d", i), 1, n)
			want := clone(sample.Features)
			ref := mustPut(t, s, sample)
			scribble(sample.Features)
			sample.Features[1].Shape[0] = 1
			sample.Attributes["source"] = "scribbled"
			wantRead(t, s, ref, want)
			if v, _ := ref.Attribute("source"); v != "storetest" {
				t.Errorf("the ref's attribute follows the caller's map: %q", v)
			}
		}
	}},
	{"PutReturnsTheRefOfWhatItTook", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		sample := eagle("s-1", 1)
		sample.DraftWeightVersion = "17"
		sample.Attributes = map[string]string{"source": "überprüft: 東京 \"x\" \\ <&>", "Empty": "", "emoji": "🌊"}
		ref := mustPut(t, s, sample)
		f := ref.Fields()
		if f.StoreURI != s.URI() || f.StoreURI == "" {
			t.Errorf("store_uri is %q, the store says %q", f.StoreURI, s.URI())
		}
		want, err := sample.RefFields(s.URI(), f.Generation)
		noError(t, "RefFields", err)
		wantRef, err := sluice.NewRef(want)
		noError(t, "NewRef", err)
		if !ref.Equal(wantRef) {
			t.Errorf("ref is\n%s, want\n%s", ref.Canonical(), wantRef.Canonical())
		}
		back, err := sluice.ParseRef([]byte(ref.Canonical()))
		noError(t, "ParseRef of the ref", err)
		wantRead(t, s, back, clone(sample.Features))
	}},
	{"PutRefusesABadSampleAndLeavesNothing", 0, refusedPuts},
	{"PutRefusesADuplicateAndKeepsTheFirst", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		first := sampleSized("s-1", 1, 5000)
		ref := mustPut(t, s, first)
		res := mustReserve(t, s, 100)
		before := look(t, s)
		for _, r := range []sluice.Reservation{{}, res} {
			_, err := s.Put(bg, sampleSized("s-1", 2, 100), r)
			wantError(t, "Put of a taken id", err, sluice.ErrDuplicate, `"s-1"`)
		}
		before.wantSame(t, "a duplicate Put", s)
		mustPutUnder(t, s, sampleSized("s-2", 2, 100), res)
		wantRead(t, s, ref, first.Features)
	}},
	{"ConcurrentPutsOfOneIDHaveOneWinner", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		const n = 8
		for round := range 5 {
			id := fmt.Sprintf("s-%d", round)
			refs, errs := make([]sluice.Ref, n), make([]error, n)
			var wg sync.WaitGroup
			start := make(chan struct{})
			for i := range n {
				sample := sampleSized(id, uint64(i), 70_000)
				wg.Go(func() {
					<-start
					refs[i], errs[i] = s.Put(bg, sample, sluice.Reservation{})
				})
			}
			close(start)
			wg.Wait()
			winner := -1
			for i, err := range errs {
				switch {
				case err == nil && winner >= 0:
					t.Fatalf("puts %d and %d of %q both worked", winner, i, id)
				case err == nil:
					winner = i
				default:
					wantError(t, "a losing Put", err, sluice.ErrDuplicate)
				}
			}
			if winner < 0 {
				t.Fatalf("no Put of %q worked: %v", id, errs)
			}
			wantHealth(t, "after the race", s, held(refs[winner]))
			wantListed(t, "after the race", s, refs[winner])
			wantRead(t, s, refs[winner], sampleSized(id, uint64(winner), 70_000).Features)
			wantHealth(t, "after the last release", s, held())
		}
	}},
	{"EveryPutHasAFreshGenerationThatOldRefsDoNotReach", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		old := mustPut(t, s, sampleSized("s-1", 1, 5000))
		ts := mustGet(t, s, old)
		oldHandle := ts.Handle
		noError(t, "Release", ts.Release(bg))

		now := sampleSized("s-1", 2, 5000)
		ref := mustPut(t, s, now)
		if ref.Generation() == old.Generation() {
			t.Fatalf("two puts have the generation %q", ref.Generation())
		}
		pin := mustGet(t, s, ref)
		before := look(t, s)
		_, err := s.Get(bg, old)
		wantError(t, "Get with the ref of an earlier put", err, sluice.ErrNotFound, "s-1")
		noError(t, "Release of a handle of an earlier put", s.Release(bg, oldHandle))
		noError(t, "Abort with the ref of an earlier put", s.Abort(bg, old))
		if c, ok := s.(sluice.ClaimStore); ok {
			wantError(t, "Claim with the ref of an earlier put", c.Claim(old, "queue-1"), sluice.ErrNotFound)
			wantError(t, "MarkDead with the ref of an earlier put", c.MarkDead(old, "queue-1", true), sluice.ErrNotFound)
			noError(t, "Unclaim with the ref of an earlier put", c.Unclaim(old, "queue-1"))
			noError(t, "Claim", c.Claim(ref, "queue-1"))
			before = look(t, s)
			noError(t, "Unclaim with the ref of an earlier put", c.Unclaim(old, "queue-1"))
			noError(t, "Abort with the ref of an earlier put", s.Abort(bg, old))
		}
		before.wantSame(t, "calls with the ref of an earlier put", s)
		wantFeatures(t, "the tensors of the later put", pin.Features, now.Features)
		wantRead(t, s, ref, now.Features)
		noError(t, "Tensors.Release", pin.Release(bg))
	}},
	{"EveryDTypeAndShapeSurvives", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		var shapes [][]int64
		for _, n := range []int64{1, 3, 7, 63, 64, 65, 4095, 4097} {
			shapes = append(shapes, []int64{n}, []int64{1, n, 3})
		}
		shapes = append(shapes, nil, []int64{0}, []int64{1, 0, 8}, []int64{1, 1, 1, 1, 1, 1, 1, 1})
		for _, dtype := range sluice.DTypes() {
			sample := sampleOf("s-"+dtype.String(), uint64(dtype))
			for i, shape := range shapes {
				sample.Features = append(sample.Features, sluice.Feature{Name: fmt.Sprintf("f%d", len(shapes)-i), Tensor: filled(uint64(i), dtype, shape...)})
			}
			want := clone(sample.Features)
			ref := mustPut(t, s, sample)
			if ref.EstimatedBytes() != sample.Bytes() {
				t.Errorf("estimated_bytes is %d, the sample has %d", ref.EstimatedBytes(), sample.Bytes())
			}
			wantHealth(t, "after Put", s, held(ref))
			ts := mustGet(t, s, ref)
			wantFeatures(t, dtype.String(), ts.Features, want)
			view(ts.Features)
			noError(t, "Tensors.Release", ts.Release(bg))
		}
		wantHealth(t, "at the end", s, held())
	}},
	{"EveryTensorIsAlignedWhateverStandsBeforeIt", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		for _, n := range []int64{1, 3, 50_001} { // odd numbers of bytes, in a small sample and in a large one
			sample := sampleOf(fmt.Sprintf("s-%d", n), 1,
				sluice.Feature{Name: "a", Tensor: sluice.NewTensor(sluice.Bool, n)},
				sluice.Feature{Name: "b", Tensor: sluice.NewTensor(sluice.Int64, 3)},
				sluice.Feature{Name: "c", Tensor: sluice.NewTensor(sluice.Float8E5M2, n)},
				sluice.Feature{Name: "d", Tensor: sluice.NewTensor(sluice.BFloat16, n)},
				sluice.Feature{Name: "e", Tensor: sluice.NewTensor(sluice.Float32)},
				sluice.Feature{Name: "f", Tensor: sluice.NewTensor(sluice.Int8)},
				sluice.Feature{Name: "g", Tensor: sluice.NewTensor(sluice.Float64, 1, 2)})
			ts := mustGet(t, s, mustPut(t, s, sample))
			wantFeatures(t, "Get", ts.Features, sample.Features)
			view(ts.Features)
			noError(t, "Tensors.Release", ts.Release(bg))
		}
	}},
	{"ASampleMayHave64FeaturesAndNoBytes", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		many := sampleOf("many", 1)
		for i := range 64 {
			many.Features = append(many.Features, sluice.Feature{Name: fmt.Sprintf("f%d", 64-i), Tensor: filled(uint64(i), sluice.Int16, int64(i))})
		}
		empty := sampleOf("empty", 1, sluice.Feature{Name: "a", Tensor: sluice.NewTensor(sluice.Float32, 1, 0)})
		m, e := mustPut(t, s, many), mustPut(t, s, empty)
		wantHealth(t, "after both puts", s, held(m, e))
		wantRead(t, s, m, many.Features)
		wantRead(t, s, e, empty.Features)
		wantHealth(t, "at the end", s, held())
	}},
	{"ASampleMayHaveTheLongestIDs", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		long := "x" + strings.Repeat("-:.a", 49) + "Z_9"
		sample := sampleOf(long, 1, sluice.Feature{Name: long, Tensor: sluice.NewTensor(sluice.Int8, 5)})
		upper := sampleOf(strings.ToUpper(long), 2, sluice.Feature{Name: long, Tensor: sluice.NewTensor(sluice.Int8, 5)})
		ref, other := mustPut(t, s, sample), mustPut(t, s, upper)
		wantListed(t, "after both puts", s, ref, other)
		wantRead(t, s, ref, sample.Features)
		wantRead(t, s, other, upper.Features)
	}},
	{"AFailedPutGivesItsIDBack", 0, func(t *testing.T, k *kit) {
		s := k.open(t, sluice.Caps{MaxBytes: 1000})
		for range 3 {
			_, err := s.Put(bg, sampleSized("s-1", 1, 2000), sluice.Reservation{})
			wantError(t, "Put over the cap", err, sluice.ErrFull)
		}
		sample := sampleSized("s-1", 2, 900)
		wantRead(t, s, mustPut(t, s, sample), sample.Features)
	}},
}

// view looks at the features as elements, which panics where the data is not aligned to them.
func view(features []sluice.Feature) {
	for _, f := range features {
		switch f.DType.Size() {
		case 8:
			sluice.View[uint64](f.Tensor)
		case 4:
			sluice.View[uint32](f.Tensor)
		case 2:
			sluice.View[uint16](f.Tensor)
		}
	}
}

func refusedPuts(t *testing.T, k *kit) {
	s := k.open(t, roomy)
	kept := eagle("kept", 3)
	keptRef := mustPut(t, s, kept)
	res := mustReserve(t, s, 4096)
	before := look(t, s)
	for _, c := range []struct {
		name      string
		change    func(*sluice.Sample)
		fragments []string
	}{
		{"id with a slash", func(s *sluice.Sample) { s.SampleID = "a/b" }, []string{"sample_id", "a/b", "want [A-Za-z0-9_]"}},
		{"id that climbs", func(s *sluice.Sample) { s.SampleID = "a..b" }, []string{"sample_id", "a..b"}},
		{"id that is hidden", func(s *sluice.Sample) { s.SampleID = ".a" }, []string{"sample_id", ".a"}},
		{"id of 201 bytes", func(s *sluice.Sample) { s.SampleID = strings.Repeat("a", 201) }, []string{"sample_id"}},
		{"no id", func(s *sluice.Sample) { s.SampleID = "" }, []string{"sample_id"}},
		{"no run", func(s *sluice.Sample) { s.RunID = "" }, []string{"run_id"}},
		{"no algorithm", func(s *sluice.Sample) { s.Algorithm = "" }, []string{"algorithm"}},
		{"schema version 0", func(s *sluice.Sample) { s.SchemaVersion = 0 }, []string{"schema_version", "is 0", "1 or more"}},
		{"negative tokens", func(s *sluice.Sample) { s.NumTokens = -1 }, []string{"num_tokens", "is -1", "0 or more"}},
		{"no features", func(s *sluice.Sample) { s.Features = nil }, []string{"features", "at least one"}},
		{"two features of one name", func(s *sluice.Sample) { s.Features[4].Name = "input_ids" }, []string{"features[4]", "input_ids"}},
		{"65 features", func(s *sluice.Sample) {
			for i := range 60 {
				s.Features = append(s.Features, sluice.Feature{Name: fmt.Sprint("f", i), Tensor: sluice.NewTensor(sluice.Int8, 1)})
			}
		}, []string{"features", "65", "64"}},
		{"feature name with a slash", func(s *sluice.Sample) { s.Features[2].Name = "../x" }, []string{"features[2]", "../x"}},
		{"last tensor a byte short", func(s *sluice.Sample) { s.Features[4].Data = s.Features[4].Data[:127] }, []string{"features[4]", "loss_mask", "128", "127"}},
		{"last tensor a byte long", func(s *sluice.Sample) { s.Features[4].Data = make([]byte, 129) }, []string{"features[4]", "loss_mask", "128", "129"}},
		{"tensor without data", func(s *sluice.Sample) { s.Features[1].Data = nil }, []string{"features[1]", "input_ids"}},
		{"no dtype", func(s *sluice.Sample) { s.Features[3].DType = 0 }, []string{"features[3]", "dtype"}},
		{"negative axis", func(s *sluice.Sample) { s.Features[3].Shape = []int64{1, -16} }, []string{"features[3]", "-16", "0 or more"}},
		{"shape that overflows", func(s *sluice.Sample) {
			s.Features[3].Shape = []int64{1 << 31, 1 << 31, 1 << 31, 0}
			s.Features[3].Data = nil
		}, []string{"features[3]", "overflow"}},
		{"attribute with a newline", func(s *sluice.Sample) { s.Attributes["note"] = "a\nb" }, []string{"attributes", "note"}},
		{"attribute that is not UTF-8", func(s *sluice.Sample) { s.Attributes["note"] = "\xff" }, []string{"attributes", "note"}},
		{"attribute key with a space", func(s *sluice.Sample) { s.Attributes["a b"] = "" }, []string{"attributes", "a b"}},
		{"target version with a control character", func(s *sluice.Sample) { s.TargetModelVersion = "\x00" }, []string{"target_model_version"}},
		{"attributes over the limit of a ref", func(s *sluice.Sample) { s.Attributes["note"] = strings.Repeat("x", sluice.MaxRefBytes) }, []string{fmt.Sprint(sluice.MaxRefBytes)}},
	} {
		for _, r := range []sluice.Reservation{{}, res} {
			sample := eagle("s-1", 1)
			c.change(sample)
			ref, err := s.Put(bg, sample, r)
			wantError(t, "Put of a sample with "+c.name, err, sluice.ErrInvalid, c.fragments...)
			if !ref.IsZero() {
				t.Errorf("a refused Put (%s) returned the ref %s", c.name, ref)
			}
		}
		before.wantSame(t, "a Put refused for: "+c.name, s)
	}
	if _, err := s.Put(bg, nil, sluice.Reservation{}); err == nil || sluice.KindOf(err) != sluice.Invalid {
		t.Errorf("Put of nil: %v, want ErrInvalid", err)
	}
	before.wantSame(t, "Put of nil", s)

	good := eagle("s-1", 1)
	ref := mustPutUnder(t, s, good, res) // the id was not burnt and the reservation is still there
	wantHealth(t, "after a good Put", s, held(keptRef, ref))
	wantRead(t, s, ref, good.Features)
	wantRead(t, s, keptRef, kept.Features)
	if i := slices.IndexFunc(good.Features, func(f sluice.Feature) bool { return f.Name == "loss_mask" }); i != 4 {
		t.Errorf("Put reordered the caller's features")
	}
}
