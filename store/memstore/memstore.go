// Package memstore is the store for producers and consumers that live in one process. Its samples are gone when it is closed.
//
// A put is one copy, a get is none. Samples of 64 KiB and more lie in one anonymous memory file, cut into segments. Put copies into a
// segment through a shared mapping that stays; Get maps the segment privately and writable, so that the consumer's writes go to pages of its own
// and nobody else sees them. Segments are recycled, because a copy into pages that exist is more than twice as fast as one into fresh ones. But a private mapping is
// no snapshot: pages its holder has not written yet show what the file holds *now*. So a segment is recycled only when no claim, no pin and no unclosed [sluice.Tensors]
// is left, which within one process is known for certain.
//
// Why one file: a descriptor a sample would run into the limit on open files with some thousands of samples, and a file's
// offsets are as good as descriptors. Mappings are limited too (vm.max_map_count, usually 65530): the segments share a mapping a
// gibibyte, and Get copies where it may not map.
//
// Smaller samples would pay more for a mapping than for a copy: Put and Get copy them on the heap. Every sample is kept that
// way where there are no anonymous memory files, which is logged once a store.
//
// # Room
//
// The caps count logical bytes. Segments that are free wait in a pool, [sluice.Health.PoolBytes], and are given back to the machine, the longest idle first, before
// the pool and what is in use together would exceed MaxBytes, or their number MaxSamples; GC gives back what was idle for a minute. A recycled segment
// may be up to an eighth larger than its sample, and all of them together by no more than a sample. So samples of 64 KiB and more never take more memory than MaxBytes and one
// sample; of smaller ones, the garbage collector decides when their memory goes.
//
// Room is also what the machine and the memory cgroup have left: Reserve, and a Put that needs fresh memory, refuse with ErrNoSpace what does not fit
// there, since the kernel would not refuse it but kill the process. A reading of them serves for a second, or until a quarter of it was used or something
// does not fit it.
//
// # Ending
//
// Close frees every sample but those whose tensors are still open; they, and their counters, go with [sluice.Tensors.Close]. It ends pins and reservations; a later Release has
// nothing left to do and returns nil. Release, Unreserve and Abort never wait, and work with a context that has ended, so that clean-up code need not mind.
package memstore

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sluice-ml/sluice"
)

// heapBelow is the size under which a sample lies on the heap: mapping, faulting in and unmapping costs about as much as copying so much.
const heapBelow = 64 << 10

// copyStep is how much Put copies between two looks at its context.
const copyStep = 8 << 20

// idleAfter is how long a free segment stays in the pool when nobody wants it.
const idleAfter = time.Minute

// Options tune a Store. Caps must be set.
type Options struct {
	Caps   sluice.Caps  // MaxBytes or MaxSamples at least; Resolve fills in the marks
	Clock  sluice.Clock // SystemClock if nil; for the times that Samples tells, and for GC
	Logger *slog.Logger // slog.Default if nil

	noFile bool                  // for tests: as if there were no anonymous memory files
	free   func() (int64, error) // for tests: what the machine has left
}

// Store is an in-process store. Make one with [New].
type Store struct {
	uri     string
	clock   sluice.Clock
	ledger  ledger
	arena   *arena // nil: all samples lie on the heap
	machine machine
	freed   notifier

	mu           sync.Mutex // guards what follows; never held while bytes are copied, mapped or given back
	closed       bool
	samples      map[string]*entry // those that can be found, and those being put
	pins         map[sluice.HandleID]*entry
	reservations map[string]*reservation
}

var (
	_ sluice.ClaimStore = (*Store)(nil)
	_ sluice.Room       = (*Store)(nil)
)

// entry is one put. Its memory is free when it can not be found any more, and no pin and no open tensors are left.
type entry struct {
	ref      sluice.Ref
	bytes    int64
	put      time.Time
	features []sluice.Feature // over the stored bytes: read only
	offsets  []int64          // of the features in the block
	block    block

	published bool
	present   bool // Store.samples has it
	owner     string
	dead      bool
	pins      int
	orphan    bool // a pin or the claim was given up: without both, it goes
	open      int  // tensors not closed
}

type reservation struct {
	bytes    int64
	used     bool // by a Put that is under way
	returned bool // Unreserve came while it was used: it ends even if that Put fails
}

// New returns an empty store with a URI of its own, "mem:" and a random id.
func New(opts *Options) (*Store, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	caps, err := o.Caps.Resolve()
	if err != nil {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: "memstore: new", Err: err}
	}
	if o.Clock == nil {
		o.Clock = sluice.SystemClock{}
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	s := &Store{
		uri: "mem:" + sluice.NewGeneration(), clock: o.Clock,
		samples: map[string]*entry{}, pins: map[sluice.HandleID]*entry{}, reservations: map[string]*reservation{},
	}
	s.ledger.h.Caps = caps
	s.machine.read = o.free
	if s.machine.read == nil {
		s.machine.read = freeMemory
	}
	if s.arena, err = newArena(caps, o.Clock, &s.machine); err != nil || o.noFile {
		s.arena.close()
		s.arena = nil
		if err != nil {
			o.Logger.Warn("memstore: no anonymous memory file, samples lie on the heap and every get copies", "store", s.uri, "err", err)
		}
	}
	return s, nil
}

// URI is "mem:" and a random id.
func (s *Store) URI() string { return s.uri }

func fault(kind sluice.Kind, op, subject, format string, args ...any) *sluice.Error {
	return &sluice.Error{Kind: kind, Op: "memstore: " + op, Subject: subject, Detail: fmt.Sprintf(format, args...)}
}

func closedError(op, subject string) error {
	return fault(sluice.Closed, op, subject, "the store is closed")
}

// Reserve sets room aside. See [sluice.Store].
func (s *Store) Reserve(ctx context.Context, bytes int64) (sluice.Reservation, error) {
	if err := context.Cause(ctx); err != nil {
		return sluice.Reservation{}, err
	}
	if bytes < 0 || bytes >= 1<<53 {
		return sluice.Reservation{}, fault(sluice.Invalid, "reserve", "", "bytes is %d, want 0 or more and less than 2^53", bytes)
	}
	r := sluice.Reservation{ID: sluice.NewHandleID().String(), Bytes: bytes}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return sluice.Reservation{}, closedError("reserve", "")
	}
	if err := s.ledger.reserve(bytes); err != nil {
		s.mu.Unlock()
		return sluice.Reservation{}, err
	}
	s.reservations[r.ID] = &reservation{bytes: bytes}
	s.mu.Unlock()
	// What is reserved and not yet written will come from the pool first, and from the machine where that is not enough.
	h := s.Health()
	if err := s.machine.has(h.ReservedBytes - h.StagingBytes - h.PoolBytes); err != nil {
		_ = s.Unreserve(ctx, r) // only a Close can be faster, and has done it then
		return sluice.Reservation{}, &sluice.Error{Kind: sluice.NoSpace, Op: "memstore: reserve", Detail: fmt.Sprintf("%d bytes", bytes), Err: err, Hint: memoryHint}
	}
	return r, nil
}

const memoryHint = "lower max_bytes, free memory or raise the cgroup's limit"

// Unreserve gives a reservation back. See [sluice.Store].
func (s *Store) Unreserve(_ context.Context, r sluice.Reservation) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return closedError("unreserve", "")
	}
	own := s.reservations[r.ID]
	if own == nil || own.used {
		if own != nil {
			own.returned = true
		}
		s.mu.Unlock()
		return nil
	}
	delete(s.reservations, r.ID)
	s.ledger.unreserve(own.bytes)
	s.mu.Unlock()
	s.freed.notify()
	return nil
}

// Put copies the sample into the store. A Put under a reservation that is spent or was never made is one under none. See [sluice.Store].
func (s *Store) Put(ctx context.Context, in *sluice.Sample, r sluice.Reservation) (sluice.Ref, error) {
	if err := context.Cause(ctx); err != nil {
		return sluice.Ref{}, err
	}
	if in == nil {
		return sluice.Ref{}, fault(sluice.Invalid, "put", "", "the sample is nil")
	}
	fields, err := in.RefFields(s.uri, sluice.NewGeneration())
	var ref sluice.Ref
	if err == nil {
		ref, err = sluice.NewRef(fields)
	}
	if err != nil {
		return sluice.Ref{}, &sluice.Error{Kind: sluice.KindOf(err), Op: "memstore: put", Subject: in.SampleID, Err: err}
	}
	sm := &entry{ref: ref, bytes: ref.EstimatedBytes(), put: s.clock.Now(), present: true}
	own, err := s.stage(sm, r)
	if err != nil {
		return sluice.Ref{}, err
	}
	err = s.fill(ctx, sm, in.Features)
	if err = s.publish(sm, r, own, err); err != nil {
		return sluice.Ref{}, err
	}
	return ref, nil
}

// stage takes the id and the room for sm, or nothing.
func (s *Store) stage(sm *entry, r sluice.Reservation) (*reservation, error) {
	id := sm.ref.SampleID()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, closedError("put", id)
	}
	if other := s.samples[id]; other != nil {
		if !other.published {
			return nil, fault(sluice.Duplicate, "put", id, "is being put by somebody else")
		}
		return nil, fault(sluice.Duplicate, "put", id, "is in the store already, as generation %s", other.ref.Generation())
	}
	own := s.reservations[r.ID]
	if own != nil && own.used {
		own = nil
	}
	if err := s.ledger.stage(id, sm.bytes, own); err != nil {
		return nil, err
	}
	if own != nil {
		own.used = true
	}
	s.samples[id] = sm
	return own, nil
}

// fill copies the features into fresh or recycled memory.
func (s *Store) fill(ctx context.Context, sm *entry, features []sluice.Feature) error {
	align := int64(8)
	if s.arena != nil && sm.bytes >= heapBelow {
		align = 64
	}
	sm.features = make([]sluice.Feature, len(features))
	sm.offsets = make([]int64, len(features))
	size, i := int64(0), 0 // size ends with the last tensor: no page of it stays unwritten
	for f := range sm.ref.Features() {
		sm.features[i] = sluice.Feature{Name: f.Name, Tensor: sluice.Tensor{Spec: f.Spec}} // the ref's shape, not the caller's
		sm.offsets[i] = (size + align - 1) &^ (align - 1)
		size = sm.offsets[i] + f.Bytes()
		i++
	}
	var err error
	if align == 8 {
		if err = s.machine.take(size); err == nil {
			sm.block = heapBlock(size)
		}
	} else {
		sm.block, err = s.arena.alloc(size)
	}
	if err != nil {
		return &sluice.Error{Kind: sluice.NoSpace, Op: "memstore: put", Subject: sm.ref.SampleID(), Detail: fmt.Sprintf("%d bytes", sm.bytes), Err: err, Hint: memoryHint}
	}
	for i := range features {
		data := features[i].Data
		for at := 0; at < len(data); at += copyStep {
			if err := context.Cause(ctx); err != nil {
				return err
			}
			if err := sm.block.write(sm.offsets[i]+int64(at), data[at:min(at+copyStep, len(data))]); err != nil {
				return &sluice.Error{Kind: sluice.NoSpace, Op: "memstore: put", Subject: sm.ref.SampleID(), Detail: fmt.Sprintf("%d bytes", sm.bytes), Err: err, Hint: memoryHint}
			}
		}
	}
	sm.block.view(sm.features, sm.offsets)
	return nil
}

// publish makes sm visible, or takes it back if failed is set or the store was closed meanwhile.
func (s *Store) publish(sm *entry, r sluice.Reservation, own *reservation, failed error) error {
	var booked int64
	if own != nil {
		booked = own.bytes
	}
	s.mu.Lock()
	if failed == nil && s.closed {
		failed = closedError("put", sm.ref.SampleID())
	}
	if failed == nil {
		sm.published = true
		s.ledger.publish(sm.bytes, own)
		if own != nil {
			delete(s.reservations, r.ID)
		}
		s.mu.Unlock()
		if booked > sm.bytes {
			s.freed.notify()
		}
		return nil
	}
	s.ledger.unstage(sm.bytes, own)
	if own != nil {
		own.used = false
		if own.returned || s.closed {
			delete(s.reservations, r.ID)
			s.ledger.unreserve(own.bytes)
		}
	}
	if s.samples[sm.ref.SampleID()] == sm {
		delete(s.samples, sm.ref.SampleID())
	}
	s.mu.Unlock()
	sm.block.free()
	s.freed.notify()
	return failed
}

// find returns the sample that ref means, or nil. The caller holds mu.
func (s *Store) find(ref sluice.Ref) *entry {
	sm := s.samples[ref.SampleID()]
	if sm == nil || !sm.published || ref.StoreURI() != s.uri || sm.ref.Generation() != ref.Generation() {
		return nil
	}
	return sm
}

// notFound says why find found nothing. The caller holds mu.
func (s *Store) notFound(op string, ref sluice.Ref) error {
	switch sm := s.samples[ref.SampleID()]; {
	case ref.IsZero():
		return fault(sluice.NotFound, op, "", "the ref is zero")
	case ref.StoreURI() != s.uri:
		return fault(sluice.NotFound, op, ref.SampleID(), "the ref is of the store %q, this one is %q", ref.StoreURI(), s.uri)
	case sm != nil && sm.published:
		return fault(sluice.NotFound, op, ref.SampleID(), "the ref is of generation %s, the store holds %s", ref.Generation(), sm.ref.Generation())
	default:
		return fault(sluice.NotFound, op, ref.SampleID(), "is not in the store")
	}
}

// Get pins the sample and maps it, or copies it if it is small. See [sluice.Store].
func (s *Store) Get(ctx context.Context, ref sluice.Ref) (*sluice.Tensors, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	h := sluice.Handle{StoreURI: s.uri, SampleID: ref.SampleID(), ID: sluice.NewHandleID()}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, closedError("get", ref.SampleID())
	}
	sm := s.find(ref)
	if sm == nil {
		defer s.mu.Unlock()
		return nil, s.notFound("get", ref)
	}
	sm.pins++
	sm.open++
	s.pins[h.ID] = sm
	s.mu.Unlock() // the pin holds the memory from here on

	if !ref.Equal(sm.ref) { // the same generation, and somebody changed what it says
		err := ref.CheckFeatures("memstore: get", sm.features)
		if err == nil {
			err = fault(sluice.Corrupt, "get", ref.SampleID(), "the ref has the features of the one that its put returned, and differs from it elsewhere")
		}
		s.unpin(h.ID, false)
		s.unmapped(sm)
		return nil, err
	}
	private := sm.block.private()
	features := make([]sluice.Feature, len(sm.features))
	axes := 0
	for i := range sm.features {
		axes += len(sm.features[i].Shape)
	}
	shapes := make([]int64, 0, axes) // the consumer's own: it may reshape what it holds
	for i := range sm.features {
		features[i] = sm.features[i]
		at := len(shapes)
		shapes = append(shapes, features[i].Shape...)
		features[i].Shape = shapes[at:len(shapes):len(shapes)]
	}
	private.view(features, sm.offsets)
	return sluice.NewTensors(s, h, features, func() error {
		err := private.unmap()
		s.unmapped(sm)
		return err
	}), nil
}

// unmapped notes that tensors of sm were closed.
func (s *Store) unmapped(sm *entry) {
	s.mu.Lock()
	sm.open--
	s.settle(sm)
}

// unpin drops the pin with the given id, if there is one. A pin that was released makes the sample one that goes with its last pin; a pin
// of a Get that failed does not.
func (s *Store) unpin(id sluice.HandleID, released bool) {
	s.mu.Lock()
	sm := s.pins[id]
	if sm == nil {
		s.mu.Unlock()
		return
	}
	delete(s.pins, id)
	sm.pins--
	sm.orphan = sm.orphan || released
	if sm.pins == 0 && sm.owner == "" && sm.orphan {
		s.hide(sm)
	}
	s.settle(sm)
}

// hide takes sm out of the ids. The caller holds mu.
func (s *Store) hide(sm *entry) {
	if sm.present {
		sm.present = false
		delete(s.samples, sm.ref.SampleID())
	}
}

// settle frees sm if nothing holds it. The caller holds mu, which settle gives up.
func (s *Store) settle(sm *entry) {
	if sm.present || sm.pins > 0 || sm.open > 0 || !sm.published {
		s.mu.Unlock()
		return
	}
	sm.published = false // once
	s.ledger.free(sm.bytes)
	s.mu.Unlock()
	sm.block.free()
	s.freed.notify()
}

// Release gives up a pin. See [sluice.Store].
func (s *Store) Release(_ context.Context, h sluice.Handle) error {
	if h.StoreURI != s.uri {
		return nil
	}
	s.mu.Lock()
	sm := s.pins[h.ID]
	s.mu.Unlock()
	if sm != nil && sm.ref.SampleID() == h.SampleID {
		s.unpin(h.ID, true)
	}
	return nil
}

// Abort frees a sample that nobody claims. See [sluice.Store].
func (s *Store) Abort(_ context.Context, ref sluice.Ref) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return closedError("abort", ref.SampleID())
	}
	sm := s.find(ref)
	if sm == nil {
		s.mu.Unlock()
		return nil
	}
	if sm.owner != "" {
		defer s.mu.Unlock()
		return fault(sluice.Conflict, "abort", ref.SampleID(), "is claimed by %q", sm.owner)
	}
	s.hide(sm)
	s.settle(sm)
	return nil
}

// GC gives idle memory back to the machine. A process that owns all of its samples has none without an owner, so it always returns 0.
func (s *Store) GC(ctx context.Context) (int, error) {
	if err := context.Cause(ctx); err != nil {
		return 0, err
	}
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return 0, closedError("gc", "")
	}
	s.arena.trim(s.clock.Now().Add(-idleAfter))
	return 0, nil
}

// Health is a snapshot of the counters. See [sluice.Store].
func (s *Store) Health() sluice.Health {
	h := s.ledger.snapshot()
	h.PoolBytes = s.arena.poolBytes()
	return h
}

// Close frees everything but what open tensors hold. See [sluice.Store].
func (s *Store) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	all := slices.Collect(maps.Values(s.samples))
	for _, sm := range s.pins {
		if !sm.present { // aborted: only its pins lead to it
			all = append(all, sm)
		}
	}
	clear(s.pins)
	for id, r := range s.reservations {
		if !r.used { // the Put that uses it ends it
			delete(s.reservations, id)
			s.ledger.unreserve(r.bytes)
		}
	}
	s.samples = map[string]*entry{}
	var free []*entry
	for _, sm := range all {
		sm.present = false
		sm.pins = 0
		if !sm.published {
			continue // the Put that is under way sees that we are closed; or it had two pins
		}
		if sm.dead {
			s.ledger.mark(sm.bytes, false)
		}
		sm.owner, sm.dead = "", false
		if sm.open == 0 {
			sm.published = false
			s.ledger.free(sm.bytes)
			free = append(free, sm)
		}
	}
	s.mu.Unlock()
	for _, sm := range free {
		sm.block.free()
	}
	s.arena.close()
	return nil
}

// Claim takes the sample for owner. See [sluice.ClaimStore].
func (s *Store) Claim(ref sluice.Ref, owner string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch sm := s.find(ref); {
	case s.closed:
		return closedError("claim", ref.SampleID())
	case owner == "":
		return fault(sluice.Invalid, "claim", ref.SampleID(), "owner is empty")
	case sm == nil:
		return s.notFound("claim", ref)
	case sm.owner != "" && sm.owner != owner:
		return fault(sluice.Conflict, "claim", ref.SampleID(), "is claimed by %q", sm.owner)
	default:
		sm.owner = owner
		return nil
	}
}

// MarkDead moves a claimed sample to the dead letters, or back. See [sluice.ClaimStore].
func (s *Store) MarkDead(ref sluice.Ref, owner string, dead bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch sm := s.find(ref); {
	case s.closed:
		return closedError("mark dead", ref.SampleID())
	case sm == nil:
		return s.notFound("mark dead", ref)
	case sm.owner == "":
		return fault(sluice.Conflict, "mark dead", ref.SampleID(), "is claimed by nobody, want %q", owner)
	case sm.owner != owner:
		return fault(sluice.Conflict, "mark dead", ref.SampleID(), "is claimed by %q, not by %q", sm.owner, owner)
	case sm.dead != dead:
		sm.dead = dead
		s.ledger.mark(sm.bytes, dead)
	}
	return nil
}

// Unclaim gives the claim up. See [sluice.ClaimStore].
func (s *Store) Unclaim(ref sluice.Ref, owner string) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return closedError("unclaim", ref.SampleID())
	}
	sm := s.find(ref)
	if sm == nil || sm.owner == "" || sm.owner != owner {
		s.mu.Unlock()
		return nil
	}
	if sm.dead {
		sm.dead = false
		s.ledger.mark(sm.bytes, false)
	}
	sm.owner, sm.orphan = "", true
	if sm.pins == 0 {
		s.hide(sm)
	}
	s.settle(sm)
	return nil
}

// Samples lists what the store holds. See [sluice.ClaimStore].
func (s *Store) Samples(ctx context.Context) ([]sluice.SampleInfo, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, closedError("samples", "")
	}
	infos := make([]sluice.SampleInfo, 0, len(s.samples))
	for _, sm := range s.samples {
		if sm.published {
			infos = append(infos, sluice.SampleInfo{Ref: sm.ref, Owner: sm.owner, Dead: sm.dead, Pins: sm.pins, Put: sm.put})
		}
	}
	return infos, nil
}

// OnFreed registers a function to call when room became free. It runs in a goroutine that freed some, never in two at once, and one call may
// stand for several frees. A call that is under way when stop is called is not waited for. See [sluice.ClaimStore].
func (s *Store) OnFreed(f func()) (stop func()) { return s.freed.add(f) }
