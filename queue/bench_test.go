package queue

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
)

// blankStore answers everything at once and keeps nothing, so that the benchmarks measure the queue.
type blankStore struct {
	sluice.ClaimStore
	uri string
	h   sluice.Health
}

func (s *blankStore) URI() string                                          { return s.uri }
func (s *blankStore) Samples(context.Context) ([]sluice.SampleInfo, error) { return nil, nil }
func (s *blankStore) Claim(sluice.Ref, string) error                       { return nil }
func (s *blankStore) Unclaim(sluice.Ref, string) error                     { return nil }
func (s *blankStore) MarkDead(sluice.Ref, string, bool) error              { return nil }
func (s *blankStore) Health() sluice.Health                                { return s.h }
func (s *blankStore) OnFreed(func()) func()                                { return func() {} }

func benchQueue(b *testing.B, pending int, next func() sluice.Ref) *Queue {
	caps, _ := sluice.Caps{MaxBytes: 1 << 50}.Resolve()
	q, err := Open(context.Background(), sluice.RunConfig{RunID: "r1", Schema: queuetest.Schema(), Caps: caps}, &blankStore{uri: "mem:blank", h: sluice.Health{Caps: caps}}, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { q.Stop(context.Background()) })
	for range pending {
		if _, err := q.Put(context.Background(), sluice.PutRequest{Ref: next()}); err != nil {
			b.Fatal(err)
		}
	}
	return q
}

// A cycle is put, acquire and ack of one sample; refs are made beforehand.
func BenchmarkCycle(b *testing.B) {
	for _, pending := range []int{100, 1_000_000} {
		b.Run(fmt.Sprintf("pending=%d", pending), func(b *testing.B) {
			n := 0
			make1 := func() sluice.Ref { n++; return queuetest.NewRef("mem:blank", "r1", fmt.Sprint("s", n), 100, nil) }
			q := benchQueue(b, pending, make1)
			refs := make([]sluice.Ref, 0, 1000) // few, so that they are in the cache, as refs are that were just made
			ctx := context.Background()
			settle := sluice.SettleRequest{Consumer: alice, Settlements: make([]sluice.Settlement, 1)}
			runtime.GC()
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			var used, took time.Duration
			var mallocs uint64
			for left := b.N; left > 0; left -= len(refs) {
				refs = refs[:0]
				for range min(left, cap(refs)) {
					refs = append(refs, make1())
				}
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				start, cpu := time.Now(), cpuTime()
				for _, ref := range refs {
					if _, err := q.Put(ctx, sluice.PutRequest{Ref: ref}); err != nil {
						b.Fatal(err)
					}
					d, err := q.Acquire(ctx, sluice.AcquireRequest{Consumer: alice})
					if err != nil || len(d.Leases) != 1 {
						b.Fatal(d, err)
					}
					settle.Settlements[0] = sluice.Settlement{Lease: d.Leases[0].ID, Verdict: sluice.Ack}
					if _, err := q.Settle(ctx, settle); err != nil {
						b.Fatal(err)
					}
				}
				used += cpuTime() - cpu
				took += time.Since(start)
				runtime.ReadMemStats(&after)
				mallocs += after.Mallocs - before.Mallocs
			}
			n64 := float64(b.N)
			b.ReportMetric(float64(took.Nanoseconds())/n64, "ns/op")
			b.ReportMetric(float64(used.Nanoseconds())/n64, "cpu-ns/op")
			b.ReportMetric(float64(mallocs)/n64, "mallocs/op")
		})
	}
}

// Batches of 256: put one by one, acquired and settled at once.
func BenchmarkSettleBatch(b *testing.B) {
	n := 0
	make1 := func() sluice.Ref { n++; return queuetest.NewRef("mem:blank", "r1", fmt.Sprint("s", n), 100, nil) }
	q := benchQueue(b, 0, make1)
	ctx := context.Background()
	const size = 256
	settle := sluice.SettleRequest{Consumer: alice, Settlements: make([]sluice.Settlement, size)}
	b.ReportAllocs()
	for range b.N {
		b.StopTimer()
		for range size {
			if _, err := q.Put(ctx, sluice.PutRequest{Ref: make1()}); err != nil {
				b.Fatal(err)
			}
		}
		d, err := q.Acquire(ctx, sluice.AcquireRequest{Consumer: alice, Max: size})
		if err != nil || len(d.Leases) != size {
			b.Fatal(err)
		}
		for i := range d.Leases {
			settle.Settlements[i] = sluice.Settlement{Lease: d.Leases[i].ID, Verdict: sluice.Ack}
		}
		b.StartTimer()
		if _, err := q.Settle(ctx, settle); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*size), "ns/settlement")
}

// The time from the call of put to the return of the acquire that waited for it.
func BenchmarkPutToWaiter(b *testing.B) {
	n := 0
	make1 := func() sluice.Ref { n++; return queuetest.NewRef("mem:blank", "r1", fmt.Sprint("s", n), 100, nil) }
	q := benchQueue(b, 0, make1)
	ctx := context.Background()
	got := make(chan time.Time)
	go func() {
		for {
			d, err := q.Acquire(ctx, sluice.AcquireRequest{Consumer: alice, Wait: -1})
			now := time.Now()
			if err != nil || d.End {
				close(got)
				return
			}
			q.Settle(ctx, sluice.SettleRequest{Consumer: alice, Settlements: []sluice.Settlement{{Lease: d.Leases[0].ID, Verdict: sluice.Ack}}})
			got <- now
		}
	}()
	waits := make([]time.Duration, 0, b.N)
	for range b.N {
		ref := make1()
		for q.waitersNow() == 0 {
			runtime.Gosched()
		}
		start := time.Now()
		if _, err := q.Put(ctx, sluice.PutRequest{Ref: ref}); err != nil {
			b.Fatal(err)
		}
		waits = append(waits, (<-got).Sub(start))
	}
	q.Close(ctx, nil)
	<-got
	slices.Sort(waits)
	b.ReportMetric(float64(waits[len(waits)/2].Nanoseconds()), "ns-median")
	b.ReportMetric(float64(waits[len(waits)*99/100].Nanoseconds()), "ns-p99")
}

func (q *Queue) waitersNow() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.waiters
}
