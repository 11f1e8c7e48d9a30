package torture

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluice-ml/sluice"
)

// consume takes samples until the end of the stream. Mostly it acks; now and then it fails a sample, gives it back, keeps it beyond its lease, or condemns it.
func (w *worker) consume(ctx context.Context) error {
	me := sluice.Consumer{Name: w.name, Incarnation: w.inc}
	for n := 0; ; n++ {
		asked := now()
		r := sluice.AcquireRequest{Consumer: me, Max: 1 + w.rand.IntN(4), Wait: 2 * time.Second, RequestID: fmt.Sprintf("%s-%d-%d", w.name, w.inc, n)}
		d, err := again(ctx, func() (sluice.Delivery, error) { return w.queue.Acquire(ctx, r) })
		if err != nil {
			return w.trouble("acquire", err)
		}
		for _, l := range d.Leases {
			if err := w.book.write(line{
				Op: opDeliver, Sample: l.Ref.SampleID(), Generation: l.Ref.Generation(), Lease: l.ID.String(), Redelivery: l.Redelivery, Asked: asked, LeftNanos: int64(l.TimeLeft),
			}); err != nil {
				return err
			}
		}
		for i := range d.Leases {
			if err := w.train(ctx, me, &d.Leases[i], asked); err != nil {
				return err
			}
		}
		if d.End {
			return w.book.write(line{Op: opDone})
		}
	}
}

// train reads a sample, compares it, and settles its lease.
func (w *worker) train(ctx context.Context, me sluice.Consumer, l *sluice.Lease, asked int64) error {
	read := line{Op: opRead, Sample: l.Ref.SampleID(), Generation: l.Ref.Generation(), Lease: l.ID.String(), Status: statusOK}
	tensors, err := again(ctx, func() (*sluice.Tensors, error) { return w.store.Get(ctx, l.Ref) })
	// By the reader's own clock, from before the lease was asked for, with a tenth taken off: what is left now is left for certain.
	read.LeftNanos = asked + int64(l.TimeLeft)*9/10 - now()
	verdict := sluice.Ack
	switch {
	case err != nil && !errors.Is(err, sluice.ErrNotFound) && !errors.Is(err, sluice.ErrCorrupt):
		return w.trouble("get "+read.Sample, err)
	case err != nil:
		read.Status, read.Text, verdict = string(sluice.KindOf(err)), err.Error(), sluice.Fail
	default:
		if d := differs(w.runID, read.Sample, tensors.Features); d != "" {
			read.Status, read.Text, verdict = statusWrong, d, sluice.FailPermanent
		}
	}
	if err := w.book.write(read); err != nil {
		return err
	}
	if tensors != nil {
		if err := tensors.Release(ctx); err != nil && !passing(err) {
			return w.trouble("release "+read.Sample, err)
		}
	}
	if verdict == sluice.Ack {
		switch n := w.rand.IntN(200); {
		case n == 0:
			verdict = sluice.FailPermanent
		case n < 8:
			verdict = sluice.Fail
		case n < 14:
			verdict = sluice.Return
		case n == 14: // train for longer than the lease lives
			select {
			case <-time.After(l.TimeLeft + 200*time.Millisecond):
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
	}
	settle := line{Op: opSettle, Sample: read.Sample, Generation: read.Generation, Lease: read.Lease, Text: string(verdict)}
	_, err = call(ctx, w, &settle, func() (struct{}, string, error) {
		results, err := w.queue.Settle(ctx, sluice.SettleRequest{Consumer: me, Settlements: []sluice.Settlement{{Lease: l.ID, Verdict: verdict, Reason: "torture: " + string(verdict)}}})
		if err != nil {
			return struct{}{}, "", err
		}
		r := results[0]
		settle.Dead = r.Dead
		if r.Status == sluice.AlreadySettled {
			return struct{}{}, string(r.Status) + " as " + string(r.As), nil
		}
		return struct{}{}, string(r.Status), nil
	})
	if err != nil {
		return w.trouble("settle "+read.Sample, err)
	}
	return nil
}
