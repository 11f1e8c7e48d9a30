package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/client"
)

// asCommand is a way to call this test program as the command itself.
func asCommand(t *testing.T) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), "sluice")
	if err := os.Symlink(self, name); err != nil {
		t.Fatal(err)
	}
	return name
}

// privateDirs are the directories of a private service.
func privateDirs(t *testing.T) (state, store string) {
	t.Helper()
	dir := t.TempDir()
	return filepath.Join(dir, "state"), filepath.Join(dir, "store")
}

func privateArgs(state, store string) []string {
	return []string{"serve", "--state", state, "--store", store, "--no-tcp", "--max-bytes", "none", "--exit-idle", "1s", "--remove-state"}
}

// within waits for something that happens by itself.
func within(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: it does not happen", what)
		}
	}
}

// join dials a service as soon as it answers.
func join(t *testing.T, state string) *client.Client {
	t.Helper()
	var c *client.Client
	within(t, "the service answers", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		var err error
		c, err = client.Dial(ctx, client.Options{StateDir: state, Patience: time.Millisecond})
		return err == nil
	})
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func gone(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, os.ErrNotExist)
}

func TestAPrivateServiceOutlivesItsStarterAndEndsAfterItsLastClient(t *testing.T) {
	t.Parallel()
	state, store := privateDirs(t)
	// The shell is the starter; what the service says goes into a pipe that breaks with it.
	starter := exec.Command("/bin/sh", "-c", `"$0" "$@" & wait`, asCommand(t))
	starter.Args = append(starter.Args, privateArgs(state, store)...)
	starter.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	said, err := starter.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	starter.Stdout = starter.Stderr
	if err := starter.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Kill(-starter.Process.Pid, syscall.SIGKILL) }) // whatever is left of them
	first := join(t, state)
	if err := errors.Join(starter.Process.Kill(), said.Close()); err != nil {
		t.Fatal(err)
	}
	if err := starter.Wait(); err == nil {
		t.Fatal("the starter ended in order, it was to be killed")
	}
	second := join(t, state)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	schema, err := sluice.SchemaOf(sluice.EAGLE3)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := second.CreateRun(t.Context(), sluice.RunConfig{RunID: "r1", Schema: schema, Caps: sluice.Caps{MaxSamples: 64}}); err != nil {
		t.Fatal(err)
	}
	if gone(filepath.Join(store, "runs", "r1")) {
		t.Fatal("the run has no directory, so that nothing is shown by its absence later")
	}
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
	within(t, "state and store go", func() bool { return gone(state) && gone(store) })
}

func TestStartersThatRaceFindOneService(t *testing.T) {
	t.Parallel()
	state, store := privateDirs(t)
	command := asCommand(t)
	const starters = 4
	status := make([]int, starters)
	said := make([]bytes.Buffer, starters)
	var all sync.WaitGroup
	for i := range starters {
		all.Go(func() {
			c := exec.Command(command, privateArgs(state, store)...)
			c.Stderr = &said[i]
			err := c.Run()
			if exit := new(exec.ExitError); errors.As(err, &exit) {
				status[i] = exit.ExitCode()
			} else if err != nil {
				status[i] = -1
			}
		})
	}
	c := join(t, state)
	st, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	all.Wait()
	ended := 0
	for i, s := range status {
		switch {
		case s == 0:
			ended++
		case s != alreadyRuns || !strings.Contains(said[i].String(), "is owned by "):
			t.Errorf("exit status %d: %s; want %d, and the owner named", s, said[i].String(), alreadyRuns)
		}
	}
	if ended != 1 || st.PID == 0 {
		t.Errorf("%d services ended in order, want 1; exit statuses %v", ended, status)
	}
}

// serveKilled runs a private service until it is ready, and kills it.
func serveKilled(t *testing.T, command, state, store string) {
	t.Helper()
	c := exec.Command(command, privateArgs(state, store)...)
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	d := join(t, state)
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait() // it was killed
	_ = d.Close()
	if gone(filepath.Join(state, "sluice.sock")) || gone(store) {
		t.Fatal("the killed service has left nothing, so that nothing is shown by its absence later")
	}
}

func TestWhatAKilledPrivateServiceLeftGoesWithTheNext(t *testing.T) {
	t.Parallel()
	command := asCommand(t)
	state, store := privateDirs(t)
	serveKilled(t, command, state, store)
	beside, other := filepath.Join(filepath.Dir(state), "beside"), store+"-2"
	next := exec.Command(command, privateArgs(beside, other)...)
	if err := next.Start(); err != nil {
		t.Fatal(err)
	}
	d := join(t, beside)
	if !gone(state) || !gone(store) {
		t.Error("a private service beside has left what a killed one has left")
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if err := next.Wait(); err != nil {
		t.Fatal(err)
	}

	serveKilled(t, command, state, store)
	again := exec.Command(command, privateArgs(state, store)...)
	if err := again.Start(); err != nil {
		t.Fatal(err)
	}
	d = join(t, state)
	st, err := d.Status(t.Context())
	if err != nil || len(st.Runs) != 0 || st.PID != again.Process.Pid {
		t.Errorf("status %+v, %v; want no runs, of process %d", st, err, again.Process.Pid)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if err := again.Wait(); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{state, store, beside, other} {
		if !gone(path) {
			t.Errorf("%s is there yet", path)
		}
	}
}
