//go:build unix

package natsjournal

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
)

const childEnv = "SLUICE_NATSJOURNAL_CHILD"

// runChild is what the test binary does when a test started it as another process.
func runChild() {
	args := strings.Fields(os.Getenv(childEnv))
	if len(args) == 0 {
		return
	}
	var err error
	switch args[0] {
	case "write":
		durability, _ := strconv.Atoi(args[2])
		err = writeUntilKilled(args[1], Durability(durability))
	case "hold":
		err = holdAndWrite(args[1])
	default:
		err = fmt.Errorf("unknown child %q", args[0])
	}
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// child starts the test binary as a process of its own.
func child(t *testing.T, args ...string) (cmd *exec.Cmd, stdin io.WriteCloser, lines *bufio.Scanner) {
	t.Helper()
	cmd = exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), childEnv+"="+strings.Join(args, " "))
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if cmd.ProcessState == nil {
			cmd.Process.Kill()
			cmd.Wait()
		}
	})
	return cmd, stdin, bufio.NewScanner(out)
}

const childWriters = 4

// counts is what a journal of these tests says: how far each writer came. A snapshot says it at once.
type counts [childWriters]int

func (c *counts) replay(r sluice.Record) error {
	var w, i int
	kind, rest, _ := strings.Cut(string(r.Data[:min(len(r.Data), 40)]), " ")
	if n, err := fmt.Sscanf(rest, "%d %d", &w, &i); n != 2 || err != nil {
		return fmt.Errorf("a record that nobody wrote: %.40q", r.Data)
	}
	switch {
	case kind == "base":
		c[w] = i
	case kind == "lazy":
	case i != c[w]+1:
		return fmt.Errorf("writer %d: record %d came where %d was due", w, i, c[w]+1)
	default:
		c[w] = i
	}
	return nil
}

// writeUntilKilled appends from several goroutines and prints what was acknowledged. It never returns of itself.
func writeUntilKilled(dir string, d Durability) error {
	ctx := context.Background()
	js, err := Open(ctx, dir, &Options{Durability: d})
	if err != nil {
		return err
	}
	j, err := js.Journal(ctx, "killed")
	if err != nil {
		return err
	}
	var at counts
	if err := j.Replay(ctx, at.replay); err != nil {
		return err
	}
	fmt.Println("open", at[0], at[1], at[2], at[3])
	var mu sync.RWMutex // a compaction excludes the writers
	failed := make(chan error)
	for w := range childWriters {
		go func() {
			for {
				i := at[w] + 1
				pad := ""
				if rand.IntN(20) == 0 {
					pad = strings.Repeat("x", rand.IntN(1_500_000))
				}
				mu.RLock()
				err := j.Append(ctx, []sluice.Record{{Lazy: true, Data: fmt.Appendf(nil, "lazy %d %d", w, i)}, {Data: fmt.Appendf(nil, "done %d %d %s", w, i, pad)}})
				if err == nil {
					at[w] = i
					fmt.Println("acked", w, i) // one write: it is out, or it is not
				}
				mu.RUnlock()
				if err != nil {
					failed <- err
				}
			}
		}()
	}
	for {
		select {
		case err := <-failed:
			return err
		case <-time.After(time.Duration(rand.IntN(40)) * time.Millisecond):
		}
		mu.Lock()
		var snapshot []sluice.Record
		for w := range at {
			snapshot = append(snapshot, sluice.Record{Data: fmt.Appendf(nil, "base %d %d %s", w, at[w], strings.Repeat("y", rand.IntN(400_000)))})
		}
		err := j.Compact(ctx, snapshot)
		mu.Unlock()
		if err != nil {
			return err
		}
	}
}

// Real processes, killed at random moments: what was acknowledged is there, in order, and nothing twice.
func TestKilledProcessesLoseNothing(t *testing.T) {
	t.Parallel()
	kills := 12
	if s := os.Getenv("SLUICE_KILLS"); s != "" {
		var err error
		if kills, err = strconv.Atoi(s); err != nil {
			t.Fatalf("SLUICE_KILLS: %v", err)
		}
	}
	ctx := t.Context()
	dir := t.TempDir()
	var acked counts
	total := 0
	for kill := range kills {
		durability := Durability(kill % 2)
		cmd, _, lines := child(t, "write", dir, fmt.Sprint(int(durability)))
		var deadline <-chan time.Time
		got := make(chan string)
		go func() { // until the child's output ends
			defer close(got)
			for lines.Scan() {
				got <- lines.Text()
			}
		}()
		for open := true; open; {
			select {
			case line, more := <-got:
				var w, i int
				switch {
				case !more:
					open = false
				case strings.HasPrefix(line, "open"):
					deadline = time.After(time.Duration(rand.IntN(150)) * time.Millisecond)
				case strings.HasPrefix(line, "acked"):
					if _, err := fmt.Sscanf(line, "acked %d %d", &w, &i); err != nil {
						t.Fatalf("%q: %v", line, err)
					}
					acked[w] = i
					total++
				default:
					t.Fatalf("kill %d: %s", kill, line)
				}
			case <-deadline:
				cmd.Process.Kill()
				deadline = nil
			}
		}
		cmd.Wait()
		// The lock died with the process.
		js, err := Open(ctx, dir, &Options{Durability: durability})
		if err != nil {
			t.Fatalf("kill %d: %v", kill, err)
		}
		j, err := js.Journal(ctx, "killed")
		if err != nil {
			t.Fatalf("kill %d: %v", kill, err)
		}
		var at counts
		if err := j.Replay(ctx, at.replay); err != nil {
			t.Fatalf("kill %d: %v", kill, err)
		}
		for w := range at {
			if at[w] < acked[w] || at[w] > acked[w]+1 {
				t.Fatalf("kill %d: writer %d had %d acknowledged, and %d are there", kill, w, acked[w], at[w])
			}
		}
		acked = at
		if err := js.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if total == 0 {
		t.Fatal("nothing was acknowledged between the kills")
	}
	t.Logf("%d kills, %d appends acknowledged", kills, total)
}

const shortLapse = 400 * time.Millisecond

// holdAndWrite owns the prefix and appends once for every line of its input.
func holdAndWrite(url string) error {
	ctx := context.Background()
	js, err := Connect(ctx, url, &Options{Lapse: shortLapse})
	if err != nil {
		return err
	}
	j, err := js.Journal(ctx, "shared")
	if err != nil {
		return err
	}
	fmt.Println("ready", js.Owner())
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		err := j.Append(ctx, []sluice.Record{{Data: lines.Bytes()}})
		fmt.Println("appended", sluice.KindOf(err))
	}
	return nil
}

// At a server elsewhere a second service is refused while the first lives and takes over when it sleeps; what wakes up can write nothing.
func TestASleepingOwnerIsSupersededAndFenced(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	srv := startServer(t, nil)
	cmd, stdin, lines := child(t, "hold", srv.ClientURL())
	expect := func(want string) string {
		t.Helper()
		if !lines.Scan() || !strings.HasPrefix(lines.Text(), want) {
			t.Fatalf("the child says %q, want %q", lines.Text(), want)
		}
		return lines.Text()
	}
	ready := expect("ready")
	if _, err := Connect(ctx, srv.ClientURL(), &Options{Lapse: shortLapse}); !errors.Is(err, sluice.ErrConflict) || !strings.Contains(err.Error(), strings.TrimPrefix(ready, "ready ")) {
		t.Fatalf("got %v, want a refusal that names %q", err, ready)
	}
	fmt.Fprintln(stdin, "before")
	expect("appended")

	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	js, err := Connect(ctx, srv.ClientURL(), &Options{Lapse: shortLapse})
	if err != nil {
		t.Fatal(err)
	}
	defer js.Close()
	// It wakes before anyone has opened the journal again, and is fenced nevertheless.
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(stdin, "after")
	expect("appended stale")
	j, err := js.Journal(ctx, "shared")
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintln(stdin, "after")
	expect("appended stale")
	var got []string
	if err := j.Replay(ctx, func(r sluice.Record) error { got = append(got, string(r.Data)); return nil }); err != nil {
		t.Fatal(err)
	}
	if len(got) != 1 || got[0] != "before" {
		t.Errorf("the journal holds %q, want what was written before", got)
	}
	if err := j.Append(ctx, []sluice.Record{{Data: []byte("mine")}}); err != nil {
		t.Error(err)
	}
	stdin.Close()
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	// It let go of nothing that was not its own any more.
	if _, err := Connect(ctx, srv.ClientURL(), &Options{Lapse: shortLapse}); !errors.Is(err, sluice.ErrConflict) {
		t.Errorf("got %v, want a refusal", err)
	}
}
