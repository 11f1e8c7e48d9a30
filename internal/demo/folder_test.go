package demo

import (
	"os"
	"path/filepath"
	"testing"
)

func TestAFolderOfAKilledDemoIsClearedAndThatOfARunningOneIsNot(t *testing.T) {
	t.Parallel()
	where := filepath.Join(t.TempDir(), "sto[re")
	running, err := newFolder(where)
	if err != nil {
		t.Fatal(err)
	}
	killed := filepath.Join(where, folderPrefix+"1")
	mine := filepath.Join(where, "mine")
	for _, dir := range []string{killed, mine} {
		if err := os.MkdirAll(filepath.Join(dir, "store"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	second, err := newFolder(where)
	if err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]bool{killed: false, mine: true, running.Path: true, second.Path: true} {
		if _, err := os.Stat(dir); (err == nil) != want {
			t.Errorf("%s: %v", filepath.Base(dir), err)
		}
	}
	if err := second.remove(); err != nil {
		t.Error(err)
	}
	if err := os.RemoveAll(mine); err != nil {
		t.Fatal(err)
	}
	if err := running.remove(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(where); err == nil {
		t.Error("the directory that the demo made is still there")
	}
}
