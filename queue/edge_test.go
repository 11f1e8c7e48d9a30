package queue

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
