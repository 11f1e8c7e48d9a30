package queue

import (
	"context"
	"time"

	"github.com/sluice-ml/sluice"
)

// waiter is an acquire that waits.
type waiter struct {
	c          *consumer
	member     int
	max        int
	ahead      bool
	request    string
	sh         *share
	prev, next *waiter

	done     chan struct{} // closed with the answer
	answered bool
	delivery sluice.Delivery
	err      error
	lsn      uint64
}

// share is what one rank is served from: its line of waiting acquires and, in a run with windows, its places.
type share struct {
	head, tail *waiter // in order of their calls
	slots      slotList
	out        int  // leases of this share
	touched    bool // something changed that a waiter may care about
}

func (q *Queue) share(c *consumer) *share {
	if !q.windows.on || c.rank >= len(q.shares) {
		return &q.shares[0]
	}
	return &q.shares[c.rank]
}

func (q *Queue) touch(sh *share) { sh.touched, q.touched = true, true }

func (q *Queue) touchAll() {
	for i := range q.shares {
		q.touch(&q.shares[i])
	}
}

func (q *Queue) enqueue(w *waiter) {
	sh := w.sh
	if w.prev = sh.tail; w.prev == nil {
		sh.head = w
	} else {
		w.prev.next = w
	}
	sh.tail = w
	q.waiters++
	w.c.waiting++
	if !w.ahead {
		w.c.needy[w.member]++
		q.waitSum.start(q.now)
	}
}

// answer ends the waiting of w.
func (q *Queue) answer(w *waiter, d sluice.Delivery, err error) {
	if w.prev == nil {
		w.sh.head = w.next
	} else {
		w.prev.next = w.next
	}
	if w.next == nil {
		w.sh.tail = w.prev
	} else {
		w.next.prev = w.prev
	}
	w.prev, w.next = nil, nil
	q.waiters--
	w.c.waiting--
	w.c.seen = q.now
	if !w.ahead {
		w.c.needy[w.member]--
		q.waitSum.stop(q.now)
	}
	w.answered, w.delivery, w.err = true, d, err
	close(w.done)
}

// Acquire leases samples; see [sluice.Queue].
func (q *Queue) Acquire(ctx context.Context, r sluice.AcquireRequest) (sluice.Delivery, error) {
	if r.Max < 0 || r.Max > 1<<20 {
		return sluice.Delivery{}, &sluice.Error{Kind: sluice.Invalid, Op: "queue: acquire", Subject: r.Consumer.Name, Detail: "max wants 0 (for 1) to 1048576"}
	}
	if err := checkRequestID(r.RequestID); err != nil {
		return sluice.Delivery{}, err
	}
	r.Max = max(r.Max, 1)
	if err := ctx.Err(); err != nil {
		return sluice.Delivery{}, context.Cause(ctx)
	}
	var timeout <-chan struct{}
	var until time.Time
	for {
		d, again, err := q.acquire(ctx, &r)
		if again == nil || r.Wait == 0 {
			return d, err
		}
		if r.Wait > 0 && timeout == nil {
			until = q.clock.Now().Add(r.Wait)
			ended := make(chan struct{})
			stop := q.clock.AfterFunc(r.Wait, func() { close(ended) })
			defer stop()
			timeout = ended
		}
		select {
		case <-again:
		case <-timeout:
			return sluice.Delivery{}, nil
		case <-ctx.Done():
			return sluice.Delivery{}, context.Cause(ctx)
		}
		if timeout != nil {
			r.Wait = max(until.Sub(q.clock.Now()), 0)
		}
	}
}

// acquire is one attempt. If the same request is waiting already, it returns what to wait for before the next.
func (q *Queue) acquire(ctx context.Context, r *sluice.AcquireRequest) (d sluice.Delivery, again <-chan struct{}, err error) {
	tx, err := q.begin()
	if err != nil {
		return d, nil, err
	}
	c, err := q.consumer(tx, r.Consumer, "acquire")
	if err != nil {
		return d, nil, q.endWith(tx, err)
	}
	key := requestKey{'a', c.name, c.incarnation, r.Consumer.Member, r.RequestID}
	if r.RequestID != "" {
		if known := q.requests.find(key, q.now); known != nil {
			if known.done != nil {
				again = known.done
				if err := q.end(tx); err != nil {
					return d, nil, err
				}
				return d, again, nil
			}
			for _, l := range known.leases {
				if l.answers(c) {
					d.Leases = append(d.Leases, q.view(l))
					tx.lsn = max(tx.lsn, l.lsn)
				}
			}
			return d, nil, q.end(tx)
		}
	}
	q.dispatch(tx) // those who came earlier are served first
	sh := q.share(c)
	if d.Leases = q.grant(tx, c, r.Consumer.Member, r.Max, r.RequestID); len(d.Leases) > 0 {
		q.moved()
		c.hungry[r.Consumer.Member] = 0
		return d, nil, q.end(tx)
	}
	if q.ended(c, r.Consumer.Member) {
		d.End, d.Cause = true, q.cause
		tx.lsn = max(tx.lsn, q.lsn) // it rests on the settlements of others too
		return d, nil, q.end(tx)
	}
	if r.Wait == 0 {
		if !r.Ahead {
			q.starve(c, r.Consumer.Member)
		}
		q.pulse = !q.closed
		return d, nil, q.end(tx)
	}
	w := &waiter{c: c, member: r.Consumer.Member, max: r.Max, ahead: r.Ahead, request: r.RequestID, sh: sh, done: make(chan struct{})}
	q.enqueue(w)
	var pending *request
	if r.RequestID != "" {
		pending = q.requests.add(key, q.now)
		pending.done = w.done
	}
	if err := q.end(tx); err != nil {
		// The journal failed while something else was made durable; w was answered with that.
		<-w.done
		return d, nil, err
	}
	return q.waitFor(ctx, w, r.Wait, pending)
}

// starve notes that the member of c went away empty-handed.
func (q *Queue) starve(c *consumer, member int) {
	c.hungry[member] = q.now + int64(hungryTime)
	q.wedge.hungry = c.hungry[member]
}

func (q *Queue) waitFor(ctx context.Context, w *waiter, wait time.Duration, pending *request) (sluice.Delivery, <-chan struct{}, error) {
	var timeout chan struct{}
	if wait > 0 {
		timeout = make(chan struct{})
		stop := q.clock.AfterFunc(wait, func() { close(timeout) })
		defer stop()
	}
	select {
	case <-w.done:
	case <-timeout:
	case <-ctx.Done():
	}
	q.mu.Lock()
	q.tick()
	lost := false
	if !w.answered {
		// Nobody can answer it any more once it is out of the line, so no lease is lost between the two.
		lost = true
		var err error
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		} else if !w.ahead {
			q.starve(w.c, w.member)
		}
		q.answer(w, sluice.Delivery{}, err)
	}
	if pending != nil {
		pending.done = nil
		if len(pending.leases) == 0 {
			q.requests.remove(pending)
		}
	}
	lsn := w.lsn
	tell := lost && q.starving() != q.told
	q.mu.Unlock()
	if tell {
		q.tellGate()
	}
	if lsn > 0 {
		if err := q.wait(lsn); err != nil {
			return sluice.Delivery{}, nil, err
		}
	}
	return w.delivery, nil, w.err
}

// dispatch serves those who wait, in line, with what has become deliverable.
func (q *Queue) dispatch(tx *txn) {
	if !q.windows.on {
		if q.waiters > 0 && (q.pending > 0 || q.groups || q.closed) {
			q.serve(tx, &q.shares[0])
		}
		return
	}
	for {
		q.openWindows(tx)
		if q.waiters == 0 || !q.touched {
			return
		}
		// What one share is given may concern others: a barrier falls, a window closes. They are touched by that, and served in the next round.
		q.touched = false
		for i := range q.shares {
			sh := &q.shares[i]
			if sh.head != nil && sh.touched {
				sh.touched = false
				q.serve(tx, sh)
			}
		}
	}
}

// serve gives what there is to the waiters of one share.
func (q *Queue) serve(tx *txn, sh *share) {
	served := false
	for w := sh.head; w != nil; {
		next := w.next
		before := tx.lsn
		tx.lsn = 0
		leases := q.grant(tx, w.c, w.member, w.max, w.request)
		w.lsn = tx.lsn
		tx.lsn = max(tx.lsn, before)
		if len(leases) == 0 {
			if !q.groups {
				break // nothing is there; only members of a group can differ in what they may have
			}
			w = next
			continue
		}
		served = true
		q.moved()
		w.c.hungry[w.member] = 0
		q.answer(w, sluice.Delivery{Leases: leases}, nil)
		w = sh.head // a group's other members may wait for the same, in front of w
	}
	// Outside windows, whoever holds leases and may end is answered when it asks, or when the queue closes; a member of a group, when others have settled what it gave back.
	if q.closed && (q.windows.on || q.groups || served || sh.out == 0) {
		q.endShare(sh)
	}
}

// ended reports whether the stream is over for the member of c.
func (q *Queue) ended(c *consumer, member int) bool {
	if !q.closed || q.deliverableLater(c) {
		return false
	}
	return c.holds(member) && !c.gaveBack(member) || q.share(c).out == 0
}

// deliverableLater reports whether anything is pending that c may yet be given.
func (q *Queue) deliverableLater(c *consumer) bool {
	if !q.windows.on {
		return q.pending > 0
	}
	return q.backlog() > 0 || q.share(c).slots.n > 0
}

// endShare answers those for whom the stream is over.
func (q *Queue) endShare(sh *share) {
	for w := sh.head; w != nil; {
		next := w.next
		if q.ended(w.c, w.member) {
			w.lsn = max(w.lsn, q.lsn)
			q.answer(w, sluice.Delivery{End: true, Cause: q.cause}, nil)
		}
		w = next
	}
}

func (q *Queue) endWaiters() {
	for i := range q.shares {
		q.endShare(&q.shares[i])
	}
}

// waitClock sums the time in which at least one of several callers waits.
type waitClock struct {
	n     int
	since int64
	sum   int64
}

func (c *waitClock) start(now int64) { c.move(now); c.n++ }
func (c *waitClock) stop(now int64)  { c.move(now); c.n-- }

func (c *waitClock) move(now int64) {
	if c.n > 0 {
		c.sum += now - c.since
	}
	c.since = now
}

func (c *waitClock) total(now int64) time.Duration {
	if c.n > 0 {
		return time.Duration(c.sum + now - c.since)
	}
	return time.Duration(c.sum)
}
