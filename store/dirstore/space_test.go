//go:build linux

package dirstore

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

// inOwnMounts runs the test once more, alone in a process that has mounts of its own, and reports whether this is that process. Nothing of what it mounts
// or fills is seen outside, and a SIGBUS there is a failure here. It skips where no such process can be had.
func inOwnMounts(t *testing.T) bool {
	t.Helper()
	if os.Getenv("DIRSTORE_MOUNTS") == t.Name() {
		must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
		return true
	}
	exe, err := os.Executable()
	must(t, err)
	cmd := exec.CommandContext(t.Context(), exe, "-test.run=^"+regexp.QuoteMeta(t.Name())+"$", "-test.v")
	cmd.Env = append(os.Environ(), "DIRSTORE_MOUNTS="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getegid(), Size: 1}},
	}
	out, err := cmd.CombinedOutput()
	switch {
	case cmd.Process == nil:
		t.Skipf("no process with mounts of its own can be started here: %v", err)
	case err != nil:
		t.Fatalf("in a process with mounts of its own: %v\n%s", err, out)
	case bytes.Contains(out, []byte("--- SKIP: ")):
		t.Skipf("in a process with mounts of its own:\n%s", out)
	case !bytes.Contains(out, []byte("--- PASS: "+t.Name())):
		t.Fatalf("the test did not run in the process with mounts of its own:\n%s", out)
	}
	t.Logf("in a process with mounts of its own:\n%s", out)
	return false
}

// smallTmpfs mounts a tmpfs for the rest of the test.
func smallTmpfs(t *testing.T, options string) string {
	t.Helper()
	mnt := t.TempDir()
	if err := unix.Mount("tmpfs", mnt, "tmpfs", 0, options); err != nil {
		t.Skipf("no tmpfs can be mounted here: %v", err)
	}
	t.Cleanup(func() { must(t, unix.Unmount(mnt, unix.MNT_DETACH)) })
	return mnt
}

func freeBytes(t testing.TB, dir string) int64 {
	t.Helper()
	var st unix.Statfs_t
	must(t, unix.Statfs(dir, &st))
	return int64(st.Bfree) * st.Bsize
}

// hog takes all room of the file system but so many bytes, until it is let go.
func hog(t testing.TB, mnt string, leave int64) (letGo func()) {
	t.Helper()
	path := filepath.Join(mnt, "hog")
	f, err := os.Create(path)
	must(t, err)
	defer f.Close()
	if n := freeBytes(t, mnt) - leave; n > 0 {
		must(t, unix.Fallocate(int(f.Fd()), 0, 0, n))
	}
	if free := freeBytes(t, mnt); free != leave/4096*4096 {
		t.Fatalf("%d bytes are free, want %d", free, leave)
	}
	return func() { must(t, os.Remove(path)) }
}

// remedies are what every refusal on a full tmpfs names.
var remedies = []string{"docker run --shm-size", "--ipc=host", "mount -o remount,size=", "max_bytes", "another directory"}

func wantNoSpace(t testing.TB, what string, err error, fragments ...string) {
	t.Helper()
	wantError(t, what, err, sluice.NoSpace, append(fragments, remedies...)...)
}

// shelf is a store on a file system of 64 MB, with claimed samples that nothing may happen to.
type shelf struct {
	*Store
	mnt  string
	refs []sluice.Ref
}

func newShelf(t *testing.T) *shelf {
	t.Helper()
	mnt := smallTmpfs(t, "size=64m")
	s := mustOpen(t, filepath.Join(mnt, "s"), &Options{Caps: sluice.Caps{MaxSamples: 100_000}})
	x := &shelf{s, mnt, nil}
	for i := range 3 {
		ref := mustPut(t, s, fmt.Sprint("kept-", i), byte(i), 1_000_000)
		must(t, s.Claim(ref, "queue"))
		x.refs = append(x.refs, ref)
	}
	return x
}

// wantWhole reads every sample that was put, to the last byte, and writes to every page of the private mapping.
func (x *shelf) wantWhole(t testing.TB, when string) {
	t.Helper()
	mustAudit(t, x.Store, when)
	for i, ref := range x.refs {
		ts := mustGet(t, x.Store, ref)
		data := ts.Features[0].Data
		if !bytes.Equal(data, pattern(byte(i), 1_000_000)) {
			t.Errorf("%s: %s has other bytes", when, ref)
		}
		for at := 0; at < len(data); at += 4096 {
			data[at]++
		}
		must(t, ts.Release(t.Context()))
	}
}

func TestAFullFileSystemRefusesClearlyAndLosesNothing(t *testing.T) {
	t.Parallel()
	if !inOwnMounts(t) {
		return
	}
	t.Run("caps over its size", func(t *testing.T) {
		mnt := smallTmpfs(t, "size=64m")
		_, err := Open(filepath.Join(mnt, "s"), &Options{Caps: sluice.Caps{MaxBytes: 1 << 30}})
		wantNoSpace(t, "Open", err, "dirstore: open", "the cap of 1073741824 bytes", "tmpfs", "67108864")
	})
	t.Run("no room for a ledger", func(t *testing.T) {
		mnt := smallTmpfs(t, "size=64m")
		dir := filepath.Join(mnt, "s")
		letGo := hog(t, mnt, 100<<10)
		_, err := Open(dir, someCaps)
		wantNoSpace(t, "Open", err, "dirstore: open", dir, fmt.Sprintf("allocate a ledger of %d bytes", headSize+segmentSize), "no space left on device")
		if names, err := os.ReadDir(mnt); err != nil || len(names) != 1 {
			t.Errorf("it left %v, %v, want the hog alone", names, err)
		}
		letGo()
		mustPut(t, mustOpen(t, dir, someCaps), "a", 1, 100)
	})
	t.Run("a ledger with holes", func(t *testing.T) {
		x := newShelf(t)
		must(t, x.Close())
		path := filepath.Join(x.dir, ledgerName)
		data, err := os.ReadFile(path)
		must(t, err)
		must(t, os.Remove(path))
		f, err := os.Create(path)
		must(t, err)
		must(t, f.Chmod(0o600))
		must(t, f.Truncate(int64(len(data))))
		for at := 0; at < len(data); at += 4096 { // as a copy does that saves room
			if page := data[at : at+4096]; bytes.Count(page, []byte{0}) != len(page) {
				_, err := f.WriteAt(page, int64(at))
				must(t, err)
			}
		}
		must(t, f.Close())
		letGo := hog(t, x.mnt, 8<<10)
		_, err = Open(x.dir, nil)
		wantNoSpace(t, "Open", err, "dirstore: open", x.dir, "give the ledger the blocks that it lacks", "no space left on device")
		letGo()
		x.Store = mustOpen(t, x.dir, nil)
		hog(t, x.mnt, 0)
		x.wantWhole(t, "opened, and full after that")
	})
	t.Run("a sample with holes", func(t *testing.T) {
		x := newShelf(t)
		const n = 3_000_000
		zeros := sampleOf("zeros", 9, n)
		clear(zeros.Features[0].Data)
		ref, err := x.Put(t.Context(), zeros, sluice.Reservation{})
		must(t, err)
		must(t, x.Claim(ref, "queue"))
		path := filepath.Join(x.dir, "zeros"+sampleSuffix)
		punch := func(path string) {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			must(t, err)
			must(t, unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 4096, 2_900_000))
			must(t, f.Close())
		}
		read := func(ref sluice.Ref) {
			t.Helper()
			letGo := hog(t, x.mnt, 0)
			ts := mustGet(t, x.Store, ref)
			if data := ts.Features[0].Data; bytes.Count(data, []byte{0}) != n {
				t.Errorf("%s has other bytes", ref)
			}
			must(t, ts.Release(t.Context()))
			letGo()
		}
		// Somebody has copied the store.
		punch(path)
		letGo := hog(t, x.mnt, 1<<20)
		_, err = x.Get(t.Context(), ref)
		wantNoSpace(t, "Get", err, `dirstore: get "zeros"`, "can't allocate 30", "no space left on device")
		x.wantWhole(t, "after the refusal")
		letGo()
		must(t, mustGet(t, x.Store, ref).Release(t.Context()))
		read(ref)
		// Somebody adopts such a file.
		staging := filepath.Join(x.mnt, "staging")
		must(t, os.Mkdir(staging, 0o700))
		must(t, os.Rename(path, filepath.Join(staging, "f")))
		root, err := os.OpenRoot(staging)
		must(t, err)
		defer root.Close()
		if n, err := x.GC(t.Context()); n != 1 || err != nil {
			t.Fatalf("GC: %d, %v, want the sample without a file", n, err)
		}
		punch(filepath.Join(staging, "f"))
		adopt := func() (sluice.Ref, error) {
			return x.Adopt(t.Context(), root, "f", os.Geteuid(), Incoming{SampleID: "zeros", RunID: "r", Generation: ref.Generation(), Algorithm: sluice.EAGLE3, NumTokens: 1,
				Attributes: zeros.Attributes, Features: []string{"x"}}, sluice.Reservation{})
		}
		x.hooks.at = func(point string) {
			if point == "moved" {
				letGo = hog(t, x.mnt, 1<<20)
			}
		}
		_, err = adopt()
		wantNoSpace(t, "Adopt", err, `dirstore: adopt "f"`, "can't allocate 30", "no space left on device")
		x.wantWhole(t, "after the refusal of the file")
		letGo()
		x.hooks.at = nil
		ref, err = adopt()
		must(t, err)
		must(t, x.Claim(ref, "queue"))
		read(ref)
	})
	t.Run("at reservation", func(t *testing.T) {
		x := newShelf(t)
		letGo := hog(t, x.mnt, 1<<20)
		for what, err := range map[string]error{
			"Reserve": func() error { _, err := x.Reserve(t.Context(), 2_000_000); return err }(),
			"Put": func() error {
				_, err := x.Put(t.Context(), sampleOf("a", 9, 2_000_000), sluice.Reservation{})
				return err
			}(),
		} {
			wantNoSpace(t, what, err, "dirstore: "+strings.ToLower(what), "2000000 bytes (1.9 MiB) are wanted beside 0 that are reserved", "file system", x.dir, "1048576 (1.0 MiB) free")
		}
		if h := x.Health(); h.ReservedSamples != 0 || h.ResidentSamples != 3 {
			t.Errorf("%+v", h)
		}
		x.wantWhole(t, "after the refusals")
		letGo()
		_, err := x.Reserve(t.Context(), 2_000_000)
		must(t, err)
	})
	// The room goes at one point of a put; before it has its blocks, that is refused, and behind that it does not matter.
	for _, tc := range []struct {
		point string
		ahead bool
		leave int64
		want  string // what it could not do
	}{
		{"staged", true, 0, "can't allocate 30"},
		{"staged", true, 1 << 20, "can't allocate 30"},
		{"staged", false, 0, "can't write 30"},
		{"created", false, 1 << 20, "can't write 30"},
		{"created", true, 0, ""},
		{"written", false, 0, ""},
		{"named", false, 0, ""},
		{"linked", false, 0, ""},
		{"published", false, 0, ""},
	} {
		t.Run(fmt.Sprintf("in a put that is %s, %d left, allocating ahead %v", tc.point, tc.leave, tc.ahead), func(t *testing.T) {
			const n = 3_000_000
			x := newShelf(t)
			x.medium.ahead = tc.ahead
			r, err := x.Reserve(t.Context(), n)
			must(t, err)
			before := x.Health()
			var letGo func()
			x.hooks.at = func(point string) {
				if point == tc.point && letGo == nil {
					letGo = hog(t, x.mnt, tc.leave)
				}
			}
			ref, err := x.Put(t.Context(), sampleOf("a", 9, n), r)
			if tc.want != "" {
				wantNoSpace(t, "Put", err, `dirstore: put "a"`, tc.want, "no space left on device")
				if h := x.Health(); h != before {
					t.Errorf("a put without room changed %+v to %+v", before, h)
				}
				x.wantWhole(t, "after the put without room")
				letGo()
				ref, err = x.Put(t.Context(), sampleOf("a", 9, n), r) // under the same reservation
			}
			must(t, err)
			ts := mustGet(t, x.Store, ref)
			if !bytes.Equal(ts.Features[0].Data, pattern(9, n)) {
				t.Error("it has other bytes")
			}
			must(t, ts.Release(t.Context()))
			x.wantWhole(t, "at the end")
		})
	}
	for _, ahead := range []bool{true, false} {
		t.Run(fmt.Sprintf("the pool is given back first, allocating ahead %v", ahead), func(t *testing.T) {
			x := newShelf(t)
			x.medium.ahead = ahead
			must(t, x.Abort(t.Context(), mustPut(t, x.Store, "pooled", 7, 3_000_000)))
			r, err := x.Reserve(t.Context(), 4_000_000)
			must(t, err)
			x.hooks.at = func(point string) {
				if point != "staged" {
					return
				}
				hog(t, x.mnt, 2_000_000)
				if x.Health().PoolBytes < 3_000_000 {
					t.Error("nothing is in the pool")
				}
			}
			ref, err := x.Put(t.Context(), sampleOf("a", 9, 4_000_000), r)
			must(t, err)
			if h := x.Health(); h.PoolBytes != 0 {
				t.Errorf("%+v", h)
			}
			ts := mustGet(t, x.Store, ref)
			if !bytes.Equal(ts.Features[0].Data, pattern(9, 4_000_000)) {
				t.Error("it has other bytes")
			}
			must(t, ts.Release(t.Context()))
			x.wantWhole(t, "at the end")
		})
	}
	t.Run("the ledger cannot grow for samples", func(t *testing.T) {
		x := newShelf(t)
		letGo := hog(t, x.mnt, 0)
		var room []sluice.Reservation
		var err error
		for err == nil && len(room) < 2*segmentSlots {
			var r sluice.Reservation
			if r, err = x.Reserve(t.Context(), 0); err == nil {
				room = append(room, r)
			}
		}
		wantNoSpace(t, "Reserve", err, "dirstore: ledger", x.dir, fmt.Sprintf("grow by %d bytes", segmentSize), "no space left on device")
		if len(room) != segmentSlots-len(x.refs) {
			t.Errorf("%d reservations were given, want %d", len(room), segmentSlots-len(x.refs))
		}
		x.wantWhole(t, "with a full ledger")
		must(t, x.Unreserve(t.Context(), room[0]))
		_, err = x.Reserve(t.Context(), 0)
		must(t, err)
		letGo()
		_, err = x.Reserve(t.Context(), 0)
		must(t, err)
		x.wantWhole(t, "with room again")
	})
	t.Run("the ledger cannot grow for handles", func(t *testing.T) {
		x := newShelf(t)
		letGo := hog(t, x.mnt, 0)
		var open []*sluice.Tensors
		var err error
		for err == nil && len(open) < 2*segmentPins {
			var ts *sluice.Tensors
			if ts, err = x.Get(t.Context(), x.refs[0]); err == nil {
				open = append(open, ts)
			}
		}
		wantNoSpace(t, "Get", err, "dirstore: ledger", fmt.Sprintf("grow by %d bytes", segmentSize))
		if len(open) != segmentPins {
			t.Errorf("%d handles were given, want %d", len(open), segmentPins)
		}
		letGo()
		open = append(open, mustGet(t, x.Store, x.refs[0]))
		for _, ts := range open {
			must(t, ts.Release(t.Context()))
		}
		x.wantWhole(t, "with room again")
	})
	t.Run("what gives back needs none", func(t *testing.T) {
		x := newShelf(t)
		loose := mustPut(t, x.Store, "loose", 8, 500_000)
		r, err := x.Reserve(t.Context(), 100)
		must(t, err)
		ts := mustGet(t, x.Store, x.refs[0])
		hog(t, x.mnt, 0)
		peer := mustOpen(t, x.dir, nil) // another session comes
		other := mustGet(t, peer, x.refs[1])
		must(t, x.Unreserve(t.Context(), r))
		must(t, x.Abort(t.Context(), loose))
		must(t, x.Unclaim(x.refs[0], "queue"))
		if !bytes.Equal(ts.Features[0].Data, pattern(0, 1_000_000)) {
			t.Error("the tensors changed")
		}
		must(t, ts.Release(t.Context()))
		must(t, x.MarkDead(x.refs[1], "queue", true))
		if n, err := x.GC(t.Context()); n != 0 || err != nil {
			t.Errorf("GC: %d, %v", n, err)
		}
		must(t, other.Release(t.Context()))
		must(t, peer.Close())
		if h := x.Health(); h.UsedSamples() != 2 {
			t.Errorf("%+v", h)
		}
		_, err = x.Put(t.Context(), sampleOf("b", 9, 400_000), sluice.Reservation{}) // in what came free
		must(t, err)
		mustAudit(t, x.Store, "at the end")
	})
	t.Run("no inodes", func(t *testing.T) {
		mnt := smallTmpfs(t, "size=64m,nr_inodes=12")
		s := mustOpen(t, filepath.Join(mnt, "s"), someCaps)
		var refs []sluice.Ref
		var err error
		for i := 0; err == nil && i < 20; i++ {
			var ref sluice.Ref
			if ref, err = s.Put(t.Context(), sampleOf(fmt.Sprint("s-", i), byte(i), 10_000), sluice.Reservation{}); err == nil {
				refs = append(refs, ref)
			}
		}
		wantError(t, "Put", err, sluice.NoSpace, fmt.Sprintf("dirstore: put %q", fmt.Sprint("s-", len(refs))), "no space left on device", "inodes (df -i)")
		mustAudit(t, s, "without inodes")
		if h := s.Health(); len(refs) == 0 || h.ResidentSamples != int64(len(refs)) || h.ReservedSamples != 0 {
			t.Errorf("%d puts, %+v", len(refs), h)
		}
		for i, ref := range refs {
			ts := mustGet(t, s, ref)
			if !bytes.Equal(ts.Features[0].Data, pattern(byte(i), 10_000)) {
				t.Errorf("%s has other bytes", ref)
			}
			must(t, ts.Release(t.Context())) // and so it is freed
		}
		mustPut(t, s, "again", 1, 10_000)
	})
}

// anonymous tells how much memory of this process is in no file, and takes none for that.
func anonymous(t testing.TB) func() int64 {
	t.Helper()
	status, err := os.Open("/proc/self/status")
	must(t, err)
	t.Cleanup(func() { must(t, status.Close()) })
	buf := make([]byte, 4096)
	return func() (kib int64) {
		n, err := unix.Pread(int(status.Fd()), buf, 0)
		must(t, err)
		_, rest, _ := bytes.Cut(buf[:n], []byte("\nRssAnon:"))
		for _, c := range bytes.TrimLeft(rest, " \t") {
			if c < '0' || c > '9' {
				break
			}
			kib = 10*kib + int64(c-'0')
		}
		return kib << 10
	}
}

// TestStreamingTwentyTimesTheCapNeverTakesMoreThanTheCapAndASample measures what the file system has given out, plus the anonymous memory that the process has
// taken since it was warm, at each point of each put and get.
func TestStreamingTwentyTimesTheCapNeverTakesMoreThanTheCapAndASample(t *testing.T) {
	t.Parallel()
	if !inOwnMounts(t) {
		return
	}
	const most, maxBytes = 12 << 20, 36 << 20
	mnt := smallTmpfs(t, "size=64m")
	empty := freeBytes(t, mnt)
	content := pattern(1, most)
	anon := anonymous(t)
	var base, peak, peakOfFiles int64
	measure := func(string) {
		files := empty - freeBytes(t, mnt)
		peakOfFiles = max(peakOfFiles, files)
		if base > 0 {
			peak = max(peak, files+anon()-base)
		}
	}
	session := func() *Store {
		s, err := open(filepath.Join(mnt, "s"), &Options{Caps: sluice.Caps{MaxBytes: maxBytes}}, hooks{at: measure})
		must(t, err)
		t.Cleanup(func() { must(t, s.Close()) })
		return s
	}
	producer, consumer := session(), session()
	type held struct {
		ref sluice.Ref
		ts  *sluice.Tensors // nil until it was got
	}
	var line []held
	rng := rand.New(rand.NewPCG(1, 2))
	full, streamed := 0, int64(0)
	for n := 0; streamed < 21*maxBytes; n++ {
		if base == 0 && streamed > maxBytes {
			base = anon() // the runtime has what it needs
		}
		size := 1 + rng.IntN(most)
		sample := sampleOf(fmt.Sprint("s-", n), 0, 0)
		sample.Features[0].Tensor = sluice.Tensor{Spec: sluice.Spec{DType: sluice.UInt8, Shape: []int64{int64(size)}}, Data: content[:size]}
		r, err := producer.Reserve(t.Context(), int64(size))
		for errors.Is(err, sluice.ErrFull) { // then the consumer goes on
			full++
			if len(line) == 0 {
				t.Fatalf("nothing is out, and yet: %v", err)
			}
			i := rng.IntN(len(line))
			if line[i].ts == nil {
				line[i].ts = mustGet(t, consumer, line[i].ref)
				for at := 0; at < len(line[i].ts.Features[0].Data); at += 64 {
					sink += line[i].ts.Features[0].Data[at]
				}
			}
			must(t, consumer.Unclaim(line[i].ref, "queue"))
			must(t, line[i].ts.Release(t.Context()))
			line = append(line[:i], line[i+1:]...)
			measure("")
			r, err = producer.Reserve(t.Context(), int64(size))
		}
		must(t, err)
		ref, err := producer.Put(t.Context(), sample, r)
		must(t, err)
		must(t, producer.Claim(ref, "queue"))
		measure("")
		line, streamed = append(line, held{ref: ref}), streamed+int64(size)
		if i := rng.IntN(len(line)); line[i].ts == nil {
			line[i].ts = mustGet(t, consumer, line[i].ref)
		}
	}
	t.Logf("%.0f MB streamed, %d times full; at most %.1f MB in files, %.1f MB with anonymous memory; the cap is %.1f MB", float64(streamed)/1e6, full, float64(peakOfFiles)/1e6, float64(peak)/1e6, maxBytes/1e6)
	if peak > maxBytes+most {
		t.Errorf("%d bytes were taken, want at most the cap of %d and a sample of %d", peak, maxBytes, most)
	}
	if full < 10 || peakOfFiles < maxBytes*3/4 {
		t.Errorf("full %d times, at most %d bytes in files: the test says nothing", full, peakOfFiles)
	}
	mustAudit(t, producer, "at the end")
	for _, h := range line {
		if h.ts != nil {
			must(t, h.ts.Release(t.Context()))
		}
	}
}
