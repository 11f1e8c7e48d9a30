package queue

import (
	"context"
	"errors"

	"github.com/sluice-ml/sluice"
)

// batch is what one Append makes durable.
type batch struct {
	records []sluice.Record
	upto    uint64 // the last record in it
	done    chan struct{}
}

func newBatch() *batch { return &batch{done: make(chan struct{})} }

// write appends a record to what the next Append takes. The caller holds mu, which is what keeps the order.
func (q *Queue) write(tx *txn, record any, lazy bool) {
	q.batch.records = append(q.batch.records, sluice.Record{Lazy: lazy, Data: encode(record)})
	q.lsn++
	if !lazy && tx != nil {
		tx.lsn = q.lsn
	}
	if !q.flushing {
		q.flushing = true
		go q.flush()
	}
}

// wait returns when the record is durable, or the journal has failed.
func (q *Queue) wait(lsn uint64) error {
	q.mu.Lock()
	for q.synced < lsn && q.broken == nil {
		b := q.batch
		if q.flying != nil && lsn <= q.flying.upto {
			b = q.flying
		}
		q.mu.Unlock()
		<-b.done
		q.mu.Lock()
	}
	err := q.broken
	if q.synced >= lsn {
		err = nil
	}
	q.mu.Unlock()
	return err
}

// flush writes batch after batch and ends when there is nothing left to write. While one Append is under way the next batch fills up: that is the whole
// of group commit.
func (q *Queue) flush() {
	for {
		q.mu.Lock()
		b := q.batch
		if len(b.records) == 0 || q.journalFailed {
			close(b.done) // nobody may wait for what is never written
			q.batch = newBatch()
			q.flushing = false
			if q.idle != nil {
				close(q.idle)
				q.idle = nil
			}
			q.mu.Unlock()
			return
		}
		q.batch = newBatch()
		q.flying = b
		b.upto = q.lsn
		var snapshot []any
		// The snapshot contains what the batch says already, so it stands for the batch as well.
		if live := q.pending + q.out + q.deadKept.n + q.deadFreed.n + q.gone.len() + q.settled.len(); q.since+len(b.records) > max(q.opts.compactRecords, 4*live) {
			snapshot = q.snapshot()
		}
		q.mu.Unlock()

		var err error
		if snapshot != nil {
			records := make([]sluice.Record, len(snapshot))
			for i := range snapshot {
				records[i].Data = encode(snapshot[i])
			}
			err = q.guarded(func() error { return q.journal.Compact(context.Background(), records) })
		} else {
			err = q.guarded(func() error { return q.journal.Append(context.Background(), b.records) })
		}

		q.mu.Lock()
		q.flying = nil
		if err != nil {
			q.journalFailed = true
			kind := sluice.Unavailable
			unavailable := &sluice.Error{Kind: kind, Op: "queue", Subject: q.runID, Detail: "the journal failed; the queue must be opened again", Err: err}
			if errors.Is(err, sluice.ErrStale) {
				unavailable.Detail = "another queue has taken over the journal"
			}
			if q.broken == nil || q.stopped {
				q.fail(unavailable)
			}
			q.emit(Event{Kind: EventUnavailable, Text: err.Error()})
		} else {
			q.synced = b.upto
			q.since += len(b.records)
			if snapshot != nil {
				q.since = 0
			}
		}
		q.mu.Unlock()
		close(b.done)
		if err != nil {
			q.dispatchEvents()
		}
	}
}

// compareWithStore makes the store agree with what was replayed: claims that it lost are taken again, samples that it has no more become dead letters without
// bytes, and claims on samples that the queue has done with are given up.
func (q *Queue) compareWithStore(ctx context.Context, tx *txn) error {
	var live []*sample
	for _, s := range q.bySeq {
		if !s.freed {
			live = append(live, s)
		}
	}
	sortBySeq(live)
	const some = 1024
	var errs []error
	for i, s := range live {
		if i%some == 0 {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			refs := make([]sluice.Ref, 0, some)
			for _, s := range live[i:min(i+some, len(live))] {
				refs = append(refs, s.ref)
			}
			errs = q.claimMany(refs)
		}
		err := errs[i%some]
		switch {
		case err == nil:
			if s.place == dead {
				tx.tellAfter(markDead, s, q.lsn)
			}
		case !errors.Is(err, sluice.ErrNotFound) && !errors.Is(err, sluice.ErrConflict):
			return err
		case s.place == gone: // it was kept for pads only
			for _, w := range q.windows.open {
				if w.spare == s {
					w.spare, s.spare = nil, false
				}
			}
			if s.kept {
				s.kept = false
				q.kept.remove(s)
				q.bygone(tx, s)
			}
			s.freed = true
		default:
			r := lostRecord{T: "lost", Seq: s.seq, Reason: "the store has the sample no more: " + clean(err.Error(), 500), At: q.now, s: s}
			q.applyLost(tx, &r)
			if q.journal != nil {
				q.write(tx, r, false)
			}
			q.emit(Event{Kind: EventLostSample, Subject: s.id, Text: err.Error()})
		}
	}
	samples, err := q.store.Samples(ctx)
	if err != nil {
		return err
	}
	for i := range samples {
		info := &samples[i]
		if info.Owner != q.owner || info.Ref.RunID() != q.runID && !q.cfg.Mixed {
			continue
		}
		switch s := q.find(info.Ref.SampleID(), info.Ref.Generation()); {
		case s == nil && q.remembers(info.Ref):
			tx.freeAfter(&sample{ref: info.Ref, id: info.Ref.SampleID(), gen: info.Ref.Generation(), place: gone}, q.lsn)
		case s == nil:
			if q.orphans == nil {
				q.orphans = map[string]sluice.Ref{}
				q.orphansAt = q.now + int64(orphanTime)
			}
			q.orphans[info.Ref.SampleID()] = info.Ref
		case s.place == dead && s.freed:
			tx.tellAfter(unclaim, s, q.lsn)
		}
	}
	q.bySeq, q.endedByID = nil, nil
	return nil
}

func (q *Queue) remembers(ref sluice.Ref) bool {
	_, ok := q.generation(q.putKey(ref.SampleID(), ref.Generation()), ref.SampleID(), ref.Generation())
	return ok
}

func (q *Queue) applyLost(tx *txn, r *lostRecord) {
	s := r.s
	q.leaveSlot(tx, s, false)
	if s.place == leased && s.lease == nil {
		s.place = claiming
	} else {
		q.detach(s)
	}
	s.remember(r.Reason)
	s.place, s.at, s.freed = dead, r.At, true
	q.deadFreed.pushBack(s)
	q.count.DeadTotal++
}

// freeOrphans gives up what was claimed for puts that were never repeated.
func (q *Queue) freeOrphans(tx *txn) {
	q.orphansAt = never
	for id, ref := range q.orphans {
		if q.find(id, ref.Generation()) == nil {
			tx.freeAfter(&sample{ref: ref, id: id, gen: ref.Generation(), place: gone}, q.lsn)
		}
	}
	q.orphans = nil
}
