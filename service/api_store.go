package service

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/service/access"
	"github.com/sluice-ml/sluice/store/dirstore"
)

// storeCalls are the calls of the data plane.
func (s *Service) storeCalls(a *api) {
	stream(a, operation{method: http.MethodPut, path: "/v1/runs/{run}/samples/{sample_id}", id: "upload", tag: "producers", summary: "Upload a sample as a safetensors file", roles: producers, status: http.StatusCreated, hot: true,
		text: "The body is a safetensors file that carries its ref in its metadata, or one that the header `Sluice-Sample` describes. Nothing of it is visible before it is whole and right. The sample waits for its commit as long as the reservation would have, or its session " +
			"lasts, and is then freed. An upload of the same generation may be repeated.",
		body: binary, params: []param{{name: "reservation", in: "query", text: "Id of the reservation that it uses; without one it goes by the caps."},
			{name: wire.SampleHeader, in: "header", text: "What the file does not say itself: a JSON object, see the schema SampleFields."},
			{name: wire.ChecksumTrailer, in: "header", text: "Sent as a trailer: crc32c of the file's data section, eight hexadecimal digits."}}},
		describe[wire.Stored](false), s.upload)
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/stage", id: "stage", tag: "producers", summary: "Make a sample of a file in the staging directory", roles: producers, hot: true, status: http.StatusCreated,
		text: "For producers on the same host, over the unix socket: the file must be the caller's own. It leaves the directory."},
		func(ctx context.Context, c *call, in *wire.Stage) (*wire.Stored, error) {
			ref, err := s.takeStaged(ctx, c, in)
			return &wire.Stored{Ref: ref}, err
		})
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/spare", id: "spare", tag: "producers", summary: "Take a freed sample's file to write the next one over", roles: producers, hot: true,
		text: "For producers on the same host, over the unix socket, that stage: a file whose pages are there is written nearly twice as fast as a fresh one. It lies in the staging directory, has the size that was asked for, and is the service's user's. " +
			"Lock it with flock(LOCK_EX | LOCK_NB) before writing, and take a fresh one if that fails. What is not staged goes as other old files there do."},
		func(ctx context.Context, c *call, in *wire.Spare) (*wire.Spared, error) {
			if access.CallerOf(ctx).UID != os.Geteuid() {
				return &wire.Spared{}, nil // who could not write to it
			}
			file, err := c.run.spare(ctx, in.Bytes)
			return &wire.Spared{File: file}, err
		})
	whole := param{name: "generation", in: "query", text: "Of the ref.", required: true}
	fileHeaders := []param{{name: "ETag", text: "The generation."}, {name: "Accept-Ranges", text: "bytes"}}
	stream(a, operation{method: http.MethodGet, path: "/v1/runs/{run}/samples/{sample_id}", id: "read-sample", tag: "consumers", summary: "Read a sample's file, or ranges of it", roles: both, hot: true,
		text: "A safetensors file. Range, If-Range and HEAD work as usual.", params: []param{whole}, raw: []string{binary}, headers: fileHeaders}, nil, s.readSample)
	stream(a, operation{method: http.MethodGet, path: "/v1/runs/{run}/samples/{sample_id}/features/{name}", id: "read-feature", tag: "consumers", summary: "Read the bytes of one feature, or ranges of them", roles: both, hot: true,
		text: "Little-endian, in C order.", params: []param{whole}, raw: []string{binary},
		headers: append(fileHeaders, param{name: "Sluice-Shape", text: "The axes, with commas between."}, param{name: "Sluice-Dtype", text: "Torch's name of the element type."})}, nil, s.readFeature)

	handle(a, operation{method: http.MethodGet, path: "/v1/runs/{run}/samples/{sample_id}/checksums", id: "checksums", tag: "consumers", summary: "Checksums of a sample's features", roles: both, hot: true,
		text: "Of a large sample in memory that was staged they are computed by the first call, which takes as long as reading it; so are those of the kind crc32 of any sample, of bytes that agree with their crc32c, or else the answer is `corrupt`. " +
			"They are the same for as long as it is there, so the call may go beside those that read it.", params: []param{whole, {name: "kind", in: "query", text: "crc32c (the default), or crc32: the one of zlib."}}}, s.checksums)

	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/pins", id: "pin", tag: "consumers", summary: "Pin a sample: its bytes stay until it is released", roles: both, hot: true}, s.pin)
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/release", id: "release", tag: "consumers", summary: "Give up pins", roles: both, hot: true},
		func(ctx context.Context, c *call, in *wire.Release) (*nothing, error) {
			ids := make([]sluice.HandleID, len(in.Handles))
			for i, h := range in.Handles {
				var err error
				if ids[i], err = handleID(h); err != nil {
					return nil, err // before any of them is given up
				}
			}
			for _, id := range ids {
				p := c.run.findPin(id)
				if p == nil {
					continue
				}
				giveBack := func() error { return p.giveBack(in.Keep) }
				if in.Undo {
					giveBack = p.loan.Drop
				}
				if err := giveBack(); err != nil {
					return nil, err
				}
				if !in.Keep || in.Undo || !p.mapped {
					c.run.unpin(id)
				}
			}
			return nil, nil
		})
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/abort", id: "abort", tag: "producers", summary: "Free a sample that was never committed", roles: producers, text: "`conflict` if it was. An upload of it that is under way is waited for: whoever broke it off leaves nothing behind by this call."},
		func(ctx context.Context, c *call, in *wire.Abort) (*nothing, error) {
			err := c.run.arrived(waitedAlready, in.Ref.SampleID())
			if errors.Is(err, errWaited) {
				until, end, ok := access.Wait(ctx)
				if !ok {
					return nil, busy
				}
				defer end()
				err = c.run.arrived(until, in.Ref.SampleID())
			}
			if err == nil {
				err = c.run.store.Abort(ctx, in.Ref)
			}
			if err == nil && in.Ref.StoreURI() == c.run.store.URI() { // a ref of another store is none of ours, and frees nothing
				c.run.committed(in.Ref)
			}
			return nil, err
		})
	handle(a, operation{method: http.MethodPost, path: "/v1/runs/{run}/gc", id: "gc", tag: "runs", summary: "Free what nobody owns", roles: both},
		func(ctx context.Context, c *call, _ *nothing) (*wire.Collected, error) {
			n, err := c.run.store.GC(ctx)
			return &wire.Collected{Freed: n}, err
		})
	handle(a, operation{method: http.MethodGet, path: "/v1/runs/{run}/health", id: "health", tag: "runs", summary: "Counters of the run's store", hot: true},
		func(ctx context.Context, c *call, _ *nothing) (*sluice.Health, error) {
			h := c.run.q.Health()
			return &h, nil
		})
}

const binary = "application/octet-stream"

// query is a parameter that must be there.
func (c *call) query(name string) (string, error) {
	v := c.r.URL.Query().Get(name)
	if v == "" {
		return "", &sluice.Error{Kind: sluice.Invalid, Op: "query", Subject: name, Detail: "is missing"}
	}
	return v, nil
}

// sampleID is the one in the path.
func (c *call) sampleID() (string, error) {
	id := c.r.PathValue("sample_id")
	return id, sluice.ValidateID(id)
}

// sample is the one in the path, in the generation that the query names.
func (c *call) sample() (id, generation string, err error) {
	if id, err = c.sampleID(); err != nil {
		return "", "", err
	}
	if generation, err = c.query("generation"); err != nil {
		return "", "", err
	}
	return id, generation, sluice.ValidateID(generation)
}

// tied lets f run as long as the run lasts: when that is to be let go, the connection's deadlines end it. They are taken back afterwards.
func (c *call) tied(f func(rc *http.ResponseController) error) error {
	rc := http.NewResponseController(c.w)
	stop := context.AfterFunc(c.run.tie.Load(), func() {
		past := time.Unix(1, 0)
		_ = rc.SetReadDeadline(past) // who can't set it ends by itself
		_ = rc.SetWriteDeadline(past)
	})
	defer stop()
	return f(rc)
}

func (s *Service) upload(ctx context.Context, c *call) error {
	id, err := c.sampleID()
	if err != nil {
		return err
	}
	var f wire.SampleFields
	if h := c.r.Header.Get(wire.SampleHeader); h != "" {
		if err := decodeJSON([]byte(h), &f); err != nil {
			return err
		}
	}
	in, err := incoming(c.run, id, &f)
	if err != nil {
		return err
	}
	// Go shows the trailers' names before the body was read, and their values behind it.
	if _, announced := c.r.Trailer[wire.ChecksumTrailer]; announced {
		in.Checksum = func() (uint32, bool) {
			sum, err := strconv.ParseUint(c.r.Trailer.Get(wire.ChecksumTrailer), 16, 32)
			return uint32(sum), err == nil
		}
	}
	res := c.run.use(c.r.URL.Query().Get("reservation"))
	var room sluice.Reservation
	if res != nil {
		room = res.Reservation
	}
	defer c.run.arrive(id)()
	body := &body{r: c.r.Body}
	var ref sluice.Ref
	tie := c.run.tie.Load()
	err = c.tied(func(*http.ResponseController) error {
		ref, err = c.run.store.Receive(ctx, body, c.r.ContentLength, in, room)
		return err
	})
	if err := s.stored(c, res, ref, err); err != nil {
		switch {
		case tie.Err() != nil:
			if why := c.run.why.Load(); why != nil {
				return why
			}
			return errStopping
		case body.err != nil:
			return bodyError(body.err) // whatever the store made of it, it is the caller's
		}
		return err
	}
	return c.encode(http.StatusCreated, &wire.Stored{Ref: ref})
}

// incoming is what a caller says of a file.
func incoming(r *run, id string, f *wire.SampleFields) (dirstore.Incoming, error) {
	if f == nil {
		f = &wire.SampleFields{}
	}
	runID := f.RunID
	switch {
	case r.spec.Mixed: // without one, the file's ref says it
	case runID != "" && runID != r.id:
		return dirstore.Incoming{}, &sluice.Error{Kind: sluice.Invalid, Op: "sample", Subject: id, Detail: fmt.Sprintf("run_id is %q, want %q: the run is not mixed", plain(runID), r.id)}
	default:
		runID = r.id
	}
	return dirstore.Incoming{SampleID: id, RunID: runID, Generation: f.Generation, Algorithm: sluice.Algorithm(f.Algorithm), SchemaVersion: f.SchemaVersion, NumTokens: f.NumTokens,
		TargetModelVersion: f.TargetModelVersion, DraftWeightVersion: f.DraftWeightVersion, Attributes: f.Attributes, Features: f.Features}, nil
}

// body remembers why it could not be read.
type body struct {
	r   io.Reader
	err error
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if err != nil && err != io.EOF {
		b.err = err
	}
	return n, err
}

// stored does what is to be done after a sample came in, or did not.
func (s *Service) stored(c *call, res *reservation, ref sluice.Ref, err error) error {
	c.run.used(res, err == nil)
	if err != nil {
		return err
	}
	expires := s.now().Add(s.opts.ReservationTime)
	if res != nil {
		expires = res.expires
	}
	c.run.uploaded(ref, c.session, expires)
	if !c.session.touches(c.run) {
		return s.sessionEnded(c)
	}
	return nil
}

func (s *Service) takeStaged(ctx context.Context, c *call, in *wire.Stage) (sluice.Ref, error) {
	uid := access.CallerOf(ctx).UID
	if uid < 0 {
		return sluice.Ref{}, &sluice.Error{Kind: sluice.Denied, Op: "stage", Subject: in.File, Detail: "files are staged over the unix socket only, where the kernel says whose they are", Hint: "upload the sample instead"}
	}
	res := c.run.use(in.Reservation)
	var room sluice.Reservation
	if res != nil {
		room = res.Reservation
	}
	defer c.run.arrive(in.SampleID)()
	ref, err := c.run.adopt(ctx, in, uid, room)
	return ref, s.stored(c, res, ref, err)
}

func handleID(text string) (id sluice.HandleID, err error) {
	if n, err := hex.Decode(id[:], []byte(text)); len(text) != 2*len(id) || err != nil || n != len(id) {
		return id, &sluice.Error{Kind: sluice.Invalid, Op: "handle", Subject: plain(text), Detail: "wants 32 hexadecimal digits"}
	}
	return id, nil
}

func (s *Service) pin(ctx context.Context, c *call, in *wire.Pin) (*wire.Pinned, error) {
	id := sluice.NewHandleID()
	if in.Handle != "" {
		var err error
		if id, err = handleID(in.Handle); err != nil {
			return nil, err
		}
	}
	p := c.run.findPin(id)
	if p == nil {
		if err := c.run.roomToPin(); err != nil {
			return nil, err
		}
		loan, err := c.run.store.Lend(ctx, in.Ref, in.Map)
		if err != nil {
			return nil, err
		}
		p = &pin{id: id, loan: loan, mapped: in.Map, session: c.session}
		if p.session == nil {
			p.expires = s.now().Add(s.opts.ReservationTime)
		}
		if known := c.run.pinned(p); known != nil { // the same call, twice at once
			if err := p.giveBack(false); err != nil {
				return nil, err
			}
			p = known
		}
	}
	if p.loan.Handle().SampleID != in.Ref.SampleID() || p.mapped != in.Map {
		return nil, &sluice.Error{Kind: sluice.Conflict, Op: "pin", Subject: in.Ref.SampleID(), Detail: "the handle is that of another pin"}
	}
	if !c.session.touches(c.run) {
		return nil, s.sessionEnded(c)
	}
	w := &wire.Pinned{Handle: id.String(), File: p.loan.Name(), Size: p.loan.Size()}
	if !in.Map && (p.loan.Summed() && in.Kind != wire.CRC32 || p.loan.Size() <= sumAtOnce) {
		sums, err := sumsOf(ctx, p.loan, in.Kind)
		if err != nil {
			return nil, err
		}
		w.Checksums = encodeSums(sums)
	}
	return w, nil
}

// sumAtOnce is the size up to which checksums are computed within the pin: that takes less than another call.
const sumAtOnce = 1 << 20

func encodeSums(sums map[string]uint32) map[string]string {
	m := make(map[string]string, len(sums))
	for name, sum := range sums {
		m[name] = fmt.Sprintf("%08x", sum)
	}
	return m
}

func (s *Service) checksums(ctx context.Context, c *call, _ *nothing) (*wire.Checksums, error) {
	id, generation, err := c.sample()
	if err != nil {
		return nil, err
	}
	kind := c.r.URL.Query().Get("kind")
	if err := wire.CheckKind(kind); err != nil {
		return nil, err
	}
	if kind == "" {
		kind = wire.CRC32C
	}
	loan, err := c.run.lend(ctx, id, generation)
	if err != nil {
		return nil, err
	}
	sums, err := sumsOf(ctx, loan, kind)
	if err := errors.Join(err, loan.Drop()); err != nil {
		return nil, err
	}
	return &wire.Checksums{Kind: kind, Checksums: encodeSums(sums)}, nil
}

// sumsOf are the checksums of a kind.
func sumsOf(ctx context.Context, loan *dirstore.Loan, kind string) (map[string]uint32, error) {
	if kind == wire.CRC32 {
		return loan.IEEE(ctx)
	}
	return loan.Checksums(ctx)
}

// reading is a sample's file that is being read: pinned for the time, and with a position of its own.
type reading struct {
	*os.File
	loan *dirstore.Loan
}

func (r *run) lend(ctx context.Context, id, generation string) (*dirstore.Loan, error) {
	ref, err := r.store.Find(ctx, id, generation)
	if err != nil {
		return nil, err
	}
	return r.store.Lend(ctx, ref, false)
}

func (r *run) read(ctx context.Context, id, generation string) (*reading, error) {
	loan, err := r.lend(ctx, id, generation)
	if err != nil {
		return nil, err
	}
	// Opened once more, since the loan's own position must not be moved; by descriptor, since the name may be another sample's by now.
	f, err := os.Open("/proc/self/fd/" + strconv.Itoa(int(loan.File().Fd())))
	if err != nil {
		return nil, errors.Join(&sluice.Error{Kind: kindOfOS(err), Op: "read", Subject: id, Detail: "its file can't be opened", Err: err}, loan.Drop())
	}
	return &reading{f, loan}, nil
}

func (r *reading) close() error { return errors.Join(r.Close(), r.loan.Drop()) }

// section is a part of a file that http.ServeContent can serve. It shows its descriptor, whose position is its own, so that the kernel can send the bytes itself.
type section struct {
	f      *os.File
	off, n int64
}

func (s *section) Read(p []byte) (int, error) {
	at, err := s.f.Seek(0, io.SeekCurrent)
	if err != nil {
		return 0, err
	}
	left := s.off + s.n - at
	if left <= 0 {
		return 0, io.EOF
	}
	return s.f.Read(p[:min(int64(len(p)), left)])
}

func (s *section) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		at, err := s.f.Seek(0, io.SeekCurrent)
		if err != nil {
			return 0, err
		}
		offset += at - s.off
	case io.SeekEnd:
		offset += s.n
	}
	if offset < 0 {
		return 0, errors.New("a seek before the start")
	}
	_, err := s.f.Seek(s.off+offset, io.SeekStart)
	return offset, err
}

func (s *section) SyscallConn() (syscall.RawConn, error) { return s.f.SyscallConn() }

func (s *Service) readSample(ctx context.Context, c *call) error {
	return s.read(ctx, c, func(r *reading) (*section, error) { return &section{r.File, 0, r.loan.Size()}, nil })
}

func (s *Service) readFeature(ctx context.Context, c *call) error {
	name := c.r.PathValue("name")
	return s.read(ctx, c, func(r *reading) (*section, error) {
		e, ok := r.loan.Header().Find(name)
		if !ok {
			return nil, &sluice.Error{Kind: sluice.NotFound, Op: "feature", Subject: plain(name), Detail: "the sample has no such feature"}
		}
		shape := ""
		for i, n := range e.Spec.Shape {
			if i > 0 {
				shape += ","
			}
			shape += strconv.FormatInt(n, 10)
		}
		h := c.w.Header()
		h.Set("Sluice-Shape", shape)
		h.Set("Sluice-Dtype", e.Spec.DType.String())
		return &section{r.File, r.loan.Header().DataStart + e.Begin, e.Bytes()}, nil
	})
}

// slowest is the rate, in bytes a second, below which a reader is given up, beyond a start of half a minute.
const slowest = 1 << 20

func (s *Service) read(ctx context.Context, c *call, part func(*reading) (*section, error)) error {
	id, generation, err := c.sample()
	if err != nil {
		return err
	}
	r, err := c.run.read(ctx, id, generation)
	if err != nil {
		return err
	}
	done := sync.OnceFunc(func() {
		if err := r.close(); err != nil {
			s.log.Warn("a sample that was read can't be given back", "run", c.run.id, "sample", id, "err", err)
		}
	})
	defer done()
	sec, err := part(r)
	if err != nil {
		return err
	}
	if _, err := sec.Seek(0, io.SeekStart); err != nil {
		return err
	}
	return c.tied(func(rc *http.ResponseController) error {
		// A reader that does not read must not hold the sample for ever.
		if err := rc.SetWriteDeadline(time.Now().Add(30*time.Second + time.Duration(sec.n/slowest)*time.Second)); err == nil {
			defer func() { _ = rc.SetWriteDeadline(time.Time{}) }() // the connection serves other calls after this one
		}
		h := c.header()
		h.Set("Content-Type", binary)
		h.Set("ETag", `"`+generation+`"`)
		w := &served{ResponseWriter: c.w, c: c, done: done}
		http.ServeContent(w, c.r, "", time.Time{}, sec)
		return w.err
	})
}

// served is the writer of http.ServeContent: it turns its refusals, which come in plain text, into problems, and leaves the way open for the kernel to send files itself.
type served struct {
	http.ResponseWriter
	c    *call
	done func() // nothing more is read
	err  error
}

func (w *served) WriteHeader(status int) {
	switch {
	case w.err != nil || w.c.status != 0:
	case status == http.StatusRequestedRangeNotSatisfiable:
		w.err = httpProblem(status, wire.CodeRange, "Bad range", "the range %q can't be served: %s", plain(w.c.r.Header.Get("Range")), w.Header().Get("Content-Range"))
	case status == http.StatusPreconditionFailed:
		w.err = httpProblem(status, wire.CodePrecondition, "Precondition failed", "the sample is not the one that the call names: its ETag is %s", w.Header().Get("Etag"))
	case status >= 400:
		w.err = fmt.Errorf("serve content: status %d", status)
	default:
		w.c.begin(status)
	}
}

func (w *served) Write(p []byte) (int, error) {
	if w.err != nil {
		return len(p), nil //nolint:nilerr // these are its own words for the error that we have noted
	}
	if w.c.status == 0 {
		w.c.begin(http.StatusOK)
	}
	return w.ResponseWriter.Write(p)
}

func (w *served) ReadFrom(r io.Reader) (int64, error) {
	if w.c.status == 0 {
		w.c.begin(http.StatusOK)
	}
	l, ok := r.(*io.LimitedReader)
	if ok {
		_, ok = l.R.(*section)
	}
	if !ok { // several ranges come through a pipe
		return io.Copy(w.ResponseWriter, r)
	}
	// The sample is let go before its last bytes are sent. Who has all of them may release it at once on another connection, and then finds it free.
	last := make([]byte, min(l.N, lastBytes))
	l.N -= int64(len(last))
	var n int64
	if l.N > 0 { // by the kernel
		var err error
		if n, err = io.Copy(w.ResponseWriter, l); err != nil || l.N > 0 {
			return n, err
		}
	}
	if _, err := io.ReadFull(l.R, last); err != nil {
		return n, err
	}
	w.done()
	m, err := w.ResponseWriter.Write(last)
	return n + int64(m), err
}

// lastBytes are sent from memory.
const lastBytes = 4 << 10

func (w *served) Unwrap() http.ResponseWriter { return w.ResponseWriter }
