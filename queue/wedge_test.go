package queue

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
)

func TestNoWedgeWhileAnotherRankHasSamplesToFetch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *sluice.RunConfig) {
			c.Caps, c.VisibilityTimeout, c.LargestSample, c.Windows = sluice.Caps{MaxBytes: 300}, time.Hour, 100, &sluice.Windows{Ranks: 2, PerRank: 1}
		}, nil)
		f.put(3)
		zero, one := sluice.Consumer{Name: "zero"}, sluice.Consumer{Name: "one", Rank: 1}
		f.acquire(zero, 1)
		p, c := f.reserve(sluice.Producer{}, 100), f.wait(zero)
		time.Sleep(10 * time.Minute) // rank 1 is still starting up
		synctest.Wait()
		if len(p)+len(c) > 0 {
			t.Fatal("reported while rank 1 had a sample to fetch")
		}
		f.acquire(one, 1)
		ch := f.wait(one)
		if !errors.Is(<-p, sluice.ErrWedged) || !errors.Is(<-c, sluice.ErrWedged) || !errors.Is(<-ch, sluice.ErrWedged) {
			t.Error("not reported although both ranks wait")
		}
		f.q.Stop(bg)
	})
}

func TestNoWedgeWhileAMemberOfTheGroupIsAtWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *sluice.RunConfig) { c.Caps, c.VisibilityTimeout = sluice.Caps{MaxBytes: 1000}, time.Hour }, nil)
		f.put(10)
		first, second := sluice.Consumer{Name: "tp", Members: 2}, sluice.Consumer{Name: "tp", Member: 1, Members: 2}
		ls := f.acquire(first, 10)
		f.acquire(second, 10)
		f.settle(first, sluice.Ack, ls...)
		p, c := f.reserve(sluice.Producer{}, 400), f.wait(first)
		time.Sleep(10 * time.Minute) // the second member trains, or writes a checkpoint
		synctest.Wait()
		if len(p)+len(c) > 0 {
			t.Fatal("reported while the second member could still ack")
		}
		other := f.wait(second)
		if !errors.Is(<-p, sluice.ErrWedged) || !errors.Is(<-c, sluice.ErrWedged) || !errors.Is(<-other, sluice.ErrWedged) {
			t.Error("not reported although both members wait")
		}
		f.q.Stop(bg)
	})
}

func TestAWedgeOfAGroupThatPolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *sluice.RunConfig) { c.Caps, c.VisibilityTimeout = sluice.Caps{MaxBytes: 1000}, time.Hour }, nil)
		f.put(10)
		members := []sluice.Consumer{{Name: "tp", Members: 2}, {Name: "tp", Member: 1, Members: 2}}
		f.acquire(members[0], 10)
		f.acquire(members[1], 10)
		start := time.Now()
		p := f.reserve(sluice.Producer{}, 400)
		for len(p) == 0 && time.Since(start) < time.Minute {
			time.Sleep(50 * time.Millisecond)
			for _, m := range members {
				f.q.Acquire(bg, sluice.AcquireRequest{Consumer: m})
			}
		}
		if err := <-p; !errors.Is(err, sluice.ErrWedged) || time.Since(start) > 5*time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		f.q.Stop(bg)
	})
}

func TestNoWedgeWhileRoomIsBeingGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 1000} }, nil)
		f.put(10)
		var kept []*sluice.Tensors
		ls := f.acquire(alice, 10)
		for _, l := range ls {
			x, err := f.store.Get(bg, l.Ref)
			if err != nil {
				t.Fatal(err)
			}
			kept = append(kept, x)
		}
		f.settle(alice, sluice.Ack, ls...)
		p, c := f.reserve(sluice.Producer{}, 900), f.wait(alice)
		for _, x := range kept[:9] { // slowly, but it comes
			time.Sleep(2 * time.Second)
			if err := x.Release(bg); err != nil {
				t.Fatal(err)
			}
		}
		if err := <-p; err != nil {
			t.Error(err)
		}
		f.q.Stop(bg)
		<-c
	})
}

func TestDeadLettersKeepToTheirShareOfBothCaps(t *testing.T) {
	f := newFixture(t, func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 1 << 40, MaxSamples: 20} }, nil)
	f.put(6)
	f.settle(alice, sluice.FailPermanent, f.acquire(alice, 6)...)
	if h := f.store.Health(); h.DeadSamples != 2 {
		t.Errorf("the dead letters hold %d of 20 samples, want at most a tenth", h.DeadSamples)
	}
}

// Whoever holds the places of one window and waits for the next waits for itself. While there are producers, they wait too; when they are through, it is a wedge all the same.
func TestAWedgeBehindTheLastPut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *sluice.RunConfig) {
			c.VisibilityTimeout, c.LargestSample, c.Windows = time.Hour, 100, &sluice.Windows{Ranks: 2, PerRank: 1}
		}, nil)
		f.put(4)
		if err := f.q.Close(bg, nil); err != nil {
			t.Fatal(err)
		}
		zero, one := sluice.Consumer{Name: "zero"}, sluice.Consumer{Name: "one", Rank: 1}
		ls := f.acquire(zero, 1)
		ch := f.wait(zero)
		time.Sleep(10 * time.Minute) // rank 1 is still starting up
		held := f.acquire(one, 1)
		time.Sleep(10 * time.Minute) // and then at work
		synctest.Wait()
		if s, _ := f.q.Status(bg); len(ch) > 0 || s.Wedged != "" {
			t.Fatalf("reported while rank 1 could ack: %s", s.Wedged)
		}
		start := time.Now()
		other := f.wait(one)
		err := <-other
		if !errors.Is(err, sluice.ErrWedged) || !errors.Is(<-ch, sluice.ErrWedged) || time.Since(start) > 5*time.Second {
			t.Fatalf("%v after %v", err, time.Since(start))
		}
		for _, want := range []string{"2 consumers wait", "2 samples are pending", "consumer one holds 1 leases of 100 bytes while it waits", "consumer zero holds 1 leases"} {
			if s, _ := f.q.Status(bg); !strings.Contains(err.Error(), want) || !strings.Contains(s.Wedged, want) {
				t.Errorf("%q, status %q; want %q", err, s.Wedged, want)
			}
		}
		f.settle(zero, sluice.Ack, ls...)
		f.settle(one, sluice.Ack, held...)
		if s, _ := f.q.Status(bg); s.Wedged != "" || len(f.acquire(zero, 1)) != 1 || len(f.acquire(one, 1)) != 1 {
			t.Errorf("it does not go on: %+v", s)
		}
		f.q.Stop(bg)
	})
}

// muteStore does not say when room becomes free, as a process that died in the middle of a release does not.
type muteStore struct{ *queuetest.Store }

func (muteStore) OnFreed(func()) func() { return func() {} }

func TestRoomThatNobodyTellsOfIsNoWedge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 1000} }, nil)
		f.q.Stop(bg)
		var err error
		if f.q, err = Open(bg, f.cfg, muteStore{f.store}, nil); err != nil {
			t.Fatal(err)
		}
		kept := f.sample("kept", 900)
		p, c := f.reserve(sluice.Producer{}, 400), f.wait(alice)
		synctest.Wait()
		if len(p)+len(c) > 0 {
			t.Fatal("there was room before any was made")
		}
		if err := f.store.Abort(bg, kept); err != nil {
			t.Fatal(err)
		}
		if err := <-p; err != nil {
			t.Errorf("the producer was told %v", err)
		}
		f.q.Stop(bg)
		<-c
	})
}
