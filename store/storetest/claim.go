package storetest

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluice-ml/sluice"
)

var claimTests = []test{
	{"AClaimKeepsTheSampleThroughReleases", claims, func(t *testing.T, k *kit) {
		s := k.openClaims(t, roomy)
		sample := sampleSized("s-1", 1, 70_000)
		ref := mustPut(t, s, sample)
		noError(t, "Claim", s.Claim(ref, "queue-1"))
		for range 3 { // what a consumer that fails and retries does: the same bits every time
			ts := mustGet(t, s, ref)
			wantFeatures(t, "Get", ts.Features, sample.Features)
			scribble(ts.Features)
			noError(t, "Tensors.Release", ts.Release(bg))
			wantHealth(t, "claimed and released", s, held(ref))
		}
		noError(t, "Unclaim", s.Unclaim(ref, "queue-1"))
		wantHealth(t, "after Unclaim", s, held())
		wantListed(t, "after Unclaim", s)
		_, err := s.Get(bg, ref)
		wantError(t, "Get after Unclaim", err, sluice.ErrNotFound)
	}},
	{"APinKeepsTheSampleThroughUnclaim", claims, func(t *testing.T, k *kit) {
		s := k.openClaims(t, roomy)
		sample := sampleSized("s-1", 1, 70_000)
		ref := mustPut(t, s, sample)
		noError(t, "Claim", s.Claim(ref, "queue-1"))
		ts := mustGet(t, s, ref)
		noError(t, "Unclaim", s.Unclaim(ref, "queue-1"))
		wantHealth(t, "unclaimed but pinned", s, held(ref))
		wantListed(t, "unclaimed but pinned", s, ref)
		wantRead(t, s, ref, sample.Features)
		wantHealth(t, "still pinned by the first handle", s, held(ref))
		wantFeatures(t, "the holder's tensors", ts.Features, sample.Features)
		noError(t, "Tensors.Release", ts.Release(bg))
		wantHealth(t, "after the last release", s, held())
	}},
	{"AckAndReleaseCommute", claims, func(t *testing.T, k *kit) {
		s := k.openClaims(t, roomy)
		for i := range 2 {
			ref := mustPut(t, s, eagle("s-1", 1))
			noError(t, "Claim", s.Claim(ref, "queue-1"))
			ts := mustGet(t, s, ref)
			if i == 0 {
				noError(t, "Unclaim", s.Unclaim(ref, "queue-1"))
				noError(t, "Tensors.Release", ts.Release(bg))
			} else {
				noError(t, "Tensors.Release", ts.Release(bg))
				noError(t, "Unclaim", s.Unclaim(ref, "queue-1"))
			}
			wantHealth(t, "after both", s, held())
			wantListed(t, "after both", s)
		}
	}},
	{"ClaimIsIdempotentForOneOwnerAndRefusedToAnother", claims, func(t *testing.T, k *kit) {
		s := k.openClaims(t, roomy)
		ref := mustPut(t, s, eagle("s-1", 1))
		noError(t, "Claim", s.Claim(ref, "queue-1"))
		before := look(t, s)
		noError(t, "Claim again", s.Claim(ref, "queue-1"))
		wantError(t, "Claim by another", s.Claim(ref, "queue-2"), sluice.ErrConflict, `"s-1"`, "queue-1")
		wantError(t, "MarkDead by another", s.MarkDead(ref, "queue-2", true), sluice.ErrConflict, `"s-1"`, "queue-1")
		noError(t, "Unclaim by another", s.Unclaim(ref, "queue-2"))
		wantError(t, "Claim without an owner", s.Claim(ref, ""), sluice.ErrInvalid, "owner")
		before.wantSame(t, "what another owner tried", s)
		if o := before.list[key(ref)].Owner; o != "queue-1" {
			t.Errorf("Samples names the owner %q", o)
		}
	}},
	{"AnUnclaimedSampleMayBeClaimedAgainWhileItIsPinned", claims, func(t *testing.T, k *kit) {
		s := k.openClaims(t, roomy)
		ref := mustPut(t, s, eagle("s-1", 1))
		noError(t, "Claim", s.Claim(ref, "queue-1"))
		ts := mustGet(t, s, ref)
		noError(t, "Unclaim", s.Unclaim(ref, "queue-1"))
		noError(t, "Claim by the next owner", s.Claim(ref, "queue-2"))
		noError(t, "Tensors.Release", ts.Release(bg))
		wantHealth(t, "claimed by the next owner", s, held(ref))
		noError(t, "Unclaim", s.Unclaim(ref, "queue-2"))
		wantHealth(t, "at the end", s, held())
	}},
	{"ClaimOfWhatIsNotThereIsNotFound", claims, func(t *testing.T, k *kit) {
		s := k.openClaims(t, roomy)
		ref := mustPut(t, s, eagle("s-1", 1))
		before := look(t, s)
		for what, r := range map[string]sluice.Ref{
			"an unknown id":      retold(t, ref, func(f *sluice.RefFields) { f.SampleID = "s-2" }),
			"another generation": retold(t, ref, func(f *sluice.RefFields) { f.Generation = "g-other" }),
			"another store":      retold(t, ref, func(f *sluice.RefFields) { f.StoreURI = "foo://bar" }),
		} {
			wantError(t, "Claim of "+what, s.Claim(r, "queue-1"), sluice.ErrNotFound, r.SampleID())
			wantError(t, "MarkDead of "+what, s.MarkDead(r, "queue-1", true), sluice.ErrNotFound, r.SampleID())
			noError(t, "Unclaim of "+what, s.Unclaim(r, "queue-1"))
		}
		wantError(t, "MarkDead of what nobody claims", s.MarkDead(ref, "queue-1", true), sluice.ErrConflict, `"s-1"`)
		before.wantSame(t, "claims of what is not there", s)
	}},
	{"MarkDeadMovesTheCountersAndKeepsTheClaim", claims, func(t *testing.T, k *kit) {
		s := k.openClaims(t, roomy)
		a, b := mustPut(t, s, eagle("s-1", 1)), mustPut(t, s, sampleSized("s-2", 2, 999))
		noError(t, "Claim", s.Claim(a, "queue-1"))
		noError(t, "Claim", s.Claim(b, "queue-1"))
		alive, dead := held(a, b), held(a, b)
		dead.DeadBytes, dead.DeadSamples = b.EstimatedBytes(), 1
		for range 2 {
			noError(t, "MarkDead", s.MarkDead(b, "queue-1", true))
			wantHealth(t, "with one dead letter", s, dead)
		}
		if l := listing(t, s); !l[key(b)].Dead || l[key(a)].Dead || l[key(b)].Owner != "queue-1" {
			t.Errorf("Samples has %+v", l)
		}
		wantRead(t, s, b, sampleSized("s-2", 2, 999).Features)
		for range 2 {
			noError(t, "MarkDead back", s.MarkDead(b, "queue-1", false))
			wantHealth(t, "requeued", s, alive)
		}
		noError(t, "MarkDead", s.MarkDead(b, "queue-1", true))
		noError(t, "Unclaim", s.Unclaim(b, "queue-1"))
		wantHealth(t, "after dropping the dead letter", s, held(a))
	}},
	{"ADeadLetterThatIsDroppedWhilePinnedIsNoLongerDead", claims, func(t *testing.T, k *kit) {
		s := k.openClaims(t, roomy)
		ref := mustPut(t, s, eagle("s-1", 1))
		noError(t, "Claim", s.Claim(ref, "queue-1"))
		ts := mustGet(t, s, ref)
		noError(t, "MarkDead", s.MarkDead(ref, "queue-1", true))
		noError(t, "Unclaim", s.Unclaim(ref, "queue-1"))
		wantHealth(t, "dropped but pinned", s, held(ref))
		noError(t, "Tensors.Release", ts.Release(bg))
		wantHealth(t, "at the end", s, held())
	}},
	{"UnclaimIsIdempotent", claims, func(t *testing.T, k *kit) {
		s := k.openClaims(t, roomy)
		ref := mustPut(t, s, eagle("s-1", 1))
		noError(t, "Unclaim of what nobody claims", s.Unclaim(ref, "queue-1"))
		wantHealth(t, "after Unclaim of what nobody claims", s, held(ref))
		noError(t, "Claim", s.Claim(ref, "queue-1"))
		for range 3 {
			noError(t, "Unclaim", s.Unclaim(ref, "queue-1"))
			wantHealth(t, "after Unclaim", s, held())
		}
	}},
	{"UnclaimedBytesStayCountedWhileTheyAreMapped", claims | attached, func(t *testing.T, k *kit) {
		s := k.openClaims(t, roomy)
		sample := sampleSized("s-1", 1, 70_000)
		ref := mustPut(t, s, sample)
		noError(t, "Claim", s.Claim(ref, "queue-1"))
		ts := mustGet(t, s, ref)
		noError(t, "Release", s.Release(bg, ts.Handle))
		noError(t, "Unclaim", s.Unclaim(ref, "queue-1"))
		wantHealth(t, "neither pinned nor claimed, but mapped", s, held(ref))
		wantListed(t, "neither pinned nor claimed, but mapped", s)
		mustPut(t, s, sampleSized("s-2", 2, 70_000))
		wantFeatures(t, "the mapped tensors", ts.Features, sample.Features)
		noError(t, "Tensors.Close", ts.Close())
	}},
	{"ALateReleaseByAStaleHolderHarmsNobody", claims, func(t *testing.T, k *kit) {
		s := k.openClaims(t, roomy)
		sample := eagle("s-1", 1)
		ref := mustPut(t, s, sample)
		noError(t, "Claim", s.Claim(ref, "queue-1"))
		stale := mustGet(t, s, ref) // its lease ran out, and the sample went to the next consumer
		next := mustGet(t, s, ref)
		noError(t, "the stale holder's Tensors.Release", stale.Release(bg))
		noError(t, "the stale holder's Release again", s.Release(bg, stale.Handle))
		wantHealth(t, "with one holder and the queue", s, held(ref))
		wantFeatures(t, "the next consumer's tensors", next.Features, sample.Features)
		noError(t, "Unclaim", s.Unclaim(ref, "queue-1"))
		noError(t, "Tensors.Release", next.Release(bg))
		wantHealth(t, "at the end", s, held())
	}},
	{"SamplesTellsOwnersPinsAndTimes", claims, func(t *testing.T, k *kit) {
		s := k.openClaims(t, roomy)
		wantListed(t, "an empty store", s)
		at := k.clock.Now()
		a, b := mustPut(t, s, eagle("s-1", 1)), mustPut(t, s, eagle("s-2", 2))
		noError(t, "Claim", s.Claim(a, "queue-1"))
		x, y := mustGet(t, s, b), mustGet(t, s, b)
		l := listing(t, s)
		wantListed(t, "with two samples", s, a, b)
		if i := l[key(a)]; i.Owner != "queue-1" || i.Pins != 0 || i.Dead || !i.Put.Equal(at) {
			t.Errorf("s-1 is %+v, want it claimed by queue-1, without pins, put at %v", i, at)
		}
		if i := l[key(b)]; i.Owner != "" || i.Pins != 2 || !i.Put.Equal(at) {
			t.Errorf("s-2 is %+v, want it unclaimed, with 2 pins, put at %v", i, at)
		}
		noError(t, "Tensors.Release", x.Release(bg))
		if i := listing(t, s)[key(b)]; i.Pins != 1 {
			t.Errorf("s-2 has %d pins after one of two releases", i.Pins)
		}
		noError(t, "Tensors.Release", y.Release(bg))
	}},
	{"ConcurrentClaimsHaveOneOwner", claims, func(t *testing.T, k *kit) {
		s := k.openClaims(t, roomy)
		for round := range 20 {
			ref := mustPut(t, s, sampleSized(fmt.Sprintf("s-%d", round), 1, 10))
			var won atomic.Int64
			var owner atomic.Value
			var wg sync.WaitGroup
			for i := range 6 {
				wg.Go(func() {
					name := fmt.Sprintf("queue-%d", i)
					if err := s.Claim(ref, name); err == nil {
						won.Add(1)
						owner.Store(name)
					} else if sluice.KindOf(err) != sluice.Conflict {
						t.Errorf("Claim: %v", err)
					}
				})
			}
			wg.Wait()
			if won.Load() != 1 {
				t.Fatalf("%d owners claimed one sample", won.Load())
			}
			if got := listing(t, s)[key(ref)].Owner; got != owner.Load() {
				t.Errorf("the owner is %q, %v won", got, owner.Load())
			}
			noError(t, "Unclaim", s.Unclaim(ref, owner.Load().(string)))
		}
		wantHealth(t, "at the end", s, held())
	}},
	{"ManyClaimsAtOnceAreAsMany", claims, func(t *testing.T, k *kit) {
		s := k.openClaims(t, roomy)
		many, ok := s.(interface {
			ClaimAll(refs []sluice.Ref, owner string) []error
			UnclaimAll(refs []sluice.Ref, owner string) []error
		})
		if !ok {
			t.Skip("the store claims one at a time")
		}
		var refs []sluice.Ref
		for i := range 200 {
			refs = append(refs, mustPut(t, s, eagle(fmt.Sprint("s-", i), 1)))
		}
		noError(t, "Claim by another", s.Claim(refs[3], "queue-2"))
		gone := refs[7]
		noError(t, "Abort", s.Abort(bg, gone))
		pinned := mustGet(t, s, refs[9])
		claim := func(owner string) {
			t.Helper()
			errs := many.ClaimAll(refs, owner)
			if len(errs) != len(refs) {
				t.Fatalf("ClaimAll gave %d answers, want %d", len(errs), len(refs))
			}
			for i, err := range errs {
				if one := s.Claim(refs[i], owner); fmt.Sprint(err) != fmt.Sprint(one) {
					t.Errorf("ClaimAll by %q answers %v of %s, Claim %v", owner, err, refs[i].SampleID(), one)
				}
			}
		}
		claim("queue-1")
		claim("queue-1")
		claim("queue-2")
		claim("")
		list := listing(t, s)
		for i, ref := range refs {
			if want := map[int]string{3: "queue-2", 7: ""}; i == 3 || i == 7 {
				if got := list[key(ref)].Owner; got != want[i] {
					t.Errorf("%s is claimed by %q, want %q", ref.SampleID(), got, want[i])
				}
			} else if got := list[key(ref)].Owner; got != "queue-1" {
				t.Errorf("%s is claimed by %q", ref.SampleID(), got)
			}
		}
		for range 2 {
			for i, err := range many.UnclaimAll(refs, "queue-1") {
				noError(t, "UnclaimAll of "+refs[i].SampleID(), err)
			}
			wantHealth(t, "after UnclaimAll", s, held(refs[3], refs[9]))
		}
		noError(t, "Tensors.Release", pinned.Release(bg))
		wantListed(t, "at the end", s, refs[3])
		noError(t, "Close", s.Close())
		for _, errs := range [][]error{many.ClaimAll(refs[:2], "queue-1"), many.UnclaimAll(refs[:2], "queue-1")} {
			for _, err := range errs {
				wantError(t, "after Close", err, sluice.ErrClosed)
			}
		}
		if errs := many.ClaimAll(nil, "queue-1"); len(errs) != 0 {
			t.Errorf("no claims are answered %v", errs)
		}
	}},
}
