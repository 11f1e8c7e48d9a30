package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// awaitThat polls until it is so, for a minute at most: nothing says when another process has come so far.
func awaitThat(t *testing.T, what string, so func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !so(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after a minute %s", what)
		}
	}
}

// An interrupt ends everything that a torture has started, and nothing is left.
func TestATortureThatIsInterruptedLeavesNothing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cmd := exec.Command("sluice", "torture", "--duration", "60s", "--dir", dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	cmd.WaitDelay = time.Minute
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() { _ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL) })

	// Samples flow once a consumer has settled one. Which one, and in which incarnation, is chance: the first may be killed before it has a book.
	awaitThat(t, "nobody has settled a sample", func() bool {
		select {
		case err := <-ended:
			t.Fatalf("it ended before: %v\n%s", err, errs.String())
		default:
		}
		books, err := filepath.Glob(filepath.Join(dir, "sluice-torture-*", "books", "consumer-*.book"))
		if err != nil {
			t.Fatal(err)
		}
		for _, book := range books {
			if data, err := os.ReadFile(book); err == nil && bytes.Contains(data, []byte(`"op":"settle","end":true`)) {
				return true
			}
		}
		return false
	})
	processes := processesThatName(t, dir)
	if len(processes) < 3 { // itself, the service, and somebody who works
		t.Errorf("only these processes are there: %v", processes)
	}
	shared := sharedMemoryOf(t, processes)
	if err := unix.Kill(-cmd.Process.Pid, unix.SIGINT); err != nil { // as a terminal does, to the whole group
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != interrupted {
			t.Errorf("it ended with %v, want status %d", err, interrupted)
		}
	case <-time.After(time.Minute):
		t.Fatal("it does not end")
	}
	if got := strings.Count(errs.String(), "sluice: interrupted"); got != 1 || out.Len() > 0 {
		t.Errorf("it says %d times that it was interrupted, and %q", got, out.String())
	}
	if left := processesThatName(t, dir); len(left) > 0 {
		t.Errorf("processes are left: %v", left)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("files are left: %v, %v", left, err)
	}
	mounts, err := os.ReadFile("/proc/mounts")
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(mounts, []byte(dir)) {
		t.Errorf("a mount is left:\n%s", mounts)
	}
	for _, path := range shared {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("shared memory is left: %s", path)
		}
	}
}

// processesThatName finds the living processes whose command lines name the directory, as all of a torture's do: their folders in /proc, and the command lines.
func processesThatName(t *testing.T, dir string) map[string]string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	for _, file := range files {
		if data, err := os.ReadFile(file); err == nil && bytes.Contains(data, []byte(dir)) { // it may be gone meanwhile
			found[filepath.Dir(file)] = string(bytes.ReplaceAll(data, []byte{0}, []byte{' '}))
		}
	}
	return found
}

// sharedMemoryOf lists what the processes have open or mapped of /dev/shm.
func sharedMemoryOf(t *testing.T, processes map[string]string) (paths []string) {
	t.Helper()
	for process := range processes {
		maps, err := os.ReadFile(process + "/maps") // it may be gone meanwhile
		if err == nil {
			for line := range strings.Lines(string(maps)) {
				if at := strings.Index(line, "/dev/shm/"); at >= 0 {
					paths = append(paths, strings.TrimSpace(line[at:]))
				}
			}
		}
		links, err := filepath.Glob(process + "/fd/*")
		if err != nil {
			t.Fatal(err)
		}
		for _, link := range links {
			if path, err := os.Readlink(link); err == nil && strings.HasPrefix(path, "/dev/shm/") {
				paths = append(paths, path)
			}
		}
	}
	return paths
}
