package storetest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/sluice-ml/sluice"
)

var concurrentTests = []test{
	{"EverythingAtOnce", 0, func(t *testing.T, k *kit) {
		s := k.open(t, sluice.Caps{MaxBytes: 2 << 20, MaxSamples: 40})
		c, _ := s.(sluice.ClaimStore)
		if c != nil {
			defer c.OnFreed(func() { s.Health() })()
		}
		const workers, rounds = 6, 150
		shared := make(chan stressed, workers*rounds) // samples that one worker put and another one finishes
		var wg sync.WaitGroup
		for w := range workers {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(w), 7))
				for i := range rounds {
					if err := stress(s, c, rng, fmt.Sprintf("s-%d-%d", w, i), shared); err != nil {
						t.Errorf("worker %d, round %d: %v", w, i, err)
						return
					}
				}
			})
		}
		wg.Wait()
		close(shared)
		for x := range shared {
			if err := x.finish(s, c); err != nil {
				t.Error(err)
			}
		}
		wantHealth(t, "when all is given back", s, held())
		wantListed(t, "when all is given back", s)
		if n := gc(t, s); n != 0 {
			t.Errorf("GC found %d entries to free", n)
		}
	}},
	{"AGetThatRacesAFreeIsRightOrNotFound", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		c, _ := s.(sluice.ClaimStore)
		for round := range 40 {
			// The same id every time: a store that looks up by id alone would answer with the next round's bytes.
			sample := sampleSized("s-1", uint64(round), 70_001)
			ref := mustPut(t, s, sample)
			if c != nil && round%2 == 0 {
				noError(t, "Claim", c.Claim(ref, "queue-1"))
			}
			start := make(chan struct{})
			var wg sync.WaitGroup
			for range 3 {
				wg.Go(func() {
					<-start
					ts, err := s.Get(bg, ref)
					if errors.Is(err, sluice.ErrNotFound) {
						return
					}
					if err != nil {
						t.Errorf("Get: %v", err)
						return
					}
					if d := diffFeatures(ts.Features, sample.Features); d != "" {
						t.Errorf("Get while the sample goes: %s", d)
					}
					if err := ts.Release(bg); err != nil {
						t.Errorf("Tensors.Release: %v", err)
					}
				})
			}
			wg.Go(func() {
				<-start
				var err error
				if c != nil && round%2 == 0 {
					err = c.Unclaim(ref, "queue-1")
				} else {
					err = s.Abort(bg, ref)
				}
				if err != nil {
					t.Errorf("freeing: %v", err)
				}
			})
			close(start)
			wg.Wait()
			wantHealth(t, "after the race", s, held())
			wantListed(t, "after the race", s)
		}
	}},
	{"AGetThatRacesAnotherPutOfItsIDIsRightOrNotFound", 0, func(t *testing.T, k *kit) {
		s := k.open(t, roomy)
		ref := mustPut(t, s, sampleSized("s-1", 0, 70_001))
		for round := range uint64(200) {
			var wg sync.WaitGroup
			old := ref
			wg.Go(func() {
				ts, err := s.Get(bg, old)
				if errors.Is(err, sluice.ErrNotFound) {
					return
				}
				if err != nil {
					t.Errorf("Get: %v", err)
					return
				}
				if d := diffFeatures(ts.Features, sampleSized("s-1", round, 70_001).Features); d != "" {
					t.Errorf("Get while the sample is replaced: %s", d)
				}
				if err := ts.Release(bg); err != nil {
					t.Errorf("Tensors.Release: %v", err)
				}
			})
			noError(t, "Abort", s.Abort(bg, old))
			ref = mustPut(t, s, sampleSized("s-1", round+1, 70_001))
			wg.Wait()
			wantHealth(t, "after the race", s, held(ref))
		}
	}},
}

type stressed struct {
	ref  sluice.Ref
	seed uint64
	size int64
}

// finish reads the sample, checks it, and gives it up.
func (x stressed) finish(s sluice.Store, c sluice.ClaimStore) error {
	ts, err := s.Get(bg, x.ref)
	if err != nil {
		return err
	}
	want := sampleSized(x.ref.SampleID(), x.seed, x.size).Features
	if d := diffFeatures(ts.Features, want); d != "" {
		return errors.New("Get " + x.ref.SampleID() + ": " + d)
	}
	if c != nil {
		if err := c.Unclaim(x.ref, "queue-1"); err != nil {
			return err
		}
	}
	if err := s.Release(bg, ts.Handle); err != nil {
		return err
	}
	if d := diffFeatures(ts.Features, want); d != "" { // neither pin nor claim holds it now, only the open tensors do
		return errors.New("released tensors of " + x.ref.SampleID() + ": " + d)
	}
	return ts.Close()
}

// stress does one round of a worker: put a sample somehow, use it somehow, and leave it to somebody or give it up.
func stress(s sluice.Store, c sluice.ClaimStore, rng *rand.Rand, id string, shared chan stressed) error {
	x := stressed{seed: rng.Uint64(), size: []int64{0, 10, 5003, 70_001, 150_000}[rng.IntN(5)]}
	sample := sampleSized(id, x.seed, x.size)
	var r sluice.Reservation
	var err error
	if rng.IntN(2) == 0 {
		if r, err = s.Reserve(bg, x.size+rng.Int64N(100)); err != nil && !errors.Is(err, sluice.ErrFull) {
			return err
		}
	}
	ref, err := s.Put(bg, sample, r)
	if err != nil {
		if !errors.Is(err, sluice.ErrFull) || r.ID != "" {
			return err
		}
		select { // make room as a consumer does
		case y := <-shared:
			return y.finish(s, c)
		default:
			return nil
		}
	}
	scribble(sample.Features)
	x.ref = ref
	if h := s.Health(); h.UsedBytes() > h.Caps.MaxBytes || h.UsedSamples() > h.Caps.MaxSamples || h.ResidentBytes < 0 || h.ReservedBytes < 0 {
		return fmt.Errorf("health %+v", h)
	}
	if c != nil {
		switch rng.IntN(4) {
		case 0:
			return s.Abort(bg, ref)
		case 1:
			if err := errors.Join(c.Claim(ref, "queue-1"), c.MarkDead(ref, "queue-1", true), c.MarkDead(ref, "queue-1", false)); err != nil {
				return err
			}
			return x.finish(s, c)
		default:
			if err := c.Claim(ref, "queue-1"); err != nil {
				return err
			}
		}
		ts, err := s.Get(bg, ref)
		if err != nil {
			return err
		}
		if _, err := c.Samples(bg); err != nil {
			return err
		}
		if err := ts.Release(bg); err != nil {
			return err
		}
	}
	shared <- x
	return nil
}
