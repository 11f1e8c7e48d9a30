package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue"
)

// blankStore answers at once and keeps nothing, so that the queue alone is measured.
type blankStore struct {
	sluice.ClaimStore
	health sluice.Health
}

const blankURI = "mem:blank"

func (*blankStore) URI() string                                          { return blankURI }
func (*blankStore) Samples(context.Context) ([]sluice.SampleInfo, error) { return nil, nil }
func (*blankStore) Claim(sluice.Ref, string) error                       { return nil }
func (*blankStore) Unclaim(sluice.Ref, string) error                     { return nil }
func (*blankStore) MarkDead(sluice.Ref, string, bool) error              { return nil }
func (s *blankStore) Health() sluice.Health                              { return s.health }
func (*blankStore) OnFreed(func()) func()                                { return func() {} }

// line is a queue over a blank store, with refs to put.
type line struct {
	q    *queue.Queue
	made int
	refs []sluice.Ref
	acks [1]sluice.Settlement // for reuse, as a consumer would
}

const cycles = 1000 // a turn: few enough for their refs to be in the cache, as refs are that were just made

func newLine(ctx context.Context, pending int) (*line, error) {
	schema, err := sluice.ParseSchema([]byte(`{"name":"bytes","version":1,"features":[{"name":"x","axes":["N"],"dtypes":["bool"],"required":true}]}`))
	if err != nil {
		return nil, err
	}
	caps, err := sluice.Caps{MaxBytes: 1 << 50}.Resolve()
	if err != nil {
		return nil, err
	}
	l := &line{}
	if l.q, err = queue.Open(ctx, sluice.RunConfig{RunID: runID, Schema: schema, Caps: caps}, &blankStore{health: sluice.Health{Caps: caps}}, nil); err != nil {
		return nil, err
	}
	for range pending {
		ref, err := l.ref()
		if err == nil {
			_, err = l.q.Put(ctx, sluice.PutRequest{Ref: ref})
		}
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return nil, errors.Join(err, l.stop(ctx))
		}
	}
	return l, nil
}

func (l *line) stop(ctx context.Context) error { return l.q.Stop(context.WithoutCancel(ctx)) }

func (l *line) ref() (sluice.Ref, error) {
	l.made++
	return sluice.NewRef(sluice.RefFields{
		SampleID: "s" + strconv.Itoa(l.made), RunID: runID, StoreURI: blankURI, Generation: sluice.NewGeneration(),
		Features:  []sluice.RefFeature{{Name: "x", Key: "x", Spec: sluice.Spec{Shape: []int64{100}, DType: sluice.Bool}}},
		Algorithm: "bytes", SchemaVersion: 1, NumTokens: 10, EstimatedBytes: 100, TargetModelVersion: "0", DraftWeightVersion: "0",
	})
}

// prepare makes the refs of the next turn.
func (l *line) prepare() error {
	l.refs = l.refs[:0]
	for range cycles {
		ref, err := l.ref()
		if err != nil {
			return err
		}
		l.refs = append(l.refs, ref)
	}
	return nil
}

// cycle puts, acquires and acknowledges as many samples as there are refs.
func (l *line) cycle(ctx context.Context) error {
	for _, ref := range l.refs {
		if _, err := l.q.Put(ctx, sluice.PutRequest{Ref: ref}); err != nil {
			return err
		}
		lease, err := acquire(ctx, l.q)
		if err != nil {
			return err
		}
		if err := ack(ctx, l.q, lease.ID, l.acks[:]); err != nil {
			return err
		}
	}
	return nil
}

// turn is a turn of cycles; making the refs does not count.
func (l *line) turn(ctx context.Context) (time.Duration, error) {
	if err := l.prepare(); err != nil {
		return 0, err
	}
	return timed(l.cycle)(ctx)
}

func acquire(ctx context.Context, q sluice.Queue) (sluice.Lease, error) {
	d, err := q.Acquire(ctx, sluice.AcquireRequest{Consumer: consumer, Wait: -1})
	if err == nil && len(d.Leases) != 1 {
		err = fmt.Errorf("acquire gave %d leases, want 1 (end %v)", len(d.Leases), d.End)
	}
	if err != nil {
		return sluice.Lease{}, err
	}
	return d.Leases[0], nil
}

// ack acknowledges a lease; acks is where its settlement may lie.
func ack(ctx context.Context, q sluice.Queue, id sluice.LeaseID, acks []sluice.Settlement) error {
	acks[0] = sluice.Settlement{Lease: id, Verdict: sluice.Ack}
	r, err := q.Settle(ctx, sluice.SettleRequest{Consumer: consumer, Settlements: acks})
	if err == nil && r[0].Status != sluice.Settled {
		err = fmt.Errorf("the ack was answered %q, want %q", r[0].Status, sluice.Settled)
	}
	return err
}

func (b *bench) queueJobs() []job {
	many, name := 1_000_000, "1,000,000"
	if b.o.Quick {
		many, name = 100_000, "100,000"
	}
	return []job{
		{name: "queue: put-acquire-ack, 100 pending, no bytes", unit: "cycles/s", floor: "insert, find, delete in a locked map of 100", run: b.queueFew},
		{name: "queue: put-acquire-ack, " + name + " pending, no bytes", unit: "cycles/s", floor: "the same at 100 pending",
			run: func(ctx context.Context) (float64, float64, error) { return b.queueMany(ctx, many) }},
		{name: "queue: put to a waiting consumer, no bytes", unit: "µs", floor: "send to a goroutine that waits at a channel", time: true, run: b.handOver},
		{name: "queue: allocations of put-acquire-ack, no bytes", unit: "allocs/cycle", run: b.allocations},
	}
}

func (b *bench) queueFew(ctx context.Context) (value, floor float64, err error) {
	l, err := newLine(ctx, 100)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, l.stop(ctx)) }()
	var mu sync.Mutex
	known := map[string]sluice.Ref{}
	var ids [100 + cycles]string
	for i := range ids {
		ids[i] = "s" + strconv.Itoa(i)
		if i < 100 {
			known[ids[i]] = sluice.Ref{}
		}
	}
	locked := func(f func()) {
		mu.Lock()
		defer mu.Unlock()
		f()
	}
	floorS, workS, err := b.turns(ctx, 201, timed(func(context.Context) error {
		for _, id := range ids[100:] {
			locked(func() { known[id] = sluice.Ref{} })
			locked(func() { _ = known[id].SampleID() })
			locked(func() { delete(known, id) })
		}
		return nil
	}), l.turn)
	return cycles / workS, cycles / floorS, err
}

func (b *bench) queueMany(ctx context.Context, pending int) (value, floor float64, err error) {
	few, err := newLine(ctx, 100)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, few.stop(ctx)) }()
	many, err := newLine(ctx, pending)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, many.stop(ctx)) }()
	runtime.GC() // of what making the refs has left
	floorS, workS, err := b.turns(ctx, 201, few.turn, many.turn)
	return cycles / workS, cycles / floorS, err
}

func (b *bench) allocations(ctx context.Context) (value, floor float64, err error) {
	l, err := newLine(ctx, 100)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, l.stop(ctx)) }()
	var before, after runtime.MemStats
	for range 2 { // the first is to warm up
		if err := l.prepare(); err != nil {
			return 0, 0, err
		}
		runtime.ReadMemStats(&before)
		if err := l.cycle(ctx); err != nil {
			return 0, 0, err
		}
		runtime.ReadMemStats(&after)
	}
	return float64(after.Mallocs-before.Mallocs) / cycles, 0, nil
}

// handOver measures from the call of put to the return of the acquire that waited for it, and the same of a bare channel.
func (b *bench) handOver(ctx context.Context) (value, floor float64, err error) {
	l, err := newLine(ctx, 0)
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, l.stop(ctx)) }()
	const times = 200
	floorS, workS, err := b.turns(ctx, 51, func(context.Context) (time.Duration, error) {
		var waits [times]time.Duration
		var waiting atomic.Bool
		ch, got := make(chan struct{}), make(chan time.Time)
		go func() { // ends with ch
			defer close(got)
			for {
				waiting.Store(true)
				if _, ok := <-ch; !ok {
					return
				}
				got <- time.Now()
			}
		}()
		for i := range waits {
			for !waiting.Load() {
				runtime.Gosched()
			}
			for range 10 { // until it has come to sleep
				runtime.Gosched()
			}
			waiting.Store(false)
			begun := time.Now()
			ch <- struct{}{}
			waits[i] = (<-got).Sub(begun)
		}
		close(ch)
		<-got
		return median(waits[:]), nil
	}, func(ctx context.Context) (time.Duration, error) { return l.handOvers(ctx, times) })
	return workS * 1e6, floorS * 1e6, err
}

// handOvers returns the median of n.
func (l *line) handOvers(ctx context.Context, n int) (time.Duration, error) {
	ctx, stop := context.WithCancel(ctx)
	type arrival struct {
		at  time.Time
		err error
	}
	got := make(chan arrival)
	through := make(chan struct{})
	defer func() { stop(); <-through }()
	go func() { // ends after n, or with ctx
		defer close(through)
		for range n {
			lease, err := acquire(ctx, l.q)
			at := time.Now()
			if err == nil {
				err = ack(ctx, l.q, lease.ID, l.acks[:])
			}
			select {
			case got <- arrival{at, err}:
			case <-ctx.Done():
			}
			if err != nil {
				return
			}
		}
	}()
	waits := make([]time.Duration, 0, n)
	for range n {
		ref, err := l.ref()
		if err != nil {
			return 0, err
		}
		for {
			s, err := l.q.Status(ctx)
			if err != nil {
				return 0, err
			}
			if s.ConsumersWaiting > 0 {
				break
			}
			if err := ctx.Err(); err != nil {
				return 0, err
			}
			runtime.Gosched()
		}
		begun := time.Now()
		if _, err := l.q.Put(ctx, sluice.PutRequest{Ref: ref}); err != nil {
			return 0, err
		}
		a := <-got
		if a.err != nil {
			return 0, a.err
		}
		waits = append(waits, a.at.Sub(begun))
	}
	return median(waits), nil
}
