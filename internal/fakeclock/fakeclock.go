// Package fakeclock is the clock of the conformance suites: it stands still until a test tells it to advance.
package fakeclock

import (
	"sync"
	"time"

	"github.com/sluice-ml/sluice"
)

// Clock is a [sluice.Clock] that stands still until Advance is called. Make one with New.
type Clock struct {
	mu     sync.Mutex
	now    time.Time
	timers map[int]timer
	n      int
}

type timer struct {
	at time.Time
	f  func()
}

var _ sluice.Clock = (*Clock)(nil)

// New returns a clock that stands at noon of the first of January 2026, UTC.
func New() *Clock {
	return &Clock{now: time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC), timers: map[int]timer{}}
}

// Now is where the clock stands.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// AfterFunc calls f in its own goroutine when the clock has advanced by d, and at once if d is not above 0.
func (c *Clock) AfterFunc(d time.Duration, f func()) (stop func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if d <= 0 {
		go f()
		return func() bool { return false }
	}
	c.n++
	id := c.n
	c.timers[id] = timer{c.now.Add(d), f}
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		_, pending := c.timers[id]
		delete(c.timers, id)
		return pending
	}
}

// Advance moves the clock by d and calls what falls due on the way, in order. It returns when those calls have returned, so that a test sees their effects;
// a call that asks for another one within d is served too.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	end := c.now.Add(d)
	for {
		first := 0
		for id, t := range c.timers {
			if f := c.timers[first]; !t.at.After(end) && (first == 0 || t.at.Before(f.at) || t.at.Equal(f.at) && id < first) {
				first = id
			}
		}
		if first == 0 {
			break
		}
		t := c.timers[first]
		delete(c.timers, first)
		if t.at.After(c.now) {
			c.now = t.at
		}
		c.mu.Unlock()
		done := make(chan struct{})
		go func() { defer close(done); t.f() }() // ends with f
		<-done
		c.mu.Lock()
	}
	c.now = end
}
