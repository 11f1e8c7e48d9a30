package queue

import (
	"container/list"
	"context"
	"fmt"
	"time"

	"github.com/sluice-ml/sluice"
)

const (
	// maxAhead bounds how far one member of a replica group may be ahead of the slowest.
	maxAhead = 4096
	// hungryTime is how long a consumer that went away empty-handed counts as still waiting: those that poll ask again within it.
	hungryTime = time.Second
	maxMembers = 1 << 16
	// maxLeft is how many consumers that have left are remembered, so that their old incarnations stay stale.
	maxLeft = 1000
	// silentTime is how long a consumer must have been silent, without a lease, to be taken for one that has left where there are many.
	silentTime = time.Hour
)

// consumer is one name that acquires.
type consumer struct {
	name        string
	number      int64 // of all that were ever known: what settled leases refer to it by
	incarnation int64
	rank        int
	members     int // 0 where it is no group

	first, last *lease // that are out, oldest first
	held        int
	heldBytes   int64
	waiting     int     // its calls that wait
	needy       []int   // by member: those of them that do not ask ahead of need
	hungry      []int64 // by member: until when it counts as waiting although it went away
	left        bool    // by Leave
	departed    *list.Element

	// A group's leases in order, from the one that the slowest member has not had; cursor counts what each had.
	log    []*lease
	base   int64
	cursor []int64

	delivered, acked int64
	seen             int64
}

func (c *consumer) hold(l *lease) {
	l.cprev, l.cnext = c.last, nil
	if c.last == nil {
		c.first = l
	} else {
		c.last.cnext = l
	}
	c.last = l
	c.held++
	if !l.pad { // a pad owns no bytes
		c.heldBytes += l.s.bytes
	}
}

func (c *consumer) drop(l *lease) {
	if l.cprev == nil {
		c.first = l.cnext
	} else {
		l.cprev.cnext = l.cnext
	}
	if l.cnext == nil {
		c.last = l.cprev
	} else {
		l.cnext.cprev = l.cprev
	}
	l.cprev, l.cnext = nil, nil
	c.held--
	if !l.pad {
		c.heldBytes -= l.s.bytes
	}
}

// behind returns the next lease that other members of the group were given and this one was not, or nil.
func (c *consumer) behind(member int) *lease {
	if i := c.cursor[member] - c.base; i < int64(len(c.log)) {
		return c.log[i]
	}
	return nil
}

// answers reports whether a repeated acquire of c is given l again: if it is still held, and in a group in any case.
func (l *lease) answers(c *consumer) bool {
	return l.c == c && l.incarnation == c.incarnation && (!l.ended || l.group != nil)
}

// ahead is how many leases the member had that the slowest had not.
func (c *consumer) ahead(member int) int64 { return c.cursor[member] - c.base }

// holds reports whether the member has leases that it has not settled.
func (c *consumer) holds(member int) bool {
	if c.members < 2 {
		return c.held > 0
	}
	for l := c.last; l != nil; l = l.cprev {
		if l.group.verdicts[member] == "" {
			return true
		}
	}
	return false
}

// gaveBack reports whether the member has failed or returned a lease that others of its group still hold: that sample comes again, and to all of them.
func (c *consumer) gaveBack(member int) bool {
	if c.members < 2 {
		return false
	}
	for l := c.first; l != nil; l = l.cnext {
		if severity(l.group.verdicts[member]) > 0 {
			return true
		}
	}
	return false
}

// trim forgets what every member has had.
func (c *consumer) trim() {
	least := c.base + int64(len(c.log))
	for _, n := range c.cursor {
		least = min(least, n)
	}
	if n := least - c.base; n > 0 {
		clear(c.log[:n])
		c.log = c.log[n:]
		c.base = least
	}
}

func (c *consumer) regroup(members int) {
	c.members, c.log, c.base, c.cursor = 0, nil, 0, nil
	c.needy, c.hungry = make([]int, max(members, 1)), make([]int64, max(members, 1))
	if members > 1 {
		c.members = members
		c.cursor = make([]int64, members)
	}
}

// consumer returns the consumer that calls, registers it, or lets a newer incarnation take over.
func (q *Queue) consumer(tx *txn, k sluice.Consumer, op string) (*consumer, error) {
	bad := func(field, detail string) error {
		return &sluice.Error{Kind: sluice.Invalid, Op: "queue: " + op, Subject: k.Name, Detail: field + " " + detail}
	}
	members := k.Members
	if members == 1 {
		members = 0
	}
	if members < 0 || members > maxMembers || k.Member < 0 || k.Member >= max(members, 1) {
		return nil, bad("member", fmt.Sprintf("is %d of %d, want 0 to one less than the members", k.Member, k.Members))
	}
	c := q.caller
	if c == nil || c.name != k.Name {
		c = q.consumers[k.Name]
		q.caller = c
	}
	if c != nil && c.incarnation == k.Incarnation && !c.left {
		if op != "acquire" || c.rank == k.Rank && c.members == members {
			if k.Member >= max(c.members, 1) {
				return nil, bad("member", fmt.Sprintf("is %d, but the group has %d", k.Member, max(c.members, 1)))
			}
			if op == "acquire" && q.windows.on && c.rank >= len(q.shares) {
				return nil, bad("rank", fmt.Sprintf("is %d, but the run was reshaped to %d ranks", c.rank, len(q.shares)))
			}
			c.seen = q.now
			return c, nil
		}
		if c.held > 0 || c.waiting > 0 {
			return nil, bad("rank or members", fmt.Sprintf("changed from %d and %d to %d and %d while it holds leases or waits; a restart needs a newer incarnation", c.rank, c.members, k.Rank, members))
		}
	}
	if err := sluice.ValidateID(k.Name); err != nil {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: "queue: " + op, Detail: "the consumer's name", Err: err}
	}
	if k.Incarnation < 0 || k.Incarnation >= 1<<53 {
		return nil, bad("incarnation", fmt.Sprintf("is %d, want 0 up to 2^53", k.Incarnation))
	}
	if c != nil && k.Incarnation < c.incarnation {
		q.count.Stale++
		return nil, &sluice.Error{Kind: sluice.Stale, Op: "queue: " + op, Subject: k.Name, Detail: fmt.Sprintf("incarnation %d was superseded by %d", k.Incarnation, c.incarnation)}
	}
	if k.Rank < 0 || op == "acquire" && q.windows.on && k.Rank >= len(q.shares) {
		return nil, bad("rank", fmt.Sprintf("is %d, but the run has %d ranks", k.Rank, len(q.shares)))
	}
	if c != nil && c.incarnation < k.Incarnation {
		q.emit(Event{Kind: EventTakeover, Subject: k.Name, Text: fmt.Sprintf("incarnation %d takes over from %d, which held %d leases", k.Incarnation, c.incarnation, c.held)})
		q.evict(tx, c, &sluice.Error{Kind: sluice.Stale, Op: "queue: acquire", Subject: k.Name, Detail: fmt.Sprintf("incarnation %d was superseded by %d", c.incarnation, k.Incarnation)})
	}
	if c == nil && len(q.consumers) >= max(q.crowd, 2*maxLeft) {
		q.sweep(tx)
	}
	r := consumerRecord{T: "consumer", Name: k.Name, Incarnation: k.Incarnation, Rank: k.Rank, Members: members}
	q.applyConsumer(&r)
	if q.journal != nil {
		// Only a group's cursors and the fence against an old incarnation must not be lost.
		q.write(tx, r, c == nil && members == 0)
	}
	q.touchAll()
	c = q.consumers[k.Name]
	return c, nil
}

// sweep takes the consumers that went away without a word for such as have left. It comes when their number has doubled.
func (q *Queue) sweep(tx *txn) {
	for _, c := range q.consumers {
		if c.left || c.held > 0 || c.waiting > 0 || q.now-c.seen < int64(silentTime) {
			continue
		}
		r := consumerRecord{T: "consumer", Name: c.name, Incarnation: c.incarnation, Rank: c.rank, Left: true}
		q.applyConsumer(&r)
		if q.journal != nil {
			q.write(tx, r, true)
		}
	}
	q.crowd = 2 * len(q.consumers)
}

func (q *Queue) applyConsumer(r *consumerRecord) {
	c := q.consumers[r.Name]
	if c == nil {
		q.known++
		c = &consumer{name: r.Name, number: q.known}
		q.consumers[r.Name] = c
	}
	for c.first != nil { // only where a lost record left some
		q.abandon(c.first)
	}
	c.incarnation, c.rank, c.left, c.seen = r.Incarnation, r.Rank, r.Left, q.now
	c.regroup(r.Members)
	if c.departed != nil {
		q.departed.Remove(c.departed)
		c.departed = nil
	}
	if c.left {
		c.departed = q.departed.PushBack(c)
		if q.departed.Len() > maxLeft {
			old := q.departed.Remove(q.departed.Front()).(*consumer)
			delete(q.consumers, old.name)
			q.caller = nil
		}
	}
	q.groups = q.groups || r.Members > 1
}

// abandon returns a lease in a replay whose own record of that was lost.
func (q *Queue) abandon(l *lease) {
	r := endRecord{l: l, At: q.now}
	q.decide(&r, sluice.Return, "")
	q.applyEnd(nil, &r)
}

// evict ends what c has: its waiting calls get err, and its leases return to the head in the order in which they were given.
func (q *Queue) evict(tx *txn, c *consumer, err error) {
	sh := q.share(c)
	for w := sh.head; w != nil; {
		next := w.next
		if w.c == c {
			q.answer(w, sluice.Delivery{}, err)
		}
		w = next
	}
	for l := c.last; l != nil; l = c.last {
		r := endRecord{T: "end", Lease: l.id, At: q.now, l: l}
		q.decide(&r, sluice.Return, "")
		q.finish(tx, &r)
	}
}

// Leave ends a consumer; see [sluice.Queue].
func (q *Queue) Leave(_ context.Context, k sluice.Consumer) error {
	tx, err := q.begin()
	if err != nil {
		return err
	}
	if q.consumers[k.Name] == nil {
		return q.end(tx) // it was never here
	}
	c, err := q.consumer(tx, k, "leave")
	if err != nil {
		return q.endWith(tx, err)
	}
	q.evict(tx, c, &sluice.Error{Kind: sluice.Stale, Op: "queue: acquire", Subject: k.Name, Detail: "the consumer has left"})
	r := consumerRecord{T: "consumer", Name: c.name, Incarnation: c.incarnation, Rank: c.rank, Left: true}
	q.applyConsumer(&r)
	if q.journal != nil {
		q.write(tx, r, false)
	}
	return q.end(tx)
}

// giveMember gives a member a lease that others of its group have already.
func (q *Queue) giveMember(tx *txn, c *consumer, member int, l *lease, request string) {
	r := giveRecord{T: "give", Consumer: c.name, Member: member, Lease: l.id, Request: request, At: q.now}
	q.applyGive(&r, c, l)
	if q.journal != nil {
		q.write(tx, r, false)
	}
}

func (q *Queue) applyGive(r *giveRecord, c *consumer, l *lease) {
	c.cursor[r.Member]++
	if r.Request != "" {
		q.requests.addLease(requestKey{'a', c.name, c.incarnation, r.Member, r.Request}, l, r.At)
	}
	c.trim()
}

func (q *Queue) applyMember(r *memberRecord) {
	g := r.l.group
	if g.verdicts[r.Member] != "" {
		return
	}
	g.verdicts[r.Member] = r.Verdict
	if r.Reason != "" {
		g.reasons = append(g.reasons, r.Reason)
	}
	g.left--
}

// outcome is the severest of the verdicts: no member may train on what another could not.
func (g *groupLease) outcome() (sluice.Verdict, string) {
	worst := sluice.Ack
	for _, v := range g.verdicts {
		if severity(v) > severity(worst) {
			worst = v
		}
	}
	reason := ""
	for i, r := range g.reasons {
		if i > 0 {
			reason += "; "
		}
		reason += r
	}
	return worst, reason
}

func severity(v sluice.Verdict) int {
	switch v {
	case sluice.Return:
		return 1
	case sluice.Fail:
		return 2
	case sluice.FailPermanent:
		return 3
	}
	return 0
}
