package queue

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-ml/sluice"
)

// lease is one delivery that is out. What became of one that was settled is remembered elsewhere, for a while.
type lease struct {
	id          sluice.LeaseID
	s           *sample // nil once it has ended
	slot        *slot   // in a run with windows; likewise
	c           *consumer
	incarnation int64
	deadline    int64 // while it is out
	given       int64
	order       int64 // of its delivery
	redelivery  int32
	pad         bool
	group       *groupLease
	lsn         uint64

	prev, next   *lease // in its line
	line         *expiryLine
	cprev, cnext *lease // in its consumer's, oldest first

	ended     bool
	requested bool // a remembered request points to it
}

// groupLease is what the members of a replica group are given, and what they said so far. The lease may end before the slowest of them has been given it: that one is
// given the same all the same, since members that are given different samples hang, or train on different ones.
type groupLease struct {
	ref      sluice.Ref
	window   *sluice.WindowSlot
	verdicts []sluice.Verdict
	reasons  []string
	left     int // members that have not settled
}

// leaseList is a doubly linked list of leases.
type leaseList struct {
	head, tail *lease
	n          int
}

func (l *leaseList) pushBack(x *lease) {
	x.prev, x.next = l.tail, nil
	if l.tail == nil {
		l.head = x
	} else {
		l.tail.next = x
	}
	l.tail = x
	l.n++
}

func (l *leaseList) remove(x *lease) {
	if x.prev == nil {
		l.head = x.next
	} else {
		x.prev.next = x.next
	}
	if x.next == nil {
		l.tail = x.prev
	} else {
		x.next.prev = x.prev
	}
	x.prev, x.next = nil, nil
	l.n--
}

// nextSample returns the pending sample that is served next, outside windows. What no longer passes the version gates goes on the way.
func (q *Queue) nextSample(tx *txn) *sample {
	for {
		var s *sample
		for i := int(returned); i <= int(retry) && s == nil; i++ {
			s = q.lists[i].head
		}
		if s == nil || s.gates == q.gates {
			return s
		}
		if err := q.passes(s.ref); err == nil {
			s.gates = q.gates
			return s
		}
		q.dropGated(tx, s)
	}
}

// grant leases up to n samples to the member of c.
func (q *Queue) grant(tx *txn, c *consumer, member, n int, request string) []sluice.Lease {
	var out []sluice.Lease
	sh := q.share(c)
	for range n {
		if c.members > 1 {
			if l := c.behind(member); l != nil {
				q.giveMember(tx, c, member, l, request)
				out = append(out, q.view(l))
				continue
			}
			if c.ahead(member) >= maxAhead {
				break
			}
		}
		r := leaseRecord{T: "lease", Consumer: c.name, Incarnation: c.incarnation, Rank: c.rank, Member: member, Members: c.members, Request: request, At: q.now, c: c}
		if q.windows.on {
			if r.slot, r.s = q.nextSlot(tx, sh); r.slot == nil {
				break
			}
			r.Window, r.Slot, r.Windowed, r.Pad = r.slot.w.number, r.slot.index, true, r.slot.s != r.s
		} else if r.s = q.nextSample(tx); r.s == nil {
			break
		}
		r.Seq, r.Lease = r.s.seq, q.newID()
		l := q.applyLease(&r)
		if q.journal != nil {
			// A member that is given the same lease later must find it again, so a group's leases may not be lost.
			q.write(tx, r, c.members < 2)
			l.lsn = r.s.lsn
			if l.slot != nil {
				l.lsn = max(l.lsn, l.slot.w.lsn)
			}
			tx.lsn = max(tx.lsn, l.lsn) // nobody trains on what a crash could undo
		}
		if out == nil && !q.windows.on {
			out = make([]sluice.Lease, 0, min(n, q.pending+1))
		}
		out = append(out, q.view(l))
	}
	return out
}

func sortByOrder(list []*lease) {
	slices.SortFunc(list, func(a, b *lease) int { return cmp.Compare(a.order, b.order) })
}

// leaseByID returns the lease if it is out, or nil.
func (q *Queue) leaseByID(id sluice.LeaseID) *lease {
	if l := q.leases[key(id)]; l != nil && l.id == id {
		return l
	}
	return nil
}

func (q *Queue) newID() sluice.LeaseID {
	for {
		if id := q.ids.next(); q.leases[key(id)] == nil {
			return id
		}
	}
}

// applyLease gives a lease. If a lost record left the sample leased otherwise, that lease ends here.
func (q *Queue) applyLease(r *leaseRecord) *lease {
	s, c := r.s, r.c
	l := q.spareLease
	if l == nil {
		l = new(lease)
	}
	q.spareLease = nil
	q.order++
	*l = lease{id: r.Lease, s: s, slot: r.slot, c: c, incarnation: r.Incarnation, given: r.At, order: q.order, pad: r.Pad}
	if c.members > 1 {
		l.group = &groupLease{ref: s.ref, verdicts: make([]sluice.Verdict, c.members), left: c.members}
		if l.slot != nil {
			l.group.window = l.slot.view(q, l.pad)
		}
		c.log = append(c.log, l)
		c.cursor[r.Member] = c.base + int64(len(c.log))
		c.trim()
	}
	q.count.Delivered++
	c.delivered++
	if sl := r.slot; sl != nil {
		q.leaseSlot(l, sl)
	}
	if r.Pad {
		s.pads++
		q.count.Padded++
		l.redelivery = s.deliveries
	} else {
		q.detach(s)
		s.place, s.lease = leased, l
		q.out++
		l.redelivery = s.deliveries
		if s.deliveries++; s.deliveries > 1 {
			q.count.Redelivered++
		}
	}
	q.leases[key(l.id)] = l
	q.expiry.push(l, q.now, q.cfg.VisibilityTimeout)
	c.hold(l)
	q.share(c).out++
	if r.Request != "" {
		l.requested = true
		q.requests.addLease(requestKey{'a', c.name, c.incarnation, r.Member, r.Request}, l, r.At)
	}
	return l
}

// detach takes a sample out of wherever it waits or is leased.
func (q *Queue) detach(s *sample) {
	switch s.place {
	case returned, fresh, retry:
		q.lists[s.place].remove(s)
		q.pending--
	case slotted:
		q.pending-- // its slot is taken out of the share by whoever deals with slots
	case leased:
		if s.lease != nil {
			q.dropLease(s.lease)
		}
	case dead:
		if s.freed {
			q.deadFreed.remove(s)
		} else {
			q.deadKept.remove(s)
			q.deadBytes -= s.bytes
		}
	case gone:
		if s.kept {
			q.kept.remove(s)
			s.kept = false
		}
	}
}

// dropLease ends a lease without a word about its sample.
func (q *Queue) dropLease(l *lease) {
	q.expiry.remove(l)
	l.c.drop(l)
	sh := q.share(l.c)
	sh.out--
	q.touch(sh)
	l.ended = true
	delete(q.leases, key(l.id))
	if l.slot != nil {
		l.slot.lease = nil
	}
	if l.pad {
		l.s.pads--
	} else {
		l.s.lease = nil
		q.out--
	}
}

// view is the lease as its holder sees it.
func (q *Queue) view(l *lease) sluice.Lease {
	left := time.Duration(max(l.deadline-q.now, 0))
	v := sluice.Lease{ID: l.id, Consumer: l.c.name, Deadline: q.began.Add(time.Duration(l.deadline - q.base)), TimeLeft: left, Redelivery: int(l.redelivery)}
	if g := l.group; g != nil {
		v.Ref = g.ref
		if g.window != nil {
			w := *g.window
			v.Window = &w
		}
		return v
	}
	v.Ref = l.s.ref
	if l.slot != nil {
		v.Window = l.slot.view(q, l.pad)
	}
	return v
}

// How a lease ended, in a record.
const (
	howAck    = "ack"
	howRetry  = "retry"
	howReturn = "return"
	howDead   = "dead"
	howSkip   = "skip" // a pad that nobody can use: its place stays empty
)

// Settle acks, fails or returns leases; see [sluice.Queue].
func (q *Queue) Settle(_ context.Context, r sluice.SettleRequest) ([]sluice.SettleResult, error) {
	for i := range r.Settlements {
		switch v := r.Settlements[i].Verdict; v {
		case sluice.Ack, sluice.Fail, sluice.FailPermanent, sluice.Return:
		default:
			return nil, &sluice.Error{Kind: sluice.Invalid, Op: "queue: settle", Subject: clean(string(v), 40), Detail: "is no verdict, want ack, fail, fail_permanent or return"}
		}
	}
	if err := checkRequestID(r.RequestID); err != nil {
		return nil, err
	}
	tx, err := q.begin()
	if err != nil {
		return nil, err
	}
	c, err := q.consumer(tx, r.Consumer, "settle")
	if err != nil {
		return nil, q.endWith(tx, err)
	}
	key := requestKey{'s', c.name, c.incarnation, r.Consumer.Member, r.RequestID}
	if r.RequestID != "" {
		if known := q.requests.find(key, q.now); known != nil && len(known.results) > 0 {
			results := append([]sluice.SettleResult(nil), known.results...)
			tx.lsn = max(tx.lsn, known.lsn)
			if err := q.end(tx); err != nil {
				return nil, err
			}
			return results, nil
		}
	}
	results := make([]sluice.SettleResult, len(r.Settlements))
	returns := 0
	for i := range r.Settlements {
		if r.Settlements[i].Verdict == sluice.Return {
			returns++
			continue
		}
		results[i] = q.settle(tx, c, r.Consumer.Member, &r.Settlements[i])
	}
	if returns > 0 {
		q.settleReturns(tx, c, r.Consumer.Member, r.Settlements, results)
	}
	if r.RequestID != "" && len(results) > 0 {
		q.applyResults(&resultsRecord{Consumer: c.name, Incarnation: c.incarnation, Member: key.member, Request: r.RequestID, At: q.now, Results: results})
		if q.journal != nil {
			q.write(tx, resultsRecord{T: "results", Consumer: c.name, Incarnation: c.incarnation, Member: key.member, Request: r.RequestID, At: q.now, Results: results}, tx.lsn == 0)
			q.requests.find(key, q.now).lsn = tx.lsn
		}
	}
	if err := q.end(tx); err != nil {
		return nil, err
	}
	return results, nil
}

// settleReturns handles the returns of one call last to first in the order in which they were delivered, so that they stand at the head in that order.
func (q *Queue) settleReturns(tx *txn, c *consumer, member int, all []sluice.Settlement, results []sluice.SettleResult) {
	type back struct {
		order int64
		i     int
	}
	var backs []back
	for i := range all {
		if all[i].Verdict == sluice.Return {
			b := back{i: i}
			if l := q.leaseByID(all[i].Lease); l != nil {
				b.order = l.order
			}
			backs = append(backs, b)
		}
	}
	slices.SortStableFunc(backs, func(a, b back) int { return cmp.Compare(b.order, a.order) })
	for _, b := range backs {
		results[b.i] = q.settle(tx, c, member, &all[b.i])
	}
}

// settle decides about one lease.
func (q *Queue) settle(tx *txn, c *consumer, member int, st *sluice.Settlement) sluice.SettleResult {
	res := sluice.SettleResult{Lease: st.Lease, Status: sluice.StaleLease}
	l := q.leaseByID(st.Lease)
	if l == nil {
		return q.settledBefore(tx, c, st.Lease)
	}
	if l.c != c || l.incarnation != c.incarnation {
		q.count.Stale++
		return res
	}
	verdict, reason := st.Verdict, st.Reason
	if g := l.group; g != nil {
		if said := g.verdicts[member]; said != "" {
			tx.lsn = max(tx.lsn, l.lsn)
			res.Status, res.As = sluice.AlreadySettled, said
			return res
		}
		res.Status, res.As = sluice.Settled, verdict
		r := memberRecord{T: "member", Lease: l.id, Member: member, Verdict: verdict, Reason: reasonOf(verdict, reason), l: l}
		q.applyMember(&r)
		q.moved()
		if q.journal != nil {
			q.write(tx, r, false)
			l.lsn = q.lsn
		}
		if g.left > 0 {
			return res
		}
		verdict, reason = g.outcome()
	} else {
		res.Status, res.As = sluice.Settled, verdict
	}
	r := endRecord{T: "end", Lease: l.id, As: verdict, At: q.now, l: l}
	q.decide(&r, verdict, reason)
	q.finish(tx, &r)
	res.Dead = r.How == howDead
	return res
}

// settledBefore answers for a lease that is not out.
func (q *Queue) settledBefore(tx *txn, c *consumer, id sluice.LeaseID) sluice.SettleResult {
	o, ok := q.settlement(id)
	if !ok || o.consumer != c.number || o.incarnation != c.incarnation {
		q.count.Stale++
		return sluice.SettleResult{Lease: id, Status: sluice.StaleLease}
	}
	tx.lsn = max(tx.lsn, o.lsn)
	return sluice.SettleResult{Lease: id, Status: sluice.AlreadySettled, As: verdicts[o.as], Dead: o.dead}
}

func reasonOf(v sluice.Verdict, reason string) string {
	if v != sluice.Fail && v != sluice.FailPermanent {
		return ""
	}
	return clean(reason, maxReason)
}

// decide says what becomes of the sample (or the place, for a pad) of r.l.
func (q *Queue) decide(r *endRecord, verdict sluice.Verdict, reason string) {
	l := r.l
	r.s, r.slot, r.Pad = l.s, l.slot, l.pad
	r.Seq = l.s.seq
	if l.slot != nil {
		r.Windowed, r.Window, r.Slot = true, l.slot.w.number, l.slot.index
	}
	fails, expiries := &l.s.fails, &l.s.expiries
	if l.pad {
		fails, expiries = &l.slot.fails, &l.slot.expiries
	}
	r.Fails, r.Expiries = *fails, *expiries
	var spent bool
	switch verdict {
	case sluice.Ack:
		r.How = howAck
		return
	case sluice.Return:
		r.How = howReturn
		return
	case sluice.Fail:
		r.Fails++
		spent = int(r.Fails) >= q.cfg.MaxFails
	case sluice.FailPermanent:
		r.Fails++
		spent = true
	default: // it ran out
		r.Expiries++
		spent = int(r.Expiries) >= q.cfg.MaxExpiries
	}
	r.Reason = clean(reason, maxReason)
	switch {
	case spent && l.pad:
		r.How = howSkip
	case spent:
		r.How = howDead
	default:
		r.How = howRetry
	}
}

// finish records the end of a lease and does what follows from it.
func (q *Queue) finish(tx *txn, r *endRecord) {
	l := r.l
	q.applyEnd(tx, r)
	q.moved()
	if q.journal != nil {
		r.Consumer, r.Incarnation = l.c.name, l.incarnation
		q.write(tx, *r, r.How == howReturn || r.As == "" && r.How == howRetry)
		if r.s.place == gone || r.s.place == dead {
			r.s.lsn = q.lsn
		}
	}
	if r.How == howDead {
		q.emit(Event{Kind: EventDead, Subject: r.s.id, Text: r.Reason})
		q.keepShare(tx)
	}
}

// applyEnd ends a lease. In a replay the lease may be unknown, its record having been lost.
func (q *Queue) applyEnd(tx *txn, r *endRecord) {
	l, s := r.l, r.s
	if l != nil {
		q.dropLease(l)
		if as, ok := codeOf(r.As); ok {
			q.rememberLease(outcome{l.id, l.c.number, l.incarnation, r.At, tx.next(), as, r.How == howDead})
		}
		l.s, l.slot = nil, nil
		if l.group == nil && !l.requested {
			q.spareLease = l // nobody else points to it; the next lease saves an allocation
		}
		if r.How == howAck && !r.Pad {
			l.c.acked++
		}
	}
	switch {
	case r.How == howReturn:
		q.count.Returned++
	case r.As == sluice.Fail || r.As == sluice.FailPermanent:
		q.count.Failed++
	case r.As == "":
		q.count.Expired++
	}
	if r.Pad {
		q.endPad(tx, r)
		return
	}
	s.fails, s.expiries = r.Fails, r.Expiries
	if r.Reason != "" && (r.How == howRetry || r.How == howDead) {
		s.remember(r.Reason)
	}
	if s.place == leased && s.lease == nil {
		s.place = claiming // it is nowhere: dropLease took it
	} else {
		q.detach(s)
	}
	switch r.How {
	case howAck:
		q.count.Acked++
		q.count.TokensAcked += s.tokens
		q.count.BytesAcked += s.bytes
		q.leaveSlot(tx, s, true)
		q.bury(tx, s, acked, r.At)
		q.letGo(tx, s)
		if tx != nil && s.info == nil && !q.windows.on {
			q.spareSample = s // neither a store call nor a window points to it
		}
	case howDead:
		q.leaveSlot(tx, s, false)
		q.die(tx, s, r.At)
	case howRetry, howReturn:
		switch {
		case r.slot != nil:
			s.place = slotted
			q.pending++
			q.putBack(r.slot)
		case r.How == howRetry:
			q.pend(s, retry)
		default:
			s.place = returned
			q.lists[returned].pushFront(s)
			q.pending++
		}
	}
}

// pend appends a sample to a pending list.
func (q *Queue) pend(s *sample, where place) {
	s.place = where
	q.lists[where].pushBack(s)
	q.pending++
}

// bury remembers the generation of a sample that is done with, and nothing more.
func (q *Queue) bury(tx *txn, s *sample, why ending, at int64) {
	s.place, s.ending, s.at = gone, why, at
	if s.info != nil {
		s.info.reasons = nil
	}
	if s.kept = !s.freed && (s.pads > 0 || s.spare); s.kept {
		q.kept.pushBack(s)
		return
	}
	q.bygone(tx, s)
}

// bygone takes s out of the names and remembers its generation.
func (q *Queue) bygone(tx *txn, s *sample) {
	q.unname(s)
	q.rememberPut(s.key, s.id, s.gen, bygone{at: s.at, lsn: tx.next(), ending: s.ending})
}

// letGo gives up the claim on a sample that is gone, unless a pad needs its bytes.
func (q *Queue) letGo(tx *txn, s *sample) {
	if s.place != gone || s.freed || s.pads > 0 || s.spare {
		return
	}
	if s.kept {
		s.kept = false
		q.kept.remove(s)
		q.bygone(tx, s)
	}
	tx.free(s)
}

// expire takes back what has run out, in the order in which it did.
func (q *Queue) expire(tx *txn) {
	for l := q.expiry.first(); l != nil && l.deadline <= q.now; l = q.expiry.first() {
		r := endRecord{T: "end", Lease: l.id, At: q.now, l: l}
		verdict, reason := sluice.Verdict(""), fmt.Sprintf("the lease of %s ran out", l.c.name)
		if g := l.group; g != nil && g.left < len(g.verdicts) {
			// Some members spoke and the others did not: a failure that was reported is the better explanation.
			if v, why := g.outcome(); v == sluice.Fail || v == sluice.FailPermanent {
				verdict, reason = v, why
			}
		}
		r.As = verdict
		q.decide(&r, verdict, reason)
		q.finish(tx, &r)
		tx.ended++
	}
}

// ReclaimExpired takes back what has run out; see [sluice.Queue].
func (q *Queue) ReclaimExpired(context.Context) (int, error) {
	tx, err := q.begin()
	if err != nil {
		return 0, err
	}
	q.expire(tx)
	n := tx.ended
	return n, q.end(tx)
}

// Renew gives leases their full time again; see [sluice.Queue]. It is not journalled: a queue that is opened again gives every lease its full time.
func (q *Queue) Renew(_ context.Context, r sluice.RenewRequest) ([]sluice.SettleResult, error) {
	tx, err := q.begin()
	if err != nil {
		return nil, err
	}
	c, err := q.consumer(tx, r.Consumer, "renew")
	if err != nil {
		return nil, q.endWith(tx, err)
	}
	var results []sluice.SettleResult
	if r.Leases == nil {
		results = make([]sluice.SettleResult, 0, c.held)
		for l := c.first; l != nil; l = l.cnext {
			results = append(results, q.renew(l))
		}
	} else {
		results = make([]sluice.SettleResult, 0, len(r.Leases))
		for _, id := range r.Leases {
			l := q.leaseByID(id)
			if l == nil || l.c != c || l.incarnation != c.incarnation {
				results = append(results, q.settledBefore(tx, c, id))
			} else {
				results = append(results, q.renew(l))
			}
		}
	}
	if err := q.end(tx); err != nil {
		return nil, err
	}
	return results, nil
}

func (q *Queue) renew(l *lease) sluice.SettleResult {
	life := max(l.line.timeout, q.cfg.VisibilityTimeout)
	q.expiry.remove(l)
	q.expiry.push(l, q.now, life)
	return sluice.SettleResult{Lease: l.id, Status: sluice.Renewed}
}
