package storetest

import (
	"context"
	"errors"
	"testing"

	"github.com/sluice-ml/sluice"
)

var contextTests = []test{
	{"ACallWhoseContextHasEndedDoesNothing", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		ref := mustPut(t, s, eagle("s-1", 1))
		r := mustReserve(t, s, 5000)
		before := look(t, s)
		ended, cancel := context.WithCancel(bg)
		cancel()
		for what, call := range map[string]func() error{
			"Reserve":   func() error { _, err := s.Reserve(ended, 10); return err },
			"Put":       func() error { _, err := s.Put(ended, eagle("s-2", 2), sluice.Reservation{}); return err },
			"Put under": func() error { _, err := s.Put(ended, eagle("s-2", 2), r); return err },
			"Get":       func() error { _, err := s.Get(ended, ref); return err },
		} {
			if err := call(); !errors.Is(err, context.Canceled) {
				t.Errorf("%s with an ended context: %v", what, err)
			}
			before.wantSame(t, what+" with an ended context", s)
		}
		mustPutUnder(t, s, eagle("s-2", 2), r)
	}},
	{"GivingBackWithAnEndedContextIsAllOrNothing", 0, func(t *testing.T, k *kit) {
		// A store that never waits may do the work, since clean-up runs with ended contexts; one that must ask somebody may refuse.
		s := k.open(t, roomy)
		ref, aborted := mustPut(t, s, eagle("s-1", 1)), mustPut(t, s, eagle("s-2", 2))
		r := mustReserve(t, s, 5000)
		ts := mustGet(t, s, ref)
		noError(t, "Tensors.Close", ts.Close())
		want := reserved(held(ref, aborted), 1, 5000)
		ended, cancel := context.WithCancel(bg)
		cancel()
		sub := func(err error, bytes int64) {
			if err == nil {
				want.ResidentBytes -= bytes
				want.ResidentSamples--
			}
		}
		sub(s.Release(ended, ts.Handle), ref.EstimatedBytes())
		wantHealth(t, "Release with an ended context", s, want)
		sub(s.Abort(ended, aborted), aborted.EstimatedBytes())
		wantHealth(t, "Abort with an ended context", s, want)
		if s.Unreserve(ended, r) == nil {
			want.ReservedBytes, want.ReservedSamples = 0, 0
		}
		wantHealth(t, "Unreserve with an ended context", s, want)
	}},
	{"ACancelledPutLeavesNothing", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		sample := sampleSized("s-1", 1, 2<<20)
		for i := range 20 {
			var r sluice.Reservation
			before := held()
			if i%2 == 0 {
				r = mustReserve(t, s, sample.Bytes()+5)
				before = reserved(before, 1, r.Bytes)
			}
			ctx, cancel := context.WithCancel(bg)
			done := make(chan struct{})
			var ref sluice.Ref
			var err error
			go func() { defer close(done); ref, err = s.Put(ctx, sample, r) }() // ends with Put
			cancel()                                                            // before, while or after
			<-done
			if err != nil {
				if !errors.Is(err, context.Canceled) {
					t.Fatalf("a cancelled Put: %v", err)
				}
				wantHealth(t, "after a cancelled Put", s, before)
				wantListed(t, "after a cancelled Put", s)
				ref = mustPutUnder(t, s, sample, r) // the id is free and the reservation is as it was
			}
			wantHealth(t, "after a Put that worked", s, held(ref))
			wantRead(t, s, ref, sample.Features)
			wantHealth(t, "after the release", s, held())
		}
	}},
}
