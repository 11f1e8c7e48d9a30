package bench

import (
	"fmt"
	"os"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/plan"
	"github.com/sluice-ml/sluice/internal/scratch"
)

const folderPrefix = "sluice-bench-"

// place is a directory to measure in. Only a folder of the run's own in it is written to.
type place struct {
	flag, where string
	disk        bool
	label       string // for the names of rows

	folder *scratch.Folder
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
	if d, err := plan.Look(p.where); err == nil && d.FreeBytes < need {
		return fail(sluice.NoSpace, fmt.Sprintf("has %d bytes free, but five samples are %d: take another directory, or a smaller --sample", d.FreeBytes, need), nil)
	}
	var err error
	if p.folder, err = scratch.New(p.where, folderPrefix); err != nil {
		return fail(sluice.Denied, "cannot write to the directory", err)
	}
	return nil
}

func (p *place) remove() error { return p.folder.Remove() }
