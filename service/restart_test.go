package service

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/service/access"
)

// TestServiceProcess is no test of its own: it is the process that others kill. It serves on a unix socket without a door.
func TestServiceProcess(t *testing.T) {
	dir := os.Getenv("SLUICE_TEST_SERVICE")
	if dir == "" {
		t.Skip("runs as a process of other tests")
	}
	s, err := Open(context.Background(), Options{StateDir: dir + "/state", StoreDir: dir + "/store", MaxBytes: 1 << 30, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		t.Fatal(err)
	}
	socket := dir + "/s"
	_ = os.Remove(socket)
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Println("serving")
	caller := access.Caller{Name: "test", Role: access.Operator, UID: os.Geteuid()}
	t.Fatal(http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.Handler().ServeHTTP(w, r.WithContext(access.WithCaller(r.Context(), caller)))
	})))
}

// process is a service in a process of its own, with a bed that speaks to it.
type process struct {
	*bed
	dir string
	cmd *exec.Cmd
}

func startProcess(t *testing.T, dir string) *process {
	t.Helper()
	p := &process{dir: dir}
	p.cmd = exec.Command(os.Args[0], "-test.run", "^TestServiceProcess$", "-test.v")
	p.cmd.Env = append(os.Environ(), "SLUICE_TEST_SERVICE="+dir)
	var log syncBuffer
	p.cmd.Stderr = &log
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	lines := bufio.NewScanner(out)
	for lines.Scan() && lines.Text() != "serving" {
	}
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", dir+"/s")
	}}}
	t.Cleanup(client.CloseIdleConnections)
	p.bed = remoteBed(t, "http://sluice", client)
	p.poll("ready", func() bool {
		resp, err := client.Get("http://sluice/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	return p
}

func (p *process) kill() {
	if p.cmd != nil {
		_ = p.cmd.Process.Signal(syscall.SIGKILL)
		_ = p.cmd.Wait()
		p.cmd = nil
	}
}

// story is what is done to a run before its service goes, and told by what came after.
func story(t *testing.T, before *bed, again func() *bed) {
	t.Helper()
	b := before
	spec := b.spec("r1")
	spec.MaxFails, spec.Caps.MaxBytes = 1, 1<<20
	do[wire.Run](b, "POST", "/v1/runs", spec)
	win := b.spec("win")
	win.Windows, win.LargestSample = &wire.Windows{Ranks: 2, PerRank: 1}, 100
	do[wire.Run](b, "POST", "/v1/runs", win)
	for _, id := range []string{"acked", "dead", "leased", "pending"} {
		ref := b.upload("r1", id, "")
		c := wire.Commit{Producer: &wire.Producer{Name: "p", Incarnation: 3}, Items: []wire.CommitItem{{Ref: &ref, Positions: []sluice.Position{{Source: "prompts", Index: int64(len(id))}}}}}
		do[wire.Commits](b, "POST", "/v1/runs/r1/commit", c)
	}
	uploaded := b.upload("r1", "uploaded", "")
	d := b.acquire("r1", 3)
	b.settle("r1", sluice.Ack, d.Leases[0])
	b.settle("r1", sluice.Fail, d.Leases[1])
	leased := d.Leases[2]
	for i := range 4 {
		b.put("win", fmt.Sprintf("w-%d", i))
	}
	w := do[wire.Delivery](b, "POST", "/v1/runs/win/acquire", wire.Acquire{Consumer: wire.Consumer{Name: "rank1", Rank: 1}, RequestID: "q"})
	if len(w.Leases) != 1 || w.Leases[0].Window.Number != 0 {
		t.Fatalf("window: %+v", w)
	}

	b = again()
	st := b.status("r1")
	if st.Pending != 1 || st.Outstanding != 1 || st.Dead != 1 || st.Acked != 1 || st.Put != 4 || st.Health.ResidentSamples != 4 || st.Health.DeadSamples != 1 {
		t.Errorf("r1 has become %+v", st)
	}
	if r := b.settle("r1", sluice.Ack, d.Leases[0]); r[0].Status != sluice.AlreadySettled {
		t.Errorf("the ack was forgotten: %+v", r)
	}
	renewed := do[wire.Settled](b, "POST", "/v1/runs/r1/renew", wire.Renew{Consumer: trainer})
	if len(renewed.Results) != 1 || renewed.Results[0].Lease != leased.ID {
		t.Errorf("renewed %+v", renewed)
	}
	dead := do[wire.DeadLetters](b, "GET", "/v1/runs/r1/dead-letters", nil).DeadLetters
	if len(dead) != 1 || dead[0].Ref.SampleID() != "dead" || dead[0].Reasons[0] != "said fail" {
		t.Errorf("dead letters %+v", dead)
	}
	if n := do[wire.Found](b, "POST", "/v1/runs/r1/dead-letters/requeue", wire.SampleIDs{All: true}); n.Found != 1 {
		t.Errorf("requeued %+v", n)
	}
	taken := do[wire.Positions](b, "GET", "/v1/runs/r1/positions?source=prompts", nil).Taken
	if len(taken) != 1 || !taken[0].Contains(4) || !taken[0].Contains(7) || taken[0].Contains(3) {
		t.Errorf("positions %+v", taken)
	}
	b.wants("stale", "POST", "/v1/runs/r1/report", wire.Report{Producer: wire.Producer{Name: "p", Incarnation: 2}, State: sluice.ProducerRunning})
	if r := b.commit("r1", leased.Ref).Results[0]; r.Status != sluice.AlreadyPut {
		t.Errorf("a put that is repeated: %+v", r)
	}
	if r := b.commit("r1", uploaded).Results[0]; r.Status != sluice.Enqueued {
		t.Errorf("what was uploaded before: %+v", r)
	}
	if a := b.send("GET", sampleURL(leased.Ref)+"?generation="+leased.Ref.Generation(), nil, nil); a.status != 200 {
		t.Errorf("the leased sample: %d %s", a.status, a.body)
	}
	same := do[wire.Delivery](b, "POST", "/v1/runs/win/acquire", wire.Acquire{Consumer: wire.Consumer{Name: "rank1", Rank: 1}, RequestID: "q"})
	// The lease itself may be forgotten in a kill, what was dealt may not.
	if len(same.Leases) != 1 || !same.Leases[0].Ref.Equal(w.Leases[0].Ref) || *same.Leases[0].Window != *w.Leases[0].Window {
		t.Errorf("the window has become %+v", same)
	}
	other := do[wire.Delivery](b, "POST", "/v1/runs/win/acquire", wire.Acquire{Consumer: wire.Consumer{Name: "rank0"}})
	if len(other.Leases) != 1 || other.Leases[0].Window.Number != 0 || other.Leases[0].Ref.SampleID() != "w-0" {
		t.Errorf("the other rank got %+v", other)
	}
}

func TestEverythingSurvivesARestart(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	story(t, b, func() *bed { b.restart(); return b })
}

func TestEverythingSurvivesAKill(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	p := startProcess(t, dir)
	story(t, p.bed, func() *bed {
		p.kill()
		return startProcess(t, dir).bed
	})
}

// shortDir is a directory whose sockets have short enough names.
func shortDir(t testing.TB) string {
	dir, err := os.MkdirTemp("", "slc")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func TestALeaseHasItsFullTimeAfterARestart(t *testing.T) {
	t.Parallel()
	b, clock := clocked(t, Options{})
	b.create("r1")
	b.put("r1", "s-1")
	d := b.acquire("r1", 1)
	clock.Advance(29 * time.Second)
	b.restart()
	clock.Advance(29 * time.Second)
	if st := b.status("r1"); st.Outstanding != 1 {
		t.Errorf("after 29 s of a second life the lease is gone: %+v", st)
	}
	if r := b.settle("r1", sluice.Ack, d.Leases...); r[0].Status != sluice.Settled {
		t.Errorf("settled %+v", r)
	}
}

// A service that starts answers for each run as soon as it is open, and never with an end.
func TestARunThatIsNotOpenYetIsUnavailable(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	do[struct{}](b, "POST", "/v1/runs/r1/close", nil)
	b.stop()
	hold := make(chan struct{})
	b.o.Journals = &slowJournals{dir: b.o.StateDir, hold: hold}
	b.start()
	b.wants("unavailable", "POST", "/v1/runs/r1/acquire", wire.Acquire{Consumer: trainer})
	b.wants("unavailable", "GET", "/readyz", nil)
	if a := b.send("GET", "/healthz", nil, nil); a.status != 200 {
		t.Errorf("healthz: %d", a.status)
	}
	if a := b.try("GET", "/v1/runs/r1", nil); a.header.Get("Retry-After") == "" || a.status != 503 {
		t.Errorf("%d, Retry-After %q", a.status, a.header.Get("Retry-After"))
	}
	st := do[wire.ServiceStatus](b, "GET", "/v1/status", nil)
	if len(st.Runs) != 1 || st.Runs[0].Unavailable == "" || st.Runs[0].Consumers == nil || st.Runs[0].Producers == nil {
		t.Errorf("status %+v", st)
	}
	if l := do[wire.RunList](b, "GET", "/v1/runs", nil); len(l.Runs) != 1 || l.Runs[0].Spec.RunID != "r1" {
		t.Errorf("listed %+v", l)
	}
	if a := b.send("GET", "/metrics", nil, nil); strings.Count(string(a.body), `run="r1"`) != 1 || !strings.Contains(string(a.body), "sluice_run_up{run=\"r1\"} 0\n") {
		t.Error("a run that is not open has other series than sluice_run_up")
	}
	close(hold)
	b.waitReady()
	if d := b.acquire("r1", 1); !d.End {
		t.Errorf("acquired %+v", d)
	}
}

// slowJournals open those of runs only when they are told to.
type slowJournals struct {
	Journals
	dir  string
	hold chan struct{}
}

func (j *slowJournals) Journal(ctx context.Context, name string) (sluice.Journal, error) {
	if j.Journals == nil {
		o := Options{StateDir: j.dir, Logger: slog.New(slog.DiscardHandler)}
		real, err := openJournals(ctx, &o)
		if err != nil {
			return nil, err
		}
		j.Journals = real
	}
	if name != registryName {
		select {
		case <-j.hold:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	return j.Journals.Journal(ctx, name)
}

func TestADeletionThatWasCutOffIsEnded(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	run := b.create("r1")
	b.put("r1", "s-1")
	b.s.admin.Lock()
	err := b.s.registry.write(t.Context(), record{T: "delete", RunID: "r1"})
	b.s.admin.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	b.restart()
	b.wants("not_found", "GET", "/v1/runs/r1", nil)
	if _, err := os.Stat(run.Store.Dir); !os.IsNotExist(err) {
		t.Errorf("%v", err)
	}
	b.create("r1")
}

// The registry's snapshot says the same as all its records.
func TestTheRegistryIsCompacted(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	for i := range 1100 {
		do[struct{}](b, "POST", "/v1/runs/r1/versions", wire.Versions{TargetVersions: []string{fmt.Sprint(i)}})
	}
	if n := b.s.registry.records; n > 1000 {
		t.Errorf("%d records", n)
	}
	b.restart()
	if got := do[wire.Run](b, "GET", "/v1/runs/r1", nil); got.Spec.TargetVersions[0] != "1099" {
		t.Errorf("described as %+v", got.Spec)
	}
	b.create("r1")
}

// pendingRefs fills a run with refs, straight into its store and its queue.
func pendingRefs(t testing.TB, b *bed, run string, n int) {
	t.Helper()
	r, err := b.s.find(run)
	if err != nil {
		t.Fatal(err)
	}
	puts := make([]sluice.PutRequest, 0, 1000)
	for i := range n {
		ref, err := r.store.Put(context.Background(), &sluice.Sample{SampleID: fmt.Sprintf("s-%d", i), RunID: run, Algorithm: "mine", SchemaVersion: 1, NumTokens: 2, Features: features(int64(i))}, sluice.Reservation{})
		if err != nil {
			t.Fatal(err)
		}
		if puts = append(puts, sluice.PutRequest{Ref: ref}); len(puts) == cap(puts) || i == n-1 {
			for _, res := range r.q.PutAll(context.Background(), puts) {
				if res.Err != nil {
					t.Fatal(res.Err)
				}
			}
			puts = puts[:0]
		}
	}
}

// BenchmarkRestart is the time until a run with 100,000 pending refs answers again.
func BenchmarkRestart(b *testing.B) {
	const n = 100_000
	bed := newBed(b, Options{StoreDir: memory(b), Logger: slog.New(slog.DiscardHandler)})
	spec := bed.spec("r1")
	spec.Caps.MaxBytes = 1 << 29
	do[wire.Run](bed, "POST", "/v1/runs", spec)
	pendingRefs(b, bed, "r1", n)
	b.ResetTimer()
	used := time.Duration(0)
	for range b.N {
		b.StopTimer()
		bed.stop()
		before := cpuTime(b)
		b.StartTimer()
		bed.start()
		bed.waitReady()
		used += cpuTime(b) - before
	}
	b.StopTimer()
	b.ReportMetric(used.Seconds()/float64(b.N), "cpu-s/op") // what a busy machine does not distort
	if st := bed.status("r1"); st.Pending != n {
		b.Fatalf("%d pending", st.Pending)
	}
}

func cpuTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func TestAFullDiskIsUnavailableUntilThereIsRoomAgain(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.stop()
	j := &failingJournals{slowJournals: slowJournals{dir: b.o.StateDir, hold: closed()}}
	b.o.Journals = j
	b.start()
	b.create("r1")
	ref := b.upload("r1", "s-1", "")
	j.full.Store(true)
	a := b.try("POST", "/v1/runs/r1/commit", wire.Commit{Items: []wire.CommitItem{{Ref: &ref}}})
	if a.problem.Code != "unavailable" {
		t.Errorf("with a full disk: %d %s", a.status, a.body)
	}
	b.poll("the reason in the status", func() bool {
		st := do[wire.ServiceStatus](b, "GET", "/v1/status", nil)
		return len(st.Runs) == 1 && strings.Contains(st.Runs[0].Unavailable, "but not yet: write /state/1.blk: no space left on device;")
	})
	j.full.Store(false)
	b.poll("room again", func() bool {
		a := b.try("POST", "/v1/runs/r1/commit", wire.Commit{Items: []wire.CommitItem{{Ref: &ref}}})
		return a.status == 200
	})
	if d := b.acquire("r1", 1); len(d.Leases) != 1 || !d.Leases[0].Ref.Equal(ref) {
		t.Errorf("acquired %+v", d)
	}
}

// A run whose journal failed is opened again in bounded time, whatever somebody uploads.
func TestASlowUploadKeepsNoRunFromBeingMended(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.stop()
	j := &failingJournals{slowJournals: slowJournals{dir: b.o.StateDir, hold: closed()}}
	b.o.Journals = j
	b.start()
	b.create("r1")
	ref := b.upload("r1", "s-1", "")
	half, more := io.Pipe()
	defer more.Close()
	ended := make(chan error, 1)
	req, err := http.NewRequest(http.MethodPut, b.url+"/v1/runs/r1/samples/s-2", half)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(wire.SampleHeader, fields)
	go func() {
		resp, err := b.client.Do(req)
		if err == nil {
			resp.Body.Close()
		}
		ended <- err
	}()
	if _, err := more.Write(file(t, 2)[:20]); err != nil {
		t.Fatal(err)
	}
	r := b.s.runs["r1"]
	b.poll("the upload", func() bool { r.mu.Lock(); defer r.mu.Unlock(); return len(r.arriving) == 1 })
	j.full.Store(true)
	b.wants("unavailable", "POST", "/v1/runs/r1/commit", wire.Commit{Items: []wire.CommitItem{{Ref: &ref}}})
	j.full.Store(false)
	b.poll("the run", func() bool {
		return b.try("POST", "/v1/runs/r1/commit", wire.Commit{Items: []wire.CommitItem{{Ref: &ref}}}).status == 200
	})
	more.Close()
	<-ended
	b.upload("r1", "s-3", "") // what comes then is not cut off
}

func closed() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// failingJournals play a disk that is full for a while.
type failingJournals struct {
	slowJournals
	full atomic.Bool
}

var errDiskIsFull = &fs.PathError{Op: "write", Path: "/state/1.blk", Err: syscall.ENOSPC}

type failingJournal struct {
	sluice.Journal
	of *failingJournals
}

func (j *failingJournals) Journal(ctx context.Context, name string) (sluice.Journal, error) {
	if j.full.Load() {
		return nil, &sluice.Error{Kind: sluice.Unavailable, Op: "journal", Detail: "can't be opened", Err: errors.Join(errDiskIsFull, errors.New("and more"))}
	}
	real, err := j.slowJournals.Journal(ctx, name)
	if err != nil {
		return nil, err
	}
	return &failingJournal{real, j}, nil
}

func (j *failingJournal) Append(ctx context.Context, records []sluice.Record) error {
	if j.of.full.Load() {
		return &sluice.Error{Kind: sluice.NoSpace, Op: "journal", Err: errDiskIsFull}
	}
	return j.Journal.Append(ctx, records)
}
