package client

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"sync"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/safetensors"
)

// healthWait is how long Health waits for an answer.
const healthWait = 250 * time.Millisecond

// giveBackTime bounds what is given back without a context of its own.
const giveBackTime = 5 * time.Second

// store is a run's store as a client sees it.
type store struct {
	c    *Client
	run  string
	info *wire.StoreInfo
	at   *site // where its files are on this host, or nil

	mu     sync.Mutex
	closed bool
	rooms  map[string]bool             // reservations made here, which end with Close
	pins   map[sluice.HandleID]*pinned // what this store handed out
	health sluice.Health               // the last that is known
}

// pinned is one Get that has not been given back whole.
type pinned struct {
	ref    sluice.Ref
	held   bool // the handle
	mapped bool // the memory, if it is a mapping
}

var _ sluice.Store = (*store)(nil)

func newStore(c *Client, runID string, info *wire.StoreInfo, h sluice.Health) *store {
	s := &store{c: c, run: runID, info: info, health: h, rooms: map[string]bool{}, pins: map[sluice.HandleID]*pinned{}}
	why := "HTTPOnly is set"
	if !c.httpOnly {
		if s.at, why = findSite(info); s.at != nil && c.target.socket == "" {
			// Only the unix socket tells the service whose file it is offered.
			s.at.stages, why = false, "the service is reached over TCP"
		} else if s.at != nil && !s.at.stages {
			why = "its staging directory " + info.StagingDir + " can't be written"
		}
	}
	switch {
	case s.at == nil:
		c.log.Info("client: samples go over HTTP, since the files of the service can't be mapped", "run", runID, "reason", why)
	case !s.at.stages:
		c.log.Info("client: samples are mapped, and uploaded over HTTP", "run", runID, "reason", why)
	}
	return s
}

func (s *store) URI() string { return s.info.URI }

func (s *store) path(rest string) string { return runPath(s.run, rest) }

func (s *store) fail(kind sluice.Kind, op, subject, format string, args ...any) error {
	return &sluice.Error{Kind: kind, Op: "client: " + op, Subject: subject, Detail: fmt.Sprintf(format, args...)}
}

// enter begins a call that a closed store refuses.
func (s *store) enter(ctx context.Context, op string) error {
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return s.fail(sluice.Closed, op, s.URI(), "the store is closed")
	}
	if err := s.c.open(); err != nil {
		return err
	}
	return context.Cause(ctx)
}

func (s *store) Reserve(ctx context.Context, bytes int64) (sluice.Reservation, error) {
	if bytes < 0 || bytes >= 1<<53 {
		return sluice.Reservation{}, s.fail(sluice.Invalid, "reserve", "", "bytes is %d, want 0 or more and less than 2^53", bytes)
	}
	if err := s.enter(ctx, "reserve"); err != nil {
		return sluice.Reservation{}, err
	}
	r, err := reserve(ctx, s.c, s.run, wire.Reserve{Bytes: []int64{bytes}, Ungated: true, RequestID: s.c.newRequestID()})
	if err != nil {
		return r, err
	}
	s.mu.Lock()
	closed := s.closed
	if !closed {
		s.rooms[r.ID] = true
	}
	s.mu.Unlock()
	if closed {
		ctx, cancel := background(ctx)
		defer cancel()
		return sluice.Reservation{}, errors.Join(s.fail(sluice.Closed, "reserve", s.URI(), "the store was closed meanwhile"), s.unreserve(ctx, r.ID))
	}
	return r, nil
}

// reserve is one slice of a reservation. None, without an error, is the zero Reservation. What an ended context leaves behind is given back.
func reserve(ctx context.Context, c *Client, runID string, r wire.Reserve) (sluice.Reservation, error) {
	var out wire.Reservations
	post := func(ctx context.Context, path string, in, out any) error {
		return c.call(ctx, call{method: http.MethodPost, path: runPath(runID, path), in: in, out: out, wait: r.WaitSeconds.Duration()})
	}
	err := post(ctx, "/reserve", &r, &out)
	if err == nil {
		if len(out.Reservations) == 0 {
			return sluice.Reservation{}, nil
		}
		return sluice.Reservation{ID: out.Reservations[0].ID, Bytes: out.Reservations[0].Bytes}, nil
	}
	if ctx.Err() != nil {
		// It may have been granted, and the answer was not waited for. Asking again with the same id tells; what comes is given back.
		after, cancel := background(ctx)
		defer cancel()
		r.WaitSeconds = 0
		if post(after, "/reserve", &r, &out) == nil && len(out.Reservations) > 0 {
			if gerr := post(after, "/unreserve", &wire.Unreserve{Reservations: []string{out.Reservations[0].ID}}, nil); gerr != nil {
				c.log.Warn("client: can't give back a reservation, which ends by itself", "run", runID, "error", gerr)
			}
		}
	}
	return sluice.Reservation{}, err
}

func (s *store) Unreserve(ctx context.Context, r sluice.Reservation) error {
	if err := s.enter(context.Background(), "unreserve"); err != nil {
		return err
	}
	if r.ID == "" {
		return nil
	}
	ctx, cancel := outlive(ctx)
	defer cancel()
	if err := s.unreserve(ctx, r.ID); err != nil {
		return err
	}
	s.mu.Lock()
	delete(s.rooms, r.ID)
	s.mu.Unlock()
	return nil
}

func (s *store) unreserve(ctx context.Context, ids ...string) error {
	return s.c.call(ctx, call{method: http.MethodPost, path: s.path("/unreserve"), in: &wire.Unreserve{Reservations: ids}})
}

// Put makes ref and file here, and stages the file or uploads it.
func (s *store) Put(ctx context.Context, sample *sluice.Sample, r sluice.Reservation) (sluice.Ref, error) {
	if sample == nil {
		return sluice.Ref{}, s.fail(sluice.Invalid, "put", "", "the sample is nil")
	}
	if err := s.enter(ctx, "put"); err != nil {
		return sluice.Ref{}, err
	}
	ref, layout, err := s.plan(sample)
	if err != nil {
		return sluice.Ref{}, &sluice.Error{Kind: sluice.Invalid, Op: "client: put", Err: err}
	}
	if s.at != nil && s.at.stages {
		err = s.stage(ctx, ref, layout, sample.Features, r)
	} else {
		err = s.upload(ctx, ref, layout, sample.Features, r)
	}
	if err != nil {
		return sluice.Ref{}, err
	}
	s.mu.Lock()
	delete(s.rooms, r.ID)
	s.mu.Unlock()
	return ref, nil
}

func (s *store) plan(sample *sluice.Sample) (sluice.Ref, *safetensors.Layout, error) {
	fields, err := sample.RefFields(s.info.URI, sluice.NewGeneration())
	if err != nil {
		return sluice.Ref{}, nil, err
	}
	ref, err := sluice.NewRef(fields)
	if err != nil {
		return sluice.Ref{}, nil, err
	}
	layoutOf := safetensors.NewLayout
	// What is staged in memory needs checksums only for readers far away. They cost an eighth of the time of the write, and the service, which had to read all of the file first, five times as much.
	if s.info.Checksummed || s.at != nil && s.at.stages {
		layoutOf = safetensors.NewChecksummedLayout
	}
	layout, err := layoutOf(sample.Features, map[string]string{safetensors.RefKey: ref.Canonical()})
	return ref, layout, err
}

// stage writes the file where the service takes it from by its name. Once it is written, the call is as good as done and is not given up with ctx, so that it never ends undecided.
func (s *store) stage(ctx context.Context, ref sluice.Ref, layout *safetensors.Layout, features []sluice.Feature, r sluice.Reservation) (err error) {
	f, name, err := s.stagingFile(ctx, layout.Size())
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.at.remove(name))
		}
	}()
	err = layout.WriteFile(f, 0, features)
	if cerr := f.Close(); err == nil && cerr != nil {
		err = &sluice.Error{Kind: sluice.Unavailable, Op: "client: put", Subject: ref.SampleID(), Err: cerr}
	}
	if err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return err
	}
	ctx, cancel := outlive(ctx)
	defer cancel()
	attempts, err := s.c.do(ctx, call{method: http.MethodPost, path: s.path("/stage"), in: &wire.Stage{File: name, SampleID: ref.SampleID(), Reservation: r.ID, Fields: fieldsOf(ref)}})
	err = s.echo(ctx, ref, attempts, err)
	if attempts > 1 && errors.Is(err, sluice.ErrNotFound) {
		// A service that ends while it takes the file takes it along.
		return &sluice.Error{Kind: sluice.Unavailable, Op: "client: put", Subject: ref.SampleID(), Detail: "the service went away while it took the file, and now it says: " + err.Error(), Hint: "put the sample again"}
	}
	return err
}

// spareFrom is the size from which it is worth a call to ask for a file whose pages are there.
const spareFrom = 4 << 20

// stagingFile opens a file to write a sample into: a freed one's that the service spares, which takes half the time to write, or a fresh one.
// A spare whose name did not arrive here, or that was not staged, stays there until the service sweeps it by its age, after ten minutes.
func (s *store) stagingFile(ctx context.Context, size int64) (f *os.File, name string, err error) {
	if size >= spareFrom {
		var out wire.Spared
		if err := s.c.call(ctx, call{method: http.MethodPost, path: s.path("/spare"), in: &wire.Spare{Bytes: size}, out: &out}); err != nil {
			return nil, "", err
		}
		if out.File != "" {
			if f, err = s.at.openSpare(out.File); f != nil || err != nil {
				return f, out.File, err
			}
		}
	}
	name = newID()
	f, err = s.at.create(name)
	return f, name, err
}

// fieldsOf says which put it is, so that the service knows a repetition before it looks at the file. The file says the rest.
func fieldsOf(ref sluice.Ref) *wire.SampleFields {
	return &wire.SampleFields{Generation: ref.Generation(), Algorithm: string(ref.Algorithm()), NumTokens: ref.NumTokens()}
}

// echo asks, after a refusal of a repeated put, whether the first one did it.
func (s *store) echo(ctx context.Context, ref sluice.Ref, attempts int, err error) error {
	if attempts < 2 || !errors.Is(err, sluice.ErrDuplicate) && !errors.Is(err, sluice.ErrNotFound) && !errors.Is(err, sluice.ErrInvalid) {
		return err
	}
	if _, herr := s.c.do(ctx, call{method: http.MethodHead, path: s.samplePath(ref)}); herr == nil {
		return nil
	}
	return err
}

func (s *store) samplePath(ref sluice.Ref) string { return s.pathOf(ref, "") }

// pathOf is the path of something of a sample.
func (s *store) pathOf(ref sluice.Ref, what string) string {
	return s.path("/samples/"+url.PathEscape(ref.SampleID())+what) + "?generation=" + url.QueryEscape(ref.Generation())
}

// outlive is ctx with some time more once it has ended.
func outlive(ctx context.Context) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	var mu sync.Mutex
	var timer *time.Timer
	stop := context.AfterFunc(ctx, func() {
		mu.Lock()
		defer mu.Unlock()
		timer = time.AfterFunc(giveBackTime, func() { cancel(context.Cause(ctx)) })
	})
	return longer, func() {
		stop()
		mu.Lock()
		if timer != nil {
			timer.Stop()
		}
		mu.Unlock()
		cancel(context.Canceled)
	}
}

// Get pins the sample and maps its file, or fetches it.
func (s *store) Get(ctx context.Context, ref sluice.Ref) (*sluice.Tensors, error) {
	if err := s.enter(ctx, "get"); err != nil {
		return nil, err
	}
	if ref.IsZero() {
		return nil, s.fail(sluice.NotFound, "get", "", "the ref is the zero Ref")
	}
	if ref.StoreURI() != s.info.URI {
		return nil, s.fail(sluice.NotFound, "get", ref.SampleID(), "is in the store %s, this is %s", ref.StoreURI(), s.info.URI)
	}
	id := sluice.NewHandleID()
	p, err := s.pin(ctx, ref, id)
	if err != nil {
		if ctx.Err() != nil {
			s.unpin(ctx, id) // it may have been granted
		}
		return nil, err
	}
	var m *safetensors.Mapping
	var free func() error
	if s.at != nil {
		m, free, err = s.at.load(p.File, p.Size)
	} else if m, err = s.fetch(ctx, ref, id, p); err == nil {
		free = m.Close
	}
	var features []sluice.Feature
	if err == nil {
		if features, err = s.check(ref, m); err != nil {
			err = errors.Join(err, free())
		}
	}
	if err != nil {
		if s.at != nil && s.replaced(ctx, ref) {
			err = s.fail(sluice.NotFound, "get", ref.SampleID(), "was freed while it was opened")
		}
		s.unpin(ctx, id)
		if errors.Is(err, sluice.ErrCorrupt) {
			err = &sluice.Error{Kind: sluice.Corrupt, Op: "client: get", Subject: ref.SampleID(), Err: err}
		}
		return nil, err
	}
	entry := &pinned{ref: ref, held: true, mapped: s.at != nil}
	s.mu.Lock()
	s.pins[id] = entry
	s.mu.Unlock()
	s.c.mu.Lock()
	s.c.pinners[s] = true
	s.c.mu.Unlock()
	handle := sluice.Handle{StoreURI: s.info.URI, SampleID: ref.SampleID(), ID: id}
	return sluice.NewTensors(s, handle, features, func() error { return s.unmap(id, free) }), nil
}

func (s *store) pin(ctx context.Context, ref sluice.Ref, id sluice.HandleID) (*wire.Pinned, error) {
	var p wire.Pinned
	if err := s.c.call(ctx, call{method: http.MethodPost, path: s.path("/pins"), in: &wire.Pin{Ref: ref, Map: s.at != nil, Handle: id.String()}, out: &p}); err != nil {
		return nil, err
	}
	return &p, nil
}

// unpin takes back the pin of a get that failed, which is no release.
func (s *store) unpin(ctx context.Context, id sluice.HandleID) {
	ctx, cancel := background(ctx)
	defer cancel()
	err := s.c.call(ctx, call{method: http.MethodPost, path: s.path("/release"), in: &wire.Release{Handles: []string{id.String()}, Undo: true}})
	if err != nil && !errors.Is(err, sluice.ErrClosed) {
		s.c.log.Warn("client: can't take back a pin, which ends with the session", "run", s.run, "error", err)
	}
}

// replaced reports whether a sample was aborted behind its pin: then its file's name is nobody's, or that of the next sample of its id.
func (s *store) replaced(ctx context.Context, ref sluice.Ref) bool {
	_, err := s.c.do(ctx, call{method: http.MethodHead, path: s.samplePath(ref)})
	return errors.Is(err, sluice.ErrNotFound)
}

// check compares the file with the ref.
func (s *store) check(ref sluice.Ref, m *safetensors.Mapping) ([]sluice.Feature, error) {
	features, err := m.Features(ref.FeatureNames())
	if err != nil {
		return nil, &sluice.Error{Kind: sluice.Corrupt, Op: "client: get", Subject: ref.SampleID(), Err: err}
	}
	if n := len(m.Header().Entries); n != len(features) {
		return nil, s.fail(sluice.Corrupt, "get", ref.SampleID(), "the file has %d features, the ref promises %d", n, len(features))
	}
	if err := ref.CheckFeatures("client: get", features); err != nil {
		return nil, err
	}
	if m.Header().Metadata[safetensors.RefKey] != ref.Canonical() {
		return nil, s.fail(sluice.Corrupt, "get", ref.SampleID(), "the file has another ref in its metadata than the one that was asked for")
	}
	return features, nil
}

// Release gives up the pin, with some time of its own if ctx has ended before, and if the service does not answer within that, when it does again. A mapping that is still open keeps its bytes counted.
func (s *store) Release(ctx context.Context, h sluice.Handle) error {
	if h.StoreURI != s.info.URI || h.ID == (sluice.HandleID{}) {
		return nil
	}
	keep := true // a peer's: it may be mapped there, and the peer will say when it no longer is
	s.mu.Lock()
	p := s.pins[h.ID]
	if p != nil {
		if p.ref.SampleID() != h.SampleID || !p.held {
			s.mu.Unlock()
			return nil
		}
		p.held, keep = false, p.mapped
		if !keep {
			delete(s.pins, h.ID)
		}
	}
	s.mu.Unlock()
	if s.c.isClosed() {
		return nil // it went with the session
	}
	if ctx.Err() != nil {
		var cancel context.CancelFunc
		ctx, cancel = background(ctx)
		defer cancel()
	}
	_, err := s.c.do(ctx, call{method: http.MethodPost, path: s.path("/release"), in: &wire.Release{Handles: []string{h.ID.String()}, Keep: keep}})
	if err != nil && p != nil {
		s.c.owe(s.run, h.ID.String(), keep)
	}
	return err
}

// pinAgain takes the store's pins again. A pin that is there is not taken twice.
func (s *store) pinAgain(ctx context.Context) {
	s.mu.Lock()
	pins := maps.Clone(s.pins)
	s.mu.Unlock()
	for id, p := range pins {
		_, err := s.c.do(ctx, call{method: http.MethodPost, path: s.path("/pins"), in: &wire.Pin{Ref: p.ref, Map: s.at != nil, Handle: id.String()}, patience: time.Second})
		if err != nil {
			if !errors.Is(err, sluice.ErrNotFound) && ctx.Err() == nil { // it was acked meanwhile
				s.c.log.Warn("client: can't take a pin again, whose bytes count no longer", "run", s.run, "sample", p.ref.SampleID(), "error", err)
			}
			continue
		}
		s.mu.Lock()
		held, mapped := p.held, p.mapped
		s.mu.Unlock()
		if !held { // it was given back before, or is given back now
			s.c.pay(s.run, []string{id.String()}, mapped)
		}
	}
}

// unmap is the end of a mapping or, where there is none, of tensors that were fetched.
func (s *store) unmap(id sluice.HandleID, free func() error) error {
	err := free()
	s.mu.Lock()
	p := s.pins[id]
	tell := p != nil && p.mapped && !p.held
	if p != nil {
		p.mapped = false
		if !p.held {
			delete(s.pins, id)
		}
	}
	s.mu.Unlock()
	if tell {
		s.forget(id)
	}
	return err
}

// forget tells the service that a released sample is no longer mapped, now or when it is there again.
func (s *store) forget(id sluice.HandleID) {
	if s.c.isClosed() {
		return // it went with the session
	}
	ctx, cancel := context.WithTimeout(context.Background(), giveBackTime)
	defer cancel()
	_, err := s.c.do(ctx, call{method: http.MethodPost, path: s.path("/release"), in: &wire.Release{Handles: []string{id.String()}}, patience: time.Second})
	if err != nil {
		s.c.owe(s.run, id.String(), false)
	}
}

func (s *store) Abort(ctx context.Context, ref sluice.Ref) error {
	if err := s.enter(context.Background(), "abort"); err != nil {
		return err
	}
	if ref.IsZero() || ref.StoreURI() != s.info.URI {
		return nil
	}
	ctx, cancel := outlive(ctx)
	defer cancel()
	return s.c.call(ctx, call{method: http.MethodPost, path: s.path("/abort"), in: &wire.Abort{Ref: ref}})
}

func (s *store) GC(ctx context.Context) (int, error) {
	if err := s.enter(ctx, "gc"); err != nil {
		return 0, err
	}
	var out wire.Collected
	err := s.c.call(ctx, call{method: http.MethodPost, path: s.path("/gc"), out: &out})
	return out.Freed, err
}

// Health makes one attempt to ask, in bounded time.
func (s *store) Health() sluice.Health {
	ctx, cancel := context.WithTimeout(context.Background(), s.c.healthWait)
	defer cancel()
	var h sluice.Health
	err := s.c.open()
	if err == nil {
		err = s.c.attempt(ctx, &call{method: http.MethodGet, path: s.path("/health"), out: &h}, s.c.newRequestID(), nil)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		s.health = h
	}
	return s.health
}

func (s *store) Close() error {
	s.mu.Lock()
	var rooms []string
	if !s.closed {
		s.closed = true
		for id := range s.rooms {
			rooms = append(rooms, id)
		}
	}
	s.mu.Unlock()
	if len(rooms) == 0 || s.c.isClosed() { // they went with the session
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), giveBackTime)
	defer cancel()
	for len(rooms) > 0 {
		n := min(len(rooms), wire.MaxBatch)
		if err := s.unreserve(ctx, rooms[:n]...); err != nil {
			return err
		}
		rooms = rooms[n:]
	}
	return nil
}
