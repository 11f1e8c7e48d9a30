package memstore

import "sync"

// notifier calls listeners after room became free. Whoever freed it makes the calls, unless another goroutine is making some already: then that one makes another
// round. So listeners never run in two goroutines at once, may free room themselves without recursion, and no free goes without a call that began after it.
type notifier struct {
	mu        sync.Mutex // guards what follows; not held during calls
	listeners map[*func()]struct{}
	again     bool
	busy      bool
}

func (n *notifier) add(f func()) (stop func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.listeners == nil {
		n.listeners = map[*func()]struct{}{}
	}
	n.listeners[&f] = struct{}{}
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.listeners, &f)
	}
}

func (n *notifier) notify() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.listeners) == 0 {
		return
	}
	n.again = true
	if n.busy {
		return
	}
	n.busy = true
	defer func() { n.busy = false }() // a listener that panics takes down its caller, not the store
	for n.again {
		n.again = false
		calls := make([]*func(), 0, len(n.listeners))
		for f := range n.listeners {
			calls = append(calls, f)
		}
		func() {
			n.mu.Unlock()
			defer n.mu.Lock()
			for _, f := range calls {
				(*f)()
			}
		}()
	}
}
