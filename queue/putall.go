package queue

import (
	"context"
	"errors"

	"github.com/sluice-ml/sluice"
)

// PutResult is the answer to one put of a [Queue.PutAll]: a status, or why it was refused.
type PutResult struct {
	Status sluice.PutStatus
	Err    error
}

// admission is a put on its way.
type admission struct {
	s         *sample // nil: the answer is there already
	displaced *sample
	later     bool // another put of the same id is under way: this one comes behind it
}

// PutAll is Put for many at once, in order: their records are written together, and one wait makes all of them durable. Each is answered for itself, as Put would.
// An id that a call names twice is put behind the others the second time.
func (q *Queue) PutAll(ctx context.Context, puts []sluice.PutRequest) []PutResult {
	results := make([]PutResult, len(puts))
	under := make([]admission, len(puts))
	for i := range puts {
		if results[i].Err = q.check(puts[i].Ref); results[i].Err == nil {
			results[i].Err = checkPositions(puts[i].Positions)
		}
	}
	// Without the journal nothing is known of any of them.
	fail := func(err error) []PutResult {
		for i := range results {
			if results[i].Err == nil {
				results[i] = PutResult{Err: err}
			}
		}
		return results
	}
	tx, err := q.begin()
	if err != nil {
		return fail(err)
	}
	for i := range puts {
		if results[i].Err == nil {
			results[i].Status, results[i].Err = q.admit(tx, &puts[i], &under[i])
		}
	}
	if err := q.end(tx); err != nil {
		q.mu.Lock()
		for i := range under {
			q.unadmit(&under[i])
		}
		q.mu.Unlock()
		return fail(err)
	}

	refs := make([]sluice.Ref, 0, len(puts))
	for i := range under {
		if s := under[i].s; s != nil {
			refs = append(refs, s.ref)
		}
	}
	errs := q.claimMany(refs)
	claimed, next := 0, 0
	for i := range under {
		a := &under[i]
		if a.s == nil {
			continue
		}
		err := errs[next]
		next++
		if err == nil {
			claimed++
			continue
		}
		results[i].Err = &sluice.Error{Kind: claimKind(err), Op: "queue: put", Subject: a.s.id, Err: err}
		q.mu.Lock()
		q.unadmit(a)
		q.mu.Unlock()
	}

	if claimed > 0 {
		tx, err = q.resume()
		if err == nil && q.closed {
			err = q.endWith(tx, q.closedError("put"))
		}
		if err != nil {
			for i := range under {
				if under[i].s != nil {
					results[i].Err = err
					q.withdraw(&under[i], err)
				}
			}
		} else {
			for i := range under {
				if under[i].s != nil {
					results[i].Status = q.enter(tx, &puts[i], under[i].s)
				}
			}
			if err := q.end(tx); err != nil {
				return fail(err)
			}
		}
	}
	for i := range under {
		if under[i].later {
			results[i].Status, results[i].Err = q.Put(ctx, puts[i])
		}
	}
	return results
}

// admit gives the id of a put to its sample, or answers. The caller holds mu.
func (q *Queue) admit(tx *txn, r *sluice.PutRequest, a *admission) (sluice.PutStatus, error) {
	p, err := q.producer(tx, r.Producer, "put")
	if err != nil {
		return "", err
	}
	s := q.newSample(r.Ref)
	known := q.byID[s.id]
	if known != nil {
		if known.place == claiming {
			a.later = true
			return "", nil
		}
		if same := q.find(s.id, s.gen); same != nil {
			tx.lsn = max(tx.lsn, same.lsn)
			if same.place == gone {
				return same.ending.status(), nil
			}
			return sluice.AlreadyPut, nil
		}
	}
	if b, ok := q.generation(s.key, s.id, s.gen); ok {
		tx.lsn = max(tx.lsn, b.lsn)
		return b.ending.status(), nil
	}
	switch {
	case known != nil && known.live():
		return "", &sluice.Error{Kind: sluice.Duplicate, Op: "queue: put", Subject: s.id, Detail: "is here in generation " + known.gen + ", not " + s.gen}
	case q.closed:
		return "", q.closedError("put")
	case p != nil && p.state != sluice.ProducerRunning:
		return "", &sluice.Error{Kind: sluice.Conflict, Op: "queue: put", Subject: s.id, Detail: "producer " + p.name + " has reported " + string(p.state)}
	}
	s.place = claiming
	a.s, a.displaced = s, known
	q.name(s, known)
	return "", nil
}

// enter makes an admitted sample pending. The caller holds mu.
func (q *Queue) enter(tx *txn, r *sluice.PutRequest, s *sample) sluice.PutStatus {
	q.claimed(s)
	status := sluice.Enqueued
	rec := putRecord{T: "put", Ref: r.Ref, Seq: q.seq + 1, Producer: r.Producer.Name, Positions: r.Positions, At: q.now, s: s}
	if err := q.passes(r.Ref); err != nil {
		status, rec.Gated = sluice.Gated, true
	}
	q.applyPut(tx, &rec)
	if q.journal != nil {
		q.write(tx, rec, false)
		s.lsn = q.lsn
	}
	q.moved()
	q.wedge.granted = q.now
	return status
}

func (q *Queue) unadmit(a *admission) {
	if a.s != nil {
		q.undoName(a.s, a.displaced)
		a.s = nil
	}
}

// withdraw gives back what was claimed for a put that came to nothing. With a journal, and unless the queue was closed, a repeated put must find its sample there: the next
// queue over it frees it if none comes.
func (q *Queue) withdraw(a *admission, why error) {
	if q.journal == nil || errors.Is(why, sluice.ErrClosed) {
		if q.guarded(func() error { return q.store.Unclaim(a.s.ref, q.owner) }) == nil {
			q.gate.Poke()
		}
	}
	q.mu.Lock()
	q.unadmit(a)
	q.mu.Unlock()
}
