package service

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/store/dirstore"
)

// holdings are what callers hold of a run beside leases: reservations, uploads that are not committed, and pins. Each ends with its session, or when its time is over.
type holdings struct {
	asking       sync.Mutex // held by who reserves past the gate, for the whole of it
	mu           sync.Mutex
	reservations map[string]*reservation
	byRequest    map[string][]sluice.Reservation // those that passed the gate
	uploads      map[string]*upload              // by sample id
	arriving     map[string]*arrival
	places       map[placeKey]*place
	pins         map[sluice.HandleID]*pin
	consumers    map[consumerKey]*session // the last session in which each has acquired
	next         time.Time                // nothing ends by itself before; zero if nothing does
}

type reservation struct {
	sluice.Reservation
	session *session
	expires time.Time
	busy    bool // an upload uses it now
	request string
}

// upload is a sample in the store whose ref no queue has.
type upload struct {
	ref     sluice.Ref
	session *session
	expires time.Time
}

// arrival is the uploads of one sample id that are under way.
type arrival struct {
	n    int
	over chan struct{} // closed with the last of them
}

// pin is a loan to a reader outside.
type pin struct {
	id      sluice.HandleID // the caller's name for it
	loan    *dirstore.Loan
	mapped  bool
	session *session
	expires time.Time // zero with a session
}

// giveBack gives the pin up, and the mapping too unless the reader keeps it.
func (p *pin) giveBack(keep bool) error {
	err := p.loan.Release()
	if !keep {
		err = errors.Join(err, p.loan.Close())
	}
	return err
}

// lost gives a pin up whose holder went without a word: that is no release.
func (p *pin) lost() error {
	if p.mapped {
		return p.loan.Lost()
	}
	return p.loan.Drop()
}

// ended is what is over and must be given back, outside the lock.
type ended struct {
	reservations []sluice.Reservation
	uploads      []sluice.Ref
	pins         []*pin
}

func (h *holdings) init() {
	h.byRequest = map[string][]sluice.Reservation{}
	h.places = map[placeKey]*place{}
	h.arriving = map[string]*arrival{}
	h.consumers = map[consumerKey]*session{}
	h.reservations, h.uploads, h.pins = map[string]*reservation{}, map[string]*upload{}, map[sluice.HandleID]*pin{}
}

// maxReservations is how many the callers of a run may hold at once: those of no bytes take no room under the caps.
const maxReservations = 1 << 16

// maxPins is how many of those they may hold. Each takes a file descriptor, of which one run must leave some to the others, and to whoever calls.
var maxPins = sync.OnceValue(func() int {
	const most = 1 << 14
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return most
	}
	return int(min(files.Cur/4, most))
})

// roomToReserve refuses reservations beyond what is kept.
func (h *holdings) roomToReserve(n int) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.reservations)+n > maxReservations {
		return tooMany("reservations of the run", len(h.reservations))
	}
	return nil
}

// roomToPin refuses a pin beyond what is kept.
func (h *holdings) roomToPin() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.pins) >= maxPins() {
		return tooMany("pins of the run", len(h.pins))
	}
	return nil
}

// due notes that something ends at t. The caller holds mu.
func (h *holdings) due(t time.Time) {
	if h.next.IsZero() || t.Before(h.next) {
		h.next = t
	}
}

// consumedBy notes in which session a consumer acquires.
func (h *holdings) consumedBy(k consumerKey, s *session) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.consumers[k] = s // nil: whoever it is, no session's end is theirs
}

// consumerGone reports whether the end of the session is the end of the consumer.
func (h *holdings) consumerGone(k consumerKey, s *session) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.consumers[k] != s {
		return false
	}
	delete(h.consumers, k)
	return true
}

// reserved notes a reservation, with the request that got it past the gate, or "".
func (h *holdings) reserved(r sluice.Reservation, s *session, expires time.Time, request string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.reservations[r.ID] == nil {
		h.reservations[r.ID] = &reservation{Reservation: r, session: s, expires: expires, request: request}
		h.due(expires)
		if request != "" {
			h.byRequest[request] = append(h.byRequest[request], r)
		}
	}
}

// askedFor is what a request got past the gate and holds yet.
func (h *holdings) askedFor(request string) []sluice.Reservation {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]sluice.Reservation(nil), h.byRequest[request]...)
}

// forget removes a reservation. The caller holds mu.
func (h *holdings) forget(r *reservation) {
	delete(h.reservations, r.ID)
	delete(h.byRequest, r.request)
}

// use takes a reservation for an upload; nil if there is none of that id that is free.
func (h *holdings) use(id string) *reservation {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.reservations[id]
	if r == nil || r.busy {
		return nil
	}
	r.busy = true
	return r
}

// used ends that: the reservation is gone, or as it was if the upload failed.
func (h *holdings) used(r *reservation, gone bool) {
	if r == nil {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	r.busy = false
	if gone {
		h.forget(r)
	}
}

// arrive notes that a sample is on its way in, until the function that it returns is called.
func (h *holdings) arrive(id string) (over func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	a := h.arriving[id]
	if a == nil {
		a = &arrival{over: make(chan struct{})}
		h.arriving[id] = a
	}
	a.n++
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if a.n--; a.n == 0 {
			delete(h.arriving, id)
			close(a.over)
		}
	}
}

// arrived waits until no sample of the id is on its way in.
func (h *holdings) arrived(ctx context.Context, id string) error {
	for {
		h.mu.Lock()
		a := h.arriving[id]
		h.mu.Unlock()
		if a == nil {
			return nil
		}
		select {
		case <-a.over:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (h *holdings) unreserve(id string) (sluice.Reservation, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.reservations[id]
	if r == nil || r.busy {
		return sluice.Reservation{}, false
	}
	h.forget(r)
	return r.Reservation, true
}

func (h *holdings) uploaded(ref sluice.Ref, s *session, expires time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.uploads[ref.SampleID()] = &upload{ref: ref, session: s, expires: expires}
	h.due(expires)
}

// committed takes an upload off the list: from now on it is the queue's.
func (h *holdings) committed(ref sluice.Ref) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if u := h.uploads[ref.SampleID()]; u != nil && u.ref.Generation() == ref.Generation() {
		delete(h.uploads, ref.SampleID())
	}
}

// pinned enters a pin, unless there is one of its id: that one is returned.
func (h *holdings) pinned(p *pin) *pin {
	h.mu.Lock()
	defer h.mu.Unlock()
	if known := h.pins[p.id]; known != nil {
		return known
	}
	h.pins[p.id] = p
	if !p.expires.IsZero() {
		h.due(p.expires)
	}
	return nil
}

func (h *holdings) findPin(id sluice.HandleID) *pin {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.pins[id]
}

func (h *holdings) unpin(id sluice.HandleID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.pins, id)
}

// allPins takes out the pins.
func (h *holdings) allPins() (all []*pin) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, p := range h.pins {
		all = append(all, p)
	}
	clear(h.pins)
	return all
}

// endSession takes out what a session holds.
func (h *holdings) endSession(s *session) (e ended) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.take(&e, func(of *session, _ time.Time) bool { return of == s })
	return e
}

// expire takes out what has come to its end.
func (h *holdings) expire(now time.Time) (e ended) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.next.IsZero() || now.Before(h.next) {
		return e
	}
	h.next = time.Time{}
	h.take(&e, func(_ *session, at time.Time) bool {
		if at.IsZero() {
			return false
		}
		if at.After(now) {
			h.due(at)
			return false
		}
		return true
	})
	return e
}

func (h *holdings) take(e *ended, over func(*session, time.Time) bool) {
	for _, r := range h.reservations {
		switch {
		case !over(r.session, r.expires):
		case r.busy: // the upload outlives it, and is looked at when it is there
			h.due(r.expires)
		default:
			e.reservations = append(e.reservations, r.Reservation)
			h.forget(r)
		}
	}
	for id, u := range h.uploads {
		if over(u.session, u.expires) {
			e.uploads = append(e.uploads, u.ref)
			delete(h.uploads, id)
		}
	}
	for id, p := range h.pins {
		if over(p.session, p.expires) {
			e.pins = append(e.pins, p)
			delete(h.pins, id)
		}
	}
}
