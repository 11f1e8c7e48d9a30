package service

import (
	"sync"
	"time"
)

// firstClient is how long a service that ends when it is idle waits for its first client at least: whoever started it may still be busy with its own start.
const firstClient = 30 * time.Second

// idle watches whether any client holds a session.
type idle struct {
	mu    sync.Mutex
	held  int       // connections
	came  bool      // one was ever held
	since time.Time // nobody has held one from then on; zero: since before the service was ready
	over  chan struct{}
	ended bool // over is closed: nobody may begin to hold one
}

// hold notes that a client begins to hold a session; it is false if the service ends.
func (i *idle) hold() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.ended {
		return false
	}
	i.held++
	i.came = true
	return true
}

func (i *idle) letGo(now time.Time) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.held--
	i.since = now
}

// look ends the service's time if nobody has held a session for limit; 0 is no limit.
func (i *idle) look(now time.Time, ready bool, limit time.Duration) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if limit == 0 || i.ended || i.held > 0 {
		return
	}
	if i.since.IsZero() {
		if ready {
			i.since = now
		}
		return
	}
	if !i.came {
		limit = max(limit, firstClient)
	}
	if now.Sub(i.since) >= limit {
		i.ended = true
		close(i.over)
	}
}

// Idle is closed when nobody has held a session for as long as [Options].ExitIdle says. No client gets a session from then on, so closing the service cuts off nobody who has one.
func (s *Service) Idle() <-chan struct{} { return s.idle.over }
