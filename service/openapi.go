package service

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/danielgtaylor/huma/v2"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/service/dashboard"
)

// described is an operation as the document has it.
type described struct {
	operation
	typ     reflect.Type // of a body; nil if there is none
	in, out *described
}

// describe is a type of body.
func describe[T any](none bool) *described {
	if none {
		return nil
	}
	return &described{typ: reflect.TypeFor[T]()}
}

func (a *api) add(op operation, in, out *described) *operation {
	d := &described{operation: op, in: in, out: out}
	a.ops = append(a.ops, d)
	return &d.operation
}

// The document shows the types of the domain that speak JSON for themselves as these.
type (
	docRef struct {
		SampleID           string            `json:"sample_id"`
		RunID              string            `json:"run_id"`
		StoreURI           string            `json:"store_uri"`
		Generation         string            `json:"generation" doc:"Fresh for every put."`
		Features           []docFeature      `json:"features" minItems:"1" maxItems:"64"`
		Algorithm          string            `json:"algorithm"`
		SchemaVersion      int64             `json:"schema_version" minimum:"1"`
		NumTokens          int64             `json:"num_tokens" minimum:"0"`
		EstimatedBytes     int64             `json:"estimated_bytes" minimum:"0" doc:"Sum of the features' bytes."`
		TargetModelVersion string            `json:"target_model_version"`
		DraftWeightVersion string            `json:"draft_weight_version"`
		Attributes         map[string]string `json:"attributes"`
	}
	docFeature struct {
		Name  string  `json:"name"`
		Key   string  `json:"key"`
		Shape []int64 `json:"shape" maxItems:"16"`
		DType string  `json:"dtype" doc:"Torch's name: bfloat16, int64, ..."`
	}
	docID string
)

// Schema says what an id looks like.
func (docID) Schema(huma.Registry) *huma.Schema {
	return &huma.Schema{Type: huma.TypeString, Pattern: "^[0-9a-fA-F]{32}$"}
}

// document makes the OpenAPI document of the operations.
func (a *api) document() *huma.OpenAPI {
	names := func(t reflect.Type, hint string) string {
		for t.Kind() == reflect.Pointer {
			t = t.Elem()
		}
		if t == reflect.TypeFor[sluice.Caps]() {
			return "ResolvedCaps"
		}
		return strings.TrimPrefix(huma.DefaultSchemaNamer(t, hint), "Doc")
	}
	reg := huma.NewMapRegistry("#/components/schemas/", names)
	reg.RegisterTypeAlias(reflect.TypeFor[sluice.Ref](), reflect.TypeFor[docRef]())
	reg.RegisterTypeAlias(reflect.TypeFor[sluice.LeaseID](), reflect.TypeFor[docID]())
	reg.RegisterTypeAlias(reflect.TypeFor[sluice.Caps](), reflect.TypeFor[wire.Caps]())
	problem := reg.Schema(reflect.TypeFor[wire.Problem](), true, "Problem")
	reg.Schema(reflect.TypeFor[wire.SampleFields](), true, "SampleFields")
	reg.Schema(reflect.TypeFor[wire.Event](), true, "Event")
	doc := &huma.OpenAPI{
		OpenAPI: "3.1.0",
		Info: &huma.Info{Title: "Sluice", Version: "1", Description: "Streams supervision from a target model to the trainers of a draft. Times are seconds and relative, sizes are bytes. Every call may be repeated when its answer was lost. " +
			"Bodies are JSON objects of the fields below and no others, at most " + strconv.Itoa(wire.MaxBody>>20) + " MiB long.\n\nEvery error is a problem document (RFC 9457). Act on its `code`:\n\n" + codeTable(),
			License: &huma.License{Name: "Apache-2.0", Identifier: "Apache-2.0"}},
		Servers: []*huma.Server{{URL: "/"}},
		Tags: []*huma.Tag{{Name: "service"}, {Name: "runs"}, {Name: "producers", Description: "From the reservation to the commit."}, {Name: "consumers", Description: "From the lease to the settlement."}, {Name: "dead letters"},
			{Name: "sessions", Description: "What a client process holds, and when that ends."}},
		Components: &huma.Components{
			Schemas: reg,
			SecuritySchemes: map[string]*huma.SecurityScheme{
				"token":  {Type: "http", Scheme: "bearer", Description: "A token of the service; needed over TCP. The unix socket needs none: the kernel says who calls."},
				"cookie": {Type: "apiKey", In: "cookie", Name: "sluice-login-7447", Description: "Set by the dashboard's login; the number is the port of the service."},
			},
			Responses: map[string]*huma.Response{"problem": {Description: "A problem document.", Content: map[string]*huma.MediaType{wire.ProblemType: {Schema: problem}},
				Headers: map[string]*huma.Param{wire.RequestHeader: {Description: "Id of the call in the service's log.", Schema: text()}}}},
		},
		Security: []map[string][]string{{"token": {}}, {"cookie": {}}},
	}
	for i := range a.ops {
		doc.AddOperation(a.ops[i].openAPI(reg))
	}
	for _, schema := range reg.Map() {
		settle(schema)
	}
	return doc
}

// settle takes back that arrays may be null: a list of ours is a list.
func settle(s *huma.Schema) {
	if s == nil {
		return
	}
	if s.Type == huma.TypeArray {
		s.Nullable = false
	}
	settle(s.Items)
	for _, p := range s.Properties {
		settle(p)
	}
}

func text() *huma.Schema { return &huma.Schema{Type: huma.TypeString} }

// openAPI is one operation in the document.
func (d *described) openAPI(reg huma.Registry) *huma.Operation {
	op := &huma.Operation{Method: d.method, Path: d.path, OperationID: d.id, Summary: d.summary, Description: d.text, Tags: []string{d.tag}, Responses: map[string]*huma.Response{}}
	if len(d.roles) > 0 {
		op.Description = strings.TrimSpace(op.Description + "\n\nRoles: " + rolesText(d) + ".")
	}
	for rest := d.path; ; {
		_, after, ok := strings.Cut(rest, "{")
		if !ok {
			break
		}
		name, after, _ := strings.Cut(after, "}")
		op.Parameters = append(op.Parameters, &huma.Param{Name: name, In: "path", Required: true, Schema: pathSchema(name)})
		rest = after
	}
	for _, p := range d.params {
		op.Parameters = append(op.Parameters, &huma.Param{Name: p.name, In: p.in, Required: p.required, Description: p.text, Schema: text()})
	}
	if d.open {
		op.Security = []map[string][]string{{}}
	} else {
		op.Parameters = append(op.Parameters, &huma.Param{Name: wire.SessionHeader, In: "header", Description: "The client process that calls.", Schema: &huma.Schema{Type: huma.TypeString, Pattern: "^[0-9a-f]{32}$"}},
			&huma.Param{Name: wire.RequestHeader, In: "header", Description: "Id of the call for the service's log.", Schema: &huma.Schema{Type: huma.TypeString, MaxLength: new(64)}})
	}
	switch {
	case d.in != nil:
		op.RequestBody = &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{"application/json": {Schema: reg.Schema(d.in.typ, true, "")}}}
	case d.body != "":
		op.RequestBody = &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{d.body: {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}}}}
	}
	ok := &huma.Response{Description: http.StatusText(d.status), Headers: map[string]*huma.Param{wire.RequestHeader: {Description: "Id of the call in the service's log.", Schema: text()}}}
	if d.out != nil {
		ok.Content = map[string]*huma.MediaType{"application/json": {Schema: reg.Schema(d.out.typ, true, "")}}
	}
	for _, raw := range d.raw {
		ok.Content = map[string]*huma.MediaType{raw: {Schema: &huma.Schema{Type: huma.TypeString, Format: "binary"}}}
	}
	for _, h := range d.headers {
		ok.Headers[h.name] = &huma.Param{Description: h.text, Schema: text()}
	}
	op.Responses[strconv.Itoa(d.status)] = ok
	if d.id == "read-sample" || d.id == "read-feature" {
		part := *ok
		part.Description = "A part of it."
		op.Responses["206"] = &part
		op.Responses["304"] = &huma.Response{Description: "The caller has it already."}
	}
	op.Responses["default"] = &huma.Response{Ref: "#/components/responses/problem"}
	return op
}

func rolesText(d *described) string {
	s := ""
	for _, r := range d.roles {
		if string(r) != "operator" {
			s += string(r) + ", "
		}
	}
	return s + "operator"
}

func pathSchema(name string) *huma.Schema {
	if name == "session" {
		return &huma.Schema{Type: huma.TypeString, Pattern: "^[0-9a-f]{32}$"}
	}
	return &huma.Schema{Type: huma.TypeString, Pattern: `^[A-Za-z0-9_][A-Za-z0-9._:-]{0,199}$`}
}

func codeTable() string {
	codes := wire.Codes()
	var b strings.Builder
	b.WriteString("| code | status | meaning |\n|---|---|---|\n")
	for _, name := range slices.Sorted(maps.Keys(codes)) {
		b.WriteString("| `" + name + "` | " + strconv.Itoa(codes[name].Status) + " | " + codes[name].Title + " |\n")
	}
	return b.String()
}

// documentCalls serve the document, which is made when it is first asked for.
func (a *api) documentCalls() {
	doc := sync.OnceValue(a.document)
	for _, f := range []struct {
		path, mediaType string
		encode          func() ([]byte, error)
	}{
		{"/openapi.json", "application/json", sync.OnceValues(func() ([]byte, error) { return json.MarshalIndent(doc(), "", "  ") })},
		{"/openapi.yaml", "application/yaml", sync.OnceValues(func() ([]byte, error) { return doc().YAML() })},
	} {
		op := &operation{method: http.MethodGet, path: f.path, id: "document", open: true, hot: true}
		a.mux.HandleFunc("GET "+f.path, a.serve(op, func(_ context.Context, c *call) error {
			data, err := f.encode()
			if err != nil {
				return err
			}
			h := c.header()
			h.Set("Content-Type", f.mediaType)
			h.Set("Content-Length", strconv.Itoa(len(data)))
			c.begin(http.StatusOK)
			_, _ = c.w.Write(data)
			return nil
		}))
	}
}

// routes puts the API together.
func (s *Service) routes() http.Handler {
	a := &api{s: s, mux: http.NewServeMux()}
	s.runCalls(a)
	s.cycleCalls(a)
	s.storeCalls(a)
	s.watchCalls(a)
	s.metricsCall(a)
	a.documentCalls()
	dashboard.Register(a.mux)
	a.mux.HandleFunc("/", a.fallback)
	return a
}
