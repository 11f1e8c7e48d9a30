package storetest

import (
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
)

func (k *kit) peerOf(t testing.TB, s sluice.Store) sluice.Store {
	t.Helper()
	p := k.h.Peer(t, s)
	if p.URI() != s.URI() {
		t.Fatalf("two sessions of one medium have the URIs %q and %q", s.URI(), p.URI())
	}
	return p
}

func gc(t testing.TB, s sluice.Store) int {
	t.Helper()
	n, err := s.GC(bg)
	noError(t, "GC", err)
	return n
}

var peerTests = []test{
	{"GCOfALiveSessionTouchesNothingHoweverOld", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		waiting, pinned, mapped := mustPut(t, s, eagle("s-1", 1)), mustPut(t, s, eagle("s-2", 2)), mustPut(t, s, eagle("s-3", 3))
		pin, memory := mustGet(t, s, pinned), mustGet(t, s, mapped)
		noError(t, "Release", s.Release(bg, memory.Handle))
		r := mustReserve(t, s, 5000)
		refs := []sluice.Ref{waiting, pinned}
		if c, ok := s.(sluice.ClaimStore); ok {
			claimed, dead := mustPut(t, s, eagle("s-4", 4)), mustPut(t, s, eagle("s-5", 5))
			noError(t, "Claim", c.Claim(claimed, "queue-1"))
			noError(t, "Claim", c.Claim(dead, "queue-1"))
			noError(t, "MarkDead", c.MarkDead(dead, "queue-1", true))
			refs = append(refs, claimed, dead)
		}
		before := look(t, s)
		for _, d := range []time.Duration{0, 61 * time.Second, 25 * time.Hour, 400 * 24 * time.Hour} {
			k.clock.Advance(d)
			if n := gc(t, s); n != 0 {
				t.Errorf("GC freed %d entries after %v", n, d)
			}
			before.wantSame(t, "GC", s)
		}
		wantFeatures(t, "mapped tensors", memory.Features, eagle("s-3", 3).Features)
		wantFeatures(t, "pinned tensors", pin.Features, eagle("s-2", 2).Features)
		for i, ref := range refs {
			ts := mustGet(t, s, ref)
			if i != 0 {
				noError(t, "Tensors.Release", ts.Release(bg))
			}
		}
		mustPutUnder(t, s, sampleSized("s-6", 6, 5000), r)
	}},
	{"PeersShareSamplesAndCounters", peer, func(t *testing.T, k *kit) {
		a := k.open(t, sluice.Caps{MaxBytes: 100_000, MaxSamples: 3})
		b := k.peerOf(t, a)
		sample := sampleSized("s-1", 1, 60_000)
		ref := mustPut(t, a, sample)
		wantHealth(t, "the other session", b, held(ref))
		_, err := b.Put(bg, sampleSized("s-1", 2, 10), sluice.Reservation{})
		wantError(t, "Put of the other session's id", err, sluice.ErrDuplicate, `"s-1"`)
		_, err = b.Reserve(bg, 40_001)
		wantError(t, "Reserve over the shared cap", err, sluice.ErrFull)
		r := mustReserve(t, b, 40_000)
		wantHealth(t, "the first session", a, reserved(held(ref), 1, 40_000))
		_, err = a.Put(bg, sampleSized("s-2", 2, 1), sluice.Reservation{})
		wantError(t, "Put beside the other session's reservation", err, sluice.ErrFull)
		noError(t, "Unreserve", b.Unreserve(bg, r))

		ts := mustGet(t, b, ref)
		wantFeatures(t, "the other session's tensors", ts.Features, sample.Features)
		scribble(ts.Features)
		own := mustGet(t, a, ref)
		wantFeatures(t, "the first session's tensors", own.Features, sample.Features)
		noError(t, "Tensors.Release", own.Release(bg))
		wantHealth(t, "pinned by the other session", a, held(ref))
		noError(t, "Tensors.Release", ts.Release(bg))
		wantHealth(t, "the first session", a, held())
		wantHealth(t, "the other session", b, held())
	}},
	{"RoomThatAPeerFreedIsRoom", peer, func(t *testing.T, k *kit) {
		// Upstream's producer never learned that another process deleted a file, and stopped for ever at a full cap over an empty directory.
		producer := k.open(t, sluice.Caps{MaxBytes: 64_000})
		consumer := k.peerOf(t, producer)
		for i := range 12 {
			ref := mustPut(t, producer, sampleSized("s-1", uint64(i), 60_000))
			wantRead(t, consumer, ref, sampleSized("s-1", uint64(i), 60_000).Features)
			wantHealth(t, "the producer", producer, held())
		}
	}},
	{"AHandleMayBeGivenBackByAPeer", peer, func(t *testing.T, k *kit) {
		// Either it is useless there, as a handle of another store is, or it drops the pin; it never does half.
		a := k.open(t, roomy)
		b := k.peerOf(t, a)
		ref := mustPut(t, a, sampleSized("s-1", 1, 70_000))
		ts := mustGet(t, a, ref)
		noError(t, "Release by the other session", b.Release(bg, ts.Handle))
		wantFeatures(t, "the tensors", ts.Features, sampleSized("s-1", 1, 70_000).Features)
		noError(t, "Tensors.Release", ts.Release(bg))
		wantHealth(t, "at the end", a, held())
		wantHealth(t, "at the end", b, held())
	}},
	{"PeersShareClaims", peer | claims, func(t *testing.T, k *kit) {
		a := k.openClaims(t, roomy)
		b := k.peerOf(t, a).(sluice.ClaimStore)
		ref := mustPut(t, a, eagle("s-1", 1))
		noError(t, "Claim", b.Claim(ref, "queue-1"))
		wantError(t, "Claim by another owner", a.Claim(ref, "queue-2"), sluice.ErrConflict, "queue-1")
		wantError(t, "Abort of what the other session claimed", a.Abort(bg, ref), sluice.ErrConflict)
		ts := mustGet(t, a, ref)
		noError(t, "Unclaim", b.Unclaim(ref, "queue-1"))
		wantHealth(t, "unclaimed but pinned by the other session", b, held(ref))
		noError(t, "Tensors.Release", ts.Release(bg))
		wantHealth(t, "at the end", b, held())
	}},
	{"CloseNeverRemovesWhatWasPublished", peer | persistent, func(t *testing.T, k *kit) {
		a := k.open(t, roomy)
		x, y := mustPut(t, a, eagle("s-1", 1)), mustPut(t, a, sampleSized("s-2", 2, 70_000))
		noError(t, "Close", a.Close())
		b := k.peerOf(t, a)
		wantHealth(t, "the next session", b, held(x, y))
		wantListed(t, "the next session", b, x, y)
		ts, ts2 := mustGet(t, b, x), mustGet(t, b, y)
		wantFeatures(t, "the backlog", ts.Features, eagle("s-1", 1).Features)
		wantFeatures(t, "the backlog", ts2.Features, sampleSized("s-2", 2, 70_000).Features)
		_, err := b.Put(bg, eagle("s-1", 3), sluice.Reservation{})
		wantError(t, "Put of an id of the backlog", err, sluice.ErrDuplicate)
		noError(t, "Tensors.Release", ts.Release(bg))
		noError(t, "Tensors.Release", ts2.Release(bg))
		wantHealth(t, "at the end", b, held())
	}},
	{"ReservationsEndWithTheirSession", peer, func(t *testing.T, k *kit) {
		a := k.open(t, sluice.Caps{MaxBytes: 1000})
		b := k.peerOf(t, a)
		mustReserve(t, a, 1000)
		noError(t, "Close", a.Close())
		mustPut(t, b, sampleSized("s-1", 1, 1000))
	}},
	{"ReleaseAfterCloseStillDropsThePin", peer | persistent, func(t *testing.T, k *kit) {
		a := k.open(t, roomy)
		b := k.peerOf(t, a)
		ref := mustPut(t, a, eagle("s-1", 1))
		ts := mustGet(t, a, ref)
		noError(t, "Close", a.Close())
		noError(t, "Tensors.Release", ts.Release(bg))
		wantHealth(t, "the other session", b, held())
		wantListed(t, "the other session", b)
	}},
	{"PinsAndReservationsOfADeadProcessEndWithIt", crash | peer | claims, func(t *testing.T, k *kit) {
		a := k.openClaims(t, roomy)
		b := k.peerOf(t, a).(sluice.ClaimStore)
		ref, kept := mustPut(t, b, eagle("s-1", 1)), mustPut(t, b, eagle("s-2", 2))
		noError(t, "Claim", b.Claim(ref, "queue-1"))
		noError(t, "Claim", b.Claim(kept, "queue-1"))
		mustGet(t, a, ref)
		mustReserve(t, a, 5000)
		k.h.Crash(t, a)
		gc(t, b)
		wantHealth(t, "after the crash", b, held(ref, kept))
		noError(t, "Unclaim", b.Unclaim(ref, "queue-1"))
		wantHealth(t, "after Unclaim", b, held(kept))
		wantRead(t, b, kept, eagle("s-2", 2).Features)
	}},
	{"UnclaimedSamplesOfADeadSessionGoAfterAMinute", crash | peer, func(t *testing.T, k *kit) {
		a := k.open(t, roomy)
		b := k.peerOf(t, a)
		lost, mine := mustPut(t, a, eagle("s-1", 1)), mustPut(t, b, eagle("s-2", 2))
		k.h.Crash(t, a)
		gc(t, b) // whoever notices the death first starts the minute
		wantHealth(t, "right after the crash", b, held(lost, mine))
		k.clock.Advance(59 * time.Second)
		gc(t, b)
		wantHealth(t, "after 59 s", b, held(lost, mine))
		k.clock.Advance(62 * time.Second)
		if n := gc(t, b); n != 1 {
			t.Errorf("GC freed %d entries, want 1", n)
		}
		wantHealth(t, "after a minute", b, held(mine))
		wantListed(t, "after a minute", b, mine)
		mustPut(t, b, eagle("s-1", 3))
	}},
	{"AnUnclaimedSampleOfADeadSessionMayStillBeClaimedInTime", crash | peer | claims, func(t *testing.T, k *kit) {
		a := k.open(t, roomy)
		b := k.peerOf(t, a).(sluice.ClaimStore)
		ref, pinned := mustPut(t, a, eagle("s-1", 1)), mustPut(t, a, eagle("s-2", 2))
		k.h.Crash(t, a)
		gc(t, b)
		k.clock.Advance(30 * time.Second)
		noError(t, "Claim", b.Claim(ref, "queue-1"))
		ts := mustGet(t, b, pinned)
		k.clock.Advance(48 * time.Hour)
		gc(t, b)
		wantHealth(t, "claimed and pinned", b, held(ref, pinned))
		wantFeatures(t, "pinned tensors", ts.Features, eagle("s-2", 2).Features)
		noError(t, "Tensors.Release", ts.Release(bg))
		wantRead(t, b, ref, eagle("s-1", 1).Features)
	}},
	{"ClaimsOutliveTheProcessThatPut", crash | peer | claims | persistent, func(t *testing.T, k *kit) {
		a := k.openClaims(t, roomy)
		ref, dead := mustPut(t, a, eagle("s-1", 1)), mustPut(t, a, eagle("s-2", 2))
		noError(t, "Claim", a.Claim(ref, "queue-1"))
		noError(t, "Claim", a.Claim(dead, "queue-1"))
		noError(t, "MarkDead", a.MarkDead(dead, "queue-1", true))
		k.h.Crash(t, a)
		b := k.peerOf(t, a).(sluice.ClaimStore)
		want := held(ref, dead)
		want.DeadBytes, want.DeadSamples = dead.EstimatedBytes(), 1
		k.clock.Advance(48 * time.Hour)
		gc(t, b)
		wantHealth(t, "after the restart", b, want)
		if l := listing(t, b); l[key(ref)].Owner != "queue-1" || !l[key(dead)].Dead {
			t.Errorf("Samples after the restart: %+v", l)
		}
		wantRead(t, b, ref, eagle("s-1", 1).Features)
		noError(t, "Claim again by the recovered queue", b.Claim(ref, "queue-1"))
		noError(t, "Unclaim", b.Unclaim(ref, "queue-1"))
		noError(t, "Unclaim", b.Unclaim(dead, "queue-1"))
		wantHealth(t, "at the end", b, held())
	}},
}
