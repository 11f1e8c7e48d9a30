package client

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/httpcall"
	"github.com/sluice-ml/sluice/internal/wire"
)

// Client is a connection to a service: one session, and as many HTTP connections as its calls need. Make one with [Dial] and end it with Close. All methods may be
// called from any goroutine.
type Client struct {
	target   target
	calls    *httpcall.Caller // of calls
	http     *http.Client     // of what goes on for long: samples, and the session's connection
	log      *slog.Logger
	httpOnly bool
	ranges   int
	patience time.Duration
	// healthWait bounds [sluice.Store].Health.
	healthWait time.Duration

	session  string
	headers  http.Header  // of every request
	requests atomic.Int64 // ids that were given out

	ended  context.Context // what runs in the background ends with it
	end    context.CancelCauseFunc
	behind sync.WaitGroup // the goroutines of this client

	mu      sync.Mutex
	closed  bool
	owed    map[string]map[string]bool // handles that could not be given back yet, by run; true if their mappings are to stay counted
	pinners map[*store]bool            // stores that have handed something out
}

const handshakeTime = 5 * time.Second

var errClosed = &sluice.Error{Kind: sluice.Closed, Op: "client", Detail: "the client is closed"}

// Dial finds the service, checks that it answers, and opens a session. Errors: ErrInvalid (an option), ErrUnavailable (nobody answers), ErrDenied (no token, or one
// that is not known).
func Dial(ctx context.Context, o Options) (*Client, error) {
	t, err := o.resolve()
	if err != nil {
		return nil, err
	}
	c := &Client{
		target: t, log: o.Logger, httpOnly: o.HTTPOnly, ranges: o.Ranges, patience: o.Patience, healthWait: healthWait,
		session: newID(), owed: map[string]map[string]bool{}, pinners: map[*store]bool{},
	}
	if c.log == nil {
		c.log = slog.Default()
	}
	if c.ranges == 0 {
		c.ranges = 4
	}
	if c.patience == 0 {
		c.patience = defaultPatience
	}
	c.headers = http.Header{"User-Agent": {"sluice-client"}, wire.SessionHeader: {c.session}}
	if t.token != "" {
		c.headers.Set("Authorization", "Bearer "+t.token)
	}
	c.http = &http.Client{
		Transport: t.transport(),
		// A redirection would take the token elsewhere.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	if c.calls, err = t.caller(c.headers); err != nil {
		return nil, err
	}
	if t.inClear() {
		c.log.Warn("client: the token crosses the network unencrypted", "url", t.name)
	}
	c.ended, c.end = context.WithCancelCause(context.Background())
	if _, err := c.Status(ctx); err != nil {
		c.end(err)
		c.hangUp()
		return nil, err
	}
	held := make(chan struct{})
	c.behind.Go(func() { c.hold(sync.OnceFunc(func() { close(held) })) }) // ends with c.ended
	select {
	case <-held: // or tried at least
		return c, nil
	case <-ctx.Done():
		return nil, errors.Join(context.Cause(ctx), c.Close())
	}
}

// dial makes a connection of TCP or to the unix socket.
func (t *target) dial(ctx context.Context, network, address string) (net.Conn, error) {
	d := net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}
	if t.socket != "" {
		network, address = "unix", t.socket
	}
	return d.DialContext(ctx, network, address)
}

// transport speaks HTTP/1.1 only, where each of several transfers has a connection of its own.
func (t *target) transport() *http.Transport {
	return &http.Transport{
		DialContext: t.dial, TLSClientConfig: t.tls, TLSHandshakeTimeout: handshakeTime, ExpectContinueTimeout: time.Second,
		MaxIdleConns: 256, MaxIdleConnsPerHost: 256, IdleConnTimeout: 90 * time.Second, DisableCompression: true,
		WriteBufferSize: 64 << 10, ReadBufferSize: 16 << 10,
	}
}

// caller makes calls that all have the headers.
func (t *target) caller(headers http.Header) (*httpcall.Caller, error) {
	host, address, err := hostOf(t.base)
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(t.base)
	if err != nil {
		return nil, invalid("url", "can't be read")
	}
	dial := t.dial
	if u.Scheme == "https" {
		dial = t.dialTLS
	}
	var lines []string
	for name := range headers {
		lines = append(lines, name+": "+headers.Get(name))
	}
	return httpcall.New(func(ctx context.Context) (net.Conn, error) { return dial(ctx, "tcp", address) }, host, u.EscapedPath(), lines...)
}

// hostOf is what a URL's host is called in requests, and where it is dialled, both as net/http has it: a name in ASCII, and no colon without a port behind it.
func hostOf(base string) (host, address string, err error) {
	req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, base, http.NoBody)
	if err != nil {
		return "", "", invalid("url", "can't be read")
	}
	var sent bytes.Buffer
	if err := req.Write(&sent); err != nil {
		return "", "", invalid("url", "names a host that can't be called")
	}
	as, err := http.ReadRequest(bufio.NewReader(&sent))
	if err != nil {
		return "", "", invalid("url", "names a host that can't be called")
	}
	port := req.URL.Port()
	if port == "" {
		port = req.URL.Scheme // a port has its scheme's name too
	}
	return as.Host, net.JoinHostPort((&url.URL{Host: as.Host}).Hostname(), port), nil
}

func (t *target) dialTLS(ctx context.Context, network, address string) (net.Conn, error) {
	plain, err := t.dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, errors.Join(err, plain.Close())
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if t.tls != nil {
		config = t.tls.Clone()
	}
	config.ServerName, config.NextProtos = host, []string{"http/1.1"}
	conn := tls.Client(plain, config)
	ctx, cancel := context.WithTimeout(ctx, handshakeTime)
	defer cancel()
	if err := conn.HandshakeContext(ctx); err != nil {
		return nil, errors.Join(err, plain.Close())
	}
	return conn, nil
}

// Close ends the session: reservations and pins go, leases of its consumers return to the head, and calls under way end with ErrClosed. Tensors that were handed out stay valid until they are closed. It waits a
// few seconds at most for a service that does not answer, which then finds out by itself. It is idempotent.
func (c *Client) Close() error {
	c.mu.Lock()
	already := c.closed
	c.closed = true
	c.mu.Unlock()
	if already {
		c.behind.Wait()
		return nil
	}
	c.end(errClosed)
	c.calls.End(errClosed)
	c.behind.Wait()
	ctx, cancel := background(context.Background())
	defer cancel()
	_, err := c.do(ctx, call{method: http.MethodDelete, path: "/v1/sessions/" + c.session, patience: time.Second, last: true})
	if sluice.KindOf(err) == sluice.NotFound {
		err = nil
	}
	c.http.CloseIdleConnections()
	return err
}

// hangUp ends all connections.
func (c *Client) hangUp() {
	c.calls.End(errClosed)
	c.http.CloseIdleConnections()
}

// open fails once the client is closed.
func (c *Client) open() error {
	if c.isClosed() {
		return errClosed
	}
	return nil
}

func (c *Client) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// Status describes the service.
type Status struct {
	Version    string
	Host       string
	PID        int
	Started    time.Time
	Uptime     time.Duration
	Ready      bool
	Durability string // "process" or "power"
	StoreDir   string
	MaxBytes   int64 // what the caps of all runs may add up to; 0: anything
	CapBytes   int64 // what they add up to
	Sessions   int
	Runs       []sluice.Status
}

// Status asks the service about itself.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var w wire.ServiceStatus
	if err := c.call(ctx, call{method: http.MethodGet, path: "/v1/status", out: &w}); err != nil {
		return Status{}, err
	}
	s := Status{
		Version: w.Version, Host: w.Host, PID: w.PID, Started: w.Started, Uptime: w.UptimeSeconds.Duration(), Ready: w.Ready, Durability: w.Durability, StoreDir: w.StoreDir,
		MaxBytes: w.MaxBytes, CapBytes: w.CapBytes, Sessions: w.Sessions, Runs: make([]sluice.Status, len(w.Runs)),
	}
	for i := range w.Runs {
		s.Runs[i] = w.Runs[i].Domain()
	}
	return s, nil
}

// call is do for those who need not know how often.
func (c *Client) call(ctx context.Context, k call) error {
	if err := c.open(); err != nil {
		return err
	}
	_, err := c.do(ctx, k)
	return err
}

// RunInfo describes a run.
type RunInfo struct {
	Config   sluice.RunConfig // as resolved
	Created  time.Time
	StoreURI string
	Status   sluice.Status
}

func infoOf(w *wire.Run) (RunInfo, error) {
	cfg, err := w.Spec.Config()
	if err != nil {
		return RunInfo{}, &sluice.Error{Kind: sluice.Corrupt, Op: "client", Subject: w.Spec.RunID, Detail: "the service describes a run that can't be", Err: err}
	}
	return RunInfo{Config: cfg, Created: w.Created, StoreURI: w.Store.URI, Status: w.Status.Domain()}, nil
}

// CreateRun creates a run. Creating it again with the same configuration is success; with another one it is ErrDuplicate.
func (c *Client) CreateRun(ctx context.Context, cfg sluice.RunConfig) (RunInfo, error) {
	spec, err := wire.SpecOf(&cfg)
	if err != nil {
		return RunInfo{}, &sluice.Error{Kind: sluice.Invalid, Op: "client: create run", Subject: cfg.RunID, Err: err}
	}
	var w wire.Run
	if err := c.call(ctx, call{method: http.MethodPost, path: "/v1/runs", in: &spec, out: &w}); err != nil {
		return RunInfo{}, err
	}
	return infoOf(&w)
}

// Runs lists the runs.
func (c *Client) Runs(ctx context.Context) ([]RunInfo, error) {
	var w wire.RunList
	if err := c.call(ctx, call{method: http.MethodGet, path: "/v1/runs", out: &w}); err != nil {
		return nil, err
	}
	infos := make([]RunInfo, len(w.Runs))
	for i := range w.Runs {
		var err error
		if infos[i], err = infoOf(&w.Runs[i]); err != nil {
			return nil, err
		}
	}
	return infos, nil
}

// Run describes one run. ErrNotFound if there is none of that name.
func (c *Client) Run(ctx context.Context, runID string) (RunInfo, error) {
	w, err := c.run(ctx, runID)
	if err != nil {
		return RunInfo{}, err
	}
	return infoOf(w)
}

func (c *Client) run(ctx context.Context, runID string) (*wire.Run, error) {
	var w wire.Run
	return &w, c.call(ctx, call{method: http.MethodGet, path: runPath(runID, ""), out: &w})
}

func runPath(runID, rest string) string { return "/v1/runs/" + url.PathEscape(runID) + rest }

// CloseRun ends the puts of a run; what is pending drains. A cause that is not empty reaches the consumers behind the drain.
func (c *Client) CloseRun(ctx context.Context, runID, cause string) error {
	return c.call(ctx, call{method: http.MethodPost, path: runPath(runID, "/close"), in: &wire.CloseRun{Cause: cause}})
}

// DeleteRun removes a run with all its samples and records. It is ErrNotFound if there is none of that name.
func (c *Client) DeleteRun(ctx context.Context, runID string) error {
	err := c.open()
	if err != nil {
		return err
	}
	attempts, err := c.do(ctx, call{method: http.MethodDelete, path: runPath(runID, "")})
	if attempts > 1 && sluice.KindOf(err) == sluice.NotFound {
		return nil // the answer to the first attempt was lost
	}
	return err
}

// Check holds a ref against a schema, as the queue of a run of that schema would: ErrSchema says in what they differ. The sample need not be there.
func (c *Client) Check(ctx context.Context, ref sluice.Ref, schema *sluice.Schema) error {
	doc, err := json.Marshal(schema)
	if err != nil {
		return &sluice.Error{Kind: sluice.Invalid, Op: "client: check", Subject: ref.SampleID(), Err: err}
	}
	return c.call(ctx, call{method: http.MethodPost, path: "/v1/check", in: &wire.Judge{Ref: ref, Schema: doc}})
}

// Reshape changes the number of ranks of a run and of samples a rank and step. ErrConflict while a lease is out.
func (c *Client) Reshape(ctx context.Context, runID string, ranks, perRank int) error {
	return c.call(ctx, call{method: http.MethodPost, path: runPath(runID, "/reshape"), in: &wire.Reshape{Ranks: ranks, PerRank: perRank}})
}

// Configure changes a run that goes on: its visibility timeout, its marks, and whether it is closed; see [sluice.RunChange]. It returns the run as it is then. ErrInvalid names the field
// that does not fit; ErrConflict if it can't be reopened: samples are pending or leased yet, or it has windows.
func (c *Client) Configure(ctx context.Context, runID string, change sluice.RunChange) (RunInfo, error) {
	in, w := wire.ConfigureOf(&change), wire.Run{}
	if err := c.call(ctx, call{method: http.MethodPost, path: runPath(runID, "/configure"), in: &in, out: &w}); err != nil {
		return RunInfo{}, err
	}
	return infoOf(&w)
}

// SetVersions changes a run's version gates: the values of target_model_version that are let in, any if there are none, and the lowest draft_weight_version, any if it is empty.
func (c *Client) SetVersions(ctx context.Context, runID string, target []string, minDraft string) error {
	return c.call(ctx, call{method: http.MethodPost, path: runPath(runID, "/versions"), in: &wire.Versions{TargetVersions: target, MinDraftVersion: minDraft}})
}
