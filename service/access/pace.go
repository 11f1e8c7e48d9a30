package access

import (
	"errors"
	"io"
	"net/http"
	"os"
	"time"
)

// body is a request's body whose deadline moves while bytes flow: a client may take as long as its file is big, and may not hold a call by sending nothing, or next to nothing.
type body struct {
	io.ReadCloser
	w      http.ResponseWriter
	c      *http.ResponseController
	stall  time.Duration
	budget time.Duration // how long the client may still let us wait; it grows with what it sends
}

func pacedBody(w http.ResponseWriter, b io.ReadCloser, stall time.Duration) *body {
	return &body{ReadCloser: b, w: w, c: http.NewResponseController(w), stall: stall, budget: stall}
}

// Read fails with os.ErrDeadlineExceeded if the client is too slow.
func (b *body) Read(p []byte) (int, error) {
	start := time.Now()
	if err := b.c.SetReadDeadline(start.Add(min(b.stall, b.budget))); err != nil { // net/http takes it off at the body's end
		return 0, err
	}
	n, err := b.ReadCloser.Read(p)
	b.budget += time.Duration(n)*(time.Second/minBodyRate) - time.Since(start)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		b.w.Header().Set("Connection", "close")
	}
	return n, err
}

// writer is the answer's way out; its deadline moves while the client takes bytes.
type writer struct {
	http.ResponseWriter
	c     *http.ResponseController
	stall time.Duration
	moved time.Time
}

func pacedWriter(w http.ResponseWriter, stall time.Duration) *writer {
	return &writer{ResponseWriter: w, c: http.NewResponseController(w), stall: stall}
}

// Unwrap is for http.ResponseController.
func (w *writer) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *writer) move() {
	if now := time.Now(); now.Sub(w.moved) > w.stall/4 {
		w.moved = now
		_ = w.c.SetWriteDeadline(now.Add(w.stall)) // it fails if the connection is gone, and so will the write
	}
}

func (w *writer) Write(p []byte) (int, error) {
	w.move()
	return w.ResponseWriter.Write(p)
}

// FlushError sends what is buffered.
func (w *writer) FlushError() error {
	w.move()
	return w.c.Flush()
}

// Flush makes it an http.Flusher.
func (w *writer) Flush() {
	_ = w.FlushError() // the next write tells what is wrong
}

// stretch is how much goes out under one deadline where the kernel copies: a client that takes less than this in StallTime is cut off.
const stretch = 2 << 20

// ReadFrom keeps sendfile, which wants a file or one limit around it, and still moves the deadline.
func (w *writer) ReadFrom(src io.Reader) (n int64, err error) {
	to, ok := w.ResponseWriter.(io.ReaderFrom)
	if !ok {
		return io.Copy(struct{ io.Writer }{w}, src)
	}
	limit := int64(-1)
	outer, limited := src.(*io.LimitedReader)
	if limited {
		src, limit = outer.R, outer.N
		defer func() { outer.N = limit }()
	}
	for limit != 0 {
		part := int64(stretch)
		if limited {
			part = min(part, limit)
		}
		w.moved = time.Time{}
		w.move()
		m, err := to.ReadFrom(&io.LimitedReader{R: src, N: part})
		n += m
		if limited {
			limit -= m
		}
		if err != nil || m < part {
			return n, err
		}
	}
	return n, nil
}
