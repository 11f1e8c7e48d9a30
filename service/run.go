package service

import (
	"context"
	"errors"
	"io/fs"
	"net/url"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/queue"
	"github.com/sluice-ml/sluice/store/dirstore"
)

// run is a run as the service has it: a store, a journal, and the queue over both.
type run struct {
	s       *Service
	id      string
	created time.Time
	spec    wire.RunSpec // as created
	cap     int64        // bytes

	// life is held shared by calls for their time, and alone by who opens or ends the run or gives it another queue.
	life  sync.RWMutex
	why   atomic.Pointer[sluice.Error] // why it can't answer; nil if it can
	ended atomic.Bool
	ctx   context.Context // ends when the run is to be let go: what waits goes by it
	end   context.CancelFunc
	tie   atomic.Pointer[tie] // of the uploads and downloads under way: cut later than ctx ends when the service stops

	now     atomic.Pointer[wire.RunSpec] // with what was changed since it was created
	store   *dirstore.Store
	journal sluice.Journal
	q       *queue.Queue
	mending sync.Mutex // held while the queue is opened again

	holdings
}

func (s *Service) newRun(e *entry, id string, bytes int64) *run {
	r := &run{s: s, id: id, created: e.created, spec: e.spec, cap: bytes}
	r.init()
	now := e.now
	r.now.Store(&now)
	r.ctx, r.end = context.WithCancel(s.ctx)
	r.tie.Store(newTie())
	r.why.Store(&sluice.Error{Kind: sluice.Unavailable, Op: "run", Subject: id, Detail: "is being opened", Hint: "ask again in a moment"})
	return r
}

// tie is what uploads and downloads hang on.
type tie struct {
	context.Context
	cut context.CancelFunc
}

func newTie() *tie {
	ctx, cut := context.WithCancel(context.Background())
	return &tie{ctx, cut}
}

// cut breaks off the uploads and downloads under way.
func (r *run) cut() { r.tie.Load().cut() }

// enter holds the run for a call, which must leave it.
func (r *run) enter() error {
	if why := r.why.Load(); why != nil { // also keeps calls from standing in line behind who ends the run
		return why
	}
	r.life.RLock()
	if why := r.why.Load(); why != nil {
		r.life.RUnlock()
		return why
	}
	return nil
}

func (r *run) leave() { r.life.RUnlock() }

// watched is the store as the queue sees it. While the queue recovers it notes what that claims, and what else there is: to list a sample is to read the head of its file, and
// of those that were claimed the queue knows all.
type watched struct {
	*dirstore.Store
	claimed map[string]struct{} // nil when the queue is open
	others  []sluice.SampleInfo
	asked   bool
}

func (w *watched) Claim(ref sluice.Ref, owner string) error {
	err := w.Store.Claim(ref, owner)
	if err == nil && w.claimed != nil {
		w.claimed[ref.SampleID()] = struct{}{}
	}
	return err
}

func (w *watched) ClaimAll(refs []sluice.Ref, owner string) []error {
	errs := w.Store.ClaimAll(refs, owner)
	if w.claimed != nil {
		for i, err := range errs {
			if err == nil {
				w.claimed[refs[i].SampleID()] = struct{}{}
			}
		}
	}
	return errs
}

func (w *watched) Samples(ctx context.Context) ([]sluice.SampleInfo, error) {
	samples, err := w.SamplesExcept(ctx, func(id string) bool { _, ok := w.claimed[id]; return ok })
	w.others, w.asked = samples, err == nil
	return samples, err
}

// open makes a run answer.
func (r *run) open(ctx context.Context) error {
	r.life.Lock()
	defer r.life.Unlock()
	cfg, err := r.spec.Config()
	if err != nil {
		return err
	}
	if err := os.Mkdir(r.s.root.stagingDir(r.id), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return &sluice.Error{Kind: kindOfOS(err), Op: "service: open run", Subject: r.id, Detail: "the staging directory can't be made", Err: err}
	}
	store, err := dirstore.Open(r.s.root.runDir(r.id), &dirstore.Options{Caps: cfg.Caps, Durability: r.s.opts.Durability, Clock: r.s.opts.Clock, Logger: r.s.log})
	if err != nil {
		return err
	}
	r.store = store
	seen, err := r.openQueue(ctx, cfg)
	if err != nil {
		return errors.Join(err, store.Close())
	}
	if err := r.takeUploads(ctx, seen); err != nil {
		return errors.Join(err, r.stopQueue(ctx), store.Close())
	}
	r.why.Store(nil)
	return nil
}

// openQueue opens journal and queue. The caller holds life.
func (r *run) openQueue(ctx context.Context, cfg sluice.RunConfig) (*watched, error) {
	j, err := r.s.journals.Journal(ctx, r.id)
	if err != nil {
		return nil, err
	}
	seen := &watched{Store: r.store, claimed: map[string]struct{}{}}
	q, err := queue.Open(ctx, cfg, seen, &queue.Options{Journal: j, Clock: r.s.opts.Clock, Logger: r.s.log, OnEvent: r.onEvent})
	if err != nil {
		return nil, errors.Join(err, j.Close())
	}
	seen.claimed = nil
	r.journal, r.q = j, q
	return seen, nil
}

func (r *run) stopQueue(ctx context.Context) error {
	if r.q == nil {
		return nil
	}
	return errors.Join(r.q.Stop(ctx), r.journal.Close())
}

// takeUploads finds the samples of an earlier life that were never committed. They have as long as if they had just been uploaded.
func (r *run) takeUploads(ctx context.Context, seen *watched) error {
	if !seen.asked { // the journal was empty
		if _, err := seen.Samples(ctx); err != nil {
			return err
		}
	}
	now := r.s.now()
	n := 0
	for _, info := range seen.others {
		if info.Owner == "" {
			r.uploaded(info.Ref, nil, now.Add(r.s.opts.ReservationTime))
			n++
		}
	}
	seen.others = nil
	if n > 0 {
		r.s.log.Info("samples that were never committed were found; they go unless they are", "run", r.id, "samples", n, "in", r.s.opts.ReservationTime)
	}
	return nil
}

// onEvent hears what the queue has to say.
func (r *run) onEvent(e queue.Event) {
	r.s.hub.send(wire.Event{Time: r.s.opts.Clock.Now(), RunID: r.id, Kind: string(e.Kind), Subject: plain(e.Subject), Text: plain(e.Text)})
	if e.Kind == queue.EventUnavailable {
		r.s.spawn(func() { r.mend(e.Text) })
	}
}

// mendTime is how long uploads and downloads may go on while a run waits to be opened again.
const mendTime = 5 * time.Second

// mend opens the queue again after its journal failed, for the given reason: at once, and then ever more slowly until it can.
func (r *run) mend(reason string) {
	if !r.mending.TryLock() {
		return // somebody does already
	}
	defer r.mending.Unlock()
	broken := &sluice.Error{Kind: sluice.Unavailable, Op: "run", Subject: r.id, Detail: "its journal failed; it is being opened again", Hint: "ask again"}
	if !r.why.CompareAndSwap(nil, broken) {
		return
	}
	old := r.tie.Load()
	patience := time.AfterFunc(mendTime, old.cut) // an upload may take hours, and all others wait
	r.life.Lock()
	patience.Stop()
	r.tie.Store(newTie())
	old.cut()
	err := r.stopQueue(r.ctx)
	r.q = nil
	r.life.Unlock()
	r.s.log.Warn("run unavailable: its journal failed", "run", r.id, "why", plain(reason))
	if err != nil {
		r.s.log.Warn("the queue of a run whose journal failed did not stop in order", "run", r.id, "err", err)
	}
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		if err = r.reopen(broken); err == nil {
			r.s.log.Info("run available again", "run", r.id)
			return
		}
		if r.ctx.Err() != nil || r.ended.Load() {
			return
		}
		if errors.Is(err, sluice.ErrStale) || errors.Is(err, sluice.ErrCorrupt) {
			r.fail(err)
			return
		}
		r.s.log.Warn("a run can't be opened again yet", "run", r.id, "again in", wait, "err", err)
		if told := because(broken, err); r.why.CompareAndSwap(broken, told) {
			broken = told
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-r.ctx.Done():
			timer.Stop()
			return
		}
	}
}

// because is the refusal with what keeps the run from being opened again, so that an operator reads of the full disk without the log. What the kernel said of a file goes before all that was
// said about it, since a status has room for a sentence; and it is text alone, since the kind of a refusal is that of its outside.
func because(broken *sluice.Error, err error) *sluice.Error {
	if file := (*fs.PathError)(nil); errors.As(err, &file) {
		err = file
	}
	told := *broken
	told.Detail = "its journal failed; it is being opened again, but not yet: " + plain(err.Error())
	return &told
}

func (r *run) reopen(broken *sluice.Error) error {
	r.life.Lock()
	defer r.life.Unlock()
	if r.ended.Load() || r.ctx.Err() != nil {
		return context.Canceled
	}
	cfg, err := r.spec.Config()
	if err == nil {
		_, err = r.openQueue(r.ctx, cfg)
	}
	if err == nil {
		r.why.CompareAndSwap(broken, nil)
	}
	return err
}

// fail notes that the run can't be opened, and why.
func (r *run) fail(err error) {
	kind := sluice.KindOf(err)
	if kind == "" {
		kind = sluice.Unavailable
	}
	r.why.Store(&sluice.Error{Kind: sluice.Unavailable, Op: "run", Subject: r.id, Detail: "can't be opened (" + string(kind) + ")", Err: err, Hint: "see the service's log; delete the run if it is not needed any more"})
	r.s.log.Error("a run can't be opened", "run", r.id, "err", err)
}

// stop ends all calls on the run with the given reason, and lets go of queue, journal and store. Uploads and downloads may end until the context does, and then are cut off.
func (r *run) stop(ctx context.Context, why *sluice.Error) error {
	defer r.cut()
	defer context.AfterFunc(ctx, r.cut)()
	r.why.Store(why)
	r.ended.Store(true)
	var err error
	if r.life.TryRLock() { // unless it is being opened right now, which heeds its context
		if r.q != nil {
			err = r.q.Stop(ctx) // whoever waits is answered
		}
		r.life.RUnlock()
	}
	r.end()
	r.life.Lock()
	defer r.life.Unlock()
	r.why.Store(why) // opening may have cleared it
	if r.q != nil {
		err = errors.Join(err, r.stopQueue(ctx))
		r.q = nil
	}
	for _, p := range r.allPins() { // a store stays as long as its loans, and these have no owner any more
		err = errors.Join(err, p.lost())
	}
	if r.store != nil {
		err = errors.Join(err, r.store.Close())
	}
	return err
}

// giveBack gives up what has ended.
func (r *run) giveBack(ctx context.Context, e ended, why string) {
	if len(e.reservations)+len(e.uploads)+len(e.pins) == 0 || r.enter() != nil {
		return
	}
	defer r.leave()
	warn := func(what, subject string, err error) {
		if err != nil {
			r.s.log.Warn("the store refused", "run", r.id, "call", what, "subject", plain(subject), "err", err)
		}
	}
	for _, v := range e.reservations {
		warn("unreserve", v.ID, r.store.Unreserve(ctx, v))
	}
	aborted := 0
	for _, ref := range e.uploads {
		err := r.store.Abort(ctx, ref)
		if errors.Is(err, sluice.ErrConflict) {
			continue // it was committed
		}
		warn("abort", ref.SampleID(), err)
		aborted++
	}
	for _, p := range e.pins {
		warn("release", p.loan.Name(), p.lost())
	}
	if aborted > 0 {
		r.s.abandoned.Add(int64(aborted))
		r.s.log.Info("samples that were never committed were freed", "run", r.id, "samples", aborted, "why", why)
		r.s.hub.send(wire.Event{Time: r.s.opts.Clock.Now(), RunID: r.id, Kind: "abandoned", Text: why})
	}
	r.s.log.Debug("given back", "run", r.id, "why", why, "reservations", len(e.reservations), "uploads", aborted, "pins", len(e.pins))
}

// describe is the run on the wire.
func (r *run) describe(ctx context.Context) wire.Run {
	return wire.Run{Spec: *r.now.Load(), Created: r.created, Store: r.storeInfo(), Status: r.shown(ctx)}
}

func (r *run) storeInfo() wire.StoreInfo {
	dir := r.s.root.runDir(r.id)
	uri := url.URL{Scheme: "file", Path: dir}
	return wire.StoreInfo{URI: uri.String(), Dir: dir, StagingDir: r.s.root.stagingDir(r.id), IDFile: r.s.root.idFile(), ID: r.s.root.id, Checksummed: r.s.root.disk}
}

// status is the queue's.
func (r *run) status(ctx context.Context) (wire.Status, error) {
	if err := r.enter(); err != nil {
		return wire.Status{}, err
	}
	defer r.leave()
	st, err := r.q.Status(ctx)
	if err != nil {
		return wire.Status{}, err
	}
	return wire.StatusOf(&st), nil
}

// shown is the status among others: a run that has none now keeps nobody from seeing theirs.
func (r *run) shown(ctx context.Context) wire.Status {
	st, err := r.status(ctx)
	if err != nil {
		return wire.Status{RunID: r.id, Unavailable: plain(err.Error()), Bottleneck: "none: " + plain(err.Error()), Consumers: []wire.ConsumerStatus{}, Producers: []wire.ProducerStatus{}}
	}
	return st
}
