package memstore

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/sluice-ml/sluice"
	"golang.org/x/sys/unix"
)

// pages is what the store's memory file really occupies, in bytes.
func pages(t *testing.T, s *Store) int64 {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Fstat(s.arena.fd, &st))
	return st.Blocks * 512
}

// held counts this process's descriptors of memory files and mappings of them. Tests that use it are not parallel to any other.
func held() (files, mappings int) {
	dir, _ := os.ReadDir("/proc/self/fd")
	for _, e := range dir {
		if to, _ := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); strings.Contains(to, "memfd:sluice") {
			files++
		}
	}
	maps, _ := os.ReadFile("/proc/self/maps")
	return files, strings.Count(string(maps), "memfd:sluice")
}

func TestNothingIsLeftOfAClosedStore(t *testing.T) {
	files, mappings := held()
	check := func(when string, wantFiles, wantMappings int) {
		t.Helper()
		if f, m := held(); f != files+wantFiles || m != mappings+wantMappings {
			t.Errorf("%s: %d descriptors and %d mappings, want %d and %d", when, f-files, m-mappings, wantFiles, wantMappings)
		}
	}
	for range 3 {
		s := open(t, &Options{Caps: sluice.Caps{MaxBytes: 1 << 30}})
		check("a new store", 1, 0)
		var open []*sluice.Tensors
		for i := range 5 {
			open = append(open, get(t, s, put(t, s, sample(fmt.Sprint(i), 100_000, 1))))
		}
		put(t, s, sample("unread", 1<<20, 1))
		check("with five tensors", 1, 6)
		for _, ts := range open[:2] {
			must(t, ts.Release(t.Context()))
		}
		check("with three tensors", 1, 4)
		must(t, s.Close())
		for _, ts := range open[2:] {
			if !same(ts, sample("", 100_000, 1)) {
				t.Error("tensors differ after Close")
			}
			must(t, ts.Close())
		}
		check("closed", 0, 0)
		if h := s.Health(); h != (sluice.Health{Caps: h.Caps}) {
			t.Errorf("Health is %+v", h)
		}
	}
}

func TestHealthWaitsForNoOtherCall(t *testing.T) {
	t.Parallel()
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: 1 << 20}})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.arena.mu.Lock()
	defer s.arena.mu.Unlock()
	if h := s.Health(); h.Caps.MaxBytes != 1<<20 || h.UsedBytes() != 0 {
		t.Errorf("health is %+v", h)
	}
}

// TestAGetTouchesNoPage: a writable private mapping that is populated is a copy of it all.
func TestAGetTouchesNoPage(t *testing.T) {
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: 1 << 30}})
	ts := get(t, s, put(t, s, sample("s", 8<<20, 1)))
	resident := func() (kib int64) {
		smaps, err := os.ReadFile("/proc/self/smaps")
		must(t, err)
		_, own, ok := strings.Cut(string(smaps), fmt.Sprintf("\n%x-", uintptr(unsafe.Pointer(unsafe.SliceData(ts.Features[0].Data)))))
		if !ok {
			t.Fatal("the tensors are no mapping")
		}
		_, own, _ = strings.Cut(own, "\nRss:")
		_, err = fmt.Sscan(own, &kib)
		must(t, err)
		return kib
	}
	if kib := resident(); kib != 0 {
		t.Errorf("a fresh mapping of 8 MiB has %d KiB in memory", kib)
	}
	ts.Features[0].Data[0]++
	if kib := resident(); kib == 0 || kib > 4096 {
		t.Errorf("after one write, the mapping has %d KiB in memory", kib)
	}
	must(t, ts.Release(t.Context()))
}

func TestThePoolIsRecycledAndCounted(t *testing.T) {
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: 8 << 20}})
	var size int64
	for i := range 20 {
		sm := sample("s", 2<<20+int64(i)*4096, byte(i))
		ts := get(t, s, put(t, s, sm))
		if !same(ts, sm) {
			t.Fatal("content differs")
		}
		must(t, ts.Release(t.Context()))
		if p := s.Health().PoolBytes; p != pages(t, s) {
			t.Errorf("the pool says %d bytes, the file has %d", p, pages(t, s))
		}
		size = pages(t, s)
	}
	if size > 4<<20 {
		t.Errorf("20 samples of 2 MiB, one after the other, take %d bytes", size)
	}
}

func TestResidentAndPoolKeepToTheCap(t *testing.T) {
	const limit = 8 << 20
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: limit}})
	for _, n := range []int64{100_000, 300_000, 1 << 20, 2 << 20, 4 << 20, 65_536, 8 << 20, 700_000, 400_000} { // each fills the store once
		var refs []sluice.Ref
		for i := range limit / (n + 4096) {
			refs = append(refs, put(t, s, sample(fmt.Sprint(i), n, 1)))
			if got, most := pages(t, s), int64(limit+limit/8); got > most {
				t.Errorf("samples of %d bytes: the file has %d bytes, at most %d are allowed", n, got, most)
			}
		}
		for _, ref := range refs {
			must(t, s.Abort(t.Context(), ref))
		}
		if p := s.Health().PoolBytes; p != pages(t, s) || p > limit+limit/8 {
			t.Errorf("samples of %d bytes: the pool says %d bytes, the file has %d", n, p, pages(t, s))
		}
	}
}

func TestAPoolWithoutACapInBytesKeepsToTheCapInSamples(t *testing.T) {
	s := open(t, &Options{Caps: sluice.Caps{MaxSamples: 3}})
	for _, n := range []int64{100_000, 300_000, 1 << 20, 3 << 20, 9 << 20} {
		var refs []sluice.Ref
		for i := range 3 {
			refs = append(refs, put(t, s, sample(fmt.Sprint(i), n, 1)))
		}
		if got, most := pages(t, s), 3*(n+n/8+4096); got > most {
			t.Errorf("three samples of %d bytes and the pool take %d bytes", n, got)
		}
		for _, ref := range refs {
			must(t, s.Abort(t.Context(), ref))
		}
	}
}

func TestGetCopiesWhereItMayNotMap(t *testing.T) {
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: 8 << 20}})
	sm := sample("s", 1<<20, 1)
	ref := put(t, s, sm)
	fd := s.arena.fd
	s.arena.fd = -1 // as good a reason as any for mmap to fail
	ts := get(t, s, ref)
	s.arena.fd = fd
	if !same(ts, sm) {
		t.Error("content differs")
	}
	must(t, ts.Release(t.Context()))
	if h := s.Health(); h.UsedBytes() != 0 {
		t.Errorf("Health is %+v", h)
	}
}

func TestAPutThatTheKernelRefusesLeavesNothing(t *testing.T) {
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: 64 << 20}})
	ref := put(t, s, sample("kept", 100_000, 1))
	before := s.Health()
	// A seal against growth stands in for a machine without memory: both are an error of write.
	if _, err := unix.FcntlInt(uintptr(s.arena.fd), unix.F_ADD_SEALS, unix.F_SEAL_GROW); err != nil {
		t.Skip("seals: ", err)
	}
	_, err := s.Put(t.Context(), sample("s", 2<<20, 1), sluice.Reservation{})
	if sluice.KindOf(err) != sluice.NoSpace || !strings.Contains(err.Error(), "pwrite") || !strings.Contains(err.Error(), memoryHint) {
		t.Errorf("Put: %v", err)
	}
	if h := s.Health(); h != before {
		t.Errorf("Health is %+v, was %+v", h, before)
	}
	ts := get(t, s, ref)
	if !same(ts, sample("kept", 100_000, 1)) {
		t.Error("content differs")
	}
	must(t, ts.Release(t.Context()))
}

func TestASegmentLargerThanARegion(t *testing.T) {
	if testing.Short() {
		t.Skip("writes 64 MiB behind a gigabyte")
	}
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: 8 << 30}})
	a := s.arena
	for _, n := range []int64{64 << 10, regionSize, regionSize - 4096, regionSize + 1, 3 * regionSize} {
		seg, err := a.place(a.classOf(n))
		must(t, err)
		if int64(len(seg.shared)) < n || int64(len(seg.shared)) > n+n/8+4096 {
			t.Errorf("a place for %d bytes has %d", n, len(seg.shared))
		}
		seg.size, seg.booked = n, 0
		must(t, seg.write(n-5, []byte("tail!")))
		if string(seg.bytes()[n-5:]) != "tail!" {
			t.Error("what was written through the file does not show in the mapping")
		}
		p, err := seg.private()
		must(t, err)
		if !bytes.Equal(p.mem[n-5:], []byte("tail!")) {
			t.Error("what was written through the file does not show in a private mapping")
		}
		must(t, p.unmap())
		must(t, a.punch(seg, 0))
	}
}

func TestClassesWasteLittle(t *testing.T) {
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: 1}})
	last := int64(0)
	for n := int64(1); n < 1<<40; n += 1 + n/13 {
		c := s.arena.classOf(n)
		if c < n || c%s.arena.page != 0 || c < last || c-n >= max(n/8+1, s.arena.page) {
			t.Fatalf("class of %d is %d", n, c)
		}
		if s.arena.classOf(c) != c {
			t.Fatalf("class of %d is %d, whose class is %d", n, c, s.arena.classOf(c))
		}
		last = c
	}
}

func TestFreeMemoryReadsThisMachine(t *testing.T) {
	n, err := freeMemory()
	if err != nil || n < 1<<20 || n > 1<<50 {
		t.Errorf("freeMemory = %d, %v", n, err)
	}
}

func TestAGroupWithALimitLeavesTheRestOfIt(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) { must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600)) }
	left := func() (int64, bool) { return groupLeft(dir, "memory.max", "memory.current", "") }
	if _, ok := left(); ok {
		t.Error("a group without files has a limit")
	}
	write("memory.max", "max\n")
	write("memory.current", "700\n")
	if _, ok := left(); ok {
		t.Error("max is no limit")
	}
	write("memory.max", "1000\n")
	if n, ok := left(); n != 300 || !ok {
		t.Errorf("left is %d, %v", n, ok)
	}
	write("memory.stat", "anon 100\nfile 600\nactive_file 50\ninactive_file 150\n")
	if n, ok := left(); n != 500 || !ok {
		t.Errorf("left with droppable files is %d, %v", n, ok)
	}
}

func TestAReadingServesForAWhile(t *testing.T) {
	reads := 0
	m := machine{read: func() (int64, error) { reads++; return 1000, nil }}
	for range 5 {
		must(t, m.take(10))
		must(t, m.has(100))
	}
	if reads != 1 {
		t.Errorf("%d readings for 50 of 1000 bytes", reads)
	}
	must(t, m.take(300))
	must(t, m.take(10)) // more than a quarter is taken
	if reads != 2 {
		t.Errorf("%d readings", reads)
	}
	m.at = m.at.Add(-2 * time.Second)
	must(t, m.take(10))
	if reads != 3 {
		t.Errorf("%d readings", reads)
	}
	if err := m.has(1001); err == nil {
		t.Error("more than there is can be had")
	}
}

func TestSamplesThatShrinkALittleKeepToTheCapAndASample(t *testing.T) {
	const limit = 16 << 20
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: limit}})
	for n := int64(2 << 20); n > 250_000; n = n * 15 / 16 { // into segments that are a sixteenth too large
		var refs []sluice.Ref
		for i := range limit / n {
			refs = append(refs, put(t, s, sample(fmt.Sprint(i), n, 1)))
		}
		if got, most := pages(t, s), limit+n+4096*(limit/n); got > most {
			t.Errorf("%d samples of %d bytes: the file has %d bytes, at most %d are allowed", limit/n, n, got, most)
		}
		for _, ref := range refs {
			must(t, s.Abort(t.Context(), ref))
		}
	}
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

// TestStreamingTwentyTimesTheCapNeverTakesMoreThanTheCapAndASample measures the store's memory file, plus the anonymous memory that the process has taken since it
// was warm, after each call. It is not parallel to any other test.
func TestStreamingTwentyTimesTheCapNeverTakesMoreThanTheCapAndASample(t *testing.T) {
	const most, maxBytes = 12 << 20, 36 << 20
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: maxBytes}})
	content := sample("content", 2*most, 1).Features[1].Data[:most]
	anon := anonymous(t)
	var base, peak, peakOfFile int64
	measure := func() {
		file := pages(t, s)
		peakOfFile = max(peakOfFile, file)
		if base > 0 {
			peak = max(peak, file+anon()-base)
		}
	}
	type held struct {
		ref sluice.Ref
		ts  *sluice.Tensors // nil until it was got
	}
	var line []held
	look := func(h *held) {
		if h.ts != nil {
			return
		}
		h.ts = get(t, s, h.ref)
		for at, data := 0, h.ts.Features[0].Data; at < len(data); at += 4096 {
			if data[at] != content[at] {
				t.Fatalf("byte %d of %s is %d, want %d", at, h.ref, data[at], content[at])
			}
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	full, streamed := 0, int64(0)
	for n := 0; streamed < 21*maxBytes; n++ {
		if base == 0 && streamed > maxBytes {
			base = anon() // the runtime has what it needs
		}
		size := heapBelow + rng.IntN(most-heapBelow+1)
		if n%3 > 0 {
			size = heapBelow + rng.IntN(most/8)
		}
		sm := sample(fmt.Sprint("s-", n), 1, 1)
		sm.Features = []sluice.Feature{{Name: "a", Tensor: sluice.Tensor{Spec: sluice.Spec{DType: sluice.UInt8, Shape: []int64{int64(size)}}, Data: content[:size]}}}
		r, err := s.Reserve(t.Context(), int64(size))
		for errors.Is(err, sluice.ErrFull) { // then the consumer goes on
			full++
			if len(line) == 0 {
				t.Fatalf("nothing is out, and yet: %v", err)
			}
			i := rng.IntN(len(line))
			look(&line[i])
			must(t, s.Unclaim(line[i].ref, "queue"))
			must(t, line[i].ts.Release(t.Context()))
			line = append(line[:i], line[i+1:]...)
			measure()
			r, err = s.Reserve(t.Context(), int64(size))
		}
		must(t, err)
		ref, err := s.Put(t.Context(), sm, r)
		must(t, err)
		must(t, s.Claim(ref, "queue"))
		measure()
		line, streamed = append(line, held{ref: ref}), streamed+int64(size)
		look(&line[rng.IntN(len(line))])
	}
	t.Logf("%.0f MB streamed, %d times full; at most %.1f MB in the file, %.1f MB with anonymous memory; the cap is %.1f MB", float64(streamed)/1e6, full, float64(peakOfFile)/1e6, float64(peak)/1e6, maxBytes/1e6)
	if peak > maxBytes+most {
		t.Errorf("%d bytes were taken, want at most the cap of %d and a sample of %d", peak, maxBytes, most)
	}
	if full < 10 || peakOfFile < maxBytes*3/4 {
		t.Errorf("full %d times, at most %d bytes in the file: the test says nothing", full, peakOfFile)
	}
	for _, h := range line {
		if h.ts != nil {
			must(t, h.ts.Release(t.Context()))
		}
	}
}
