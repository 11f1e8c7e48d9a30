package torture

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/client"
	"github.com/sluice-ml/sluice/internal/child"
	"github.com/sluice-ml/sluice/internal/scratch"
	"github.com/sluice-ml/sluice/internal/wire"
)

// Options are what a torture is like.
type Options struct {
	Duration  time.Duration // in which samples are produced and processes killed; what is under way then is finished
	Producers int           // 2 if 0
	Consumers int           // 3 if 0
	Seed      uint64        // of who is killed when, a random one if 0; the rest of the world is not in its hands
	Dir       string        // where the folder of the run is made; the temporary directory if empty
	Keep      bool          // leave the folder, for who wants to read the books
	Fault     string        // one of the service's hidden faults, which must turn the audit red
	Power     bool          // durability "power"
	Small     bool          // a file system of our own is mounted in Dir and filled for a while; set by [Run]
	Say       func(string)  // progress, a line
}

// Result is what came of it.
type Result struct {
	Seed       uint64           `json:"seed"`
	Seconds    float64          `json:"seconds"`
	Kills      map[string]int64 `json:"kills"` // by role: producer, consumer, service
	Stops      int64            `json:"stops"` // SIGSTOP for longer than a lease, then SIGCONT
	DiskFull   float64          `json:"disk_full_seconds"`
	NoDiskFull string           `json:"no_disk_full,omitempty"` // why it was not
	audit
	LeakedBytes int64    `json:"leaked_bytes"`
	LeakedFiles int64    `json:"leaked_files"`
	Findings    []string `json:"findings"`
	Books       string   `json:"books,omitempty"` // folder, if it was kept
}

// OK says whether nothing was found.
func (r *Result) OK() bool {
	return r.clean() && r.LeakedBytes == 0 && r.LeakedFiles == 0 && len(r.Findings) == 0
}

// enough is the duration from which on every role must have been killed.
const enough = 10 * time.Second

// judge finds fault with a torture that was none: in which nothing flowed, or not through everybody, or nobody was killed.
func (r *Result) judge(o *Options) {
	find := func(format string, args ...any) { r.Findings = append(r.Findings, fmt.Sprintf(format, args...)) }
	if r.Produced == 0 || r.Acked == 0 {
		find("nothing flowed: %d samples were put and %d acked, which proves nothing", r.Produced, r.Acked)
	}
	if r.Kills["producer"]+r.Kills["consumer"]+r.Kills["service"] == 0 {
		find("nobody was killed, which proves nothing")
	}
	if o.Duration < enough {
		return
	}
	for _, role := range []string{"producer", "consumer", "service"} {
		if r.Kills[role] == 0 {
			find("no %s was killed, which proves too little", role)
		}
	}
	idle := func(role string, n int, has map[string]int64, what string) {
		for i := range n {
			if name := fmt.Sprintf("%s-%d", role, i); has[name] == 0 && r.Produced >= int64(20*n) {
				find("%s %s", name, what)
			}
		}
	}
	idle("producer", o.Producers, r.put, "never got a sample into the queue")
	idle("consumer", o.Consumers, r.got, "never got a sample")
}

const (
	runID      = "torture"
	capBytes   = 48 << 20
	mountBytes = 96 << 20
	visibility = 2 * time.Second
	// Uploads that are not committed outlive a service that was killed for so long, and the audit of leaks has to wait for them.
	reservationTime = 8 * time.Second
	drainTime       = 2 * time.Minute // for what is under way at the end of the duration
)

// program is the command line that starts this binary again.
var program = os.Executable

// rack is a torture under way.
type rack struct {
	o       *Options
	exe     string
	dir     string // of the run
	rand    *rand.Rand
	address string // TCP

	service *process
	client  *client.Client
	book    *book

	mu      sync.Mutex
	workers map[string]*process
	result  *Result
}

func (r *rack) state() string { return filepath.Join(r.dir, "state") }
func (r *rack) store() string { return filepath.Join(r.dir, "store") }
func (r *rack) books() string { return filepath.Join(r.dir, "books") }

// process is a child.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
	err  error
	log  *os.File
}

// start starts this binary with the arguments. What it says goes into a file of the run's folder.
func (r *rack) start(name string, args ...string) (*process, error) {
	log, err := os.OpenFile(filepath.Join(r.dir, name+".log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(context.Background(), r.exe, args...) // whoever ends it says how
	cmd.Args[0] = os.Args[0]
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), wire.EnvState+"="+r.state(), wire.EnvURL+"=", wire.EnvTokenFile+"=")
	ended, err := child.Start(cmd)
	if err != nil {
		return nil, errors.Join(err, log.Close())
	}
	p := &process{cmd: cmd, done: make(chan struct{}), log: log}
	go func() {
		p.err = errors.Join(<-ended, log.Close())
		close(p.done)
	}()
	return p, nil
}

// lastWord is the last line of a process's log.
func (r *rack) lastWord(name string) string {
	data, err := os.ReadFile(filepath.Join(r.dir, name+".log"))
	if err != nil {
		return err.Error()
	}
	text := strings.TrimSpace(string(data))
	return text[strings.LastIndexByte(text, '\n')+1:]
}

func (p *process) signal(s os.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// kill kills it and waits for its end. ended says that it was through before.
func (p *process) kill() (ended bool, err error) {
	select {
	case <-p.done:
		return true, nil
	default:
	}
	if err := p.signal(syscall.SIGKILL); err != nil {
		return false, err
	}
	<-p.done
	return p.cmd.ProcessState.Success(), nil
}

// Run runs the torture. It starts itself once more where it may mount a small file system of its own, if it can.
func Run(ctx context.Context, o Options) (*Result, error) {
	if o.Producers == 0 {
		o.Producers = 2
	}
	if o.Consumers == 0 {
		o.Consumers = 3
	}
	if o.Seed == 0 {
		o.Seed = 1 + uint64(rand.Uint32()) // short enough to be typed, and exact in any JSON reader
	}
	if o.Dir == "" {
		o.Dir = os.TempDir()
	}
	if o.Say == nil {
		o.Say = func(string) {}
	}
	if err := supported(); err != nil {
		return nil, err
	}
	exe, err := program()
	if err != nil {
		return nil, err
	}
	r := &rack{o: &o, exe: exe, rand: rand.New(rand.NewPCG(o.Seed, 0)), workers: map[string]*process{}, result: &Result{Seed: o.Seed, Findings: []string{}, Kills: map[string]int64{"producer": 0, "consumer": 0, "service": 0}}}
	folder, err := scratch.New(o.Dir, "sluice-torture-")
	if err != nil {
		return nil, &sluice.Error{Kind: sluice.Denied, Op: "torture", Subject: o.Dir, Detail: "cannot make a folder there", Err: err}
	}
	r.dir = folder.Path
	for _, dir := range []string{r.state(), r.store(), r.books()} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return nil, errors.Join(err, folder.Remove())
		}
	}
	if o.Small {
		if err := mountSmall(r.store(), mountBytes); err != nil {
			o.Small, r.result.NoDiskFull = false, err.Error()
		}
	} else {
		r.result.NoDiskFull = "no file system of its own could be mounted"
	}
	err = r.run(ctx)
	if ctx.Err() != nil {
		err = ctx.Err() // what broke off because of that is no fault
	}
	for _, p := range append(r.all(), r.service) {
		if p != nil {
			if _, kerr := p.kill(); kerr != nil {
				err = errors.Join(err, kerr)
			}
		}
	}
	if o.Small {
		err = errors.Join(err, unmount(r.store()))
	}
	if o.Keep || ctx.Err() == nil && (err != nil || !r.result.OK()) {
		// Under another name, since the next torture clears what it takes for a killed one's.
		kept := filepath.Join(o.Dir, "kept-"+filepath.Base(r.dir))
		if rerr := os.Rename(r.dir, kept); rerr != nil {
			return r.result, errors.Join(err, rerr)
		}
		r.result.Books = kept
		return r.result, err
	}
	return r.result, errors.Join(err, folder.Remove())
}

func (r *rack) all() []*process {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []*process
	for _, p := range r.workers {
		all = append(all, p)
	}
	return all
}

func (r *rack) run(ctx context.Context) error {
	var err error
	if r.book, err = openBook(r.books(), "torture", 1); err != nil {
		return err
	}
	defer func() { _ = r.book.close() }() // each of its lines has been written
	if err := r.choosePort(ctx); err != nil {
		return err
	}
	if err := r.startService(ctx); err != nil {
		return err
	}
	schema, err := sluice.SchemaOf(sluice.DFlash)
	if err != nil {
		return err
	}
	quiet := slog.New(slog.DiscardHandler)
	if r.client, err = client.Dial(ctx, client.Options{StateDir: r.state(), HTTPOnly: true, Logger: quiet}); err != nil {
		return err
	}
	defer func() { _ = r.client.Close() }() // it has nothing to give back
	if _, err := r.client.CreateRun(ctx, sluice.RunConfig{
		RunID: runID, Schema: schema, Caps: sluice.Caps{MaxBytes: capBytes}, VisibilityTimeout: visibility, MaxExpiries: 1000, Producers: r.o.Producers,
	}); err != nil {
		return err
	}

	started := time.Now()
	until := started.Add(r.o.Duration)
	limit, cancel := context.WithDeadline(ctx, until.Add(drainTime))
	defer cancel()
	errs := make(chan error, r.o.Producers+r.o.Consumers+1)
	var workers sync.WaitGroup
	for i := range r.o.Producers {
		workers.Go(func() { errs <- r.keep(limit, fmt.Sprintf("producer-%d", i), i%2 == 1, until) })
	}
	for i := range r.o.Consumers {
		workers.Go(func() { errs <- r.keep(limit, fmt.Sprintf("consumer-%d", i), i%2 == 1, until) })
	}
	tormented := make(chan struct{})
	go func() {
		defer close(tormented)
		errs <- r.torment(limit, until)
	}()
	finished := make(chan struct{})
	go func() { workers.Wait(); close(finished) }()
	if err := r.watch(limit, started, finished); err != nil {
		cancel()
		<-finished
		<-tormented
		return err
	}
	<-tormented
	close(errs)
	for e := range errs {
		err = errors.Join(err, e)
	}
	r.result.Seconds = time.Since(started).Seconds()
	if err != nil {
		return err
	}
	return r.close(ctx)
}

// choosePort finds a TCP port of the loopback that is free now; the service gets the same one at every start.
func (r *rack) choosePort(ctx context.Context) error {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	r.address = l.Addr().String()
	return l.Close()
}

// url is where a worker finds the service: over TCP if it is to be a remote one, and otherwise by itself.
func (r *rack) url(remote bool) string {
	if remote {
		return "http://" + r.address
	}
	return ""
}

func (r *rack) startService(ctx context.Context) error {
	durability := "process"
	if r.o.Power {
		durability = "power"
	}
	args := []string{"serve", "--state", r.state(), "--store", r.store(), "--max-bytes", fmt.Sprint(capBytes), "--listen", r.address, "--durability", durability, "--reservation-time", reservationTime.String()}
	if r.o.Fault != "" {
		args = append(args, "--fault", r.o.Fault)
	}
	p, err := r.start("service", args...)
	if err != nil {
		return err
	}
	r.mu.Lock()
	r.service = p
	r.mu.Unlock()
	for {
		if e, err := wire.ReadEndpoint(r.state()); err == nil && e.PID == p.cmd.Process.Pid {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("the service ended at its start: %w: %s", p.err, r.lastWord("service"))
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// keep runs a worker until it has no more to do, and starts another incarnation whenever it was killed.
func (r *rack) keep(ctx context.Context, name string, remote bool, until time.Time) error {
	for inc := int64(1); ; inc++ {
		job, err := json.Marshal(Job{Name: name, Incarnation: inc, Books: r.books(), URL: r.url(remote), UntilNanos: now() + int64(time.Until(until)), Seed: r.o.Seed})
		if err != nil {
			return err
		}
		p, err := r.start(name, "torture", "worker", string(job))
		if err != nil {
			return err
		}
		r.mu.Lock()
		r.workers[name] = p
		r.mu.Unlock()
		select {
		case <-p.done:
		case <-ctx.Done():
			_, err := p.kill()
			return errors.Join(fmt.Errorf("%s was not through in time: %w", name, context.Cause(ctx)), err)
		}
		if p.cmd.ProcessState.Success() {
			return nil
		}
		if status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || !status.Signaled() {
			return fmt.Errorf("%s failed: %w: %s", name, p.err, r.lastWord(name))
		}
	}
}

// torment kills until the time is over.
func (r *rack) torment(ctx context.Context, until time.Time) error {
	full := r.result.NoDiskFull == ""
	fullAt := time.Now().Add(time.Until(until) * 2 / 5)
	first := []int{0, 8, 14} // one of each role comes before chance
	r.rand.Shuffle(len(first), func(i, j int) { first[i], first[j] = first[j], first[i] })
	for {
		wait := 100*time.Millisecond + time.Duration(r.rand.Int64N(int64(900*time.Millisecond)))
		if time.Until(until) < wait {
			return nil
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil
		}
		var err error
		n := r.rand.IntN(20)
		if len(first) > 0 {
			n, first = first[0], first[1:]
		}
		switch {
		case full && len(first) == 0 && time.Now().After(fullAt):
			full = false
			err = r.fillUp(ctx, min(time.Until(until)/4, 5*time.Second))
		case n < 8:
			err = r.killWorker("producer", r.o.Producers)
		case n < 14:
			err = r.killWorker("consumer", r.o.Consumers)
		case n < 18:
			err = r.killService(ctx)
		default:
			err = r.stopWorker(ctx)
		}
		if err != nil {
			return err
		}
	}
}

func (r *rack) worker(role string, of int) *process {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.workers[fmt.Sprintf("%s-%d", role, r.rand.IntN(of))]
}

func (r *rack) killWorker(role string, of int) error {
	p := r.worker(role, of)
	if p == nil {
		return nil
	}
	ended, err := p.kill()
	if !ended && err == nil {
		r.count(role)
	}
	return err
}

func (r *rack) count(role string) {
	r.mu.Lock()
	r.result.Kills[role]++
	r.mu.Unlock()
}

// killService kills the service and starts it again, sometimes only after a while.
func (r *rack) killService(ctx context.Context) error {
	if err := r.book.write(line{Op: opKill}); err != nil {
		return err
	}
	if _, err := r.service.kill(); err != nil {
		return err
	}
	if err := r.book.write(line{Op: opKill, End: true}); err != nil {
		return err
	}
	r.count("service")
	if r.rand.IntN(3) == 0 {
		time.Sleep(time.Duration(r.rand.Int64N(int64(time.Second))))
	}
	return r.startService(ctx)
}

// stopWorker stops a consumer for longer than its leases live, and lets it go on.
func (r *rack) stopWorker(ctx context.Context) error {
	p := r.worker("consumer", r.o.Consumers)
	if p == nil {
		return nil
	}
	if err := p.signal(syscall.SIGSTOP); err != nil {
		return err
	}
	r.mu.Lock()
	r.result.Stops++
	r.mu.Unlock()
	select {
	case <-time.After(visibility + 500*time.Millisecond):
	case <-ctx.Done():
	}
	return p.signal(syscall.SIGCONT)
}

// fillUp leaves the store's file system without room for a while.
func (r *rack) fillUp(ctx context.Context, d time.Duration) error {
	began := time.Now()
	if err := r.book.write(line{Op: opFull}); err != nil {
		return err
	}
	empty, err := fill(r.store())
	if err != nil {
		return err
	}
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
	r.result.DiskFull = time.Since(began).Seconds()
	return errors.Join(empty(), r.book.write(line{Op: opFull, End: true}))
}

// watch says how it goes until the workers are through.
func (r *rack) watch(ctx context.Context, started time.Time, finished <-chan struct{}) error {
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-finished:
			return nil
		case <-ctx.Done():
			<-finished
			return fmt.Errorf("the stream did not end: %w; %s", context.Cause(ctx), r.lastStatus())
		case <-tick.C:
			r.mu.Lock()
			k := r.result.Kills
			text := fmt.Sprintf("%3.0f s: killed %d producers, %d consumers, the service %d times", time.Since(started).Seconds(), k["producer"], k["consumer"], k["service"])
			r.mu.Unlock()
			r.o.Say(text + "; " + r.lastStatus())
		}
	}
}

func (r *rack) lastStatus() string {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	info, err := r.client.Run(ctx, runID)
	if err != nil {
		return "the service is away"
	}
	s := &info.Status
	return fmt.Sprintf("since the run began %d put, %d acked, %d pending, %d leased, %d dead", s.Put, s.Acked, s.Pending, s.Outstanding, s.Dead)
}

// close hears what the service has to say, drops the dead letters, sees whether anything is left, ends the service, and joins the books.
func (r *rack) close(ctx context.Context) error {
	run, err := r.client.Open(ctx, runID)
	if err != nil {
		return err
	}
	said := testimony{dead: map[string]string{}, taken: map[position]bool{}}
	queue := run.Queue()
	for i := range r.o.Producers {
		source := fmt.Sprintf("producer-%d", i)
		taken, err := queue.Taken(ctx, source)
		if err != nil {
			return err
		}
		for _, t := range taken {
			for _, span := range t.Ranges {
				for index := span[0]; index < span[1]; index++ {
					said.taken[position{source, index}] = true
				}
			}
		}
	}
	letters, err := queue.DeadLetters(ctx)
	if err != nil {
		return err
	}
	ids := make([]string, len(letters))
	for i, l := range letters {
		said.dead[l.Ref.SampleID()] = l.Ref.Generation()
		ids[i] = l.Ref.SampleID()
	}
	for len(ids) > 0 {
		n := min(len(ids), wire.MaxBatch)
		if _, err := queue.Drop(ctx, ids[:n]...); err != nil {
			return err
		}
		ids = ids[n:]
	}
	lines, err := readBooks(r.books())
	if err != nil {
		return err
	}
	a := examine(lines, said)
	r.result.audit = *a
	r.result.Findings = append(r.result.Findings, a.findings...)
	r.result.judge(r.o)
	if err := r.leaks(ctx, run.Store()); err != nil {
		return err
	}
	if err := r.remains(ctx); err != nil {
		return err
	}
	if err := r.service.signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-r.service.done:
	case <-time.After(30 * time.Second):
		return fmt.Errorf("the service did not stop within 30 s of SIGTERM: %s", r.lastWord("service"))
	}
	return r.service.err
}

// leaks waits for what ends by itself, and counts what stays although nobody owns it.
func (r *rack) leaks(ctx context.Context, store sluice.Store) error {
	patience := time.Now().Add(3 * reservationTime)
	for {
		info, err := r.client.Run(ctx, runID)
		if err != nil {
			return err
		}
		h := info.Status.Health
		r.result.LeakedBytes = h.UsedBytes()
		left, err := r.files(func(path string) bool {
			return strings.HasSuffix(path, ".safetensors") || strings.Contains(path, "/staging/")
		})
		if err != nil {
			return err
		}
		r.result.LeakedFiles = int64(len(left))
		if r.result.LeakedBytes == 0 && r.result.LeakedFiles == 0 && h.UsedSamples() == 0 {
			return nil
		}
		if time.Now().After(patience) {
			r.result.Findings = append(r.result.Findings, fmt.Sprintf("left at the end: %d files %s; the store counts %d samples of %d bytes and reservations of %d bytes", len(left), some(left), h.ResidentSamples, h.ResidentBytes, h.ReservedBytes))
			return nil
		}
		if _, err := store.GC(ctx); err != nil && !errors.Is(err, sluice.ErrUnsupported) {
			return err
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// remains deletes the run, and counts what is left in the store then, under whatever name or under none.
func (r *rack) remains(ctx context.Context) error {
	if err := r.client.DeleteRun(ctx, runID); err != nil {
		return err
	}
	left, err := r.files(func(path string) bool {
		return path != filepath.Join(r.store(), "id") && path != filepath.Join(r.store(), "owner.json")
	})
	if err != nil {
		return err
	}
	if len(left) > 0 {
		r.result.LeakedFiles += int64(len(left))
		r.result.Findings = append(r.result.Findings, fmt.Sprintf("left when the run was deleted: %s", some(left)))
	}
	if !r.o.Small {
		return nil
	}
	used, err := usedBytes(r.store())
	if err != nil {
		return err
	}
	if used > 1<<20 { // its own files and folders take some pages
		r.result.LeakedBytes += used
		r.result.Findings = append(r.result.Findings, fmt.Sprintf("when the run was deleted, %d bytes of the store's file system were in use yet", used))
	}
	return nil
}

// files lists the files under the store's root that count.
func (r *rack) files(counts func(path string) bool) (names []string, err error) {
	err = filepath.WalkDir(r.store(), func(path string, d fs.DirEntry, err error) error {
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if d != nil && !d.IsDir() && counts(path) {
			names = append(names, path)
		}
		return nil
	})
	return names, err
}

// some is the first few of them.
func some(names []string) string {
	if len(names) > 5 {
		return strings.Join(names[:5], ", ") + ", ..."
	}
	return strings.Join(names, ", ")
}

// Print writes the result for people.
func (r *Result) Print(w io.Writer) {
	verdict := "nothing was lost"
	if !r.OK() {
		verdict = "FAILED"
	}
	fmt.Fprintf(w, "%s: %d samples put, %d acked, %d dead, %d delivered again, in %.0f s, with seed %d\n", verdict, r.Produced, r.Acked, r.Dead, r.Redelivered, r.Seconds, r.Seed)
	fmt.Fprintf(w, "killed with SIGKILL: %d producers (%d of the processes in the middle of storing a sample), %d consumers, the service %d times; stopped beyond their leases: %d\n", r.Kills["producer"], r.InUpload, r.Kills["consumer"], r.Kills["service"], r.Stops)
	if r.NoDiskFull == "" {
		fmt.Fprintf(w, "the disk was full for %.1f s\n", r.DiskFull)
	} else {
		fmt.Fprintf(w, "the disk was never full: %s\n", r.NoDiskFull)
	}
	fmt.Fprintf(w, "lost %d, acked twice %d, acks forgotten %d, put twice %d, other bytes read %d, unreadable under a lease %d, errors that nothing explains %d\n", r.Lost, r.DoubleAcked, r.Forgotten, r.Repeated, r.Wrong, r.Missing, r.Trouble)
	if r.Unanswered+r.Early > 0 {
		fmt.Fprintf(w, "acks whose answer a kill or a full disk swallowed: %d; leases forgotten with a killed service: %d\n", r.Unanswered, r.Early)
	}
	fmt.Fprintf(w, "left behind: %d files, %d bytes\n", r.LeakedFiles, r.LeakedBytes)
	for _, f := range r.Findings {
		fmt.Fprintf(w, "  %s\n", f)
	}
	if r.Books != "" {
		fmt.Fprintf(w, "the books and logs are in %s\n", r.Books)
	}
}
