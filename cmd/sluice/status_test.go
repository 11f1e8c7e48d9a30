package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

func busyStatus() *wire.ServiceStatus {
	run := wire.Status{
		RunID: "r1", Pending: 12, Outstanding: 3, Dead: 1, Put: 1000, Acked: 984, Redelivered: 2, ProducersWaiting: 1, ConsumersWaiting: 2, OldestLeaseSeconds: 12.3, Paused: true,
		Bottleneck: "the trainer: producers waited 40s for room, consumers 1s for samples",
		Health:     sluice.Health{ResidentBytes: 48 << 20, ReservedBytes: 8 << 20, Caps: sluice.Caps{MaxBytes: 64 << 20, LowWatermarkBytes: 16 << 20, HighWatermarkBytes: 48 << 20}},
		Producers:  []wire.ProducerStatus{{Name: "target-0", State: "running", Put: 1000, LastSeenSeconds: 0.2}},
		Consumers: []wire.ConsumerStatus{
			{Name: "rank-0", Leases: 3, LeasedBytes: 12 << 20, Delivered: 987, Acked: 984, LastSeenSeconds: 3},
			{Name: "evil\x1b[2J\x07name", Waiting: true, LastSeenSeconds: 100},
		},
	}
	few := wire.Status{RunID: "r2", Closed: true, Cause: "the \u202etarget\r\nfailed", Bottleneck: "none: of 1s", Health: sluice.Health{ResidentSamples: 3, Caps: sluice.Caps{MaxSamples: 4, LowWatermarkSamples: 1, HighWatermarkSamples: 3}}}
	return &wire.ServiceStatus{Version: "v1", Host: "trainer-3", PID: 7, UptimeSeconds: 3700, Ready: true, Durability: "process", StoreDir: "/dev/shm/sluice-0/x", MaxBytes: 1 << 30, CapBytes: 64 << 20, Sessions: 3, Runs: []wire.Status{run, few}}
}

func TestStatusSaysWhoWaitsForWhat(t *testing.T) {
	t.Parallel()
	text := strings.Join(statusLines(busyStatus(), 100), "\n")
	for _, want := range []string{
		"sluice v1 on trainer-3, pid 7, up 1h2m, ready", "the runs' caps take 64.0 MiB of 1.0 GiB; 3 sessions", "r1  paused: producers wait until the level is at the low mark", "56.0 MiB of 64.0 MiB used: resident 48.0 MiB, reserved 8.0 MiB",
		"low 16.0 MiB", "high 48.0 MiB", "pending 12   leased 3   dead 1   put 1000   acked 984   redelivered 2", "waiting: 1 producer for room, 2 consumers for samples; the oldest lease is 12s old",
		"bottleneck: the trainer: producers waited 40s", "producer target-0: running, put 1000, seen 200ms ago", "consumer rank-0: works, 3 leases (12.0 MiB)", "consumer evil?[2J?name: waits",
		"r2  failed", "3 samples of 4 samples used", "cause: the ?target??failed",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in\n%s", want, text)
		}
	}
	if strings.ContainsAny(text, "\x1b\x07\r") {
		t.Errorf("control bytes: %q", text)
	}
	if empty := statusLines(&wire.ServiceStatus{}, 80); !strings.Contains(strings.Join(empty, "\n"), "no runs; create one with") {
		t.Errorf("%q", empty)
	}
}

func TestStatusFitsANarrowTerminal(t *testing.T) {
	t.Parallel()
	for _, width := range []int{40, 20, 5, 1} {
		for _, l := range statusLines(busyStatus(), width) {
			longest := 0
			for word := range strings.FieldsSeq(l) {
				longest = max(longest, utf8.RuneCountInString(word))
			}
			if n := utf8.RuneCountInString(l); n > max(width, longest+2) && !strings.Contains(l, "low ") {
				t.Errorf("%d columns of %d: %q", n, width, l)
			}
		}
		for _, l := range fit(statusLines(busyStatus(), width), width, 10) {
			if n := utf8.RuneCountInString(l); n > width {
				t.Errorf("%d columns of %d after the cut: %q", n, width, l)
			}
		}
	}
	if lines := fit([]string{"a", "b", "c", "d"}, 80, 3); len(lines) != 3 || lines[2] != "... 2 lines more" {
		t.Errorf("%q", lines)
	}
	if lines := fit([]string{"a", "b"}, 80, 0); len(lines) != 1 {
		t.Errorf("%q", lines)
	}
}

func TestStatesOfARun(t *testing.T) {
	t.Parallel()
	for want, r := range map[string]wire.Status{
		"open": {}, "unavailable: its journal failed": {Unavailable: "its journal failed", Paused: true}, "wedged": {Wedged: "x", Closed: true, Paused: true}, "done": {Closed: true}, "failed": {Closed: true, Cause: "x"}, "failed: what is left drains": {Closed: true, Cause: "x", Pending: 1}, "draining": {Closed: true, Outstanding: 1, Paused: true}, "paused: producers wait until the level is at the low mark": {Paused: true, Starving: true}, "open: consumers are starving": {Starving: true},
	} {
		if got := stateOf(&r); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestARunThatCannotAnswerHasNoFigures(t *testing.T) {
	t.Parallel()
	r := wire.Status{RunID: "r1", Unavailable: "its journal\x1b failed"}
	want := "r1  unavailable: its journal? failed"
	if got := strings.Join(runLines(&r, 100), "\n"); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	s := &wire.ServiceStatus{Runs: []wire.Status{r}}
	if got := plainStatus(s, time.Unix(0, 0)); len(got) != 1 || !strings.HasSuffix(got[0], " r1 unavailable: its journal? failed") {
		t.Errorf("%q", got)
	}
	var list strings.Builder
	if err := listRuns(&list, []wire.Run{{Status: r}}); err != nil || !regexp.MustCompile(`(?m)^r1 +unavailable( +-){7}$`).MatchString(list.String()) {
		t.Errorf("%q, %v", list.String(), err)
	}
}

func TestTimesForPeople(t *testing.T) {
	t.Parallel()
	for s, want := range map[wire.Seconds]string{0: "0s", 0.854: "850ms", 12.4: "12s", 200: "3m20s", 18130: "5h2m", 9 * 86400: "9d"} {
		if got := ago(s); got != want {
			t.Errorf("%v: %s, want %s", s, got, want)
		}
	}
}

func TestWatchRedrawsOnATerminalAndWritesLinesElsewhere(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		watch := func(size func() (int, int), asJSON bool, long time.Duration) string {
			ctx, cancel := context.WithTimeout(t.Context(), long)
			defer cancel()
			var b strings.Builder
			n := 0
			err := watchStatus(ctx, &b, size, asJSON, func(context.Context) (wire.ServiceStatus, error) {
				if n++; n == 2 {
					return wire.ServiceStatus{}, &sluice.Error{Kind: sluice.Unavailable, Op: "service", Detail: "does not answer\x1b[2J"}
				}
				return *busyStatus(), nil
			})
			if err != nil {
				t.Error(err)
			}
			return b.String()
		}
		screen := watch(func() (int, int) { return 60, 12 }, false, 2500*time.Millisecond)
		if n := strings.Count(screen, "\x1b[J"); n != 2 || !strings.Contains(screen, "\x1b[11A\r") || !strings.Contains(screen, "\x1b[1A\r") || strings.Contains(screen, "\x1b[2J") {
			t.Errorf("%d redraws: %q", n, screen)
		}
		lines := watch(nil, false, 12*time.Second)
		if n := strings.Count(lines, "\n"); n != 5 || strings.Contains(lines, "\x1b") || !strings.Contains(lines, "does not answer") || !strings.Contains(lines, "r1 paused: producers wait until the level is at the low mark  56.0 MiB of 64.0 MiB") {
			t.Errorf("%d lines: %q", n, lines)
		}
		objects := strings.Split(strings.TrimSpace(watch(nil, true, 12*time.Second)), "\n")
		for _, o := range objects {
			if !json.Valid([]byte(o)) {
				t.Errorf("no JSON: %s", o)
			}
		}
		if len(objects) != 3 {
			t.Errorf("%d objects", len(objects))
		}
	})
}

func TestDeadLettersShowTheirReasonsAndNothingElse(t *testing.T) {
	t.Parallel()
	var ref sluice.Ref
	if err := json.Unmarshal([]byte(`{"sample_id":"s1","run_id":"r1","store_uri":"mem://x","generation":"g","features":[{"name":"input_ids","key":"k","shape":[1,2],"dtype":"int64"}],"algorithm":"eagle3","schema_version":1,"num_tokens":2,"estimated_bytes":16,"target_model_version":"0","draft_weight_version":"0","attributes":{}}`), &ref); err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	letters := []wire.DeadLetter{{Ref: ref, Fails: 1, Reasons: []string{"loss is NaN\x1b]0;title\x07", "\u202eagain"}}, {Ref: ref, Fails: 5, Freed: true}}
	if err := listDeadLetters(&b, letters); err != nil {
		t.Fatal(err)
	}
	text := b.String()
	if !strings.Contains(text, "s1  since ") || !strings.Contains(text, "1 fail, 0 expiries, 16 B\n  loss is NaN?]0;title?\n  ?again\n") || !strings.Contains(text, "5 fails, 0 expiries, its bytes were freed") || strings.ContainsAny(text, "\x1b\x07") {
		t.Errorf("%q", text)
	}
}

// answering is a service that says one thing.
func answering(t *testing.T, status int, mediaType, text string) *serviceFlags {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", mediaType)
		w.Header().Set("Location", "http://evil.example/")
		w.WriteHeader(status)
		io.WriteString(w, text)
	}))
	t.Cleanup(s.Close)
	return &serviceFlags{url: s.URL, state: t.TempDir()}
}

func TestWhatIsNoAnswerOfAServiceIsSaid(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		status int
		text   string
		want   error
		say    string
	}{
		"a problem":      {404, `{"code":"not_found","status":404,"detail":"there is no such run","op":"run","subject":"r1"}`, sluice.ErrNotFound, `run "r1": there is no such run`},
		"another server": {404, "<html>", sluice.ErrUnavailable, "that is no Sluice service"},
		"a redirect":     {302, "", sluice.ErrUnavailable, "302"},
		"half an answer": {200, `{"runs":`, sluice.ErrCorrupt, "can't be read"},
		"nothing":        {200, ``, sluice.ErrCorrupt, "can't be read"},
	} {
		call, err := answering(t, c.status, "application/json", c.text).dial(io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		var out wire.RunList
		if err := call.do(t.Context(), "GET", "/v1/runs", nil, &out); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.say) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTheLocalTokenGoesToTheLocalServiceAlone(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const secret = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	data, err := wire.FormatTokens([]wire.Token{{Name: "c", Role: "consumer", Value: secret + "2"}, {Name: "one", Role: "operator", Run: "r1", Value: secret + "3"}, {Name: "op", Role: "operator", Value: secret}})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(filepath.Join(dir, wire.TokensFile), data, 0o600), os.WriteFile(filepath.Join(dir, wire.EndpointFile), []byte(`{"url":"http://127.0.0.1:7447","socket":"/x"}`), 0o600)); err != nil {
		t.Fatal(err)
	}
	var warned strings.Builder
	for url, want := range map[string]string{"http://127.0.0.1:7447": secret, "http://127.0.0.1:7447/": secret, "http://127.0.0.1:7448": "", "https://127.0.0.1:7447": "", "http://evil.example:7447": "", "unix:/x": "", "": ""} {
		call, err := (&serviceFlags{url: url, state: dir}).dial(&warned)
		if err != nil {
			t.Errorf("%s: %v", url, err)
		} else if call.token != want {
			t.Errorf("%s is sent %q", url, call.token)
		}
	}
	if warned.Len() != 0 {
		t.Errorf("warned where no token goes out: %q", warned.String())
	}
	file := filepath.Join(dir, "token")
	if err := os.WriteFile(file, []byte(secret), 0o600); err != nil {
		t.Fatal(err)
	}
	for url, want := range map[string]bool{"http://trainer-3:7447": true, "http://10.0.0.1:7447": true, "https://trainer-3:7447": false, "http://localhost:7447": false, "http://[::1]:7447": false, "unix:/x": false} {
		warned.Reset()
		call, err := (&serviceFlags{url: url, state: dir, tokenFile: file}).dial(&warned)
		if err != nil || call.token != secret || strings.Contains(warned.String(), "in the clear") != want {
			t.Errorf("%s: %v, warned %q", url, err, warned.String())
		}
	}
}
