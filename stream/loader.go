package stream

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"sync"
	"time"

	"github.com/sluice-ml/sluice"
)

// AckMode says when a loader acknowledges what the trainer consumed. A sample is freed by its acknowledgement; what was not acknowledged comes again.
type AckMode string

// The modes.
const (
	// AckOnNext acknowledges a batch when the next one is pulled, by ConsumeNow, and at a regular Close. (Upstream's.)
	AckOnNext AckMode = "next"
	// AckOnStep acknowledges at Step all batches that were pulled since the last one: for gradient accumulation.
	AckOnStep AckMode = "step"
	// AckOnCheckpoint acknowledges at Checkpoint all batches that were pulled since the last one, so that a trainer that goes back to its checkpoint loses nothing. The
	// run must declare its steps a checkpoint ([sluice.RunConfig].StepsPerCheckpoint), since the samples stay for so long and its caps must hold them; a loader over a run that
	// declares none is refused at its first Next.
	AckOnCheckpoint AckMode = "checkpoint"
)

// LoaderConfig says where batches come from and how they are made.
type LoaderConfig struct {
	Queue    sluice.Queue    // required
	Store    sluice.Store    // required: the one that the refs name
	Schema   *sluice.Schema  // required: every ref is checked against it
	Consumer sluice.Consumer // who acquires; a random name if empty

	// Batch is how many samples make a batch; 1 if 0. A cap that cannot hold so many makes batches small and slow: let the run declare SamplesPerStep and
	// StepsPerCheckpoint, and it is refused instead. The last one may have fewer, and so may one that would otherwise reach into the next window (in a run
	// with windows, let it divide the samples a rank and step) or beyond a change of the target's weights.
	Batch   int
	Collate Collator // PadTo(1) if nil; a schema that it can't join is refused by NewLoader
	// FinalNorm norms last hidden states that the schema wants post-norm, of samples that say that theirs are pre-norm. Without it such samples are refused.
	FinalNorm *FinalNorm
	// Prefetch is how many batches are made ahead of the one that the trainer has; 1 if 0, none if negative. In a run with windows, let it be no more than the
	// windows that the run opens ahead hold; a larger one only waits.
	Prefetch int
	// Ack is AckOnNext if empty. AckOnCheckpoint needs a run that declares StepsPerCheckpoint: the first Next asks the queue's Status for it before anything is leased, and without it
	// that Next and all later ones return ErrInvalid.
	Ack AckMode

	// RenewEvery is how often leases are renewed; a third of their time if 0.
	RenewEvery time.Duration
	// MaxIdle is how long after the trainer's last call leases are still renewed; 30 minutes if 0. A trainer that hangs, say in a collective,
	// does not hold its samples for ever. A call of any method, Touch among them, counts.
	MaxIdle time.Duration
	// Patience is how long an unavailable queue or store is asked again before Next returns the error; 10 minutes if 0.
	Patience time.Duration

	// Skip says whether a sample that could not be made part of a batch is passed over (its lease failed, counted and reported) or its error is
	// returned by Next. By default ErrCorrupt and ErrNotFound are passed over. In a run with windows the queue gives the rank another sample
	// for the same place, so that ranks stay in step.
	Skip func(ref sluice.Ref, err error) bool
	// MaxSkips is how many samples in a row may be passed over before the last one's error is returned after all; 100 if 0.
	MaxSkips int

	OnEvent func(Event)  // slog.Default at Warn if nil; it runs in the loader's goroutines and must not call the loader
	Clock   sluice.Clock // SystemClock if nil
}

// Loader makes batches of the samples that a queue leases to it. (Upstream's FeatureDataLoader.)
//
// Its methods may be called from any goroutine, one at a time: another call waits. Two goroutines of its own, which start with the first Next and end with Close, fetch ahead and
// renew leases. Samples that can't be read, are corrupt or break the schema end as failed leases (for good where no try can succeed), never as data.
//
// A batch never mixes fingerprints of target or tokenizer, nor attributes that the schema names. From one batch to the next they may change together with the target_model_version,
// as they do when the target's weights are synced anew; a sample that says otherwise under the version of the one before is refused. In a run with windows the
// change must fall between two batches of every rank: within one the later sample is refused, since a rank that made two batches of one would be out of step.
type Loader struct {
	cfg    LoaderConfig
	norm   *rmsNorm
	clock  sluice.Clock
	ctx    context.Context // of the goroutines; ends with Close
	cancel context.CancelCauseFunc

	call    chan struct{} // held by the method that runs
	permits chan struct{} // one for each batch that may be made
	ready   chan made
	wake    chan struct{} // tells the renewer that there is something to do
	work    sync.WaitGroup

	// Of the method that runs.
	started bool
	owed    bool     // a permit was given for a batch that was not received yet
	current *Batch   // whose memory the trainer may use
	open    []*Batch // pulled and not settled, oldest first
	done    bool     // Close is through
	cause   error    // what CloseWithError was first called with

	// Of the fetcher; Close takes over when that has ended.
	parts []*piece // samples read but not in a batch yet
	id    identity
	kinds int  // times that id changed
	ackOK bool // the run declares what Ack needs
	skips int
	// Places of windows whose samples were passed over: the queue fills each again, ahead of all later windows. In a group it does when all members have passed over it.
	owing map[place]bool

	mu       sync.Mutex // guards what follows
	held     map[sluice.LeaseID]*hold
	acquired int64
	life     time.Duration // shortest time that a lease was given
	lastCall time.Time
	calling  int
	waiting  bool               // Next waits, and no batch is ready
	recall   context.CancelFunc // ends the acquire that is out: what it says of waiting is no longer so
	moves    int64              // times that leases ended: an end that was seen before may be none since
	closing  bool
	fatal    error // why nothing more is acquired: a newer incarnation took over, or a callback panicked
	stats    LoaderStats
}

// hold is a lease that is not settled.
type hold struct {
	until time.Time // by our clock; zero if it does not run out
	life  time.Duration
	seq   int64 // in the order in which they were acquired
	lost  bool
}

// piece is a leased sample.
type piece struct {
	lease   sluice.Lease
	sample  Sample
	tensors *sluice.Tensors
	item    *item
	kind    int // of the samples that may be in one batch with it
}

// made is what the fetcher hands over: a batch, an error, or the end.
type made struct {
	batch *Batch
	err   error
	end   bool
	moves int64 // at the end: the Loader's moves before the queue was asked
}

// LoaderStats count since the Loader was made.
type LoaderStats struct {
	Batches          int64
	Samples          int64 // in batches that were handed out, stand-ins left out
	Tokens           int64
	SupervisedTokens int64
	Bytes            int64         // read from the store
	Fetching         time.Duration // spent reading it
	Collating        time.Duration
	Waited           time.Duration // by Next, for a batch to be ready
	Pads             int64         // stand-ins
	Redelivered      int64
	Acked            int64
	Failed           int64 // leases failed, for good or not
	Returned         int64
	Skipped          int64 // samples passed over
	Stale            int64 // settlements that came too late: somebody else has the sample
	Lost             int64 // leases that ran out or were taken over while held
	Dropped          int64 // batches not handed out because a lease of theirs was lost
	Held             int   // leases now
}

// BytesPerSecond is the rate at which the store was read while it was read.
func (s *LoaderStats) BytesPerSecond() float64 {
	if s.Fetching <= 0 {
		return 0
	}
	return float64(s.Bytes) / s.Fetching.Seconds()
}

var errLoaderClosed = &sluice.Error{Kind: sluice.Closed, Op: "stream: loader", Detail: "was closed"}

// NewLoader checks the configuration. It starts nothing and asks the queue for nothing yet. Errors: ErrInvalid names the field; ErrSchema says what Collate can't work on.
func NewLoader(cfg LoaderConfig) (*Loader, error) {
	bad := func(field, format string, args ...any) error {
		return &sluice.Error{Kind: sluice.Invalid, Op: "stream: new loader", Subject: field, Detail: fmt.Sprintf(format, args...)}
	}
	switch {
	case cfg.Queue == nil:
		return nil, bad("Queue", "is nil")
	case cfg.Store == nil:
		return nil, bad("Store", "is nil")
	case cfg.Schema == nil:
		return nil, bad("Schema", "is nil")
	case cfg.Batch < 0:
		return nil, bad("Batch", "is %d, want 0 (the default) or more", cfg.Batch)
	case cfg.MaxSkips < 0:
		return nil, bad("MaxSkips", "is %d, want 0 (the default) or more", cfg.MaxSkips)
	}
	for _, d := range []struct {
		field string
		value time.Duration
	}{{"RenewEvery", cfg.RenewEvery}, {"MaxIdle", cfg.MaxIdle}, {"Patience", cfg.Patience}} {
		if d.value < 0 {
			return nil, bad(d.field, "is %v, want 0 (the default) or more", d.value)
		}
	}
	if cfg.Consumer.Name == "" {
		var bits [8]byte
		rand.Read(bits[:])
		cfg.Consumer.Name = "consumer-" + hex.EncodeToString(bits[:])
	} else if err := sluice.ValidateID(cfg.Consumer.Name); err != nil {
		return nil, bad("Consumer", "%v", err)
	}
	cfg.Batch = max(cfg.Batch, 1)
	if cfg.Collate == nil {
		cfg.Collate = PadTo(1)
	}
	if err := cfg.Collate.check(cfg.Schema, cfg.Batch); err != nil {
		return nil, err
	}
	norm, err := cfg.FinalNorm.prepare("stream: new loader")
	if err != nil {
		return nil, err
	}
	switch {
	case cfg.Prefetch == 0:
		cfg.Prefetch = 1
	case cfg.Prefetch < 0:
		cfg.Prefetch = 0
	}
	switch cfg.Ack {
	case "":
		cfg.Ack = AckOnNext
	case AckOnNext, AckOnStep, AckOnCheckpoint:
	default:
		return nil, bad("Ack", "is %q, want next, step or checkpoint", cfg.Ack)
	}
	if cfg.MaxIdle == 0 {
		cfg.MaxIdle = 30 * time.Minute
	}
	if cfg.Patience == 0 {
		cfg.Patience = 10 * time.Minute
	}
	if cfg.MaxSkips == 0 {
		cfg.MaxSkips = 100
	}
	if cfg.Skip == nil {
		cfg.Skip = func(_ sluice.Ref, err error) bool {
			return errors.Is(err, sluice.ErrCorrupt) || errors.Is(err, sluice.ErrNotFound)
		}
	}
	if cfg.OnEvent == nil {
		cfg.OnEvent = logEvent
	}
	if cfg.Clock == nil {
		cfg.Clock = sluice.SystemClock{}
	}
	l := &Loader{
		cfg: cfg, norm: norm, clock: cfg.Clock,
		call:    make(chan struct{}, 1),
		permits: make(chan struct{}, cfg.Prefetch+1), ready: make(chan made, cfg.Prefetch+1),
		wake: make(chan struct{}, 1),
		held: map[sluice.LeaseID]*hold{}, owing: map[place]bool{},
	}
	l.ctx, l.cancel = context.WithCancelCause(context.Background())
	return l, nil
}

// enter begins a call of the trainer.
func (l *Loader) enter(ctx context.Context) error {
	select {
	case l.call <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	l.mu.Lock()
	l.calling++
	l.lastCall = l.clock.Now()
	l.mu.Unlock()
	poke(l.wake)
	return nil
}

func (l *Loader) leave() {
	l.mu.Lock()
	l.calling--
	l.lastCall = l.clock.Now()
	l.mu.Unlock()
	<-l.call
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Touch is a sign of life of a trainer that does without the loader for long. It never waits.
func (l *Loader) Touch() {
	l.mu.Lock()
	l.lastCall = l.clock.Now()
	l.mu.Unlock()
	poke(l.wake)
}

// Next returns the next batch. In AckOnNext mode it acknowledges the one before. It waits for as long as the context lives; when that ends, its error is returned and nothing is
// lost: the batch that was being made is there for the next call.
//
// io.EOF is the clean end. In the other modes it may come while leases are open: settle them (Step, Checkpoint or Close), and if one was failed, call Next again to get it.
// A stream that was cut off gives the producer's error instead, behind everything that was produced. Other errors: ErrStale when a newer incarnation of the consumer took over;
// ErrWedged when nothing can move; the error of a sample that Skip does not pass over, after which Next may be called again; ErrUnavailable when Patience is through; ErrInvalid for AckOnCheckpoint over
// a run that declares no steps a checkpoint; ErrClosed.
func (l *Loader) Next(ctx context.Context) (*Batch, error) {
	if err := l.enter(ctx); err != nil {
		return nil, err
	}
	defer l.leave()
	if l.isClosing() {
		return nil, errLoaderClosed
	}
	ctx, unbind := l.bind(ctx)
	defer unbind()
	if !l.started {
		l.started = true
		for range l.cfg.Prefetch {
			l.permits <- struct{}{}
		}
		l.work.Go(l.fetch)
		l.work.Go(l.renew)
	}
	l.letGo()
	if l.cfg.Ack == AckOnNext {
		if err := l.ackOpen(ctx); err != nil {
			return nil, err
		}
	}
	start := l.clock.Now()
	defer func() {
		l.mu.Lock()
		l.wait(false)
		l.stats.Waited += l.clock.Now().Sub(start)
		l.mu.Unlock()
	}()
	for {
		if ctx.Err() != nil { // also with batches made ahead: to hand one out, or to drop one that is lost, may take its time while the store is away
			return nil, context.Cause(ctx)
		}
		l.mu.Lock()
		if len(l.ready) == 0 {
			l.wait(true) // before the permit, so that what is asked for it says so at once
		}
		l.mu.Unlock()
		if !l.owed {
			l.permits <- struct{}{}
			l.owed = true
		}
		var m made
		select {
		case m = <-l.ready:
		default:
			select {
			case m = <-l.ready:
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		}
		l.owed = false
		switch {
		case m.batch != nil:
			if !l.stillHeld(m.batch) {
				l.drop(ctx, m.batch)
				continue
			}
			l.handOut(m.batch)
			return m.batch, nil
		case m.end && m.moves != l.moved():
			// It was the end for one that held leases which have ended since, and may have been failed. Only the queue knows whether they or other consumers' come back.
			continue
		}
		return nil, m.err
	}
}

// wait notes whether the trainer waits. An acquire that is out said the opposite: it is given up, and asked again. The caller holds mu.
func (l *Loader) wait(waiting bool) {
	if l.waiting == waiting {
		return
	}
	l.waiting = waiting
	if l.recall != nil {
		l.recall()
	}
}

// All iterates over the batches. An error is the last pair. Leaving the loop early is a regular end: Close (or the next pull) settles
// the last batch as AckMode says. A panic in the loop's body fails it.
func (l *Loader) All(ctx context.Context) iter.Seq2[*Batch, error] {
	return func(yield func(*Batch, error) bool) {
		for {
			b, err := l.Next(ctx)
			if err == io.EOF { //nolint:errorlint // an error that wraps io.EOF is no end
				return
			}
			if err != nil {
				yield(nil, err)
				return
			}
			if !l.body(ctx, b, yield) {
				return
			}
		}
	}
}

// body runs the loop's body. Neither true nor false means that it panicked, or ended its goroutine.
func (l *Loader) body(ctx context.Context, b *Batch, yield func(*Batch, error) bool) (more bool) {
	returned := false
	defer func() {
		if !returned {
			c, cancel := cleanup(ctx)
			defer cancel()
			_ = l.Fail(c, errors.New("the loop's body panicked")) // the panic goes on and says more
		}
	}()
	more = yield(b, nil)
	returned = true
	return more
}

// ConsumeNow gives up the most recent batch's memory at once, and in AckOnNext mode acknowledges it, without pulling another one. It is idempotent. (Upstream's consume_now.)
func (l *Loader) ConsumeNow(ctx context.Context) error {
	return l.do(ctx, func(ctx context.Context) error {
		l.letGo()
		if l.cfg.Ack != AckOnNext {
			return nil
		}
		return l.ackOpen(ctx)
	})
}

// Step says that the trainer's optimizer has made a step with all batches pulled so far. In AckOnStep mode they are acknowledged, and in AckOnNext mode too; in AckOnCheckpoint mode they
// only become safe from a later failure.
func (l *Loader) Step(ctx context.Context) error {
	return l.do(ctx, func(ctx context.Context) error {
		l.letGo()
		if l.cfg.Ack != AckOnCheckpoint {
			return l.ackOpen(ctx)
		}
		for _, b := range l.open {
			b.stepped = true
		}
		return nil
	})
}

// Checkpoint says that the trainer's state, with all batches pulled so far in it, is safe. It acknowledges them in every mode.
func (l *Loader) Checkpoint(ctx context.Context) error {
	return l.do(ctx, func(ctx context.Context) error {
		l.letGo()
		return l.ackOpen(ctx)
	})
}

// Fail fails the batches that were pulled and not settled, those of the steps that are through left out: their samples come again, behind the others, until their budget
// is used up.
func (l *Loader) Fail(ctx context.Context, cause error) error {
	return l.do(ctx, func(ctx context.Context) error {
		l.letGo()
		return l.failOpen(ctx, cause)
	})
}

func (l *Loader) do(ctx context.Context, f func(ctx context.Context) error) error {
	if err := l.enter(ctx); err != nil {
		return err
	}
	defer l.leave()
	if l.isClosing() {
		return errLoaderClosed
	}
	ctx, unbind := l.bind(ctx)
	defer unbind()
	return f(ctx)
}

// bind gives a call a context that ends with Close, too, so that Close need not wait for one that waits for a queue that is away.
func (l *Loader) bind(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(l.ctx, func() { cancel(errLoaderClosed) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// emit hands out an event. A callback that panics ends the stream.
func (l *Loader) emit(e Event) {
	err := guard(sluice.Invalid, "stream: loader: OnEvent", func() error {
		l.cfg.OnEvent(e)
		return nil
	})
	if err != nil {
		l.mu.Lock()
		l.fatal = err
		l.mu.Unlock()
	}
}

// Close ends the loader regularly. In AckOnNext mode the last batch is acknowledged. In the other modes what was pulled without a Step or a Checkpoint behind it
// is returned, since it is in no state of the trainer's that counts. Batches made ahead are returned: they cost no budget. Pins and memory go, the goroutines end, and the consumer
// leaves the queue.
//
// It takes 5 seconds at most, whatever the context and Patience allow, so that a trainer can end while the service is away: then it fails with ErrUnavailable. Leases that it could not
// give back run out by themselves, or end with their client's session, and their samples come again. It is idempotent, and after a failure it may be called again, with 5 seconds more. A
// trainer whose last acknowledgement in AckOnNext mode is worth Patience calls ConsumeNow before it.
func (l *Loader) Close(ctx context.Context) error { return l.CloseWithError(ctx, nil) }

// CloseWithError is Close for a trainer that failed: what is not safe by a step is failed with the cause instead of acknowledged. A nil cause is Close. (Upstream acknowledges a batch whose
// loop was left by an exception.)
func (l *Loader) CloseWithError(ctx context.Context, cause error) error {
	l.mu.Lock()
	if !l.closing {
		l.closing, l.cause = true, cause
	}
	l.mu.Unlock()
	l.cancel(errLoaderClosed)
	bounded, cancel := context.WithTimeout(ctx, cleanupTime)
	defer cancel()
	err := l.close(bounded)
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		err = &sluice.Error{Kind: sluice.Unavailable, Op: "stream: loader: close", Detail: fmt.Sprintf("could not give everything back within %v; leases that are left run out by themselves, or end with the session", cleanupTime), Err: err}
	}
	return err
}

func (l *Loader) close(ctx context.Context) error {
	if err := l.enter(ctx); err != nil {
		return err
	}
	defer l.leave()
	if l.done {
		return nil
	}
	ended := make(chan struct{})
	go func() { l.work.Wait(); close(ended) }() // ends when the two goroutines do
	select {
	case <-ended:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	pieces := l.parts
	l.parts = nil
	if l.current != nil {
		l.current.Features = nil
		pieces = append(pieces, l.current.pieces...)
		l.current = nil
	}
	for len(l.ready) > 0 {
		if m := <-l.ready; m.batch != nil {
			pieces = append(pieces, m.batch.pieces...)
		}
	}
	l.release(ctx, pieces)
	if !l.started {
		l.done = true
		return nil
	}
	var err error
	switch {
	case l.cause != nil:
		err = l.failOpen(ctx, l.cause)
	case l.cfg.Ack == AckOnNext:
		err = l.ackOpen(ctx)
	}
	if err == nil {
		err = l.settle(ctx, l.heldIDs(), sluice.Return, "")
	}
	if err == nil {
		l.open = nil
		err = l.retry(ctx, "leave", func() error { return l.cfg.Queue.Leave(ctx, l.cfg.Consumer) })
	}
	if errors.Is(err, sluice.ErrStale) || errors.Is(err, sluice.ErrClosed) {
		err = nil // the successor has the leases, or the queue is no more
	}
	l.done = err == nil
	return err
}

// Stats returns a snapshot.
func (l *Loader) Stats() LoaderStats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stats
	s.Held = len(l.held)
	return s
}

func (l *Loader) isClosing() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closing
}

func (l *Loader) moved() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.moves
}

func (l *Loader) heldCount() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.held)
}

// heldIDs lists the leases in the order in which they were acquired.
func (l *Loader) heldIDs() []sluice.LeaseID {
	l.mu.Lock()
	defer l.mu.Unlock()
	ids := make([]sluice.LeaseID, 0, len(l.held))
	for id := range l.held {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, func(a, b sluice.LeaseID) int { return cmp.Compare(l.held[a].seq, l.held[b].seq) })
	return ids
}

// handOut makes b the trainer's.
func (l *Loader) handOut(b *Batch) {
	l.current, l.open = b, append(l.open, b)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stats.Batches++
	l.stats.Tokens += b.Tokens
	l.stats.SupervisedTokens += b.SupervisedTokens
	for i := range b.Samples {
		if b.Samples[i].Pad {
			l.stats.Pads++
			continue
		}
		l.stats.Samples++
		if b.Samples[i].Redelivery > 0 {
			l.stats.Redelivered++
		}
	}
}

// letGo takes the memory of the current batch back.
func (l *Loader) letGo() {
	if l.current == nil {
		return
	}
	l.current.Features = nil
	l.free(l.current.pieces)
	l.current = nil
}

// free gives up pins and memory. The leases stay.
func (l *Loader) free(pieces []*piece) {
	ctx, cancel := cleanup(l.ctx)
	defer cancel()
	l.release(ctx, pieces)
}

// release is free within the time of ctx: all at once, so that a store that does not answer is waited for once and not once a piece.
func (l *Loader) release(ctx context.Context, pieces []*piece) {
	var all sync.WaitGroup
	for _, p := range pieces {
		if p.tensors == nil {
			continue
		}
		all.Go(func() {
			if err := guard(sluice.Invalid, "stream: loader: release", func() error { return p.tensors.Release(ctx) }); err != nil {
				l.emit(Event{Kind: Unreleased, Op: "release", SampleID: p.lease.Ref.SampleID(), Err: err})
			}
			p.tensors, p.sample.Features = nil, nil
		})
	}
	all.Wait()
}

// stillHeld reports whether no lease of a batch made ahead was lost in the meantime.
func (l *Loader) stillHeld(b *Batch) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.clock.Now()
	for _, p := range b.pieces {
		if h := l.held[p.lease.ID]; h == nil || h.lost || !h.until.IsZero() && !now.Before(h.until) {
			return false
		}
	}
	return true
}

// drop gives back a batch that others may be training on already.
func (l *Loader) drop(ctx context.Context, b *Batch) {
	l.free(b.pieces)
	l.mu.Lock()
	l.stats.Dropped++
	l.mu.Unlock()
	_ = l.settle(ctx, idsOf(b.pieces), sluice.Return, "") // what fails here is returned at Close, or runs out
}

func idsOf(pieces []*piece) []sluice.LeaseID {
	ids := make([]sluice.LeaseID, len(pieces))
	for i, p := range pieces {
		ids[i] = p.lease.ID
	}
	return ids
}

// ackOpen acknowledges all batches that were pulled.
func (l *Loader) ackOpen(ctx context.Context) error {
	return l.settleBatches(ctx, sluice.Ack, "", func(*Batch) bool { return true })
}

func (l *Loader) failOpen(ctx context.Context, cause error) error {
	reason := "failed by the trainer"
	if cause != nil {
		reason = cause.Error()
	}
	return l.settleBatches(ctx, sluice.Fail, reason, func(b *Batch) bool { return !b.stepped })
}

func (l *Loader) settleBatches(ctx context.Context, v sluice.Verdict, reason string, which func(*Batch) bool) error {
	var ids []sluice.LeaseID
	for _, b := range l.open {
		if which(b) {
			ids = append(ids, idsOf(b.pieces)...)
		}
	}
	if err := l.settle(ctx, ids, v, reason); err != nil {
		return err
	}
	l.open = slices.DeleteFunc(l.open, which)
	return nil
}

// settle settles leases, and asks again for as long as the queue is unavailable. That a lease is stale is no error: someone else has the sample.
func (l *Loader) settle(ctx context.Context, ids []sluice.LeaseID, v sluice.Verdict, reason string) error {
	if len(ids) == 0 {
		return nil
	}
	r := sluice.SettleRequest{Consumer: l.cfg.Consumer, RequestID: requestID("settle")}
	reason = limit(reason, 4096)
	for _, id := range ids {
		r.Settlements = append(r.Settlements, sluice.Settlement{Lease: id, Verdict: v, Reason: reason})
	}
	var results []sluice.SettleResult
	err := l.retry(ctx, "settle", func() (err error) {
		results, err = l.cfg.Queue.Settle(ctx, r)
		return err
	})
	if err != nil {
		if errors.Is(err, sluice.ErrStale) {
			l.takenOver(err)
		}
		return err
	}
	stale := 0
	l.mu.Lock()
	l.moves++
	for _, id := range ids {
		delete(l.held, id)
	}
	for _, res := range results {
		became := v
		if res.Status == sluice.AlreadySettled { // by a call that was broken off
			became = res.As
		}
		switch {
		case res.Status == sluice.StaleLease:
			stale++
		case became == sluice.Ack:
			l.stats.Acked++
		case became == sluice.Return:
			l.stats.Returned++
		default:
			l.stats.Failed++
		}
	}
	l.stats.Stale += int64(stale)
	l.mu.Unlock()
	if stale > 0 {
		l.emit(Event{Kind: LeaseLost, Op: "settle", Count: stale})
	}
	return nil
}

func requestID(op string) string {
	var bits [16]byte
	rand.Read(bits[:])
	return op + "-" + hex.EncodeToString(bits[:])
}

// retry repeats f while the other side is unavailable, within Patience.
func (l *Loader) retry(ctx context.Context, op string, f func() error) error {
	begin := l.clock.Now()
	for try := 1; ; try++ {
		err := f()
		if !errors.Is(err, sluice.ErrUnavailable) || ctx.Err() != nil || l.clock.Now().Sub(begin) >= l.cfg.Patience {
			return err
		}
		l.emit(Event{Kind: Retry, Op: op, Attempt: try, Wait: backoff(try), Err: err})
		if !sleep(ctx, l.clock, backoff(try)) {
			return err
		}
	}
}

// takenOver forgets all leases: a newer incarnation of the consumer has them.
func (l *Loader) takenOver(err error) {
	l.mu.Lock()
	n := len(l.held)
	l.stats.Lost += int64(n)
	clear(l.held)
	l.fatal = err
	l.mu.Unlock()
	if n > 0 {
		l.emit(Event{Kind: LeaseLost, Op: "incarnation", Count: n, Err: err})
	}
}
