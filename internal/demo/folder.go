package demo

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

const folderPrefix = "sluice-demo-"

// folder is the demo's own folder inside the directory that --store names. A lock on it lives as long as the process, so that a demo that was killed can be told
// from one that runs.
type folder struct {
	path   string
	parent string // to be removed too, if not empty
	lock   *os.File
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
	if err := sweep(where); err != nil {
		return nil, fail("cannot clear what a killed demo left", err)
	}
	var err error
	if f.path, err = os.MkdirTemp(where, folderPrefix); err != nil {
		return nil, errors.Join(fail("cannot write to the directory", err), f.remove())
	}
	if f.lock, err = lock(f.path); err != nil {
		return nil, errors.Join(fail("cannot lock "+filepath.Base(f.path), err), f.remove())
	}
	return f, nil
}

// lock takes the folder's lock, or fails at once.
func lock(dir string) (*os.File, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// sweep removes the folders of demos that no longer run.
func sweep(where string) error {
	names, err := filepath.Glob(filepath.Join(globQuote(where), folderPrefix+"*"))
	if err != nil {
		return err
	}
	for _, name := range names {
		d, err := lock(name)
		if err != nil {
			continue // it runs, or is somebody else's
		}
		if err := errors.Join(os.RemoveAll(name), d.Close()); err != nil {
			return err
		}
	}
	return nil
}

func globQuote(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

// store is where the store is in it.
func (f *folder) store() string { return filepath.Join(f.path, "store") }

// remove removes it. A nil folder is none.
func (f *folder) remove() error {
	if f == nil {
		return nil
	}
	var err error
	if f.path != "" {
		err = os.RemoveAll(f.path)
	}
	if f.lock != nil {
		err = errors.Join(err, f.lock.Close())
	}
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
		d, err := lock(path)
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
