package stream_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue"
	"github.com/sluice-ml/sluice/store/memstore"
	"github.com/sluice-ml/sluice/stream"
	"github.com/sluice-ml/sluice/target/targettest"
)

// dice decides which calls fail. All parts of a run throw the same ones, so they are locked.
type dice struct {
	mu     sync.Mutex
	r      *rand.Rand
	chance float64
	off    bool
}

func (d *dice) fail() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !d.off && d.r.Float64() < d.chance
}

func (d *dice) pick(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.r.IntN(n)
}

// shakyStore fails now and then, sometimes after it has done its work.
type shakyStore struct {
	sluice.Store
	dice *dice
}

func (s shakyStore) Put(ctx context.Context, x *sluice.Sample, r sluice.Reservation) (sluice.Ref, error) {
	if s.dice.fail() {
		return sluice.Ref{}, &sluice.Error{Kind: sluice.Unavailable, Op: "shaky: put"}
	}
	return s.Store.Put(ctx, x, r)
}

func (s shakyStore) Get(ctx context.Context, ref sluice.Ref) (*sluice.Tensors, error) {
	if s.dice.fail() {
		kinds := []sluice.Kind{sluice.Unavailable, sluice.NotFound, sluice.Corrupt, sluice.Denied}
		return nil, &sluice.Error{Kind: kinds[s.dice.pick(len(kinds))], Op: "shaky: get", Subject: ref.SampleID()}
	}
	return s.Store.Get(ctx, ref)
}

type shakyQueue struct {
	sluice.Queue
	dice *dice
}

var errAway = &sluice.Error{Kind: sluice.Unavailable, Op: "shaky"}

func (q shakyQueue) Reserve(ctx context.Context, r sluice.ReserveRequest) (sluice.Reservation, error) {
	if q.dice.fail() {
		return sluice.Reservation{}, errAway
	}
	room, err := q.Queue.Reserve(ctx, r)
	if err == nil && q.dice.fail() {
		return sluice.Reservation{}, errAway // the answer is lost; the same request gets it again
	}
	return room, err
}

func (q shakyQueue) Put(ctx context.Context, r sluice.PutRequest) (sluice.PutStatus, error) {
	if q.dice.fail() {
		return "", errAway
	}
	status, err := q.Queue.Put(ctx, r)
	if err == nil && q.dice.fail() {
		return "", errAway
	}
	return status, err
}

func (q shakyQueue) Acquire(ctx context.Context, r sluice.AcquireRequest) (sluice.Delivery, error) {
	if q.dice.fail() {
		return sluice.Delivery{}, errAway
	}
	d, err := q.Queue.Acquire(ctx, r)
	if err == nil && q.dice.fail() {
		return sluice.Delivery{}, errAway
	}
	return d, err
}

func (q shakyQueue) Settle(ctx context.Context, r sluice.SettleRequest) ([]sluice.SettleResult, error) {
	if q.dice.fail() {
		return nil, errAway
	}
	res, err := q.Queue.Settle(ctx, r)
	if err == nil && q.dice.fail() {
		return nil, errAway
	}
	return res, err
}

func (q shakyQueue) Renew(ctx context.Context, r sluice.RenewRequest) ([]sluice.SettleResult, error) {
	if q.dice.fail() {
		return nil, errAway
	}
	return q.Queue.Renew(ctx, r)
}

func (q shakyQueue) Status(ctx context.Context) (sluice.Status, error) {
	if q.dice.fail() {
		return sluice.Status{}, errAway
	}
	return q.Queue.Status(ctx)
}

func (q shakyQueue) Report(ctx context.Context, r sluice.ProducerReport) error {
	if q.dice.fail() {
		return errAway
	}
	return q.Queue.Report(ctx, r)
}

// world is what a property run is drawn from.
type world struct {
	seed                          uint64
	chance                        float64
	rows, workers, loaders, batch int
	prefetch                      int
	ack                           stream.AckMode
	collate                       stream.Collator
	maxBytes                      int64
	stop                          int // the pipeline after so many milliseconds, if above 0
}

// Whatever fails on the way, every row that was enqueued ends acknowledged or as a dead letter, and nothing is left in the store.
func TestEveryRowEndsAcknowledgedOrDead(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		w := world{
			seed:     rapid.Uint64().Draw(rt, "seed"),
			chance:   rapid.SampledFrom([]float64{0, 0.05, 0.2}).Draw(rt, "chance"),
			rows:     rapid.IntRange(1, 25).Draw(rt, "rows"),
			workers:  rapid.IntRange(1, 3).Draw(rt, "workers"),
			loaders:  rapid.IntRange(1, 2).Draw(rt, "loaders"),
			batch:    rapid.IntRange(1, 3).Draw(rt, "batch"),
			prefetch: rapid.SampledFrom([]int{-1, 1, 2}).Draw(rt, "prefetch"),
			ack:      rapid.SampledFrom([]stream.AckMode{stream.AckOnNext, stream.AckOnStep, stream.AckOnCheckpoint}).Draw(rt, "ack"),
			collate:  rapid.SampledFrom([]stream.Collator{stream.PadTo(4), stream.Pack(stream.PackOptions{MaxTokens: 12})}).Draw(rt, "collate"),
			maxBytes: rapid.SampledFrom([]int64{1000, 3000, 1 << 20}).Draw(rt, "cap"),
			stop:     rapid.IntRange(-100, 200).Draw(rt, "stop"),
		}
		if w.ack != stream.AckOnNext {
			w.maxBytes = 1 << 20 // what is held for a step must fit
		}
		var err error
		synctest.Test(t, func(t *testing.T) { err = w.run(t.Context()) })
		if err != nil {
			rt.Fatal(err)
		}
	})
}

// errorList collects what several goroutines find.
type errorList struct {
	mu  sync.Mutex
	err error
}

func (e *errorList) add(format string, args ...any) {
	e.mu.Lock()
	e.err = errors.Join(e.err, fmt.Errorf(format, args...))
	e.mu.Unlock()
}

func (w world) run(ctx context.Context) error {
	d := &dice{r: rand.New(rand.NewPCG(w.seed, 1)), chance: w.chance}
	schema, err := sluice.SchemaOf(sluice.EAGLE3)
	if err != nil {
		return err
	}
	caps := sluice.Caps{MaxBytes: w.maxBytes}
	store, err := memstore.New(&memstore.Options{Caps: caps})
	if err != nil {
		return err
	}
	defer store.Close()
	cfg := sluice.RunConfig{RunID: "r", Schema: schema, Caps: caps}
	if w.ack == stream.AckOnCheckpoint {
		cfg.LargestSample, cfg.SamplesPerStep, cfg.StepsPerCheckpoint = 1000, w.loaders*w.batch, w.rows
	}
	q, err := queue.Open(ctx, cfg, store, nil)
	if err != nil {
		return err
	}
	defer q.Stop(ctx)
	target := targettest.New(targettest.Options{Concurrent: w.workers > 1, Hook: func(context.Context, targettest.Call) targettest.Fault {
		time.Sleep(time.Duration(d.pick(5)) * time.Millisecond)
		if d.fail() {
			return targettest.Fault{NaN: []int{0}}
		}
		return targettest.Fault{}
	}})
	p, err := stream.NewProducer(stream.ProducerConfig{Target: target, Store: shakyStore{store, d}, Queue: shakyQueue{q, d}, Schema: schema, RunID: "r"})
	if err != nil {
		return err
	}
	defer p.Close()
	quiet := func(stream.Event) {}
	pl, err := stream.NewPipeline(p, shakyQueue{q, d}, prompts(w.rows), &stream.PipelineOptions{Workers: w.workers, MaxTargetFaults: w.rows, OnEvent: quiet})
	if err != nil {
		return err
	}
	if err := pl.Start(ctx); err != nil {
		return err
	}
	var trainers sync.WaitGroup
	var bad errorList
	for i := range w.loaders {
		trainers.Go(func() { w.train(ctx, &bad, q, store, d, schema, i) })
	}
	if w.stop > 0 {
		time.Sleep(time.Duration(w.stop) * time.Millisecond)
		if err := pl.Stop(ctx); err != nil {
			return fmt.Errorf("stop: %w", err)
		}
	}
	trainers.Wait()
	if err := pl.Wait(ctx); err != nil {
		return fmt.Errorf("pipeline: %w", err)
	}
	if bad.err != nil {
		return bad.err
	}
	st, err := q.Status(ctx)
	if err != nil {
		return err
	}
	made := pl.Stats()
	// A put whose answer was lost may have been consumed and freed by the time its pipeline, being stopped, gives it up.
	if st.Pending != 0 || st.Outstanding != 0 || st.Put < made.Enqueued || st.Put > made.Enqueued+made.Discarded || st.Acked+int64(st.Dead) != st.Put ||
		w.stop <= 0 && (made.Pulled != int64(w.rows) || made.Discarded != 0 || made.Enqueued+made.FaultPassed != made.Pulled) {
		return fmt.Errorf("%d rows, pipeline %+v, queue %+v", w.rows, made, st)
	}
	dead, err := q.DeadLetters(ctx)
	if err != nil {
		return err
	}
	for _, x := range dead {
		if _, err := q.Drop(ctx, x.Ref.SampleID()); err != nil {
			return err
		}
	}
	if h := store.Health(); h.UsedBytes() != 0 || h.UsedSamples() != 0 {
		return fmt.Errorf("the store holds %+v", h)
	}
	return nil
}

// train consumes until the end, through faults, crashes of the loop and restarts of the loader.
func (w world) train(ctx context.Context, bad *errorList, q sluice.Queue, store sluice.Store, d *dice, schema *sluice.Schema, i int) {
	for life := int64(0); ; life++ {
		l, err := stream.NewLoader(stream.LoaderConfig{Queue: shakyQueue{q, d}, Store: shakyStore{store, d}, Schema: schema,
			Consumer: sluice.Consumer{Name: fmt.Sprint("trainer-", i), Incarnation: life}, Batch: w.batch, Prefetch: w.prefetch, Ack: w.ack, Collate: w.collate, OnEvent: func(stream.Event) {}})
		if err != nil {
			bad.add("%v", err)
			return
		}
		var ended bool
		for !ended {
			b, err := l.Next(ctx)
			switch {
			case errors.Is(err, io.EOF):
				err := l.Checkpoint(ctx)
				ended = err == nil
				if err != nil && !errors.Is(err, sluice.ErrUnavailable) {
					bad.add("checkpoint: %v", err)
				}
				continue
			case err != nil && ctx.Err() != nil:
				bad.add("%v", err)
				return
			case err != nil:
				time.Sleep(time.Millisecond)
				if d.pick(4) == 0 {
					break
				}
				continue
			}
			if err == nil {
				for _, f := range b.Features {
					clear(f.Data) // the trainer may write
				}
				time.Sleep(time.Duration(d.pick(20)) * time.Millisecond)
				if !d.fail() {
					if d.pick(3) == 0 {
						_ = l.Step(ctx)
					}
					if d.pick(5) == 0 {
						_ = l.Checkpoint(ctx)
					}
					continue
				}
			}
			break // the trainer crashes, or is restarted
		}
		var cause error
		if !ended && d.pick(2) == 0 {
			cause = errors.New("the trainer failed")
		}
		if err := l.CloseWithError(ctx, cause); err != nil {
			bad.add("close: %v", err)
			return
		}
		if ended {
			st, err := q.Status(ctx)
			if err == nil && st.Closed && st.Pending == 0 && st.Outstanding == 0 {
				return
			}
			time.Sleep(10 * time.Millisecond) // another trainer may still fail its samples
		}
	}
}

// Ranks that step together get the same number of samples, though one of them can't read one: the queue gives it another for its place.
func TestRanksStayInStepThroughABadSample(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
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
		q, err := queue.Open(ctx, sluice.RunConfig{RunID: "r", Schema: schema, Caps: caps, LargestSample: 1000, Windows: &sluice.Windows{Ranks: 2, PerRank: 2, Prefetch: 1}}, store, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer q.Stop(context.Background())
		n := -1
		p, err := stream.NewProducer(stream.ProducerConfig{Target: targettest.New(targettest.Options{}), Store: store, Queue: q, Schema: schema, RunID: "r", SampleID: func(int64) string { n++; return fmt.Sprint("s", n) }})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		pl, err := stream.NewPipeline(p, q, prompts(11), nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := pl.Start(ctx); err != nil {
			t.Fatal(err)
		}
		var steps [2][]string
		var ranks sync.WaitGroup
		for rank := range 2 {
			ranks.Go(func() {
				l, err := stream.NewLoader(stream.LoaderConfig{Queue: q, Store: badStore{store, "s5"}, Schema: schema, Batch: 2, OnEvent: func(stream.Event) {},
					Consumer: sluice.Consumer{Name: fmt.Sprint("rank-", rank), Rank: rank}})
				if err != nil {
					t.Error(err)
					return
				}
				for b, err := range l.All(ctx) {
					if err != nil {
						t.Errorf("rank %d: %v", rank, err)
						break
					}
					step := fmt.Sprint(b.Samples[0].Window.Number, ":", len(b.Samples))
					for _, s := range b.Samples {
						if s.Window.Number != b.Samples[0].Window.Number || s.Window.Rank != rank {
							t.Errorf("rank %d got the slot %+v", rank, s.Window)
						}
					}
					steps[rank] = append(steps[rank], step)
				}
				if err := l.Close(ctx); err != nil {
					t.Error(err)
				}
			})
		}
		ranks.Wait()
		if err := pl.Wait(ctx); err != nil {
			t.Error(err)
		}
		if fmt.Sprint(steps[0]) != "[0:2 1:2 2:2]" || fmt.Sprint(steps[1]) != fmt.Sprint(steps[0]) {
			t.Errorf("rank 0 stepped %v, rank 1 %v", steps[0], steps[1])
		}
		st, err := q.Status(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if st.Dead != 1 || st.Padded != 2 || st.Acked != 10 {
			t.Errorf("%d dead, %d padded, %d acked; want the bad one, stand-ins for it and for the tail, and the ten others", st.Dead, st.Padded, st.Acked)
		}
		if _, err := q.Drop(ctx, "s5"); err != nil {
			t.Error(err)
		}
		if h := store.Health(); h.UsedSamples() != 0 {
			t.Errorf("the store holds %+v", h)
		}
	})
}

// badStore has one sample that is corrupt.
type badStore struct {
	sluice.Store
	bad string
}

func (s badStore) Get(ctx context.Context, ref sluice.Ref) (*sluice.Tensors, error) {
	if ref.SampleID() == s.bad {
		return nil, &sluice.Error{Kind: sluice.Corrupt, Op: "bad: get", Subject: s.bad}
	}
	return s.Store.Get(ctx, ref)
}
