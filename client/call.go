package client

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/httpcall"
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

// newID is a fresh session or handle id.
func newID() string {
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// newRequestID is a fresh id of a call: unique, and short in logs.
func (c *Client) newRequestID() string {
	id := append(make([]byte, 0, 48), c.session[:16]...)
	return string(strconv.AppendInt(append(id, '-'), c.requests.Add(1), 36))
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
	id := c.newRequestID()
	var pause backoff
	var since time.Time
	for {
		attempts++
		err = c.attempt(ctx, &k, id, body)
		var l *lost
		if !errors.As(err, &l) {
			return attempts, err
		}
		if since.IsZero() {
			since = time.Now()
			if !k.last { // between the attempts too
				var cancel context.CancelCauseFunc
				ctx, cancel = context.WithCancelCause(ctx)
				defer cancel(nil)
				defer context.AfterFunc(c.ended, func() { cancel(errClosed) })()
			}
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
	a, err := c.calls.Do(ctx, &httpcall.Call{
		Method: k.method, Path: k.path, Headers: wire.RequestHeader + ": " + id + "\r\n", Body: body, Limit: k.wait + answerTime, Most: maxAnswer, Behind: k.last,
	})
	switch {
	case err == nil:
		return decode(k.method, k.path, &a, k.out)
	case errors.Is(err, httpcall.ErrTooLong):
		return tooLong(k.path)
	case ctx.Err() != nil: // also if it ended just now, and the call by something else
		return context.Cause(ctx)
	case c.ended.Err() != nil && !k.last:
		return context.Cause(c.ended)
	}
	return &lost{fmt.Errorf("%s %s: %w", k.method, k.path, err)}
}

// request makes a request with what all have.
func (c *Client) request(ctx context.Context, method, path, id string) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.target.base+path, http.NoBody)
	if err != nil {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: "client", Subject: path, Err: err}
	}
	req.Header = c.headers.Clone()
	req.Header.Set(wire.RequestHeader, id)
	return req, nil
}

// decode reads an answer: out, or the error that it is.
func decode(method, path string, a *httpcall.Answer, out any) error {
	if a.StatusCode/100 != 2 {
		return refusal(method, path, a)
	}
	if out == nil || a.StatusCode == http.StatusNoContent {
		return nil
	}
	if h := a.Type; h != "application/json" {
		if kind, _, _ := mime.ParseMediaType(h); kind != "application/json" {
			return noService(path, a, "the type "+kind)
		}
	}
	if wire.Read(a.Body, out) { // out is zero until here
		return nil
	}
	if err := json.Unmarshal(a.Body, out); err != nil {
		return &sluice.Error{Kind: sluice.Corrupt, Op: "client", Subject: path, Detail: "the answer can't be read", Err: err}
	}
	return nil
}

// answered reads the rest of an answer that is no sample, and closes it.
func answered(resp *http.Response) (*httpcall.Answer, error) {
	defer resp.Body.Close() //nolint:errcheck // it has been read, or is given up
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return nil, &lost{err}
	}
	if len(data) > maxAnswer {
		return nil, tooLong(resp.Request.URL.Path)
	}
	return &httpcall.Answer{StatusCode: resp.StatusCode, Type: resp.Header.Get("Content-Type"), Body: data}, nil
}

func tooLong(path string) error {
	return &sluice.Error{Kind: sluice.Unsupported, Op: "client", Subject: path, Detail: fmt.Sprintf("the answer is longer than %d bytes", maxAnswer)}
}

// refusal is the error that an answer with a status other than 2xx means.
func refusal(method, path string, a *httpcall.Answer) error {
	var p wire.Problem
	kind, _, _ := mime.ParseMediaType(a.Type)
	if kind == wire.ProblemType && json.Unmarshal(a.Body, &p) == nil && p.Code != "" {
		switch p.Code {
		case string(sluice.Unavailable), wire.CodeBusy, wire.CodeTimeout:
			return &lost{p.Err()}
		}
		return p.Err()
	}
	if method == http.MethodHead && a.StatusCode == http.StatusNotFound {
		return &sluice.Error{Kind: sluice.NotFound, Op: "client", Subject: path} // it comes without a document
	}
	switch a.StatusCode {
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout, http.StatusTooManyRequests:
		return &lost{noService(path, a, "no problem document")}
	}
	return noService(path, a, "no problem document")
}

// noService is for answers that no Sluice service gives: something else listens there, or stands between.
func noService(path string, a *httpcall.Answer, what string) error {
	return &sluice.Error{Kind: sluice.Unavailable, Op: "client", Subject: path, Detail: fmt.Sprintf("the answer has the status %s and %s", strings.TrimSpace(strconv.Itoa(a.StatusCode)+" "+http.StatusText(a.StatusCode)), what), Hint: "is that the address of a Sluice service?"}
}

// background is for what must be done although the caller's context has ended, in bounded time.
func background(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), giveBackTime)
}
