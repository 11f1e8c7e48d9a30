package sluice

import (
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestErrorReadsAsASentence(t *testing.T) {
	t.Parallel()
	err := fmt.Errorf("outer: %w", &Error{Kind: Full, Op: "dirstore: put", Subject: "s-17", Detail: "5 GiB does not fit", Hint: "raise max_bytes", Err: io.ErrShortWrite})
	if got, want := err.Error(), `outer: dirstore: put "s-17": 5 GiB does not fit: short write; raise max_bytes`; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if !errors.Is(err, ErrFull) || errors.Is(err, ErrNoSpace) || !errors.Is(err, io.ErrShortWrite) || KindOf(err) != Full || KindOf(io.EOF) != "" {
		t.Error("kinds are confused")
	}
	if got := (&Error{Kind: NotFound, Op: "get", Subject: "a\x1b[2J\u202eb\xff"}).Error(); got != `get "a?[2J?b?": not_found` {
		t.Errorf("control characters reach the terminal: %q", got)
	}
	if errors.Is(&Error{Kind: Full, Op: "x"}, &Error{Kind: Full, Op: "y"}) {
		t.Error("an error matches another one that is no sentinel")
	}
}

func TestDTypeNamesAndSizes(t *testing.T) {
	t.Parallel()
	want := map[string]int64{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int64": 8, "int32": 4,
		"int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1}
	if len(DTypes()) != len(want) {
		t.Fatalf("%d dtypes, want %d", len(DTypes()), len(want))
	}
	for name, size := range want {
		d, err := ParseDType(name)
		if err != nil || d.Size() != size || d.String() != name {
			t.Errorf("%s: %v of %d bytes, %v", name, d, d.Size(), err)
		}
		text, err := d.MarshalText()
		var back DType
		if err != nil || back.UnmarshalText(text) != nil || back != d {
			t.Errorf("%s does not survive its text form", name)
		}
		if isFloat := strings.Contains(name, "float"); d.Float() != isFloat {
			t.Errorf("%s: Float is %v", name, d.Float())
		}
	}
	for _, bad := range []string{"", "Float32", "torch.float32", "F32", "dtype(3)"} {
		if d, err := ParseDType(bad); !errors.Is(err, ErrInvalid) || d != 0 {
			t.Errorf("%q is taken for %v", bad, d)
		}
	}
	if _, err := DType(0).MarshalText(); err == nil {
		t.Error("the zero DType marshals")
	}
	if _, err := DType(99).MarshalText(); err == nil || DType(99).Size() != 0 {
		t.Error("an undeclared DType is valid")
	}
}

func TestSpecChecksItsProduct(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		spec  Spec
		bytes int64
		bad   string
	}{
		{Spec{[]int64{1, 2048, 12288}, BFloat16}, 50331648, ""},
		{Spec{nil, Int64}, 8, ""},
		{Spec{[]int64{3, 0, 5}, Float32}, 0, ""},
		{Spec{[]int64{-1}, Float32}, 0, "shape[0] is -1"},
		{Spec{[]int64{1 << 53}, Bool}, 0, "less than 2^53"},
		{Spec{[]int64{1 << 31, 1 << 31}, Float32}, 0, "overflows"},
		{Spec{[]int64{1 << 26, 1 << 26}, Float64}, 0, "want less than 2^53"},
		{Spec{make([]int64, 17), Bool}, 0, "has 17 axes"},
		{Spec{[]int64{1}, 0}, 0, "the dtype is missing"},
	} {
		err := tc.spec.Validate()
		if got := tc.spec.Bytes(); got != tc.bytes || (err == nil) != (tc.bad == "") || err != nil && !strings.Contains(err.Error(), tc.bad) {
			t.Errorf("%v: %d bytes, %v; want %d, %q", tc.spec, got, err, tc.bytes, tc.bad)
		}
	}
	if s := (Spec{[]int64{1, 2, 3}, Float16}); s.String() != "float16[1,2,3]" || s.Elements() != 6 || (Spec{}).Elements() != 0 {
		t.Errorf("%s has %d elements", s, s.Elements())
	}
}

func TestViewSharesMemoryAndChecksWidthAndAlignment(t *testing.T) {
	t.Parallel()
	x := TensorOf(Float32, []float32{1, 2, 3, float32(math.Inf(1))}, 2, 2)
	View[float32](x)[3] = 4
	if got := View[float32](x); got[3] != 4 || len(got) != 4 {
		t.Errorf("the view does not share memory: %v", got)
	}
	if View[int64](NewTensor(Int64, 0, 3)) != nil {
		t.Error("an empty tensor has elements")
	}
	mustPanic := func(what string, f func()) {
		t.Helper()
		defer func() {
			if recover() == nil {
				t.Errorf("%s does not panic", what)
			}
		}()
		f()
	}
	mustPanic("a view of another width", func() { View[float64](x) })
	mustPanic("an unaligned view", func() {
		u := Tensor{Spec{[]int64{1}, Float32}, x.Data[1:5]}
		View[float32](u)
	})
	mustPanic("a wrong count", func() { TensorOf(Int64, []int64{1}, 2) })
	mustPanic("a bad spec", func() { NewTensor(Int64, -1) })
	if err := (Tensor{x.Spec, x.Data[1:]}).Validate(); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "needs 16 bytes, has 15") {
		t.Errorf("a short tensor is valid: %v", err)
	}
}

func TestCapsFillInMarksAndRefuseContradictions(t *testing.T) {
	t.Parallel()
	got, err := Caps{MaxBytes: 1000, MaxSamples: 10}.Resolve()
	if want := (Caps{1000, 10, 750, 250, 8, 2}); err != nil || got != want {
		t.Errorf("got %+v, %v; want %+v", got, err, want)
	}
	for _, tc := range []struct{ caps, want Caps }{ // marks without their cap
		{Caps{MaxSamples: 10, HighWatermarkBytes: 300}, Caps{0, 10, 300, 100, 8, 2}}, {Caps{MaxSamples: 10, HighWatermarkBytes: 1}, Caps{0, 10, 1, 0, 8, 2}},
		{Caps{MaxBytes: 1000, HighWatermarkSamples: 5, LowWatermarkSamples: 4}, Caps{1000, 0, 750, 250, 5, 4}},
	} {
		if got, err := tc.caps.Resolve(); err != nil || got != tc.want {
			t.Errorf("%+v: got %+v, %v; want %+v", tc.caps, got, err, tc.want)
		}
		if again, err := tc.want.Resolve(); err != nil || again != tc.want {
			t.Errorf("%+v, resolved again: %+v, %v", tc.want, again, err)
		}
	}
	for _, n := range []int64{1, 2, 3, 4} {
		c, err := Caps{MaxSamples: n}.Resolve()
		if err != nil || c.HighWatermarkSamples < 1 || c.HighWatermarkSamples > n || c.LowWatermarkSamples >= c.HighWatermarkSamples {
			t.Errorf("%d samples: %+v, %v", n, c, err)
		}
	}
	for _, tc := range []struct {
		caps Caps
		want string
	}{
		{Caps{}, "neither max_bytes nor max_samples is set"},
		{Caps{MaxBytes: -1}, `"max_bytes": is -1, want 0 (unset) or more`},
		{Caps{MaxBytes: 10, HighWatermarkBytes: 11}, `"high_watermark_bytes": is 11, want 1 to max_bytes (10)`},
		{Caps{MaxBytes: 10, HighWatermarkBytes: 5, LowWatermarkBytes: 5}, `"low_watermark_bytes": is 5, want 0 or more and less than high_watermark_bytes (5)`},
		{Caps{MaxBytes: 10, HighWatermarkBytes: 5, LowWatermarkBytes: -1}, `"low_watermark_bytes": is -1`},
		{Caps{MaxBytes: 10, HighWatermarkSamples: -5}, `"high_watermark_samples": is -5, want 1 or more`},
		{Caps{MaxBytes: 10, HighWatermarkSamples: 1 << 53}, `"high_watermark_samples": is 9007199254740992, want 1 or more, and less than 2^53`},
		{Caps{MaxBytes: 10, HighWatermarkSamples: 5, LowWatermarkSamples: 5}, `"low_watermark_samples": is 5, want 0 or more and less than high_watermark_samples (5)`},
		{Caps{MaxBytes: 10, LowWatermarkSamples: 5}, `"low_watermark_samples": is 5, want 0, since neither high_watermark_samples nor max_samples is set`},
		{Caps{MaxSamples: 10, LowWatermarkSamples: 9}, `"low_watermark_samples": is 9, want 0 or more and less than high_watermark_samples (8)`},
	} {
		if _, err := tc.caps.Resolve(); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%+v: got %v, want ...%s...", tc.caps, err, tc.want)
		}
	}
}

func TestHealthComparesUseWithBothMarks(t *testing.T) {
	t.Parallel()
	caps, err := Caps{MaxBytes: 1000, MaxSamples: 10}.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		bytes, samples  int64
		high, low, fits bool
	}{
		{0, 0, false, true, true}, {250, 2, false, true, true}, {251, 2, false, false, true}, {250, 3, false, false, true},
		{749, 7, false, false, true}, {750, 1, true, false, true}, {0, 8, true, false, true}, {901, 1, true, false, false}, {0, 10, true, false, false},
	} {
		// Reservations count like resident samples.
		h := Health{ResidentBytes: tc.bytes / 2, ReservedBytes: tc.bytes - tc.bytes/2, ResidentSamples: tc.samples / 2, ReservedSamples: tc.samples - tc.samples/2, Caps: caps}
		if h.HighWatermarkHit() != tc.high || h.LowWatermarkHit() != tc.low || h.Fits(100) != tc.fits {
			t.Errorf("%d bytes, %d samples: high %v, low %v, fits %v; want %v, %v, %v", tc.bytes, tc.samples, h.HighWatermarkHit(), h.LowWatermarkHit(), h.Fits(100), tc.high, tc.low, tc.fits)
		}
	}
}

func TestMarksPauseWithoutTheirCap(t *testing.T) {
	t.Parallel()
	caps, err := Caps{MaxSamples: 10, HighWatermarkBytes: 300, LowWatermarkBytes: 100}.Resolve()
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		bytes     int64
		high, low bool
	}{{100, false, true}, {101, false, false}, {299, false, false}, {300, true, false}, {1 << 50, true, false}} {
		h := Health{ResidentBytes: tc.bytes, ResidentSamples: 1, Caps: caps}
		if h.HighWatermarkHit() != tc.high || h.LowWatermarkHit() != tc.low || !h.Fits(1<<50) {
			t.Errorf("%d bytes: high %v, low %v, fits %v; want %v, %v, true", tc.bytes, h.HighWatermarkHit(), h.LowWatermarkHit(), h.Fits(1<<50), tc.high, tc.low)
		}
	}
}

func TestSampleRefFieldsCheckTheTensors(t *testing.T) {
	t.Parallel()
	s := Sample{SampleID: "s", RunID: "r", Algorithm: "a", SchemaVersion: 1, Features: []Feature{{"x", NewTensor(Float32, 2, 3)}, {"y", NewTensor(Bool, 5)}}}
	f, err := s.RefFields("mem:1", "g")
	if err != nil {
		t.Fatal(err)
	}
	r, err := NewRef(f)
	if err != nil || r.EstimatedBytes() != 29 || r.EstimatedBytes() != s.Bytes() || r.TargetModelVersion() != "0" {
		t.Errorf("%v, %v", r, err)
	}
	if x, _ := r.Feature("x"); x.Key != "s/x" {
		t.Errorf("key %q", x.Key)
	}
	s.Features[1].Data = s.Features[1].Data[:4]
	if _, err := s.RefFields("mem:1", "g"); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "features[1] (y): tensor: bool[5] needs 5 bytes, has 4") {
		t.Errorf("a short tensor passes: %v", err)
	}
}

func TestRunRefusesCapsThatCannotHoldItsWindows(t *testing.T) {
	t.Parallel()
	schema, err := SchemaOf(EAGLE3)
	if err != nil {
		t.Fatal(err)
	}
	base := func() RunConfig {
		return RunConfig{RunID: "r", Schema: schema, Caps: Caps{MaxBytes: 1300}, Windows: &Windows{Ranks: 2, PerRank: 3, Prefetch: 1}, LargestSample: 100}
	}
	if c, err := base().Resolve(); err != nil || c.MaxFails != 5 || c.MaxExpiries != 20 || c.Producers != 1 || c.VisibilityTimeout.Seconds() != 30 || c.ProducerTimeout.Seconds() != 60 {
		t.Fatalf("%+v, %v", c, err)
	}
	for _, tc := range []struct {
		edit func(*RunConfig)
		want string
	}{
		{func(c *RunConfig) { c.Caps.MaxBytes = 1299 }, "max_bytes is 1299, but 2 windows of 6 samples and one more sample of 100 bytes need 1300; set it to 1300 or more"},
		{func(c *RunConfig) { c.Caps.MaxSamples = 12 }, "max_samples is 12, but 2 windows of 6 samples and one more hold 13 samples; set it to 13 or more"},
		{func(c *RunConfig) { c.LargestSample = 0 }, "largest_sample is missing"},
		{func(c *RunConfig) { c.StepsPerCheckpoint = 3 }, "4 windows of 6 samples"},
		{func(c *RunConfig) { c.Windows, c.StepsPerCheckpoint, c.SamplesPerStep = nil, 4, 5 }, "4 steps of 5 samples and one more sample of 100 bytes need 2100"},
		{func(c *RunConfig) { c.Windows, c.LargestSample = nil, 1301 }, "max_bytes is 1300, but the largest sample has 1301 bytes; set it to 1301 or more"},
		{func(c *RunConfig) { c.Windows, c.StepsPerCheckpoint = nil, 4 }, "samples_per_step is missing"},
		{func(c *RunConfig) { c.Windows.Ranks = 0 }, `"ranks": is 0, want 1 to`},
		{func(c *RunConfig) { c.RunID = "../x" }, "run_id"},
		{func(c *RunConfig) { c.Schema = nil }, "schema is missing"},
		{func(c *RunConfig) { c.VisibilityTimeout = -1 }, "visibility_timeout is -1ns"},
		{func(c *RunConfig) { c.MaxFails = -1 }, "max_fails is -1"},
		{func(c *RunConfig) { c.MinDraftVersion = "v3" }, `min_draft_version is "v3", want an unsigned integer`},
		{func(c *RunConfig) { c.Caps = Caps{} }, "neither max_bytes nor max_samples"},
		{func(c *RunConfig) { c.LargestSample = maxInteger - 1 }, "more than 2^53 bytes"},
	} {
		c := base()
		tc.edit(&c)
		if _, err := c.Resolve(); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("got %v, want ...%s...", err, tc.want)
		}
	}
}

func TestParseVersionTakesUnsignedIntegersOnly(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]uint64{"0": 0, "007": 7, "18446744073709551615": math.MaxUint64} {
		if got, ok := ParseVersion(in); !ok || got != want {
			t.Errorf("%q: %d, %v", in, got, ok)
		}
	}
	for _, in := range []string{"", "-1", "+1", "1.0", " 1", "18446744073709551616", "99999999999999999999999", "abc"} {
		if got, ok := ParseVersion(in); ok {
			t.Errorf("%q is taken for %d", in, got)
		}
	}
}

func TestLeaseIDTextForm(t *testing.T) {
	t.Parallel()
	id := NewLeaseID()
	text, err := id.MarshalText()
	var back LeaseID
	if err != nil || back.UnmarshalText(text) != nil || back != id || id == NewLeaseID() {
		t.Error("a lease id does not survive its text form")
	}
	for _, bad := range []string{"", "00", strings.Repeat("g", 32), strings.Repeat("0", 34)} {
		if err := back.UnmarshalText([]byte(bad)); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q is a lease id", bad)
		}
	}
}

func TestTakenContains(t *testing.T) {
	t.Parallel()
	taken := Taken{Ranges: [][2]int64{{0, 3}, {5, 6}, {10, 20}}}
	for i := int64(-1); i < 25; i++ {
		want := i >= 0 && i < 3 || i == 5 || i >= 10 && i < 20
		if taken.Contains(i) != want {
			t.Errorf("%d: %v", i, !want)
		}
	}
	if (&Taken{}).Contains(0) {
		t.Error("an empty set contains 0")
	}
}

func TestBottleneckNamesTheSide(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		s    Status
		want string
	}{
		{Status{}, "none"}, {Status{Elapsed: 100e9, ProducerPaused: 4e9, ConsumerWaited: 1e9}, "none: of 1m40s, producers waited 4s for room and consumers 1s for samples"},
		{Status{Elapsed: 100e9, ProducerPaused: 6e9, ConsumerWaited: 1e9}, "the trainer"}, {Status{Elapsed: 100e9, Ended: 50e9, ConsumerWaited: 4e9}, "the target"},
		{Status{ProducerPaused: 5e9, ConsumerWaited: 1e9}, "the trainer"}, {Status{ProducerPaused: 1e9, ConsumerWaited: 5e9}, "the target"},
		{Status{ProducerPaused: 2e9, ConsumerWaited: 2e9}, "balanced"}, {Status{Wedged: "all wait"}, "wedged: all wait"},
		{Status{ProducerPaused: 2e9, ConsumerWaited: 2e9, MissingRanks: []int{1}}, "a missing rank: no consumer asks for the samples of rank 1, and the others wait"},
		{Status{MissingRanks: []int{1, 3}}, "a missing rank: no consumer asks for the samples of ranks 1, 3, and the others wait"},
		{Status{MissingRanks: []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}}, "a missing rank: no consumer asks for the samples of ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more, and"},
		{Status{MissingRanks: []int{1}, Wedged: "all wait"}, "wedged: all wait"},
	} {
		if got := tc.s.Bottleneck(); !strings.HasPrefix(got, tc.want) {
			t.Errorf("got %q, want %q", got, tc.want)
		}
	}
}
