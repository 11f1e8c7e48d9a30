package queue

import (
	"container/list"
	"context"
	"crypto/rand"
	"hash/maphash"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-ml/sluice"
)

const (
	// memory is how long settled leases and generations and the results of request ids are remembered.
	memory = 10 * time.Minute
	// memoryCount bounds each of these memories. What falls out is answered as if the time were up: a lease is stale, and of a generation
	// the store says that it is not there.
	memoryCount = 1 << 16
	// orphanTime is how long a recovered queue keeps samples that it claims and does not know: their put may still be repeated.
	orphanTime = time.Minute
	// compactRecords is the least number of records that is worth a snapshot.
	compactRecords = 10_000

	never = math.MaxInt64
)

// Options tune a Queue. A nil *Options is fine.
type Options struct {
	// Journal is where the queue writes what must survive. Nil: it lives in memory only. The caller closes it, after [Queue.Stop].
	Journal sluice.Journal
	Clock   sluice.Clock // SystemClock if nil
	// Owner is how the queue names itself to the store; "queue:" and the run id if empty. It must be the same when a queue is opened again.
	Owner string
	// OnPause and OnResume report the gate at its marks, OnEvent everything that an operator wants to see. They are called in order, outside every lock, and
	// may call the queue. They are called by whoever made the call that caused them, or by a goroutine of their own, so they should not take long.
	OnPause, OnResume func(sluice.Health)
	OnEvent           func(Event)
	Logger            *slog.Logger // discards if nil

	compactRecords int // for tests
	memoryCount    int
}

// Queue is the queue of one run. It implements [sluice.Queue]. Its zero value is not usable; see [Open].
type Queue struct {
	opts    Options
	store   sluice.ClaimStore
	room    room
	gate    *sluice.Gate
	clock   sluice.Clock
	log     *slog.Logger
	journal sluice.Journal
	runID   string
	uri     string
	owner   string
	unhook  func() // from the store's OnFreed
	began   time.Time
	base    int64 // q.now at began: nanoseconds since 1970
	system  bool  // clock is the system's

	events struct {
		mu   sync.Mutex
		list []Event
		busy bool
		some atomic.Bool
	}

	mu  sync.Mutex // guards everything below
	cfg sluice.RunConfig
	now int64 // of the latest call; never goes back

	closed    bool
	cause     error
	closeLSN  uint64
	stopped   bool
	broken    error // the journal's failure, or that the queue was stopped
	wedged    string
	gates     uint32 // counts changes of the version gates
	targets   map[string]bool
	minDraft  uint64
	seq       int64 // of the last put
	pending   int   // samples that wait for a lease, those in open windows included
	lists     [pendingLists]sampleList
	byID      map[string]*sample
	older     map[string][]*sample // dead letters without bytes, or kept samples, whose id was put again
	gone      recent[bygone]       // by putKey
	sieve     goneSieve
	kept      sampleList // samples that are gone, with the claim that pads need
	deadKept  sampleList // dead letters with their bytes, oldest first
	deadFreed sampleList // and without
	deadBytes int64      // of those kept
	taken     map[stream]*rangeSet
	orphans   map[string]sluice.Ref
	orphansAt int64

	seed        maphash.Seed
	leases      map[uint64]*lease // by key; see leaseByID
	spareSample *sample           // one that is gone, for the next put
	spareLease  *lease            // one that has ended, for the next
	spareTxn    *txn
	expiry      expiring        // leases that are out
	timeout     time.Duration   // as it was changed; 0 if it never was
	settled     recent[outcome] // by key
	ids         idSource
	order       int64 // of the last lease
	out         int   // samples that are leased
	requests    requestMemory

	consumers map[string]*consumer
	known     int64     // consumers that there ever were
	caller    *consumer // of the latest call: most often that of the next as well
	departed  list.List // those of them that have left, in that order
	crowd     int       // so many are looked through for such as went away without a word
	groups    bool      // one of them is or was a replica group
	producers map[string]*producer
	alive     producerList // producers that are watched, the longest silent first
	reserving int          // calls that wait at the gate for room

	shares  []share // one a rank; one if there are no windows
	touched bool    // one of them is
	windows windowState
	waiters int // acquires that wait, over all shares

	told    bool // what the gate was last told of starvation
	pulse   bool // a call went away empty-handed: the gate must hear of it once
	telling bool

	timerAt  int64 // when the armed timer fires
	timer    func() bool
	wedge    wedgeWatch
	count    counters
	waitSum  waitClock // consumers
	pauseSum waitClock // producers

	// The journal's side; see journal.go.
	lsn           uint64 // of the last record
	synced        uint64 // durable up to here
	batch         *batch
	flying        *batch
	flushing      bool
	journalFailed bool
	since         int // records since the last snapshot
	idle          chan struct{}
	bySeq         map[int64]*sample         // during a replay
	endedByID     map[sluice.LeaseID]*lease // likewise; of groups
}

// counters are the sums of Status; they survive.
type counters struct {
	Put         int64 `json:"put"`
	Delivered   int64 `json:"delivered"`
	Redelivered int64 `json:"redelivered"`
	Padded      int64 `json:"padded"`
	Acked       int64 `json:"acked"`
	Failed      int64 `json:"failed"`
	Expired     int64 `json:"expired"`
	Returned    int64 `json:"returned"`
	DeadTotal   int64 `json:"dead_total"`
	Dropped     int64 `json:"dropped"`
	TailDropped int64 `json:"tail_dropped"`
	Gated       int64 `json:"gated"`
	Stale       int64 `json:"stale"`
	TokensPut   int64 `json:"tokens_put"`
	TokensAcked int64 `json:"tokens_acked"`
	BytesPut    int64 `json:"bytes_put"`
	BytesAcked  int64 `json:"bytes_acked"`
	Windows     int64 `json:"windows"`
}

var _ sluice.Queue = (*Queue)(nil)

// Open starts the queue of a run over the store that its samples are in. With a journal that holds something it goes on where that ends: leases have
// their full time again, and samples that the store lost meanwhile become dead letters without bytes. The numbers of ranks, the version gates, the visibility timeout and the marks may have
// changed since the run began, so those of the journal count and not those of cfg. The context bounds the opening only.
//
// A run has one queue at a time; the journal fences a second one off. Call [Queue.Stop] to let go of the store, the timer and the journal.
func Open(ctx context.Context, cfg sluice.RunConfig, store sluice.ClaimStore, opts *Options) (*Queue, error) {
	cfg, err := cfg.Resolve()
	if err != nil {
		return nil, err
	}
	q := &Queue{
		store: store, cfg: cfg, runID: cfg.RunID, uri: store.URI(),
		byID: map[string]*sample{}, older: map[string][]*sample{}, taken: map[stream]*rangeSet{}, leases: map[uint64]*lease{}, seed: maphash.MakeSeed(),
		consumers: map[string]*consumer{}, producers: map[string]*producer{},
		timerAt: never, orphansAt: never,
	}
	if opts != nil {
		q.opts = *opts
	}
	q.clock, q.log, q.journal, q.owner = q.opts.Clock, q.opts.Logger, q.opts.Journal, q.opts.Owner
	if q.clock == nil {
		q.clock = sluice.SystemClock{}
	}
	if q.log == nil {
		q.log = slog.New(slog.DiscardHandler)
	}
	if q.owner == "" {
		q.owner = "queue:" + cfg.RunID
	}
	if q.opts.compactRecords == 0 {
		q.opts.compactRecords = compactRecords
	}
	if q.opts.memoryCount == 0 {
		q.opts.memoryCount = memoryCount
	}
	q.wedge.checkAt, q.wedge.since = never, never
	q.requests.init()
	q.gone.init(q.opts.memoryCount)
	q.sieve.init(q.opts.memoryCount)
	q.settled.init(q.opts.memoryCount)
	_, q.system = q.clock.(sluice.SystemClock)
	q.began = q.clock.Now()
	q.base = q.began.UnixNano()
	q.now = q.base
	q.batch = newBatch()
	q.setGates(cfg.TargetVersions, cfg.MinDraftVersion)
	q.setShape(cfg.Windows)
	q.room.ClaimStore = store
	q.gate = sluice.NewGate(&q.room, &sluice.GateOptions{
		Clock:    q.clock,
		OnPause:  func(h sluice.Health) { q.emitFromGate(Event{Kind: EventPaused, Health: h}) },
		OnResume: func(h sluice.Health) { q.emitFromGate(Event{Kind: EventResumed, Health: h}) },
	})
	replayed := 0
	if q.journal != nil {
		err := q.journal.Replay(ctx, func(r sluice.Record) error {
			replayed++
			return q.replay(r.Data)
		})
		if err != nil {
			return nil, err
		}
		q.since = replayed
		q.base = q.now // later than the clock says, if that was set back: the time of the queue goes on from its last record
	}
	q.unhook = store.OnFreed(q.gate.Poke)
	if err := q.recover(ctx, replayed > 0); err != nil {
		q.unhook()
		return nil, err
	}
	return q, nil
}

// recover makes the replayed state and the world agree.
func (q *Queue) recover(ctx context.Context, replayed bool) error {
	tx, err := q.begin()
	if err != nil {
		return err
	}
	out := q.expiry.all()
	q.expiry = expiring{}
	for _, l := range out {
		q.expiry.push(l, tx.now, max(l.line.timeout, q.cfg.VisibilityTimeout))
	}
	for _, p := range q.producers {
		p.seen = tx.now
		q.watch(p)
	}
	for _, c := range q.consumers {
		c.seen = tx.now
	}
	if q.closed {
		q.gate.Close(q.closedError("reserve"))
	}
	if replayed {
		if err := q.compareWithStore(ctx, tx); err != nil {
			q.mu.Unlock()
			return err
		}
	}
	if q.journal != nil && !replayed {
		q.write(tx, q.header(), false)
	}
	q.checkDone(tx)
	return q.end(tx)
}

// txn is one command: from taking the lock to the reply.
type txn struct {
	q     *Queue
	now   int64
	lsn   uint64 // must be durable before the reply
	calls []storeCall
	ended int // leases that ran out
}

var txns = sync.Pool{New: func() any { return new(txn) }}

// newTxn returns a transaction of the present moment: the last one if that has nothing left to do outside the lock.
func (q *Queue) newTxn() *txn {
	tx := q.spareTxn
	if tx == nil {
		tx = txns.Get().(*txn)
	}
	q.spareTxn = nil
	tx.q, tx.now, tx.lsn, tx.ended = q, q.now, 0, 0
	return tx
}

// begin takes the lock and brings the state up to the present: what has run out by now has run out before the command.
func (q *Queue) begin() (*txn, error) {
	q.mu.Lock()
	if q.broken != nil {
		err := q.broken
		q.mu.Unlock()
		return nil, err
	}
	q.tick()
	tx := q.newTxn()
	if q.now >= q.timerAt {
		q.due(tx)
	}
	q.forget()
	return tx, nil
}

// tick reads the clock. A wall clock that jumps does not disturb it.
func (q *Queue) tick() {
	var passed time.Duration
	if q.system {
		passed = time.Since(q.began) // it reads one clock where Now reads two
	} else {
		passed = q.clock.Now().Sub(q.began)
	}
	q.now = max(q.now, q.base+int64(passed))
}

// end serves those who wait, releases the lock, waits until what the reply rests on is durable, and then does what was left to do outside the lock.
func (q *Queue) end(tx *txn) error {
	q.dispatch(tx)
	q.watchWedge()
	q.arm()
	tell := q.pulse || q.starving() != q.told
	lsn, calls := tx.lsn, tx.calls
	if len(calls) == 0 {
		q.spareTxn = tx
	}
	q.mu.Unlock()
	var err error
	if lsn > 0 {
		err = q.wait(lsn)
	}
	if len(calls) > 0 {
		if err == nil {
			q.runCalls(calls)
		}
		clear(calls)
		tx.q, tx.calls = nil, calls[:0]
		txns.Put(tx)
	}
	if tell {
		q.tellGate()
	}
	q.dispatchEvents()
	return err
}

// endWith is end for a command that has failed with err.
func (q *Queue) endWith(tx *txn, err error) error {
	_ = q.end(tx) // the first error says more
	return err
}

// starving reports whether an acquire waits: it would not if anything were deliverable to it. When the queue is closed nothing can be put any more.
func (q *Queue) starving() bool { return q.waiters > 0 && !q.closed && q.broken == nil }

// tellGate keeps the gate informed. One goroutine at a time does, and it goes on until the gate knows the latest, so that two
// changes cannot overtake each other.
func (q *Queue) tellGate() {
	q.mu.Lock()
	if q.telling {
		q.mu.Unlock()
		return
	}
	q.telling = true
	for {
		want := q.starving()
		if want == q.told && !q.pulse {
			break
		}
		pulse := q.pulse && !want
		q.pulse, q.told = false, want
		q.mu.Unlock()
		if pulse {
			q.gate.SetStarving(true)
		}
		q.gate.SetStarving(want)
		q.mu.Lock()
	}
	q.telling = false
	q.mu.Unlock()
}

// forget lets go of what was remembered for long enough.
func (q *Queue) forget() {
	old := q.now - int64(memory)
	q.requests.forget(old)
}

// unname takes s out of the names.
func (q *Queue) unname(s *sample) {
	if q.byID[s.id] == s {
		delete(q.byID, s.id)
		return
	}
	list := q.older[s.id]
	for i, o := range list {
		if o == s {
			list = append(list[:i], list[i+1:]...)
			break
		}
	}
	if len(list) == 0 {
		delete(q.older, s.id)
	} else {
		q.older[s.id] = list
	}
}

// find returns the sample with the given id and generation that is here, or nil.
func (q *Queue) find(id, gen string) *sample {
	if s := q.byID[id]; s != nil && s.gen == gen {
		return s
	}
	for _, s := range q.older[id] {
		if s.gen == gen {
			return s
		}
	}
	return nil
}

// nextDue is the earliest moment at which something happens by itself.
func (q *Queue) nextDue() int64 {
	due := min(q.orphansAt, q.wedge.checkAt)
	if l := q.expiry.first(); l != nil {
		due = min(due, l.deadline)
	}
	if p := q.alive.head; p != nil && !q.closed {
		due = min(due, p.seen+int64(q.cfg.ProducerTimeout))
	}
	return due
}

// resume takes the lock again for a command that let go of it to ask the store. Time has not passed for it.
func (q *Queue) resume() (*txn, error) {
	q.mu.Lock()
	if q.broken != nil {
		err := q.broken
		q.mu.Unlock()
		return nil, err
	}
	return q.newTxn(), nil
}

// arm sets the timer if something is due before it fires. It is not set back when the earliest deadline goes away: it then fires once for nothing, which is
// cheaper than stopping and starting it with every lease.
func (q *Queue) arm() {
	due := q.nextDue()
	if due >= q.timerAt || q.broken != nil {
		return
	}
	if q.timer != nil {
		q.timer()
	}
	q.timerAt = due
	q.timer = q.clock.AfterFunc(time.Duration(max(due-q.now, 0)), q.onTimer)
}

func (q *Queue) onTimer() {
	tx, err := q.begin()
	if err != nil {
		return
	}
	q.disarm()    // if it was early, or an old one, it is armed again
	_ = q.end(tx) // whoever calls next hears of it
}

func (q *Queue) disarm() {
	if q.timer != nil {
		q.timer()
		q.timer = nil
	}
	q.timerAt = never
}

// due does what time has come for. It runs whenever the armed moment has passed, in the timer's goroutine or in that of a call which came first.
func (q *Queue) due(tx *txn) {
	q.disarm()
	q.expire(tx)
	q.loseProducers(tx)
	if q.now >= q.orphansAt {
		q.freeOrphans(tx)
	}
	if q.now >= q.wedge.checkAt {
		q.checkWedge()
	}
}

// Close ends the puts; see [sluice.Queue].
func (q *Queue) Close(_ context.Context, cause error) error {
	tx, err := q.begin()
	if err != nil {
		return err
	}
	if !q.closed {
		q.close(tx, cause)
	}
	tx.lsn = max(tx.lsn, q.closeLSN)
	return q.end(tx)
}

func (q *Queue) close(tx *txn, cause error) {
	r := closeRecord{T: "close", cause: cause}
	if cause != nil {
		r.Cause, r.Kind = clean(cause.Error(), 4096), sluice.KindOf(cause)
	}
	q.applyClose(&r)
	if q.journal != nil {
		q.write(tx, r, false)
		q.closeLSN = q.lsn
	}
	q.gate.Close(q.closedError("reserve"))
	q.emit(Event{Kind: EventClosed, Text: r.Cause})
	q.dispatch(tx)
	q.endWaiters()
}

func (q *Queue) applyClose(r *closeRecord) {
	q.closed = true
	if q.cause = r.cause; q.cause == nil && r.Cause != "" {
		kind := r.Kind
		if kind == "" {
			kind = sluice.TargetFault
		}
		q.cause = &sluice.Error{Kind: kind, Detail: r.Cause}
	}
}

func (q *Queue) closedError(op string) error {
	e := &sluice.Error{Kind: sluice.Closed, Op: "queue: " + op, Subject: q.runID, Detail: "the queue is closed"}
	if q.cause != nil {
		e.Err = q.cause
	}
	return e
}

// Stop lets go of the store, the timer and the journal, after what was written is durable. Whoever waits gets ErrUnavailable, and so does every later
// call: the run has not ended, it only goes on elsewhere or later. It is idempotent.
func (q *Queue) Stop(ctx context.Context) error {
	q.mu.Lock()
	if q.broken == nil {
		q.fail(&sluice.Error{Kind: sluice.Unavailable, Op: "queue", Subject: q.runID, Detail: "was stopped"})
	}
	first := !q.stopped
	q.stopped = true
	var idle chan struct{}
	if q.flushing {
		if q.idle == nil {
			q.idle = make(chan struct{})
		}
		idle = q.idle
	}
	q.mu.Unlock()
	if first {
		q.unhook()
	}
	q.dispatchEvents()
	if idle == nil {
		return nil
	}
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// fail makes the queue unavailable. The caller holds mu.
func (q *Queue) fail(err error) {
	q.broken = err
	for i := range q.shares {
		for w := q.shares[i].head; w != nil; w = q.shares[i].head {
			q.answer(w, sluice.Delivery{}, err)
		}
	}
	q.disarm()
	q.gate.Close(err)
}

// PendingCount is how many samples wait for a lease. (Upstream's pending_count.)
func (q *Queue) PendingCount() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.pending
}

// OutstandingCount is how many samples are leased. (Upstream's outstanding_count.)
func (q *Queue) OutstandingCount() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.out
}

// IsClosed reports whether the queue was closed; it may still hold samples.
func (q *Queue) IsClosed() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.closed
}

// idSource hands out random lease ids from a buffer: a call to the system's generator costs as much as a whole cycle.
type idSource struct {
	buf  [256 * len(sluice.LeaseID{})]byte
	left []byte
}

func (s *idSource) next() sluice.LeaseID {
	if len(s.left) == 0 {
		s.left = s.buf[:]
		rand.Read(s.left)
	}
	id := sluice.LeaseID(s.left)
	clear(s.left[:len(id)]) // an id that was given out is nowhere else to be read
	s.left = s.left[len(id):]
	return id
}

// clean makes text from outside fit to keep: valid, without control characters, at most limit bytes.
func clean(s string, limit int) string {
	out := make([]byte, 0, min(len(s), limit))
	for _, r := range s {
		switch {
		case r == '\n' || r == '\t':
			r = ' '
		case r < 0x20 || r >= 0x7f && r < 0xa0 || r == 0x2028 || r == 0x2029 || r >= 0x202a && r <= 0x202e || r >= 0x2066 && r <= 0x2069:
			continue
		}
		if len(out)+4 > limit && len(out)+len(string(r)) > limit {
			break
		}
		out = append(out, string(r)...)
	}
	return string(out)
}
