package stream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/sluice-ml/sluice"
)

// EventKind says what an [Event] is about.
type EventKind string

// The kinds of event.
const (
	Retry       EventKind = "retry"        // an operation failed in a way that may pass, and is tried again after Wait
	NotAdmitted EventKind = "not_admitted" // a batch of prompts was refused by the schema's admission rule and skipped
	FaultPassed EventKind = "fault_passed" // a fault of the target was skipped, as the options allow
	Discarded   EventKind = "discarded"    // a sample that did not reach the queue was taken out of the store
	Heartbeat   EventKind = "heartbeat"    // a heartbeat or a final report did not get through
	Skipped     EventKind = "skipped"      // a sample could not be read and was failed
	LeaseLost   EventKind = "lease_lost"   // leases ran out or were taken over before they were settled
	Unreleased  EventKind = "unreleased"   // a pin could not be given up; it ends with the session that holds it
	Idle        EventKind = "idle"         // the trainer has been silent for so long that its leases are no longer renewed
)

// Event is something that happened on the way and did not end it.
type Event struct {
	Kind     EventKind
	Op       string        // what was being done: "reserve", "forward", "put", "enqueue", "acquire", ...
	SampleID string        // whose, if it was one sample's
	Attempt  int           // of a retry, from 1
	Wait     time.Duration // before the next try
	Count    int           // of leases or rows, where several are meant
	Err      error
}

func (e Event) String() string {
	s := string(e.Kind)
	if e.Op != "" {
		s += " " + e.Op
	}
	if e.SampleID != "" {
		s += " " + e.SampleID
	}
	if e.Count > 0 {
		s += fmt.Sprintf(" (%d)", e.Count)
	}
	if e.Kind == Retry {
		s += fmt.Sprintf(" (try %d, again in %v)", e.Attempt, e.Wait)
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// logEvent is where events go when nobody asked for them.
func logEvent(e Event) {
	level := slog.LevelWarn
	if e.Kind == NotAdmitted {
		level = slog.LevelDebug
	}
	slog.Log(context.Background(), level, "stream: "+string(e.Kind), "op", e.Op, "sample", e.SampleID, "attempt", e.Attempt, "wait", e.Wait, "count", e.Count, "err", e.Err)
}

// transient reports whether the same call may succeed later.
func transient(err error) bool {
	return errors.Is(err, sluice.ErrUnavailable) || errors.Is(err, sluice.ErrWedged)
}

// backoff is the wait before try n+1: doubling from 100 ms to 5 s.
func backoff(n int) time.Duration {
	return min(100*time.Millisecond<<min(n-1, 10), 5*time.Second)
}

// sleep waits by the clock; false means that the context ended first.
func sleep(ctx context.Context, clock sluice.Clock, d time.Duration) bool {
	done := make(chan struct{})
	stop := clock.AfterFunc(d, func() { close(done) })
	select {
	case <-done:
		return true
	case <-ctx.Done():
		stop()
		return false
	}
}

// cleanupTime bounds the work that has to be done although the caller's context has ended, and all of a Loader's Close: who ends does not wait for what is away.
const cleanupTime = 5 * time.Second

// cleanup returns a context for that work.
func cleanup(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
}

// insist does work that has to be done although ctx has ended, and repeats it while the other side is unavailable, for as long as cleanup allows.
func insist(ctx context.Context, f func(ctx context.Context) error) error {
	ctx, cancel := cleanup(ctx)
	defer cancel()
	for try := 1; ; try++ {
		err := f(ctx)
		if !errors.Is(err, sluice.ErrUnavailable) || !sleep(ctx, sluice.SystemClock{}, backoff(try)) {
			return err
		}
	}
}

// guard calls f, code that is not ours, and turns a panic into an error that says where it began.
func guard(kind sluice.Kind, op string, f func() error) (err error) {
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		e := &sluice.Error{Kind: kind, Op: op, Detail: "panicked" + panickedAt()}
		if cause, ok := v.(error); ok {
			e.Err = cause
		} else {
			e.Detail += fmt.Sprintf(": %v", v)
		}
		err = e
	}()
	return f()
}

// panickedAt names the function that panicked; a whole stack has no place in a message. It is called by the deferred function that recovers.
func panickedAt() string {
	var pcs [32]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(3, pcs[:])])
	for {
		f, more := frames.Next()
		if f.Function != "" && !strings.HasPrefix(f.Function, "runtime.") {
			return fmt.Sprintf(" in %s (%s:%d)", f.Function, filepath.Base(f.File), f.Line)
		}
		if !more {
			return ""
		}
	}
}

// limit cuts a text to n bytes.
func limit(s string, n int) string {
	if len(s) > n {
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "?")
}
