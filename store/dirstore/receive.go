//go:build linux

package dirstore

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"sync"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
)

// pieceBytes is how much of a body is in memory at a time.
const pieceBytes = 1 << 20

// maxIncomingHeader bounds the header of a file that comes in: a ref and checksums are at most a fifth of it.
const maxIncomingHeader = pieceBytes - 8

var pieces = sync.Pool{New: func() any { return new([pieceBytes]byte) }}

// Receive stores a sample that comes as a safetensors file in a stream of size bytes, or of unknown size if that is below zero. The tensors may be in any order. The
// bytes go down in one pass, into room that was taken before the first of them was read; nothing can be seen of the sample before the last one is there and right. Metadata other than the
// ref is dropped. Checksums that the file carries in its metadata are compared with what came; zeros stand for one that the sender has not filled in. The stored
// file has checksums, on every medium.
//
// A call that repeats one of the same generation returns the same ref, reads nothing, or no more than the header if in does not name the generation, and leaves the reservation alone.
//
// Receive looks at ctx between reads, but can't interrupt one: the body needs a deadline of its own. Close waits for it.
//
// Errors are those of [sluice.Store].Put, and ErrCorrupt for a body that is no safetensors file, is short or long, or fails a checksum, ErrInvalid for one that does not agree with in, ErrUnsupported
// for a dtype that no feature can have, ErrUnavailable, with the cause inside, for a read that failed, and for a repetition while the first call is under way.
// After any of them nothing is left, and the reservation is as it was.
func (s *Store) Receive(ctx context.Context, body io.Reader, size int64, in Incoming, r sluice.Reservation) (sluice.Ref, error) {
	if err := s.enter(ctx, "receive"); err != nil {
		return sluice.Ref{}, err
	}
	defer s.life.RUnlock()
	if err := s.checkDirectory("receive"); err != nil {
		return sluice.Ref{}, err
	}
	if ref, err := s.stored("receive", in); err != nil || !ref.IsZero() {
		return ref, err
	}
	b := &stream{s: s, ctx: ctx, body: body, id: in.SampleID}
	h, err := b.header(size)
	if err != nil {
		return sluice.Ref{}, err
	}
	ref, features, err := s.describe("receive", h, in)
	if err != nil {
		return sluice.Ref{}, err
	}
	return s.receive(b, h, ref, features, in.Checksum, r)
}

// stored returns the ref of the sample if it is here in the generation that in names, and the zero Ref if not.
func (s *Store) stored(op string, in Incoming) (sluice.Ref, error) {
	if in.Generation == "" {
		return sluice.Ref{}, nil
	}
	ref, err := s.find(op, in.SampleID, in.Generation)
	if errors.Is(err, sluice.ErrNotFound) {
		return sluice.Ref{}, nil
	}
	if err == nil {
		err = in.agree(op, ref, s.uri)
	}
	if err != nil {
		return sluice.Ref{}, err
	}
	return ref, nil
}

// receive stores the data that follows a header. checksum is that of [Incoming].
func (s *Store) receive(b *stream, h *safetensors.Header, ref sluice.Ref, features []sluice.Feature, checksum func() (uint32, bool), r sluice.Reservation) (sluice.Ref, error) {
	id := ref.SampleID()
	said, err := h.Checksums()
	if err != nil {
		return sluice.Ref{}, &sluice.Error{Kind: sluice.Corrupt, Op: "dirstore: receive", Subject: id, Err: err}
	}
	// Checksums cost little while the bytes pass, and a second pass once a reader far away asks for them: so the file has them on any medium.
	layout, err := safetensors.NewChecksummedLayout(features, map[string]string{safetensors.RefKey: ref.Canonical()})
	if err != nil {
		return sluice.Ref{}, &sluice.Error{Kind: sluice.Invalid, Op: "dirstore: receive", Subject: id, Err: err}
	}
	size := layout.Size()
	return s.put(b.ctx, ref, r, source{size: size, fill: func(p staged) (*os.File, error) {
		const ahead = true // what comes can't be asked for once more
		return s.writeScratch(id, p, size, ahead, func(f *os.File) error {
			sums, err := b.copyData(f, h, layout)
			if err != nil {
				return err
			}
			if err := b.end(); err != nil {
				return err
			}
			if err := compareSums("receive", id, said, sums); err != nil {
				return err
			}
			if checksum != nil {
				sum := uint32(0) // of the data as a whole
				for i := range h.Entries {
					e := &h.Entries[i]
					sum = safetensors.CombineChecksums(sum, sums[e.Name], e.Bytes())
				}
				if want, known := checksum(); known && want != sum {
					return fail(sluice.Corrupt, "receive", id, "the data that came has the crc32c %08x, its sender says %08x", sum, want)
				}
			}
			s.hooks.reach("received")
			// The header comes last: what was not finished has none.
			head, err := layout.HeaderWithChecksums(sums)
			if err != nil {
				return err
			}
			if _, err := f.WriteAt(head, 0); err != nil {
				return s.writeError(id, size, err)
			}
			return nil
		})
	}})
}

// compareSums compares the checksums that a file carries with those of its data.
func compareSums(op, id string, said, sums map[string]uint32) error {
	for _, name := range slices.Sorted(maps.Keys(said)) {
		if said[name] != 0 && said[name] != sums[name] {
			return fail(sluice.Corrupt, op, id, "the feature %s has the crc32c %08x, its file says %08x", name, sums[name], said[name])
		}
	}
	return nil
}

// describe makes the ref of an incoming file, and lists its features in the ref's order, without data.
func (s *Store) describe(op string, h *safetensors.Header, in Incoming) (sluice.Ref, []sluice.Feature, error) {
	invalid := func(format string, args ...any) error { return fail(sluice.Invalid, op, in.SampleID, format, args...) }
	for i := range h.Entries {
		if e := &h.Entries[i]; !e.Spec.DType.Valid() {
			return sluice.Ref{}, nil, fail(sluice.Unsupported, op, in.SampleID, "the tensor %q is of the dtype %s, which no feature can have", e.Name, e.RawDType)
		}
	}
	var ref sluice.Ref
	text, carried := h.Metadata[safetensors.RefKey]
	if carried {
		var err error
		if ref, err = sluice.ParseRef([]byte(text)); err != nil {
			return sluice.Ref{}, nil, &sluice.Error{Kind: sluice.Invalid, Op: "dirstore: " + op, Subject: in.SampleID, Detail: "the file's " + safetensors.RefKey, Err: err}
		}
		if err := in.agree(op, ref, s.uri); err != nil {
			return sluice.Ref{}, nil, err
		}
	} else {
		if in.RunID == "" {
			return sluice.Ref{}, nil, invalid("run_id is missing: neither the call nor the file has it")
		}
		fields, err := in.fields(h, s.uri)
		if err != nil {
			return sluice.Ref{}, nil, &sluice.Error{Kind: sluice.Invalid, Op: "dirstore: " + op, Subject: in.SampleID, Err: err}
		}
		if ref, err = sluice.NewRef(fields); err != nil {
			return sluice.Ref{}, nil, &sluice.Error{Kind: sluice.Invalid, Op: "dirstore: " + op, Subject: in.SampleID, Err: err}
		}
	}
	if n := ref.NumFeatures(); n != len(h.Entries) {
		return sluice.Ref{}, nil, invalid("the file has %d tensors, the ref has %d features", len(h.Entries), n)
	}
	features := make([]sluice.Feature, 0, len(h.Entries))
	for f := range ref.Features() {
		switch e, ok := h.Find(f.Name); {
		case !ok:
			return sluice.Ref{}, nil, invalid("the file has no tensor %s, the ref promises one", f.Name)
		case !e.Spec.Equal(f.Spec):
			return sluice.Ref{}, nil, invalid("the tensor %s is %s, the ref promises %s", f.Name, e.Spec, f.Spec)
		}
		features = append(features, sluice.Feature{Name: f.Name, Tensor: sluice.Tensor{Spec: f.Spec}})
	}
	return ref, features, nil
}

// fields are those of the ref of a file that carries none.
func (in *Incoming) fields(h *safetensors.Header, uri string) (sluice.RefFields, error) {
	f := sluice.RefFields{
		SampleID: in.SampleID, RunID: in.RunID, StoreURI: uri, Generation: in.Generation,
		Algorithm: in.Algorithm, SchemaVersion: in.SchemaVersion, NumTokens: in.NumTokens,
		TargetModelVersion: in.TargetModelVersion, DraftWeightVersion: in.DraftWeightVersion, Attributes: in.Attributes,
	}
	if f.Generation == "" {
		f.Generation = sluice.NewGeneration()
	}
	if f.SchemaVersion == 0 {
		f.SchemaVersion = 1
	}
	if f.TargetModelVersion == "" {
		f.TargetModelVersion = "0"
	}
	if f.DraftWeightVersion == "" {
		f.DraftWeightVersion = "0"
	}
	names := in.Features
	if names == nil {
		for i := range h.Entries {
			names = append(names, h.Entries[i].Name)
		}
	}
	for _, name := range names {
		e, ok := h.Find(name)
		if !ok {
			return f, fmt.Errorf("the file has no tensor %q", name)
		}
		f.Features = append(f.Features, sluice.RefFeature{Name: name, Key: in.SampleID + "/" + name, Spec: e.Spec})
	}
	var err error
	f.EstimatedBytes, err = sluice.SumBytes(f.Features)
	return f, err
}

// agree refuses a ref that is not what the sender says beside it.
func (in *Incoming) agree(op string, ref sluice.Ref, uri string) error {
	f := ref.Fields()
	for _, c := range [...]struct {
		field      string
		have, want string
		unset      bool
	}{
		{"sample_id", f.SampleID, in.SampleID, false},
		{"run_id", f.RunID, in.RunID, in.RunID == ""},
		{"store_uri", f.StoreURI, uri, false},
		{"generation", f.Generation, in.Generation, in.Generation == ""},
		{"algorithm", string(f.Algorithm), string(in.Algorithm), in.Algorithm == ""},
		{"schema_version", fmt.Sprint(f.SchemaVersion), fmt.Sprint(in.SchemaVersion), in.SchemaVersion == 0},
		{"num_tokens", fmt.Sprint(f.NumTokens), fmt.Sprint(in.NumTokens), in.NumTokens == 0},
		{"target_model_version", f.TargetModelVersion, in.TargetModelVersion, in.TargetModelVersion == ""},
		{"draft_weight_version", f.DraftWeightVersion, in.DraftWeightVersion, in.DraftWeightVersion == ""},
	} {
		if !c.unset && c.have != c.want {
			return fail(sluice.Invalid, op, in.SampleID, "the file's %s has the %s %q, want %q", safetensors.RefKey, c.field, c.have, c.want)
		}
	}
	if in.Attributes != nil && !maps.Equal(in.Attributes, f.Attributes) {
		return fail(sluice.Invalid, op, in.SampleID, "the file's %s has other attributes than the call", safetensors.RefKey)
	}
	if in.Features != nil && !slices.Equal(in.Features, ref.FeatureNames()) {
		return fail(sluice.Invalid, op, in.SampleID, "the file's %s has the features %q, want %q", safetensors.RefKey, ref.FeatureNames(), in.Features)
	}
	return nil
}

// stream reads a file from its beginning to its end.
type stream struct {
	s    *Store
	ctx  context.Context // of the one call that the stream is for
	body io.Reader
	id   string
	at   int64 // bytes read
	size int64 // of the file
}

// fill reads exactly len(buf) bytes.
func (b *stream) fill(buf []byte) error {
	for idle := 0; len(buf) > 0; {
		n, err := b.read(buf)
		buf = buf[n:]
		switch {
		case len(buf) == 0:
		case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF): // net/http says the latter of a body that is short
			return fail(sluice.Corrupt, "receive", b.id, "the body ends after %d bytes, want %d", b.at, max(b.size, b.at+int64(len(buf))))
		case err != nil:
			return b.failed(err)
		case n > 0:
			idle = 0
		default:
			if idle++; idle == 100 {
				return b.failed(io.ErrNoProgress)
			}
		}
	}
	return nil
}

func (b *stream) read(buf []byte) (int, error) {
	if b.ctx.Err() != nil {
		return 0, context.Cause(b.ctx)
	}
	n, err := b.body.Read(buf)
	b.at += int64(n)
	return n, err
}

func (b *stream) failed(err error) error {
	if b.ctx.Err() != nil {
		return context.Cause(b.ctx)
	}
	e := &sluice.Error{Kind: sluice.KindOf(err), Op: "dirstore: receive", Subject: b.id, Detail: fmt.Sprintf("the body stopped after %d bytes", b.at), Err: err}
	if e.Kind == "" {
		e.Kind = sluice.Unavailable
	}
	return e
}

// header reads up to the data. size is the size of the file, or below zero if only the header knows it.
func (b *stream) header(size int64) (*safetensors.Header, error) {
	corrupt := func(err error) error {
		return &sluice.Error{Kind: sluice.Corrupt, Op: "dirstore: receive", Subject: b.id, Err: err}
	}
	b.size = size
	var length [8]byte
	if err := b.fill(length[:]); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint64(length[:])
	switch {
	case n > safetensors.MaxHeader || size >= 0 && (size < 8 || n > uint64(size-8)):
		_, err := safetensors.ParseHeader(length[:], size)
		return nil, corrupt(err)
	case n > maxIncomingHeader:
		return nil, fail(sluice.Invalid, "receive", b.id, "the header is %d bytes long, want at most %d", n, maxIncomingHeader)
	}
	piece := pieces.Get().(*[pieceBytes]byte)
	defer pieces.Put(piece)
	read := piece[:8+n]
	copy(read, length[:])
	if err := b.fill(read[8:]); err != nil {
		return nil, err
	}
	h, err := safetensors.ParseHeader(read, size)
	if err != nil {
		return nil, corrupt(err)
	}
	b.size = h.Size()
	return h, nil
}

// copyData reads the tensors, in the order in which they come, and writes each to its place.
func (b *stream) copyData(f *os.File, h *safetensors.Header, layout *safetensors.Layout) (sums map[string]uint32, err error) {
	piece := pieces.Get().(*[pieceBytes]byte)
	defer pieces.Put(piece)
	sums = make(map[string]uint32, len(h.Entries))
	for i := range h.Entries {
		e := &h.Entries[i]
		at, _ := layout.Offset(e.Name)
		sum := uint32(0)
		for left := e.Bytes(); left > 0; {
			buf := piece[:min(left, pieceBytes)]
			if err := b.fill(buf); err != nil {
				return nil, err
			}
			if _, err := f.WriteAt(buf, at); err != nil {
				return nil, b.s.writeError(b.id, layout.Size(), err)
			}
			sum = safetensors.UpdateChecksum(sum, buf)
			at, left = at+int64(len(buf)), left-int64(len(buf))
		}
		sums[e.Name] = sum
	}
	return sums, nil
}

// end refuses a body that goes on. It also makes an HTTP server read the trailer.
func (b *stream) end() error {
	var more [1]byte
	for range 100 {
		switch n, err := b.read(more[:]); {
		case n > 0:
			return fail(sluice.Corrupt, "receive", b.id, "the body goes on behind the %d bytes of its file", b.size)
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return b.failed(err)
		}
	}
	return b.failed(io.ErrNoProgress)
}
