package client

import (
	"errors"
	"testing"

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
			schema, err := sluice.SchemaOf(sluice.EAGLE3)
			if err != nil {
				t.Fatal(err)
			}
			cfg := sluice.RunConfig{RunID: "r1", Schema: schema, Caps: sluice.Caps{MaxBytes: 8 << 10}} // a handful of samples: both sides wait
			at, to := l.run(l.dial(w, nil), cfg), l.run(l.dial(w, nil), cfg)

			const rows = 60
			prompts := stream.FromSeq(func(yield func(*sluice.PromptBatch, error) bool) {
				for i := range int64(rows) {
					ids, mask := []int64{10, 11, 12, 13 + i}, []int64{1, 1, 1, 1}
					n := int64(len(ids))
					if !yield(stream.BatchOf(sluice.TensorOf(sluice.Int64, ids, 1, n), sluice.TensorOf(sluice.Int64, mask, 1, n), sluice.TensorOf(sluice.Int64, mask, 1, n))) {
						return
					}
				}
			})
			producer, err := stream.NewProducer(stream.ProducerConfig{Target: targettest.New(targettest.Options{VocabSize: 128}), Store: at.Store(), Queue: at.Queue(), Schema: schema, RunID: "r1"})
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
				if seen += len(batch.Samples); seen == 20 {
					l.stop()
					l.start()
				}
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
			if len(last) != rows || st.Acked != rows || st.Dead != 0 || st.Health.UsedSamples() != 0 {
				t.Errorf("%d rows came of %d; status %+v", len(last), rows, st)
			}
		})
	}
}
