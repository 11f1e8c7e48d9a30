package storetest

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/sluice-ml/sluice"
	"pgregory.net/rapid"
)

var propertyTests = []test{
	{"AnySequenceOfCallsAgreesWithTheModel", 0, func(t *testing.T, k *kit) {
		rapid.Check(t, func(rt *rapid.T) {
			caps := rapid.SampledFrom([]sluice.Caps{{MaxBytes: 250_000}, {MaxSamples: 4}, {MaxBytes: 400_000, MaxSamples: 3}, {MaxBytes: 10 << 20, MaxSamples: 100}}).Draw(rt, "caps")
			m := &model{k: k, s: k.open(t, caps), caps: caps, reservations: map[string]int64{}}
			m.c, _ = m.s.(sluice.ClaimStore)
			defer m.end(rt)
			actions := map[string]func(*rapid.T){"": m.check, "put": m.put, "put again": m.put, "get": m.get, "get again": m.get, "write": m.write, "close tensors": m.closeTensors, "release": m.release,
				"abort": m.abort, "reserve": m.reserve, "unreserve": m.unreserve, "gc": m.gc}
			if m.c != nil {
				maps.Copy(actions, map[string]func(*rapid.T){"claim": m.claim, "unclaim": m.unclaim, "mark dead": m.markDead})
			}
			rt.Repeat(actions)
		})
	}},
}

// model is the contract in the small: what each call does to ownership, and what the counters say of it.
type model struct {
	k    *kit
	s    sluice.Store
	c    sluice.ClaimStore // nil if s is none
	caps sluice.Caps

	samples      []*modelSample // all that ever were, so that old refs are tried too
	tensors      []*modelTensors
	reservations map[string]int64 // live ones
	spent        []sluice.Reservation
	issued       []sluice.Reservation
}

type modelSample struct {
	ref     sluice.Ref
	bytes   int64
	seed    uint64
	present bool // can be found by its ref
	owner   string
	dead    bool
	pins    int
	mapped  int // tensors not closed
}

type modelTensors struct {
	of       *modelSample
	ts       *sluice.Tensors
	want     []sluice.Feature // with what their holder wrote
	released bool
	closed   bool
}

func (x *modelSample) counted(detached bool) bool {
	return x.present || x.pins > 0 || x.mapped > 0 && !detached
}

// settle applies the rule of ownership after a pin or the claim went.
func (x *modelSample) settle() {
	if x.owner == "" && x.pins == 0 {
		x.present = false
	}
}

func (m *model) health() (h sluice.Health) {
	for _, x := range m.samples {
		if x.counted(m.k.h.Detached) {
			h.ResidentBytes += x.bytes
			h.ResidentSamples++
		}
		if x.dead {
			h.DeadBytes += x.bytes
			h.DeadSamples++
		}
	}
	for _, n := range m.reservations {
		h.ReservedBytes += n
		h.ReservedSamples++
	}
	return h
}

// fits says whether the caps allow n more bytes and one more sample, less what is given up for them.
func (m *model) fits(n, lessBytes, lessSamples int64) bool {
	h := m.health()
	return (m.caps.MaxBytes == 0 || h.UsedBytes()-lessBytes+n <= m.caps.MaxBytes) && (m.caps.MaxSamples == 0 || h.UsedSamples()-lessSamples < m.caps.MaxSamples)
}

func (m *model) present(id string) bool {
	return slices.ContainsFunc(m.samples, func(x *modelSample) bool { return x.present && x.ref.SampleID() == id })
}

func drawOne[E any](rt *rapid.T, from []E, label string) E {
	if len(from) == 0 {
		rt.Skip("no " + label)
	}
	return from[len(from)-1-rapid.IntRange(0, len(from)-1).Draw(rt, label)] // shrinks towards the latest
}

func expect(rt *rapid.T, what string, err, kind error) {
	rt.Helper()
	if kind == nil && err != nil || kind != nil && !errors.Is(err, kind) {
		rt.Fatalf("%s: %v, want %v", what, err, kind)
	}
}

var propertySizes = []int64{0, 1, 13, 5003, 65_536, 100_001, 200_000}

func (m *model) put(rt *rapid.T) {
	id := rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(rt, "id")
	n := rapid.SampledFrom(propertySizes).Draw(rt, "bytes")
	seed := uint64(len(m.samples) + 1)
	var r sluice.Reservation
	var room, slot int64
	if len(m.reservations) > 0 && rapid.Bool().Draw(rt, "under a reservation") {
		r = drawOne(rt, slices.DeleteFunc(slices.Clone(m.issued), func(r sluice.Reservation) bool { _, live := m.reservations[r.ID]; return !live }), "reservation")
		room, slot = m.reservations[r.ID], 1
	}
	sample := sampleSized(id, seed, n)
	ref, err := m.s.Put(bg, sample, r)
	scribble(sample.Features)
	switch {
	case m.present(id):
		expect(rt, "Put of a taken id", err, sluice.ErrDuplicate)
	case n > room && !m.fits(n, room, slot) || slot == 0 && !m.fits(n, 0, 0):
		expect(rt, "Put over a cap", err, sluice.ErrFull)
	default:
		expect(rt, "Put", err, nil)
		if slot == 1 {
			delete(m.reservations, r.ID)
			m.spent = append(m.spent, r)
		}
		for _, x := range m.samples {
			if x.ref.Generation() == ref.Generation() {
				rt.Fatalf("the generation %q is not fresh", ref.Generation())
			}
		}
		m.samples = append(m.samples, &modelSample{ref: ref, bytes: n, seed: seed, present: true})
	}
}

func (m *model) get(rt *rapid.T) {
	x := drawOne(rt, m.samples, "sample")
	ts, err := m.s.Get(bg, x.ref)
	if !x.present {
		expect(rt, "Get of what is gone", err, sluice.ErrNotFound)
		return
	}
	expect(rt, "Get", err, nil)
	x.pins++
	x.mapped++
	m.tensors = append(m.tensors, &modelTensors{of: x, ts: ts, want: sampleSized(x.ref.SampleID(), x.seed, x.bytes).Features})
}

func (m *model) open() []*modelTensors {
	return slices.DeleteFunc(slices.Clone(m.tensors), func(h *modelTensors) bool { return h.closed })
}

func (m *model) write(rt *rapid.T) {
	h := drawOne(rt, m.open(), "open tensors")
	f := rapid.IntRange(0, 1).Draw(rt, "feature")
	if n := len(h.want[f].Data); n > 0 {
		// A few bytes only: the pages that stay unwritten are the ones that would show what a store writes there later.
		i := rapid.IntRange(0, n-1).Draw(rt, "byte")
		h.want[f].Data[i]++
		h.ts.Features[f].Data[i]++
	}
}

func (m *model) closeTensors(rt *rapid.T) {
	h := drawOne(rt, m.tensors, "tensors")
	expect(rt, "Tensors.Close", h.ts.Close(), nil)
	if !h.closed {
		h.closed = true
		h.of.mapped--
	}
}

func (m *model) release(rt *rapid.T) {
	h := drawOne(rt, m.tensors, "handle")
	expect(rt, "Release", m.s.Release(bg, h.ts.Handle), nil)
	if !h.released {
		h.released = true
		h.of.pins--
		h.of.settle()
	}
}

func (m *model) abort(rt *rapid.T) {
	x := drawOne(rt, m.samples, "sample")
	err := m.s.Abort(bg, x.ref)
	if x.present && x.owner != "" {
		expect(rt, "Abort of a claimed sample", err, sluice.ErrConflict)
		return
	}
	expect(rt, "Abort", err, nil)
	x.present = false
}

func (m *model) reserve(rt *rapid.T) {
	n := rapid.SampledFrom(propertySizes).Draw(rt, "bytes")
	fits := m.fits(n, 0, 0)
	r, err := m.s.Reserve(bg, n)
	if !fits {
		expect(rt, "Reserve over a cap", err, sluice.ErrFull)
		return
	}
	expect(rt, "Reserve", err, nil)
	m.reservations[r.ID] = n
	m.issued = append(m.issued, r)
}

func (m *model) unreserve(rt *rapid.T) {
	r := drawOne(rt, m.issued, "reservation")
	expect(rt, "Unreserve", m.s.Unreserve(bg, r), nil)
	delete(m.reservations, r.ID)
}

func (m *model) claim(rt *rapid.T) {
	x, owner := drawOne(rt, m.samples, "sample"), rapid.SampledFrom([]string{"queue-1", "queue-2"}).Draw(rt, "owner")
	err := m.c.Claim(x.ref, owner)
	switch {
	case !x.present:
		expect(rt, "Claim of what is gone", err, sluice.ErrNotFound)
	case x.owner != "" && x.owner != owner:
		expect(rt, "Claim of what another owns", err, sluice.ErrConflict)
	default:
		expect(rt, "Claim", err, nil)
		x.owner = owner
	}
}

func (m *model) unclaim(rt *rapid.T) {
	x, owner := drawOne(rt, m.samples, "sample"), rapid.SampledFrom([]string{"queue-1", "queue-2"}).Draw(rt, "owner")
	expect(rt, "Unclaim", m.c.Unclaim(x.ref, owner), nil)
	if x.present && x.owner == owner {
		x.owner, x.dead = "", false
		x.settle()
	}
}

func (m *model) markDead(rt *rapid.T) {
	x, owner := drawOne(rt, m.samples, "sample"), rapid.SampledFrom([]string{"queue-1", "queue-2"}).Draw(rt, "owner")
	dead := rapid.Bool().Draw(rt, "dead")
	err := m.c.MarkDead(x.ref, owner, dead)
	switch {
	case !x.present:
		expect(rt, "MarkDead of what is gone", err, sluice.ErrNotFound)
	case x.owner != owner:
		expect(rt, "MarkDead of what owner does not claim", err, sluice.ErrConflict)
	default:
		expect(rt, "MarkDead", err, nil)
		x.dead = dead
	}
}

func (m *model) gc(rt *rapid.T) {
	n, err := m.s.GC(bg)
	expect(rt, "GC", err, nil)
	if n != 0 {
		rt.Fatalf("GC of a live session freed %d entries", n)
	}
}

// check compares all that can be seen with the model. It runs after every action.
func (m *model) check(rt *rapid.T) {
	if d := cmp.Diff(m.health(), m.s.Health(), ignoreOwn); d != "" {
		rt.Fatalf("Health differs (-model +store):\n%s", d)
	}
	for i, h := range m.open() {
		if d := diffFeatures(h.ts.Features, h.want); d != "" {
			rt.Fatalf("open tensors %d, of %s: %s", i, h.of.ref, d)
		}
	}
	if m.c == nil {
		return
	}
	infos, err := m.c.Samples(bg)
	expect(rt, "Samples", err, nil)
	type info struct {
		Owner string
		Dead  bool
		Pins  int
		Ref   string
	}
	got, want := map[string]info{}, map[string]info{}
	for _, i := range infos {
		got[key(i.Ref)] = info{i.Owner, i.Dead, i.Pins, i.Ref.Canonical()}
	}
	for _, x := range m.samples {
		if x.present {
			want[key(x.ref)] = info{x.owner, x.dead, x.pins, x.ref.Canonical()}
		}
	}
	if d := cmp.Diff(want, got); d != "" || len(got) != len(infos) {
		rt.Fatalf("Samples (%d of them) differ (-model +store):\n%s", len(infos), d)
	}
}

// end gives everything back, after which nothing may be counted.
func (m *model) end(rt *rapid.T) {
	defer func() { expectEnd(rt, m.s.Close()) }()
	for _, h := range m.tensors {
		if err := errors.Join(m.s.Release(bg, h.ts.Handle), h.ts.Close()); err != nil {
			rt.Errorf("Tensors.Release: %v", err)
		}
	}
	for _, x := range m.samples {
		if x.owner != "" {
			expectEnd(rt, m.c.Unclaim(x.ref, x.owner))
		}
		expectEnd(rt, m.s.Abort(bg, x.ref))
	}
	for _, r := range append(m.issued, m.spent...) {
		expectEnd(rt, m.s.Unreserve(bg, r))
	}
	if d := cmp.Diff(sluice.Health{}, m.s.Health(), ignoreOwn); d != "" && !rt.Failed() {
		rt.Errorf("Health when all is given back (-want +got):\n%s", d)
	}
}

func expectEnd(rt *rapid.T, err error) {
	if err != nil {
		rt.Error(fmt.Errorf("giving back: %w", err))
	}
}
