package access

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

func TestTCPWantsAToken(t *testing.T) {
	t.Parallel()
	w := open(t, nil, nil)
	operator := w.token("operator")
	for name, c := range map[string]struct {
		headers []string
		status  int
		code    string
	}{
		"none":               {nil, 401, wire.CodeUnauthorized},
		"empty":              {[]string{"Authorization: Bearer "}, 401, wire.CodeUnauthorized},
		"unknown":            {[]string{"Authorization: Bearer AAAAAAAAAAAAAAAAAAAAAAAAAA"}, 401, wire.CodeUnauthorized},
		"cut short":          {[]string{"Authorization: Bearer " + operator[:25]}, 401, wire.CodeUnauthorized},
		"longer":             {[]string{"Authorization: Bearer " + operator + "A"}, 401, wire.CodeUnauthorized},
		"lower case":         {[]string{"Authorization: Bearer " + strings.ToLower(operator)}, 401, wire.CodeUnauthorized},
		"another scheme":     {[]string{"Authorization: Basic " + operator}, 401, wire.CodeUnauthorized},
		"unknown cookie":     {[]string{"Cookie: " + w.d.cookieName() + "=" + operator}, 401, wire.CodeUnauthorized},
		"right":              {[]string{"Authorization: Bearer " + operator}, 200, ""},
		"scheme in any case": {[]string{"Authorization: bEARER " + operator}, 200, ""},
	} {
		a := w.do(w.request("GET", "/v1/status?token="+operator, "", c.headers...)) // one in the URL counts for nothing
		if a.status != c.status || a.code != c.code {
			t.Errorf("%s: %d %q %s", name, a.status, a.code, a.body)
		}
		if c.status == 401 && a.header.Get("WWW-Authenticate") == "" {
			t.Errorf("%s: the answer does not say how to authenticate", name)
		}
		if strings.Contains(a.body, operator) {
			t.Errorf("%s: the token is in the answer", name)
		}
	}
	two := w.request("GET", "/", "", "Authorization: Bearer "+operator)
	two.Header.Add("Authorization", "Bearer "+operator)
	if a := w.do(two); a.status != 401 {
		t.Errorf("two Authorization headers: %d", a.status)
	}
	if log := w.log.String(); strings.Contains(log, operator) || !strings.Contains(log, "wrong token") {
		t.Errorf("log: %s", log)
	}
}

func TestTokensHaveRolesAndRuns(t *testing.T) {
	t.Parallel()
	w := open(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if err := CallerOf(r.Context()).May(r.Header.Get("Run"), Role(r.Header.Get("Role"))); err != nil {
			rw.WriteHeader(wire.ProblemOf(err).Status)
		}
	}), nil)
	if _, err := CreateToken(w.dir, "trainer", Consumer, "r1"); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		token, run, role string
		status           int
	}{
		{"producer", "r1", "producer", 200}, {"producer", "r1", "consumer", 403}, {"producer", "r1", "operator", 403},
		{"consumer", "r2", "consumer", 200}, {"consumer", "r2", "producer", 403}, {"operator", "r2", "producer", 200},
		{"trainer", "r1", "consumer", 200}, {"trainer", "r2", "consumer", 403}, {"trainer", "", "consumer", 403}, {"trainer", "r1", "producer", 403},
	} {
		if a := w.do(w.request("POST", "/v1/x", "", w.bearer(c.token), "Run: "+c.run, "Role: "+c.role)); a.status != c.status {
			t.Errorf("%+v: %d", c, a.status)
		}
	}
}

func TestRevokedAndNewTokensCountSoon(t *testing.T) {
	t.Parallel()
	w := open(t, nil, nil)
	old := w.bearer("consumer")
	made, err := CreateToken(w.dir, "second", Consumer, "")
	if err != nil {
		t.Fatal(err)
	}
	if a := w.do(w.request("GET", "/", "", "Authorization: Bearer "+made.Value)); a.status != 200 {
		t.Errorf("a new token: %d %s", a.status, a.body)
	}
	if err := RevokeToken(w.dir, "consumer"); err != nil {
		t.Fatal(err)
	}
	w.d.keys.mu.Lock()
	w.d.keys.checked = time.Time{} // a second later
	w.d.keys.mu.Unlock()
	if a := w.do(w.request("GET", "/", "", old)); a.status != 401 {
		t.Errorf("a revoked token: %d", a.status)
	}
}

func TestTokensThatCannotBeTrustedOpenForNobody(t *testing.T) {
	t.Parallel()
	w := open(t, nil, nil)
	operator := w.bearer("operator")
	path := filepath.Join(w.dir, wire.TokensFile)
	look := func() answer {
		w.d.keys.mu.Lock()
		w.d.keys.checked = time.Time{}
		w.d.keys.mu.Unlock()
		return w.do(w.request("GET", "/v1/status", "", operator))
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func() error{
		"others may read it": func() error { return os.Chmod(path, 0o644) },
		"it is gone":         func() error { return os.Remove(path) },
		"it is broken":       func() error { return os.WriteFile(path, []byte("{"), 0o600) },
	} {
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		if a := look(); a.status != 503 || a.code != string(sluice.Unavailable) {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
		if err := errors.Join(replace(path, good, 0o600)); err != nil {
			t.Fatal(err)
		}
		if a := look(); a.status != 200 {
			t.Errorf("%s, and mended: %d %s", name, a.status, a.body)
		}
	}
	if !strings.Contains(w.log.String(), "tokens can't be read") {
		t.Error("the log says nothing")
	}
}

func TestOnlyKnownHostNamesAreServed(t *testing.T) {
	t.Parallel()
	w := open(t, nil, func(o *Options) { o.AllowHosts = []string{"Trainer-3.example"} })
	for host, status := range map[string]int{
		"127.0.0.1": 200, "localhost": 200, "localhost:1234": 200, "LOCALHOST.": 200, "[::1]:7447": 200, "trainer-3.example:80": 200,
		"evil.example": 403, "localhost.evil.example": 403, "10.1.2.3": 403, "127.0.0.1.evil.example:7447": 403, "0.0.0.0": 403, "169.254.169.254": 403,
	} {
		if a := w.do(w.request("GET", "/v1/status", "", w.bearer("operator"), "Host: "+host)); a.status != status {
			t.Errorf("%s: %d %s", host, a.status, a.body)
		}
	}
	if a := w.do(w.request("GET", "/healthz", "", "Host: evil.example")); a.status != 403 {
		t.Errorf("a probe under a foreign name: %d", a.status)
	}
}

func TestPagesOfOtherSitesMayNotCall(t *testing.T) {
	t.Parallel()
	w := open(t, nil, nil)
	for name, c := range map[string]struct {
		method  string
		headers []string
		status  int
	}{
		"a program":                   {"POST", nil, 200},
		"another site":                {"POST", []string{"Sec-Fetch-Site: cross-site"}, 403},
		"another port of the host":    {"DELETE", []string{"Sec-Fetch-Site: same-site"}, 403},
		"another site, old browser":   {"POST", []string{"Origin: https://evil.example"}, 403},
		"a page without an origin":    {"PUT", []string{"Origin: null"}, 403},
		"the dashboard":               {"POST", []string{"Sec-Fetch-Site: same-origin"}, 200},
		"a look from another site":    {"GET", []string{"Sec-Fetch-Site: cross-site"}, 200},
		"another port by its origin":  {"POST", []string{"Origin: http://127.0.0.1:1"}, 403},
		"the dashboard by its origin": {"POST", []string{"Origin: " + w.url}, 200},
	} {
		if a := w.do(w.request(c.method, "/v1/runs", "", append(c.headers, w.bearer("operator"))...)); a.status != c.status {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
}

func TestProbesNeedNoTokenAndNothingElseGoesWithout(t *testing.T) {
	t.Parallel()
	w := open(t, nil, nil)
	for path, status := range map[string]int{"/healthz": 200, "/readyz": 200, "/metrics": 401, "/openapi.json": 401, "/": 401, "/healthz/": 401, "/v1/../healthz": 401, "//healthz": 401} {
		if a := w.do(w.request("GET", path, "")); a.status != status {
			t.Errorf("%s: %d", path, a.status)
		}
	}
	if a := w.do(w.request("GET", "/healthz", "")); !strings.HasPrefix(a.body, "nobody none") {
		t.Errorf("a probe is somebody: %s", a.body)
	}
}

func TestTheSocketIsForItsOwner(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		uid    int
		err    error
		token  string
		status int
		body   string
	}{
		"the same user":            {os.Geteuid(), nil, "", 200, fmt.Sprintf("uid %d operator  %[1]d", os.Geteuid())},
		"root":                     {0, nil, "", 200, "uid 0 operator  0"},
		"another user":             {os.Geteuid() + 1, nil, "", 403, ""},
		"nobody knows":             {-1, errors.New("no credentials"), "", 403, ""},
		"another user with token":  {os.Geteuid() + 1, nil, "consumer", 200, fmt.Sprintf("consumer consumer  %d", os.Geteuid()+1)},
		"a token narrows the role": {os.Geteuid(), nil, "producer", 200, fmt.Sprintf("producer producer  %d", os.Geteuid())},
	} {
		w := open(t, nil, func(o *Options) { o.peer = func(*net.UnixConn) (int, error) { return c.uid, c.err } })
		w.overSocket()
		var headers []string
		if c.token != "" {
			headers = []string{w.bearer(c.token)}
		}
		if a := w.do(w.request("POST", "/v1/x", "", append(headers, "Host: whatever")...)); a.status != c.status || !strings.HasPrefix(a.body, c.body) {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
}

func TestTheKernelTellsWhoCalls(t *testing.T) {
	t.Parallel()
	w := open(t, nil, func(o *Options) { o.Listen = "" })
	w.overSocket()
	if a := w.do(w.request("GET", "/", "")); !strings.HasPrefix(a.body, fmt.Sprintf("uid %d operator", os.Geteuid())) {
		t.Errorf("%d %s", a.status, a.body)
	}
	if a := w.do(w.request("GET", "/", "", "Authorization: Bearer AAAAAAAAAAAAAAAAAAAAAAAAAA")); a.status != 401 {
		t.Errorf("a wrong token on the socket: %d", a.status)
	}
}

func TestWhoFailsOftenIsToldToWait(t *testing.T) {
	t.Parallel()
	w := open(t, nil, nil)
	var last answer
	for range failBurst + 1 {
		last = w.do(w.request("GET", "/v1/status", "", "Authorization: Bearer AAAAAAAAAAAAAAAAAAAAAAAAAA"))
	}
	if last.status != 429 || last.header.Get("Retry-After") == "" {
		t.Errorf("after %d wrong tokens: %d", failBurst+1, last.status)
	}
	if a := w.do(w.request("GET", "/v1/status", "", w.bearer("operator"))); a.status != 200 {
		t.Errorf("a right token from the same address: %d", a.status)
	}
	if n := strings.Count(w.log.String(), "wrong token"); n > failBurst {
		t.Errorf("%d lines in the log", n)
	}
}

func TestSizesAreBounded(t *testing.T) {
	t.Parallel()
	w := open(t, nil, nil)
	if a := w.do(w.request("GET", "/v1/status", "", w.bearer("operator"), "X: "+strings.Repeat("a", 80<<10))); a.status != 431 {
		t.Errorf("a header of 80 KiB: %d", a.status)
	}
	big := strings.Repeat("a", wire.MaxBody+1)
	if a := w.do(w.request("POST", "/v1/runs/r/commit", big, w.bearer("operator"))); a.status != 413 || a.code != wire.CodeTooLarge {
		t.Errorf("a body over the limit: %d %s", a.status, a.body)
	}
	r := w.request("POST", "/v1/runs/r/commit", "", w.bearer("operator"))
	r.Body, r.ContentLength = io.NopCloser(strings.NewReader(big)), -1
	if a := w.do(r); a.status != http.StatusTeapot || !strings.Contains(a.body, "too large") {
		t.Errorf("a body over the limit that does not say so: %d %s", a.status, a.body)
	}
	if a := w.do(w.request("PUT", "/v1/runs/r/samples/s", big, w.bearer("operator"))); a.status != 200 || !strings.Contains(a.body, fmt.Sprintf("read %d <nil>", len(big))) {
		t.Errorf("a sample: %d %s", a.status, a.body)
	}
}

// raw sends text on a connection of its own and returns all that comes back, and whether the other side closed.
func (w *house) raw(text string, wait time.Duration) (string, bool) {
	w.t.Helper()
	c, err := net.Dial("tcp", w.d.tcp.Addr().String())
	if err != nil {
		w.t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, text); err != nil {
		w.t.Fatal(err)
	}
	c.SetReadDeadline(time.Now().Add(wait))
	got, err := io.ReadAll(c)
	return string(got), !errors.Is(err, os.ErrDeadlineExceeded)
}

func TestSlowClientsAreCutOff(t *testing.T) {
	t.Parallel()
	w := open(t, nil, func(o *Options) {
		o.Limits = Limits{HeaderTime: 200 * time.Millisecond, StallTime: 200 * time.Millisecond, IdleTime: 200 * time.Millisecond}
	})
	start := "POST /v1/x HTTP/1.1\r\nHost: localhost\r\n" + w.bearer("operator") + "\r\n"
	for name, c := range map[string]struct{ send, want string }{
		"nothing at all":       {"", ""},
		"half a header":        {start, ""},
		"half a body":          {start + "Content-Length: 100\r\n\r\nabc", "i/o timeout"},
		"half a chunked body":  {start + "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", "i/o timeout"},
		"one call and no more": {start + "Content-Length: 3\r\n\r\nabc", "read 3 <nil>"},
	} {
		got, closed := w.raw(c.send, 10*time.Second)
		if !closed || !strings.Contains(got, c.want) {
			t.Errorf("%s: closed %v\n%s", name, closed, got)
		}
	}
}

func TestABodyThatDripsIsCutOffAndOneThatFlowsIsNot(t *testing.T) {
	t.Parallel()
	const stall = time.Second
	w := open(t, nil, func(o *Options) { o.Limits.StallTime = stall })
	send := func(piece, pieces int) (sent int, answer string) {
		c, err := net.Dial("tcp", w.d.tcp.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprintf(c, "PUT /v1/x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%s\r\nContent-Length: %d\r\n\r\n", w.bearer("operator"), piece*pieces)
		for range pieces {
			if _, err := c.Write(make([]byte, piece)); err != nil {
				break
			}
			sent++
			time.Sleep(stall / 5) // the other side has a real clock
		}
		got, _ := io.ReadAll(c)
		return sent, string(got)
	}
	if _, got := send(1, 50); strings.Contains(got, "read 50 <nil>") {
		t.Errorf("a byte now and then is let through: %s", got)
	}
	if _, got := send(64<<10, 8); !strings.Contains(got, "read 524288 <nil>") { // 1.6 s in all
		t.Errorf("a body that flows is cut off: %s", got)
	}
}

func TestAReaderThatTakesNothingIsCutOff(t *testing.T) {
	t.Parallel()
	failed := make(chan error, 1)
	w := open(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Length", "1073741824")
		_, err := io.CopyN(rw, zeros{}, 1<<30)
		failed <- err
	}), func(o *Options) { o.Limits.StallTime = 100 * time.Millisecond })
	c, err := net.Dial("tcp", w.d.tcp.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "GET /v1/x HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n", w.bearer("operator"))
	if err := <-failed; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestADeadlineOfTheHandlerStands(t *testing.T) {
	t.Parallel()
	ended := make(chan error, 1)
	w := open(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		buf := make([]byte, 1)
		r.Body.Read(buf)
		http.NewResponseController(rw).SetReadDeadline(time.Unix(1, 0))
		_, err := r.Body.Read(make([]byte, 1<<20))
		ended <- err
	}), nil)
	w.raw("PUT /v1/x HTTP/1.1\r\nHost: localhost\r\n"+w.bearer("operator")+"\r\nContent-Length: 100\r\n\r\na", 10*time.Second)
	if err := <-ended; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestALongWaitIsNoStall(t *testing.T) {
	t.Parallel()
	w := open(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		r.Body.Read(make([]byte, 1)) // who asks again for a body that has ended must not start its clock
		fmt.Fprint(rw, "first")
		select {
		case <-r.Context().Done():
		case <-time.After(800 * time.Millisecond):
			fmt.Fprint(rw, " then")
		}
	}), func(o *Options) { o.Limits.StallTime = 200 * time.Millisecond })
	for _, body := range []string{"", "{}"} {
		if a := w.do(w.request("POST", "/v1/runs/r/acquire", body, w.bearer("operator"))); a.body != "first then" {
			t.Errorf("body %q: %q", body, a.body)
		}
	}
}

func TestFilesComeWholeAndInRanges(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "f")
	data := make([]byte, 3*stretch+12345)
	for i := range data {
		data[i] = byte(i * 7 >> 3)
	}
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	w := open(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { http.ServeFile(rw, r, path) }), nil)
	for _, socket := range []bool{false, true} {
		if socket {
			w.overSocket()
		}
		if a := w.do(w.request("GET", "/v1/f", "", w.bearer("operator"))); a.body != string(data) {
			t.Errorf("socket %v: %d bytes of %d", socket, len(a.body), len(data))
		}
		if a := w.do(w.request("GET", "/v1/f", "", w.bearer("operator"), fmt.Sprintf("Range: bytes=100-%d", 100+stretch))); a.status != 206 || a.body != string(data[100:101+stretch]) {
			t.Errorf("socket %v: a range: %d, %d bytes", socket, a.status, len(a.body))
		}
	}
}

func TestWaitingCallsLeaveRoomForTheOthers(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	entered := make(chan struct{}, 10)
	w := open(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if kindOfCall(r) != short {
			entered <- struct{}{}
			<-release
		}
	}), func(o *Options) { o.Limits = Limits{Waiting: 2, Held: 1, Calls: 1} })
	ended := make(chan int, 3)
	for _, path := range []string{"/v1/runs/r/acquire", "/v1/runs/r/reserve", "/v1/events"} {
		method := "POST"
		if path == "/v1/events" {
			method = "GET"
		}
		r := w.request(method, path, "", w.bearer("operator"))
		go func() {
			resp, err := w.client.Do(r)
			if err != nil {
				ended <- 0
				return
			}
			resp.Body.Close()
			ended <- resp.StatusCode
		}()
	}
	for range 3 {
		<-entered
	}
	for path, method := range map[string]string{"/v1/runs/r/acquire": "POST", "/v1/sessions/s": "GET"} {
		if a := w.do(w.request(method, path, "", w.bearer("operator"))); a.status != 429 || a.code != wire.CodeBusy || a.header.Get("Retry-After") == "" {
			t.Errorf("one more %s: %d %s", path, a.status, a.body)
		}
	}
	for _, path := range []string{"/v1/runs/r/settle", "/v1/runs/r/renew"} {
		if a := w.do(w.request("POST", path, "", w.bearer("operator"))); a.status != 200 {
			t.Errorf("%s while others wait: %d", path, a.status)
		}
	}
	close(release)
	for range 3 {
		if s := <-ended; s != 200 {
			t.Errorf("a call that waited: %d", s)
		}
	}
}

func TestConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	w := open(t, nil, func(o *Options) { o.Limits.Connections = 2 })
	var held []net.Conn
	for range 2 {
		c, err := net.Dial("tcp", w.d.tcp.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprintf(c, "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
		if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || !strings.Contains(line, "200") {
			t.Fatalf("%q %v", line, err)
		}
		held = append(held, c)
	}
	if got, closed := w.raw("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", 200*time.Millisecond); got != "" || closed {
		t.Errorf("a third connection was served: %q", got)
	}
	held[0].Close()
	if got, _ := w.raw("GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 10*time.Second); !strings.Contains(got, "200 OK") {
		t.Errorf("after one had gone: %q", got)
	}
	w.overSocket()
	if a := w.do(w.request("GET", "/", "")); a.status != 200 {
		t.Errorf("the socket has its own room: %d", a.status)
	}
	if !strings.Contains(w.log.String(), "all connections are taken") {
		t.Error("the log says nothing")
	}
}

func TestStoppingEndsWaitsAtOnceAndLetsCallsFinish(t *testing.T) {
	t.Parallel()
	entered := make(chan string, 2)
	finish := make(chan struct{})
	w := open(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		entered <- r.URL.Path
		select {
		case <-r.Context().Done():
			rw.WriteHeader(http.StatusServiceUnavailable)
		case <-finish:
		}
	}), nil)
	ended := map[string]chan int{"/v1/runs/r/acquire": make(chan int, 1), "/v1/runs/r/commit": make(chan int, 1)}
	for path, end := range ended {
		r := w.request("POST", path, "", w.bearer("operator"))
		go func() {
			resp, err := w.client.Do(r)
			if err != nil {
				end <- 0
				return
			}
			resp.Body.Close()
			end <- resp.StatusCode
		}()
	}
	<-entered
	<-entered
	if _, err := os.Stat(filepath.Join(w.dir, wire.EndpointFile)); err != nil {
		t.Error(err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- w.stop() }()
	if s := <-ended["/v1/runs/r/acquire"]; s != 503 {
		t.Errorf("a call that waited: %d", s)
	}
	if _, err := os.Stat(filepath.Join(w.dir, wire.EndpointFile)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the endpoint file is there while the service stops: %v", err)
	}
	close(finish)
	if s := <-ended["/v1/runs/r/commit"]; s != 200 {
		t.Errorf("a call under way: %d", s)
	}
	if err := <-stopped; err != nil {
		t.Error(err)
	}
	left, err := os.ReadDir(w.dir)
	if err != nil || len(left) != 2 {
		t.Errorf("left behind: %v %v, want the tokens and their lock", left, err)
	}
}

func TestStoppingIsBounded(t *testing.T) {
	t.Parallel()
	entered := make(chan struct{})
	w := open(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		close(entered)
		<-r.Context().Done() // only a cut connection ends this
	}), func(o *Options) { o.Limits.StopTime = 50 * time.Millisecond })
	c, err := net.Dial("tcp", w.d.tcp.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "POST /v1/runs/r/commit HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n", w.bearer("operator"))
	<-entered
	if err := w.stop(); err != nil {
		t.Error(err)
	}
	if !strings.Contains(w.log.String(), "connections were cut") {
		t.Error("the log does not say that a call was cut off")
	}
}

func TestAnswersTellBrowsersWhatNotToDo(t *testing.T) {
	t.Parallel()
	w := open(t, nil, nil)
	for _, path := range []string{"/", "/v1/status", "/login", "/nothing"} {
		a := w.do(w.request("GET", path, "", w.bearer("operator")))
		csp := a.header.Get("Content-Security-Policy")
		if a.header.Get("X-Content-Type-Options") != "nosniff" || a.header.Get("Cache-Control") != "no-store" || !strings.Contains(csp, "frame-ancestors 'none'") || !strings.Contains(csp, "default-src 'none'") || strings.Contains(csp, "unsafe") {
			t.Errorf("%s: %v", path, a.header)
		}
	}
	if a := w.do(w.request("GET", "/v1/status", "")); a.header.Get("Content-Security-Policy") == "" || !a.close {
		t.Errorf("a refusal: %v", a.header)
	}
	// A form makes a POST whose answer is shown, and has no token.
	for _, path := range []string{"/login", "/v1/runs/r/commit"} {
		if a := w.do(w.request("POST", path, "")); a.header.Get("Content-Security-Policy") == "" || a.header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("POST %s: %v", path, a.header)
		}
	}
	// Nor has one the token whose URL holds a name and a password.
	for _, path := range []string{"/login", "/v1/runs/r/commit"} {
		if a := w.do(w.request("POST", path, "", "Authorization: Basic YTpi")); a.header.Get("Content-Security-Policy") == "" || a.header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("POST %s with a password: %v", path, a.header)
		}
	}
	if a := w.do(w.request("POST", "/v1/runs/r/commit", "", w.bearer("operator"))); a.header.Get("Content-Security-Policy") != "" {
		t.Errorf("the answer to a program's call tells browsers something: %v", a.header)
	}
}

func TestTheEndpointFileLeadsToTheService(t *testing.T) {
	t.Parallel()
	w := open(t, nil, nil)
	var e wire.Endpoint
	for e.URL == "" { // Serve writes it
		if data, err := os.ReadFile(filepath.Join(w.dir, wire.EndpointFile)); err == nil {
			if err := json.Unmarshal(data, &e); err != nil {
				t.Fatal(err)
			}
		}
	}
	if e.PID != os.Getpid() || e.Socket != filepath.Join(w.dir, "sluice.sock") || e.Version != "test" || e.CAFile != "" {
		t.Errorf("%+v", e)
	}
	w.url = e.URL
	if a := w.do(w.request("GET", "/", "", w.bearer("consumer"))); a.status != 200 {
		t.Errorf("%d", a.status)
	}
}

func TestTLSOfTheServicesOwn(t *testing.T) {
	t.Parallel()
	w := open(t, nil, func(o *Options) { o.TLSSelfSigned, o.Listen, o.AllowHosts = true, "0.0.0.0:0", []string{"trainer-3"} })
	e := w.d.Endpoint()
	pem, err := os.ReadFile(e.CAFile)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	trust := &tls.Config{RootCAs: pool}
	w.client.Transport = &http.Transport{TLSClientConfig: trust}
	if a := w.do(w.request("GET", "/", "", w.bearer("operator"))); a.status != 200 || !strings.HasPrefix(e.URL, "https://localhost:") {
		t.Errorf("%s: %d %s", e.URL, a.status, a.body)
	}
	addr := w.d.tcp.Addr().String()
	for name, c := range map[string]struct {
		config *tls.Config
		ok     bool
	}{
		"an allowed name":   {&tls.Config{RootCAs: pool, ServerName: "trainer-3"}, true},
		"an address":        {&tls.Config{RootCAs: pool, ServerName: "127.0.0.1"}, true},
		"another name":      {&tls.Config{RootCAs: pool, ServerName: "evil.example"}, false},
		"nobody's word":     {&tls.Config{ServerName: "localhost"}, false},
		"TLS 1.1":           {&tls.Config{RootCAs: pool, ServerName: "localhost", MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11}, false},
		"only HTTP/1.1":     {&tls.Config{RootCAs: pool, ServerName: "localhost", NextProtos: []string{"http/1.1"}}, true},
		"TLS 1.2 is enough": {&tls.Config{RootCAs: pool, ServerName: "localhost", MaxVersion: tls.VersionTLS12}, true},
	} {
		conn, err := tls.Dial("tcp", strings.Replace(addr, "[::]", "127.0.0.1", 1), c.config)
		if (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
		if conn != nil {
			conn.Close()
		}
	}
	info, err := os.Stat(filepath.Join(w.dir, keyFile))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("key: %v %v", info, err)
	}
}

func TestTheCertificateStaysUntilItsNamesOrItsTimeChange(t *testing.T) {
	t.Parallel()
	dir := stateDir(t)
	cert, key := filepath.Join(dir, certFile), filepath.Join(dir, keyFile)
	made := func(names ...string) string {
		t.Helper()
		if err := ensureCertificate(cert, key, names); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(cert)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	first := made("localhost", "::1")
	if made("localhost") != first {
		t.Error("a new one for names that it had")
	}
	second := made("localhost", "trainer-3")
	if second == first {
		t.Error("the old one for a new name")
	}
	pair, err := loadPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	if !stillGood(pair.Leaf, []string{"trainer-3"}, time.Now()) || stillGood(pair.Leaf, []string{"trainer-3"}, time.Now().Add(certLife-certRenew+time.Hour)) || stillGood(pair.Leaf, nil, time.Now().Add(-2*time.Hour)) {
		t.Error("its time is not heeded")
	}
	if err := os.Remove(key); err != nil {
		t.Fatal(err)
	}
	if made("localhost") == second {
		t.Error("a certificate without its key was kept")
	}
	if err := os.Chmod(key, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := ensureCertificate(cert, key, nil); !errors.Is(err, sluice.ErrDenied) {
		t.Errorf("a key that others can read: %v", err)
	}
}

func TestWhatMayNotBeOpened(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		prepare func(dir string, o *Options) error
		want    error
		text    string
	}{
		"other hosts without TLS":   {func(_ string, o *Options) error { o.Listen = "0.0.0.0:0"; return nil }, sluice.ErrInvalid, "in the clear"},
		"every address without TLS": {func(_ string, o *Options) error { o.Listen = ":0"; return nil }, sluice.ErrInvalid, "in the clear"},
		"IPv6 without TLS":          {func(_ string, o *Options) error { o.Listen = "[::]:0"; return nil }, sluice.ErrInvalid, "in the clear"},
		"no address":                {func(_ string, o *Options) error { o.Listen = "7447"; return nil }, sluice.ErrInvalid, "want host:port"},
		"half a pair":               {func(_ string, o *Options) error { o.TLSCert = "x"; return nil }, sluice.ErrInvalid, "both"},
		"two certificates":          {func(_ string, o *Options) error { o.TLSCert, o.TLSKey, o.TLSSelfSigned = "x", "y", true; return nil }, sluice.ErrInvalid, "--tls-self-signed"},
		"no certificate there":      {func(_ string, o *Options) error { o.TLSCert, o.TLSKey = "/nonexistent", "/nonexistent"; return nil }, sluice.ErrInvalid, "no such file"},
		"no directory":              {func(dir string, _ *Options) error { return os.Remove(dir) }, sluice.ErrNotFound, "no such"},
		"others write there":        {func(dir string, _ *Options) error { return os.Chmod(dir, 0o777) }, sluice.ErrDenied, "nobody else may write"},
		"tokens that others read": {func(dir string, _ *Options) error {
			return os.WriteFile(filepath.Join(dir, wire.TokensFile), []byte(`{"tokens":[]}`), 0o644)
		}, sluice.ErrDenied, "chmod 600"},
		"tokens behind a link": {func(dir string, _ *Options) error {
			if err := os.WriteFile(filepath.Join(dir, "elsewhere"), []byte(`{"tokens":[]}`), 0o600); err != nil {
				return err
			}
			return os.Symlink("elsewhere", filepath.Join(dir, wire.TokensFile))
		}, sluice.ErrDenied, "symbolic link"},
		"tokens that are a pipe": {func(dir string, _ *Options) error {
			return mkfifo(filepath.Join(dir, wire.TokensFile))
		}, sluice.ErrDenied, "named pipe"},
		"a lock behind a link": {func(dir string, _ *Options) error {
			return os.Symlink("elsewhere", filepath.Join(dir, "tokens.lock"))
		}, sluice.ErrDenied, "tokens"},
		"a socket that is a link": {func(dir string, _ *Options) error {
			return os.Symlink("elsewhere", filepath.Join(dir, wire.SocketFile))
		}, sluice.ErrConflict, "no socket"},
		"a socket that is a file": {func(dir string, _ *Options) error {
			return os.WriteFile(filepath.Join(dir, wire.SocketFile), nil, 0o600)
		}, sluice.ErrConflict, "no socket"},
		"a path too long": {func(dir string, o *Options) error {
			o.StateDir = filepath.Join(dir, strings.Repeat("d", 100))
			return os.Mkdir(o.StateDir, 0o700)
		}, sluice.ErrInvalid, "at most 107"},
	} {
		dir := stateDir(t)
		o := Options{StateDir: dir, Listen: "127.0.0.1:0"}
		if err := c.prepare(dir, &o); err != nil {
			t.Fatal(err)
		}
		d, err := Open(o)
		if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v", name, err)
		}
		if d != nil {
			d.Close()
		}
	}
}

func TestTheHonestFlagLetsOtherHostsCallInTheClear(t *testing.T) {
	t.Parallel()
	w := open(t, nil, func(o *Options) { o.Listen, o.InsecurePlaintext = "0.0.0.0:0", true })
	if a := w.do(w.request("GET", "/v1/status", "")); a.status != 401 {
		t.Errorf("without a token: %d", a.status)
	}
	if a := w.do(w.request("GET", "/v1/status", "", w.bearer("operator"))); a.status != 200 {
		t.Errorf("with one: %d", a.status)
	}
}

func TestATakenPortIsNamed(t *testing.T) {
	t.Parallel()
	w := open(t, nil, nil)
	d, err := Open(Options{StateDir: stateDir(t), Listen: w.d.tcp.Addr().String()})
	if !errors.Is(err, sluice.ErrConflict) || !strings.Contains(err.Error(), "--listen") {
		t.Errorf("got %v %v", d, err)
	}
}

func TestTheSocketOfADeadServiceIsReplacedAndThatOfALiveOneIsNot(t *testing.T) {
	t.Parallel()
	dir := stateDir(t)
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, wire.SocketFile), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	dead.Close()
	l, err := listenUnix(filepath.Join(dir, wire.SocketFile))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	info, err := os.Lstat(filepath.Join(dir, wire.SocketFile))
	if err != nil || info.Mode() != os.ModeSocket|0o600 {
		t.Errorf("socket: %v %v", info, err)
	}
	if second, err := listenUnix(filepath.Join(dir, wire.SocketFile)); !errors.Is(err, sluice.ErrConflict) || !strings.Contains(err.Error(), "a service listens there;") {
		t.Errorf("got %v %v", second, err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 {
		t.Errorf("left behind: %v", left)
	}
}

func TestASocketThatIsNoLongerOursStays(t *testing.T) {
	t.Parallel()
	w := open(t, nil, nil)
	path := filepath.Join(w.dir, wire.SocketFile)
	if err := errors.Join(os.Remove(path), os.WriteFile(path, []byte("other"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := w.stop(); err != nil {
		t.Error(err)
	}
	if data, err := os.ReadFile(path); string(data) != "other" {
		t.Errorf("%q %v", data, err)
	}
}

func TestServeEndsWhenAListenerFails(t *testing.T) {
	t.Parallel()
	w := open(t, nil, nil)
	w.d.tcp.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for _, err := os.Stat(filepath.Join(w.dir, wire.SocketFile)); err == nil && ctx.Err() == nil; _, err = os.Stat(filepath.Join(w.dir, wire.SocketFile)) {
	}
	if err := w.stop(); err == nil || !strings.Contains(err.Error(), "a listener failed") {
		t.Errorf("got %v", err)
	}
}

func TestATakenAddressIsFoundBeforeThereIsAStateDirectory(t *testing.T) {
	t.Parallel()
	l, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	o := Options{StateDir: filepath.Join(t.TempDir(), "none"), Listen: l.Addr().String()}
	if err := o.Check(); !errors.Is(err, sluice.ErrConflict) {
		t.Errorf("%v, want a conflict", err)
	}
	o.Listen = "127.0.0.1:0"
	if err := o.Check(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(o.StateDir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the state directory: %v", err)
	}
}
