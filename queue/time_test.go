package queue

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
	"pgregory.net/rapid"
)

// These tests run on the real clock of the package inside a bubble: its time passes when everybody waits.

func (f *fixture) reserve(p sluice.Producer, bytes int64) chan error {
	ch := make(chan error, 1)
	go func() {
		_, err := f.q.Reserve(bg, sluice.ReserveRequest{Producer: p, Bytes: bytes})
		ch <- err
	}()
	synctest.Wait()
	return ch
}

func (f *fixture) wait(c sluice.Consumer) chan error {
	ch := make(chan error, 1)
	go func() {
		d, err := f.q.Acquire(bg, sluice.AcquireRequest{Consumer: c, Wait: -1})
		if err == nil && d.End {
			err = errors.New("the end")
		}
		ch <- err
	}()
	synctest.Wait()
	return ch
}

func TestExpiryIsAutomatic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil, nil)
		f.put(2)
		f.acquire(alice, 1)
		time.Sleep(10 * time.Second)
		f.acquire(alice, 1)
		start := time.Now()
		bob := sluice.Consumer{Name: "bob"}
		for i, want := range []time.Duration{20 * time.Second, 30 * time.Second} {
			d, err := f.q.Acquire(bg, sluice.AcquireRequest{Consumer: bob, Wait: -1})
			if err != nil || ids(d.Leases) != fmt.Sprintf("s%d ", i) || time.Since(start) != want {
				t.Errorf("%v after %v: %v, want s%d after %v", ids(d.Leases), time.Since(start), err, i, want)
			}
		}
		if s, _ := f.q.Status(bg); s.ConsumerWaited != 30*time.Second || s.Expired != 2 {
			t.Errorf("status %+v", s)
		}
		f.q.Stop(bg)
	})
}

func TestReclaimExpiredFindsNothingLeftToDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil, nil)
		f.put(1)
		f.acquire(alice, 1)
		time.Sleep(30 * time.Second)
		synctest.Wait()
		if n, err := f.q.ReclaimExpired(bg); n != 0 || err != nil || f.q.PendingCount() != 1 {
			t.Errorf("%d, %v, %d pending", n, err, f.q.PendingCount())
		}
		f.q.Stop(bg)
	})
}

// deadlineClock counts how often a timer is armed.
type deadlineClock struct {
	sluice.SystemClock
	armed atomic.Int32
}

func (c *deadlineClock) AfterFunc(d time.Duration, f func()) func() bool {
	c.armed.Add(1)
	return c.SystemClock.AfterFunc(d, f)
}

func TestOneTimerServesAllLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &deadlineClock{}
		f := newFixture(t, nil, &Options{Clock: c})
		f.put(1000)
		for range 1000 {
			f.settle(alice, sluice.Ack, f.acquire(alice, 1)...)
		}
		if n := c.armed.Load(); n != 1 {
			t.Errorf("%d timers for 1000 leases, want 1", n)
		}
		time.Sleep(time.Hour)
		if n := c.armed.Load(); n != 1 {
			t.Errorf("%d timers after an idle hour, want 1: something polls", n)
		}
		f.q.Stop(bg)
	})
}

func TestAProducerThatWaitsAtTheGateIsAlive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 1000} }, nil)
		f.put(10)
		p := sluice.Producer{Name: "p0"}
		ch := f.reserve(p, 500)
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if f.q.IsClosed() || len(ch) > 0 {
			t.Fatal("the waiting producer was lost")
		}
		f.settle(alice, sluice.Ack, f.acquire(alice, 10)...)
		if err := <-ch; err != nil {
			t.Fatal(err)
		}
		time.Sleep(61 * time.Second)
		synctest.Wait()
		if s, _ := f.q.Status(bg); !s.Closed || s.Cause == "" {
			t.Errorf("a minute of silence later: %+v", s)
		}
		f.q.Stop(bg)
	})
}

func TestASuccessorEndsTheWaitOfItsPredecessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 1000} }, nil)
		f.put(10)
		ch := f.reserve(sluice.Producer{Name: "p0"}, 500)
		if err := f.q.Report(bg, sluice.ProducerReport{Producer: sluice.Producer{Name: "p0", Incarnation: 1}, State: sluice.ProducerRunning}); err != nil {
			t.Fatal(err)
		}
		if err := <-ch; !errors.Is(err, sluice.ErrStale) {
			t.Errorf("got %v, want stale", err)
		}
		f.q.Stop(bg)
	})
}

// A repeated request that finds the first still waiting joins it.
func TestARepetitionJoinsTheCallThatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil, nil)
		got := make(chan sluice.Delivery, 2)
		ctx, cancel := context.WithCancel(bg)
		for i := range 2 {
			c := bg
			if i == 0 {
				c = ctx
			}
			go func() {
				d, err := f.q.Acquire(c, sluice.AcquireRequest{Consumer: alice, Wait: -1, RequestID: "x"})
				if err == nil {
					got <- d
				}
			}()
			synctest.Wait()
		}
		f.put(2)
		if a, b := <-got, <-got; len(a.Leases) != 1 || len(b.Leases) != 1 || a.Leases[0].ID != b.Leases[0].ID {
			t.Errorf("got %v and %v", a, b)
		}
		cancel()
		// And if the first is gone, as when a connection broke, the second waits on in its place.
		ctx, cancel = context.WithCancel(bg)
		f.acquire(alice, 1)
		go f.q.Acquire(ctx, sluice.AcquireRequest{Consumer: alice, Wait: -1, RequestID: "y"})
		synctest.Wait()
		go func() {
			d, _ := f.q.Acquire(bg, sluice.AcquireRequest{Consumer: alice, Wait: -1, RequestID: "y"})
			got <- d
		}()
		synctest.Wait()
		cancel()
		synctest.Wait()
		f.put(1)
		if d := <-got; ids(d.Leases) != "s2 " {
			t.Errorf("got %v", ids(d.Leases))
		}
		f.q.Stop(bg)
	})
}

// wedged fills a cap of 1000 with leases that alice holds while she waits for more, and a producer that waits for room.
func wedged(t *testing.T, f *fixture) (producer, consumer chan error) {
	f.put(10)
	f.acquire(alice, 9)
	f.settle(alice, sluice.FailPermanent, f.acquire(alice, 1)...)
	return f.reserve(sluice.Producer{}, 400), f.wait(alice)
}

// What a run waited for is measured by the time it took, however long it has been over.
func TestARunThatIsOverSaysHowLongAgo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil, nil)
		c := f.wait(alice)
		time.Sleep(4 * time.Second)
		f.put(1)
		if err := <-c; err != nil {
			t.Fatal(err)
		}
		if err := f.q.Close(bg, nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if s, err := f.q.Status(bg); err != nil || s.Ended != 0 {
			t.Errorf("a lease is out: %v, %v", s.Ended, err)
		}
		f.settle(alice, sluice.Ack, f.leasesOf("alice")...)
		time.Sleep(time.Hour)
		s, err := f.q.Status(bg)
		if err != nil || s.Ended != time.Hour || s.Elapsed != time.Hour+5*time.Second || !strings.HasPrefix(s.Bottleneck(), "the target") {
			t.Errorf("%v: ended %v ago of %v: %s", err, s.Ended, s.Elapsed, s.Bottleneck())
		}
		f.q.Stop(bg)
	})
}

func TestAWedgeIsReportedWithinFiveSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var events []Event
		f := newFixture(t, func(c *sluice.RunConfig) { c.Caps, c.VisibilityTimeout = sluice.Caps{MaxBytes: 1000}, time.Hour }, &Options{OnEvent: func(e Event) { events = append(events, e) }})
		start := time.Now()
		p, c := wedged(t, f)
		err := <-p
		if !errors.Is(err, sluice.ErrWedged) || !errors.Is(<-c, sluice.ErrWedged) {
			t.Fatalf("got %v", err)
		}
		if d := time.Since(start); d < wedgeTime || d > 5*time.Second {
			t.Errorf("reported after %v", d)
		}
		for _, want := range []string{"1000 of 1000 bytes", "first for 400 bytes", "0 samples are pending", "consumer alice holds 9 leases of 900 bytes", "1 dead letters hold 100 bytes"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q does not say %q", err, want)
			}
		}
		s, _ := f.q.Status(bg)
		if s.Wedged == "" || !strings.HasPrefix(s.Bottleneck(), "wedged") || !slices.ContainsFunc(events, func(e Event) bool { return e.Kind == EventWedged }) {
			t.Errorf("status %+v, events %v", s, events)
		}
		// Who asks again hears it again; when something moves it is over.
		p, c = f.reserve(sluice.Producer{}, 400), f.wait(alice)
		if !errors.Is(<-p, sluice.ErrWedged) || !errors.Is(<-c, sluice.ErrWedged) {
			t.Error("the second time it was not reported")
		}
		f.settle(alice, sluice.Ack, f.leasesOf("alice")...)
		if s, _ := f.q.Status(bg); s.Wedged != "" {
			t.Errorf("still wedged: %s", s.Wedged)
		}
		f.q.Stop(bg)
	})
}

func (f *fixture) leasesOf(name string) []sluice.Lease {
	f.q.mu.Lock()
	defer f.q.mu.Unlock()
	var ls []sluice.Lease
	for l := f.q.consumers[name].first; l != nil; l = l.cnext {
		ls = append(ls, f.q.view(l))
	}
	return ls
}

func TestAWedgeOfKeptTensorsNamesThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 1000} }, nil)
		f.put(10)
		ls := f.acquire(alice, 10)
		for _, l := range ls {
			if _, err := f.store.Get(bg, l.Ref); err != nil {
				t.Fatal(err)
			}
		}
		f.settle(alice, sluice.Ack, ls...)
		p, c := f.reserve(sluice.Producer{}, 400), f.wait(alice)
		err := <-p
		if !errors.Is(err, sluice.ErrWedged) || !strings.Contains(err.Error(), "1000 bytes are of samples that the queue is done with") {
			t.Errorf("got %v", err)
		}
		<-c
		f.q.Stop(bg)
	})
}

func TestNoWedgeWhileSomebodyCanAck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *sluice.RunConfig) { c.Caps, c.VisibilityTimeout = sluice.Caps{MaxBytes: 1000}, time.Hour }, nil)
		f.put(10)
		f.acquire(alice, 5)
		bob := sluice.Consumer{Name: "bob"}
		slow := f.acquire(bob, 5)
		p, c := f.reserve(sluice.Producer{}, 400), f.wait(alice)
		time.Sleep(10 * time.Minute) // bob trains
		synctest.Wait()
		if len(p)+len(c) > 0 {
			t.Fatal("reported while bob could still ack")
		}
		f.settle(bob, sluice.Ack, slow...)
		if err := <-p; err != nil {
			t.Error(err)
		}
		f.q.Close(bg, nil)
		<-c
		f.q.Stop(bg)
	})
}

func TestNoWedgeWhileTheConsumerAsksAheadOfNeed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *sluice.RunConfig) { c.Caps, c.VisibilityTimeout = sluice.Caps{MaxBytes: 1000}, time.Hour }, nil)
		f.put(10)
		f.acquire(alice, 10)
		p := f.reserve(sluice.Producer{}, 400)
		ctx, cancel := context.WithCancel(bg)
		ahead := make(chan error, 1)
		go func() {
			_, err := f.q.Acquire(ctx, sluice.AcquireRequest{Consumer: alice, Wait: -1, Ahead: true})
			ahead <- err
		}()
		time.Sleep(10 * time.Minute) // alice trains on what she has, while her loader asks for more
		synctest.Wait()
		s, _ := f.q.Status(bg)
		if len(p)+len(ahead) > 0 || s.Wedged != "" || s.ConsumerWaited != 0 || s.ConsumersWaiting != 0 || !s.Starving {
			t.Fatalf("asking ahead counts as waiting: %+v", s)
		}
		cancel()
		if err := <-ahead; !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		c := f.wait(alice) // now she needs one
		if !errors.Is(<-p, sluice.ErrWedged) || !errors.Is(<-c, sluice.ErrWedged) {
			t.Error("not wedged")
		}
		f.q.Stop(bg)
	})
}

func TestTimesOfWaitingAreNotAddedUpOverWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil, nil)
		a, b := f.wait(alice), f.wait(sluice.Consumer{Name: "bob"})
		time.Sleep(10 * time.Second)
		f.put(1)
		time.Sleep(5 * time.Second) // one of the two still waits
		f.put(1)
		<-a
		<-b
		time.Sleep(time.Minute)
		if s, _ := f.q.Status(bg); s.ConsumerWaited != 15*time.Second {
			t.Errorf("consumers waited %v, want 15s", s.ConsumerWaited)
		}
		f.q.Stop(bg)
	})
}

func TestNoWedgeWhileASampleIsBeingMade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 1000} }, nil)
		c := f.wait(alice)
		p1, p2 := sluice.Producer{Name: "p1"}, sluice.Producer{Name: "p2"}
		if err := <-f.reserve(p1, 800); err != nil {
			t.Fatal(err)
		}
		second := f.reserve(p2, 800)
		time.Sleep(50 * time.Second) // p1 is in a long forward
		synctest.Wait()
		if len(second)+len(c) > 0 {
			t.Fatal("reported while p1 was producing")
		}
		f.q.Stop(bg)
		<-second
		<-c
	})
}

// A consumer that polls with short waits, or with none, waits as well.
func TestAWedgeWithAPollingConsumer(t *testing.T) {
	for _, wait := range []time.Duration{0, 50 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t, func(c *sluice.RunConfig) { c.Caps, c.VisibilityTimeout = sluice.Caps{MaxBytes: 1000}, time.Hour }, nil)
			f.put(10)
			f.acquire(alice, 10)
			start := time.Now()
			p := f.reserve(sluice.Producer{}, 400)
			stop := make(chan struct{})
			go func() {
				for {
					select {
					case <-stop:
						return
					case <-time.After(50 * time.Millisecond):
						f.q.Acquire(bg, sluice.AcquireRequest{Consumer: alice, Wait: wait})
					}
				}
			}()
			if err := <-p; !errors.Is(err, sluice.ErrWedged) || time.Since(start) > 5*time.Second {
				t.Errorf("%v after %v", err, time.Since(start))
			}
			close(stop)
			f.q.Stop(bg)
		})
	}
}

// A consumer that polls starves like one that waits: the marks alone would stop this pair.
func TestPollingConsumersOpenTheGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 100} }, nil)
		go func() {
			for i := range 20 {
				r, err := f.q.Reserve(bg, sluice.ReserveRequest{Bytes: 40})
				if err != nil {
					t.Error(err)
					return
				}
				time.Sleep(time.Millisecond)
				ref := queuetest.NewRef(f.store.URI(), "r1", fmt.Sprint("s", i), 40, nil)
				if err := f.store.Add(ref, r); err != nil {
					t.Error(err)
				}
				if _, err := f.q.Put(bg, sluice.PutRequest{Ref: ref}); err != nil {
					t.Error(err)
				}
			}
			f.q.Close(bg, nil)
		}()
		var last []sluice.Lease
		n := 0
		for {
			d, err := f.q.Acquire(bg, sluice.AcquireRequest{Consumer: alice})
			if err != nil {
				t.Fatal(err)
			}
			if d.End {
				break
			}
			if len(d.Leases) == 0 {
				time.Sleep(10 * time.Millisecond)
				continue
			}
			n++
			f.settle(alice, sluice.Ack, last...)
			last = d.Leases
		}
		if n != 20 {
			t.Errorf("%d of 20 samples arrived", n)
		}
		f.q.Stop(bg)
	})
}

func TestCallbacksMayCallTheQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var f *fixture
		var mu sync.Mutex
		var got []string
		call := func(what string) {
			s, err := f.q.Status(bg)
			if err != nil {
				t.Error(err)
			}
			f.q.Acquire(bg, sluice.AcquireRequest{Consumer: sluice.Consumer{Name: "callback"}})
			mu.Lock()
			got = append(got, fmt.Sprint(what, " ", s.Paused))
			mu.Unlock()
		}
		f = newFixture(t, func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 1000} }, &Options{
			OnPause:  func(sluice.Health) { call("pause") },
			OnResume: func(sluice.Health) { call("resume") },
			OnEvent: func(e Event) {
				if e.Kind == EventDead {
					call("dead")
					panic("a fault of the callback's own")
				}
			},
		})
		f.put(7)
		ls := f.acquire(alice, 7)
		for range 3 {
			f.put(1)
		}
		f.reserve(sluice.Producer{}, 1)
		synctest.Wait()
		f.settle(alice, sluice.FailPermanent, ls[0])
		f.settle(alice, sluice.Ack, ls[1:]...)
		f.q.Leave(bg, sluice.Consumer{Name: "callback"})
		f.settle(alice, sluice.Ack, f.acquire(alice, 10)...)
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		if want := []string{"pause true", "dead true", "resume false"}; !slices.Equal(got, want) {
			t.Errorf("callbacks: %v, want %v", got, want)
		}
		f.q.Stop(bg)
	})
}

func TestFaultsOfTheStoreLeaveTheStateRight(t *testing.T) {
	f := newFixture(t, nil, nil)
	bad := true
	f.store.Fault = func(op string, ref sluice.Ref) error {
		switch {
		case bad && op == "claim":
			panic("the store fell over")
		case bad:
			return errors.New("no answer")
		}
		return nil
	}
	ref := f.sample("s0", 100)
	if _, err := f.q.Put(bg, sluice.PutRequest{Ref: ref}); !errors.Is(err, sluice.ErrUnavailable) {
		t.Errorf("put: %v", err)
	}
	if f.q.PendingCount() != 0 {
		t.Error("a refused put left something")
	}
	bad = false
	if st, err := f.q.Put(bg, sluice.PutRequest{Ref: ref}); err != nil || st != sluice.Enqueued {
		t.Fatal(st, err)
	}
	bad = true
	ls := f.acquire(alice, 1)
	if r := f.settle(alice, sluice.Ack, ls...)[0]; r.Status != sluice.Settled {
		t.Errorf("ack: %+v", r)
	}
	if r := f.settle(alice, sluice.Ack, ls...)[0]; r.Status != sluice.AlreadySettled {
		t.Errorf("the second ack: %+v", r)
	}
}

func TestTheStoreIsToldInOrder(t *testing.T) {
	f := newFixture(t, nil, nil)
	f.store.Record()
	f.put(1)
	f.settle(alice, sluice.FailPermanent, f.acquire(alice, 1)...)
	f.q.Requeue(bg, "s0")
	f.settle(alice, sluice.FailPermanent, f.acquire(alice, 1)...)
	f.q.Drop(bg, "s0")
	want := []string{"claim s0", "mark true s0", "mark false s0", "mark true s0", "unclaim s0"}
	if got := f.store.Calls(); !slices.Equal(got, want) {
		t.Errorf("calls %v, want %v", got, want)
	}
}

// A put of one sample from many goroutines enqueues it once.
func TestConcurrentPutsOfOneSample(t *testing.T) {
	f := newFixture(t, nil, nil)
	for i := range 200 {
		ref := f.sample(fmt.Sprint("x", i), 1)
		var enqueued atomic.Int32
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				st, err := f.q.Put(bg, sluice.PutRequest{Ref: ref})
				if err != nil {
					t.Error(err)
				}
				if st == sluice.Enqueued {
					enqueued.Add(1)
				}
			})
		}
		wg.Go(func() { f.settle(alice, sluice.Ack, f.acquire(alice, 1)...) })
		wg.Wait()
		if n := enqueued.Load(); n != 1 {
			t.Fatalf("enqueued %d times", n)
		}
	}
	f.settle(alice, sluice.Ack, f.acquire(alice, 200)...)
	if h := f.store.Health(); h.ResidentSamples != 0 {
		t.Errorf("%d samples leak", h.ResidentSamples)
	}
}

// Everything at once, under the race detector: several producers behind the gate, consumers that fail, return, let leases run out, restart and leave. Every
// sample ends up acked or dead, and the store ends up empty but for the dead.
func TestStorm(t *testing.T) {
	for _, w := range []*sluice.Windows{nil, {Ranks: 2, PerRank: 2, Prefetch: 1}} {
		t.Run(fmt.Sprint("windows=", w != nil), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, func(c *sluice.RunConfig) {
					c.Caps, c.LargestSample, c.Producers, c.VisibilityTimeout, c.Windows = sluice.Caps{MaxBytes: 3000}, 100, 3, 2*time.Second, w
				}, &Options{Journal: &memJournal{}, compactRecords: 100})
				const each = 150
				var wg sync.WaitGroup
				for p := range 3 {
					wg.Go(func() {
						who := sluice.Producer{Name: fmt.Sprint("p", p)}
						for i := range each {
							n := int64(rand.IntN(100) + 1)
							r, err := f.q.Reserve(bg, sluice.ReserveRequest{Producer: who, Bytes: n})
							if err != nil {
								t.Error(err)
								return
							}
							time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
							ref := queuetest.NewRef(f.store.URI(), "r1", fmt.Sprintf("s%d-%d", p, i), n, nil)
							if err := f.store.Add(ref, r); err != nil {
								t.Error(err)
							}
							if _, err := f.q.Put(bg, sluice.PutRequest{Ref: ref, Producer: who, Positions: []sluice.Position{{Source: "x", Epoch: int64(p), Index: int64(i)}}}); err != nil {
								t.Error(err)
							}
						}
						if err := f.q.Report(bg, sluice.ProducerReport{Producer: who, State: sluice.ProducerDone}); err != nil {
							t.Error(err)
						}
					})
				}
				for k := range 4 {
					wg.Go(func() {
						c := sluice.Consumer{Name: fmt.Sprint("c", k), Rank: k % 2}
						for {
							d, err := f.q.Acquire(bg, sluice.AcquireRequest{Consumer: c, Max: rand.IntN(3) + 1, Wait: 10 * time.Second})
							if err != nil {
								t.Error(err)
								return
							}
							if d.End {
								if len(d.Leases) > 0 {
									t.Error("leases at the end")
								}
								// Who let a lease run out hears of the end at once, as if it were going to ack it; so it asks again.
								if f.q.PendingCount()+f.q.OutstandingCount()+f.q.openNow() == 0 {
									return
								}
								time.Sleep(100 * time.Millisecond)
							}
							for _, l := range d.Leases {
								time.Sleep(time.Duration(rand.IntN(10)) * time.Millisecond)
								v := sluice.Ack
								switch rand.IntN(12) {
								case 0:
									v = sluice.Fail
								case 1:
									v = sluice.Return
								case 2:
									v = sluice.FailPermanent
								case 3:
									if rand.IntN(4) == 0 {
										continue // it runs out
									}
								case 4:
									if rand.IntN(10) == 0 {
										c.Incarnation++
									}
								}
								r := sluice.SettleRequest{Consumer: c, Settlements: []sluice.Settlement{{Lease: l.ID, Verdict: v}}}
								if _, err := f.q.Settle(bg, r); err != nil {
									t.Error(err)
								}
							}
						}
					})
				}
				wg.Wait()
				s, err := f.q.Status(bg)
				if err != nil {
					t.Fatal(err)
				}
				if s.Put != 3*each || s.Acked+s.DeadTotal != s.Put || s.Pending != 0 || s.Outstanding != 0 {
					t.Errorf("status %+v", s)
				}
				if h := s.Health; h.ResidentSamples != h.DeadSamples || h.ReservedSamples != 0 || h.DeadBytes > 300 {
					t.Errorf("health %+v", h)
				}
				for p := range 3 {
					taken, _ := f.q.Taken(bg, "x")
					if fmt.Sprint(taken[p].Ranges) != fmt.Sprintf("[[0 %d]]", each) {
						t.Errorf("taken %v", taken)
					}
				}
				f.q.Stop(bg)
			})
		})
	}
}

func (q *Queue) openNow() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.windows.open)
}

// Nothing here takes time, so whoever is not woken by what concerns it lets the clock of the bubble run on to the first deadline, and is found out.
func TestNoWakeUpIsLost(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var w *sluice.Windows
		ranks, members := rapid.IntRange(1, 3).Draw(rt, "ranks"), rapid.IntRange(1, 2).Draw(rt, "members")
		if rapid.Bool().Draw(rt, "windows") {
			w = &sluice.Windows{Ranks: ranks, PerRank: rapid.IntRange(1, 2).Draw(rt, "per rank"), Prefetch: rapid.IntRange(0, 2).Draw(rt, "prefetch"), DropTail: rapid.Bool().Draw(rt, "drop tail")}
		}
		verdicts := rapid.SliceOfN(rapid.SampledFrom([]sluice.Verdict{sluice.Ack, sluice.Ack, sluice.Fail, sluice.FailPermanent, sluice.Return}), 20, 20).Draw(rt, "verdicts")
		n := rapid.IntRange(0, 20).Draw(rt, "samples")
		hold := 0
		if w == nil { // who holds a place of a window cannot wait for the next window
			hold = rapid.IntRange(0, 2).Draw(rt, "held")
		}
		var took time.Duration
		var end sluice.Status
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t, func(c *sluice.RunConfig) { c.LargestSample, c.Windows, c.MaxFails = 100, w, 2 }, nil)
			start := time.Now()
			var wg sync.WaitGroup
			for r := range ranks {
				for m := range members {
					wg.Go(func() {
						c := sluice.Consumer{Name: fmt.Sprint("c", r), Rank: r, Member: m, Members: members}
						var held []sluice.Lease
						settle := func(least int) {
							for len(held) > least {
								v := verdicts[int(held[0].ID[0])%len(verdicts)] // all members say the same
								if _, err := f.q.Settle(bg, sluice.SettleRequest{Consumer: c, Settlements: []sluice.Settlement{{Lease: held[0].ID, Verdict: v}}}); err != nil {
									t.Error(err)
								}
								held = held[1:]
							}
						}
						for {
							d, err := f.q.Acquire(bg, sluice.AcquireRequest{Consumer: c, Wait: -1})
							if err != nil {
								t.Error(err)
								return
							}
							if d.End && len(held) == 0 {
								return
							}
							held = append(held, d.Leases...)
							if d.End {
								settle(0)
							}
							settle(hold)
						}
					})
				}
			}
			f.put(n)
			synctest.Wait()
			if err := f.q.Close(bg, nil); err != nil {
				t.Error(err)
			}
			wg.Wait()
			took = time.Since(start)
			end, _ = f.q.Status(bg)
			f.q.Stop(bg)
		})
		if took > 0 {
			rt.Errorf("somebody waited for %v", took)
		}
		if end.Pending+end.Outstanding != 0 || end.Acked+end.DeadTotal+end.TailDropped != end.Put {
			rt.Errorf("left: %+v", end)
		}
	})
}

// Windows are dealt to all ranks alike, so that one that nobody started stops the others, and producers, without a wedge.
func TestStatusNamesTheRanksThatTheOthersWaitFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *sluice.RunConfig) {
			c.LargestSample, c.Windows, c.VisibilityTimeout = 100, &sluice.Windows{Ranks: 3, PerRank: 1}, time.Minute
		}, nil)
		want := func(when string, ranks ...int) {
			t.Helper()
			s, err := f.q.Status(bg)
			if err != nil || !slices.Equal(s.MissingRanks, ranks) || strings.HasPrefix(s.Bottleneck(), "a missing rank") != (len(ranks) > 0) {
				t.Errorf("%s: missing are %v (%q, %v), want %v", when, s.MissingRanks, s.Bottleneck(), err, ranks)
			}
		}
		zero, one, two := sluice.Consumer{Name: "zero"}, sluice.Consumer{Name: "one", Rank: 1}, sluice.Consumer{Name: "two", Rank: 2}
		f.put(3)
		want("nobody waits")
		f.settle(zero, sluice.Ack, f.acquire(zero, 1)...)
		next := f.wait(zero)
		want("rank 0 waits, the others were never there", 1, 2)
		held := f.acquire(one, 1)
		want("rank 1 holds its place", 2)
		f.settle(one, sluice.Ack, held...)
		f.settle(two, sluice.Ack, f.acquire(two, 1)...)
		want("rank 2 came")
		f.put(3)
		if err := <-next; err != nil {
			t.Fatal(err)
		}
		f.settle(zero, sluice.Ack, f.leasesOf("zero")...)
		next = f.wait(zero)
		want("ranks 1 and 2 were here just now")
		time.Sleep(30 * time.Second)
		if _, err := f.q.Acquire(bg, sluice.AcquireRequest{Consumer: two, Max: 1}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(45 * time.Second)
		want("rank 1 was silent for as long as a lease lasts; rank 2 holds one", 1)
		if err := f.q.Leave(bg, two); err != nil {
			t.Fatal(err)
		}
		want("rank 2 has left", 1, 2)
		f.q.Stop(bg)
		<-next
	})
}
