package client

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/stream"
	"github.com/sluice-ml/sluice/target/targettest"
)

// Producer, pipeline and loader run on a service as they do in one process, also when it restarts under them.
func TestAStreamRunsOnAService(t *testing.T) {
	t.Parallel()
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			l := serve(t, tmpfs(t), nil)
			const rows = 60
			st := l.streams(w, rows, func(seen int) {
				if seen == 20 {
					l.stop()
					l.start()
				}
			})
			if st.Acked != rows || st.Dead != 0 || st.Health.UsedSamples() != 0 {
				t.Errorf("status %+v", st)
			}
		})
	}
}

// A loader gives up what it asked ahead whenever its trainer begins to wait. What it was given in that moment is its own, and nothing comes twice.
func TestAStreamWhoseTrainerWaitsOftenIsNotRedelivered(t *testing.T) {
	t.Parallel()
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			const rows = 240
			pace := rand.New(rand.NewPCG(1, 2))
			st := serve(t, tmpfs(t), nil).streams(w, rows, func(int) {
				time.Sleep(time.Duration(pace.IntN(4000)) * time.Microsecond) // the trainer's step, as long as four samples take
			})
			if st.Acked != rows || st.Redelivered != 0 || st.Returned != 0 {
				t.Errorf("%d acked, %d redelivered, %d returned", st.Acked, st.Redelivered, st.Returned)
			}
		})
	}
}

// streams takes so many rows through a run, calls trained behind each batch, and returns the run's status at the end.
func (l *live) streams(w way, rows int64, trained func(seen int)) sluice.Status {
	t := l.t
	t.Helper()
	schema, err := sluice.SchemaOf(sluice.EAGLE3)
	if err != nil {
		t.Fatal(err)
	}
	cfg := sluice.RunConfig{RunID: "r1", Schema: schema, Caps: sluice.Caps{MaxBytes: 8 << 10}} // a handful of samples: both sides wait
	at, to := l.run(l.dial(w, nil), cfg), l.run(l.dial(w, nil), cfg)

	prompts := stream.FromSeq(func(yield func(*sluice.PromptBatch, error) bool) {
		for i := range rows {
			ids, mask := []int64{10, 11, 12, 13 + i}, []int64{1, 1, 1, 1}
			n := int64(len(ids))
			if !yield(stream.BatchOf(sluice.TensorOf(sluice.Int64, ids, 1, n), sluice.TensorOf(sluice.Int64, mask, 1, n), sluice.TensorOf(sluice.Int64, mask, 1, n))) {
				return
			}
		}
	})
	producer, err := stream.NewProducer(stream.ProducerConfig{Target: targettest.New(targettest.Options{VocabSize: 512}), Store: at.Store(), Queue: at.Queue(), Schema: schema, RunID: "r1"})
	if err != nil {
		t.Fatal(err)
	}
	defer producer.Close()
	pipeline, err := stream.NewPipeline(producer, at.Queue(), prompts, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := pipeline.Start(bg); err != nil {
		t.Fatal(err)
	}
	loader, err := stream.NewLoader(stream.LoaderConfig{Queue: to.Queue(), Store: to.Store(), Schema: schema, Batch: 4, Ack: stream.AckOnStep})
	if err != nil {
		t.Fatal(err)
	}
	last, seen := map[int64]bool{}, 0
	for batch, err := range loader.All(bg) {
		if err != nil {
			t.Fatal(err)
		}
		ids, _ := batch.Feature("input_ids")
		for i := range ids.Shape[0] {
			last[sluice.View[int64](ids)[i*4+2]] = true // shifted by one
		}
		seen += len(batch.Samples)
		trained(seen)
		if err := loader.Step(bg); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(loader.Close(bg), pipeline.Wait(bg)); err != nil {
		t.Fatal(err)
	}
	st, err := to.Queue().Status(bg)
	if err != nil {
		t.Fatal(err)
	}
	if int64(len(last)) != rows {
		t.Errorf("%d rows came of %d", len(last), rows)
	}
	return st
}
