package access

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/sluice-ml/sluice/internal/wire"
)

// net/http reads what a handler leaves of a body before it answers, or before it lets go of the connection: somebody who is not even let in could hold all connections by announcing bodies that
// never come.
func TestABodyThatNobodyReadsHoldsNothing(t *testing.T) {
	t.Parallel()
	w := open(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/events" {
			_ = http.NewResponseController(rw).Flush()
			<-r.Context().Done()
		}
	}), func(o *Options) {
		o.Limits = Limits{HeaderTime: 300 * time.Millisecond, IdleTime: 300 * time.Millisecond}
	})
	bearer := w.bearer("operator") + "\r\n"
	for name, start := range map[string]string{
		"a probe":          "GET /healthz HTTP/1.1\r\nHost: localhost\r\n",
		"no token":         "POST /v1/runs HTTP/1.1\r\nHost: localhost\r\n",
		"another host":     "POST /v1/runs HTTP/1.1\r\nHost: elsewhere\r\n",
		"the login page":   "GET /login HTTP/1.1\r\nHost: localhost\r\n",
		"the logout":       "POST /logout HTTP/1.1\r\nHost: localhost\r\n",
		"a call":           "GET /v1/status HTTP/1.1\r\nHost: localhost\r\n" + bearer,
		"an expectation":   "GET /healthz HTTP/1.1\r\nHost: localhost\r\nExpect: much\r\n",
		"a call that goes": "GET /v1/events HTTP/1.1\r\nHost: localhost\r\n" + bearer,
	} {
		for form, rest := range map[string]string{"a length": "Content-Length: 100\r\n\r\nabc", "a chunk": "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"} {
			t.Run(name+" with "+form, func(t *testing.T) {
				t.Parallel()
				if got, closed := w.raw(start+rest, 10*time.Second); !closed || !strings.HasPrefix(got, "HTTP/1.1 ") {
					t.Errorf("closed %v, answered %.100q", closed, got)
				}
			})
		}
	}
}

// Whatever stays for long has room of its own.
func TestNoCallThatStaysTakesTheRoomOfTheShortOnes(t *testing.T) {
	t.Parallel()
	entered, release := make(chan struct{}), make(chan struct{})
	w := open(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/settle") {
			return
		}
		if kindOfCall(r) == mayWait {
			_, end, ok := Wait(r.Context())
			if !ok {
				rw.Header().Set("Content-Type", wire.ProblemType)
				rw.WriteHeader(http.StatusTooManyRequests)
				_, _ = io.WriteString(rw, `{"status":429,"detail":"no room"}`)
				return
			}
			defer end()
		}
		entered <- struct{}{}
		<-release
	}), func(o *Options) { o.Limits = Limits{Calls: 1, Moving: 1, Waiting: 1, Held: 1} })
	for _, c := range [][2]string{{"GET", "/v1/sessions/s"}, {"GET", "/v1/events"}, {"PUT", "/v1/runs/r/samples/s"}, {"GET", "/v1/runs/r/samples/s/features/f"}, {"POST", "/v1/runs/r/commit"}, {"POST", "/v1/runs/r/abort"}} {
		ended := make(chan int)
		go func() {
			resp, err := w.client.Do(w.request(c[0], c[1], "", w.bearer("operator")))
			if err != nil {
				ended <- 0
				return
			}
			resp.Body.Close()
			ended <- resp.StatusCode
		}()
		<-entered
		if a := w.do(w.request("POST", "/v1/runs/r/settle", "", w.bearer("operator"))); a.status != 200 {
			t.Errorf("a settle beside %v: %d", c, a.status)
		}
		if a := w.do(w.request(c[0], c[1], "", w.bearer("operator"))); a.status != 429 {
			t.Errorf("one more %v: %d", c, a.status)
		}
		release <- struct{}{}
		if s := <-ended; s != 200 {
			t.Errorf("%v: %d", c, s)
		}
	}
}

func TestAWaitEndsWhenTheServiceStops(t *testing.T) {
	t.Parallel()
	entered := make(chan struct{})
	w := open(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		ctx, end, _ := Wait(r.Context())
		defer end()
		close(entered)
		<-ctx.Done()
		rw.WriteHeader(http.StatusServiceUnavailable)
	}), nil)
	ended := make(chan int)
	go func() {
		resp, err := w.client.Do(w.request("POST", "/v1/runs/r/commit", "", w.bearer("operator")))
		if err != nil {
			ended <- 0
			return
		}
		resp.Body.Close()
		ended <- resp.StatusCode
	}()
	<-entered
	stopped := make(chan error, 1)
	go func() { stopped <- w.stop() }()
	if s := <-ended; s != http.StatusServiceUnavailable {
		t.Errorf("answered %d", s)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}

// A token that was revoked keeps no stream open, and no session alive; the socket and other tokens stay.
func TestARevokedTokenKeepsNothingOpen(t *testing.T) {
	t.Parallel()
	w := open(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(rw).Flush()
		<-r.Context().Done()
	}), nil)
	hold := func(header string) (ended chan struct{}) {
		resp, err := w.client.Do(w.request("GET", "/v1/events", "", header)) //nolint:bodyclose // it is closed when the stream ends
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatal(resp, err)
		}
		ended = make(chan struct{})
		go func() {
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			close(ended)
		}()
		return ended
	}
	login := w.request("POST", "/login", "token="+w.token("consumer"), "Content-Type: application/x-www-form-urlencoded")
	resp, err := w.client.Do(login)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	var cookie string
	for _, c := range resp.Cookies() {
		cookie = c.Name + "=" + c.Value
	}
	byToken, byCookie, other := hold(w.bearer("consumer")), hold("Cookie: "+cookie), hold(w.bearer("producer"))
	if err := RevokeToken(w.dir, "consumer"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for name, ended := range map[string]chan struct{}{"token": byToken, "cookie": byCookie} {
		select {
		case <-ended:
		case <-ctx.Done():
			t.Errorf("the stream of the %s goes on", name)
		}
	}
	select {
	case <-other:
		t.Error("the stream of another token has ended")
	default:
	}
	if a := w.do(w.request("GET", "/v1/events", "", "Cookie: "+cookie)); a.code != wire.CodeUnauthorized {
		t.Errorf("again: %d %s", a.status, a.body)
	}
}

// A HEAD finds the handler of a GET, and stays as long.
func TestAHeadIsHeldLikeAGet(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"/v1/sessions/s", "/v1/events", "/v1/runs/r/events"} {
		for _, method := range []string{http.MethodGet, http.MethodHead} {
			if kind := kindOfCall(httptest.NewRequest(method, path, nil)); kind != holds {
				t.Errorf("%s %s is of the kind %d", method, path, kind)
			}
		}
	}
}
