package sluice

import (
	"fmt"
	"time"
)

// RunConfig describes a run: one stream from producers to consumers. Its zero fields mean the defaults that Resolve fills in.
type RunConfig struct {
	RunID  string  `json:"run_id"`
	Schema *Schema `json:"schema"` // what every sample must look like; nil in a mixed run
	// Mixed lets in refs of any run id, algorithm, schema version and features: what is in them is between producers and consumers. Store, generation and claims are checked as always.
	Mixed bool `json:"mixed,omitempty"`
	Caps  Caps `json:"caps"` // of the run's store

	// VisibilityTimeout is how long a lease lives unless it is renewed; 30 s. (Upstream's VisibilityTimeout.)
	VisibilityTimeout time.Duration `json:"visibility_timeout"`

	// MaxFails is how many times a sample may be failed before it is a dead letter, the last one included; 5.
	MaxFails int `json:"max_fails"`
	// MaxExpiries is the same for leases that ran out; 20.
	MaxExpiries int `json:"max_expiries"`

	// Producers is how many producer sessions the run waits for before it ends; 1.
	Producers int `json:"producers"`
	// ProducerTimeout is how long a named producer may be silent before it counts as lost; 60 s.
	ProducerTimeout time.Duration `json:"producer_timeout"`

	// Windows, if set, deals the stream out to data-parallel ranks in equal shares.
	Windows *Windows `json:"windows,omitempty"`

	// LargestSample is the most bytes a sample of the run can have. It is needed for windows and checkpoints.
	LargestSample int64 `json:"largest_sample,omitempty"`
	// StepsPerCheckpoint says that consumers ack at checkpoints, this many steps apart, and so hold that many steps' samples; 0 if they do not.
	StepsPerCheckpoint int `json:"steps_per_checkpoint,omitempty"`
	// SamplesPerStep is how many samples all consumers together take in a step: needed where StepsPerCheckpoint is set and there are no windows.
	SamplesPerStep int `json:"samples_per_step,omitempty"`

	// TargetVersions, if not empty, is the set of target_model_version values that are let in.
	TargetVersions []string `json:"target_versions,omitempty"`
	// MinDraftVersion, if not empty, is the lowest draft_weight_version that is let in: an unsigned integer.
	MinDraftVersion string `json:"min_draft_version,omitempty"`
}

// RunChange is what may be changed of a run that goes on. What is nil, or false, stays.
type RunChange struct {
	VisibilityTimeout *time.Duration // of leases that are given from then on, and of those that are renewed if they had less

	// The marks between which producers are paced, as in [Caps]. 0 <= low < high <= cap.
	HighWatermarkBytes, LowWatermarkBytes     *int64
	HighWatermarkSamples, LowWatermarkSamples *int64

	// Reopen lets a run that was closed, and that is drained, take puts again.
	Reopen bool
}

// HasMarks reports whether any mark is to be changed.
func (c *RunChange) HasMarks() bool {
	return c.HighWatermarkBytes != nil || c.LowWatermarkBytes != nil || c.HighWatermarkSamples != nil || c.LowWatermarkSamples != nil
}

// Validate refuses what no run could be changed to.
func (c *RunChange) Validate() error {
	if c.VisibilityTimeout != nil && *c.VisibilityTimeout <= 0 {
		return &Error{Kind: Invalid, Op: "run: change", Subject: "visibility_timeout", Detail: fmt.Sprintf("is %v, want more than 0", *c.VisibilityTimeout)}
	}
	if c.VisibilityTimeout == nil && !c.HasMarks() && !c.Reopen {
		return &Error{Kind: Invalid, Op: "run: change", Detail: "changes nothing, want a field at least"}
	}
	return nil
}

// Marks returns the caps, which must be resolved, with the marks that are to be changed. ErrInvalid names the field that does not fit the others.
func (c *RunChange) Marks(caps Caps) (Caps, error) {
	for _, m := range [...]struct {
		unit            string
		high, low       *int64
		nowHigh, nowLow *int64
		limit           int64
	}{
		{"bytes", c.HighWatermarkBytes, c.LowWatermarkBytes, &caps.HighWatermarkBytes, &caps.LowWatermarkBytes, caps.MaxBytes},
		{"samples", c.HighWatermarkSamples, c.LowWatermarkSamples, &caps.HighWatermarkSamples, &caps.LowWatermarkSamples, caps.MaxSamples},
	} {
		if m.high == nil && m.low == nil {
			continue
		}
		fail := func(field string, v int64, want string, args ...any) (Caps, error) {
			return caps, &Error{Kind: Invalid, Op: "run: change", Subject: field + "_" + m.unit, Detail: fmt.Sprintf("is %d, want "+want, append([]any{v}, args...)...)}
		}
		had := *m.nowHigh > 0
		if m.high != nil {
			*m.nowHigh = *m.high
		}
		switch {
		case m.low != nil:
			*m.nowLow = *m.low
		case !had: // as where a run is created without its cap
			*m.nowLow = *m.nowHigh / 3
		}
		limit, most := int64(maxInteger-1), "and less than 2^53"
		if m.limit > 0 {
			limit, most = m.limit, fmt.Sprintf("up to max_%s (%d)", m.unit, m.limit)
		}
		high, low := *m.nowHigh, *m.nowLow
		switch {
		case m.high != nil && (high < 1 || high > limit):
			return fail("high_watermark", high, "1 or more, %s", most)
		case high == 0:
			return fail("low_watermark", low, "a high_watermark_%s beside it: the run has none", m.unit)
		case m.low != nil && (low < 0 || low >= high):
			return fail("low_watermark", low, "0 or more, and less than high_watermark_%s (%d)", m.unit, high)
		case low >= high:
			return fail("high_watermark", high, "more than low_watermark_%s (%d)", m.unit, low)
		}
	}
	return caps, nil
}

// Windows describes data-parallel consumption: ranks that step together must get equal numbers of samples, or their
// collectives hang. A window is what all ranks together consume in one optimizer step.
type Windows struct {
	Ranks    int  `json:"ranks"`               // data-parallel ranks
	PerRank  int  `json:"per_rank"`            // samples a rank and step
	Prefetch int  `json:"prefetch,omitempty"`  // windows opened ahead of the one that is being consumed
	DropTail bool `json:"drop_tail,omitempty"` // drop an incomplete last window instead of padding it
}

// Size is the number of samples in a window.
func (w *Windows) Size() int64 { return int64(w.Ranks) * int64(w.PerRank) }

// Validate checks the numbers.
func (w *Windows) Validate() error {
	const most = 1 << 20
	for _, n := range [...]struct {
		field      string
		value, min int
	}{{"ranks", w.Ranks, 1}, {"per_rank", w.PerRank, 1}, {"prefetch", w.Prefetch, 0}} {
		if n.value < n.min || n.value > most {
			return &Error{Kind: Invalid, Op: "windows", Subject: n.field, Detail: fmt.Sprintf("is %d, want %d to %d", n.value, n.min, most)}
		}
	}
	return nil
}

// Resolve checks the run and fills in the defaults. Contradictions between windows, checkpoints and caps are refused here, with the number that
// would do, because later they would be a deadlock.
func (c RunConfig) Resolve() (RunConfig, error) {
	fail := func(field, detail string) (RunConfig, error) {
		return c, &Error{Kind: Invalid, Op: "run", Subject: c.RunID, Detail: field + " " + detail}
	}
	if err := ValidateID(c.RunID); err != nil {
		return c, &Error{Kind: Invalid, Op: "run", Detail: "run_id", Err: err}
	}
	switch {
	case c.Schema == nil && !c.Mixed:
		return fail("schema", "is missing")
	case c.Schema != nil && c.Mixed:
		return fail("schema", "is given, but the run is mixed and checks none")
	}
	var err error
	if c.Caps, err = c.Caps.Resolve(); err != nil {
		return c, &Error{Kind: Invalid, Op: "run", Subject: c.RunID, Err: err}
	}
	for _, d := range [...]struct {
		field string
		value *time.Duration
		unset time.Duration
	}{{"visibility_timeout", &c.VisibilityTimeout, 30 * time.Second}, {"producer_timeout", &c.ProducerTimeout, 60 * time.Second}} {
		if *d.value < 0 {
			return fail(d.field, fmt.Sprintf("is %v, want more than 0", *d.value))
		}
		if *d.value == 0 {
			*d.value = d.unset
		}
	}
	for _, n := range [...]struct {
		field string
		value *int
		unset int
	}{{"max_fails", &c.MaxFails, 5}, {"max_expiries", &c.MaxExpiries, 20}, {"producers", &c.Producers, 1}, {"steps_per_checkpoint", &c.StepsPerCheckpoint, 0}, {"samples_per_step", &c.SamplesPerStep, 0}} {
		if *n.value < 0 || *n.value > 1<<20 {
			return fail(n.field, fmt.Sprintf("is %d, want 0 (the default) to %d", *n.value, 1<<20))
		}
		if *n.value == 0 {
			*n.value = n.unset
		}
	}
	if c.LargestSample < 0 || c.LargestSample >= maxInteger {
		return fail("largest_sample", fmt.Sprintf("is %d, want 0 or more, and less than 2^53", c.LargestSample))
	}
	if c.MinDraftVersion != "" {
		if _, ok := ParseVersion(c.MinDraftVersion); !ok {
			return fail("min_draft_version", fmt.Sprintf("is %q, want an unsigned integer", printable(c.MinDraftVersion, 40)))
		}
	}
	if c.Windows != nil {
		w := *c.Windows
		c.Windows = &w
		if err := w.Validate(); err != nil {
			return c, &Error{Kind: Invalid, Op: "run", Subject: c.RunID, Err: err}
		}
	}
	if c.Windows == nil && c.StepsPerCheckpoint > 0 && c.SamplesPerStep == 0 {
		return fail("samples_per_step", "is missing; with steps_per_checkpoint and without windows it is needed to check the caps")
	}
	need, why := c.heldSamples()
	if need == 0 {
		if limit := c.Caps.MaxBytes; limit > 0 && c.LargestSample > limit {
			return fail("max_bytes", fmt.Sprintf("is %d, but the largest sample has %d bytes; set it to %d or more", limit, c.LargestSample, c.LargestSample))
		}
		return c, nil
	}
	if limit := c.Caps.MaxSamples; limit > 0 && need+1 > limit {
		return fail("max_samples", fmt.Sprintf("is %d, but %s and one more hold %d samples; set it to %d or more", limit, why, need+1, need+1))
	}
	if limit := c.Caps.MaxBytes; limit > 0 {
		if c.LargestSample == 0 {
			return fail("largest_sample", "is missing; with windows or checkpoints it is needed to check max_bytes")
		}
		if need+1 > (maxInteger-1)/c.LargestSample {
			return fail("largest_sample", fmt.Sprintf("is %d, and %s and one more hold %d of them: more than 2^53 bytes", c.LargestSample, why, need+1))
		}
		if bytes := (need + 1) * c.LargestSample; bytes > limit {
			return fail("max_bytes", fmt.Sprintf("is %d, but %s and one more sample of %d bytes need %d; set it to %d or more", limit, why, c.LargestSample, bytes, bytes))
		}
	}
	return c, nil
}

// heldSamples is how many samples the consumers may hold at once by design: windows in work and prefetched, or unacked steps.
func (c *RunConfig) heldSamples() (int64, string) {
	steps := int64(max(c.StepsPerCheckpoint, 1))
	switch {
	case c.Windows != nil:
		n := steps + int64(c.Windows.Prefetch)
		return n * c.Windows.Size(), fmt.Sprintf("%d windows of %d samples", n, c.Windows.Size())
	case c.StepsPerCheckpoint > 0 && c.SamplesPerStep > 0:
		return steps * int64(c.SamplesPerStep), fmt.Sprintf("%d steps of %d samples", steps, c.SamplesPerStep)
	}
	return 0, ""
}

// ParseVersion reads a draft version for comparison: plain decimal digits of an unsigned 64-bit integer.
func ParseVersion(s string) (uint64, bool) {
	var n uint64
	for i := range len(s) {
		d := uint64(s[i] - '0')
		if d > 9 || n > (1<<64-1-d)/10 {
			return 0, false
		}
		n = n*10 + d
	}
	return n, s != ""
}
