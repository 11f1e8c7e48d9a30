package queue_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue"
	"github.com/sluice-ml/sluice/queue/queuetest"
	"github.com/sluice-ml/sluice/store/memstore"
)

// The queue over a real store: reserve, put, get, release and ack in every order that matters, until nothing is left.
func TestOverMemstore(t *testing.T) {
	ctx := context.Background()
	caps := sluice.Caps{MaxBytes: 1000}
	store, err := memstore.New(&memstore.Options{Caps: caps})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	q, err := queue.Open(ctx, sluice.RunConfig{RunID: "r1", Schema: queuetest.Schema(), Caps: caps}, store, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Stop(ctx)
	const n = 100
	produced := make(chan error, 1)
	go func() {
		produced <- func() error {
			p := sluice.Producer{Name: "p0"}
			for i := range n {
				s := queuetest.NewSample("r1", fmt.Sprint("s", i), 400) // 40 % of the cap: the marks alone would stop it
				room, err := q.Reserve(ctx, sluice.ReserveRequest{Producer: p, Bytes: s.Bytes()})
				if err != nil {
					return err
				}
				ref, err := store.Put(ctx, s, room)
				if err != nil {
					return err
				}
				if st, err := q.Put(ctx, sluice.PutRequest{Ref: ref, Producer: p}); err != nil || st != sluice.Enqueued {
					return fmt.Errorf("put: %v, %w", st, err)
				}
			}
			return q.Report(ctx, sluice.ProducerReport{Producer: p, State: sluice.ProducerDone})
		}()
	}()
	c := sluice.Consumer{Name: "c0"}
	settle := func(l sluice.Lease, v sluice.Verdict) {
		t.Helper()
		res, err := q.Settle(ctx, sluice.SettleRequest{Consumer: c, Settlements: []sluice.Settlement{{Lease: l.ID, Verdict: v}}})
		if err != nil || res[0].Status != sluice.Settled {
			t.Fatal(res, err)
		}
	}
	for acked := 0; ; {
		d, err := q.Acquire(ctx, sluice.AcquireRequest{Consumer: c, Wait: -1})
		if err != nil {
			t.Fatal(err)
		}
		if d.End {
			if acked != n || d.Cause != nil {
				t.Errorf("the end after %d of %d, cause %v", acked, n, d.Cause)
			}
			break
		}
		l := d.Leases[0]
		tensors, err := store.Get(ctx, l.Ref)
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case l.Redelivery == 0 && acked%7 == 3: // failed after release: it must be read again
			if err := tensors.Release(ctx); err != nil {
				t.Fatal(err)
			}
			settle(l, sluice.Fail)
			continue
		case acked%2 == 0: // ack before release, and after it
			settle(l, sluice.Ack)
			if err := tensors.Release(ctx); err != nil {
				t.Fatal(err)
			}
		default:
			if err := tensors.Release(ctx); err != nil {
				t.Fatal(err)
			}
			settle(l, sluice.Ack)
		}
		acked++
	}
	if err := <-produced; err != nil {
		t.Fatal(err)
	}
	if h := store.Health(); h.UsedBytes() != 0 || h.UsedSamples() != 0 {
		t.Errorf("left in the store: %+v", h)
	}
}
