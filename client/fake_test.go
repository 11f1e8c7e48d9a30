package client

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/queue/queuetest"
)

// fake answers as the tests tell it to: what a live service would do in a moment that can't be had from one.
type fake struct {
	*httptest.Server
	mux *http.ServeMux

	mu    sync.Mutex
	calls []seen
}

// seen is a call that came.
type seen struct{ method, path, request, token, session string }

func newFake(t *testing.T) *fake {
	f := &fake{mux: http.NewServeMux()}
	f.Server = httptest.NewServer(f)
	t.Cleanup(f.Close)
	f.on("GET /v1/status", wire.ServiceStatus{Version: "fake", Runs: []wire.Status{}})
	f.mux.HandleFunc("GET /v1/sessions/{id}", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(wire.Session{GraceSeconds: 5})
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	f.mux.HandleFunc("DELETE /v1/sessions/{id}", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	spec, err := wire.SpecOf(&sluice.RunConfig{RunID: "r1", Schema: queuetest.Schema(), Caps: sluice.Caps{MaxBytes: 1 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	f.on("GET /v1/runs/r1", wire.Run{Spec: spec, Store: wire.StoreInfo{URI: "file:///elsewhere", IDFile: "/nowhere/id", ID: newID()}})
	return f
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	f.calls = append(f.calls, seen{r.Method, r.URL.Path, r.Header.Get(wire.RequestHeader), r.Header.Get("Authorization"), r.Header.Get(wire.SessionHeader)})
	f.mu.Unlock()
	f.mux.ServeHTTP(w, r)
}

// of lists the calls of one kind.
func (f *fake) of(method, path string) (of []seen) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.calls {
		if c.method == method && c.path == path {
			of = append(of, c)
		}
	}
	return of
}

// on answers with body.
func (f *fake) on(pattern string, body any) {
	f.mux.HandleFunc(pattern, func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, body) })
}

// onEach answers the calls of a kind one after the other, the last for all that follow.
func (f *fake) onEach(pattern string, answers ...http.HandlerFunc) {
	var mu sync.Mutex
	f.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		h := answers[0]
		if len(answers) > 1 {
			answers = answers[1:]
		}
		mu.Unlock()
		h(w, r)
	})
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	if p, ok := body.(*wire.Problem); ok {
		w.Header().Set("Content-Type", wire.ProblemType)
		status = p.Status
	}
	data, err := json.Marshal(body)
	if err != nil {
		panic(err)
	}
	w.WriteHeader(status)
	_, _ = w.Write(data)
}

func says(body any) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, body) }
}

func refuses(err error) http.HandlerFunc { return says(wire.ProblemOf(err)) }

// hangsUp breaks the connection without an answer.
func hangsUp(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }

// halfAnswers breaks the connection in the middle of one.
func halfAnswers(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", "1000")
	_, _ = w.Write([]byte(`{"results":[`))
	_ = http.NewResponseController(w).Flush()
	panic(http.ErrAbortHandler)
}

// dialed is a client of the fake that the test closes.
func dialed(t *testing.T, f *fake, edit func(*Options)) *Client {
	t.Helper()
	o := Options{URL: f.URL, Patience: 10 * time.Second, Logger: slog.New(slog.DiscardHandler)}
	if edit != nil {
		edit(&o)
	}
	c, err := Dial(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return c
}

func opened(t *testing.T, c *Client) *Run {
	t.Helper()
	r, err := c.Open(context.Background(), "r1")
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// logTo is a logger whose lines a test can read.
type logTo struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logTo) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logTo) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}
