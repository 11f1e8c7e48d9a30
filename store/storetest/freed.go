package storetest

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
)

// patience bounds the wait for a callback that must come; only a failing test waits so long.
const patience = 30 * time.Second

// signal is a channel that holds at most one pending call, as merged calls are one.
func onFreed(s sluice.ClaimStore) (calls chan struct{}, stop func()) {
	calls = make(chan struct{}, 1)
	stop = s.OnFreed(func() {
		select {
		case calls <- struct{}{}:
		default:
		}
	})
	return calls, stop
}

var freedTests = []test{
	{"OnFreedTellsOfRoomWhoeverFreedIt", claims, func(t *testing.T, k *kit) {
		s := k.openClaims(t, sluice.Caps{MaxBytes: 100_000})
		calls, stop := onFreed(s)
		defer stop()
		put := func(n int64) sluice.Ref { return mustPut(t, s, sampleSized("s-1", 1, n)) }
		claimed := func() sluice.Ref {
			ref := put(100_000)
			noError(t, "Claim", s.Claim(ref, "queue-1"))
			return ref
		}
		for _, c := range []struct {
			what    string
			prepare func() (free func() error)
		}{
			{"the last Tensors.Release", func() func() error {
				ts := mustGet(t, s, put(100_000))
				return func() error { return ts.Release(bg) }
			}},
			{"Tensors.Close after the last Release", func() func() error {
				ts := mustGet(t, s, put(100_000))
				noError(t, "Release", s.Release(bg, ts.Handle))
				if k.h.Detached {
					return nil
				}
				return ts.Close
			}},
			{"Release after Tensors.Close", func() func() error {
				ts := mustGet(t, s, put(100_000))
				noError(t, "Tensors.Close", ts.Close())
				return func() error { return s.Release(bg, ts.Handle) }
			}},
			{"Unclaim", func() func() error {
				ref := claimed()
				return func() error { return s.Unclaim(ref, "queue-1") }
			}},
			{"Abort", func() func() error {
				ref := put(100_000)
				return func() error { return s.Abort(bg, ref) }
			}},
			{"Unreserve", func() func() error {
				r := mustReserve(t, s, 100_000)
				return func() error { return s.Unreserve(bg, r) }
			}},
		} {
			free := c.prepare()
			if free == nil {
				continue
			}
			select {
			case <-calls: // of the preparation
			default:
			}
			noError(t, c.what, free())
			select {
			case <-calls:
			case <-time.After(patience):
				t.Fatalf("%s freed room and OnFreed was not called", c.what)
			}
			wantHealth(t, "after "+c.what, s, held())
		}
	}},
	{"OnFreedMayCallTheStore", claims, func(t *testing.T, k *kit) {
		s := k.openClaims(t, sluice.Caps{MaxBytes: 1000})
		ref := mustPut(t, s, sampleSized("s-1", 1, 1000))
		done := make(chan error, 1)
		var once atomic.Bool
		stop := s.OnFreed(func() {
			if s.Health().UsedBytes() > 0 || !once.CompareAndSwap(false, true) {
				return // a merged or late call
			}
			got, err := s.Put(bg, sampleSized("s-2", 2, 1000), sluice.Reservation{})
			if err == nil {
				_, err = s.Samples(bg)
			}
			if err == nil {
				err = s.Abort(bg, got) // frees again, from within
			}
			done <- err
		})
		defer stop()
		freed := make(chan error, 1)
		go func() { freed <- s.Abort(bg, ref) }() // ends with Abort; a store that calls under its lock hangs here
		for _, c := range []chan error{done, freed} {
			select {
			case err := <-c:
				noError(t, "the callback", err)
			case <-time.After(patience):
				t.Fatal("OnFreed was not called, or hangs when it calls the store")
			}
		}
		wantHealth(t, "at the end", s, held())
	}},
	{"OnFreedHasSeveralListenersAndAnEnd", claims, func(t *testing.T, k *kit) {
		s := k.openClaims(t, roomy)
		a, stopA := onFreed(s)
		b, stopB := onFreed(s)
		defer stopB()
		wait := func(c chan struct{}) {
			t.Helper()
			select {
			case <-c:
			case <-time.After(patience):
				t.Fatal("OnFreed was not called")
			}
		}
		noError(t, "Abort", s.Abort(bg, mustPut(t, s, eagle("s-1", 1))))
		wait(a)
		wait(b)
		stopA()
		stopA()
		select {
		case <-a: // a call that was under way
		default:
		}
		noError(t, "Abort", s.Abort(bg, mustPut(t, s, eagle("s-2", 1))))
		wait(b)
		select {
		case <-a:
			t.Error("a stopped listener was called")
		default:
		}
	}},
}
