package queue

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
)

// Rank 1 finds that its last place can't be filled; that lets the tail go, and rank 0 must hear that nothing else comes.
func TestTheEndReachesThoseWhomASkipConcerns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *sluice.RunConfig) {
			c.LargestSample, c.Windows = 100, &sluice.Windows{Ranks: 2, PerRank: 1, DropTail: true}
		}, nil)
		zero, one := sluice.Consumer{Name: "zero"}, sluice.Consumer{Name: "one", Rank: 1}
		f.put(3)
		a, b := f.acquire(zero, 1), f.acquire(one, 1)
		f.settle(one, sluice.FailPermanent, b...)
		f.settle(zero, sluice.FailPermanent, a...)
		f.q.Close(bg, nil)
		c := f.wait(zero)
		if d, err := f.q.Acquire(bg, sluice.AcquireRequest{Consumer: one}); err != nil || !d.End {
			t.Fatalf("%+v, %v", d, err)
		}
		synctest.Wait()
		if len(c) == 0 {
			t.Error("rank 0 waits on")
		}
		f.q.Stop(bg)
		<-c
	})
}

// However the goroutines are scheduled: whoever comes first to tell the store makes the calls of those before it.
func TestTheStoreIsToldInTheOrderOfTheRecords(t *testing.T) {
	f := newFixture(t, nil, nil)
	f.put(1)
	ls := f.acquire(alice, 1)
	f.store.Record()
	tx, err := f.q.begin()
	if err != nil {
		t.Fatal(err)
	}
	f.q.settle(tx, f.q.consumers["alice"], 0, &sluice.Settlement{Lease: ls[0].ID, Verdict: sluice.FailPermanent})
	f.q.mu.Unlock() // and here its goroutine is suspended
	if n, err := f.q.Requeue(bg, "s0"); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	f.q.mu.Lock()
	if err := f.q.end(tx); err != nil {
		t.Fatal(err)
	}
	if want, got := []string{"mark true s0", "mark false s0"}, f.store.Calls(); !slices.Equal(got, want) {
		t.Errorf("calls %v, want %v", got, want)
	}
}

func TestARepetitionOfAReserveHearsThatTheJournalFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &memJournal{}
		f := newFixture(t, nil, &Options{Journal: j})
		f.q.settleJournal()
		synctest.Wait()
		j.hold = make(chan struct{})
		got := make(chan error, 2)
		for range 2 {
			go func() {
				_, err := f.q.Reserve(bg, sluice.ReserveRequest{Producer: sluice.Producer{Name: "p0"}, Bytes: 1, RequestID: "x"})
				got <- err
			}()
			synctest.Wait()
		}
		j.fail = errPower
		close(j.hold)
		time.Sleep(time.Minute)
		if len(got) != 2 {
			t.Fatalf("%d of 2 calls returned", len(got))
		}
		for range 2 {
			if err := <-got; !errors.Is(err, sluice.ErrUnavailable) {
				t.Errorf("got %v", err)
			}
		}
		if s, _ := f.q.Status(bg); s.ProducersWaiting != 0 {
			t.Errorf("%d producers wait", s.ProducersWaiting)
		}
		f.q.Stop(bg)
	})
}

func TestARepetitionWaitsNoLongerThanItSays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil, nil)
		ctx, cancel := context.WithCancel(bg)
		go f.q.Acquire(ctx, sluice.AcquireRequest{Consumer: alice, Wait: -1, RequestID: "x"})
		synctest.Wait()
		for _, wait := range []time.Duration{0, 3 * time.Second} {
			start := time.Now()
			d, err := f.q.Acquire(bg, sluice.AcquireRequest{Consumer: alice, Wait: wait, RequestID: "x"})
			if err != nil || d.End || len(d.Leases) > 0 || time.Since(start) != wait {
				t.Errorf("%+v, %v after %v, want nothing yet after %v", d, err, time.Since(start), wait)
			}
		}
		cancel()
		f.q.Stop(bg)
	})
}

// A put that a stopping queue could not finish may be repeated at the next one, so its sample must still be there.
func TestAPutThatAStopCutOffMayBeRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &memJournal{}
		f := newFixture(t, nil, &Options{Journal: j})
		ref := f.sample("s0", 100)
		first := f.q
		f.store.Fault = func(op string, _ sluice.Ref) error {
			if op == "claim" {
				first.Stop(bg)
			}
			return nil
		}
		if _, err := f.q.Put(bg, sluice.PutRequest{Ref: ref}); !errors.Is(err, sluice.ErrUnavailable) {
			t.Fatalf("got %v", err)
		}
		f.store.Fault = nil
		f.q = newQueue(t, f.cfg, f.store, &Options{Journal: j})
		if st, err := f.q.Put(bg, sluice.PutRequest{Ref: ref}); st != sluice.Enqueued || err != nil {
			t.Errorf("the repetition: %q, %v", st, err)
		}
		f.q.Stop(bg)
	})
}

func TestAPutOfAnotherGenerationDoesNotForgetAnOrphan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &memJournal{}
		f := newFixture(t, nil, &Options{Journal: j})
		f.put(1)
		f.q.Stop(bg)
		orphan := f.sample("x", 10)
		if err := f.store.Claim(orphan, "queue:r1"); err != nil {
			t.Fatal(err)
		}
		f.q = newQueue(t, f.cfg, f.store, &Options{Journal: j})
		other := queuetest.NewRef(f.store.URI(), "r1", "x", 10, nil)
		if _, err := f.q.Put(bg, sluice.PutRequest{Ref: other}); !errors.Is(err, sluice.ErrNotFound) {
			t.Fatal(err)
		}
		time.Sleep(2 * orphanTime)
		synctest.Wait()
		if _, ok := f.store.Owner("x"); ok {
			t.Error("the orphan leaks")
		}
		f.q.Stop(bg)
	})
}

func TestReclaimExpiredCountsItsOwn(t *testing.T) {
	f := newFixture(t, nil, &Options{Clock: &lateClock{Clock: queuetest.NewClock()}})
	f.put(2)
	f.acquire(sluice.Consumer{Name: "tp", Members: 2}, 2)
	clock := f.q.clock.(*lateClock)
	clock.Advance(time.Hour)
	if n, err := f.q.ReclaimExpired(bg); n != 2 || err != nil {
		t.Errorf("%d, %v, want 2", n, err)
	}
}

// lateClock never fires a timer by itself.
type lateClock struct {
	*queuetest.Clock
	fire func()
}

func (c *lateClock) AfterFunc(d time.Duration, f func()) func() bool {
	c.fire = f
	return func() bool { return false }
}

// A clock of somebody's own may be a little early.
func TestATimerThatFiresEarlyIsArmedAgain(t *testing.T) {
	clock := &lateClock{Clock: queuetest.NewClock()}
	f := newFixture(t, nil, &Options{Clock: clock})
	f.put(1)
	f.acquire(alice, 1)
	early := clock.fire
	clock.fire = nil
	clock.Advance(30*time.Second - 1)
	early()
	if clock.fire == nil {
		t.Fatal("the timer was not armed again")
	}
	clock.Advance(1)
	clock.fire()
	if n := f.q.PendingCount(); n != 1 {
		t.Errorf("%d pending, want 1", n)
	}
}

func TestAPanicOfTheCallersConditionLeavesNothing(t *testing.T) {
	f := newFixture(t, func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 1000} }, nil)
	f.put(8)
	ref := f.sample("x", 10)
	func() {
		defer func() { recover() }()
		f.q.PutBlocksUntilBelow(bg, sluice.PutRequest{Ref: ref, Producer: sluice.Producer{Name: "p0"}}, func() bool { panic("a fault of the caller's own") })
	}()
	if s, _ := f.q.Status(bg); s.ProducersWaiting != 0 {
		t.Errorf("%d producers wait", s.ProducersWaiting)
	}
	if p := f.q.producers["p0"]; p.waiting != 0 || !p.watched {
		t.Errorf("the producer counts as waiting for ever: %+v", p)
	}
}

// Consumers that left are fences against their old incarnations, but not for ever: names may be made up anew with every start.
func TestConsumersThatLeftAreForgottenInTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &memJournal{}
		f := newFixture(t, nil, &Options{Journal: j})
		for i := range 3 * maxLeft {
			c := sluice.Consumer{Name: fmt.Sprint("c", i), Incarnation: 1}
			f.put(1)
			f.settle(c, sluice.Ack, f.acquire(c, 1)...)
			if err := f.q.Leave(bg, c); err != nil {
				t.Fatal(err)
			}
		}
		if n := len(f.q.consumers); n > maxLeft+1 {
			t.Errorf("%d consumers are remembered", n)
		}
		last := sluice.Consumer{Name: fmt.Sprint("c", 3*maxLeft-1)}
		if _, err := f.q.Acquire(bg, sluice.AcquireRequest{Consumer: last}); !errors.Is(err, sluice.ErrStale) {
			t.Errorf("the old incarnation of one that left lately: %v", err)
		}
		f.q.settleJournal()
		live := dump(f.q)
		f.q.Stop(bg)
		q := newQueue(t, f.cfg, f.store, &Options{Journal: j})
		if again := dump(q); !slices.Equal(live, again) {
			t.Errorf("the replay differs: %d lines and %d", len(live), len(again))
		}
		q.Stop(bg)
	})
}

func TestConsumersThatWentAwaySilentlyAreForgottenInTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil, nil)
		f.put(1)
		f.acquire(alice, 1)
		for i := range 20 * maxLeft {
			f.acquire(sluice.Consumer{Name: fmt.Sprint("c", i)}, 1)
			time.Sleep(10 * time.Second)
			f.q.Renew(bg, sluice.RenewRequest{Consumer: alice})
		}
		if n := len(f.q.consumers); n > 5*maxLeft {
			t.Errorf("%d consumers are remembered", n)
		}
		if n := len(f.leasesOf("alice")); n != 1 {
			t.Errorf("alice holds %d leases, want 1", n)
		}
		f.q.Stop(bg)
	})
}

// The end that one consumer is told rests on what the others have settled, so that must be durable.
func TestTheEndWaitsForTheLastAck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &memJournal{}
		f := newFixture(t, nil, &Options{Journal: j})
		f.put(1)
		ls := f.acquire(alice, 1)
		f.q.Close(bg, nil)
		waits := f.wait(sluice.Consumer{Name: "bob"})
		f.q.settleJournal()
		synctest.Wait()
		j.hold = make(chan struct{})
		go f.settle(alice, sluice.Ack, ls...)
		synctest.Wait()
		asks := f.wait(sluice.Consumer{Name: "cleo"})
		if len(waits)+len(asks) > 0 {
			t.Error("told of the end before the last ack was durable")
		}
		close(j.hold)
		<-waits
		<-asks
		f.q.Stop(bg)
	})
}

func TestStatusOfAConsumerThatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil, nil)
		c := f.wait(alice)
		time.Sleep(time.Hour)
		if s, _ := f.q.Status(bg); s.Consumers[0].LastSeen != 0 || !s.Consumers[0].Waiting {
			t.Errorf("%+v", s.Consumers[0])
		}
		f.q.Stop(bg)
		<-c
	})
}

func TestSetVersionsKeepsNoSliceOfTheCaller(t *testing.T) {
	f := newFixture(t, nil, nil)
	targets := []string{"0"}
	if err := f.q.SetVersions(bg, targets, ""); err != nil {
		t.Fatal(err)
	}
	targets[0] = "other"
	if got := f.q.header().Targets; !slices.Equal(got, []string{"0"}) {
		t.Errorf("the gates became %v", got)
	}
}

func TestSetVersionsRefusesADraftVersionThatIsNoNumber(t *testing.T) {
	f := newFixture(t, func(c *sluice.RunConfig) { c.MinDraftVersion = "3" }, nil)
	for _, bad := range []string{"v2", "-1", "1.5", "99999999999999999999999"} {
		err := f.q.SetVersions(bg, []string{"7"}, bad)
		if !errors.Is(err, sluice.ErrInvalid) || !strings.Contains(err.Error(), fmt.Sprintf("%q", bad)) || !strings.Contains(err.Error(), "wants an unsigned integer") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if h := f.q.header(); h.MinDraft != "3" || len(h.Targets) > 0 {
		t.Errorf("a refused call left the gates at %q, %v", h.MinDraft, h.Targets)
	}
}

// drafted puts one sample for each of the draft versions, d and the version its id.
func (f *fixture) drafted(want sluice.PutStatus, versions ...string) {
	f.t.Helper()
	for _, v := range versions {
		ref := queuetest.NewRef(f.store.URI(), "r1", "d"+v, 100, func(r *sluice.RefFields) { r.DraftWeightVersion = v })
		if err := f.store.Add(ref, sluice.Reservation{}); err != nil {
			f.t.Fatal(err)
		}
		if st, err := f.q.Put(bg, sluice.PutRequest{Ref: ref}); err != nil || st != want {
			f.t.Fatalf("put of draft version %s: %q, %v, want %q", v, st, err, want)
		}
	}
}

// minDraft sets the least draft version and nothing else.
func (f *fixture) minDraft(v string) {
	f.t.Helper()
	if err := f.q.SetVersions(bg, nil, v); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) wantGated(gated, resident int64) {
	f.t.Helper()
	if s, err := f.q.Status(bg); err != nil || s.Gated != gated || s.Health.ResidentSamples != resident {
		f.t.Errorf("%d gated and %d resident, %v, want %d and %d", s.Gated, s.Health.ResidentSamples, err, gated, resident)
	}
}

func TestALaterDraftMinimumIsCheckedBeforeALease(t *testing.T) {
	j := &memJournal{}
	f := newFixture(t, nil, &Options{Journal: j})
	f.drafted(sluice.Enqueued, "0", "3", "1", "10", "2")
	leased := f.acquire(alice, 1)
	f.minDraft("3")
	if got := ids(f.acquire(alice, 1)); got != "d3 " {
		t.Errorf("leased %q, want d3", got)
	}
	if got := ids(f.acquire(alice, 9)); got != "d10 " {
		t.Errorf("leased %q, want d10, which is more than 3", got)
	}
	f.wantGated(2, 3) // d0 was leased before, and stays
	if res := f.settle(alice, sluice.Ack, leased...); res[0].Status != sluice.Settled {
		t.Errorf("the lease from before: %+v", res[0])
	}
	f.drafted(sluice.Gated, "2")
	f.q.settleJournal()
	f.q.Stop(bg)
	f.q = newQueue(t, f.cfg, f.store, &Options{Journal: j})
	f.drafted(sluice.Gated, "1")
	f.drafted(sluice.Enqueued, "4")
	f.minDraft("") // any
	f.drafted(sluice.Enqueued, "1")
	f.q.Stop(bg)
}

func TestALaterDraftMinimumIsCheckedBeforeAWindow(t *testing.T) {
	f := newFixture(t, func(c *sluice.RunConfig) {
		c.LargestSample, c.Windows = 100, &sluice.Windows{Ranks: 1, PerRank: 2}
	}, nil)
	f.drafted(sluice.Enqueued, "0", "1", "2")
	f.minDraft("3")
	first := f.acquire(alice, 9)
	if got := ids(first); got != "d0 d1 " {
		t.Errorf("leased %q, want d0 d1: their window is from before", got)
	}
	f.drafted(sluice.Enqueued, "3")
	f.settle(alice, sluice.Ack, first...)
	if got := ids(f.acquire(alice, 9)); got != "" {
		t.Errorf("leased %q, want nothing: d3 alone is no window", got)
	}
	f.drafted(sluice.Enqueued, "10")
	if got := ids(f.acquire(alice, 9)); got != "d3 d10 " {
		t.Errorf("leased %q, want d3 d10", got)
	}
	f.wantGated(1, 2)
}

// takeoverStore lets a successor come in the moment in which room is granted.
type takeoverStore struct {
	*queuetest.Store
	granted func()
}

func (s *takeoverStore) Reserve(ctx context.Context, bytes int64) (sluice.Reservation, error) {
	r, err := s.Store.Reserve(ctx, bytes)
	s.granted()
	return r, err
}

func TestRoomGrantedToASupersededProducerIsGivenBack(t *testing.T) {
	store := &takeoverStore{Store: queuetest.NewStore(roomy)}
	q, err := Open(bg, sluice.RunConfig{RunID: "r1", Schema: queuetest.Schema(), Caps: roomy}, store, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Stop(bg)
	store.granted = func() {
		if err := q.Report(bg, sluice.ProducerReport{Producer: sluice.Producer{Name: "p0", Incarnation: 1}, State: sluice.ProducerRunning}); err != nil {
			t.Error(err)
		}
	}
	r, err := q.Reserve(bg, sluice.ReserveRequest{Producer: sluice.Producer{Name: "p0"}, Bytes: 10})
	if !errors.Is(err, sluice.ErrStale) || !strings.Contains(err.Error(), `"p0": the producer was superseded`) || r != (sluice.Reservation{}) {
		t.Errorf("got %+v, %v", r, err)
	}
	if h := store.Health(); h.ReservedSamples != 0 || h.ReservedBytes != 0 {
		t.Errorf("its room leaks: %+v", h)
	}
}
