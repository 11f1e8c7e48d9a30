package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/sluice-ml/sluice"
)

// worker is a producer or a consumer: a process of its own, which may be killed at any instruction.
type worker struct {
	runID string
	store sluice.Store
	queue sluice.Queue
	book  *book
	name  string
	inc   int64
	rand  *rand.Rand
}

// pause is how long a worker waits before it tries again what the service could not do.
const pause = 100 * time.Millisecond

// passing says whether an error is one of those that torture brings about: the service restarts, the disk is full. The call is made again, and so is its intent.
func passing(err error) bool {
	return errors.Is(err, sluice.ErrUnavailable) || errors.Is(err, sluice.ErrNoSpace) || errors.Is(err, sluice.ErrFull) || errors.Is(err, sluice.ErrWedged)
}

// trouble writes down an error that should not be, and returns it.
func (w *worker) trouble(what string, err error) error {
	return errors.Join(err, w.book.write(line{Op: opTrouble, Status: string(sluice.KindOf(err)), Text: what + ": " + err.Error()}))
}

// again repeats a call for as long as its error will pass.
func again[T any](ctx context.Context, call func() (T, error)) (T, error) {
	for {
		v, err := call()
		if err == nil || !passing(err) {
			return v, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return v, context.Cause(ctx)
		}
	}
}

// produce puts samples until the deadline and then reports that it is done. It goes on where a killed predecessor stopped: at the positions that the queue has not taken.
func (w *worker) produce(ctx context.Context, until time.Time) error {
	me := sluice.Producer{Name: w.name, Incarnation: w.inc}
	report := func(state sluice.ProducerState) error {
		_, err := again(ctx, func() (struct{}, error) {
			return struct{}{}, w.queue.Report(ctx, sluice.ProducerReport{Producer: me, State: state})
		})
		return err
	}
	if err := report(sluice.ProducerRunning); err != nil {
		if errors.Is(err, sluice.ErrConflict) { // the predecessor was killed between its last report and its last line
			return w.book.write(line{Op: opDone, Text: "the predecessor was done"})
		}
		return w.trouble("report", err)
	}
	taken, err := again(ctx, func() ([]sluice.Taken, error) { return w.queue.Taken(ctx, w.name) })
	if err != nil {
		return w.trouble("taken", err)
	}
	var known sluice.Taken
	for _, t := range taken {
		if t.Epoch == 0 {
			known = t
		}
	}
	for index := int64(0); time.Now().Before(until); index++ {
		if known.Contains(index) {
			continue
		}
		if err := w.put(ctx, me, index); err != nil {
			return err
		}
	}
	if err := report(sluice.ProducerDone); err != nil {
		return w.trouble("report", err)
	}
	return w.book.write(line{Op: opDone})
}

// put makes one sample and gets it into the queue, whatever it takes. A sample whose fate is unknown, or that went while the service was down and before it was committed, is made
// again under another id: nothing was promised for the first one.
func (w *worker) put(ctx context.Context, me sluice.Producer, index int64) error {
	for try := 0; ; try++ {
		id := fmt.Sprintf("%s-%d-%d-%d", w.name, w.inc, index, try)
		sample := makeSample(w.runID, id)
		room, err := again(ctx, func() (sluice.Reservation, error) {
			return w.queue.Reserve(ctx, sluice.ReserveRequest{Producer: me, Bytes: sample.Bytes(), RequestID: id})
		})
		if err != nil {
			return w.trouble("reserve for "+id, err)
		}
		l := line{Op: opStore, Sample: id, Source: w.name, Index: index}
		ref, err := call(ctx, w, &l, func() (sluice.Ref, string, error) {
			ref, err := w.store.Put(ctx, sample, room)
			l.Generation = ref.Generation()
			return ref, statusOK, err
		})
		if errors.Is(err, sluice.ErrDuplicate) {
			continue
		}
		if err != nil {
			return w.trouble("put "+id, err)
		}
		l.Op = opCommit
		_, err = call(ctx, w, &l, func() (sluice.PutStatus, string, error) {
			status, err := w.queue.Put(ctx, sluice.PutRequest{Ref: ref, Producer: me, Positions: []sluice.Position{{Source: w.name, Index: index}}})
			return status, string(status), err
		})
		if errors.Is(err, sluice.ErrNotFound) {
			continue
		}
		if err != nil {
			return w.trouble("commit "+id, err)
		}
		return nil
	}
}

// call makes a call until it is answered, with an intent and an outcome in the book for every try.
func call[T any](ctx context.Context, w *worker, l *line, f func() (T, string, error)) (T, error) {
	return again(ctx, func() (T, error) {
		var none T
		l.End, l.Status, l.Detail = false, "", ""
		if err := w.book.write(*l); err != nil {
			return none, err
		}
		v, status, err := f()
		l.End, l.Status = true, status
		if err != nil {
			l.Status, l.Detail = string(sluice.KindOf(err)), err.Error()
		}
		return v, errors.Join(err, w.book.write(*l))
	})
}
