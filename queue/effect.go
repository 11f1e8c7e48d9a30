package queue

import (
	"fmt"
	"runtime/debug"

	"github.com/sluice-ml/sluice"
)

// storeCall is what the store must be told of a sample once the record behind it is durable.
type storeCall struct {
	what storeOp
	s    *sample // nil if no other call about it can be under way
	ref  sluice.Ref
	lsn  uint64 // of that record
}

type storeOp uint8

const (
	unclaim storeOp = iota
	markDead
	markAlive
)

// tell leaves a store call to the end of the transaction. It rests on the record of what is being applied.
func (tx *txn) tell(what storeOp, s *sample) { tx.tellAfter(what, s, tx.next()) }

// tellAfter is tell for a call that rests on the given record.
func (tx *txn) tellAfter(what storeOp, s *sample, lsn uint64) {
	if tx == nil {
		return // a replay: Open compares with the store when it is done
	}
	c := storeCall{what, nil, s.ref, lsn}
	if what != unclaim || s.info != nil { // with most samples nothing but an unclaim ever happens
		c.s = s
		info := s.rare()
		info.calls = append(info.calls, c)
	}
	tx.calls = append(tx.calls, c)
	tx.lsn = max(tx.lsn, lsn)
}

// next is the number of the record that is about to be written for what is being applied; 0 if none is.
func (tx *txn) next() uint64 {
	if tx == nil || tx.q.journal == nil {
		return 0
	}
	return tx.q.lsn + 1
}

// free gives up the claim on s.
func (tx *txn) free(s *sample) { tx.freeAfter(s, tx.next()) }

func (tx *txn) freeAfter(s *sample, lsn uint64) {
	tx.tellAfter(unclaim, s, lsn)
	s.freed = true
	if s.place != dead {
		s.ref = sluice.Ref{}
	}
}

// runCalls makes the store calls, outside the lock. Calls about one sample come in the order of their records, whoever makes them, since a burial must
// not overtake the requeue after it: they stand in line at the sample, and who comes first makes all whose records are durable.
func (q *Queue) runCalls(calls []storeCall) {
	freed := q.unclaimMany(calls)
	for _, c := range calls {
		if c.s == nil {
			continue // an unclaim
		}
		q.mu.Lock()
		info := c.s.info
		if info.busy {
			q.mu.Unlock()
			continue
		}
		info.busy = true
		for len(info.calls) > 0 && (q.journal == nil || info.calls[0].lsn <= q.synced) {
			c, info.calls = info.calls[0], info.calls[1:]
			q.mu.Unlock()
			freed = freed || c.what == unclaim
			q.callStore(c)
			q.mu.Lock()
		}
		info.busy = false
		q.mu.Unlock()
	}
	if freed {
		q.gate.Poke()
	}
}

// manyClaims is a store that claims and unclaims many samples for little more than one. Each answer is that of Claim or Unclaim.
type manyClaims interface {
	ClaimAll(refs []sluice.Ref, owner string) []error
	UnclaimAll(refs []sluice.Ref, owner string) []error
}

// claimMany claims samples, and returns an answer for each.
func (q *Queue) claimMany(refs []sluice.Ref) []error {
	errs := make([]error, len(refs))
	if many, ok := q.store.(manyClaims); ok && len(refs) > 1 {
		err := q.guarded(func() error {
			if errs = many.ClaimAll(refs, q.owner); len(errs) != len(refs) {
				return fmt.Errorf("the store gave %d answers to %d claims", len(errs), len(refs))
			}
			return nil
		})
		if err != nil {
			errs = make([]error, len(refs))
			for i := range errs {
				errs[i] = err
			}
		}
		return errs
	}
	for i, ref := range refs {
		errs[i] = q.guarded(func() error { return q.store.Claim(ref, q.owner) })
	}
	return errs
}

// unclaimMany makes the calls that are about no sample which has others, and reports whether there are any. All of them are unclaims.
func (q *Queue) unclaimMany(calls []storeCall) bool {
	n, only := 0, -1
	for i := range calls {
		if calls[i].s == nil {
			n, only = n+1, i
		}
	}
	many, ok := q.store.(manyClaims)
	switch {
	case n == 0:
		return false
	case n == 1:
		q.callStore(calls[only])
		return true
	case !ok:
		for _, c := range calls {
			if c.s == nil {
				q.callStore(c)
			}
		}
		return true
	}
	refs := make([]sluice.Ref, 0, n)
	for _, c := range calls {
		if c.s == nil {
			refs = append(refs, c.ref)
		}
	}
	var errs []error
	if err := q.guarded(func() error { errs = many.UnclaimAll(refs, q.owner); return nil }); err != nil {
		errs = []error{err}
	}
	for i, err := range errs {
		if err != nil {
			q.refused(unclaim, refs[i], err)
		}
	}
	return true
}

func (q *Queue) callStore(c storeCall) {
	err := q.guarded(func() error {
		switch c.what {
		case unclaim:
			return q.store.Unclaim(c.ref, q.owner)
		case markDead:
			return q.store.MarkDead(c.ref, q.owner, true)
		}
		return q.store.MarkDead(c.ref, q.owner, false)
	})
	if err != nil {
		q.refused(c.what, c.ref, err)
	}
}

// refused notes that the store did not do what it was told. The state is right whatever it says; what it failed to free is found by its GC or by the next Open.
func (q *Queue) refused(what storeOp, ref sluice.Ref, err error) {
	q.log.Warn("queue: the store refused", "run", q.runID, "sample", ref.SampleID(), "call", what.String(), "err", err)
}

func (o storeOp) String() string { return [...]string{"unclaim", "mark dead", "mark alive"}[o] }

// guarded turns a panic of foreign code into an error, so that it cannot leave a call half done.
func (q *Queue) guarded(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			q.log.Error("queue: foreign code panicked", "run", q.runID, "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("panic: %v", p)
		}
	}()
	return f()
}

// EventKind says what an [Event] is about.
type EventKind string

// The kinds of event.
const (
	EventPaused       EventKind = "paused"        // the gate closed at the high mark
	EventResumed      EventKind = "resumed"       // and opened again at the low one
	EventDead         EventKind = "dead"          // a sample became a dead letter
	EventDeadFreed    EventKind = "dead_freed"    // a dead letter lost its bytes to the share that dead letters may hold
	EventTakeover     EventKind = "takeover"      // a newer incarnation of a consumer or producer came
	EventProducerLost EventKind = "producer_lost" // a producer was silent for too long
	EventClosed       EventKind = "closed"
	EventReopened     EventKind = "reopened" // it was closed, and takes puts again
	EventWedged       EventKind = "wedged"
	EventUnavailable  EventKind = "unavailable" // the journal failed
	EventWindow       EventKind = "window"      // a window opened
	EventLostSample   EventKind = "lost_sample" // a recovered queue has a ref whose sample the store has no more
)

// Event is something that an operator wants to see.
type Event struct {
	Kind    EventKind
	Subject string // the sample, consumer, producer or window
	Text    string
	Health  sluice.Health // for paused and resumed
}

// emit leaves an event to whoever dispatches next. It may be called with or without the lock.
func (q *Queue) emit(e Event) {
	q.events.mu.Lock()
	q.events.list = append(q.events.list, e)
	q.events.some.Store(true)
	q.events.mu.Unlock()
}

// emitFromGate is emit for the gate's callbacks, which may come in the middle of a call that waits, or that must not: the goroutine ends with the last event.
func (q *Queue) emitFromGate(e Event) {
	q.emit(e)
	go q.dispatchEvents()
}

// dispatchEvents reports events outside every lock, one goroutine at a time so that they come in order. A callback that calls the queue leaves its
// events to the goroutine that is reporting.
func (q *Queue) dispatchEvents() {
	ev := &q.events
	if !ev.some.Load() {
		return
	}
	ev.mu.Lock()
	if ev.busy {
		ev.mu.Unlock()
		return
	}
	ev.busy = true
	for len(ev.list) > 0 {
		e := ev.list[0]
		ev.list = ev.list[1:]
		ev.mu.Unlock()
		q.report(e)
		ev.mu.Lock()
	}
	ev.list = nil
	ev.busy = false
	ev.some.Store(false)
	ev.mu.Unlock()
}

func (q *Queue) report(e Event) {
	_ = q.guarded(func() error { // it has logged the panic
		switch e.Kind {
		case EventPaused:
			if q.opts.OnPause != nil {
				q.opts.OnPause(e.Health)
			}
		case EventResumed:
			if q.opts.OnResume != nil {
				q.opts.OnResume(e.Health)
			}
		case EventWindow:
		default:
			q.log.Info("queue: "+string(e.Kind), "run", q.runID, "subject", e.Subject, "text", e.Text)
		}
		if q.opts.OnEvent != nil {
			q.opts.OnEvent(e)
		}
		return nil
	})
}
