package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/sluice-ml/sluice"
)

// PipelineOptions tune a Pipeline. The zero value is fine.
type PipelineOptions struct {
	// Workers is how many prompts are in work at once; 1 if 0. With more than one the put order is no longer the source's, and unless the target is concurrent only reserving and
	// putting overlap with the forwards.
	Workers int

	// KeepPolling asks a source that has nothing again every PollInterval, until Stop or Drain, so that a dataset may grow. (Upstream's stop_on_exhausted=False.)
	KeepPolling  bool
	PollInterval time.Duration // 100 ms if 0

	// Heartbeat is how often the queue is told that the producer is alive; 15 s if 0.
	Heartbeat time.Duration

	// MaxTargetFaults is how many ErrTargetFault in a row are passed over, with their prompts; the next one ends the pipeline. 0 passes over none.
	MaxTargetFaults int

	// Patience is how long an operation is retried that fails with ErrUnavailable; 10 minutes if 0. One that fails with ErrWedged is retried until Stop.
	Patience time.Duration

	// LeaveOpen says that Stop and a context that ends report nothing to the queue, since a successor of the same name will go on. Without it Stop counts as the end of the stream
	// and a context that ends as its failure.
	LeaveOpen bool

	OnEvent func(Event)  // slog.Default at Warn if nil; it runs in the pipeline's goroutines and must not call Stop or Wait
	Clock   sluice.Clock // SystemClock if nil
}

// Pipeline drives a Producer over a Source in the background and puts the refs into a queue, so that target and trainer work at the same time.
// (Upstream's AsyncFeaturePipeline.)
//
// It is used once: Start, then Wait, Drain or Stop. When the source is exhausted it reports to the queue that this producer is done (it has failed if not one batch was admitted); when it fails, why. What it made
// and could not enqueue it takes out of the store again.
type Pipeline struct {
	producer *Producer
	queue    sluice.Queue
	source   Source
	opts     PipelineOptions
	clock    sluice.Clock

	pulling sync.Mutex // one call of the source at a time

	mu       sync.Mutex // guards what follows
	state    pipelineState
	stopping bool
	draining bool
	over     bool                    // the source is exhausted
	refused  error                   // why the last batch that was not admitted was not
	end      context.CancelCauseFunc // ends everything
	noMore   context.CancelFunc      // ends the pulling of prompts
	done     chan struct{}           // closed when state is ended
	err      error                   // the first one that ended it
	faults   int                     // of the target, in a row
	stats    PipelineStats
}

type pipelineState int

const (
	fresh pipelineState = iota
	running
	ended
)

// PipelineStats count since Start.
type PipelineStats struct {
	Pulled      int64 // batches that the source gave
	Enqueued    int64
	Gated       int64 // dropped by the run's version gates
	NotAdmitted int64 // batches
	FaultPassed int64 // batches whose forward failed and was passed over
	Discarded   int64 // samples given up after a put without an answer or with an error; one whose answer was lost may have reached the queue and been consumed
	Retries     int64
}

var (
	errStopped = errors.New("stopped")
	errOver    = errors.New("the pipeline is over")
)

// NewPipeline checks what it is given and starts nothing.
func NewPipeline(p *Producer, q sluice.Queue, source Source, opts *PipelineOptions) (*Pipeline, error) {
	bad := func(field, format string, args ...any) error {
		return &sluice.Error{Kind: sluice.Invalid, Op: "stream: new pipeline", Subject: field, Detail: fmt.Sprintf(format, args...)}
	}
	switch {
	case p == nil:
		return nil, bad("producer", "is nil")
	case q == nil:
		return nil, bad("queue", "is nil")
	case source == nil:
		return nil, bad("source", "is nil")
	}
	pl := &Pipeline{producer: p, queue: q, source: source, done: make(chan struct{})}
	if opts != nil {
		pl.opts = *opts
	}
	o := &pl.opts
	switch {
	case o.Workers < 0:
		return nil, bad("Workers", "is %d, want 0 (the default) or more", o.Workers)
	case o.MaxTargetFaults < 0:
		return nil, bad("MaxTargetFaults", "is %d, want 0 or more", o.MaxTargetFaults)
	}
	o.Workers = max(o.Workers, 1)
	for _, d := range []struct {
		field string
		value *time.Duration
		unset time.Duration
	}{{"PollInterval", &o.PollInterval, 100 * time.Millisecond}, {"Heartbeat", &o.Heartbeat, 15 * time.Second}, {"Patience", &o.Patience, 10 * time.Minute}} {
		if *d.value < 0 {
			return nil, bad(d.field, "is %v, want 0 (the default) or more", *d.value)
		}
		if *d.value == 0 {
			*d.value = d.unset
		}
	}
	if o.OnEvent == nil {
		o.OnEvent = logEvent
	}
	if o.Clock == nil {
		o.Clock = sluice.SystemClock{}
	}
	pl.clock = o.Clock
	p.join(q)
	return pl, nil
}

// Start begins to work in the background, until the source is exhausted, Stop or Drain is called, an error occurs, or ctx ends. While it works, Start does nothing more. Afterwards, and after
// a Stop that came first, it is refused with ErrConflict: a queue that was told the end can't be reopened, so make a new Pipeline.
func (p *Pipeline) Start(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.state == running:
		return nil
	case p.state == ended && p.end == nil:
		return &sluice.Error{Kind: sluice.Conflict, Op: "stream: pipeline: start", Detail: "it was stopped before it was started", Hint: "make a new Pipeline"}
	case p.state == ended:
		return &sluice.Error{Kind: sluice.Conflict, Op: "stream: pipeline: start", Detail: "it has run already and is used once", Hint: "make a new Pipeline, and a new run if its queue is closed", Err: p.err}
	}
	all, end := context.WithCancelCause(ctx)
	pull, noMore := context.WithCancel(all)
	p.state, p.end, p.noMore = running, end, noMore
	go p.run(ctx, all, pull) // ends p.done; Stop, Drain and Wait wait for it
	return nil
}

// run is the life of a pipeline. outer is the caller's context, all ends with Stop too, and pull also with Drain.
func (p *Pipeline) run(outer, all, pull context.Context) {
	defer func() {
		p.mu.Lock()
		p.state = ended
		p.mu.Unlock()
		close(p.done)
	}()
	defer p.noMore()
	defer p.end(errOver)
	err := p.report(all, sluice.ProducerReport{Producer: p.producer.Session(), State: sluice.ProducerRunning}, true)
	if err != nil {
		if all.Err() == nil {
			p.fail(err)
		}
	} else {
		var beats, workers sync.WaitGroup
		beating, stopBeating := context.WithCancel(all)
		beats.Go(func() { p.watch("report", func() { p.heartbeat(beating) }) })
		for range p.opts.Workers {
			workers.Go(func() { p.watch("work", func() { p.work(all, pull) }) })
		}
		workers.Wait()
		stopBeating()
		beats.Wait()
	}
	if c, ok := p.source.(io.Closer); ok {
		var closing sync.WaitGroup // in a goroutine of its own, since this one has more to do
		closing.Go(func() {
			p.watch("close source", func() {
				if err := guard(sluice.Invalid, "stream: pipeline: close source", c.Close); err != nil {
					p.fail(err)
				}
			})
		})
		closing.Wait()
	}
	p.finish(outer, all)
}

// watch calls f, which calls code that is not ours, at the bottom of a goroutine. If that code ends the goroutine, which nothing can prevent, the pipeline has failed: otherwise it would seem
// that there were no more prompts.
func (p *Pipeline) watch(what string, f func()) {
	returned := false
	defer func() {
		if !returned {
			p.fail(&sluice.Error{Kind: sluice.Invalid, Op: "stream: pipeline: " + what, Detail: "the goroutine was ended by what it called (runtime.Goexit)"})
		}
	}()
	f()
	returned = true
}

// finish tells the queue how it ended. While nothing has ended the pipeline but its source it asks for as long as Patience lasts, like any other call; then, and behind an error or a
// stop, only for as long as clean-up may take.
func (p *Pipeline) finish(outer, all context.Context) {
	p.mu.Lock()
	if p.err == nil && outer.Err() != nil && !p.stopping && !p.over {
		p.err = context.Cause(outer)
	}
	if s := &p.stats; p.err == nil && p.over && s.Enqueued == 0 && s.NotAdmitted > 0 && s.NotAdmitted == s.Pulled {
		// An epoch of nothing is a mistake, of the masks usually, that would otherwise look like a training run that is through.
		p.err = &sluice.Error{Kind: sluice.Invalid, Op: "stream: pipeline", Detail: fmt.Sprintf("the source is exhausted and not one of its %d batches was admitted", s.Pulled), Err: p.refused}
	}
	err, cut := p.err, !p.over && !p.draining
	p.mu.Unlock()
	if p.opts.LeaveOpen && cut && (err == nil || outer.Err() != nil) || errors.Is(err, sluice.ErrStale) {
		return // a successor speaks for this name
	}
	r := sluice.ProducerReport{Producer: p.producer.Session(), State: sluice.ProducerDone}
	if err != nil {
		r.State, r.Cause = sluice.ProducerFailed, limit(err.Error(), 4096)
	}
	rerr := all.Err()
	if rerr == nil {
		rerr = p.report(all, r, true)
	}
	if all.Err() != nil && rerr != nil {
		ctx, cancel := cleanup(outer)
		defer cancel()
		rerr = p.report(ctx, r, true)
	}
	if rerr != nil && !errors.Is(rerr, sluice.ErrClosed) && err == nil {
		p.fail(rerr)
	}
}

// report tells the queue, and asks again while it is unavailable and insist says so.
func (p *Pipeline) report(ctx context.Context, r sluice.ProducerReport, insist bool) error {
	begin := p.clock.Now()
	for try := 1; ; try++ {
		err := guard(sluice.Invalid, "stream: pipeline: report", func() error { return p.queue.Report(ctx, r) })
		if err == nil {
			return nil
		}
		p.emit(Event{Kind: Heartbeat, Op: string(r.State), Attempt: try, Err: err})
		if !insist || !errors.Is(err, sluice.ErrUnavailable) || p.clock.Now().Sub(begin) >= p.opts.Patience || !sleep(ctx, p.clock, backoff(try)) {
			return err
		}
	}
}

// heartbeat ends with ctx, or when a newer incarnation has taken the name.
func (p *Pipeline) heartbeat(ctx context.Context) {
	for sleep(ctx, p.clock, p.opts.Heartbeat) {
		err := p.report(ctx, sluice.ProducerReport{Producer: p.producer.Session(), State: sluice.ProducerRunning}, false)
		if errors.Is(err, sluice.ErrStale) {
			p.fail(err)
			return
		}
	}
}

// emit hands out an event. A callback that panics ends the pipeline.
func (p *Pipeline) emit(e Event) {
	err := guard(sluice.Invalid, "stream: pipeline: OnEvent", func() error {
		p.opts.OnEvent(e)
		return nil
	})
	if err != nil {
		p.fail(err)
	}
}

// fail keeps the first error and ends everything.
func (p *Pipeline) fail(err error) {
	p.mu.Lock()
	if p.err == nil {
		p.err = err
	}
	p.mu.Unlock()
	p.end(err)
}

// work takes one batch after the other until there is none.
func (p *Pipeline) work(all, pull context.Context) {
	for {
		b, err := p.pull(pull)
		switch {
		case all.Err() != nil:
			return
		case err == nil && b != nil: // a batch that was pulled is in work, whatever became of the source since
		case pull.Err() != nil:
			return
		case err == io.EOF || err == nil && b == nil: //nolint:errorlint // an error that wraps io.EOF is no end
			if !p.opts.KeepPolling {
				p.mu.Lock()
				p.over = true
				p.mu.Unlock()
				p.noMore()
				return
			}
			if !sleep(pull, p.clock, p.opts.PollInterval) {
				return
			}
			continue
		case err != nil:
			p.fail(err)
			return
		}
		p.count(func(s *PipelineStats) { s.Pulled++ })
		var ref sluice.Ref
		err = guard(sluice.Invalid, "stream: pipeline", func() (err error) {
			ref, err = p.producer.produce(all, b, p.again())
			return err
		})
		if err == nil {
			err = p.enqueue(all, ref, b.Positions)
		}
		if err != nil && !p.passOver(all, err) {
			return
		}
	}
}

// pull takes the next batch. Pulls are in turn, so that the source sees one call at a time.
func (p *Pipeline) pull(ctx context.Context) (b *sluice.PromptBatch, err error) {
	p.pulling.Lock()
	defer p.pulling.Unlock()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	err = guard(sluice.Invalid, "stream: pipeline: source", func() (err error) {
		b, err = p.source.Next(ctx)
		return err
	})
	return b, err
}

// passOver reports whether work goes on after the error.
func (p *Pipeline) passOver(all context.Context, err error) bool {
	switch {
	case all.Err() != nil:
		return false // it is the consequence of the end, which has its reason
	case errors.Is(err, ErrNotAdmitted):
		p.mu.Lock()
		p.stats.NotAdmitted++
		p.refused = err
		p.mu.Unlock()
		p.emit(Event{Kind: NotAdmitted, Op: "produce", Err: err})
		return true
	case errors.Is(err, sluice.ErrTargetFault):
		p.mu.Lock()
		p.faults++
		pass := p.faults <= p.opts.MaxTargetFaults
		if pass {
			p.stats.FaultPassed++
		}
		p.mu.Unlock()
		if pass {
			p.emit(Event{Kind: FaultPassed, Op: "forward", Err: err})
			return true
		}
	}
	p.fail(err)
	return false
}

// again is the retrier of the pipeline.
func (p *Pipeline) again() retrier {
	var begin time.Time
	last, try := "", 0
	return func(ctx context.Context, op, sampleID string, err error) error {
		if !transient(err) || ctx.Err() != nil {
			return err
		}
		if op != last {
			last, begin, try = op, p.clock.Now(), 0
		}
		try++
		// A wedge is for the consumers to end, and a trainer that evaluates for an hour is none; the queue's status shows it all along. Whoever says
		// wedged is there, so the time in which it was not begins anew.
		if errors.Is(err, sluice.ErrWedged) {
			begin = p.clock.Now()
		} else if p.clock.Now().Sub(begin) >= p.opts.Patience {
			return err
		}
		p.count(func(s *PipelineStats) { s.Retries++ })
		p.emit(Event{Kind: Retry, Op: op, SampleID: sampleID, Attempt: try, Wait: backoff(try), Err: err})
		if !sleep(ctx, p.clock, backoff(try)) {
			return context.Cause(ctx)
		}
		return nil
	}
}

// enqueue puts the ref. If that fails, the sample goes.
func (p *Pipeline) enqueue(ctx context.Context, ref sluice.Ref, positions []sluice.Position) error {
	again := p.again()
	r := sluice.PutRequest{Ref: ref, Producer: p.producer.Session(), Positions: positions}
	for {
		var status sluice.PutStatus
		err := guard(sluice.Invalid, "stream: pipeline: enqueue", func() (err error) {
			status, err = p.queue.Put(ctx, r)
			return err
		})
		if err == nil {
			p.mu.Lock()
			p.faults = 0
			if status == sluice.Gated {
				p.stats.Gated++
			} else {
				p.stats.Enqueued++
			}
			p.mu.Unlock()
			return nil
		}
		if err = again(ctx, "enqueue", ref.SampleID(), err); err == nil {
			continue
		}
		return p.discard(ctx, ref, err)
	}
}

// discard takes a sample out of the store whose put failed with cause. If the put got through all the same, the sample is claimed and stays: then it has succeeded.
func (p *Pipeline) discard(ctx context.Context, ref sluice.Ref, cause error) error {
	err := insist(ctx, func(ctx context.Context) error {
		return guard(sluice.Invalid, "stream: pipeline: discard", func() error { return p.producer.Discard(ctx, ref) })
	})
	switch {
	case errors.Is(err, sluice.ErrConflict):
		p.count(func(s *PipelineStats) { s.Enqueued++ })
		return nil
	case err != nil:
		return errors.Join(cause, err)
	}
	p.count(func(s *PipelineStats) { s.Discarded++ })
	p.emit(Event{Kind: Discarded, Op: "enqueue", SampleID: ref.SampleID(), Err: cause})
	return cause
}

func (p *Pipeline) count(f func(s *PipelineStats)) {
	p.mu.Lock()
	f(&p.stats)
	p.mu.Unlock()
}

// Wait waits until the pipeline has ended by itself and returns the error that ended it, or nil. If ctx ends first, its error is returned and the pipeline goes on.
func (p *Pipeline) Wait(ctx context.Context) error {
	p.mu.Lock()
	unstarted := p.state == fresh
	p.mu.Unlock()
	if unstarted {
		return &sluice.Error{Kind: sluice.Conflict, Op: "stream: pipeline: wait", Detail: "it was not started"}
	}
	return p.join(ctx)
}

func (p *Pipeline) join(ctx context.Context) error {
	select {
	case <-p.done:
	default:
		select {
		case <-p.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// Drain pulls no more prompts, finishes those in work, reports the end to the queue, and waits for all that.
func (p *Pipeline) Drain(ctx context.Context) error {
	p.mu.Lock()
	if p.stopUnstarted() {
		p.mu.Unlock()
		return nil
	}
	p.draining = true
	p.noMore()
	p.mu.Unlock()
	return p.join(ctx)
}

// Stop gives up what is in work: a wait at the gate ends, a forward is cancelled, a sample that has not reached the queue is taken out of the store. It waits until that is done, for as long as ctx
// lives (a store and a queue that are away get 5 seconds each, whatever ctx allows), and returns the error that had ended the pipeline before, if one had. What is in the queue stays there, and leases are the trainer's. To the queue
// this is a regular end, like that of the prompts, unless LeaveOpen says otherwise. It may be called any number of times, and
// before Start, which is refused then.
func (p *Pipeline) Stop(ctx context.Context) error {
	p.mu.Lock()
	if p.stopUnstarted() {
		p.mu.Unlock()
		return nil
	}
	p.stopping = true
	p.end(errStopped)
	p.mu.Unlock()
	return p.join(ctx)
}

// stopUnstarted ends a pipeline that was never started. The caller holds mu.
func (p *Pipeline) stopUnstarted() bool {
	if p.state == fresh {
		p.state = ended
		close(p.done)
	}
	return p.end == nil
}

// Running reports whether it was started and has not ended.
func (p *Pipeline) Running() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state == running
}

// Stats returns a snapshot.
func (p *Pipeline) Stats() PipelineStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stats
}
