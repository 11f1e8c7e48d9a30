package service

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

func TestEveryRefusalIsAProblem(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	ref := b.put("r1", "s-1")
	one := sampleURL(ref) + "?generation=" + ref.Generation()
	acquire := "/v1/runs/r1/acquire"
	js := map[string]string{"Content-Type": "application/json"}
	huge := bytes.Repeat([]byte(" "), wire.MaxBody+1)
	pinned := do[wire.Pinned](b, "POST", "/v1/runs/r1/pins", wire.Pin{Ref: ref}).Handle
	before := b.status("r1")
	for _, c := range []struct {
		name, method, path string
		header             map[string]string
		body               string
		status             int
		code               string
	}{
		{"no such path", "GET", "/nothing", nil, "", 404, "not_found"},
		{"a path below one", "GET", "/v1/runs/r1/status/more", nil, "", 404, "not_found"},
		{"a path with a slash behind it", "GET", "/v1/runs/", nil, "", 404, "not_found"},
		{"an unclean path", "GET", "/v1//runs", nil, "", 404, "not_found"},
		{"a path that climbs", "GET", "/v1/runs/r1/samples/..%2f..%2fid?generation=g", nil, "", 404, "not_found"},
		{"dots", "GET", "/v1/runs/../../etc", nil, "", 404, "not_found"},
		{"an id with an escape", "GET", "/v1/runs/%1b%5b31m/status", nil, "", 400, "invalid"},
		{"a wrong method", "DELETE", acquire, nil, "", 405, "method_not_allowed"},
		{"a strange method", "BREW", acquire, nil, "", 405, "method_not_allowed"},
		{"no such run", "GET", "/v1/runs/r2", nil, "", 404, "not_found"},
		{"no content type", "POST", acquire, map[string]string{"Content-Type": ""}, `{}`, 415, "unsupported_media"},
		{"a form", "POST", acquire, map[string]string{"Content-Type": "application/x-www-form-urlencoded"}, `{}`, 415, "unsupported_media"},
		{"another charset", "POST", acquire, map[string]string{"Content-Type": "application/json; charset=latin1"}, `{}`, 415, "unsupported_media"},
		{"a broken content type", "POST", acquire, map[string]string{"Content-Type": "a/b/c;;="}, `{}`, 415, "unsupported_media"},
		{"no body", "POST", acquire, js, "", 400, "invalid"},
		{"half a body", "POST", acquire, js, `{"consumer":{"name"`, 400, "invalid"},
		{"no object", "POST", acquire, js, `[]`, 400, "invalid"},
		{"null", "POST", acquire, js, `null`, 400, "invalid"},
		{"two objects", "POST", acquire, js, `{"consumer":{"name":"c"}}{}`, 400, "invalid"},
		{"an unknown field", "POST", acquire, js, `{"consumer":{"name":"c","colour":1}}`, 400, "invalid"},
		{"a field in capitals", "POST", acquire, js, `{"Consumer":{"name":"c"}}`, 400, "invalid"},
		{"an inner field in capitals", "POST", acquire, js, `{"consumer":{"NAME":"c"}}`, 400, "invalid"},
		{"a field twice", "POST", acquire, js, `{"consumer":{"name":"c"},"max":1,"consumer":{"name":"d"}}`, 400, "invalid"},
		{"a field twice, once with an escape", "POST", acquire, js, `{"consumer":{"name":"c","n\u0061me":"d"}}`, 400, "invalid"},
		{"a field of a list's item twice", "POST", "/v1/runs/r1/commit", js, `{"items":[{"stage":{"file":"a","sample_id":"s","sample_id":"t"}}]}`, 400, "invalid"},
		{"an attribute twice", "PUT", "/v1/runs/r1/samples/s-9", map[string]string{wire.SampleHeader: `{"algorithm":"mine","num_tokens":1,"attributes":{"a":"1","a":"2"}}`}, string(file(t, 1)), 400, "invalid"},
		{"invalid UTF-8", "POST", acquire, js, "{\"consumer\":{\"name\":\"c\"},\"request_id\":\"\xff\"}", 400, "invalid"},
		{"handles of which one is none", "POST", "/v1/runs/r1/release", js, `{"handles":["` + pinned + `","x"]}`, 400, "invalid"},
		{"a wrong type", "POST", acquire, js, `{"consumer":{"name":7}}`, 400, "invalid"},
		{"a number out of range", "POST", acquire, js, `{"consumer":{"name":"c"},"max":1025}`, 400, "invalid"},
		{"a huge number", "POST", acquire, js, `{"consumer":{"name":"c"},"wait_seconds":1e400}`, 400, "invalid"},
		{"a long wait", "POST", acquire, js, `{"consumer":{"name":"c"},"wait_seconds":61}`, 400, "invalid"},
		{"a body over the limit", "POST", acquire, js, string(huge), 413, "too_large"},
		{"no leases", "POST", "/v1/runs/r1/settle", js, `{"consumer":{"name":"c"},"settlements":[]}`, 400, "invalid"},
		{"a verdict", "POST", "/v1/runs/r1/settle", js, `{"consumer":{"name":"c"},"settlements":[{"lease":"` + strings.Repeat("0", 32) + `","verdict":"maybe"}]}`, 400, "invalid"},
		{"a lease id", "POST", "/v1/runs/r1/settle", js, `{"consumer":{"name":"c"},"settlements":[{"lease":"0","verdict":"ack"}]}`, 400, "invalid"},
		{"a sample over the cap", "POST", "/v1/runs/r1/reserve", js, `{"bytes":[1048577]}`, 507, "full"},
		{"a negative size", "POST", "/v1/runs/r1/reserve", js, `{"bytes":[-1]}`, 400, "invalid"},
		{"an upload that is no file", "PUT", "/v1/runs/r1/samples/s-9", map[string]string{wire.SampleHeader: fields}, "hello", 422, "corrupt"},
		{"an upload without a word", "PUT", "/v1/runs/r1/samples/s-9", nil, string(file(t, 1)), 400, "invalid"},
		{"an upload under a bad id", "PUT", "/v1/runs/r1/samples/a..b", map[string]string{wire.SampleHeader: fields}, string(file(t, 1)), 400, "invalid"},
		{"a strange sample header", "PUT", "/v1/runs/r1/samples/s-9", map[string]string{wire.SampleHeader: `{"x":1}`}, string(file(t, 1)), 400, "invalid"},
		{"an upload of a name that is taken", "PUT", "/v1/runs/r1/samples/s-1", map[string]string{wire.SampleHeader: fields}, string(file(t, 1)), 409, "duplicate"},
		{"an upload of another algorithm", "PUT", "/v1/runs/r1/samples/s-9", map[string]string{wire.SampleHeader: `{"algorithm":"a b","num_tokens":1}`}, string(file(t, 1)), 400, "invalid"},
		{"a read without a generation", "GET", sampleURL(ref), nil, "", 400, "invalid"},
		{"a read of another generation", "GET", sampleURL(ref) + "?generation=other", nil, "", 404, "not_found"},
		{"a range beyond the end", "GET", one, map[string]string{"Range": "bytes=100000-"}, "", 416, "bad_range"},
		{"a broken range", "GET", one, map[string]string{"Range": "bytes=x"}, "", 416, "bad_range"},
		{"a precondition", "GET", one, map[string]string{"If-Match": `"other"`}, "", 412, "precondition"},
		{"no such feature", "GET", sampleURL(ref) + "/features/logits?generation=" + ref.Generation(), nil, "", 404, "not_found"},
		{"a claimed sample aborted", "POST", "/v1/runs/r1/abort", js, `{"ref":` + ref.Canonical() + `}`, 409, "conflict"},
		{"no source", "GET", "/v1/runs/r1/positions", nil, "", 400, "invalid"},
		{"ranks without windows", "POST", "/v1/runs/r1/reshape", js, `{"ranks":0,"per_rank":1}`, 400, "invalid"},
		{"the registry as a run", "POST", "/v1/runs", js, `{"run_id":"sluice:registry","algorithm":"eagle3","caps":{"max_bytes":1}}`, 400, "invalid"},
		{"a run without a schema", "POST", "/v1/runs", js, `{"run_id":"r2","caps":{"max_bytes":1000}}`, 400, "invalid"},
		{"a run with a time of centuries", "POST", "/v1/runs", js, `{"run_id":"r2","algorithm":"eagle3","caps":{"max_bytes":1000},"visibility_timeout_seconds":1e12}`, 400, "invalid"},
	} {
		var body *strings.Reader
		a := func() answer {
			if c.body == "" {
				return b.send(c.method, c.path, c.header, http.NoBody)
			}
			body = strings.NewReader(c.body)
			return b.send(c.method, c.path, c.header, body)
		}()
		if a.status != c.status || a.problem.Code != c.code {
			t.Errorf("%s: %d %.300s, want %d %s", c.name, a.status, a.body, c.status, c.code)
		}
		for _, r := range string(a.body) {
			if r < 0x20 || r == 0x7f {
				t.Errorf("%s: a control byte in %q", c.name, a.body)
			}
		}
	}
	if a := b.send("DELETE", acquire, nil, nil); a.header.Get("Allow") != "POST" {
		t.Errorf("Allow: %q", a.header.Get("Allow"))
	}
	after := b.status("r1")
	if before.Health != after.Health || before.Pending != after.Pending || before.Put != after.Put || before.Delivered != after.Delivered {
		t.Errorf("the refusals have changed %+v into %+v", before, after)
	}
	if id, err := handleID(pinned); err != nil || b.s.runs["r1"].findPin(id) == nil {
		t.Errorf("a call that was refused has given up a pin: %v", err)
	}
}

func TestExactNames(t *testing.T) {
	t.Parallel()
	for _, good := range []string{
		` { "items" : [ { "ref" : null , "positions" : [ ] } , {} ] , "below" : false } `,
		`{"items":[{"stage":{"file":"\"}{,","sample_id":"s","fields":{"attributes":{"A":"1","a":"2"},"num_tokens":-1.5e3,"features":["x","x"]}}}],"wait_seconds":0.5}`,
		`{"producer":{"name":"p"},"items":[]}`,
	} {
		if err := exact([]byte(good), reflect.TypeFor[*wire.Commit]()); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
}

// FuzzDecode: whatever is taken, is taken again with the same meaning after it was written anew; and no body makes the reading panic.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{`{}`, `{"items":[{"stage":{"file":"a","sample_id":"b","fields":{"attributes":{"x":"y"}}}}],"below":true}`, `{"items":[{"positions":[{"source":"s","epoch":1,"index":2}]}]}`, `{"items":[],"items":[]}`, `{"ITEMS":[]}`, "{\"items\":\t[ ]\n}"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var first, second wire.Commit
		if decodeJSON(data, &first) != nil {
			return
		}
		again, err := json.Marshal(&first)
		if err != nil {
			return // an empty ref has no form
		}
		if err := decodeJSON(again, &second); err != nil {
			t.Fatalf("%s was taken, and %s is not: %v", data, again, err)
		}
		// An empty list and none are written alike.
		if third, err := json.Marshal(&second); err != nil || !bytes.Equal(again, third) {
			t.Fatalf("%s became %s, %v", again, third, err)
		}
	})
}

// FuzzOnePass: what is read in one pass is what a study of it finds, which refuses names in other cases, repeated ones and unknown ones.
func FuzzOnePass(f *testing.F) {
	lease := strings.Repeat("0f", 16)
	for _, seed := range []string{
		`{}`, `{"bytes":[1,2],"wait_seconds":0.5,"request_id":"r","producer":{"name":"p","incarnation":2}}`, `{"bytes":[],"ungated":true}`, `{"bytes":[1],"Bytes":[2]}`, `{"bytes":[1],"bytes":[2]}`,
		`{"consumer":{"name":"c","rank":1},"max":3,"ahead":false}`, `{"consumer":{"name":"c"},"settlements":[{"lease":"` + lease + `","verdict":"ack","reason":""}]}`, `{"items":[{"positions":[{"source":"s","epoch":1,"index":2}]}]}`,
		`{"items":[{"ref":` + oneRef(f) + `}],"below":true}`, `{"file":"f","sample_id":"s","fields":{"num_tokens":2,"features":["x"]}}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, body := range []func() any{
			func() any { return new(wire.Reserve) }, func() any { return new(wire.Unreserve) }, func() any { return new(wire.Commit) }, func() any { return new(wire.Acquire) }, func() any { return new(wire.Settle) },
			func() any { return new(wire.Renew) }, func() any { return new(wire.Report) }, func() any { return new(wire.Stage) }, func() any { return new(wire.Pin) }, func() any { return new(wire.RunSpec) },
		} {
			got, want := body(), body()
			if !wire.Read(data, got) {
				continue
			}
			if err := study(data, want); err != nil {
				t.Errorf("%T: %q was read in one pass, but %v", got, data, err)
			} else if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%T of %q (-studied +one pass):\n%s", got, data, diff)
			}
		}
	})
}

// oneRef is a ref in JSON.
func oneRef(t testing.TB) string {
	ref, err := sluice.NewRef(sluice.RefFields{
		SampleID: "s-1", RunID: "r1", StoreURI: "mem:x", Generation: "g1", Algorithm: "mine", SchemaVersion: 1, NumTokens: 3, EstimatedBytes: 100,
		Features: []sluice.RefFeature{{Name: "x", Key: "s-1/x", Spec: sluice.Spec{Shape: []int64{100}, DType: sluice.Bool}}}, Attributes: map[string]string{"a": "b"},
		TargetModelVersion: "1", DraftWeightVersion: "0",
	})
	if err != nil {
		t.Fatal(err)
	}
	return ref.Canonical()
}

// What a caller may have in any number must not fill the memory of the service.
func TestNobodyKeepsEverMore(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	ref := b.put("r1", "s-1")
	for range 3 { // whoever asks a probe is not known, and has no session
		do[struct{}](b, "GET", "/healthz", nil, newID())
	}
	if n := b.s.sessions.count(); n != 0 {
		t.Errorf("%d sessions by probes", n)
	}
	for range maxSessions {
		if _, err := b.s.sessions.begin(newID(), b.s.now()); err != nil {
			t.Fatal(err)
		}
	}
	b.wants("busy", "GET", "/v1/runs/r1/health", nil, newID())
	do[struct{}](b, "GET", "/v1/runs/r1/health", nil)

	reserve := wire.Reserve{Bytes: make([]int64, wire.MaxBatch)}
	for range maxReservations / wire.MaxBatch {
		reserve.Ungated = !reserve.Ungated
		do[wire.Reservations](b, "POST", "/v1/runs/r1/reserve", reserve)
	}
	before := b.status("r1").Health
	b.wants("busy", "POST", "/v1/runs/r1/reserve", reserve)
	if after := b.status("r1").Health; after != before {
		t.Errorf("%+v became %+v", before, after)
	}

	h := &b.s.runs["r1"].holdings
	h.mu.Lock()
	for range maxPins() {
		h.pins[sluice.NewHandleID()] = nil
	}
	h.mu.Unlock()
	b.wants("busy", "POST", "/v1/runs/r1/pins", wire.Pin{Ref: ref})
	h.mu.Lock()
	clear(h.pins)
	h.mu.Unlock()
}

func TestAnswersCarryTheIDOfTheirCall(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	if a := b.send("GET", "/v1/status", map[string]string{wire.RequestHeader: "mine-1"}, nil); a.header.Get(wire.RequestHeader) != "mine-1" {
		t.Errorf("got %q", a.header.Get(wire.RequestHeader))
	}
	if a := b.send("GET", "/v1/status", map[string]string{wire.RequestHeader: "a b"}, nil); a.header.Get(wire.RequestHeader) == "a b" || a.header.Get(wire.RequestHeader) == "" {
		t.Errorf("got %q", a.header.Get(wire.RequestHeader))
	}
	if a := b.send("GET", "/nothing", map[string]string{wire.RequestHeader: "mine-2"}, nil); a.problem.Request != "mine-2" {
		t.Errorf("got %+v", a.problem)
	}
}

// What is only announced counts for nothing: one call could spoil a counter for ever.
func TestTheMetricsCountNoBytesThatDidNotCome(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	ref := b.put("r1", "s-1")
	bytesOf := func(metric string) (n float64) {
		a := b.send("GET", "/metrics", nil, nil)
		for line := range strings.Lines(string(a.body)) {
			if _, err := fmt.Sscanf(line, metric+" %g", &n); err == nil {
				return n
			}
		}
		t.Fatalf("no %s in %s", metric, a.body)
		return 0
	}
	received, sent := bytesOf("sluice_http_received_bytes_total"), bytesOf("sluice_http_sent_bytes_total")
	conn, err := net.Dial("tcp", strings.TrimPrefix(b.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "PUT /v1/runs/none/samples/s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", int64(math.MaxInt64))
	if line, err := bufio.NewReader(conn).ReadString('\n'); !strings.Contains(line, " 404 ") {
		t.Fatal(line, err)
	}
	for range 10 {
		b.send("HEAD", sampleURL(ref)+"?generation="+ref.Generation(), nil, nil)
	}
	if n := bytesOf("sluice_http_received_bytes_total"); n != received {
		t.Errorf("received %g, then %g", received, n)
	}
	if n := bytesOf("sluice_http_sent_bytes_total"); n > sent+1000 { // a problem and no sample
		t.Errorf("sent %g, then %g", sent, n)
	}
}
