package service

import (
	"sync"

	"github.com/sluice-ml/sluice/internal/wire"
)

// hub hands events to those who listen. It never waits for one of them: who is too slow loses some.
type hub struct {
	mu   sync.Mutex
	subs map[*subscription]struct{}
}

type subscription struct {
	run string // only of this run; "" for all
	ch  chan wire.Event
}

// backlog is how many events wait for a listener before it loses some.
const backlog = 256

// subscribe listens to the events of a run, or of all if run is "". Call stop when you are done; the channel is not closed.
func (h *hub) subscribe(run string) (events <-chan wire.Event, stop func()) {
	sub := &subscription{run, make(chan wire.Event, backlog)}
	h.mu.Lock()
	if h.subs == nil {
		h.subs = map[*subscription]struct{}{}
	}
	h.subs[sub] = struct{}{}
	h.mu.Unlock()
	return sub.ch, func() {
		h.mu.Lock()
		delete(h.subs, sub)
		h.mu.Unlock()
	}
}

func (h *hub) send(e wire.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for sub := range h.subs {
		if sub.run == "" || sub.run == e.RunID {
			select {
			case sub.ch <- e:
			default:
			}
		}
	}
}
