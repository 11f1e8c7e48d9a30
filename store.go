package sluice

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"sync"
	"time"
)

// Sample is what a producer puts: the features of one produced unit, normally one sequence (B=1), with what its ref shall say. The
// store reads the tensors during Put and keeps no reference to them.
type Sample struct {
	SampleID           string
	RunID              string
	Algorithm          Algorithm
	SchemaVersion      int64
	NumTokens          int64
	TargetModelVersion string // "0" if empty
	DraftWeightVersion string // "0" if empty
	Attributes         map[string]string
	Features           []Feature
}

// Bytes is the sum of the features' bytes: what a reservation for the sample must hold.
func (s *Sample) Bytes() int64 {
	var n int64
	for i := range s.Features {
		n += s.Features[i].Bytes()
	}
	return n
}

// RefFields returns the fields that the sample's ref will have, checked against the tensors, with the given store and generation and
// the key "<sample id>/<feature>" for every feature. Stores call it before they make anything visible.
func (s *Sample) RefFields(storeURI, generation string) (RefFields, error) {
	f := RefFields{
		SampleID: s.SampleID, RunID: s.RunID, StoreURI: storeURI, Generation: generation,
		Algorithm: s.Algorithm, SchemaVersion: s.SchemaVersion, NumTokens: s.NumTokens,
		TargetModelVersion: s.TargetModelVersion, DraftWeightVersion: s.DraftWeightVersion, Attributes: s.Attributes,
		Features: make([]RefFeature, 0, len(s.Features)),
	}
	if f.TargetModelVersion == "" {
		f.TargetModelVersion = "0"
	}
	if f.DraftWeightVersion == "" {
		f.DraftWeightVersion = "0"
	}
	for i := range s.Features {
		ft := &s.Features[i]
		if err := ft.Validate(); err != nil {
			return f, &Error{Kind: Invalid, Op: "sample", Subject: s.SampleID, Detail: fmt.Sprintf("features[%d] (%s)", i, printable(ft.Name, 60)), Err: err}
		}
		f.Features = append(f.Features, RefFeature{Name: ft.Name, Key: s.SampleID + "/" + ft.Name, Spec: ft.Spec})
	}
	sum, err := SumBytes(f.Features)
	if err != nil {
		return f, err
	}
	f.EstimatedBytes = sum
	return f, nil
}

// HandleID is the random identity of a pin. Whoever does not know it cannot release the pin.
type HandleID [16]byte

// NewHandleID returns 128 fresh random bits.
func NewHandleID() (id HandleID) {
	rand.Read(id[:]) // never fails: crypto/rand crashes the process instead
	return id
}

func (h HandleID) String() string { return hex.EncodeToString(h[:]) }

// NewGeneration returns a fresh generation for a put.
func NewGeneration() string {
	var b [16]byte
	rand.Read(b[:])
	return randomID(b)
}

// Handle is a pin on a sample, made by Get: while it is held, the bytes stay. It is a plain value that may be copied and
// sent to another process. (Upstream's StoreHandle.)
type Handle struct {
	StoreURI string
	SampleID string
	ID       HandleID
}

// Tensors are the features that a Get handed out, in the ref's order. The consumer may write to them, and nobody else sees it.
//
// Pin and memory are two things. Releasing the handle gives up the pin; the memory stays valid, and its bytes stay counted, until Close. Nobody may touch the
// tensors after Close: on some stores they are a mapping, and the access would be a fault. Tensors are not safe for concurrent Close and use.
type Tensors struct {
	Features []Feature
	Handle   Handle

	store Store
	once  sync.Once
	unmap func() error
	err   error
}

// NewTensors is for stores: unmap, which may be nil, is called once, by the first Close.
func NewTensors(store Store, handle Handle, features []Feature, unmap func() error) *Tensors {
	return &Tensors{Features: features, Handle: handle, store: store, unmap: unmap}
}

// Feature returns the tensor with the given name.
func (t *Tensors) Feature(name string) (Tensor, bool) { return FindFeature(t.Features, name) }

// Close gives back the memory. It is idempotent and does not touch the pin.
func (t *Tensors) Close() error {
	t.once.Do(func() {
		t.Features = nil
		if t.unmap != nil {
			t.err = t.unmap()
		}
	})
	return t.err
}

// Release releases the handle and closes the tensors: what most consumers want when they are done with a sample.
func (t *Tensors) Release(ctx context.Context) error {
	err := t.store.Release(ctx, t.Handle)
	if cerr := t.Close(); err == nil {
		err = cerr
	}
	return err
}

// Reservation is room that was set aside for one sample before the target spent a forward on it. It ends with the Put that
// uses it, with Unreserve, or with its process. The zero Reservation is none.
type Reservation struct {
	ID    string
	Bytes int64
}

// Store is the data plane: it holds the tensors of samples. (Upstream's FeatureStore.)
//
// A sample has at most one claim, its queue's, and any number of pins, the handles. Its bytes are free when neither is left; a
// sample that was never claimed is freed by its last release, or by Abort; a Get that fails is no release. So a sample that failed after release can be
// read again, bit for bit, and a late release by a stale holder harms nobody.
//
// All methods may be called from any goroutine. Unless said otherwise they fail with ErrClosed after Close, and with the context's
// error when it ends first.
type Store interface {
	// URI identifies the store: "scheme:location". Refs carry it, and a ref of another store is ErrNotFound.
	URI() string

	// Reserve sets room aside for a sample of the given size, at once or not at all: ErrFull when it does not fit the caps now,
	// ErrNoSpace when the medium is out of room. It does not look at the marks; a [Gate] does.
	Reserve(ctx context.Context, bytes int64) (Reservation, error)

	// Unreserve gives a reservation back. It is idempotent, and useless when forged or used.
	Unreserve(ctx context.Context, r Reservation) error

	// Put copies the sample into the store under the reservation, or under none if that is zero, and returns its ref. Everything is checked
	// before a byte is visible, and a refused put leaves nothing; a reservation then stays as it was.
	// Errors: ErrInvalid, ErrDuplicate (the id is present), ErrFull (over a cap, or over the reservation and a cap), ErrNoSpace.
	Put(ctx context.Context, s *Sample, r Reservation) (Ref, error)

	// Get pins the sample and hands its tensors out. ErrNotFound: no such sample, another generation, another store. ErrCorrupt: what is
	// stored disagrees with the ref, is short or fails its check.
	Get(ctx context.Context, ref Ref) (*Tensors, error)

	// Release gives up a pin. It is idempotent, and useless when the handle is forged, used or foreign: then it does nothing and
	// returns nil. It works after Close. Release, Unreserve and Abort are for clean-up code too: in process they do their work although ctx has ended.
	Release(ctx context.Context, h Handle) error

	// Abort frees a sample whose ref never reached a queue, without reading it. ErrConflict if the sample is claimed; nil if it is not there.
	Abort(ctx context.Context, ref Ref) error

	// GC frees what nobody owns (see the backends) and returns how many entries that were.
	GC(ctx context.Context) (int, error)

	// Health is a snapshot of counters: O(1), never blocked by a put, a get or a disk, and still there after Close.
	Health() Health

	// Close is idempotent. It never removes a published sample from a persistent medium, and tensors handed out stay valid until they are closed.
	Close() error
}

// ClaimStore is a store with the queue's side of ownership. A queue needs one; a store that is merely a client of a service is none,
// since there the queue lives next to the real store.
type ClaimStore interface {
	Store

	// Claim takes the sample for owner (the queue's id). It is idempotent for one owner; ErrConflict names another one.
	// ErrNotFound if the sample is not there in this generation. ErrInvalid if owner is empty.
	Claim(ref Ref, owner string) error

	// MarkDead moves a sample that owner claims to the dead letters, or back. It stays claimed. ErrConflict if owner does not claim it.
	MarkDead(ref Ref, owner string, dead bool) error

	// Unclaim gives the claim up; without pins that frees the sample. Idempotent: nil if the sample is gone or owner does not claim it.
	Unclaim(ref Ref, owner string) error

	// Samples lists what the store holds, in no particular order: for a queue that recovers, and for people.
	Samples(ctx context.Context) ([]SampleInfo, error)

	// OnFreed registers a function that is called, outside the store's locks, after room became free, whoever freed it. Calls may be merged.
	OnFreed(func()) (stop func())
}

// SampleInfo describes a sample in a store.
type SampleInfo struct {
	Ref   Ref
	Owner string // who claims it, or ""
	Dead  bool
	Pins  int
	Put   time.Time
}

// Health is a snapshot of a store's counters. (Upstream's StoreHealth.) Resident samples are the published ones, counted while claimed, pinned or
// never claimed, in logical bytes, and those released but still mapped.
type Health struct {
	ResidentBytes   int64 `json:"resident_bytes"`
	ResidentSamples int64 `json:"resident_samples"`
	ReservedBytes   int64 `json:"reserved_bytes"`
	ReservedSamples int64 `json:"reserved_samples"`
	DeadBytes       int64 `json:"dead_bytes"`    // part of resident: dead letters
	DeadSamples     int64 `json:"dead_samples"`  // likewise
	StagingBytes    int64 `json:"staging_bytes"` // part of reserved: being written now
	PoolBytes       int64 `json:"pool_bytes"`    // kept for recycling, beside resident
	Caps            Caps  `json:"caps"`          // as resolved
}

// UsedBytes is resident + reserved: what caps and marks are compared with.
func (h Health) UsedBytes() int64 { return h.ResidentBytes + h.ReservedBytes }

// UsedSamples is resident + reserved.
func (h Health) UsedSamples() int64 { return h.ResidentSamples + h.ReservedSamples }

// HighWatermarkHit reports whether either use is at or over its high mark: a producer pauses here.
func (h Health) HighWatermarkHit() bool {
	c := h.Caps
	return c.HighWatermarkBytes > 0 && h.UsedBytes() >= c.HighWatermarkBytes || c.HighWatermarkSamples > 0 && h.UsedSamples() >= c.HighWatermarkSamples
}

// LowWatermarkHit reports whether both uses are at or under their low marks: a paused producer goes on here.
func (h Health) LowWatermarkHit() bool {
	c := h.Caps
	return (c.HighWatermarkBytes == 0 || h.UsedBytes() <= c.LowWatermarkBytes) && (c.HighWatermarkSamples == 0 || h.UsedSamples() <= c.LowWatermarkSamples)
}

// Fits reports whether a sample of n bytes fits under the caps now.
func (h Health) Fits(n int64) bool {
	c := h.Caps
	return (c.MaxBytes == 0 || n <= c.MaxBytes-h.UsedBytes()) && (c.MaxSamples == 0 || h.UsedSamples() < c.MaxSamples)
}

// Caps bound what a store holds, and set the marks between which a gate paces its producers. Zero means unset. Marks may be set where their cap is not.
type Caps struct {
	MaxBytes             int64 `json:"max_bytes"`   // hard cap in bytes
	MaxSamples           int64 `json:"max_samples"` // hard cap in samples; at least one of the two caps must be set
	HighWatermarkBytes   int64 `json:"high_watermark_bytes"`
	LowWatermarkBytes    int64 `json:"low_watermark_bytes"`
	HighWatermarkSamples int64 `json:"high_watermark_samples"`
	LowWatermarkSamples  int64 `json:"low_watermark_samples"`
}

// Resolve checks the caps and fills in the marks that are unset: 75 % and 25 % of their cap. Without their cap they stay unset; the low one is then a third of the high one.
func (c Caps) Resolve() (Caps, error) {
	if c.MaxBytes == 0 && c.MaxSamples == 0 {
		return c, &Error{Kind: Invalid, Op: "caps", Detail: "neither max_bytes nor max_samples is set, want at least one", Hint: "a store without a cap fills its disk"}
	}
	if err := resolveMarks("bytes", c.MaxBytes, &c.HighWatermarkBytes, &c.LowWatermarkBytes); err != nil {
		return c, err
	}
	return c, resolveMarks("samples", c.MaxSamples, &c.HighWatermarkSamples, &c.LowWatermarkSamples)
}

func resolveMarks(unit string, limit int64, high, low *int64) error {
	fail := func(field string, v int64, want string) error {
		return &Error{Kind: Invalid, Op: "caps", Subject: field + "_" + unit, Detail: fmt.Sprintf("is %d, want %s", v, want)}
	}
	if limit < 0 || limit >= maxInteger {
		return fail("max", limit, "0 (unset) or more, and less than 2^53")
	}
	most := fmt.Sprintf("1 to max_%s (%d)", unit, limit)
	if limit == 0 {
		switch {
		case *high == 0 && *low == 0:
			return nil
		case *high == 0:
			return fail("low_watermark", *low, "0, since neither high_watermark_"+unit+" nor max_"+unit+" is set")
		}
		limit, most = maxInteger-1, "1 or more, and less than 2^53"
		if *low == 0 {
			*low = *high / 3
		}
	}
	if *high == 0 {
		*high = max(limit-limit/4, 1)
	}
	if *low == 0 {
		*low = min(limit/4, *high-1)
	}
	switch {
	case *high < 1 || *high > limit:
		return fail("high_watermark", *high, most)
	case *low < 0 || *low >= *high:
		return fail("low_watermark", *low, fmt.Sprintf("0 or more and less than high_watermark_%s (%d)", unit, *high))
	}
	return nil
}
