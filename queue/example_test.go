package queue_test

import (
	"context"
	"fmt"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue"
	"github.com/sluice-ml/sluice/queue/queuetest"
	"github.com/sluice-ml/sluice/store/memstore"
)

// A producer reserves room, puts the sample into the store and its ref into the queue; a consumer acquires it, reads the tensors and acks.
func Example() {
	ctx := context.Background()
	caps := sluice.Caps{MaxBytes: 1 << 20}
	store, err := memstore.New(&memstore.Options{Caps: caps})
	if err != nil {
		panic(err)
	}
	defer store.Close()
	q, err := queue.Open(ctx, sluice.RunConfig{RunID: "r1", Schema: queuetest.Schema(), Caps: caps}, store, nil)
	if err != nil {
		panic(err)
	}
	defer q.Stop(ctx)

	producer := sluice.Producer{Name: "p0"}
	for i := range 2 {
		sample := queuetest.NewSample("r1", fmt.Sprint("s", i), 1000) // what the target computes
		room, err := q.Reserve(ctx, sluice.ReserveRequest{Producer: producer, Bytes: sample.Bytes()})
		if err != nil {
			panic(err)
		}
		ref, err := store.Put(ctx, sample, room)
		if err != nil {
			panic(err)
		}
		status, err := q.Put(ctx, sluice.PutRequest{Ref: ref, Producer: producer})
		if err != nil {
			panic(err)
		}
		fmt.Println("put", ref.SampleID(), status)
	}
	if err := q.Report(ctx, sluice.ProducerReport{Producer: producer, State: sluice.ProducerDone}); err != nil {
		panic(err)
	}

	consumer := sluice.Consumer{Name: "trainer"}
	for {
		d, err := q.Acquire(ctx, sluice.AcquireRequest{Consumer: consumer, Wait: -1})
		if err != nil {
			panic(err)
		}
		if d.End {
			fmt.Println("the end, cause:", d.Cause)
			break
		}
		lease := d.Leases[0]
		tensors, err := store.Get(ctx, lease.Ref)
		if err != nil {
			panic(err)
		}
		x, _ := tensors.Feature("x")
		fmt.Println("train on", lease.Ref.SampleID(), x.Shape)
		if err := tensors.Release(ctx); err != nil {
			panic(err)
		}
		results, err := q.Settle(ctx, sluice.SettleRequest{Consumer: consumer, Settlements: []sluice.Settlement{{Lease: lease.ID, Verdict: sluice.Ack}}})
		if err != nil {
			panic(err)
		}
		fmt.Println(results[0].Status)
	}
	// Output:
	// put s0 enqueued
	// put s1 enqueued
	// train on s0 [1000]
	// settled
	// train on s1 [1000]
	// settled
	// the end, cause: <nil>
}

// Ranks that step together get equal shares of every window; three samples do not fill the second window, so one of it is leased again as a pad.
func Example_windows() {
	ctx := context.Background()
	caps := sluice.Caps{MaxBytes: 1 << 20}
	store := queuetest.NewStore(caps)
	q, err := queue.Open(ctx, sluice.RunConfig{
		RunID: "r1", Schema: queuetest.Schema(), Caps: caps, LargestSample: 1000,
		Windows: &sluice.Windows{Ranks: 2, PerRank: 1},
	}, store, nil)
	if err != nil {
		panic(err)
	}
	defer q.Stop(ctx)
	for i := range 3 {
		ref, err := store.Put(ctx, queuetest.NewSample("r1", fmt.Sprint("s", i), 1000), sluice.Reservation{})
		if err != nil {
			panic(err)
		}
		if _, err := q.Put(ctx, sluice.PutRequest{Ref: ref}); err != nil {
			panic(err)
		}
	}
	if err := q.Close(ctx, nil); err != nil {
		panic(err)
	}
	for range 2 { // steps
		for rank := range 2 {
			c := sluice.Consumer{Name: fmt.Sprint("rank", rank), Rank: rank}
			d, err := q.Acquire(ctx, sluice.AcquireRequest{Consumer: c, Wait: -1})
			if err != nil {
				panic(err)
			}
			l := d.Leases[0]
			fmt.Printf("window %d rank %d: %s pad=%v, %d tokens in the window\n", l.Window.Number, rank, l.Ref.SampleID(), l.Window.Pad, l.Window.Tokens)
			if _, err := q.Settle(ctx, sluice.SettleRequest{Consumer: c, Settlements: []sluice.Settlement{{Lease: l.ID, Verdict: sluice.Ack}}}); err != nil {
				panic(err)
			}
		}
	}
	// Output:
	// window 0 rank 0: s0 pad=false, 20 tokens in the window
	// window 0 rank 1: s1 pad=false, 20 tokens in the window
	// window 1 rank 0: s2 pad=false, 10 tokens in the window
	// window 1 rank 1: s2 pad=true, 10 tokens in the window
}
