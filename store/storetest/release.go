package storetest

import (
	"fmt"
	"testing"

	"github.com/sluice-ml/sluice"
)

var releaseTests = []test{
	{"TheLastReleaseFreesASampleThatWasNeverClaimed", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		ref := mustPut(t, s, eagle("s-1", 1))
		wantHealth(t, "after Put", s, held(ref))
		a, b := mustGet(t, s, ref), mustGet(t, s, ref)
		noError(t, "the first Release", a.Release(bg))
		wantHealth(t, "after one of two releases", s, held(ref))
		wantFeatures(t, "the other holder's tensors", b.Features, eagle("s-1", 1).Features)
		noError(t, "the last Release", b.Release(bg))
		wantHealth(t, "after the last release", s, held())
		wantListed(t, "after the last release", s)
		_, err := s.Get(bg, ref)
		wantError(t, "Get after the last release", err, sluice.ErrNotFound)
	}},
	{"ReleasingOneHandleTwiceDropsOnePin", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		ref := mustPut(t, s, eagle("s-1", 1))
		a, b := mustGet(t, s, ref), mustGet(t, s, ref)
		noError(t, "Tensors.Release", a.Release(bg))
		before := look(t, s)
		for range 3 {
			noError(t, "Release again", s.Release(bg, a.Handle))
			noError(t, "Tensors.Release again", a.Release(bg))
		}
		before.wantSame(t, "releasing again", s)
		wantFeatures(t, "the other holder's tensors", b.Features, eagle("s-1", 1).Features)
		noError(t, "Tensors.Release", b.Release(bg))
	}},
	{"ForgedAndForeignHandlesAreHarmless", 0, func(t *testing.T, k *kit) {
		s, other := k.open(t, roomy), k.open(t, roomy)
		ref, second := mustPut(t, s, eagle("s-1", 1)), mustPut(t, s, eagle("s-2", 2))
		foreign := mustPut(t, other, eagle("s-1", 1))
		ts, ts2, fs := mustGet(t, s, ref), mustGet(t, s, second), mustGet(t, other, foreign)
		before, beforeOther := look(t, s), look(t, other)
		h := ts.Handle
		for what, forged := range map[string]sluice.Handle{
			"no handle":          {},
			"no id":              {StoreURI: h.StoreURI, SampleID: h.SampleID},
			"an invented id":     {StoreURI: h.StoreURI, SampleID: h.SampleID, ID: sluice.NewHandleID()},
			"an unknown sample":  {StoreURI: h.StoreURI, SampleID: "s-9", ID: h.ID},
			"another sample":     {StoreURI: h.StoreURI, SampleID: "s-2", ID: h.ID},
			"another store":      {StoreURI: other.URI(), SampleID: h.SampleID, ID: h.ID},
			"a name that climbs": {StoreURI: h.StoreURI, SampleID: "../../s-1", ID: h.ID},
			"a foreign handle":   fs.Handle,
		} {
			noError(t, "Release of "+what, s.Release(bg, forged))
			before.wantSame(t, "Release of "+what, s)
		}
		beforeOther.wantSame(t, "Release of a foreign handle", other)
		for _, ts := range []*sluice.Tensors{ts, ts2, fs} {
			noError(t, "Tensors.Release", ts.Release(bg))
		}
		wantHealth(t, "at the end", s, held())
	}},
	{"AHandleIsAValueThatAnyoneMayHandBack", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		ts := mustGet(t, s, mustPut(t, s, eagle("s-1", 1)))
		h := sluice.Handle{StoreURI: ts.Handle.StoreURI, SampleID: ts.Handle.SampleID, ID: ts.Handle.ID}
		noError(t, "Release of a copy", s.Release(bg, h))
		noError(t, "Tensors.Close", ts.Close())
		wantHealth(t, "after releasing a copy of the handle", s, held())
	}},
	{"ReleaseKeepsTheMemoryUntilTensorsAreClosed", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		for i, n := range sizes {
			sample := sampleSized(fmt.Sprintf("s-%d", i), uint64(i), n)
			ref := mustPut(t, s, sample)
			ts := mustGet(t, s, ref)
			noError(t, "Release", s.Release(bg, ts.Handle))
			wantListed(t, "after the last release", s)
			if !k.h.Detached {
				wantHealth(t, "released but mapped", s, held(ref))
			}
			// A sample of the same size is what a recycling store would write into that memory.
			var later []sluice.Ref
			for j := range 4 {
				later = append(later, mustPut(t, s, sampleSized(fmt.Sprintf("s-%d-%d", i, j), uint64(100+j), n)))
			}
			wantFeatures(t, "tensors after their release", ts.Features, sample.Features)
			scribble(ts.Features)
			for _, r := range later {
				noError(t, "Abort", s.Abort(bg, r))
			}
			for range 3 {
				noError(t, "Tensors.Close", ts.Close())
			}
			wantHealth(t, "after Tensors.Close", s, held())
			if ts.Features != nil {
				t.Error("Tensors keep their features after Close")
			}
		}
	}},
	{"MappedBytesHoldTheirRoom", attached, func(t *testing.T, k *kit) {
		s := k.open(t, sluice.Caps{MaxBytes: 1000, MaxSamples: 1})
		ts := mustGet(t, s, mustPut(t, s, sampleSized("s-1", 1, 600)))
		noError(t, "Release", s.Release(bg, ts.Handle))
		_, err := s.Reserve(bg, 600)
		wantError(t, "Reserve beside what is still mapped", err, sluice.ErrFull)
		_, err = s.Put(bg, sampleSized("s-1", 2, 600), sluice.Reservation{})
		wantError(t, "Put beside what is still mapped", err, sluice.ErrFull)
		noError(t, "Tensors.Close", ts.Close())
		mustPut(t, s, sampleSized("s-1", 3, 600))
	}},
	{"AnIDIsFreeAgainWhileItsOldBytesAreStillMapped", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		first, second := sampleSized("s-1", 1, 70_000), sampleSized("s-1", 2, 70_000)
		ts := mustGet(t, s, mustPut(t, s, first))
		noError(t, "Release", s.Release(bg, ts.Handle))
		ref := mustPut(t, s, second)
		wantFeatures(t, "the mapped tensors of the first put", ts.Features, first.Features)
		now := mustGet(t, s, ref)
		noError(t, "Release of the first handle again", s.Release(bg, ts.Handle))
		noError(t, "Tensors.Close", ts.Close())
		wantHealth(t, "after closing the first tensors", s, held(ref))
		wantFeatures(t, "the second put's tensors", now.Features, second.Features)
		noError(t, "Tensors.Release", now.Release(bg))
		wantHealth(t, "at the end", s, held())
	}},
	{"ClosedTensorsStayPinnedUntilReleased", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		ref := mustPut(t, s, eagle("s-1", 1))
		ts := mustGet(t, s, ref)
		noError(t, "Tensors.Close", ts.Close())
		wantHealth(t, "closed but pinned", s, held(ref))
		wantListed(t, "closed but pinned", s, ref)
		again := mustGet(t, s, ref)
		noError(t, "Release", s.Release(bg, ts.Handle))
		wantFeatures(t, "a second Get", again.Features, eagle("s-1", 1).Features)
		noError(t, "Tensors.Release", again.Release(bg))
		wantHealth(t, "at the end", s, held())
	}},
	{"ManyHandlesOfManySamples", 0, func(t *testing.T, k *kit) {
		// A release that searches makes this quadratic, and the test far too slow to go unnoticed.
		const samples = 50
		s := k.open(t, roomy)
		var refs []sluice.Ref
		for i := range samples {
			refs = append(refs, mustPut(t, s, sampleSized(fmt.Sprintf("s-%d", i), uint64(i), 64)))
		}
		var all []*sluice.Tensors
		for i := range k.h.Handles {
			all = append(all, mustGet(t, s, refs[i%samples]))
		}
		wantHealth(t, "with all handles out", s, held(refs...))
		for i := range all { // from the middle outwards and interleaved, so that no order is the lucky one
			ts := all[(i*7919+len(all)/2)%len(all)]
			if ts == nil {
				continue
			}
			noError(t, "Tensors.Release", ts.Release(bg))
			all[(i*7919+len(all)/2)%len(all)] = nil
		}
		for _, ts := range all {
			if ts != nil {
				noError(t, "Tensors.Release", ts.Release(bg))
			}
		}
		wantHealth(t, "at the end", s, held())
		wantListed(t, "at the end", s)
	}},
}
