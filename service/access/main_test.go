package access

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/sluice-ml/sluice/internal/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// house is a door with an echo behind it: who called, with what.
type house struct {
	t      *testing.T
	d      *Door
	dir    string
	url    string
	client *http.Client
	log    *logBuffer
	stop   func() error // ends Serve and says what it returned
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func stateDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "door") // t.TempDir's are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// open starts a door on a free port. change may be nil.
func open(t *testing.T, h http.Handler, change func(*Options)) *house {
	t.Helper()
	w := &house{t: t, dir: stateDir(t), log: &logBuffer{}}
	o := Options{StateDir: w.dir, Listen: "127.0.0.1:0", Version: "test", Log: slog.New(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	if change != nil {
		change(&o)
	}
	d, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	w.d, w.url = d, d.Endpoint().URL
	w.client = &http.Client{Transport: &http.Transport{}, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	if h == nil {
		h = http.HandlerFunc(echo)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- d.Serve(ctx, h) }()
	var once sync.Once
	w.stop = func() (err error) {
		once.Do(func() {
			cancel()
			err = <-ended
		})
		return err
	}
	t.Cleanup(func() {
		w.client.CloseIdleConnections()
		if err := w.stop(); err != nil {
			t.Errorf("the door does not close: %v", err)
		}
	})
	return w
}

func echo(w http.ResponseWriter, r *http.Request) {
	n, err := io.Copy(io.Discard, r.Body)
	c := CallerOf(r.Context())
	if err != nil {
		w.WriteHeader(http.StatusTeapot)
	}
	fmt.Fprintf(w, "%s %s %s %d read %d %v", c.Name, c.Role, c.Run, c.UID, n, err)
}

// token is the value of a token of the house.
func (w *house) token(name string) string {
	w.t.Helper()
	tokens, err := wire.ReadTokens(w.dir)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, tok := range tokens {
		if tok.Name == name {
			return tok.Value
		}
	}
	w.t.Fatalf("no token %q", name)
	return ""
}

// answer is what came back: the status, the code of the problem if it is one, and the body.
type answer struct {
	status int
	code   string
	body   string
	header http.Header
	close  bool // the connection ends with it
}

func (w *house) do(r *http.Request) answer {
	w.t.Helper()
	resp, err := w.client.Do(r)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	a := answer{status: resp.StatusCode, body: string(body), header: resp.Header, close: resp.Close}
	if resp.Header.Get("Content-Type") == wire.ProblemType {
		var p wire.Problem
		if err := json.Unmarshal(body, &p); err != nil || p.Status != a.status || p.Detail == "" {
			w.t.Errorf("no whole problem document: %s", body)
		}
		a.code = p.Code
	}
	return a
}

// request makes one with headers given as "Name: value".
func (w *house) request(method, path, body string, headers ...string) *http.Request {
	w.t.Helper()
	r, err := http.NewRequestWithContext(w.t.Context(), method, w.url+path, strings.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		if name == "Host" {
			r.Host = value
		} else {
			r.Header.Set(name, value)
		}
	}
	return r
}

func (w *house) bearer(name string) string { return "Authorization: Bearer " + w.token(name) }

// overSocket makes the house's client call on the unix socket.
func (w *house) overSocket() {
	w.client.Transport = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(w.dir, wire.SocketFile))
	}}
	w.url = "http://localhost"
}
