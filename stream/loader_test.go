package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/target/targettest"
)

// bubble runs a test under a fake clock with a rig whose queue holds n samples and is closed.
func bubble(t *testing.T, n int, f func(t *testing.T, r *rig, refs []sluice.Ref)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		f(t, r, r.fill(t, n))
	})
}

func next(t testing.TB, l *Loader) *Batch {
	t.Helper()
	b, err := l.Next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func closeLoader(t testing.TB, l *Loader) {
	t.Helper()
	for range 2 {
		if err := l.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}
}

func TestBatchesHaveTheirSizeAndTheLastOneWhatIsLeft(t *testing.T) {
	t.Parallel()
	bubble(t, 7, func(t *testing.T, r *rig, refs []sluice.Ref) {
		l := r.loader(t, func(c *LoaderConfig) { c.Batch = 3 })
		defer closeLoader(t, l)
		var sizes []int
		var ids []string
		for b, err := range l.All(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			sizes = append(sizes, len(b.Samples))
			x, _ := b.Feature("input_ids")
			if x.Shape[0] != int64(len(b.Samples)) {
				t.Errorf("shape %v for %d samples", x.Shape, len(b.Samples))
			}
			for _, s := range b.Samples {
				ids = append(ids, s.Ref.SampleID())
			}
		}
		if !slices.Equal(sizes, []int{3, 3, 1}) {
			t.Errorf("sizes %v", sizes)
		}
		for i, ref := range refs {
			if ids[i] != ref.SampleID() {
				t.Errorf("sample %d is %s, want put order", i, ids[i])
			}
		}
		if got := len(r.queue.ackedIDs()); got != 7 {
			t.Errorf("%d acked", got)
		}
		s := l.Stats()
		if s.Batches != 3 || s.Samples != 7 || s.Acked != 7 || s.Tokens == 0 || s.Bytes == 0 || s.Held != 0 {
			t.Errorf("stats %+v", s)
		}
		clean(t, r.store, r.queue)
	})
}

func TestTheNextPullAcknowledges(t *testing.T) {
	t.Parallel()
	bubble(t, 3, func(t *testing.T, r *rig, refs []sluice.Ref) {
		l := r.loader(t, nil)
		a := next(t, l)
		if len(r.queue.ackedIDs()) != 0 {
			t.Error("acknowledged before it was consumed")
		}
		next(t, l)
		if got := r.queue.ackedIDs(); !slices.Equal(got, []string{refs[0].SampleID()}) {
			t.Errorf("acked %v", got)
		}
		if a.Features != nil {
			t.Error("the batch still has its tensors")
		}
		for range 2 {
			if err := l.ConsumeNow(t.Context()); err != nil {
				t.Error(err)
			}
		}
		if got := len(r.queue.ackedIDs()); got != 2 {
			t.Errorf("ConsumeNow: %d acked, want 2", got)
		}
		next(t, l)
		closeLoader(t, l)
		if got := len(r.queue.ackedIDs()); got != 3 {
			t.Errorf("after Close %d acked, want the last one too", got)
		}
		if _, err := l.Next(t.Context()); !errors.Is(err, sluice.ErrClosed) {
			t.Errorf("Next after Close: %v", err)
		}
		clean(t, r.store, r.queue)
	})
}

func TestStepAcknowledgesAllSinceTheLastOne(t *testing.T) {
	t.Parallel()
	bubble(t, 4, func(t *testing.T, r *rig, refs []sluice.Ref) {
		l := r.loader(t, func(c *LoaderConfig) { c.Ack = AckOnStep })
		next(t, l)
		next(t, l)
		if len(r.queue.ackedIDs()) != 0 {
			t.Error("acknowledged before the step")
		}
		if err := l.Step(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := len(r.queue.ackedIDs()); got != 2 {
			t.Errorf("%d acked after the step, want 2", got)
		}
		next(t, l)
		closeLoader(t, l)
		if got := len(r.queue.ackedIDs()); got != 2 {
			t.Errorf("%d acked; what no step followed must come again", got)
		}
		st, _ := r.queue.Status(t.Context())
		if st.Pending != 2 || r.queue.pending[0].fails != 0 {
			t.Errorf("status %+v, want both back without a fail", st)
		}
	})
}

func TestCheckpointAcknowledgesAllSinceTheLastOne(t *testing.T) {
	t.Parallel()
	bubble(t, 4, func(t *testing.T, r *rig, refs []sluice.Ref) {
		r.queue.steps = 4
		l := r.loader(t, func(c *LoaderConfig) { c.Ack = AckOnCheckpoint })
		next(t, l)
		if err := l.Step(t.Context()); err != nil {
			t.Fatal(err)
		}
		next(t, l)
		if len(r.queue.ackedIDs()) != 0 {
			t.Error("acknowledged before the checkpoint")
		}
		if err := l.CloseWithError(t.Context(), errors.New("boom")); err != nil {
			t.Fatal(err)
		}
		fails := map[string]int{}
		for _, e := range r.queue.pending {
			fails[e.ref.SampleID()] = e.fails
		}
		if fails[refs[0].SampleID()] != 0 || fails[refs[1].SampleID()] != 1 || len(fails) != 4 {
			t.Errorf("fails %v, want the batch behind the last step failed and the others back unharmed", fails)
		}
		l = r.loader(t, func(c *LoaderConfig) { c.Ack = AckOnCheckpoint })
		for range 4 {
			next(t, l)
		}
		if _, err := l.Next(t.Context()); !errors.Is(err, io.EOF) {
			t.Errorf("the end with open leases: %v", err)
		}
		if err := l.Checkpoint(t.Context()); err != nil {
			t.Error(err)
		}
		closeLoader(t, l)
		if got := len(r.queue.ackedIDs()); got != 4 {
			t.Errorf("%d acked", got)
		}
		clean(t, r.store, r.queue)
	})
}

func TestLeavingByAnErrorFailsTheBatch(t *testing.T) {
	t.Parallel()
	for name, leave := range map[string]func(t *testing.T, l *Loader){
		"close with error": func(t *testing.T, l *Loader) {
			next(t, l)
			if err := l.CloseWithError(t.Context(), errors.New("loss is NaN")); err != nil {
				t.Error(err)
			}
		},
		"panic in the loop": func(t *testing.T, l *Loader) {
			err := guard(sluice.Invalid, "test", func() error {
				for range l.All(t.Context()) {
					panic("loss is NaN")
				}
				return nil
			})
			if err == nil {
				t.Error("the panic was swallowed")
			}
			closeLoader(t, l)
		},
		"fail": func(t *testing.T, l *Loader) {
			next(t, l)
			if err := l.Fail(t.Context(), errors.New("loss is NaN")); err != nil {
				t.Error(err)
			}
			closeLoader(t, l)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bubble(t, 3, func(t *testing.T, r *rig, refs []sluice.Ref) {
				leave(t, r.loader(t, nil))
				if got := r.queue.ackedIDs(); len(got) != 0 {
					t.Errorf("acked %v", got)
				}
				st, _ := r.queue.Status(t.Context())
				last := r.queue.pending[len(r.queue.pending)-1]
				if st.Pending != 3 || last.ref.SampleID() != refs[0].SampleID() || last.fails != 1 || last.lastReason == "" {
					t.Errorf("%d pending, the last is %s with %d fails (%q)", st.Pending, last.ref.SampleID(), last.fails, last.lastReason)
				}
				if r.queue.pending[0].fails != 0 {
					t.Error("a batch that was never handed out was failed")
				}
				if len(r.store.pins) != 0 || r.store.mapped != 0 {
					t.Errorf("%d pins, %d mappings", len(r.store.pins), r.store.mapped)
				}
			})
		})
	}
}

func TestLeavingTheLoopEarlyIsARegularEnd(t *testing.T) {
	t.Parallel()
	bubble(t, 5, func(t *testing.T, r *rig, refs []sluice.Ref) {
		l := r.loader(t, func(c *LoaderConfig) { c.Prefetch = 2 })
		for range l.All(t.Context()) {
			break
		}
		synctest.Wait()
		closeLoader(t, l)
		if got := r.queue.ackedIDs(); len(got) != 1 || r.queue.returned != 2 || len(r.queue.dead) != 0 {
			t.Errorf("acked %v, %d returned; want the one that was used and the two made ahead", got, r.queue.returned)
		}
		if st, _ := r.queue.Status(t.Context()); st.Pending != 4 || r.queue.pending[0].ref.SampleID() != refs[1].SampleID() {
			t.Errorf("status %+v, head %s", st, r.queue.pending[0].ref.SampleID())
		}
		if r.queue.left != 1 {
			t.Errorf("left %d times", r.queue.left)
		}
	})
}

func TestAFailedBatchComesAgainBeforeTheEnd(t *testing.T) {
	t.Parallel()
	bubble(t, 2, func(t *testing.T, r *rig, refs []sluice.Ref) {
		l := r.loader(t, nil)
		defer closeLoader(t, l)
		next(t, l)
		next(t, l)
		synctest.Wait() // the end was seen ahead, while leases were held
		if err := l.Fail(t.Context(), errors.New("x")); err != nil {
			t.Fatal(err)
		}
		b := next(t, l)
		if b.Samples[0].Ref.SampleID() != refs[1].SampleID() || b.Samples[0].Redelivery != 1 {
			t.Errorf("got %s, redelivery %d", b.Samples[0].Ref.SampleID(), b.Samples[0].Redelivery)
		}
		if _, err := l.Next(t.Context()); !errors.Is(err, io.EOF) {
			t.Errorf("error %v, want EOF", err)
		}
		if _, err := l.Next(t.Context()); !errors.Is(err, io.EOF) {
			t.Errorf("error %v, want EOF again", err)
		}
		if s := l.Stats(); s.Redelivered != 1 {
			t.Errorf("stats %+v", s)
		}
		clean(t, r.store, r.queue)
	})
}

// emptyQueue answers that there is nothing yet, at once.
type emptyQueue struct {
	*fakeQueue
	asked *atomic.Int64
}

func (q emptyQueue) Acquire(context.Context, sluice.AcquireRequest) (sluice.Delivery, error) {
	q.asked.Add(1)
	return sluice.Delivery{}, nil
}

func TestAQueueThatHasNothingYetIsNotSpunOn(t *testing.T) {
	t.Parallel()
	bubble(t, 0, func(t *testing.T, r *rig, _ []sluice.Ref) {
		var asked atomic.Int64
		l := r.loader(t, func(c *LoaderConfig) { c.Queue = emptyQueue{r.queue, &asked} })
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := l.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		if n := asked.Load(); n < 2 || n > 25 {
			t.Errorf("asked %d times in a second", n)
		}
		closeLoader(t, l)
	})
}

func TestALoadersPatienceWithItsQueueEnds(t *testing.T) {
	t.Parallel()
	bubble(t, 1, func(t *testing.T, r *rig, _ []sluice.Ref) {
		begin := time.Now()
		r.queue.beforeAcquire = func() error {
			if time.Since(begin) < 2*time.Minute {
				return sluice.ErrUnavailable
			}
			return nil
		}
		l := r.loader(t, func(c *LoaderConfig) { c.Patience, c.Prefetch = time.Minute, -1 })
		_, err := l.Next(t.Context())
		wantKind(t, err, sluice.ErrUnavailable)
		if took := time.Since(begin); took < time.Minute || took > 70*time.Second {
			t.Errorf("gave up after %v", took)
		}
		time.Sleep(time.Minute)
		next(t, l)
		closeLoader(t, l)
		clean(t, r.store, r.queue)
	})
}

func TestARenewalThatFailsIsTriedAgainAndOneThatIsStaleEndsTheLoader(t *testing.T) {
	t.Parallel()
	bubble(t, 2, func(t *testing.T, r *rig, _ []sluice.Ref) {
		begin := time.Now()
		r.queue.beforeRenew = func() error {
			switch since := time.Since(begin); {
			case since < 11*time.Second:
				return sluice.ErrUnavailable
			case since > 51*time.Second:
				return sluice.ErrStale
			}
			return nil
		}
		r.queue.beforeAcquire = func() error {
			if time.Since(begin) > 51*time.Second {
				return sluice.ErrStale
			}
			return nil
		}
		var mu sync.Mutex
		var events []Event
		l := r.loader(t, func(c *LoaderConfig) {
			c.Prefetch, c.OnEvent = -1, func(e Event) { mu.Lock(); events = append(events, e); mu.Unlock() }
		})
		next(t, l)
		time.Sleep(51 * time.Second)
		synctest.Wait()
		mu.Lock()
		if s := l.Stats(); s.Held != 1 || s.Lost != 0 || len(events) != 1 || events[0].Op != "renew" {
			t.Errorf("stats %+v, events %v", s, events)
		}
		mu.Unlock()
		time.Sleep(11 * time.Second)
		synctest.Wait()
		if s := l.Stats(); s.Held != 0 || s.Lost != 1 {
			t.Errorf("stats %+v", s)
		}
		if _, err := l.Next(t.Context()); !errors.Is(err, sluice.ErrStale) {
			t.Errorf("error %v, want ErrStale", err)
		}
		closeLoader(t, l)
	})
}

// stuckStore keeps its pins.
type stuckStore struct{ *fakeStore }

func (s stuckStore) Get(ctx context.Context, ref sluice.Ref) (*sluice.Tensors, error) {
	x, err := s.fakeStore.Get(ctx, ref)
	if err != nil {
		return nil, err
	}
	return sluice.NewTensors(s, x.Handle, x.Features, x.Close), nil
}

func (s stuckStore) Release(context.Context, sluice.Handle) error { return sluice.ErrUnavailable }

func TestAPinThatCannotBeGivenUpIsReported(t *testing.T) {
	t.Parallel()
	bubble(t, 1, func(t *testing.T, r *rig, refs []sluice.Ref) {
		var events []Event
		l := r.loader(t, func(c *LoaderConfig) {
			c.Store, c.OnEvent = stuckStore{r.store}, func(e Event) { events = append(events, e) }
		})
		next(t, l)
		closeLoader(t, l)
		if len(events) != 1 || events[0].Kind != Unreleased || events[0].SampleID != refs[0].SampleID() || r.store.mapped != 0 {
			t.Errorf("events %v, %d mappings", events, r.store.mapped)
		}
	})
}

func TestACauseThatWrapsEOFIsNoCleanEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		_ = r.queue.Close(t.Context(), fmt.Errorf("read prompts: %w", io.EOF))
		l := r.loader(t, nil)
		_, err := l.Next(t.Context())
		if err == nil || errors.Is(err, io.EOF) || !strings.Contains(err.Error(), "read prompts: EOF") {
			t.Errorf("error %v, want the cause", err)
		}
		n := 0
		for _, err := range l.All(t.Context()) {
			if n++; err == nil || errors.Is(err, io.EOF) {
				t.Errorf("error %v, want the cause", err)
			}
		}
		if n != 1 {
			t.Errorf("%d elements, want the error", n)
		}
		closeLoader(t, l)
	})
}

// Prefetching sees the end more than once. What it saw before a batch was failed must not hide that the batch comes again, although other leases are still held.
func TestAnEndSeenBeforeAFailureIsNone(t *testing.T) {
	t.Parallel()
	bubble(t, 2, func(t *testing.T, r *rig, refs []sluice.Ref) {
		r.queue.steps = 2
		l := r.loader(t, func(c *LoaderConfig) { c.Ack, c.Prefetch = AckOnCheckpoint, 2 })
		next(t, l)
		if err := l.Step(t.Context()); err != nil {
			t.Fatal(err)
		}
		next(t, l)
		if _, err := l.Next(t.Context()); !errors.Is(err, io.EOF) {
			t.Fatalf("error %v, want the end", err)
		}
		synctest.Wait()
		if err := l.Fail(t.Context(), errors.New("x")); err != nil {
			t.Fatal(err)
		}
		if b := next(t, l); b.Samples[0].Ref.SampleID() != refs[1].SampleID() || b.Samples[0].Redelivery != 1 {
			t.Errorf("got %+v", b.Samples[0])
		}
		if _, err := l.Next(t.Context()); !errors.Is(err, io.EOF) {
			t.Errorf("error %v, want the end", err)
		}
		if err := l.Checkpoint(t.Context()); err != nil {
			t.Error(err)
		}
		closeLoader(t, l)
		clean(t, r.store, r.queue)
	})
}

func TestTheEndWaitsForWhatOthersMayFail(t *testing.T) {
	t.Parallel()
	bubble(t, 1, func(t *testing.T, r *rig, refs []sluice.Ref) {
		other := r.loader(t, func(c *LoaderConfig) { c.Consumer.Name = "other" })
		next(t, other)
		l := r.loader(t, nil)
		defer closeLoader(t, l)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := l.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v, want to wait", err)
		}
		if err := other.CloseWithError(t.Context(), errors.New("x")); err != nil {
			t.Fatal(err)
		}
		next(t, l)
	})
}

func TestACutOffStreamGivesItsCauseBehindTheDrain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		boom := errors.New("boom")
		ref, err := r.producer.Produce(t.Context(), prompts(1)[0])
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.queue.Put(t.Context(), sluice.PutRequest{Ref: ref}); err != nil {
			t.Fatal(err)
		}
		_ = r.queue.Close(t.Context(), boom)
		l := r.loader(t, nil)
		defer closeLoader(t, l)
		next(t, l)
		for range 2 {
			if _, err := l.Next(t.Context()); !errors.Is(err, boom) {
				t.Errorf("error %v, want the cause", err)
			}
		}
		n := 0
		for b, err := range l.All(t.Context()) {
			if n++; b != nil || !errors.Is(err, boom) {
				t.Errorf("the iterator gave %v, %v", b, err)
			}
		}
		if n != 1 {
			t.Errorf("%d pairs", n)
		}
	})
}

func TestLeasesAreRenewedWhileTheTrainerLivesAndNoLonger(t *testing.T) {
	t.Parallel()
	bubble(t, 3, func(t *testing.T, r *rig, refs []sluice.Ref) {
		var events []Event
		l := r.loader(t, func(c *LoaderConfig) {
			c.OnEvent = func(e Event) { events = append(events, e) }
		})
		next(t, l)
		time.Sleep(29 * time.Minute)
		if st, _ := r.queue.Status(t.Context()); st.Outstanding != 2 {
			t.Fatalf("%d leases out after 29 minutes, want the batch and the one made ahead", st.Outstanding)
		}
		l.Touch() // a sign of life starts the time again
		time.Sleep(29 * time.Minute)
		if st, _ := r.queue.Status(t.Context()); st.Outstanding != 2 {
			t.Fatalf("%d leases out after a sign of life", st.Outstanding)
		}
		time.Sleep(2 * time.Minute)
		if st, _ := r.queue.Status(t.Context()); st.Outstanding != 0 {
			t.Errorf("%d leases out; a trainer that hangs must not hold them for ever", st.Outstanding)
		}
		renews := func() int { r.queue.mu.Lock(); defer r.queue.mu.Unlock(); return r.queue.renews }
		n := renews()
		time.Sleep(time.Hour)
		synctest.Wait()
		if renews() != n {
			t.Error("renewals went on")
		}
		if len(events) == 0 || events[0].Kind != Idle {
			t.Errorf("events %v", events)
		}
		// The trainer wakes up: its batch is lost, the one made ahead is not handed out, and all three come again.
		var ids []string
		for b, err := range l.All(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, b.Samples[0].Ref.SampleID())
		}
		if len(ids) != 3 {
			t.Errorf("got %v, want all three again", ids)
		}
		if s := l.Stats(); s.Stale != 2 || s.Dropped != 1 || s.Acked != 3 {
			t.Errorf("stats %+v", s)
		}
		closeLoader(t, l)
		clean(t, r.store, r.queue)
	})
}

func TestALeaseThatLivesForLessThanThoseBeforeIsRenewedInTime(t *testing.T) {
	t.Parallel()
	bubble(t, 2, func(t *testing.T, r *rig, refs []sluice.Ref) {
		l := r.loader(t, func(c *LoaderConfig) { c.Prefetch, c.Ack = -1, AckOnStep })
		next(t, l)
		time.Sleep(time.Second)
		r.queue.mu.Lock()
		r.queue.visibility = 3 * time.Second
		r.queue.mu.Unlock()
		next(t, l)
		time.Sleep(20 * time.Second)
		if s := l.Stats(); s.Held != 2 || s.Lost != 0 {
			t.Errorf("stats %+v, want two leases held and none lost", s)
		}
		if err := l.Step(t.Context()); err != nil {
			t.Fatal(err)
		}
		if s := l.Stats(); s.Acked != 2 || s.Stale != 0 {
			t.Errorf("stats %+v", s)
		}
		closeLoader(t, l)
		clean(t, r.store, r.queue)
	})
}

func TestAWaitingTrainerIsNotIdle(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		l := r.loader(t, func(c *LoaderConfig) { c.Ack = AckOnStep })
		ref, err := r.producer.Produce(t.Context(), prompts(1)[0])
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.queue.Put(t.Context(), sluice.PutRequest{Ref: ref}); err != nil {
			t.Fatal(err)
		}
		next(t, l)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Hour)
		defer cancel()
		if _, err := l.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		if err := l.Step(t.Context()); err != nil {
			t.Fatal(err)
		}
		if s := l.Stats(); s.Acked != 1 || s.Stale != 0 {
			t.Errorf("stats %+v", s)
		}
		closeLoader(t, l)
		clean(t, r.store, r.queue)
	})
}

// A settlement that the queue has, and whose answer the loader has not seen yet, while the renewer asks.
func TestARenewalThatMeetsAnAckOnItsWayLosesNothing(t *testing.T) {
	t.Parallel()
	bubble(t, 1, func(t *testing.T, r *rig, refs []sluice.Ref) {
		l := r.loader(t, func(c *LoaderConfig) { c.Prefetch, c.Ack = -1, AckOnStep })
		b := next(t, l)
		ack := sluice.SettleRequest{Consumer: l.cfg.Consumer, Settlements: []sluice.Settlement{{Lease: b.Samples[0].Lease, Verdict: sluice.Ack}}}
		if got, err := r.queue.Settle(t.Context(), ack); err != nil || got[0].Status != sluice.Settled {
			t.Fatalf("%v, %v", got, err)
		}
		l.renewOnce()
		if s := l.Stats(); s.Lost != 0 {
			t.Errorf("stats %+v", s)
		}
		if err := l.Step(t.Context()); err != nil {
			t.Fatal(err)
		}
		if s := l.Stats(); s.Acked != 1 || s.Stale != 0 {
			t.Errorf("stats %+v", s)
		}
		closeLoader(t, l)
	})
}

func TestALostLeaseIsCountedAndNotFatal(t *testing.T) {
	t.Parallel()
	bubble(t, 2, func(t *testing.T, r *rig, refs []sluice.Ref) {
		l := r.loader(t, func(c *LoaderConfig) { c.Prefetch = -1 })
		b := next(t, l)
		r.queue.expired(b.Samples[0].Lease) // somebody took it away
		time.Sleep(20 * time.Second)        // and the renewal notices
		if s := l.Stats(); s.Lost != 1 {
			t.Errorf("stats %+v", s)
		}
		ids := map[string]int{}
		for b, err := range l.All(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			ids[b.Samples[0].Ref.SampleID()]++
		}
		if len(ids) != 2 {
			t.Errorf("then got %v", ids)
		}
		if s := l.Stats(); s.Stale != 1 || s.Acked != 2 {
			t.Errorf("stats %+v", s)
		}
		closeLoader(t, l)
		clean(t, r.store, r.queue)
	})
}

func TestASuccessorTakesTheLeases(t *testing.T) {
	t.Parallel()
	bubble(t, 3, func(t *testing.T, r *rig, refs []sluice.Ref) {
		l := r.loader(t, nil)
		next(t, l)
		r.queue.beforeSettle = func() error { return sluice.ErrStale }
		r.queue.beforeAcquire = func() error { return sluice.ErrStale }
		_, err := l.Next(t.Context())
		wantKind(t, err, sluice.ErrStale)
		if s := l.Stats(); s.Held != 0 || s.Lost == 0 {
			t.Errorf("stats %+v", s)
		}
		closeLoader(t, l)
		if len(r.store.pins) != 0 || r.store.mapped != 0 {
			t.Error("pins or memory are left")
		}
	})
}

func TestBadSamplesEndAsFailedLeases(t *testing.T) {
	t.Parallel()
	type outcome struct {
		err  error // what Next says, or nil if it goes on
		dead int   // at once
	}
	for name, c := range map[string]struct {
		spoil func(r *rig, id string)
		want  outcome
	}{
		"not found": {func(r *rig, bad string) {
			r.store.beforeGet = func(id string) error {
				if id == bad {
					return sluice.ErrNotFound
				}
				return nil
			}
		}, outcome{nil, 1}}, // after five tries
		"corrupt": {func(r *rig, bad string) {
			r.store.beforeGet = func(id string) error {
				if id == bad {
					return sluice.ErrCorrupt
				}
				return nil
			}
		}, outcome{nil, 1}},
		"short": {func(r *rig, bad string) {
			r.store.corrupt(bad, func(f []sluice.Feature) []sluice.Feature { return f[:2] })
		}, outcome{nil, 1}},
		"another shape": {func(r *rig, bad string) {
			r.store.corrupt(bad, func(f []sluice.Feature) []sluice.Feature {
				f[0].Tensor = sluice.NewTensor(sluice.Float32, 1, 1, 12)
				return f
			})
		}, outcome{nil, 1}},
		"denied": {func(r *rig, bad string) {
			n := 0
			r.store.beforeGet = func(id string) error {
				if n++; id == bad && n < 4 {
					return sluice.ErrDenied
				}
				return nil
			}
		}, outcome{sluice.ErrDenied, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bubble(t, 4, func(t *testing.T, r *rig, refs []sluice.Ref) {
				c.spoil(r, refs[1].SampleID())
				l := r.loader(t, func(c *LoaderConfig) { c.Batch = 2 })
				var seen []string
				var failed error
				for {
					b, err := l.Next(t.Context())
					if errors.Is(err, io.EOF) {
						break
					}
					if err != nil {
						failed = err
						continue
					}
					for _, s := range b.Samples {
						seen = append(seen, s.Ref.SampleID())
					}
				}
				closeLoader(t, l)
				if c.want.err != nil && !errors.Is(failed, c.want.err) || c.want.err == nil && failed != nil {
					t.Errorf("Next said %v, want %v", failed, c.want.err)
				}
				if len(r.queue.dead) != c.want.dead || len(seen) != 4-c.want.dead {
					t.Errorf("%d dead letters, trained on %v", len(r.queue.dead), seen)
				}
				if c.want.err == nil && l.Stats().Skipped == 0 {
					t.Error("not counted")
				}
				clean(t, r.store, r.queue)
			})
		})
	}
}

func TestAStoreThatIsAwayIsAskedAgain(t *testing.T) {
	t.Parallel()
	bubble(t, 2, func(t *testing.T, r *rig, refs []sluice.Ref) {
		var n atomic.Int64
		away := func() error {
			if n.Add(1)%4 != 0 {
				return sluice.ErrUnavailable
			}
			return nil
		}
		r.store.beforeGet = func(string) error { return away() }
		r.queue.beforeAcquire, r.queue.beforeSettle = away, away
		l := r.loader(t, nil)
		ids := 0
		for _, err := range l.All(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			ids++
		}
		closeLoader(t, l)
		if ids != 2 {
			t.Errorf("%d batches", ids)
		}
		clean(t, r.store, r.queue)
	})
}

func TestTooManyBadSamplesInARowAreAnError(t *testing.T) {
	t.Parallel()
	bubble(t, 9, func(t *testing.T, r *rig, refs []sluice.Ref) {
		r.store.beforeGet = func(string) error { return sluice.ErrCorrupt }
		l := r.loader(t, func(c *LoaderConfig) { c.MaxSkips = 3 })
		_, err := l.Next(t.Context())
		wantKind(t, err, sluice.ErrCorrupt)
		closeLoader(t, l)
		if st, _ := r.queue.Status(t.Context()); st.Dead+st.Pending != 9 || st.Outstanding != 0 {
			t.Errorf("status %+v", st)
		}
	})
}

func TestARefOfAnotherSchemaIsADeadLetter(t *testing.T) {
	t.Parallel()
	bubble(t, 1, func(t *testing.T, r *rig, refs []sluice.Ref) {
		l := r.loader(t, func(c *LoaderConfig) { c.Schema = schema(t, sluice.DFlash) })
		_, err := l.Next(t.Context())
		wantKind(t, err, sluice.ErrSchema)
		closeLoader(t, l)
		if len(r.queue.dead) != 1 {
			t.Errorf("%d dead letters", len(r.queue.dead))
		}
		clean(t, r.store, r.queue)
	})
}

// putVersions enqueues a sample for each letter and version, such as "a0": of the target a with target_model_version 0.
func (r *rig) putVersions(t *testing.T, list ...string) (refs []sluice.Ref) {
	t.Helper()
	for _, v := range list {
		p, err := NewProducer(ProducerConfig{Target: targettest.New(targettest.Options{Seed: uint64(v[0])}), Store: r.store, Schema: schema(t, sluice.EAGLE3), RunID: "r1", TargetModelVersion: v[1:]})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		ref, err := p.Produce(t.Context(), prompts(1)[0])
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.queue.Put(t.Context(), sluice.PutRequest{Ref: ref}); err != nil {
			t.Fatal(err)
		}
		refs = append(refs, ref)
	}
	_ = r.queue.Close(t.Context(), nil)
	return refs
}

func TestTheTargetChangesOnlyWithItsVersionAndNeverWithinABatch(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		batch    int
		put      []string
		sizes    []int // of the batches
		refused  int   // place of the sample that ends as a dead letter, or -1
		names    int   // place of the one that its reason names
		prefetch int
	}{
		"another target":                {1, []string{"a0", "b0"}, []int{1}, 1, 0, 1},
		"another target in a batch":     {2, []string{"a0", "b0", "a0"}, []int{2}, 1, 0, -1},
		"new weights":                   {1, []string{"a0", "b1", "b1"}, []int{1, 1, 1}, -1, 0, 1},
		"new weights cut a batch short": {4, []string{"a0", "a0", "a0", "b1", "b1", "b1", "b1", "b1"}, []int{3, 4, 1}, -1, 0, 3},
		"another target afterwards":     {2, []string{"a0", "b1", "c1", "b1"}, []int{1, 2}, 2, 1, -1},
		"a late sample of the old ones": {2, []string{"a0", "b1", "a0", "b1"}, []int{1, 1, 1, 1}, -1, 0, 1},
		"another version, same weights": {2, []string{"a0", "a1", "a2", "b2"}, []int{2, 1}, 3, 0, -1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, plenty, targettest.Options{}, nil)
				refs := r.putVersions(t, c.put...)
				l := r.loader(t, func(cfg *LoaderConfig) { cfg.Batch, cfg.Prefetch = c.batch, c.prefetch })
				var sizes []int
				for {
					b, err := l.Next(t.Context())
					if errors.Is(err, io.EOF) {
						break
					}
					if err != nil {
						wantKind(t, err, sluice.ErrSchema)
						continue
					}
					sizes = append(sizes, len(b.Samples))
					for _, s := range b.Samples {
						was, _ := b.Samples[0].Ref.Attribute("target")
						if is, _ := s.Ref.Attribute("target"); is != was {
							t.Errorf("a batch mixes the targets %s and %s", was, is)
						}
					}
				}
				closeLoader(t, l)
				if !slices.Equal(sizes, c.sizes) {
					t.Errorf("batches of %v, want %v", sizes, c.sizes)
				}
				if c.refused < 0 && len(r.queue.dead) > 0 {
					t.Errorf("dead letters %+v", r.queue.dead)
				}
				if c.refused >= 0 && (len(r.queue.dead) != 1 || r.queue.dead[0].ref.SampleID() != refs[c.refused].SampleID() ||
					!strings.Contains(r.queue.dead[0].lastReason, refs[c.names].SampleID()) || !strings.Contains(r.queue.dead[0].lastReason, "target_model_version")) {
					t.Errorf("dead letters %+v, want %s with the name of %s", r.queue.dead, refs[c.refused].SampleID(), refs[c.names].SampleID())
				}
				clean(t, r.store, r.queue)
			})
		})
	}
}

// A rank that made two batches where the others make one would be out of step with them.
func TestNewWeightsWithinABatchOfAWindowAreRefused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		r.queue.window = func(n int, _ sluice.Ref) *sluice.WindowSlot {
			return &sluice.WindowSlot{Number: int64(n / 4), Slot: n % 4}
		}
		refs := r.putVersions(t, "a0", "a0", "b1", "c2", "c2", "c2")
		l := r.loader(t, func(c *LoaderConfig) { c.Batch = 2 })
		next(t, l)
		_, err := l.Next(t.Context()) // the first of the two is there, and the change between batches was in order
		wantKind(t, err, sluice.ErrSchema)
		if err != nil && !strings.Contains(err.Error(), "between windows") {
			t.Errorf("error %q", err)
		}
		for _, want := range []string{"1", "2"} {
			if b := next(t, l); b.Samples[0].Ref.TargetModelVersion() != want {
				t.Errorf("version %s, want %s", b.Samples[0].Ref.TargetModelVersion(), want)
			}
		}
		if _, err := l.Next(t.Context()); !errors.Is(err, io.EOF) {
			t.Error(err)
		}
		closeLoader(t, l)
		if len(r.queue.dead) != 1 || r.queue.dead[0].ref.SampleID() != refs[3].SampleID() {
			t.Errorf("dead letters %+v", r.queue.dead)
		}
		clean(t, r.store, r.queue)
	})
}

func TestALoaderNormsWhatComesPreNorm(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, norm := range []*FinalNorm{nil, normOf(2)} {
			r := newRig(t, plenty, targettest.Options{}, nil)
			s := sampleOf(t, "s", []int64{0, 1, 1}, func(x *sluice.Sample) {
				x.RunID = "r1"
				preNorm(x)
				copy(sluice.View[uint16](x.Features[4].Tensor), []uint16{0x3f80, 0x4000, 0x4040})
			}, []int64{1, 2, 3})
			x := &sluice.Sample{SampleID: "s", RunID: "r1", Algorithm: sluice.EAGLE3, SchemaVersion: 1, NumTokens: 3, Features: s.Features, Attributes: map[string]string{"shift": "0", "aux_layers": "hf:1,2,3", "last_norm": "pre"}}
			ref, err := r.store.Put(t.Context(), x, sluice.Reservation{})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := r.queue.Put(t.Context(), sluice.PutRequest{Ref: ref}); err != nil {
				t.Fatal(err)
			}
			_ = r.queue.Close(t.Context(), nil)
			l := r.loader(t, func(c *LoaderConfig) { c.FinalNorm = norm })
			b, err := l.Next(t.Context())
			if norm == nil {
				wantKind(t, err, sluice.ErrSchema)
			} else if err != nil || b.LastNorm != sluice.PostNorm || !slices.Equal(shorts(t, b, "last_hidden_states"), []uint16{0x4000, 0x4000, 0}) {
				t.Errorf("%+v, %v", b, err)
			}
			closeLoader(t, l)
			clean(t, r.store, r.queue)
		}
	})
}

func TestIfMakingABatchFailsPinsGoAndLeasesFail(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]func([]Sample) ([]sluice.Feature, error){
		"error": func([]Sample) ([]sluice.Feature, error) { return nil, errors.New("x") },
		"panic": func([]Sample) ([]sluice.Feature, error) { panic("x") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bubble(t, 4, func(t *testing.T, r *rig, refs []sluice.Ref) {
				n := 0
				l := r.loader(t, func(c *LoaderConfig) {
					c.Batch, c.Prefetch = 2, -1
					c.Collate = CollateFunc(func(s []Sample) ([]sluice.Feature, error) {
						if n++; n == 1 {
							return f(s)
						}
						return s[0].Features, nil
					})
				})
				if _, err := l.Next(t.Context()); err == nil {
					t.Error("no error")
				}
				if len(r.store.pins) != 0 || r.store.mapped != 0 || l.Stats().Failed != 2 || l.Stats().Held != 0 {
					t.Errorf("%d pins, stats %+v", len(r.store.pins), l.Stats())
				}
				got := 0
				for b, err := range l.All(t.Context()) {
					if err != nil {
						t.Fatal(err)
					}
					got += len(b.Samples)
				}
				if got != 4 {
					t.Errorf("%d samples afterwards, want all four", got)
				}
				closeLoader(t, l)
				clean(t, r.store, r.queue)
			})
		})
	}
}

func TestOneSampleThatDoesNotFitItsBatchIsFailedAlone(t *testing.T) {
	t.Parallel()
	bubble(t, 4, func(t *testing.T, r *rig, refs []sluice.Ref) {
		l := r.loader(t, func(c *LoaderConfig) {
			c.Batch, c.Collate = 2, Pack(PackOptions{MaxTokens: 5})
			c.Skip = func(sluice.Ref, error) bool { return true }
		})
		var ids []string // rows have 3, 4, 5 and 6 tokens
		for b, err := range l.All(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range b.Samples {
				ids = append(ids, s.Ref.SampleID())
			}
		}
		closeLoader(t, l)
		if len(ids) != 3 || len(r.queue.dead) != 1 || r.queue.dead[0].ref.SampleID() != refs[3].SampleID() {
			t.Errorf("got %v, dead %v", ids, r.queue.dead)
		}
		clean(t, r.store, r.queue)
	})
}

func TestACancelledPullLosesNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		l := r.loader(t, nil)
		for range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			if _, err := l.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("error %v", err)
			}
			cancel()
		}
		r.fill(t, 3)
		for range 3 {
			next(t, l)
		}
		if _, err := l.Next(t.Context()); !errors.Is(err, io.EOF) {
			t.Error(err)
		}
		closeLoader(t, l)
		clean(t, r.store, r.queue)
	})
}

func TestCloseEndsAPullThatWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		l := r.loader(t, nil)
		got := make(chan error)
		go func() {
			_, err := l.Next(context.Background())
			got <- err
		}()
		synctest.Wait()
		closeLoader(t, l)
		wantKind(t, <-got, sluice.ErrClosed)
	})
}

func TestACloseThatFailsMayBeRepeated(t *testing.T) {
	t.Parallel()
	bubble(t, 2, func(t *testing.T, r *rig, refs []sluice.Ref) {
		l := r.loader(t, nil)
		next(t, l)
		r.queue.beforeSettle = func() error { return sluice.ErrUnavailable }
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		wantKind(t, l.Close(ctx), sluice.ErrUnavailable)
		r.queue.beforeSettle = nil
		closeLoader(t, l)
		if len(r.queue.ackedIDs()) != 1 {
			t.Errorf("acked %v", r.queue.ackedIDs())
		}
	})
}

func TestCloseEndsACallThatWaitsForAQueueThatIsAway(t *testing.T) {
	t.Parallel()
	bubble(t, 2, func(t *testing.T, r *rig, refs []sluice.Ref) {
		l := r.loader(t, func(c *LoaderConfig) { c.Ack = AckOnStep })
		next(t, l)
		var away atomic.Bool
		away.Store(true)
		r.queue.beforeSettle = func() error {
			if away.Load() {
				return sluice.ErrUnavailable
			}
			return nil
		}
		got := make(chan error)
		go func() { got <- l.Step(context.Background()) }()
		time.Sleep(time.Second)
		closed := make(chan error)
		go func() { closed <- l.Close(context.Background()) }()
		if err := <-got; err == nil {
			t.Error("the step succeeded")
		}
		away.Store(false)
		if err := <-closed; err != nil {
			t.Error(err)
		}
		if st, _ := r.queue.Status(t.Context()); st.Pending != 2 || st.Outstanding != 0 {
			t.Errorf("status %+v", st)
		}
	})
}

// silentQueue and silentStore answer nothing once they are away: a call ends with its context. fast says that it fails at once instead, as where nobody listens.
type silentQueue struct {
	*fakeQueue
	away, fast *atomic.Bool
}

func absent(ctx context.Context, away, fast *atomic.Bool) error {
	if !away.Load() {
		return nil
	}
	if !fast.Load() {
		<-ctx.Done()
		return ctx.Err()
	}
	return sluice.ErrUnavailable
}

func (q silentQueue) Acquire(ctx context.Context, r sluice.AcquireRequest) (sluice.Delivery, error) {
	if err := absent(ctx, q.away, q.fast); err != nil {
		return sluice.Delivery{}, err
	}
	return q.fakeQueue.Acquire(ctx, r)
}

func (q silentQueue) Settle(ctx context.Context, r sluice.SettleRequest) ([]sluice.SettleResult, error) {
	if err := absent(ctx, q.away, q.fast); err != nil {
		return nil, err
	}
	return q.fakeQueue.Settle(ctx, r)
}

func (q silentQueue) Leave(ctx context.Context, c sluice.Consumer) error {
	if err := absent(ctx, q.away, q.fast); err != nil {
		return err
	}
	return q.fakeQueue.Leave(ctx, c)
}

func (q silentQueue) Report(ctx context.Context, r sluice.ProducerReport) error {
	if err := absent(ctx, q.away, q.fast); err != nil {
		return err
	}
	return q.fakeQueue.Report(ctx, r)
}

type silentStore struct {
	*fakeStore
	away, fast *atomic.Bool
}

func (s silentStore) Get(ctx context.Context, ref sluice.Ref) (*sluice.Tensors, error) {
	x, err := s.fakeStore.Get(ctx, ref)
	if err != nil {
		return nil, err
	}
	return sluice.NewTensors(s, x.Handle, x.Features, x.Close), nil
}

func (s silentStore) Release(ctx context.Context, h sluice.Handle) error {
	if err := absent(ctx, s.away, s.fast); err != nil {
		return err
	}
	return s.fakeStore.Release(ctx, h)
}

func TestATrainerEndsWithinSecondsWhileTheServiceIsAway(t *testing.T) {
	t.Parallel()
	for _, leased := range []bool{false, true} {
		for _, storeToo := range []bool{false, true} {
			for _, atOnce := range []bool{false, true} {
				t.Run(fmt.Sprintf("leased=%v,store=%v,refused=%v", leased, storeToo, atOnce), func(t *testing.T) {
					t.Parallel()
					synctest.Test(t, func(t *testing.T) {
						r := newRig(t, plenty, targettest.Options{}, nil)
						if leased {
							r.fill(t, 9)
						}
						var away, storeAway, fast atomic.Bool
						fast.Store(atOnce)
						l := r.loader(t, func(c *LoaderConfig) {
							c.Queue, c.Store = silentQueue{r.queue, &away, &fast}, silentStore{r.store, &storeAway, &fast}
							c.Batch, c.Prefetch, c.Ack = 1, 3, AckOnStep
						})
						ctx, interrupt := context.WithCancel(t.Context())
						var begin time.Time
						go func() {
							time.Sleep(time.Second)
							away.Store(true)
							storeAway.Store(storeToo)
							time.Sleep(time.Minute)
							begin = time.Now()
							interrupt()
						}()
						var err error
						for _, err = range l.All(ctx) {
							<-ctx.Done()
						}
						if !errors.Is(err, context.Canceled) {
							t.Fatalf("the loop ended by %v", err)
						}
						err = l.CloseWithError(context.WithoutCancel(ctx), err)
						// The pull after the interrupt takes the batch's memory back, which has its own time where the store is away.
						took, most := time.Since(begin), cleanupTime
						if leased && storeToo {
							most += cleanupTime
						}
						if took > most {
							t.Errorf("it took %v, want %v at most", took, most)
						}
						wantKind(t, err, sluice.ErrUnavailable)
						if err == nil || !strings.Contains(err.Error(), "could not give everything back within 5s; leases that are left run out by themselves") {
							t.Errorf("Close: %v", err)
						}
						away.Store(false)
						storeAway.Store(false)
						closeLoader(t, l)
						if st, _ := r.queue.Status(t.Context()); st.Outstanding != 0 {
							t.Errorf("status %+v", st)
						}
					})
				})
			}
		}
	}
}

func TestAPipelineStopsWithinSecondsWhileItsQueueIsAway(t *testing.T) {
	t.Parallel()
	for _, atOnce := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, plenty, targettest.Options{}, nil)
			var away, fast atomic.Bool
			fast.Store(atOnce)
			p, err := NewPipeline(r.producer, silentQueue{r.queue, &away, &fast}, batches(nil), &PipelineOptions{KeepPolling: true, OnEvent: quiet})
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
			away.Store(true)
			time.Sleep(time.Minute)
			begin := time.Now()
			if err := p.Stop(context.WithoutCancel(t.Context())); err == nil {
				t.Error("nobody was told, and Stop says nothing")
			}
			if took := time.Since(begin); took > cleanupTime {
				t.Errorf("Stop took %v", took)
			}
		})
	}
}

func TestAPanicInTheLoadersCallbackIsAnError(t *testing.T) {
	t.Parallel()
	bubble(t, 4, func(t *testing.T, r *rig, refs []sluice.Ref) {
		r.store.beforeGet = func(id string) error {
			if id == refs[0].SampleID() {
				return sluice.ErrCorrupt
			}
			return nil
		}
		l := r.loader(t, func(c *LoaderConfig) { c.OnEvent = func(Event) { panic("ouch") } })
		var err error
		for err == nil {
			_, err = l.Next(t.Context())
		}
		if errors.Is(err, io.EOF) || !strings.Contains(err.Error(), "ouch") || !strings.Contains(err.Error(), "loader_test.go") {
			t.Errorf("error %v, want the panic and where it began", err)
		}
		closeLoader(t, l)
	})
}

func TestAnUnusedLoaderAsksForNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, plenty, targettest.Options{}, nil)
	r.queue.beforeAcquire = func() error { t.Error("acquired"); return nil }
	l := r.loader(t, nil)
	closeLoader(t, l)
	if r.queue.left != 0 {
		t.Error("left a queue that it never joined")
	}
}

func TestAWedgeThatTheTrainerCanEndIsNone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		// One sample fills the store, and the trainer takes an hour over it.
		r := newRig(t, 300, targettest.Options{}, nil)
		r.queue.wedgeAfter = 5 * time.Second
		list := []*sluice.PromptBatch{prompts(1)[0], prompts(1)[0], prompts(1)[0]}
		p := r.pipeline(t, batches(list), PipelineOptions{})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		l := r.loader(t, nil)
		for range 3 {
			next(t, l)
			time.Sleep(20 * time.Minute)
		}
		if _, err := l.Next(t.Context()); !errors.Is(err, io.EOF) {
			t.Error(err)
		}
		closeLoader(t, l)
		if err := p.Wait(t.Context()); err != nil {
			t.Error(err)
		}
		clean(t, r.store, r.queue)
	})
}

func TestAWedgeThatNobodyEndsIsAnError(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 300, targettest.Options{}, nil)
		r.queue.wedgeAfter = 5 * time.Second
		list := []*sluice.PromptBatch{prompts(1)[0], prompts(1)[0]}
		p := r.pipeline(t, batches(list), PipelineOptions{})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		l := r.loader(t, func(c *LoaderConfig) { c.Ack = AckOnStep })
		next(t, l)
		_, err := l.Next(t.Context()) // needs two for a step, and there is room for one
		wantKind(t, err, sluice.ErrWedged)
		if err := l.Step(t.Context()); err != nil {
			t.Fatal(err)
		}
		next(t, l) // the trainer may go on
		if err := l.Step(t.Context()); err != nil {
			t.Fatal(err)
		}
		closeLoader(t, l)
		if err := p.Wait(t.Context()); err != nil {
			t.Error(err)
		}
		clean(t, r.store, r.queue)
	})
}

func TestABatchStaysInItsWindow(t *testing.T) {
	t.Parallel()
	bubble(t, 7, func(t *testing.T, r *rig, refs []sluice.Ref) {
		r.queue.window = func(n int, _ sluice.Ref) *sluice.WindowSlot {
			return &sluice.WindowSlot{Number: int64(n / 3), Slot: n % 3, Pad: n == 5}
		}
		l := r.loader(t, func(c *LoaderConfig) { c.Batch = 2 })
		var sizes []int
		for b, err := range l.All(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			sizes = append(sizes, len(b.Samples))
			for _, s := range b.Samples {
				if s.Window.Number != b.Samples[0].Window.Number {
					t.Errorf("windows %d and %d in one batch", b.Samples[0].Window.Number, s.Window.Number)
				}
				if s.Pad {
					mask := ints(t, b, "loss_mask")
					if row := mask[len(mask)/len(b.Samples)*int(s.Row):]; slices.Contains(row, 1) {
						t.Error("a stand-in is supervised")
					}
				}
			}
		}
		closeLoader(t, l)
		if !slices.Equal(sizes, []int{2, 1, 2, 1, 1}) {
			t.Errorf("sizes %v", sizes)
		}
		if s := l.Stats(); s.Pads != 1 || s.Samples != 6 {
			t.Errorf("stats %+v", s)
		}
		clean(t, r.store, r.queue)
	})
}

func TestPrefetchIsBounded(t *testing.T) {
	t.Parallel()
	for _, n := range []int{-1, 1, 3} {
		bubble(t, 9, func(t *testing.T, r *rig, refs []sluice.Ref) {
			l := r.loader(t, func(c *LoaderConfig) { c.Prefetch = n })
			for range 2 {
				next(t, l)
				synctest.Wait()
				if st, _ := r.queue.Status(t.Context()); st.Outstanding != 1+max(n, 0) {
					t.Errorf("prefetch %d: %d leases out", n, st.Outstanding)
				}
			}
			closeLoader(t, l)
		})
	}
}

func TestCopiedBatchesHoldNoPins(t *testing.T) {
	t.Parallel()
	bubble(t, 4, func(t *testing.T, r *rig, refs []sluice.Ref) {
		l := r.loader(t, func(c *LoaderConfig) { c.Batch, c.Prefetch = 2, -1 })
		b := next(t, l)
		if len(r.store.pins) != 0 || r.store.mapped != 0 {
			t.Errorf("%d pins for a batch that was copied", len(r.store.pins))
		}
		if x := ints(t, b, "input_ids"); x[0] != 1 {
			t.Errorf("input_ids %v", x)
		}
		closeLoader(t, l)
	})
}

func TestImpossibleLoadersAreRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t, plenty, targettest.Options{}, nil)
	const from = "stream: new loader "
	for want, change := range map[string]func(*LoaderConfig){
		from + `"Queue": is nil`:                                    func(c *LoaderConfig) { c.Queue = nil },
		from + `"Store": is nil`:                                    func(c *LoaderConfig) { c.Store = nil },
		from + `"Schema": is nil`:                                   func(c *LoaderConfig) { c.Schema = nil },
		from + `"Batch": is -1, want 0 (the default) or more`:       func(c *LoaderConfig) { c.Batch = -1 },
		from + `"Ack": is "later", want next, step or checkpoint`:   func(c *LoaderConfig) { c.Ack = "later" },
		from + `"RenewEvery": is -1s, want 0 (the default) or more`: func(c *LoaderConfig) { c.RenewEvery = -time.Second },
		from + `"MaxIdle": is -2s, want 0 (the default) or more`:    func(c *LoaderConfig) { c.MaxIdle = -2 * time.Second },
		from + `"Patience": is -3s, want 0 (the default) or more`:   func(c *LoaderConfig) { c.Patience = -3 * time.Second },
		from + `"MaxSkips": is -4, want 0 (the default) or more`:    func(c *LoaderConfig) { c.MaxSkips = -4 },
		from + `"Consumer": ` + sluice.ValidateID("a b").Error():    func(c *LoaderConfig) { c.Consumer.Name = "a b" },
		from + `"FinalNorm": has a weight of float32[1,2], want float32, bfloat16 or float16 [H]`: func(c *LoaderConfig) {
			c.FinalNorm = &FinalNorm{Weight: sluice.NewTensor(sluice.Float32, 1, 2), Epsilon: 1}
		},
		from + `"FinalNorm": has a bad weight: tensor: float32[2] needs 8 bytes, has 4`: func(c *LoaderConfig) {
			c.FinalNorm = &FinalNorm{Weight: sluice.Tensor{Spec: sluice.Spec{DType: sluice.Float32, Shape: []int64{2}}, Data: make([]byte, 4)}, Epsilon: 1}
		},
		from + `"FinalNorm": has a weight that is not finite at 1`: func(c *LoaderConfig) {
			c.FinalNorm = &FinalNorm{Weight: sluice.TensorOf(sluice.Float32, []float32{1, float32(math.NaN())}, 2), Epsilon: 1}
		},
		from + `"FinalNorm": has the epsilon -1, want more than 0`: func(c *LoaderConfig) {
			c.FinalNorm = &FinalNorm{Weight: sluice.TensorOf(sluice.Float32, []float32{1}, 1), Epsilon: -1}
		},
		`stream: collate: the function is nil`: func(c *LoaderConfig) { c.Collate = CollateFunc(nil) },
	} {
		cfg := LoaderConfig{Queue: r.queue, Store: r.store, Schema: schema(t, sluice.EAGLE3)}
		change(&cfg)
		_, err := NewLoader(cfg)
		wantRefused(t, err, sluice.ErrInvalid, want)
	}
}

func TestARunThatCannotBeAskedForItsCheckpointsIsAskedAgain(t *testing.T) {
	t.Parallel()
	bubble(t, 1, func(t *testing.T, r *rig, _ []sluice.Ref) {
		begin := time.Now()
		r.queue.steps = 1
		r.queue.beforeStatus = func() error {
			if time.Since(begin) < 2*time.Minute {
				return sluice.ErrUnavailable
			}
			return nil
		}
		r.queue.beforeAcquire = func() error {
			if time.Since(begin) < 2*time.Minute {
				t.Error("a lease was asked for")
			}
			return nil
		}
		var retries atomic.Int64
		l := r.loader(t, func(c *LoaderConfig) {
			c.Ack, c.Patience, c.Prefetch = AckOnCheckpoint, time.Minute, -1
			c.OnEvent = func(e Event) {
				if e.Kind == Retry && e.Op == "status" {
					retries.Add(1)
				}
			}
		})
		_, err := l.Next(t.Context())
		wantKind(t, err, sluice.ErrUnavailable)
		if took := time.Since(begin); took < time.Minute || took > 70*time.Second || retries.Load() == 0 {
			t.Errorf("gave up after %v and %d retries", took, retries.Load())
		}
		next(t, l) // it is away for another minute
		r.queue.beforeStatus = func() error { t.Error("asked again for what cannot change"); return nil }
		if _, err := l.Next(t.Context()); !errors.Is(err, io.EOF) {
			t.Errorf("error %v, want the end", err)
		}
		r.queue.beforeStatus = nil
		if err := l.Checkpoint(t.Context()); err != nil {
			t.Error(err)
		}
		closeLoader(t, l)
		clean(t, r.store, r.queue)

		// Close ends the asking, and a loader that acks otherwise does not ask.
		r.queue.beforeStatus = func() error { return sluice.ErrUnavailable }
		l = r.loader(t, func(c *LoaderConfig) { c.Ack = AckOnCheckpoint })
		failed := make(chan error, 1)
		go func() { _, err := l.Next(t.Context()); failed <- err }()
		time.Sleep(time.Second)
		closeLoader(t, l)
		wantKind(t, <-failed, sluice.ErrClosed)
		l = r.loader(t, func(c *LoaderConfig) { c.Ack = AckOnStep })
		if _, err := l.Next(t.Context()); !errors.Is(err, io.EOF) {
			t.Errorf("error %v, want the end", err)
		}
		closeLoader(t, l)
	})
}
