package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/service/metrics"
)

// Service owns a state directory and a store, and answers for the runs in them. Its methods may be called from any goroutine.
type Service struct {
	opts     Options
	log      *slog.Logger
	host     string
	started  time.Time
	state    *os.File // the lock on the state directory
	root     *root
	why      string  // the root was chosen
	private  private // where RemoveState is set
	marked   bool    // likewise, as soon as there is something to remove
	idle     idle
	journals Journals
	handler  http.Handler
	metrics  *metrics.Metrics

	ctx     context.Context // ends when the service stops
	end     context.CancelFunc
	work    sync.WaitGroup // goroutines of the service; see spawn
	ready   atomic.Bool    // every run was tried once
	stopped atomic.Bool
	once    sync.Once
	err     error // of the first Close

	// admin is held by who changes the list of runs, for the whole of the change.
	admin    turn
	registry *registry

	mu   sync.RWMutex // guards runs
	runs map[string]*run

	sessions  sessions
	faults    faults
	hub       hub
	abandoned atomic.Int64 // samples that were uploaded, never committed, and freed
	sweep     struct {
		mu     sync.Mutex
		stop   func() bool
		rounds int
	}
}

// openers bounds how many runs are opened at once.
const openers = 8

// sweepEvery is how often the service looks for what has come to its end.
const sweepEvery = time.Second

// Open starts a service. It returns when the directories are its own and the list of runs is read; the runs open in the background, and those that are not open yet answer
// ErrUnavailable. The context bounds the opening only.
//
// Errors: ErrConflict, naming who, if another service has the state directory, the store or the journals; ErrDenied for directories of others.
func Open(ctx context.Context, o Options) (*Service, error) {
	o, err := o.resolve()
	if err != nil {
		return nil, err
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	s := &Service{admin: make(turn, 1), opts: o, log: o.Logger, host: host, started: o.Clock.Now(), runs: map[string]*run{}, journals: o.Journals}
	s.faults.fault = o.Fault
	s.sessions.byID = map[string]*session{}
	s.idle.over = make(chan struct{})
	s.ctx, s.end = context.WithCancel(context.Background())
	if err := s.take(ctx); err != nil {
		s.end()
		return nil, errors.Join(err, s.release())
	}
	s.metrics = metrics.New(s.Status)
	s.handler = s.routes()
	s.arm()
	return s, nil
}

// take makes everything that the service needs its own.
func (s *Service) take(ctx context.Context) error {
	me := owner{Host: s.host, PID: os.Getpid(), Since: s.started}
	var err error
	if s.state, err = own(s.opts.StateDir, me); err != nil {
		if errors.Is(err, sluice.ErrConflict) {
			err = taken{err}
		}
		return err
	}
	if err := s.begin(); err != nil {
		return err
	}
	if s.journals == nil {
		if s.journals, err = openJournals(ctx, &s.opts); err != nil {
			return err
		}
	}
	if s.registry, err = openRegistry(ctx, s.journals); err != nil {
		return err
	}
	dir, why, err := s.placeOfRoot()
	if err != nil {
		return err
	}
	id := newID()
	if s.opts.RemoveState {
		if err := s.willHave(dir, id, me); err != nil {
			return err
		}
	}
	if s.root, err = openRoot(dir, me, id); err != nil {
		return err
	}
	s.why = why
	s.log.Info("store", "dir", dir, "why", why, "max_bytes", s.opts.MaxBytes)
	if err := s.claimRoot(ctx); err != nil {
		return err
	}
	return s.openRuns(ctx)
}

// ErrRunning is in the chain of the error of an Open that was refused because another service has the state directory, which is named.
var ErrRunning = errors.New("another service has the state directory")

type taken struct{ error }

func (t taken) Unwrap() error      { return t.error }
func (taken) Is(target error) bool { return target == ErrRunning }

// begin prepares the state directory, which is ours by now.
func (s *Service) begin() error {
	// Whoever was killed has not taken back where it was.
	if err := os.Remove(filepath.Join(s.opts.StateDir, wire.EndpointFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return &sluice.Error{Kind: kindOfOS(err), Op: "service: open", Subject: s.opts.StateDir, Detail: "the endpoint of an earlier service can't be removed", Err: err}
	}
	if !s.opts.RemoveState {
		return keep(s.opts.StateDir)
	}
	if err := s.beginEmpty(); err != nil {
		return err
	}
	s.sweepBeside()
	return nil
}

// placeOfRoot is where the store is: where it was asked for, where it was before, or where there is room. A start that would leave samples of runs behind is refused, for a forgotten --store or
// a disk that is not mounted must not cost them; what lay in memory that is gone is lost already.
func (s *Service) placeOfRoot() (dir, why string, err error) {
	g := s.registry
	dir, why = s.opts.StoreDir, "it was asked for"
	if dir == "" {
		if dir, why = chooseRoot(&s.opts, memoryDir); g.storeDir != "" && (g.storeDisk || idOf(g.storeDir) == g.storeID) {
			dir, why = g.storeDir, "it is where it was before"
		}
	}
	if len(g.runs) == 0 || g.storeDir == "" || s.opts.AbandonSamples || idOf(dir) == g.storeID {
		return dir, why, nil
	}
	refuse := func(detail string) (string, string, error) {
		return "", "", &sluice.Error{Kind: sluice.Conflict, Op: "service: open", Subject: dir, Detail: detail, Hint: "name that directory with --store, or give up the samples in it with --abandon-samples"}
	}
	if idOf(g.storeDir) == g.storeID {
		return refuse(fmt.Sprintf("is not the store of this state: the samples of its %d runs are in %s", len(g.runs), g.storeDir))
	}
	if g.storeDisk {
		return refuse(fmt.Sprintf("is not the store of this state: the samples of its %d runs were in %s, and that is not there (is its disk mounted?)", len(g.runs), g.storeDir))
	}
	return dir, why, nil
}

// idOf is the id of the store in a directory, "" if there is none.
func idOf(dir string) string {
	data, err := os.ReadFile(filepath.Join(dir, idName))
	if err != nil {
		return "" // whatever it is, it is no store that can be used
	}
	return strings.TrimSpace(string(data))
}

// claimRoot makes sure that store and registry belong together.
func (s *Service) claimRoot(ctx context.Context) error {
	g := s.registry
	known := func(run string) bool { return g.runs[run] != nil }
	strays, err := s.root.strays(known)
	if err != nil {
		return err
	}
	if g.storeID == s.root.id {
		// What a deletion left behind that was cut off late.
		for _, dir := range strays {
			s.log.Warn("the directory of a run that is not known is removed", "dir", dir)
			if err := os.RemoveAll(dir); err != nil {
				return &sluice.Error{Kind: kindOfOS(err), Op: "service: open", Subject: dir, Detail: "can't be removed", Err: err}
			}
		}
		return nil
	}
	if len(strays) > 0 {
		return &sluice.Error{Kind: sluice.Conflict, Op: "service: open", Subject: s.root.dir, Detail: fmt.Sprintf("is the store of another service state: it holds %s, which this one does not know", filepath.Base(strays[0])),
			Hint: "name another directory, or remove this one if its samples are not needed any more"}
	}
	if g.storeID != "" && len(g.runs) > 0 {
		s.log.Warn("the store is not the one that the runs were in; their samples are lost", "store", s.root.dir, "before", g.storeDir, "runs", len(g.runs))
	}
	return g.write(ctx, record{T: "store", StoreID: s.root.id, Dir: s.root.dir, Disk: s.root.disk})
}

// openRuns opens the runs of the registry in the background, some at a time, and ends what is left of deletions.
func (s *Service) openRuns(ctx context.Context) error {
	var opening []*run
	for id, e := range s.registry.runs {
		bytes, err := s.capOf(&e.spec)
		if err != nil {
			return &sluice.Error{Kind: sluice.Conflict, Op: "service: open", Subject: id, Detail: "the run was made without caps.max_bytes, by a service without a cap", Hint: "start with --max-bytes none, as it was", Err: err}
		}
		r := s.newRun(e, id, bytes)
		if e.deleting {
			if err := s.remove(ctx, r); err != nil {
				return err
			}
			continue
		}
		s.runs[id] = r
		opening = append(opening, r)
	}
	slices.SortFunc(opening, func(a, b *run) int { return strings.Compare(a.id, b.id) })
	if len(opening) == 0 {
		s.ready.Store(true)
		return nil
	}
	next := make(chan *run, len(opening))
	for _, r := range opening {
		next <- r
	}
	close(next)
	var left atomic.Int64
	left.Store(int64(len(opening)))
	for range min(openers, len(opening)) {
		s.spawn(func() {
			for r := range next {
				if s.ctx.Err() != nil {
					return
				}
				if !r.ended.Load() {
					if err := r.open(r.ctx); err != nil && r.ctx.Err() == nil {
						r.fail(err)
					}
				}
				if left.Add(-1) == 0 {
					s.ready.Store(true)
					debug.FreeOSMemory() // what a replay leaves behind may be more than the refs
					s.log.Info("all runs are open", "runs", len(opening), "after", s.opts.Clock.Now().Sub(s.started))
				}
			}
		})
	}
	return nil
}

// spawn runs f in a goroutine that Close waits for. f must heed s.ctx.
func (s *Service) spawn(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.stopped.Load() {
		s.work.Go(f)
	}
}

// now is the time, with the monotonic reading that keeps what ends by itself from heeding a wall clock that jumps.
func (s *Service) now() time.Time { return s.opts.Clock.Now() }

// arm sets the timer of the next sweep.
func (s *Service) arm() {
	s.sweep.mu.Lock()
	defer s.sweep.mu.Unlock()
	if s.ctx.Err() == nil {
		s.sweep.stop = s.opts.Clock.AfterFunc(sweepEvery, func() {
			s.mu.Lock()
			if s.stopped.Load() {
				s.mu.Unlock()
				return
			}
			s.work.Add(1)
			s.mu.Unlock()
			defer s.work.Done()
			s.clean()
			s.arm()
		})
	}
}

// clean ends sessions, reservations and uploads whose time is over.
func (s *Service) clean() {
	now := s.now()
	for _, gone := range s.sessions.all() {
		if gone.over(now, s.opts.SessionGrace, s.opts.SessionIdle) && s.sessions.take(gone, now, &s.opts, false) {
			s.endSession(s.ctx, gone, "its connection was lost")
		}
	}
	s.idle.look(now, s.Ready(), s.opts.ExitIdle)
	s.sweep.rounds++
	// Not more often than once a minute, unless what was staged is to go sooner.
	staging := min(60, max(1, int(s.opts.ReservationTime/sweepEvery)))
	for _, r := range s.list() {
		r.giveBack(s.ctx, r.expire(now), "their time was over")
		if s.sweep.rounds%staging == 0 {
			r.sweepStaging(now)
		}
	}
}

// list is the runs, by name.
func (s *Service) list() []*run {
	s.mu.RLock()
	list := make([]*run, 0, len(s.runs))
	for _, r := range s.runs {
		list = append(list, r)
	}
	s.mu.RUnlock()
	slices.SortFunc(list, func(a, b *run) int { return strings.Compare(a.id, b.id) })
	return list
}

// find returns the run of the given name.
func (s *Service) find(id string) (*run, error) {
	s.mu.RLock()
	r := s.runs[id]
	s.mu.RUnlock()
	if r == nil {
		if err := sluice.ValidateID(id); err != nil {
			return nil, err
		}
		return nil, noRun(id)
	}
	return r, nil
}

func noRun(id string) *sluice.Error {
	return &sluice.Error{Kind: sluice.NotFound, Op: "run", Subject: id, Detail: "there is no such run", Hint: wire.HintCreateRun}
}

// capOf is what a run's cap counts against the service's.
func (s *Service) capOf(spec *wire.RunSpec) (int64, error) {
	c := &spec.Caps
	switch {
	case c.MaxBytes > 0:
		return c.MaxBytes, nil
	case s.opts.MaxBytes == NoCap: // there is nothing to add up for
		return 0, nil
	case spec.LargestSample == 0:
		return 0, &sluice.Error{Kind: sluice.Invalid, Op: "run", Subject: spec.RunID, Detail: "caps.max_bytes is missing: the service adds up what its runs may hold", Hint: "give it, or largest_sample beside max_samples"}
	case c.MaxSamples > (1<<53-1)/spec.LargestSample:
		return 0, &sluice.Error{Kind: sluice.Invalid, Op: "run", Subject: spec.RunID, Detail: "max_samples times largest_sample is 2^53 bytes or more"}
	}
	return c.MaxSamples * spec.LargestSample, nil
}

// create makes a run; made is false if one with this spec is there already.
func (s *Service) create(ctx context.Context, spec *wire.RunSpec) (r *run, made bool, err error) {
	if spec.RunID == registryName {
		return nil, false, &sluice.Error{Kind: sluice.Invalid, Op: "run", Subject: spec.RunID, Detail: "is a name of the service's own, choose another"}
	}
	cfg, err := spec.Config()
	if err != nil {
		return nil, false, err
	}
	if cfg, err = cfg.Resolve(); err != nil {
		return nil, false, err
	}
	resolved, err := wire.SpecOf(&cfg)
	if err != nil {
		return nil, false, err
	}
	bytes, err := s.capOf(&resolved)
	if err != nil {
		return nil, false, err
	}
	s.admin.Lock()
	defer s.admin.Unlock()
	if s.stopped.Load() {
		return nil, false, errStopping
	}
	if e := s.registry.runs[spec.RunID]; e != nil {
		if e.deleting {
			return nil, false, &sluice.Error{Kind: sluice.Unavailable, Op: "run", Subject: spec.RunID, Detail: "is being deleted", Hint: "delete it again to end that, or ask again"}
		}
		if d := differs(&e.spec, &resolved); d != "" {
			return nil, false, &sluice.Error{Kind: sluice.Conflict, Op: "run", Subject: spec.RunID, Detail: "is there already, and its " + d, Hint: "choose another name, or delete the run first"}
		}
		r, err := s.find(spec.RunID)
		return r, false, err
	}
	sum := bytes
	for _, o := range s.list() {
		sum += o.cap
	}
	if s.opts.MaxBytes != NoCap && sum > s.opts.MaxBytes {
		return nil, false, &sluice.Error{Kind: sluice.Full, Op: "run", Subject: spec.RunID, Detail: fmt.Sprintf("its cap of %d bytes does not fit: the runs' caps would add up to %d, and the service's is %d", bytes, sum, s.opts.MaxBytes),
			Hint: "lower caps.max_bytes, delete a run, or give the service more"}
	}
	ctx = context.WithoutCancel(ctx) // a caller that goes away leaves no half of a run
	if err := s.registry.write(ctx, record{T: "create", RunID: spec.RunID, At: s.opts.Clock.Now(), Spec: &resolved}); err != nil {
		return nil, false, err
	}
	r = s.newRun(s.registry.runs[spec.RunID], spec.RunID, bytes)
	if err := r.open(ctx); err != nil {
		// A run that can't be opened at birth is none: what was made of it is taken back.
		return nil, false, errors.Join(err, s.delete(ctx, r))
	}
	s.mu.Lock()
	s.runs[r.id] = r
	s.mu.Unlock()
	s.log.Info("run created", "run", r.id, "cap_bytes", bytes)
	s.hub.send(wire.Event{Time: s.opts.Clock.Now(), RunID: r.id, Kind: "created"})
	return r, true, nil
}

// turn is a lock that one may wait for among other things.
type turn chan struct{}

func (t turn) Lock()   { t <- struct{}{} }
func (t turn) Unlock() { <-t }

// change changes a run's queue by edit, one caller at a time, and notes in the registry what edit made of the spec, also if the caller is gone by then: the queue has changed.
func (s *Service) change(ctx context.Context, r *run, edit func(*wire.RunSpec) error) error {
	select { // the caller is in the run, and whoever deletes that has the turn and waits for all to leave
	case s.admin <- struct{}{}:
		defer s.admin.Unlock()
	case <-r.ctx.Done():
		if why := r.why.Load(); why != nil {
			return why
		}
		return errStopping
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	now := *r.now.Load()
	if err := edit(&now); err != nil {
		return err
	}
	if err := s.registry.write(context.WithoutCancel(ctx), record{T: "change", RunID: r.id, Spec: &now}); err != nil {
		return err
	}
	r.now.Store(&now)
	return nil
}

// Delete removes a run with all that is in it: whoever waits on it is told that it is gone, its journal and its files go. To delete what is not there is success.
func (s *Service) Delete(ctx context.Context, id string) error {
	s.admin.Lock()
	defer s.admin.Unlock()
	if s.stopped.Load() {
		return errStopping
	}
	if err := sluice.ValidateID(id); err != nil {
		return err
	}
	e := s.registry.runs[id]
	if e == nil {
		return nil
	}
	r, err := s.find(id)
	if err != nil { // an earlier attempt was cut off
		r = s.newRun(e, id, 0)
	}
	return s.delete(context.WithoutCancel(ctx), r)
}

// delete is Delete with admin held.
func (s *Service) delete(ctx context.Context, r *run) error {
	if err := s.registry.write(ctx, record{T: "delete", RunID: r.id}); err != nil {
		return err
	}
	s.mu.Lock()
	delete(s.runs, r.id)
	s.mu.Unlock()
	r.cut()
	if err := r.stop(ctx, noRun(r.id)); err != nil {
		s.log.Warn("a run was not stopped in order before it was deleted", "run", r.id, "err", err)
	}
	s.sessions.forget(r)
	if err := s.remove(ctx, r); err != nil {
		return err
	}
	s.log.Info("run deleted", "run", r.id)
	s.hub.send(wire.Event{Time: s.opts.Clock.Now(), RunID: r.id, Kind: "deleted"})
	return nil
}

// remove takes away what a deleted run has left: the journal, and the files. Whoever has one mapped keeps the mapping.
func (s *Service) remove(ctx context.Context, r *run) error {
	if err := s.journals.Delete(ctx, r.id); err != nil && !errors.Is(err, sluice.ErrNotFound) {
		return err
	}
	for _, dir := range []string{s.root.runDir(r.id), s.root.stagingDir(r.id)} {
		if err := os.RemoveAll(dir); err != nil {
			return &sluice.Error{Kind: kindOfOS(err), Op: "service: delete", Subject: dir, Detail: "can't be removed", Err: err}
		}
	}
	return s.registry.write(ctx, record{T: "deleted", RunID: r.id})
}

// Handler is the API, without a door: whoever serves it must first find out who calls and say so with access.WithCaller.
func (s *Service) Handler() http.Handler { return s.handler }

// StoreDir is the directory that the samples are in.
func (s *Service) StoreDir() string { return s.root.dir }

// StoreReason says why they are there.
func (s *Service) StoreReason() string { return s.why }

// StateDir is the service's state directory.
func (s *Service) StateDir() string { return s.opts.StateDir }

// Ready reports whether every run has been opened, or tried at least.
func (s *Service) Ready() bool { return s.ready.Load() && !s.stopped.Load() }

// Abandoned is how many samples were freed because they were uploaded and never committed.
func (s *Service) Abandoned() int64 { return s.abandoned.Load() }

// Subscribe listens to what happens in a run, or in all of them if run is "". Call stop when you are done. Who is too slow loses events.
func (s *Service) Subscribe(run string) (events <-chan wire.Event, stop func()) {
	return s.hub.subscribe(run)
}

// Status is a snapshot of the service and of all its runs.
func (s *Service) Status(ctx context.Context) wire.ServiceStatus {
	w := wire.ServiceStatus{
		Version: s.opts.Version, Host: s.host, PID: os.Getpid(), Started: s.started, UptimeSeconds: wire.SecondsOf(s.opts.Clock.Now().Sub(s.started)), Ready: s.Ready(),
		Durability: s.opts.durability(), StoreDir: s.root.dir, MaxBytes: max(s.opts.MaxBytes, 0), Sessions: s.sessions.count(), Abandoned: s.Abandoned(), Runs: []wire.Status{},
	}
	for _, r := range s.list() {
		w.CapBytes += r.cap
		w.Runs = append(w.Runs, r.shown(ctx))
	}
	return w
}

var errStopping = &sluice.Error{Kind: sluice.Unavailable, Op: "service", Detail: "is stopping", Hint: "ask again when it is back"}

// Close stops the service: who waits is told that it is unavailable, what was written is made durable, and everything is let go of. The context bounds how
// long that may take; what is under way then breaks off. It is idempotent. Samples, refs and leases stay for the next start.
func (s *Service) Close(ctx context.Context) error {
	s.once.Do(func() {
		s.mu.Lock()
		s.stopped.Store(true)
		s.mu.Unlock()
		s.sweep.mu.Lock()
		s.end()
		if s.sweep.stop != nil {
			s.sweep.stop()
		}
		s.sweep.mu.Unlock()
		var errs sync.Map
		var stopping sync.WaitGroup
		for _, r := range s.list() {
			stopping.Go(func() {
				if err := r.stop(ctx, errStopping); err != nil {
					errs.Store(r.id, err)
				}
			})
		}
		stopping.Wait()
		s.work.Wait()
		errs.Range(func(_, err any) bool { s.err = errors.Join(s.err, err.(error)); return true })
		s.admin.Lock()
		s.err = errors.Join(s.err, s.release())
		s.admin.Unlock()
		if s.err != nil {
			s.log.Error("service stopped", "err", s.err)
		} else {
			s.log.Info("service stopped")
		}
	})
	return s.err
}

// release lets go of registry, journals and directories.
func (s *Service) release() error {
	var errs []error
	if s.registry != nil {
		errs = append(errs, s.registry.close())
	}
	if s.journals != nil {
		errs = append(errs, s.journals.Close())
	}
	if s.marked {
		errs = append(errs, s.leaveNothing())
	}
	if s.root != nil {
		errs = append(errs, s.root.lock.Close())
	}
	if s.state != nil {
		errs = append(errs, s.state.Close())
	}
	return errors.Join(errs...)
}
