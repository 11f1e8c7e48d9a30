package storetest

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/sluice-ml/sluice"
)

// sizes are such that backends which treat small, unaligned or large samples differently are met on every path.
var sizes = []int64{0, 1, 13, 4096, 5003, 65_536, 70_001, 300_000}

var getTests = []test{
	{"GetKeepsTheOrderOfTheRef", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		sample := eagle("s-1", 1)
		ref := mustPut(t, s, sample)
		ts := mustGet(t, s, ref)
		names := make([]string, 0, len(ts.Features))
		for _, f := range ts.Features {
			names = append(names, f.Name)
		}
		want := []string{"last_hidden_states", "input_ids", "aux_hidden_states", "attention_mask", "loss_mask"}
		if !slices.Equal(names, want) || !slices.Equal(ref.FeatureNames(), want) {
			t.Errorf("Get has %v, the ref %v, the producer put %v", names, ref.FeatureNames(), want)
		}
		if f, ok := ts.Feature("loss_mask"); !ok || !f.Equal(sample.Features[4].Spec) {
			t.Errorf("Feature(loss_mask) = %v, %v", f.Spec, ok)
		}
		if ts.Handle.SampleID != "s-1" || ts.Handle.StoreURI != s.URI() || ts.Handle.ID == (sluice.HandleID{}) {
			t.Errorf("the handle is %+v", ts.Handle)
		}
		noError(t, "Tensors.Release", ts.Release(bg))
	}},
	{"TensorsArePrivateAndWritable", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		for i, n := range sizes {
			sample := sampleSized(fmt.Sprintf("s-%d", i), uint64(i), n)
			ref := mustPut(t, s, sample)
			a, b := mustGet(t, s, ref), mustGet(t, s, ref)
			scribble(a.Features)
			wantFeatures(t, "a second holder's tensors", b.Features, sample.Features)
			scribble(b.Features[:1])
			c := mustGet(t, s, ref)
			wantFeatures(t, "a later Get", c.Features, sample.Features)
			inverse := clone(sample.Features)
			scribble(inverse)
			wantFeatures(t, "what the first holder wrote", a.Features, inverse)
			if a.Handle.ID == b.Handle.ID || a.Handle.ID == c.Handle.ID {
				t.Error("two handles have one id")
			}
			for _, ts := range []*sluice.Tensors{a, b, c} {
				noError(t, "Tensors.Release", ts.Release(bg))
			}
		}
		wantHealth(t, "at the end", s, held())
	}},
	{"AppendingToATensorDoesNotReachItsNeighbour", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		sample := sampleSized("s-1", 1, 70_000)
		ts := mustGet(t, s, mustPut(t, s, sample))
		_ = append(ts.Features[0].Data, 1, 2, 3, 4, 5, 6, 7, 8)
		wantFeatures(t, "after append to the first tensor", ts.Features, sample.Features)
		noError(t, "Tensors.Release", ts.Release(bg))
	}},
	{"GetOfWhatIsNotThereIsNotFound", 0, func(t *testing.T, k *kit) {
		s, other := k.open(t, roomy), k.open(t, roomy)
		if s.URI() == other.URI() {
			t.Fatalf("two stores have the URI %q", s.URI())
		}
		ref := mustPut(t, s, eagle("s-1", 1))
		before := look(t, s)
		for what, r := range map[string]sluice.Ref{
			"an unknown id":        retold(t, ref, func(f *sluice.RefFields) { f.SampleID = "s-2" }),
			"another generation":   retold(t, ref, func(f *sluice.RefFields) { f.Generation = "g-other" }),
			"another store's uri":  retold(t, ref, func(f *sluice.RefFields) { f.StoreURI = other.URI() }),
			"an unheard-of scheme": retold(t, ref, func(f *sluice.RefFields) { f.StoreURI = "foo://bar" }),
		} {
			_, err := s.Get(bg, r)
			wantError(t, "Get with "+what, err, sluice.ErrNotFound, r.SampleID())
			noError(t, "Abort with "+what, s.Abort(bg, r))
		}
		_, err := other.Get(bg, ref)
		wantError(t, "Get from another store", err, sluice.ErrNotFound)
		_, err = s.Get(bg, sluice.Ref{})
		wantError(t, "Get with the zero Ref", err, sluice.ErrNotFound)
		noError(t, "Abort with the zero Ref", s.Abort(bg, sluice.Ref{}))
		before.wantSame(t, "Get of what is not there", s)
	}},
	{"GetWithARefThatPromisesSomethingElseIsCorruptAndPinsNothing", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		ref := mustPut(t, s, eagle("s-1", 1))
		before := look(t, s)
		for what, change := range map[string]func(*sluice.RefFields){
			"another dtype": func(f *sluice.RefFields) { f.Features[0].DType = sluice.Float16 },
			"another shape": func(f *sluice.RefFields) { f.Features[0].Shape = []int64{1, 8, 16} },
			"another order": func(f *sluice.RefFields) { f.Features[3], f.Features[4] = f.Features[4], f.Features[3] },
			"another name":  func(f *sluice.RefFields) { f.Features[2].Name = "hidden_states" },
			"one feature less": func(f *sluice.RefFields) {
				f.EstimatedBytes -= f.Features[4].Bytes()
				f.Features = f.Features[:4]
			},
			"another attribute":        func(f *sluice.RefFields) { f.Attributes["shift"] = "1" },
			"another number of tokens": func(f *sluice.RefFields) { f.NumTokens++ },
			"another run":              func(f *sluice.RefFields) { f.RunID = "run-2" },
		} {
			_, err := s.Get(bg, retold(t, ref, change))
			wantError(t, "Get with a ref of "+what, err, sluice.ErrCorrupt, "s-1")
			before.wantSame(t, "Get with a ref of "+what, s)
		}
		wantRead(t, s, ref, eagle("s-1", 1).Features)
	}},
	{"ConcurrentGetsShareNothing", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		sample := sampleSized("s-1", 1, 70_001)
		ref := mustPut(t, s, sample)
		pin := mustGet(t, s, ref)
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range 10 {
					ts, err := s.Get(bg, ref)
					if err != nil {
						t.Errorf("Get: %v", err)
						return
					}
					if d := diffFeatures(ts.Features, sample.Features); d != "" {
						t.Errorf("Get: %s", d)
					}
					scribble(ts.Features)
					if err := ts.Release(bg); err != nil {
						t.Errorf("Tensors.Release: %v", err)
					}
				}
			})
		}
		wg.Wait()
		wantHealth(t, "after all were released but one", s, held(ref))
		wantFeatures(t, "the tensors of the one", pin.Features, sample.Features)
		noError(t, "Tensors.Release", pin.Release(bg))
		wantHealth(t, "at the end", s, held())
	}},
}
