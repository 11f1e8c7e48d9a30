package stream_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
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

// sim is a whole run: producers, gate, store, queue, loaders and their trainers, under a clock that stands still while anything can move.
type sim struct {
	cfg      sluice.RunConfig
	rows     []int // tokens of each
	workers  int   // of each producer
	forward  time.Duration
	loaders  int // ranks, where there are windows
	members  int // of each: those of a replica group have a loader each
	batch    int
	pulls    int // batches a step
	prefetch int
	ack      stream.AckMode
	train    time.Duration // a batch
	late     time.Duration // after which the trainers come
	failing  int           // every so many batches a trainer fails; 0 is never
	tight    bool          // the cap is below what the loaders need for full batches, which no run declares
}

// tokenBytes is what a token takes in the samples of a sim.
const tokenBytes = 3*4*4 + 3*8 + 4*4 // aux_hidden_states, ids and masks, last_hidden_states

var eagle3 = func() *sluice.Schema {
	s, err := sluice.SchemaOf(sluice.EAGLE3)
	if err != nil {
		panic(err)
	}
	return s
}()

func (s *sim) trainers() int { return s.loaders * s.members }

func drawSim(t *rapid.T) sim {
	s := sim{
		rows:     rapid.SliceOfN(rapid.IntRange(3, 12), 1, 40).Draw(t, "rows"),
		workers:  rapid.IntRange(1, 3).Draw(t, "workers"),
		forward:  rapid.SampledFrom([]time.Duration{0, 20 * time.Millisecond, 4 * time.Second}).Draw(t, "forward"),
		loaders:  rapid.IntRange(1, 3).Draw(t, "loaders"),
		members:  rapid.SampledFrom([]int{1, 1, 2}).Draw(t, "members"),
		batch:    rapid.IntRange(1, 3).Draw(t, "batch"),
		pulls:    rapid.IntRange(1, 3).Draw(t, "batches a step"),
		prefetch: rapid.SampledFrom([]int{-1, 1, 2, 3}).Draw(t, "prefetch"),
		ack:      rapid.SampledFrom([]stream.AckMode{stream.AckOnNext, stream.AckOnStep, stream.AckOnCheckpoint}).Draw(t, "ack"),
		train:    rapid.SampledFrom([]time.Duration{0, 30 * time.Millisecond, 7 * time.Second}).Draw(t, "train"),
		late:     rapid.SampledFrom([]time.Duration{0, 20 * time.Second}).Draw(t, "late"),
	}
	c := &s.cfg
	c.RunID, c.Producers, c.MaxFails = "r", rapid.IntRange(1, 2).Draw(t, "producers"), 1<<20
	c.LargestSample = int64(slices.Max(s.rows)*tokenBytes + rapid.SampledFrom([]int{0, 1, 500}).Draw(t, "larger"))
	steps := 1
	if s.ack == stream.AckOnCheckpoint {
		steps = rapid.IntRange(1, 3).Draw(t, "steps a checkpoint")
		c.StepsPerCheckpoint = steps
	}
	var need, least int // samples that are held by design and one more; fewest that the cap may have
	step := s.loaders * s.batch * s.pulls
	switch {
	case rapid.Bool().Draw(t, "windows"):
		short := rapid.IntRange(0, s.batch-1).Draw(t, "short") // so many samples the last batch of a step lacks
		c.Windows = &sluice.Windows{Ranks: s.loaders, PerRank: s.batch*s.pulls - short, Prefetch: rapid.IntRange(0, 2).Draw(t, "windows ahead"), DropTail: rapid.Bool().Draw(t, "drop tail")}
		need = (steps+c.Windows.Prefetch)*int(c.Windows.Size()) + 1
		least = need
	case s.ack == stream.AckOnNext:
		need, least = s.loaders*(s.batch-1)+1, 1
		s.failing = rapid.IntRange(0, 5).Draw(t, "failing")
	default:
		c.StepsPerCheckpoint, c.SamplesPerStep = steps, step
		need = steps*step + 1
		least = need
		s.failing = rapid.IntRange(0, 5).Draw(t, "failing")
	}
	if least == need {
		c.Schema = eagle3
		for _, few := range []sluice.Caps{{MaxSamples: int64(need - 1)}, {MaxBytes: int64(need)*c.LargestSample - 1}} {
			less := *c
			less.Caps = few
			if _, err := less.Resolve(); !errors.Is(err, sluice.ErrInvalid) {
				t.Fatalf("the caps %+v are accepted: %v", few, err)
			}
		}
	}
	room := rapid.IntRange(least, need+5).Draw(t, "room")
	s.tight = room < need
	if kind := rapid.IntRange(0, 2).Draw(t, "caps"); kind > 0 {
		c.Caps.MaxSamples = int64(room)
		c.Caps.HighWatermarkSamples, c.Caps.LowWatermarkSamples = drawMarks(t, c.Caps.MaxSamples)
		if kind == 2 {
			room = need + 5
		}
	}
	if c.Caps.MaxSamples == 0 || room == need+5 {
		c.Caps.MaxBytes = int64(room) * c.LargestSample
		c.Caps.HighWatermarkBytes, c.Caps.LowWatermarkBytes = drawMarks(t, c.Caps.MaxBytes)
	}
	return s
}

func drawMarks(t *rapid.T, limit int64) (high, low int64) {
	high = rapid.Int64Range(1, limit).Draw(t, "high")
	return high, rapid.Int64Range(0, high-1).Draw(t, "low")
}

// rowsOf gives every nth row from the ith.
func (s *sim) rowsOf(i, n int) stream.Source {
	return stream.FromSeq(func(yield func(*sluice.PromptBatch, error) bool) {
		for ; i < len(s.rows); i += n {
			ids := make([]int64, s.rows[i])
			for k := range ids {
				ids[k] = int64((7*i + k) % 60)
			}
			if !yield(row(1, ids...)) {
				return
			}
		}
	})
}

// barrier is where ranks wait for each other, as in a collective.
type barrier struct {
	mu      sync.Mutex
	n, here int
	open    chan struct{}
}

func (b *barrier) wait(ctx context.Context) error {
	b.mu.Lock()
	open := b.open
	if b.here++; b.here == b.n {
		b.here, b.open = 0, make(chan struct{})
		close(open)
	}
	b.mu.Unlock()
	select {
	case <-open:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// simRun is a sim that runs.
type simRun struct {
	*sim
	store     *memstore.Store
	queue     *queue.Queue
	pipelines []*stream.Pipeline
	step      barrier

	counts []int // batches by loader

	mu     sync.Mutex
	wedges int
}

func (s *sim) open(ctx context.Context, wrap func(sluice.Queue) sluice.Queue, onEvent func(stream.Event)) (*simRun, error) {
	s.cfg.Schema = eagle3
	r := &simRun{sim: s, counts: make([]int, s.trainers()), step: barrier{n: s.trainers(), open: make(chan struct{})}}
	var err error
	if r.store, err = memstore.New(&memstore.Options{Caps: s.cfg.Caps}); err != nil {
		return nil, err
	}
	r.queue, err = queue.Open(ctx, s.cfg, r.store, &queue.Options{OnEvent: func(e queue.Event) {
		if e.Kind == queue.EventWedged {
			r.mu.Lock()
			r.wedges++
			r.mu.Unlock()
		}
	}})
	if err != nil {
		return nil, err
	}
	var q sluice.Queue = r.queue
	if wrap != nil {
		q = wrap(q)
	}
	target := targettest.New(targettest.Options{Concurrent: s.workers > 1, Hook: func(context.Context, targettest.Call) targettest.Fault {
		time.Sleep(s.forward)
		return targettest.Fault{}
	}})
	for i := range max(s.cfg.Producers, 1) {
		p, err := stream.NewProducer(stream.ProducerConfig{Target: target, Store: r.store, Queue: q, Schema: s.cfg.Schema, RunID: "r"})
		if err != nil {
			return nil, err
		}
		pl, err := stream.NewPipeline(p, q, s.rowsOf(i, max(s.cfg.Producers, 1)), &stream.PipelineOptions{Workers: s.workers, OnEvent: onEvent})
		if err != nil {
			return nil, err
		}
		r.pipelines = append(r.pipelines, pl)
	}
	for _, pl := range r.pipelines {
		if err := pl.Start(ctx); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// train lets all trainers consume to the end.
func (r *simRun) trainAll(ctx context.Context, cancel context.CancelFunc) error {
	var trainers sync.WaitGroup
	var bad errorList
	for i := range r.trainers() {
		trainers.Go(func() {
			if err := r.trainer(ctx, i); err != nil {
				bad.add("trainer %d: %w", i, err)
				cancel() // the others may wait for it
			}
		})
	}
	trainers.Wait()
	return bad.err
}

// end ends the run, and reports what is left of it.
func (r *simRun) end(ctx context.Context) (sluice.Status, error) {
	var err error
	for _, pl := range r.pipelines {
		err = errors.Join(err, pl.Wait(ctx))
	}
	ctx = context.WithoutCancel(ctx)
	for _, pl := range r.pipelines {
		_ = pl.Stop(ctx) // where the wait was cut off
	}
	st, serr := r.queue.Status(ctx)
	if h := st.Health; err == nil && (h.UsedBytes() != 0 || h.UsedSamples() != 0) {
		err = fmt.Errorf("the store holds %+v", h)
	}
	return st, errors.Join(err, serr, r.queue.Stop(ctx), r.store.Close())
}

func (r *simRun) loader(i int, q sluice.Queue, store sluice.Store) (*stream.Loader, error) {
	c := sluice.Consumer{Name: fmt.Sprint("trainer-", i/r.members), Member: i % r.members, Members: r.members}
	if r.cfg.Windows != nil {
		c.Rank = i / r.members
	}
	return stream.NewLoader(stream.LoaderConfig{Queue: q, Store: store, Schema: r.cfg.Schema, Consumer: c,
		Batch: r.batch, Prefetch: r.prefetch, Ack: r.ack, OnEvent: func(stream.Event) {}})
}

// trainer consumes to the end. Ranks of windows step together.
func (r *simRun) trainer(ctx context.Context, i int) (err error) {
	l, err := r.loader(i, r.queue, r.store)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close(context.WithoutCancel(ctx))) }()
	time.Sleep(r.late)
	pulled, stepped := 0, 0
	for {
		_, err := l.Next(ctx)
		switch {
		case errors.Is(err, sluice.ErrWedged) && r.tight:
			continue
		case errors.Is(err, io.EOF) && l.Stats().Held > 0:
			if err := l.Checkpoint(ctx); err != nil {
				return err
			}
			continue
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		r.counts[i]++
		time.Sleep(r.train)
		if r.failing > 0 && r.counts[i]%r.failing == 0 && r.counts[i] < 3*len(r.rows) {
			if err := l.Fail(ctx, errors.New("not this time")); err != nil {
				return err
			}
			pulled = 0
			continue
		}
		if pulled++; pulled < r.pulls {
			continue
		}
		pulled = 0
		if r.cfg.Windows != nil {
			if err := r.step.wait(ctx); err != nil {
				return fmt.Errorf("rank %d waits for the others, which are not in step: %w", i, err)
			}
		}
		if r.ack == stream.AckOnNext {
			continue
		}
		if err := l.Step(ctx); err != nil {
			return err
		}
		if stepped++; r.ack == stream.AckOnCheckpoint && stepped%r.cfg.StepsPerCheckpoint == 0 {
			if err := l.Checkpoint(ctx); err != nil {
				return err
			}
		}
	}
}

// run lets the sim run to its end. In a run that its configuration promises to hold, somebody is always at work: in a forward, or in a batch.
func (s *sim) run(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 3*time.Hour, errors.New("nothing moves any more"))
	defer cancel()
	start := time.Now()
	r, err := s.open(ctx, nil, func(stream.Event) {})
	if err != nil {
		return err
	}
	err = r.trainAll(ctx, cancel)
	took := time.Since(start)
	st, eerr := r.end(ctx)
	if err = errors.Join(err, eerr); err != nil {
		return fmt.Errorf("%w; status %+v", err, st)
	}
	if st.Acked+st.TailDropped != int64(len(s.rows)) || st.Dead != 0 || st.TailDropped > 0 && !s.cfg.Windows.DropTail {
		return fmt.Errorf("%d rows, and in the end %+v", len(s.rows), st)
	}
	batches := 0
	for _, n := range r.counts {
		batches += n
		if r.cfg.Windows != nil && n != r.counts[0] {
			return fmt.Errorf("the ranks had %v batches", r.counts)
		}
	}
	most := s.late + time.Duration(len(s.rows))*s.forward + time.Duration(batches)*s.train
	if s.tight {
		most += time.Duration(batches+1) * 20 * time.Second // each batch of what there is comes after a wedge, and the producers ask again after some seconds
	} else if r.wedges > 0 {
		return fmt.Errorf("%d wedges were reported", r.wedges)
	}
	if took > most {
		return fmt.Errorf("took %v, want at most the %v of all work one after the other", took, most)
	}
	return nil
}

// Whatever the sizes, marks, windows and ways to acknowledge, a run that its configuration was accepted for gets all samples through, and nobody waits while nobody works.
func TestNoAcceptedRunWedges(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		s := drawSim(rt)
		var err error
		synctest.Test(t, func(t *testing.T) { err = s.run(t.Context()) })
		if err != nil {
			rt.Fatal(err)
		}
	})
}

// witness is a queue that remembers when something last moved, or began to wait.
type witness struct {
	sluice.Queue
	mu   sync.Mutex
	last time.Time
}

func (q *witness) see() {
	q.mu.Lock()
	q.last = time.Now()
	q.mu.Unlock()
}

func (q *witness) since() time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	return time.Since(q.last)
}

func (q *witness) Reserve(ctx context.Context, r sluice.ReserveRequest) (sluice.Reservation, error) {
	q.see()
	room, err := q.Queue.Reserve(ctx, r)
	if err == nil {
		q.see()
	}
	return room, err
}

func (q *witness) Put(ctx context.Context, r sluice.PutRequest) (sluice.PutStatus, error) {
	defer q.see()
	return q.Queue.Put(ctx, r)
}

func (q *witness) Acquire(ctx context.Context, r sluice.AcquireRequest) (sluice.Delivery, error) {
	if !r.Ahead {
		q.see()
	}
	d, err := q.Queue.Acquire(ctx, r)
	if err == nil {
		q.see()
	}
	return d, err
}

func (q *witness) Settle(ctx context.Context, r sluice.SettleRequest) ([]sluice.SettleResult, error) {
	defer q.see()
	return q.Queue.Settle(ctx, r)
}

// rotten is a store in which the first samples that are asked for cannot be read.
type rotten struct {
	sluice.Store
	mu  sync.Mutex
	n   int
	bad []string
}

func (s *rotten) Get(ctx context.Context, ref sluice.Ref) (*sluice.Tensors, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	bad := slices.Contains(s.bad, ref.SampleID())
	if !bad && len(s.bad) < s.n {
		s.bad, bad = append(s.bad, ref.SampleID()), true
	}
	if bad {
		return nil, &sluice.Error{Kind: sluice.Corrupt, Op: "rotten: get", Subject: ref.SampleID()}
	}
	return s.Store.Get(ctx, ref)
}

// stuck is a sim that must wedge: its trainers keep tensors, or never reach their checkpoint, or dead letters take the room that a window or checkpoint needs.
type stuck struct {
	sim
	kept, unacked bool
	dead          int
}

func drawStuck(t *rapid.T) stuck {
	s := stuck{sim: sim{
		workers: rapid.IntRange(1, 3).Draw(t, "workers"), forward: rapid.SampledFrom([]time.Duration{0, 20 * time.Millisecond, 4 * time.Second}).Draw(t, "forward"),
		loaders: rapid.IntRange(1, 2).Draw(t, "loaders"), members: 1, batch: rapid.IntRange(1, 3).Draw(t, "batch"), pulls: 1,
		prefetch: rapid.SampledFrom([]int{-1, 1, 2}).Draw(t, "prefetch"), train: rapid.SampledFrom([]time.Duration{0, 30 * time.Millisecond, 7 * time.Second}).Draw(t, "train"), ack: stream.AckOnNext,
	}}
	c := &s.cfg
	c.RunID, c.LargestSample = "r", 12*tokenBytes
	room, shortest := rapid.IntRange(1, 12).Draw(t, "room"), 3
	switch rapid.IntRange(0, 3).Draw(t, "why") {
	case 0:
		s.kept, s.tight = true, true
	case 1:
		s.unacked, s.ack, s.tight = true, stream.AckOnCheckpoint, true
		c.StepsPerCheckpoint, c.SamplesPerStep = rapid.IntRange(1, 3).Draw(t, "steps"), s.loaders*s.batch
		room += c.StepsPerCheckpoint * c.SamplesPerStep
	case 2: // the samples of a window, and one more
		share := rapid.IntRange(20, 24).Draw(t, "share") / s.loaders
		c.Windows = &sluice.Windows{Ranks: s.loaders, PerRank: share}
		room, shortest = share*s.loaders+1, 12
		s.dead = room / 10
	case 3: // those of a checkpoint
		s.unacked, s.ack = true, stream.AckOnCheckpoint
		c.SamplesPerStep = s.loaders * s.batch
		c.StepsPerCheckpoint = 20/c.SamplesPerStep + 1
		room, shortest = c.StepsPerCheckpoint*c.SamplesPerStep+1, 12
		s.dead = room / 10
	}
	n := room*12/shortest + room + 8 // more than there is room for, behind what is consumed before
	s.rows = rapid.SliceOfN(rapid.IntRange(shortest, 12), n, n).Draw(t, "rows")
	if rapid.Bool().Draw(t, "bytes") {
		c.Caps.MaxBytes = int64(room) * c.LargestSample
		c.Caps.HighWatermarkBytes, c.Caps.LowWatermarkBytes = drawMarks(t, c.Caps.MaxBytes)
	} else {
		c.Caps.MaxSamples = int64(room)
		c.Caps.HighWatermarkSamples, c.Caps.LowWatermarkSamples = drawMarks(t, c.Caps.MaxSamples)
	}
	return s
}

func (s *stuck) run(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 3*time.Hour, errors.New("nothing moves any more"))
	defer cancel()
	var q *witness
	var mu sync.Mutex
	var told []string // what producers and consumers were told
	freed := false    // afterwards a tight run may wedge again, unseen by the witness
	var bad errorList
	hear := func(who string, err error) {
		mu.Lock()
		defer mu.Unlock()
		if freed {
			return
		}
		told = append(told, who+err.Error())
		if d := q.since(); d > 5*time.Second {
			bad.add("%s was told %v after the last move", who, d)
		}
	}
	r, err := s.open(ctx, func(inner sluice.Queue) sluice.Queue {
		q = &witness{Queue: inner}
		return q
	}, func(e stream.Event) {
		if errors.Is(e.Err, sluice.ErrWedged) {
			hear("producer: ", e.Err)
		}
	})
	if err != nil {
		return err
	}
	var kept []*sluice.Tensors
	var loaders []*stream.Loader
	var trainers sync.WaitGroup
	store := &rotten{Store: r.store, n: s.dead}
	for i := range s.loaders {
		l, err := r.loader(i, q, store)
		if err != nil {
			return err
		}
		loaders = append(loaders, l)
		trainers.Go(func() {
			for {
				b, err := l.Next(ctx)
				if errors.Is(err, sluice.ErrWedged) {
					hear("consumer: ", err)
					return
				}
				if err != nil {
					bad.add("trainer %d was not told that the run is wedged: %w", i, err)
					cancel()
					return
				}
				for _, x := range b.Samples {
					if s.kept {
						mine, err := r.store.Get(ctx, x.Ref)
						if err != nil {
							bad.add("%w", err)
							return
						}
						mu.Lock()
						kept = append(kept, mine)
						mu.Unlock()
					}
				}
				time.Sleep(s.train)
			}
		})
	}
	trainers.Wait()
	synctest.Wait()
	st, err := r.queue.Status(context.WithoutCancel(ctx))
	if err != nil {
		return err
	}
	mu.Lock()
	bad.check(s.explain(st, told))
	freed = true
	mu.Unlock()
	// The run goes on when its operator does what the message advises.
	for _, x := range kept {
		bad.check(x.Release(ctx))
	}
	dead, err := q.DeadLetters(ctx)
	bad.check(err)
	for _, x := range dead {
		_, err := q.Drop(ctx, x.Ref.SampleID())
		bad.check(err)
	}
	for _, l := range loaders {
		bad.check(l.Checkpoint(ctx))
		bad.check(l.Close(ctx))
	}
	bad.check(r.trainAll(ctx, cancel))
	st, err = r.end(ctx)
	bad.check(err)
	if bad.err == nil && st.Acked+int64(s.dead) != int64(len(s.rows)) {
		bad.add("%d rows, and in the end %+v", len(s.rows), st)
	}
	return bad.err
}

func (e *errorList) check(err error) {
	if err != nil {
		e.add("%w", err)
	}
}

// explain says what is missing in what the status and the callers were told.
func (s *stuck) explain(st sluice.Status, told []string) error {
	h := st.Health
	var want []string
	held, leases := int64(0), 0
	for _, c := range st.Consumers {
		held += c.LeasedBytes
		leases += c.Leases
		if c.Leases > 0 {
			want = append(want, fmt.Sprintf("consumer %s holds %d leases of %d bytes while it waits", c.Name, c.Leases, c.LeasedBytes))
		}
	}
	if c := h.Caps; c.MaxBytes > 0 {
		want = append(want, fmt.Sprintf("%d of %d bytes are used", h.UsedBytes(), c.MaxBytes))
	} else {
		want = append(want, fmt.Sprintf("%d of %d samples are used", h.UsedSamples(), c.MaxSamples))
	}
	if s.dead > 0 {
		want = append(want, fmt.Sprintf("%d dead letters hold %d bytes", s.dead, h.DeadBytes))
	}
	if rest := h.ResidentBytes - held - h.DeadBytes; s.kept {
		want = append(want, fmt.Sprintf("%d bytes are of samples that the queue is done with", rest))
	}
	want = append(want, fmt.Sprintf("%d samples are pending", st.Pending), fmt.Sprintf("%d producers wait for room", s.workers))
	if s.unacked != (leases > 0) || int(h.DeadSamples) != s.dead {
		return fmt.Errorf("it wedged otherwise than it should: %+v", st)
	}
	if !s.kept && strings.Contains(st.Wedged, "done with") {
		return fmt.Errorf("the status blames tensors that nobody kept: %s", st.Wedged)
	}
	for _, w := range want {
		if !strings.Contains(st.Wedged, w) {
			return fmt.Errorf("the status says %q, and not %q", st.Wedged, w)
		}
	}
	for _, who := range []string{"producer: ", "consumer: "} {
		if !slices.ContainsFunc(told, func(s string) bool { return strings.HasPrefix(s, who) && strings.Contains(s, st.Wedged) }) {
			return fmt.Errorf("the status says %q, but what was told is\n%s", st.Wedged, strings.Join(told, "\n"))
		}
	}
	return nil
}

// What must wedge is reported within five seconds, in the status and in the calls of both sides that wait, with the numbers and with who holds what; and it goes on when that is seen to.
func TestARunThatMustWedgeSaysWhy(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		s := drawStuck(rt)
		var err error
		synctest.Test(t, func(t *testing.T) { err = s.run(t.Context()) })
		if err != nil {
			rt.Fatal(err)
		}
	})
}

// A rank that waited for the rest of its batch would hold its window open, so that the next never came; and once the producers are through nobody would call that a wedge.
func TestAWindowEndsABatchThatItsShareDoesNotFill(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := sim{rows: []int{3, 4, 5, 6, 7, 8, 9, 10}, workers: 1, loaders: 2, members: 1, batch: 2, pulls: 2, ack: stream.AckOnNext,
			cfg: sluice.RunConfig{RunID: "r", LargestSample: 10 * tokenBytes, Caps: sluice.Caps{MaxSamples: 7}, Windows: &sluice.Windows{Ranks: 2, PerRank: 3}}}
		if err := s.run(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// Batches are those of the windows, for all members of a group, also where a sample is passed over: what comes in its place is there at once for a consumer by itself and
// for the last member of a group, and for the others only when that one has passed over it too.
func TestBatchesKeepTheirWindowsWhereASampleIsPassedOver(t *testing.T) {
	t.Parallel()
	for form := range 24 {
		members, batch, bad, first := 1+form%2, 2+form/2%2, form/4%3, form/12
		synctest.Test(t, func(t *testing.T) {
			s := sim{rows: []int{3, 4, 5, 6, 7, 8}, workers: 1, loaders: 1, members: members, batch: batch, pulls: 1, prefetch: -1, ack: stream.AckOnStep,
				cfg: sluice.RunConfig{RunID: "r", LargestSample: 8 * tokenBytes, Caps: sluice.Caps{MaxSamples: 20}, Windows: &sluice.Windows{Ranks: 1, PerRank: 3, Prefetch: 1}}}
			ctx := t.Context()
			r, err := s.open(ctx, nil, func(stream.Event) {})
			if err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			samples, err := r.store.Samples(ctx)
			if err != nil {
				t.Fatal(err)
			}
			slices.SortFunc(samples, func(a, b sluice.SampleInfo) int { return strings.Compare(a.Ref.SampleID(), b.Ref.SampleID()) })
			store := &rotten{Store: r.store, bad: []string{samples[bad].Ref.SampleID()}}
			loaders := make([]*stream.Loader, members)
			for i := range loaders {
				if loaders[i], err = r.loader(i, r.queue, store); err != nil {
					t.Fatal(err)
				}
			}
			want := []string{"0 0", "0", "1 1", "1"} // windows
			if batch == 3 {
				want = []string{"0 0 0", "1 1 1"}
			}
			for _, want := range append(want, "EOF") {
				got, ids := make([]string, members), make([]string, members)
				var all sync.WaitGroup
				for k := range loaders {
					i := (k + first) % members
					all.Go(func() {
						b, err := loaders[i].Next(ctx)
						if err != nil {
							got[i] = err.Error()
							return
						}
						for _, x := range b.Samples {
							got[i] += fmt.Sprint(x.Window.Number, " ")
							ids[i] += fmt.Sprint(x.Ref.SampleID(), " ", x.Pad, " ")
						}
					})
					synctest.Wait() // the other member comes later
				}
				all.Wait()
				for i := range loaders {
					if strings.TrimSpace(got[i]) != want || ids[i] != ids[0] {
						t.Errorf("members %d, batch %d, bad %d: member %d has %q (%s), want %q; the first has %s", members, batch, bad, i, got[i], ids[i], want, ids[0])
					}
				}
				for _, l := range loaders {
					if err := l.Step(ctx); err != nil {
						t.Error(err)
					}
				}
			}
			for _, l := range loaders {
				if err := l.Close(ctx); err != nil {
					t.Error(err)
				}
			}
			if n, err := r.queue.Drop(ctx, store.bad...); n != 1 || err != nil {
				t.Errorf("%d dead letters, %v", n, err)
			}
			if _, err := r.end(ctx); err != nil {
				t.Error(err)
			}
		})
	}
}

// fading is a store whose samples can be read once.
type fading struct {
	sluice.Store
	err  error
	mu   sync.Mutex
	read map[string]bool
}

func (s *fading) Get(ctx context.Context, ref sluice.Ref) (*sluice.Tensors, error) {
	s.mu.Lock()
	faded := s.read[ref.SampleID()]
	s.read[ref.SampleID()] = true
	s.mu.Unlock()
	if faded {
		return nil, s.err
	}
	return s.Store.Get(ctx, ref)
}

// A place that nothing can fill keeps nobody: no batch waits for it, and no more is fetched in its stead.
func TestAPlaceThatStaysEmptyIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	for _, kind := range []sluice.Kind{sluice.Corrupt, sluice.NotFound} {
		synctest.Test(t, func(t *testing.T) {
			s := sim{rows: []int{3, 4, 5, 6, 7, 8}, workers: 1, loaders: 1, members: 1, batch: 2, pulls: 1, prefetch: -1, ack: stream.AckOnStep,
				cfg: sluice.RunConfig{RunID: "r", LargestSample: 8 * tokenBytes, Caps: sluice.Caps{MaxSamples: 20}, Windows: &sluice.Windows{Ranks: 1, PerRank: 2, Prefetch: 2}}}
			ctx := t.Context()
			r, err := s.open(ctx, nil, func(stream.Event) {})
			if err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			samples, err := r.store.Samples(ctx)
			if err != nil {
				t.Fatal(err)
			}
			slices.SortFunc(samples, func(a, b sluice.SampleInfo) int { return strings.Compare(a.Ref.SampleID(), b.Ref.SampleID()) })
			l, err := r.loader(0, r.queue, &fading{Store: r.store, err: &sluice.Error{Kind: kind}, read: map[string]bool{samples[0].Ref.SampleID(): true}})
			if err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			for i, want := range []int{1, 2, 2} {
				b, err := l.Next(ctx)
				if err != nil {
					t.Fatal(err)
				}
				if len(b.Samples) != want || b.Samples[0].Window.Number != int64(i) || l.Stats().Held > 2 || time.Since(start) > 0 {
					t.Errorf("batch %d has %d samples of window %d, and %d are held after %v; want %d, and 2 at most", i, len(b.Samples), b.Samples[0].Window.Number, l.Stats().Held, time.Since(start), want)
				}
				if err := l.Step(ctx); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := l.Next(ctx); !errors.Is(err, io.EOF) {
				t.Errorf("in the end: %v", err)
			}
			if err := l.Close(ctx); err != nil {
				t.Error(err)
			}
			if _, err := r.queue.Drop(ctx, samples[0].Ref.SampleID()); err != nil {
				t.Error(err)
			}
			if _, err := r.end(ctx); err != nil {
				t.Error(err)
			}
		})
	}
}
