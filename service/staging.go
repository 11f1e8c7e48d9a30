package service

import (
	"os"
	"path/filepath"
	"time"
)

// sweepStaging removes files that somebody staged and never committed.
func (r *run) sweepStaging(time.Time) {
	if r.enter() != nil {
		return
	}
	defer r.leave()
	dir := r.s.root.stagingDir(r.id)
	root, err := os.OpenRoot(dir)
	if err != nil {
		r.s.log.Warn("the staging directory can't be swept", "run", r.id, "err", err)
		return
	}
	defer func() { _ = root.Close() }()
	entries, err := os.ReadDir(dir)
	if err != nil {
		r.s.log.Warn("the staging directory can't be swept", "run", r.id, "err", err)
		return
	}
	for _, e := range entries {
		info, err := e.Info()
		// A file's age is by the wall clock: there is no other for what an earlier process left.
		if err != nil || time.Since(info.ModTime()) < r.s.opts.ReservationTime {
			continue
		}
		if err := root.RemoveAll(e.Name()); err != nil {
			r.s.log.Warn("an old staged file can't be removed", "run", r.id, "file", filepath.Join(dir, plain(e.Name())), "err", err)
			continue
		}
		r.s.log.Info("an old staged file was removed", "run", r.id, "file", plain(e.Name()))
	}
}
