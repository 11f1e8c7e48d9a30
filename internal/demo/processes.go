package demo

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/client"
	"github.com/sluice-ml/sluice/prompt"
	"github.com/sluice-ml/sluice/queue"
	"github.com/sluice-ml/sluice/store/dirstore"
	"github.com/sluice-ml/sluice/stream"
	"github.com/sluice-ml/sluice/target/tinyllama"
)

// childArgs are the arguments of the processes that a demo of several processes starts: a hidden command, which calls [Child].
var childArgs = []string{"demo", "process"}

// ChildCommand is the last of them.
const ChildCommand = "process"

// patience is how long a process may take to end when nothing is left for it to do.
const patience = 10 * time.Second

// errNoParent is for who calls the hidden command by hand.
var errNoParent = &sluice.Error{Kind: sluice.Invalid, Op: "demo: process", Detail: "is started by `sluice demo --processes`, and by nobody else"}

// job is what a child has to do.
type job struct {
	Produce     bool // otherwise it consumes
	Rank        int
	Incarnation int64

	Algorithm sluice.Algorithm
	Prompts   []string
	Model     string
	AuxLayers []int
	Batch     int
	MaxTokens int64

	Store          string // directory of the store, where the queue is the parent's
	State          string // or the state directory of the service that has both
	Folder, Beside string // what is to be removed if the parent can't do it any more: the demo's folder, and the one that it was made in
	Pid            int    // of the parent
}

func (j *job) name() string {
	if j.Produce {
		return "producer"
	}
	return trainer(j.Rank)
}

// rowRead is what a producer says of a row that it has read.
type rowRead struct {
	Row  [sha256.Size]byte
	Read prompt.Stats
}

// stepDone is what a consumer says after a step.
type stepDone struct {
	Samples []seen
	Differs string
}

// bye is the last word of a child.
type bye struct {
	Err     *wireError
	Refused int64
	Read    prompt.Stats
}

// runProcesses is run with a process for the producer and for each consumer. This one has the queue, and with it the gate.
func runProcesses(ctx context.Context, o *Options, cfg sluice.RunConfig, info sluice.TargetInfo, store sluice.ClaimStore, dir *folder) (result *Result, err error) {
	q, err := queue.Open(ctx, cfg, store, nil)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, q.Stop(context.WithoutCancel(ctx))) }() // an interrupt must not keep anything from being given back
	return newSession(o, info, store, q).processes(ctx, job{Store: dir.store(), Folder: dir.Path, Beside: dir.parent})
}

// processes starts them; place says where store and queue are.
func (s *session) processes(ctx context.Context, place job) (result *Result, err error) {
	o, lasting := s.o, context.WithoutCancel(ctx)
	var read atomic.Pointer[prompt.Stats]
	read.Store(&prompt.Stats{})
	s.read = func() prompt.Stats { return *read.Load() }

	j := place
	j.Algorithm, j.Prompts, j.Model, j.AuxLayers, j.Batch, j.MaxTokens, j.Pid = o.Algorithm, o.Prompts, o.Model, o.AuxLayers, o.Batch, o.MaxTokens, os.Getpid()
	work, stop := context.WithCancel(ctx)
	defer stop()
	var children errgroup.Group // they end when the stream does, or with work
	var produced error
	children.Go(func() error {
		j := j
		j.Produce = true
		var last *bye
		last, produced = s.process(work, j, func(func()) map[string]handler {
			return map[string]handler{"row": handleOnly(func(_ context.Context, r rowRead) error {
				read.Store(&r.Read)
				s.row(r.Row)
				return nil
			})}
		})
		if last != nil {
			s.refused = last.Refused
			read.Store(&last.Read)
		}
		if produced != nil {
			stop()
		}
		return nil
	})
	killer := &killer{s: s}
	for rank := range o.Ranks {
		children.Go(func() error {
			j := j
			j.Rank = rank
			err := s.consumer(work, j, killer)
			if err != nil {
				stop() // neither the producer nor another rank must wait for one that is gone
			}
			return err
		})
	}
	consumed := s.watch(lasting, children.Wait)
	seconds := time.Since(s.start).Seconds()
	err = s.afterKills(lasting)
	if s.kills = killer.kills.Load(); o.Kill && s.kills == 0 && produced == nil && consumed == nil {
		consumed = &sluice.Error{Kind: sluice.Invalid, Op: "demo", Subject: "--kill", Detail: "the prompts were over before a consumer could be killed in its second step", Hint: "give more prompts, or a smaller --batch"}
	}
	result, ferr := s.finish(ctx, produced, consumed, seconds)
	return result, errors.Join(ferr, err)
}

// afterKills sees to what a killed process held: GC ends a session whose process is gone, and a service does so by itself when its connection has been gone for a moment.
func (s *session) afterKills(ctx context.Context) error {
	for until := time.Now().Add(patience); ; {
		if _, err := s.store.GC(ctx); err != nil {
			return err
		}
		if !s.o.Service || !s.o.Kill || s.store.Health().ResidentBytes == 0 || time.Now().After(until) {
			return nil
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// killer kills one consumer.
type killer struct {
	s     *session
	once  atomic.Bool
	kills atomic.Int64
}

// checked is called when the rank's consumer has checked a batch and waits for the word to step. If it is time for it to die, checked kills it, and does not return
// before it is gone: so nothing is acknowledged that is not in the books.
func (k *killer) checked(ctx context.Context, rank int, kill func()) error {
	if !k.s.o.Kill || k.s.ranks[rank].steps == 0 {
		return nil
	}
	status, err := k.s.queue.Status(ctx)
	if err != nil {
		return err
	}
	for _, c := range status.Consumers {
		if c.Name == trainer(rank) && c.Leases > 0 && k.once.CompareAndSwap(false, true) {
			k.s.o.Warn(fmt.Sprintf("%s is killed while it holds %d samples; a new one takes over", c.Name, c.Leases))
			k.kills.Add(1)
			kill()
			<-ctx.Done()
			return context.Cause(ctx)
		}
	}
	return nil
}

// consumer runs the consumer of a rank, and a successor if it is killed.
func (s *session) consumer(ctx context.Context, j job, k *killer) error {
	t := s.ranks[j.Rank]
	for ; ; j.Incarnation++ {
		killed := false
		last, err := s.process(ctx, j, func(kill func()) map[string]handler {
			return map[string]handler{
				"checked": handleOnly(func(ctx context.Context, _ struct{}) error {
					return k.checked(ctx, j.Rank, func() { killed = true; kill() })
				}),
				"stepped": handleOnly(func(_ context.Context, d stepDone) error {
					t.differs = d.Differs
					s.stepped(j.Rank, d.Samples)
					return nil
				}),
			}
		})
		if killed && last == nil && ctx.Err() == nil {
			continue
		}
		return err
	}
}

// process runs a child until it has ended and none of its calls is out, and returns its last word, or nil if it was lost. When ctx ends, the child is hung up on, and killed if it does not
// heed that.
func (s *session) process(ctx context.Context, j job, more func(kill func()) map[string]handler) (last *bye, err error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	conn, theirs, err := pipe()
	if err != nil {
		return nil, err
	}
	alive, hangUp := context.WithCancel(ctx)
	defer hangUp()
	cmd := exec.CommandContext(alive, self, childArgs...)
	cmd.Args[0] = os.Args[0]
	cmd.Stderr = os.Stderr // for a panic
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt from the terminal is for the parent, which ends its children
	cmd.Cancel = func() error { return nil }              // serve hangs up
	cmd.WaitDelay = patience                              // from then to the kill

	err = cmd.Start()
	_ = theirs.Close()
	if err != nil {
		return nil, errors.Join(&sluice.Error{Kind: sluice.Denied, Op: "demo: processes", Subject: j.name(), Detail: "cannot be started", Err: err}, conn.Close())
	}

	handlers := queueHandlers(s.queue)
	for name, h := range more(func() { _ = cmd.Process.Kill() }) {
		handlers[name] = h
	}
	handlers["job"] = handle(func(context.Context, struct{}) (job, error) { return j, nil })
	handlers["warn"] = handleOnly(func(_ context.Context, line string) error { s.o.Warn(j.name() + ": " + line); return nil })
	handlers["bye"] = handleOnly(func(_ context.Context, b bye) error { last = &b; return nil })
	err = serve(alive, conn, handlers)
	hangUp()
	gone := cmd.Wait()
	switch {
	case err != nil:
		return last, err
	case last != nil && last.Err == nil:
		return last, nil
	case ctx.Err() != nil:
		return last, context.Cause(ctx)
	case last != nil && last.Err.Canceled:
		return last, &sluice.Error{Kind: sluice.Aborted, Op: "demo: processes", Subject: j.name(), Detail: "was interrupted"}
	case last != nil:
		return last, last.Err.error()
	}
	return nil, &sluice.Error{Kind: sluice.Unavailable, Op: "demo: processes", Subject: j.name(), Detail: "ended before its time", Err: gone}
}

// pipe makes a connection to a child.
func pipe() (ours net.Conn, theirs *os.File, err error) {
	syscall.ForkLock.RLock()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err == nil {
		unix.CloseOnExec(fds[0])
		unix.CloseOnExec(fds[1])
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	f := os.NewFile(uintptr(fds[0]), "child")
	theirs = os.NewFile(uintptr(fds[1]), "parent")
	ours, err = net.FileConn(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	return ours, theirs, nil
}

// Child is what a process does that a demo of several processes has started. It ends when its work is done or its parent is gone.
func Child(ctx context.Context) error {
	const fd = 3
	if _, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE); err != nil {
		return errNoParent
	}
	f := os.NewFile(fd, "parent")
	conn, err := net.FileConn(f)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	parent := newCaller(conn)
	defer parent.Close() //nolint:errcheck // nothing was written that was not answered
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	told := make(chan job, 1)
	go func() { // ends with conn
		<-parent.over
		cancel()
		var j job
		select {
		case j = <-told:
		default: // it knows of nothing to do
		}
		wait := patience // for whatever keeps it
		if j.State != "" && orphaned(j.Pid) {
			wait = 0 // the service has died with the parent: nothing can be given back
		}
		time.AfterFunc(wait, func() {
			if j.Folder != "" {
				removeOrphaned(j.Folder, j.Beside, j.Pid)
			}
			os.Exit(1)
		})
	}()

	var j job
	if err := parent.call(ctx, "job", struct{}{}, &j); err != nil {
		return err
	}
	told <- j
	var last bye
	err = j.do(ctx, parent, &last)
	last.Err = toWire(err)
	if parent.call(context.WithoutCancel(ctx), "bye", last, nil) != nil {
		removeOrphaned(j.Folder, j.Beside, j.Pid)
	}
	return nil // the parent says what was wrong
}

// open opens the store and the queue: the parent's, or those of a service.
func (j *job) open(ctx context.Context, parent *caller) (sluice.Store, sluice.Queue, func() error, error) {
	if j.State == "" {
		store, err := dirstore.Open(j.Store, &dirstore.Options{Logger: quiet()})
		if err != nil {
			return nil, nil, nil, err
		}
		return store, remoteQueue{parent}, store.Close, nil
	}
	c, err := client.Dial(ctx, client.Options{StateDir: j.State, Logger: quiet()})
	if err != nil {
		return nil, nil, nil, err
	}
	run, err := c.Open(ctx, runID)
	if err != nil {
		return nil, nil, nil, errors.Join(err, c.Close())
	}
	return run.Store(), run.Queue(), c.Close, nil
}

// do does it, and leaves nothing open.
func (j *job) do(ctx context.Context, parent *caller, last *bye) (err error) {
	schema, err := sluice.SchemaOf(j.Algorithm)
	if err != nil {
		return err
	}
	model, err := loadModel(j.Model)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, model.Close()) }()
	store, queue, leave, err := j.open(ctx, parent)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, leave()) }()
	event := func(e stream.Event) {
		if e.Kind != stream.NotAdmitted {
			_ = parent.call(context.WithoutCancel(ctx), "warn", e.String(), nil) // for people; a parent that is gone has none
		}
	}
	o := &Options{Algorithm: j.Algorithm, Prompts: j.Prompts, AuxLayers: j.AuxLayers, Batch: j.Batch, MaxTokens: j.MaxTokens}
	if j.Produce {
		return produce(ctx, parent, last, o, model, store, queue, schema, event)
	}
	loader, err := newLoader(store, queue, schema, o, j.Rank, j.Incarnation, event)
	if err != nil {
		return err
	}
	c := &checker{target: model, auxLayers: o.AuxLayers, store: store, schema: schema}
	return consume(ctx, loader, c, func(ctx context.Context) error {
		return parent.call(ctx, "checked", struct{}{}, nil)
	}, func(ctx context.Context, all []seen) error {
		return parent.call(ctx, "stepped", stepDone{all, c.differs}, nil)
	})
}

func produce(ctx context.Context, parent *caller, last *bye, o *Options, model *tinyllama.Model, store sluice.Store, queue sluice.Queue, schema *sluice.Schema, event func(stream.Event)) error {
	rows, err := openPrompts(o, model, schema)
	if err != nil {
		return err
	}
	producer, err := newProducer(model, store, queue, schema, o)
	if err != nil {
		return errors.Join(err, rows.Close())
	}
	source := noting(rows, func(ctx context.Context, row [sha256.Size]byte) error {
		return parent.call(ctx, "row", rowRead{row, rows.Stats()}, nil)
	})
	pipeline, err := stream.NewPipeline(producer, queue, source, &stream.PipelineOptions{OnEvent: event})
	if err != nil {
		return errors.Join(err, rows.Close())
	}
	if err = pipeline.Start(ctx); err == nil {
		err = pipeline.Wait(context.WithoutCancel(ctx)) // it ends with ctx
	}
	last.Refused, last.Read = pipeline.Stats().NotAdmitted, rows.Stats()
	return errors.Join(err, rows.Close())
}
