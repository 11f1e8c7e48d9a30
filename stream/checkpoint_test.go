package stream_test

import (
	"context"
	"errors"
	"io"
	"sync/atomic"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue"
	"github.com/sluice-ml/sluice/store/memstore"
	"github.com/sluice-ml/sluice/stream"
	"github.com/sluice-ml/sluice/target/targettest"
)

// asked counts what a loader asks its queue for.
type asked struct {
	sluice.Queue
	acquires, statuses atomic.Int64
}

func (q *asked) Acquire(ctx context.Context, r sluice.AcquireRequest) (sluice.Delivery, error) {
	q.acquires.Add(1)
	return q.Queue.Acquire(ctx, r)
}

func (q *asked) Status(ctx context.Context) (sluice.Status, error) {
	q.statuses.Add(1)
	return q.Queue.Status(ctx)
}

// A run whose caps were not checked to hold what a checkpoint holds would wedge in the middle of the first one.
func TestAckingAtCheckpointsNeedsARunThatDeclaresThem(t *testing.T) {
	t.Parallel()
	const rows = 3
	for name, c := range map[string]struct {
		ack     stream.AckMode
		steps   int
		refused bool
	}{
		"checkpoints, undeclared": {stream.AckOnCheckpoint, 0, true},
		"checkpoints, declared":   {stream.AckOnCheckpoint, rows, false},
		"steps, undeclared":       {stream.AckOnStep, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			schema, err := sluice.SchemaOf(sluice.EAGLE3)
			if err != nil {
				t.Fatal(err)
			}
			caps := sluice.Caps{MaxBytes: 1 << 20}
			store, err := memstore.New(&memstore.Options{Caps: caps})
			if err != nil {
				t.Fatal(err)
			}
			defer store.Close()
			cfg := sluice.RunConfig{RunID: "r", Schema: schema, Caps: caps, StepsPerCheckpoint: c.steps}
			if c.steps > 0 {
				cfg.LargestSample, cfg.SamplesPerStep = 1000, 1
			}
			q, err := queue.Open(ctx, cfg, store, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer q.Stop(context.Background())
			producer, err := stream.NewProducer(stream.ProducerConfig{Target: targettest.New(targettest.Options{}), Store: store, Queue: q, Schema: schema, RunID: "r"})
			if err != nil {
				t.Fatal(err)
			}
			defer producer.Close()
			pipeline, err := stream.NewPipeline(producer, q, prompts(rows), nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(pipeline.Start(ctx), pipeline.Wait(ctx)); err != nil {
				t.Fatal(err)
			}
			counted := &asked{Queue: q}
			l, err := stream.NewLoader(stream.LoaderConfig{Queue: counted, Store: store, Schema: schema, Ack: c.ack})
			if err != nil {
				t.Fatal(err)
			}
			if n := counted.statuses.Load(); n != 0 {
				t.Errorf("NewLoader asked the queue %d times", n)
			}
			steps := 0
			for ; ; steps++ {
				if _, err = l.Next(ctx); err != nil {
					break
				}
				if err := l.Step(ctx); err != nil {
					t.Error(err)
				}
			}
			pending := 0
			if c.refused {
				const want = `stream: loader "Ack": is "checkpoint", but the run "r" declares no steps a checkpoint; ` +
					`set RunConfig.StepsPerCheckpoint to the steps between two checkpoints (without windows SamplesPerStep too), or let Ack be next or step`
				for range 4 { // it stays so, beyond what was made ahead
					if !errors.Is(err, sluice.ErrInvalid) || err.Error() != want {
						t.Errorf("error %v, want\n%s", err, want)
					}
					_, err = l.Next(ctx)
				}
				if steps != 0 || counted.acquires.Load() != 0 || counted.statuses.Load() != 1 {
					t.Errorf("%d batches, %d acquires and %d calls of Status; want none, none and one", steps, counted.acquires.Load(), counted.statuses.Load())
				}
				pending = rows
			} else {
				if !errors.Is(err, io.EOF) || steps != rows {
					t.Errorf("%d batches and then %v", steps, err)
				}
				if err := l.Checkpoint(ctx); err != nil {
					t.Error(err)
				}
			}
			if err := l.Close(ctx); err != nil {
				t.Error(err)
			}
			st, err := q.Status(ctx)
			if err != nil || st.Pending != pending || st.Outstanding != 0 || st.Delivered != int64(steps) {
				t.Errorf("status %+v, %v", st, err)
			}
		})
	}
}
