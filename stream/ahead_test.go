package stream_test

import (
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue"
	"github.com/sluice-ml/sluice/store/memstore"
	"github.com/sluice-ml/sluice/stream"
	"github.com/sluice-ml/sluice/target/targettest"
)

// narrow is a run whose store has room for so many samples, all of one size, and whose target takes a second for each.
type narrow struct {
	schema   *sluice.Schema
	store    *memstore.Store
	queue    *queue.Queue
	pipeline *stream.Pipeline

	mu     sync.Mutex
	wedges int // that the queue reported
}

func newNarrow(t *testing.T, room, rows int) *narrow {
	t.Helper()
	ctx := t.Context()
	n := &narrow{}
	var err error
	if n.schema, err = sluice.SchemaOf(sluice.EAGLE3); err != nil {
		t.Fatal(err)
	}
	target := targettest.New(targettest.Options{Hook: func(context.Context, targettest.Call) targettest.Fault {
		time.Sleep(time.Second)
		return targettest.Fault{}
	}})
	caps := sluice.Caps{MaxSamples: int64(room), MaxBytes: 1 << 20}
	if n.store, err = memstore.New(&memstore.Options{Caps: caps}); err != nil {
		t.Fatal(err)
	}
	n.queue, err = queue.Open(ctx, sluice.RunConfig{RunID: "r", Schema: n.schema, Caps: caps}, n.store, &queue.Options{OnEvent: func(e queue.Event) {
		if e.Kind == queue.EventWedged {
			n.mu.Lock()
			n.wedges++
			n.mu.Unlock()
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	producer, err := stream.NewProducer(stream.ProducerConfig{Target: target, Store: n.store, Queue: n.queue, Schema: n.schema, RunID: "r"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { producer.Close() })
	if n.pipeline, err = stream.NewPipeline(producer, n.queue, prompts(rows), &stream.PipelineOptions{OnEvent: func(stream.Event) {}}); err != nil {
		t.Fatal(err)
	}
	if err := n.pipeline.Start(ctx); err != nil {
		t.Fatal(err)
	}
	return n
}

func (n *narrow) loader(t *testing.T, name string, q sluice.Queue, change func(*stream.LoaderConfig)) *stream.Loader {
	t.Helper()
	cfg := stream.LoaderConfig{Queue: q, Store: n.store, Schema: n.schema, Consumer: sluice.Consumer{Name: name}, OnEvent: func(stream.Event) {}}
	if change != nil {
		change(&cfg)
	}
	l, err := stream.NewLoader(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func (n *narrow) wedged(t *testing.T) (reports int, s sluice.Status) {
	t.Helper()
	synctest.Wait()
	s, err := n.queue.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.wedges, s
}

// end consumes the rest, and fails the test if anything is left.
func (n *narrow) end(t *testing.T, rest int, loaders ...*stream.Loader) {
	t.Helper()
	ctx := t.Context()
	for ; ; rest-- {
		_, err := loaders[0].Next(ctx)
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = loaders[0].Step(ctx)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if rest != 0 {
		t.Errorf("%d batches more than there were", -rest)
	}
	for _, l := range loaders {
		if err := l.Close(ctx); err != nil {
			t.Error(err)
		}
	}
	if err := n.pipeline.Wait(ctx); err != nil {
		t.Error(err)
	}
	if h := n.store.Health(); h.UsedSamples() != 0 || h.UsedBytes() != 0 {
		t.Errorf("the store holds %+v", h)
	}
	n.queue.Stop(ctx)
	n.store.Close()
}

func onStep(c *stream.LoaderConfig) { c.Ack = stream.AckOnStep }

func mustNext(t *testing.T, l *stream.Loader) *stream.Batch {
	t.Helper()
	b, err := l.Next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestABusyTrainerWaitsForNothingAndIsNoPartOfAWedge(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNarrow(t, 1, 3)
		l := n.loader(t, "trainer", n.queue, onStep)
		mustNext(t, l)
		time.Sleep(20 * time.Minute) // the trainer is at work; its loader asks for more, and the producer waits for room
		wedges, s := n.wedged(t)
		if wedges != 0 || s.Wedged != "" || s.ProducersWaiting != 1 || !s.Starving || s.ConsumersWaiting != 0 || s.ConsumerWaited != time.Second || l.Stats().Waited != time.Second {
			t.Errorf("%d wedges reported, waited %v, status %+v", wedges, l.Stats().Waited, s)
		}
		start := time.Now()
		_, err := l.Next(t.Context()) // without a Step before it, there never will be room
		if took := time.Since(start); !errors.Is(err, sluice.ErrWedged) || took > 5*time.Second {
			t.Errorf("%v after %v, want ErrWedged within 5 s", err, took)
		}
		if wedges, s = n.wedged(t); wedges != 1 || s.ConsumerWaited != l.Stats().Waited {
			t.Errorf("%d wedges reported; consumers waited %v by the queue and %v in Next", wedges, s.ConsumerWaited, l.Stats().Waited)
		}
		if err := l.Step(t.Context()); err != nil {
			t.Fatal(err)
		}
		n.end(t, 2, l)
	})
}

func TestATrainerThatGaveUpWaitingIsNoPartOfAWedge(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNarrow(t, 1, 2)
		l := n.loader(t, "trainer", n.queue, onStep)
		mustNext(t, l)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := l.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Minute)
		if wedges, s := n.wedged(t); wedges != 0 || s.ConsumerWaited != 2*time.Second {
			t.Errorf("%d wedges reported, waited %v", wedges, s.ConsumerWaited)
		}
		if err := l.Step(t.Context()); err != nil {
			t.Fatal(err)
		}
		n.end(t, 1, l)
	})
}

// The queue tells all who wait of a wedge; whoever only asks ahead is not concerned.
func TestAWedgeOfOthersIsNoneOfABusyTrainers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNarrow(t, 1, 3)
		busy, holder := n.loader(t, "busy", n.queue, nil), n.loader(t, "holder", n.queue, onStep)
		mustNext(t, busy)
		got := make(chan error, 1)
		go func() {
			_, err := holder.Next(t.Context())
			got <- err
		}()
		synctest.Wait()
		if err := busy.ConsumeNow(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := <-got; err != nil {
			t.Fatal(err)
		}
		if _, err := holder.Next(t.Context()); !errors.Is(err, sluice.ErrWedged) {
			t.Errorf("got %v, want ErrWedged", err)
		}
		time.Sleep(time.Minute)
		if err := holder.Step(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := holder.Close(t.Context()); err != nil {
			t.Error(err)
		}
		n.end(t, 1, busy)
	})
}

// absentMinded loses the answer of whoever asked ahead, when the call is given up.
type absentMinded struct {
	sluice.Queue
	asked *[]sluice.AcquireRequest
}

func (q absentMinded) Acquire(ctx context.Context, r sluice.AcquireRequest) (sluice.Delivery, error) {
	*q.asked = append(*q.asked, r)
	d, err := q.Queue.Acquire(ctx, r)
	if err == nil && r.Ahead {
		<-ctx.Done()
		return sluice.Delivery{}, context.Cause(ctx)
	}
	return d, err
}

func TestNoLeaseIsLostWhenTheTrainerBeginsToWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		n := newNarrow(t, 5, 3)
		var asked []sluice.AcquireRequest
		l := n.loader(t, "trainer", absentMinded{n.queue, &asked}, onStep)
		first := mustNext(t, l).Samples[0]
		time.Sleep(10 * time.Second) // the second was leased, and the answer is on its way
		start := time.Now()
		second := mustNext(t, l).Samples[0]
		if second.Ref.SampleID() == first.Ref.SampleID() || second.Redelivery != 0 || time.Since(start) != 0 {
			t.Errorf("got %s (delivery %d) after %v, having had %s", second.Ref.SampleID(), second.Redelivery, time.Since(start), first.Ref.SampleID())
		}
		synctest.Wait()
		i := slices.IndexFunc(asked, func(r sluice.AcquireRequest) bool { return r.Ahead })
		if i < 0 || i+1 == len(asked) || asked[i+1].Ahead || asked[i+1].RequestID != asked[i].RequestID {
			t.Errorf("the calls were %+v, want one ahead, and the same again without", asked)
		}
		if err := l.Step(t.Context()); err != nil {
			t.Fatal(err)
		}
		n.end(t, 1, l)
	})
}
