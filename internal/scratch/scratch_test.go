package scratch_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-ml/sluice/internal/scratch"
)

func TestAFolderOfAKilledRunIsClearedAndThatOfARunningOneIsNot(t *testing.T) {
	t.Parallel()
	where := filepath.Join(t.TempDir(), "sto[re")
	if err := os.Mkdir(where, 0o700); err != nil {
		t.Fatal(err)
	}
	running, err := scratch.New(where, "run-")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{filepath.Base(running.Path): true}
	for name, stays := range map[string]bool{"run-1": false, "mine": true, ".run-old": false, ".run-new": true} {
		if err := os.MkdirAll(filepath.Join(where, name, "store"), 0o700); err != nil {
			t.Fatal(err)
		}
		want[name] = stays
	}
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(filepath.Join(where, ".run-old"), old, old); err != nil {
		t.Fatal(err)
	}
	second, err := scratch.New(where, "run-")
	if err != nil {
		t.Fatal(err)
	}
	want[filepath.Base(second.Path)] = true
	for name, stays := range want {
		if _, err := os.Stat(filepath.Join(where, name)); (err == nil) != stays {
			t.Errorf("%s: %v, want it there: %v", name, err, stays)
		}
	}
	for _, f := range []*scratch.Folder{second, running} {
		if err := f.Remove(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(f.Path); err == nil {
			t.Errorf("%s is there after Remove", f.Path)
		}
	}
}
