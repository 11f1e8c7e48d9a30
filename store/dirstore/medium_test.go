//go:build linux

package dirstore

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
)

func TestAReadingOfTheCgroupServesForAWhileAndCountsWhatIsPut(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), &Options{Caps: sluice.Caps{MaxSamples: 10}, NoPool: true})
	g := cgroup{dir: t.TempDir(), limit: "memory.max", usage: "memory.current"}
	left := func(n int64) {
		must(t, os.WriteFile(filepath.Join(g.dir, "memory.max"), fmt.Appendln(nil, 1_000_000+n), 0o600))
		must(t, os.WriteFile(filepath.Join(g.dir, "memory.current"), []byte("1000000\n"), 0o600))
	}
	s.cgroups = []cgroup{g}
	room := func(want int64, fresh bool, when string) {
		t.Helper()
		must(t, s.do(func(*ledger) error {
			if n, of := s.room(fresh); n != want || of != "memory cgroup" {
				t.Errorf("%s: room for %d bytes in the %s, want %d in the memory cgroup", when, n, of, want)
			}
			return nil
		}))
	}
	left(1000)
	room(1000, true, "at first")
	s.reading.at = time.Now().Add(time.Hour) // so that it does not age while the test runs
	left(700)
	room(1000, false, "while the reading serves")
	ref := mustPut(t, s, "a", 1, 200)
	room(800, false, "after a put")
	must(t, s.Abort(t.Context(), ref))
	room(1000, false, "after an abort")
	room(700, true, "when asked for a fresh one")
	left(600)
	_, err := s.Reserve(t.Context(), 650) // fits the reading that serves
	must(t, err)
	_, err = s.Reserve(t.Context(), 100)
	wantError(t, "Reserve of more than a fresh reading has", err, sluice.NoSpace, "600 (600 B) free", "memory cgroup")
	s.reading.at = time.Now().Add(-2 * time.Second)
	left(500)
	room(500, false, "after a while")
}

func TestACgroupIsFullLessWhatItCanTakeBack(t *testing.T) {
	t.Parallel()
	g := cgroup{dir: t.TempDir(), limit: "memory.max", usage: "memory.current", cache: [2]string{"inactive_file", "active_file"}}
	if _, ok := g.free(); ok {
		t.Error("a cgroup without files has a limit")
	}
	write := func(name, text string) { must(t, os.WriteFile(filepath.Join(g.dir, name), []byte(text), 0o600)) }
	write("memory.max", "1000\n")
	write("memory.current", "900\n")
	if n, ok := g.free(); n != 100 || !ok {
		t.Errorf("free is %d, %v", n, ok)
	}
	write("memory.stat", "anon 5\ninactive_file 200\nactive_file 30\ninactive_anon 9\n")
	if n, ok := g.free(); n != 330 || !ok {
		t.Errorf("free is %d, %v", n, ok)
	}
	write("memory.current", "5000\n")
	if n, ok := g.free(); n != 0 || !ok {
		t.Errorf("free is %d, %v", n, ok)
	}
	write("memory.max", "max\n")
	if _, ok := g.free(); ok {
		t.Error("max is no limit")
	}
	_ = cgroups() // whatever this host has, it is readable
}
