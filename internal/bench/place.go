package bench

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/plan"
)

const folderPrefix = "sluice-bench-"

// place is a directory to measure in. Only a folder of the run's own in it is written to.
type place struct {
	flag, where string
	disk        bool
	label       string // for the names of rows

	folder string
	lock   *os.File // of the folder: it tells a run that was killed from one that runs
}

func newPlace(flag, where string, disk bool) *place {
	p := &place{flag: flag, where: where, disk: disk, label: "dirstore"}
	t := typeOf(where)
	switch {
	case disk && t != "":
		p.label += " on disk (" + t + ")"
	case disk:
		p.label += " on disk"
	case t != "":
		p.label += " on " + t
	}
	return p
}

// open makes the folder, in which there must be room for so many bytes.
func (p *place) open(need int64) error {
	fail := func(kind sluice.Kind, detail string, err error) error {
		return &sluice.Error{Kind: kind, Op: "bench: " + p.flag, Subject: p.where, Detail: detail, Err: err}
	}
	if info, err := os.Stat(p.where); err != nil || !info.IsDir() {
		return fail(sluice.Denied, "is not a directory", err)
	}
	p.sweep()
	if d, err := plan.Look(p.where); err == nil && d.FreeBytes < need {
		return fail(sluice.NoSpace, fmt.Sprintf("has %d bytes free, but five samples are %d: take another directory, or a smaller --sample", d.FreeBytes, need), nil)
	}
	var err error
	if p.folder, err = os.MkdirTemp(p.where, folderPrefix); err != nil {
		return fail(sluice.Denied, "cannot write to the directory", err)
	}
	if p.lock, err = lock(p.folder); err != nil {
		return errors.Join(fail(sluice.Denied, "cannot lock "+filepath.Base(p.folder), err), p.remove())
	}
	return nil
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

// sweep removes the folders of runs that were killed, as far as it may. One that was just made may not be locked yet.
func (p *place) sweep() {
	entries, err := os.ReadDir(p.where)
	if err != nil {
		return
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || !e.IsDir() || !strings.HasPrefix(e.Name(), folderPrefix) || time.Since(info.ModTime()) < 10*time.Second {
			continue
		}
		name := filepath.Join(p.where, e.Name())
		if d, err := lock(name); err == nil {
			_ = os.RemoveAll(name) // what cannot go stays: it is in nobody's way
			_ = d.Close()
		}
	}
}

func (p *place) remove() error {
	err := os.RemoveAll(p.folder)
	if p.lock != nil {
		err = errors.Join(err, p.lock.Close())
	}
	return err
}
