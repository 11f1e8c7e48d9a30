package storetest

import (
	"sync"
	"time"

	"github.com/sluice-ml/sluice"
)

// Clock is a [sluice.Clock] that stands still until it is told to advance.
type Clock struct {
	mu     sync.Mutex
	now    time.Time
	timers map[*timer]struct{}
}

type timer struct {
	at time.Time
	f  func()
}

var _ sluice.Clock = (*Clock)(nil)

// NewClock returns a clock that stands at noon of the first of January 2026, UTC.
func NewClock() *Clock {
	return &Clock{now: time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC), timers: map[*timer]struct{}{}}
}

// Now is where the clock stands.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// AfterFunc calls f in its own goroutine when the clock has advanced by d.
func (c *Clock) AfterFunc(d time.Duration, f func()) (stop func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	tm := &timer{at: c.now.Add(d), f: f}
	c.timers[tm] = struct{}{}
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		_, pending := c.timers[tm]
		delete(c.timers, tm)
		return pending
	}
}

// Advance moves the clock by d and calls what falls due on the way, in order. It returns when those calls have returned, so that a test sees their effects;
// a call that asks for another one within d is served too.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	end := c.now.Add(d)
	for {
		var next *timer
		for tm := range c.timers {
			if !tm.at.After(end) && (next == nil || tm.at.Before(next.at)) {
				next = tm
			}
		}
		if next == nil {
			break
		}
		delete(c.timers, next)
		if next.at.After(c.now) {
			c.now = next.at
		}
		c.mu.Unlock()
		done := make(chan struct{})
		go func() { defer close(done); next.f() }() // ends with f
		<-done
		c.mu.Lock()
	}
	c.now = end
	c.mu.Unlock()
}
