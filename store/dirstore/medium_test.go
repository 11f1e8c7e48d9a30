//go:build linux

package dirstore

import (
	"os"
	"path/filepath"
	"testing"
)

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
	cgroups() // whatever this host has, it is readable
}
