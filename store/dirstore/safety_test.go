//go:build linux

package dirstore

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

// overlay returns a fresh directory path on an overlay over tmpfs, or skips.
func overlay(t testing.TB) string {
	t.Helper()
	base := filepath.Dir(shm(t))
	for _, d := range []string{"lower", "upper", "work", "merged"} {
		must(t, os.Mkdir(filepath.Join(base, d), 0o755))
	}
	merged := filepath.Join(base, "merged")
	opts := fmt.Sprintf("lowerdir=%s/lower,upperdir=%s/upper,workdir=%s/work", base, base, base)
	if err := unix.Mount("overlay", merged, "overlay", 0, opts); err != nil {
		t.Skipf("no overlay can be mounted here: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(merged, unix.MNT_DETACH) })
	return filepath.Join(merged, "store")
}

// changesUnderReader gets a sample, gives its handle and its claim up but keeps the tensor untouched, puts 200 others of its size, and reports whether the tensor
// changed. Pages that the reader has not touched yet are the ones in danger, so it looks at each page for the first time at the end. Until the tensor is dropped,
// its bytes must count, unless the ledger is to be wrong.
func changesUnderReader(t *testing.T, dir string, h hooks) (changed, recycled bool) {
	t.Helper()
	const n = 1 << 20
	caps := &Options{Caps: sluice.Caps{MaxBytes: 64 << 20}}
	producer, err := open(dir, caps, h)
	must(t, err)
	t.Cleanup(producer.crash) // the ledger of a forced reuse is not one to close properly
	reader, err := open(dir, nil, h)
	must(t, err)
	t.Cleanup(reader.crash)
	ref := mustPut(t, producer, "victim", 1, n)
	must(t, producer.Claim(ref, "queue"))
	ts := mustGet(t, reader, ref)
	must(t, reader.Release(t.Context(), ts.Handle))
	must(t, producer.Unclaim(ref, "queue"))
	var inode unix.Stat_t
	seen := map[uint64]bool{}
	for i := range 200 {
		r := mustPut(t, producer, "other-"+strconv.Itoa(i), byte(2+i%100), n)
		must(t, unix.Stat(filepath.Join(dir, r.SampleID()+sampleSuffix), &inode))
		if h := producer.Health(); h.ResidentBytes != 2*n && !producer.hooks.forceReuse {
			t.Errorf("after %d puts, %+v is counted, want the tensor and the last put", i+1, h)
		}
		recycled = recycled || seen[inode.Ino]
		seen[inode.Ino] = true
		must(t, producer.Abort(t.Context(), r))
	}
	changed = !bytes.Equal(ts.Features[0].Data, pattern(1, n))
	must(t, ts.Close())
	if h := producer.Health(); h.ResidentBytes != 0 && !producer.hooks.forceReuse {
		t.Errorf("when the tensor is dropped, %+v is counted", h)
	}
	return changed, recycled
}

func TestNoMappedFileChanges(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		dir  func(t testing.TB) string
	}{{"tmpfs", shm}, {"disk", func(t testing.TB) string { return freshDir(t, diskDir(t)) }}, {"overlay", overlay}} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			changed, recycled := changesUnderReader(t, tc.dir(t), hooks{})
			if changed {
				t.Error("the mapped bytes changed")
			}
			if !recycled {
				t.Error("no file was recycled, so the test says nothing")
			}
			if changed, _ := changesUnderReader(t, tc.dir(t), hooks{forceReuse: true}); changed {
				t.Error("the lock alone, against a wrong ledger, did not keep the mapped bytes")
			}
			if changed, _ := changesUnderReader(t, tc.dir(t), hooks{forceReuse: true, noLocks: true}); !changed {
				t.Error("nothing changed without locks, so the test says nothing")
			}
		})
	}
}

func TestOnOverlayTheStoreKeepsTheDescriptorThatTheMappingDoesNot(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, overlay(t), &Options{Caps: sluice.Caps{MaxBytes: 1 << 20}})
	if !s.medium.maps || !s.medium.keepFD {
		t.Errorf("overlay is taken for %+v", s.medium)
	}
	d := mustOpen(t, shm(t), &Options{Caps: sluice.Caps{MaxBytes: 1 << 20}})
	if !d.medium.maps || d.medium.keepFD {
		t.Errorf("tmpfs is taken for %+v", d.medium)
	}
}

func TestAFileOfADeadReaderIsNotRecycled(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}})
	r := mustOpen(t, dir, nil)
	ref := mustPut(t, s, "a", 1, victimSample)
	must(t, s.Claim(ref, "queue"))
	ts := mustGet(t, r, ref)
	r.crash() // a child that it forked may have the mapping still
	if _, err := s.GC(t.Context()); err != nil {
		t.Fatal(err)
	}
	must(t, s.Unclaim(ref, "queue"))
	if h := s.Health(); h.PoolBytes != 0 || h.ResidentBytes != 0 {
		t.Errorf("%+v, want nothing kept", h)
	}
	for i := range 20 {
		must(t, s.Abort(t.Context(), mustPut(t, s, "b"+strconv.Itoa(i), 9, victimSample)))
	}
	if !bytes.Equal(ts.Features[0].Data, pattern(1, victimSample)) {
		t.Error("the dead reader's mapping changed")
	}
	_ = ts.Close()
}

func TestAHardLinkedFileIsNotRecycled(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}})
	ref := mustPut(t, s, "a", 1, victimSample)
	saved := filepath.Join(filepath.Dir(dir), "saved")
	must(t, os.Link(filepath.Join(dir, "a.safetensors"), saved))
	before, err := os.ReadFile(saved)
	must(t, err)
	must(t, s.Abort(t.Context(), ref))
	mustPut(t, s, "b", 9, victimSample)
	after, err := os.ReadFile(saved)
	must(t, err)
	if !bytes.Equal(before, after) {
		t.Error("the put wrote into somebody's copy")
	}
}

func TestResidencyIsTrueAcrossSessions(t *testing.T) {
	t.Parallel()
	const n = 20_000_000
	dir := shm(t)
	producer := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 64 << 20}})
	consumer := mustOpen(t, dir, nil)
	refs := []sluice.Ref{mustPut(t, producer, "s1", 1, n), mustPut(t, producer, "s2", 2, n), mustPut(t, producer, "s3", 3, n)}
	if _, err := producer.Put(t.Context(), sampleOf("s4", 4, n), sluice.Reservation{}); sluice.KindOf(err) != sluice.Full {
		t.Fatalf("a fourth sample: %v", err)
	}
	must(t, mustGet(t, consumer, refs[0]).Release(t.Context()))
	if h := producer.Health(); h.ResidentBytes != 2*n {
		t.Fatalf("the producer sees %+v", h)
	}
	mustPut(t, producer, "s4", 4, n)
}

func TestSessionsLeaveNoDescriptorsBehind(t *testing.T) { // not parallel: it counts those of the process
	mappings := func() int {
		maps, err := os.ReadFile("/proc/self/maps")
		must(t, err)
		return bytes.Count(maps, []byte("dirstore-test-"))
	}
	before, mapped := 0, mappings() // tests that play a death leave some
	for round := range 21 {
		if round == 1 { // the first round is the runtime's: it opens its poller with the first file that can be polled
			before = openFDs(t)
		}
		s := mustOpen(t, shm(t), &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}})
		stop := s.OnFreed(func() {})
		ref := mustPut(t, s, "a", 1, victimSample)
		_, err := s.Put(t.Context(), sampleOf("a", 1, 10), sluice.Reservation{})
		if err == nil {
			t.Fatal("a duplicate was taken")
		}
		ts := mustGet(t, s, ref)
		must(t, s.Close())
		if round > 0 && openFDs(t) == before {
			t.Fatal("the session ended while its tensors are out")
		}
		stop()
		must(t, ts.Release(t.Context()))
		if _, err := Open(s.dir, &Options{Caps: sluice.Caps{MaxBytes: -1}}); err == nil {
			t.Fatal("bad caps were taken")
		}
	}
	if after := openFDs(t); after != before {
		t.Errorf("%d descriptors are open, %d were", after, before)
	}
	if n := mappings(); n != mapped {
		t.Errorf("%d mappings of stores are left, %d were", n, mapped)
	}
}
