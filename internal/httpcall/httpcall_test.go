package httpcall

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var bg = context.Background()

// serve starts a server of HTTP, and a caller of it that counts its connections.
func serve(t *testing.T, h http.HandlerFunc) (*Caller, *httptest.Server, *atomic.Int64) {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	var dialed atomic.Int64
	c, err := New(func(ctx context.Context) (net.Conn, error) {
		dialed.Add(1)
		return new(net.Dialer).DialContext(ctx, "tcp", s.Listener.Addr().String())
	}, "some.host", "/base", "X-All: every call")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.End(errEnd) })
	return c, s, &dialed
}

var errEnd = errors.New("the end")

func post(body string) *Call {
	return &Call{Method: http.MethodPost, Path: "/calls?a=b", Headers: "X-One: this call\r\n", Body: []byte(body), Limit: 10 * time.Second, Most: 1 << 20}
}

func kept(c *Caller) (kept, busy int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.kept), len(c.busy)
}

func TestACallIsWhatItSays(t *testing.T) {
	t.Parallel()
	c, _, dialed := serve(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Type", "text/plain")
		w.WriteHeader(http.StatusAccepted)
		fmt.Fprintf(w, "%s %s %s %q %q %q %q %d", r.Method, r.Host, r.URL, body, r.Header.Get("X-All"), r.Header.Get("X-One"), r.Header.Get("Content-Type"), r.ContentLength)
	})
	for _, k := range []struct {
		call *Call
		want string
	}{
		{post(`{"x":1}`), `POST some.host /base/calls?a=b "{\"x\":1}" "every call" "this call" "application/json" 7`},
		{post(""), `POST some.host /base/calls?a=b "" "every call" "this call" "application/json" 0`},
		{&Call{Method: http.MethodPost, Path: "/p", Limit: time.Minute, Most: 1 << 20}, `POST some.host /base/p "" "every call" "" "" 0`},
		{&Call{Method: http.MethodGet, Path: "/p", Limit: time.Minute, Most: 1 << 20}, `GET some.host /base/p "" "every call" "" "" 0`},
		{&Call{Method: http.MethodDelete, Path: "/a%2Fb", Limit: time.Minute, Most: 1 << 20}, `DELETE some.host /base/a%2Fb "" "every call" "" "" 0`},
		{&Call{Method: http.MethodHead, Path: "/p", Limit: time.Minute}, ``},
		{post(strings.Repeat("x", 400<<10)), ""},
	} {
		a, err := c.Do(bg, k.call)
		if err != nil || a.StatusCode != http.StatusAccepted || a.Type != "text/plain" || k.want != "" && string(a.Body) != k.want {
			t.Errorf("%s %s: %v: got %d %s\n%s\nwant\n%s", k.call.Method, k.call.Path, err, a.StatusCode, a.Type, a.Body, k.want)
		}
	}
	if n := dialed.Load(); n != 1 {
		t.Errorf("%d connections were made for calls one after the other", n)
	}
}

func TestCallsAtOnceHaveAConnectionEach(t *testing.T) {
	t.Parallel()
	all := make(chan struct{})
	var here atomic.Int64
	c, _, dialed := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		if here.Add(1) == 8 {
			close(all)
		}
		<-all
	})
	for range 3 {
		var group sync.WaitGroup
		for range 8 {
			group.Go(func() {
				if _, err := c.Do(bg, post("{}")); err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
	}
	if k, busy := kept(c); dialed.Load() != 8 || k != 8 || busy != 0 {
		t.Errorf("%d connections were made, %d are kept and %d busy", dialed.Load(), k, busy)
	}
}

// A server that went away while nobody called must not look like one that lost a call.
func TestAConnectionThatWasClosedIsNotUsed(t *testing.T) {
	t.Parallel()
	c, s, dialed := serve(t, func(http.ResponseWriter, *http.Request) {})
	if _, err := c.Do(bg, post("{}")); err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	c.kept[0].used = c.kept[0].used.Add(-time.Minute) // long ago
	c.mu.Unlock()
	s.CloseClientConnections()
	if _, err := c.Do(bg, post("{}")); err != nil || dialed.Load() != 2 {
		t.Errorf("%v, with %d connections", err, dialed.Load())
	}
	if k, _ := kept(c); k != 1 {
		t.Errorf("%d connections are kept", k)
	}
}

func TestAnAnswerThatEndsTheConnectionEndsIt(t *testing.T) {
	t.Parallel()
	c, _, dialed := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.Method {
		case http.MethodPut: // in chunks
			w.(http.Flusher).Flush()
		default:
			w.Header().Set("Connection", "close")
		}
		_, _ = w.Write([]byte("all of it"))
	})
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodPost} { // the first has one of its own
		if a, err := c.Do(bg, &Call{Method: method, Path: "/", Limit: time.Minute, Most: 9}); err != nil || string(a.Body) != "all of it" {
			t.Errorf("%s: %v: %q", method, err, a.Body)
		}
	}
	if k, _ := kept(c); k != 0 || dialed.Load() != 2 {
		t.Errorf("%d connections were made, %d are kept", dialed.Load(), k)
	}
}

// Whether such an answer outlives the end of its connection is the kernel's to decide; mostly it does. What must not be is another call on that connection.
func TestARefusalThatComesBeforeTheBodyWasReadIsHeard(t *testing.T) {
	t.Parallel()
	c, _, _ := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "too large", http.StatusRequestEntityTooLarge)
	})
	heard := 0
	for range 3 {
		a, err := c.Do(bg, post(strings.Repeat("x", 8<<20))) // more than the sockets hold, and than the server reads to be polite
		if err == nil {
			heard++
		}
		if k, _ := kept(c); k != 0 || err == nil && a.StatusCode != http.StatusRequestEntityTooLarge {
			t.Errorf("%v: got %d; %d connections are kept on which half a call was sent", err, a.StatusCode, k)
		}
	}
	if heard == 0 {
		t.Error("no refusal was heard of three")
	}
}

func TestAnAnswerMayBeTooLong(t *testing.T) {
	t.Parallel()
	c, _, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut {
			w.(http.Flusher).Flush()
		}
		_, _ = w.Write([]byte("0123456789"))
	})
	for _, method := range []string{http.MethodPost, http.MethodPut} {
		if _, err := c.Do(bg, &Call{Method: method, Path: "/", Limit: time.Minute, Most: 9}); !errors.Is(err, ErrTooLong) {
			t.Errorf("%s: %v", method, err)
		}
		if k, _ := kept(c); k != 0 {
			t.Error("a connection is kept with an answer on it")
		}
	}
}

func TestACallEndsByItsContextItsLimitOrTheCaller(t *testing.T) {
	t.Parallel()
	hangs := make(chan struct{})
	gone := make(chan struct{}, 8)
	c, _, _ := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // only then the server sees that the caller goes
		hangs <- struct{}{}
		<-r.Context().Done()
		gone <- struct{}{}
	})
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(bg)
	go func() { <-hangs; cancel(cause) }() // ends with the call
	if _, err := c.Do(ctx, post("{}")); !errors.Is(err, cause) {
		t.Errorf("got %v, want the cause", err)
	}
	<-gone
	if _, err := c.Do(ctx, post("{}")); !errors.Is(err, cause) {
		t.Errorf("an ended context: %v", err)
	}

	k := post("{}")
	k.Limit = 50 * time.Millisecond
	go func() { <-hangs }() // ends with the call
	var timeout net.Error
	if _, err := c.Do(bg, k); !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("got %v, want a timeout", err)
	}
	<-gone

	go func() { <-hangs; c.End(errEnd) }() // ends with the call
	if _, err := c.Do(bg, post("{}")); !errors.Is(err, errEnd) {
		t.Errorf("got %v, want the caller's end", err)
	}
	<-gone
	if _, err := c.Do(bg, post("{}")); !errors.Is(err, errEnd) {
		t.Errorf("behind its end: %v", err)
	}
	if k, busy := kept(c); k != 0 || busy != 0 {
		t.Errorf("%d connections are kept and %d busy", k, busy)
	}
}

func TestOneCallMayComeBehindTheEnd(t *testing.T) {
	t.Parallel()
	c, _, dialed := serve(t, func(http.ResponseWriter, *http.Request) {})
	if _, err := c.Do(bg, post("{}")); err != nil {
		t.Fatal(err)
	}
	c.End(errEnd)
	k := post("{}")
	k.Behind = true
	if _, err := c.Do(bg, k); err != nil || dialed.Load() != 2 {
		t.Errorf("%v, with %d connections", err, dialed.Load())
	}
	if k, busy := kept(c); k != 0 || busy != 0 {
		t.Errorf("%d connections are kept and %d busy", k, busy)
	}
}

// A dial that hangs ends with whatever ends the call.
func TestADialEndsWithTheCall(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		end  func(c *Caller, cancel context.CancelCauseFunc)
		want error
	}{
		"context": {func(_ *Caller, cancel context.CancelCauseFunc) { cancel(io.ErrShortWrite) }, io.ErrShortWrite},
		"caller":  {func(c *Caller, _ context.CancelCauseFunc) { c.End(errEnd) }, errEnd},
		"limit":   {func(*Caller, context.CancelCauseFunc) {}, context.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				caller, err := New(func(ctx context.Context) (net.Conn, error) { <-ctx.Done(); return nil, ctx.Err() }, "h", "")
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancelCause(t.Context())
				go func() { time.Sleep(time.Second); c.end(caller, cancel) }()
				if _, err := caller.Do(ctx, post("{}")); !errors.Is(err, c.want) {
					t.Errorf("got %v, want %v", err, c.want)
				}
				caller.End(errEnd)
			})
		})
	}
}

// A connection that was made while the caller ended is closed and not used.
func TestADialThatEndsBehindTheEndIsNoCall(t *testing.T) {
	t.Parallel()
	ours, theirs := net.Pipe()
	defer theirs.Close()
	var c *Caller
	c, err := New(func(context.Context) (net.Conn, error) { c.End(errEnd); return ours, nil }, "h", "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Do(bg, post("{}")); !errors.Is(err, errEnd) {
		t.Errorf("got %v", err)
	}
	if _, err := ours.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("the connection is open: %v", err)
	}
}

func TestWhatIsKeptGoesAfterAWhile(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var ends []net.Conn
		var mu sync.Mutex
		c, err := New(func(context.Context) (net.Conn, error) {
			ours, theirs := net.Pipe()
			mu.Lock()
			ends = append(ends, theirs)
			mu.Unlock()
			go answers(theirs) // ends with the connection
			return ours, nil
		}, "h", "")
		if err != nil {
			t.Fatal(err)
		}
		two := func() {
			var group sync.WaitGroup
			for range 2 {
				group.Go(func() {
					if _, err := c.Do(t.Context(), post("{}")); err != nil {
						t.Error(err)
					}
				})
			}
			group.Wait()
		}
		two()
		time.Sleep(keepTime / 2)
		if _, err := c.Do(t.Context(), post("{}")); err != nil { // on one of them
			t.Fatal(err)
		}
		if k, _ := kept(c); k != 2 {
			t.Fatalf("%d are kept, want 2", k)
		}
		time.Sleep(keepTime/2 + time.Second)
		if k, _ := kept(c); k != 1 {
			t.Errorf("%d are kept, want 1", k)
		}
		time.Sleep(keepTime)
		if k, _ := kept(c); k != 0 {
			t.Errorf("%d are kept, want none", k)
		}
		c.End(errEnd)
		synctest.Wait()
	})
}

// answers is a server on one connection.
func answers(c net.Conn) {
	defer c.Close()
	r := bufio.NewReader(c)
	for {
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, req.Body)
		time.Sleep(time.Millisecond)
		if _, err := io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"); err != nil {
			return
		}
	}
}

func TestOverTLS(t *testing.T) {
	t.Parallel()
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("{}")) }))
	defer s.Close()
	dialed := 0
	c, err := New(func(ctx context.Context) (net.Conn, error) {
		dialed++
		d := tls.Dialer{Config: s.Client().Transport.(*http.Transport).TLSClientConfig}
		return d.DialContext(ctx, "tcp", s.Listener.Addr().String())
	}, "example.com", "")
	if err != nil {
		t.Fatal(err)
	}
	defer c.End(errEnd)
	for i := range 3 {
		if a, err := c.Do(bg, post("{}")); err != nil || string(a.Body) != "{}" {
			t.Fatalf("call %d: %v: %q", i, err, a.Body)
		}
		c.mu.Lock()
		c.kept[0].used = time.Now().Add(-time.Second)
		c.mu.Unlock()
	}
	if dialed != 1 {
		t.Errorf("%d connections were made: a silent one is taken for broken", dialed)
	}
}

// The farewell of TLS takes five seconds where nobody reads: a call that was broken off must not wait for it, and neither must those beside it.
func TestACallOverTLSEndsAtOnceWhereNobodyReads(t *testing.T) {
	t.Parallel()
	s := httptest.NewTLSServer(nil)
	defer s.Close()
	synctest.Test(t, func(t *testing.T) {
		var theirs net.Conn
		c, err := New(func(ctx context.Context) (net.Conn, error) {
			ours, other := net.Pipe()
			theirs = other
			go func() { _ = tls.Server(other, s.TLS).HandshakeContext(bg) }() // ends with the handshake, and nobody reads behind it
			conn := tls.Client(ours, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12})
			return conn, conn.HandshakeContext(ctx)
		}, "example.com", "")
		if err != nil {
			t.Fatal(err)
		}
		k := post("{}")
		k.Limit = time.Second
		begun := time.Now()
		if _, err := c.Do(t.Context(), k); err == nil || time.Since(begun) != k.Limit {
			t.Errorf("it ended after %v, want %v: %v", time.Since(begun), k.Limit, err)
		}
		c.End(errEnd)
		if _, err := theirs.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("the connection is open: %v", err)
		}
		theirs.Close()
	})
}

func TestWhatCanBeNoRequestIsNotSent(t *testing.T) {
	t.Parallel()
	c, _, dialed := serve(t, func(http.ResponseWriter, *http.Request) {})
	for _, path := range []string{"/a b", "/a\r\nX-Evil: 1", "/\x00", "/\x7f"} {
		if _, err := c.Do(bg, &Call{Method: http.MethodGet, Path: path, Limit: time.Second}); err == nil {
			t.Errorf("the path %q was sent", path)
		}
	}
	if dialed.Load() != 0 {
		t.Error("a connection was made")
	}
	for _, bad := range [][]string{{"h\r\nX: 1", "", ""}, {"h", "/\n", ""}, {"h", "", "Authorization: Bearer a\nb"}} {
		if _, err := New(nil, bad[0], bad[1], bad[2]); err == nil || strings.Contains(err.Error(), "Bearer") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
