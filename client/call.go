package client

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

// answerTime is how long a single attempt may take beyond what the call itself asks to wait: a service that is silent for longer counts as gone.
const answerTime = 20 * time.Second

// maxAnswer bounds a JSON answer: a page of dead letters or runs is the largest.
const maxAnswer = 256 << 20

// call is one call of the API.
type call struct {
	method, path string // the path is escaped and has its query
	in, out      any    // pointers to the bodies, or nil; out is zero
	wait         time.Duration
	patience     time.Duration // the client's if 0, none below
	sent         *time.Time    // is set to when the last attempt began, unless it is nil
	last         bool          // it is the one that ends the session: all others end with the client
}

// newID is a fresh request, session or handle id.
func newID() string {
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// lost is an attempt of which nothing is known: no answer, half of one, or the word that the service can't answer now. It may be repeated.
type lost struct{ err error }

func (l *lost) Error() string { return l.err.Error() }
func (l *lost) Unwrap() error { return l.err }

// do makes a call and repeats it for as long as its answers are lost, which every call of the API bears. It tells how many attempts it took: after the first, a refusal may
// be the echo of a success. Errors are the service's own, the cause of ctx, or ErrUnavailable.
func (c *Client) do(ctx context.Context, k call) (attempts int, err error) {
	if err := context.Cause(ctx); err != nil {
		return 0, err
	}
	if !k.last {
		var cancel context.CancelCauseFunc
		ctx, cancel = context.WithCancelCause(ctx)
		defer cancel(nil)
		defer context.AfterFunc(c.ended, func() { cancel(errClosed) })()
	}
	var body []byte
	if k.in != nil {
		if body, err = wire.Append(nil, k.in); err != nil {
			return 0, &sluice.Error{Kind: sluice.Invalid, Op: "client", Subject: k.path, Detail: "the call has no JSON form", Err: err}
		}
	}
	patience := c.patience
	if k.patience != 0 {
		patience = k.patience
	}
	id := newID()
	var pause backoff
	var since time.Time
	for {
		attempts++
		err = c.attempt(ctx, &k, id, body)
		var l *lost
		if !errors.As(err, &l) {
			return attempts, err
		}
		if cause := context.Cause(ctx); cause != nil {
			return attempts, cause
		}
		if since.IsZero() {
			since = time.Now()
		}
		if time.Since(since) >= patience {
			return attempts, c.unavailable(l.err, time.Since(since))
		}
		if err := pause.wait(ctx); err != nil {
			return attempts, err
		}
	}
}

func (c *Client) unavailable(err error, waited time.Duration) error {
	e := &sluice.Error{Kind: sluice.Unavailable, Op: "client", Subject: c.target.name, Detail: "the service does not answer", Err: err}
	if waited > time.Second {
		e.Detail = fmt.Sprintf("the service has not answered for %v", waited.Round(time.Second))
	}
	return e
}

func (c *Client) attempt(ctx context.Context, k *call, id string, body []byte) error {
	if k.sent != nil {
		*k.sent = time.Now()
	}
	ctx, cancel := context.WithTimeout(ctx, k.wait+answerTime)
	defer cancel()
	req, err := c.request(ctx, k.method, k.path, id)
	if err != nil {
		return err
	}
	if body != nil {
		req.Body, req.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return &lost{err}
	}
	defer resp.Body.Close() //nolint:errcheck // it has been read, or is given up
	return decode(resp, k.out)
}

// request makes a request with what all have.
func (c *Client) request(ctx context.Context, method, path, id string) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.target.base+path, http.NoBody)
	if err != nil {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: "client", Subject: path, Err: err}
	}
	h := req.Header
	h[wire.SessionHeader] = c.sessionHeader
	h.Set(wire.RequestHeader, id)
	h.Set("User-Agent", "sluice-client")
	if c.target.token != "" {
		h.Set("Authorization", "Bearer "+c.target.token)
	}
	return req, nil
}

// decode reads an answer: out, or the error that it is.
func decode(resp *http.Response, out any) error {
	data, err := readAll(resp)
	if err != nil {
		return err
	}
	if resp.StatusCode/100 != 2 {
		return refusal(resp, data)
	}
	if out == nil || resp.StatusCode == http.StatusNoContent {
		return nil
	}
	if h := resp.Header.Get("Content-Type"); h != "application/json" {
		if kind, _, _ := mime.ParseMediaType(h); kind != "application/json" {
			return noService(resp, "the type "+kind)
		}
	}
	if wire.Read(data, out) { // out is zero until here
		return nil
	}
	if err := json.Unmarshal(data, out); err != nil {
		return &sluice.Error{Kind: sluice.Corrupt, Op: "client", Subject: resp.Request.URL.Path, Detail: "the answer can't be read", Err: err}
	}
	return nil
}

func readAll(resp *http.Response) ([]byte, error) {
	if resp.Request.Method == http.MethodHead {
		return nil, nil // whatever length it has
	}
	if n := resp.ContentLength; n >= 0 && n <= maxAnswer {
		data := make([]byte, n)
		if _, err := io.ReadFull(resp.Body, data); err != nil {
			return nil, &lost{err}
		}
		// The next read finds the end, which lets the connection be used again.
		_, _ = resp.Body.Read(make([]byte, 1))
		return data, nil
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return nil, &lost{err}
	}
	if len(data) > maxAnswer {
		return nil, &sluice.Error{Kind: sluice.Unsupported, Op: "client", Subject: resp.Request.URL.Path, Detail: fmt.Sprintf("the answer is longer than %d bytes", maxAnswer)}
	}
	return data, nil
}

// refusal is the error that a response with a status other than 2xx means.
func refusal(resp *http.Response, data []byte) error {
	var p wire.Problem
	kind, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if kind == wire.ProblemType && json.Unmarshal(data, &p) == nil && p.Code != "" {
		switch p.Code {
		case string(sluice.Unavailable), wire.CodeBusy, wire.CodeTimeout:
			return &lost{p.Err()}
		}
		return p.Err()
	}
	if resp.Request.Method == http.MethodHead && resp.StatusCode == http.StatusNotFound {
		return &sluice.Error{Kind: sluice.NotFound, Op: "client", Subject: resp.Request.URL.Path} // it comes without a document
	}
	switch resp.StatusCode {
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout, http.StatusTooManyRequests:
		return &lost{noService(resp, "no problem document")}
	}
	return noService(resp, "no problem document")
}

// noService is for answers that no Sluice service gives: something else listens there, or stands between.
func noService(resp *http.Response, what string) error {
	return &sluice.Error{Kind: sluice.Unavailable, Op: "client", Subject: resp.Request.URL.Path, Detail: fmt.Sprintf("the answer has the status %s and %s", resp.Status, what), Hint: "is that the address of a Sluice service?"}
}

// background is for what must be done although the caller's context has ended, in bounded time.
func background(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), giveBackTime)
}
