package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/gauge"
	"github.com/sluice-ml/sluice/internal/inspect"
	"github.com/sluice-ml/sluice/internal/wire"
)

// redrawEvery is the time between two looks on a terminal, and logEvery that between two lines elsewhere.
const (
	redrawEvery = time.Second
	logEvery    = 5 * time.Second
)

func statusCommand(stdout, stderr io.Writer) *cobra.Command {
	var (
		service       serviceFlags
		watch, asJSON bool
	)
	c := &cobra.Command{
		Use:   "status [RUN]",
		Short: "Show what a service and its runs, or one of them, are doing, and what they wait for",
		Example: `  sluice status
  sluice status r1
  sluice status --watch
  sluice status --url https://trainer-3:7447 --token-file operator.token --json`,
		Args: arguments(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			call, err := service.dial(stderr)
			if err != nil {
				return err
			}
			look := func(ctx context.Context) (s wire.ServiceStatus, err error) {
				err = call.do(ctx, http.MethodGet, "/v1/status", nil, &s)
				if err == nil && len(args) > 0 {
					s.Runs = slices.DeleteFunc(s.Runs, func(r wire.Status) bool { return r.RunID != args[0] })
					if len(s.Runs) == 0 {
						err = &sluice.Error{Kind: sluice.NotFound, Op: "status", Subject: args[0], Detail: "there is no such run", Hint: "`sluice runs` lists them"}
					}
				}
				return s, err
			}
			if watch {
				return watchStatus(cmd.Context(), stdout, terminalSize(stdout), asJSON, look)
			}
			s, err := look(cmd.Context())
			if err != nil {
				return err
			}
			if asJSON {
				return writeASCII(stdout, s)
			}
			width := 100
			if size := terminalSize(stdout); size != nil {
				width, _ = size()
			}
			_, err = fmt.Fprintln(stdout, strings.Join(statusLines(&s, width), "\n"))
			return err
		},
	}
	service.register(c)
	c.Flags().BoolVar(&watch, "watch", false, "go on looking: redraw every second on a terminal, else a line a run every five")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object, as GET /v1/status answers, or {\"error\",\"kind\"}; with --watch one every five seconds")
	return c
}

// watchStatus looks until ctx ends, which is its regular end. A service that does not answer is told, and asked again.
func watchStatus(ctx context.Context, w io.Writer, size func() (int, int), asJSON bool, look func(context.Context) (wire.ServiceStatus, error)) error {
	every, drawn := logEvery, 0
	if size != nil && !asJSON {
		every = redrawEvery
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		s, err := look(ctx)
		if ctx.Err() != nil {
			return nil
		}
		var lines []string
		switch {
		case err != nil:
			lines = []string{time.Now().Format(time.TimeOnly) + " " + inspect.Clean(err.Error())}
			if asJSON {
				if err := writeASCII(w, errorObject(err)); err != nil {
					return err
				}
			}
		case asJSON:
			if err := writeASCII(w, s); err != nil {
				return err
			}
		case size == nil:
			lines = plainStatus(&s, time.Now())
		default:
			width, _ := size()
			lines = statusLines(&s, width)
		}
		if !asJSON {
			out := strings.Join(lines, "\n") + "\n"
			if size != nil {
				width, height := size()
				lines = fit(lines, width, height-1)
				if drawn > 0 {
					out = fmt.Sprintf("\x1b[%dA\r\x1b[J", drawn)
				} else {
					out = ""
				}
				out += strings.Join(lines, "\n") + "\n"
				drawn = len(lines)
			}
			if _, err := io.WriteString(w, out); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// fit cuts lines to a screen: one that wraps, or scrolls away, would spoil the redrawing.
func fit(lines []string, width, height int) []string {
	height = max(height, 1)
	if len(lines) > height {
		lines = append(lines[:height-1:height-1], fmt.Sprintf("... %d lines more", len(lines)-height+1))
	}
	for i, l := range lines {
		if r := []rune(l); len(r) > width {
			lines[i] = string(r[:max(width, 1)])
		}
	}
	return lines
}

// plainStatus is a line a run, for logs.
func plainStatus(s *wire.ServiceStatus, now time.Time) []string {
	at := now.Format(time.TimeOnly)
	if len(s.Runs) == 0 {
		return []string{at + " no runs"}
	}
	var lines []string
	for i := range s.Runs {
		r := &s.Runs[i]
		if r.Unavailable != "" {
			lines = append(lines, fmt.Sprintf("%s %s unavailable: %s", at, inspect.Clean(r.RunID), inspect.Clean(r.Unavailable)))
			continue
		}
		level := levelOf(r)
		lines = append(lines, fmt.Sprintf("%s %s %s  %s of %s  pending %d  leased %d  put %d  acked %d  redelivered %d  dead %d  producers waiting %d  consumers waiting %d  %s",
			at, inspect.Clean(r.RunID), stateOf(r), level.Unit(level.Level), level.Unit(level.Cap), r.Pending, r.Outstanding, r.Put, r.Acked, r.Redelivered, r.Dead, r.ProducersWaiting, r.ConsumersWaiting, inspect.Clean(r.Bottleneck)))
	}
	return lines
}

// statusLines is the status for people, in at most width columns where texts of others allow it.
func statusLines(s *wire.ServiceStatus, width int) []string {
	ready := "ready"
	if !s.Ready {
		ready = "not ready yet"
	}
	lines := wrap(fmt.Sprintf("sluice %s on %s, pid %d, up %s, %s", inspect.Clean(s.Version), inspect.Clean(s.Host), s.PID, ago(s.UptimeSeconds), ready), width)
	caps := gauge.Size(s.CapBytes)
	if s.MaxBytes > 0 {
		caps += " of " + gauge.Size(s.MaxBytes)
	}
	lines = append(lines, wrap(fmt.Sprintf("store %s, durability %s; the runs' caps take %s; %s", inspect.Clean(s.StoreDir), s.Durability, caps, count(s.Sessions, "session")), width)...)
	if len(s.Runs) == 0 {
		return append(lines, "", "no runs; create one with `sluice runs create`")
	}
	for i := range s.Runs {
		lines = append(append(lines, ""), runLines(&s.Runs[i], width)...)
	}
	return lines
}

func runLines(r *wire.Status, width int) []string {
	lines := wrap(inspect.Clean(r.RunID)+"  "+stateOf(r), width)
	if r.Unavailable != "" { // it has no figures
		return lines
	}
	level := levelOf(r)
	bar := min(width, 100) - 4
	lines = append(lines, "  "+level.Bar(bar), "  "+level.Marks(bar))
	text := func(format string, args ...any) {
		for _, l := range wrap(fmt.Sprintf(format, args...), width-2) {
			lines = append(lines, "  "+l)
		}
	}
	text("%s of %s used: resident %s, reserved %s, dead letters %s", level.Unit(level.Level), level.Unit(level.Cap), gauge.Size(r.Health.ResidentBytes), gauge.Size(r.Health.ReservedBytes), gauge.Size(r.Health.DeadBytes))
	text("pending %d   leased %d   dead %d   put %d   acked %d   redelivered %d   failed %d   expired %d", r.Pending, r.Outstanding, r.Dead, r.Put, r.Acked, r.Redelivered, r.Failed, r.Expired)
	text("waiting: %s for room, %s for samples%s", count(r.ProducersWaiting, "producer"), count(r.ConsumersWaiting, "consumer"), oldest(r))
	if r.Cause != "" {
		text("cause: %s", inspect.Clean(r.Cause))
	}
	text("bottleneck: %s", inspect.Clean(r.Bottleneck))
	for _, p := range r.Producers {
		text("producer %s: %s, put %d, seen %s ago", inspect.Clean(p.Name), p.State, p.Put, ago(p.LastSeenSeconds))
	}
	for _, c := range r.Consumers {
		doing := "works"
		switch {
		case c.Waiting:
			doing = "waits"
		case c.Leases == 0:
			doing = "idle"
		}
		text("consumer %s: %s, %s (%s), delivered %d, acked %d, seen %s ago", inspect.Clean(c.Name), doing, count(c.Leases, "lease"), gauge.Size(c.LeasedBytes), c.Delivered, c.Acked, ago(c.LastSeenSeconds))
	}
	return lines
}

func oldest(r *wire.Status) string {
	if r.Outstanding == 0 {
		return ""
	}
	return "; the oldest lease is " + ago(r.OldestLeaseSeconds) + " old"
}

// levelOf is what of the cap is used: of the bytes, or of the samples where only they are bounded.
func levelOf(r *wire.Status) gauge.Gauge {
	h, c := r.Health, r.Health.Caps
	if c.MaxBytes == 0 {
		return gauge.Gauge{Level: h.UsedSamples(), Low: c.LowWatermarkSamples, High: c.HighWatermarkSamples, Cap: c.MaxSamples, Unit: func(n int64) string { return count(n, "sample") }}
	}
	return gauge.Gauge{Level: h.UsedBytes(), Low: c.LowWatermarkBytes, High: c.HighWatermarkBytes, Cap: c.MaxBytes, Unit: gauge.Size}
}

func stateOf(r *wire.Status) string {
	switch {
	case r.Unavailable != "":
		return "unavailable: " + inspect.Clean(r.Unavailable)
	case r.Wedged != "":
		return "wedged"
	case r.Closed && r.Cause != "":
		if r.Pending+r.Outstanding == 0 {
			return "failed"
		}
		return "failed: what is left drains"
	case r.Closed && r.Pending+r.Outstanding == 0:
		return "done"
	case r.Closed:
		return "draining"
	case r.Paused:
		return "paused: producers wait until the level is at the low mark"
	case r.Starving:
		return "open: consumers are starving"
	}
	return "open"
}

func count[T int | int64](n T, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %ss", n, one)
}

// ago shows a time in two parts at most: 850ms, 12s, 3m20s, 5h2m, 9d.
func ago(s wire.Seconds) string {
	d := s.Duration()
	switch {
	case d < time.Second:
		return d.Round(10 * time.Millisecond).String()
	case d < time.Minute:
		return d.Round(time.Second).String()
	case d < time.Hour:
		return d.Round(time.Second).String()
	case d < 48*time.Hour:
		return strings.TrimSuffix(d.Round(time.Minute).String(), "0s")
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// wrap breaks a text between words, so that no line has more than width columns; a longer word has a line of its own.
func wrap(text string, width int) []string {
	var lines []string
	line := ""
	for word := range strings.SplitSeq(text, " ") {
		switch {
		case line == "":
			line = word
		case len([]rune(line))+1+len([]rune(word)) > width:
			lines, line = append(lines, strings.TrimRight(line, " ")), word
		default:
			line += " " + word
		}
	}
	return append(lines, line)
}
