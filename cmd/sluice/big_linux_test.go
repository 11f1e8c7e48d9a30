package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/store/dirstore"
)

// TestManyPendingRefs fills a real service with 100,000 refs of eagle3, restarts it, and says what memory and time that takes. It is for a person, with SLUICE_BIG=1 and -v: the bounds are
// those of an idle machine with two cores.
func TestManyPendingRefs(t *testing.T) {
	if os.Getenv("SLUICE_BIG") == "" {
		t.Skip("takes a minute and 600 MB of /dev/shm; set SLUICE_BIG=1")
	}
	const (
		refs    = 100_000
		mostRSS = 300 << 20
		mostCPU = 6 * time.Second
	)
	dir, err := os.MkdirTemp("/dev/shm", "sluice-big-")
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	state := t.TempDir()
	s := startServe(t, state, filepath.Join(dir, "store"))
	schema, err := sluice.SchemaOf(sluice.EAGLE3)
	if err != nil {
		t.Fatal(err)
	}
	run := wire.Run{}
	spec, err := wire.SpecOf(&sluice.RunConfig{RunID: "distill-llama-eagle3-07", Schema: schema, Caps: sluice.Caps{MaxBytes: 2 << 30}})
	if err != nil {
		t.Fatal(err)
	}
	s.call("POST", "/v1/runs", spec, &run)

	// The samples are put straight into the store, as a producer of the same host might through a library; what is measured are the refs.
	store, err := dirstore.Open(run.Store.Dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	begun, peak := time.Now(), int64(0)
	const each = 64
	work := make(chan int)
	var callers sync.WaitGroup
	for range 4 {
		callers.Go(func() {
			for from := range work {
				var commit wire.Commit
				for i := from; i < min(from+each, refs); i++ {
					ref, err := store.Put(context.Background(), eagleSample(run.Spec.RunID, i), sluice.Reservation{})
					if err != nil {
						t.Error(err)
						return
					}
					commit.Items = append(commit.Items, wire.CommitItem{Ref: &ref})
				}
				var done wire.Commits
				s.call("POST", "/v1/runs/"+run.Spec.RunID+"/commit", commit, &done)
				for _, r := range done.Results {
					if r.Status != sluice.Enqueued {
						t.Errorf("a commit was answered %+v", r)
					}
				}
			}
		})
	}
	for from := 0; from < refs && !t.Failed(); from += each {
		work <- from
		peak = max(peak, s.rss())
	}
	close(work)
	callers.Wait()
	if err := store.Close(); err != nil {
		t.Fatal(err)
	}
	t.Logf("filled in %v, at most %s resident, %v of processor time", time.Since(begun).Round(time.Millisecond), mib(peak), s.cpu())
	time.Sleep(2 * time.Second)
	full := s.rss()
	t.Logf("filled: %s resident (%s)", mib(full), s.parts())
	s.kill() // a restart after a kill has more to do than one behind an orderly stop

	s = startServe(t, state, filepath.Join(dir, "store"))
	again := s.rss()
	used := s.cpu()
	t.Logf("restarted in %v, %v of processor time, %s resident (%s), at most %s until then", s.took.Round(time.Millisecond), used, mib(again), s.parts(), mib(s.most()))
	time.Sleep(2 * time.Second)
	t.Logf("two seconds later: %s resident (%s)", mib(s.rss()), s.parts())
	for _, m := range []struct {
		when string
		rss  int64
	}{{"while it fills", peak}, {"filled", full}, {"restarted", again}} {
		if m.rss > mostRSS {
			t.Errorf("%s: %s resident, want at most %s", m.when, mib(m.rss), mib(mostRSS))
		}
	}
	if used > mostCPU {
		t.Errorf("the restart took %v of processor time, want at most %v", used, mostCPU)
	}
	s.call("GET", "/v1/runs/"+run.Spec.RunID, nil, &run)
	if run.Status.Pending != refs {
		t.Errorf("%d refs are pending, want %d", run.Status.Pending, refs)
	}
	s.stop()
}

// eagleSample has next to no bytes; its ref is as long as any. Samples differ in length, as those of a run do.
func eagleSample(run string, i int) *sluice.Sample {
	n := int64(2 + i%7)
	return &sluice.Sample{
		SampleID: fmt.Sprintf("ep0-shard%03d-row%07d", i/4096, i), RunID: run, Algorithm: sluice.EAGLE3, SchemaVersion: 1, NumTokens: n, TargetModelVersion: "0", DraftWeightVersion: "0",
		Features: []sluice.Feature{
			{Name: "aux_hidden_states", Tensor: sluice.NewTensor(sluice.BFloat16, 1, n, 24)}, {Name: "input_ids", Tensor: sluice.NewTensor(sluice.Int64, 1, n)},
			{Name: "attention_mask", Tensor: sluice.NewTensor(sluice.Int64, 1, n)}, {Name: "loss_mask", Tensor: sluice.NewTensor(sluice.Int64, 1, n)},
			{Name: "last_hidden_states", Tensor: sluice.NewTensor(sluice.BFloat16, 1, n, 8)},
		},
		Attributes: map[string]string{"shift": "0", "aux_layers": "hf:1,2,3", "last_norm": "post", "prompt_set": "ultrachat-200k", "epoch": "0"},
	}
}

// served is a process of sluice serve.
type served struct {
	t    *testing.T
	cmd  *exec.Cmd
	http *http.Client
	took time.Duration // from its start until it was ready
}

func startServe(t *testing.T, state, store string) *served {
	t.Helper()
	begun := time.Now()
	cmd := exec.Command("sluice", "serve", "--state", state, "--store", store, "--no-tcp", "--log-level", "warn")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s := &served{t: t, cmd: cmd, http: &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(state, "sluice.sock"))
	}}}}
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
		s.http.CloseIdleConnections()
		if t.Failed() {
			t.Logf("the service said:\n%s", out.String())
		}
	})
	for end := begun.Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		resp, err := s.http.Get("http://localhost/readyz")
		if err == nil {
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				s.took = time.Since(begun)
				return s
			}
		}
		if time.Now().After(end) {
			t.Fatalf("the service is not ready: %v", err)
		}
	}
}

func (s *served) call(method, path string, in, out any) {
	body, err := json.Marshal(in)
	if err != nil {
		s.t.Error(err)
		return
	}
	req, err := http.NewRequest(method, "http://localhost"+path, bytes.NewReader(body))
	if err != nil {
		s.t.Error(err)
		return
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := s.http.Do(req)
	if err != nil {
		s.t.Error(err)
		return
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode/100 != 2 {
		s.t.Errorf("%s %s: %s %s, %v", method, path, resp.Status, answer, err)
		return
	}
	if err := json.Unmarshal(answer, out); err != nil {
		s.t.Error(err)
	}
}

func (s *served) stop() {
	s.t.Helper()
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		s.t.Fatal(err)
	}
	if err := s.cmd.Wait(); err != nil {
		s.t.Fatal(err)
	}
}

func (s *served) kill() {
	s.t.Helper()
	if err := s.cmd.Process.Kill(); err != nil {
		s.t.Fatal(err)
	}
	_ = s.cmd.Wait() // killed, it says
}

// field reads a size from what the kernel says of the process.
func (s *served) field(name string) int64 {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(s.cmd.Process.Pid) + "/status")
	if err != nil {
		s.t.Error(err)
		return 0
	}
	for line := range strings.Lines(string(data)) {
		if v, ok := strings.CutPrefix(line, name+":"); ok {
			n, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 10, 64)
			if err != nil {
				s.t.Error(err)
			}
			return n << 10
		}
	}
	s.t.Errorf("the kernel does not say %s", name)
	return 0
}

func (s *served) rss() int64  { return s.field("VmRSS") }
func (s *served) most() int64 { return s.field("VmHWM") }

func (s *served) parts() string {
	return fmt.Sprintf("%s of its own, %s of files, %s shared", mib(s.field("RssAnon")), mib(s.field("RssFile")), mib(s.field("RssShmem")))
}

// cpu is the processor time that the process has used.
func (s *served) cpu() time.Duration {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(s.cmd.Process.Pid) + "/stat")
	if err != nil {
		s.t.Error(err)
		return 0
	}
	_, rest, _ := strings.Cut(string(data), ") ")
	fields := strings.Fields(rest)
	ticks := int64(0)
	for _, f := range fields[11:13] { // user and system time
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			s.t.Error(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

func mib(n int64) string { return fmt.Sprintf("%d MiB", n>>20) }
