package queue

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-ml/sluice"
)

const (
	// wedgeTime is how long both sides must wait for each other, without any progress, before the queue says so; wedgeLook is how often it looks
	// while a producer and a consumer wait at once. Together they stay below the five seconds of the contract.
	wedgeTime = 3 * time.Second
	wedgeLook = 500 * time.Millisecond
)

// wedgeWatch is the state of the look-out for deadlock.
type wedgeWatch struct {
	checkAt  int64 // the next look, or never
	since    int64 // since when the condition holds, or never
	progress int64 // when anything last moved
	granted  int64 // when a producer was last given room, or put
	hungry   int64 // until when somebody who polls counts as waiting
	bytes    int64 // used at the last look
	samples  int64
}

// mayWedge reports whether those who wait may wait for each other: producers for room, or, when nothing more is put, consumers for the windows of others.
func (q *Queue) mayWedge() bool {
	if q.closed {
		return q.windows.on
	}
	return q.reserving > 0
}

// watchWedge starts looking when they do. It costs nothing otherwise.
func (q *Queue) watchWedge() {
	if q.wedge.checkAt == never && q.mayWedge() && (q.waitSum.n > 0 || q.now < q.wedge.hungry) {
		q.wedge.checkAt = q.now + int64(wedgeLook)
		q.wedge.since = never
		if q.holdersWait() && !q.deliverable() {
			q.wedge.since = q.now
		}
	}
}

// moved notes that something did: a put, a grant, a delivery, the end of a lease.
func (q *Queue) moved() {
	q.wedge.progress = q.now
	if q.wedged != "" {
		q.wedged = ""
	}
}

// waits reports whether the member waits for a sample.
func (c *consumer) waits(member int, now int64) bool {
	return c.needy[member] > 0 || now < c.hungry[member]
}

// isHungry reports whether c can do nothing but wait: all members of it do, since one that works may still settle what the others have settled.
func (c *consumer) isHungry(now int64) bool {
	for m := range c.needy {
		if !c.waits(m, now) {
			return false
		}
	}
	return true
}

func (q *Queue) anyoneHungry() bool {
	if q.waitSum.n > 0 {
		return true
	}
	for _, c := range q.consumers {
		if q.now < slices.Max(c.hungry) {
			return true
		}
	}
	return false
}

// deliverable reports whether there is something for one who does not ask now: it may be starting up, or in a long step.
func (q *Queue) deliverable() bool {
	if !q.windows.on {
		return q.pending > 0
	}
	for i := range q.shares {
		if sl := q.shares[i].slots.head; sl != nil && sl.w.number <= q.windows.dealing {
			return true
		}
	}
	return false
}

// holdersWait reports whether everyone who holds a lease is itself waiting for another, so that no ack will come.
func (q *Queue) holdersWait() bool {
	for _, c := range q.consumers {
		if c.held > 0 && !c.isHungry(q.now) {
			return false
		}
	}
	return true
}

// checkWedge looks once.
func (q *Queue) checkWedge() {
	w := &q.wedge
	w.checkAt = never
	if !q.mayWedge() || !q.anyoneHungry() {
		w.since = never
		return
	}
	w.checkAt = q.now + int64(wedgeLook)
	h := q.room.Health()
	head := q.gate.State()
	if h.UsedBytes() < w.bytes || h.UsedSamples() < w.samples {
		w.progress = q.now // somebody gives room back, if not enough yet
	}
	w.bytes, w.samples = h.UsedBytes(), h.UsedSamples()
	stuck := head.Waiting > 0
	if q.closed {
		stuck = q.expiry.n > 0 // room is no matter any more, but what is held keeps its window open
	}
	switch {
	case !stuck || !q.holdersWait() || q.deliverable():
		w.since = never
		return
	case !q.closed && h.Fits(head.HeadBytes):
		// Not for long: the gate was told that someone starves. If it has not heard of room that became free, it hears of it now.
		w.since = never
		go q.gate.Poke()
		return
	case !q.closed && h.ReservedSamples > 0 && q.someoneProduces():
		w.since = never
		return
	case w.since == never:
		w.since = q.now
	}
	if q.now-max(w.since, w.progress) < int64(wedgeTime) {
		return
	}
	q.wedged = q.wedgeText(h, head)
	err := &sluice.Error{Kind: sluice.Wedged, Op: "queue", Subject: q.runID, Detail: q.wedged, Hint: "settle or return leases, close tensors that are kept, drop dead letters, or raise the cap"}
	q.emit(Event{Kind: EventWedged, Text: q.wedged})
	for i := range q.shares {
		for x := q.shares[i].head; x != nil; x = q.shares[i].head {
			q.answer(x, sluice.Delivery{}, err)
		}
	}
	q.gate.Fail(err)
	w.checkAt = never
}

// someoneProduces reports whether the room that is set aside may yet turn into a sample. A producer that does not wait at the gate may be in a
// forward. One that does may have another under way, or may wait for the rest of a batch: it is given the time in which a producer may be silent.
func (q *Queue) someoneProduces() bool {
	if q.now-q.wedge.granted < int64(q.cfg.ProducerTimeout) {
		return true
	}
	for _, p := range q.producers {
		if p.state == sluice.ProducerRunning && p.waiting == 0 && p.granted > 0 {
			return true
		}
	}
	return false
}

// wedgeText says who waits for whom, with the numbers.
func (q *Queue) wedgeText(h sluice.Health, head sluice.GateState) string {
	var b strings.Builder
	if q.closed {
		fmt.Fprintf(&b, "nothing more is put, %d consumers wait for samples of the next window, and nothing can move: ", max(q.waitSum.n, 1))
	} else {
		fmt.Fprintf(&b, "%d producers wait for room (the first for %d bytes) and %d consumers for samples, and nothing can move: ", head.Waiting, head.HeadBytes, max(q.waitSum.n, 1))
	}
	if h.Caps.MaxBytes > 0 {
		fmt.Fprintf(&b, "%d of %d bytes", h.UsedBytes(), h.Caps.MaxBytes)
	}
	if h.Caps.MaxSamples > 0 {
		if h.Caps.MaxBytes > 0 {
			b.WriteString(" and ")
		}
		fmt.Fprintf(&b, "%d of %d samples", h.UsedSamples(), h.Caps.MaxSamples)
	}
	fmt.Fprintf(&b, " are used; %d samples are pending", q.pending)
	var names []string
	for name, c := range q.consumers {
		if c.held > 0 {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for i, name := range names {
		if i == 10 {
			fmt.Fprintf(&b, "; and %d more consumers hold leases", len(names)-i)
			break
		}
		c := q.consumers[name]
		fmt.Fprintf(&b, "; consumer %s holds %d leases of %d bytes while it waits", name, c.held, c.heldBytes)
	}
	if q.deadKept.n > 0 {
		fmt.Fprintf(&b, "; %d dead letters hold %d bytes", q.deadKept.n, q.deadBytes)
	}
	if h.ReservedSamples > 0 {
		fmt.Fprintf(&b, "; %d reservations of %d bytes have not become samples", h.ReservedSamples, h.ReservedBytes)
	}
	if rest := h.ResidentBytes - q.knownBytes(); rest > 0 {
		fmt.Fprintf(&b, "; %d bytes are of samples that the queue is done with or never had: tensors that are kept, or refs that were not put", rest)
	}
	return b.String()
}

// knownBytes are the bytes of the samples that the queue claims or is about to. It looks at each, of which there are few: none is pending, but for less than a window.
func (q *Queue) knownBytes() (n int64) {
	for _, s := range q.byID {
		if !s.freed {
			n += s.bytes
		}
	}
	for _, list := range q.older {
		for _, s := range list {
			if !s.freed {
				n += s.bytes
			}
		}
	}
	return n
}
