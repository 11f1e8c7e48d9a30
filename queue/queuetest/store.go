package queuetest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/sluice-ml/sluice"
)

// Store is a sluice.ClaimStore that keeps counters instead of tensors: what tests of a queue need. Its Get hands out zeros.
type Store struct {
	uri  string
	caps sluice.Caps

	mu       sync.Mutex
	h        sluice.Health
	samples  map[string]*entry
	rooms    map[string]int64
	pins     map[sluice.HandleID]*entry
	seq      int
	hooks    map[int]func()
	claims   int
	unclaims int
	log      []string
	logging  bool

	// Fault, if set, is asked before Claim, MarkDead and Unclaim, whose names it gets; what it returns is what they return. It may panic.
	Fault func(op string, ref sluice.Ref) error
}

type entry struct {
	ref   sluice.Ref
	owner string
	dead  bool
	pins  int
	put   time.Time
}

var _ sluice.ClaimStore = (*Store)(nil)

// NewStore returns an empty store with the given caps.
func NewStore(caps sluice.Caps) *Store {
	caps, err := caps.Resolve()
	if err != nil {
		panic(err)
	}
	return &Store{
		uri: "mem:" + sluice.NewGeneration(), caps: caps, h: sluice.Health{Caps: caps},
		samples: map[string]*entry{}, rooms: map[string]int64{}, pins: map[sluice.HandleID]*entry{}, hooks: map[int]func(){},
	}
}

// URI identifies the store.
func (s *Store) URI() string { return s.uri }

func (s *Store) fail(kind sluice.Kind, op, subject, detail string) error {
	return &sluice.Error{Kind: kind, Op: "queuetest: " + op, Subject: subject, Detail: detail}
}

// Reserve sets room aside, at once or not at all.
func (s *Store) Reserve(_ context.Context, bytes int64) (sluice.Reservation, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.h.Fits(bytes) {
		return sluice.Reservation{}, s.fail(sluice.Full, "reserve", "", fmt.Sprintf("%d bytes do not fit", bytes))
	}
	s.seq++
	r := sluice.Reservation{ID: fmt.Sprint("r", s.seq), Bytes: bytes}
	s.rooms[r.ID] = bytes
	s.h.ReservedBytes += bytes
	s.h.ReservedSamples++
	return r, nil
}

// Unreserve gives it back.
func (s *Store) Unreserve(_ context.Context, r sluice.Reservation) error {
	s.mu.Lock()
	ok := s.unreserve(r)
	hooks := s.freed(ok)
	s.mu.Unlock()
	hooks()
	return nil
}

func (s *Store) unreserve(r sluice.Reservation) bool {
	n, ok := s.rooms[r.ID]
	if ok {
		delete(s.rooms, r.ID)
		s.h.ReservedBytes -= n
		s.h.ReservedSamples--
	}
	return ok
}

// Put makes a ref of the sample and counts it.
func (s *Store) Put(_ context.Context, sample *sluice.Sample, r sluice.Reservation) (sluice.Ref, error) {
	f, err := sample.RefFields(s.uri, sluice.NewGeneration())
	if err != nil {
		return sluice.Ref{}, err
	}
	ref, err := sluice.NewRef(f)
	if err != nil {
		return sluice.Ref{}, err
	}
	return ref, s.Add(ref, r)
}

// Add enters a sample by its ref alone.
func (s *Store) Add(ref sluice.Ref, r sluice.Reservation) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.samples[ref.SampleID()] != nil {
		return s.fail(sluice.Duplicate, "put", ref.SampleID(), "is here")
	}
	reserved := s.rooms[r.ID]
	if n := ref.EstimatedBytes(); r.ID == "" && !s.h.Fits(n) || r.ID != "" && n > reserved {
		return s.fail(sluice.Full, "put", ref.SampleID(), "does not fit")
	}
	s.unreserve(r)
	s.samples[ref.SampleID()] = &entry{ref: ref, put: time.Now()}
	s.h.ResidentBytes += ref.EstimatedBytes()
	s.h.ResidentSamples++
	return nil
}

// Get pins the sample.
func (s *Store) Get(_ context.Context, ref sluice.Ref) (*sluice.Tensors, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.find(ref)
	if e == nil {
		return nil, s.fail(sluice.NotFound, "get", ref.SampleID(), "is not here in this generation")
	}
	h := sluice.Handle{StoreURI: s.uri, SampleID: ref.SampleID(), ID: sluice.NewHandleID()}
	e.pins++
	s.pins[h.ID] = e
	var features []sluice.Feature
	for f := range ref.Features() {
		features = append(features, sluice.Feature{Name: f.Name, Tensor: sluice.NewTensor(f.DType, f.Shape...)})
	}
	return sluice.NewTensors(s, h, features, nil), nil
}

// Release gives up a pin.
func (s *Store) Release(_ context.Context, h sluice.Handle) error {
	s.mu.Lock()
	e := s.pins[h.ID]
	gone := false
	if e != nil {
		delete(s.pins, h.ID)
		e.pins--
		gone = s.drop(e)
	}
	hooks := s.freed(gone)
	s.mu.Unlock()
	hooks()
	return nil
}

func (s *Store) find(ref sluice.Ref) *entry {
	e := s.samples[ref.SampleID()]
	if e == nil || e.ref.Generation() != ref.Generation() {
		return nil
	}
	return e
}

// drop frees the entry if nobody owns it.
func (s *Store) drop(e *entry) bool {
	if e.owner != "" || e.pins > 0 || s.samples[e.ref.SampleID()] != e {
		return false
	}
	delete(s.samples, e.ref.SampleID())
	s.h.ResidentBytes -= e.ref.EstimatedBytes()
	s.h.ResidentSamples--
	return true
}

// freed returns the calls to make, outside the lock, when room became free.
func (s *Store) freed(yes bool) func() {
	if !yes || len(s.hooks) == 0 {
		return func() {}
	}
	hooks := make([]func(), 0, len(s.hooks))
	for _, f := range s.hooks {
		hooks = append(hooks, f)
	}
	return func() {
		for _, f := range hooks {
			f()
		}
	}
}

// Abort frees a sample that is not claimed.
func (s *Store) Abort(_ context.Context, ref sluice.Ref) error {
	s.mu.Lock()
	e := s.find(ref)
	if e == nil {
		s.mu.Unlock()
		return nil
	}
	if e.owner != "" {
		s.mu.Unlock()
		return s.fail(sluice.Conflict, "abort", ref.SampleID(), "is claimed")
	}
	hooks := s.freed(s.drop(e))
	s.mu.Unlock()
	hooks()
	return nil
}

// GC does nothing.
func (s *Store) GC(context.Context) (int, error) { return 0, nil }

// Health is a snapshot of the counters.
func (s *Store) Health() sluice.Health {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.h
}

// Close does nothing.
func (s *Store) Close() error { return nil }

func (s *Store) ask(op string, ref sluice.Ref) error {
	if f := s.Fault; f != nil {
		if err := f(op, ref); err != nil {
			return err
		}
	}
	if s.logging {
		s.mu.Lock()
		s.log = append(s.log, op+" "+ref.SampleID())
		s.mu.Unlock()
	}
	return nil
}

// Claim takes the sample for owner.
func (s *Store) Claim(ref sluice.Ref, owner string) error {
	if err := s.ask("claim", ref); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.find(ref)
	switch {
	case e == nil:
		return s.fail(sluice.NotFound, "claim", ref.SampleID(), "is not here in this generation")
	case e.owner != "" && e.owner != owner:
		return s.fail(sluice.Conflict, "claim", ref.SampleID(), "is claimed by "+e.owner)
	}
	e.owner = owner
	s.claims++
	return nil
}

// MarkDead moves the sample to the dead letters, or back.
func (s *Store) MarkDead(ref sluice.Ref, owner string, dead bool) error {
	if err := s.ask(fmt.Sprint("mark ", dead), ref); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.find(ref)
	if e == nil || e.owner != owner {
		return s.fail(sluice.NotFound, "mark dead", ref.SampleID(), "is not claimed by "+owner)
	}
	s.mark(e, dead)
	return nil
}

func (s *Store) mark(e *entry, dead bool) {
	if e.dead == dead {
		return
	}
	e.dead = dead
	sign := int64(1)
	if !dead {
		sign = -1
	}
	s.h.DeadBytes += sign * e.ref.EstimatedBytes()
	s.h.DeadSamples += sign
}

// Unclaim gives the claim up.
func (s *Store) Unclaim(ref sluice.Ref, owner string) error {
	if err := s.ask("unclaim", ref); err != nil {
		return err
	}
	s.mu.Lock()
	e := s.find(ref)
	if e == nil || e.owner != owner {
		s.mu.Unlock()
		return nil
	}
	e.owner = ""
	s.mark(e, false)
	s.unclaims++
	if len(s.hooks) == 0 || e.pins > 0 {
		s.drop(e)
		s.mu.Unlock()
		return nil
	}
	s.drop(e)
	if len(s.hooks) == 1 {
		for _, f := range s.hooks {
			s.mu.Unlock()
			f()
			return nil
		}
	}
	hooks := s.freed(true)
	s.mu.Unlock()
	hooks()
	return nil
}

// Samples lists what is here.
func (s *Store) Samples(context.Context) ([]sluice.SampleInfo, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []sluice.SampleInfo
	for _, e := range s.samples {
		all = append(all, sluice.SampleInfo{Ref: e.ref, Owner: e.owner, Dead: e.dead, Pins: e.pins, Put: e.put})
	}
	slices.SortFunc(all, func(a, b sluice.SampleInfo) int { return compare(a.Ref.SampleID(), b.Ref.SampleID()) })
	return all, nil
}

func compare(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// OnFreed registers f.
func (s *Store) OnFreed(f func()) (stop func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seq++
	id := s.seq
	s.hooks[id] = f
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.hooks, id)
	}
}

// Owner returns who claims the sample, and whether it is there at all.
func (s *Store) Owner(id string) (owner string, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.samples[id]
	if e == nil {
		return "", false
	}
	return e.owner, true
}

// Record starts to record the calls of Claim, MarkDead and Unclaim; Calls returns them.
func (s *Store) Record() { s.logging = true }

// Calls returns what was recorded.
func (s *Store) Calls() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.log)
}
