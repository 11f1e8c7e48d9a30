package service

import (
	"context"
	"sync"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

// session is a client process. It lives while it holds a connection open; what it holds goes when it ends.
type session struct {
	id string

	mu        sync.Mutex
	held      int       // connections
	everHeld  bool      // it has held one: from then on only those count
	calls     int       // under way
	last      time.Time // a call or a connection ended
	ended     bool
	done      chan struct{} // closed with the end
	consumers map[consumerKey]sluice.Consumer
	runs      map[*run]struct{}
}

// consumerKey is a consumer, or a member of a replica group.
type consumerKey struct {
	run    *run
	name   string
	member int
}

// maxSessions bounds the sessions: a caller that has another one for each call must not fill the memory.
const maxSessions = 1 << 14

type sessions struct {
	mu   sync.Mutex
	byID map[string]*session
}

// begin finds the session of a call, or starts it. The zero id is no session: nil.
func (t *sessions) begin(id string, now time.Time) (*session, error) {
	if id == "" {
		return nil, nil
	}
	if !isID(id) {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: "session", Subject: plain(id), Detail: "the header " + wire.SessionHeader + " wants 32 hexadecimal digits in lower case"}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.byID[id]
	if s == nil {
		if len(t.byID) >= maxSessions {
			return nil, tooMany("sessions", maxSessions)
		}
		s = &session{id: id, last: now, done: make(chan struct{}), consumers: map[consumerKey]sluice.Consumer{}, runs: map[*run]struct{}{}}
		t.byID[id] = s
	}
	s.mu.Lock()
	s.calls++
	s.mu.Unlock()
	return s, nil
}

// finish ends a call.
func (s *session) finish(now time.Time) {
	if s == nil {
		return
	}
	s.mu.Lock()
	s.calls--
	s.last = now
	s.mu.Unlock()
}

// hold notes that the session holds a connection, and letGo that it broke.
func (s *session) hold() {
	s.mu.Lock()
	s.held++
	s.everHeld = true
	s.mu.Unlock()
}

func (s *session) letGo(now time.Time) {
	s.mu.Lock()
	s.held--
	s.last = now
	s.mu.Unlock()
}

// over reports whether the session's time has come.
func (s *session) over(now time.Time, grace, idle time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.held > 0:
		return false
	case s.everHeld:
		return now.Sub(s.last) >= grace
	}
	return s.calls == 0 && now.Sub(s.last) >= idle
}

// touches notes that the session may hold something of a run; it is false if the session has ended.
func (s *session) touches(r *run) bool {
	if s == nil {
		return true
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.runs[r] = struct{}{}
	}
	return !s.ended
}

// consumes notes that a consumer acquires in the session. From then on it is this session whose end ends the consumer, and no longer that of one that had it before: a process that was
// started anew under the same name and incarnation must not lose its leases to the end of its predecessor.
func (s *session) consumes(r *run, c sluice.Consumer) {
	key := consumerKey{r, c.Name, c.Member}
	if s != nil {
		s.mu.Lock()
		if !s.ended {
			s.consumers[key] = c
		}
		s.mu.Unlock()
	}
	r.consumedBy(key, s)
}

// left notes that a consumer has left by itself.
func (s *session) left(r *run, c sluice.Consumer) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.consumers, consumerKey{r, c.Name, c.Member})
}

// forget lets go of a run that is gone.
func (t *sessions) forget(r *run) {
	for _, s := range t.all() {
		s.mu.Lock()
		delete(s.runs, r)
		for k := range s.consumers {
			if k.run == r {
				delete(s.consumers, k)
			}
		}
		s.mu.Unlock()
	}
}

func (t *sessions) all() []*session {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := make([]*session, 0, len(t.byID))
	for _, s := range t.byID {
		list = append(list, s)
	}
	return list
}

func (t *sessions) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.byID)
}

// take removes a session if it is over, or in any case if forced; false if another was faster.
func (t *sessions) take(s *session, now time.Time, o *Options, forced bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.byID[s.id] != s || !forced && !s.over(now, o.SessionGrace, o.SessionIdle) {
		return false
	}
	delete(t.byID, s.id)
	s.mu.Lock()
	s.ended = true
	close(s.done)
	s.mu.Unlock()
	return true
}

// endSession gives back what a session holds that was taken.
func (s *Service) endSession(ctx context.Context, gone *session, why string) {
	for r := range gone.runs {
		r.giveBack(ctx, r.endSession(gone), why)
	}
	for k, c := range gone.consumers {
		if !k.run.consumerGone(k, gone) {
			continue
		}
		if err := k.run.enter(); err != nil {
			continue // its leases run out by themselves
		}
		if err := k.run.q.Leave(ctx, c); err != nil && sluice.KindOf(err) != sluice.Stale {
			s.log.Warn("a consumer of an ended session can't leave", "run", k.run.id, "consumer", plain(c.Name), "err", err)
		}
		k.run.leave()
	}
	s.log.Info("session ended", "session", gone.id[:8], "why", why, "runs", len(gone.runs), "consumers", len(gone.consumers))
}

// isOver reports whether the session has ended.
func (s *session) isOver() bool {
	if s == nil {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended
}
