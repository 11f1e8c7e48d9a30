package queue

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/sluice-ml/sluice"
)

// Status is a snapshot; see [sluice.Queue]. It answers even when the queue is unavailable.
func (q *Queue) Status(context.Context) (sluice.Status, error) {
	health := q.room.Health()
	q.gate.Poke() // so that the pause it reports is today's
	gate := q.gate.State()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.tick()
	c := &q.count
	s := sluice.Status{
		RunID: q.runID, Closed: q.closed, StepsPerCheckpoint: q.cfg.StepsPerCheckpoint, Elapsed: time.Duration(q.now - q.base),
		Pending: q.pending, Outstanding: q.out, Dead: q.deadKept.n + q.deadFreed.n,
		Put: c.Put, Delivered: c.Delivered, Redelivered: c.Redelivered, Padded: c.Padded, Acked: c.Acked, Failed: c.Failed, Expired: c.Expired, Returned: c.Returned,
		DeadTotal: c.DeadTotal, Dropped: c.Dropped, TailDropped: c.TailDropped, Gated: c.Gated, Stale: c.Stale,
		TokensPut: c.TokensPut, TokensAcked: c.TokensAcked, BytesPut: c.BytesPut, BytesAcked: c.BytesAcked, WindowsOpened: c.Windows,
		Health: health, Paused: gate.Paused, Starving: q.starving(), ProducersWaiting: q.pauseSum.n, ConsumersWaiting: q.waitSum.n,
		ProducerPaused: q.pauseSum.total(q.now), ConsumerWaited: q.waitSum.total(q.now), Wedged: q.wedged, MissingRanks: q.missingRanks(),
	}
	if q.cause != nil {
		s.Cause = q.cause.Error()
	}
	if q.closed && q.pending == 0 && q.out == 0 {
		s.Ended = time.Duration(q.now - max(q.wedge.progress, q.base))
	}
	oldest := q.now
	for _, c := range q.consumers {
		if c.left {
			continue
		}
		if c.first != nil {
			oldest = min(oldest, c.first.given)
		}
		seen := time.Duration(q.now - c.seen)
		if c.waiting > 0 {
			seen = 0
		}
		s.Consumers = append(s.Consumers, sluice.ConsumerStatus{
			Name: c.name, Incarnation: c.incarnation, Rank: c.rank, Leases: c.held, LeasedBytes: c.heldBytes, Waiting: slices.Max(c.needy) > 0,
			Delivered: c.delivered, Acked: c.acked, LastSeen: seen,
		})
	}
	s.OldestLease = time.Duration(q.now - oldest)
	for _, p := range q.producers {
		seen := time.Duration(q.now - p.seen)
		if p.waiting > 0 {
			seen = 0
		}
		s.Producers = append(s.Producers, sluice.ProducerStatus{Name: p.name, Incarnation: p.incarnation, State: p.state, Put: p.put, LastSeen: seen})
	}
	slices.SortFunc(s.Consumers, func(a, b sluice.ConsumerStatus) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(s.Producers, func(a, b sluice.ProducerStatus) int { return cmp.Compare(a.Name, b.Name) })
	return s, nil
}

// missingRanks are those that the others wait for: places are dealt to them that nobody takes. It is no wedge, since they may be starting up.
func (q *Queue) missingRanks() (missing []int) {
	if !q.windows.on || q.pauseSum.n == 0 && !q.anyoneHungry() {
		return nil
	}
	present := make([]bool, len(q.shares))
	for _, c := range q.consumers {
		if !c.left && c.rank < len(present) && (c.held > 0 || c.waiting > 0 || q.now-c.seen < int64(q.cfg.VisibilityTimeout)) {
			present[c.rank] = true
		}
	}
	for rank := range q.shares {
		if sl := q.shares[rank].slots.head; sl != nil && sl.w.number <= q.windows.dealing && !present[rank] {
			missing = append(missing, rank)
		}
	}
	return missing
}

func sortTaken(all []sluice.Taken) {
	slices.SortFunc(all, func(a, b sluice.Taken) int { return cmp.Compare(a.Epoch, b.Epoch) })
}

func sortBySeq(list []*sample) {
	slices.SortFunc(list, func(a, b *sample) int { return cmp.Compare(a.seq, b.seq) })
}
