package natsjournal

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"golang.org/x/sys/unix"
)

const fullDiskEnv = "SLUICE_NATSJOURNAL_FULL_DISK"

// A disk that is full fails the append as what it is, soon, and loses nothing; when there is room the journal goes on.
func TestFullDisk(t *testing.T) {
	if dir := os.Getenv(fullDiskEnv); dir != "" {
		fullDisk(t, dir)
		return
	}
	t.Parallel()
	// A small file system of its own, in a name space of its own, so that nothing is left of it.
	cmd := exec.Command(os.Args[0], "-test.run=^TestFullDisk$", "-test.v")
	cmd.Env = append(os.Environ(), fullDiskEnv+"="+t.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	if os.Getuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	out, err := cmd.CombinedOutput()
	switch {
	case errors.Is(err, syscall.EPERM), strings.Contains(string(out), "no file system of its own"):
		t.Skipf("this system allows no file system of its own: %v\n%s", err, out)
	case err != nil:
		t.Fatalf("%v\n%s", err, out)
	}
}

func fullDisk(t *testing.T, dir string) {
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		t.Fatalf("no file system of its own: %v", err)
	}
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=12m"); err != nil {
		t.Fatalf("no file system of its own: %v", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 5<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	js := mustOpen(t, filepath.Join(dir, "journal"), nil)
	j := mustJournal(t, js, "a")
	other := mustJournal(t, js, "b")
	mustAppend(t, other, "other")
	var want []string
	fill := func() {
		t.Helper()
		for i := 0; ; i++ {
			data := fmt.Sprint(i, strings.Repeat("x", 100_000))
			begin := time.Now()
			err := j.Append(t.Context(), []sluice.Record{{Data: []byte(data)}})
			if err == nil {
				want = append(want, data)
				continue
			}
			if !errors.Is(err, sluice.ErrNoSpace) {
				t.Fatalf("append %d: %v, want no space", i, err)
			}
			if d := time.Since(begin); d > askAgain/2 {
				t.Errorf("it took %v to say so", d)
			}
			break
		}
		if err := j.Append(t.Context(), []sluice.Record{{Data: []byte("more")}}); !errors.Is(err, sluice.ErrNoSpace) {
			t.Errorf("a journal that failed goes on: %v", err)
		}
	}
	reopen := func() {
		t.Helper()
		j = mustJournal(t, js, "a")
		if got, err := contents(j); err != nil || !slices.Equal(got, want) {
			t.Fatalf("%d of %d records came back, %v", len(got), len(want), err)
		}
	}
	fill()
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	reopen()
	if got, err := contents(mustJournal(t, js, "b")); err != nil || !slices.Equal(got, []string{"other"}) {
		t.Fatalf("the other journal: %q, %v", got, err)
	}
	// A snapshot for which there is no room replaces nothing.
	if err := j.Compact(t.Context(), []sluice.Record{{Data: make([]byte, 12<<20)}}); !errors.Is(err, sluice.ErrNoSpace) {
		t.Fatalf("a compaction: %v, want no space", err)
	}
	reopen() // to open it takes little room
	// And one for which there is makes room.
	if err := j.Compact(t.Context(), []sluice.Record{{Data: []byte("snapshot")}}); err != nil {
		t.Fatal(err)
	}
	want = []string{"snapshot"}
	fill()
	if len(want) < 80 {
		t.Errorf("%d appends of 100 KB fit into 12 MiB after a compaction", len(want))
	}
	if err := js.Close(); err != nil {
		t.Error(err)
	}
}

const deniedEnv = "SLUICE_NATSJOURNAL_DENIED"

// A directory in which the server may not make files any more fails the append as what it is, and when it may again the journal goes on. The server itself gives up for good.
func TestADirectoryThatMayNotBeWrittenTo(t *testing.T) {
	if dir := os.Getenv(deniedEnv); dir != "" {
		denied(t, dir)
		return
	}
	t.Parallel()
	cmd := exec.Command(os.Args[0], "-test.run=^TestADirectoryThatMayNotBeWrittenTo$", "-test.v") // which stops being root
	cmd.Env = append(os.Environ(), deniedEnv+"="+t.TempDir())
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func denied(t *testing.T, dir string) {
	if os.Getuid() == 0 {
		const nobody = 65534
		if err := errors.Join(os.Chmod(filepath.Dir(dir), 0o711), os.Chown(dir, nobody, nobody), syscall.Setgid(nobody), syscall.Setuid(nobody)); err != nil {
			t.Fatal(err)
		}
	}
	js := mustOpen(t, filepath.Join(dir, "journal"), nil)
	j := mustJournal(t, js, "a")
	messages := filepath.Join(js.streamDir("a"), "msgs")
	if err := os.Chmod(messages, 0o500); err != nil {
		t.Fatal(err)
	}
	var want []string
	for { // until the server wants another file
		if len(want) == 100 {
			t.Fatal("40 MB need no other file")
		}
		data := fmt.Sprint(len(want), strings.Repeat("x", 400_000))
		begin := time.Now()
		err := j.Append(t.Context(), []sluice.Record{{Data: []byte(data)}})
		if err == nil {
			want = append(want, data)
			continue
		}
		if !errors.Is(err, sluice.ErrDenied) {
			t.Fatalf("append %d: %v, want denied", len(want), err)
		}
		if d := time.Since(begin); d > askAgain/2 {
			t.Errorf("it took %v to say so", d)
		}
		break
	}
	if err := os.Chmod(messages, 0o700); err != nil {
		t.Fatal(err)
	}
	j = mustJournal(t, js, "a")
	if got, err := contents(j); err != nil || !slices.Equal(got, want) {
		t.Fatalf("%d of %d records came back, %v", len(got), len(want), err)
	}
	mustAppend(t, j, "goes on")
	if err := js.Close(); err != nil {
		t.Error(err)
	}
}
