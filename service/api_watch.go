package service

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

// watchCalls are the calls that stay open, and those that ask how the service is.
func (s *Service) watchCalls(a *api) {
	events := operation{method: http.MethodGet, path: "/v1/events", id: "events", across: true, tag: "service", summary: "What happens, as it happens",
		text: "Server-sent events: `status` with a ServiceStatus, at once and then every second, and `event` with an Event.", raw: []string{eventStream}}
	stream(a, events, nil, func(ctx context.Context, c *call) error {
		return s.sendEvents(ctx, c, "", func() any { return s.statusFor(ctx, c) })
	})
	events.path, events.id, events.tag, events.text = "/v1/runs/{run}/events", "run-events", "runs", "The same for one run: `status` carries a Status. The stream ends with the run."
	events.across, events.early = false, true // it must not hold the run
	stream(a, events, nil, func(ctx context.Context, c *call) error {
		r, err := s.find(c.r.PathValue("run"))
		if err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		defer context.AfterFunc(r.ctx, cancel)()
		return s.sendEvents(ctx, c, r.id, func() any { return r.shown(ctx) })
	})

	stream(a, operation{method: http.MethodGet, path: "/v1/sessions/{session}", id: "hold-session", across: true, tag: "sessions", summary: "Hold a session", hot: true,
		text: "The answer is a Session, and then a line of white space every few seconds, for as long as the client process keeps the connection. When it ends and no other comes within the grace, the session has ended: its reservations and pins go, and the leases of the " +
			"consumers that called in it return to the head. A session that never held a connection ends a minute after its last call."}, describe[wire.Session](false), s.holdSession)
	handle(a, operation{method: http.MethodDelete, path: "/v1/sessions/{session}", id: "end-session", across: true, tag: "sessions", summary: "End a session at once", text: "Ending one that is not there is success."},
		func(ctx context.Context, c *call, _ *nothing) (*nothing, error) {
			id := c.r.PathValue("session")
			if !isID(id) {
				return nil, badSession(id)
			}
			s.sessions.mu.Lock()
			sess := s.sessions.byID[id]
			s.sessions.mu.Unlock()
			if sess != nil && s.sessions.take(sess, s.now(), &s.opts, true) {
				s.endSession(context.WithoutCancel(ctx), sess, "it was ended")
			}
			return nil, nil
		})

	handle(a, operation{method: http.MethodGet, path: "/healthz", id: "healthz", tag: "service", summary: "Whether the process answers", open: true, hot: true},
		func(context.Context, *call, *nothing) (*alive, error) { return &alive{"ok"}, nil })
	handle(a, operation{method: http.MethodGet, path: "/readyz", id: "readyz", tag: "service", summary: "Whether all runs are open", open: true, hot: true, text: "`unavailable` until they are, and when the service stops."},
		func(context.Context, *call, *nothing) (*alive, error) {
			if !s.Ready() {
				return nil, &sluice.Error{Kind: sluice.Unavailable, Op: "service", Detail: "is not ready: its runs are being opened, or it stops"}
			}
			return &alive{"ready"}, nil
		})
}

// maxScrapes is how many may be under way: each asks all runs for their status.
const maxScrapes = 4

// metricsCall lets Prometheus look.
func (s *Service) metricsCall(a *api) {
	h := s.metrics.Handler()
	scrapes := make(chan struct{}, maxScrapes)
	stream(a, operation{method: http.MethodGet, path: "/metrics", id: "metrics", tag: "service", summary: "Figures for Prometheus", hot: true, raw: []string{"text/plain"}}, nil,
		func(_ context.Context, c *call) error {
			select {
			case scrapes <- struct{}{}:
				defer func() { <-scrapes }()
			default:
				return tooMany("scrapes under way", maxScrapes)
			}
			c.header()
			c.status = http.StatusOK
			h.ServeHTTP(c.w, c.r)
			return nil
		})
}

// alive answers the probes.
type alive struct {
	Status string `json:"status"`
}

const eventStream = "text/event-stream"

func badSession(id string) error {
	return &sluice.Error{Kind: sluice.Invalid, Op: "session", Subject: plain(id), Detail: "wants 32 hexadecimal digits in lower case"}
}

// pieces writes an answer that comes in pieces, each of which must get through in time: a reader that is gone or stuck is given up.
type pieces struct {
	c  *call
	rc *http.ResponseController
}

func (c *call) pieces(mediaType string) *pieces {
	p := &pieces{c, http.NewResponseController(c.w)}
	c.header().Set("Content-Type", mediaType)
	c.begin(http.StatusOK)
	return p
}

func (p *pieces) write(data []byte) error {
	if err := p.rc.SetWriteDeadline(time.Now().Add(10 * time.Second)); err == nil {
		defer func() { _ = p.rc.SetWriteDeadline(time.Time{}) }()
	}
	if _, err := p.c.w.Write(data); err != nil {
		return err
	}
	return p.rc.Flush()
}

func (s *Service) sendEvents(ctx context.Context, c *call, run string, status func() any) error {
	events, stop := s.hub.subscribe(run)
	defer stop()
	out := c.pieces(eventStream)
	send := func(name string, v any) error {
		data, err := json.Marshal(v)
		if err != nil {
			return err
		}
		return out.write(fmt.Appendf(nil, "event: %s\ndata: %s\n\n", name, data))
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		err := send("status", status())
		for due := false; err == nil && !due; {
			select {
			case e := <-events:
				if c.caller.May(e.RunID) == nil {
					err = send("event", e)
				}
			case <-tick.C:
				due = true
			case <-ctx.Done():
				return nil
			case <-s.ctx.Done():
				return nil
			}
		}
		if err != nil {
			return err
		}
	}
}

// beat is how often a held connection shows that it lives.
const beat = 2 * time.Second

func (s *Service) holdSession(ctx context.Context, c *call) error {
	sess, err := s.sessions.begin(c.r.PathValue("session"), s.now())
	if err != nil {
		return err
	}
	defer func() { sess.finish(s.now()) }()
	if !s.idle.hold() {
		return errStopping
	}
	defer func() { s.idle.letGo(s.now()) }()
	sess.hold()
	defer func() { sess.letGo(s.now()) }()
	out := c.pieces("application/json")
	first, err := json.Marshal(wire.Session{GraceSeconds: wire.SecondsOf(s.opts.SessionGrace)})
	if err != nil {
		return err
	}
	if err := out.write(append(first, '\n')); err != nil {
		return err
	}
	tick := time.NewTicker(beat)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if err := out.write([]byte{'\n'}); err != nil {
				return err
			}
		case <-sess.done:
			return nil
		case <-ctx.Done():
			return nil
		case <-s.ctx.Done():
			return nil
		}
	}
}
