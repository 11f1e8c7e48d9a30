package demo

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/scratch"
)

const folderPrefix = "sluice-demo-"

// folder is the demo's own folder inside the directory that --store names.
type folder struct {
	*scratch.Folder
	parent string // to be removed too, if not empty
}

// newFolder makes a folder in where, which is made too if it is not there, and removes those of demos that were killed.
func newFolder(where string) (*folder, error) {
	fail := func(detail string, err error) error {
		return &sluice.Error{Kind: sluice.Denied, Op: "demo: store", Subject: where, Detail: detail, Err: err}
	}
	f := &folder{}
	switch err := os.Mkdir(where, 0o700); {
	case err == nil:
		f.parent = where
	case !errors.Is(err, fs.ErrExist):
		return nil, fail("cannot make the directory", err)
	}
	if info, err := os.Stat(where); err != nil || !info.IsDir() {
		return nil, fail("is not a directory", err)
	}
	var err error
	if f.Folder, err = scratch.New(where, folderPrefix); err != nil {
		return nil, errors.Join(fail("cannot write to the directory", err), f.remove())
	}
	return f, nil
}

// store is where the store is in it.
func (f *folder) store() string { return filepath.Join(f.Path, "store") }

// remove removes it. A nil folder is none.
func (f *folder) remove() error {
	if f == nil {
		return nil
	}
	err := f.Remove()
	if f.parent != "" {
		err = errors.Join(err, os.Remove(f.parent))
	}
	return err
}

// sharedMemory is where the samples of a demo of several processes lie if nobody says where.
func sharedMemory() string {
	const tmpfs = "/dev/shm"
	if unix.Access(tmpfs, unix.W_OK) == nil {
		return tmpfs
	}
	return os.TempDir()
}

// removeOrphaned removes the folder of a demo that was killed, for its children, which outlive it by a moment. It does nothing if the demo, which is process pid, lives.
func removeOrphaned(path, parent string, pid int) {
	for try := range 100 {
		d, err := scratch.Lock(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			if parent != "" {
				_ = os.Remove(parent) // unless there is something in it
			}
			return
		case err == nil:
			_ = os.RemoveAll(path) // what it leaves, since another child is not through, is removed in the next round
			_ = d.Close()
			continue
		case try > 2 && os.Getppid() == pid: // the lock and this relation end at about the same time
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// orphaned reports whether process pid, the parent, has died, and not merely hung up. The kernel hangs up for it a moment before.
func orphaned(pid int) bool {
	for range 10 {
		if os.Getppid() != pid {
			return true
		}
		time.Sleep(20 * time.Millisecond)
	}
	return false
}
