package dashboard_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/service/dashboard"
)

// evil is what a caller may have put into a name or a reason.
const evil = `<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>`

const gib = 1 << 30

// fakeService answers what the page asks, with figures of its own.
type fakeService struct {
	mu     sync.Mutex
	status wire.ServiceStatus
	events chan wire.Event
	cut    chan struct{} // closed: every stream ends, and no new one begins
}

func (f *fakeService) away() chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.cut
}

func (f *fakeService) hangUp() {
	f.mu.Lock()
	defer f.mu.Unlock()
	select {
	case <-f.cut:
	default:
		close(f.cut)
	}
}

func (f *fakeService) comeBack() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cut = make(chan struct{})
}

func newFake() *fakeService {
	caps := sluice.Caps{MaxBytes: 8 * gib, HighWatermarkBytes: 6 * gib, LowWatermarkBytes: 2 * gib}
	return &fakeService{events: make(chan wire.Event, 10), cut: make(chan struct{}), status: wire.ServiceStatus{
		Version: "v0.4.0", Host: "trainer-7", Ready: true, UptimeSeconds: 7300, Durability: "process", MaxBytes: 64 * gib, CapBytes: 16 * gib, Sessions: 5,
		Runs: []wire.Status{{
			RunID: "llama-eagle3", Pending: 40, Outstanding: 12, Put: 90412, Acked: 90360, Delivered: 90400, Redelivered: 28, Dead: 2, DeadTotal: 2, TokensPut: 180e6, TokensAcked: 179e6, BytesPut: 6e12, BytesAcked: 5.9e12,
			Health:         sluice.Health{ResidentBytes: 3 * gib, ResidentSamples: 54, ReservedBytes: gib / 2, DeadBytes: gib / 8, DeadSamples: 2, Caps: caps},
			ElapsedSeconds: 7200, ProducersWaiting: 1, ConsumersWaiting: 0, OldestLeaseSeconds: 3, Bottleneck: "the trainer: producers waited 3m0s for room, consumers 2s for samples", MissingRanks: []int{3},
			Producers: []wire.ProducerStatus{{Name: "h100-0", State: sluice.ProducerRunning, Put: 45000, LastSeenSeconds: 0.2}, {Name: "h100-1", State: sluice.ProducerRunning, Put: 45412, LastSeenSeconds: 0.4}},
			Consumers: []wire.ConsumerStatus{{Name: "trainer-0", Leases: 6, LeasedBytes: 400 << 20, Acked: 45180, LastSeenSeconds: 0.1}, {Name: "trainer-1", Rank: 1, Leases: 6, LeasedBytes: 400 << 20, Acked: 45180, LastSeenSeconds: 0.1}},
		}, {
			RunID: "qwen-dspark", Pending: 0, Outstanding: 96, Put: 400, Acked: 304, Paused: true, Starving: true, Dead: 0,
			Health:         sluice.Health{ResidentBytes: 7 * gib, ResidentSamples: 96, Caps: caps},
			ElapsedSeconds: 600, ProducersWaiting: 2, ConsumersWaiting: 1, OldestLeaseSeconds: 29, Bottleneck: "wedged",
			Wedged:    "consumer trainer-0 holds 96 leases (7.0 GiB) and waits for more, producers wait for 1.0 GiB, 1.0 GiB are free under the cap",
			Consumers: []wire.ConsumerStatus{{Name: "trainer-0", Leases: 96, LeasedBytes: 7 * gib, Waiting: true, Acked: 304, LastSeenSeconds: 12}, {Name: "consumer-338198e399a250b7", Waiting: true, LastSeenSeconds: 0.1}},
			Producers: []wire.ProducerStatus{{Name: evil, State: sluice.ProducerRunning, Put: 400, LastSeenSeconds: 40}},
		}, {RunID: "being-opened", Unavailable: "its journal failed; it is being opened again"}},
	}}
}

func (f *fakeService) handler() http.Handler {
	mux := http.NewServeMux()
	dashboard.Register(mux)
	answer := func(w http.ResponseWriter, v any) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(v)
	}
	mux.HandleFunc("GET /v1/runs/{run}", func(w http.ResponseWriter, r *http.Request) {
		answer(w, map[string]any{"spec": wire.RunSpec{RunID: r.PathValue("run"), VisibilityTimeoutSeconds: 30}})
	})
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) { f.mu.Lock(); defer f.mu.Unlock(); answer(w, f.status) })
	mux.HandleFunc("GET /v1/runs/{run}/dead-letters", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, map[string]any{"dead_letters": []map[string]any{
			{"ref": map[string]any{"sample_id": "llama-eagle3-0-17"}, "fails": 5, "expiries": 0, "reasons": []string{"first", evil}},
			{"ref": map[string]any{"sample_id": "llama-eagle3-0-99"}, "fails": 0, "expiries": 20, "freed": true, "reasons": []string{"the lease ran out"}},
		}})
	})
	mux.HandleFunc("GET /v1/events", func(w http.ResponseWriter, r *http.Request) {
		cut := f.away()
		select {
		case <-cut:
			http.Error(w, "away", http.StatusServiceUnavailable)
			return
		default:
		}
		w.Header().Set("Content-Type", "text/event-stream")
		out := http.NewResponseController(w)
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			f.mu.Lock()
			run := &f.status.Runs[0]
			run.ElapsedSeconds += 0.05
			run.Put, run.Acked, run.BytesPut, run.BytesAcked, run.TokensPut, run.TokensAcked = run.Put+1, run.Acked+1, run.BytesPut+64<<20, run.BytesAcked+64<<20, run.TokensPut+2000, run.TokensAcked+2000
			data, err := json.Marshal(f.status)
			f.mu.Unlock()
			if err != nil {
				panic(err)
			}
			fmt.Fprintf(w, "event: status\ndata: %s\n\n", data)
			_ = out.Flush()
			select {
			case e := <-f.events:
				data, err := json.Marshal(e)
				if err != nil {
					panic(err)
				}
				fmt.Fprintf(w, "event: event\ndata: %s\n\n", data)
				_ = out.Flush()
			case <-tick.C:
			case <-cut:
				return
			case <-r.Context().Done():
				return
			}
		}
	})
	return mux
}

// tab is a page in a headless Chromium.
type tab struct {
	t   *testing.T
	ctx context.Context

	mu         sync.Mutex
	complaints []string // errors and warnings of the page, and what it asks of others than its service
}

// open opens the address. Where there is no Chromium the test is skipped, and says so, unless $SLUICE_CHROMIUM promises one.
func open(t *testing.T, address string, width, height int64, scheme string) *tab {
	t.Helper()
	path := os.Getenv("SLUICE_CHROMIUM")
	if path == "" {
		for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
			if p, err := exec.LookPath(name); err == nil {
				path = p
				break
			}
		}
	}
	if path == "" {
		t.Skip("no Chromium on this machine; set SLUICE_CHROMIUM to one")
	}
	opts := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.UserDataDir(t.TempDir()),
		chromedp.Flag("disable-background-networking", true), chromedp.Flag("disable-component-update", true), chromedp.Flag("disable-sync", true), chromedp.Flag("disable-quic", true))
	ctx, cancel := chromedp.NewExecAllocator(t.Context(), opts...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	p := &tab{t: t, ctx: ctx}
	if err := chromedp.Listen(ctx, func(e any) { p.hear(address, e) }); err != nil {
		t.Fatal(err)
	}
	scheming := chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		if _, err := cdp.Call(ctx, target, network.Enable, network.EnableParams{}); err != nil {
			return err
		}
		_, err := cdp.Call(ctx, target, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}})
		return err
	})
	if err := chromedp.Do(ctx, chromedp.EmulateViewport(width, height), scheming, chromedp.Navigate(address)); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *tab) hear(origin string, e any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch e := e.(type) {
	case *runtime.EventExceptionThrown:
		p.complaints = append(p.complaints, "exception: "+e.ExceptionDetails.Text)
	case *runtime.EventConsoleAPICalled:
		p.complaints = append(p.complaints, fmt.Sprintf("console: %s", e.Args[0].Value))
	case *network.EventRequestWillBeSent:
		if u := e.Request.URL; !strings.HasPrefix(u, origin) && !strings.HasPrefix(u, "data:") {
			p.complaints = append(p.complaints, "asks "+u)
		}
	}
}

// until waits until the expression is true.
func (p *tab) until(expression string) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, 20*time.Second)
	defer cancel()
	if _, err := chromedp.Run(ctx, chromedp.Poll[chromedp.Void](expression, chromedp.WithPollingInterval(20*time.Millisecond))); err != nil {
		p.t.Fatalf("%s does not come true: %v", expression, err)
	}
}

// says is the value of an expression.
func says[T any](p *tab, expression string) T {
	p.t.Helper()
	v, err := chromedp.Run(p.ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		p.t.Fatalf("%s: %v", expression, err)
	}
	return v
}

func TestThePageShowsTheRuns(t *testing.T) {
	for _, size := range []struct {
		width, height int64
		scheme        string
	}{{1280, 900, "light"}, {1280, 900, "dark"}, {390, 844, "light"}, {390, 844, "dark"}} {
		t.Run(fmt.Sprintf("%d-%s", size.width, size.scheme), func(t *testing.T) {
			f := newFake()
			server := httptest.NewServer(f.handler())
			t.Cleanup(server.Close)
			t.Cleanup(f.hangUp)
			f.events <- wire.Event{Time: time.Now(), RunID: "qwen-dspark", Kind: "wedged", Text: evil}
			p := open(t, server.URL, size.width, size.height, size.scheme)
			p.until(`document.querySelectorAll("article").length === 3`)
			p.until(`document.querySelector("article[data-run=llama-eagle3] .stream:not(.dry)") !== null`)
			p.until(`document.querySelector("#events li") !== null`)
			p.until(`document.querySelector("article[data-run=llama-eagle3] .letters .why") !== null`)
			p.until(`document.body.textContent.includes("of 30 s")`)

			// What was unfolded stays so, and who walks with keys stays where they were, although every status makes the cards anew.
			says[bool](p, `(() => { const d = document.querySelector("article[data-run=llama-eagle3] details"); d.open = true; d.querySelector("summary").focus(); window.first = d; return true })()`)
			p.until(`document.querySelector("article[data-run=llama-eagle3] details") !== window.first`)
			p.until(`document.querySelector("article[data-run=llama-eagle3] details").open && document.activeElement.tagName === "SUMMARY"`)

			text := says[string](p, `document.body.innerText + " " + [...document.querySelectorAll("svg text")].map((t) => t.textContent).join(" ")`)
			for _, want := range []string{
				"llama-eagle3", "Bottleneck: the trainer: producers waited 3m0s", "Nothing can move: consumer trainer-0 holds 96 leases", "3.5 GiB of 8.0 GiB", "high 6.0 GiB", "low 2.0 GiB",
				"1 producer waits for room", "h100-1", "no consumer of rank 3", "trainer-1", "2 dead letters", "llama-eagle3-0-17", "the lease ran out", evil, "trainer-7", "gate shut", "being-opened", "its journal failed",
			} {
				if !strings.Contains(text, want) {
					t.Errorf("the page does not say %q", want)
				}
			}
			if title := says[string](p, `document.title`); title != "Sluice" {
				t.Errorf("the title is %q: something that came as text was run", title)
			}
			if says[bool](p, `document.documentElement.scrollWidth > innerWidth`) {
				t.Error("the page is wider than its window")
			}
			if says[bool](p, `[...document.querySelectorAll(".wide table")].some((t) => t.textContent.startsWith("consumer") && t.scrollWidth > t.parentElement.clientWidth)`) {
				t.Error("a table of consumers is wider than its card: the figures behind the names are out of sight")
			}
			if background := says[string](p, `getComputedStyle(document.body).backgroundColor`); strings.HasPrefix(background, "rgb(20") != (size.scheme == "dark") {
				t.Errorf("in the %s scheme the background is %s", size.scheme, background)
			}
			if dir := os.Getenv("SLUICE_SCREENSHOTS"); dir != "" {
				picture, err := chromedp.Run(p.ctx, chromedp.FullScreenshot(100))
				if err == nil {
					err = os.WriteFile(filepath.Join(dir, fmt.Sprintf("dashboard-%d-%s.png", size.width, size.scheme)), picture, 0o644)
				}
				if err != nil {
					t.Error(err)
				}
			}
			p.mu.Lock()
			defer p.mu.Unlock()
			if len(p.complaints) > 0 {
				t.Errorf("complaints: %q", p.complaints)
			}
		})
	}
}

func TestThePageSaysWhenTheServiceIsGone(t *testing.T) {
	f := newFake()
	server := httptest.NewServer(f.handler())
	t.Cleanup(server.Close)
	t.Cleanup(f.hangUp)
	p := open(t, server.URL, 1280, 900, "light")
	p.until(`document.querySelectorAll("article").length === 3`)
	f.hangUp()
	p.until(`!document.getElementById("banner").hidden && document.getElementById("banner").textContent.startsWith("No connection")`)
	f.comeBack()
	p.until(`document.getElementById("banner").hidden`)
}

func TestThePageNeedsNothingFromElsewhere(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	dashboard.Register(mux)
	for route, mediaType := range map[string]string{"/": "text/html; charset=utf-8", "/dashboard/style.css": "text/css; charset=utf-8", "/dashboard/app.js": "text/javascript; charset=utf-8"} {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, route, nil))
		h := w.Result().Header
		if w.Code != http.StatusOK || h.Get("Content-Type") != mediaType || h.Get("Content-Security-Policy") != dashboard.Policy {
			t.Errorf("%s: %d %v", route, w.Code, h)
		}
		body := strings.ReplaceAll(w.Body.String(), "http://www.w3.org/2000/svg", "")
		for _, foreign := range []string{"http://", "https://", "innerHTML", "insertAdjacentHTML", "document.write", "eval("} {
			if strings.Contains(body, foreign) {
				t.Errorf("%s has %q in it", route, foreign)
			}
		}
	}
}
