//go:build linux

package dirstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"strconv"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
)

func mustLend(t testing.TB, s *Store, ref sluice.Ref, mapped bool) *Loan {
	t.Helper()
	n, err := s.Lend(context.Background(), ref, mapped)
	must(t, err)
	t.Cleanup(func() { _ = errors.Join(n.Release(), n.Close()) })
	return n
}

func TestALoanIsAPinOnTheFile(t *testing.T) {
	t.Parallel()
	for _, verify := range []bool{false, true} {
		s := mustOpen(t, shm(t), &Options{Caps: someCaps.Caps, Verify: verify})
		ref := mustPut(t, s, "a", 1, victimSample)
		n := mustLend(t, s, ref, false)
		info, err := os.Stat(s.samplePath("a"))
		must(t, err)
		if n.Name() != "a.safetensors" || n.Size() != info.Size() || n.Handle().SampleID != "a" || n.Handle().StoreURI != s.uri {
			t.Errorf("the loan is of %s, %d bytes, %+v", n.Name(), n.Size(), n.Handle())
		}
		e, ok := n.Header().Find("x")
		if !ok {
			t.Fatal("the header has no x")
		}
		got := make([]byte, e.Bytes())
		if _, err := n.File().ReadAt(got, n.Header().DataStart+e.Begin); err != nil || !bytes.Equal(got, pattern(1, victimSample)) {
			t.Errorf("the file has other bytes, %v", err)
		}
		for range 2 {
			sums, err := n.Checksums(t.Context())
			if err != nil || len(sums) != 1 || sums["x"] != safetensors.Checksum(got) {
				t.Errorf("checksums %v, %v", sums, err)
			}
		}
		if infos, err := s.Samples(t.Context()); err != nil || len(infos) != 1 || infos[0].Pins != 1 {
			t.Errorf("%+v, %v", infos, err)
		}
		for range 2 {
			must(t, n.Release())
			must(t, n.Close())
		}
		if _, err := n.File().ReadAt(got, 0); !errors.Is(err, os.ErrClosed) {
			t.Errorf("reading from a loan that is over: %v", err)
		}
		if h := s.Health(); h.ResidentSamples != 0 {
			t.Errorf("what nobody claims was released and is here: %+v", h)
		}
		mustAudit(t, s, "at the end")
	}
}

func TestAMappedLoanCountsUntilItIsClosed(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), someCaps)
	n := mustLend(t, s, mustPut(t, s, "a", 1, victimSample), true)
	must(t, n.Release())
	if _, err := s.Get(t.Context(), refOf(s)); !errors.Is(err, sluice.ErrNotFound) {
		t.Errorf("the released sample: %v", err)
	}
	if h := s.Health(); h.ResidentBytes != victimSample || h.PoolBytes != 0 {
		t.Errorf("released and mapped: %+v", h)
	}
	mustAudit(t, s, "released and mapped")
	got := make([]byte, victimSample)
	if _, err := n.File().ReadAt(got, n.Header().DataStart); err != nil || !bytes.Equal(got, pattern(1, victimSample)) {
		t.Errorf("the file has other bytes, %v", err)
	}
	must(t, n.Close())
	if h := s.Health(); h.ResidentBytes != 0 || h.PoolBytes == 0 {
		t.Errorf("closed: %+v", h)
	}
	mustAudit(t, s, "closed")

	ref := mustPut(t, s, "b", 1, victimSample)
	n = mustLend(t, s, ref, true)
	must(t, n.Close()) // the pin stays
	if infos, err := s.Samples(t.Context()); err != nil || len(infos) != 1 || infos[0].Pins != 1 {
		t.Errorf("%+v, %v", infos, err)
	}
	must(t, s.Release(t.Context(), n.Handle()))
	must(t, n.Release())
	if h := s.Health(); h.ResidentBytes != 0 {
		t.Errorf("released: %+v", h)
	}
}

func TestALentFileIsLockedAndNeverRecycled(t *testing.T) {
	t.Parallel()
	for _, h := range []hooks{{}, {forceReuse: true}, {forceReuse: true, noLocks: true}} {
		s, err := open(shm(t), &Options{Caps: sluice.Caps{MaxBytes: 64 << 20}}, h)
		must(t, err)
		t.Cleanup(s.crash) // the ledger of a forced reuse is not one to close properly
		ref := mustPut(t, s, "a", 1, victimSample)
		n := mustLend(t, s, ref, true)
		fd, err := unix.Open(s.samplePath("a"), unix.O_RDWR|unix.O_CLOEXEC, 0)
		must(t, err)
		if err := flock(fd, unix.LOCK_EX|unix.LOCK_NB); (err == nil) != h.noLocks {
			t.Errorf("an exclusive lock beside the loan: %v", err)
		}
		must(t, unix.Close(fd))
		must(t, n.Release())
		for i := range 100 {
			must(t, s.Abort(t.Context(), mustPut(t, s, "b"+strconv.Itoa(i), byte(2+i), victimSample)))
		}
		got := make([]byte, victimSample)
		_, err = n.File().ReadAt(got, n.Header().DataStart)
		must(t, err)
		if same := bytes.Equal(got, pattern(1, victimSample)); same == h.noLocks {
			t.Errorf("with %+v the bytes are the same: %v", h, same)
		}
	}
}

func TestTheFileOfALostReaderIsNeverOverwritten(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), someCaps)
	for _, mapped := range []bool{false, true} {
		ref := mustPut(t, s, "a", 1, victimSample)
		n := mustLend(t, s, ref, mapped)
		for range 2 {
			must(t, n.Lost())
		}
		if _, err := n.File().Stat(); !errors.Is(err, os.ErrClosed) {
			t.Errorf("the file is open: %v", err)
		}
		if h := s.Health(); h.ResidentBytes != victimSample {
			t.Errorf("to be lost is no release: %+v", h)
		}
		must(t, s.Abort(t.Context(), ref))
		if h := s.Health(); h.ResidentBytes != 0 || h.PoolBytes != 0 {
			t.Errorf("the file was kept: %+v", h)
		}
	}
	n := mustLend(t, s, mustPut(t, s, "b", 1, victimSample), true)
	must(t, n.Release())
	must(t, n.Lost())
	if h := s.Health(); h.ResidentBytes != 0 || h.PoolBytes != 0 {
		t.Errorf("released and lost: %+v", h)
	}
	mustAudit(t, s, "at the end")
}

func TestLendRefusesWhatGetRefuses(t *testing.T) {
	t.Parallel()
	s, other := mustOpen(t, shm(t), someCaps), mustOpen(t, shm(t), someCaps)
	ref := mustPut(t, s, "a", 1, 1000)
	if _, err := s.Lend(t.Context(), sluice.Ref{}, false); !errors.Is(err, sluice.ErrNotFound) {
		t.Errorf("the zero ref: %v", err)
	}
	if _, err := other.Lend(t.Context(), ref, false); !errors.Is(err, sluice.ErrNotFound) {
		t.Errorf("another store's ref: %v", err)
	}
	if _, err := s.Lend(t.Context(), refOf(s), false); !errors.Is(err, sluice.ErrNotFound) {
		t.Errorf("another generation: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.Lend(ctx, ref, false); !errors.Is(err, context.Canceled) {
		t.Errorf("a context that ended: %v", err)
	}
	must(t, os.Truncate(s.samplePath("a"), 900))
	if _, err := s.Lend(t.Context(), ref, true); !errors.Is(err, sluice.ErrCorrupt) {
		t.Errorf("a short file: %v", err)
	}
	if infos, err := s.Samples(t.Context()); err == nil && len(infos) > 0 && infos[0].Pins != 0 {
		t.Errorf("a refused loan left a pin: %+v", infos)
	}
	must(t, os.Remove(s.samplePath("a")))
	if _, err := s.Lend(t.Context(), ref, true); !errors.Is(err, sluice.ErrNotFound) {
		t.Errorf("no file: %v", err)
	}
	wantEmpty(t, s, "at the end", 0)
}

func TestOnDisksTheFirstLoanAfterARestartChecksTheBytes(t *testing.T) {
	t.Parallel()
	dir := freshDir(t, diskDir(t))
	s := mustOpen(t, dir, someCaps)
	ref := mustPut(t, s, "a", 1, 1000)
	must(t, s.Claim(ref, "queue"))
	must(t, s.Close())
	f, err := os.OpenFile(s.samplePath("a"), os.O_RDWR, 0)
	must(t, err)
	info, err := f.Stat()
	must(t, err)
	_, err = f.WriteAt([]byte{0xff}, info.Size()-5)
	must(t, err)
	must(t, f.Close())
	s = mustOpen(t, dir, nil)
	_, err = s.Lend(t.Context(), ref, false)
	wantError(t, "Lend", err, sluice.Corrupt, `"x"`)
}

func TestLoansOutliveTheirStoreAndEndWithItsProcess(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	s, observer := mustOpen(t, dir, someCaps), mustOpen(t, dir, nil)
	ref := mustPut(t, observer, "a", 1, victimSample)
	must(t, observer.Claim(ref, "queue"))
	n := mustLend(t, s, ref, true)
	must(t, s.Close())
	if infos, err := observer.Samples(t.Context()); err != nil || infos[0].Pins != 1 {
		t.Fatalf("after Close: %+v, %v", infos, err)
	}
	must(t, n.Release())
	must(t, n.Close())
	must(t, n.Lost())
	mustAudit(t, observer, "after the release")

	s = mustOpen(t, dir, nil)
	n = mustLend(t, s, ref, true)
	s.crash()
	if _, err := observer.GC(t.Context()); err != nil {
		t.Fatal(err)
	}
	if infos, err := observer.Samples(t.Context()); err != nil || infos[0].Pins != 0 {
		t.Fatalf("after the crash: %+v, %v", infos, err)
	}
	mustAudit(t, observer, "after the crash")
	_ = n.Close()
}

// TestLoansAmongFreesAndPutsShowWhatTheirRefsPromise lends, frees and puts again, all at once, in files that are recycled all the time.
func TestLoansAmongFreesAndPutsShowWhatTheirRefsPromise(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), &Options{Caps: sluice.Caps{MaxBytes: 64 << 20}})
	const n, ids = 100_000, 3
	var mu sync.Mutex
	refs := map[int]sluice.Ref{}
	var writers, readers sync.WaitGroup
	stop := make(chan struct{})
	for id := range ids {
		writers.Go(func() {
			for i := range 150 {
				ref, err := s.Put(context.Background(), sampleOf(fmt.Sprint("s", id, "-", i%2), byte(i), n), sluice.Reservation{})
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				before := refs[id]
				refs[id] = ref
				mu.Unlock()
				if err := s.Abort(context.Background(), before); err != nil {
					t.Error(err)
				}
			}
			mu.Lock()
			last := refs[id]
			mu.Unlock()
			if err := s.Abort(context.Background(), last); err != nil {
				t.Error(err)
			}
		})
	}
	lent := 0
	for reader := range 3 {
		readers.Go(func() {
			got := make([]byte, n)
			for {
				select {
				case <-stop:
					return
				default:
				}
				mu.Lock()
				ref := refs[reader]
				mu.Unlock()
				loan, err := s.Lend(context.Background(), ref, reader == 0)
				if err != nil {
					if !errors.Is(err, sluice.ErrNotFound) {
						t.Error(err)
					}
					continue
				}
				seed, _ := ref.Attribute("seed")
				want, _ := strconv.Atoi(seed)
				if _, err := loan.File().ReadAt(got, loan.Header().DataStart); err != nil || !bytes.Equal(got, pattern(byte(want), n)) {
					t.Errorf("%s has other bytes, %v", ref, err)
				}
				if err := errors.Join(loan.Release(), loan.Close()); err != nil {
					t.Error(err)
				}
				mu.Lock()
				lent++
				mu.Unlock()
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
	t.Logf("%d loans", lent)
	wantEmpty(t, poolless(s), "at the end", 0)
}

// What readers far away compare with is known from the first of them on: a file that rots afterwards is not summed as if it were right.
func TestChecksumsAreComputedOnceForAllLoans(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), someCaps)
	ref := mustPut(t, s, "a", 1, victimSample)
	must(t, s.Claim(ref, "queue"))
	want := safetensors.Checksum(pattern(1, victimSample))

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	n := mustLend(t, s, ref, false)
	if _, err := n.Checksums(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v", err)
	}
	var readers sync.WaitGroup
	for range 4 {
		n := mustLend(t, s, ref, false)
		readers.Go(func() {
			if sums, err := n.Checksums(t.Context()); err != nil || sums["x"] != want {
				t.Errorf("checksums %v, %v, want %08x", sums, err, want)
			}
		})
	}
	readers.Wait()

	f, err := os.OpenFile(s.samplePath("a"), os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteAt([]byte{0xff, 0, 0xff, 0}, n.Size()-4)
	must(t, errors.Join(err, f.Close()))
	n = mustLend(t, s, ref, false)
	if sums, err := n.Checksums(t.Context()); err != nil || sums["x"] != want || n.Summed() {
		t.Errorf("after the file was damaged: %v, %v, want %08x; summed %v", sums, err, want, n.Summed())
	}

	other := mustLend(t, s, mustPut(t, s, "b", 2, victimSample), false)
	if sums, err := other.Checksums(t.Context()); err != nil || sums["x"] != safetensors.Checksum(pattern(2, victimSample)) {
		t.Errorf("another sample: %v, %v", sums, err)
	}
}

func TestComputedChecksumsAreBounded(t *testing.T) {
	t.Parallel()
	var c computed
	for uid := range uint64(3 * mostComputed) {
		if s := c.of(uid); s != c.of(uid) {
			t.Fatal("the one that is asked for is not kept")
		}
		if len(c.slots) > mostComputed {
			t.Fatalf("%d are kept, want at most %d", len(c.slots), mostComputed)
		}
	}
}

func TestTheOtherChecksumIsOfBytesThatAgreeWithTheStoredOne(t *testing.T) {
	t.Parallel()
	for _, verify := range []bool{false, true} { // whether the file carries a crc32c
		s := mustOpen(t, shm(t), &Options{Caps: someCaps.Caps, Verify: verify})
		n := mustLend(t, s, mustPut(t, s, "a", 1, victimSample), false)
		want := crc32.ChecksumIEEE(pattern(1, victimSample))
		for range 2 {
			if sums, err := n.IEEE(t.Context()); err != nil || len(sums) != 1 || sums["x"] != want {
				t.Errorf("%08x, %v; want %08x", sums, err, want)
			}
		}
		if sums, err := n.Checksums(t.Context()); err != nil || sums["x"] != safetensors.Checksum(pattern(1, victimSample)) {
			t.Errorf("crc32c %08x, %v", sums, err)
		}
		other := mustLend(t, s, mustPut(t, s, "b", 2, victimSample), false)
		if !verify { // known, though the file does not carry it
			if _, err := other.Checksums(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		scribble := func() {
			f, err := os.OpenFile(s.samplePath("b"), os.O_RDWR, 0)
			must(t, err)
			var b [1]byte
			_, err = f.ReadAt(b[:], other.Header().DataStart)
			must(t, err)
			b[0] ^= 1
			_, err = f.WriteAt(b[:], other.Header().DataStart)
			must(t, errors.Join(err, f.Close()))
		}
		scribble()
		if sums, err := other.IEEE(t.Context()); !errors.Is(err, sluice.ErrCorrupt) {
			t.Errorf("of bytes that have changed: %08x, %v; want ErrCorrupt", sums, err)
		}
		scribble()
		if sums, err := other.IEEE(t.Context()); err != nil || sums["x"] != crc32.ChecksumIEEE(pattern(2, victimSample)) {
			t.Errorf("of the right bytes again: %08x, %v", sums, err)
		}
	}
}

func TestTheChecksumOfNothingIsZero(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), someCaps)
	ref, err := s.Put(t.Context(), &sluice.Sample{SampleID: "a", RunID: "r", Algorithm: "x", SchemaVersion: 1, Features: []sluice.Feature{feature("x", sluice.UInt8, 1, 3), feature("none", sluice.Int64, 1, 0)}}, sluice.Reservation{})
	must(t, err)
	n := mustLend(t, s, ref, false)
	if sums, err := n.IEEE(t.Context()); err != nil || len(sums) != 2 || sums["none"] != 0 || sums["x"] == 0 {
		t.Errorf("%v, %v", sums, err)
	}
}
