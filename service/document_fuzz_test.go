package service

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/service/access"
)

// The document itself says what may come; these tests make calls of it that are nearly right, and see that the service refuses each as a caller's fault, with no change of its state.

// document is the OpenAPI document as a caller gets it.
type document struct {
	Paths      map[string]map[string]docOperation `json:"paths"`
	Components struct {
		Schemas map[string]*docSchema `json:"schemas"`
	} `json:"components"`
}

type docOperation struct {
	ID         string `json:"operationId"`
	Parameters []struct {
		Name     string     `json:"name"`
		In       string     `json:"in"`
		Required bool       `json:"required"`
		Schema   *docSchema `json:"schema"`
	} `json:"parameters"`
	RequestBody *struct {
		Content map[string]struct {
			Schema *docSchema `json:"schema"`
		} `json:"content"`
	} `json:"requestBody"`
}

type docSchema struct {
	Ref        string                `json:"$ref"`
	Type       any                   `json:"type"`
	Properties map[string]*docSchema `json:"properties"`
	Required   []string              `json:"required"`
	Items      *docSchema            `json:"items"`
	Additional any                   `json:"additionalProperties"`
	Enum       []any                 `json:"enum"`
	Pattern    string                `json:"pattern"`
	MinLength  *int                  `json:"minLength"`
	MaxLength  *int                  `json:"maxLength"`
	MinItems   *int                  `json:"minItems"`
	MaxItems   *int                  `json:"maxItems"`
	Minimum    *float64              `json:"minimum"`
	Maximum    *float64              `json:"maximum"`
}

// mill makes calls.
type mill struct {
	t     testing.TB
	b     *bed
	doc   *document
	ops   []milled
	rnd   *rand.Rand
	ref   string
	valid map[string]string // bodies that are right, by operation
}

type milled struct {
	method, path string
	docOperation
}

func newMill(t testing.TB, b *bed, seed uint64) *mill {
	a := b.send("GET", "/openapi.json", nil, nil)
	m := &mill{t: t, b: b, doc: new(document), rnd: rand.New(rand.NewPCG(seed, 1))}
	if err := json.Unmarshal(a.body, m.doc); err != nil {
		t.Fatal(err)
	}
	for path, methods := range m.doc.Paths {
		for method, op := range methods {
			m.ops = append(m.ops, milled{strings.ToUpper(method), path, op})
		}
	}
	slices.SortFunc(m.ops, func(a, b milled) int { return strings.Compare(a.ID, b.ID) })
	if len(m.ops) < 30 {
		t.Fatalf("the document has %d operations", len(m.ops))
	}
	m.ref = b.put("r1", "fuzz-"+newID()[:8]).Canonical()
	lease, spec := strings.Repeat("0", 32), `{"run_id":"r2","algorithm":"eagle3","caps":{"max_bytes":1000}}`
	m.valid = map[string]string{
		"create-run": spec, "close-run": `{}`, "reshape-run": `{"ranks":1,"per_rank":1}`, "set-versions": `{}`, "reserve": `{"bytes":[1]}`, "unreserve": `{"reservations":["x"]}`,
		"commit": `{"items":[{"ref":` + m.ref + `,"positions":[{"source":"s","epoch":0,"index":1}]}]}`, "report": `{"producer":{"name":"p"},"state":"running"}`, "acquire": `{"consumer":{"name":"c"},"wait_seconds":0}`,
		"settle": `{"consumer":{"name":"c"},"settlements":[{"lease":"` + lease + `","verdict":"ack"}]}`, "renew": `{"consumer":{"name":"c"},"leases":["` + lease + `"]}`, "leave": `{"consumer":{"name":"c"}}`,
		"stage": `{"file":"f","sample_id":"s","fields":{"algorithm":"mine","num_tokens":2}}`, "pin": `{"ref":` + m.ref + `}`, "release": `{"handles":["` + lease + `"]}`, "abort": `{"ref":` + m.ref + `}`,
		"spare":         `{"bytes":1000000}`,
		"configure-run": `{"visibility_timeout_seconds":30,"high_watermark_bytes":700000}`,
		"check-ref":     `{"ref":` + m.ref + `,"algorithm":"eagle3"}`, "requeue-dead-letters": `{"all":true}`, "drop-dead-letters": `{"all":true}`,
	}
	for _, op := range m.ops {
		if _, ok := m.valid[op.ID]; op.RequestBody != nil && op.RequestBody.Content["application/json"].Schema != nil && !ok {
			t.Errorf("no body is known for %s", op.ID)
		}
	}
	return m
}

func (m *mill) resolve(s *docSchema) *docSchema {
	for s != nil && s.Ref != "" {
		s = m.doc.Components.Schemas[strings.TrimPrefix(s.Ref, "#/components/schemas/")]
	}
	return s
}

func pick[T any](r *rand.Rand, list []T) T { return list[r.IntN(len(list))] }

// breakage changes one place of a valid body so that the schema forbids it, and says how; "" if it found no way there.
func (m *mill) breakage(s *docSchema, v any) (any, string) {
	s = m.resolve(s)
	if s == nil {
		return v, ""
	}
	switch v := v.(type) {
	case map[string]any:
		names := make([]string, 0, len(v))
		for k := range v {
			if s.Properties[k] != nil {
				names = append(names, k)
			}
		}
		slices.Sort(names)
		if len(names) > 0 && m.rnd.IntN(3) > 0 { // deeper
			k := pick(m.rnd, names)
			broken, how := m.breakage(s.Properties[k], v[k])
			v[k] = broken
			return v, join(k, how)
		}
		switch m.rnd.IntN(3) {
		case 0:
			if s.Additional == false {
				v["unknown_"+newID()[:4]] = 1
				return v, "an unknown field"
			}
		case 1:
			for _, k := range s.Required {
				p := m.resolve(s.Properties[k])
				if p == nil || p.Type == "integer" || p.Type == "boolean" || p.Type == "number" {
					continue // Go can't tell a missing zero
				}
				delete(v, k)
				return v, "without " + k
			}
		}
		return pick(m.rnd, []any{[]any{}, "text", 7, true}), "no object"
	case []any:
		if len(v) > 0 && m.rnd.IntN(3) > 0 {
			i := m.rnd.IntN(len(v))
			broken, how := m.breakage(s.Items, v[i])
			v[i] = broken
			return v, join(fmt.Sprint(i), how)
		}
		switch {
		case s.MaxItems != nil && m.rnd.IntN(2) == 0 && len(v) > 0:
			for len(v) <= *s.MaxItems {
				v = append(v, v[0])
			}
			return v, "too many items"
		case s.MinItems != nil && *s.MinItems > 0 && m.rnd.IntN(2) == 0:
			return []any{}, "too few items"
		}
		return pick(m.rnd, []any{map[string]any{}, "text", 7, true}), "no list"
	}
	var ways []any
	switch s.Type {
	case "string":
		ways = []any{7, true, []any{}, map[string]any{}}
		if s.MaxLength != nil {
			ways = append(ways, strings.Repeat("x", *s.MaxLength+1))
		}
		if len(s.Enum) > 0 {
			ways = append(ways, "none of these")
		}
		if s.Pattern != "" {
			ways = append(ways, "", "\x00", strings.Repeat("z", 32))
		}
	case "integer":
		ways = []any{"7", 1.5, true, []any{}, map[string]any{}, json.Number("1e400"), json.Number("99999999999999999999999999")}
	case "number":
		ways = []any{"7", true, []any{}, map[string]any{}, json.Number("1e400")}
	case "boolean":
		ways = []any{"true", 1, []any{}, map[string]any{}}
	}
	if s.Minimum != nil {
		ways = append(ways, *s.Minimum-1)
	}
	if s.Maximum != nil {
		ways = append(ways, *s.Maximum+1)
	}
	if len(ways) == 0 {
		return v, ""
	}
	w := pick(m.rnd, ways)
	return w, fmt.Sprintf("%.60v for %v", w, s.Type)
}

func join(a, b string) string {
	if b == "" {
		return ""
	}
	return a + ": " + b
}

// garbage is text that a caller might put anywhere.
func (m *mill) garbage() string {
	n := m.rnd.IntN(40)
	switch m.rnd.IntN(8) {
	case 0:
		return "../../../etc/passwd"
	case 1:
		return strings.Repeat("A", 5000)
	case 2:
		return "a\x00b\x1b[31m"
	case 3:
		return "\xff\xfe"
	case 4:
		return "-1"
	case 5:
		return "\u202e..//%2e%2e"
	case 6:
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(m.rnd.UintN(256))
		}
		return string(b)
	}
	return fmt.Sprint(m.rnd.Uint64())
}

// bad is a call that must be refused, and how it was spoilt.
func (m *mill) bad() (*http.Request, string) {
	for {
		op := pick(m.rnd, m.ops)
		path := op.path
		path = strings.NewReplacer("{run}", "r1", "{sample_id}", "no-such", "{name}", "input_ids", "{session}", strings.Repeat("0", 32)).Replace(path)
		var how string
		var body []byte
		contentType := "application/json"
		query := ""
		for _, p := range op.Parameters {
			if p.In == "query" && p.Required {
				query = "?" + p.Name + "=x"
			}
		}
		if text, ok := m.valid[op.ID]; ok {
			body = []byte(text)
		}
		switch k := m.rnd.IntN(7); {
		case k < 4 && body != nil:
			var v any
			d := json.NewDecoder(bytes.NewReader(body))
			d.UseNumber()
			if err := d.Decode(&v); err != nil {
				m.t.Fatal(err)
			}
			broken, why := m.breakage(op.RequestBody.Content["application/json"].Schema, v)
			if why == "" {
				continue
			}
			data, err := json.Marshal(broken)
			if err != nil {
				continue // 1e400
			}
			body, how = data, why
		case k == 4 && body != nil:
			how = pick(m.rnd, []string{"cut", "behind", "noise", "twice"})
			switch how {
			case "cut":
				body = body[:1+m.rnd.IntN(len(body)-1)]
			case "behind":
				body = append(body, "]"...)
			case "noise":
				body[m.rnd.IntN(len(body))] = 0x01
			case "twice":
				body = append(body, body...)
			}
		case k == 5 && body != nil:
			contentType, how = pick(m.rnd, []string{"text/plain", "application/xml", "multipart/form-data", "", ";", "application/json; charset=utf-16"}), "its content type"
		case k == 6 && strings.Contains(op.path, "{"):
			// A segment that is no id, escaped so that it arrives as one.
			raw := pick(m.rnd, []string{"%00", "%2e%2e%2fx", "a%20b", "%ff", "a..b", strings.Repeat("a", 201), "%1b%5b0m", "%2F"})
			path = strings.Replace(strings.NewReplacer("{sample_id}", "s", "{name}", "n", "{session}", "{run}").Replace(op.path), "{run}", raw, 1)
			how = "its path"
		default:
			continue
		}
		r, err := http.NewRequest(op.method, "http://service"+path+query, bytes.NewReader(body))
		if err != nil {
			continue
		}
		if contentType != "" {
			r.Header.Set("Content-Type", contentType)
		}
		return r, op.ID + ": " + how
	}
}

// wild is a call of which nothing is promised but that it is answered.
func (m *mill) wild() (*http.Request, string) {
	op := pick(m.rnd, m.ops)
	r, err := http.NewRequest(pick(m.rnd, []string{op.method, "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"}), "http://service/", strings.NewReader(m.garbage()))
	if err != nil {
		m.t.Fatal(err)
	}
	seg := func() string { return pick(m.rnd, []string{"r1", "r2", m.garbage()}) }
	r.URL.Path = strings.NewReplacer("{run}", seg(), "{sample_id}", seg(), "{name}", seg(), "{session}", seg()).Replace(op.path)
	r.URL.RawQuery = pick(m.rnd, []string{"", "generation=" + m.garbage(), "source=" + m.garbage(), "reservation=" + m.garbage(), m.garbage()})
	for _, h := range []string{"Content-Type", "Range", "If-Match", "If-None-Match", "If-Range", "Content-Encoding", wire.SampleHeader, wire.SessionHeader, wire.RequestHeader} {
		if m.rnd.IntN(4) == 0 {
			r.Header.Set(h, m.garbage())
		}
	}
	if m.rnd.IntN(3) == 0 {
		r.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", m.rnd.Int64()-5, m.rnd.Int64()))
	}
	if m.rnd.IntN(3) == 0 {
		r.Header.Set("Content-Type", "application/json")
	}
	return r, op.ID + ": wild"
}

func (m *mill) serve(r *http.Request) *httptest.ResponseRecorder {
	ctx, cancel := context.WithTimeout(access.WithCaller(context.Background(), access.Caller{Name: "fuzz", Role: access.Operator, UID: os.Geteuid()}), 30*time.Millisecond)
	defer cancel()
	w := httptest.NewRecorder()
	m.b.s.Handler().ServeHTTP(w, r.WithContext(ctx))
	return w
}

// state is what a refused call must not have changed.
func (m *mill) state() string {
	st := m.b.s.Status(context.Background())
	st.UptimeSeconds = 0
	for i := range st.Runs {
		r := &st.Runs[i]
		r.ElapsedSeconds, r.ProducerPausedSeconds, r.ConsumerWaitedSeconds, r.OldestLeaseSeconds, r.Bottleneck, r.Stale, r.Wedged, r.Starving = 0, 0, 0, 0, "", 0, "", false
		r.MissingRanks = nil
		for k := range r.Consumers {
			r.Consumers[k].LastSeenSeconds = 0
		}
		for k := range r.Producers {
			r.Producers[k].LastSeenSeconds = 0
		}
	}
	data, err := json.Marshal(st)
	if err != nil {
		m.t.Fatal(err)
	}
	return string(data)
}

// grind makes n calls.
func (m *mill) grind(n int) {
	for range n {
		if m.rnd.IntN(4) == 0 {
			r, how := m.wild()
			if w := m.serve(r); w.Code == http.StatusInternalServerError || strings.Contains(w.Body.String(), `"code":"internal"`) {
				m.t.Errorf("%s: %s %q: %d %s", how, r.Method, r.URL, w.Code, w.Body)
			}
			m.repair()
			continue
		}
		before := m.state()
		r, how := m.bad()
		w := m.serve(r)
		if w.Code < 400 || w.Code >= 500 {
			m.t.Errorf("%s: %s %s: %d %.300s, want a refusal", how, r.Method, r.URL, w.Code, w.Body)
			m.repair()
			continue
		}
		var p wire.Problem
		if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil || p.Code == "" || p.Status != w.Code || p.Detail == "" || w.Header().Get("Content-Type") != wire.ProblemType {
			m.t.Errorf("%s: no problem: %d %s", how, w.Code, w.Body)
		}
		if _, known := wire.Codes()[p.Code]; !known {
			m.t.Errorf("%s: the code %q is in no list", how, p.Code)
		}
		if after := m.state(); after != before {
			m.t.Errorf("%s: %s %s: refused with %s, and yet the state changed from\n%s\nto\n%s", how, r.Method, r.URL, w.Body, before, after)
		}
	}
}

// repair makes the run again if a wild call was right, and deleted it.
func (m *mill) repair() {
	if a := m.b.try("GET", "/v1/runs/r1", nil); a.status != 200 {
		m.b.create("r1")
	}
	m.b.try("DELETE", "/v1/runs/r2", nil)
}

func TestCallsThatAreNearlyRightAreRefusedAndChangeNothing(t *testing.T) {
	t.Parallel()
	n := 2000
	if testing.Short() {
		n = 300
	}
	b := newBed(t, Options{})
	b.create("r1")
	newMill(t, b, rand.Uint64()).grind(n)
}

func FuzzDocument(f *testing.F) {
	b := newBed(f, Options{})
	b.create("r1")
	for seed := range uint64(4) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		mine := *b
		mine.t = t
		newMill(t, &mine, seed).grind(50)
	})
}
