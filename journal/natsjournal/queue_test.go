package natsjournal_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/journal/natsjournal"
	"github.com/sluice-ml/sluice/queue"
	"github.com/sluice-ml/sluice/queue/queuetest"
)

func open(t testing.TB, dir string) *natsjournal.Journals {
	t.Helper()
	js, err := natsjournal.Open(context.Background(), dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { js.Close() })
	return js
}

// A queue on a journal does all that one in memory does.
func TestQueueConformance(t *testing.T) {
	t.Parallel()
	js := open(t, t.TempDir())
	var n atomic.Int64
	queuetest.Run(t, queuetest.Harness{Open: func(t *testing.T, cfg sluice.RunConfig, store *queuetest.Store, clock *queuetest.Clock) sluice.Queue {
		j, err := js.Journal(t.Context(), fmt.Sprint("run", n.Add(1)))
		if err != nil {
			t.Fatal(err)
		}
		q, err := queue.Open(t.Context(), cfg, store, &queue.Options{Clock: clock, Journal: j})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			q.Stop(context.Background())
			if err := j.Close(); err != nil {
				t.Error(err)
			}
		})
		return q
	}})
}

// service is a run on a journal that restarts.
type service struct {
	t     *testing.T
	dir   string
	cfg   sluice.RunConfig
	store *queuetest.Store
	clock *queuetest.Clock
	js    *natsjournal.Journals
	j     sluice.Journal
	q     *queue.Queue
}

func newService(t *testing.T, edit func(*sluice.RunConfig)) *service {
	s := &service{t: t, dir: t.TempDir(), clock: queuetest.NewClock()}
	s.cfg = sluice.RunConfig{RunID: "r1", Schema: queuetest.Schema(), Caps: sluice.Caps{MaxBytes: 1 << 30}, LargestSample: 1000}
	if edit != nil {
		edit(&s.cfg)
	}
	s.store = queuetest.NewStore(s.cfg.Caps)
	s.start()
	t.Cleanup(s.stop)
	return s
}

func (s *service) start() {
	s.t.Helper()
	var err error
	if s.js, err = natsjournal.Open(s.t.Context(), s.dir, nil); err != nil {
		s.t.Fatal(err)
	}
	if s.j, err = s.js.Journal(s.t.Context(), s.cfg.RunID); err != nil {
		s.t.Fatal(err)
	}
	if s.q, err = queue.Open(s.t.Context(), s.cfg, s.store, &queue.Options{Clock: s.clock, Journal: s.j}); err != nil {
		s.t.Fatal(err)
	}
}

func (s *service) stop() {
	s.q.Stop(context.Background())
	if err := s.js.Close(); err != nil {
		s.t.Error(err)
	}
}

func (s *service) restart() {
	s.t.Helper()
	s.stop()
	s.start()
}

func (s *service) put(id string, index int64) {
	s.t.Helper()
	ref := queuetest.NewRef(s.store.URI(), "r1", id, 100, nil)
	if err := s.store.Add(ref, sluice.Reservation{}); err != nil {
		s.t.Fatal(err)
	}
	st, err := s.q.Put(s.t.Context(), sluice.PutRequest{Ref: ref, Positions: []sluice.Position{{Source: "text", Index: index}}})
	if err != nil || st != sluice.Enqueued {
		s.t.Fatalf("put %s: %v, %v", id, st, err)
	}
}

func (s *service) acquire(c sluice.Consumer, n int) []sluice.Lease {
	s.t.Helper()
	d, err := s.q.Acquire(s.t.Context(), sluice.AcquireRequest{Consumer: c, Max: n})
	if err != nil {
		s.t.Fatal(err)
	}
	return d.Leases
}

func (s *service) settle(c sluice.Consumer, v sluice.Verdict, want sluice.SettleStatus, leases ...sluice.Lease) {
	s.t.Helper()
	r := sluice.SettleRequest{Consumer: c}
	for _, l := range leases {
		r.Settlements = append(r.Settlements, sluice.Settlement{Lease: l.ID, Verdict: v, Reason: "because"})
	}
	res, err := s.q.Settle(s.t.Context(), r)
	if err != nil {
		s.t.Fatal(err)
	}
	for i := range res {
		if res[i].Status != want {
			s.t.Errorf("settled %s: %+v, want %v", leases[i].Ref.SampleID(), res[i], want)
		}
	}
}

func names(leases []sluice.Lease) string {
	s := ""
	for _, l := range leases {
		s += l.Ref.SampleID() + " "
	}
	return s
}

var alice = sluice.Consumer{Name: "alice"}

func TestPutSettleDeadAndPositionSurvive(t *testing.T) {
	t.Parallel()
	s := newService(t, nil)
	for i := range 5 {
		s.put(fmt.Sprint("s", i), int64(i))
	}
	ls := s.acquire(alice, 3)
	s.settle(alice, sluice.Ack, sluice.Settled, ls[0])
	s.settle(alice, sluice.FailPermanent, sluice.Settled, ls[1])
	s.restart()
	s.settle(alice, sluice.Ack, sluice.AlreadySettled, ls[0])
	dead, err := s.q.DeadLetters(t.Context())
	if err != nil || len(dead) != 1 || dead[0].Ref.SampleID() != "s1" || dead[0].Reasons[0] != "because" {
		t.Errorf("dead letters %+v, %v", dead, err)
	}
	taken, err := s.q.Taken(t.Context(), "text")
	if err != nil || len(taken) != 1 || len(taken[0].Ranges) != 1 || taken[0].Ranges[0] != [2]int64{0, 5} {
		t.Errorf("taken %+v, %v", taken, err)
	}
	// The lease from before is one still, and the others come in their order.
	s.settle(alice, sluice.Ack, sluice.Settled, ls[2])
	if got := names(s.acquire(alice, 5)); got != "s3 s4 " {
		t.Errorf("leased %q", got)
	}
	s.restart()
	st, err := s.q.Status(t.Context())
	if err != nil || st.Put != 5 || st.Acked != 2 {
		t.Errorf("status %+v, %v", st, err)
	}
}

func TestARecordedLeaseHasItsFullTimeAfterARestart(t *testing.T) {
	t.Parallel()
	s := newService(t, nil) // 30 s of visibility
	s.put("s0", 0)
	ls := s.acquire(alice, 1)
	s.clock.Advance(25 * time.Second)
	s.restart()
	s.clock.Advance(25 * time.Second)
	s.settle(alice, sluice.Ack, sluice.Settled, ls...)
}

func TestWindowsSurvive(t *testing.T) {
	t.Parallel()
	s := newService(t, func(c *sluice.RunConfig) { c.Windows = &sluice.Windows{Ranks: 2, PerRank: 2} })
	rank := func(r int) sluice.Consumer { return sluice.Consumer{Name: fmt.Sprint("rank", r), Rank: r} }
	for i := range 8 {
		s.put(fmt.Sprint("s", i), int64(i))
	}
	first := s.acquire(rank(0), 1)
	s.settle(rank(0), sluice.Ack, sluice.Settled, first...)
	s.restart()
	// The window goes on where it was: rank 0 has one place left and then waits for rank 1.
	second := s.acquire(rank(0), 8)
	if got := names(second); got != "s2 " {
		t.Errorf("rank 0 leased %q", got)
	}
	s.restart()
	others := s.acquire(rank(1), 8)
	if got := names(others); got != "s1 s3 " {
		t.Errorf("rank 1 leased %q", got)
	}
	s.restart()
	s.settle(rank(0), sluice.Ack, sluice.Settled, second...)
	s.settle(rank(1), sluice.Ack, sluice.Settled, others...)
	if got := names(s.acquire(rank(0), 8)); got != "s4 s6 " {
		t.Errorf("rank 0 leased %q", got)
	}
}

// BenchmarkRestart opens a directory with 100,000 pending refs, journal and queue.
func BenchmarkRestart(b *testing.B) {
	const pending, putters = 100_000, 64
	ctx := context.Background()
	cfg := sluice.RunConfig{RunID: "r1", Schema: queuetest.Schema(), Caps: sluice.Caps{MaxBytes: 1 << 40}}
	store := queuetest.NewStore(cfg.Caps)
	dir := b.TempDir()
	start := func() (*natsjournal.Journals, sluice.Journal, *queue.Queue) {
		js, err := natsjournal.Open(ctx, dir, nil)
		if err != nil {
			b.Fatal(err)
		}
		j, err := js.Journal(ctx, "r1")
		if err != nil {
			b.Fatal(err)
		}
		q, err := queue.Open(ctx, cfg, store, &queue.Options{Journal: j})
		if err != nil {
			b.Fatal(err)
		}
		return js, j, q
	}
	stop := func(js *natsjournal.Journals, q *queue.Queue) {
		q.Stop(ctx)
		if err := js.Close(); err != nil {
			b.Fatal(err)
		}
	}
	js, _, q := start()
	var wg sync.WaitGroup
	for p := range putters {
		wg.Go(func() {
			for i := p; i < pending; i += putters {
				ref := queuetest.NewRef(store.URI(), "r1", fmt.Sprint("s", i), 100, nil)
				if err := store.Add(ref, sluice.Reservation{}); err != nil {
					b.Error(err)
				}
				if _, err := q.Put(ctx, sluice.PutRequest{Ref: ref}); err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
	stop(js, q)
	restart := func(b *testing.B) {
		for range b.N {
			js, _, q := start()
			b.StopTimer()
			if n := q.PendingCount(); n != pending {
				b.Fatalf("%d pending", n)
			}
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			b.ReportMetric(float64(m.HeapInuse)/(1<<20), "heap-MiB")
			stop(js, q)
			b.StartTimer()
		}
	}
	b.Run("records", restart)
	// The same as a snapshot.
	js, err := natsjournal.Open(ctx, dir, nil)
	if err != nil {
		b.Fatal(err)
	}
	j, err := js.Journal(ctx, "r1")
	if err != nil {
		b.Fatal(err)
	}
	var all []sluice.Record
	if err := j.Replay(ctx, func(r sluice.Record) error { all = append(all, r); return nil }); err != nil {
		b.Fatal(err)
	}
	b.Run("replay of the journal alone", func(b *testing.B) {
		for range b.N {
			j, err := js.Journal(ctx, "r1")
			if err != nil {
				b.Fatal(err)
			}
			if err := j.Replay(ctx, func(sluice.Record) error { return nil }); err != nil {
				b.Fatal(err)
			}
		}
	})
	j, err = js.Journal(ctx, "r1")
	if err != nil {
		b.Fatal(err)
	}
	if err := j.Compact(ctx, all); err != nil {
		b.Fatal(err)
	}
	if err := js.Close(); err != nil {
		b.Fatal(err)
	}
	b.Run("snapshot", restart)
}
