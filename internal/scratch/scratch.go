// Package scratch makes private folders for one run of a command: each is locked for as long as its process lives, so that the next run can tell what a killed one has
// left from what is in use, and clear it.
package scratch

import (
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Folder is a locked folder of its own.
type Folder struct {
	Path string
	lock *os.File
}

// New sweeps the directory and makes a folder in it, whose name begins with the prefix. Its path is absolute.
func New(where, prefix string) (*Folder, error) {
	where, err := filepath.Abs(where)
	if err != nil {
		return nil, err
	}
	if err := Sweep(where, prefix); err != nil {
		return nil, err
	}
	// It gets its name when it is locked, so that nobody sweeps it before.
	fresh := filepath.Join(where, "."+prefix+rand.Text())
	if err := os.Mkdir(fresh, 0o700); err != nil {
		return nil, err
	}
	f := &Folder{Path: fresh}
	if f.lock, err = Lock(fresh); err != nil {
		return nil, errors.Join(err, f.Remove())
	}
	name := filepath.Join(where, prefix+rand.Text()[:10])
	if err := os.Rename(fresh, name); err != nil {
		return nil, errors.Join(err, f.Remove())
	}
	f.Path = name
	return f, nil
}

// Remove removes the folder and what is in it, and lets go of the lock. A nil folder is none.
func (f *Folder) Remove() error {
	if f == nil {
		return nil
	}
	err := os.RemoveAll(f.Path)
	if f.lock != nil {
		err = errors.Join(err, f.lock.Close())
		f.lock = nil
	}
	return err
}

// Sweep removes the folders of that prefix whose processes are gone.
func Sweep(where, prefix string) error {
	entries, err := os.ReadDir(where)
	if err != nil {
		return err
	}
	var errs error
	for _, e := range entries {
		hidden := strings.HasPrefix(e.Name(), "."+prefix) // between its making and its lock
		if !e.IsDir() || !hidden && !strings.HasPrefix(e.Name(), prefix) {
			continue
		}
		if info, err := e.Info(); err != nil || hidden && time.Since(info.ModTime()) < time.Minute {
			continue
		}
		name := filepath.Join(where, e.Name())
		lock, err := Lock(name)
		if err != nil {
			continue // it is in use, or somebody else's
		}
		errs = errors.Join(errs, os.RemoveAll(name), lock.Close())
	}
	return errs
}

// Lock takes a directory's lock, or fails at once. Closing the file gives it up.
func Lock(dir string) (*os.File, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}
