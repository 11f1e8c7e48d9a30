package stream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/target/targettest"
)

// The fakes keep the contract in its plainest form and fail on demand, so that this package's tests stand on nothing but the contract.

// fakeStore is a store in memory.
type fakeStore struct {
	caps sluice.Caps

	// Hooks run outside the lock, before the operation; an error is the operation's.
	beforePut, beforeGet, beforeReserve func(id string) error
	afterPut                            func(id string) error // the sample is stored, and the answer is the error

	mu       sync.Mutex
	samples  map[string]*fakeSample
	reserved map[string]int64
	pins     map[sluice.HandleID]*fakeSample
	mapped   int
	n        int
	freed    []func()
}

type fakeSample struct {
	ref      sluice.Ref
	features []sluice.Feature
	owner    string
	pins     int
}

var _ sluice.ClaimStore = (*fakeStore)(nil)

func newStore(t testing.TB, maxBytes int64) *fakeStore {
	t.Helper()
	caps, err := sluice.Caps{MaxBytes: maxBytes}.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	return &fakeStore{caps: caps, samples: map[string]*fakeSample{}, reserved: map[string]int64{}, pins: map[sluice.HandleID]*fakeSample{}}
}

func call(hook func(string) error, id string) error {
	if hook == nil {
		return nil
	}
	return hook(id)
}

func (s *fakeStore) URI() string { return "mem:fake" }

func (s *fakeStore) health() (h sluice.Health) {
	h.Caps = s.caps
	for _, x := range s.samples {
		h.ResidentBytes += x.ref.EstimatedBytes()
		h.ResidentSamples++
	}
	for _, n := range s.reserved {
		h.ReservedBytes += n
		h.ReservedSamples++
	}
	return h
}

func (s *fakeStore) Health() sluice.Health {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.health()
}

func (s *fakeStore) Reserve(ctx context.Context, n int64) (sluice.Reservation, error) {
	if err := call(s.beforeReserve, ""); err != nil {
		return sluice.Reservation{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.health().Fits(n) {
		return sluice.Reservation{}, &sluice.Error{Kind: sluice.Full, Op: "fake: reserve"}
	}
	s.n++
	r := sluice.Reservation{ID: fmt.Sprint(s.n), Bytes: n}
	s.reserved[r.ID] = n
	return r, nil
}

func (s *fakeStore) Unreserve(ctx context.Context, r sluice.Reservation) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	delete(s.reserved, r.ID)
	s.mu.Unlock()
	s.free()
	return nil
}

func (s *fakeStore) free() {
	s.mu.Lock()
	fs := slices.Clone(s.freed)
	s.mu.Unlock()
	for _, f := range fs {
		f()
	}
}

func (s *fakeStore) Put(ctx context.Context, x *sluice.Sample, r sluice.Reservation) (sluice.Ref, error) {
	if err := ctx.Err(); err != nil {
		return sluice.Ref{}, err
	}
	if err := call(s.beforePut, x.SampleID); err != nil {
		return sluice.Ref{}, err
	}
	f, err := x.RefFields(s.URI(), sluice.NewGeneration())
	if err != nil {
		return sluice.Ref{}, err
	}
	ref, err := sluice.NewRef(f)
	if err != nil {
		return ref, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.samples[x.SampleID] != nil {
		return sluice.Ref{}, &sluice.Error{Kind: sluice.Duplicate, Op: "fake: put", Subject: x.SampleID}
	}
	if n, ok := s.reserved[r.ID]; ok && n >= x.Bytes() {
		delete(s.reserved, r.ID)
	} else if !s.health().Fits(x.Bytes()) {
		return sluice.Ref{}, &sluice.Error{Kind: sluice.Full, Op: "fake: put", Subject: x.SampleID}
	}
	s.samples[x.SampleID] = &fakeSample{ref: ref, features: cloneFeatures(x.Features)}
	if err := call(s.afterPut, x.SampleID); err != nil {
		return sluice.Ref{}, err
	}
	return ref, nil
}

func cloneFeatures(features []sluice.Feature) (out []sluice.Feature) {
	for _, f := range features {
		t := sluice.NewTensor(f.DType, f.Shape...)
		copy(t.Data, f.Data)
		out = append(out, sluice.Feature{Name: f.Name, Tensor: t})
	}
	return out
}

func (s *fakeStore) Get(ctx context.Context, ref sluice.Ref) (*sluice.Tensors, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := call(s.beforeGet, ref.SampleID()); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.samples[ref.SampleID()]
	if x == nil || x.ref.Generation() != ref.Generation() {
		return nil, &sluice.Error{Kind: sluice.NotFound, Op: "fake: get", Subject: ref.SampleID()}
	}
	h := sluice.Handle{StoreURI: s.URI(), SampleID: ref.SampleID(), ID: sluice.NewHandleID()}
	x.pins++
	s.pins[h.ID] = x
	s.mapped++
	features := cloneFeatures(x.features)
	return sluice.NewTensors(s, h, features, func() error {
		for _, f := range features { // whoever looks at it after Close shall notice
			for i := range f.Data {
				f.Data[i] = 0xdd
			}
		}
		s.mu.Lock()
		s.mapped--
		s.mu.Unlock()
		return nil
	}), nil
}

func (s *fakeStore) drop(x *fakeSample) {
	if x.pins == 0 && x.owner == "" && s.samples[x.ref.SampleID()] == x {
		delete(s.samples, x.ref.SampleID())
	}
}

func (s *fakeStore) Release(ctx context.Context, h sluice.Handle) error {
	s.mu.Lock()
	if x := s.pins[h.ID]; x != nil {
		delete(s.pins, h.ID)
		x.pins--
		s.drop(x)
	}
	s.mu.Unlock()
	s.free()
	return nil
}

func (s *fakeStore) Abort(ctx context.Context, ref sluice.Ref) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	x := s.samples[ref.SampleID()]
	if x != nil && x.ref.Generation() == ref.Generation() {
		if x.owner != "" {
			s.mu.Unlock()
			return &sluice.Error{Kind: sluice.Conflict, Op: "fake: abort", Subject: ref.SampleID()}
		}
		delete(s.samples, ref.SampleID())
	}
	s.mu.Unlock()
	s.free()
	return nil
}

func (s *fakeStore) Claim(ref sluice.Ref, owner string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.samples[ref.SampleID()]
	if x == nil || x.ref.Generation() != ref.Generation() {
		return &sluice.Error{Kind: sluice.NotFound, Op: "fake: claim", Subject: ref.SampleID()}
	}
	x.owner = owner
	return nil
}

func (s *fakeStore) MarkDead(sluice.Ref, string, bool) error { return nil }

func (s *fakeStore) Unclaim(ref sluice.Ref, owner string) error {
	s.mu.Lock()
	if x := s.samples[ref.SampleID()]; x != nil && x.owner == owner {
		x.owner = ""
		s.drop(x)
	}
	s.mu.Unlock()
	s.free()
	return nil
}

func (s *fakeStore) Samples(context.Context) (out []sluice.SampleInfo, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.samples {
		out = append(out, sluice.SampleInfo{Ref: x.ref, Owner: x.owner, Pins: x.pins})
	}
	return out, nil
}

func (s *fakeStore) OnFreed(f func()) func() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.freed = append(s.freed, f)
	return func() {}
}

func (s *fakeStore) GC(context.Context) (int, error) { return 0, nil }
func (s *fakeStore) Close() error                    { return nil }

// corrupt replaces a stored feature.
func (s *fakeStore) corrupt(id string, f func(features []sluice.Feature) []sluice.Feature) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.samples[id].features = f(s.samples[id].features)
}

// fakeQueue is a queue in memory over a store.
type fakeQueue struct {
	store *fakeStore
	gate  *sluice.Gate

	visibility time.Duration
	maxFails   int
	producers  int
	steps      int           // a checkpoint, as the run declares
	wedgeAfter time.Duration // an acquire that waits for so long, and not ahead of need, is wedged; 0 is never

	// Hooks run outside the lock, before the operation; an error is the operation's.
	beforeReserve, beforePut, beforeAcquire, beforeSettle, beforeRenew, beforeReport, beforeStatus func() error
	// window, if set, gives the leases their slots.
	window func(n int, r sluice.Ref) *sluice.WindowSlot

	mu        sync.Mutex
	changed   chan struct{}
	pending   []*fakeEntry
	leased    map[sluice.LeaseID]*fakeEntry
	past      map[sluice.LeaseID]sluice.Verdict
	dead      []*fakeEntry
	closed    bool
	cause     error
	waiting   int
	delivered int
	reports   []sluice.ProducerReport
	positions []sluice.Position
	acked     []string
	returned  int
	renews    int
	left      int
}

type fakeEntry struct {
	ref        sluice.Ref
	tries      int
	fails      int
	lease      sluice.LeaseID
	consumer   string
	expire     *time.Timer
	lastReason string
}

func newQueue(s *fakeStore) *fakeQueue {
	q := &fakeQueue{store: s, gate: sluice.NewGate(s, nil), visibility: 30 * time.Second, maxFails: 5, producers: 1,
		changed: make(chan struct{}), leased: map[sluice.LeaseID]*fakeEntry{}, past: map[sluice.LeaseID]sluice.Verdict{}}
	s.OnFreed(q.gate.Poke)
	return q
}

func hooked(hook func() error) error {
	if hook == nil {
		return nil
	}
	return hook()
}

// change wakes all who wait. The caller holds mu.
func (q *fakeQueue) change() {
	close(q.changed)
	q.changed = make(chan struct{})
}

func (q *fakeQueue) starve() {
	q.mu.Lock()
	s := q.waiting > 0 && len(q.pending) == 0
	q.mu.Unlock()
	q.gate.SetStarving(s)
}

func (q *fakeQueue) Reserve(ctx context.Context, r sluice.ReserveRequest) (sluice.Reservation, error) {
	if err := hooked(q.beforeReserve); err != nil {
		return sluice.Reservation{}, err
	}
	return q.gate.Reserve(ctx, r.Bytes)
}

func (q *fakeQueue) Put(ctx context.Context, r sluice.PutRequest) (sluice.PutStatus, error) {
	if err := hooked(q.beforePut); err != nil {
		return "", err
	}
	if err := ctx.Err(); err != nil {
		return "", err
	}
	q.mu.Lock()
	closed := q.closed
	q.mu.Unlock()
	if closed {
		return "", &sluice.Error{Kind: sluice.Closed, Op: "fake: put"}
	}
	if err := q.store.Claim(r.Ref, "q"); err != nil {
		return "", err
	}
	q.mu.Lock()
	q.pending = append(q.pending, &fakeEntry{ref: r.Ref})
	q.positions = append(q.positions, r.Positions...)
	q.change()
	q.mu.Unlock()
	q.starve()
	return sluice.Enqueued, nil
}

func (q *fakeQueue) PutBlocksUntilBelow(ctx context.Context, r sluice.PutRequest, _ func() bool) (sluice.PutStatus, error) {
	return q.Put(ctx, r)
}

func (q *fakeQueue) Acquire(ctx context.Context, r sluice.AcquireRequest) (sluice.Delivery, error) {
	if err := hooked(q.beforeAcquire); err != nil {
		return sluice.Delivery{}, err
	}
	var wedge <-chan time.Time
	if q.wedgeAfter > 0 && !r.Ahead {
		t := time.NewTimer(q.wedgeAfter)
		defer t.Stop()
		wedge = t.C
	}
	for {
		q.mu.Lock()
		if len(q.pending) > 0 {
			var d sluice.Delivery
			for len(q.pending) > 0 && len(d.Leases) < max(r.Max, 1) {
				e := q.pending[0]
				q.pending = q.pending[1:]
				e.lease, e.consumer = sluice.NewLeaseID(), r.Consumer.Name
				l := sluice.Lease{ID: e.lease, Ref: e.ref, Consumer: e.consumer, Deadline: time.Now().Add(q.visibility), TimeLeft: q.visibility, Redelivery: e.tries}
				if q.window != nil {
					l.Window = q.window(q.delivered, e.ref)
				}
				q.delivered++
				e.tries++
				q.leased[e.lease] = e
				e.expire = time.AfterFunc(q.visibility, func() { q.expired(l.ID) })
				d.Leases = append(d.Leases, l)
			}
			q.mu.Unlock()
			return d, nil
		}
		mine := 0
		for _, e := range q.leased {
			if e.consumer == r.Consumer.Name {
				mine++
			}
		}
		if q.closed && (mine > 0 || len(q.leased) == 0) {
			d := sluice.Delivery{End: true, Cause: q.cause}
			q.mu.Unlock()
			return d, nil
		}
		changed := q.changed
		q.waiting++
		q.mu.Unlock()
		q.starve()
		var err error
		select {
		case <-changed:
		case <-ctx.Done():
			err = ctx.Err()
		case <-wedge:
			err = &sluice.Error{Kind: sluice.Wedged, Op: "fake: acquire"}
		}
		q.mu.Lock()
		q.waiting--
		q.mu.Unlock()
		q.starve()
		if err != nil {
			return sluice.Delivery{}, err
		}
	}
}

func (q *fakeQueue) expired(id sluice.LeaseID) {
	q.mu.Lock()
	if e := q.leased[id]; e != nil {
		delete(q.leased, id)
		q.pending = append(q.pending, e)
		q.change()
	}
	q.mu.Unlock()
	q.starve()
}

func (q *fakeQueue) Settle(ctx context.Context, r sluice.SettleRequest) ([]sluice.SettleResult, error) {
	if err := hooked(q.beforeSettle); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	out := make([]sluice.SettleResult, 0, len(r.Settlements))
	// Returns stand at the head in the order in which they are listed.
	order := slices.Clone(r.Settlements)
	if len(order) > 0 && order[0].Verdict == sluice.Return {
		slices.Reverse(order)
		defer func() { slices.Reverse(out) }()
	}
	for _, s := range order {
		q.mu.Lock()
		e := q.leased[s.Lease]
		if e == nil {
			as, known := q.past[s.Lease]
			res := sluice.SettleResult{Lease: s.Lease, Status: sluice.StaleLease}
			if known {
				res.Status, res.As = sluice.AlreadySettled, as
			}
			out = append(out, res)
			q.mu.Unlock()
			continue
		}
		e.expire.Stop()
		delete(q.leased, s.Lease)
		q.past[s.Lease] = s.Verdict
		res := sluice.SettleResult{Lease: s.Lease, Status: sluice.Settled, As: s.Verdict}
		unclaim := false
		switch s.Verdict {
		case sluice.Ack:
			q.acked = append(q.acked, e.ref.SampleID())
			unclaim = true
		case sluice.Return:
			q.returned++
			e.tries--
			q.pending = append([]*fakeEntry{e}, q.pending...)
		default:
			e.lastReason = s.Reason
			if e.fails++; e.fails >= q.maxFails || s.Verdict == sluice.FailPermanent {
				res.Dead = true
				q.dead = append(q.dead, e)
			} else {
				q.pending = append(q.pending, e)
			}
		}
		q.change()
		q.mu.Unlock()
		if unclaim {
			_ = q.store.Unclaim(e.ref, "q")
		}
		out = append(out, res)
	}
	q.starve()
	return out, nil
}

func (q *fakeQueue) Renew(ctx context.Context, r sluice.RenewRequest) ([]sluice.SettleResult, error) {
	if err := hooked(q.beforeRenew); err != nil {
		return nil, err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.renews++
	var out []sluice.SettleResult
	for _, id := range r.Leases {
		res := sluice.SettleResult{Lease: id, Status: sluice.StaleLease}
		if e := q.leased[id]; e != nil {
			e.expire.Reset(q.visibility)
			res.Status = sluice.Renewed
		} else if as, known := q.past[id]; known {
			res.Status, res.As = sluice.AlreadySettled, as
		}
		out = append(out, res)
	}
	return out, nil
}

func (q *fakeQueue) ReclaimExpired(context.Context) (int, error) { return 0, nil }

func (q *fakeQueue) Leave(ctx context.Context, c sluice.Consumer) error {
	q.mu.Lock()
	q.left++
	for id, e := range q.leased {
		if e.consumer == c.Name {
			e.expire.Stop()
			delete(q.leased, id)
			q.pending = append([]*fakeEntry{e}, q.pending...)
			q.change()
		}
	}
	q.mu.Unlock()
	return nil
}

func (q *fakeQueue) Report(ctx context.Context, r sluice.ProducerReport) error {
	if err := hooked(q.beforeReport); err != nil {
		return err
	}
	q.mu.Lock()
	q.reports = append(q.reports, r)
	done := 0
	var cause error
	for _, x := range q.reports {
		switch x.State {
		case sluice.ProducerDone:
			done++
		case sluice.ProducerFailed:
			cause = errors.New(x.Cause)
		}
	}
	q.mu.Unlock()
	if cause != nil || done >= q.producers {
		return q.Close(ctx, cause)
	}
	return nil
}

func (q *fakeQueue) Taken(context.Context, string) ([]sluice.Taken, error) { return nil, nil }

func (q *fakeQueue) DeadLetters(context.Context) (out []sluice.DeadLetter, _ error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, e := range q.dead {
		out = append(out, sluice.DeadLetter{Ref: e.ref, Fails: e.fails, Reasons: []string{e.lastReason}})
	}
	return out, nil
}

func (q *fakeQueue) Requeue(context.Context, ...string) (int, error) { return 0, nil }

func (q *fakeQueue) Drop(ctx context.Context, ids ...string) (n int, _ error) {
	q.mu.Lock()
	dead := q.dead
	q.dead = nil
	for _, e := range dead {
		if !slices.Contains(ids, e.ref.SampleID()) {
			q.dead = append(q.dead, e)
		}
	}
	q.mu.Unlock()
	for _, e := range dead {
		if slices.Contains(ids, e.ref.SampleID()) {
			n++
			_ = q.store.Unclaim(e.ref, "q")
		}
	}
	return n, nil
}

func (q *fakeQueue) Reshape(context.Context, int, int) error { return nil }

func (q *fakeQueue) Status(context.Context) (sluice.Status, error) {
	if err := hooked(q.beforeStatus); err != nil {
		return sluice.Status{}, err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return sluice.Status{RunID: "r1", StepsPerCheckpoint: q.steps, Pending: len(q.pending), Outstanding: len(q.leased), Dead: len(q.dead), Closed: q.closed, Acked: int64(len(q.acked))}, nil
}

func (q *fakeQueue) Close(_ context.Context, cause error) error {
	q.mu.Lock()
	if !q.closed {
		q.closed, q.cause = true, cause
		q.change()
	}
	q.mu.Unlock()
	q.gate.Close(nil)
	return nil
}

func (q *fakeQueue) lastReport() sluice.ProducerReport {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.reports) == 0 {
		return sluice.ProducerReport{}
	}
	return q.reports[len(q.reports)-1]
}

func (q *fakeQueue) ackedIDs() []string {
	q.mu.Lock()
	defer q.mu.Unlock()
	return slices.Clone(q.acked)
}

// clean fails the test if anything is left of what was produced, dead letters aside.
func clean(t testing.TB, s *fakeStore, q *fakeQueue) {
	t.Helper()
	if q != nil {
		dead, _ := q.DeadLetters(t.Context())
		for _, d := range dead {
			_, _ = q.Drop(context.Background(), d.Ref.SampleID())
		}
		if st, _ := q.Status(t.Context()); st.Outstanding != 0 {
			t.Errorf("%d leases are left", st.Outstanding)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.health()
	if h.ResidentSamples != 0 || h.ReservedSamples != 0 || h.ResidentBytes != 0 || h.ReservedBytes != 0 || len(s.pins) != 0 || s.mapped != 0 {
		t.Errorf("the store holds %d samples, %d reservations, %d pins, %d mappings; want nothing", h.ResidentSamples, h.ReservedSamples, len(s.pins), s.mapped)
	}
}

// prompts gives n batches of one row each, of 3 to 8 tokens, all but the first supervised.
func prompts(n int) []*sluice.PromptBatch {
	var out []*sluice.PromptBatch
	for i := range n {
		var ids []int64
		for t := range 3 + i%6 {
			ids = append(ids, int64((7*i+t)%60))
		}
		b := plain(ids, 1)
		b.Positions = []sluice.Position{{Source: "set", Index: int64(i)}}
		out = append(out, b)
	}
	return out
}

// plain is a batch of one row whose tokens from the given one on are supervised.
func plain(ids []int64, from int) *sluice.PromptBatch {
	n := int64(len(ids))
	b := &sluice.PromptBatch{InputIDs: sluice.TensorOf(sluice.Int64, ids, 1, n), AttentionMask: sluice.NewTensor(sluice.Int64, 1, n), LossMask: sluice.NewTensor(sluice.Int64, 1, n)}
	for i := range ids {
		sluice.View[int64](b.AttentionMask)[i] = 1
		if i >= from {
			sluice.View[int64](b.LossMask)[i] = 1
		}
	}
	return b
}

func batches(list []*sluice.PromptBatch) Source {
	return FromSeq(func(yield func(*sluice.PromptBatch, error) bool) {
		for _, b := range list {
			if !yield(b, nil) {
				return
			}
		}
	})
}

func schema(t testing.TB, a sluice.Algorithm) *sluice.Schema {
	t.Helper()
	s, err := sluice.SchemaOf(a)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// rig is a producer over fakes.
type rig struct {
	target   *targettest.Fake
	store    *fakeStore
	queue    *fakeQueue
	producer *Producer
}

// newRig makes an eagle3 rig. Samples are some hundred bytes.
func newRig(t testing.TB, maxBytes int64, o targettest.Options, change func(*ProducerConfig)) *rig {
	t.Helper()
	r := &rig{target: targettest.New(o), store: newStore(t, maxBytes)}
	r.queue = newQueue(r.store)
	cfg := ProducerConfig{Target: r.target, Store: r.store, Queue: r.queue, Schema: schema(t, sluice.EAGLE3), RunID: "r1"}
	if change != nil {
		change(&cfg)
	}
	p, err := NewProducer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	r.producer = p
	t.Cleanup(func() { p.Close() })
	return r
}

func quiet(Event) {}

func (r *rig) pipeline(t testing.TB, src Source, o PipelineOptions) *Pipeline {
	t.Helper()
	if o.OnEvent == nil {
		o.OnEvent = quiet
	}
	p, err := NewPipeline(r.producer, r.queue, src, &o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func (r *rig) loader(t testing.TB, change func(*LoaderConfig)) *Loader {
	t.Helper()
	cfg := LoaderConfig{Queue: r.queue, Store: r.store, Schema: schema(t, sluice.EAGLE3), Consumer: sluice.Consumer{Name: "trainer"}, OnEvent: quiet}
	if change != nil {
		change(&cfg)
	}
	l, err := NewLoader(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// fill produces and enqueues n samples and closes the queue.
func (r *rig) fill(t testing.TB, n int) []sluice.Ref {
	t.Helper()
	var refs []sluice.Ref
	for _, b := range prompts(n) {
		ref, err := r.producer.Produce(t.Context(), b)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.queue.Put(t.Context(), sluice.PutRequest{Ref: ref}); err != nil {
			t.Fatal(err)
		}
		refs = append(refs, ref)
	}
	_ = r.queue.Close(t.Context(), nil)
	return refs
}
