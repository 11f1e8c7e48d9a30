package torture

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue"
	"github.com/sluice-ml/sluice/store/memstore"
)

// flow runs producers and consumers over the store and the queue, in process, and returns what their books prove.
func flow(t *testing.T, wrapStore func(sluice.ClaimStore) sluice.Store, wrapQueue func(sluice.Queue) sluice.Queue) *audit {
	t.Helper()
	schema, err := sluice.SchemaOf(sluice.DFlash)
	if err != nil {
		t.Fatal(err)
	}
	store, err := memstore.New(&memstore.Options{Caps: sluice.Caps{MaxBytes: 64 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	q, err := queue.Open(t.Context(), sluice.RunConfig{RunID: "torture", Schema: schema, Caps: sluice.Caps{MaxBytes: 64 << 20}, VisibilityTimeout: 300 * time.Millisecond, Producers: 2}, store, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := q.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	dir := t.TempDir()
	until := time.Now().Add(1500 * time.Millisecond) // long enough for the samples that the tests want, also where other tests have the cores
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	for i, name := range []string{"producer-0", "producer-1", "consumer-0", "consumer-1"} {
		b, err := openBook(dir, name, 1)
		if err != nil {
			t.Fatal(err)
		}
		w := &worker{runID: "torture", store: wrapStore(store), queue: wrapQueue(q), book: b, name: name, inc: 1, rand: rand.New(rand.NewPCG(1, uint64(i)))}
		g.Go(func() error {
			defer func() { _ = b.close() }()
			if i < 2 {
				return w.produce(ctx, until)
			}
			return w.consume(ctx)
		})
	}
	if err := g.Wait(); err != nil {
		t.Log(err)
	}
	said := testimony{dead: map[string]string{}, taken: map[position]bool{}}
	letters, err := q.DeadLetters(context.WithoutCancel(t.Context()))
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range letters {
		said.dead[l.Ref.SampleID()] = l.Ref.Generation()
	}
	lines, err := readBooks(dir)
	if err != nil {
		t.Fatal(err)
	}
	return examine(lines, said)
}

func asIs(s sluice.ClaimStore) sluice.Store { return s }
func same(q sluice.Queue) sluice.Queue      { return q }

func TestAStreamThatIsWellHasCleanBooks(t *testing.T) {
	t.Parallel()
	a := flow(t, asIs, same)
	if !a.clean() || a.Produced < 10 || a.Produced != a.Acked+a.Dead {
		t.Errorf("%+v\n%v", a, a.findings)
	}
}

// liar is a queue that says "settled" to every fifth ack and forgets it.
type liar struct {
	sluice.Queue
	n *int
}

func (q liar) Settle(ctx context.Context, r sluice.SettleRequest) ([]sluice.SettleResult, error) {
	if *q.n++; *q.n%5 == 0 && r.Settlements[0].Verdict == sluice.Ack {
		return []sluice.SettleResult{{Lease: r.Settlements[0].Lease, Status: sluice.Settled, As: sluice.Ack}}, nil
	}
	return q.Queue.Settle(ctx, r)
}

func TestAQueueThatForgetsAcksIsFoundOut(t *testing.T) {
	t.Parallel()
	a := flow(t, asIs, func(q sluice.Queue) sluice.Queue { return liar{q, new(int)} })
	if a.Forgotten+a.DoubleAcked == 0 {
		t.Errorf("%+v\n%v", a, a.findings)
	}
}

// loser is a queue that says "enqueued" to every fifth put and drops it.
type loser struct {
	sluice.Queue
	n *int
}

func (q loser) Put(ctx context.Context, r sluice.PutRequest) (sluice.PutStatus, error) {
	if *q.n++; *q.n%5 == 0 {
		return sluice.Enqueued, nil
	}
	return q.Queue.Put(ctx, r)
}

func TestAQueueThatLosesRefsIsFoundOut(t *testing.T) {
	t.Parallel()
	a := flow(t, asIs, func(q sluice.Queue) sluice.Queue { return loser{q, new(int)} })
	if a.Lost == 0 {
		t.Errorf("%+v\n%v", a, a.findings)
	}
}

// eager is a queue that frees every fifth sample as soon as it is delivered.
type eager struct {
	sluice.Queue
	store sluice.ClaimStore
	n     *int
}

func (q eager) Acquire(ctx context.Context, r sluice.AcquireRequest) (sluice.Delivery, error) {
	d, err := q.Queue.Acquire(ctx, r)
	for i := range d.Leases {
		if *q.n++; *q.n%5 == 0 {
			if err := q.store.Unclaim(d.Leases[i].Ref, "queue:torture"); err != nil {
				return d, err
			}
		}
	}
	return d, err
}

func TestAStoreThatFreesEarlyIsFoundOut(t *testing.T) {
	t.Parallel()
	var store sluice.ClaimStore
	a := flow(t, func(s sluice.ClaimStore) sluice.Store { store = s; return s }, func(q sluice.Queue) sluice.Queue { return eager{q, store, new(int)} })
	if a.Missing == 0 {
		t.Errorf("%+v\n%v", a, a.findings)
	}
}
