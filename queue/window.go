package queue

import (
	"context"
	"fmt"

	"github.com/sluice-ml/sluice"
)

// windowState is what a run with windows has beyond one without.
type windowState struct {
	on             bool
	ranks, perRank int
	limit          int // windows that may be open at once
	dropTail       bool
	open           []*window // in order
	next           int64     // number of the next window
	dealing        int64     // the first window of which some place was never delivered, or next: nothing later is given to anyone
}

// window is an open window. It closes when each of its places is done.
type window struct {
	number      int64
	slots       []slot
	real        []*sample // those that it was made of
	tokens      int64
	supervised  int64
	undelivered int // places that were never leased
	unresolved  int // places that are not done
	nextPad     int
	spare       *sample // acked, but keeps its claim for pads
	lsn         uint64
}

// slot is one place in a window.
type slot struct {
	w               *window
	index           int
	s               *sample // its own; nil if it is to be padded
	lease           *lease
	fails, expiries int32 // of pads
	delivered, done bool
	waiting         bool // it is in its rank's list
	prev, next      *slot
}

type slotList struct {
	head, tail *slot
	n          int
}

func (l *slotList) pushBack(s *slot) {
	if s.prev = l.tail; s.prev == nil {
		l.head = s
	} else {
		s.prev.next = s
	}
	s.next = nil
	l.tail = s
	l.n++
}

func (l *slotList) pushFront(s *slot) {
	if s.next = l.head; s.next == nil {
		l.tail = s
	} else {
		s.next.prev = s
	}
	s.prev = nil
	l.head = s
	l.n++
}

func (l *slotList) remove(s *slot) {
	if s.prev == nil {
		l.head = s.next
	} else {
		s.prev.next = s.next
	}
	if s.next == nil {
		l.tail = s.prev
	} else {
		s.next.prev = s.prev
	}
	s.prev, s.next = nil, nil
	l.n--
}

func (q *Queue) rankOf(sl *slot) int { return sl.index % q.windows.ranks }

func (sl *slot) view(q *Queue, pad bool) *sluice.WindowSlot {
	return &sluice.WindowSlot{
		Number: sl.w.number, Rank: sl.index % q.windows.ranks, Slot: sl.index / q.windows.ranks, Pad: pad,
		Tokens: sl.w.tokens, SupervisedTokens: sl.w.supervised,
	}
}

// setShape sets the number of ranks and their shares. There are no open windows.
func (q *Queue) setShape(w *sluice.Windows) {
	ws := &q.windows
	q.cfg.Windows = w
	n := 1
	if w != nil {
		ws.on, ws.ranks, ws.perRank, ws.dropTail = true, w.Ranks, w.PerRank, w.DropTail
		ws.limit = max(q.cfg.StepsPerCheckpoint, 1) + w.Prefetch
		n = w.Ranks
	}
	q.shares = make([]share, n)
}

func (q *Queue) backlog() int {
	return q.lists[returned].n + q.lists[fresh].n + q.lists[retry].n
}

// openWindows opens windows while there are samples for them and not too many are open. At the end of the stream it pads or drops the rest.
func (q *Queue) openWindows(tx *txn) {
	ws := &q.windows
	size := ws.ranks * ws.perRank
	for len(ws.open) < ws.limit {
		n := q.backlog()
		if n == 0 || n < size && !q.closed {
			return
		}
		picked := make([]*sample, 0, min(size, n))
		for i := int(returned); i <= int(retry) && len(picked) < size; i++ {
			for s := q.lists[i].head; s != nil && len(picked) < size; {
				next := s.next
				if s.gates != q.gates && q.passes(s.ref) != nil {
					q.dropGated(tx, s)
				} else {
					s.gates = q.gates
					picked = append(picked, s)
				}
				s = next
			}
		}
		switch {
		case len(picked) == size:
		case !q.closed:
			return
		case len(picked) == 0:
			q.touchAll()
			return
		case ws.dropTail:
			for _, s := range picked {
				r := dropRecord{T: "drop", Seq: s.seq, Why: tailDropped, At: q.now, s: s}
				q.applyDrop(tx, &r)
				if q.journal != nil {
					q.write(tx, r, false)
					s.lsn = q.lsn
				}
			}
			q.touchAll()
			continue
		}
		r := windowRecord{T: "window", Number: ws.next, picked: picked}
		for _, s := range picked {
			r.Seqs = append(r.Seqs, s.seq)
		}
		w := q.applyWindow(&r)
		if q.journal != nil {
			q.write(tx, r, false)
			w.lsn = q.lsn
		}
		q.emit(Event{Kind: EventWindow, Subject: fmt.Sprint(w.number), Text: fmt.Sprintf("opened with %d samples of %d", len(w.real), size)})
	}
}

// applyWindow deals the picked samples to the ranks: place i belongs to rank i mod ranks.
func (q *Queue) applyWindow(r *windowRecord) *window {
	ws := &q.windows
	size := ws.ranks * ws.perRank
	w := &window{number: r.Number, slots: make([]slot, size), real: r.picked, undelivered: size, unresolved: size}
	for i := range w.slots {
		sl := &w.slots[i]
		sl.w, sl.index = w, i
		if i < len(r.picked) {
			s := r.picked[i]
			q.detach(s)
			s.place = slotted
			q.pending++
			s.slot, sl.s = sl, s
			w.tokens += s.tokens
			w.supervised += s.supervised
		}
		q.line(sl, false)
	}
	ws.open = append(ws.open, w)
	ws.next = r.Number + 1
	q.count.Windows++
	q.touchAll()
	return w
}

// line puts a place into its rank's list.
func (q *Queue) line(sl *slot, front bool) {
	sh := &q.shares[q.rankOf(sl)]
	if front {
		sh.slots.pushFront(sl)
	} else {
		sh.slots.pushBack(sl)
	}
	sl.waiting = true
	q.touch(sh)
}

// pull takes a place out of its rank's list, or its lease away.
func (q *Queue) pull(sl *slot) {
	if sl.waiting {
		sh := &q.shares[q.rankOf(sl)]
		sh.slots.remove(sl)
		q.touch(sh)
		sl.waiting = false
	}
	if sl.lease != nil {
		q.dropLease(sl.lease)
	}
}

// putBack returns a place to the front of its rank's share.
func (q *Queue) putBack(sl *slot) {
	q.pull(sl)
	q.delivered(sl) // its lease's record may have been lost
	q.line(sl, true)
}

// window returns the open window with the given number, or nil.
func (q *Queue) window(number int64) *window {
	for _, w := range q.windows.open {
		if w.number == number {
			return w
		}
	}
	return nil
}

// nextSlot returns what the share is given next: a place and the sample for it, its own or one to pad with.
func (q *Queue) nextSlot(tx *txn, sh *share) (*slot, *sample) {
	for {
		sl := sh.slots.head
		if sl == nil || sl.w.number > q.windows.dealing {
			return nil, nil
		}
		if sl.s != nil {
			return sl, sl.s
		}
		if s := sl.w.padding(); s != nil {
			return sl, s
		}
		// All of its window are dead. Each was delivered before it died, so every rank loses alike.
		r := skipRecord{T: "skip", Window: sl.w.number, Slot: sl.index, slot: sl}
		q.applySkip(tx, &r)
		if q.journal != nil {
			q.write(tx, r, false)
		}
		q.openWindows(tx) // that may have been the last place of its window
	}
}

// padding picks a sample of the window to stand in for one that died: the one kept for it, or else one after the other.
func (w *window) padding() *sample {
	if w.spare != nil {
		return w.spare
	}
	for range w.real {
		s := w.real[w.nextPad%len(w.real)]
		w.nextPad++
		if s.slot != nil && s.slot.w == w && (s.place == slotted || s.place == leased) {
			return s
		}
	}
	return nil
}

// leaseSlot notes that a place is leased; with the last one of a window that was never leased before, the next window may be dealt.
func (q *Queue) leaseSlot(l *lease, sl *slot) {
	q.pull(sl)
	sl.lease = l
	q.delivered(sl)
}

func (q *Queue) delivered(sl *slot) {
	if sl.delivered {
		return
	}
	sl.delivered = true
	sl.w.undelivered--
	// Only in a replay that lost leases: what was given of this window proves that every place of those before had been given.
	if sl.w.number > q.windows.dealing {
		for _, w := range q.windows.open {
			if w.number < sl.w.number && w.undelivered > 0 {
				for i := range w.slots {
					w.slots[i].delivered = true
				}
				w.undelivered = 0
			}
		}
		q.advance()
	}
	if sl.w.undelivered == 0 {
		q.advance()
	}
}

// advance moves the barrier.
func (q *Queue) advance() {
	ws := &q.windows
	at := ws.next
	for _, w := range ws.open {
		if w.undelivered > 0 {
			at = w.number
			break
		}
	}
	if at != ws.dealing {
		ws.dealing = at
		q.touchAll()
	}
}

// leaveSlot takes a sample that was acked or died out of its place.
func (q *Queue) leaveSlot(tx *txn, s *sample, acked bool) {
	sl := s.slot
	if sl == nil {
		return
	}
	q.pull(sl)
	s.slot, sl.s = nil, nil
	q.delivered(sl) // its lease's record may have been lost
	if !acked {
		q.line(sl, true)
		return
	}
	if sl.w.spare == nil {
		sl.w.spare, s.spare = s, true
	}
	q.resolve(tx, sl)
}

// resolve notes that a place is done, and closes its window with the last.
func (q *Queue) resolve(tx *txn, sl *slot) {
	w := sl.w
	sl.done = true
	if w.unresolved--; w.unresolved > 0 {
		return
	}
	ws := &q.windows
	for i, o := range ws.open {
		if o == w {
			ws.open = append(ws.open[:i], ws.open[i+1:]...)
			break
		}
	}
	q.advance()
	q.touchAll()
	q.dropSpare(tx, w)
}

func (q *Queue) dropSpare(tx *txn, w *window) {
	if s := w.spare; s != nil {
		w.spare, s.spare = nil, false
		q.letGo(tx, s)
	}
}

// endPad ends a lease that was a pad.
func (q *Queue) endPad(tx *txn, r *endRecord) {
	sl, s := r.slot, r.s
	q.pull(sl)
	q.delivered(sl)
	switch r.How {
	case howAck, howSkip:
		q.resolve(tx, sl)
	default:
		sl.fails, sl.expiries = r.Fails, r.Expiries
		q.line(sl, true)
	}
	q.letGo(tx, s)
}

// applySkip gives a place up that nothing can fill.
func (q *Queue) applySkip(tx *txn, r *skipRecord) {
	q.pull(r.slot)
	q.delivered(r.slot)
	q.resolve(tx, r.slot)
}

// Reshape changes the number of ranks and of samples a rank and step; see [sluice.Queue]. What is left of the open windows goes back to the head, in
// order, and is dealt again; windows are numbered on.
func (q *Queue) Reshape(_ context.Context, ranks, perRank int) error {
	tx, err := q.begin()
	if err != nil {
		return err
	}
	if !q.windows.on {
		return q.endWith(tx, &sluice.Error{Kind: sluice.Invalid, Op: "queue: reshape", Subject: q.runID, Detail: "the run has no windows"})
	}
	w := *q.cfg.Windows
	w.Ranks, w.PerRank = ranks, perRank
	cfg := q.cfg
	cfg.Windows = &w
	if _, err := cfg.Resolve(); err != nil {
		return q.endWith(tx, err)
	}
	if w == *q.cfg.Windows {
		return q.endWith(tx, nil) // a repetition, whose first answer may have been lost: leases may be out by now
	}
	if q.expiry.n > 0 {
		return q.endWith(tx, &sluice.Error{Kind: sluice.Conflict, Op: "queue: reshape", Subject: q.runID, Detail: fmt.Sprintf("%d leases are out", q.expiry.n), Hint: "settle or return them first"})
	}
	r := shapeRecord{T: "shape", Ranks: ranks, PerRank: perRank}
	old := q.applyShape(tx, &r)
	if q.journal != nil {
		q.write(tx, r, false)
	}
	for i := range old {
		for w := old[i].head; w != nil; w = old[i].head {
			q.move(w)
		}
	}
	return q.end(tx)
}

// move puts a waiting acquire into the line of its rank's new share.
func (q *Queue) move(w *waiter) {
	if w.c.rank >= len(q.shares) {
		q.answer(w, sluice.Delivery{}, &sluice.Error{Kind: sluice.Invalid, Op: "queue: acquire", Subject: w.c.name, Detail: fmt.Sprintf("rank is %d, but the run was reshaped to %d ranks", w.c.rank, len(q.shares))})
		return
	}
	from := w.sh
	if from.head = w.next; w.next == nil {
		from.tail = nil
	} else {
		w.next.prev = nil
	}
	w.sh = &q.shares[w.c.rank]
	if w.prev = w.sh.tail; w.prev == nil {
		w.sh.head = w
	} else {
		w.prev.next = w
	}
	w.next = nil
	w.sh.tail = w
}

// applyShape dissolves the open windows and returns the old shares, whose waiters are not moved yet.
func (q *Queue) applyShape(tx *txn, r *shapeRecord) []share {
	ws := &q.windows
	for i := len(ws.open) - 1; i >= 0; i-- {
		w := ws.open[i]
		for j := len(w.slots) - 1; j >= 0; j-- {
			sl := &w.slots[j]
			q.pull(sl)
			if s := sl.s; s != nil {
				if s.place == leased { // its return was lost
					s.place = claiming
				} else {
					q.detach(s)
				}
				s.slot, sl.s = nil, nil
				s.place = returned
				q.lists[returned].pushFront(s)
				q.pending++
			}
		}
		q.dropSpare(tx, w)
	}
	ws.open = nil
	ws.dealing = ws.next
	old := q.shares
	w := *q.cfg.Windows
	w.Ranks, w.PerRank = r.Ranks, r.PerRank
	q.setShape(&w)
	q.touchAll()
	return old
}
