// Package httpcall makes small calls of HTTP/1.1 over connections that it keeps.
//
// A call writes its request, and reads its answer, in the goroutine of its caller: a connection has one call at a time, and no goroutine of its own. The Transport of net/http has two for each
// connection, to which requests are handed and from which answers come back. Bodies that go on for long need that; for a small call it is half of what it costs. So samples go over that one, and
// the calls of the control plane over this.
//
// There are no redirections, proxies, cookies or compression here, and a body is in memory as a whole.
package httpcall

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	keepTime   = 90 * time.Second      // that a connection is kept without a call
	trustTime  = 10 * time.Millisecond // since its last call, in which it is thought to stand
	mostKept   = 256                   // connections
	mostOutput = 256 << 10             // bytes of a request's memory that are kept with a connection
)

// past is a deadline that breaks a call off.
var past = time.Unix(1, 0)

// Caller makes calls of one server. Its methods may be called from any goroutine.
type Caller struct {
	dial   func(context.Context) (net.Conn, error)
	path   string // before that of each call
	head   string // the headers of every call
	living context.Context
	end    context.CancelCauseFunc

	mu    sync.Mutex
	busy  map[*conn]struct{}
	kept  []*conn // the one that was used last comes last
	prune *time.Timer
}

// Call is a request.
type Call struct {
	Method  string
	Path    string        // escaped, with its query
	Headers string        // beyond those of every call, each with its \r\n
	Body    []byte        // JSON, or nil
	Limit   time.Duration // for all of it
	Most    int64         // bytes of the answer
	Behind  bool          // it is made although the caller has ended
}

// New makes the caller of the server that dial reaches and host names. Paths begin behind path. All calls have the headers, each "Name: value".
func New(dial func(context.Context) (net.Conn, error), host, path string, headers ...string) (*Caller, error) {
	h := &Caller{dial: dial, path: path, busy: map[*conn]struct{}{}}
	for _, line := range append([]string{"Host: " + host}, headers...) {
		if !printable(line) || !printable(path) {
			return nil, errors.New("httpcall: a header or the path holds a control byte") // which may be in a secret
		}
		h.head += line + "\r\n"
	}
	h.living, h.end = context.WithCancelCause(context.Background())
	return h, nil
}

func printable(s string) bool {
	return strings.IndexFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) < 0
}

// End breaks off all calls, whose error is then err, and closes all connections. Calls that come later have the same error, but for those [Call.Behind] it.
func (h *Caller) End(err error) {
	h.end(err)
	h.mu.Lock()
	defer h.mu.Unlock()
	for c := range h.busy {
		_ = c.Close()
	}
	for _, c := range h.kept {
		_ = c.Close()
	}
	h.kept = nil
	if h.prune != nil {
		h.prune.Stop()
	}
}

// Do makes a call. An error is the cause of ctx, that of End, or ErrTooLong. With any other there was no answer, or half of one, and whether the call was done is not known.
func (h *Caller) Do(ctx context.Context, k *Call) (Answer, error) {
	if !printable(k.Path) || strings.Contains(k.Path, " ") {
		return Answer{}, fmt.Errorf("httpcall: the path %q is not escaped", k.Path)
	}
	if ctx.Err() != nil {
		return Answer{}, context.Cause(ctx)
	}
	now := time.Now()
	c, err := h.take(ctx, k, now)
	if err != nil {
		return Answer{}, h.why(ctx, k, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(past) }) // a connection that can't be told so ends its call by the limit
	a, whole, err := c.call(h, k)
	h.put(c, stop() && whole)
	return a, h.why(ctx, k, err)
}

// why is the error of a call that was broken off.
func (h *Caller) why(ctx context.Context, k *Call, err error) error {
	switch {
	case err == nil || errors.Is(err, ErrTooLong):
		return err
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case h.living.Err() != nil && !k.Behind:
		return context.Cause(h.living)
	}
	return err
}

// take gets a connection for a call: the one that was used last, or a new one.
func (h *Caller) take(ctx context.Context, k *Call, now time.Time) (*conn, error) {
	for {
		c, err := h.takeKept(k)
		if err != nil {
			return nil, err
		}
		if c == nil {
			return h.make(ctx, k, now)
		}
		// A server that stopped has closed it meanwhile. Who knows that before the call knows that it was not made.
		if (now.Sub(c.used) < trustTime || stands(c.Conn)) && c.SetDeadline(now.Add(k.Limit)) == nil {
			return c, nil
		}
		h.put(c, false)
	}
}

func (h *Caller) takeKept(k *Call) (*conn, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.living.Err() != nil && !k.Behind {
		return nil, context.Cause(h.living)
	}
	n := len(h.kept) - 1
	if n < 0 {
		return nil, nil
	}
	c := h.kept[n]
	h.kept[n], h.kept = nil, h.kept[:n]
	h.busy[c] = struct{}{}
	return c, nil
}

func (h *Caller) make(ctx context.Context, k *Call, now time.Time) (*conn, error) {
	until := now.Add(k.Limit)
	dialing, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	if !k.Behind {
		defer context.AfterFunc(h.living, cancel)()
	}
	nc, err := h.dial(dialing)
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: nc, in: bufio.NewReaderSize(nc, longestLine)}
	if err := c.SetDeadline(until); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.living.Err() != nil && !k.Behind { // it came too late for End to find it
		return nil, errors.Join(context.Cause(h.living), c.Close())
	}
	h.busy[c] = struct{}{}
	return c, nil
}

// put gives a connection back, to be kept if it is whole: its last call has left nothing on it.
func (h *Caller) put(c *conn, whole bool) {
	now := time.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.busy, c)
	if !whole || h.living.Err() != nil || len(h.kept) >= mostKept {
		_ = c.Close()
		return
	}
	c.used = now
	h.kept = append(h.kept, c)
	if h.prune == nil {
		h.prune = time.AfterFunc(keepTime, h.drop)
	}
}

// drop closes what was kept for too long.
func (h *Caller) drop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, now := 0, time.Now()
	for n < len(h.kept) && now.Sub(h.kept[n].used) >= keepTime {
		_ = h.kept[n].Close()
		n++
	}
	h.kept = slices.Delete(h.kept, 0, n)
	h.prune = nil
	if len(h.kept) > 0 && h.living.Err() == nil {
		h.prune = time.AfterFunc(keepTime-now.Sub(h.kept[0].used), h.drop)
	}
}

// conn is a connection that has a call or is kept.
type conn struct {
	net.Conn
	in   *bufio.Reader
	out  []byte
	used time.Time
}

// Close says no farewell, which over TLS waits for seconds where the peer reads nothing.
func (c *conn) Close() error {
	if t, ok := c.Conn.(interface{ NetConn() net.Conn }); ok {
		return t.NetConn().Close()
	}
	return c.Conn.Close()
}

// call writes the request and reads the answer. It reports whether that was the whole of it, so that there can be another call.
func (c *conn) call(h *Caller, k *Call) (a Answer, whole bool, err error) {
	out := append(c.out[:0], k.Method...)
	out = append(out, ' ')
	out = append(out, h.path...)
	out = append(out, k.Path...)
	out = append(out, " HTTP/1.1\r\n"...)
	out = append(out, h.head...)
	out = append(out, k.Headers...)
	switch {
	case k.Body != nil:
		out = append(out, "Content-Type: application/json\r\nContent-Length: "...)
		out = append(strconv.AppendInt(out, int64(len(k.Body)), 10), "\r\n"...)
	case k.Method != http.MethodGet && k.Method != http.MethodHead:
		out = append(out, "Content-Length: 0\r\n"...)
	}
	out = append(append(out, "\r\n"...), k.Body...)
	_, unsent := c.Write(out)
	if c.out = out; cap(out) > mostOutput {
		c.out = nil
	}
	a, whole, err = readAnswer(c.in, k.Method, k.Most) // also of what could not be sent: a server may refuse a call before it has read it
	if err != nil && unsent != nil {
		err = unsent
	}
	return a, whole && unsent == nil, err
}
