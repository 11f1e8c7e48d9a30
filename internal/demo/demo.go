// Package demo is the main job of Sluice from end to end, on a real model, in one process or several: prompts go through a target into a store and a queue, and a consumer
// checks every sample against a forward of its own before it acknowledges it. `sluice demo` is its command line.
package demo

import (
	"context"
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
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
	Store     string           // "mem", or a directory in which the samples shall lie for the time of the demo; if empty, mem, or with Processes one in shared memory
	Ranks     int              // data-parallel ranks, at most 64; 1 if 0. With more than one the run deals out windows
	Batch     int              // samples a rank and step, at most 1024; 4 if 0
	MaxTokens int64            // rows are truncated here; 384 if 0, and never more than the model takes
	MaxBytes  int64            // cap of the store; if 0, 8 MiB or twice what the consumers hold

	// Processes makes the producer and each consumer a process of its own: this binary, started again with the arguments demo and [ChildCommand], at which it must call [Child].
	Processes bool
	// Service implies Processes. Queue and store are those of a service, which the demo starts as a process of its own: this binary with the argument serve.
	Service bool
	// Kill implies Processes. A consumer is killed once in the middle of a batch, and a new one goes on.
	Kill bool

	// Warn is told in a line of what happened on the way and did not end it. It may be called from several goroutines.
	Warn func(string)
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
	Kills          int64            `json:"kills"`  // consumers that the demo killed
	Padded         int64            `json:"padded"` // stand-ins in the last window
	Dead           int64            `json:"dead"`
	Lost           int64            `json:"lost"`    // rows read that were neither acknowledged, dead, nor refused
	Skipped        int64            `json:"skipped"` // lines that made no sample: too short, nothing supervised
	Truncated      int64            `json:"truncated"`
	ResidentBytes  int64            `json:"resident_bytes"` // at the end
	PeakBytes      int64            `json:"peak_bytes"`     // most that was seen resident and reserved
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

// Faults says what is wrong with the result: what the exit status of the command is about. It is empty if nothing was lost and parity held.
func (r *Result) Faults() []string {
	var faults []string
	check := func(ok bool, format string, args ...any) {
		if !ok {
			faults = append(faults, fmt.Sprintf(format, args...))
		}
	}
	check(r.Lost == 0, "%d rows were lost", r.Lost)
	check(r.Dead == 0, "%d samples became dead letters", r.Dead)
	check(r.Parity == bitExact, "parity is broken: %s", r.Parity)
	check(r.ResidentBytes == 0, "%d bytes are left in the store", r.ResidentBytes)
	check(r.Redelivered >= r.Kills, "%d consumers were killed while they held samples, and %d samples came again", r.Kills, r.Redelivered)
	check(r.Acked == r.Produced, "%d samples were produced and %d acknowledged", r.Produced, r.Acked)
	if n := r.StepsPerRank; len(n) > 0 {
		check(slices.Min(n) == slices.Max(n), "ranks made between %d and %d steps (leases ran out: the machine is too slow for so many ranks)", slices.Min(n), slices.Max(n))
	}
	return faults
}

const bitExact = "bit-exact"

// Snapshot is what a progress display needs.
type Snapshot struct {
	Options Options
	Model   sluice.TargetInfo
	Status  sluice.Status
	Elapsed time.Duration
	Tokens  int64   // consumed
	Read    float64 // share of the prompts that was read, 0 to 1
	Done    bool
}

const defaultMaxBytes = 8 << 20

func (o Options) withDefaults() (Options, error) {
	if o.Algorithm == "" {
		o.Algorithm = sluice.EAGLE3
	}
	o.Processes = o.Processes || o.Kill || o.Service
	switch {
	case o.Processes && o.Store == "mem":
		return o, &sluice.Error{Kind: sluice.Invalid, Op: "demo", Subject: "--store", Detail: "is mem, which processes cannot share", Hint: "name a directory, or leave it out"}
	case o.Processes && o.Store == "":
		o.Store = sharedMemory()
	case o.Store == "":
		o.Store = "mem"
	}
	if o.Interval == 0 {
		o.Interval = time.Second
	}
	if o.Warn == nil {
		o.Warn = func(string) {}
	}
	for _, n := range []struct {
		flag        string
		value       *int
		unset, most int
	}{{"--ranks", &o.Ranks, 1, 64}, {"--batch", &o.Batch, 4, 1024}} {
		if *n.value == 0 {
			*n.value = n.unset
		}
		if *n.value < 1 || *n.value > n.most {
			return o, &sluice.Error{Kind: sluice.Invalid, Op: "demo", Subject: n.flag, Detail: fmt.Sprintf("is %d, want 1 to %d", *n.value, n.most)}
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
func Run(ctx context.Context, o Options) (result *Result, err error) {
	if o, err = o.withDefaults(); err != nil {
		return nil, err
	}
	closing := func(c io.Closer) { err = errors.Join(err, c.Close()) }
	schema, err := sluice.SchemaOf(o.Algorithm)
	if err != nil {
		return nil, err
	}
	model, err := loadModel(o.Model)
	if err != nil {
		return nil, err
	}
	defer closing(model)
	info := model.Info()
	o.MaxTokens = min(o.MaxTokens, info.MaxTokens)

	rows, err := openPrompts(&o, model, schema)
	if err != nil {
		return nil, err
	}
	defer closing(rows)

	// A consumer acks at every step, so a cap that cannot hold a step's samples is refused here and not met as a deadlock later.
	cfg := sluice.RunConfig{RunID: runID, Schema: schema, StepsPerCheckpoint: 1, SamplesPerStep: o.Batch}
	if o.Ranks > 1 {
		cfg.Windows = &sluice.Windows{Ranks: o.Ranks, PerRank: o.Batch, Prefetch: 1}
	}
	if cfg.LargestSample, err = largestSample(&o, model, schema); err != nil {
		var e *sluice.Error
		if errors.As(err, &e) && e.Subject == "AuxLayers" {
			e.Subject = "--aux-layers"
		}
		return nil, err
	}
	if o.AuxLayers == nil {
		o.AuxLayers = info.DefaultAuxLayers() // the producer takes them, or has refused a model that is too shallow for them
	}
	if o.MaxBytes == 0 {
		// Room for what the consumers hold and prefetch, and for a producer that is a few samples ahead.
		o.MaxBytes = max(defaultMaxBytes, cfg.LargestSample*int64(2*o.Ranks*o.Batch+4))
	}
	cfg.Caps = sluice.Caps{MaxBytes: o.MaxBytes}

	if o.Service {
		return runService(ctx, &o, cfg, info)
	}
	store, dir, err := openStore(o.Store, cfg.Caps)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, store.Close(), dir.remove()) }()
	if o.Processes {
		return runProcesses(ctx, &o, cfg, info, store, dir)
	}
	return run(ctx, &o, cfg, model, rows, store)
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
	}
	if len(o.Prompts) == 0 {
		opts.FS, opts.Files = shippedPrompts, []string{"prompts.jsonl"}
	}
	return prompt.Open(opts)
}

// largestSample is the size of a sample of the longest row.
func largestSample(o *Options, target sluice.Target, schema *sluice.Schema) (int64, error) {
	p, err := stream.NewProducer(stream.ProducerConfig{Target: target, Store: noStore{}, Schema: schema, AuxLayers: o.AuxLayers, RunID: runID})
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

// openStore opens the store, and the folder that it is in, which is nil if it is in none.
func openStore(where string, caps sluice.Caps) (sluice.ClaimStore, *folder, error) {
	if where == "mem" {
		s, err := memstore.New(&memstore.Options{Caps: caps})
		return s, nil, err
	}
	dir, err := newFolder(where)
	if err != nil {
		return nil, nil, err
	}
	s, err := dirstore.Open(dir.store(), &dirstore.Options{Caps: caps, Logger: quiet()})
	if err != nil {
		return nil, nil, errors.Join(err, dir.remove())
	}
	return s, dir, nil
}

// quiet is a logger that does not write into the display what is as it should be, such as the end of a session that was killed.
func quiet() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
}

// session is a demo that runs.
type session struct {
	o     *Options
	info  sluice.TargetInfo
	store sluice.Store
	queue sluice.Queue
	read  func() prompt.Stats
	books *books
	ranks []*tally

	start   time.Time
	tokens  atomic.Int64 // consumed
	peak    atomic.Int64 // bytes used
	refused int64        // rows that were not admitted
	kills   int64
}

func newSession(o *Options, info sluice.TargetInfo, store sluice.Store, q sluice.Queue) *session {
	s := &session{o: o, info: info, store: store, queue: q, books: newBooks(), start: time.Now()}
	for range o.Ranks {
		s.ranks = append(s.ranks, &tally{})
	}
	return s
}

// look notes how full the store is.
func (s *session) look() {
	for used := s.store.Health().UsedBytes(); ; {
		if peak := s.peak.Load(); used <= peak || s.peak.CompareAndSwap(peak, used) {
			return
		}
	}
}

// row notes a row that was read.
func (s *session) row(row [sha256.Size]byte) {
	s.look()
	s.books.read(row)
}

// stepped notes that a step of the rank was acknowledged.
func (s *session) stepped(rank int, all []seen) {
	t := s.ranks[rank]
	t.steps++
	for _, one := range all {
		t.samples++
		s.tokens.Add(one.Tokens)
		s.books.acked(one.ID, one.Row)
	}
}

func (s *session) event(e stream.Event) {
	if e.Kind != stream.NotAdmitted { // those are counted
		s.o.Warn(e.String())
	}
}

func newProducer(target sluice.Target, store sluice.Store, q sluice.Queue, schema *sluice.Schema, o *Options) (*stream.Producer, error) {
	return stream.NewProducer(stream.ProducerConfig{Target: target, Store: store, Queue: q, Schema: schema, AuxLayers: o.AuxLayers, RunID: runID})
}

func newLoader(store sluice.Store, q sluice.Queue, schema *sluice.Schema, o *Options, rank int, incarnation int64, event func(stream.Event)) (*stream.Loader, error) {
	return stream.NewLoader(stream.LoaderConfig{
		Queue: q, Store: store, Schema: schema, Batch: o.Batch, Ack: stream.AckOnStep, OnEvent: event,
		Consumer: sluice.Consumer{Name: trainer(rank), Rank: rank, Incarnation: incarnation},
	})
}

func trainer(rank int) string { return fmt.Sprintf("trainer-%d", rank) }

const runID = "demo"

func run(ctx context.Context, o *Options, cfg sluice.RunConfig, model *tinyllama.Model, rows *prompt.Reader, store sluice.ClaimStore) (result *Result, err error) {
	q, err := queue.Open(ctx, cfg, store, nil)
	if err != nil {
		return nil, err
	}
	s := newSession(o, model.Info(), store, q)
	s.read = rows.Stats
	lasting := context.WithoutCancel(ctx) // an interrupt must not keep anything from being given back
	defer func() { err = errors.Join(err, q.Stop(lasting)) }()
	producer, err := newProducer(model, store, s.queue, cfg.Schema, o)
	if err != nil {
		return nil, err
	}
	source := noting(rows, func(_ context.Context, row [sha256.Size]byte) error { s.row(row); return nil })
	pipeline, err := stream.NewPipeline(producer, s.queue, source, &stream.PipelineOptions{OnEvent: s.event})
	if err != nil {
		return nil, err
	}

	loaders := make([]*stream.Loader, o.Ranks)
	for rank := range loaders {
		if loaders[rank], err = newLoader(store, s.queue, cfg.Schema, o, rank, 0, s.event); err != nil {
			return nil, err
		}
	}

	work, stop := context.WithCancel(ctx)
	defer stop()
	if err := pipeline.Start(work); err != nil {
		return nil, err
	}
	var consumers errgroup.Group // they end when the stream does, or with work
	for rank, loader := range loaders {
		c := &checker{target: model, auxLayers: o.AuxLayers, store: store, schema: cfg.Schema}
		consumers.Go(func() error {
			err := consume(work, loader, c, nil, func(_ context.Context, all []seen) error { s.stepped(rank, all); return nil })
			s.ranks[rank].differs = c.differs
			if err != nil {
				stop() // neither the producer nor another rank must wait for one that is gone
			}
			return err
		})
	}
	consumed := s.watch(lasting, consumers.Wait)
	seconds := time.Since(s.start).Seconds()
	// The consumers are through, or one has failed. Either way the pipeline has nothing left to do; Stop tells what had ended it.
	produced := pipeline.Stop(lasting)
	s.refused = pipeline.Stats().NotAdmitted
	return s.finish(ctx, produced, consumed, seconds)
}

// finish says what came of it when producer and consumers have ended.
func (s *session) finish(ctx context.Context, produced, consumed error, seconds float64) (*Result, error) {
	lasting := context.WithoutCancel(ctx)
	if err := s.report(lasting, true); err != nil {
		return nil, err
	}
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case produced != nil && !errors.Is(produced, context.Canceled):
		return nil, produced // it reached the consumers as their cause: say it once
	case consumed != nil:
		return nil, consumed
	}
	return s.result(lasting, seconds)
}

// watch reports until the consumers are through and returns what they returned.
func (s *session) watch(ctx context.Context, wait func() error) error {
	through := make(chan error, 1)
	go func() { through <- wait() }() // ends with the consumers
	tick := time.NewTicker(s.o.Interval)
	defer tick.Stop()
	for {
		select {
		case err := <-through:
			return err
		case <-tick.C:
			if err := s.report(ctx, false); err != nil {
				return errors.Join(err, <-through)
			}
		}
	}
}

func (s *session) report(ctx context.Context, done bool) error {
	status, err := s.queue.Status(ctx)
	if err != nil {
		return err
	}
	s.look()
	if s.o.Progress != nil {
		read := s.read()
		s.o.Progress(Snapshot{
			Options: *s.o, Model: s.info, Status: status, Elapsed: time.Since(s.start), Tokens: s.tokens.Load(), Done: done,
			Read: float64(read.Bytes) / float64(max(read.EpochBytes, 1)),
		})
	}
	return nil
}

func (s *session) result(ctx context.Context, seconds float64) (*Result, error) {
	status, err := s.queue.Status(ctx)
	if err != nil {
		return nil, err
	}
	read := s.read()
	r := &Result{
		Algorithm: s.o.Algorithm, Model: s.info.Name,
		Produced: status.Put, Acked: status.Acked, Redelivered: status.Redelivered, Kills: s.kills, Padded: status.Padded, Dead: status.DeadTotal,
		Lost: s.books.open() - s.refused - status.DeadTotal, Skipped: s.refused, Truncated: read.Truncated,
		ResidentBytes: s.store.Health().ResidentBytes, PeakBytes: s.peak.Load(), MaxBytes: s.o.MaxBytes, Parity: bitExact,
		Bytes: status.BytesAcked, Tokens: s.tokens.Load(), Seconds: seconds,
		ProducerPaused: status.ProducerPaused.Seconds(), ConsumerWaited: status.ConsumerWaited.Seconds(), Bottleneck: status.Bottleneck(),
	}
	for _, n := range read.Skipped {
		r.Skipped += n
	}
	if seconds > 0 {
		r.SamplesPerS, r.TokensPerS, r.GBPerS = float64(r.Acked)/seconds, float64(r.Tokens)/seconds, float64(r.Bytes)/1e9/seconds
	}
	for _, t := range s.ranks {
		r.Consumed += t.samples
		r.StepsPerRank = append(r.StepsPerRank, t.steps)
		if r.Parity == bitExact && t.differs != "" {
			r.Parity = t.differs
		}
	}
	if n := s.books.unknown(); r.Parity == bitExact && n > 0 {
		r.Parity = fmt.Sprintf("%d samples are of no prompt that was read", n)
	}
	return r, nil
}

// consume is a trainer: it pulls batches, checks them, steps, and only then lets the samples go. It calls checked, if that is not nil, before it steps, and stepped afterwards.
func consume(ctx context.Context, loader *stream.Loader, c *checker, checked func(context.Context) error, stepped func(context.Context, []seen) error) error {
	err := func() error {
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
			if checked != nil {
				if err := checked(ctx); err != nil {
					return err
				}
			}
			if err := loader.Step(ctx); err != nil {
				return err
			}
			if err := stepped(ctx, all); err != nil {
				return err
			}
		}
	}()
	return errors.Join(err, loader.CloseWithError(context.WithoutCancel(ctx), err))
}
