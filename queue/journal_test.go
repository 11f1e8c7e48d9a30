package queue

import (
	"context"
	"errors"
	"fmt"
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

var errPower = errors.New("the power is gone")

// crashJournal keeps the first records that it is given and then dies, in the middle of an Append if need be.
type crashJournal struct {
	memJournal
	left int
}

func (j *crashJournal) Append(ctx context.Context, records []sluice.Record) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := min(len(records), j.left)
	j.left -= n
	j.records = append(j.records, records[:n]...)
	if n < len(records) {
		return errPower
	}
	return nil
}

func (j *crashJournal) Compact(ctx context.Context, snapshot []sluice.Record) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.left == 0 {
		return errPower
	}
	j.left--
	j.records = slices.Clone(snapshot)
	return nil
}

// Whatever the moment of a crash, and whichever of the lazy records it takes: what was acknowledged is there, and what was settled does not return.
func TestCrashLosesNothingThatWasAcknowledged(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := sluice.RunConfig{RunID: "r1", Schema: queuetest.Schema(), Caps: sluice.Caps{MaxBytes: 1 << 20}, LargestSample: 100, MaxFails: 3, MaxExpiries: 3, Producers: 9}
		ranks, members := 1, 0
		if rapid.Bool().Draw(t, "windows") {
			ranks = rapid.IntRange(1, 3).Draw(t, "ranks")
			cfg.Windows = &sluice.Windows{Ranks: ranks, PerRank: 2, Prefetch: 1}
		}
		if rapid.Bool().Draw(t, "group") {
			members = 2
		}
		store, clock := queuetest.NewStore(cfg.Caps), queuetest.NewClock()
		j := &crashJournal{left: rapid.IntRange(0, 120).Draw(t, "records before the crash")}
		compact := rapid.SampledFrom([]int{15, 1 << 20}).Draw(t, "compact")
		q, err := Open(bg, cfg, store, &Options{Journal: j, Clock: clock, compactRecords: compact})
		if err != nil {
			if errors.Is(err, sluice.ErrUnavailable) {
				return
			}
			t.Fatal(err)
		}
		put, gone, maybe := map[string]sluice.Ref{}, map[string]bool{}, map[string]bool{}
		type held struct {
			c sluice.Consumer
			l sluice.Lease
		}
		var leases []held
		consumer := func() sluice.Consumer {
			r := rapid.IntRange(0, ranks-1).Draw(t, "rank")
			c := sluice.Consumer{Name: fmt.Sprint("c", r), Rank: r, Members: members}
			if members > 0 {
				c.Member = rapid.IntRange(0, members-1).Draw(t, "member")
			}
			return c
		}
		for i := 0; i < 300 && err == nil; i++ {
			switch rapid.IntRange(0, 9).Draw(t, "op") {
			case 0, 1, 2:
				id := fmt.Sprint("s", i)
				ref := queuetest.NewRef(store.URI(), "r1", id, 100, nil)
				if store.Add(ref, sluice.Reservation{}) != nil {
					continue
				}
				if _, err = q.Put(bg, sluice.PutRequest{Ref: ref, Positions: []sluice.Position{{Source: "x", Index: int64(i)}}}); err == nil {
					put[id] = ref
				}
			case 3, 4, 5:
				c := consumer()
				var d sluice.Delivery
				if d, err = q.Acquire(bg, sluice.AcquireRequest{Consumer: c, Max: 2}); err == nil {
					for _, l := range d.Leases {
						if gone[l.Ref.SampleID()] && (l.Window == nil || !l.Window.Pad) {
							t.Fatalf("%s was settled and comes again", l.Ref.SampleID())
						}
						leases = append(leases, held{c, l})
					}
				}
			case 6, 7, 8:
				if len(leases) == 0 {
					continue
				}
				k := rapid.IntRange(0, len(leases)-1).Draw(t, "lease")
				h := leases[k]
				leases = slices.Delete(leases, k, k+1)
				v := rapid.SampledFrom([]sluice.Verdict{sluice.Ack, sluice.Ack, sluice.Fail, sluice.Return, sluice.FailPermanent}).Draw(t, "verdict")
				id := h.l.Ref.SampleID()
				var res []sluice.SettleResult
				before := q.count.Acked
				res, err = q.Settle(bg, sluice.SettleRequest{Consumer: h.c, Settlements: []sluice.Settlement{{Lease: h.l.ID, Verdict: v}}})
				pad := h.l.Window != nil && h.l.Window.Pad
				switch {
				case err != nil && !pad:
					maybe[id] = true
				case err == nil && res[0].Status == sluice.Settled && q.count.Acked > before:
					gone[id] = true
				}
			case 9:
				clock.Advance(time.Duration(rapid.IntRange(0, 40).Draw(t, "seconds")) * time.Second)
			}
		}
		q.Stop(bg)

		records := slices.DeleteFunc(slices.Clone(j.records), func(r sluice.Record) bool { return r.Lazy && rapid.IntRange(0, 2).Draw(t, "lost") == 0 })
		q, err = Open(bg, cfg, store, &Options{Journal: &memJournal{records: records}, Clock: clock})
		if err != nil {
			t.Fatal(err)
		}
		defer q.Stop(bg)
		taken, err := q.Taken(bg, "x")
		if err != nil {
			t.Fatal(err)
		}
		for id := range put {
			var index int64
			fmt.Sscanf(id, "s%d", &index)
			if len(taken) == 0 || !taken[0].Contains(index) {
				t.Fatalf("the position of %s is lost", id)
			}
		}
		// Drain what is there.
		if err := q.Close(bg, nil); err != nil {
			t.Fatal(err)
		}
		clock.Advance(31 * time.Second)
		for ended, rounds := 0, 0; ended < ranks; rounds++ {
			if rounds > 1000 {
				t.Fatal("it does not drain")
			}
			ended = 0
			for r := range ranks {
				c := sluice.Consumer{Name: fmt.Sprint("c", r), Rank: r, Incarnation: 1}
				d, err := q.Acquire(bg, sluice.AcquireRequest{Consumer: c, Max: 5})
				if err != nil {
					t.Fatal(err)
				}
				for _, l := range d.Leases {
					id := l.Ref.SampleID()
					if owner, ok := store.Owner(id); !ok || owner == "" {
						t.Fatalf("%s was leased (%+v), but its bytes are gone", id, l.Window)
					}
					pad := l.Window != nil && l.Window.Pad
					if gone[id] && !pad {
						t.Fatalf("%s was settled and came back", id)
					}
					if !pad {
						delete(put, id)
					}
					if res, err := q.Settle(bg, sluice.SettleRequest{Consumer: c, Settlements: []sluice.Settlement{{Lease: l.ID, Verdict: sluice.Ack}}}); err != nil || res[0].Status != sluice.Settled {
						t.Fatal(res, err)
					}
				}
				if d.End {
					ended++
				}
			}
		}
		dead, err := q.DeadLetters(bg)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range dead {
			delete(put, d.Ref.SampleID())
		}
		for id := range put {
			if !gone[id] && !maybe[id] {
				t.Fatalf("%s was put and is lost", id)
			}
		}
		clock.Advance(2 * orphanTime)
		if _, err := q.ReclaimExpired(bg); err != nil {
			t.Fatal(err)
		}
		samples, _ := store.Samples(bg)
		for _, s := range samples {
			if s.Owner != "" && !s.Dead {
				t.Fatalf("%s is still claimed when all is done", s.Ref.SampleID())
			}
		}
	})
}

func TestAReplyWaitsForItsRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &memJournal{hold: make(chan struct{}, 100)}
		j.hold <- struct{}{} // for the header
		f := newFixture(t, nil, &Options{Journal: j})
		ref := f.sample("s0", 100)
		done := make(chan error, 1)
		go func() {
			_, err := f.q.Put(bg, sluice.PutRequest{Ref: ref})
			done <- err
		}()
		synctest.Wait()
		if len(done) > 0 {
			t.Fatal("the put was answered before it was durable")
		}
		// It is not given to anyone either, nor confirmed to a second caller.
		leased := make(chan []sluice.Lease, 1)
		go func() { leased <- f.acquire(alice, 1) }()
		again := make(chan sluice.PutStatus, 1)
		go func() {
			st, _ := f.q.Put(bg, sluice.PutRequest{Ref: ref})
			again <- st
		}()
		synctest.Wait()
		if len(leased)+len(again) > 0 {
			t.Fatal("something was built on a put that was not durable")
		}
		j.hold <- struct{}{}
		j.hold <- struct{}{}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		ls := <-leased
		if st := <-again; st != sluice.AlreadyPut || len(ls) != 1 {
			t.Fatal(st, ls)
		}
		acked := make(chan struct{})
		go func() { f.settle(alice, sluice.Ack, ls...); close(acked) }()
		synctest.Wait()
		if owner, _ := f.store.Owner("s0"); owner == "" {
			t.Fatal("the bytes were freed before the ack was durable")
		}
		j.hold <- struct{}{}
		<-acked
		if _, ok := f.store.Owner("s0"); ok {
			t.Fatal("the bytes were not freed")
		}
		close(j.hold)
		f.q.Stop(bg)
	})
}

func TestManyCallersShareOneAppend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &memJournal{}
		f := newFixture(t, nil, &Options{Journal: j})
		f.q.settleJournal()
		synctest.Wait()
		hold := make(chan struct{})
		j.hold = hold
		appends := j.appends
		var wg sync.WaitGroup
		for i := range 100 {
			ref := f.sample(fmt.Sprint("s", i), 100)
			wg.Go(func() { f.q.Put(bg, sluice.PutRequest{Ref: ref}) })
		}
		synctest.Wait()
		close(hold)
		wg.Wait()
		if n := j.appends - appends; n > 2 {
			t.Errorf("100 puts took %d appends, want 2: the first, and all that came meanwhile", n)
		}
		f.q.Stop(bg)
	})
}

func TestJournalFailureMakesTheQueueUnavailable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &memJournal{}
		f := newFixture(t, nil, &Options{Journal: j})
		f.put(2)
		ls := f.acquire(alice, 1)
		f.q.settleJournal()
		waits := make(chan error, 2)
		go func() {
			f.acquire(alice, 1)
			_, err := f.q.Acquire(bg, sluice.AcquireRequest{Consumer: alice, Wait: -1})
			waits <- err
		}()
		synctest.Wait()
		j.mu.Lock()
		j.fail = errPower
		j.mu.Unlock()
		_, err := f.q.Settle(bg, sluice.SettleRequest{Consumer: alice, Settlements: []sluice.Settlement{{Lease: ls[0].ID, Verdict: sluice.Ack}}})
		if !errors.Is(err, sluice.ErrUnavailable) || !errors.Is(err, errPower) {
			t.Fatalf("got %v, want unavailable because of the power", err)
		}
		if err := <-waits; !errors.Is(err, sluice.ErrUnavailable) {
			t.Errorf("the waiting acquire got %v", err)
		}
		if owner, _ := f.store.Owner("s0"); owner == "" {
			t.Error("an ack that may be lost freed the bytes")
		}
		if _, err := f.q.Acquire(bg, sluice.AcquireRequest{Consumer: alice}); !errors.Is(err, sluice.ErrUnavailable) {
			t.Errorf("a later acquire got %v", err)
		}
		if _, err := f.q.Reserve(bg, sluice.ReserveRequest{Bytes: 1}); !errors.Is(err, sluice.ErrUnavailable) {
			t.Errorf("a later reserve got %v", err)
		}
		if _, err := f.q.Status(bg); err != nil {
			t.Errorf("status got %v", err)
		}
		f.q.Stop(bg)
		// The journal works again, and the queue is opened again.
		j.fail = nil
		q := newQueue(t, f.cfg, f.store, &Options{Journal: j})
		if q.PendingCount()+q.OutstandingCount() != 2 {
			t.Errorf("%d pending and %d outstanding, want both samples", q.PendingCount(), q.OutstandingCount())
		}
		q.Stop(bg)
	})
}

func TestCompactionKeepsTheJournalShort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &memJournal{}
		f := newFixture(t, nil, &Options{Journal: j, compactRecords: 50, memoryCount: 10})
		for range 300 {
			f.put(1)
			f.settle(alice, sluice.Ack, f.acquire(alice, 1)...)
		}
		f.q.settleJournal()
		if j.compacts < 5 || len(j.records) > 150 {
			t.Errorf("%d snapshots, %d records, want some and few", j.compacts, len(j.records))
		}
		f.q.Stop(bg)
		q := newQueue(t, f.cfg, f.store, &Options{Journal: j})
		s, _ := q.Status(bg)
		if s.Acked != 300 || s.Put != 300 {
			t.Errorf("status %+v", s)
		}
		q.Stop(bg)
	})
}

func TestARecordedLeaseHasItsFullTimeAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &memJournal{}
		f := newFixture(t, nil, &Options{Journal: j})
		f.put(1)
		ls := f.acquire(alice, 1)
		time.Sleep(20 * time.Second)
		f.q.Stop(bg)
		q := newQueue(t, f.cfg, f.store, &Options{Journal: j})
		time.Sleep(20 * time.Second)
		f.q = q
		if r := f.settle(alice, sluice.Ack, ls...)[0]; r.Status != sluice.Settled {
			t.Errorf("got %+v, want settled by the lease from before", r)
		}
		q.Stop(bg)
		// And the settlement is known after another restart.
		f.q = newQueue(t, f.cfg, f.store, &Options{Journal: j})
		if r := f.settle(alice, sluice.Ack, ls...)[0]; r.Status != sluice.AlreadySettled {
			t.Errorf("got %+v, want already settled", r)
		}
		f.q.Stop(bg)
	})
}

func TestWhatTheStoreLostIsADeadLetterWithoutBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &memJournal{}
		f := newFixture(t, nil, &Options{Journal: j})
		f.put(2)
		f.q.Stop(bg)
		ref := f.q.byID["s0"].ref
		f.store.Unclaim(ref, "queue:r1") // as a reboot does to a tmpfs
		var events []Event
		f.q = newQueue(t, f.cfg, f.store, &Options{Journal: j, OnEvent: func(e Event) { events = append(events, e) }})
		dead, err := f.q.DeadLetters(bg)
		if err != nil || len(dead) != 1 || !dead[0].Freed || !strings.Contains(dead[0].Reasons[0], "the store has the sample no more") {
			t.Errorf("dead letters %+v, %v", dead, err)
		}
		if got := ids(f.acquire(alice, 5)); got != "s1 " {
			t.Errorf("leased %s", got)
		}
		if !slices.ContainsFunc(events, func(e Event) bool { return e.Kind == EventLostSample }) {
			t.Errorf("events %v", events)
		}
		f.q.Stop(bg)
	})
}

func TestAPutInFlightAtACrashMayBeRepeatedForAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &memJournal{}
		f := newFixture(t, nil, &Options{Journal: j})
		f.put(1)
		f.q.Stop(bg)
		one, two := f.sample("one", 10), f.sample("two", 10)
		for _, ref := range []sluice.Ref{one, two} { // claimed, but the record was lost
			if err := f.store.Claim(ref, "queue:r1"); err != nil {
				t.Fatal(err)
			}
		}
		f.q = newQueue(t, f.cfg, f.store, &Options{Journal: j})
		time.Sleep(30 * time.Second)
		if st, err := f.q.Put(bg, sluice.PutRequest{Ref: one}); st != sluice.Enqueued || err != nil {
			t.Fatal(st, err)
		}
		time.Sleep(31 * time.Second)
		synctest.Wait()
		if _, ok := f.store.Owner("one"); !ok {
			t.Error("the put that was repeated lost its bytes")
		}
		if _, ok := f.store.Owner("two"); ok {
			t.Error("the put that was not repeated leaks")
		}
		f.q.Stop(bg)
	})
}

// What came back of a later window stands at the head of its rank's share. That it was ever given may be lost, and with it that all of the windows before were given; if they then
// counted as not delivered, the head would wait for those behind it.
func TestAPlaceThatCameBackDoesNotBarItsRankWhenItsLeaseIsLost(t *testing.T) {
	j, clock := &memJournal{}, queuetest.NewClock()
	f := newFixture(t, func(c *sluice.RunConfig) {
		c.LargestSample, c.Windows = 100, &sluice.Windows{Ranks: 1, PerRank: 2, Prefetch: 1}
	}, &Options{Journal: j, Clock: clock})
	f.put(4)
	if got := ids(f.acquire(alice, 4)); got != "s0 s1 s2 s3 " {
		t.Fatal(got)
	}
	clock.Advance(30 * time.Second) // all run out
	if err := f.q.Stop(bg); err != nil {
		t.Fatal(err)
	}
	last := j.records[len(j.records)-1]
	if !last.Lazy || !strings.Contains(string(last.Data), `"how":"retry"`) {
		t.Fatalf("the last record is %s", last.Data)
	}
	kept := append(slices.DeleteFunc(slices.Clone(j.records), func(r sluice.Record) bool { return r.Lazy }), last)
	f.q = newQueue(t, f.cfg, f.store, &Options{Journal: &memJournal{records: kept}, Clock: clock})
	if got := ids(f.acquire(alice, 4)); len(got) != len("s0 s1 s2 s3 ") {
		t.Errorf("acquired %q after the crash, want all four", got)
	}
}

func TestAJournalOfNonsenseIsRefused(t *testing.T) {
	for _, data := range []string{`{`, `{"t":"what"}`, `{"t":"put"}`, `{"t":"lease","seq":7,"lease":"00000000000000000000000000000000"}`, `{"t":"window","seqs":[1]}`, `{"t":"snap-samples","list":[{"seq":1,"place":0}]}`, `{"t":"skip"}`, `{"t":"shape"}`} {
		store := queuetest.NewStore(roomy)
		_, err := Open(bg, sluice.RunConfig{RunID: "r1", Schema: queuetest.Schema(), Caps: roomy}, store, &Options{Journal: &memJournal{records: []sluice.Record{{Data: []byte(data)}}}})
		if !errors.Is(err, sluice.ErrCorrupt) {
			t.Errorf("%s: %v, want corrupt", data, err)
		}
	}
}

func FuzzReplay(f *testing.F) {
	j := &memJournal{}
	fx := newFixture(f, nil, &Options{Journal: j})
	fx.put(3)
	fx.settle(alice, sluice.Fail, fx.acquire(alice, 2)...)
	fx.q.settleJournal()
	for _, r := range j.records {
		f.Add(r.Data, r.Data)
	}
	for _, line := range dump(fx.q) {
		f.Add([]byte(line), []byte(line))
	}
	records := slices.Clone(j.records)
	f.Fuzz(func(t *testing.T, a, b []byte) {
		list := append(slices.Clone(records), sluice.Record{Data: a}, sluice.Record{Data: b})
		q, err := Open(bg, fx.cfg, &blankStore{uri: fx.store.URI(), h: fx.store.Health()}, &Options{Journal: &memJournal{records: list}})
		if err == nil {
			q.Stop(bg)
		}
	})
}

func TestStopLetsGoOfEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 100} }, &Options{Journal: &memJournal{}})
		var n atomic.Int32
		for range 3 {
			go func() {
				if _, err := f.q.Acquire(bg, sluice.AcquireRequest{Consumer: alice, Wait: -1}); errors.Is(err, sluice.ErrUnavailable) {
					n.Add(1)
				}
			}()
		}
		synctest.Wait()
		f.q.Stop(bg)
		f.q.Stop(bg)
		synctest.Wait()
		if n.Load() != 3 {
			t.Errorf("%d of 3 waiting calls ended", n.Load())
		}
		if _, err := f.q.Put(bg, sluice.PutRequest{Ref: f.sample("x", 1)}); !errors.Is(err, sluice.ErrUnavailable) {
			t.Errorf("put after stop: %v", err)
		}
	})
}

// The clock of a machine may be set back while the queue is down: its records are then of the future, but its time must not stand still until that has come.
func TestTimeGoesOnAfterAClockThatWasSetBack(t *testing.T) {
	j, clock := &memJournal{}, queuetest.NewClock()
	f := newFixture(t, nil, &Options{Journal: j, Clock: clock})
	f.put(2)
	clock.Advance(time.Hour)
	f.settle(alice, sluice.Ack, f.acquire(alice, 1)...)
	f.q.settleJournal()
	f.q.Stop(bg)

	clock = queuetest.NewClock() // an hour earlier
	f.q = newQueue(t, f.cfg, f.store, &Options{Journal: j, Clock: clock})
	ls := f.acquire(alice, 1)
	if want := clock.Now().Add(f.q.cfg.VisibilityTimeout); !ls[0].Deadline.Equal(want) || ls[0].TimeLeft != f.q.cfg.VisibilityTimeout {
		t.Errorf("the lease lasts until %v (%v), want %v", ls[0].Deadline, ls[0].TimeLeft, want)
	}
	clock.Advance(f.q.cfg.VisibilityTimeout)
	if f.q.OutstandingCount() != 0 {
		t.Error("the lease has not run out in its time")
	}
}
