package sluice

import (
	"errors"
	"strings"
)

// Kind says what sort of failure an error is. The text of a Kind is a stable code: the same in Go, in the
// problem documents of the service and in Python. The list only ever grows.
type Kind string

// The kinds of failure. Act on the kind, with [errors.Is] against the sentinels below; the message is for people.
const (
	Invalid     Kind = "invalid"      // an argument breaks its documented form (Python: ValueError)
	NotFound    Kind = "not_found"    // no such sample, lease, run or feature; or a ref of an earlier put (KeyError)
	Duplicate   Kind = "duplicate"    // the sample id is taken (ValueError)
	Full        Kind = "full"         // it does not fit the cap (MemoryError)
	NoSpace     Kind = "no_space"     // the file system or the cgroup has no room, whatever the caps say (MemoryError)
	Closed      Kind = "closed"       // the store, queue or pipeline was closed (RuntimeError)
	Stale       Kind = "stale"        // the lease or the incarnation has been superseded (RuntimeError)
	SchemaError Kind = "schema"       // the sample does not agree with its run's schema (ValueError)
	Corrupt     Kind = "corrupt"      // stored bytes disagree with the ref, are short or fail a check (RuntimeError)
	Denied      Kind = "denied"       // the operating system or the token does not allow it (PermissionError)
	Conflict    Kind = "conflict"     // the state does not allow it now: a claimed sample aborted, a second start (RuntimeError)
	Unavailable Kind = "unavailable"  // the other side cannot answer now; ask again (ConnectionError)
	Wedged      Kind = "wedged"       // producer and consumers wait for each other and nothing can move (RuntimeError)
	Aborted     Kind = "aborted"      // the caller's own abort condition became true (RuntimeError)
	Unsupported Kind = "unsupported"  // this medium, target or backend cannot do it (NotImplementedError)
	TargetFault Kind = "target_fault" // the target failed or answered something that cannot be right (RuntimeError)
)

// Sentinels for [errors.Is]: an *Error of the kind matches the sentinel of the kind.
var (
	ErrInvalid     error = &Error{Kind: Invalid}
	ErrNotFound    error = &Error{Kind: NotFound}
	ErrDuplicate   error = &Error{Kind: Duplicate}
	ErrFull        error = &Error{Kind: Full}
	ErrNoSpace     error = &Error{Kind: NoSpace}
	ErrClosed      error = &Error{Kind: Closed}
	ErrStale       error = &Error{Kind: Stale}
	ErrSchema      error = &Error{Kind: SchemaError}
	ErrCorrupt     error = &Error{Kind: Corrupt}
	ErrDenied      error = &Error{Kind: Denied}
	ErrConflict    error = &Error{Kind: Conflict}
	ErrUnavailable error = &Error{Kind: Unavailable}
	ErrWedged      error = &Error{Kind: Wedged}
	ErrAborted     error = &Error{Kind: Aborted}
	ErrUnsupported error = &Error{Kind: Unsupported}
	ErrTargetFault error = &Error{Kind: TargetFault}
)

// Error is the one error type of the project. It reads as a sentence with the operation and the subject first:
//
//	dirstore: put "s-17": 5.2 GiB does not fit the 4.0 GiB cap; raise max_bytes or shorten the sample
type Error struct {
	Kind    Kind   // what sort of failure, stable
	Op      string // the operation, with its package where that helps: "dirstore: put"
	Subject string // what it was done to: an id, a path, a field; quoted in the message
	Detail  string // what is wrong: the value found and what was expected
	Hint    string // what the reader can do about it; may be empty
	Err     error  // the cause, if there is one
}

func (e *Error) Error() string {
	var b strings.Builder
	if e.Op != "" {
		b.WriteString(e.Op)
	}
	if e.Subject != "" {
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		b.WriteByte('"')
		b.WriteString(printable(e.Subject, 200))
		b.WriteByte('"')
	}
	if b.Len() > 0 {
		b.WriteString(": ")
	}
	if e.Detail != "" {
		b.WriteString(e.Detail)
	} else if e.Err == nil {
		b.WriteString(string(e.Kind))
	}
	if e.Err != nil {
		if e.Detail != "" {
			b.WriteString(": ")
		}
		b.WriteString(e.Err.Error())
	}
	if e.Hint != "" {
		b.WriteString("; ")
		b.WriteString(e.Hint)
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Is reports whether target is an *Error of the same kind that names nothing else, as the sentinels are.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Kind == e.Kind && t.Op == "" && t.Subject == "" && t.Detail == "" && t.Err == nil
}

// KindOf returns the kind of the outermost *Error in err's chain, or "" if there is none.
func KindOf(err error) Kind {
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	return ""
}

// printable makes s safe to show on a terminal or in a log: control bytes and what is not UTF-8 become '?',
// and what is longer than limit bytes is cut.
func printable(s string, limit int) string {
	cut := false
	if len(s) > limit {
		s, cut = s[:limit], true
	}
	s = strings.Map(func(r rune) rune {
		if r < 0x20 || r == 0x7f || (r >= 0x80 && r < 0xa0) || r == 0xfffd || r == 0x2028 || r == 0x2029 || (r >= 0x202a && r <= 0x202e) || (r >= 0x2066 && r <= 0x2069) {
			return '?'
		}
		return r
	}, s)
	if cut {
		s += "..."
	}
	return s
}
