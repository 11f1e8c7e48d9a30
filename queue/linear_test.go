package queue

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
)

// The spec is the contract's queue of a run without windows, one call at a time. A history of many goroutines is linearizable if some order of its calls, in
// which each stands between its beginning and its end, has the spec give every answer that the queue gave.
type spec struct {
	now        time.Duration // since the queue was opened
	closed     bool
	put, acked int
	consumers  [linearConsumers]specConsumer
	samples    []specSample
	lists      [3][]int // of samples that wait: returned, fresh, retry
	leases     []specLease
	out        []int // leases that are out, the first to run out first
	asked      []specRequest
}

const (
	linearConsumers  = 3
	linearSamples    = 24
	linearWorkers    = 8
	linearProducers  = 3 // of the workers: they alone put, since the order of puts that are in progress at once is what the checker has to guess, and never wait
	linearCalls      = 8 // a worker
	linearVisibility = 30 * time.Second
	linearBudget     = 2 // fails and expiries
)

type specConsumer struct {
	incarnation int64
	left        bool // once, in this incarnation
}

type specSample struct {
	state                       byte // 0 before its put; p(ending), l(eased), d(ead), g(one)
	fails, expiries, deliveries int
}

type specLease struct {
	id          sluice.LeaseID
	sample      int
	consumer    int
	incarnation int64
	deadline    time.Duration
	out, dead   bool
	as          sluice.Verdict // if it was settled
}

// specRequest says that an acquire with that id was given the lease.
type specRequest struct {
	consumer    int
	incarnation int64
	id          string
	lease       int
}

// call is what a worker asks.
type call struct {
	kind        string
	consumer    int
	incarnation int64
	sample      int
	other       bool // put: another generation than the sample's
	max         int
	wait        bool
	request     string
	settlements []sluice.Settlement
	all         bool // renew: all that it holds
	d           time.Duration
}

// reply is what it is told.
type reply struct {
	err      sluice.Kind // "" if none; "canceled" if a call was given up
	status   sluice.PutStatus
	delivery sluice.Delivery
	results  []sluice.SettleResult
	n        int
	counts   [5]int // pending, outstanding, dead, put, acked
	closed   bool
}

func newSpec() *spec {
	return &spec{samples: make([]specSample, linearSamples)}
}

func (s *spec) clone() *spec {
	c := *s
	c.samples, c.leases, c.out, c.asked = slices.Clone(s.samples), slices.Clone(s.leases), slices.Clone(s.out), slices.Clone(s.asked)
	for i := range c.lists {
		c.lists[i] = slices.Clone(s.lists[i])
	}
	return &c
}

func (s *spec) equal(o *spec) bool {
	same := s.now == o.now && s.closed == o.closed && s.consumers == o.consumers && s.put == o.put && s.acked == o.acked &&
		slices.Equal(s.samples, o.samples) && slices.Equal(s.leases, o.leases) && slices.Equal(s.out, o.out) && slices.Equal(s.asked, o.asked)
	for i := range s.lists {
		same = same && slices.Equal(s.lists[i], o.lists[i])
	}
	return same
}

var specSeed = maphash.MakeSeed()

func (s *spec) hash() uint64 {
	h := maphash.Comparable(specSeed, s.now)
	for _, list := range append(s.lists[:], s.out) {
		for _, n := range append(list, -1) {
			h = h*1099511628211 ^ uint64(n)
		}
	}
	for _, x := range s.samples {
		h = h*1099511628211 ^ uint64(x.state)
	}
	return h
}

func (s *spec) pending() int { return len(s.lists[0]) + len(s.lists[1]) + len(s.lists[2]) }

// end ends a lease; the verdict "" is that it ran out.
func (s *spec) end(i int, v sluice.Verdict) {
	l := &s.leases[i]
	x := &s.samples[l.sample]
	s.out = remove(s.out, i)
	l.out, l.as = false, v
	var spent bool
	switch v {
	case sluice.Ack:
		x.state = 'g'
		s.acked++
		return
	case sluice.Return:
		x.state = 'p'
		s.lists[0] = slices.Insert(s.lists[0], 0, l.sample)
		return
	case sluice.Fail:
		x.fails++
		spent = x.fails >= linearBudget
	case sluice.FailPermanent:
		x.fails++
		spent = true
	default:
		x.expiries++
		spent = x.expiries >= linearBudget
	}
	if spent {
		x.state, l.dead = 'd', true
		return
	}
	x.state = 'p'
	s.lists[2] = append(s.lists[2], l.sample)
}

// expire takes back what has run out.
func (s *spec) expire() (n int) {
	for len(s.out) > 0 && s.leases[s.out[0]].deadline <= s.now {
		s.end(s.out[0], "")
		n++
	}
	return n
}

// evict returns all that a consumer holds, in the order in which it was given.
func (s *spec) evict(consumer int) {
	for i, l := range slices.Backward(s.leases) {
		if l.out && l.consumer == consumer {
			s.end(i, sluice.Return)
			s.leases[i].as = "" // nobody settled it
		}
	}
}

// comes is a consumer's call; false if a newer incarnation has come.
func (s *spec) comes(c *call) bool {
	k := &s.consumers[c.consumer]
	switch {
	case c.incarnation < k.incarnation:
		return false
	case c.incarnation > k.incarnation:
		s.evict(c.consumer)
		*k = specConsumer{incarnation: c.incarnation}
	}
	return true
}

// held returns the leases of the consumer.
func (s *spec) held(consumer int) (held []int) {
	for i := range s.leases {
		if s.leases[i].out && s.leases[i].consumer == consumer {
			held = append(held, i)
		}
	}
	return held
}

// settle answers for one lease; as "" renews it.
func (s *spec) settle(c *call, id sluice.LeaseID, as sluice.Verdict) sluice.SettleResult {
	r := sluice.SettleResult{Lease: id, Status: sluice.StaleLease}
	i := slices.IndexFunc(s.leases, func(l specLease) bool { return l.id == id })
	if i < 0 || s.leases[i].consumer != c.consumer || s.leases[i].incarnation != c.incarnation {
		return r
	}
	l := &s.leases[i]
	switch {
	case l.out && as == "":
		r.Status = sluice.Renewed
		l.deadline = s.now + linearVisibility
		s.out = append(remove(s.out, i), i)
	case l.out:
		s.end(i, as)
		r.Status, r.As, r.Dead = sluice.Settled, as, l.dead
	case l.as != "":
		r.Status, r.As, r.Dead = sluice.AlreadySettled, l.as, l.dead
	}
	return r
}

// settleAll settles returns behind the others, the last delivered first, so that they stand at the head in the order in which they were delivered.
func (s *spec) settleAll(c *call) []sluice.SettleResult {
	results := make([]sluice.SettleResult, len(c.settlements))
	var backs []int
	for i, x := range c.settlements {
		if x.Verdict == sluice.Return {
			backs = append(backs, i)
		} else {
			results[i] = s.settle(c, x.Lease, x.Verdict)
		}
	}
	given := func(i int) int {
		return slices.IndexFunc(s.leases, func(l specLease) bool { return l.out && l.id == c.settlements[i].Lease })
	}
	slices.SortStableFunc(backs, func(a, b int) int { return given(b) - given(a) })
	for _, i := range backs {
		results[i] = s.settle(c, c.settlements[i].Lease, sluice.Return)
	}
	return results
}

// acquire reports whether the delivery is what the consumer must be given.
func (s *spec) acquire(c *call, d *sluice.Delivery) bool {
	repeated, given := false, d.Leases
	for _, a := range s.asked {
		if c.request == "" || a.id != c.request || a.consumer != c.consumer || a.incarnation != c.incarnation {
			continue
		}
		repeated = true
		if l := s.leases[a.lease]; l.out {
			if len(given) == 0 || given[0].ID != l.id || !s.describes(&given[0], l) {
				return false
			}
			given = given[1:]
		}
	}
	if repeated {
		return len(given) == 0 && !d.End
	}
	if want := min(c.max, s.pending()); len(given) != want {
		return false
	}
	if len(given) == 0 {
		ended := s.closed && (len(s.held(c.consumer)) > 0 || len(s.out) == 0)
		return d.End == ended && (d.End || !c.wait)
	}
	for i := range given {
		list := slices.IndexFunc(s.lists[:], func(l []int) bool { return len(l) > 0 })
		l := specLease{id: given[i].ID, sample: s.lists[list][0], consumer: c.consumer, incarnation: c.incarnation, deadline: s.now + linearVisibility, out: true}
		if slices.ContainsFunc(s.leases, func(o specLease) bool { return o.id == l.id }) {
			return false
		}
		x := &s.samples[l.sample]
		s.lists[list] = s.lists[list][1:]
		x.state = 'l'
		x.deliveries++
		s.out = append(s.out, len(s.leases))
		if c.request != "" {
			s.asked = append(s.asked, specRequest{c.consumer, c.incarnation, c.request, len(s.leases)})
		}
		s.leases = append(s.leases, l)
		if given[i].Redelivery != x.deliveries-1 || !s.describes(&given[i], l) {
			return false
		}
	}
	return true
}

// describes reports whether what the consumer was shown of a lease is right.
func (s *spec) describes(v *sluice.Lease, l specLease) bool {
	return v.Ref.SampleID() == fmt.Sprint("s", l.sample) && v.Deadline.Sub(linearStart) == l.deadline
}

// putOf is the answer to a put.
func (s *spec) putOf(c *call) (sluice.PutStatus, sluice.Kind) {
	x := &s.samples[c.sample]
	switch live := x.state != 0 && x.state != 'g'; {
	case live && c.other:
		return "", sluice.Duplicate
	case live:
		return sluice.AlreadyPut, ""
	case x.state == 'g' && !c.other:
		return sluice.WasSettled, ""
	case s.closed:
		return "", sluice.Closed
	case c.other:
		return "", sluice.NotFound
	}
	x.state = 'p'
	s.put++
	s.lists[1] = append(s.lists[1], c.sample)
	return sluice.Enqueued, ""
}

// step is one call: whether the spec may give the reply, and the state after it. It leaves s as it is.
func (s *spec) step(c *call, r *reply) (bool, *spec) {
	n := s.clone()
	switch c.kind {
	case "advance":
		n.now += c.d
		return true, n
	case "put":
		status, kind := n.putOf(c)
		return status == r.status && kind == r.err, n
	case "close":
		n.closed = true
		return r.err == "", n
	case "acquire":
		// A call that waits may be served in the very moment in which leases run out, before those are taken back, and a snapshot shows such a moment.
		switch {
		case r.err == "canceled":
			return c.wait, n
		case r.err == sluice.Stale && c.wait && n.consumers[c.consumer].left:
			return true, n // it waited when its consumer left
		case c.wait && r.err == "" && n.comes(c) && n.acquire(c, &r.delivery):
			return true, n
		}
		n = s.clone()
	case "status":
		if n.counts() == r.counts && n.closed == r.closed {
			return true, n
		}
		n.expire()
		return n.counts() == r.counts && n.closed == r.closed, n
	}
	due := n.expire()
	switch c.kind {
	case "acquire", "settle", "renew", "leave":
		if !n.comes(c) {
			return r.err == sluice.Stale, n
		}
	}
	if r.err != "" {
		return false, n
	}
	switch c.kind {
	case "acquire":
		return n.acquire(c, &r.delivery), n
	case "settle":
		return slices.Equal(n.settleAll(c), r.results), n
	case "renew":
		var want []sluice.SettleResult
		if c.all {
			for _, i := range n.held(c.consumer) {
				want = append(want, n.settle(c, n.leases[i].id, ""))
			}
		}
		for _, x := range c.settlements {
			want = append(want, n.settle(c, x.Lease, ""))
		}
		return slices.Equal(want, r.results), n
	case "leave":
		n.evict(c.consumer)
		n.consumers[c.consumer].left = true
		return true, n
	case "reclaim":
		return r.n <= due, n // the timer may have been faster with some
	}
	x := &n.samples[c.sample]
	want := 0
	if x.state == 'd' {
		want = 1
		x.state = 'g'
		if c.kind == "requeue" {
			*x = specSample{state: 'p', deliveries: x.deliveries}
			n.lists[2] = append(n.lists[2], c.sample)
		}
	}
	return r.n == want, n
}

func (s *spec) counts() [5]int {
	dead := 0
	for _, x := range s.samples {
		if x.state == 'd' {
			dead++
		}
	}
	return [5]int{s.pending(), len(s.out), dead, s.put, s.acked}
}

var linearModel = porcupine.Model{
	Init: func() any { return newSpec() },
	Step: func(state, in, out any) (bool, any) {
		ok, next := state.(*spec).step(in.(*call), out.(*reply))
		return ok, next
	},
	Equal: func(a, b any) bool { return a.(*spec).equal(b.(*spec)) },
	Hash:  func(s any) uint64 { return s.(*spec).hash() },
}

// leapClock advances at one stroke, so that to advance it is one operation of a history; what falls due then runs in goroutines of its own.
type leapClock struct {
	mu     sync.Mutex
	now    time.Time
	timers map[*leapTimer]bool
	fired  sync.WaitGroup
}

type leapTimer struct {
	at time.Time
	f  func()
}

var linearStart = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

func (c *leapClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *leapClock) AfterFunc(d time.Duration, f func()) func() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := &leapTimer{c.now.Add(d), f}
	c.timers[t] = true
	c.fire()
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		pending := c.timers[t]
		delete(c.timers, t)
		return pending
	}
}

func (c *leapClock) fire() {
	for t := range c.timers {
		if !t.at.After(c.now) {
			delete(c.timers, t)
			c.fired.Go(t.f)
		}
	}
}

func (c *leapClock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
	c.fire()
}

// historian lets workers loose on a queue and writes down what they ask and are told.
type historian struct {
	q     sluice.Queue
	clock *leapClock
	refs  [linearSamples]sluice.Ref
	other [linearSamples]sluice.Ref // the same ids in generations that are nowhere
	wait  context.Context           // of the calls that wait; ends when those workers are through that never wait

	tick atomic.Int64 // stamps
	next atomic.Int64 // sample that was not put yet
	incs [linearConsumers]atomic.Int64

	mu      sync.Mutex
	given   []sluice.Lease
	history []porcupine.Operation
}

// record has a fresh queue, seen through wrap, used by all workers at once, and returns the history.
func record(t *testing.T, seed uint64, wrap func(sluice.Queue) sluice.Queue) []porcupine.Operation {
	t.Helper()
	store := queuetest.NewStore(roomy)
	store.Fault = func(string, sluice.Ref) error { runtime.Gosched(); return nil } // it is asked outside the lock: let others in between
	h := &historian{clock: &leapClock{now: linearStart, timers: map[*leapTimer]bool{}}}
	for i := range h.refs {
		id := fmt.Sprint("s", i)
		h.refs[i], h.other[i] = queuetest.NewRef(store.URI(), "r1", id, 100, nil), queuetest.NewRef(store.URI(), "r1", id, 100, nil)
		if err := store.Add(h.refs[i], sluice.Reservation{}); err != nil {
			t.Fatal(err)
		}
	}
	opts := &Options{Clock: h.clock}
	if seed%3 == 0 {
		opts.Journal, opts.compactRecords = &memJournal{}, 20
	}
	q, err := Open(bg, sluice.RunConfig{RunID: "r1", Schema: queuetest.Schema(), Caps: roomy, VisibilityTimeout: linearVisibility, MaxFails: linearBudget, MaxExpiries: linearBudget}, store, opts)
	if err != nil {
		t.Fatal(err)
	}
	for i := range linearConsumers { // that a call makes a consumer known is a second effect of it
		if _, err := q.Renew(bg, sluice.RenewRequest{Consumer: sluice.Consumer{Name: fmt.Sprint("c", i)}}); err != nil {
			t.Fatal(err)
		}
	}
	h.q = q
	if wrap != nil {
		h.q = wrap(q)
	}
	var stop context.CancelFunc
	h.wait, stop = context.WithCancel(bg)
	var restless, all sync.WaitGroup
	for w := range linearWorkers {
		r := rand.New(rand.NewPCG(seed, uint64(w)))
		all.Add(1)
		if w < linearProducers {
			restless.Add(1)
		}
		go func() { // ends with its calls
			defer all.Done()
			if w < linearProducers {
				defer restless.Done()
			}
			for i := range linearCalls {
				h.ask(w, h.draw(r, w < linearProducers, i > linearCalls/2))
			}
		}()
	}
	restless.Wait()
	stop()
	all.Wait()
	if err := q.Stop(bg); err != nil {
		t.Fatal(err)
	}
	h.clock.fired.Wait()
	return h.history
}

// draw makes up a call.
func (h *historian) draw(r *rand.Rand, producer, late bool) *call {
	c := &call{consumer: r.IntN(linearConsumers), sample: r.IntN(linearSamples), max: 1 + r.IntN(3)}
	c.incarnation = h.incs[c.consumer].Load()
	if r.IntN(25) == 0 && c.incarnation > 0 {
		c.incarnation--
	}
	least := 30
	if producer {
		least = 0
	}
	switch n := least + r.IntN(100-least); {
	case n < 50 && producer:
		c.kind = "put"
		if next := h.next.Add(1) - 1; next < linearSamples && r.IntN(6) > 0 {
			c.sample = int(next)
		}
		c.other = r.IntN(12) == 0
	case n < 60:
		c.kind = "acquire"
		c.wait = !producer && r.IntN(3) == 0
		if r.IntN(3) == 0 { // one that does not wait may say "nothing yet" while the same request waits, whatever that is about to be given
			c.request = fmt.Sprintf("%v-%d", c.wait, r.IntN(3))
		}
	case n < 84:
		c.kind = "settle"
		h.leases(c, r, 1+r.IntN(3))
	case n < 87:
		c.kind = "renew"
		if c.all = r.IntN(2) == 0; !c.all {
			h.leases(c, r, 1+r.IntN(2))
		}
		if r.IntN(3) == 0 {
			c.incarnation++ // not with an acquire: it takes over, those who wait are served with what returns, and only then is it answered
		}
	case n < 90:
		c.kind, c.d = "advance", time.Duration(5+r.IntN(35))*time.Second // two or three a history: far from the ten minutes for which the queue remembers
	case n < 92:
		c.kind = "leave"
	case n < 94:
		c.kind = "requeue"
	case n < 95:
		c.kind = "drop"
	case n < 97:
		c.kind = "reclaim"
	case n < 99 || !late:
		c.kind = "status"
	default:
		c.kind = "close"
	}
	return c
}

// leases picks n of those that were given lately, as a rule for the consumer who has them.
func (h *historian) leases(c *call, r *rand.Rand, n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for range n {
		l := sluice.Lease{ID: sluice.LeaseID{1}} // never one
		if len(h.given) > 0 {
			l = h.given[max(0, len(h.given)-1-r.IntN(8))]
		}
		if len(c.settlements) == 0 && l.Consumer != "" && r.IntN(8) > 0 {
			c.consumer = int(l.Consumer[1] - '0')
			c.incarnation = h.incs[c.consumer].Load()
		}
		v := []sluice.Verdict{sluice.Ack, sluice.Ack, sluice.Fail, sluice.Fail, sluice.Return, sluice.Return, sluice.FailPermanent}[r.IntN(7)]
		c.settlements = append(c.settlements, sluice.Settlement{Lease: l.ID, Verdict: v})
	}
}

// ask makes the call and writes it down.
func (h *historian) ask(worker int, c *call) {
	r := &reply{}
	k := sluice.Consumer{Name: fmt.Sprint("c", c.consumer), Incarnation: c.incarnation}
	var err error
	op := porcupine.Operation{ClientId: worker, Input: c, Output: r, Call: h.tick.Add(1)}
	switch c.kind {
	case "put":
		ref := h.refs[c.sample]
		if c.other {
			ref = h.other[c.sample]
		}
		r.status, err = h.q.Put(bg, sluice.PutRequest{Ref: ref})
	case "acquire":
		ctx, wait := bg, time.Duration(0)
		if c.wait {
			ctx, wait = h.wait, -1
		}
		r.delivery, err = h.q.Acquire(ctx, sluice.AcquireRequest{Consumer: k, Max: c.max, Wait: wait, RequestID: c.request})
	case "settle":
		r.results, err = h.q.Settle(bg, sluice.SettleRequest{Consumer: k, Settlements: c.settlements})
	case "renew":
		var ids []sluice.LeaseID
		for _, x := range c.settlements {
			ids = append(ids, x.Lease)
		}
		r.results, err = h.q.Renew(bg, sluice.RenewRequest{Consumer: k, Leases: ids})
	case "leave":
		err = h.q.Leave(bg, k)
	case "advance":
		h.clock.advance(c.d)
	case "reclaim":
		r.n, err = h.q.ReclaimExpired(bg)
	case "requeue":
		r.n, err = h.q.Requeue(bg, fmt.Sprint("s", c.sample))
	case "drop":
		r.n, err = h.q.Drop(bg, fmt.Sprint("s", c.sample))
	case "status":
		var s sluice.Status
		s, err = h.q.Status(bg)
		r.counts, r.closed = [5]int{s.Pending, s.Outstanding, s.Dead, int(s.Put), int(s.Acked)}, s.Closed
	case "close":
		err = h.q.Close(bg, nil)
	}
	op.Return = h.tick.Add(1)
	if r.err = sluice.KindOf(err); errors.Is(err, context.Canceled) {
		r.err = "canceled"
	} else if err != nil && r.err == "" {
		r.err = "unknown"
	}
	if inc := &h.incs[c.consumer]; err == nil && c.incarnation > inc.Load() {
		inc.Store(c.incarnation) // from now on: a call that waits must find it there
	}
	h.mu.Lock()
	h.given = append(h.given, r.delivery.Leases...)
	h.history = append(h.history, op)
	h.mu.Unlock()
}

// overlaps counts the pairs of calls that were in progress at once.
func overlaps(history []porcupine.Operation) (n int) {
	for i, a := range history {
		for _, b := range history[:i] {
			if a.Call < b.Return && b.Call < a.Return {
				n++
			}
		}
	}
	return n
}

// show writes a history down to be read.
func show(history []porcupine.Operation) string {
	history = slices.Clone(history)
	slices.SortFunc(history, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	var b strings.Builder
	for _, op := range history {
		c, r := op.Input.(*call), op.Output.(*reply)
		fmt.Fprintf(&b, "%d-%d worker %d: %s c%d.%d", op.Call, op.Return, op.ClientId, c.kind, c.consumer, c.incarnation)
		switch c.kind {
		case "put", "requeue", "drop":
			fmt.Fprintf(&b, " s%d other=%v: %s n=%d", c.sample, c.other, r.status, r.n)
		case "acquire":
			fmt.Fprintf(&b, " max=%d wait=%v request=%q: end=%v", c.max, c.wait, c.request, r.delivery.End)
			for _, l := range r.delivery.Leases {
				fmt.Fprintf(&b, " %x=%s(%d, until %v)", l.ID[:2], l.Ref.SampleID(), l.Redelivery, l.Deadline.Sub(linearStart))
			}
		case "settle", "renew":
			for _, x := range c.settlements {
				fmt.Fprintf(&b, " %x %s", x.Lease[:2], x.Verdict)
			}
			for _, x := range r.results {
				fmt.Fprintf(&b, "; %x %s %s dead=%v", x.Lease[:2], x.Status, x.As, x.Dead)
			}
		case "advance":
			fmt.Fprintf(&b, " %v", c.d)
		default:
			fmt.Fprintf(&b, ": n=%d %v closed=%v", r.n, r.counts, r.closed)
		}
		fmt.Fprintf(&b, " %s\n", r.err)
	}
	return b.String()
}

// linearizable checks a history. Not to know within the time is a failure: nothing was checked then.
func linearizable(t *testing.T, history []porcupine.Operation) bool {
	t.Helper()
	switch porcupine.CheckOperationsTimeout(linearModel, history, 30*time.Second) {
	case porcupine.Ok:
		return true
	case porcupine.Illegal:
		return false
	}
	t.Fatalf("the checker did not come to an end in time over\n%s", show(history))
	return false
}

func TestHistoriesAreLinearizable(t *testing.T) {
	const histories = 500
	first := rand.Uint64N(1 << 40)
	calls, pairs := 0, 0
	kinds := map[string]int{}
	for i := range histories {
		history := record(t, first+uint64(i), nil)
		if !linearizable(t, history) {
			t.Fatalf("no order of these calls explains their answers:\n%s", show(history))
		}
		calls += len(history)
		pairs += overlaps(history)
		for _, op := range history {
			r := op.Output.(*reply)
			kinds[op.Input.(*call).kind+" "+string(r.err)]++
			for _, x := range r.results {
				kinds[string(x.Status)]++
			}
			for _, l := range r.delivery.Leases {
				kinds[fmt.Sprint("redelivery ", l.Redelivery > 0)]++
			}
			if r.delivery.End {
				kinds["end"]++
			}
		}
	}
	t.Logf("%d histories, %d calls, %d pairs of them at once; %v", histories, calls, pairs, kinds)
	if pairs < calls/4 {
		t.Errorf("only %d pairs of %d calls were in progress at once: this was no test of concurrency", pairs, calls)
	}
	for _, want := range []string{"put closed", "put duplicate", "put not_found", "acquire stale", "acquire canceled", "settle stale", "settled", "already_settled", "stale", "renewed", "redelivery true", "end"} {
		if kinds[want] == 0 {
			t.Errorf("%q never happened in %d histories", want, histories)
		}
	}
}

// A checker that accepts everything would accept the queue as well: each of these queues has one fault, and must be found out.
func TestFaultyQueuesAreNotLinearizable(t *testing.T) {
	var late sync.WaitGroup
	defer late.Wait()
	for name, wrap := range map[string]func(sluice.Queue) sluice.Queue{
		"settles twice": func(q sluice.Queue) sluice.Queue {
			return faulty{Queue: q, settle: func(c context.Context, r sluice.SettleRequest) ([]sluice.SettleResult, error) {
				results, err := q.Settle(c, r)
				for i := range results {
					if results[i].Status == sluice.AlreadySettled {
						results[i].Status = sluice.Settled
					}
				}
				return results, err
			}}
		},
		"puts what was failed at the head": func(q sluice.Queue) sluice.Queue {
			return faulty{Queue: q, settle: func(c context.Context, r sluice.SettleRequest) ([]sluice.SettleResult, error) {
				asked := r.Settlements
				r.Settlements = slices.Clone(asked)
				for i := range asked {
					if asked[i].Verdict == sluice.Fail {
						r.Settlements[i].Verdict = sluice.Return
					}
				}
				results, err := q.Settle(c, r)
				for i := range results {
					if results[i].Status == sluice.Settled {
						results[i].As = asked[i].Verdict
					}
				}
				return results, err
			}}
		},
		"changes the order of deliveries": func(q sluice.Queue) sluice.Queue {
			return faulty{Queue: q, acquire: func(c context.Context, r sluice.AcquireRequest) (sluice.Delivery, error) {
				d, err := q.Acquire(c, r)
				slices.Reverse(d.Leases)
				return d, err
			}}
		},
		"has nothing yet although it has": func(q sluice.Queue) sluice.Queue {
			var n atomic.Int64
			return faulty{Queue: q, acquire: func(c context.Context, r sluice.AcquireRequest) (sluice.Delivery, error) {
				if r.Wait == 0 && n.Add(1)%8 == 0 {
					return sluice.Delivery{}, nil
				}
				return q.Acquire(c, r)
			}}
		},
		"delivers to two at once": func(q sluice.Queue) sluice.Queue {
			var mu sync.Mutex
			var last sluice.Delivery
			return faulty{Queue: q, acquire: func(c context.Context, r sluice.AcquireRequest) (sluice.Delivery, error) {
				mu.Lock()
				d := last
				last = sluice.Delivery{}
				mu.Unlock()
				if len(d.Leases) > 0 {
					return d, nil
				}
				d, err := q.Acquire(c, r)
				mu.Lock()
				last = d
				mu.Unlock()
				return d, err
			}}
		},
		"ends while others hold leases": func(q sluice.Queue) sluice.Queue {
			return faulty{Queue: q, acquire: func(c context.Context, r sluice.AcquireRequest) (sluice.Delivery, error) {
				d, err := q.Acquire(c, r)
				if s, e := q.Status(c); err == nil && e == nil && len(d.Leases) == 0 && s.Closed {
					d.End = true
				}
				return d, err
			}}
		},
		"loses a put": func(q sluice.Queue) sluice.Queue {
			var n atomic.Int64
			return faulty{Queue: q, put: func(c context.Context, r sluice.PutRequest) (sluice.PutStatus, error) {
				if n.Add(1) == 8 {
					return sluice.Enqueued, nil
				}
				return q.Put(c, r)
			}}
		},
		"answers a close before it is done": func(q sluice.Queue) sluice.Queue {
			return faulty{Queue: q, close: func(c context.Context, cause error) error {
				late.Go(func() { _ = q.Close(c, cause) })
				return nil
			}}
		},
		"reads its status in two halves": func(q sluice.Queue) sluice.Queue {
			return faulty{Queue: q, status: func(c context.Context) (sluice.Status, error) {
				s, err := q.Status(c)
				for range 20 {
					runtime.Gosched()
				}
				if later, e := q.Status(c); e == nil {
					s.Pending = later.Pending
				}
				return s, err
			}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(400) {
				if !linearizable(t, record(t, seed, wrap)) {
					t.Logf("found out by history %d", seed)
					return
				}
			}
			t.Error("was not found out")
		})
	}
}

// faulty is a queue of which some methods are others.
type faulty struct {
	sluice.Queue
	put     func(context.Context, sluice.PutRequest) (sluice.PutStatus, error)
	acquire func(context.Context, sluice.AcquireRequest) (sluice.Delivery, error)
	settle  func(context.Context, sluice.SettleRequest) ([]sluice.SettleResult, error)
	status  func(context.Context) (sluice.Status, error)
	close   func(context.Context, error) error
}

func (q faulty) Put(c context.Context, r sluice.PutRequest) (sluice.PutStatus, error) {
	if q.put != nil {
		return q.put(c, r)
	}
	return q.Queue.Put(c, r)
}

func (q faulty) Acquire(c context.Context, r sluice.AcquireRequest) (sluice.Delivery, error) {
	if q.acquire != nil {
		return q.acquire(c, r)
	}
	return q.Queue.Acquire(c, r)
}

func (q faulty) Settle(c context.Context, r sluice.SettleRequest) ([]sluice.SettleResult, error) {
	if q.settle != nil {
		return q.settle(c, r)
	}
	return q.Queue.Settle(c, r)
}

func (q faulty) Status(c context.Context) (sluice.Status, error) {
	if q.status != nil {
		return q.status(c)
	}
	return q.Queue.Status(c)
}

func (q faulty) Close(c context.Context, cause error) error {
	if q.close != nil {
		return q.close(c, cause)
	}
	return q.Queue.Close(c, cause)
}
