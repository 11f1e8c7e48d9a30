package service

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/safetensors"
	"github.com/sluice-ml/sluice/service/access"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bed is a service under test, behind a door that lets everybody in as an operator over the unix socket.
type bed struct {
	t      testing.TB
	s      *Service // nil where the service is another process
	srv    *httptest.Server
	url    string
	client *http.Client
	o      Options
	as     access.Caller
}

// remoteBed speaks to a service in another process.
func remoteBed(t testing.TB, url string, client *http.Client) *bed {
	return &bed{t: t, url: url, client: client}
}

// quietLog keeps what is logged, for when the test fails.
func quietLog(t testing.TB) *slog.Logger {
	var b syncBuffer
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(b.String())
		}
	})
	return testLogger(&b)
}

func testLogger(b *syncBuffer) *slog.Logger {
	return slog.New(slog.NewTextHandler(b, &slog.HandlerOptions{Level: slog.LevelInfo}))
}

func newBed(t testing.TB, o Options) *bed {
	t.Helper()
	if o.StateDir == "" {
		o.StateDir = t.TempDir() + "/state"
	}
	if o.StoreDir == "" {
		o.StoreDir = t.TempDir() + "/store"
	}
	if o.MaxBytes == 0 {
		o.MaxBytes = 1 << 30
	}
	if o.Logger == nil {
		o.Logger = quietLog(t)
	}
	b := &bed{t: t, o: o, as: access.Caller{Name: "test", Role: access.Operator, UID: os.Geteuid()}}
	b.start()
	t.Cleanup(b.stop)
	return b
}

func (b *bed) start() {
	b.t.Helper()
	s, err := Open(context.Background(), b.o)
	if err != nil {
		b.t.Fatal(err)
	}
	b.s = s
	h := s.Handler()
	b.srv = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.ServeHTTP(w, r.WithContext(access.WithCaller(r.Context(), b.as)))
	}))
	b.url, b.client = b.srv.URL, b.srv.Client()
}

func (b *bed) stop() {
	b.t.Helper()
	if b.s == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := b.s.Close(ctx); err != nil {
		b.t.Errorf("close: %v", err)
	}
	b.srv.CloseClientConnections()
	b.srv.Close()
	b.client.CloseIdleConnections()
	b.s = nil
}

func (b *bed) restart() {
	b.t.Helper()
	b.stop()
	b.start()
	b.waitReady()
}

// poll waits for something that happens by itself.
func (b *bed) poll(what string, f func() bool) {
	b.t.Helper()
	for end := time.Now().Add(time.Minute); !f(); {
		if time.Now().After(end) {
			b.t.Fatalf("%s: it does not happen", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func (b *bed) waitReady() { b.t.Helper(); b.poll("ready", b.s.Ready) }

// answer is what came back.
type answer struct {
	status  int
	header  http.Header
	body    []byte
	problem wire.Problem
}

func (b *bed) send(method, path string, header map[string]string, body io.Reader) answer {
	b.t.Helper()
	req, err := http.NewRequest(method, b.url+path, body)
	if err != nil {
		b.t.Fatal(err)
	}
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := b.client.Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	a := answer{status: resp.StatusCode, header: resp.Header, body: data}
	if resp.StatusCode >= 400 {
		if ct := resp.Header.Get("Content-Type"); ct != wire.ProblemType && method != http.MethodHead {
			b.t.Errorf("%s %s: %d with the content type %q: %s", method, path, resp.StatusCode, ct, data)
		}
		if method != http.MethodHead {
			if err := json.Unmarshal(data, &a.problem); err != nil {
				b.t.Errorf("%s %s: %d: %v: %s", method, path, resp.StatusCode, err, data)
			}
			if a.problem.Status != resp.StatusCode || a.problem.Code == "" || a.problem.Detail == "" || a.problem.Request == "" {
				b.t.Errorf("%s %s: %d: an incomplete problem: %s", method, path, resp.StatusCode, data)
			}
		}
	}
	return a
}

// try makes a call with a JSON body.
func (b *bed) try(method, path string, in any, session ...string) answer {
	b.t.Helper()
	h := map[string]string{}
	var body io.Reader
	if in != nil {
		data, ok := in.(string)
		if !ok {
			raw, err := json.Marshal(in)
			if err != nil {
				b.t.Fatal(err)
			}
			data = string(raw)
		}
		h["Content-Type"] = "application/json"
		body = strings.NewReader(data)
	}
	if len(session) > 0 {
		h[wire.SessionHeader] = session[0]
	}
	return b.send(method, path, h, body)
}

// do makes a call that must succeed.
func do[Out any](b *bed, method, path string, in any, session ...string) (out Out) {
	b.t.Helper()
	a := b.try(method, path, in, session...)
	if a.status >= 300 {
		b.t.Fatalf("%s %s: %d %s", method, path, a.status, a.body)
	}
	if len(a.body) > 0 {
		if err := json.Unmarshal(a.body, &out); err != nil {
			b.t.Fatalf("%s %s: %v: %s", method, path, err, a.body)
		}
	}
	return out
}

// wants makes a call that must be refused with the code.
func (b *bed) wants(code, method, path string, in any, session ...string) wire.Problem {
	b.t.Helper()
	a := b.try(method, path, in, session...)
	if a.problem.Code != code {
		b.t.Errorf("%s %s: %d %s, want the code %q", method, path, a.status, a.body, code)
	}
	return a.problem
}

// testSchema is small enough for many samples, and exact.
const testSchema = `{"name":"mine","version":1,"features":[
	{"name":"hidden_states","from":"aux","axes":["B","S","H"],"dtypes":["float32"],"required":true},
	{"name":"input_ids","from":"input_ids","axes":["B","S"],"dtypes":["int64"],"required":true}]}`

func (b *bed) spec(run string) wire.RunSpec {
	return wire.RunSpec{RunID: run, Schema: json.RawMessage(testSchema), Caps: wire.Caps{MaxBytes: 1 << 20}}
}

func (b *bed) create(run string) wire.Run {
	b.t.Helper()
	return do[wire.Run](b, "POST", "/v1/runs", b.spec(run))
}

var sampleNumber atomic.Int64

// features are those of a small sample; n makes its content its own.
func features(n int64) []sluice.Feature {
	return []sluice.Feature{
		{Name: "hidden_states", Tensor: sluice.TensorOf(sluice.Float32, []float32{float32(n), 2, 3, 4, 5, 6, 7, 8}, 1, 2, 4)},
		{Name: "input_ids", Tensor: sluice.TensorOf(sluice.Int64, []int64{n, n + 1}, 1, 2)},
	}
}

const sampleBytes = 8*4 + 2*8

// file is a sample as a safetensors file that does not carry a ref.
func file(t testing.TB, n int64) []byte { return fileOf(t, features(n)) }

func fileOf(t testing.TB, fs []sluice.Feature) []byte {
	layout, err := safetensors.NewLayout(fs, nil)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(t.TempDir() + "/f")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := layout.WriteFile(f, 0, fs); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	return data
}

var fields = `{"algorithm":"mine","num_tokens":2,"features":["hidden_states","input_ids"]}`

// upload brings a sample in.
func (b *bed) upload(run, id, reservation string, session ...string) sluice.Ref {
	b.t.Helper()
	a := b.tryUpload(run, id, reservation, session...)
	if a.status != http.StatusCreated {
		b.t.Fatalf("upload: %d %s", a.status, a.body)
	}
	var st wire.Stored
	if err := json.Unmarshal(a.body, &st); err != nil {
		b.t.Fatal(err)
	}
	return st.Ref
}

func (b *bed) tryUpload(run, id, reservation string, session ...string) answer {
	b.t.Helper()
	path := "/v1/runs/" + run + "/samples/" + id
	if reservation != "" {
		path += "?reservation=" + reservation
	}
	h := map[string]string{"Content-Type": "application/octet-stream", wire.SampleHeader: fields}
	if len(session) > 0 {
		h[wire.SessionHeader] = session[0]
	}
	return b.send("PUT", path, h, bytes.NewReader(file(b.t, sampleNumber.Add(1))))
}

func (b *bed) commit(run string, refs ...sluice.Ref) wire.Commits {
	b.t.Helper()
	c := wire.Commit{}
	for i := range refs {
		c.Items = append(c.Items, wire.CommitItem{Ref: &refs[i]})
	}
	return do[wire.Commits](b, "POST", "/v1/runs/"+run+"/commit", c)
}

// put brings a sample in and enqueues it.
func (b *bed) put(run, id string) sluice.Ref {
	b.t.Helper()
	ref := b.upload(run, id, "")
	if r := b.commit(run, ref).Results[0]; r.Status != sluice.Enqueued {
		b.t.Fatalf("commit: %+v", r)
	}
	return ref
}

var trainer = wire.Consumer{Name: "trainer"}

func (b *bed) acquire(run string, n int, session ...string) wire.Delivery {
	b.t.Helper()
	return do[wire.Delivery](b, "POST", "/v1/runs/"+run+"/acquire", wire.Acquire{Consumer: trainer, Max: n}, session...)
}

func (b *bed) settle(run string, v sluice.Verdict, leases ...wire.Lease) []wire.SettleResult {
	b.t.Helper()
	s := wire.Settle{Consumer: trainer}
	for _, l := range leases {
		s.Settlements = append(s.Settlements, wire.Settlement{Lease: l.ID, Verdict: v, Reason: "said " + string(v)})
	}
	return do[wire.Settled](b, "POST", "/v1/runs/"+run+"/settle", s).Results
}

func (b *bed) status(run string) wire.Status {
	b.t.Helper()
	return do[wire.Status](b, "GET", "/v1/runs/"+run+"/status", nil)
}

func sampleURL(ref sluice.Ref) string {
	return fmt.Sprintf("/v1/runs/%s/samples/%s", ref.RunID(), ref.SampleID())
}
