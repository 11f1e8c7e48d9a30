//go:build linux

package dirstore

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

// syncs notes what is synced, and when: each sync is named after what it is of and which names there are by then.
type syncs struct {
	t    *testing.T
	dir  string
	list []string
	fail string // the sync that fails
}

func (s *syncs) hook(fd int) error {
	s.t.Helper()
	var st, is unix.Stat_t
	must(s.t, unix.Fstat(fd, &st))
	entries, err := os.ReadDir(s.dir)
	must(s.t, err)
	name, sample := "?", "before the name"
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), sampleSuffix) {
			sample = "after the name"
		}
		must(s.t, unix.Lstat(filepath.Join(s.dir, e.Name()), &is))
		if is.Ino != st.Ino {
			continue
		}
		switch {
		case strings.HasPrefix(e.Name(), newPrefix):
			name = "ledger"
		case strings.HasPrefix(e.Name(), scratchPrefix):
			name = "file"
		default:
			name = e.Name()
		}
	}
	if must(s.t, unix.Lstat(s.dir, &is)); is.Ino == st.Ino {
		name = "directory"
	}
	s.list = append(s.list, name+" "+sample)
	if name == s.fail {
		return unix.EIO
	}
	return nil
}

func (s *syncs) open(d Durability) (*Store, error) {
	o := *someCaps
	o.Durability = d
	return open(s.dir, &o, hooks{sync: s.hook})
}

func (s *syncs) want(when string, want ...string) {
	s.t.Helper()
	if !slices.Equal(s.list, want) {
		s.t.Errorf("%s: synced %q, want %q", when, s.list, want)
	}
	s.list = nil
}

func TestOnlyPowerSyncsAndInTheRightOrder(t *testing.T) {
	t.Parallel()
	for _, d := range []Durability{Process, Power} {
		s := &syncs{t: t, dir: shm(t)}
		st, err := s.open(d)
		must(t, err)
		t.Cleanup(func() { _ = st.Close() })
		if d == Power {
			s.want("a new store", "ledger before the name", "directory before the name")
		} else {
			s.want("a new store")
		}
		ref := mustPut(t, st, "a", 1, 200_000)
		check := func(when string) {
			t.Helper()
			if d == Power {
				s.want(when, "file before the name", "directory after the name")
			} else {
				s.want(when)
			}
		}
		check("a put")
		must(t, st.Abort(t.Context(), ref))
		if st.Health().PoolBytes == 0 {
			t.Fatal("the file was not kept")
		}
		ref = mustPut(t, st, "b", 2, 200_000)
		check("a put into a kept file")
		must(t, st.Claim(ref, "queue"))
		must(t, mustGet(t, st, ref).Release(t.Context()))
		must(t, st.Unclaim(ref, "queue"))
		s.want("what is no put")
	}
}

func TestAPutWhoseSyncFailsLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"file", "directory"} {
		s := &syncs{t: t, dir: shm(t)}
		st, err := s.open(Power)
		must(t, err)
		t.Cleanup(func() { _ = st.Close() })
		s.fail = what
		_, err = st.Put(t.Context(), sampleOf("a", 1, 100), sluice.Reservation{})
		wantError(t, "Put", err, sluice.Unavailable, `put "a"`, fmt.Sprintf("can't sync the %s", what))
		if !errors.Is(err, unix.EIO) {
			t.Errorf("%v does not wrap the cause", err)
		}
		mustAudit(t, st, "after the put")
		if h := st.Health(); h.UsedSamples() != 0 || h.UsedBytes() != 0 {
			t.Errorf("left: %+v", h)
		}
		if _, err := os.Lstat(filepath.Join(s.dir, "a"+sampleSuffix)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the file: %v", err)
		}
		s.fail = ""
		mustPut(t, st, "a", 1, 100)
	}
}

func TestAStoreWhoseFirstSyncFailsIsNotMade(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"ledger", "directory"} {
		s := &syncs{t: t, dir: shm(t), fail: what}
		_, err := s.open(Power)
		wantError(t, "Open", err, sluice.Unavailable, "can't sync the ledger")
		if _, err := os.Lstat(s.dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the directory: %v", err)
		}
	}
}

func TestASyncIsTheSystems(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), someCaps)
	must(t, s.sync(s.dirfd))
	if err := s.sync(-1); !errors.Is(err, unix.EBADF) {
		t.Errorf("sync of no file: %v, want EBADF", err)
	}
}
