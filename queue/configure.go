package queue

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sluice-ml/sluice"
)

// room is the store as the gate sees it: with the marks that the run has now.
type room struct {
	sluice.ClaimStore
	marks atomic.Pointer[marks] // nil: the store's own
}

// marks are those of [sluice.Caps], which the journal keeps once they were changed.
type marks struct {
	HighBytes   int64 `json:"high_bytes,omitempty"`
	LowBytes    int64 `json:"low_bytes,omitempty"`
	HighSamples int64 `json:"high_samples,omitempty"`
	LowSamples  int64 `json:"low_samples,omitempty"`
}

func (r *room) Health() sluice.Health {
	h := r.ClaimStore.Health()
	if m := r.marks.Load(); m != nil {
		h.Caps.HighWatermarkBytes, h.Caps.LowWatermarkBytes, h.Caps.HighWatermarkSamples, h.Caps.LowWatermarkSamples = m.HighBytes, m.LowBytes, m.HighSamples, m.LowSamples
	}
	return h
}

// configRecord states what was changed, as it is from then on.
type configRecord struct {
	T       string        `json:"t"`
	Timeout time.Duration `json:"timeout,omitempty"` // 0: as it was
	Marks   *marks        `json:"marks,omitempty"`   // nil: as they were
	Reopen  bool          `json:"reopen,omitempty"`
}

// Health is the store's, with the marks that the run has now.
func (q *Queue) Health() sluice.Health { return q.room.Health() }

// Configure changes a run that goes on: all of what c gives, or nothing. Leases that are out keep their deadlines. What is given from then on has the new timeout, and so has what is renewed if
// that is longer: a holder renews by the time that it was given, and must not lose its lease in between. It may be repeated.
//
// Reopen lets a run that was closed take puts again, once nothing is pending or leased; its cause and its producers' sessions are forgotten. A run that is not closed is left as it is.
//
// Errors: ErrInvalid, naming the field; ErrConflict, naming it, if the run can't be reopened: it is not drained, or has windows, whose ranks were told the end.
func (q *Queue) Configure(_ context.Context, c sluice.RunChange) error {
	if err := c.Validate(); err != nil {
		return err
	}
	tx, err := q.begin()
	if err != nil {
		return err
	}
	r := configRecord{T: "config"}
	if c.VisibilityTimeout != nil {
		r.Timeout = *c.VisibilityTimeout
	}
	caps, err := c.Marks(q.room.Health().Caps)
	if err != nil {
		return q.endWith(tx, err)
	}
	if c.HasMarks() {
		r.Marks = &marks{caps.HighWatermarkBytes, caps.LowWatermarkBytes, caps.HighWatermarkSamples, caps.LowWatermarkSamples}
	}
	if c.Reopen && q.closed {
		refuse := func(detail, hint string) error {
			return q.endWith(tx, &sluice.Error{Kind: sluice.Conflict, Op: "queue: configure", Subject: "reopen", Detail: detail, Hint: hint})
		}
		if q.windows.on {
			return refuse("is not possible in a run with windows: its ranks were told the end", "create another run")
		}
		if q.pending+q.out > 0 {
			return refuse(fmt.Sprintf("is not possible yet: %d samples are pending and %d leased", q.pending, q.out), "drain the run first")
		}
		r.Reopen = true
	}
	if r == (configRecord{T: "config"}) { // a repetition
		return q.end(tx)
	}
	q.applyConfig(&r)
	if q.journal != nil {
		q.write(tx, r, false)
	}
	if r.Reopen {
		q.gate.Reopen()
		q.emit(Event{Kind: EventReopened})
	}
	err = q.end(tx)
	if r.Marks != nil {
		q.gate.Remeasure()
	}
	return err
}

func (q *Queue) applyConfig(r *configRecord) {
	if r.Timeout != 0 {
		q.cfg.VisibilityTimeout, q.timeout = r.Timeout, r.Timeout
	}
	if r.Marks != nil {
		q.room.marks.Store(r.Marks)
	}
	if !r.Reopen {
		return
	}
	q.closed, q.cause = false, nil
	for _, p := range q.producers { // as if they had never been: those that are done would close it again
		if p.watched {
			q.alive.remove(p)
			p.watched = false
		}
		p.waiting, p.calls = 0, nil // their calls end by themselves
	}
	clear(q.producers)
}

// expiring are the leases that are out, in a line for each timeout by which any was given: within a line they run out in the order in which they were given or renewed.
type expiring struct {
	lines []*expiryLine
	n     int
}

type expiryLine struct {
	leaseList
	timeout time.Duration
}

// push gives the lease its full time.
func (e *expiring) push(l *lease, now int64, timeout time.Duration) {
	l.deadline = now + int64(timeout)
	e.n++
	for _, line := range e.lines {
		if line.timeout == timeout {
			l.line = line
			line.pushBack(l)
			return
		}
	}
	l.line = &expiryLine{timeout: timeout}
	l.line.pushBack(l)
	e.lines = append(slices.DeleteFunc(e.lines, func(line *expiryLine) bool { return line.n == 0 }), l.line)
}

func (e *expiring) remove(l *lease) {
	l.line.remove(l)
	l.line = nil
	e.n--
}

// first is the lease that runs out first, or nil.
func (e *expiring) first() (first *lease) {
	for _, line := range e.lines {
		if l := line.head; l != nil && (first == nil || l.deadline < first.deadline) {
			first = l
		}
	}
	return first
}

// all lists the leases in the order in which they were given.
func (e *expiring) all() []*lease {
	list := make([]*lease, 0, e.n)
	for _, line := range e.lines {
		for l := line.head; l != nil; l = l.next {
			list = append(list, l)
		}
	}
	sortByOrder(list)
	return list
}
