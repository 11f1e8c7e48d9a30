// Command stream is the Go program of the README: a target, a store, a queue, a producer in the background and a training loop, in one process.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"syscall"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/prompt"
	"github.com/sluice-ml/sluice/queue"
	"github.com/sluice-ml/sluice/store/memstore"
	"github.com/sluice-ml/sluice/stream"
	"github.com/sluice-ml/sluice/target/tinyllama"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the first ^C ends the loop, a second one the program at once
	if err := run(ctx, "prompts.jsonl"); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, file string) (err error) {
	closing := func(c io.Closer) { err = errors.Join(err, c.Close()) }

	target, err := tinyllama.Shipped() // any sluice.Target
	if err != nil {
		return err
	}
	defer closing(target)
	prompts, err := prompt.Open(prompt.Options{Files: []string{file}, Tokenizer: target, MaxTokens: 384})
	if err != nil {
		return err
	}
	defer closing(prompts)
	schema, err := sluice.SchemaOf(sluice.EAGLE3)
	if err != nil {
		return err
	}

	caps := sluice.Caps{MaxBytes: 64 << 20}
	store, err := memstore.New(&memstore.Options{Caps: caps}) // or dirstore.Open, to share it with other processes
	if err != nil {
		return err
	}
	defer closing(store)
	q, err := queue.Open(ctx, sluice.RunConfig{RunID: "r1", Schema: schema, Caps: caps}, store, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, q.Stop(context.WithoutCancel(ctx))) }()

	producer, err := stream.NewProducer(stream.ProducerConfig{Target: target, Store: store, Queue: q, Schema: schema, RunID: "r1"})
	if err != nil {
		return err
	}
	pipeline, err := stream.NewPipeline(producer, q, prompts, nil)
	if err != nil {
		return err
	}
	if err := pipeline.Start(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pipeline.Stop(context.WithoutCancel(ctx))) }()

	loader, err := stream.NewLoader(stream.LoaderConfig{Queue: q, Store: store, Schema: schema, Batch: 4, Ack: stream.AckOnStep})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, loader.CloseWithError(context.WithoutCancel(ctx), err)) }() // 5 seconds at most
	for batch, err := range loader.All(ctx) {
		if err != nil {
			return err // also a producer's failure: a cut-off epoch never looks complete
		}
		hidden, _ := batch.Feature("aux_hidden_states") // [B,S,K*H]; the batch is ours until Step
		fmt.Printf("%d samples, aux states %v, %d supervised tokens\n", len(batch.Samples), hidden.Spec, batch.SupervisedTokens)
		// forward, backward and the optimizer's step of the draft go here
		if err := loader.Step(ctx); err != nil { // now the samples are acknowledged, and freed
			return err
		}
	}
	return nil
}
