package storetest

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/sluice-ml/sluice"
)

// reserved is h with room set aside for n samples of the given bytes in sum.
func reserved(h sluice.Health, samples, bytes int64) sluice.Health {
	h.ReservedBytes, h.ReservedSamples = bytes, samples
	return h
}

var capsTests = []test{
	{"MarksDefaultToFractionsOfTheirCaps", 0, func(t *testing.T, k *kit) {
		for _, caps := range []sluice.Caps{{MaxBytes: 1 << 20}, {MaxSamples: 8}, {MaxBytes: 1000, MaxSamples: 4}, {MaxBytes: 1000, HighWatermarkBytes: 900, LowWatermarkBytes: 1}} {
			s := k.open(t, caps)
			want, err := caps.Resolve()
			noError(t, "Resolve", err)
			if d := cmp.Diff(want, s.Health().Caps); d != "" {
				t.Errorf("Health.Caps (-want +got):\n%s", d)
			}
		}
	}},
	{"TheCapInBytesHolds", 0, func(t *testing.T, k *kit) {
		s := k.open(t, sluice.Caps{MaxBytes: 10_000})
		a := mustPut(t, s, sampleSized("s-1", 1, 6000))
		before := look(t, s)
		_, err := s.Put(bg, sampleSized("s-2", 2, 4001), sluice.Reservation{})
		wantError(t, "Put of a byte too many", err, sluice.ErrFull, `"s-2"`)
		wantNumbers(t, "Put of a byte too many", err, 4001, 10_000)
		_, err = s.Reserve(bg, 4001)
		wantError(t, "Reserve of a byte too many", err, sluice.ErrFull)
		wantNumbers(t, "Reserve of a byte too many", err, 4001, 10_000)
		before.wantSame(t, "what did not fit", s)
		b := mustPut(t, s, sampleSized("s-2", 2, 4000))
		wantHealth(t, "full to the byte", s, held(a, b))
		mustPut(t, s, sampleSized("empty", 3, 0))
		noError(t, "Abort", s.Abort(bg, a))
		mustPut(t, s, sampleSized("s-3", 3, 6000))
	}},
	{"TheCapInSamplesHolds", 0, func(t *testing.T, k *kit) {
		s := k.open(t, sluice.Caps{MaxSamples: 2})
		a, b := mustPut(t, s, sampleSized("s-1", 1, 10)), mustPut(t, s, sampleSized("s-2", 1, 10))
		before := look(t, s)
		_, err := s.Put(bg, sampleSized("s-3", 1, 0), sluice.Reservation{})
		wantError(t, "Put of a third sample", err, sluice.ErrFull, `"s-3"`)
		wantNumbers(t, "Put of a third sample", err, 2)
		_, err = s.Reserve(bg, 0)
		wantError(t, "Reserve for a third sample", err, sluice.ErrFull)
		before.wantSame(t, "what did not fit", s)
		noError(t, "Abort", s.Abort(bg, a))
		c := mustPut(t, s, sampleSized("s-3", 1, 10))
		wantHealth(t, "at the end", s, held(b, c))
	}},
	{"ASampleOverTheCapIsRefusedAtOnceWithBothNumbers", 0, func(t *testing.T, k *kit) {
		s := k.open(t, sluice.Caps{MaxBytes: 4 << 20})
		before := look(t, s)
		_, err := s.Reserve(bg, 5<<20)
		wantError(t, "Reserve of more than the cap", err, sluice.ErrFull)
		wantNumbers(t, "Reserve of more than the cap", err, 5<<20, 4<<20)
		big := sampleOf("big", 1, sluice.Feature{Name: "a", Tensor: sluice.NewTensor(sluice.Int8, 5<<20)})
		_, err = s.Put(bg, big, sluice.Reservation{})
		wantError(t, "Put of more than the cap", err, sluice.ErrFull, `"big"`)
		wantNumbers(t, "Put of more than the cap", err, 5<<20, 4<<20)
		before.wantSame(t, "what is over the cap", s)
	}},
	{"ReservationsCountAndEndWithTheirPut", 0, func(t *testing.T, k *kit) {
		s := k.open(t, sluice.Caps{MaxBytes: 10_000, MaxSamples: 3})
		r := mustReserve(t, s, 6000)
		if r.ID == "" || r.Bytes != 6000 {
			t.Errorf("the reservation is %+v", r)
		}
		wantHealth(t, "after Reserve", s, reserved(held(), 1, 6000))
		_, err := s.Put(bg, sampleSized("s-1", 1, 4001), sluice.Reservation{})
		wantError(t, "Put beside the reservation", err, sluice.ErrFull)
		other := mustReserve(t, s, 4000)
		if other.ID == r.ID {
			t.Error("two reservations have one id")
		}
		wantHealth(t, "after a second Reserve", s, reserved(held(), 2, 10_000))
		ref := mustPutUnder(t, s, sampleSized("s-1", 1, 6000), r)
		wantHealth(t, "after the Put", s, reserved(held(ref), 1, 4000))
		noError(t, "Unreserve of the spent one", s.Unreserve(bg, r))
		wantHealth(t, "after Unreserve of the spent one", s, reserved(held(ref), 1, 4000))
		noError(t, "Unreserve of the other one", s.Unreserve(bg, other))
		wantHealth(t, "at the end", s, held(ref))
	}},
	{"APutMayNeedLessOrMoreThanItsReservation", 0, func(t *testing.T, k *kit) {
		s := k.open(t, sluice.Caps{MaxBytes: 10_000})
		small := mustPutUnder(t, s, sampleSized("s-1", 1, 1000), mustReserve(t, s, 5000))
		wantHealth(t, "after a Put of less", s, held(small))
		large := mustPutUnder(t, s, sampleSized("s-2", 2, 7000), mustReserve(t, s, 5000))
		wantHealth(t, "after a Put of more", s, held(small, large))

		r := mustReserve(t, s, 1500)
		before := look(t, s)
		_, err := s.Put(bg, sampleSized("s-3", 3, 2001), r)
		wantError(t, "Put over the reservation and the cap", err, sluice.ErrFull, `"s-3"`)
		wantNumbers(t, "Put over the reservation and the cap", err, 2001, 10_000)
		before.wantSame(t, "Put over the reservation and the cap", s)
		exact := mustPutUnder(t, s, sampleSized("s-3", 3, 2000), r)
		wantHealth(t, "full to the byte", s, held(small, large, exact))
	}},
	{"AReservationNeedsNoRoomWhenItIsUsed", 0, func(t *testing.T, k *kit) {
		s := k.open(t, sluice.Caps{MaxBytes: 5000, MaxSamples: 2})
		r := mustReserve(t, s, 4000)
		other := mustPut(t, s, sampleSized("s-1", 1, 1000)) // now both caps are exhausted
		mine := mustPutUnder(t, s, sampleSized("s-2", 2, 4000), r)
		wantHealth(t, "at the end", s, held(other, mine))
	}},
	{"ASpentOrForgedReservationGivesNoRoom", 0, func(t *testing.T, k *kit) {
		s := k.open(t, sluice.Caps{MaxBytes: 10_000})
		spent := mustReserve(t, s, 5000)
		ref := mustPutUnder(t, s, sampleSized("s-1", 1, 5000), spent)
		given := mustReserve(t, s, 3000)
		noError(t, "Unreserve", s.Unreserve(bg, given))
		keep := mustReserve(t, s, 4000)
		wantHealth(t, "before", s, reserved(held(ref), 1, 4000))
		before := look(t, s)
		for what, r := range map[string]sluice.Reservation{
			"a spent reservation":     spent,
			"a returned reservation":  given,
			"an invented reservation": {ID: "deadbeef", Bytes: 5000},
			"one without an id":       {Bytes: 5000},
		} {
			_, err := s.Put(bg, sampleSized("s-2", 2, 3000), r)
			if err == nil {
				t.Fatalf("Put under %s found room beyond the cap", what)
			}
			if !errors.Is(err, sluice.ErrFull) && !errors.Is(err, sluice.ErrInvalid) {
				t.Errorf("Put under %s: %v", what, err)
			}
			noError(t, "Unreserve of "+what, s.Unreserve(bg, r))
			before.wantSame(t, "the use of "+what, s)
		}
		// What the holder writes into its reservation changes nothing: the store goes by its own record.
		fat := keep
		fat.Bytes = 9000
		_, err := s.Put(bg, sampleSized("s-2", 2, 5001), fat)
		wantError(t, "Put under an inflated reservation", err, sluice.ErrFull)
		before.wantSame(t, "Put under an inflated reservation", s)
		noError(t, "Unreserve of an inflated reservation", s.Unreserve(bg, fat))
		wantHealth(t, "after Unreserve of an inflated reservation", s, held(ref))
	}},
	{"TwoPutsUnderOneReservationGetItsRoomOnce", 0, func(t *testing.T, k *kit) {
		for range 10 {
			s := k.open(t, sluice.Caps{MaxBytes: 100_000})
			r := mustReserve(t, s, 100_000)
			refs, errs := make([]sluice.Ref, 2), make([]error, 2)
			var wg sync.WaitGroup
			for i := range refs {
				sample := sampleSized(fmt.Sprintf("s-%d", i), uint64(i), 100_000)
				wg.Go(func() { refs[i], errs[i] = s.Put(bg, sample, r) })
			}
			wg.Wait()
			if (errs[0] == nil) == (errs[1] == nil) {
				t.Fatalf("two puts under one reservation: %v and %v, want one to work", errs[0], errs[1])
			}
			for i := range refs {
				if errs[i] == nil {
					wantHealth(t, "after both puts", s, held(refs[i]))
					noError(t, "Abort", s.Abort(bg, refs[i]))
				} else if !errors.Is(errs[i], sluice.ErrFull) && !errors.Is(errs[i], sluice.ErrInvalid) {
					t.Errorf("Put under a reservation in use: %v", errs[i])
				}
			}
			wantHealth(t, "at the end", s, held())
			noError(t, "Close", s.Close())
		}
	}},
	{"UnreserveIsIdempotent", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		r, kept := mustReserve(t, s, 5000), mustReserve(t, s, 5000)
		for range 3 {
			noError(t, "Unreserve", s.Unreserve(bg, r))
			wantHealth(t, "after Unreserve", s, reserved(held(), 1, 5000))
		}
		noError(t, "Unreserve of none", s.Unreserve(bg, sluice.Reservation{}))
		noError(t, "Unreserve", s.Unreserve(bg, kept))
		wantHealth(t, "at the end", s, held())
	}},
	{"ReserveRefusesNegativeSizes", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		before := look(t, s)
		_, err := s.Reserve(bg, -1)
		wantError(t, "Reserve(-1)", err, sluice.ErrInvalid, "-1", "0 or more")
		before.wantSame(t, "Reserve(-1)", s)
	}},
	{"ReserveRefusesSizesThatWouldOverflowTheCounters", 0, func(t *testing.T, k *kit) {
		s := k.open(t, sluice.Caps{MaxSamples: 10})
		mustReserve(t, s, 100)
		before := look(t, s)
		for _, n := range []int64{1 << 53, math.MaxInt64 - 50, math.MaxInt64} {
			_, err := s.Reserve(bg, n)
			wantError(t, fmt.Sprintf("Reserve(%d)", n), err, sluice.ErrInvalid, fmt.Sprint(n), "2^53")
			before.wantSame(t, fmt.Sprintf("Reserve(%d)", n), s)
		}
	}},
	{"AReservationForNothingCountsOneSample", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		r := mustReserve(t, s, 0)
		wantHealth(t, "after Reserve(0)", s, reserved(held(), 1, 0))
		ref := mustPutUnder(t, s, sampleSized("s-1", 1, 0), r)
		wantHealth(t, "after the Put", s, held(ref))
	}},
	{"PutIgnoresTheMarks", 0, func(t *testing.T, k *kit) {
		s := k.open(t, sluice.Caps{MaxBytes: 1000, HighWatermarkBytes: 10, LowWatermarkBytes: 1})
		mustPut(t, s, sampleSized("s-1", 1, 500))
		mustPutUnder(t, s, sampleSized("s-2", 1, 400), mustReserve(t, s, 400))
		if !s.Health().HighWatermarkHit() {
			t.Error("the high mark is not hit")
		}
	}},
	{"ConcurrentReservationsNeverExceedTheCaps", 0, func(t *testing.T, k *kit) {
		s := k.open(t, sluice.Caps{MaxBytes: 10_000, MaxSamples: 7})
		var got atomic.Int64
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				for j := range 50 {
					r, err := s.Reserve(bg, 1900)
					if err != nil {
						if !errors.Is(err, sluice.ErrFull) {
							t.Errorf("Reserve: %v", err)
						}
						continue
					}
					if n := got.Add(1); n > 5 {
						t.Errorf("%d reservations of 1900 bytes in a cap of 10000", n)
					}
					if h := s.Health(); h.UsedBytes() > 10_000 || h.UsedSamples() > 7 {
						t.Errorf("used is %d bytes and %d samples", h.UsedBytes(), h.UsedSamples())
					}
					if j%2 == 0 {
						got.Add(-1)
						if err := s.Unreserve(bg, r); err != nil {
							t.Errorf("Unreserve: %v", err)
						}
						continue
					}
					ref, err := s.Put(bg, sampleSized(fmt.Sprintf("s-%d-%d", i, j), 1, 1900), r)
					if err != nil {
						t.Errorf("Put under a reservation: %v", err)
					}
					got.Add(-1)
					if err := s.Abort(bg, ref); err != nil {
						t.Errorf("Abort: %v", err)
					}
				}
			})
		}
		wg.Wait()
		wantHealth(t, "at the end", s, held())
	}},
}
