package queue

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
	"pgregory.net/rapid"
)

// what a put came to, without the times and generations in its words.
func outcomeOf(status sluice.PutStatus, err error) string {
	if err != nil {
		return "error " + string(sluice.KindOf(err))
	}
	return string(status)
}

// PutAll comes to what as many puts in a row come to, whatever they are, and leaves the same queue.
func TestPutAllIsPutManyTimes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		together := newFixture(t, func(c *sluice.RunConfig) { c.MinDraftVersion = "2" }, &Options{Journal: new(memJournal)})
		single := newFixture(t, func(c *sluice.RunConfig) { c.MinDraftVersion = "2" }, &Options{Journal: new(memJournal)})
		ctx := context.Background()
		var made [][2]sluice.Ref
		for round := range rapid.IntRange(1, 5).Draw(rt, "rounds") {
			var all, each []sluice.PutRequest
			producer := sluice.Producer{}
			if k := rapid.IntRange(0, 3).Draw(rt, "producer"); k > 0 {
				producer = sluice.Producer{Name: "p", Incarnation: int64(k)}
			}
			for range rapid.IntRange(0, 8).Draw(rt, "puts") {
				id := fmt.Sprint("s", rapid.IntRange(0, 5).Draw(rt, "id"))
				var refs [2]sluice.Ref
				switch kind := rapid.IntRange(0, 9).Draw(rt, "kind"); {
				case kind == 0 && len(made) > 0: // a repetition
					refs = rapid.SampledFrom(made).Draw(rt, "again")
				case kind == 1: // nobody has stored it
					for i, f := range []*fixture{together, single} {
						refs[i] = queuetest.NewRef(f.store.URI(), "r1", id, 100, nil)
					}
				case kind == 2: // of another run
					for i, f := range []*fixture{together, single} {
						refs[i] = queuetest.NewRef(f.store.URI(), "r2", id, 100, nil)
					}
				default:
					draft := func(r *sluice.RefFields) { r.DraftWeightVersion = fmt.Sprint(1 + kind%3) }
					for i, f := range []*fixture{together, single} {
						refs[i] = queuetest.NewRef(f.store.URI(), "r1", id, 100, draft)
						_ = f.store.Add(refs[i], sluice.Reservation{}) // the id may be taken: then the put finds it so
					}
				}
				made = append(made, refs)
				positions := []sluice.Position{{Source: "s", Index: int64(len(made))}}
				all = append(all, sluice.PutRequest{Ref: refs[0], Producer: producer, Positions: positions})
				each = append(each, sluice.PutRequest{Ref: refs[1], Producer: producer, Positions: positions})
			}
			results := together.q.PutAll(ctx, all)
			for i := range each {
				want := outcomeOf(single.q.Put(ctx, each[i]))
				if got := outcomeOf(results[i].Status, results[i].Err); got != want {
					rt.Fatalf("round %d, put %d of %s: %s (%v), one by one it is %s", round, i, each[i].Ref.SampleID(), got, results[i].Err, want)
				}
			}
			// A consumer settles some, so that ids come again.
			n := rapid.IntRange(0, 3).Draw(rt, "acks")
			took := [2]string{}
			for i, f := range []*fixture{together, single} {
				leases := f.acquire(alice, 100)
				slices.SortFunc(leases, func(a, b sluice.Lease) int { return strings.Compare(a.Ref.SampleID(), b.Ref.SampleID()) })
				took[i] = ids(leases)
				n := min(n, len(leases))
				f.settle(alice, sluice.Ack, leases[:n]...)
				f.settle(alice, sluice.Return, leases[n:]...)
			}
			if took[0] != took[1] {
				rt.Fatalf("delivered %s, one by one it is %s", took[0], took[1])
			}
			if rapid.IntRange(0, 9).Draw(rt, "close") == 0 {
				together.q.Close(ctx, nil)
				single.q.Close(ctx, nil)
			}
		}
		x, _ := together.q.Status(ctx)
		y, _ := single.q.Status(ctx)
		if x.Put != y.Put || x.Pending != y.Pending || x.Gated != y.Gated || x.Acked != y.Acked || x.Stale != y.Stale || x.Health != y.Health {
			rt.Fatalf("left %+v, one by one it is %+v", x, y)
		}
		p, _ := together.q.Taken(ctx, "s")
		q, _ := single.q.Taken(ctx, "s")
		if fmt.Sprint(p) != fmt.Sprint(q) {
			rt.Fatalf("taken %v, one by one it is %v", p, q)
		}
	})
}

func (f *fixture) puts(n int) []sluice.PutRequest {
	f.t.Helper()
	puts := make([]sluice.PutRequest, n)
	for i := range puts {
		puts[i].Ref = f.sample(fmt.Sprint("s", f.n), 100)
		f.n++
	}
	return puts
}

func TestPutAllIsOneAppend(t *testing.T) {
	t.Parallel()
	j := new(memJournal)
	f := newFixture(t, nil, &Options{Journal: j})
	f.put(1) // the header of the journal is behind us
	before := j.appends
	for _, r := range f.q.PutAll(context.Background(), f.puts(100)) {
		if r.Err != nil || r.Status != sluice.Enqueued {
			t.Fatal(r)
		}
	}
	if n := j.appends - before; n != 1 {
		t.Errorf("%d appends", n)
	}
	if got := ids(f.acquire(alice, 200)); !strings.HasPrefix(got, "s0 s1 s2 s3 ") || strings.Count(got, " ") != 101 {
		t.Errorf("delivered %s", got)
	}
}

func TestPutAllWithAJournalThatFails(t *testing.T) {
	t.Parallel()
	j := new(memJournal)
	f := newFixture(t, nil, &Options{Journal: j})
	f.put(1)
	puts := f.puts(3)
	j.mu.Lock()
	j.fail = errors.New("the disk is gone")
	j.mu.Unlock()
	for range 2 {
		for _, r := range f.q.PutAll(context.Background(), puts) {
			if !errors.Is(r.Err, sluice.ErrUnavailable) || r.Status != "" {
				t.Errorf("%+v", r)
			}
		}
	}
	j.mu.Lock()
	j.fail = nil
	j.mu.Unlock()
	// The next queue over the journal finds the samples, and the puts may be repeated.
	q := newQueue(t, f.cfg, f.store, &Options{Journal: j})
	for _, r := range q.PutAll(context.Background(), puts) {
		if r.Err != nil || r.Status != sluice.Enqueued {
			t.Errorf("%+v", r)
		}
	}
}

// Batches that overlap, from several callers at once: every sample is put once, and each caller is told so.
func TestBatchesThatOverlap(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil, &Options{Journal: new(memJournal)})
	puts := f.puts(40)
	var wg sync.WaitGroup
	var mu sync.Mutex
	count := map[sluice.PutStatus]int{}
	for w := range 8 {
		wg.Go(func() {
			mine := slices.Clone(puts)
			if w%2 == 1 {
				slices.Reverse(mine)
			}
			for _, r := range f.q.PutAll(context.Background(), mine) {
				mu.Lock()
				count[r.Status]++
				if r.Err != nil {
					t.Error(r.Err)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if count[sluice.Enqueued] != 40 || count[sluice.AlreadyPut] != 7*40 {
		t.Errorf("%v", count)
	}
	if st, _ := f.q.Status(context.Background()); st.Pending != 40 || st.Put != 40 {
		t.Errorf("%+v", st)
	}
}

// What a put is told of the past rests on records that a crash may still take.
func TestPutAllWaitsForWhatItsAnswersRestOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &memJournal{hold: make(chan struct{}, 100)}
		for range 4 { // the header, the first put, its lease, and the lease that is lazy
			j.hold <- struct{}{}
		}
		f := newFixture(t, nil, &Options{Journal: j})
		f.put(1)
		ls := f.acquire(alice, 1)
		f.q.settleJournal()
		for len(j.hold) > 0 {
			<-j.hold
		}
		acked := make(chan struct{})
		go func() { f.settle(alice, sluice.Ack, ls...); close(acked) }()
		synctest.Wait()
		again := make(chan PutResult, 1)
		go func() { again <- f.q.PutAll(bg, []sluice.PutRequest{{Ref: ls[0].Ref}})[0] }()
		synctest.Wait()
		if len(again) > 0 {
			t.Error("answered before the ack was durable")
		}
		close(j.hold)
		if r := <-again; r.Err != nil || r.Status != sluice.WasSettled {
			t.Errorf("%+v", r)
		}
		<-acked
		f.q.Stop(bg)
	})
}

func TestPutAllEndsAWedge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *sluice.RunConfig) { c.Caps, c.VisibilityTimeout = sluice.Caps{MaxBytes: 1000}, time.Hour }, nil)
		puts := f.puts(1)
		f.put(8)
		f.acquire(alice, 8)
		p, c := f.reserve(sluice.Producer{}, 400), f.wait(alice)
		if !errors.Is(<-p, sluice.ErrWedged) || !errors.Is(<-c, sluice.ErrWedged) {
			t.Fatal("not wedged")
		}
		f.q.PutAll(bg, puts)
		if s, _ := f.q.Status(bg); s.Wedged != "" || s.Pending != 1 {
			t.Errorf("after a put, %d pending: %s", s.Pending, s.Wedged)
		}
		f.q.Stop(bg)
	})
}
