package sluice

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Room is what a [Gate] grants from: the part of a [Store] it needs.
type Room interface {
	Reserve(ctx context.Context, bytes int64) (Reservation, error)
	Health() Health
}

// GateOptions tune a Gate. The zero value is fine.
type GateOptions struct {
	// OnPause and OnResume are called when the gate closes at the high mark and opens again at the low one. They run in order, outside
	// every lock, and may call the gate and the queue.
	OnPause, OnResume func(Health)
	Clock             Clock // SystemClock if nil
}

// Gate paces the producers of a run *before* they spend a forward on a sample. It compares used = resident + reserved with the marks: it pauses
// at used >= high and goes on at used <= low, for bytes and for samples.
//
// Reserve waits in line. The head of the line is granted when it fits under the caps and the gate is not paused, or the consumers are
// starving: someone waits for a sample and nothing is deliverable to it. Without that rule, marks and sizes exist with which both sides wait for
// ever: with marks at 75 and 25 %, samples of 40 % of the cap are enough.
//
// The gate holds no room itself: reservations live in the store. Whoever owns the gate calls Poke when room may have become
// free and SetStarving when that changes.
type Gate struct {
	room Room
	opts GateOptions

	dirty atomic.Bool // a Poke that whoever holds mu must see to

	mu       sync.Mutex    // guards what follows; given up by unlock only
	line     []*gateWaiter // in order; those granted or gone are removed
	openers  []*gateWaiter // WaitOpen callers
	paused   bool
	starving bool
	closed   error

	pausedSince time.Time
	pausedFor   time.Duration // up to pausedSince

	events      []gateEvent // pauses and resumes not yet reported
	dispatching bool
}

type gateWaiter struct {
	bytes int64
	since time.Time
	res   Reservation
	err   error
	done  chan struct{} // closed when res or err is set
}

type gateEvent struct {
	pause bool
	h     Health
}

// NewGate returns an open gate over room.
func NewGate(room Room, opts *GateOptions) *Gate {
	g := &Gate{room: room}
	if opts != nil {
		g.opts = *opts
	}
	if g.opts.Clock == nil {
		g.opts.Clock = SystemClock{}
	}
	return g
}

// Reserve waits until a sample of the given size may be produced and returns the room set aside for it.
//
// Errors: ErrFull at once if the size is over a cap; ErrNoSpace if the medium is out of room; ErrWedged if waiting
// has no prospect; ErrClosed; the context's error, in which case nothing is reserved.
func (g *Gate) Reserve(ctx context.Context, bytes int64) (Reservation, error) {
	if bytes < 0 {
		return Reservation{}, &Error{Kind: Invalid, Op: "gate: reserve", Detail: fmt.Sprintf("%d bytes, want 0 or more", bytes)}
	}
	if limit := g.room.Health().Caps.MaxBytes; limit > 0 && bytes > limit {
		return Reservation{}, &Error{Kind: Full, Op: "gate: reserve", Detail: fmt.Sprintf("a sample of %d bytes does not fit the cap of %d bytes", bytes, limit), Hint: "raise max_bytes or shorten the sample"}
	}
	w := &gateWaiter{bytes: bytes, since: g.opts.Clock.Now(), done: make(chan struct{})}
	g.mu.Lock()
	if err := g.closed; err != nil {
		g.unlock()
		return Reservation{}, err
	}
	g.line = append(g.line, w)
	g.evaluate()
	g.unlock()
	return w.wait(ctx, g, &g.line)
}

// WaitOpen waits until the gate is not paused or the consumers are starving. It reserves nothing: it is for a put whose sample is in the store already.
func (g *Gate) WaitOpen(ctx context.Context) error {
	w := &gateWaiter{since: g.opts.Clock.Now(), done: make(chan struct{})}
	g.mu.Lock()
	if err := g.closed; err != nil {
		g.unlock()
		return err
	}
	g.openers = append(g.openers, w)
	g.evaluate()
	g.unlock()
	_, err := w.wait(ctx, g, &g.openers)
	return err
}

func (w *gateWaiter) wait(ctx context.Context, g *Gate, line *[]*gateWaiter) (Reservation, error) {
	select {
	case <-w.done:
		return w.res, w.err
	case <-ctx.Done():
	}
	g.mu.Lock()
	select {
	case <-w.done: // granted in the meantime: a grant must not be lost
		g.unlock()
		return w.res, w.err
	default:
	}
	for i, o := range *line {
		if o == w {
			*line = append((*line)[:i:i], (*line)[i+1:]...)
			break
		}
	}
	g.evaluate() // whoever stood behind w may fit
	g.unlock()
	return Reservation{}, context.Cause(ctx)
}

// Poke makes the gate look again: room may have become free, or been taken. It never waits for another caller of the gate, so a store may report freed room from
// anywhere, even from inside the Reserve that the gate is calling; whoever is in the gate looks again before it leaves.
func (g *Gate) Poke() {
	g.dirty.Store(true)
	if g.mu.TryLock() {
		g.unlock()
	}
}

// SetStarving says whether a consumer waits with nothing deliverable to it.
func (g *Gate) SetStarving(starving bool) {
	g.mu.Lock()
	if g.starving != starving {
		g.starving = starving
		g.evaluate()
	}
	g.unlock()
}

// Fail ends the waiting of all that stand in line now with err: the queue's word that they are wedged.
func (g *Gate) Fail(err error) {
	g.mu.Lock()
	g.failAll(err)
	g.unlock()
}

// Close ends all waiting, now and later, with err, or with ErrClosed if that is nil. It is idempotent; the first error stays.
func (g *Gate) Close(err error) {
	if err == nil {
		err = &Error{Kind: Closed, Op: "gate", Detail: "is closed"}
	}
	g.mu.Lock()
	if g.closed == nil {
		g.closed = err
		g.failAll(err)
	}
	g.unlock()
}

// Reopen ends Close: whoever comes from now on waits again.
func (g *Gate) Reopen() {
	g.mu.Lock()
	g.closed = nil
	g.unlock()
}

// Remeasure is Poke after the marks of the room have changed: a pause by the old ones ends if the high one is not hit now, also above the low one.
func (g *Gate) Remeasure() {
	g.mu.Lock()
	if h := g.room.Health(); g.paused && !h.HighWatermarkHit() {
		g.resume(h)
	}
	g.evaluate()
	g.unlock()
}

// GateState is a snapshot of a gate.
type GateState struct {
	Paused    bool          // between the high mark and the low one
	Starving  bool          // as last said by SetStarving
	Waiting   int           // reservations in line
	HeadBytes int64         // what the head of the line asks for
	HeadSince time.Time     // since when
	PausedFor time.Duration // in sum, this pause included
}

// State returns a snapshot.
func (g *Gate) State() GateState {
	g.mu.Lock()
	defer g.unlock()
	s := GateState{Paused: g.paused, Starving: g.starving, Waiting: len(g.line), PausedFor: g.pausedFor}
	if g.paused {
		s.PausedFor += g.opts.Clock.Now().Sub(g.pausedSince)
	}
	if len(g.line) > 0 {
		s.HeadBytes, s.HeadSince = g.line[0].bytes, g.line[0].since
	}
	return s
}

// evaluate grants what can be granted. The caller holds mu.
func (g *Gate) evaluate() {
	h := g.room.Health()
	g.updatePause(h)
	for len(g.line) > 0 {
		w := g.line[0]
		if g.paused && !g.starving || !h.Fits(w.bytes) {
			break
		}
		res, err := g.room.Reserve(context.Background(), w.bytes)
		if errors.Is(err, ErrFull) && h.UsedSamples() > 0 {
			break // another process was faster; its release will poke us
		}
		w.res, w.err = res, err
		close(w.done)
		g.line = g.line[1:]
		h = g.room.Health()
		g.updatePause(h)
	}
	if !g.paused || g.starving {
		for _, w := range g.openers {
			close(w.done)
		}
		g.openers = nil
	}
}

func (g *Gate) updatePause(h Health) {
	switch {
	case !g.paused && h.HighWatermarkHit():
		g.paused, g.pausedSince = true, g.opts.Clock.Now()
	case g.paused && h.LowWatermarkHit():
		g.resume(h)
		return
	default:
		return
	}
	g.tell(h)
}

func (g *Gate) resume(h Health) {
	g.paused = false
	g.pausedFor += g.opts.Clock.Now().Sub(g.pausedSince)
	g.tell(h)
}

// tell leaves a pause or resume to unlock.
func (g *Gate) tell(h Health) {
	if g.opts.OnPause != nil || g.opts.OnResume != nil {
		g.events = append(g.events, gateEvent{g.paused, h})
	}
}

func (g *Gate) failAll(err error) {
	for _, line := range []*[]*gateWaiter{&g.line, &g.openers} {
		for _, w := range *line {
			w.err = err
			close(w.done)
		}
		*line = nil
	}
}

// unlock releases mu, after it has seen to the pokes that came meanwhile, and reports pauses and resumes. One goroutine at a time reports, so that they come in
// order; a callback that calls the gate leaves its events to the goroutine that is reporting.
func (g *Gate) unlock() {
	for {
		for g.dirty.Swap(false) {
			g.evaluate()
		}
		for !g.dispatching && len(g.events) > 0 {
			e := g.events[0]
			g.events = g.events[1:]
			g.dispatching = true
			g.mu.Unlock()
			g.report(e)
			g.mu.Lock()
			g.dispatching = false
		}
		g.mu.Unlock()
		// A poke that found mu taken relies on this look.
		if !g.dirty.Load() || !g.mu.TryLock() {
			return
		}
	}
}

func (g *Gate) report(e gateEvent) {
	ok := false
	defer func() {
		if !ok { // a callback that panics must not silence all those after it
			g.mu.Lock()
			g.dispatching = false
			g.mu.Unlock()
		}
	}()
	if f := g.opts.OnPause; e.pause && f != nil {
		f(e.h)
	}
	if f := g.opts.OnResume; !e.pause && f != nil {
		f(e.h)
	}
	ok = true
}
