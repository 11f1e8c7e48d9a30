package inspect

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
	"github.com/sluice-ml/sluice/store/dirstore"
)

// StoreReport is what a store's directory holds.
type StoreReport struct {
	Kind string `json:"kind"` // "store"
	OK   bool   `json:"ok"`
	*dirstore.Inspection
	// Verified has an entry for each published sample whose file was read to its end; null unless that was asked for.
	Verified map[string]Verified `json:"verified"`
}

// Verified is what reading a sample's file gave.
type Verified struct {
	Checksums string `json:"checksums"` // ok, bad or none
	Finite    bool   `json:"finite"`
}

// Store inspects the store in dir. With verify it reads the file of every published sample, and checks checksums, finiteness, ref and schema.
// What is wrong is in the report. The errors are those of [dirstore.Inspect].
func Store(ctx context.Context, dir string, verify bool) (*StoreReport, error) {
	r := &StoreReport{Kind: "store"}
	var o dirstore.InspectOptions
	if verify {
		r.Verified = map[string]Verified{}
		o.Check = func(f *os.File, s *dirstore.InspectedSample) (wrong []string) {
			v, wrong := check(ctx, f)
			if v != nil {
				r.Verified[s.SampleID] = *v
			}
			return wrong
		}
	}
	in, err := dirstore.Inspect(ctx, dir, &o)
	if err != nil && holdsRuns(dir) {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: "inspect", Subject: dir, Detail: "is the root of a service's stores, one for each run", Hint: "inspect " + filepath.Join(Clean(dir), "runs", "<run>")}
	}
	if err != nil {
		return nil, err
	}
	r.Inspection = in
	r.OK = len(in.Findings) == 0
	return r, nil
}

// holdsRuns tells the directory of a service's store, which holds the runs' stores, from one of these.
func holdsRuns(dir string) bool {
	id, err := os.Lstat(filepath.Join(dir, "id"))
	if err != nil || !id.Mode().IsRegular() {
		return false
	}
	runs, err := os.Lstat(filepath.Join(dir, "runs"))
	return err == nil && runs.IsDir()
}

func check(ctx context.Context, f *os.File) (v *Verified, wrong []string) {
	info, err := f.Stat()
	if err != nil {
		return nil, []string{err.Error()}
	}
	h, err := safetensors.ReadHeader(f, info.Size())
	if err != nil {
		return nil, []string{err.Error()}
	}
	r, err := examine(ctx, f, h)
	if err != nil {
		return nil, []string{fmt.Sprintf("its file can't be read: %v", err)}
	}
	for _, p := range r.Problems {
		wrong = append(wrong, "in its file, "+p.String())
	}
	return &Verified{r.Checksums, r.Finite}, wrong
}

// Stat says whether path is a directory, with an error for what can be neither a sample nor a store.
func Stat(path string) (dir bool, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return false, openError(path, err)
	}
	if !info.IsDir() && !info.Mode().IsRegular() {
		err = &sluice.Error{Kind: sluice.Invalid, Op: "inspect", Subject: path, Detail: fmt.Sprintf("is no regular file (%s), want a safetensors file or a store's directory", info.Mode())}
	}
	return info.IsDir(), err
}
