package queue

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/sluice-ml/sluice"
)

// producer is a named producer session.
type producer struct {
	name        string
	incarnation int64
	state       sluice.ProducerState
	put         int64
	seen        int64
	waiting     int // its calls that wait; while there are any it is alive
	granted     int64
	lost        bool
	calls       map[*producerCall]struct{}

	prev, next *producer
	watched    bool
}

// producerCall is a call that waits for a producer, so that a successor can end it.
type producerCall struct {
	cancel context.CancelCauseFunc
}

// producerList is a doubly linked list of the producers that are watched, the longest silent first.
type producerList struct{ head, tail *producer }

func (l *producerList) remove(p *producer) {
	if p.prev == nil {
		l.head = p.next
	} else {
		p.prev.next = p.next
	}
	if p.next == nil {
		l.tail = p.prev
	} else {
		p.next.prev = p.prev
	}
	p.prev, p.next = nil, nil
}

// watch puts p at the end of those that are watched, or out of them if it need not be.
func (q *Queue) watch(p *producer) {
	if p.watched {
		q.alive.remove(p)
		p.watched = false
	}
	if p.state != sluice.ProducerRunning || p.waiting > 0 {
		return
	}
	if p.prev = q.alive.tail; p.prev == nil {
		q.alive.head = p
	} else {
		p.prev.next = p
	}
	q.alive.tail = p
	p.watched = true
}

// producer returns the session that calls, registers it, or lets a newer incarnation take over; nil for the anonymous producer.
func (q *Queue) producer(tx *txn, k sluice.Producer, op string) (*producer, error) {
	if k.Name == "" {
		return nil, nil
	}
	p := q.producers[k.Name]
	if p != nil && p.incarnation == k.Incarnation {
		p.seen = q.now
		q.watch(p)
		return p, nil
	}
	if err := sluice.ValidateID(k.Name); err != nil {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: "queue: " + op, Detail: "the producer's name", Err: err}
	}
	if k.Incarnation < 0 || k.Incarnation >= 1<<53 {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: "queue: " + op, Subject: k.Name, Detail: fmt.Sprintf("incarnation is %d, want 0 up to 2^53", k.Incarnation)}
	}
	if p != nil && k.Incarnation < p.incarnation {
		q.count.Stale++
		return nil, &sluice.Error{Kind: sluice.Stale, Op: "queue: " + op, Subject: k.Name, Detail: fmt.Sprintf("producer incarnation %d was superseded by %d", k.Incarnation, p.incarnation)}
	}
	if p != nil {
		q.emit(Event{Kind: EventTakeover, Subject: k.Name, Text: fmt.Sprintf("producer incarnation %d takes over from %d", k.Incarnation, p.incarnation)})
		for call := range p.calls {
			call.cancel(&sluice.Error{Kind: sluice.Stale, Op: "queue: reserve", Subject: k.Name, Detail: fmt.Sprintf("producer incarnation %d was superseded by %d", p.incarnation, k.Incarnation)})
		}
	}
	r := producerRecord{T: "producer", Name: k.Name, Incarnation: k.Incarnation, State: sluice.ProducerRunning}
	q.applyProducer(&r)
	if q.journal != nil {
		q.write(tx, r, false)
	}
	return q.producers[k.Name], nil
}

func (q *Queue) applyProducer(r *producerRecord) {
	p := q.producers[r.Name]
	if p == nil {
		p = &producer{name: r.Name}
		q.producers[r.Name] = p
	}
	if r.Incarnation != p.incarnation {
		p.waiting, p.calls = 0, nil // those of the old one end by themselves
	}
	p.incarnation, p.state, p.seen = r.Incarnation, r.State, q.now
	q.watch(p)
}

// Report registers a producer session, keeps it alive, or ends it; see [sluice.Queue].
func (q *Queue) Report(_ context.Context, r sluice.ProducerReport) error {
	switch r.State {
	case sluice.ProducerRunning, sluice.ProducerDone, sluice.ProducerFailed:
	default:
		return &sluice.Error{Kind: sluice.Invalid, Op: "queue: report", Subject: r.Producer.Name, Detail: "state is " + clean(string(r.State), 40) + ", want running, done or failed"}
	}
	if r.Producer.Name == "" {
		return &sluice.Error{Kind: sluice.Invalid, Op: "queue: report", Detail: "the producer has no name; an anonymous one is not watched, and its queue is closed by hand"}
	}
	tx, err := q.begin()
	if err != nil {
		return err
	}
	p, err := q.producer(tx, r.Producer, "report")
	if err != nil {
		return q.endWith(tx, err)
	}
	switch {
	case r.State == p.state:
	case p.state != sluice.ProducerRunning && r.State == sluice.ProducerRunning:
		err = &sluice.Error{Kind: sluice.Conflict, Op: "queue: report", Subject: p.name, Detail: "the session has reported " + string(p.state) + "; a restart needs a newer incarnation"}
	default:
		rec := producerRecord{T: "producer", Name: p.name, Incarnation: p.incarnation, State: r.State}
		q.applyProducer(&rec)
		if q.journal != nil {
			q.write(tx, rec, false)
		}
		if r.State == sluice.ProducerFailed && !q.closed {
			cause := clean(r.Cause, 4096)
			if cause == "" {
				cause = "it gave no cause"
			}
			q.close(tx, &sluice.Error{Kind: sluice.TargetFault, Op: "producer", Subject: p.name, Detail: "failed: " + cause})
		}
		q.checkDone(tx)
	}
	if e := q.end(tx); e != nil {
		return e
	}
	return err
}

// checkDone closes the queue when all of the run's producers are done: as many as it declares, and every one that ever came.
func (q *Queue) checkDone(tx *txn) {
	if q.closed || len(q.producers) < q.cfg.Producers {
		return
	}
	for _, p := range q.producers {
		if p.state != sluice.ProducerDone {
			return
		}
	}
	q.close(tx, nil)
}

// loseProducers closes the queue if a producer was silent for too long and no successor came.
func (q *Queue) loseProducers(tx *txn) {
	p := q.alive.head
	if p == nil || q.closed || q.now < p.seen+int64(q.cfg.ProducerTimeout) {
		return
	}
	p.lost = true
	text := fmt.Sprintf("producer %s lost: nothing was heard of it for %v", p.name, q.cfg.ProducerTimeout)
	q.emit(Event{Kind: EventProducerLost, Subject: p.name, Text: text})
	q.close(tx, &sluice.Error{Kind: sluice.TargetFault, Detail: text})
}

// startWait notes that a producer's call begins to wait, and returns a context that a successor of the producer ends.
func (q *Queue) startWait(ctx context.Context, p *producer) (context.Context, *producerCall) {
	ctx, cancel := context.WithCancelCause(ctx)
	call := &producerCall{cancel: cancel}
	if p != nil {
		p.waiting++
		if p.calls == nil {
			p.calls = map[*producerCall]struct{}{}
		}
		p.calls[call] = struct{}{}
		q.watch(p)
	}
	q.pauseSum.start(q.now)
	return ctx, call
}

// stopWait ends that, under the lock, and reports whether the producer has been superseded meanwhile.
func (q *Queue) stopWait(p *producer, call *producerCall) (superseded bool) {
	call.cancel(nil)
	q.pauseSum.stop(q.now)
	if p == nil {
		return false
	}
	if _, ok := p.calls[call]; !ok {
		return true
	}
	delete(p.calls, call)
	p.waiting--
	p.seen = q.now
	q.watch(p)
	return false
}

// Reserve waits at the run's gate; see [sluice.Queue]. A repeated request gets the reservation of the first, as long as this process lives: a
// reservation ends with it anyway.
func (q *Queue) Reserve(ctx context.Context, r sluice.ReserveRequest) (sluice.Reservation, error) {
	if err := checkRequestID(r.RequestID); err != nil {
		return sluice.Reservation{}, err
	}
	for {
		room, again, err := q.reserve(ctx, &r)
		if again == nil {
			return room, err
		}
		select {
		case <-again:
		case <-ctx.Done():
			return sluice.Reservation{}, context.Cause(ctx)
		}
	}
}

func (q *Queue) reserve(ctx context.Context, r *sluice.ReserveRequest) (room sluice.Reservation, again <-chan struct{}, err error) {
	tx, err := q.begin()
	if err != nil {
		return room, nil, err
	}
	p, err := q.producer(tx, r.Producer, "reserve")
	key := requestKey{'r', r.Producer.Name, r.Producer.Incarnation, 0, r.RequestID}
	if err == nil && r.RequestID != "" {
		if known := q.requests.find(key, q.now); known != nil {
			room = known.room
			if known.done != nil {
				again = known.done
			}
			return room, again, q.end(tx)
		}
	}
	if err == nil && q.closed {
		err = q.closedError("reserve")
	}
	if err != nil {
		return room, nil, q.endWith(tx, err)
	}
	var pending *request
	if r.RequestID != "" {
		pending = q.requests.add(key, q.now)
		pending.done = make(chan struct{})
	}
	wctx, call := q.startWait(ctx, p)
	q.reserving++
	if err = q.end(tx); err == nil {
		room, err = q.gate.Reserve(wctx, r.Bytes)
	}

	q.mu.Lock()
	q.tick()
	q.reserving--
	superseded := q.stopWait(p, call)
	if err == nil {
		q.moved()
		q.wedge.granted = q.now
		if p != nil {
			p.granted = q.now
		}
	}
	if pending != nil {
		close(pending.done)
		pending.done, pending.room, pending.at = nil, room, q.now
		if err != nil || superseded {
			q.requests.remove(pending)
		}
	}
	q.arm()
	q.mu.Unlock()
	q.dispatchEvents()
	if superseded && err == nil {
		// Granted in the moment in which the successor came: nobody else knows of it.
		if err := q.guarded(func() error { return q.store.Unreserve(context.WithoutCancel(ctx), room) }); err != nil {
			q.log.Warn("queue: the store refused", "run", q.runID, "reservation", room.ID, "call", "unreserve", "err", err)
		}
		q.gate.Poke()
		return sluice.Reservation{}, nil, &sluice.Error{Kind: sluice.Stale, Op: "queue: reserve", Subject: r.Producer.Name, Detail: "the producer was superseded"}
	}
	return room, nil, err
}

// check says why a ref does not belong here. It looks at nothing that changes.
func (q *Queue) check(ref sluice.Ref) error {
	fail := func(kind sluice.Kind, detail string) error {
		return &sluice.Error{Kind: kind, Op: "queue: put", Subject: ref.SampleID(), Detail: detail}
	}
	switch {
	case ref.IsZero():
		return fail(sluice.Invalid, "the ref is empty")
	case ref.RunID() != q.runID && !q.cfg.Mixed:
		return fail(sluice.Invalid, fmt.Sprintf("was made for run %q, this is the queue of %q", ref.RunID(), q.runID))
	case ref.StoreURI() != q.uri:
		return fail(sluice.Invalid, fmt.Sprintf("is in the store %q, this queue's store is %q", clean(ref.StoreURI(), 200), q.uri))
	}
	if q.cfg.Mixed {
		return nil
	}
	if err := q.cfg.Schema.Validate(ref); err != nil {
		return &sluice.Error{Kind: sluice.SchemaError, Op: "queue: put", Subject: ref.SampleID(), Err: err}
	}
	return nil
}

// passes reports, as an error, which version gate keeps a ref out. The caller holds mu.
func (q *Queue) passes(ref sluice.Ref) error {
	if len(q.targets) > 0 && !q.targets[ref.TargetModelVersion()] {
		return fmt.Errorf("target model version %s is not let in", ref.TargetModelVersion())
	}
	if q.cfg.MinDraftVersion != "" {
		if v, ok := sluice.ParseVersion(ref.DraftWeightVersion()); !ok || v < q.minDraft {
			return fmt.Errorf("draft weight version %s is not %s or more", ref.DraftWeightVersion(), q.cfg.MinDraftVersion)
		}
	}
	return nil
}

// Put enqueues a ref; see [sluice.Queue].
func (q *Queue) Put(ctx context.Context, r sluice.PutRequest) (sluice.PutStatus, error) {
	if err := q.check(r.Ref); err != nil {
		return "", err
	}
	if len(r.Positions) > 0 {
		if err := checkPositions(r.Positions); err != nil {
			return "", err
		}
	}
	for {
		status, again, err := q.put(&r)
		if again == nil {
			return status, err
		}
		select {
		case <-again:
		case <-ctx.Done():
			return "", context.Cause(ctx)
		}
	}
}

// put is one attempt. If a put of the same id is asking the store, it returns what to wait for before the next.
func (q *Queue) put(r *sluice.PutRequest) (sluice.PutStatus, <-chan struct{}, error) {
	tx, err := q.begin()
	if err != nil {
		return "", nil, err
	}
	var a admission
	status, err := q.admit(tx, r, &a)
	if err != nil {
		return "", nil, q.endWith(tx, err)
	}
	if a.later {
		under := q.byID[r.Ref.SampleID()]
		again := under.rare().claimed
		if again == nil {
			again = make(chan struct{})
			under.info.claimed = again
		}
		if err := q.end(tx); err != nil {
			return "", nil, err
		}
		return "", again, nil
	}
	if a.s == nil {
		if err := q.end(tx); err != nil {
			return "", nil, err
		}
		return status, nil, nil
	}
	// The id is taken before the store is asked, outside the lock, so that no other put can come between.
	if err := q.end(tx); err != nil {
		q.mu.Lock()
		q.unadmit(&a)
		q.mu.Unlock()
		return "", nil, err
	}

	if err := q.guarded(func() error { return q.store.Claim(r.Ref, q.owner) }); err != nil {
		q.mu.Lock()
		q.unadmit(&a)
		q.mu.Unlock()
		return "", nil, &sluice.Error{Kind: claimKind(err), Op: "queue: put", Subject: r.Ref.SampleID(), Err: err}
	}

	tx, err = q.resume()
	if err == nil && q.closed {
		err = q.endWith(tx, q.closedError("put"))
	}
	if err != nil {
		q.withdraw(&a, err)
		return "", nil, err
	}
	status = q.enter(tx, r, a.s)
	if err := q.end(tx); err != nil {
		return "", nil, err
	}
	return status, nil, nil
}

// status is the answer to a put of a generation that ended so.
func (e ending) status() sluice.PutStatus {
	if e == gatedOut {
		return sluice.Gated
	}
	return sluice.WasSettled
}

func claimKind(err error) sluice.Kind {
	if k := sluice.KindOf(err); k != "" {
		return k
	}
	return sluice.Unavailable
}

// name gives s the id that displaced, whose time is over, had if it is not nil.
func (q *Queue) name(s, displaced *sample) {
	if displaced != nil {
		q.older[s.id] = append(q.older[s.id], displaced)
	}
	q.byID[s.id] = s
}

// undoName takes it back.
func (q *Queue) undoName(s, displaced *sample) {
	delete(q.byID, s.id)
	if displaced != nil {
		for _, o := range q.older[s.id] {
			if o == displaced { // unless it was forgotten meanwhile
				q.unname(displaced)
				q.byID[s.id] = displaced
				break
			}
		}
	}
	q.claimed(s)
}

// claimed lets those go on who wait for the end of the put.
func (q *Queue) claimed(s *sample) {
	if s.info != nil && s.info.claimed != nil {
		close(s.info.claimed)
		s.info.claimed = nil
	}
}

// applyPut enters a sample, or notes that the version gates kept it out.
func (q *Queue) applyPut(tx *txn, r *putRecord) {
	s := r.s
	q.seq = r.Seq
	s.seq = r.Seq
	q.take(r.Positions)
	q.count.Put++
	q.count.TokensPut += s.tokens
	q.count.BytesPut += s.bytes
	if r.Producer != "" {
		if p := q.producers[r.Producer]; p != nil {
			p.put++
		}
	}
	if r.Gated {
		q.count.Gated++
		q.bury(tx, s, gatedOut, r.At)
		q.letGo(tx, s)
		return
	}
	if q.windows.on {
		if v, ok := s.ref.Attribute("supervised_tokens"); ok {
			s.supervised, _ = strconv.ParseInt(v, 10, 64)
			s.supervised = max(s.supervised, 0)
		}
	}
	s.gates = q.gates
	q.pend(s, fresh)
}

// dropGated drops a pending sample that the version gates no longer let through.
func (q *Queue) dropGated(tx *txn, s *sample) {
	r := dropRecord{T: "drop", Seq: s.seq, Why: gatedOut, At: q.now, s: s}
	q.applyDrop(tx, &r)
	if q.journal != nil {
		q.write(tx, r, false)
		s.lsn = q.lsn
	}
}

// applyDrop gives a sample up.
func (q *Queue) applyDrop(tx *txn, r *dropRecord) {
	s := r.s
	q.detach(s)
	switch r.Why {
	case gatedOut:
		q.count.Gated++
	case tailDropped:
		q.count.TailDropped++
	case droppedByHand:
		q.count.Dropped++
	}
	freed := s.freed
	q.bury(tx, s, r.Why, r.At)
	if freed {
		s.ref = sluice.Ref{}
	}
	q.letGo(tx, s)
}

// SetVersions changes the version gates: the set of target versions that is let in (any, if empty) and the least draft version (any, if empty).
// Samples that wait are checked before they are leased or dealt to a window; what is leased or in a window stays.
func (q *Queue) SetVersions(_ context.Context, targets []string, minDraft string) error {
	if minDraft != "" {
		if _, ok := sluice.ParseVersion(minDraft); !ok {
			return &sluice.Error{Kind: sluice.Invalid, Op: "queue: set versions", Subject: clean(minDraft, 40), Detail: "the least draft version wants an unsigned integer"}
		}
	}
	tx, err := q.begin()
	if err != nil {
		return err
	}
	targets = slices.Clone(targets)
	q.setGates(targets, minDraft)
	if q.journal != nil {
		q.write(tx, gatesRecord{T: "gates", Targets: targets, MinDraft: minDraft}, false)
	}
	return q.end(tx)
}

func (q *Queue) setGates(targets []string, minDraft string) {
	q.gates++
	q.targets = nil
	if len(targets) > 0 {
		q.targets = make(map[string]bool, len(targets))
		for _, v := range targets {
			q.targets[v] = true
		}
	}
	q.cfg.TargetVersions, q.cfg.MinDraftVersion = targets, minDraft
	q.minDraft, _ = sluice.ParseVersion(minDraft)
}

// abortPoll is how often PutBlocksUntilBelow asks its caller whether to go on.
const abortPoll = 50 * time.Millisecond

var errPoll = errors.New("time to ask again")

// PutBlocksUntilBelow is Put behind the gate; see [sluice.Queue].
func (q *Queue) PutBlocksUntilBelow(ctx context.Context, r sluice.PutRequest, abortWhen func() bool) (sluice.PutStatus, error) {
	if err := q.check(r.Ref); err != nil {
		return "", err
	}
	tx, err := q.begin()
	if err != nil {
		return "", err
	}
	p, err := q.producer(tx, r.Producer, "put")
	if err != nil {
		return "", q.endWith(tx, err)
	}
	settled := q.remembers(r.Ref)
	if q.closed || settled || q.find(r.Ref.SampleID(), r.Ref.Generation()) != nil {
		if err := q.end(tx); err != nil {
			return "", err
		}
		return q.Put(ctx, r) // it has its answer already
	}
	if err := q.endBehindGate(ctx, tx, p, r.Ref.SampleID(), abortWhen); err != nil {
		return "", err
	}
	return q.Put(ctx, r)
}

// endBehindGate ends the transaction and waits until the gate is open.
func (q *Queue) endBehindGate(ctx context.Context, tx *txn, p *producer, id string, abortWhen func() bool) error {
	ctx, call := q.startWait(ctx, p)
	defer func() { // abortWhen may panic
		q.mu.Lock()
		q.tick()
		q.stopWait(p, call)
		q.arm()
		q.mu.Unlock()
	}()
	if err := q.end(tx); err != nil {
		return err
	}
	return q.waitOpen(ctx, id, abortWhen)
}

func (q *Queue) waitOpen(ctx context.Context, id string, abortWhen func() bool) error {
	if abortWhen == nil {
		return q.gate.WaitOpen(ctx)
	}
	for {
		if abortWhen() {
			return &sluice.Error{Kind: sluice.Aborted, Op: "queue: put", Subject: id, Detail: "the caller called it off while the gate was paused"}
		}
		turn, cancel := context.WithCancelCause(ctx)
		stop := q.clock.AfterFunc(abortPoll, func() { cancel(errPoll) })
		err := q.gate.WaitOpen(turn)
		stop()
		cancel(nil)
		if !errors.Is(err, errPoll) {
			return err
		}
	}
}

// Taken returns which positions of a source were put, by epoch; see [sluice.Queue].
func (q *Queue) Taken(_ context.Context, source string) ([]sluice.Taken, error) {
	tx, err := q.begin()
	if err != nil {
		return nil, err
	}
	var all []sluice.Taken
	for st, set := range q.taken {
		if st.source == source {
			all = append(all, sluice.Taken{Source: source, Epoch: st.epoch, Ranges: set.ranges()})
		}
	}
	if q.journal != nil {
		tx.lsn = q.lsn // a producer goes by it: what it is told must stay true
	}
	if err := q.end(tx); err != nil {
		return nil, err
	}
	sortTaken(all)
	return all, nil
}
