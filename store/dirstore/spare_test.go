//go:build linux

package dirstore

import (
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

// pooled leaves one file in the yard's pool, and says its inode.
func (y *yard) pooled(n int) uint64 {
	y.t.Helper()
	ref := mustPut(y.t, y.s, "old", 9, n)
	ino := y.inode(y.s.samplePath("old"))
	must(y.t, y.s.Abort(y.t.Context(), ref))
	if y.s.Health().PoolBytes == 0 {
		y.t.Fatal("nothing is in the pool")
	}
	return ino
}

func (y *yard) spare(name string, size int64) (bool, error) {
	return y.s.Spare(y.t.Context(), y.root, name, size)
}

func TestSpareHandsOutAFileOfThePoolThatBecomesASample(t *testing.T) {
	t.Parallel()
	y := newYard(t, shm(t), someCaps)
	ino := y.pooled(300_000)
	ours := y.ours(false)
	if ok, err := y.spare("small", 100); ok || err != nil { // it would not be worth it
		t.Fatalf("a small one: %v, %v", ok, err)
	}
	if ok, err := y.spare("large", 1<<20); ok || err != nil {
		t.Fatalf("one that is larger than all: %v, %v", ok, err)
	}
	y.wantStaged("before")
	ok, err := y.spare("f", 200_000)
	must(t, err)
	info, err := os.Stat(y.path("f"))
	must(t, err)
	if !ok || y.inode(y.path("f")) != ino || info.Size() != 200_000 || info.Mode() != 0o600 || y.s.Health().PoolBytes != 0 {
		t.Fatalf("%v: %d bytes, mode %v, %+v", ok, info.Size(), info.Mode(), y.s.Health())
	}
	mustAudit(t, y.s, "with the file away")
	if ok, err := y.spare("g", 200_000); ok || err != nil {
		t.Fatalf("from an empty pool: %v, %v", ok, err)
	}
	f, err := os.OpenFile(y.path("f"), os.O_WRONLY, 0)
	must(t, err)
	must(t, unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)) // nobody has kept a lock of it
	_, err = f.Write(ours)
	must(t, errors.Join(err, f.Truncate(int64(len(ours))), f.Close()))
	ref, err := y.adopt("f", incoming())
	must(t, err)
	if y.inode(y.s.samplePath("a")) != ino {
		t.Error("the file was copied")
	}
	wantSample(t, y.s, ref, three())
	mustAudit(t, y.s, "afterwards")
}

// The sweep of a staging directory goes by age, and a file may have been in the pool for long.
func TestAFileFromThePoolIsNewInTheStagingDirectory(t *testing.T) {
	t.Parallel()
	y := newYard(t, shm(t), someCaps)
	ref := mustPut(t, y.s, "old", 9, 300_000)
	long := time.Now().Add(-24 * time.Hour)
	must(t, os.Chtimes(y.s.samplePath("old"), long, long))
	info, err := os.Stat(y.s.samplePath("old"))
	must(t, err)
	must(t, y.s.Abort(t.Context(), ref))
	ok, err := y.spare("f", info.Size())
	must(t, err)
	info, err = os.Stat(y.path("f"))
	must(t, err)
	if age := time.Since(info.ModTime()); !ok || age > time.Hour {
		t.Errorf("%v: it is %v old", ok, age)
	}
}

func TestAFileThatSomebodyStillReadsIsNoSpare(t *testing.T) {
	t.Parallel()
	y := newYard(t, shm(t), someCaps)
	ref := mustPut(t, y.s, "old", 9, 300_000)
	f, err := os.Open(y.s.samplePath("old")) // as a reader whose pin was lost
	must(t, err)
	defer f.Close()
	must(t, unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB))
	must(t, y.s.Abort(t.Context(), ref))
	if y.s.Health().PoolBytes == 0 {
		t.Fatal("nothing is in the pool")
	}
	if ok, err := y.spare("f", 200_000); ok || err != nil {
		t.Errorf("%v, %v", ok, err)
	}
	y.wantStaged("afterwards")
	mustAudit(t, y.s, "afterwards")
}

func TestSpareRefusesNamesThatAreTakenOrNotBare(t *testing.T) {
	t.Parallel()
	y := newYard(t, shm(t), someCaps)
	for _, name := range []string{"", ".", "..", "a/b", "a\x00b"} {
		if ok, err := y.spare(name, 200_000); ok || !errors.Is(err, sluice.ErrInvalid) {
			t.Errorf("%q: %v, %v", name, ok, err)
		}
	}
	y.stage("f", []byte("mine"))
	y.pooled(300_000)
	if ok, err := y.spare("f", 200_000); ok || !errors.Is(err, sluice.ErrConflict) {
		t.Errorf("%v, %v", ok, err)
	}
	data, err := os.ReadFile(y.path("f"))
	must(t, err)
	if string(data) != "mine" {
		t.Errorf("the file was changed: %q", data)
	}
	mustAudit(t, y.s, "afterwards")
	must(t, y.s.Close())
	if _, err := y.spare("g", 200_000); !errors.Is(err, sluice.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}
