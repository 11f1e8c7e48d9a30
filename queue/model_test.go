package queue

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
	"pgregory.net/rapid"
)

// The model is the queue written down as plainly as possible: slices that are searched, maps, no lists, no records. The test does the same
// to both and compares every answer.

type mSample struct {
	ref                         sluice.Ref
	seq                         int
	state                       string // returned fresh retry slotted leased dead acked dropped gated tail
	fails, expiries, deliveries int
	freed                       bool
	at                          time.Time
	slot                        *mSlot
}

func (s *mSample) id() string { return s.ref.SampleID() }

type mLease struct {
	id       sluice.LeaseID
	s        *mSample
	slot     *mSlot
	consumer string
	inc      int64
	rank     int
	deadline time.Time
	order    int
	pad      bool
	state    string // out settled
	as       sluice.Verdict
	dead     bool
	at       time.Time

	redelivery int
	verdicts   []sluice.Verdict // of a group's members
}

// mGroup is a replica group: what was given to its members, and how much each has had.
type mGroup struct {
	log    []*mLease
	cursor []int
}

type mProducer struct {
	name  string
	inc   int64
	state sluice.ProducerState
	put   int64
	seen  time.Time
	order int
}

type mSlot struct {
	w               *mWindow
	rank, place     int
	s               *mSample // nil: to be padded
	delivered, done bool
	fails, expiries int
}

type mWindow struct {
	number int64
	slots  []*mSlot
	real   []*mSample
	spare  *mSample
}

type model struct {
	cfg       sluice.RunConfig
	now       time.Time
	samples   []*mSample // in put order
	lists     map[string][]*mSample
	leases    []*mLease
	dead      []*mSample
	order     int
	incs      map[string]int64
	groups    map[string]*mGroup
	producers map[string]*mProducer
	closed    bool
	cause     string
	windows   []*mWindow
	shares    [][]*mSlot
	next      int64
	delivered []int // first deliveries of places by rank, since the last reshape
	targets   []string
	minDraft  string
}

func (m *model) windowed() bool { return m.cfg.Windows != nil }

func (m *model) passes(s *mSample) bool {
	// The versions of these samples have one digit.
	return (len(m.targets) == 0 || slices.Contains(m.targets, s.ref.TargetModelVersion())) && s.ref.DraftWeightVersion() >= m.minDraft
}

func remove[T comparable](list []T, x T) []T {
	if i := slices.Index(list, x); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}

func (m *model) push(s *mSample, list string, front bool) {
	s.state = list
	if front {
		m.lists[list] = slices.Insert(m.lists[list], 0, s)
	} else {
		m.lists[list] = append(m.lists[list], s)
	}
}

func (m *model) finish(s *mSample, state string) {
	m.lists[s.state] = remove(m.lists[s.state], s)
	s.state, s.at = state, m.now
}

func (m *model) backlog() []*mSample {
	return slices.Concat(m.lists["returned"], m.lists["fresh"], m.lists["retry"])
}

func (m *model) out() []*mLease {
	var out []*mLease
	for _, l := range m.leases {
		if l.state == "out" {
			out = append(out, l)
		}
	}
	return out
}

func (m *model) openWindows() {
	if !m.windowed() {
		return
	}
	w := m.cfg.Windows
	for len(m.windows) < 1+w.Prefetch {
		size := int(w.Size())
		if n := len(m.backlog()); n == 0 || n < size && !m.closed {
			return
		}
		var picked []*mSample
		for _, s := range m.backlog() {
			if len(picked) == size {
				break
			}
			if m.passes(s) {
				picked = append(picked, s)
			} else {
				m.finish(s, "gated")
			}
		}
		if len(picked) < size && !m.closed || len(picked) == 0 {
			return
		}
		if len(picked) < size && w.DropTail {
			for _, s := range picked {
				m.finish(s, "tail")
			}
			continue
		}
		win := &mWindow{number: m.next, real: picked}
		m.next++
		for i := range size {
			sl := &mSlot{w: win, rank: i % w.Ranks, place: i / w.Ranks}
			if i < len(picked) {
				sl.s = picked[i]
				m.finish(picked[i], "slotted")
				picked[i].slot = sl
			}
			win.slots = append(win.slots, sl)
			m.shares[sl.rank] = append(m.shares[sl.rank], sl)
		}
		m.windows = append(m.windows, win)
	}
}

// barrier is the number of the first open window with a place that was never delivered.
func (m *model) barrier() int64 {
	for _, w := range m.windows {
		for _, sl := range w.slots {
			if !sl.delivered {
				return w.number
			}
		}
	}
	return m.next
}

func (m *model) resolve(sl *mSlot) {
	sl.done = true
	for _, o := range sl.w.slots {
		if !o.done {
			return
		}
	}
	m.windows = remove(m.windows, sl.w)
	sl.w.spare = nil
	m.openWindows()
}

func (w *mWindow) mayPad(s *mSample) bool {
	if s == w.spare {
		return true
	}
	return slices.Contains(w.real, s) && s.slot != nil && s.slot.w == w && (s.state == "slotted" || s.state == "leased")
}

// take is what the next lease of the consumer's share must be of; for a pad the sample is nil.
func (m *model) take(rank int) (*mSample, *mSlot) {
	m.openWindows()
	if !m.windowed() {
		for _, s := range m.backlog() {
			if m.passes(s) {
				return s, nil
			}
			m.finish(s, "gated")
		}
		return nil, nil
	}
	for len(m.shares[rank]) > 0 {
		sl := m.shares[rank][0]
		if sl.w.number > m.barrier() {
			return nil, nil
		}
		if sl.s != nil {
			return sl.s, sl
		}
		if slices.ContainsFunc(append(slices.Clone(sl.w.real), sl.w.spare), func(s *mSample) bool { return s != nil && sl.w.mayPad(s) }) {
			return nil, sl
		}
		m.shares[rank] = m.shares[rank][1:]
		m.markDelivered(sl)
		m.resolve(sl)
	}
	return nil, nil
}

func (m *model) markDelivered(sl *mSlot) {
	if !sl.delivered {
		sl.delivered = true
		m.delivered[sl.rank]++
	}
}

func (m *model) lease(l sluice.Lease, c sluice.Consumer, s *mSample, sl *mSlot) *mLease {
	x := &mLease{id: l.ID, s: s, slot: sl, consumer: c.Name, inc: c.Incarnation, rank: c.Rank, deadline: m.now.Add(m.cfg.VisibilityTimeout), state: "out"}
	x.pad = sl != nil && sl.s != s
	x.redelivery = s.deliveries
	if c.Members > 1 {
		x.verdicts = make([]sluice.Verdict, c.Members)
		g := m.group(c)
		g.log = append(g.log, x)
		g.cursor[c.Member] = len(g.log)
	}
	m.order++
	x.order = m.order
	m.leases = append(m.leases, x)
	if sl != nil {
		m.shares[sl.rank] = remove(m.shares[sl.rank], sl)
		m.markDelivered(sl)
	}
	if !x.pad {
		m.finish(s, "leased")
		s.deliveries++
	}
	return x
}

func (m *model) group(c sluice.Consumer) *mGroup {
	if m.groups[c.Name] == nil {
		m.groups[c.Name] = &mGroup{cursor: make([]int, c.Members)}
	}
	return m.groups[c.Name]
}

// behind is the next lease that others of the group were given and this member was not, or nil.
func (m *model) behind(c sluice.Consumer) *mLease {
	if c.Members < 2 {
		return nil
	}
	if g := m.group(c); g.cursor[c.Member] < len(g.log) {
		return g.log[g.cursor[c.Member]]
	}
	return nil
}

// worst is the severest of the verdicts that were given.
func (l *mLease) worst() (worst sluice.Verdict) {
	for _, v := range []sluice.Verdict{sluice.Ack, sluice.Return, sluice.Fail, sluice.FailPermanent} {
		if slices.Contains(l.verdicts, v) {
			worst = v
		}
	}
	return worst
}

// says is the verdict of a member of a group; the last one ends the lease.
func (m *model) says(l *mLease, member int, v sluice.Verdict) sluice.SettleResult {
	if said := l.verdicts[member]; said != "" {
		return sluice.SettleResult{Lease: l.id, Status: sluice.AlreadySettled, As: said}
	}
	l.verdicts[member] = v
	if !slices.Contains(l.verdicts, "") {
		m.endLease(l, l.worst())
	}
	return sluice.SettleResult{Lease: l.id, Status: sluice.Settled, As: v, Dead: l.dead}
}

// hear notes a call of a producer; false if it is stale.
func (m *model) hear(p sluice.Producer) bool {
	if p.Name == "" {
		return true
	}
	x := m.producers[p.Name]
	if x == nil {
		x = &mProducer{name: p.Name, inc: -1}
		m.producers[p.Name] = x
	}
	if p.Incarnation < x.inc {
		return false
	}
	if p.Incarnation > x.inc {
		x.inc, x.state = p.Incarnation, sluice.ProducerRunning
	}
	m.order++
	x.seen, x.order = m.now, m.order
	return true
}

// silent is the producer that has been silent for longest, of those that are watched.
func (m *model) silent() (first *mProducer) {
	for _, p := range m.producers {
		if p.state == sluice.ProducerRunning && (first == nil || p.seen.Before(first.seen) || p.seen.Equal(first.seen) && p.order < first.order) {
			first = p
		}
	}
	return first
}

func (m *model) close(cause string) {
	if !m.closed {
		m.closed, m.cause = true, cause
		m.openWindows()
	}
}

func (m *model) toShare(sl *mSlot) { m.shares[sl.rank] = slices.Insert(m.shares[sl.rank], 0, sl) }

// endLease applies a verdict; "" is expiry.
func (m *model) endLease(l *mLease, v sluice.Verdict) {
	l.state = "ended"
	if v != "" {
		l.state, l.as, l.at = "settled", v, m.now
	}
	s := l.s
	fails, expiries := &s.fails, &s.expiries
	if l.pad {
		fails, expiries = &l.slot.fails, &l.slot.expiries
	}
	spent := false
	switch v {
	case sluice.Fail:
		*fails++
		spent = *fails >= m.cfg.MaxFails
	case sluice.FailPermanent:
		*fails++
		spent = true
	case "":
		*expiries++
		spent = *expiries >= m.cfg.MaxExpiries
	}
	if l.pad {
		if v == sluice.Ack || spent {
			m.resolve(l.slot)
		} else {
			m.toShare(l.slot)
		}
		return
	}
	switch {
	case v == sluice.Ack:
		m.finish(s, "acked")
		if sl := l.slot; sl != nil {
			s.slot, sl.s = nil, nil
			if sl.w.spare == nil {
				sl.w.spare = s
			}
			m.resolve(sl)
		}
	case spent:
		m.finish(s, "dead")
		l.dead = true
		m.dead = append(m.dead, s)
		if sl := l.slot; sl != nil {
			s.slot, sl.s = nil, nil
			m.toShare(sl)
		}
		m.freeDead()
	case l.slot != nil:
		s.state = "slotted"
		m.toShare(l.slot)
	case v == sluice.Return:
		m.push(s, "returned", true)
	default:
		m.push(s, "retry", false)
	}
}

func (m *model) padsOn(s *mSample) bool {
	return slices.ContainsFunc(m.out(), func(l *mLease) bool { return l.pad && l.s == s })
}

func (m *model) freeDead() {
	for {
		var kept int64
		var oldest *mSample
		for _, s := range m.dead {
			if !s.freed {
				kept += s.ref.EstimatedBytes()
				if oldest == nil && !m.padsOn(s) {
					oldest = s
				}
			}
		}
		if kept <= m.cfg.Caps.MaxBytes/10 || oldest == nil {
			return
		}
		oldest.freed = true
	}
}

// release returns all leases of a consumer, last to first. What its members have not been given they never are.
func (m *model) release(name string) {
	delete(m.groups, name)
	var mine []*mLease
	for _, l := range m.out() {
		if l.consumer == name {
			mine = append(mine, l)
		}
	}
	for _, l := range slices.Backward(mine) {
		m.endLease(l, sluice.Return)
		l.state = "ended"
	}
	m.openWindows()
}

func (m *model) advance(d time.Duration) {
	end := m.now.Add(d)
	for {
		var first *mLease
		for _, l := range m.out() {
			if !l.deadline.After(end) && (first == nil || l.deadline.Before(first.deadline) || l.deadline.Equal(first.deadline) && l.order < first.order) {
				first = l
			}
		}
		if p := m.silent(); p != nil && !m.closed {
			if lost := p.seen.Add(m.cfg.ProducerTimeout); !lost.After(end) && (first == nil || lost.Before(first.deadline)) {
				m.now = lost
				m.close("producer " + p.name + " lost")
				continue
			}
		}
		if first == nil {
			break
		}
		m.now = first.deadline
		v := first.worst()
		if v != sluice.Fail && v != sluice.FailPermanent { // a failure that one of a group reported explains more than that the others said nothing
			v = ""
		}
		m.endLease(first, v)
		m.openWindows()
	}
	m.now = end
	m.openWindows()
}

func (m *model) ended(c sluice.Consumer) bool {
	if !m.closed {
		return false
	}
	pending, mine, others, gave := len(m.backlog()), 0, 0, false
	if m.windowed() {
		pending += len(m.shares[c.Rank])
	}
	for _, l := range m.out() {
		if l.consumer == c.Name && (l.verdicts == nil || l.verdicts[c.Member] == "") {
			mine++
		}
		gave = gave || l.consumer == c.Name && l.verdicts != nil && l.verdicts[c.Member] != "" && l.verdicts[c.Member] != sluice.Ack
		if !m.windowed() || l.rank == c.Rank {
			others++
		}
	}
	return pending == 0 && (mine > 0 && !gave || others == 0)
}

// machine drives the queue and the model.
type machine struct {
	q       *Queue
	j       *memJournal
	store   *queuetest.Store
	clock   *queuetest.Clock
	m       *model
	n       int
	ranks   int
	members int // of the second consumer of each rank
	journal bool
	named   bool // there are producer sessions
}

var bg = context.Background()

func newMachine(t *rapid.T) *machine {
	cfg := sluice.RunConfig{
		RunID: "r1", Schema: queuetest.Schema(), Caps: sluice.Caps{MaxBytes: 4000}, LargestSample: 100, MaxFails: 3, MaxExpiries: 3,
		Producers: 1000, VisibilityTimeout: 30 * time.Second, ProducerTimeout: time.Hour,
	}
	named := rapid.Bool().Draw(t, "producer sessions")
	if named {
		cfg.Producers = rapid.SampledFrom([]int{2, 1000}).Draw(t, "producers")
		cfg.ProducerTimeout = rapid.SampledFrom([]time.Duration{time.Minute, time.Hour}).Draw(t, "producer timeout")
	}
	if rapid.Bool().Draw(t, "windows") {
		cfg.Windows = &sluice.Windows{
			Ranks: rapid.IntRange(1, 3).Draw(t, "ranks"), PerRank: rapid.IntRange(1, 2).Draw(t, "per rank"), Prefetch: rapid.IntRange(0, 2).Draw(t, "prefetch"), DropTail: rapid.Bool().Draw(t, "drop tail"),
		}
	}
	cfg, err := cfg.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	h := &machine{store: queuetest.NewStore(cfg.Caps), clock: queuetest.NewClock(), journal: rapid.Bool().Draw(t, "journal"), named: named, members: rapid.IntRange(1, 3).Draw(t, "members")}
	h.m = &model{cfg: cfg, now: h.clock.Now(), lists: map[string][]*mSample{}, incs: map[string]int64{}, groups: map[string]*mGroup{}, producers: map[string]*mProducer{}}
	h.shape(cfg.Windows)
	opts := &Options{Clock: h.clock}
	if h.journal {
		h.j = &memJournal{}
		opts.Journal = h.j
		opts.compactRecords = rapid.SampledFrom([]int{20, 1 << 20}).Draw(t, "compact")
	}
	if h.q, err = Open(bg, cfg, h.store, opts); err != nil {
		t.Fatal(err)
	}
	return h
}

func (h *machine) shape(w *sluice.Windows) {
	h.ranks = 1
	if w != nil {
		h.ranks = w.Ranks
	}
	h.m.shares = make([][]*mSlot, h.ranks)
	h.m.delivered = make([]int, h.ranks)
}

// consumer picks one of two a rank, of which the second may be a group.
func (h *machine) consumer(t *rapid.T) sluice.Consumer {
	r, which := rapid.IntRange(0, h.ranks-1).Draw(t, "rank"), rapid.IntRange(0, 1).Draw(t, "which")
	return h.known(t, fmt.Sprintf("c%d-%d-%d", h.ranks, r, which), r)
}

// known is the consumer of that name: any of its members, if it is a group.
func (h *machine) known(t *rapid.T, name string, rank int) sluice.Consumer {
	c := sluice.Consumer{Name: name, Rank: rank, Incarnation: h.m.incs[name]}
	if strings.HasSuffix(name, "-1") && h.members > 1 {
		c.Members, c.Member = h.members, rapid.IntRange(0, h.members-1).Draw(t, "member")
	}
	return c
}

// producer picks one of three sessions, as a rule in its latest incarnation, or the anonymous one.
func (h *machine) producer(t *rapid.T) (p sluice.Producer) {
	if !h.named || rapid.IntRange(0, 3).Draw(t, "anonymous") == 0 {
		return p
	}
	p.Name = fmt.Sprint("p", rapid.IntRange(0, 2).Draw(t, "producer"))
	if x := h.m.producers[p.Name]; x != nil {
		p.Incarnation = max(0, x.inc+int64(rapid.SampledFrom([]int{0, 0, 0, 0, 0, 0, 1, -1}).Draw(t, "incarnation")))
	}
	return p
}

func (h *machine) put(t *rapid.T) {
	h.n++
	version, draft := rapid.SampledFrom([]string{"0", "0", "0", "1"}).Draw(t, "version"), rapid.SampledFrom([]string{"1", "1", "1", "0", "2"}).Draw(t, "draft")
	ref := queuetest.NewRef(h.store.URI(), "r1", fmt.Sprint("s", h.n), int64(rapid.IntRange(10, 100).Draw(t, "bytes")), func(f *sluice.RefFields) {
		f.TargetModelVersion, f.DraftWeightVersion = version, draft
	})
	if h.store.Add(ref, sluice.Reservation{}) != nil {
		return // the store is full
	}
	p := h.producer(t)
	st, err := h.q.Put(bg, sluice.PutRequest{Ref: ref, Producer: p, Positions: []sluice.Position{{Source: "x", Index: int64(h.n)}}})
	m := h.m
	fresh := m.hear(p)
	x := m.producers[p.Name]
	refused := error(nil)
	switch {
	case !fresh:
		refused = sluice.ErrStale
	case m.closed:
		refused = sluice.ErrClosed
	case x != nil && x.state != sluice.ProducerRunning:
		refused = sluice.ErrConflict
	}
	if refused != nil {
		if !errors.Is(err, refused) {
			t.Fatalf("put: %v, %v, want %v", st, err, refused)
		}
		if err := h.store.Abort(bg, ref); err != nil {
			t.Fatal(err)
		}
		return
	}
	if x != nil {
		x.put++
	}
	s := &mSample{ref: ref, seq: len(m.samples)}
	m.samples = append(m.samples, s)
	want := sluice.Enqueued
	if m.passes(s) {
		m.push(s, "fresh", false)
	} else {
		want = sluice.Gated
		m.finish(s, "gated")
	}
	m.openWindows()
	if err != nil || st != want {
		t.Fatalf("put: %v, %v, want %v", st, err, want)
	}
}

func (h *machine) report(t *rapid.T) {
	p := h.producer(t)
	if p.Name == "" {
		t.Skip()
	}
	state := rapid.SampledFrom([]sluice.ProducerState{sluice.ProducerRunning, sluice.ProducerRunning, sluice.ProducerRunning, sluice.ProducerDone, sluice.ProducerDone, sluice.ProducerFailed}).Draw(t, "state")
	err := h.q.Report(bg, sluice.ProducerReport{Producer: p, State: state, Cause: "out of memory"})
	m := h.m
	fresh := m.hear(p)
	x := m.producers[p.Name]
	refused := error(nil)
	switch {
	case !fresh:
		refused = sluice.ErrStale
	case x.state == state:
	case state == sluice.ProducerRunning:
		refused = sluice.ErrConflict
	default:
		x.state = state
		if state == sluice.ProducerFailed {
			m.close("out of memory")
		}
		done := 0
		for _, o := range m.producers {
			if o.state == sluice.ProducerDone {
				done++
			}
		}
		if done == len(m.producers) && done >= m.cfg.Producers {
			m.close("")
		}
	}
	if !errors.Is(err, refused) {
		t.Fatalf("report %s of %+v: %v, want %v", state, p, err, refused)
	}
	m.openWindows()
}

func (h *machine) putAgain(t *rapid.T) {
	if len(h.m.samples) == 0 {
		t.Skip()
	}
	s := rapid.SampledFrom(h.m.samples).Draw(t, "sample")
	p := h.producer(t)
	st, err := h.q.Put(bg, sluice.PutRequest{Ref: s.ref, Producer: p})
	if !h.m.hear(p) {
		if !errors.Is(err, sluice.ErrStale) {
			t.Fatalf("put again by a producer that was superseded: %v, %v", st, err)
		}
		return
	}
	want := sluice.AlreadyPut
	switch s.state {
	case "acked", "dropped", "tail", "gated":
		kept := h.m.padsOn(s)
		for _, w := range h.m.windows {
			kept = kept || w.spare == s
		}
		if h.m.now.Sub(s.at) > memory && !kept {
			want = ""
		} else if want = sluice.WasSettled; s.state == "gated" {
			want = sluice.Gated
		}
	}
	if want == "" {
		if err == nil {
			t.Fatalf("put of what was forgotten: %v", st)
		}
		return
	}
	if err != nil || st != want {
		t.Fatalf("put again of a sample that is %s: %v, %v, want %v", s.state, st, err, want)
	}
}

func (h *machine) acquire(t *rapid.T) {
	c := h.consumer(t)
	r := sluice.AcquireRequest{Consumer: c, Max: rapid.IntRange(1, 4).Draw(t, "max")}
	if rapid.Bool().Draw(t, "with id") {
		h.n++
		r.RequestID = fmt.Sprint("req", h.n)
	}
	d, err := h.q.Acquire(bg, r)
	if err != nil {
		t.Fatal(err)
	}
	repeated := []sluice.LeaseID{} // that a repetition is given again
	for _, l := range d.Leases {
		if x := h.m.behind(c); x != nil {
			h.m.group(c).cursor[c.Member]++
			if l.ID != x.id || l.Ref.SampleID() != x.s.id() || l.Redelivery != x.redelivery {
				t.Fatalf("member %d was given %s, want lease %s of %s like the others", c.Member, l.Ref.SampleID(), x.id, x.s.id())
			}
			repeated = append(repeated, l.ID)
			if x.slot != nil && (l.Window == nil || l.Window.Number != x.slot.w.number || l.Window.Pad != x.pad) {
				t.Fatalf("window %+v of what others were given, want %d, pad %v", l.Window, x.slot.w.number, x.pad)
			}
			continue
		}
		repeated = append(repeated, l.ID)
		s, sl := h.m.take(c.Rank)
		if s == nil && sl == nil {
			t.Fatalf("leased %s, want nothing", l.Ref.SampleID())
		}
		if s == nil { // a pad: any sample of the window whose bytes are there
			for _, o := range h.m.samples {
				if o.id() == l.Ref.SampleID() && sl.w.mayPad(o) {
					s = o
				}
			}
			if s == nil {
				t.Fatalf("padded with %s, which is no live sample of the window", l.Ref.SampleID())
			}
		}
		if s.id() != l.Ref.SampleID() {
			t.Fatalf("leased %s, want %s", l.Ref.SampleID(), s.id())
		}
		if owner, _ := h.store.Owner(s.id()); owner == "" {
			t.Fatalf("leased %s, which is not claimed", s.id())
		}
		if redelivery := s.deliveries; l.Redelivery != redelivery {
			t.Fatalf("redelivery of %s is %d, want %d", s.id(), l.Redelivery, redelivery)
		}
		x := h.m.lease(l, c, s, sl)
		if sl != nil {
			w := l.Window
			if w == nil || w.Number != sl.w.number || w.Rank != sl.rank || w.Slot != sl.place || w.Pad != x.pad {
				t.Fatalf("window %+v, want %d/%d/%d pad %v", w, sl.w.number, sl.rank, sl.place, x.pad)
			}
		}
	}
	if len(d.Leases) < r.Max {
		if s, sl := h.m.take(c.Rank); s != nil || sl != nil || h.m.behind(c) != nil {
			t.Fatalf("%d leases, want more", len(d.Leases))
		}
	}
	if len(d.Leases) == 0 && d.End != h.m.ended(c) {
		t.Fatalf("end is %v, want %v", d.End, h.m.ended(c))
	}
	if d.End && (d.Cause == nil) != (h.m.cause == "") || d.Cause != nil && !strings.Contains(d.Cause.Error(), h.m.cause) {
		t.Fatalf("the end has the cause %v, want %q", d.Cause, h.m.cause)
	}
	if r.RequestID != "" && len(d.Leases) > 0 {
		again, err := h.q.Acquire(bg, r)
		got := []sluice.LeaseID{}
		for _, l := range again.Leases {
			got = append(got, l.ID)
		}
		if err != nil || !slices.Equal(got, repeated) {
			t.Fatalf("the repetition: %v, %v, want %v", again, err, repeated)
		}
	}
}

func (h *machine) settle(t *rapid.T) {
	if len(h.m.leases) == 0 {
		t.Skip()
	}
	out := h.m.out()
	var c sluice.Consumer
	var r sluice.SettleRequest
	for range rapid.IntRange(1, 3).Draw(t, "n") {
		l := rapid.SampledFrom(h.m.leases).Draw(t, "any lease")
		if len(out) > 0 && rapid.IntRange(0, 3).Draw(t, "live") > 0 {
			l = rapid.SampledFrom(out).Draw(t, "lease")
		}
		if c.Name == "" {
			c = h.known(t, l.consumer, l.rank)
			r.Consumer = c
		}
		v := rapid.SampledFrom([]sluice.Verdict{sluice.Ack, sluice.Ack, sluice.Fail, sluice.Fail, sluice.Return, sluice.FailPermanent}).Draw(t, "verdict")
		r.Settlements = append(r.Settlements, sluice.Settlement{Lease: l.id, Verdict: v, Reason: "because"})
	}
	got, err := h.q.Settle(bg, r)
	if err != nil {
		t.Fatal(err)
	}
	// Returns come after the others, the last delivered first.
	index := make([]int, len(r.Settlements))
	for i := range index {
		index[i] = i
	}
	order := func(i int) int {
		if r.Settlements[i].Verdict != sluice.Return {
			return -1 << 30
		}
		for k, l := range h.m.leases {
			if l.id == r.Settlements[i].Lease {
				return -k
			}
		}
		return 0
	}
	sort.SliceStable(index, func(a, b int) bool { return order(index[a]) < order(index[b]) })
	for _, i := range index {
		st := r.Settlements[i]
		var l *mLease
		for _, x := range h.m.leases {
			if x.id == st.Lease {
				l = x
			}
		}
		want := sluice.SettleResult{Lease: st.Lease, Status: sluice.StaleLease}
		switch {
		case l.consumer != c.Name || l.inc != c.Incarnation:
		case l.state == "out" && l.verdicts != nil:
			want = h.m.says(l, c.Member, st.Verdict)
		case l.state == "out":
			h.m.endLease(l, st.Verdict)
			want.Status, want.As, want.Dead = sluice.Settled, st.Verdict, l.dead
		case l.state == "settled" && h.m.now.Sub(l.at) <= memory:
			want.Status, want.As, want.Dead = sluice.AlreadySettled, l.as, l.dead
		}
		if got[i] != want {
			t.Fatalf("settlement %d (%v of %s): %+v, want %+v", i, st.Verdict, l.s.id(), got[i], want)
		}
	}
	h.m.openWindows()
}

func (h *machine) renew(t *rapid.T) {
	out := h.m.out()
	if len(out) == 0 {
		t.Skip()
	}
	name := rapid.SampledFrom(out).Draw(t, "lease").consumer
	if _, err := h.q.Renew(bg, sluice.RenewRequest{Consumer: sluice.Consumer{Name: name, Incarnation: h.m.incs[name]}}); err != nil {
		t.Fatal(err)
	}
	for _, l := range out {
		if l.consumer == name {
			h.m.order++
			l.deadline, l.order = h.m.now.Add(h.m.cfg.VisibilityTimeout), h.m.order
		}
	}
}

func (h *machine) advance(t *rapid.T) {
	d := time.Duration(rapid.IntRange(1, 40_000).Draw(t, "ms")) * time.Millisecond
	if rapid.IntRange(0, 20).Draw(t, "long") == 0 {
		d = 11 * time.Minute
	}
	h.clock.Advance(d)
	h.m.advance(d)
}

func (h *machine) takeover(t *rapid.T) {
	c := h.consumer(t)
	if rapid.Bool().Draw(t, "leave") {
		if err := h.q.Leave(bg, c); err != nil {
			t.Fatal(err)
		}
		h.m.release(c.Name)
		return
	}
	c.Incarnation++
	if _, err := h.q.Renew(bg, sluice.RenewRequest{Consumer: c}); err != nil {
		t.Fatal(err)
	}
	h.m.incs[c.Name]++
	h.m.release(c.Name)
	// Renew does not serve anybody; whoever calls next opens the windows, in the model as well.
	old := c
	old.Incarnation--
	if _, err := h.q.Acquire(bg, sluice.AcquireRequest{Consumer: old}); !errors.Is(err, sluice.ErrStale) {
		t.Fatalf("the old incarnation: %v", err)
	}
}

func (h *machine) deadOps(t *rapid.T) {
	if len(h.m.dead) == 0 {
		t.Skip()
	}
	s := rapid.SampledFrom(h.m.dead).Draw(t, "dead")
	want := 1
	if rapid.Bool().Draw(t, "requeue") {
		if s.freed {
			want = 0
		} else {
			h.m.dead = remove(h.m.dead, s)
			s.fails, s.expiries = 0, 0
			h.m.push(s, "retry", false)
		}
		if n, err := h.q.Requeue(bg, s.id()); n != want || err != nil {
			t.Fatalf("requeue: %d, %v, want %d", n, err, want)
		}
	} else {
		h.m.dead = remove(h.m.dead, s)
		s.state, s.at = "dropped", h.m.now
		if n, err := h.q.Drop(bg, s.id()); n != 1 || err != nil {
			t.Fatalf("drop: %d, %v", n, err)
		}
	}
	h.m.openWindows()
}

func (h *machine) versions(t *rapid.T) {
	h.m.targets = rapid.SampledFrom([][]string{nil, {"0"}, {"1"}, {"0", "1"}}).Draw(t, "targets")
	h.m.minDraft = rapid.SampledFrom([]string{"", "", "0", "1", "2"}).Draw(t, "least draft")
	if err := h.q.SetVersions(bg, h.m.targets, h.m.minDraft); err != nil {
		t.Fatal(err)
	}
	h.m.openWindows()
}

func (h *machine) reshape(t *rapid.T) {
	m := h.m
	if !m.windowed() {
		t.Skip()
	}
	w := *m.cfg.Windows
	w.Ranks, w.PerRank = rapid.IntRange(1, 3).Draw(t, "ranks"), rapid.IntRange(1, 2).Draw(t, "per rank")
	err := h.q.Reshape(bg, w.Ranks, w.PerRank)
	if w == *m.cfg.Windows { // a repetition
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	if len(m.out()) > 0 {
		if !errors.Is(err, sluice.ErrConflict) {
			t.Fatalf("reshape with leases out: %v", err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, win := range slices.Backward(m.windows) {
		for _, sl := range slices.Backward(win.slots) {
			if sl.s != nil {
				sl.s.slot = nil
				m.push(sl.s, "returned", true)
			}
		}
		win.spare = nil
	}
	m.windows, m.cfg.Windows = nil, &w
	h.shape(&w)
	m.openWindows()
}

func (h *machine) close(t *rapid.T) {
	if rapid.IntRange(0, 5).Draw(t, "really") > 0 {
		t.Skip()
	}
	if err := h.q.Close(bg, nil); err != nil {
		t.Fatal(err)
	}
	h.m.close("")
	h.m.openWindows()
}

// check compares what can be seen from outside.
func (h *machine) check(t *rapid.T) {
	m := h.m
	s, err := h.q.Status(bg)
	if err != nil {
		t.Fatal(err)
	}
	count := map[string]int{}
	for _, x := range m.samples {
		count[x.state]++
	}
	pending := count["returned"] + count["fresh"] + count["retry"] + count["slotted"]
	if s.Pending != pending || s.Outstanding != count["leased"] || s.Dead != len(m.dead) || s.Acked != int64(count["acked"]) || s.Gated != int64(count["gated"]) ||
		s.TailDropped != int64(count["tail"]) || s.Dropped != int64(count["dropped"]) || s.Put != int64(len(m.samples)) {
		t.Fatalf("status %+v, want %v", s, count)
	}
	if s.Closed != m.closed || (s.Cause == "") != (m.cause == "") || !strings.Contains(s.Cause, m.cause) {
		t.Fatalf("closed %v with cause %q, want %v, %q", s.Closed, s.Cause, m.closed, m.cause)
	}
	if len(s.Producers) != len(m.producers) {
		t.Fatalf("producers %+v, want %d", s.Producers, len(m.producers))
	}
	for _, p := range s.Producers {
		if x := m.producers[p.Name]; x == nil || p.Incarnation != x.inc || p.State != x.state || p.Put != x.put {
			t.Fatalf("producer %+v, want %+v", p, x)
		}
	}
	// Nothing is lost: every put is in exactly one state, and the states that are live hold a claim.
	for _, x := range m.samples {
		owner, there := h.store.Owner(x.id())
		live := slices.Contains([]string{"returned", "fresh", "retry", "slotted", "leased"}, x.state) || x.state == "dead" && !x.freed
		for _, w := range m.windows {
			live = live || w.spare == x
		}
		live = live || m.padsOn(x)
		if live != (there && owner != "") {
			t.Fatalf("%s is %s (freed %v), but in the store: %v, owner %q", x.id(), x.state, x.freed, there, owner)
		}
	}
	live := map[*mSample]int{}
	for _, l := range m.out() {
		if !l.pad {
			live[l.s]++
		}
	}
	for x, n := range live {
		if n > 1 {
			t.Fatalf("%s has %d live leases", x.id(), n)
		}
	}
	if w := m.cfg.Windows; w != nil {
		if slices.Max(m.delivered)-slices.Min(m.delivered) > w.PerRank {
			t.Fatalf("delivered counts %v differ by more than a window's share of %d", m.delivered, w.PerRank)
		}
	}
	h.q.mu.Lock()
	h.q.tick()
	leases := map[sluice.LeaseID]int64{}
	for _, l := range h.q.expiry.all() {
		leases[l.id] = l.deadline
	}
	h.q.mu.Unlock()
	want := map[sluice.LeaseID]int64{}
	for _, l := range m.out() {
		want[l.id] = l.deadline.UnixNano()
	}
	if !maps.Equal(leases, want) {
		t.Fatalf("leases that are out: %d, want %d", len(leases), len(want))
	}
	if h.journal {
		h.compareReplay(t)
	}
}

// compareReplay opens what the journal holds and compares the states.
func (h *machine) compareReplay(t *rapid.T) {
	if tx, err := h.q.begin(); err != nil || h.q.end(tx) != nil {
		t.Fatal("the queue is not available")
	}
	h.q.settleJournal()
	h.q.mu.Lock()
	live := dump(h.q)
	h.q.mu.Unlock()
	h.j.mu.Lock()
	records := slices.Clone(h.j.records)
	h.j.mu.Unlock()
	cfg := h.m.cfg
	again, err := Open(bg, cfg, &blankStore{uri: h.store.URI(), h: h.store.Health()}, &Options{Clock: h.clock, Journal: &memJournal{records: records}, compactRecords: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	again.settleJournal()
	again.mu.Lock()
	replayed := dump(again)
	again.mu.Unlock()
	if err := again.Stop(bg); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(live, replayed); diff != "" {
		t.Fatalf("the replay differs (-live +replayed):\n%s", diff)
	}
}

// settleJournal waits until all that was written is durable.
func (q *Queue) settleJournal() {
	q.mu.Lock()
	lsn := q.lsn
	q.mu.Unlock()
	q.wait(lsn)
}

// dump is the state as text, without what a restart forgets on purpose: the count of stale calls and requests that came to nothing.
func dump(q *Queue) []string {
	for range 100 {
		q.requests.forget(q.now - int64(memory))
	}
	stale := q.count.Stale
	q.count.Stale = 0
	var out []string
	for _, r := range q.snapshot() {
		out = append(out, string(encode(r)))
	}
	q.count.Stale = stale
	return out
}

func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := newMachine(t)
		defer h.q.Stop(bg)
		t.Repeat(map[string]func(*rapid.T){
			"put": h.put, "put 2": h.put, "put 3": h.put, "put again": h.putAgain,
			"acquire": h.acquire, "acquire 2": h.acquire, "acquire 3": h.acquire,
			"settle": h.settle, "settle 2": h.settle, "settle 3": h.settle,
			"renew": h.renew, "advance": h.advance, "takeover": h.takeover, "report": h.report, "dead": h.deadOps, "versions": h.versions, "reshape": h.reshape, "close": h.close,
			"": h.check,
		})
	})
}
