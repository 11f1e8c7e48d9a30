package stream

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"
)

func TestEventsSayWhatHappened(t *testing.T) {
	e := Event{Kind: Retry, Op: "put", SampleID: "s-1", Attempt: 2, Wait: 200 * time.Millisecond, Err: errors.New("away")}
	if got, want := e.String(), "retry put s-1 (try 2, again in 200ms): away"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	var b bytes.Buffer
	old := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&b, nil)))
	defer slog.SetDefault(old)
	logEvent(e)
	logEvent(Event{Kind: NotAdmitted})
	if got := b.String(); !strings.Contains(got, "stream: retry") || strings.Contains(got, "not_admitted") {
		t.Errorf("logged %q; want the retry, and rows that are not admitted only at Debug", got)
	}
}
