package client

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/service"
	"github.com/sluice-ml/sluice/service/access"
)

// live is a service in this process, behind real sockets, that can be stopped and started again.
type live struct {
	t    testing.TB
	opts service.Options
	wrap []func(http.Handler) http.Handler // round the service
	dir  string
	tcp  string // address

	mu      sync.Mutex
	svc     *service.Service
	servers []*http.Server
	clients []*Client
}

// tmpfs and disk are directories for a service's store.
func tmpfs(t testing.TB) string { return tempIn(t, "/dev/shm") }

func disk(t testing.TB) string {
	t.Helper()
	for _, dir := range []string{os.TempDir(), "/var/tmp", "."} {
		if !onTmpfs(dir) {
			return tempIn(t, dir)
		}
	}
	t.Skip("there is no directory outside of tmpfs")
	return ""
}

func tempIn(t testing.TB, under string) string {
	t.Helper()
	dir, err := os.MkdirTemp(under, "sluice-client-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// serve starts a service whose store lies under dir, and ends it with the test.
func serve(t testing.TB, dir string, edit func(*service.Options), wrap ...func(http.Handler) http.Handler) *live {
	t.Helper()
	l := &live{t: t, dir: dir, wrap: wrap, opts: service.Options{
		StateDir: filepath.Join(dir, "state"), StoreDir: filepath.Join(dir, "store"), MaxBytes: 1 << 40, Journals: &journals{}, Logger: slog.New(slog.DiscardHandler), Version: "test",
	}}
	if edit != nil {
		edit(&l.opts)
	}
	l.start()
	t.Cleanup(l.stop)
	t.Cleanup(l.hangUp)
	return l
}

// hangUp closes the clients.
func (l *live) hangUp() {
	for _, c := range l.clients {
		if err := c.Close(); err != nil {
			l.t.Errorf("Close of a client: %v", err)
		}
	}
	l.clients = nil
}

func (l *live) start() {
	l.t.Helper()
	svc, err := service.Open(context.Background(), l.opts)
	if err != nil {
		l.t.Fatal(err)
	}
	addr := "127.0.0.1:0"
	if l.tcp != "" {
		addr = l.tcp
	}
	tcp, err := net.Listen("tcp", addr)
	if err != nil {
		l.t.Fatal(err)
	}
	l.tcp = tcp.Addr().String()
	socket := filepath.Join(l.dir, "sock")
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		l.t.Fatal(err)
	}
	local, err := net.Listen("unix", socket)
	if err != nil {
		l.t.Fatal(err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.svc, l.servers = svc, nil
	handler := svc.Handler()
	for _, w := range l.wrap {
		handler = w(handler)
	}
	for listener, uid := range map[net.Listener]int{tcp: -1, local: os.Getuid()} {
		s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			caller := access.Caller{Name: "test", Role: access.Operator, UID: uid}
			handler.ServeHTTP(w, r.WithContext(access.WithCaller(r.Context(), caller)))
		}), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
		l.servers = append(l.servers, s)
		go func() { _ = s.Serve(listener) }() // ends with stop
	}
}

// stop ends service and connections as a restart does: whoever waits is cut off.
func (l *live) stop() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.servers {
		if err := s.Close(); err != nil {
			l.t.Error(err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := l.svc.Close(ctx); err != nil {
		l.t.Errorf("Close of the service: %v", err)
	}
}

// way is how a client reaches the service.
type way struct {
	name   string
	mapped bool
	edit   func(*live, *Options)
}

var (
	overUnix = way{"unix", true, func(l *live, o *Options) { o.URL = "unix:" + filepath.Join(l.dir, "sock") }}
	overTCP  = way{"tcp", true, func(l *live, o *Options) { o.URL = "http://" + l.tcp }}
	overHTTP = way{"http only", false, func(l *live, o *Options) { o.URL, o.HTTPOnly = "http://"+l.tcp, true }}
	ways     = []way{overUnix, overTCP, overHTTP}
)

// dial makes a client that the test closes.
func (l *live) dial(w way, edit func(*Options)) *Client {
	l.t.Helper()
	o := Options{Logger: slog.New(slog.DiscardHandler), Patience: 30 * time.Second}
	w.edit(l, &o)
	if edit != nil {
		edit(&o)
	}
	c, err := Dial(context.Background(), o)
	if err != nil {
		l.t.Fatal(err)
	}
	c.healthWait = 30 * time.Second // the suites compare, on a machine that has other work
	l.mu.Lock()
	l.clients = append(l.clients, c)
	l.mu.Unlock()
	return c
}

// run creates a run, or finds it, and opens it.
func (l *live) run(c *Client, cfg sluice.RunConfig) *Run {
	l.t.Helper()
	if _, err := c.CreateRun(context.Background(), cfg); err != nil {
		l.t.Fatal(err)
	}
	r, err := c.Open(context.Background(), cfg.RunID)
	if err != nil {
		l.t.Fatal(err)
	}
	return r
}

// journals keeps the journals of a service in memory, over its restarts.
type journals struct {
	mu     sync.Mutex
	byName map[string]*journal
}

var _ service.Journals = (*journals)(nil)

func (j *journals) Journal(_ context.Context, name string) (sluice.Journal, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.byName == nil {
		j.byName = map[string]*journal{}
	}
	if j.byName[name] == nil {
		j.byName[name] = &journal{}
	}
	return j.byName[name], nil
}

func (j *journals) List(context.Context) (names []string, _ error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for name := range j.byName {
		names = append(names, name)
	}
	return names, nil
}

func (j *journals) Delete(_ context.Context, name string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.byName, name)
	return nil
}

func (j *journals) Close() error { return nil }

type journal struct {
	mu      sync.Mutex
	records []sluice.Record
}

func (j *journal) Append(_ context.Context, records []sluice.Record) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.records = append(j.records, records...)
	return nil
}

func (j *journal) Replay(_ context.Context, f func(sluice.Record) error) error {
	j.mu.Lock()
	records := slices.Clone(j.records)
	j.mu.Unlock()
	for _, r := range records {
		if err := f(r); err != nil {
			return err
		}
	}
	return nil
}

func (j *journal) Compact(_ context.Context, snapshot []sluice.Record) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.records = slices.Clone(snapshot)
	return nil
}

func (j *journal) Close() error { return nil }

// storeInfo asks where a run's files are.
func (l *live) storeInfo(c *Client, runID string) wire.StoreInfo {
	l.t.Helper()
	w, err := c.run(context.Background(), runID)
	if err != nil {
		l.t.Fatal(err)
	}
	return w.Store
}
