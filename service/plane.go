package service

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/safetensors"
	"github.com/sluice-ml/sluice/store/dirstore"
)

// plane is the data plane of a run.
type plane struct{ *dirstore.Store }

// incoming is a sample on its way in.
type incoming struct {
	runID, sampleID string
	fields          *wire.SampleFields // nil: the file says it all
	size            int64              // -1 if unknown
	reservation     sluice.Reservation
}

// receive takes a safetensors stream in.
func (p plane) receive(ctx context.Context, body io.Reader, in *incoming) (sluice.Ref, error) {
	limit := p.Health().Caps.MaxBytes + safetensors.MaxHeader
	data, err := io.ReadAll(io.LimitReader(body, limit))
	if err != nil {
		return sluice.Ref{}, err
	}
	m, err := safetensors.Read(readerAt(data), int64(len(data)))
	if err != nil {
		return sluice.Ref{}, err
	}
	defer func() { _ = m.Close() }()
	if in.fields == nil {
		return sluice.Ref{}, &sluice.Error{Kind: sluice.Invalid, Op: "upload", Subject: in.sampleID, Detail: "wants the header " + wire.SampleHeader}
	}
	features, err := m.Features(in.fields.Features)
	if err != nil {
		return sluice.Ref{}, err
	}
	f := in.fields
	return p.Put(ctx, &sluice.Sample{SampleID: in.sampleID, RunID: in.runID, Algorithm: sluice.Algorithm(f.Algorithm), SchemaVersion: max(f.SchemaVersion, 1), NumTokens: f.NumTokens,
		TargetModelVersion: f.TargetModelVersion, DraftWeightVersion: f.DraftWeightVersion, Attributes: f.Attributes, Features: features}, in.reservation)
}

type readerAt []byte

func (r readerAt) ReadAt(p []byte, off int64) (int, error) {
	if off >= int64(len(r)) {
		return 0, io.EOF
	}
	n := copy(p, r[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// adopt takes a file of the staging directory in.
func (p plane) adopt(ctx context.Context, dir string, file string, uid int, in *incoming) (sluice.Ref, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return sluice.Ref{}, err
	}
	defer func() { _ = root.Close() }()
	f, err := root.OpenFile(file, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return sluice.Ref{}, &sluice.Error{Kind: kindOfOS(err), Op: "stage", Subject: plain(file), Err: err}
	}
	defer func() { _ = f.Close() }()
	ref, err := p.receive(ctx, f, in)
	if err == nil {
		err = root.Remove(file)
	}
	return ref, err
}

// loan is a sample's file that is pinned.
type loan struct {
	file string
	size int64
	sums map[string]string
}

// lend pins a sample for a reader outside.
func (p plane) lend(ctx context.Context, ref sluice.Ref, id sluice.HandleID, mapped bool) (*pin, *loan, error) {
	t, err := p.Get(ctx, ref)
	if err != nil {
		return nil, nil, err
	}
	file := ref.SampleID() + ".safetensors"
	st, err := os.Stat(p.dir() + "/" + file)
	if err != nil {
		return nil, nil, errors.Join(err, t.Release(ctx))
	}
	lent[id] = t
	return &pin{handle: sluice.Handle{StoreURI: p.URI(), SampleID: ref.SampleID(), ID: id}, mapped: mapped}, &loan{file: file, size: st.Size()}, nil
}

var lent = map[sluice.HandleID]*sluice.Tensors{}

// giveBack gives a pin up; keep says that the file is still mapped.
func (p plane) giveBack(ctx context.Context, of *pin, keep bool) error {
	t := lent[of.handle.ID]
	if t == nil {
		return nil
	}
	if keep {
		return p.Release(ctx, t.Handle)
	}
	delete(lent, of.handle.ID)
	return t.Release(ctx)
}

func (p plane) dir() string { return p.URI()[len("file://"):] }

// reading is a sample's file that is being read.
type reading struct {
	*os.File
	size   int64
	header *safetensors.Header
	close  func()
}

// read opens the file of a sample, pinned for the time.
func (p plane) read(ctx context.Context, id, generation string) (*reading, error) {
	f, err := os.Open(p.dir() + "/" + id + ".safetensors")
	if err != nil {
		return nil, &sluice.Error{Kind: kindOfOS(err), Op: "read", Subject: id, Detail: "is not here in generation " + generation}
	}
	st, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	h, err := safetensors.ReadHeader(f, st.Size())
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	r := &reading{File: f, size: st.Size(), header: h, close: func() { _ = f.Close() }}
	ref, err := sluice.ParseRef([]byte(h.Metadata[safetensors.RefKey]))
	if err != nil || ref.Generation() != generation {
		r.close()
		return nil, &sluice.Error{Kind: sluice.NotFound, Op: "read", Subject: id, Detail: fmt.Sprintf("is not here in generation %s", plain(generation))}
	}
	return r, nil
}
