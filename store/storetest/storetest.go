// Package storetest is the conformance suite of stores: it argues, one claim a test, everything that [sluice.Store] and
// [sluice.ClaimStore] promise. A backend is a folder that passes it:
//
//	func TestConformance(t *testing.T) {
//		storetest.Run(t, storetest.Harness{
//			Open: func(t testing.TB, o storetest.Options) sluice.Store {
//				s, err := mystore.New(&mystore.Options{Caps: o.Caps, Clock: o.Clock})
//				...
//			},
//			Volatile: true,
//		})
//	}
//
// The harness says what its medium can do: whether a second session may open it (Peer), die (Crash), or find its data damaged (Corrupt). Tests that need what
// is not there are skipped, and say so. The claims of a queue are argued where the store is a [sluice.ClaimStore].
//
// Nothing here sleeps or measures time. Time that a store goes by is the harness's [Clock]; tests that wait for a callback wait for the callback. Every test opens
// its own store and runs in parallel with the others, so a harness must keep them apart.
//
// Beside the single claims there is a property test: random sequences of calls, each compared with a model of a few lines that keeps the counters and contents as the contract
// words them. It is the referee where two readings of the contract differ. When it fails, it prints the shortest sequence it found and a seed to repeat it.
package storetest

import (
	"context"
	"testing"

	"github.com/sluice-ml/sluice"
)

// Harness tells the suite how to make stores of one backend and what their medium can do. Only Open is required.
type Harness struct {
	// Open opens a new, empty store on a medium of its own. It fails the test if that does not work, and leaves nothing behind when the test ends; the
	// suite may have closed the store by then.
	Open func(t testing.TB, o Options) sluice.Store

	// Peer opens another session on the medium of s, with the same options, whether s is still open or not: what a second process does. The two
	// share samples, counters and caps. Leave it nil if the medium belongs to one session.
	Peer func(t testing.TB, s sluice.Store) sluice.Store

	// Crash ends the session s as the death of its process would: nothing is given back or flushed, and locks just vanish. The suite does not use s afterwards.
	// It needs Peer. Leave it nil if that cannot be played in one process.
	Crash func(t testing.TB, s sluice.Store)

	// Corrupt damages the stored bytes of ref's sample behind the back of s and returns the store to read it through, which may be s or, where a check happens
	// only after a restart, a later session on the medium. It returns nil if this medium by its documentation does not notice that damage.
	Corrupt func(t testing.TB, s sluice.Store, ref sluice.Ref, d Damage) sluice.Store

	// Volatile says that samples end with Close, as those in memory do.
	Volatile bool

	// Detached says that tensors are copies which the store does not count once their handle is released, as those of a remote client are.
	Detached bool

	// Handles is how many handles the suite may hold at a time. 20000 if zero.
	Handles int
}

// Options are what the suite wants of a store.
type Options struct {
	Caps  sluice.Caps
	Clock sluice.Clock // never nil
}

// Damage is a way for stored bytes to go bad.
type Damage int

// The kinds of damage that Corrupt is asked for.
const (
	Truncate   Damage = iota // the last bytes are missing
	FlipData                 // one bit of one tensor is different
	FlipHeader               // one byte of the description of the tensors is different
)

func (d Damage) String() string { return [...]string{"Truncate", "FlipData", "FlipHeader"}[d] }

// need is what a test needs of the harness or of the store.
type need int

const (
	claims     need = 1 << iota // a sluice.ClaimStore
	peer                        // Harness.Peer
	crash                       // Harness.Crash
	corrupt                     // Harness.Corrupt
	persistent                  // not Harness.Volatile
	attached                    // not Harness.Detached
)

type test struct {
	name  string
	needs need
	run   func(t *testing.T, k *kit)
}

// Run runs the suite against the harness's stores. Its tests are parallel subtests of t, so they end after Run has returned.
func Run(t *testing.T, h Harness) {
	if h.Open == nil {
		t.Fatal("storetest: the harness has no Open")
	}
	if h.Handles == 0 {
		h.Handles = 20000
	}
	for _, group := range [][]test{putTests, getTests, releaseTests, abortTests, claimTests, capsTests, closeTests, freedTests, contextTests, peerTests, corruptTests, concurrentTests, propertyTests} {
		for _, tc := range group {
			t.Run(tc.name, func(t *testing.T) {
				t.Parallel()
				k := &kit{h: h, clock: NewClock()}
				k.skipUnless(t, tc.needs)
				tc.run(t, k)
			})
		}
	}
}

// kit is what one test works with.
type kit struct {
	h     Harness
	clock *Clock
}

func (k *kit) skipUnless(t *testing.T, n need) {
	for _, c := range []struct {
		need need
		ok   func() bool
		why  string
	}{
		{peer, func() bool { return k.h.Peer != nil }, "the medium belongs to one session"},
		{crash, func() bool { return k.h.Crash != nil && k.h.Peer != nil }, "the harness cannot play the death of a process"},
		{corrupt, func() bool { return k.h.Corrupt != nil }, "the harness cannot damage what is stored"},
		{persistent, func() bool { return !k.h.Volatile }, "samples end with Close on this medium"},
		{attached, func() bool { return !k.h.Detached }, "the store does not count what it handed out"},
		{claims, func() bool {
			s := k.open(t, sluice.Caps{MaxSamples: 1})
			defer func() { noError(t, "Close", s.Close()) }()
			_, ok := s.(sluice.ClaimStore)
			return ok
		}, "the store takes no claims"},
	} {
		if n&c.need != 0 && !c.ok() {
			t.Skip("storetest: " + c.why)
		}
	}
}

// roomy are caps that a test which is not about caps does not meet.
var roomy = sluice.Caps{MaxBytes: 64 << 20, MaxSamples: 4096}

func (k *kit) open(t testing.TB, caps sluice.Caps) sluice.Store {
	t.Helper()
	return k.h.Open(t, Options{Caps: caps, Clock: k.clock})
}

func (k *kit) openClaims(t testing.TB, caps sluice.Caps) sluice.ClaimStore {
	t.Helper()
	return k.open(t, caps).(sluice.ClaimStore)
}

var bg = context.Background()

func mustPut(t testing.TB, s sluice.Store, sample *sluice.Sample) sluice.Ref {
	t.Helper()
	return mustPutUnder(t, s, sample, sluice.Reservation{})
}

func mustPutUnder(t testing.TB, s sluice.Store, sample *sluice.Sample, r sluice.Reservation) sluice.Ref {
	t.Helper()
	ref, err := s.Put(bg, sample, r)
	if err != nil {
		t.Fatalf("Put %q: %v", sample.SampleID, err)
	}
	return ref
}

func mustGet(t testing.TB, s sluice.Store, ref sluice.Ref) *sluice.Tensors {
	t.Helper()
	ts, err := s.Get(bg, ref)
	if err != nil {
		t.Fatalf("Get %s: %v", ref, err)
	}
	return ts
}

func mustReserve(t testing.TB, s sluice.Store, n int64) sluice.Reservation {
	t.Helper()
	r, err := s.Reserve(bg, n)
	if err != nil {
		t.Fatalf("Reserve(%d): %v", n, err)
	}
	return r
}

// noError fails the test at a call that must have worked.
func noError(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}
