package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
)

const (
	headBytes = 64 << 10 // of a file, fetched first: its header, and all of a small sample
	leastPart = 8 << 20  // bytes that are worth a connection of their own
	stall     = 20 * time.Second
)

// fetch downloads a pinned file into memory of its own.
func (s *store) fetch(ctx context.Context, ref sluice.Ref, id sluice.HandleID, size int64) (*safetensors.Mapping, error) {
	d := &download{
		c: s.c, ctx: ctx, path: s.samplePath(ref), sample: ref.SampleID(), size: size,
		repin: func(ctx context.Context) error { _, err := s.pin(ctx, ref, id); return err },
	}
	return safetensors.Read(d, size)
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
	id := newID()
	var pause backoff
	since := time.Now()
	for done := 0; ; {
		n, err := d.stream(ctx, id, p[done:], off+int64(done))
		done += n
		if err == nil {
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

// stream fills p from one response, and says how far it came.
func (d *download) stream(ctx context.Context, id string, p []byte, off int64) (n int, err error) {
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
		data, err := readAll(resp)
		if err != nil {
			return 0, err
		}
		return 0, refusal(resp, data)
	}
	if strings.TrimSpace(resp.Header.Get("Content-Encoding")) != "" {
		return 0, noService(resp, "a content encoding")
	}
	for n < len(p) {
		m, err := resp.Body.Read(p[n:])
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
