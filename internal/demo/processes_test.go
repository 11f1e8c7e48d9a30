//go:build linux

package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// startParent starts such a demo and waits until something flows. It returns the pids of its children too.
func startParent(t *testing.T, dir string) (parent *exec.Cmd, children []int, stderr *bytes.Buffer) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	parent = exec.Command(self)
	parent.Env = append(os.Environ(), parentOver+"="+dir)
	stderr = &bytes.Buffer{}
	parent.Stderr = stderr
	parent.WaitDelay = 20 * time.Second
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = parent.Process.Kill() })
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatalf("nothing flows: %v: %s", err, stderr)
	}
	if children = childrenOf(parent.Process.Pid); len(children) != 2 {
		t.Fatalf("children: %v", children)
	}
	return parent, children, stderr
}

func childrenOf(pid int) (pids []int) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, name := range stats {
		stat, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(stat), ") ")
		if f := strings.Fields(rest); len(f) > 1 && f[1] == strconv.Itoa(pid) {
			child, _ := strconv.Atoi(filepath.Base(filepath.Dir(name)))
			pids = append(pids, child)
		}
	}
	return pids
}

// gone waits until the processes and the directory are no more.
func gone(t *testing.T, dir string, pids []int) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		var left []string
		for _, pid := range pids {
			stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if err == nil && !strings.Contains(string(stat), ") Z ") { // a zombie waits for who collects orphans here, if anyone does
				left = append(left, strconv.Itoa(pid))
			}
		}
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			left = append(left, dir)
		}
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still there: %v", left)
		}
	}
}

func TestAParentThatIsKilledLeavesNothing(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "store")
	parent, children, _ := startParent(t, dir)
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait()
	gone(t, dir, children)
}

func TestAChildThatIsLostEndsTheDemo(t *testing.T) {
	t.Parallel()
	for i := range 2 { // producer and consumer, in the order in which they happened to start
		dir := filepath.Join(t.TempDir(), "store")
		parent, children, stderr := startParent(t, dir)
		if err := syscall.Kill(children[i], syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if err := parent.Wait(); err == nil || !strings.Contains(stderr.String(), "ended before its time: signal: killed") {
			t.Errorf("%v: %s", err, stderr)
		}
		gone(t, dir, children)
	}
}

func TestProcessesEndSoonWhenInterrupted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	dir := filepath.Join(t.TempDir(), "store")
	var at time.Time
	o := Options{Store: dir, Processes: true, Interval: 10 * time.Millisecond, Progress: func(s Snapshot) {
		if s.Status.Acked > 0 && ctx.Err() == nil {
			at = time.Now()
			cancel()
		}
	}}
	if _, err := Run(ctx, o); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if took := time.Since(at); took > patience/2 {
		t.Errorf("it took %v", took)
	}
	gone(t, dir, nil)
}

func TestKillingAConsumerLosesNothing(t *testing.T) {
	t.Parallel()
	for _, ranks := range []int{1, 2} {
		o := Options{Model: tiny, Prompts: []string{promptFile(t)}, AuxLayers: []int{0, 1, 2}, Batch: 1, Ranks: ranks, Kill: true, Store: filepath.Join(t.TempDir(), "store")}
		r, err := Run(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if f := r.Faults(); len(f) > 0 || r.Kills != 1 || r.Redelivered < 1 || r.Acked != 5 || r.Consumed != 5 {
			t.Errorf("%d ranks: faults %q in %+v", ranks, f, r)
		}
		gone(t, o.Store, nil)
	}
}
