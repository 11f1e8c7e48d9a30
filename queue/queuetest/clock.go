package queuetest

import (
	"sync"
	"time"
)

// Clock is a sluice.Clock that stands still until Advance is called.
type Clock struct {
	mu     sync.Mutex
	now    time.Time
	timers map[int]*timer
	n      int
}

type timer struct {
	at time.Time
	f  func()
}

// NewClock returns a clock that shows some time.
func NewClock() *Clock {
	return &Clock{now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), timers: map[int]*timer{}}
}

// Now is the time that the clock shows.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// AfterFunc has f called when Advance has moved the clock by d. Advance returns when f has, so that a test goes on when everything that is due was done.
func (c *Clock) AfterFunc(d time.Duration, f func()) (stop func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if d <= 0 {
		go f()
		return func() bool { return false }
	}
	c.n++
	id := c.n
	c.timers[id] = &timer{c.now.Add(d), f}
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		_, ok := c.timers[id]
		delete(c.timers, id)
		return ok
	}
}

// Advance moves the clock and starts what is due on the way, in order.
func (c *Clock) Advance(d time.Duration) {
	c.mu.Lock()
	end := c.now.Add(d)
	for {
		first := 0
		for id, t := range c.timers {
			if !t.at.After(end) && (first == 0 || t.at.Before(c.timers[first].at)) {
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
		t.f()
		c.mu.Lock()
	}
	c.now = end
	c.mu.Unlock()
}
