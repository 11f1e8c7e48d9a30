package storetest

import (
	"sync"
	"testing"

	"github.com/sluice-ml/sluice"
)

var closeTests = []test{
	{"CloseIsIdempotentAndEveryLaterCallErrs", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		ref := mustPut(t, s, eagle("s-1", 1))
		r := mustReserve(t, s, 10)
		uri := s.URI()
		for range 3 {
			noError(t, "Close", s.Close())
		}
		for what, call := range map[string]func() error{
			"Reserve":   func() error { _, err := s.Reserve(bg, 1); return err },
			"Unreserve": func() error { return s.Unreserve(bg, r) },
			"Put":       func() error { _, err := s.Put(bg, eagle("s-2", 1), sluice.Reservation{}); return err },
			"Put under": func() error { _, err := s.Put(bg, sampleSized("s-2", 1, 9), r); return err },
			"Get":       func() error { _, err := s.Get(bg, ref); return err },
			"Abort":     func() error { return s.Abort(bg, ref) },
			"GC":        func() error { _, err := s.GC(bg); return err },
		} {
			wantError(t, what+" after Close", call(), sluice.ErrClosed)
		}
		if s.URI() != uri {
			t.Errorf("the URI changed from %q to %q", uri, s.URI())
		}
		if c := s.Health().Caps; c.MaxBytes != roomy.MaxBytes {
			t.Errorf("Health after Close has the caps %+v", c)
		}
		if c, ok := s.(sluice.ClaimStore); ok {
			for what, call := range map[string]func() error{
				"Claim":    func() error { return c.Claim(ref, "queue-1") },
				"MarkDead": func() error { return c.MarkDead(ref, "queue-1", true) },
				"Unclaim":  func() error { return c.Unclaim(ref, "queue-1") },
				"Samples":  func() error { _, err := c.Samples(bg); return err },
			} {
				wantError(t, what+" after Close", call(), sluice.ErrClosed)
			}
			c.OnFreed(func() {})()
		}
	}},
	{"TensorsOutliveTheStore", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		for _, n := range []int64{100, 300_000} {
			sample := sampleSized("s-1", uint64(n), n)
			st := k.open(t, roomy)
			ts := mustGet(t, st, mustPut(t, st, sample))
			noError(t, "Close", st.Close())
			mustPut(t, s, sampleSized("s", 9, 2*n)) // reuses what the closed store gave back
			wantFeatures(t, "tensors after Close of their store", ts.Features, sample.Features)
			scribble(ts.Features)
			noError(t, "Release after Close", st.Release(bg, ts.Handle))
			noError(t, "Release after Close again", st.Release(bg, ts.Handle))
			inverse := clone(sample.Features)
			scribble(inverse)
			wantFeatures(t, "released tensors after Close of their store", ts.Features, inverse)
			noError(t, "Tensors.Close after Close", ts.Close())
			noError(t, "Tensors.Close after Close again", ts.Close())
			noError(t, "Abort", s.Abort(bg, mustPut(t, s, sampleSized("s-2", 9, 10))))
			noError(t, "Close again", s.Close())
			s = k.open(t, roomy)
		}
	}},
	{"TensorsMayBeClosedBeforeTheyAreReleasedAfterClose", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		ts := mustGet(t, s, mustPut(t, s, sampleSized("s-1", 1, 70_000)))
		noError(t, "Close", s.Close())
		noError(t, "Tensors.Close", ts.Close())
		noError(t, "Release", s.Release(bg, ts.Handle))
		noError(t, "Tensors.Release", ts.Release(bg))
	}},
	{"NothingOfAVolatileStoreStaysCountedOnceItIsClosedAndUnmapped", attached, func(t *testing.T, k *kit) {
		if !k.h.Volatile {
			t.Skip("storetest: samples outlive Close on this medium")
		}
		s := k.open(t, roomy)
		mustPut(t, s, sampleSized("s-1", 1, 5000))
		ref := mustPut(t, s, sampleSized("s-2", 2, 70_000))
		mustReserve(t, s, 100)
		if c, ok := s.(sluice.ClaimStore); ok {
			noError(t, "Claim", c.Claim(ref, "queue-1"))
			noError(t, "MarkDead", c.MarkDead(ref, "queue-1", true))
		}
		ts := mustGet(t, s, ref)
		noError(t, "Close", s.Close())
		if h := s.Health(); h.ResidentBytes < 70_000 {
			t.Errorf("Health after Close does not count what is mapped: %+v", h)
		}
		noError(t, "Tensors.Release", ts.Release(bg))
		wantHealth(t, "closed and unmapped", s, held())
		if p := s.Health().PoolBytes; p != 0 {
			t.Errorf("a closed store keeps %d bytes for recycling", p)
		}
	}},
	{"CloseEndsThePinsOfAbortedSamples", 0, func(t *testing.T, k *kit) {
		for _, n := range []int64{100, 70_000} {
			s := k.open(t, roomy)
			refs := []sluice.Ref{mustPut(t, s, sampleSized("s-1", 1, n)), mustPut(t, s, sampleSized("s-2", 2, n))}
			mapped, pinned := mustGet(t, s, refs[0]), mustGet(t, s, refs[1])
			noError(t, "Tensors.Close", pinned.Close())
			for _, ref := range refs {
				noError(t, "Abort", s.Abort(bg, ref))
			}
			wantHealth(t, "aborted but pinned", s, held(refs...))
			noError(t, "Close", s.Close())
			wantFeatures(t, "tensors after Close of their store", mapped.Features, sampleSized("s-1", 1, n).Features)
			noError(t, "Tensors.Release", mapped.Release(bg))
			noError(t, "Tensors.Release", pinned.Release(bg))
			wantHealth(t, "closed, released and unmapped", s, held())
		}
	}},
	{"CloseMayRaceEverything", 0, func(t *testing.T, k *kit) {
		for range 5 {
			s := k.open(t, roomy)
			ref := mustPut(t, s, sampleSized("s-1", 1, 70_000))
			pin := mustGet(t, s, ref)
			check := func(what string, err error) {
				if err != nil && sluice.KindOf(err) != sluice.Closed {
					t.Errorf("%s while Close: %v", what, err)
				}
			}
			var wg sync.WaitGroup
			wg.Go(func() { check("Close", s.Close()) })
			wg.Go(func() { check("Close", s.Close()) })
			wg.Go(func() {
				_, err := s.Put(bg, sampleSized("s-2", 2, 300_000), sluice.Reservation{})
				check("Put", err)
			})
			wg.Go(func() {
				r, err := s.Reserve(bg, 1000)
				check("Reserve", err)
				check("Unreserve", s.Unreserve(bg, r))
			})
			wg.Go(func() {
				ts, err := s.Get(bg, ref)
				check("Get", err)
				if err == nil {
					if d := diffFeatures(ts.Features, sampleSized("s-1", 1, 70_000).Features); d != "" {
						t.Errorf("Get while Close: %s", d)
					}
					check("Tensors.Release", ts.Release(bg))
				}
			})
			wg.Go(func() { s.Health() })
			wg.Wait()
			wantFeatures(t, "pinned tensors", pin.Features, sampleSized("s-1", 1, 70_000).Features)
			noError(t, "Tensors.Release", pin.Release(bg))
		}
	}},
}
