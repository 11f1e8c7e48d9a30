package stream_test

import (
	"context"
	"fmt"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue"
	"github.com/sluice-ml/sluice/store/memstore"
	"github.com/sluice-ml/sluice/stream"
	"github.com/sluice-ml/sluice/target/targettest"
)

// newRun opens a run in this process: a store in memory and a queue without a journal.
func newRun(schema *sluice.Schema) (*memstore.Store, *queue.Queue, error) {
	caps := sluice.Caps{MaxBytes: 64 << 20}
	store, err := memstore.New(&memstore.Options{Caps: caps})
	if err != nil {
		return nil, nil, err
	}
	q, err := queue.Open(context.Background(), sluice.RunConfig{RunID: "demo", Schema: schema, Caps: caps}, store, nil)
	if err != nil {
		store.Close()
	}
	return store, q, err
}

// row is a batch of one row whose tokens from the given one on supervise the draft.
func row(from int, ids ...int64) (*sluice.PromptBatch, error) {
	attention, loss := make([]int64, len(ids)), make([]int64, len(ids))
	for i := range ids {
		attention[i] = 1
		if i >= from {
			loss[i] = 1
		}
	}
	n := int64(len(ids))
	return stream.BatchOf(sluice.TensorOf(sluice.Int64, ids, 1, n), sluice.TensorOf(sluice.Int64, attention, 1, n), sluice.TensorOf(sluice.Int64, loss, 1, n))
}

func ExampleProducer() {
	schema, _ := sluice.SchemaOf(sluice.EAGLE3)
	store, q, err := newRun(schema)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	defer q.Stop(context.Background())
	producer, err := stream.NewProducer(stream.ProducerConfig{
		Target:   targettest.New(targettest.Options{HiddenSize: 8}),
		Store:    store,
		Queue:    q,
		Schema:   schema,
		RunID:    "demo",
		SampleID: func(n int64) string { return fmt.Sprintf("demo-%d", n) },
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer producer.Close()

	batch, err := row(2, 10, 11, 12, 13)
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := context.Background()
	ref, err := producer.Produce(ctx, batch)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(ref)
	for f := range ref.Features() {
		fmt.Println(f.Name, f.Spec)
	}
	// A ref that goes into no queue must be discarded, or its bytes stay.
	if err := producer.Discard(ctx, ref); err != nil {
		fmt.Println(err)
	}
	fmt.Println(store.Health().ResidentBytes, "bytes left")
	// Output:
	// demo/demo-0 (eagle3, 5 features, 4 tokens, 608 bytes)
	// aux_hidden_states float32[1,4,24]
	// input_ids int64[1,4]
	// attention_mask int64[1,4]
	// loss_mask int64[1,4]
	// last_hidden_states float32[1,4,8]
	// 0 bytes left
}

// prompts is a source of n rows.
func prompts(n int) stream.Source {
	return stream.FromSeq(func(yield func(*sluice.PromptBatch, error) bool) {
		for i := range n {
			ids := []int64{1, 2, 3, 4, 5, 6}
			if !yield(row(1, ids[:3+i%3]...)) {
				return
			}
		}
	})
}

func ExamplePipeline() {
	schema, _ := sluice.SchemaOf(sluice.EAGLE3)
	store, q, err := newRun(schema)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	defer q.Stop(context.Background())
	producer, err := stream.NewProducer(stream.ProducerConfig{Target: targettest.New(targettest.Options{}), Store: store, Queue: q, Schema: schema, RunID: "demo"})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer producer.Close()

	pipeline, err := stream.NewPipeline(producer, q, prompts(3), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := context.Background()
	if err := pipeline.Start(ctx); err != nil {
		fmt.Println(err)
		return
	}
	if err := pipeline.Wait(ctx); err != nil {
		fmt.Println(err)
		return
	}
	status, _ := q.Status(ctx)
	fmt.Println(status.Pending, "samples wait for a trainer; closed:", status.Closed)
	// Output: 3 samples wait for a trainer; closed: true
}

func ExampleLoader() {
	schema, _ := sluice.SchemaOf(sluice.EAGLE3)
	store, q, err := newRun(schema)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()
	defer q.Stop(context.Background())
	producer, err := stream.NewProducer(stream.ProducerConfig{Target: targettest.New(targettest.Options{}), Store: store, Queue: q, Schema: schema, RunID: "demo"})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer producer.Close()
	pipeline, err := stream.NewPipeline(producer, q, prompts(3), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx := context.Background()
	if err := pipeline.Start(ctx); err != nil {
		fmt.Println(err)
		return
	}
	defer pipeline.Stop(ctx)

	loader, err := stream.NewLoader(stream.LoaderConfig{Queue: q, Store: store, Schema: schema, Batch: 2, Collate: stream.PadTo(4)})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer loader.Close(ctx)
	for batch, err := range loader.All(ctx) {
		if err != nil {
			fmt.Println(err) // the producer's error, if the stream was cut off
			return
		}
		ids, _ := batch.Feature("input_ids")
		fmt.Println(len(batch.Samples), "samples,", ids.Spec, "with", batch.SupervisedTokens, "supervised tokens")
	}
	// Output:
	// 2 samples, int64[2,4] with 5 supervised tokens
	// 1 samples, int64[1,8] with 4 supervised tokens
}
