package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/target/targettest"
)

// consume acknowledges everything until the end and returns the error of the end.
func consume(t testing.TB, r *rig) (ids []string, err error) {
	t.Helper()
	l := r.loader(t, nil)
	defer func() {
		if err := l.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	for {
		b, err := l.Next(t.Context())
		if err != nil {
			return ids, err
		}
		for _, s := range b.Samples {
			ids = append(ids, s.Ref.SampleID())
		}
	}
}

func TestAnExhaustedSourceIsACleanEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 1000, targettest.Options{}, nil) // room for two or three samples
		p := r.pipeline(t, batches(prompts(20)), PipelineOptions{})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := p.Start(t.Context()); err != nil {
			t.Errorf("a second Start while it runs: %v", err)
		}
		ids, err := consume(t, r)
		if !errors.Is(err, io.EOF) || len(ids) != 20 {
			t.Errorf("%d samples, %v; want 20 and EOF", len(ids), err)
		}
		if err := p.Wait(t.Context()); err != nil {
			t.Error(err)
		}
		if got := r.queue.lastReport().State; got != sluice.ProducerDone {
			t.Errorf("reported %s", got)
		}
		if len(r.queue.positions) != 20 || r.queue.positions[7].Index != 7 {
			t.Errorf("%d positions were put", len(r.queue.positions))
		}
		wantKind(t, p.Start(t.Context()), sluice.ErrConflict)
		if s := p.Stats(); s.Enqueued != 20 || s.Pulled != 20 || s.Discarded != 0 {
			t.Errorf("stats %+v", s)
		}
		clean(t, r.store, r.queue)
	})
}

func TestAProducersErrorReachesTheConsumer(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	for name, c := range map[string]struct {
		source Source
		fault  targettest.Fault
		want   error
	}{
		"target":         {batches(prompts(3)), targettest.Fault{Err: boom}, boom},
		"target panic":   {batches(prompts(3)), targettest.Fault{Panic: boom}, boom},
		"source":         {SourceFunc(func(context.Context) (*sluice.PromptBatch, error) { return nil, boom }), targettest.Fault{}, boom},
		"source panic":   {SourceFunc(func(context.Context) (*sluice.PromptBatch, error) { panic(boom) }), targettest.Fault{}, boom},
		"iterator panic": {FromSeq(func(func(*sluice.PromptBatch, error) bool) { panic(boom) }), targettest.Fault{}, boom},
		"swapped packing": {FromTensors(func(context.Context) ([]sluice.Tensor, error) {
			b := packedBatch()
			return []sluice.Tensor{b.InputIDs, b.AttentionMask, b.LossMask, b.DocRemaining, b.SeqLens, b.PositionIDs}, nil
		}), targettest.Fault{}, sluice.ErrInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, plenty, targettest.Options{Hook: func(_ context.Context, call targettest.Call) targettest.Fault {
					if call.Number < 1 {
						return targettest.Fault{}
					}
					return c.fault
				}}, nil)
				p := r.pipeline(t, c.source, PipelineOptions{})
				if err := p.Start(t.Context()); err != nil {
					t.Fatal(err)
				}
				ids, err := consume(t, r)
				if err == nil || errors.Is(err, io.EOF) {
					t.Errorf("the consumer got %v; a cut-off epoch must not look complete", err)
				}
				if made := int(r.producer.Stats().Samples); len(ids) != made {
					t.Errorf("%d of %d samples were delivered before the cause", len(ids), made)
				}
				if err := p.Wait(t.Context()); !errors.Is(err, c.want) {
					t.Errorf("Wait: %v", err)
				}
				if err := p.Stop(t.Context()); !errors.Is(err, c.want) {
					t.Errorf("Stop: %v, want the error again", err)
				}
				if got := r.queue.lastReport(); got.State != sluice.ProducerFailed || got.Cause == "" {
					t.Errorf("reported %+v", got)
				}
				clean(t, r.store, r.queue)
			})
		})
	}
}

// Every phase in which a stop can come, and what it must leave: nothing that is not in the queue.
func TestStopOrphansNothingInAnyPhase(t *testing.T) {
	t.Parallel()
	for _, phase := range []string{"source", "before reserve", "waiting at the gate", "in the forward", "before put", "between put and enqueue", "polling", "retrying"} {
		for _, how := range []string{"stop", "context"} {
			t.Run(phase+"/"+how, func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					ctx, cancel := context.WithCancelCause(t.Context())
					defer cancel(nil)
					why := errors.New("shutdown")
					var p *Pipeline
					var done atomic.Bool
					var asked sync.WaitGroup
					ask := func() {
						if !done.CompareAndSwap(false, true) {
							return
						}
						if how == "context" {
							cancel(why)
							return
						}
						asked.Go(func() {
							if err := p.Stop(context.WithoutCancel(ctx)); err != nil {
								t.Errorf("Stop: %v", err)
							}
						})
						time.Sleep(time.Millisecond) // until Stop waits
					}
					maxBytes := int64(plenty)
					if phase == "waiting at the gate" {
						maxBytes = 700 // one sample
					}
					r := newRig(t, maxBytes, targettest.Options{Hook: func(context.Context, targettest.Call) targettest.Fault {
						if phase == "in the forward" {
							ask()
						}
						return targettest.Fault{}
					}}, nil)
					source := batches(prompts(8))
					o := PipelineOptions{}
					switch phase {
					case "source":
						source = SourceFunc(func(ctx context.Context) (*sluice.PromptBatch, error) {
							<-ctx.Done()
							return nil, ctx.Err()
						})
					case "before reserve":
						r.queue.beforeReserve = func() error { ask(); return nil }
					case "before put":
						r.store.beforePut = func(string) error { ask(); return nil }
					case "between put and enqueue":
						r.queue.beforePut = func() error { ask(); return nil }
					case "polling":
						source, o.KeepPolling = batches(nil), true
					case "retrying":
						r.queue.beforePut = func() error { return sluice.ErrUnavailable }
					}
					p = r.pipeline(t, source, o)
					if err := p.Start(ctx); err != nil {
						t.Fatal(err)
					}
					synctest.Wait()
					ask()
					err := p.Wait(context.WithoutCancel(ctx))
					asked.Wait()
					last := r.queue.lastReport()
					if how == "stop" && (err != nil || last.State != sluice.ProducerDone) {
						t.Errorf("after Stop: error %v, report %+v; want none and done", err, last)
					}
					if how == "context" && (!errors.Is(err, why) || last.State != sluice.ProducerFailed) {
						t.Errorf("after the context: error %v, report %+v; want its cause and failed", err, last)
					}
					if h := r.store.Health(); h.ReservedSamples != 0 {
						t.Errorf("%d reservations are left", h.ReservedSamples)
					}
					st, _ := r.queue.Status(t.Context())
					if h := r.store.Health(); h.ResidentSamples != int64(st.Pending) {
						t.Errorf("%d samples in the store, %d in the queue", h.ResidentSamples, st.Pending)
					}
				})
			})
		}
	}
}

func TestStopsOutOfTurn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		p := r.pipeline(t, batches(prompts(1)), PipelineOptions{})
		wantKind(t, p.Wait(t.Context()), sluice.ErrConflict)
		for range 2 {
			if err := p.Stop(t.Context()); err != nil {
				t.Errorf("Stop before Start: %v", err)
			}
		}
		wantRefused(t, p.Start(t.Context()), sluice.ErrConflict, "stream: pipeline: start: it was stopped before it was started; make a new Pipeline")
		if got := r.queue.lastReport(); got.State != "" {
			t.Errorf("a pipeline that never ran reported %s", got.State)
		}

		p = r.pipeline(t, batches(prompts(1)), PipelineOptions{})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := p.Stop(t.Context()); err != nil {
				t.Error(err)
			}
		}
		if p.Running() {
			t.Error("it still runs")
		}
		wantRefused(t, p.Start(t.Context()), sluice.ErrConflict, "stream: pipeline: start: it has run already and is used once; make a new Pipeline, and a new run if its queue is closed")
	})
}

func TestStopIsBoundedByItsContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		r := newRig(t, plenty, targettest.Options{Hook: func(context.Context, targettest.Call) targettest.Fault { <-release; return targettest.Fault{} }}, nil)
		p := r.pipeline(t, batches(prompts(1)), PipelineOptions{})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if err := p.Stop(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Stop with a target that ignores its context: %v", err)
		}
		close(release)
		if err := p.Stop(t.Context()); err != nil {
			t.Error(err)
		}
		clean(t, r.store, r.queue)
	})
}

func TestDrainFinishesWhatIsInWork(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var p *Pipeline
		var drained sync.WaitGroup
		r := newRig(t, plenty, targettest.Options{Hook: func(_ context.Context, c targettest.Call) targettest.Fault {
			if c.Number == 2 {
				drained.Go(func() {
					if err := p.Drain(context.Background()); err != nil {
						t.Error(err)
					}
				})
				time.Sleep(time.Second)
			}
			return targettest.Fault{}
		}}, nil)
		p = r.pipeline(t, batches(prompts(10)), PipelineOptions{})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(t.Context()); err != nil {
			t.Error(err)
		}
		drained.Wait()
		if s := p.Stats(); s.Enqueued != 3 || r.queue.lastReport().State != sluice.ProducerDone {
			t.Errorf("%d samples, reported %+v; want the third one finished and done", s.Enqueued, r.queue.lastReport())
		}
	})
}

func TestABatchThatWasPulledWhileDrainingIsInWork(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		p := r.pipeline(t, SourceFunc(func(ctx context.Context) (*sluice.PromptBatch, error) {
			<-ctx.Done()
			return prompts(1)[0], nil // its last one
		}), PipelineOptions{})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if err := p.Drain(t.Context()); err != nil {
			t.Error(err)
		}
		if s := p.Stats(); s.Enqueued != 1 {
			t.Errorf("stats %+v; the source counts it as given", s)
		}
	})
}

func TestAQueueClosedByOthersEndsThePipeline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var r *rig
		r = newRig(t, plenty, targettest.Options{Hook: func(_ context.Context, c targettest.Call) targettest.Fault {
			if c.Number == 2 {
				_ = r.queue.Close(context.Background(), nil)
			}
			return targettest.Fault{}
		}}, nil)
		p := r.pipeline(t, batches(prompts(10)), PipelineOptions{})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantKind(t, p.Wait(t.Context()), sluice.ErrClosed)
		if s := p.Stats(); s.Discarded != 1 {
			t.Errorf("%d samples discarded, want the one that came too late", s.Discarded)
		}
		if h := r.store.Health(); h.ResidentSamples != 2 || h.ReservedSamples != 0 {
			t.Errorf("health %+v", h)
		}
	})
}

func TestRowsThatAreNotAdmittedAreCountedAndPassed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		list := prompts(4)
		list[0], list[2] = plain([]int64{1, 2, 3}, 9), plain([]int64{1}, 0)
		p := r.pipeline(t, batches(list), PipelineOptions{})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(t.Context()); err != nil {
			t.Error(err)
		}
		if s := p.Stats(); s.NotAdmitted != 2 || s.Enqueued != 2 {
			t.Errorf("stats %+v", s)
		}
	})
}

func TestASourceOfWhichNothingIsAdmittedIsAFailure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		list := prompts(2)
		list[0], list[1] = plain([]int64{1, 2, 3}, 9), plain([]int64{1}, 0)
		p := r.pipeline(t, batches(list), PipelineOptions{})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		err := p.Wait(t.Context())
		if !errors.Is(err, sluice.ErrInvalid) || !errors.Is(err, ErrNotAdmitted) || !strings.Contains(err.Error(), "not one of its 2 batches was admitted") {
			t.Errorf("got %v", err)
		}
		p = r.pipeline(t, batches(nil), PipelineOptions{}) // an empty source is an empty epoch
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(t.Context()); err != nil {
			t.Errorf("got %v", err)
		}
	})
}

func TestTransientErrorsAreRetriedAndReported(t *testing.T) {
	t.Parallel()
	for _, op := range []string{"reserve", "forward", "put", "enqueue"} {
		for _, kind := range []error{sluice.ErrUnavailable, sluice.ErrWedged} {
			t.Run(fmt.Sprint(op, kind), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					var n atomic.Int64
					some := func(string) error {
						if n.Add(1) <= 3 {
							return kind
						}
						return nil
					}
					r := newRig(t, plenty, targettest.Options{Hook: func(context.Context, targettest.Call) targettest.Fault {
						if op == "forward" {
							return targettest.Fault{Err: some("")}
						}
						return targettest.Fault{}
					}}, nil)
					switch op {
					case "reserve":
						r.queue.beforeReserve = func() error { return some("") }
					case "put":
						r.store.beforePut = some
					case "enqueue":
						r.queue.beforePut = func() error { return some("") }
					}
					var events []Event
					begin := time.Now()
					p := r.pipeline(t, batches(prompts(2)), PipelineOptions{OnEvent: func(e Event) { events = append(events, e) }})
					if err := p.Start(t.Context()); err != nil {
						t.Fatal(err)
					}
					if err := p.Wait(t.Context()); err != nil {
						t.Fatal(err)
					}
					if took := time.Since(begin); took != 700*time.Millisecond {
						t.Errorf("waited %v, want 100+200+400 ms", took)
					}
					if len(events) != 3 || events[0].Kind != Retry || events[0].Op != op || events[2].Attempt != 3 || !errors.Is(events[2].Err, kind) {
						t.Errorf("events %v", events)
					}
					if s := p.Stats(); s.Enqueued != 2 || s.Retries != 3 {
						t.Errorf("stats %+v", s)
					}
					if _, err := consume(t, r); !errors.Is(err, io.EOF) {
						t.Error(err)
					}
					clean(t, r.store, r.queue)
				})
			})
		}
	}
}

func TestPatienceEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		r.queue.beforePut = func() error { return sluice.ErrUnavailable }
		p := r.pipeline(t, batches(prompts(1)), PipelineOptions{Patience: time.Minute})
		begin := time.Now()
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantKind(t, p.Wait(t.Context()), sluice.ErrUnavailable)
		if took := time.Since(begin); took < time.Minute || took > 70*time.Second {
			t.Errorf("gave up after %v", took)
		}
		clean(t, r.store, r.queue)
	})
}

func TestImpossiblePipelinesAreRefusedByName(t *testing.T) {
	t.Parallel()
	r := newRig(t, plenty, targettest.Options{}, nil)
	const from = "stream: new pipeline "
	with := func(o PipelineOptions) func() (*Pipeline, error) {
		return func() (*Pipeline, error) { return NewPipeline(r.producer, r.queue, batches(nil), &o) }
	}
	for want, make := range map[string]func() (*Pipeline, error){
		from + `"producer": is nil`:                                   func() (*Pipeline, error) { return NewPipeline(nil, r.queue, batches(nil), nil) },
		from + `"queue": is nil`:                                      func() (*Pipeline, error) { return NewPipeline(r.producer, nil, batches(nil), nil) },
		from + `"source": is nil`:                                     func() (*Pipeline, error) { return NewPipeline(r.producer, r.queue, nil, nil) },
		from + `"Workers": is -1, want 0 (the default) or more`:       with(PipelineOptions{Workers: -1}),
		from + `"MaxTargetFaults": is -2, want 0 or more`:             with(PipelineOptions{MaxTargetFaults: -2}),
		from + `"PollInterval": is -1s, want 0 (the default) or more`: with(PipelineOptions{PollInterval: -time.Second}),
		from + `"Heartbeat": is -2s, want 0 (the default) or more`:    with(PipelineOptions{Heartbeat: -2 * time.Second}),
		from + `"Patience": is -3s, want 0 (the default) or more`:     with(PipelineOptions{Patience: -3 * time.Second}),
	} {
		p, err := make()
		wantRefused(t, err, sluice.ErrInvalid, want)
		if p != nil {
			t.Errorf("a pipeline was made in spite of %v", err)
		}
	}
}

// A remote tokenizer whose connection broke in the middle is no end of the prompts.
func TestASourcesErrorThatWrapsEOFIsNoCleanEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		p := r.pipeline(t, SourceFunc(func(context.Context) (*sluice.PromptBatch, error) { return nil, fmt.Errorf("tokenize: %w", io.EOF) }), PipelineOptions{})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(t.Context()); err == nil {
			t.Error("no error")
		}
		if last := r.queue.lastReport(); last.State != sluice.ProducerFailed {
			t.Errorf("the last report is %+v", last)
		}
	})
}

// A wedge may last; an outage behind it has a patience of its own.
func TestAWedgeDoesNotUseUpPatience(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		begin := time.Now()
		r.queue.beforeReserve = func() error {
			switch since := time.Since(begin); {
			case since < time.Hour:
				return sluice.ErrWedged
			case since < time.Hour+30*time.Second:
				return sluice.ErrUnavailable
			}
			return nil
		}
		p := r.pipeline(t, batches(prompts(1)), PipelineOptions{Patience: time.Minute})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// A service that restarts while the last report is due must not make a complete epoch a lost producer's.
func TestTheLastReportHasPatience(t *testing.T) {
	t.Parallel()
	for _, state := range []sluice.ProducerState{sluice.ProducerDone, sluice.ProducerFailed} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, plenty, targettest.Options{}, nil)
			var away time.Time
			source := batches(prompts(1))
			p := r.pipeline(t, SourceFunc(func(ctx context.Context) (*sluice.PromptBatch, error) {
				b, err := source.Next(ctx)
				if err != nil {
					away = time.Now()
					if state == sluice.ProducerFailed {
						err = errors.New("disk on fire")
					}
				}
				return b, err
			}), PipelineOptions{})
			outage := map[sluice.ProducerState]time.Duration{sluice.ProducerDone: time.Minute, sluice.ProducerFailed: 3 * time.Second}[state]
			r.queue.beforeReport = func() error {
				if !away.IsZero() && time.Since(away) < outage {
					return sluice.ErrUnavailable
				}
				return nil
			}
			if err := p.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := p.Wait(t.Context()); (err == nil) != (state == sluice.ProducerDone) {
				t.Errorf("error %v", err)
			}
			if last := r.queue.lastReport(); last.State != state {
				t.Errorf("the last report is %+v, want %s", last, state)
			}
		})
	}
}

func TestAStopEndsTheLastReport(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		p := r.pipeline(t, batches(nil), PipelineOptions{})
		n := 0
		r.queue.beforeReport = func() error {
			if n++; n > 1 {
				return sluice.ErrUnavailable
			}
			return nil
		}
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		begin := time.Now()
		wantKind(t, p.Stop(t.Context()), sluice.ErrUnavailable)
		if took := time.Since(begin); took > 15*time.Second {
			t.Errorf("Stop took %v", took)
		}
	})
}

// busyStore is away when it is asked to free something.
type busyStore struct {
	*fakeStore
	aborts, unreserves int // calls that fail
}

func (s *busyStore) Abort(ctx context.Context, ref sluice.Ref) error {
	if s.aborts > 0 {
		s.aborts--
		return sluice.ErrUnavailable
	}
	return s.fakeStore.Abort(ctx, ref)
}

func (s *busyStore) Unreserve(ctx context.Context, r sluice.Reservation) error {
	if s.unreserves > 0 {
		s.unreserves--
		return sluice.ErrUnavailable
	}
	return s.fakeStore.Unreserve(ctx, r)
}

func TestAStoreThatIsAwayDuringCleanUpIsAskedAgain(t *testing.T) {
	t.Parallel()
	for _, phase := range []string{"abort", "unreserve"} {
		synctest.Test(t, func(t *testing.T) {
			why := errors.New("no")
			r := newRig(t, plenty, targettest.Options{}, nil)
			store := &busyStore{r.store, 2, 2}
			if phase == "abort" {
				r.queue.beforePut = func() error { return why }
			} else {
				r.store.beforePut = func(string) error { return why }
			}
			producer, err := NewProducer(ProducerConfig{Target: r.target, Store: store, Queue: r.queue, Schema: schema(t, sluice.EAGLE3), RunID: "r1"})
			if err != nil {
				t.Fatal(err)
			}
			defer producer.Close()
			p, err := NewPipeline(producer, r.queue, batches(prompts(1)), &PipelineOptions{OnEvent: quiet})
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := p.Wait(t.Context()); !errors.Is(err, why) || errors.Is(err, sluice.ErrUnavailable) {
				t.Errorf("error %v, want the put's alone", err)
			}
			clean(t, r.store, r.queue)
		})
	}
}

// A producer that was given no gate is paced by the pipeline's queue, and not killed by a store that is full.
func TestAPipelinePacesAProducerWithoutAQueue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 1500, targettest.Options{}, func(c *ProducerConfig) { c.Queue = nil })
		p := r.pipeline(t, batches(prompts(12)), PipelineOptions{})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if ids, err := consume(t, r); len(ids) != 12 || !errors.Is(err, io.EOF) {
			t.Errorf("%d samples, error %v", len(ids), err)
		}
		if err := p.Wait(t.Context()); err != nil {
			t.Error(err)
		}
		clean(t, r.store, r.queue)
	})
}

// A put whose answer was lost has happened all the same. The sample is neither lost nor trained on twice.
func TestAPutWhoseAnswerWasLost(t *testing.T) {
	t.Parallel()
	t.Run("in the store", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, plenty, targettest.Options{}, nil)
			lost := false
			r.store.afterPut = func(string) error {
				if lost {
					return nil
				}
				lost = true
				return sluice.ErrUnavailable
			}
			p := r.pipeline(t, batches(prompts(1)), PipelineOptions{})
			if err := p.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := p.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			st, _ := r.queue.Status(t.Context())
			if h := r.store.Health(); st.Pending != 1 || h.ReservedSamples != 0 {
				t.Errorf("%d pending, health %+v", st.Pending, h)
			}
		})
	})
	t.Run("and the id was another's", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, plenty, targettest.Options{}, func(c *ProducerConfig) { c.SampleID = func(int64) string { return "taken" } })
			away := false
			if _, err := r.producer.Produce(t.Context(), prompts(1)[0]); err != nil {
				t.Fatal(err)
			}
			r.store.beforePut = func(string) error {
				if away = !away; away {
					return sluice.ErrUnavailable
				}
				r.store.beforePut = nil
				return nil
			}
			p := r.pipeline(t, batches(prompts(1)), PipelineOptions{})
			if err := p.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := p.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			if h := r.store.Health(); h.ResidentSamples != 2 || h.ReservedSamples != 0 {
				t.Errorf("health %+v", h)
			}
		})
	})
	t.Run("in the queue", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, plenty, targettest.Options{}, nil)
			wrap := lostAnswer{r.queue}
			p, err := NewPipeline(r.producer, wrap, batches(prompts(1)), &PipelineOptions{OnEvent: quiet, Patience: time.Second})
			if err != nil {
				t.Fatal(err)
			}
			if err := p.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := p.Wait(t.Context()); err != nil {
				t.Errorf("the put had succeeded: %v", err)
			}
			if s := p.Stats(); s.Enqueued != 1 || s.Discarded != 0 {
				t.Errorf("stats %+v", s)
			}
		})
	})
}

// lostAnswer puts once, and never says so.
type lostAnswer struct{ *fakeQueue }

func (q lostAnswer) Put(ctx context.Context, r sluice.PutRequest) (sluice.PutStatus, error) {
	if len(q.positions) == 0 {
		_, _ = q.fakeQueue.Put(ctx, r)
	}
	return "", sluice.ErrUnavailable
}

func TestTargetFaultsInARowAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		bad := map[int]bool{1: true, 2: true, 4: true, 5: true, 7: true, 8: true, 9: true}
		r := newRig(t, plenty, targettest.Options{Hook: func(_ context.Context, c targettest.Call) targettest.Fault {
			if bad[c.Number] {
				return targettest.Fault{NaN: []int{0}}
			}
			return targettest.Fault{}
		}}, nil)
		p := r.pipeline(t, batches(prompts(20)), PipelineOptions{MaxTargetFaults: 2})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantKind(t, p.Wait(t.Context()), sluice.ErrTargetFault)
		if s := p.Stats(); s.FaultPassed != 6 || s.Enqueued != 3 {
			t.Errorf("stats %+v, want 6 passed and the samples 0, 3 and 6", s)
		}
		if _, err := consume(t, r); errors.Is(err, io.EOF) {
			t.Error("a clean end")
		}
		clean(t, r.store, r.queue)
	})
}

func TestPollingGoesOnUntilStop(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		n := 0
		begin := time.Now()
		var at []time.Duration
		source := SourceFunc(func(context.Context) (*sluice.PromptBatch, error) {
			n++
			at = append(at, time.Since(begin))
			switch n {
			case 1, 3:
				return prompts(1)[0], nil
			case 2:
				return nil, nil
			}
			return nil, io.EOF
		})
		p := r.pipeline(t, source, PipelineOptions{KeepPolling: true, PollInterval: time.Second})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2500 * time.Millisecond)
		if err := p.Stop(t.Context()); err != nil {
			t.Error(err)
		}
		if p.Stats().Enqueued != 2 || len(at) != 5 || at[2] != time.Second || at[4] != 2*time.Second {
			t.Errorf("%d samples, asked at %v", p.Stats().Enqueued, at)
		}
	})
}

func TestHeartbeatsComeWhileItLives(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{Hook: func(context.Context, targettest.Call) targettest.Fault {
			time.Sleep(100 * time.Second)
			return targettest.Fault{}
		}}, nil)
		p := r.pipeline(t, batches(prompts(1)), PipelineOptions{})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(t.Context()); err != nil {
			t.Error(err)
		}
		if n := len(r.queue.reports); n != 1+6+1 {
			t.Errorf("%d reports, want hello, six heartbeats in 100 s and the end", n)
		}
		time.Sleep(time.Hour)
		if n := len(r.queue.reports); n != 8 {
			t.Error("heartbeats went on after the end")
		}
	})
}

func TestASuccessorEndsThePipeline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		hello := true
		r.queue.beforeReport = func() error {
			if hello {
				hello = false
				return nil
			}
			return sluice.ErrStale
		}
		p := r.pipeline(t, batches(nil), PipelineOptions{KeepPolling: true})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantKind(t, p.Wait(t.Context()), sluice.ErrStale)
		if n := len(r.queue.reports); n != 1 {
			t.Errorf("%d reports; the successor speaks for the name now", n)
		}
	})
}

func TestLeaveOpenReportsNoEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, cancelled := range []bool{false, true} {
			r := newRig(t, plenty, targettest.Options{}, nil)
			ctx, cancel := context.WithCancel(t.Context())
			p := r.pipeline(t, batches(nil), PipelineOptions{KeepPolling: true, LeaveOpen: true})
			if err := p.Start(ctx); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			if cancelled {
				cancel()
			}
			_ = p.Stop(t.Context())
			cancel()
			if got := r.queue.lastReport().State; got != sluice.ProducerRunning {
				t.Errorf("reported %s", got)
			}
		}
	})
}

func TestAPanicInACallbackIsAnError(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		p := r.pipeline(t, batches([]*sluice.PromptBatch{plain([]int64{1}, 0)}), PipelineOptions{OnEvent: func(Event) { panic("x") }})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(t.Context()); err == nil {
			t.Error("the panic is gone")
		}
	})
}

// exiting is a source that ends the goroutine that calls it, as t.FailNow does.
type exiting struct {
	next, close bool
	left        []*sluice.PromptBatch
}

func (s *exiting) Next(context.Context) (*sluice.PromptBatch, error) {
	if len(s.left) > 0 {
		b := s.left[0]
		s.left = s.left[1:]
		return b, nil
	}
	if s.next {
		runtime.Goexit()
	}
	return nil, io.EOF
}

func (s *exiting) Close() error {
	if s.close {
		runtime.Goexit()
	}
	return nil
}

func TestASourceThatEndsItsGoroutineEndsThePipelineAsFailed(t *testing.T) {
	t.Parallel()
	for _, src := range []*exiting{{next: true}, {close: true}, {next: true, close: true}} {
		synctest.Test(t, func(t *testing.T) {
			src.left = prompts(2)
			r := newRig(t, plenty, targettest.Options{}, nil)
			p := r.pipeline(t, src, PipelineOptions{})
			if err := p.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			ids, err := consume(t, r)
			if len(ids) != 2 || err == nil || errors.Is(err, io.EOF) || !strings.Contains(err.Error(), "Goexit") {
				t.Errorf("the consumer got %d samples and %v", len(ids), err)
			}
			if err := p.Wait(t.Context()); !errors.Is(err, sluice.ErrInvalid) || !strings.Contains(err.Error(), "Goexit") {
				t.Errorf("the pipeline ended with %v", err)
			}
			if last := r.queue.lastReport(); last.State != sluice.ProducerFailed {
				t.Errorf("the last report was %+v", last)
			}
			clean(t, r.store, r.queue)
		})
	}
}

func TestSeveralWorkersLoseNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 2000, targettest.Options{Concurrent: true, Hook: func(_ context.Context, c targettest.Call) targettest.Fault {
			time.Sleep(time.Duration(1+c.Number%5) * time.Millisecond)
			return targettest.Fault{}
		}}, nil)
		p := r.pipeline(t, batches(prompts(40)), PipelineOptions{Workers: 4})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		ids, err := consume(t, r)
		if !errors.Is(err, io.EOF) || len(ids) != 40 {
			t.Errorf("%d samples, %v", len(ids), err)
		}
		if r.target.MostConcurrent() < 2 {
			t.Error("the workers did not overlap")
		}
		clean(t, r.store, r.queue)
	})
}

func TestTheSourceIsClosed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{}, nil)
		ended := false
		src := FromSeq(func(yield func(*sluice.PromptBatch, error) bool) {
			defer func() { ended = true }()
			for yield(prompts(1)[0], nil) {
			}
		})
		r.queue.beforePut = func() error { return sluice.ErrDenied }
		p := r.pipeline(t, src, PipelineOptions{})
		if err := p.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantKind(t, p.Wait(t.Context()), sluice.ErrDenied)
		if !ended {
			t.Error("the iterator was left hanging")
		}
		clean(t, r.store, r.queue)
	})
}
