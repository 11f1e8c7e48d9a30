// Package demo is the main job of Sluice from end to end, on a real model, in one process: prompts go through a target into a store and a queue, and a consumer
// checks every sample against a forward of its own before it acknowledges it. `sluice demo` is its command line.
package demo

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/prompt"
	"github.com/sluice-ml/sluice/queue"
	"github.com/sluice-ml/sluice/store/dirstore"
	"github.com/sluice-ml/sluice/store/memstore"
	"github.com/sluice-ml/sluice/stream"
	"github.com/sluice-ml/sluice/target/tinyllama"
)

//go:embed prompts.jsonl
var shippedPrompts embed.FS

// Options say what to run. The zero value is the default demo.
type Options struct {
	Algorithm sluice.Algorithm // eagle3 if empty
	Prompts   []string         // JSONL files; those that ship with the project if empty
	Model     string           // a Hugging Face folder with a Llama; the shipped checkpoint if empty
	AuxLayers []int            // layers of the aux states, in "hf" numbering; the model's default if nil
	Store     string           // "mem" (also if empty), or a directory in which the samples shall lie for the time of the demo
	Ranks     int              // data-parallel ranks; 1 if 0. With more than one the run deals out windows
	Batch     int              // samples a rank and step; 4 if 0
	MaxTokens int64            // rows are truncated here; 384 if 0, and never more than the model takes
	MaxBytes  int64            // cap of the store; if 0, 8 MiB or what the windows need

	// Progress is called every Interval while the demo runs, and once at its end.
	Progress func(Snapshot)
	Interval time.Duration // 1 s if 0
}

// Result is what came of it: the object that --json prints.
type Result struct {
	Algorithm      sluice.Algorithm `json:"algorithm"`
	Model          string           `json:"model"`
	Produced       int64            `json:"produced"` // samples whose refs reached the queue
	Consumed       int64            `json:"consumed"` // samples that a consumer checked and stepped on, stand-ins left out
	Acked          int64            `json:"acked"`
	Redelivered    int64            `json:"redelivered"`
	Padded         int64            `json:"padded"` // stand-ins in the last window
	Dead           int64            `json:"dead"`
	Lost           int64            `json:"lost"`    // rows read that were neither acknowledged, dead, nor refused
	Skipped        int64            `json:"skipped"` // lines that made no sample: too short, nothing supervised
	Truncated      int64            `json:"truncated"`
	ResidentBytes  int64            `json:"resident_bytes"` // at the end
	PeakBytes      int64            `json:"peak_bytes"`     // most that was resident and reserved, as far as progress saw
	MaxBytes       int64            `json:"max_bytes"`
	Parity         string           `json:"parity"` // "bit-exact", or what differed
	Bytes          int64            `json:"bytes"`
	Tokens         int64            `json:"tokens"`
	Seconds        float64          `json:"seconds"`
	SamplesPerS    float64          `json:"samples_per_s"`
	TokensPerS     float64          `json:"tokens_per_s"`
	GBPerS         float64          `json:"gb_per_s"`
	ProducerPaused float64          `json:"producer_paused_s"`
	ConsumerWaited float64          `json:"consumer_waited_s"` // by all ranks together
	StepsPerRank   []int64          `json:"steps_per_rank"`
	Bottleneck     string           `json:"bottleneck"`
}

// OK reports whether nothing was lost and parity held: what the exit status of the command says.
func (r *Result) OK() bool {
	if r.Lost != 0 || r.Dead != 0 || r.Parity != bitExact || r.ResidentBytes != 0 || r.Acked != r.Produced {
		return false
	}
	for _, n := range r.StepsPerRank {
		if n != r.StepsPerRank[0] {
			return false
		}
	}
	return true
}

const bitExact = "bit-exact"

// Snapshot is what a progress display needs.
type Snapshot struct {
	Options Options
	Model   sluice.TargetInfo
	Status  sluice.Status
	Elapsed time.Duration
	Tokens  int64 // consumed
	Done    bool
}

const defaultMaxBytes = 8 << 20

func (o Options) withDefaults() (Options, error) {
	if o.Algorithm == "" {
		o.Algorithm = sluice.EAGLE3
	}
	if o.Store == "" {
		o.Store = "mem"
	}
	if o.Interval == 0 {
		o.Interval = time.Second
	}
	for _, n := range []struct {
		flag  string
		value *int
		unset int
	}{{"--ranks", &o.Ranks, 1}, {"--batch", &o.Batch, 4}} {
		if *n.value == 0 {
			*n.value = n.unset
		}
		if *n.value < 1 || *n.value > 1024 {
			return o, &sluice.Error{Kind: sluice.Invalid, Op: "demo", Subject: n.flag, Detail: fmt.Sprintf("is %d, want 1 to 1024", *n.value)}
		}
	}
	if o.MaxTokens == 0 {
		o.MaxTokens = 384
	}
	if o.MaxTokens < 2 {
		return o, &sluice.Error{Kind: sluice.Invalid, Op: "demo", Subject: "--max-tokens", Detail: fmt.Sprintf("is %d, want 2 or more", o.MaxTokens)}
	}
	if o.MaxBytes < 0 {
		return o, &sluice.Error{Kind: sluice.Invalid, Op: "demo", Subject: "--max-bytes", Detail: fmt.Sprintf("is %d, want more than 0", o.MaxBytes)}
	}
	return o, nil
}

// Run runs the demo. An error means that it could not be carried through; whether what was carried through is right, Result.OK says.
func Run(ctx context.Context, o Options) (*Result, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	schema, err := sluice.SchemaOf(o.Algorithm)
	if err != nil {
		return nil, err
	}
	model, err := loadModel(o.Model)
	if err != nil {
		return nil, err
	}
	defer model.Close()
	info := model.Info()
	o.MaxTokens = min(o.MaxTokens, info.MaxTokens)

	rows, err := openPrompts(&o, model, schema)
	if err != nil {
		return nil, err
	}
	defer rows.Close()

	cfg := sluice.RunConfig{RunID: "demo", Schema: schema}
	if o.Ranks > 1 {
		cfg.Windows = &sluice.Windows{Ranks: o.Ranks, PerRank: o.Batch, Prefetch: 1}
	}
	if cfg.LargestSample, err = largestSample(&o, model, schema); err != nil {
		return nil, err
	}
	if o.AuxLayers == nil {
		o.AuxLayers = info.DefaultAuxLayers() // the producer takes them, or has refused a model that is too shallow for them
	}
	if o.MaxBytes == 0 {
		// Room for what the consumers hold and for a producer that is a few samples ahead.
		o.MaxBytes = max(defaultMaxBytes, cfg.LargestSample*int64(2*o.Ranks*o.Batch+4))
	}
	cfg.Caps = sluice.Caps{MaxBytes: o.MaxBytes}

	store, cleanUp, err := openStore(o.Store, cfg.Caps)
	if err != nil {
		return nil, err
	}
	result, err := run(ctx, &o, cfg, model, rows, store)
	if cerr := cleanUp(); err == nil && cerr != nil {
		err = cerr
	}
	return result, err
}

func loadModel(dir string) (*tinyllama.Model, error) {
	if dir == "" {
		return tinyllama.Shipped()
	}
	return tinyllama.Open(dir)
}

func openPrompts(o *Options, model *tinyllama.Model, schema *sluice.Schema) (*prompt.Reader, error) {
	opts := prompt.Options{
		Files: o.Prompts, Tokenizer: model, Vocab: model.Info().VocabSize, MaxTokens: o.MaxTokens, MinTokens: schema.Admission.MinTokens,
		Shuffle: true, Seed: 1,
	}
	if len(o.Prompts) == 0 {
		opts.FS, opts.Files = shippedPrompts, []string{"prompts.jsonl"}
	}
	return prompt.Open(opts)
}

// largestSample is the size of a sample of the longest row.
func largestSample(o *Options, target sluice.Target, schema *sluice.Schema) (int64, error) {
	p, err := stream.NewProducer(stream.ProducerConfig{Target: target, Store: noStore{}, Schema: schema, AuxLayers: o.AuxLayers, RunID: "demo"})
	if err != nil {
		return 0, err
	}
	one := sluice.NewTensor(sluice.Int64, 1, o.MaxTokens)
	for i := range sluice.View[int64](one) {
		sluice.View[int64](one)[i] = 1
	}
	return p.SampleBytes(&sluice.PromptBatch{InputIDs: one, AttentionMask: one, LossMask: one})
}

// noStore is for a producer that only tells sizes.
type noStore struct{ sluice.Store }

func (noStore) URI() string { return "none:" }

// openStore opens the store and returns how to close it and leave nothing behind.
func openStore(where string, caps sluice.Caps) (sluice.ClaimStore, func() error, error) {
	if where == "mem" {
		s, err := memstore.New(&memstore.Options{Caps: caps})
		if err != nil {
			return nil, nil, err
		}
		return s, s.Close, nil
	}
	made := false
	if err := os.Mkdir(where, 0o700); err == nil {
		made = true
	} else if !errors.Is(err, os.ErrExist) {
		return nil, nil, &sluice.Error{Kind: sluice.Denied, Op: "demo: store", Subject: where, Detail: "cannot make the directory", Err: err}
	}
	remove := func(dir string) error {
		err := os.RemoveAll(dir)
		if made {
			err = errors.Join(err, os.Remove(where))
		}
		return err
	}
	parent, err := os.MkdirTemp(where, "sluice-demo-")
	if err != nil {
		if made {
			err = errors.Join(err, os.Remove(where))
		}
		return nil, nil, &sluice.Error{Kind: sluice.Denied, Op: "demo: store", Subject: where, Detail: "cannot write to the directory", Err: err}
	}
	s, err := dirstore.Open(filepath.Join(parent, "store"), &dirstore.Options{Caps: caps})
	if err != nil {
		return nil, nil, errors.Join(err, remove(parent))
	}
	return s, func() error { return errors.Join(s.Close(), remove(parent)) }, nil
}

func run(ctx context.Context, o *Options, cfg sluice.RunConfig, model *tinyllama.Model, rows *prompt.Reader, store sluice.ClaimStore) (*Result, error) {
	q, err := queue.Open(ctx, cfg, store, nil)
	if err != nil {
		return nil, err
	}
	producer, err := stream.NewProducer(stream.ProducerConfig{Target: model, Store: store, Queue: q, Schema: cfg.Schema, AuxLayers: o.AuxLayers, RunID: cfg.RunID})
	if err != nil {
		return nil, errors.Join(err, q.Close(ctx, err))
	}
	books := newBooks()
	pipeline, err := stream.NewPipeline(producer, q, books.source(rows), nil)
	if err != nil {
		return nil, errors.Join(err, q.Close(ctx, err))
	}

	start := time.Now()
	work, stop := context.WithCancel(ctx)
	defer stop()
	var group errgroup.Group
	if err := pipeline.Start(work); err != nil {
		return nil, err
	}
	var tokens atomic.Int64
	checks := make([]*checker, o.Ranks)
	for rank := range checks {
		checks[rank] = &checker{target: model, auxLayers: o.AuxLayers, store: store, schema: cfg.Schema, books: books, tokens: &tokens}
		group.Go(func() error {
			err := consume(work, o, q, cfg.Schema, store, rank, checks[rank])
			if err != nil {
				stop() // a producer must not wait for a consumer that is gone
			}
			return err
		})
	}

	var peak int64
	report := func(done bool) {
		status, err := q.Status(context.WithoutCancel(ctx))
		if err != nil {
			return // closed under us by an error that is reported anyway
		}
		peak = max(peak, status.Health.UsedBytes())
		if o.Progress != nil {
			o.Progress(Snapshot{Options: *o, Model: model.Info(), Status: status, Elapsed: time.Since(start), Tokens: tokens.Load(), Done: done})
		}
	}
	finished := make(chan error, 1)
	go func() { // ends with the consumers, which end with work
		finished <- group.Wait()
	}()
	tick := time.NewTicker(o.Interval)
	defer tick.Stop()
	var consumed error
	for waiting := true; waiting; {
		select {
		case consumed = <-finished:
			waiting = false
		case <-tick.C:
			report(false)
		}
	}
	ended := time.Since(start)
	// The consumers are through, or one has failed. Either way the pipeline has nothing left to do; Stop tells what ended it before.
	produced := pipeline.Stop(context.WithoutCancel(ctx))
	report(true)

	status, err := q.Status(context.WithoutCancel(ctx))
	if err != nil {
		return nil, err
	}
	if err := q.Close(context.WithoutCancel(ctx), nil); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	// What broke the producer reaches the consumers as their cause: say it once.
	if produced != nil && !errors.Is(produced, context.Canceled) {
		return nil, produced
	}
	if consumed != nil {
		return nil, consumed
	}

	skipped := pipeline.Stats().NotAdmitted
	for _, n := range rows.Stats().Skipped {
		skipped += n
	}
	r := &Result{
		Algorithm: o.Algorithm, Model: model.Info().Name,
		Produced: status.Put, Acked: status.Acked, Redelivered: status.Redelivered, Padded: status.Padded, Dead: status.DeadTotal,
		Lost: books.open() - pipeline.Stats().NotAdmitted, Skipped: skipped, Truncated: rows.Stats().Truncated,
		ResidentBytes: store.Health().ResidentBytes, PeakBytes: peak, MaxBytes: o.MaxBytes, Parity: bitExact,
		Bytes: status.BytesAcked, Tokens: tokens.Load(), Seconds: ended.Seconds(),
		ProducerPaused: status.ProducerPaused.Seconds(), ConsumerWaited: status.ConsumerWaited.Seconds(), Bottleneck: status.Bottleneck(),
	}
	if s := ended.Seconds(); s > 0 {
		r.SamplesPerS, r.TokensPerS, r.GBPerS = float64(r.Acked)/s, float64(r.Tokens)/s, float64(r.Bytes)/1e9/s
	}
	for _, c := range checks {
		r.Consumed += c.samples
		r.StepsPerRank = append(r.StepsPerRank, c.steps)
		if r.Parity == bitExact && c.differs != "" {
			r.Parity = c.differs
		}
	}
	if r.Parity == bitExact && books.unknown() > 0 {
		r.Parity = fmt.Sprintf("%d samples are of no prompt that was read", books.unknown())
	}
	return r, nil
}

// consume is a trainer: it pulls batches, checks them, steps, and only then lets the samples go.
func consume(ctx context.Context, o *Options, q sluice.Queue, schema *sluice.Schema, store sluice.Store, rank int, c *checker) error {
	loader, err := stream.NewLoader(stream.LoaderConfig{
		Queue: q, Store: store, Schema: schema, Batch: o.Batch, Ack: stream.AckOnStep,
		Consumer: sluice.Consumer{Name: fmt.Sprintf("trainer-%d", rank), Rank: rank},
	})
	if err != nil {
		return err
	}
	err = func() error {
		for {
			batch, err := loader.Next(ctx)
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			all, err := c.check(ctx, batch)
			if err != nil {
				return err
			}
			if err := loader.Step(ctx); err != nil {
				return err
			}
			c.stepped(all)
		}
	}()
	return errors.Join(err, loader.CloseWithError(context.WithoutCancel(ctx), err))
}
