package service

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net/http"
	"path"
	"reflect"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"unicode/utf8"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/service/access"
)

// operation is one call of the API: what the document says of it, and who may make it.
type operation struct {
	method, path string
	id           string
	summary      string
	text         string // more about it, for the document
	tag          string
	roles        []access.Role // besides the operator; none: whoever may look
	hot          bool          // logged at debug level
	open         bool          // whoever reaches the service may make it, known or not
	across       bool          // not about one run: a token that is good for one may call too, and sees no more than its own
	early        bool          // on a run that is not open (deletion): the handler finds the run by itself
	params       []param
	status       int      // of success; 200 if 0
	raw          []string // other media types that it answers with
	body         string   // media type of a body that is not JSON
	headers      []param  // of the answer
}

// param is a parameter in the query or a header.
type param struct {
	name, in, text string
	required       bool
}

// call is one call under way.
type call struct {
	s       *Service
	w       http.ResponseWriter
	r       *http.Request
	op      *operation
	id      string // of the call, in the log
	caller  access.Caller
	session *session
	run     *run // entered; nil where the path names none
	status  int  // written so far; 0: nothing
}

// checked is a body that can refuse itself.
type checked interface{ Check() error }

// nothing is no body.
type nothing struct{}

// api puts operations before a mux, and into the document.
type api struct {
	s   *Service
	mux *http.ServeMux
	ops []*described
}

// handle adds an operation with JSON bodies: In is what comes, Out what goes; nothing is none.
func handle[In, Out any](a *api, op operation, f func(context.Context, *call, *In) (*Out, error)) {
	_, takesNone := any((*In)(nil)).(*nothing)
	_, givesNone := any((*Out)(nil)).(*nothing)
	if op.status == 0 {
		if op.status = http.StatusOK; givesNone {
			op.status = http.StatusNoContent
		}
	}
	o := a.add(op, describe[In](takesNone), describe[Out](givesNone))
	a.mux.HandleFunc(op.method+" "+op.path, a.serve(o, func(ctx context.Context, c *call) error {
		var in In
		if !takesNone {
			if err := c.decode(&in); err != nil {
				return err
			}
			if in, ok := any(&in).(checked); ok {
				if err := in.Check(); err != nil {
					return err
				}
			}
		}
		out, err := f(ctx, c, &in)
		if err != nil {
			return err
		}
		if givesNone {
			c.header()
			c.begin(o.status)
			return nil
		}
		return c.encode(o.status, out)
	}))
}

// stream adds an operation that reads or writes something else than JSON.
func stream(a *api, op operation, out *described, f func(context.Context, *call) error) {
	if op.status == 0 {
		op.status = http.StatusOK
	}
	o := a.add(op, nil, out)
	a.mux.HandleFunc(op.method+" "+op.path, a.serve(o, f))
}

var (
	callPrefix = newID()[:8] + "-"
	callNumber atomic.Int64
)

// callID is the caller's own id for its call if that can be shown, or a fresh one.
func callID(r *http.Request) string {
	if id := r.Header.Get(wire.RequestHeader); id != "" && len(id) <= 64 && sluice.ValidateID(id) == nil {
		return id
	}
	return callPrefix + strconv.FormatInt(callNumber.Add(1), 36)
}

// serve is what all operations have in common: who calls, from which session, on which run; and that every failure is a problem document.
func (a *api) serve(op *operation, f func(context.Context, *call) error) http.HandlerFunc {
	s := a.s
	perRun := strings.Contains(op.path, "{run}")
	return func(w http.ResponseWriter, r *http.Request) {
		c := &call{s: s, w: w, r: r, op: op, id: callID(r)}
		ctx := r.Context()
		began := s.opts.Clock.Now()
		var err error
		defer func() {
			if p := recover(); p != nil {
				if p == http.ErrAbortHandler { //nolint:errorlint // net/http compares so too
					panic(p)
				}
				s.log.Error("a call panicked", "request", c.id, "op", op.id, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
				err = errors.New("panic")
				if c.status != 0 { // half an answer is out: the connection must break
					panic(http.ErrAbortHandler)
				}
			}
			if err != nil {
				c.problem(err)
			}
			received, sent := r.ContentLength, declared(w.Header())
			if c.status >= 400 {
				received = 0 // what was announced with a call that was refused need not have come
			}
			if r.Method == http.MethodHead {
				sent = 0
			}
			s.metrics.Answered(op.path, op.method, c.status, s.opts.Clock.Now().Sub(began), received, sent)
			level := slog.LevelInfo
			if op.hot {
				level = slog.LevelDebug
			}
			if s.log.Enabled(ctx, level) {
				s.log.LogAttrs(ctx, level, "call", slog.String("request", c.id), slog.String("op", op.id), slog.String("path", plain(r.URL.Path)), slog.String("caller", plain(c.caller.Name)),
					slog.Int("status", c.status), slog.Duration("took", s.opts.Clock.Now().Sub(began)), slog.Any("err", quiet(err)))
			}
		}()
		err = func() error {
			if !op.open {
				c.caller = access.CallerOf(ctx)
				about, roles := r.PathValue("run"), op.roles
				if op.across {
					about = c.caller.Run
				}
				if roles == nil {
					roles = both // whoever is known
				}
				if err := c.caller.May(about, roles...); err != nil {
					return err
				}
			}
			if !op.open { // who is not known has no session
				sess, err := s.sessions.begin(r.Header.Get(wire.SessionHeader), s.now())
				if err != nil {
					return err
				}
				if c.session = sess; sess != nil {
					defer func() { sess.finish(s.now()) }()
				}
			}
			if perRun && !op.early {
				run, err := s.find(r.PathValue("run"))
				if err != nil {
					return err
				}
				if err := run.enter(); err != nil {
					return err
				}
				defer run.leave()
				c.run = run
			}
			return f(ctx, c)
		}()
	}
}

// declared is the length that an answer has said it has, 0 if it did not.
func declared(h http.Header) int64 {
	n, err := strconv.ParseInt(h.Get("Content-Length"), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// quiet shows an error in the log without what a caller may have put into it.
func quiet(err error) any {
	if err == nil {
		return nil
	}
	return plain(err.Error())
}

var buffers = sync.Pool{New: func() any { return new(bytes.Buffer) }}

func giveBuffer(b *bytes.Buffer) {
	if b.Cap() <= 1<<20 { // a huge one would be kept for all the small calls to come
		b.Reset()
		buffers.Put(b)
	}
}

// tooLarge, media and others are errors that only HTTP has.
type httpError struct{ wire.Problem }

func (e *httpError) Error() string { return e.Detail }

func httpProblem(status int, code, title, format string, args ...any) *httpError {
	return &httpError{wire.Problem{Status: status, Code: code, Title: title, Detail: fmt.Sprintf(format, args...)}}
}

// decode reads the body: one JSON value of known fields, and nothing behind it.
func (c *call) decode(v any) error {
	h := c.r.Header.Get("Content-Type")
	if h != "application/json" && h != "" {
		if t, params, err := mime.ParseMediaType(h); err != nil || t != "application/json" || params["charset"] != "" && !strings.EqualFold(params["charset"], "utf-8") {
			return httpProblem(http.StatusUnsupportedMediaType, wire.CodeMedia, "Unsupported media type", "the body is %q, want application/json", plain(h))
		}
	}
	if c.r.ContentLength > wire.MaxBody {
		return tooLarge(wire.MaxBody)
	}
	b := buffers.Get().(*bytes.Buffer)
	defer giveBuffer(b)
	if n := c.r.ContentLength; n > 0 {
		b.Grow(int(n) + bytes.MinRead)
	}
	if _, err := b.ReadFrom(http.MaxBytesReader(c.w, c.r.Body, wire.MaxBody)); err != nil {
		return bodyError(err)
	}
	if b.Len() > 0 && h == "" {
		return httpProblem(http.StatusUnsupportedMediaType, wire.CodeMedia, "Unsupported media type", "the body has no Content-Type, want application/json")
	}
	return decodeJSON(b.Bytes(), v)
}

// decodeJSON is strict: unknown and repeated fields are refused, and so is anything but one value. No body is the empty object, for calls all of whose fields are optional. v is zero before.
func decodeJSON(data []byte, v any) error {
	if wire.Read(data, v) { // as programs write it
		return nil
	}
	return study(data, v)
}

// study reads a body of whatever form, in several passes, and says what is wrong with it.
func study(data []byte, v any) error {
	bad := func(err error) error {
		var e *sluice.Error
		if errors.As(err, &e) {
			return e
		}
		return &sluice.Error{Kind: sluice.Invalid, Op: "body", Detail: plain(wire.Misfit(err).Error())}
	}
	trimmed := bytes.TrimLeft(data, " \t\r\n")
	if len(trimmed) == 0 {
		return nil
	}
	if trimmed[0] != '{' {
		return &sluice.Error{Kind: sluice.Invalid, Op: "body", Detail: "wants a JSON object"}
	}
	if !utf8.Valid(data) {
		return &sluice.Error{Kind: sluice.Invalid, Op: "body", Detail: "is not valid UTF-8"}
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return bad(err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return &sluice.Error{Kind: sluice.Invalid, Op: "body", Detail: "has something behind its JSON object"}
	}
	return exact(data, reflect.TypeOf(v))
}

// tooMany refuses what would make the service keep ever more for its callers.
func tooMany(what string, limit int) error {
	return httpProblem(http.StatusTooManyRequests, wire.CodeBusy, "Busy", "there are %d %s already, which is the most that are kept", limit, what)
}

func tooLarge(limit int64) error {
	return httpProblem(http.StatusRequestEntityTooLarge, wire.CodeTooLarge, "Too large", "the body is over the limit of %d bytes", limit)
}

// bodyError says why a body could not be read.
func bodyError(err error) error {
	var large *http.MaxBytesError
	var timeout interface{ Timeout() bool }
	switch {
	case errors.As(err, &large):
		return tooLarge(large.Limit)
	case errors.As(err, &timeout) && timeout.Timeout():
		return httpProblem(http.StatusRequestTimeout, wire.CodeTimeout, "Too slow", "the body did not come in time")
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return &sluice.Error{Kind: sluice.Invalid, Op: "body", Detail: "ended before its declared length"}
	}
	return &sluice.Error{Kind: sluice.Invalid, Op: "body", Detail: "could not be read", Err: err}
}

// header sets what every answer has; what a browser must not do with it is the door's matter.
func (c *call) header() http.Header {
	h := c.w.Header()
	h[wire.RequestHeader] = []string{c.id}
	return h
}

var jsonType = []string{"application/json"}

// begin writes the status.
func (c *call) begin(status int) {
	c.status = status
	c.w.WriteHeader(status)
}

func (c *call) encode(status int, v any) error {
	b := buffers.Get().(*bytes.Buffer)
	defer giveBuffer(b)
	text, err := wire.Append(b.AvailableBuffer(), v)
	if err != nil {
		return err
	}
	b.Write(text)
	b.WriteByte('\n')
	h := c.header()
	h["Content-Type"] = jsonType
	h.Set("Content-Length", strconv.Itoa(b.Len()))
	c.begin(status)
	_, _ = c.w.Write(b.Bytes()) // who is gone does not hear of it
	return nil
}

// problem answers with an error.
func (c *call) problem(err error) {
	if c.status != 0 {
		return // too late: the answer has begun, and the stream ends short
	}
	p := problemOf(err)
	p.Request = c.id
	if p.Status >= 500 && p.Code == wire.CodeInternal {
		c.s.log.Error("a call failed", "request", c.id, "op", c.op.id, "err", plain(err.Error()))
	}
	h := c.header()
	for name := range h {
		if name == "Etag" || strings.HasPrefix(name, "Content-") && name != "Content-Security-Policy" || strings.HasPrefix(name, "Sluice-") && name != wire.RequestHeader {
			delete(h, name) // meant for the answer that there is none of
		}
	}
	if p.Status == http.StatusServiceUnavailable || p.Status == http.StatusTooManyRequests {
		h.Set("Retry-After", "1")
	}
	body, err := json.Marshal(p)
	if err != nil {
		body = []byte(`{"title":"Internal error","status":500,"code":"internal","detail":"the problem could not be written"}`)
	}
	h.Set("Content-Type", wire.ProblemType)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	c.begin(p.Status)
	_, _ = c.w.Write(body)
}

func problemOf(err error) *wire.Problem {
	var e *httpError
	if errors.As(err, &e) {
		p := e.Problem
		return &p
	}
	return wire.ProblemOf(err)
}

// fallback answers for paths and methods that there are none of.
func (a *api) fallback(w http.ResponseWriter, r *http.Request) {
	op := &operation{id: "none", path: r.URL.Path}
	c := &call{s: a.s, w: w, r: r, op: op, id: callID(r)}
	var allow []string
	for _, m := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodDelete} {
		probe := &http.Request{Method: m, URL: r.URL, Host: r.Host}
		if _, pattern := a.mux.Handler(probe); pattern != "" && pattern != "/" {
			allow = append(allow, m)
		}
	}
	if len(allow) > 0 && path.Clean(r.URL.Path) == r.URL.Path {
		w.Header().Set("Allow", strings.Join(allow, ", "))
		c.problem(httpProblem(http.StatusMethodNotAllowed, wire.CodeMethod, "Method not allowed", "%s does not go here, want %s", plain(r.Method), strings.Join(allow, " or ")))
		return
	}
	c.problem(&sluice.Error{Kind: sluice.NotFound, Op: "path", Subject: plain(r.URL.Path), Detail: "there is nothing here", Hint: "see /openapi.json"})
}

// ServeHTTP keeps the mux from answering in its own words: it would redirect what is not clean, and refuse in plain text what it does not know.
func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p := r.URL.Path
	if p == "" || p[0] != '/' || r.Method == http.MethodConnect || p != "/" && path.Clean(p) != strings.TrimSuffix(p, "/") {
		a.fallback(w, r)
		return
	}
	a.mux.ServeHTTP(w, r)
}
