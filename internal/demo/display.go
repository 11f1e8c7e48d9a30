package demo

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/gauge"
)

// Display draws snapshots: a panel that is redrawn in place on a terminal, a line now and then elsewhere. Its methods may be called from any goroutine.
type Display struct {
	w     io.Writer
	width func() int // of the terminal in columns; nil if there is none

	mu    sync.Mutex
	drawn int           // lines of the panel that is on the screen
	last  time.Duration // when the last plain line was written
}

// plainEvery is the time between two plain lines: often enough to see that it lives, rarely enough for a log.
const plainEvery = 2 * time.Second

// NewDisplay returns a display that writes to w. If that is a terminal, width tells its width in columns, which may change; otherwise it is nil.
func NewDisplay(w io.Writer, width func() int) *Display {
	return &Display{w: w, width: width}
}

// Warn writes a line above the panel.
func (d *Display) Warn(line string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fmt.Fprintln(d.w, d.clear()+"warning: "+line)
}

// clear returns what takes the panel off the screen.
func (d *Display) clear() string {
	if d.drawn == 0 {
		return ""
	}
	n := d.drawn
	d.drawn = 0
	return fmt.Sprintf("\x1b[%dA\r\x1b[J", n) // from the panel's first line to the end of the screen
}

// Show draws a snapshot.
func (d *Display) Show(s Snapshot) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.width == nil {
		if s.Done || d.last == 0 || s.Elapsed-d.last >= plainEvery {
			d.last = max(s.Elapsed, 1)
			fmt.Fprintln(d.w, plainLine(s))
		}
		return
	}
	lines := panel(s, min(d.width(), 100))
	out := d.clear() + strings.Join(lines, "\n") + "\n"
	d.drawn = len(lines)
	fmt.Fprint(d.w, out) // a terminal that went away does not stop the work
}

func rates(s Snapshot) (samples, tokens, gb float64) {
	if sec := s.Elapsed.Seconds(); sec > 0 {
		return float64(s.Status.Acked) / sec, float64(s.Tokens) / sec, float64(s.Status.BytesAcked) / 1e9 / sec
	}
	return 0, 0, 0
}

func plainLine(s Snapshot) string {
	st := &s.Status
	samples, tokens, gb := rates(s)
	line := fmt.Sprintf("%5.1fs  %3.0f%% read  produced %d  acked %d  %.1f samples/s  %.0f tokens/s  %.4f GB/s  resident and reserved %s of %s (marks %s, %s)  producer paused %.1fs  consumer waited %.1fs  redelivered %d",
		s.Elapsed.Seconds(), 100*s.Read, st.Put, st.Acked, samples, tokens, gb, gauge.Size(st.Health.UsedBytes()), gauge.Size(st.Health.Caps.MaxBytes),
		gauge.Size(st.Health.Caps.LowWatermarkBytes), gauge.Size(st.Health.Caps.HighWatermarkBytes), st.ProducerPaused.Seconds(), st.ConsumerWaited.Seconds(), st.Redelivered)
	if st.Dead > 0 {
		line += fmt.Sprintf("  dead %d", st.Dead)
	}
	if st.Wedged != "" {
		line += "  WEDGED: " + st.Wedged
	}
	return line
}

func panel(s Snapshot, width int) []string {
	st := &s.Status
	samples, tokens, gb := rates(s)
	ranks := ""
	if s.Options.Ranks > 1 {
		ranks = fmt.Sprintf(", %d ranks", s.Options.Ranks)
	}
	state := "open"
	switch {
	case st.Wedged != "":
		state = "wedged"
	case s.Done:
		state = "done"
	case st.Closed:
		state = "draining"
	case st.Paused:
		state = "paused: above the high mark"
	case st.Starving:
		state = "open: the consumer is starving"
	}
	level := levelOf(st.Health)
	lines := []string{
		fmt.Sprintf("%s from %s (%d layers, H %d)%s, store %s   %.1f s", s.Options.Algorithm, s.Model.Name, s.Model.Layers, s.Model.HiddenSize, ranks, s.Options.Store, s.Elapsed.Seconds()),
		fmt.Sprintf("%3.0f%% of the prompts read   produced %d   acked %d   pending %d   leased %d", 100*s.Read, st.Put, st.Acked, st.Pending, st.Outstanding),
		fmt.Sprintf("%.1f samples/s   %.0f tokens/s   %.4f GB/s", samples, tokens, gb),
		level.Bar(width - 2),
		level.Marks(width - 2),
		fmt.Sprintf("resident and reserved %s of %s   gate %s", gauge.Size(st.Health.UsedBytes()), gauge.Size(st.Health.Caps.MaxBytes), state),
		fmt.Sprintf("redelivered %d   dead %d   producer paused %.1f s   consumer waited %.1f s", st.Redelivered, st.Dead, st.ProducerPaused.Seconds(), st.ConsumerWaited.Seconds()),
	}
	for i, l := range lines {
		if r := []rune(l); len(r) > width {
			lines[i] = string(r[:max(width, 1)]) // a line that wraps would spoil the redrawing
		}
	}
	return lines
}

// levelOf is what is used against the cap.
func levelOf(h sluice.Health) gauge.Gauge {
	return gauge.Gauge{Level: h.UsedBytes(), Low: h.Caps.LowWatermarkBytes, High: h.Caps.HighWatermarkBytes, Cap: h.Caps.MaxBytes, Unit: gauge.Size}
}

// Summary says what came of the demo, for people.
func (r *Result) Summary() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d samples, %d tokens, %s in %.1f s: %.1f samples/s, %.0f tokens/s, %.4f GB/s\n", r.Acked, r.Tokens, gauge.Size(r.Bytes), r.Seconds, r.SamplesPerS, r.TokensPerS, r.GBPerS)
	fmt.Fprintf(&b, "flow        %s went through a store of %s; at most %s were used\n", gauge.Size(r.Bytes), gauge.Size(r.MaxBytes), gauge.Size(r.PeakBytes))
	if r.Parity == bitExact {
		b.WriteString("parity      bit-exact: every sample equals a direct forward of its row\n")
	} else {
		fmt.Fprintf(&b, "parity      BROKEN: %s\n", r.Parity)
	}
	fmt.Fprintf(&b, "accounts    produced %d, acked %d, lost %d, dead %d, redelivered %d, left in the store %s", r.Produced, r.Acked, r.Lost, r.Dead, r.Redelivered, gauge.Size(r.ResidentBytes))
	if r.Kills > 0 {
		fmt.Fprintf(&b, ", consumers killed %d", r.Kills)
	}
	if r.Padded > 0 {
		fmt.Fprintf(&b, ", stand-ins in the last window %d", r.Padded)
	}
	if r.Skipped > 0 || r.Truncated > 0 {
		fmt.Fprintf(&b, "\nprompts     %d skipped, %d truncated", r.Skipped, r.Truncated)
	}
	fmt.Fprintf(&b, "\nbottleneck  %s\n", r.Bottleneck)
	for _, fault := range r.Faults() {
		fmt.Fprintf(&b, "WRONG       %s\n", fault)
	}
	return b.String()
}
