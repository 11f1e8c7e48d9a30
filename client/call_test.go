package client

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/queue/queuetest"
)

var bg = context.Background()

const testToken = "abcdefghijklmnopqrstuvwxyz0123"

func TestLostAnswersAreAskedForAgainWithTheSameID(t *testing.T) {
	t.Parallel()
	unavailable := &sluice.Error{Kind: sluice.Unavailable, Op: "service", Detail: "is starting"}
	busy := func(w http.ResponseWriter, _ *http.Request) {
		answer(w, 0, &wire.Problem{Status: http.StatusTooManyRequests, Code: wire.CodeBusy})
	}
	bare := func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "<html>bad gateway</html>", http.StatusBadGateway)
	}
	f := newFake(t)
	good := wire.Settled{Results: []wire.SettleResult{{Status: sluice.Settled, As: sluice.Ack}}}
	f.onEach("POST /v1/runs/r1/settle", hangsUp, halfAnswers, refuses(unavailable), busy, bare, says(good))
	q := opened(t, dialed(t, f, nil)).Queue()
	got, err := q.Settle(bg, sluice.SettleRequest{Consumer: sluice.Consumer{Name: "ann"}, Settlements: make([]sluice.Settlement, 1)})
	if err != nil || len(got) != 1 || got[0].Status != sluice.Settled {
		t.Fatalf("got %v, %v", got, err)
	}
	calls := f.of("POST", "/v1/runs/r1/settle")
	if len(calls) != 6 {
		t.Fatalf("%d attempts, want 6", len(calls))
	}
	for _, c := range calls {
		if c.request == "" || c.request != calls[0].request {
			t.Errorf("the attempts have the ids %v", calls)
		}
	}
}

func TestRefusalsAreTheServicesErrorsAndAreNotRepeated(t *testing.T) {
	t.Parallel()
	for _, kind := range []sluice.Kind{
		sluice.Invalid, sluice.NotFound, sluice.Duplicate, sluice.Full, sluice.NoSpace, sluice.Closed, sluice.Stale, sluice.SchemaError, sluice.Corrupt, sluice.Denied, sluice.Conflict,
		sluice.Wedged, sluice.Aborted, sluice.Unsupported, sluice.TargetFault,
	} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			want := &sluice.Error{Kind: kind, Op: "queue: put", Subject: "s-1", Detail: "is 17, want 18", Hint: "try 18"}
			f := newFake(t)
			f.onEach("POST /v1/runs/r1/leave", refuses(want))
			err := opened(t, dialed(t, f, nil)).Queue().Leave(bg, sluice.Consumer{Name: "ann"})
			var got *sluice.Error
			if !errors.As(err, &got) {
				t.Fatalf("%v is no *sluice.Error", err)
			}
			if d := cmp.Diff(want, got, cmpopts.IgnoreFields(sluice.Error{}, "Err")); d != "" || got.Error() != want.Error() {
				t.Errorf("-want +got:\n%s", d)
			}
			if n := len(f.of("POST", "/v1/runs/r1/leave")); n != 1 {
				t.Errorf("%d attempts, want 1", n)
			}
		})
	}
}

func TestAnErrorOfOneItemIsItsOwn(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	want := &sluice.Error{Kind: sluice.Duplicate, Op: "queue: put", Subject: "s-1", Detail: "is here"}
	f.onEach("POST /v1/runs/r1/commit", says(wire.Commits{Results: []wire.CommitResult{{Error: wire.ProblemOf(want)}}}), says(wire.Commits{}))
	q := opened(t, dialed(t, f, nil)).Queue()
	put := sluice.PutRequest{Ref: queuetest.NewRef("file:///elsewhere", "r1", "s-1", 10, nil)}
	if _, err := q.Put(bg, put); !errors.Is(err, sluice.ErrDuplicate) || err.Error() != want.Error() {
		t.Errorf("got %v, want %v", err, want)
	}
	if _, err := q.Put(bg, put); !errors.Is(err, sluice.ErrCorrupt) {
		t.Errorf("an answer without results: %v, want ErrCorrupt", err)
	}
}

func TestPatienceEndsAsUnavailable(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.onEach("GET /v1/runs/r1/status", hangsUp)
	q := opened(t, dialed(t, f, func(o *Options) { o.Patience = 100 * time.Millisecond })).Queue()
	_, err := q.Status(bg)
	if !errors.Is(err, sluice.ErrUnavailable) || !strings.Contains(err.Error(), f.URL) {
		t.Errorf("got %v, want ErrUnavailable that names %s", err, f.URL)
	}
	if n := len(f.of("GET", "/v1/runs/r1/status")); n < 2 {
		t.Errorf("%d attempts, want several", n)
	}
}

func TestTheContextsEndIsItsCause(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.onEach("GET /v1/runs/r1/status", hangsUp)
	q := opened(t, dialed(t, f, nil)).Queue()
	cause := errors.New("the trainer has had enough")
	ctx, cancel := context.WithCancelCause(bg)
	time.AfterFunc(30*time.Millisecond, func() { cancel(cause) })
	if _, err := q.Status(ctx); !errors.Is(err, cause) {
		t.Errorf("got %v, want the cause", err)
	}
	before := len(f.of("GET", "/v1/runs/r1/status"))
	if _, err := q.Status(ctx); !errors.Is(err, cause) {
		t.Errorf("a call with an ended context: %v", err)
	}
	if n := len(f.of("GET", "/v1/runs/r1/status")); n != before {
		t.Error("a call with an ended context reached the service")
	}
}

func TestWhatIsNoServiceIsNotAskedTwice(t *testing.T) {
	t.Parallel()
	for name, h := range map[string]http.HandlerFunc{
		"a page":         func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("<html>hello</html>")) },
		"a missing page": http.NotFound,
		"a redirection": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "https://example.com/", http.StatusFound)
		},
		"an answer cut short": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write([]byte(`{"version":`))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := 0
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { n++; h(w, r) }))
			defer s.Close()
			_, err := Dial(bg, Options{URL: s.URL, Token: testToken})
			if err == nil || n != 1 {
				t.Fatalf("Dial: %v after %d attempts, want an error after one", err, n)
			}
			if k := sluice.KindOf(err); k != sluice.Unavailable && k != sluice.Corrupt {
				t.Errorf("the kind is %q", k)
			}
		})
	}
}

func TestTokensAreSentAndNeverShown(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(testToken+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, edit := range map[string]func(*Options){
		"by value":  func(o *Options) { o.Token = testToken },
		"in a file": func(o *Options) { o.TokenFile = file },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t)
			f.onEach("GET /v1/runs/r1/status", refuses(&sluice.Error{Kind: sluice.Denied}))
			var log logTo
			c := dialed(t, f, func(o *Options) {
				edit(o)
				o.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
			})
			_, err := opened(t, c).Queue().Status(bg)
			if !errors.Is(err, sluice.ErrDenied) {
				t.Errorf("got %v", err)
			}
			if got := f.of("GET", "/v1/status")[0].token; got != "Bearer "+testToken {
				t.Errorf("the header is %q", got)
			}
			if strings.Contains(log.String()+err.Error(), testToken) {
				t.Error("the token is shown")
			}
		})
	}
}

func TestTheTokenOfTheStateDirectoryGoesToItsOwnServiceAlone(t *testing.T) {
	t.Parallel()
	const secret = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	state := func(url string) string {
		dir := t.TempDir()
		tokens, err := wire.FormatTokens([]wire.Token{{Name: "op", Role: "operator", Value: secret}})
		if err != nil {
			t.Fatal(err)
		}
		endpoint, err := json.Marshal(wire.Endpoint{URL: url})
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.WriteFile(filepath.Join(dir, wire.TokensFile), tokens, 0o600), os.WriteFile(filepath.Join(dir, wire.EndpointFile), endpoint, 0o600)); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	for url, want := range map[string]string{"http://127.0.0.1:7447": secret, "http://127.0.0.1:7448": "", "http://evil.example:7447": "", "unix:/x": ""} {
		o := Options{URL: url, StateDir: state("http://127.0.0.1:7447")}
		if to, err := o.resolve(); err != nil || to.token != want {
			t.Errorf("%s is sent %q: %v", url, to.token, err)
		}
	}
	open := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(open, []byte(secret), 0o644); err != nil {
		t.Fatal(err)
	}
	o := Options{URL: "http://h", TokenFile: open}
	if _, err := o.resolve(); !errors.Is(err, sluice.ErrDenied) {
		t.Errorf("a file that others may read: %v", err)
	}
}

func TestOptionsThatCanNotBe(t *testing.T) {
	t.Parallel()
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		o    Options
		want []string
	}{
		"scheme":          {Options{URL: "ftp://h"}, []string{`"url"`, `"ftp"`, "unix:/path"}},
		"no host":         {Options{URL: "http://"}, []string{"names no host"}},
		"relative socket": {Options{URL: "unix:sock"}, []string{"not absolute"}},
		"user":            {Options{URL: "http://u:hush@h"}, []string{"a token goes into a file"}},
		"unreadable":      {Options{URL: "http://hush%zz"}, []string{"can't be read"}},
		"query":           {Options{URL: "http://h/?token=hush"}, []string{"has a query"}},
		"ranges":          {Options{URL: "http://h", Ranges: 65}, []string{"Ranges", "65", "1 to 64"}},
		"patience":        {Options{URL: "http://h", Patience: -1}, []string{"Patience"}},
		"token":           {Options{URL: "http://h", Token: "hush hush"}, []string{"Token", "26 to 256"}},
		"empty token":     {Options{URL: "http://h", TokenFile: empty}, []string{"holds no token"}},
		"no token file":   {Options{URL: "http://h", TokenFile: empty + "x"}, []string{"no such file"}},
		"no ca":           {Options{URL: "https://h", CAFile: empty}, []string{"CAFile", "no certificate"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := Dial(bg, c.o)
			if err == nil {
				t.Fatal("it worked")
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not say %q", err, w)
				}
			}
			if strings.Contains(err.Error(), "hush") {
				t.Errorf("%q shows what may be a secret", err)
			}
		})
	}
}

func TestTheServiceIsFoundInOrder(t *testing.T) {
	option, env, state := newFake(t), newFake(t), newFake(t)
	dir := t.TempDir()
	socket := filepath.Join(dir, wire.SocketFile)
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	local := &httptest.Server{Listener: l, Config: &http.Server{Handler: state.Config.Handler}}
	local.Start()
	defer local.Close()
	endpoint := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, wire.EndpointFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv(wire.EnvState, dir)
	t.Setenv(wire.EnvURL, "")
	t.Setenv(wire.EnvTokenFile, "")
	used := func(o Options) string {
		t.Helper()
		c, err := Dial(bg, o)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		return c.target.name
	}
	if _, err := Dial(bg, Options{}); !errors.Is(err, sluice.ErrUnavailable) || !strings.Contains(err.Error(), "sluice serve") {
		t.Errorf("without any service: %v", err)
	}
	endpoint(`{"pid":1,"socket":"` + socket + `","url":"` + state.URL + `"}`)
	if got := used(Options{}); got != "unix:"+socket {
		t.Errorf("the state directory's is %s", got)
	}
	endpoint(`{"pid":1,"url":"` + state.URL + `"}`)
	if _, err := Dial(bg, Options{}); !errors.Is(err, sluice.ErrNotFound) || !strings.Contains(err.Error(), wire.TokensFile) {
		t.Errorf("without a token: %v", err)
	}
	tokens, err := wire.FormatTokens([]wire.Token{{Name: "p", Role: "producer", Value: testToken + "p"}, {Name: "o", Role: "operator", Value: testToken}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, wire.TokensFile), tokens, 0o600); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if calls := state.of("GET", "/v1/status"); calls[len(calls)-1].token != "Bearer "+testToken {
			t.Errorf("the token of the state directory was not used")
		}
	}()
	if got := used(Options{StateDir: dir}); got != state.URL {
		t.Errorf("without a socket it is %s", got)
	}
	endpoint(`{"pid":1}`)
	if _, err := Dial(bg, Options{}); !errors.Is(err, sluice.ErrCorrupt) {
		t.Errorf("an endpoint without an address: %v", err)
	}
	t.Setenv(wire.EnvURL, env.URL)
	if got := used(Options{}); got != env.URL {
		t.Errorf("the environment's is %s", got)
	}
	if got := used(Options{URL: option.URL}); got != option.URL {
		t.Errorf("the option's is %s", got)
	}
}

func TestTheSessionIsHeldAndHeldAgain(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	c := dialed(t, f, nil)
	path := "/v1/sessions/" + c.session
	eventually(t, func() bool { return len(f.of("GET", path)) == 1 })
	f.CloseClientConnections()
	eventually(t, func() bool { return len(f.of("GET", path)) == 2 })
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if n := len(f.of("DELETE", path)); n != 1 {
		t.Errorf("%d ends of the session, want 1", n)
	}
	for _, s := range f.calls {
		if s.session != c.session {
			t.Errorf("%s %s in the session %q, want %q", s.method, s.path, s.session, c.session)
		}
	}
	if _, err := c.Status(bg); !errors.Is(err, sluice.ErrClosed) {
		t.Errorf("Status after Close: %v", err)
	}
}

func eventually(t *testing.T, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it does not come")
		}
	}
}

// Calls go where samples go, and name the host as they do.
func TestHostsAreCalledAsNetHTTPCallsThem(t *testing.T) {
	t.Parallel()
	for url, want := range map[string][2]string{
		"http://some.host:7447":             {"some.host:7447", "some.host:7447"},
		"http://some.host/prefix":           {"some.host", "some.host:http"},
		"https://some.host":                 {"some.host", "some.host:https"},
		"http://some.host:":                 {"some.host", "some.host:http"},
		"http://127.0.0.1:7447":             {"127.0.0.1:7447", "127.0.0.1:7447"},
		"http://[::1]:7447":                 {"[::1]:7447", "[::1]:7447"},
		"https://[::1]":                     {"[::1]", "[::1]:https"},
		"http://b\u00fccher.example:7447/p": {"xn--bcher-kva.example:7447", "xn--bcher-kva.example:7447"},
	} {
		target, err := parseURL(url)
		if err != nil {
			t.Fatal(err)
		}
		host, address, err := hostOf(target.base)
		if err != nil || host != want[0] || address != want[1] {
			t.Errorf("%s: got %q at %q (%v), want %q at %q", url, host, address, err, want[0], want[1])
		}
		// net/http dials the same, but for the names of ports.
		var dialed string
		tr := target.transport()
		tr.DialContext = func(_ context.Context, _, address string) (net.Conn, error) {
			dialed = address
			return nil, io.ErrUnexpectedEOF
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, target.base, http.NoBody)
		if err != nil {
			t.Fatal(err)
		}
		if resp, err := tr.RoundTrip(req); err == nil {
			resp.Body.Close()
		}
		dialed = strings.NewReplacer(":80", ":http", ":443", ":https").Replace(dialed)
		if dialed != address {
			t.Errorf("%s: net/http calls %q", url, dialed)
		}
	}
}

// A call that fails in the moment in which the client ends says that, and not how.
func TestACallThatFailsAtTheEndSaysSo(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	f.mux.HandleFunc("GET /v1/lost", hangsUp)
	c := dialed(t, f, nil)
	c.end(errClosed) // as Close begins, before it has broken off the calls
	if err := c.call(t.Context(), call{method: http.MethodGet, path: "/v1/lost"}); !errors.Is(err, sluice.ErrClosed) {
		t.Errorf("got %v", err)
	}
}
