package client

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

const (
	slice     = 30 * time.Second      // of a call that waits
	abortPoll = 50 * time.Millisecond // how often abortWhen is asked
)

// queue is a run's queue as a client sees it.
type queue struct {
	c     *Client
	run   string
	store *store
}

var _ sluice.Queue = (*queue)(nil)

func (q *queue) post(ctx context.Context, path string, in, out any, wait time.Duration) error {
	return q.c.call(ctx, call{method: http.MethodPost, path: runPath(q.run, path), in: in, out: out, wait: wait})
}

func (q *queue) get(ctx context.Context, path string, out any) error {
	return q.c.call(ctx, call{method: http.MethodGet, path: runPath(q.run, path), out: out})
}

func producerOf(p sluice.Producer) *wire.Producer {
	if p == (sluice.Producer{}) {
		return nil
	}
	return &wire.Producer{Name: p.Name, Incarnation: p.Incarnation}
}

// requestID is the caller's, or a fresh one.
func (q *queue) requestID(callers string) string {
	if callers != "" {
		return callers
	}
	return q.c.newRequestID()
}

// Reserve waits in slices, all with one id: by that the service keeps the place in the line from one to the next.
func (q *queue) Reserve(ctx context.Context, r sluice.ReserveRequest) (sluice.Reservation, error) {
	for id := q.requestID(r.RequestID); ; {
		got, err := reserve(ctx, q.c, q.run, wire.Reserve{Producer: producerOf(r.Producer), Bytes: []int64{r.Bytes}, WaitSeconds: wire.SecondsOf(slice), RequestID: id})
		if err != nil || got.ID != "" {
			return got, err
		}
	}
}

func (q *queue) Put(ctx context.Context, r sluice.PutRequest) (sluice.PutStatus, error) {
	status, _, err := q.commit(ctx, &r, wire.Commit{})
	return status, err
}

// PutBlocksUntilBelow asks in slices, which with abortWhen are as long as it may go unasked: a put is never given up while it is under way.
func (q *queue) PutBlocksUntilBelow(ctx context.Context, r sluice.PutRequest, abortWhen func() bool) (sluice.PutStatus, error) {
	wait := slice
	if abortWhen != nil {
		wait = abortPoll
	}
	for {
		if abortWhen != nil && abortWhen() {
			return "", &sluice.Error{Kind: sluice.Aborted, Op: "client: put", Subject: r.Ref.SampleID(), Detail: "the caller's abort condition became true while the put waited at the gate"}
		}
		status, paused, err := q.commit(ctx, &r, wire.Commit{Below: true, WaitSeconds: wire.SecondsOf(wait)})
		if err != nil || !paused {
			return status, err
		}
	}
}

func (q *queue) commit(ctx context.Context, r *sluice.PutRequest, in wire.Commit) (status sluice.PutStatus, paused bool, err error) {
	if r.Ref.IsZero() {
		return "", false, &sluice.Error{Kind: sluice.Invalid, Op: "client: put", Detail: "the ref is empty"}
	}
	in.Producer, in.Items = producerOf(r.Producer), []wire.CommitItem{{Ref: &r.Ref, Positions: r.Positions}}
	var out wire.Commits
	if err := q.post(ctx, "/commit", &in, &out, in.WaitSeconds.Duration()); err != nil {
		return "", false, err
	}
	switch {
	case out.Paused:
		return "", true, nil
	case len(out.Results) != 1:
		return "", false, q.miscounted("commit")
	}
	return out.Results[0].Status, false, out.Results[0].Error.Err()
}

func (q *queue) miscounted(op string) error {
	return &sluice.Error{Kind: sluice.Corrupt, Op: "client: " + op, Subject: q.run, Detail: "the service answered with a wrong number of results", Hint: "do client and service have the same version?"}
}

func consumerOf(c sluice.Consumer) wire.Consumer {
	return wire.Consumer{Name: c.Name, Incarnation: c.Incarnation, Rank: c.Rank, Member: c.Member, Members: c.Members}
}

// Acquire waits in slices. The first carries the caller's id; those behind it have their own, since what a slice came to is not what the next one shall repeat.
func (q *queue) Acquire(ctx context.Context, r sluice.AcquireRequest) (sluice.Delivery, error) {
	in := wire.Acquire{Consumer: consumerOf(r.Consumer), Max: min(r.Max, wire.MaxBatch), Ahead: r.Ahead, RequestID: q.requestID(r.RequestID)}
	for until := time.Now().Add(r.Wait); ; {
		wait, last := slice, false
		if r.Wait >= 0 {
			if left := time.Until(until); left <= slice {
				wait, last = max(left, 0), true
			}
			if r.Wait <= slice {
				wait = r.Wait
			}
		}
		in.WaitSeconds = wire.SecondsOf(wait)
		d, err := q.acquire(ctx, &in)
		if err != nil || d.End || len(d.Leases) > 0 || last {
			return d, err
		}
		in.RequestID = q.c.newRequestID()
	}
}

// acquire is one slice.
func (q *queue) acquire(ctx context.Context, in *wire.Acquire) (sluice.Delivery, error) {
	d, err := q.ask(ctx, in)
	if err == nil || ctx.Err() == nil {
		return d, err
	}
	// It was given up, but an answer may have been on its way. To ask again with the same id, without waiting, tells what that was: leases that the caller must know of, as it must of those
	// that a queue in its own process gave it in that moment.
	bounded, cancel := background(ctx)
	defer cancel()
	again := *in
	again.WaitSeconds = 0
	late, lateErr := q.ask(bounded, &again)
	switch {
	case lateErr == nil && len(late.Leases) > 0:
		return late, nil
	case lateErr != nil && !errors.Is(lateErr, sluice.ErrStale) && !errors.Is(lateErr, sluice.ErrClosed):
		q.c.log.Warn("client: can't ask what a cancelled acquire was given, which returns when its lease runs out", "run", q.run, "consumer", in.Consumer.Name, "error", lateErr)
	}
	return sluice.Delivery{}, err
}

func (q *queue) ask(ctx context.Context, in *wire.Acquire) (sluice.Delivery, error) {
	var out wire.Delivery
	var sent time.Time
	err := q.c.call(ctx, call{method: http.MethodPost, path: runPath(q.run, "/acquire"), in: in, out: &out, wait: in.WaitSeconds.Duration(), sent: &sent})
	if err != nil {
		return sluice.Delivery{}, err
	}
	given := sent.Add(out.WaitedSeconds.Duration()) // or later: however long the answer took, no lease is thought to live when it does not
	d := sluice.Delivery{End: out.End, Cause: out.Cause.Err()}
	for _, l := range out.Leases {
		left := l.TimeLeftSeconds.Duration()
		d.Leases = append(d.Leases, sluice.Lease{
			ID: l.ID, Ref: l.Ref, Consumer: in.Consumer.Name, Deadline: given.Add(left), TimeLeft: left, Redelivery: l.Redelivery, Window: l.Window,
		})
	}
	return d, nil
}

func (q *queue) Settle(ctx context.Context, r sluice.SettleRequest) ([]sluice.SettleResult, error) {
	results := make([]sluice.SettleResult, 0, len(r.Settlements))
	for part := range slices.Chunk(r.Settlements, wire.MaxBatch) {
		in := wire.Settle{Consumer: consumerOf(r.Consumer), Settlements: make([]wire.Settlement, len(part)), RequestID: q.requestID(r.RequestID)}
		if len(results) > 0 {
			in.RequestID = q.c.newRequestID() // the caller's stands for one call
		}
		for i, s := range part {
			in.Settlements[i] = wire.Settlement(s)
		}
		var out wire.Settled
		if err := q.post(ctx, "/settle", &in, &out, 0); err != nil {
			return nil, err
		}
		if len(out.Results) != len(part) {
			return nil, q.miscounted("settle")
		}
		results = appendResults(results, out.Results)
	}
	return results, nil
}

func appendResults(to []sluice.SettleResult, from []wire.SettleResult) []sluice.SettleResult {
	for _, r := range from {
		to = append(to, sluice.SettleResult(r))
	}
	return to
}

func (q *queue) Renew(ctx context.Context, r sluice.RenewRequest) ([]sluice.SettleResult, error) {
	in := wire.Renew{Consumer: consumerOf(r.Consumer)}
	if r.Leases == nil {
		var out wire.Settled
		err := q.post(ctx, "/renew", &in, &out, 0)
		return appendResults(nil, out.Results), err
	}
	var results []sluice.SettleResult
	for part := range slices.Chunk(r.Leases, wire.MaxBatch) {
		in.Leases = &part
		var out wire.Settled
		if err := q.post(ctx, "/renew", &in, &out, 0); err != nil {
			return nil, err
		}
		if len(out.Results) != len(part) {
			return nil, q.miscounted("renew")
		}
		results = appendResults(results, out.Results)
	}
	return results, nil
}

func (q *queue) ReclaimExpired(ctx context.Context) (int, error) {
	var out wire.Reclaimed
	err := q.post(ctx, "/reclaim", nil, &out, 0)
	return out.Reclaimed, err
}

func (q *queue) Leave(ctx context.Context, c sluice.Consumer) error {
	return q.post(ctx, "/leave", &wire.Leave{Consumer: consumerOf(c)}, nil, 0)
}

func (q *queue) Report(ctx context.Context, r sluice.ProducerReport) error {
	return q.post(ctx, "/report", &wire.Report{Producer: wire.Producer(r.Producer), State: r.State, Cause: r.Cause}, nil, 0)
}

func (q *queue) Taken(ctx context.Context, source string) ([]sluice.Taken, error) {
	var out wire.Positions
	err := q.get(ctx, "/positions?source="+url.QueryEscape(source), &out)
	return out.Taken, err
}

func (q *queue) DeadLetters(ctx context.Context) ([]sluice.DeadLetter, error) {
	var out wire.DeadLetters
	if err := q.get(ctx, "/dead-letters", &out); err != nil {
		return nil, err
	}
	dead := make([]sluice.DeadLetter, len(out.DeadLetters))
	for i, d := range out.DeadLetters {
		dead[i] = sluice.DeadLetter(d)
	}
	return dead, nil
}

func (q *queue) Requeue(ctx context.Context, sampleIDs ...string) (int, error) {
	return q.forDead(ctx, "/dead-letters/requeue", sampleIDs)
}

func (q *queue) Drop(ctx context.Context, sampleIDs ...string) (int, error) {
	return q.forDead(ctx, "/dead-letters/drop", sampleIDs)
}

func (q *queue) forDead(ctx context.Context, path string, ids []string) (found int, err error) {
	for part := range slices.Chunk(ids, wire.MaxBatch) {
		var out wire.Found
		if err := q.post(ctx, path, &wire.SampleIDs{SampleIDs: part}, &out, 0); err != nil {
			return found, err
		}
		found += out.Found
	}
	return found, nil
}

func (q *queue) Reshape(ctx context.Context, ranks, perRank int) error {
	return q.c.Reshape(ctx, q.run, ranks, perRank)
}

func (q *queue) Status(ctx context.Context) (sluice.Status, error) {
	var out wire.Status
	if err := q.get(ctx, "/status", &out); err != nil {
		return sluice.Status{}, err
	}
	return out.Domain(), nil
}

func (q *queue) Close(ctx context.Context, cause error) error {
	text := ""
	if cause != nil {
		text = cause.Error()
	}
	return q.c.CloseRun(ctx, q.run, text)
}
