package inspect

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/sluice-ml/sluice/store/dirstore"
)

// Clean makes text from a file safe for a terminal: control characters, and those that turn the direction of writing, become '?'.
func Clean(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r < 0x20, r >= 0x7f && r < 0xa0, r == 0xfffd, r == 0x2028, r == 0x2029, r == 0x200e, r == 0x200f, r >= 0x202a && r <= 0x202e, r >= 0x2066 && r <= 0x2069:
			return '?'
		}
		return r
	}, s)
}

// clip bounds what one name takes of a line.
func clip(s string, most int) string {
	s = Clean(s)
	if r := []rune(s); len(r) > most {
		return string(r[:most]) + "..."
	}
	return s
}

func plural(n int64, one string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %ss", n, one)
}

func size(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	v, i := float64(n), 0
	for v >= 1024 && i < len(units)-1 {
		v /= 1024
		i++
	}
	if i == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", v, units[i])
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "NO"
}

func number(v *float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%.4g", *v)
}

// table writes rows of cells below each other. The cells have been cleaned.
func table(w io.Writer, rows [][]string) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, r := range rows {
		fmt.Fprintln(t, "  "+strings.Join(r, "\t"))
	}
	_ = t.Flush() // the writer below is a terminal, or tells its caller
}

func problems(w io.Writer, list []string) {
	if len(list) == 0 {
		return
	}
	fmt.Fprintf(w, "\n%s\n", plural(int64(len(list)), "problem"))
	for _, p := range list {
		fmt.Fprintf(w, "  %s\n", Clean(p))
	}
}

// ProblemTexts are the problems as sentences.
func (r *FileReport) ProblemTexts() (texts []string) {
	for _, p := range r.Problems {
		texts = append(texts, p.String())
	}
	return texts
}

// ProblemTexts are the problems as sentences.
func (r *StoreReport) ProblemTexts() (texts []string) {
	for _, f := range r.Findings {
		texts = append(texts, Problem(f).String())
	}
	return texts
}

// Text writes the report for people.
func (r *FileReport) Text(w io.Writer) {
	fmt.Fprintf(w, "%s: %s, %s, data from byte %d\n", Clean(r.Path), size(r.Bytes), plural(int64(len(r.Features)), "feature"), r.Header)
	if ref := r.Ref; ref != nil {
		schema := map[string]string{OK: "agrees with its schema", Bad: "does NOT agree with its schema", None: "whose schema is not built in"}[r.Schema]
		agrees := "agrees with the tensors"
		if r.RefAgrees != OK {
			agrees = "does NOT agree with the tensors"
		}
		fmt.Fprintf(w, "sample      %s, of run %s\n", Clean(ref.SampleID), Clean(ref.RunID))
		fmt.Fprintf(w, "store       %s, generation %s\n", Clean(ref.StoreURI), Clean(ref.Generation))
		fmt.Fprintf(w, "algorithm   %s version %d, %s\n", Clean(string(ref.Algorithm)), ref.SchemaVersion, schema)
		fmt.Fprintf(w, "weights     target %s, draft %s\n", Clean(ref.TargetModelVersion), Clean(ref.DraftWeightVersion))
		fmt.Fprintf(w, "tokens      %d\n", ref.NumTokens)
		fmt.Fprintf(w, "ref         %s; order %s\n", agrees, Clean(strings.Join(r.RefOrder, ", ")))
	} else if r.RefAgrees == Bad {
		fmt.Fprintln(w, "ref         can't be read")
	} else {
		fmt.Fprintln(w, "ref         none: the file is not a store's")
	}
	fmt.Fprintf(w, "checksums   %s\n", r.Checksums)
	fmt.Fprintf(w, "finite      %s\n", yesNo(r.Finite))
	if r.Ref != nil && len(r.Ref.Attributes) > 0 {
		fmt.Fprintln(w, "\nattributes")
		pairs(w, r.Ref.Attributes)
	}
	if len(r.Metadata) > 0 {
		fmt.Fprintln(w, "\nother metadata")
		pairs(w, r.Metadata)
	}
	if len(r.Features) > 0 {
		fmt.Fprintln(w, "\nfeatures, in the file's order")
		rows := [][]string{{"name", "dtype", "shape", "bytes", "offset", "aligned", "checksum", "finite", "min", "max", "mean"}}
		for _, f := range r.Features {
			aligned := fmt.Sprint(f.Alignment)
			if !f.Aligned {
				aligned += " (NOT to its elements)"
			}
			row := []string{clip(f.Name, 60), Clean(f.DType), strings.ReplaceAll(fmt.Sprint(f.Shape), " ", ","), fmt.Sprint(f.Bytes), fmt.Sprint(f.Offset), aligned, f.Checksum}
			if s := f.Stats; s == nil {
				row = append(row, "-", "-", "-", "-")
			} else {
				finite := "yes"
				if !s.Finite {
					finite = fmt.Sprintf("NO: %d NaN, %d Inf", s.NaN, s.Inf)
				}
				row = append(row, finite, number(s.Min), number(s.Max), number(s.Mean))
			}
			rows = append(rows, row)
		}
		table(w, rows)
	}
	problems(w, r.ProblemTexts())
}

func pairs(w io.Writer, m map[string]string) {
	var rows [][]string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		rows = append(rows, []string{clip(k, 60), clip(m[k], 200)})
	}
	table(w, rows)
}

const gaugeWidth = 60

// gauge draws use against a cap, with the marks in it.
func gauge(used, low, high, most int64) string {
	cell := func(n int64) int { return int(min(max(float64(n)/float64(most), 0), 1) * gaugeWidth) }
	cells := []rune(strings.Repeat("█", cell(used)) + strings.Repeat(" ", gaugeWidth-cell(used)))
	for _, mark := range []int64{low, high} {
		if i := min(cell(mark), gaugeWidth-1); cells[i] == ' ' {
			cells[i] = '│'
		} else {
			cells[i] = '┃'
		}
	}
	return "▕" + string(cells) + "▏"
}

// Text writes the report for people.
func (r *StoreReport) Text(w io.Writer) {
	h, c := r.Health, r.Health.Caps
	alive := 0
	for _, s := range r.Sessions {
		if s.Alive {
			alive++
		}
	}
	fmt.Fprintf(w, "%s: %s, %d alive; %s\n", Clean(r.URI), plural(int64(len(r.Sessions)), "session"), alive, plural(int64(len(r.Samples)), "sample"))
	if r.Torn != "" {
		fmt.Fprintf(w, "torn        %s\n", r.Torn)
	}
	for _, n := range r.Notes {
		fmt.Fprintf(w, "note        %s\n", Clean(n))
	}
	if c.MaxBytes > 0 {
		fmt.Fprintf(w, "bytes       %s\n            %s of %s used; marks %s, %s\n", gauge(h.UsedBytes(), c.LowWatermarkBytes, c.HighWatermarkBytes, c.MaxBytes),
			size(h.UsedBytes()), size(c.MaxBytes), size(c.LowWatermarkBytes), size(c.HighWatermarkBytes))
	}
	if c.MaxSamples > 0 {
		fmt.Fprintf(w, "samples     %s\n            %d of %d used; marks %d, %d\n", gauge(h.UsedSamples(), c.LowWatermarkSamples, c.HighWatermarkSamples, c.MaxSamples),
			h.UsedSamples(), c.MaxSamples, c.LowWatermarkSamples, c.HighWatermarkSamples)
	}
	table(w, [][]string{
		{"resident", size(h.ResidentBytes), plural(h.ResidentSamples, "sample")},
		{"  dead letters", size(h.DeadBytes), plural(h.DeadSamples, "sample")},
		{"reserved", size(h.ReservedBytes), plural(h.ReservedSamples, "sample")},
		{"  staging", size(h.StagingBytes), "being written"},
		{"pool", size(h.PoolBytes), plural(r.PoolFiles, "file")},
		{"ledger", size(r.LedgerBytes), fmt.Sprintf("epoch %d", r.Epoch)},
	})
	if len(r.Sessions) > 0 {
		fmt.Fprintln(w, "\nsessions")
		rows := [][]string{{"session", "pid", "state", "age", "samples", "reservations", "pins", "mappings"}}
		for _, s := range r.Sessions {
			state := "alive"
			if !s.Alive {
				state = "DEAD"
			}
			rows = append(rows, []string{fmt.Sprint(s.Index), fmt.Sprint(s.PID), state, age(r.Taken, s.Started), fmt.Sprint(s.Samples), fmt.Sprint(s.Reservations), fmt.Sprint(s.Pins), fmt.Sprint(s.Mappings)})
		}
		table(w, rows)
	}
	if len(r.Samples) > 0 {
		fmt.Fprintln(w, "\nsamples, oldest first")
		head := []string{"sample", "state", "bytes", "owner", "pins", "mappings", "session", "age", "run", "algorithm", "tokens"}
		if r.Verified != nil {
			head = append(head, "checksums", "finite")
		}
		rows := [][]string{head}
		for i := range r.Samples {
			rows = append(rows, r.sampleRow(&r.Samples[i]))
		}
		table(w, rows)
	}
	if len(r.Reservations) > 0 {
		fmt.Fprintln(w, "\nreservations")
		rows := [][]string{{"bytes", "session", "sample"}}
		for _, v := range r.Reservations {
			rows = append(rows, []string{size(v.Bytes), index(v.Session), orDash(v.SampleID)})
		}
		table(w, rows)
	}
	if len(r.Orphans) > 0 {
		fmt.Fprintln(w, "\nfiles without a slot")
		rows := [][]string{{"file", "kind", "bytes", "age", "detail"}}
		for _, o := range r.Orphans {
			rows = append(rows, []string{clip(o.Name, 220), o.Kind, size(o.Bytes), age(r.Taken, o.Modified), orDash(o.Detail)})
		}
		table(w, rows)
	}
	problems(w, r.ProblemTexts())
}

func (r *StoreReport) sampleRow(s *dirstore.InspectedSample) []string {
	state := s.State
	for _, x := range []struct {
		is   bool
		word string
	}{{s.Dead, "dead letter"}, {s.Adopted, "adopted"}, {s.Left, "left since"}} {
		if x.is {
			state += ", " + x.word
		}
	}
	tokens := "-"
	if s.RunID != "" {
		tokens = fmt.Sprint(s.NumTokens)
	}
	row := []string{orDash(s.SampleID), state, size(s.Bytes), orDash(s.Owner), fmt.Sprint(s.Pins), fmt.Sprint(s.Mappings), index(s.Session), age(r.Taken, s.Put), orDash(s.RunID), orDash(string(s.Algorithm)), tokens}
	if r.Verified != nil {
		v, ok := r.Verified[s.SampleID]
		if !ok || s.State != dirstore.StatePublished {
			return append(row, "-", "-")
		}
		row = append(row, v.Checksums, yesNo(v.Finite))
	}
	return row
}

func index(session int) string {
	if session < 0 {
		return "-"
	}
	return fmt.Sprint(session)
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return clip(s, 220)
}

func age(now, then time.Time) string {
	if then.IsZero() {
		return "-"
	}
	switch d := max(now.Sub(then), 0); {
	case d < time.Minute:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < 48*time.Hour:
		return d.Round(time.Second).String()
	default:
		return fmt.Sprintf("%.0f days", d.Hours()/24)
	}
}
