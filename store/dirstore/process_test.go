//go:build linux

package dirstore

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

// parse makes the handle that a consumer told of.
func parseHandle(t testing.TB, s *Store, said string) sluice.Handle {
	t.Helper()
	id, text, _ := strings.Cut(said, " ")
	raw, err := hex.DecodeString(text)
	h := sluice.Handle{StoreURI: s.URI(), SampleID: id}
	if err != nil || len(raw) != len(h.ID) {
		t.Fatalf("%q names no handle: %v", said, err)
	}
	copy(h.ID[:], raw)
	return h
}

// putOthers puts 200 samples of other bytes, each of which goes at once, so that whatever may be recycled is.
func putOthers(t testing.TB, s *Store, n int) {
	t.Helper()
	for i := range 200 {
		must(t, s.Abort(t.Context(), mustPut(t, s, "other-"+strconv.Itoa(i), byte(100+i%100), n)))
	}
}

// wantResident compares the room that a store has given out, after its dead were cleared away.
func wantResident(t testing.TB, when string, s *Store, bytes, samples int64) {
	t.Helper()
	if _, err := s.GC(t.Context()); err != nil {
		t.Fatal(err)
	}
	if h := s.Health(); h.UsedBytes() != bytes || h.UsedSamples() != samples {
		t.Fatalf("%s: %+v, want %d bytes of %d samples", when, h, bytes, samples)
	}
	mustAudit(t, s, when)
}

// processState is the letter of /proc/PID/stat.
func processState(t testing.TB, pid int) string {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	must(t, err)
	return strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))[0]
}

// eventually waits for what other processes do.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it is never so that %s", what)
		}
	}
}

func TestAConsumerThatIsStoppedPastItsLeaseKeepsWhatItHas(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}})
	ref := mustPut(t, s, "a", 7, victimSample)
	must(t, s.Claim(ref, "queue"))
	slow, quick := startVictim(t, "consumer", s.dir), startVictim(t, "consumer", s.dir)
	slow.await(t, "ready")
	quick.await(t, "ready")
	handle := parseHandle(t, s, slow.ask(t, "got", "get %s", ref.Canonical()))
	must(t, slow.cmd.Process.Signal(unix.SIGSTOP))
	eventually(t, "the consumer is stopped", func() bool { return processState(t, slow.cmd.Process.Pid) == "T" })
	// Its lease runs out: another consumer gets the sample, and acks it.
	quick.ask(t, "used a", "use %s", ref.Canonical())
	must(t, s.Unclaim(ref, "queue"))
	wantResident(t, "while the stopped one has it", s, victimSample, 1)
	putOthers(t, s, victimSample)
	again := mustPut(t, s, "b", 8, victimSample)
	must(t, s.Claim(again, "queue"))
	must(t, slow.cmd.Process.Signal(unix.SIGCONT))
	slow.ask(t, "same a", "check a")
	slow.ask(t, "released a", "release a")
	wantResident(t, "while it has the memory", s, 2*victimSample, 2)
	putOthers(t, s, victimSample)
	slow.ask(t, "same a", "check a")
	slow.ask(t, "closed a", "close a")
	wantResident(t, "when it has given all back", s, victimSample, 1)
	must(t, s.Release(t.Context(), handle)) // late, and once more
	slow.ask(t, "used b", "use %s", again.Canonical())
	wantResident(t, "at the end", s, victimSample, 1)
}

func TestForeignForgedAndStaleHandlesOfOtherProcessesAreHarmless(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}})
	release := func(what string, h sluice.Handle) {
		t.Helper()
		if err := s.Release(t.Context(), h); err != nil {
			t.Errorf("Release of a handle that is %s: %v", what, err)
		}
	}
	first := mustPut(t, s, "a", 7, victimSample)
	dead := startVictim(t, "consumer", s.dir)
	dead.await(t, "ready")
	stale := parseHandle(t, s, dead.ask(t, "got", "get %s", first.Canonical()))
	dead.kill()
	must(t, s.Abort(t.Context(), first))
	wantResident(t, "when its holder is dead", s, 0, 0)

	second := mustPut(t, s, "a", 8, victimSample) // the id and, if it can be, the slot of the first
	v := startVictim(t, "consumer", s.dir)
	v.await(t, "ready")
	handle := parseHandle(t, s, v.ask(t, "got", "get %s", second.Canonical()))
	release("stale", stale)
	forged, foreign, crossed := handle, handle, handle
	forged.ID[3] ^= 1
	foreign.StoreURI += "x"
	crossed.SampleID = "b"
	release("forged", forged)
	release("of another store", foreign)
	release("of another sample", crossed)
	release("zero", sluice.Handle{})
	infos, err := s.Samples(t.Context())
	if err != nil || len(infos) != 1 || infos[0].Pins != 1 {
		t.Fatalf("%+v, %v, want one pin", infos, err)
	}
	wantResident(t, "after all of them", s, victimSample, 1)
	v.ask(t, "same a", "check a")

	release("true, and given back by another process", handle)
	release("given back twice", handle)
	wantResident(t, "while the memory is out", s, victimSample, 1)
	putOthers(t, s, victimSample)
	v.ask(t, "same a", "check a")
	v.ask(t, "closed a", "close a")
	wantResident(t, "at the end", s, 0, 0)
}

func TestAFileIsKeptForTheLastOfTwoReaders(t *testing.T) {
	t.Parallel()
	for _, killed := range []bool{false, true} {
		s := mustOpen(t, shm(t), &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}})
		ref := mustPut(t, s, "a", 7, victimSample)
		must(t, s.Claim(ref, "queue"))
		a, b := startVictim(t, "consumer", s.dir), startVictim(t, "consumer", s.dir)
		for _, v := range []*victim{a, b} {
			v.await(t, "ready")
			v.ask(t, "got a", "get %s", ref.Canonical())
		}
		must(t, s.Unclaim(ref, "queue"))
		if killed {
			a.kill()
		} else {
			a.ask(t, "released a", "release a")
			a.ask(t, "closed a", "close a")
		}
		wantResident(t, "with one reader left", s, victimSample, 1)
		putOthers(t, s, victimSample)
		b.ask(t, "same a", "check a")
		b.ask(t, "released a", "release a")
		putOthers(t, s, victimSample)
		b.ask(t, "same a", "check a")
		b.ask(t, "closed a", "close a")
		wantResident(t, "with none", s, 0, 0)
	}
}

// mappedIn reads what a process has mapped of the store's samples, through no mapping of this one.
func mappedIn(t testing.TB, pid int, dir string) (all []byte) {
	t.Helper()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	must(t, err)
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	must(t, err)
	defer mem.Close()
	for line := range strings.Lines(string(maps)) {
		if !strings.Contains(line, dir+"/") || strings.Contains(line, ledgerName) {
			continue
		}
		var from, to int64
		if _, err := fmt.Sscanf(line, "%x-%x", &from, &to); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		part := make([]byte, to-from)
		if _, err := mem.ReadAt(part, from); err != nil {
			t.Fatalf("read the memory of process %d: %v", pid, err)
		}
		all = append(all, part...)
	}
	return all
}

func killAndAwait(t testing.TB, pid int) {
	t.Helper()
	must(t, unix.Kill(pid, unix.SIGKILL))
	eventually(t, "the process is gone", func() bool {
		_, err := os.Stat(fmt.Sprintf("/proc/%d/maps", pid))
		return err != nil || processState(t, pid) == "Z"
	})
}

// TestAForkedChildKeepsWhatItsParentHad kills a session whose copy lives on: it has the mappings, and with them the locks, so its parent is not dead yet.
func TestAForkedChildKeepsWhatItsParentHad(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}})
	ref := mustPut(t, s, "a", 7, victimSample)
	v := startVictim(t, "consumer", s.dir)
	v.await(t, "ready")
	v.ask(t, "got a", "get %s", ref.Canonical())
	child, err := strconv.Atoi(v.ask(t, "forked", "fork"))
	must(t, err)
	alive := true
	t.Cleanup(func() {
		if alive {
			_ = unix.Kill(child, unix.SIGKILL)
		}
	})
	must(t, v.cmd.Process.Kill())
	_, _ = v.cmd.Process.Wait() // the copy has the pipes, so there is no end of what it says
	wantResident(t, "while the copy lives", s, victimSample, 1)
	must(t, s.Abort(t.Context(), ref))
	putOthers(t, s, victimSample)
	if !bytes.Contains(mappedIn(t, child, s.dir), pattern(7, victimSample)) {
		t.Error("what the copy has mapped has changed")
	}
	wantResident(t, "while the copy lives, aborted", s, victimSample, 1)
	killAndAwait(t, child)
	alive = false
	wantResident(t, "when the copy is dead too", s, 0, 0)
}

func TestAProgramThatAHolderStartsInheritsNothing(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}})
	ref := mustPut(t, s, "a", 7, victimSample)
	must(t, s.Claim(ref, "queue"))
	v := startVictim(t, "consumer", s.dir)
	v.await(t, "ready")
	v.ask(t, "got a", "get %s", ref.Canonical())
	child, err := strconv.Atoi(v.ask(t, "started", "start"))
	must(t, err)
	defer killAndAwait(t, child)
	must(t, v.cmd.Process.Kill())
	_, _ = v.cmd.Process.Wait()
	if maps := mappedIn(t, child, s.dir); len(maps) != 0 {
		t.Errorf("it has %d bytes of samples mapped", len(maps))
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", child))
	must(t, err)
	for _, fd := range fds {
		if to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", child, fd.Name())); strings.HasPrefix(to, s.dir) {
			t.Errorf("it has %s open", to)
		}
	}
	must(t, s.Unclaim(ref, "queue"))
	wantResident(t, "when its parent is dead", s, 0, 0)
}

// reader is a program that knows nothing of the store but its rule for readers: a shared lock on the file while it is mapped. It goes, and leaves a copy of itself
// that has the mapping alone.
const reader = `
import fcntl, mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_SH)
m = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
os.close(fd)
if os.fork():
    os._exit(0)
print("ready", flush=True)
sys.stdin.readline()
sys.stdout.buffer.write(m[:])
`

func TestAForkedReaderFromOutsideKeepsItsBytesByItsLockAlone(t *testing.T) {
	t.Parallel()
	python := os.Getenv("SLUICE_PYTHON")
	if python == "" {
		python = "python3"
	}
	s := mustOpen(t, shm(t), &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}})
	ref := mustPut(t, s, "a", 7, victimSample)
	path := filepath.Join(s.dir, "a"+sampleSuffix)
	before, err := os.ReadFile(path)
	must(t, err)
	cmd := exec.Command(python, "-c", reader, path)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	if err := cmd.Start(); err != nil {
		t.Skipf("no Python to be a reader from outside: %v", err)
	}
	lines := bufio.NewReader(out)
	if line, err := lines.ReadString('\n'); line != "ready\n" {
		t.Fatalf("it says %q, %v", line, err)
	}
	if _, err := cmd.Process.Wait(); err != nil { // the one that locked is gone
		t.Fatal(err)
	}
	must(t, s.Abort(t.Context(), ref)) // nobody has a handle: the ledger lets the file into the pool
	if s.Health().PoolBytes == 0 {
		t.Fatal("the file is not kept, so the test says nothing")
	}
	putOthers(t, s, victimSample)
	_, err = io.WriteString(in, "\n")
	must(t, err)
	after, err := io.ReadAll(lines)
	must(t, errors.Join(err, in.Close(), out.Close()))
	if !bytes.Equal(after, before) {
		t.Errorf("the %d bytes that it had mapped have changed to %d others", len(before), len(after))
	}
	mustAudit(t, s, "at the end")
}
