//go:build linux

package dirstore

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/store/storetest"
)

// shm returns a fresh directory path on tmpfs, or skips.
func shm(t testing.TB) string {
	t.Helper()
	return freshDir(t, "/dev/shm")
}

func freshDir(t testing.TB, under string) string {
	t.Helper()
	base, err := os.MkdirTemp(under, "dirstore-test-")
	if err != nil {
		t.Skipf("no room for tests in %s: %v", under, err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(base) })
	return filepath.Join(base, "store")
}

// crash ends the session as the death of its process would: the kernel drops the locks with the last use of the ledger's descriptor. A child that
// another test has forked, and that has not come to close what it inherited, uses it for a moment longer, so crash waits for the session's lock.
func (s *Store) crash() {
	s.watch.close(s.shown)
	s.reaper.close()
	s.closed.Store(true)
	var me uint32
	if s.led != nil {
		me = s.led.me
	}
	s.letGo()
	fd, err := unix.Open(filepath.Join(s.dir, ledgerName), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if me == 0 || err != nil {
		return
	}
	_, _ = (&ledger{fd: fd}).rangeLock(unix.F_OFD_SETLKW, unix.F_WRLCK, int64(me))
	_ = unix.Close(fd)
}

func harness(under string, change func(*Options)) storetest.Harness {
	opts := func(o storetest.Options) *Options {
		p := &Options{Caps: o.Caps, Clock: o.Clock}
		if change != nil {
			change(p)
		}
		return p
	}
	mustOpen := func(t testing.TB, dir string, o *Options) *Store {
		t.Helper()
		s, err := Open(dir, o)
		if err != nil {
			t.Fatalf("Open: %v", err)
		}
		t.Cleanup(func() {
			if err := s.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
		return s
	}
	return storetest.Harness{
		Open: func(t testing.TB, o storetest.Options) sluice.Store {
			return mustOpen(t, freshDir(t, under), opts(o))
		},
		Peer: func(t testing.TB, s sluice.Store) sluice.Store {
			d := s.(*Store)
			o := d.opts
			return mustOpen(t, d.dir, &o)
		},
		Crash: func(_ testing.TB, s sluice.Store) { s.(*Store).crash() },
		Corrupt: func(t testing.TB, s sluice.Store, ref sluice.Ref, d storetest.Damage) sluice.Store {
			st := s.(*Store)
			path := filepath.Join(st.dir, ref.SampleID()+sampleSuffix)
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			at := int64(0)
			switch d {
			case storetest.Truncate:
				if err := f.Truncate(int64(len(data)) - 7); err != nil {
					t.Fatal(err)
				}
				return s
			case storetest.FlipHeader:
				at = 40
			case storetest.FlipData:
				if st.medium.tmpfs && !st.opts.Verify {
					return nil
				}
				at = int64(len(data)) - 9
			}
			if _, err := f.WriteAt([]byte{data[at] ^ 1}, at); err != nil {
				t.Fatal(err)
			}
			if st.opts.Verify {
				return s
			}
			o := st.opts
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			return mustOpen(t, st.dir, &o)
		},
		Handles: 5000,
	}
}

func TestConformanceOnTmpfs(t *testing.T) { storetest.Run(t, harness("/dev/shm", nil)) }

func TestConformanceOnTmpfsVerifying(t *testing.T) {
	storetest.Run(t, harness("/dev/shm", func(o *Options) { o.Verify = true }))
}

func TestConformanceWithoutPool(t *testing.T) {
	storetest.Run(t, harness("/dev/shm", func(o *Options) { o.NoPool = true }))
}

func TestConformanceOnDisk(t *testing.T) {
	storetest.Run(t, harness(diskDir(t), func(o *Options) { o.Durability = Power }))
}

// diskDir is a directory that is not on tmpfs, or skips.
func diskDir(t testing.TB) string {
	t.Helper()
	for _, dir := range []string{os.Getenv("DIRSTORE_DISK"), os.TempDir(), "/var/tmp", "."} {
		var st unix.Statfs_t
		if dir != "" && unix.Statfs(dir, &st) == nil && int64(uint32(st.Type)) != unix.TMPFS_MAGIC {
			return dir
		}
	}
	t.Skip("no directory outside of tmpfs; set DIRSTORE_DISK to one")
	return ""
}
