//go:build linux

package dirstore

import (
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// reapEvery is how often a session with listeners looks for dead ones: their pins and reservations are room that nobody else would tell of. One that is alone sleeps until
// another one comes, which wakes it.
const reapEvery = 500 * time.Millisecond

const futexWake, futexWait = 1, 0 // FUTEX_WAKE and FUTEX_WAIT, not private: the word is shared between processes

// wake makes the waiters of all sessions look up.
func (h *head) wake() {
	h.futex.Add(1)
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&h.futex)), futexWake, 1<<30, 0, 0, 0)
}

// sleep waits until the word is not value, or until it is time to look for dead sessions, if there are others. It may return early.
func (h *head) sleep(value uint32) {
	var until *unix.Timespec
	if h.known() > 1 {
		ts := unix.NsecToTimespec(int64(reapEvery))
		until = &ts
	}
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&h.futex)), futexWait, uintptr(value), uintptr(unsafe.Pointer(until)), 0, 0)
}

// known counts the sessions of the ledger. It needs no lock: one that comes later changes the word.
func (h *head) known() (n int) {
	for i := range h.sessions {
		if atomic.LoadUint32(&h.sessions[i].state) != 0 {
			n++
		}
	}
	return n
}

// watcher calls the listeners when room came free in any session. Its goroutine runs while there are listeners, and ends with the last one or
// with close.
type watcher struct {
	mu      sync.Mutex
	calls   map[*listener]struct{}
	running chan struct{} // closed when the goroutine has ended; nil if there is none
	closed  bool
}

type listener struct{ call func() }

// OnFreed registers a function that a goroutine of the session calls after room became free, in this process or another one. Calls are merged.
func (s *Store) OnFreed(f func()) (stop func()) {
	w, me := &s.watch, &listener{f}
	s.life.RLock()
	defer s.life.RUnlock()
	if s.closed.Load() {
		return func() {}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.calls == nil {
		w.calls = map[*listener]struct{}{}
	}
	w.calls[me] = struct{}{}
	if w.running == nil {
		w.running = make(chan struct{})
		go s.watchFreed(s.shown, s.shown.freed.Load(), w.running)
	}
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.calls, me)
		if len(w.calls) == 0 && w.running != nil && !w.closed {
			s.shown.wake() // mapped until close has seen the goroutine end
		}
	}
}

func (s *Store) watchFreed(h *head, seen uint64, done chan struct{}) {
	w := &s.watch
	reaped := time.Now()
	for {
		word := h.futex.Load()
		now := h.freed.Load()
		w.mu.Lock()
		if w.closed || len(w.calls) == 0 {
			w.running = nil
			close(done)
			w.mu.Unlock()
			return
		}
		var calls []*listener
		if now != seen {
			for c := range w.calls {
				calls = append(calls, c)
			}
		}
		w.mu.Unlock()
		if now != seen {
			seen = now
			for _, c := range calls {
				w.mu.Lock()
				_, on := w.calls[c]
				w.mu.Unlock()
				if on {
					c.call()
				}
			}
			continue
		}
		if time.Since(reaped) >= reapEvery && h.known() > 1 {
			_ = s.do(func(l *ledger) error { l.reapDead(); return nil })
			reaped = time.Now()
			continue
		}
		h.sleep(word)
	}
}

func (w *watcher) close(h *head) {
	w.mu.Lock()
	w.closed = true
	running := w.running
	w.mu.Unlock()
	if running != nil {
		h.wake()
		<-running
	}
}
