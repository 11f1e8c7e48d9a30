package service

import (
	"context"
	"os"
	"path/filepath"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
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

// adopt makes a sample of a staged file of the user's own.
func (r *run) adopt(ctx context.Context, in *wire.Stage, uid int, room sluice.Reservation) (sluice.Ref, error) {
	what, err := incoming(r, in.SampleID, in.Fields)
	if err != nil {
		return sluice.Ref{}, err
	}
	dir, err := os.OpenRoot(r.s.root.stagingDir(r.id))
	if err != nil {
		return sluice.Ref{}, &sluice.Error{Kind: kindOfOS(err), Op: "stage", Subject: r.id, Detail: "the staging directory can't be opened", Err: err}
	}
	defer func() { _ = dir.Close() }()
	return r.store.Adopt(ctx, dir, in.File, uid, what, room)
}

// spare moves a file of the pool into the staging directory, and says its name; "" if there is none.
func (r *run) spare(ctx context.Context, size int64) (string, error) {
	dir, err := os.OpenRoot(r.s.root.stagingDir(r.id))
	if err != nil {
		return "", &sluice.Error{Kind: kindOfOS(err), Op: "spare", Subject: r.id, Detail: "the staging directory can't be opened", Err: err}
	}
	defer func() { _ = dir.Close() }()
	name := sluice.NewGeneration()
	ok, err := r.store.Spare(ctx, dir, name, size)
	if !ok {
		name = ""
	}
	return name, err
}
