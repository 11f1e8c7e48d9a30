package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/sluice-ml/sluice"
)

// fetch is the goroutine that makes batches, one for each permit. Close ends it by l.ctx.
func (l *Loader) fetch() {
	for {
		select {
		case <-l.permits:
		case <-l.ctx.Done():
			return
		}
		var m made
		err := guard(sluice.Invalid, "stream: loader", func() error {
			m = l.make()
			return nil
		})
		if err != nil { // a callback or a backend panicked; what it left behind is returned at Close
			m = made{err: err}
		}
		l.mu.Lock()
		l.wait(false)
		l.ready <- m // has room for as many as there are permits
		l.mu.Unlock()
	}
}

// make makes one batch of the parts that are there and of what it acquires.
func (l *Loader) make() made {
	if err := l.allowed(); err != nil {
		return made{err: err}
	}
	for {
		n, complete := l.group()
		if complete {
			if m, again := l.collate(n); !again {
				return m
			}
			continue
		}
		// A window opens as a whole, so what lacks now of the batch's window comes no more, unless others of a group have still to pass over what this one has; and the next
		// window may not open before this one is settled.
		rest := n > 0 && l.parts[0].lease.Window != nil && (l.cfg.Consumer.Members < 2 || !l.owes(l.parts[0].lease, 0))
		most := max(l.cfg.Batch-n, 1)
		leases, m := l.acquire(most, !rest)
		l.filled(leases, most)
		switch {
		case len(leases) > 0:
		case n > 0 && (m.end || m.err == nil || errors.Is(m.err, sluice.ErrWedged)):
			if part, again := l.collate(n); !again {
				return part // the end, or the wedge, will be there again
			}
			continue
		default:
			return m
		}
		for i, lease := range leases {
			p, err := l.load(lease)
			if err == nil {
				l.join(p)
				l.skips = 0
				continue
			}
			if l.ctx.Err() != nil {
				return made{err: errLoaderClosed}
			}
			if err := l.giveUp([]sluice.Lease{lease}, err); err != nil {
				// The others of this answer were not looked at. They are held, and returned unused.
				_ = l.settle(l.ctx, leaseIDs(leases[i+1:]), sluice.Return, "")
				return made{err: err}
			}
		}
	}
}

// allowed refuses, before anything is leased, to ack at checkpoints in a run that declares none: its caps were not checked to hold the samples of so many steps, and it could wedge.
func (l *Loader) allowed() error {
	if l.ackOK || l.cfg.Ack != AckOnCheckpoint {
		return nil
	}
	l.mu.Lock()
	err := l.fatal
	l.mu.Unlock()
	if err != nil {
		return err
	}
	var st sluice.Status
	err = l.retry(l.ctx, "status", func() (err error) {
		st, err = l.cfg.Queue.Status(l.ctx)
		return err
	})
	switch {
	case l.ctx.Err() != nil:
		return errLoaderClosed
	case err != nil:
		return err
	case st.StepsPerCheckpoint > 0:
		l.ackOK = true
		return nil
	}
	err = &sluice.Error{Kind: sluice.Invalid, Op: "stream: loader", Subject: "Ack", Detail: fmt.Sprintf("is %q, but the run %q declares no steps a checkpoint", AckOnCheckpoint, st.RunID),
		Hint: "set RunConfig.StepsPerCheckpoint to the steps between two checkpoints (without windows SamplesPerStep too), or let Ack be next or step"}
	l.mu.Lock()
	l.fatal = err
	l.mu.Unlock()
	return err
}

func leaseIDs(leases []sluice.Lease) []sluice.LeaseID {
	ids := make([]sluice.LeaseID, len(leases))
	for i := range leases {
		ids[i] = leases[i].ID
	}
	return ids
}

// group counts the parts at the head that go into one batch: at most Batch, of one window and one kind. It is complete if no more can join.
func (l *Loader) group() (n int, complete bool) {
	for n < len(l.parts) && n < l.cfg.Batch {
		if l.parts[n].kind != l.parts[0].kind || otherWindow(l.parts[0].lease, l.parts[n].lease) {
			return n, !l.owes(l.parts[0].lease, 0)
		}
		n++
	}
	return n, n == l.cfg.Batch && !l.owes(l.parts[0].lease, 1)
}

// place is one in a window.
type place struct {
	window int64
	slot   int
}

func placeOf(w *sluice.WindowSlot) place { return place{w.Number, w.Slot} }

// owes reports whether the queue owes a place in the window that is so many before the lease's, or in an earlier one.
func (l *Loader) owes(lease sluice.Lease, before int64) bool {
	for p := range l.owing {
		if lease.Window != nil && p.window <= lease.Window.Number-before {
			return true
		}
	}
	return false
}

// filled notes which places the answer to an acquire fills. A consumer by itself is given what there is for them first, so that what it is not given then comes no more: as a
// stand-in that failed too often.
func (l *Loader) filled(leases []sluice.Lease, asked int) {
	all := len(leases) == asked
	for i := range leases {
		if w := leases[i].Window; w == nil || !l.owing[placeOf(w)] {
			all = false
		} else {
			delete(l.owing, placeOf(w))
		}
	}
	if !all && l.cfg.Consumer.Members < 2 {
		clear(l.owing)
	}
}

// join puts a part behind those of its window and of earlier ones.
func (l *Loader) join(p *piece) {
	at := len(l.parts)
	for at > 0 && p.lease.Window != nil && l.parts[at-1].lease.Window != nil && l.parts[at-1].lease.Window.Number > p.lease.Window.Number {
		at--
	}
	l.parts = slices.Insert(l.parts, at, p)
}

func otherWindow(a, b sluice.Lease) bool {
	return a.Window != nil && b.Window != nil && a.Window.Number != b.Window.Number
}

// acquire waits for leases, or takes what there is. The end and errors come as made, and nothing as neither.
//
// While the trainer does not wait it asks ahead, so that a run whose trainer is at work counts neither as wedged nor as waiting for samples. When that changes
// the call is given up and asked again under the same id, which gets the leases of an answer that was lost on the way.
func (l *Loader) acquire(most int, patient bool) ([]sluice.Lease, made) {
	wait := time.Duration(0)
	if patient {
		wait = -1
	}
	var failing time.Time // since when the queue is unavailable
	id := requestID("acquire")
	for try := 1; ; {
		l.mu.Lock()
		fatal, moves := l.fatal, l.moves
		if fatal != nil {
			l.mu.Unlock()
			return nil, made{err: fatal}
		}
		ctx, recall := context.WithCancel(l.ctx)
		ahead := !l.waiting
		l.recall = recall
		l.mu.Unlock()
		begin := l.clock.Now()
		d, err := l.cfg.Queue.Acquire(ctx, sluice.AcquireRequest{Consumer: l.cfg.Consumer, Max: most, Wait: wait, Ahead: ahead, RequestID: id})
		l.mu.Lock()
		l.recall = nil
		l.mu.Unlock()
		recalled := ctx.Err() != nil
		recall()
		switch {
		case err == nil && len(d.Leases) > 0:
			l.hold(d.Leases)
			return d.Leases, made{}
		case l.ctx.Err() != nil:
			return nil, made{err: errLoaderClosed}
		case err != nil && recalled:
			// Whatever it was, it is an answer to what is no longer asked.
		case err == nil && d.End:
			m := made{end: true, moves: moves, err: io.EOF}
			if d.Cause != nil {
				m.err = cutOff(d.Cause)
			}
			return nil, m
		case err == nil && !patient:
			return nil, made{}
		case err == nil || ahead && errors.Is(err, sluice.ErrWedged):
			// Nothing yet; the queue tells all who wait of a wedge, and the trainer hears of it when it waits itself, if there still is one by then. The queue has
			// waited already; if it did not, this must not become a spin.
			id, failing = requestID("acquire"), time.Time{}
			if l.clock.Now().Sub(begin) < 50*time.Millisecond && !sleep(l.ctx, l.clock, 50*time.Millisecond) {
				return nil, made{err: errLoaderClosed}
			}
		case errors.Is(err, sluice.ErrUnavailable):
			if failing.IsZero() {
				failing, try = begin, 1
			}
			if l.clock.Now().Sub(failing) >= l.cfg.Patience {
				return nil, made{err: err}
			}
			l.emit(Event{Kind: Retry, Op: "acquire", Attempt: try, Wait: backoff(try), Err: err})
			if !sleep(l.ctx, l.clock, backoff(try)) {
				return nil, made{err: errLoaderClosed}
			}
			try++
		default:
			if errors.Is(err, sluice.ErrStale) {
				l.takenOver(err)
			}
			return nil, made{err: err}
		}
	}
}

// cutOff is the error of a stream that was closed with a cause. It must never pass for io.EOF, whatever the producer stumbled over.
func cutOff(cause error) error {
	const what = "stream: loader: the stream was cut off"
	if errors.Is(cause, io.EOF) {
		return fmt.Errorf("%s: %s", what, cause.Error())
	}
	return fmt.Errorf("%s: %w", what, cause)
}

// hold begins to keep leases alive.
func (l *Loader) hold(leases []sluice.Lease) {
	l.mu.Lock()
	now := l.clock.Now()
	for i := range leases {
		life := leases[i].TimeLeft
		l.acquired++
		h := &hold{life: life, seq: l.acquired}
		if life > 0 { // a queue that sets no time lets leases live for ever
			h.until = now.Add(life)
		}
		l.held[leases[i].ID] = h
		if life > 0 && (l.life == 0 || life < l.life) {
			l.life = life
		}
	}
	l.mu.Unlock()
	poke(l.wake)
}

// load reads a leased sample and checks it. What it fails on keeps no pin.
func (l *Loader) load(lease sluice.Lease) (*piece, error) {
	p := &piece{lease: lease, sample: Sample{Ref: lease.Ref, Pad: lease.Window != nil && lease.Window.Pad}}
	if err := l.fill(p); err != nil {
		l.free([]*piece{p})
		return nil, err
	}
	return p, nil
}

func (l *Loader) fill(p *piece) (err error) {
	ref := p.lease.Ref
	if err := l.cfg.Schema.Validate(ref); err != nil {
		return err
	}
	begin := l.clock.Now()
	err = l.retry(l.ctx, "get", func() (err error) {
		p.tensors, err = l.cfg.Store.Get(l.ctx, ref)
		return err
	})
	if err != nil {
		return err
	}
	l.mu.Lock()
	l.stats.Fetching += l.clock.Now().Sub(begin)
	l.stats.Bytes += ref.EstimatedBytes()
	l.mu.Unlock()
	p.sample.Features = p.tensors.Features
	if p.item, err = newItem(l.cfg.Schema, l.norm, &p.sample); err != nil {
		return err
	}
	return l.identify(p)
}

// identify compares what the sample says with those before it. The parts that are there are of an incomplete batch, and the sample would join them.
func (l *Loader) identify(p *piece) error {
	ref := p.lease.Ref
	if err := l.id.check(l.cfg.Schema, ref); err != nil {
		if ref.TargetModelVersion() == l.id.version {
			return fmt.Errorf("%w; both are of target_model_version %q, with which alone it may change", err, l.id.version)
		}
		if n := len(l.parts); n > 0 && p.lease.Window != nil && !otherWindow(l.parts[n-1].lease, p.lease) {
			return fmt.Errorf("%w in one batch, and a run with windows can't split it; the target must change between windows", err)
		}
		l.id = identity{}
		l.kinds++
	}
	l.id.adopt(l.cfg.Schema, ref)
	p.kind = l.kinds
	return nil
}

// giveUp fails leases whose samples could not become part of a batch: for good where no try can succeed. It returns the error if that
// is not to be passed over.
func (l *Loader) giveUp(leases []sluice.Lease, cause error) error {
	v := sluice.Fail
	if errors.Is(cause, sluice.ErrCorrupt) || errors.Is(cause, sluice.ErrSchema) {
		v = sluice.FailPermanent
	}
	if err := l.settle(l.ctx, leaseIDs(leases), v, cause.Error()); err != nil {
		return errors.Join(cause, err)
	}
	for i := range leases {
		if w := leases[i].Window; w != nil && (!w.Pad || v != sluice.FailPermanent) { // the place of such a stand-in stays empty
			l.owing[placeOf(w)] = true
		}
	}
	ref := leases[0].Ref
	l.skips++
	if !l.cfg.Skip(ref, cause) || l.skips > l.cfg.MaxSkips {
		return cause
	}
	l.mu.Lock()
	l.stats.Skipped += int64(len(leases))
	l.mu.Unlock()
	l.emit(Event{Kind: Skipped, Op: "get", SampleID: ref.SampleID(), Count: len(leases), Err: cause})
	return nil
}

// collate makes a batch of the first n parts. Where that fails on one of them, it alone is failed and the others stay; otherwise all n are. If
// that is passed over, there is nothing yet and the batch must be filled again.
func (l *Loader) collate(n int) (m made, again bool) {
	pieces := slices.Clone(l.parts[:n])
	items := make([]*item, n)
	for i, p := range pieces {
		items[i] = p.item
	}
	begin := l.clock.Now()
	var b *Batch
	err := guard(sluice.Invalid, "stream: collate", func() (err error) {
		b, err = collate(l.cfg.Schema, l.cfg.Collate, l.norm, items)
		return err
	})
	if err == nil {
		l.parts = slices.Clone(l.parts[n:])
		b.pieces = pieces
		for i, p := range pieces {
			s := &b.Samples[i]
			s.Lease, s.Redelivery, s.Window = p.lease.ID, p.lease.Redelivery, p.lease.Window
		}
		if !b.aliases {
			l.free(pieces) // everything was copied; the claim keeps the sample for another try
		}
		l.mu.Lock()
		l.stats.Collating += l.clock.Now().Sub(begin)
		l.mu.Unlock()
		return made{batch: b}, false
	}
	from, to := 0, n
	var one *itemError
	if errors.As(err, &one) {
		from, to, err = one.index, one.index+1, one.err
	}
	l.parts = slices.Delete(l.parts, from, to)
	bad := pieces[from:to]
	l.free(bad)
	leases := make([]sluice.Lease, len(bad))
	for i, p := range bad {
		leases[i] = p.lease
	}
	if err := l.giveUp(leases, err); err != nil {
		return made{err: err}, false
	}
	return made{}, true
}

// renew is the goroutine that keeps leases alive while the trainer is. Close ends it by l.ctx.
func (l *Loader) renew() {
	dormant := false
	var begun time.Time // of the wait for the next renewal
	for {
		every, idle := l.renewal()
		if idle && !dormant {
			dormant = true
			l.emit(Event{Kind: Idle, Op: "renew", Count: l.heldCount()})
		}
		if every == 0 || idle {
			begun = time.Time{}
			select {
			case <-l.wake:
				continue
			case <-l.ctx.Done():
				return
			}
		}
		dormant = false
		if begun.IsZero() {
			begun = l.clock.Now()
		}
		if left := begun.Add(every).Sub(l.clock.Now()); left > 0 { // what is acquired meanwhile may live for less
			if !l.rest(left) {
				return
			}
			continue
		}
		begun = l.clock.Now()
		l.renewOnce()
	}
}

// rest waits for d, or until there is something to look at; it is false if the Loader ends.
func (l *Loader) rest(d time.Duration) bool {
	over := make(chan struct{})
	stop := l.clock.AfterFunc(d, func() { close(over) })
	defer stop()
	select {
	case <-over:
	case <-l.wake:
	case <-l.ctx.Done():
		return false
	}
	return true
}

// renewal returns how long to wait before the next renewal, 0 if nothing is held, and whether the trainer has been silent for too long.
func (l *Loader) renewal() (every time.Duration, idle bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	alive := false
	for _, h := range l.held {
		alive = alive || !h.lost
	}
	if !alive {
		return 0, false
	}
	if every = l.cfg.RenewEvery; every == 0 {
		if every = max(l.life/3, time.Millisecond); l.life == 0 {
			every = 10 * time.Second
		}
	}
	return every, l.calling == 0 && l.clock.Now().Sub(l.lastCall) >= l.cfg.MaxIdle
}

func (l *Loader) renewOnce() {
	l.mu.Lock()
	ids := make([]sluice.LeaseID, 0, len(l.held))
	for id, h := range l.held {
		if !h.lost {
			ids = append(ids, id)
		}
	}
	l.mu.Unlock()
	if len(ids) == 0 {
		return
	}
	begin := l.clock.Now()
	results, err := l.cfg.Queue.Renew(l.ctx, sluice.RenewRequest{Consumer: l.cfg.Consumer, Leases: ids})
	switch {
	case l.ctx.Err() != nil:
		return
	case errors.Is(err, sluice.ErrStale):
		l.takenOver(err)
		return
	case err != nil: // there are two more tries before the leases run out
		l.emit(Event{Kind: Retry, Op: "renew", Attempt: 1, Count: len(ids), Err: err})
		return
	}
	lost := 0
	l.mu.Lock()
	for _, r := range results {
		h := l.held[r.Lease]
		if h == nil {
			continue
		}
		switch r.Status {
		case sluice.Renewed:
			if h.life > 0 {
				h.until = begin.Add(h.life)
			}
		case sluice.AlreadySettled: // by a call of ours whose answer is still on its way
		default:
			h.lost = true
			lost++
		}
	}
	l.stats.Lost += int64(lost)
	if lost > 0 {
		l.moves++
	}
	l.mu.Unlock()
	if lost > 0 {
		l.emit(Event{Kind: LeaseLost, Op: "renew", Count: lost})
	}
}
