package service

import (
	"context"
	"errors"
	"time"

	"github.com/sluice-ml/sluice"
)

// place is a place in the gate's line. It is a request's and not a call's: a client waits in slices, and who lost the place between two of them would never get a large room
// where small ones are asked for all the time.
type place struct {
	done  chan struct{} // closed when room and err are there
	room  sluice.Reservation
	err   error
	until context.Context // ends with the run, or when the place is left
	leave context.CancelCauseFunc

	// Under the mutex of the holdings.
	here   int         // calls that wait for it
	expire func() bool // stops the timer that gives the place up while none does
}

// placeKey names a request for room as the queue does.
type placeKey struct {
	producer sluice.Producer
	request  string
}

// mostKept is how long a place is kept for the next slice: a tenth of the one before, and no longer than this.
const mostKept = 3 * time.Second

// room asks the gate for room, and waits for it up to the given time; then it is errWaited.
func (s *Service) room(ctx context.Context, c *call, req sluice.ReserveRequest, wait time.Duration) (sluice.Reservation, error) {
	key := placeKey{req.Producer, req.RequestID}
	keep := min(mostKept, wait/10)
	h := &c.run.holdings
	h.mu.Lock()
	p := h.places[key]
	if p == nil && (keep <= 0 || req.RequestID == "" || c.session == nil) {
		h.mu.Unlock()
		wctx, stop := s.waiting(ctx, wait)
		defer stop()
		return c.run.q.Reserve(wctx, req)
	}
	first := p == nil
	if first {
		p = &place{done: make(chan struct{}), expire: func() bool { return false }}
		p.until, p.leave = context.WithCancelCause(c.run.ctx)
		h.places[key] = p
	}
	p.here++
	p.expire()
	h.mu.Unlock()

	if first && !p.grab(c, req) {
		p.stand(s, c, req)
	}
	if wait <= 0 {
		p.leave(errWaited) // who asks without waiting wants to know what came of it
		<-p.done
	}
	select {
	case <-p.done: // mostly there is room, and nothing to wait for
	default:
		wctx, stop := s.waiting(ctx, wait)
		select {
		case <-p.done:
		case <-wctx.Done():
		}
		stop()
	}

	h.mu.Lock()
	defer h.mu.Unlock()
	p.here--
	select {
	case <-p.done:
		h.giveUp(key, p)
		return p.room, p.err
	default:
	}
	if ctx.Err() != nil { // the caller is gone
		if p.here == 0 {
			h.giveUp(key, p)
			p.leave(context.Cause(ctx))
		}
		return sluice.Reservation{}, context.Cause(ctx)
	}
	if p.here == 0 {
		p.expire = s.opts.Clock.AfterFunc(keep, func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			if p.here == 0 {
				h.giveUp(key, p)
				p.leave(errWaited)
			}
		})
	}
	return sluice.Reservation{}, errWaited
}

// giveUp forgets a place. The caller holds mu.
func (h *holdings) giveUp(key placeKey, p *place) {
	if h.places[key] == p {
		delete(h.places, key)
	}
}

// grab takes the room if nobody has to wait for it, as mostly. The place is there meanwhile, so that the same call, coming twice, finds it.
func (p *place) grab(c *call, req sluice.ReserveRequest) bool {
	room, err := c.run.q.Reserve(waitedAlready, req)
	if errors.Is(err, errWaited) {
		return false
	}
	p.room, p.err = room, err
	p.leave(nil)
	close(p.done)
	return true
}

// stand waits in the line. What is granted is the session's, whoever is there to hear of it.
func (p *place) stand(s *Service, c *call, req sluice.ReserveRequest) {
	r, session, q := c.run, c.session, c.run.q
	go func() { // ends with the queue
		defer p.leave(nil)
		p.room, p.err = q.Reserve(p.until, req)
		if p.err == nil {
			r.reserved(p.room, session, s.now().Add(s.opts.ReservationTime), "")
			if !session.touches(r) {
				s.giveBackOf(r, session)
			}
		}
		close(p.done)
	}()
}
