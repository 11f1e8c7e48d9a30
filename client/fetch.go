package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/httpcall"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/safetensors"
)

const (
	headBytes = 64 << 10  // of a file, fetched first: its header, and all of a small sample
	leastPart = 8 << 20   // bytes that are worth a connection of their own
	readBytes = 512 << 10 // are read, and then summed while the processor's cache has them
	stall     = 20 * time.Second
)

// fetch downloads a pinned file into memory of its own, and compares it with its checksums. If the pin came without them, the service computes them meanwhile.
func (s *store) fetch(ctx context.Context, ref sluice.Ref, id sluice.HandleID, p *wire.Pinned) (m *safetensors.Mapping, err error) {
	g, ctx := errgroup.WithContext(ctx)
	sums := wire.Checksums{Checksums: p.Checksums}
	if sums.Checksums == nil {
		g.Go(func() error {
			return s.c.call(ctx, call{method: http.MethodGet, path: s.pathOf(ref, "/checksums"), out: &sums})
		})
	}
	d := &download{
		c: s.c, ctx: ctx, path: s.samplePath(ref), sample: ref.SampleID(), size: p.Size,
		repin: func(ctx context.Context) error { _, err := s.pin(ctx, ref, id); return err },
	}
	g.Go(func() (err error) { m, err = d.read(); return err })
	if err := g.Wait(); err != nil {
		return nil, err
	}
	return m, d.check(sums.Checksums)
}

// download is a file of the service as an io.ReaderAt.
type download struct {
	c            *Client
	ctx          context.Context
	path, sample string
	size         int64
	head         []byte
	// repin takes the pin again, which a service that was restarted has lost. It waits for the service.
	repin func(context.Context) error

	header *safetensors.Header // once it was read
	mu     sync.Mutex
	summed []summed // what came behind the header
}

func (d *download) read() (*safetensors.Mapping, error) {
	h, err := safetensors.ReadHeader(d, d.size)
	if err != nil {
		return nil, err
	}
	d.header = h
	return safetensors.ReadData(d, h)
}

// check compares the checksums of what came with those that the service gives.
func (d *download) check(want map[string]string) error {
	slices.SortFunc(d.summed, func(a, b summed) int { return cmp.Compare(a.at, b.at) })
	sums := make(map[string]uint32, len(d.header.Entries))
	for _, s := range d.summed {
		sums[s.feature] = safetensors.CombineChecksums(sums[s.feature], s.sum, s.n)
	}
	for i := range d.header.Entries {
		name := d.header.Entries[i].Name
		w, ok := want[name]
		if !ok {
			return &sluice.Error{Kind: sluice.Corrupt, Op: "client: get", Subject: d.sample, Detail: fmt.Sprintf("the service gave no checksum of the feature %q", name)}
		}
		if got := fmt.Sprintf("%08x", sums[name]); got != w {
			return &sluice.Error{Kind: sluice.Corrupt, Op: "client: get", Subject: d.sample, Detail: fmt.Sprintf("the feature %q has the crc32c %s, want %s", name, got, w)}
		}
	}
	return nil
}

// summed is the checksum of n bytes in a row, at an offset in the file, all of one feature.
type summed struct {
	at, n   int64
	feature string
	sum     uint32
}

// tally sums bytes as they come, those of each feature by themselves.
type tally struct {
	rest   []safetensors.Entry // from the one on that is summed now
	start  int64               // of the data, in the file
	at     int64               // of the next byte, in the file
	summed []summed
}

// tally begins at an offset in the file. Before the header is known there is nothing to sum.
func (d *download) tally(at int64) *tally {
	t := &tally{at: at}
	if d.header != nil {
		t.start, t.rest = d.header.DataStart, d.header.Entries
	}
	return t
}

func (t *tally) add(p []byte) {
	for len(t.rest) > 0 && len(p) > 0 {
		e := &t.rest[0]
		n := min(t.start+e.End-t.at, int64(len(p)))
		if n <= 0 {
			t.rest = t.rest[1:]
			continue
		}
		if i := len(t.summed) - 1; i < 0 || t.summed[i].feature != e.Name {
			t.summed = append(t.summed, summed{at: t.at, feature: e.Name})
		}
		s := &t.summed[len(t.summed)-1]
		s.sum, s.n = safetensors.UpdateChecksum(s.sum, p[:n]), s.n+n
		t.at, p = t.at+n, p[n:]
	}
}

func (d *download) keep(t *tally) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.summed = append(d.summed, t.summed...)
}

func (d *download) ReadAt(p []byte, off int64) (n int, err error) {
	if d.head == nil {
		head := make([]byte, min(d.size, headBytes))
		if err := d.part(d.ctx, head, 0); err != nil {
			return 0, err
		}
		d.head = head
	}
	if off < int64(len(d.head)) {
		n = copy(p, d.head[off:])
		t := d.tally(off)
		t.add(p[:n])
		d.keep(t)
	}
	if rest := min(int64(len(p)), d.size-off); rest > int64(n) {
		if err := d.parts(p[n:rest], off+int64(n)); err != nil {
			return 0, err
		}
		n = int(rest)
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// parts fills p by several connections at once, each with its own piece.
func (d *download) parts(p []byte, off int64) error {
	g, ctx := errgroup.WithContext(d.ctx)
	piece := (len(p) + d.c.ranges - 1) / d.c.ranges
	for piece = max(piece, leastPart); len(p) > 0; {
		n := min(piece, len(p))
		part, at := p[:n], off
		g.Go(func() error { return d.part(ctx, part, at) })
		p, off = p[n:], off+int64(n)
	}
	return g.Wait()
}

// part fills p, going on where a connection broke.
func (d *download) part(ctx context.Context, p []byte, off int64) error {
	id := d.c.newRequestID()
	t := d.tally(off)
	var pause backoff
	since := time.Now()
	for done := 0; ; {
		n, err := d.stream(ctx, id, p[done:], off+int64(done), t)
		done += n
		if err == nil {
			d.keep(t)
			return nil
		}
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		var l *lost
		if !errors.As(err, &l) {
			return err
		}
		if n > 0 {
			pause, since = backoff{}, time.Now()
		}
		if waited := time.Since(since); waited >= d.c.patience {
			return d.c.unavailable(l.err, waited)
		}
		if err := pause.wait(ctx); err != nil {
			return err
		}
		if err := d.repin(ctx); err != nil {
			return err
		}
	}
}

// stream fills p from one response, and says how far it came, and t what that was.
func (d *download) stream(ctx context.Context, id string, p []byte, off int64, t *tally) (n int, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := time.AfterFunc(stall, func() { cancel(fmt.Errorf("no byte came for %v", stall)) })
	defer watch.Stop()
	req, err := d.c.request(ctx, http.MethodGet, d.path, id)
	if err != nil {
		return 0, err
	}
	req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", off, off+int64(len(p))-1))
	resp, err := d.c.http.Do(req)
	if err != nil {
		return 0, &lost{err}
	}
	defer resp.Body.Close() //nolint:errcheck // it has been read, or is given up
	switch resp.StatusCode {
	case http.StatusPartialContent:
		if want := fmt.Sprintf("bytes %d-%d/%d", off, off+int64(len(p))-1, d.size); resp.Header.Get("Content-Range") != want {
			return 0, &sluice.Error{Kind: sluice.Corrupt, Op: "client: get", Subject: d.sample, Detail: fmt.Sprintf("the service sent %q, want %q", resp.Header.Get("Content-Range"), want)}
		}
	case http.StatusOK:
		if off != 0 || resp.ContentLength != d.size {
			return 0, &sluice.Error{Kind: sluice.Corrupt, Op: "client: get", Subject: d.sample, Detail: fmt.Sprintf("the service sent all of %d bytes, want bytes %d to %d of %d", resp.ContentLength, off, off+int64(len(p)), d.size)}
		}
	default:
		a, err := answered(resp)
		if err != nil {
			return 0, err
		}
		return 0, refusal(req.Method, d.path, a)
	}
	if strings.TrimSpace(resp.Header.Get("Content-Encoding")) != "" {
		return 0, noService(d.path, &httpcall.Answer{StatusCode: resp.StatusCode}, "a content encoding")
	}
	for n < len(p) {
		m, err := resp.Body.Read(p[n:min(len(p), n+readBytes)])
		t.add(p[n : n+m])
		n += m
		if n == len(p) {
			break
		}
		if err != nil {
			return n, &lost{err}
		}
		watch.Reset(stall)
	}
	// The next read finds the end, which lets the connection be used again.
	_, _ = resp.Body.Read(make([]byte, 1))
	return n, nil
}
