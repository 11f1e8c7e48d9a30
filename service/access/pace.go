package access

import (
	"errors"
	"io"
	"net/http"
	"os"
	"sync"
	"time"
)

// pace moves a connection's deadlines while bytes flow: a client may take as long as its file is big, and may not hold a call by sending nothing, or by taking nothing. A
// deadline that the handler sets itself, through http.ResponseController, counts beside it.
type pace struct {
	c     *http.ResponseController
	stall time.Duration

	mu              sync.Mutex // a handler may set deadlines from other goroutines, to break off
	readBy, writeBy time.Time  // the handler's own
	written         time.Time  // when the deadline for writing was moved last
}

func (p *pace) setRead(t time.Time) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.c.SetReadDeadline(earlier(t, p.readBy))
}

// setWrite moves the deadline for writing; not at every piece, if it has just been moved.
func (p *pace) setWrite(force bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if now := time.Now(); force || now.Sub(p.written) > p.stall/4 {
		p.written = now
		_ = p.c.SetWriteDeadline(earlier(now.Add(p.stall), p.writeBy)) // it fails if the connection is gone, and so will the write
	}
}

// earlier of two times; a zero limit is none.
func earlier(t, limit time.Time) time.Time {
	if !limit.IsZero() && limit.Before(t) {
		return limit
	}
	return t
}

// body is a request's body that has to come.
type body struct {
	io.ReadCloser
	p      *pace
	header http.Header   // of the answer
	budget time.Duration // how long the client may still let us wait; it grows with what it sends
	err    error         // that ended it; the connection's deadline is no longer the body's then
}

// Read fails with os.ErrDeadlineExceeded if the client is too slow.
func (b *body) Read(p []byte) (int, error) {
	if b.err != nil {
		return 0, b.err
	}
	start := time.Now()
	if err := b.p.setRead(start.Add(min(b.p.stall, b.budget))); err != nil { // net/http takes it off at the body's end
		return 0, err
	}
	n, err := b.ReadCloser.Read(p)
	b.budget += time.Duration(n)*(time.Second/minBodyRate) - time.Since(start)
	b.err = err
	if errors.Is(err, os.ErrDeadlineExceeded) {
		b.header.Set("Connection", "close")
	}
	return n, err
}

// writer is an answer that has to be taken.
type writer struct {
	http.ResponseWriter
	p *pace
}

// paced puts a pace on both ways of a call. The body's reader is r.Body afterwards.
func paced(w http.ResponseWriter, r *http.Request, stall time.Duration) *writer {
	p := &pace{c: http.NewResponseController(w), stall: stall}
	if r.Body != http.NoBody {
		r.Body = &body{ReadCloser: r.Body, p: p, header: w.Header(), budget: stall}
	}
	return &writer{w, p}
}

// Unwrap is for http.ResponseController, as the three methods below are.
func (w *writer) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// SetReadDeadline sets the handler's own deadline.
func (w *writer) SetReadDeadline(t time.Time) error {
	w.p.mu.Lock()
	defer w.p.mu.Unlock()
	w.p.readBy = t
	return w.p.c.SetReadDeadline(t)
}

// SetWriteDeadline sets the handler's own deadline.
func (w *writer) SetWriteDeadline(t time.Time) error {
	w.p.mu.Lock()
	defer w.p.mu.Unlock()
	w.p.writeBy, w.p.written = t, time.Time{}
	return w.p.c.SetWriteDeadline(t)
}

// FlushError sends what is buffered.
func (w *writer) FlushError() error {
	w.p.setWrite(false)
	return w.p.c.Flush()
}

// Flush makes it an http.Flusher.
func (w *writer) Flush() {
	_ = w.FlushError() // the next write tells what is wrong
}

func (w *writer) Write(p []byte) (int, error) {
	w.p.setWrite(false)
	return w.ResponseWriter.Write(p)
}

// stretch is how much goes out under one deadline where the kernel copies: a client that takes less than this in StallTime is cut off.
const stretch = 2 << 20

// ReadFrom keeps sendfile, which wants a file or one limit around it, and still moves the deadline.
func (w *writer) ReadFrom(src io.Reader) (n int64, err error) {
	to, ok := w.ResponseWriter.(io.ReaderFrom)
	if !ok {
		return io.Copy(struct{ io.Writer }{w}, src)
	}
	outer, limited := src.(*io.LimitedReader)
	for {
		part := &io.LimitedReader{R: src, N: stretch}
		if limited {
			part.R, part.N = outer.R, min(stretch, outer.N)
		}
		if part.N == 0 {
			return n, nil
		}
		want := part.N
		w.p.setWrite(true)
		m, err := to.ReadFrom(part)
		n += m
		if limited {
			outer.N -= want - part.N
		}
		if err != nil || m < want {
			return n, err
		}
	}
}
