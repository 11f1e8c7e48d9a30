package queue

import (
	"context"
	"time"

	"github.com/sluice-ml/sluice"
)

const (
	maxReason  = 4096   // bytes of a reason
	maxReasons = 8      // kept of a sample
	maxDead    = 10_000 // dead letters listed
)

// remember keeps the last reasons for which a sample was failed.
func (s *sample) remember(reason string) {
	i := s.rare()
	if len(i.reasons) == maxReasons {
		i.reasons = append(i.reasons[:0:0], i.reasons[1:]...)
	}
	i.reasons = append(i.reasons, reason)
}

// die makes s a dead letter. Its claim stays, so that it can be requeued.
func (q *Queue) die(tx *txn, s *sample, at int64) {
	s.place, s.at = dead, at
	q.deadKept.pushBack(s)
	q.deadBytes += s.bytes
	q.count.DeadTotal++
	tx.tell(markDead, s)
}

// overShare reports whether the dead letters hold more than their share: a tenth of either cap.
func (q *Queue) overShare() bool {
	c := &q.cfg.Caps
	return c.MaxBytes > 0 && q.deadBytes > c.MaxBytes/10 || c.MaxSamples > 0 && int64(q.deadKept.n) > c.MaxSamples/10
}

// keepShare frees the oldest dead letters while they hold too much, and forgets the oldest while they are too many to list.
func (q *Queue) keepShare(tx *txn) {
	for s := q.deadKept.head; s != nil && (q.overShare() || q.deadKept.n > maxDead); {
		next := s.next
		if s.pads == 0 { // a pad that is out needs the bytes; the next death looks again
			r := freedRecord{T: "freed", Seq: s.seq, s: s}
			q.applyFreed(tx, &r)
			if q.journal != nil {
				q.write(tx, r, false)
			}
			q.emit(Event{Kind: EventDeadFreed, Subject: s.id, Text: "the dead letters hold more than a tenth of the cap"})
		}
		s = next
	}
	for q.deadKept.n+q.deadFreed.n > maxDead && q.deadFreed.head != nil {
		s := q.deadFreed.head
		r := dropRecord{T: "drop", Seq: s.seq, Why: forgotten, At: q.now, s: s}
		q.applyDrop(tx, &r)
		if q.journal != nil {
			q.write(tx, r, false)
		}
	}
}

func (q *Queue) applyFreed(tx *txn, r *freedRecord) {
	s := r.s
	q.deadKept.remove(s)
	q.deadBytes -= s.bytes
	tx.free(s)
	q.deadFreed.pushBack(s)
}

// DeadLetters lists the dead letters, oldest first; see [sluice.Queue].
func (q *Queue) DeadLetters(context.Context) ([]sluice.DeadLetter, error) {
	tx, err := q.begin()
	if err != nil {
		return nil, err
	}
	list := make([]sluice.DeadLetter, 0, q.deadKept.n+q.deadFreed.n)
	a, b := q.deadFreed.head, q.deadKept.head
	for a != nil || b != nil {
		s := a
		if a == nil || b != nil && b.at < a.at {
			s, b = b, b.next
		} else {
			a = a.next
		}
		list = append(list, sluice.DeadLetter{
			Ref: s.ref, Since: time.Unix(0, s.at), Fails: int(s.fails), Expiries: int(s.expiries), Reasons: append([]string(nil), s.reasons()...), Freed: s.freed,
		})
		tx.lsn = max(tx.lsn, s.lsn)
	}
	return list, q.end(tx)
}

// Requeue gives dead letters new budgets and puts them behind all others; see [sluice.Queue]. In a run with windows they are dealt to later windows.
func (q *Queue) Requeue(_ context.Context, sampleIDs ...string) (int, error) {
	tx, err := q.begin()
	if err != nil {
		return 0, err
	}
	n := 0
	for _, id := range sampleIDs {
		s := q.byID[id]
		if s == nil || s.place != dead || s.freed {
			continue
		}
		r := requeueRecord{T: "requeue", Seq: s.seq, s: s}
		q.applyRequeue(tx, &r)
		if q.journal != nil {
			q.write(tx, r, false)
			s.lsn = q.lsn
		}
		n++
	}
	return n, q.end(tx)
}

func (q *Queue) applyRequeue(tx *txn, r *requeueRecord) {
	s := r.s
	q.detach(s)
	s.fails, s.expiries = 0, 0
	q.pend(s, retry)
	tx.tell(markAlive, s)
}

// Drop frees dead letters; see [sluice.Queue].
func (q *Queue) Drop(_ context.Context, sampleIDs ...string) (int, error) {
	tx, err := q.begin()
	if err != nil {
		return 0, err
	}
	n := 0
	for _, id := range sampleIDs {
		found := append([]*sample{q.byID[id]}, q.older[id]...)
		for _, s := range found {
			if s == nil || s.place != dead {
				continue
			}
			r := dropRecord{T: "drop", Seq: s.seq, Why: droppedByHand, At: q.now, s: s}
			q.applyDrop(tx, &r)
			if q.journal != nil {
				q.write(tx, r, false)
				s.lsn = q.lsn
			}
			n++
		}
	}
	return n, q.end(tx)
}
