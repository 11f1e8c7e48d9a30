package wire

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"github.com/sluice-ml/sluice"
)

// ProblemType is the media type of an error.
const ProblemType = "application/problem+json"

// Codes that only HTTP has; all others are those of [sluice.Kind].
const (
	CodeUnauthorized = "unauthorized"       // no token, or none that is known (401)
	CodeTooLarge     = "too_large"          // a body or header over its limit (413)
	CodeTimeout      = "timeout"            // a body that came too slowly (408)
	CodeMethod       = "method_not_allowed" // (405)
	CodeMedia        = "unsupported_media"  // a body of another type (415)
	CodeRange        = "bad_range"          // (416)
	CodePrecondition = "precondition"       // an If-Match that does not hold (412)
	CodeBusy         = "busy"               // too many calls or connections at once; try again (429)
	CodeInternal     = "internal"           // a fault of the service, logged with the request's id (500)
)

// Problem is an error of the API: an RFC 9457 problem document with the members that make a [sluice.Error] again.
type Problem struct { //nolint:errname // RFC 9457 calls it so
	Type    string `json:"type,omitempty" doc:"Documentation of the code."`
	Title   string `json:"title" doc:"The code in words."`
	Status  int    `json:"status"`
	Code    string `json:"code" doc:"Stable: act on it, not on the text."`
	Detail  string `json:"detail" doc:"What is wrong, in a sentence."`
	Hint    string `json:"hint,omitempty" doc:"What to do about it."`
	Op      string `json:"op,omitempty"`
	Subject string `json:"subject,omitempty" doc:"What it was done to."`
	Request string `json:"request,omitempty" doc:"Id of the call in the service's log."`
}

// Hints that are in the words of the API; the command line has words of its own for them.
const (
	HintCreateRun = "create it with POST /v1/runs"
	HintToken     = "send Authorization: Bearer and a token from the service's state directory, see `sluice token`"
)

var kinds = map[sluice.Kind]struct {
	status int
	title  string
}{
	sluice.Invalid:     {http.StatusBadRequest, "Invalid argument"},
	sluice.NotFound:    {http.StatusNotFound, "Not found"},
	sluice.Duplicate:   {http.StatusConflict, "Duplicate"},
	sluice.Full:        {http.StatusInsufficientStorage, "Over the cap"},
	sluice.NoSpace:     {http.StatusInsufficientStorage, "Out of room"},
	sluice.Closed:      {http.StatusConflict, "Closed"},
	sluice.Stale:       {http.StatusConflict, "Superseded"},
	sluice.SchemaError: {http.StatusUnprocessableEntity, "Breaks the run's schema"},
	sluice.Corrupt:     {http.StatusUnprocessableEntity, "Corrupt"},
	sluice.Denied:      {http.StatusForbidden, "Denied"},
	sluice.Conflict:    {http.StatusConflict, "Conflict"},
	sluice.Unavailable: {http.StatusServiceUnavailable, "Unavailable"},
	sluice.Wedged:      {http.StatusConflict, "Wedged"},
	sluice.Aborted:     {http.StatusConflict, "Aborted"},
	sluice.Unsupported: {http.StatusUnprocessableEntity, "Unsupported"},
	sluice.TargetFault: {http.StatusConflict, "The target failed"},
}

// ProblemOf is err on the wire. An error without a kind is the service's own fault and says nothing of its insides.
func ProblemOf(err error) *Problem {
	var e *sluice.Error
	if errors.As(err, &e) {
		if k, ok := kinds[e.Kind]; ok {
			p := &Problem{Title: k.title, Status: k.status, Code: string(e.Kind), Op: e.Op, Subject: printable(e.Subject), Hint: e.Hint}
			p.Detail = printable(sentence(e))
			return p
		}
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return &Problem{Title: "Unavailable", Status: http.StatusServiceUnavailable, Code: string(sluice.Unavailable), Detail: "the call ended before it was answered"}
	}
	return &Problem{Title: "Internal error", Status: http.StatusInternalServerError, Code: CodeInternal, Detail: "the service failed; its log has the request"}
}

// sentence is e's text without what has members of its own.
func sentence(e *sluice.Error) string {
	bare := sluice.Error{Kind: e.Kind, Detail: e.Detail, Err: e.Err}
	return bare.Error()
}

// printable replaces what could disturb a terminal, or reorder what is read: whoever shows a problem may take it as it is.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < 0x20 || r >= 0x7f && r < 0xa0 || r == 0xfffd || r == 0x2028 || r == 0x2029 || r >= 0x202a && r <= 0x202e || r >= 0x2066 && r <= 0x2069 {
			return '?'
		}
		return r
	}, s)
}

// Error makes p an error that reads as it did on the other side.
func (p *Problem) Error() string { return p.Err().Error() }

// Err is the problem as an error of the domain: errors.Is finds its kind.
func (p *Problem) Err() error {
	if p == nil {
		return nil
	}
	e := &sluice.Error{Kind: sluice.Kind(p.Code), Op: p.Op, Subject: p.Subject, Detail: p.Detail, Hint: p.Hint}
	switch p.Code {
	case CodeUnauthorized:
		e.Kind = sluice.Denied
	case CodeTooLarge, CodeMethod, CodeMedia, CodeRange, CodePrecondition:
		e.Kind = sluice.Invalid
	case CodeTimeout, CodeBusy, CodeInternal:
		e.Kind = sluice.Unavailable
	}
	return e
}

// Code describes a code for people.
type Code struct {
	Status int
	Title  string
}

// Codes are all codes that a [Problem] can have.
func Codes() map[string]Code {
	all := map[string]Code{
		CodeUnauthorized: {http.StatusUnauthorized, "No token, or none that is known"},
		CodeTooLarge:     {http.StatusRequestEntityTooLarge, "Too large"},
		CodeTimeout:      {http.StatusRequestTimeout, "Too slow"},
		CodeMethod:       {http.StatusMethodNotAllowed, "Method not allowed"},
		CodeMedia:        {http.StatusUnsupportedMediaType, "Unsupported media type"},
		CodeRange:        {http.StatusRequestedRangeNotSatisfiable, "Bad range"},
		CodePrecondition: {http.StatusPreconditionFailed, "Precondition failed"},
		CodeBusy:         {http.StatusTooManyRequests, "Too many calls at once"},
		CodeInternal:     {http.StatusInternalServerError, "Internal error"},
	}
	for kind, k := range kinds {
		all[string(kind)] = Code{k.status, k.title}
	}
	return all
}
