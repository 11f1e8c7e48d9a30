// Package queuetest is the conformance suite for sluice.Queue: what any implementation, in process or behind a network, must do. It also has the fakes that tests
// of a queue need: a store that counts, a clock that stands still, refs.
package queuetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/sluice-ml/sluice"
)

// Harness opens the queue under test, by one of its two functions.
type Harness struct {
	// Open returns a new, empty queue for the run over the store, going by the clock. It ends with the test.
	Open func(t *testing.T, cfg sluice.RunConfig, store *Store, clock *Clock) sluice.Queue

	// OpenBoth is for a queue that comes with its store, as that of a service does: it returns both, new and empty.
	OpenBoth func(t *testing.T, cfg sluice.RunConfig, clock *Clock) (sluice.Queue, Samples)
}

// Samples is what the suite asks of the store behind the queue. [Store] is one.
type Samples interface {
	URI() string
	// Add enters a sample by its ref, whatever its tensors hold.
	Add(ref sluice.Ref, r sluice.Reservation) error
	// Owner returns who claims the sample, and whether it is there at all.
	Owner(id string) (owner string, ok bool)
	Get(ctx context.Context, ref sluice.Ref) (*sluice.Tensors, error)
	Abort(ctx context.Context, ref sluice.Ref) error
	Health() sluice.Health
}

// patience bounds how long the suite waits in real time for something that must come at once.
const patience = 10 * time.Second

// bench is a queue under test with what it needs.
type bench struct {
	t     *testing.T
	ctx   context.Context
	store Samples
	clock *Clock
	q     sluice.Queue
	n     int
	refs  map[string]sluice.Ref
}

// Run runs the suite.
func Run(t *testing.T, h Harness) {
	claims := []struct {
		name  string
		edit  func(*sluice.RunConfig)
		check func(*bench)
	}{
		{"first deliveries come in put order", nil, putOrder},
		{"a failed sample goes behind those that wait for their first try", nil, failedGoesBehind},
		{"returned samples stand at the head in the order in which they were delivered", nil, returnedToHead},
		{"a put wakes a waiting acquire at once", nil, putWakes},
		{"a fail wakes a waiting acquire at once", nil, failWakes},
		{"waiting consumers are served in line", nil, waitersInLine},
		{"a wait that is over answers nothing yet", nil, waitEnds},
		{"a cancelled acquire loses no sample", nil, cancelledAcquire},
		{"an ack frees the sample and says already settled the second time", nil, ackTwice},
		{"settling with the lease of another consumer is stale", nil, foreignSettle},
		{"a lease that ran out is stale and its sample comes again", nil, expiry},
		{"renewal gives the full time again", nil, renewal},
		{"one stale settlement keeps no other from being settled", nil, mixedSettle},
		{"a repeated put is already, another generation is a duplicate, a settled one stays settled", nil, putAgain},
		{"refs of another run, store or schema are refused", nil, foreignRefs},
		{"a ref without a sample is not found and leaves nothing", nil, refWithoutSample},
		{"a repeated acquire gets the same leases", nil, acquireAgain},
		{"a repeated settle gets the same results", nil, settleAgain},
		{"a repeated reserve gets the same reservation", nil, reserveAgain},
		{"the fifth fail makes a dead letter that keeps its reasons", nil, fifthFail},
		{"a permanent fail is dead at once; requeue and drop", nil, permanentFail},
		{"the twentieth expiry makes a dead letter", nil, twentiethExpiry},
		{"reasons are cut and cleaned", nil, reasonsClean},
		{"dead letters hold at most a tenth of the cap", func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 3000} }, deadShare},
		{"a closed queue refuses puts and drains", nil, closedDrains},
		{"the end comes at once for a holder, and for others when nobody holds", nil, endRules},
		{"the cause comes behind the drain", nil, causeBehindDrain},
		{"the queue closes when all producers are done", func(c *sluice.RunConfig) { c.Producers = 2 }, producersDone},
		{"a producer that failed closes the queue with its cause", nil, producerFailed},
		{"a silent producer is lost, unless a successor comes", nil, producerLost},
		{"a newer incarnation of a consumer takes over", nil, takeover},
		{"a takeover by any call wakes those who wait", nil, takeoverWakes},
		{"leaving returns the leases", nil, leave},
		{"all members of a replica group get the same leases", nil, replicaGroup},
		{"a fail by one member fails the lease", nil, replicaFail},
		{"the end of a group comes when all its members have settled", nil, replicaEnd},
		{"positions are kept as ranges", nil, positions},
		{"version gates drop and free at put", func(c *sluice.RunConfig) { c.TargetVersions, c.MinDraftVersion = []string{"0"}, "3" }, gates},
		{"windows deal equal shares", twoRanks(2, 0, false), equalShares},
		{"no rank is a window ahead of another", twoRanks(1, 3, false), barrier},
		{"redelivery stays in the share of its rank", twoRanks(1, 0, false), sameRank},
		{"a dead slot is padded", twoRanks(1, 0, false), deadSlot},
		{"the tail is padded", twoRanks(2, 0, false), tailPadded},
		{"or dropped", twoRanks(2, 0, true), tailDropped},
		{"reshape waits for leases", twoRanks(1, 0, false), reshape},
		{"a rank that a reshape took away is refused", twoRanks(1, 0, false), reshapedAway},
		{"put_blocks_until_below waits at the gate, but not while consumers starve", func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 1000} }, putBlocks},
		{"a reservation waits for room and is granted when it comes", func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 1000} }, reserveWaits},
		{"a producer that was superseded gets no reservation", func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 1000} }, reserveSuperseded},
		{"status counts", nil, status},
	}
	for _, c := range claims {
		t.Run(strings.ReplaceAll(c.name, " ", "_"), func(t *testing.T) {
			t.Parallel()
			cfg := sluice.RunConfig{RunID: "r1", Schema: Schema(), Caps: sluice.Caps{MaxBytes: 1 << 30}}
			if c.edit != nil {
				c.edit(&cfg)
			}
			b := &bench{t: t, ctx: context.Background(), clock: NewClock(), refs: map[string]sluice.Ref{}}
			if h.OpenBoth != nil {
				b.q, b.store = h.OpenBoth(t, cfg, b.clock)
			} else {
				store := NewStore(cfg.Caps)
				b.q, b.store = h.Open(t, cfg, store, b.clock), store
			}
			c.check(b)
		})
	}
}

func twoRanks(perRank, prefetch int, dropTail bool) func(*sluice.RunConfig) {
	return func(c *sluice.RunConfig) {
		c.LargestSample = 1000
		c.Windows = &sluice.Windows{Ranks: 2, PerRank: perRank, Prefetch: prefetch, DropTail: dropTail}
	}
}

var (
	ann = sluice.Consumer{Name: "ann"}
	bob = sluice.Consumer{Name: "bob"}
)

func rank(r int) sluice.Consumer { return sluice.Consumer{Name: fmt.Sprint("rank", r), Rank: r} }

func (b *bench) ref(id string) sluice.Ref {
	ref := NewRef(b.store.URI(), "r1", id, 100, nil)
	b.add(ref)
	return ref
}

func (b *bench) add(ref sluice.Ref) {
	b.t.Helper()
	if err := b.store.Add(ref, sluice.Reservation{}); err != nil {
		b.t.Fatal(err)
	}
	b.refs[ref.SampleID()] = ref
}

// put puts n samples s0, s1, ...
func (b *bench) put(n int) {
	b.t.Helper()
	for range n {
		b.want(sluice.Enqueued)(b.q.Put(b.ctx, sluice.PutRequest{Ref: b.ref(fmt.Sprint("s", b.n))}))
		b.n++
	}
}

func (b *bench) want(want sluice.PutStatus) func(sluice.PutStatus, error) {
	b.t.Helper()
	return func(got sluice.PutStatus, err error) {
		b.t.Helper()
		if err != nil || got != want {
			b.t.Fatalf("put: %q, %v, want %q", got, err, want)
		}
	}
}

func (b *bench) fails(err error, want error) {
	b.t.Helper()
	if !errors.Is(err, want) {
		b.t.Fatalf("got %v, want %v", err, want)
	}
}

// refused is fails for those who want to read the reason too.
func (b *bench) refused(err error, want error, reasons ...string) {
	b.t.Helper()
	b.fails(err, want)
	for _, r := range reasons {
		if !strings.Contains(err.Error(), r) {
			b.t.Errorf("%q does not say %q", err, r)
		}
	}
}

func (b *bench) ok(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) acquire(c sluice.Consumer, n int) []sluice.Lease {
	b.t.Helper()
	d, err := b.q.Acquire(b.ctx, sluice.AcquireRequest{Consumer: c, Max: n})
	b.ok(err)
	if d.End {
		b.t.Fatal("the end, want leases or nothing yet")
	}
	return d.Leases
}

// leased is acquire for those who know what must come.
func (b *bench) leased(c sluice.Consumer, n int, want ...string) []sluice.Lease {
	b.t.Helper()
	ls := b.acquire(c, n)
	if got := names(ls); !slices.Equal(got, want) {
		b.t.Fatalf("%s was given %v, want %v", c.Name, got, want)
	}
	return ls
}

func names(ls []sluice.Lease) []string {
	var s []string
	for _, l := range ls {
		s = append(s, l.Ref.SampleID())
	}
	return s
}

func (b *bench) end(c sluice.Consumer) sluice.Delivery {
	b.t.Helper()
	d, err := b.q.Acquire(b.ctx, sluice.AcquireRequest{Consumer: c})
	b.ok(err)
	if !d.End {
		b.t.Fatalf("%s got %v, want the end", c.Name, names(d.Leases))
	}
	return d
}

func (b *bench) settle(c sluice.Consumer, v sluice.Verdict, ls ...sluice.Lease) []sluice.SettleResult {
	b.t.Helper()
	r := sluice.SettleRequest{Consumer: c}
	for _, l := range ls {
		r.Settlements = append(r.Settlements, sluice.Settlement{Lease: l.ID, Verdict: v, Reason: "because"})
	}
	res, err := b.q.Settle(b.ctx, r)
	b.ok(err)
	return res
}

func (b *bench) settled(c sluice.Consumer, v sluice.Verdict, ls ...sluice.Lease) {
	b.t.Helper()
	for _, r := range b.settle(c, v, ls...) {
		if r.Status != sluice.Settled || r.As != v {
			b.t.Fatalf("settled as %+v, want %s", r, v)
		}
	}
}

func (b *bench) status() sluice.Status {
	b.t.Helper()
	s, err := b.q.Status(b.ctx)
	b.ok(err)
	return s
}

type answer struct {
	d   sluice.Delivery
	err error
}

// waiting starts an acquire that waits and returns when the queue knows of it.
func (b *bench) waiting(ctx context.Context, c sluice.Consumer, wait time.Duration) <-chan answer {
	b.t.Helper()
	before := b.status().ConsumersWaiting
	ch := make(chan answer, 1)
	go func() {
		d, err := b.q.Acquire(ctx, sluice.AcquireRequest{Consumer: c, Wait: wait})
		ch <- answer{d, err}
	}()
	b.until(func() bool { return b.status().ConsumersWaiting > before || len(ch) > 0 })
	return ch
}

func (b *bench) until(f func() bool) {
	b.t.Helper()
	for deadline := time.Now().Add(patience); !f(); {
		if time.Now().After(deadline) {
			b.t.Fatal("it does not come")
		}
		time.Sleep(time.Millisecond)
	}
}

func (b *bench) got(ch <-chan answer) answer {
	b.t.Helper()
	select {
	case a := <-ch:
		return a
	case <-time.After(patience):
		b.t.Fatal("the waiting acquire was not woken")
		panic("unreachable")
	}
}

func (b *bench) woken(ch <-chan answer, want ...string) []sluice.Lease {
	b.t.Helper()
	a := b.got(ch)
	if got := names(a.d.Leases); a.err != nil || !slices.Equal(got, want) {
		b.t.Fatalf("woken with %v, %v, want %v", got, a.err, want)
	}
	return a.d.Leases
}

func putOrder(b *bench) {
	b.put(5)
	b.leased(ann, 2, "s0", "s1")
	b.leased(bob, 1, "s2")
	b.put(1)
	b.leased(ann, 10, "s3", "s4", "s5")
	b.leased(bob, 1)
}

func failedGoesBehind(b *bench) {
	b.put(3)
	ls := b.leased(ann, 1, "s0")
	b.settled(ann, sluice.Fail, ls...)
	b.put(1)
	ls = b.leased(ann, 4, "s1", "s2", "s3", "s0")
	if ls[0].Redelivery != 0 || ls[3].Redelivery != 1 {
		b.t.Errorf("redeliveries are %d and %d, want 0 and 1", ls[0].Redelivery, ls[3].Redelivery)
	}
}

func returnedToHead(b *bench) {
	b.put(4)
	ls := b.leased(ann, 3, "s0", "s1", "s2")
	b.settled(ann, sluice.Return, ls[1], ls[0])
	b.leased(bob, 3, "s0", "s1", "s3")
	if s := b.status(); s.Returned != 2 || s.Failed != 0 {
		b.t.Errorf("status %+v", s)
	}
}

func putWakes(b *bench) {
	ch := b.waiting(b.ctx, ann, -1)
	b.put(1)
	b.woken(ch, "s0")
}

func failWakes(b *bench) {
	b.put(1)
	ls := b.leased(ann, 1, "s0")
	ch := b.waiting(b.ctx, bob, -1)
	b.settled(ann, sluice.Fail, ls...)
	b.woken(ch, "s0")
}

func waitersInLine(b *bench) {
	first := b.waiting(b.ctx, ann, -1)
	second := b.waiting(b.ctx, bob, -1)
	third := b.waiting(b.ctx, ann, -1)
	b.put(1)
	b.woken(first, "s0")
	if len(second)+len(third) > 0 {
		b.t.Error("one put woke more than one")
	}
	b.put(2)
	b.woken(second, "s1")
	b.woken(third, "s2")
}

func waitEnds(b *bench) {
	ch := b.waiting(b.ctx, ann, time.Second)
	b.clock.Advance(time.Second)
	if a := b.got(ch); a.err != nil || a.d.End || len(a.d.Leases) > 0 {
		b.t.Errorf("got %+v, want nothing yet", a)
	}
}

func cancelledAcquire(b *bench) {
	ctx, cancel := context.WithCancel(b.ctx)
	ch := b.waiting(ctx, ann, -1)
	cancel()
	a := b.got(ch)
	b.fails(a.err, context.Canceled)
	b.until(func() bool { return b.status().ConsumersWaiting == 0 })
	b.put(1)
	b.leased(bob, 1, "s0")
}

func ackTwice(b *bench) {
	b.put(1)
	ls := b.leased(ann, 1, "s0")
	if owner, ok := b.store.Owner("s0"); !ok || owner == "" {
		b.t.Error("the leased sample is not claimed")
	}
	b.settled(ann, sluice.Ack, ls...)
	if _, ok := b.store.Owner("s0"); ok {
		b.t.Error("the acked sample was not freed")
	}
	if r := b.settle(ann, sluice.Fail, ls...)[0]; r.Status != sluice.AlreadySettled || r.As != sluice.Ack {
		b.t.Errorf("the second time: %+v", r)
	}
	b.leased(ann, 1)
}

func foreignSettle(b *bench) {
	b.put(2)
	ls := b.leased(ann, 1, "s0")
	b.leased(bob, 1, "s1")
	if r := b.settle(bob, sluice.Ack, ls...)[0]; r.Status != sluice.StaleLease {
		b.t.Errorf("got %+v, want stale", r)
	}
	if r := b.settle(ann, sluice.Ack, sluice.Lease{ID: sluice.NewLeaseID()})[0]; r.Status != sluice.StaleLease {
		b.t.Errorf("a forged lease: %+v, want stale", r)
	}
	b.settled(ann, sluice.Ack, ls...)
}

func expiry(b *bench) {
	b.put(2)
	ls := b.leased(ann, 1, "s0")
	if ls[0].TimeLeft != 30*time.Second {
		b.t.Errorf("time left is %v", ls[0].TimeLeft)
	}
	b.clock.Advance(30*time.Second - 1)
	b.leased(bob, 1, "s1")
	ch := b.waiting(b.ctx, bob, -1)
	b.clock.Advance(1)
	again := b.woken(ch, "s0")
	if again[0].Redelivery != 1 || again[0].ID == ls[0].ID {
		b.t.Errorf("got %+v, want a new lease with redelivery 1", again[0])
	}
	if r := b.settle(ann, sluice.Ack, ls...)[0]; r.Status != sluice.StaleLease {
		b.t.Errorf("the late ack: %+v, want stale", r)
	}
	b.settled(bob, sluice.Ack, again...)
}

func renewal(b *bench) {
	b.put(2)
	ls := b.leased(ann, 2, "s0", "s1")
	b.clock.Advance(20 * time.Second)
	res, err := b.q.Renew(b.ctx, sluice.RenewRequest{Consumer: ann, Leases: []sluice.LeaseID{ls[0].ID, sluice.NewLeaseID()}})
	b.ok(err)
	if res[0].Status != sluice.Renewed || res[1].Status != sluice.StaleLease {
		b.t.Errorf("got %+v", res)
	}
	b.clock.Advance(20 * time.Second)
	b.leased(bob, 2, "s1")
	b.settled(ann, sluice.Ack, ls[0])
	res, err = b.q.Renew(b.ctx, sluice.RenewRequest{Consumer: bob})
	b.ok(err)
	if len(res) != 1 || res[0].Status != sluice.Renewed {
		b.t.Errorf("renewing all: %+v", res)
	}
}

func mixedSettle(b *bench) {
	b.put(2)
	ls := b.leased(ann, 2, "s0", "s1")
	b.settled(ann, sluice.Ack, ls[0])
	res := b.settle(ann, sluice.Ack, ls[0], sluice.Lease{ID: sluice.NewLeaseID()}, ls[1])
	if res[0].Status != sluice.AlreadySettled || res[1].Status != sluice.StaleLease || res[2].Status != sluice.Settled {
		b.t.Errorf("got %+v", res)
	}
}

func putAgain(b *bench) {
	b.put(1)
	ref := b.refs["s0"]
	again := func(want sluice.PutStatus) {
		b.t.Helper()
		b.want(want)(b.q.Put(b.ctx, sluice.PutRequest{Ref: ref}))
	}
	again(sluice.AlreadyPut)
	other := NewRef(b.store.URI(), "r1", "s0", 100, nil)
	_, err := b.q.Put(b.ctx, sluice.PutRequest{Ref: other})
	b.refused(err, sluice.ErrDuplicate, `"s0"`, "is here in generation "+ref.Generation(), "not "+other.Generation())
	ls := b.leased(ann, 1, "s0")
	again(sluice.AlreadyPut)
	b.settled(ann, sluice.Ack, ls...)
	again(sluice.WasSettled)
	b.add(other)
	b.want(sluice.Enqueued)(b.q.Put(b.ctx, sluice.PutRequest{Ref: other}))
	_, err = b.q.Put(b.ctx, sluice.PutRequest{Ref: ref})
	if got, _ := b.q.Put(b.ctx, sluice.PutRequest{Ref: ref}); got != sluice.WasSettled {
		b.t.Errorf("the settled generation: %q, %v, want settled", got, err)
	}
	b.clock.Advance(11 * time.Minute)
	_, err = b.q.Put(b.ctx, sluice.PutRequest{Ref: ref})
	if !errors.Is(err, sluice.ErrDuplicate) && !errors.Is(err, sluice.ErrNotFound) {
		b.t.Errorf("after eleven minutes: %v", err)
	}
	b.ok(b.q.Close(b.ctx, nil))
	b.want(sluice.AlreadyPut)(b.q.Put(b.ctx, sluice.PutRequest{Ref: other}))
}

func foreignRefs(b *bench) {
	put := func(run, store string, edit func(*sluice.RefFields), want error, reasons ...string) {
		b.t.Helper()
		_, err := b.q.Put(b.ctx, sluice.PutRequest{Ref: NewRef(store, run, "guest", 1, edit)})
		b.refused(err, want, append(reasons, `"guest"`)...)
	}
	put("r2", b.store.URI(), nil, sluice.ErrInvalid, `made for run "r2"`, `the queue of "r1"`)
	put("r1", "mem:elsewhere", nil, sluice.ErrInvalid, `in the store "mem:elsewhere"`, fmt.Sprintf("store is %q", b.store.URI()))
	schema := func(edit func(*sluice.RefFields), reasons ...string) {
		b.t.Helper()
		put("r1", b.store.URI(), edit, sluice.ErrSchema, reasons...)
	}
	schema(func(f *sluice.RefFields) { f.SchemaVersion = 2 }, "of bytes version 2", "want bytes version 1")
	schema(func(f *sluice.RefFields) { f.Algorithm = "bits" }, "of bits version 1", "want bytes version 1")
	schema(func(f *sluice.RefFields) { f.Features[0].DType = sluice.UInt8 }, `feature "x" is uint8`, "want one of [bool]")
	schema(func(f *sluice.RefFields) { f.Features[0].Name = "y" }, `lacks the required feature "x"`)
	_, err := b.q.Put(b.ctx, sluice.PutRequest{})
	b.refused(err, sluice.ErrInvalid, "the ref is empty")
	if s := b.status(); s.Put != 0 || s.Pending != 0 {
		b.t.Errorf("a refused put left %+v", s)
	}
}

func refWithoutSample(b *bench) {
	ref := NewRef(b.store.URI(), "r1", "ghost", 1, nil)
	_, err := b.q.Put(b.ctx, sluice.PutRequest{Ref: ref})
	b.fails(err, sluice.ErrNotFound)
	if s := b.status(); s.Put != 0 || s.Pending != 0 {
		b.t.Errorf("a refused put left %+v", s)
	}
	b.add(ref)
	b.want(sluice.Enqueued)(b.q.Put(b.ctx, sluice.PutRequest{Ref: ref}))
}

func acquireAgain(b *bench) {
	b.put(4)
	r := sluice.AcquireRequest{Consumer: ann, Max: 2, RequestID: "a1"}
	first, err := b.q.Acquire(b.ctx, r)
	b.ok(err)
	again, err := b.q.Acquire(b.ctx, r)
	b.ok(err)
	if !slices.Equal(names(again.Leases), []string{"s0", "s1"}) || again.Leases[0].ID != first.Leases[0].ID {
		b.t.Fatalf("the repetition got %v", names(again.Leases))
	}
	b.settled(ann, sluice.Ack, first.Leases[0])
	again, err = b.q.Acquire(b.ctx, r)
	b.ok(err)
	if !slices.Equal(names(again.Leases), []string{"s1"}) {
		b.t.Errorf("after an ack the repetition got %v, want s1", names(again.Leases))
	}
	b.leased(ann, 1, "s2")
	r.Consumer = bob // an id belongs to who brought it
	other, err := b.q.Acquire(b.ctx, r)
	b.ok(err)
	if !slices.Equal(names(other.Leases), []string{"s3"}) {
		b.t.Errorf("another consumer with the same id got %v", names(other.Leases))
	}
}

func settleAgain(b *bench) {
	b.put(1)
	ls := b.leased(ann, 1, "s0")
	r := sluice.SettleRequest{Consumer: ann, RequestID: "x1", Settlements: []sluice.Settlement{{Lease: ls[0].ID, Verdict: sluice.Ack}}}
	for range 2 {
		res, err := b.q.Settle(b.ctx, r)
		b.ok(err)
		if res[0].Status != sluice.Settled {
			b.t.Errorf("got %+v", res)
		}
	}
	b.clock.Advance(9 * time.Minute)
	res, err := b.q.Settle(b.ctx, r)
	b.ok(err)
	if res[0].Status != sluice.Settled {
		b.t.Errorf("after nine minutes: %+v", res)
	}
	b.clock.Advance(2 * time.Minute)
	res, err = b.q.Settle(b.ctx, r)
	b.ok(err)
	if res[0].Status != sluice.StaleLease {
		b.t.Errorf("after eleven minutes: %+v", res)
	}
}

func reserveAgain(b *bench) {
	r := sluice.ReserveRequest{Producer: sluice.Producer{Name: "p"}, Bytes: 100, RequestID: "r1"}
	first, err := b.q.Reserve(b.ctx, r)
	b.ok(err)
	again, err := b.q.Reserve(b.ctx, r)
	b.ok(err)
	if first != again || b.store.Health().ReservedSamples != 1 {
		b.t.Errorf("got %v and %v", first, again)
	}
}

func fifthFail(b *bench) {
	b.put(1)
	for i := range 5 {
		ls := b.leased(ann, 1, "s0")
		if r := b.settle(ann, sluice.Fail, ls...)[0]; r.Dead != (i == 4) {
			b.t.Fatalf("fail %d: %+v", i+1, r)
		}
	}
	b.leased(ann, 1)
	dead, err := b.q.DeadLetters(b.ctx)
	b.ok(err)
	if len(dead) != 1 || dead[0].Fails != 5 || len(dead[0].Reasons) != 5 || dead[0].Reasons[4] != "because" || dead[0].Freed {
		b.t.Errorf("dead letters: %+v", dead)
	}
	if h := b.store.Health(); h.DeadSamples != 1 || h.ResidentSamples != 1 {
		b.t.Errorf("health: %+v", h)
	}
}

func permanentFail(b *bench) {
	b.put(2)
	ls := b.leased(ann, 2, "s0", "s1")
	b.settled(ann, sluice.FailPermanent, ls...)
	b.want(sluice.AlreadyPut)(b.q.Put(b.ctx, sluice.PutRequest{Ref: b.refs["s0"]}))
	b.put(1)
	if n, err := b.q.Requeue(b.ctx, "s0", "s2", "nobody"); n != 1 || err != nil {
		b.t.Fatalf("requeue: %d, %v", n, err)
	}
	if n, err := b.q.Drop(b.ctx, "s1", "s2"); n != 1 || err != nil {
		b.t.Fatalf("drop: %d, %v", n, err)
	}
	if _, ok := b.store.Owner("s1"); ok {
		b.t.Error("the dropped sample was not freed")
	}
	if h := b.store.Health(); h.DeadSamples != 0 {
		b.t.Errorf("health: %+v", h)
	}
	ls = b.leased(ann, 3, "s2", "s0")
	for range 4 { // it has a new budget
		if r := b.settle(ann, sluice.Fail, ls[1])[0]; r.Dead {
			b.t.Fatal("dead too early")
		}
		ls = append(ls[:1], b.leased(ann, 1, "s0")...)
	}
	b.want(sluice.WasSettled)(b.q.Put(b.ctx, sluice.PutRequest{Ref: b.refs["s1"]}))
}

func twentiethExpiry(b *bench) {
	b.put(1)
	for range 20 {
		b.leased(ann, 1, "s0")
		b.clock.Advance(30 * time.Second)
	}
	b.leased(ann, 1)
	dead, err := b.q.DeadLetters(b.ctx)
	b.ok(err)
	if len(dead) != 1 || dead[0].Expiries != 20 || len(dead[0].Reasons) != 8 {
		b.t.Errorf("dead letters: %+v", dead)
	}
}

func reasonsClean(b *bench) {
	b.put(1)
	ls := b.leased(ann, 1, "s0")
	_, err := b.q.Settle(b.ctx, sluice.SettleRequest{Consumer: ann, Settlements: []sluice.Settlement{
		{Lease: ls[0].ID, Verdict: sluice.FailPermanent, Reason: "a\x1b[31mb\x00\xff" + strings.Repeat("é", 4000)},
	}})
	b.ok(err)
	dead, err := b.q.DeadLetters(b.ctx)
	b.ok(err)
	r := dead[0].Reasons[0]
	if len(r) > 4096 || len(r) < 4000 || strings.ContainsAny(r, "\x1b\x00") || !utf8.ValidString(r) || !strings.HasPrefix(r, "a[31mb") {
		b.t.Errorf("the reason is %d bytes: %.20q", len(r), r)
	}
	_, err = b.q.Settle(b.ctx, sluice.SettleRequest{Consumer: ann, Settlements: []sluice.Settlement{{Lease: ls[0].ID, Verdict: "maybe"}}})
	b.fails(err, sluice.ErrInvalid)
}

func deadShare(b *bench) {
	b.put(5)
	for i := range 5 {
		b.settled(ann, sluice.FailPermanent, b.leased(ann, 1, fmt.Sprint("s", i))...)
	}
	dead, err := b.q.DeadLetters(b.ctx)
	b.ok(err)
	for i, d := range dead {
		if d.Freed != (i < 2) {
			b.t.Errorf("dead letter %d (%s): freed is %v", i, d.Ref.SampleID(), d.Freed)
		}
	}
	if h := b.store.Health(); h.DeadBytes != 300 || h.ResidentBytes != 300 {
		b.t.Errorf("health: %+v", h)
	}
	if n, err := b.q.Requeue(b.ctx, "s0", "s4"); n != 1 || err != nil {
		b.t.Errorf("requeue: %d, %v, want 1: the bytes of s0 are gone", n, err)
	}
}

func closedDrains(b *bench) {
	b.put(2)
	b.ok(b.q.Close(b.ctx, nil))
	b.ok(b.q.Close(b.ctx, nil))
	_, err := b.q.Put(b.ctx, sluice.PutRequest{Ref: b.ref("late")})
	b.fails(err, sluice.ErrClosed)
	_, err = b.q.Reserve(b.ctx, sluice.ReserveRequest{Bytes: 1})
	b.fails(err, sluice.ErrClosed)
	if owner, _ := b.store.Owner("late"); owner != "" {
		b.t.Error("a refused put left a claim")
	}
	ls := b.leased(ann, 2, "s0", "s1")
	b.settled(ann, sluice.Ack, ls...)
	b.end(ann)
}

func endRules(b *bench) {
	b.put(2)
	one := b.leased(ann, 1, "s0")
	two := b.leased(bob, 1, "s1")
	idle := b.waiting(b.ctx, sluice.Consumer{Name: "cleo"}, -1)
	holder := b.waiting(b.ctx, ann, -1)
	b.ok(b.q.Close(b.ctx, nil))
	if a := b.got(holder); !a.d.End || a.err != nil {
		b.t.Errorf("the holder got %+v, want the end at once", a)
	}
	b.end(bob)
	b.settled(ann, sluice.Ack, one...)
	if len(idle) > 0 {
		b.t.Fatal("the end came while another consumer's lease may still fail")
	}
	b.settled(bob, sluice.Fail, two...)
	again := b.woken(idle, "s1")
	idle = b.waiting(b.ctx, ann, -1)
	b.settled(sluice.Consumer{Name: "cleo"}, sluice.Ack, again...)
	if a := b.got(idle); !a.d.End {
		b.t.Errorf("got %+v, want the end when the last lease was settled", a)
	}
}

func causeBehindDrain(b *bench) {
	b.put(1)
	b.ok(b.q.Close(b.ctx, &sluice.Error{Kind: sluice.TargetFault, Detail: "the target melted"}))
	b.ok(b.q.Close(b.ctx, errors.New("too late")))
	ls := b.leased(ann, 1, "s0")
	b.settled(ann, sluice.Ack, ls...)
	if d := b.end(ann); d.Cause == nil || !strings.Contains(d.Cause.Error(), "melted") {
		b.t.Errorf("the cause is %v", d.Cause)
	}
	if s := b.status(); !s.Closed || !strings.Contains(s.Cause, "melted") {
		b.t.Errorf("status: %+v", s)
	}
}

func producersDone(b *bench) {
	report := func(name string, inc int64, s sluice.ProducerState) error {
		return b.q.Report(b.ctx, sluice.ProducerReport{Producer: sluice.Producer{Name: name, Incarnation: inc}, State: s})
	}
	b.ok(report("p0", 0, sluice.ProducerRunning))
	b.ok(report("p0", 0, sluice.ProducerDone))
	b.ok(report("p0", 0, sluice.ProducerDone))
	b.ok(report("p1", 2, sluice.ProducerRunning))
	b.fails(report("p1", 1, sluice.ProducerDone), sluice.ErrStale)
	if b.status().Closed {
		b.t.Fatal("closed too early")
	}
	b.ok(report("p1", 2, sluice.ProducerDone))
	if s := b.status(); !s.Closed || s.Cause != "" {
		b.t.Errorf("status: %+v", s)
	}
	b.end(ann)
}

func producerFailed(b *bench) {
	b.ok(b.q.Report(b.ctx, sluice.ProducerReport{Producer: sluice.Producer{Name: "p0"}, State: sluice.ProducerFailed, Cause: "out of prompts"}))
	if d := b.end(ann); d.Cause == nil || !strings.Contains(d.Cause.Error(), "out of prompts") || !strings.Contains(d.Cause.Error(), "p0") {
		b.t.Errorf("the cause is %v", d.Cause)
	}
}

func producerLost(b *bench) {
	p := sluice.Producer{Name: "p0"}
	put := func(id string) error {
		_, err := b.q.Put(b.ctx, sluice.PutRequest{Ref: b.ref(id), Producer: p})
		return err
	}
	b.ok(put("a"))
	b.clock.Advance(59 * time.Second)
	b.ok(put("b")) // any call is a sign of life
	b.clock.Advance(59 * time.Second)
	p.Incarnation++
	b.ok(put("c")) // a successor
	p.Incarnation--
	b.fails(put("d"), sluice.ErrStale)
	b.clock.Advance(59 * time.Second)
	if b.status().Closed {
		b.t.Fatal("closed too early")
	}
	b.clock.Advance(time.Second)
	b.until(func() bool { return b.status().Closed })
	if s := b.status(); !strings.Contains(s.Cause, "producer p0 lost") {
		b.t.Errorf("the cause is %q", s.Cause)
	}
}

func takeover(b *bench) {
	b.put(4)
	old := b.leased(ann, 3, "s0", "s1", "s2")
	waits := b.waiting(b.ctx, sluice.Consumer{Name: "zoe", Incarnation: 1}, 0)
	b.woken(waits, "s3")
	stuck := b.waiting(b.ctx, ann, -1)
	newer := ann
	newer.Incarnation = 1
	b.leased(newer, 2, "s0", "s1")
	b.fails(b.got(stuck).err, sluice.ErrStale)
	b.leased(bob, 1, "s2")
	_, err := b.q.Settle(b.ctx, sluice.SettleRequest{Consumer: ann, Settlements: []sluice.Settlement{{Lease: old[0].ID, Verdict: sluice.Ack}}})
	b.fails(err, sluice.ErrStale)
	_, err = b.q.Acquire(b.ctx, sluice.AcquireRequest{Consumer: ann})
	b.fails(err, sluice.ErrStale)
	_, err = b.q.Renew(b.ctx, sluice.RenewRequest{Consumer: ann})
	b.fails(err, sluice.ErrStale)
	if r := b.settle(newer, sluice.Ack, old[0])[0]; r.Status != sluice.StaleLease {
		b.t.Errorf("the old incarnation's lease: %+v, want stale", r)
	}
}

func takeoverWakes(b *bench) {
	b.put(1)
	b.leased(ann, 1, "s0")
	waits := b.waiting(b.ctx, bob, -1)
	newer := ann
	newer.Incarnation = 1
	_, err := b.q.Renew(b.ctx, sluice.RenewRequest{Consumer: newer})
	b.ok(err)
	b.woken(waits, "s0")
}

func leave(b *bench) {
	b.put(3)
	b.leased(ann, 2, "s0", "s1")
	b.ok(b.q.Leave(b.ctx, ann))
	b.ok(b.q.Leave(b.ctx, sluice.Consumer{Name: "nobody"}))
	b.leased(bob, 3, "s0", "s1", "s2")
	for _, c := range b.status().Consumers {
		if c.Name == "ann" {
			b.t.Error("a consumer that left is still listed")
		}
	}
}

func member(i int) sluice.Consumer { return sluice.Consumer{Name: "tp", Member: i, Members: 2} }

func replicaGroup(b *bench) {
	b.put(4)
	one := b.leased(member(0), 2, "s0", "s1")
	first := b.leased(member(1), 1, "s0")
	more := b.leased(member(1), 2, "s1", "s2")
	if one[0].ID != first[0].ID || one[1].ID != more[0].ID {
		b.t.Error("the members hold different leases")
	}
	b.settled(member(0), sluice.Ack, one[0])
	if s := b.status(); s.Acked != 0 || s.Outstanding != 3 {
		b.t.Errorf("settled by one of two: %+v", s)
	}
	if r := b.settle(member(0), sluice.Ack, one[0])[0]; r.Status != sluice.AlreadySettled {
		b.t.Errorf("a member's second ack: %+v", r)
	}
	b.settled(member(1), sluice.Ack, one[0])
	if s := b.status(); s.Acked != 1 {
		b.t.Errorf("settled by both: %+v", s)
	}
	b.leased(member(0), 1, "s2")
	waits := b.waiting(b.ctx, member(1), -1)
	b.woken(waits, "s3")
	b.leased(member(0), 2, "s3")
	waits = b.waiting(b.ctx, member(0), -1)
	other := b.waiting(b.ctx, member(1), -1)
	b.put(1)
	b.woken(waits, "s4")
	b.woken(other, "s4")
}

func replicaFail(b *bench) {
	b.put(1)
	ls := b.leased(member(0), 1, "s0")
	b.leased(member(1), 1, "s0")
	b.settled(member(0), sluice.Fail, ls...)
	b.settled(member(1), sluice.Ack, ls...)
	again := b.leased(member(1), 1, "s0")
	if again[0].Redelivery != 1 || again[0].ID == ls[0].ID {
		b.t.Errorf("got %+v, want the sample again", again[0])
	}
	if s := b.status(); s.Failed != 1 || s.Acked != 0 {
		b.t.Errorf("status %+v", s)
	}
}

// A member that has settled its part waits for what the others say, since that may be a failure.
func replicaEnd(b *bench) {
	b.put(1)
	b.ok(b.q.Close(b.ctx, nil))
	ls := b.leased(member(0), 1, "s0")
	b.leased(member(1), 1, "s0")
	b.settled(member(0), sluice.Ack, ls...)
	waits := b.waiting(b.ctx, member(0), -1)
	if len(waits) > 0 {
		b.t.Fatalf("got %+v while the other member may still fail", b.got(waits))
	}
	b.settled(member(1), sluice.Fail, ls...)
	b.woken(waits, "s0")
	ls = b.leased(member(1), 1, "s0")
	b.end(member(1)) // who holds a lease ends at once
	b.settled(member(0), sluice.Ack, ls...)
	waits = b.waiting(b.ctx, member(0), -1)
	b.settled(member(1), sluice.Ack, ls...)
	if a := b.got(waits); !a.d.End || a.err != nil {
		b.t.Errorf("got %+v, want the end", a)
	}
}

func positions(b *bench) {
	for i, at := range []int64{0, 1, 5, 3, 2} {
		_, err := b.q.Put(b.ctx, sluice.PutRequest{Ref: b.ref(fmt.Sprint("p", i)), Positions: []sluice.Position{{Source: "books", Epoch: at / 5, Index: at}, {Source: "web", Index: at}}})
		b.ok(err)
	}
	got, err := b.q.Taken(b.ctx, "books")
	b.ok(err)
	if want := "[{books 0 [[0 4]]} {books 1 [[5 6]]}]"; fmt.Sprint(got) != want {
		b.t.Errorf("taken: %v, want %s", got, want)
	}
	_, err = b.q.Put(b.ctx, sluice.PutRequest{Ref: b.ref("bad"), Positions: []sluice.Position{{Source: "books", Index: -1}}})
	b.fails(err, sluice.ErrInvalid)
}

func gates(b *bench) {
	put := func(id, target, draft string, want sluice.PutStatus) {
		b.t.Helper()
		ref := NewRef(b.store.URI(), "r1", id, 100, func(f *sluice.RefFields) { f.TargetModelVersion, f.DraftWeightVersion = target, draft })
		b.add(ref)
		for range 2 {
			b.want(want)(b.q.Put(b.ctx, sluice.PutRequest{Ref: ref}))
			if want == sluice.Enqueued {
				return
			}
		}
	}
	put("a", "0", "3", sluice.Enqueued)
	put("b", "1", "3", sluice.Gated)
	put("c", "0", "2", sluice.Gated)
	put("d", "0", "v4", sluice.Gated)
	put("e", "0", "10", sluice.Enqueued)
	b.leased(ann, 9, "a", "e")
	if s := b.status(); s.Gated != 3 || s.Health.ResidentSamples != 2 {
		b.t.Errorf("status %+v", s)
	}
}

func equalShares(b *bench) {
	b.put(3)
	b.leased(rank(0), 4)
	b.put(1)
	zero := b.leased(rank(0), 4, "s0", "s2")
	one := b.leased(rank(1), 4, "s1", "s3")
	for i, l := range append(zero, one...) {
		w := l.Window
		if w == nil || w.Number != 0 || w.Rank != i/2 || w.Slot != i%2 || w.Pad || w.Tokens != 40 {
			b.t.Errorf("lease %d: window %+v", i, w)
		}
	}
	b.put(4)
	b.leased(rank(0), 4) // no prefetch
	b.settled(rank(0), sluice.Ack, zero...)
	b.settled(rank(1), sluice.Ack, one...)
	if l := b.leased(rank(0), 1, "s4")[0]; l.Window.Number != 1 {
		b.t.Errorf("window %+v", l.Window)
	}
	_, err := b.q.Acquire(b.ctx, sluice.AcquireRequest{Consumer: rank(2)})
	b.fails(err, sluice.ErrInvalid)
}

func barrier(b *bench) {
	b.put(8)
	b.leased(rank(0), 9, "s0")
	waits := b.waiting(b.ctx, rank(0), -1)
	b.leased(rank(1), 1, "s1")
	b.woken(waits, "s2")
	b.leased(rank(1), 9, "s3", "s5")
	b.leased(rank(0), 9, "s4", "s6")
	b.leased(rank(0), 9)
	b.leased(rank(1), 9, "s7")
}

func sameRank(b *bench) {
	b.put(2)
	ls := b.leased(rank(1), 1, "s1")
	b.settled(rank(1), sluice.Fail, ls...)
	b.leased(rank(0), 2, "s0")
	again := b.leased(rank(1), 2, "s1")
	if w := again[0].Window; w.Number != 0 || w.Rank != 1 || again[0].Redelivery != 1 {
		b.t.Errorf("got %+v", again[0])
	}
}

func deadSlot(b *bench) {
	b.put(2)
	zero := b.leased(rank(0), 1, "s0")
	one := b.leased(rank(1), 1, "s1")
	b.settled(rank(0), sluice.Ack, zero...)
	b.settled(rank(1), sluice.FailPermanent, one...)
	pad := b.leased(rank(1), 1, "s0")
	if w := pad[0].Window; !w.Pad || w.Number != 0 || w.Rank != 1 {
		b.t.Errorf("got %+v, want a pad", w)
	}
	h, err := b.store.Get(b.ctx, pad[0].Ref)
	b.ok(err) // the bytes must be there
	b.ok(h.Release(b.ctx))
	if s := b.status(); s.Padded != 1 || s.Acked != 1 || s.Outstanding != 0 {
		b.t.Errorf("status %+v", s)
	}
	b.settled(rank(1), sluice.Ack, pad...)
	if h := b.store.Health(); h.ResidentSamples != 1 || h.DeadSamples != 1 {
		b.t.Errorf("health %+v: want the dead letter only", h)
	}
}

func tailPadded(b *bench) {
	b.put(1)
	b.ok(b.q.Close(b.ctx, nil))
	zero := b.leased(rank(0), 9, "s0", "s0")
	one := b.leased(rank(1), 9, "s0", "s0")
	if zero[0].Window.Pad || !zero[1].Window.Pad || !one[0].Window.Pad || zero[0].Window.Tokens != 10 {
		b.t.Errorf("got %+v", zero[0].Window)
	}
	b.settled(rank(0), sluice.Ack, zero...)
	_, err := b.store.Get(b.ctx, one[1].Ref)
	b.ok(err)
	b.end(rank(0))
	b.settled(rank(1), sluice.Ack, one...)
	b.end(rank(1))
	if owner, _ := b.store.Owner("s0"); owner != "" {
		b.t.Error("the sample is still claimed when all pads are settled")
	}
}

func tailDropped(b *bench) {
	b.put(5)
	b.ok(b.q.Close(b.ctx, nil))
	for r := range 2 {
		ls := b.acquire(rank(r), 9)
		if len(ls) != 2 {
			b.t.Fatalf("rank %d got %v", r, names(ls))
		}
		b.settled(rank(r), sluice.Ack, ls...)
	}
	b.end(rank(0))
	b.end(rank(1))
	if s := b.status(); s.TailDropped != 1 || s.Health.ResidentSamples != 0 {
		b.t.Errorf("status %+v", s)
	}
}

func reshape(b *bench) {
	b.put(4)
	ls := b.leased(rank(0), 1, "s0")
	ls = append(ls, b.leased(rank(1), 1, "s1")...)
	b.refused(b.q.Reshape(b.ctx, 1, 1), sluice.ErrConflict, "2 leases are out", "settle or return them")
	b.settled(rank(0), sluice.Ack, ls[0])
	b.settled(rank(1), sluice.Return, ls[1])
	b.ok(b.q.Reshape(b.ctx, 1, 3))
	ls = b.leased(rank(0), 9, "s1", "s2", "s3")
	b.ok(b.q.Reshape(b.ctx, 1, 3)) // a repetition, whose first answer was lost
	if w := ls[0].Window; w.Number != 1 {
		b.t.Errorf("window %+v", w)
	}
	b.fails(b.q.Reshape(b.ctx, 0, 1), sluice.ErrInvalid)
}

func reshapedAway(b *bench) {
	b.put(2)
	b.settled(rank(1), sluice.Ack, b.leased(rank(1), 1, "s1")...)
	waits := b.waiting(b.ctx, rank(1), -1)
	b.ok(b.q.Reshape(b.ctx, 1, 1))
	b.refused(b.got(waits).err, sluice.ErrInvalid, `"rank1"`, "rank is 1", "reshaped to 1 ranks")
	_, err := b.q.Acquire(b.ctx, sluice.AcquireRequest{Consumer: rank(1)})
	b.refused(err, sluice.ErrInvalid, `"rank1"`, "rank is 1", "reshaped to 1 ranks")
	_, err = b.q.Acquire(b.ctx, sluice.AcquireRequest{Consumer: rank(2)}) // it was never here
	b.refused(err, sluice.ErrInvalid, `"rank2"`, "rank is 2", "has 1 ranks")
	b.leased(rank(0), 1, "s0")
}

func putBlocks(b *bench) {
	b.put(8) // 800 of 1000, over the high mark
	b.leased(ann, 8, "s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7")
	put := func(id string, abort func() bool) <-chan error {
		ch := make(chan error, 1)
		ref := b.ref(id)
		go func() {
			_, err := b.q.PutBlocksUntilBelow(b.ctx, sluice.PutRequest{Ref: ref}, abort)
			ch <- err
		}()
		b.until(func() bool { return b.status().ProducersWaiting > 0 || len(ch) > 0 })
		return ch
	}
	wait := func(ch <-chan error) error {
		b.t.Helper()
		select {
		case err := <-ch:
			return err
		case <-time.After(patience):
			b.t.Fatal("the put does not return")
			return nil
		}
	}
	calls := 0
	ch := put("x", func() bool { calls++; return calls > 1 })
	b.clock.Advance(50 * time.Millisecond)
	b.fails(wait(ch), sluice.ErrAborted)
	b.ok(b.store.Abort(b.ctx, b.refs["x"]))
	ch = put("y", nil)
	if len(ch) > 0 {
		b.t.Fatal("the put did not wait")
	}
	waits := b.waiting(b.ctx, bob, -1)
	b.ok(wait(ch))
	b.woken(waits, "y")
}

func reserveWaits(b *bench) {
	_, err := b.q.Reserve(b.ctx, sluice.ReserveRequest{Bytes: 1001})
	b.refused(err, sluice.ErrFull, "1001 bytes", "cap of 1000 bytes")
	b.put(10)
	ls := b.acquire(ann, 10)
	ch := make(chan error, 1)
	go func() {
		_, err := b.q.Reserve(b.ctx, sluice.ReserveRequest{Bytes: 500})
		ch <- err
	}()
	b.until(func() bool { return b.status().ProducersWaiting == 1 })
	b.settled(ann, sluice.Ack, ls[:7]...)
	if len(ch) > 0 {
		b.t.Fatal("granted above the low mark")
	}
	b.settled(ann, sluice.Ack, ls[7])
	select {
	case err := <-ch:
		b.ok(err)
	case <-time.After(patience):
		b.t.Fatal("not granted at the low mark")
	}
}

func reserveSuperseded(b *bench) {
	b.put(10)
	p := sluice.Producer{Name: "p0", Incarnation: 3}
	ch := make(chan error, 1)
	go func() {
		_, err := b.q.Reserve(b.ctx, sluice.ReserveRequest{Producer: p, Bytes: 500})
		ch <- err
	}()
	b.until(func() bool { return b.status().ProducersWaiting == 1 })
	newer := sluice.Producer{Name: "p0", Incarnation: 7}
	b.ok(b.q.Report(b.ctx, sluice.ProducerReport{Producer: newer, State: sluice.ProducerRunning}))
	select {
	case err := <-ch:
		b.refused(err, sluice.ErrStale, `"p0"`, "incarnation 3 was superseded by 7")
	case <-time.After(patience):
		b.t.Fatal("the reserve of the old incarnation waits on")
	}
	_, err := b.q.Reserve(b.ctx, sluice.ReserveRequest{Producer: p, Bytes: 500})
	b.refused(err, sluice.ErrStale, `"p0"`, "incarnation 3 was superseded by 7")
}

func status(b *bench) {
	p := sluice.Producer{Name: "p0"}
	for i := range 4 {
		_, err := b.q.Put(b.ctx, sluice.PutRequest{Ref: b.ref(fmt.Sprint("s", i)), Producer: p})
		b.ok(err)
	}
	ls := b.leased(ann, 3, "s0", "s1", "s2")
	b.settled(ann, sluice.Ack, ls[0])
	b.settled(ann, sluice.Fail, ls[1])
	b.clock.Advance(10 * time.Second)
	s := b.status()
	if s.RunID != "r1" || s.Pending != 2 || s.Outstanding != 1 || s.Put != 4 || s.Delivered != 3 || s.Acked != 1 || s.Failed != 1 ||
		s.TokensPut != 40 || s.TokensAcked != 10 || s.BytesPut != 400 || s.BytesAcked != 100 || s.OldestLease != 10*time.Second || s.Health.ResidentSamples != 3 {
		b.t.Errorf("status %+v", s)
	}
	if len(s.Consumers) != 1 || s.Consumers[0].Leases != 1 || s.Consumers[0].LeasedBytes != 100 || s.Consumers[0].Acked != 1 || s.Consumers[0].LastSeen != 10*time.Second {
		b.t.Errorf("consumers %+v", s.Consumers)
	}
	if len(s.Producers) != 1 || s.Producers[0].Put != 4 || s.Producers[0].State != sluice.ProducerRunning {
		b.t.Errorf("producers %+v", s.Producers)
	}
}
