// Package inspect looks into sample files and stores, for people and scripts. It reads and changes nothing.
package inspect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
)

// What became of a check.
const (
	OK   = "ok"
	Bad  = "bad"
	None = "none" // there is nothing to check against
)

// Problem is something that is corrupt or inconsistent.
type Problem struct {
	Subject string `json:"subject"`
	Detail  string `json:"detail"`
}

func (p Problem) String() string { return fmt.Sprintf("%q: %s", p.Subject, p.Detail) }

// FileReport is what a safetensors file holds, ours or not.
type FileReport struct {
	Kind     string            `json:"kind"` // "file"
	Path     string            `json:"path"`
	OK       bool              `json:"ok"`
	Bytes    int64             `json:"bytes"`
	Header   int64             `json:"header_bytes"` // where data begins
	Data     int64             `json:"data_bytes"`
	Features []FeatureReport   `json:"features"` // in the file's order
	RefOrder []string          `json:"ref_order,omitempty"`
	Ref      *RefReport        `json:"ref"`      // null if the file has none that can be read
	Metadata map[string]string `json:"metadata"` // what is there beside ref and checksums

	RefAgrees string `json:"ref_agrees"` // with the tensors: ok, bad or none
	Schema    string `json:"schema"`     // the built-in one that the ref names: ok, bad or none
	Checksums string `json:"checksums"`  // ok, bad or none
	Finite    bool   `json:"finite"`     // no NaN and no infinity in any float feature that could be read

	Problems []Problem `json:"problems"`
}

// FeatureReport describes one tensor.
type FeatureReport struct {
	Name      string  `json:"name"`
	DType     string  `json:"dtype"` // torch's name, or the format's own if a feature can't have it
	Shape     []int64 `json:"shape"`
	Bytes     int64   `json:"bytes"`
	Offset    int64   `json:"offset"`    // in the file
	Alignment int64   `json:"alignment"` // the largest power of two that divides the offset, at most 4096
	Aligned   bool    `json:"aligned"`   // to its elements: it can be mapped and viewed
	Checksum  string  `json:"checksum"`  // ok, bad or none
	Stats     *Stats  `json:"stats"`     // null if it is no float that we know
}

// RefReport is a ref in full.
type RefReport struct {
	SampleID           string            `json:"sample_id"`
	RunID              string            `json:"run_id"`
	StoreURI           string            `json:"store_uri"`
	Generation         string            `json:"generation"`
	Algorithm          sluice.Algorithm  `json:"algorithm"`
	SchemaVersion      int64             `json:"schema_version"`
	NumTokens          int64             `json:"num_tokens"`
	EstimatedBytes     int64             `json:"estimated_bytes"`
	TargetModelVersion string            `json:"target_model_version"`
	DraftWeightVersion string            `json:"draft_weight_version"`
	Attributes         map[string]string `json:"attributes"`
}

// File inspects the file at path. What is wrong with a file that has a header is in the report; a file without one is an error.
//
// Errors: ErrNotFound, ErrDenied, ErrInvalid (no regular file), ErrCorrupt (no safetensors file, or one that was cut off), ErrUnavailable (another process holds the file's lock).
func File(ctx context.Context, path string) (*FileReport, error) {
	fail := func(kind sluice.Kind, detail, hint string, err error) error {
		return &sluice.Error{Kind: kind, Op: "inspect", Subject: path, Detail: detail, Hint: hint, Err: err}
	}
	f, err := openQuietly(path)
	if err != nil {
		return nil, openError(path, err)
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return nil, fail(sluice.Unavailable, "can't stat the file", "", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fail(sluice.Invalid, fmt.Sprintf("is no regular file (%s), want a safetensors file or a store's directory", info.Mode()), "", nil)
	}
	// A file that its store freed could be overwritten otherwise. Nobody waits for the lock: whoever would recycle the file tries, and takes another.
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		return nil, fail(sluice.Unavailable, "another process holds an exclusive lock on the file: it may be writing it", "try again", nil)
	}
	h, err := safetensors.ReadHeader(f, info.Size())
	if err != nil {
		kind := sluice.KindOf(err)
		hint := ""
		if kind == sluice.Corrupt {
			hint = "it is no safetensors file, or was cut off or damaged"
		}
		return nil, fail(kind, "", hint, err)
	}
	r, err := examine(ctx, f, h)
	if err != nil {
		if sluice.KindOf(err) != "" {
			err = fail(sluice.KindOf(err), "", "", err)
		}
		return nil, err
	}
	r.Path = path
	return r, nil
}

// openQuietly opens for reading without leaving an access time, which only the owner may ask for.
func openQuietly(path string) (*os.File, error) {
	const flags = os.O_RDONLY | unix.O_NONBLOCK
	f, err := os.OpenFile(path, flags|noAccessTime, 0)
	if errors.Is(err, unix.EPERM) {
		f, err = os.OpenFile(path, flags, 0)
	}
	return f, err
}

func openError(path string, err error) error {
	e := &sluice.Error{Kind: sluice.Unavailable, Op: "inspect", Subject: path, Detail: "can't open it", Err: err}
	var pe *fs.PathError
	if errors.As(err, &pe) {
		e.Err = pe.Err // the path is the subject
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		e.Kind, e.Detail = sluice.NotFound, "is not there, want a safetensors file or a store's directory"
	case errors.Is(err, fs.ErrPermission):
		e.Kind, e.Detail, e.Hint = sluice.Denied, "may not be read", "run as the user it belongs to"
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, unix.ENXIO):
		e.Kind, e.Detail = sluice.Invalid, "is no path to a safetensors file or a store's directory"
	}
	return e
}

// examine reads all of a file, a piece at a time.
func examine(ctx context.Context, f io.ReaderAt, h *safetensors.Header) (*FileReport, error) {
	r := &FileReport{Kind: "file", Bytes: h.Size(), Header: h.DataStart, Data: h.Size() - h.DataStart, Features: []FeatureReport{}, Metadata: map[string]string{},
		RefAgrees: None, Schema: None, Checksums: None, Finite: true, Problems: []Problem{}}
	problem := func(subject, format string, args ...any) {
		r.Problems = append(r.Problems, Problem{subject, fmt.Sprintf(format, args...)})
	}
	for k, v := range h.Metadata {
		if k != safetensors.RefKey && k != safetensors.ChecksumsKey {
			r.Metadata[k] = v
		}
	}
	if text, ok := h.Metadata[safetensors.RefKey]; ok {
		ref, err := sluice.ParseRef([]byte(text))
		if err != nil {
			r.RefAgrees = Bad
			problem(safetensors.RefKey, "can't be read: %v", err)
		} else {
			r.setRef(ref, h)
		}
	}
	sums, err := h.Checksums()
	if err != nil {
		r.Checksums = Bad
		problem(safetensors.ChecksumsKey, "can't be used: %v", err)
	} else if sums != nil {
		r.Checksums = OK
	}
	buf := make([]byte, pieceBytes)
	for i := range h.Entries {
		e := &h.Entries[i]
		fr := FeatureReport{Name: e.Name, DType: e.RawDType, Shape: e.Spec.Shape, Bytes: e.Bytes(), Offset: h.DataStart + e.Begin, Checksum: None}
		fr.Alignment = min(fr.Offset&-fr.Offset, 4096)
		fr.Aligned = true
		if d := e.Spec.DType; d.Valid() {
			fr.DType, fr.Aligned = d.String(), fr.Offset%d.Size() == 0
			if d.Float() {
				fr.Stats = newStats(d, e.Spec.Elements())
			}
		}
		if fr.Stats != nil || sums != nil {
			sum, err := stream(ctx, f, h.DataStart+e.Begin, e.Bytes(), buf, fr.Stats)
			if err != nil {
				return nil, err
			}
			if want, ok := sums[e.Name]; ok {
				if fr.Checksum = OK; sum != want {
					fr.Checksum, r.Checksums = Bad, Bad
					problem(e.Name, "its bytes have the crc32c %08x, the file says %08x: they are not what was written", sum, want)
				}
			}
		}
		if s := fr.Stats; s != nil {
			s.finish()
			if !s.Finite {
				r.Finite = false
				problem(e.Name, "has values that are not finite: %d NaN, %d infinite, of %d", s.NaN, s.Inf, s.Elements)
			}
		}
		r.Features = append(r.Features, fr)
	}
	r.OK = len(r.Problems) == 0
	return r, nil
}

// pieceBytes is how much of a tensor is in memory at a time; a multiple of every element size.
const pieceBytes = 1 << 20

func stream(ctx context.Context, f io.ReaderAt, off, n int64, buf []byte, s *Stats) (sum uint32, err error) {
	for n > 0 {
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		piece := buf[:min(n, int64(len(buf)))]
		if k, err := f.ReadAt(piece, off); k < len(piece) {
			if errors.Is(err, io.EOF) {
				return 0, &sluice.Error{Kind: sluice.Corrupt, Detail: fmt.Sprintf("ends at byte %d, want %d more: it was cut off while it was read", off+int64(k), n-int64(k))}
			}
			return 0, &sluice.Error{Kind: sluice.Unavailable, Detail: fmt.Sprintf("can't read byte %d", off+int64(k)), Err: err}
		}
		sum = safetensors.UpdateChecksum(sum, piece)
		if s != nil {
			s.add(piece)
		}
		off, n = off+int64(len(piece)), n-int64(len(piece))
	}
	return sum, nil
}

// setRef compares a ref with the tensors of its file and with its schema.
func (r *FileReport) setRef(ref sluice.Ref, h *safetensors.Header) {
	f := ref.Fields()
	if f.Attributes == nil {
		f.Attributes = map[string]string{}
	}
	r.RefOrder = ref.FeatureNames()
	r.Ref = &RefReport{f.SampleID, f.RunID, f.StoreURI, f.Generation, f.Algorithm, f.SchemaVersion, f.NumTokens, f.EstimatedBytes, f.TargetModelVersion, f.DraftWeightVersion, f.Attributes}
	r.RefAgrees = OK
	disagree := func(subject, format string, args ...any) {
		r.RefAgrees = Bad
		r.Problems = append(r.Problems, Problem{subject, fmt.Sprintf(format, args...)})
	}
	for _, want := range f.Features {
		switch e, ok := h.Find(want.Name); {
		case !ok:
			disagree(want.Name, "is promised by the ref and not in the file")
		case !e.Spec.Equal(want.Spec):
			have := e.Spec.String()
			if !e.Spec.DType.Valid() {
				have = e.RawDType
			}
			disagree(want.Name, "is %s, the ref promises %s", have, want.Spec)
		}
	}
	for i := range h.Entries {
		if !slices.Contains(r.RefOrder, h.Entries[i].Name) {
			disagree(h.Entries[i].Name, "is in the file, and the ref does not know it")
		}
	}
	schema, err := sluice.SchemaOf(f.Algorithm)
	if err != nil {
		return // a run may bring its own
	}
	r.Schema = OK
	if err := schema.Validate(ref); err != nil {
		r.Schema = Bad
		r.Problems = append(r.Problems, Problem{f.SampleID, "does not agree with its schema: " + err.Error()})
	}
}
