package plan

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/sluice-ml/sluice"
)

// String is the plan for people. Sizes are in KiB, MiB, GiB and TiB, powers of 1024; rates in GB/s, powers of 1000, as links are sold.
func (p *Plan) String() string {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }

	var axes []string
	for name, n := range p.Axes {
		axes = append(axes, fmt.Sprintf("%s %d", name, n))
	}
	slices.Sort(axes)
	line("%s version %d, supervision %s: %s", p.Algorithm, p.SchemaVersion, p.Supervision, strings.Join(axes, ", "))
	if p.Packing {
		line("prompts of %s tokens on average, packed into rows of %s", count(p.PromptTokens), count(p.LargestTokens))
	} else {
		line("rows of %s tokens on average, %s at most", count(p.MeanTokens), count(p.LargestTokens))
	}

	line("")
	rows := [][]string{{"FEATURE", "AXES", "DTYPE", "BYTES A TOKEN", "MEAN SAMPLE", "LARGEST SAMPLE"}}
	for _, f := range p.Features {
		token := count(f.BytesPerToken)
		if f.perSeq != 1 {
			token = "-"
		}
		rows = append(rows, []string{f.Name, "[" + strings.Join(f.Axes, ",") + "]", f.DType.String(), token, size(f.MeanBytes), size(f.LargestBytes)})
	}
	rows = append(rows, []string{"all", "", "", count(p.BytesPerToken), size(p.MeanSampleBytes), size(p.LargestSampleBytes)})
	b.WriteString(table(3, rows))

	line("")
	w := p.Run.Windows
	rows = [][]string{
		{"", "SAMPLES", "OF MEAN SIZE", "OF THE LARGEST"},
		{fmt.Sprintf("window (%s, %d each)", plural(int64(w.Ranks), "rank"), w.PerRank), count(p.WindowSamples), size(p.MeanWindowBytes), size(p.LargestWindowBytes)},
		{"held by the trainers", count(p.HeldSamples), size(p.MeanHeldBytes), size(p.LargestHeldBytes)},
	}
	if p.EpochSamples > 0 {
		rows = append(rows, []string{"epoch (" + plural(p.EpochWindows, "window") + ")", count(p.EpochSamples), size(p.EpochBytes), ""})
	}
	b.WriteString(table(1, rows))
	kept := "the one in work"
	if n := p.Run.StepsPerCheckpoint; n > 0 {
		kept = fmt.Sprintf("%d until their checkpoint", n)
	}
	line("held: %s, %s and %d fetched ahead", plural(p.HeldSamples/p.WindowSamples, "window"), kept, w.Prefetch)
	if p.EpochSamples > 0 {
		line("an epoch has %s tokens; all of it on a disk would be %s GB", count(p.EpochTokens), decimal(float64(p.EpochBytes)/1e9))
	}

	line("")
	c := p.Run.Caps
	b.WriteString(table(1, [][]string{
		{"CAPS TO SET", "VALUE", "", "WHY"},
		{"Caps.MaxBytes", strconv.FormatInt(c.MaxBytes, 10), size(c.MaxBytes), fmt.Sprintf("least %d: what is held and one more, all of the largest", p.LeastMaxBytes)},
		{"Caps.MaxSamples", strconv.FormatInt(c.MaxSamples, 10), "", fmt.Sprintf("least %d; may stay unset; so many of mean size fill MaxBytes", p.LeastMaxSamples)},
		{"Caps.HighWatermarkBytes", strconv.FormatInt(c.HighWatermarkBytes, 10), size(c.HighWatermarkBytes), "the default: producers pause here"},
		{"Caps.LowWatermarkBytes", strconv.FormatInt(c.LowWatermarkBytes, 10), size(c.LowWatermarkBytes), "the default: and go on here"},
		{"Caps.HighWatermarkSamples", strconv.FormatInt(c.HighWatermarkSamples, 10), "", "the default"},
		{"Caps.LowWatermarkSamples", strconv.FormatInt(c.LowWatermarkSamples, 10), "", "the default"},
		{"LargestSample", strconv.FormatInt(p.Run.LargestSample, 10), size(p.Run.LargestSample), ""},
		{"StepsPerCheckpoint", strconv.Itoa(p.Run.StepsPerCheckpoint), "", ""},
	}, 3))
	line("Windows: Ranks %d, PerRank %d, Prefetch %d (all of these are fields of sluice.RunConfig)", w.Ranks, w.PerRank, w.Prefetch)
	line("at a service: %s", p.command())
	line("stream.ProducerConfig: %s", strings.Join(p.producerFields(), ", "))
	if c.LowWatermarkBytes < p.MeanHeldBytes || c.LowWatermarkSamples < p.HeldSamples {
		line("With these caps trainers hold more than a low mark, so that a paused producer goes on only when they starve.")
		line("It runs ahead of them from MaxBytes %d (%s) and MaxSamples %d on.", p.AheadMaxBytes, size(p.AheadMaxBytes), p.AheadMaxSamples)
	}

	if r := p.Rate; r != nil {
		line("")
		rows := [][]string{
			{"RATES", "", ""},
			{"target", count(r.TokensPerS) + " tokens/s", fmt.Sprintf("%s samples/s, %s windows/s", decimal(r.SamplesPerS), decimal(r.WindowsPerS))},
			{"into the store", decimal(r.GBPerSIn) + " GB/s", p.linkShare(false)},
			{"out of the store", decimal(r.GBPerSOut) + " GB/s", p.linkShare(false)},
			{"out of each target node", decimal(r.GBPerSNode) + " GB/s", strings.TrimPrefix(fmt.Sprintf("%s; %s", p.linkShare(true), plural(r.Nodes, "node")), "; ")},
			{"cores to put", decimal(r.PutCores), fmt.Sprintf("at %.1f GiB/s: a fresh file on tmpfs", putFloor)},
			{"cores to read", decimal(r.ReadCores), fmt.Sprintf("at %.1f GiB/s: every byte of a mapping, by the trainers", readFloor)},
			{"cores to send, to take in", decimal(r.SendCores) + " + " + decimal(r.TakeCores), fmt.Sprintf("at %.1f GiB/s: only if samples cross a network; putting is in it", wireFloor)},
			{"if the trainers stall", decimal(r.SecondsToHigh) + " s", fmt.Sprintf("until an empty store is at its high mark; %s s until it is full", decimal(r.SecondsToFull))},
		}
		if r.EpochSeconds > 0 {
			rows = append(rows, []string{"an epoch", decimal(r.EpochSeconds) + " s", decimal(r.EpochSeconds/3600) + " h"})
		}
		b.WriteString(table(1, rows, 2))
	}
	if l := p.Link; l != nil {
		line("A link of %s GB/s takes in at most %s tokens/s.", decimal(float64(l.BytesPerS)/1e9), count(l.MaxTokensPerS))
	}

	line("")
	line("Assumed: a sample is one row without padding; a file takes up to %s beside its tensors; a sample goes to one rank.", size(fileOverhead))
	if p.Rate != nil {
		line("The speeds of copies were measured for one core of a 2-core development machine, and yours will differ by a third or more;")
		line("all samples pass one store, whose host has one link.")
	}
	if p.Packing {
		line("Packed rows are counted as full, which real prompts nearly reach; the largest has documents of one token.")
	}
	if p.quadratic {
		line("A feature grows faster than the tokens, so that the mean sample is larger than a sample of mean length, which is what is shown.")
	}
	if s := p.Store; s != nil {
		line("")
		line("%s: %s, %s in all, %s free", s.Path, s.Type, size(s.TotalBytes), size(s.FreeBytes))
	} else {
		line("")
	}
	line("%s", p.Verdict)
	return b.String()
}

// command creates the run at a service. What it leaves out is the service's default.
func (p *Plan) command() string {
	r, w := &p.Run, p.Run.Windows
	schema := "--schema FILE"
	if p.builtin {
		schema = "--algorithm " + string(p.Algorithm)
	}
	text := fmt.Sprintf("sluice runs create RUN %s --max-bytes %d --max-samples %d --largest-sample %d --ranks %d --per-rank %d --prefetch %d",
		schema, r.Caps.MaxBytes, r.Caps.MaxSamples, r.LargestSample, w.Ranks, w.PerRank, w.Prefetch)
	if r.StepsPerCheckpoint > 0 {
		text += fmt.Sprintf(" --steps-per-checkpoint %d", r.StepsPerCheckpoint)
	}
	return text
}

// producerFields lists what a producer must be told, so that its samples are what was planned.
func (p *Plan) producerFields() []string {
	var f []string
	if p.Supervision != NoSupervision {
		f = append(f, fmt.Sprintf("Encoding %q", p.Supervision))
	}
	if k, ok := p.Axes["K"]; ok {
		f = append(f, fmt.Sprintf("AuxLayers of %d layers", k))
	}
	if vd, ok := p.Axes["Vd"]; ok {
		f = append(f, fmt.Sprintf("DraftVocab of %d ids", vd))
	}
	if p.logits {
		f = append(f, "LogitsDType "+p.LogitsDType.String())
		if p.LogitsDType != sluice.Float32 {
			f[len(f)-1] += " (the default is float32)"
		}
	}
	if len(f) == 0 {
		return []string{"nothing special"}
	}
	return f
}

func (p *Plan) linkShare(node bool) string {
	switch {
	case p.Link == nil:
		return ""
	case node:
		return percent(p.Link.PercentNode) + " of its link"
	}
	return percent(p.Link.PercentIn) + " of a link"
}

func plural(n int64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return count(n) + " " + noun + "s"
}

func percent(f float64) string { return strconv.FormatFloat(f, 'f', 1, 64) + " %" }

// table lines columns up: those from right on at their right side, except the ones in left.
func table(right int, rows [][]string, left ...int) string {
	var widths []int
	for _, r := range rows {
		for i, c := range r {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(c))
		}
	}
	var b strings.Builder
	for _, r := range rows {
		var l strings.Builder
		for i, c := range r {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(c))
			if i > 0 {
				l.WriteString("  ")
			}
			if i >= right && !slices.Contains(left, i) {
				l.WriteString(pad + c)
			} else {
				l.WriteString(c + pad)
			}
		}
		b.WriteString(strings.TrimRight(l.String(), " ") + "\n")
	}
	return b.String()
}

// size shows bytes in a unit of 1024.
func size(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}
	v, i := float64(n), 0
	for v >= 1024 && i < len(units)-1 {
		v /= 1024
		i++
	}
	if i == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.2f %s", v, units[i])
}

// count shows a whole number with commas.
func count(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// decimal shows a number that is not negative with three digits that count, or all of them before the point.
func decimal(f float64) string {
	switch {
	case f >= 1000:
		return count(int64(math.Round(min(f, most))))
	case f >= 100:
		return strconv.FormatFloat(f, 'f', 0, 64)
	case f >= 10:
		return strconv.FormatFloat(f, 'f', 1, 64)
	case f >= 1:
		return strconv.FormatFloat(f, 'f', 2, 64)
	}
	return strconv.FormatFloat(f, 'g', 3, 64)
}
