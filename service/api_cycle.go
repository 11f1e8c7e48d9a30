package service

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/service/access"
)

// cycleCalls are the calls of the hot path: from a reservation to the settlement.
func (s *Service) cycleCalls(a *api) {
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/reserve", id: "reserve", tag: "producers", summary: "Ask the run's gate for room", roles: producers, hot: true,
		text: "Waits for the first reservation up to wait_seconds; the others come with it as far as they are granted at once. None is no error: asked again at once in the same session with the same request id, the call has kept its place in the line. Ask before the target is run. " +
			"A reservation ends when it is used, with its session, or when its time is over."}, s.reserve)
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/unreserve", id: "unreserve", tag: "producers", summary: "Give reservations back", roles: producers, hot: true},
		func(ctx context.Context, c *call, in *wire.Unreserve) (*nothing, error) {
			for _, id := range in.Reservations {
				if res, ok := c.run.unreserve(id); ok {
					if err := c.run.store.Unreserve(ctx, res); err != nil {
						return nil, err
					}
				}
			}
			return nil, nil
		})
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/commit", id: "commit", tag: "producers", summary: "Enqueue stored samples, in order, with one record for all", roles: producers, hot: true,
		text: "Each item is answered for itself. A committed sample that is committed again answers `already`."}, s.commit)
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/report", id: "report", tag: "producers", summary: "Register a producer session, keep it alive, or end it", roles: producers, hot: true},
		func(ctx context.Context, c *call, in *wire.Report) (*nothing, error) {
			return nil, c.run.q.Report(ctx, sluice.ProducerReport{Producer: sluice.Producer(in.Producer), State: in.State, Cause: in.Cause})
		})
	handle(a, operation{method: http.MethodGet, path: "/v1/runs/{run}/positions", id: "positions", tag: "producers", summary: "Which positions of a source were committed, by epoch",
		params: []param{{name: "source", in: "query", text: "Name of the source.", required: true}}},
		func(ctx context.Context, c *call, _ *nothing) (*wire.Positions, error) {
			source, err := c.query("source")
			if err != nil {
				return nil, err
			}
			taken, err := c.run.q.Taken(ctx, source)
			if taken == nil {
				taken = []sluice.Taken{}
			}
			return &wire.Positions{Taken: taken}, err
		})
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/acquire", id: "acquire", tag: "consumers", summary: "Lease samples", roles: consumers, hot: true,
		text: "Waits up to wait_seconds for the first one. Answers leases, or nothing yet (no lease and end false), or the end. A call whose answer was lost is repeated with its request id; without one, " +
			"leases that could not be delivered go back to the head as soon as that is noticed, or when they run out."}, s.acquire)
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/settle", id: "settle", tag: "consumers", summary: "Ack, fail or return leases", roles: consumers, hot: true,
		text: "Each is settled by itself: one that is stale keeps none of the others from being settled."},
		func(ctx context.Context, c *call, in *wire.Settle) (*wire.Settled, error) {
			req := sluice.SettleRequest{Consumer: sluice.Consumer(in.Consumer), RequestID: in.RequestID, Settlements: make([]sluice.Settlement, len(in.Settlements))}
			for i := range in.Settlements {
				req.Settlements[i] = sluice.Settlement(in.Settlements[i])
			}
			if len(req.Settlements) == 1 && req.Settlements[0].Verdict == sluice.Ack && s.faults.strikes(ForgetAck) {
				return settled([]sluice.SettleResult{{Lease: req.Settlements[0].Lease, Status: sluice.Settled, As: sluice.Ack}}, nil)
			}
			return settled(c.run.q.Settle(ctx, req))
		})
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/renew", id: "renew", tag: "consumers", summary: "Give leases their full time again", roles: consumers, hot: true},
		func(ctx context.Context, c *call, in *wire.Renew) (*wire.Settled, error) {
			req := sluice.RenewRequest{Consumer: sluice.Consumer(in.Consumer)}
			if in.Leases != nil {
				req.Leases = append([]sluice.LeaseID{}, *in.Leases...)
			}
			return settled(c.run.q.Renew(ctx, req))
		})
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/leave", id: "leave", tag: "consumers", summary: "End a consumer: its leases return to the head", roles: consumers},
		func(ctx context.Context, c *call, in *wire.Leave) (*nothing, error) {
			who := sluice.Consumer(in.Consumer)
			err := c.run.q.Leave(ctx, who)
			if err == nil {
				c.session.left(c.run, who)
			}
			return nil, err
		})
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/reclaim", id: "reclaim", tag: "consumers", summary: "Take back what has run out", roles: both,
		text: "Nobody has to: expiry is automatic."},
		func(ctx context.Context, c *call, _ *nothing) (*wire.Reclaimed, error) {
			n, err := c.run.q.ReclaimExpired(ctx)
			return &wire.Reclaimed{Reclaimed: n}, err
		})
}

func settled(results []sluice.SettleResult, err error) (*wire.Settled, error) {
	if err != nil {
		return nil, err
	}
	w := &wire.Settled{Results: make([]wire.SettleResult, len(results))}
	for i := range results {
		w.Results[i] = wire.SettleResult(results[i])
	}
	return w, nil
}

// errWaited is the cause of a context whose time to wait is over: no error for the caller.
var errWaited = errors.New("waited long enough")

var waitedAlready = func() context.Context {
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(errWaited)
	return ctx
}()

// waiting is ctx until d has passed.
func (s *Service) waiting(ctx context.Context, d time.Duration) (context.Context, func()) {
	if d <= 0 {
		return waitedAlready, func() {}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := s.opts.Clock.AfterFunc(d, func() { cancel(errWaited) })
	return ctx, func() { stop(); cancel(nil) }
}

func (s *Service) reserve(ctx context.Context, c *call, in *wire.Reserve) (*wire.Reservations, error) {
	if err := c.run.roomToReserve(len(in.Bytes)); err != nil {
		return nil, err
	}
	if in.Ungated {
		return s.reserveUngated(ctx, c, in)
	}
	req := sluice.ReserveRequest{}
	if in.Producer != nil {
		req.Producer = sluice.Producer(*in.Producer)
	}
	out := &wire.Reservations{Reservations: make([]wire.Reservation, 0, len(in.Bytes))}
	for i, n := range in.Bytes {
		wait := in.WaitSeconds.Duration()
		if i > 0 {
			wait = 0
		}
		if req.Bytes = n; in.RequestID != "" {
			req.RequestID = in.RequestID + "/" + strconv.Itoa(i)
		}
		res, err := s.room(ctx, c, req, wait)
		if errors.Is(err, errWaited) {
			break
		}
		if err == nil {
			c.run.reserved(res, c.session, s.now().Add(s.opts.ReservationTime), "")
			if !c.session.touches(c.run) {
				err = s.sessionEnded(c)
			}
		}
		if err != nil {
			if i > 0 && !errors.Is(err, sluice.ErrStale) {
				break // what was granted is not lost to what was not
			}
			return nil, err
		}
		out.Reservations = append(out.Reservations, wire.Reservation{ID: res.ID, Bytes: res.Bytes, ExpiresSeconds: wire.SecondsOf(s.opts.ReservationTime)})
	}
	return out, nil
}

// reserveUngated is the Reserve of a store: by the caps alone, all or none.
func (s *Service) reserveUngated(ctx context.Context, c *call, in *wire.Reserve) (*wire.Reservations, error) {
	c.run.asking.Lock() // a repetition may come while the first call is under way
	defer c.run.asking.Unlock()
	request := ""
	if in.RequestID != "" {
		request = in.RequestID
		if c.session != nil {
			request = c.session.id + "/" + request
		}
	}
	granted := c.run.askedFor(request)
	for _, n := range in.Bytes[min(len(granted), len(in.Bytes)):] {
		res, err := c.run.store.Reserve(ctx, n)
		if err != nil {
			for _, res := range granted {
				if back, ok := c.run.unreserve(res.ID); ok {
					err = errors.Join(err, c.run.store.Unreserve(context.WithoutCancel(ctx), back))
				}
			}
			return nil, err
		}
		c.run.reserved(res, c.session, s.now().Add(s.opts.ReservationTime), request)
		granted = append(granted, res)
	}
	if !c.session.touches(c.run) {
		return nil, s.sessionEnded(c)
	}
	out := &wire.Reservations{Reservations: make([]wire.Reservation, len(granted))}
	for i, res := range granted {
		out.Reservations[i] = wire.Reservation{ID: res.ID, Bytes: res.Bytes, ExpiresSeconds: wire.SecondsOf(s.opts.ReservationTime)}
	}
	return out, nil
}

// sessionEnded gives back what a call took in a session that ended meanwhile.
func (s *Service) sessionEnded(c *call) error {
	s.giveBackOf(c.run, c.session)
	return &sluice.Error{Kind: sluice.Stale, Op: "session", Subject: c.session.id[:8], Detail: "has ended", Hint: "begin another one"}
}

// giveBackOf gives back what was noted for a session after its end.
func (s *Service) giveBackOf(r *run, of *session) {
	e := r.endSession(of)
	s.spawn(func() { r.giveBack(s.ctx, e, "their session had ended") }) // it enters the run, which a call may hold
}

// commit stages what is to be staged, and enqueues all.
func (s *Service) commit(ctx context.Context, c *call, in *wire.Commit) (*wire.Commits, error) {
	out := &wire.Commits{Results: make([]wire.CommitResult, len(in.Items))}
	puts := make([]sluice.PutRequest, 0, len(in.Items))
	at := make([]int, 0, len(in.Items))
	var who sluice.Producer
	if in.Producer != nil {
		who = sluice.Producer(*in.Producer)
	}
	for i := range in.Items {
		it, res := &in.Items[i], &out.Results[i]
		put := sluice.PutRequest{Producer: who, Positions: it.Positions}
		if it.Stage != nil {
			ref, err := s.takeStaged(ctx, c, it.Stage)
			if err != nil {
				res.Error = s.itemProblem(err)
				continue
			}
			put.Ref, res.Ref = ref, &ref
		} else {
			put.Ref = *it.Ref
		}
		if s.faults.strikes(LoseRef) {
			res.Status = sluice.Enqueued
			continue
		}
		puts, at = append(puts, put), append(at, i)
	}
	if in.Below {
		return s.commitBelow(ctx, c, puts[0], in.WaitSeconds.Duration())
	}
	for k, r := range c.run.q.PutAll(ctx, puts) {
		if r.Err != nil {
			if errors.Is(r.Err, sluice.ErrUnavailable) {
				return nil, r.Err // nothing is known of any of them
			}
			out.Results[at[k]].Error = s.itemProblem(r.Err)
			continue
		}
		out.Results[at[k]].Status = r.Status
		c.run.committed(puts[k].Ref)
	}
	return out, nil
}

var busy = httpProblem(http.StatusTooManyRequests, wire.CodeBusy, "Busy", "as many calls wait as the service lets wait; try again")

// commitBelow waits at the gate before it enqueues.
func (s *Service) commitBelow(ctx context.Context, c *call, put sluice.PutRequest, wait time.Duration) (*wire.Commits, error) {
	if wait > 0 {
		var end func()
		var ok bool
		if ctx, end, ok = access.Wait(ctx); !ok {
			return nil, busy
		}
		defer end()
	}
	wctx, stop := s.waiting(ctx, wait)
	status, err := c.run.q.PutBlocksUntilBelow(wctx, put, nil)
	stop()
	switch {
	case errors.Is(err, errWaited):
		return &wire.Commits{Results: []wire.CommitResult{}, Paused: true}, nil
	case errors.Is(err, sluice.ErrUnavailable), err != nil && ctx.Err() != nil:
		return nil, err
	case err != nil:
		return &wire.Commits{Results: []wire.CommitResult{{Error: s.itemProblem(err)}}}, nil
	}
	c.run.committed(put.Ref)
	return &wire.Commits{Results: []wire.CommitResult{{Status: status}}}, nil
}

func (s *Service) itemProblem(err error) *wire.Problem {
	p := problemOf(err)
	if p.Code == wire.CodeInternal {
		s.log.Error("an item failed", "err", plain(err.Error()))
	}
	return p
}

func (s *Service) acquire(ctx context.Context, c *call, in *wire.Acquire) (*wire.Delivery, error) {
	who := sluice.Consumer(in.Consumer)
	c.session.consumes(c.run, who)
	began := s.now()
	d, err := c.run.q.Acquire(ctx, sluice.AcquireRequest{Consumer: who, Max: in.Max, Wait: in.WaitSeconds.Duration(), Ahead: in.Ahead, RequestID: in.RequestID})
	if err != nil {
		return nil, err
	}
	out := &wire.Delivery{Leases: make([]wire.Lease, len(d.Leases)), End: d.End}
	if len(d.Leases) > 0 {
		l := &d.Leases[0]
		out.WaitedSeconds = wire.SecondsOf(max(0, l.Deadline.Add(-l.TimeLeft).Sub(began)))
	}
	for i := range d.Leases {
		l := &d.Leases[i]
		if s.faults.strikes(FreeEarly) {
			if err := c.run.store.Unclaim(l.Ref, "queue:"+c.run.id); err != nil {
				return nil, err
			}
		}
		out.Leases[i] = wire.Lease{ID: l.ID, Ref: l.Ref, TimeLeftSeconds: wire.SecondsOf(l.TimeLeft), Redelivery: l.Redelivery, Window: l.Window}
	}
	if d.Cause != nil {
		out.Cause = wire.ProblemOf(d.Cause)
	}
	// The caller may have gone in the moment in which it was given something. If it can ask again for the same leases they wait for it, until its session ends or they run out; if it
	// can't, they go back. A member of a group can't return what the others still work on.
	if len(out.Leases) > 0 && in.RequestID == "" && who.Members < 2 && (ctx.Err() != nil || c.session.isOver()) {
		back := sluice.SettleRequest{Consumer: who, Settlements: make([]sluice.Settlement, len(d.Leases))}
		for i := range d.Leases {
			back.Settlements[i] = sluice.Settlement{Lease: d.Leases[i].ID, Verdict: sluice.Return}
		}
		if _, err := c.run.q.Settle(context.WithoutCancel(ctx), back); err != nil {
			return nil, err
		}
		return nil, &sluice.Error{Kind: sluice.Unavailable, Op: "acquire", Subject: who.Name, Detail: "the caller went away; its leases were returned"}
	}
	return out, nil
}
