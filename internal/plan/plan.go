// Package plan works out how big a run will be before a forward is spent on it: bytes of a token, a sample, a window and an epoch, the caps that the run needs, and
// whether a file system has the room.
//
// Everything comes from the schema document: its axes, its dtypes, its encodings. The least caps come from [sluice.RunConfig.Resolve] itself, which is
// what a run is checked with, so that a plan and its run cannot disagree.
package plan

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-ml/sluice"
)

// NoSupervision asks for samples without supervision, where the schema allows that.
const NoSupervision = "none"

// Input is what a plan is made of. Zero means unset where a field is not needed; messages name the fields as the flags of the command.
type Input struct {
	Schema      *sluice.Schema // required
	Supervision string         // an encoding of the schema, or NoSupervision; the schema's default if empty

	Hidden     int64            // axis H
	Layers     int64            // decoder layers of the target; only bounds Aux
	Aux        int64            // axis K: aux layers
	Vocab      int64            // axis V
	DraftVocab int64            // axis Vd
	Axes       map[string]int64 // axes that only the schema's author knows

	DType       sluice.DType // of hidden states; bfloat16 if zero
	LogitsDType sluice.DType // of logits and target probabilities; DType if zero

	MeanLen int64 // tokens of a prompt, on average
	MaxLen  int64 // tokens of the longest row
	Packing bool  // rows of MaxLen tokens are filled with several prompts

	Ranks, PerRank, Prefetch int // as in sluice.Windows
	StepsPerCheckpoint       int // as in sluice.RunConfig

	Prompts    int64 // rows of an epoch; 0: nothing is said about epochs
	TokensPerS int64 // of the target, all nodes together; 0: nothing is said about rates
	Nodes      int64 // nodes that the target runs on; 1 if zero
	Link       int64 // bytes a second that a node's link carries; 0: unknown

	Disk *Disk // where the store would lie; nil: nothing is said about it
}

// Feature is a feature's part in a sample.
type Feature struct {
	Name  string       `json:"name"`
	Axes  []string     `json:"axes"`
	DType sluice.DType `json:"dtype"`
	// BytesPerToken is 0 for a feature that does not grow with the number of tokens, or faster than it.
	BytesPerToken int64 `json:"bytes_per_token"`
	MeanBytes     int64 `json:"mean_bytes"`    // in a mean sample
	LargestBytes  int64 `json:"largest_bytes"` // in the largest sample

	perSeq int // how many factors of its axes are S
}

// Run is the part of a sluice.RunConfig that a plan knows, under the names that it has there.
type Run struct {
	Caps               sluice.Caps    `json:"caps"`
	Windows            sluice.Windows `json:"windows"`
	LargestSample      int64          `json:"largest_sample"`
	StepsPerCheckpoint int            `json:"steps_per_checkpoint"`
}

// Plan says how big a run will be. Sizes are logical bytes, as in refs, caps and health.
type Plan struct {
	Algorithm     sluice.Algorithm `json:"algorithm"`
	SchemaVersion int64            `json:"schema_version"`
	Supervision   string           `json:"supervision"` // "none" if there is none
	DType         sluice.DType     `json:"dtype"`
	LogitsDType   sluice.DType     `json:"logits_dtype"`
	Axes          map[string]int64 `json:"axes"` // the lengths that were used, B and S left out
	Packing       bool             `json:"packing"`
	builtin       bool             // the schema is

	PromptTokens  int64 `json:"prompt_tokens"`  // of a mean prompt
	MeanTokens    int64 `json:"mean_tokens"`    // of a mean row: a mean prompt, or a full row where rows are packed
	LargestTokens int64 `json:"largest_tokens"` // of the longest row

	Features      []Feature `json:"features"`
	BytesPerToken int64     `json:"bytes_per_token"` // of all features that grow with the tokens

	MeanSampleBytes    int64 `json:"mean_sample_bytes"`
	LargestSampleBytes int64 `json:"largest_sample_bytes"`
	WindowSamples      int64 `json:"window_samples"`
	MeanWindowBytes    int64 `json:"mean_window_bytes"`
	LargestWindowBytes int64 `json:"largest_window_bytes"`
	HeldSamples        int64 `json:"held_samples"` // that consumers hold at once by design
	MeanHeldBytes      int64 `json:"mean_held_bytes"`
	LargestHeldBytes   int64 `json:"largest_held_bytes"`
	EpochSamples       int64 `json:"epoch_samples"` // 0 without prompts, like the next three
	EpochWindows       int64 `json:"epoch_windows"`
	EpochTokens        int64 `json:"epoch_tokens"`
	EpochBytes         int64 `json:"epoch_bytes"`

	LeastMaxBytes   int64 `json:"least_max_bytes"`   // the least that the run is accepted with
	LeastMaxSamples int64 `json:"least_max_samples"` // likewise
	// AheadMaxBytes is the MaxBytes whose low mark is above what consumers hold on average, so that a producer runs ahead of them and not only when they starve.
	AheadMaxBytes   int64 `json:"ahead_max_bytes"`
	AheadMaxSamples int64 `json:"ahead_max_samples"` // the same for MaxSamples
	Run             Run   `json:"run"`               // what to set

	Rate    *Rate  `json:"rate,omitempty"`
	Link    *Link  `json:"link,omitempty"`
	Store   *Room  `json:"store,omitempty"`
	Verdict string `json:"verdict"`

	quadratic bool // a feature grows faster than the tokens
	logits    bool // a feature is stored as LogitsDType
}

// most is the largest number that a ref, a cap and JSON readers take.
const most = 1<<53 - 1

func invalid(flag, format string, args ...any) error {
	return &sluice.Error{Kind: sluice.Invalid, Op: "plan", Subject: flag, Detail: fmt.Sprintf(format, args...)}
}

// New makes a plan. Errors are ErrInvalid, with the flag in question or the figure that overflows as subject, or what Resolve says.
func New(in Input) (*Plan, error) {
	if err := in.check(); err != nil {
		return nil, err
	}
	p := &Plan{
		Algorithm: in.Schema.Name, SchemaVersion: in.Schema.Version, DType: in.DType, LogitsDType: in.LogitsDType, Axes: map[string]int64{}, Packing: in.Packing,
		PromptTokens: in.MeanLen, MeanTokens: in.MeanLen, LargestTokens: in.MaxLen,
	}
	if known, err := sluice.SchemaOf(in.Schema.Name); err == nil {
		p.builtin = in.Schema == known
	}
	var m meter
	meanDocs, mostDocs := int64(1), int64(1)
	p.EpochSamples, p.EpochTokens = in.Prompts, m.times("epoch_tokens", in.Prompts, in.MeanLen)
	if in.Packing {
		p.MeanTokens = in.MaxLen
		p.EpochSamples = ceil(p.EpochTokens, in.MaxLen)
		meanDocs, mostDocs = ceil(in.MaxLen, in.MeanLen), in.MaxLen // a document has at least one token
	}
	if m.err != nil {
		return nil, m.err
	}
	if err := p.measure(&in, meanDocs, mostDocs); err != nil {
		return nil, err
	}
	if err := p.findCaps(&in); err != nil {
		return nil, err
	}

	p.MeanWindowBytes = m.times("mean_window_bytes", p.WindowSamples, p.MeanSampleBytes)
	p.LargestWindowBytes = m.times("largest_window_bytes", p.WindowSamples, p.LargestSampleBytes)
	p.MeanHeldBytes = m.times("mean_held_bytes", p.HeldSamples, p.MeanSampleBytes)
	p.LargestHeldBytes = m.times("largest_held_bytes", p.HeldSamples, p.LargestSampleBytes)
	p.EpochWindows = ceil(p.EpochSamples, p.WindowSamples)
	p.EpochBytes = m.times("epoch_bytes", p.EpochSamples, p.MeanSampleBytes)
	p.AheadMaxBytes = roundUp(max(m.times("ahead_max_bytes", 4, p.MeanHeldBytes), p.LeastMaxBytes))
	p.AheadMaxSamples = max(m.times("ahead_max_samples", 4, p.HeldSamples), ceil(p.AheadMaxBytes, p.MeanSampleBytes))
	if m.err != nil {
		return nil, m.err
	}
	if p.AheadMaxBytes > most || p.AheadMaxSamples > most { // no run can have such caps
		return nil, invalid("ahead_max_bytes", "is %d, and ahead_max_samples %d, want less than 2^53", p.AheadMaxBytes, p.AheadMaxSamples)
	}
	if err := p.rate(&in); err != nil {
		return nil, err
	}
	p.judge(in.Disk)
	return p, nil
}

// check looks at every field by itself and fills in defaults.
func (in *Input) check() error {
	const most20 = 1 << 20
	if in.MeanLen == 0 {
		return invalid("--mean-len", "is 0 or not set, want the mean number of tokens of a prompt")
	}
	if in.MaxLen == 0 {
		return invalid("--max-len", "is 0 or not set, want the number of tokens of the longest prompt")
	}
	for _, f := range [...]struct {
		flag               string
		value, least, most int64
	}{
		{"--hidden", in.Hidden, 0, most}, {"--layers", in.Layers, 0, most}, {"--aux", in.Aux, 0, most}, {"--vocab", in.Vocab, 0, most}, {"--draft-vocab", in.DraftVocab, 0, most},
		{"--mean-len", in.MeanLen, 1, most}, {"--max-len", in.MaxLen, 1, most},
		{"--ranks", int64(in.Ranks), 1, most20}, {"--per-rank", int64(in.PerRank), 1, most20}, {"--prefetch", int64(in.Prefetch), 0, most20}, {"--steps-per-checkpoint", int64(in.StepsPerCheckpoint), 0, most20},
		{"--prompts", in.Prompts, 0, most}, {"--tokens-per-s", in.TokensPerS, 0, most}, {"--nodes", in.Nodes, 0, most20}, {"--link", in.Link, 0, most},
	} {
		if f.value < f.least || f.value > f.most {
			return invalid(f.flag, "is %d, want %d to %d", f.value, f.least, f.most)
		}
	}
	switch {
	case in.Schema == nil:
		return invalid("--schema", "is missing")
	case in.MeanLen > in.MaxLen:
		return invalid("--mean-len", "is %d, want at most --max-len (%d)", in.MeanLen, in.MaxLen)
	case in.Layers > 0 && in.Aux > in.Layers+1:
		return invalid("--aux", "is %d, want at most %d: a target of %d layers has that many states, the embeddings included", in.Aux, in.Layers+1, in.Layers)
	case in.Vocab > 0 && in.DraftVocab > in.Vocab:
		return invalid("--draft-vocab", "is %d, want at most --vocab (%d)", in.DraftVocab, in.Vocab)
	case in.Packing && len(in.Schema.Packing) == 0:
		return invalid("--packing", "is set, but %s version %d has no packing features", in.Schema.Name, in.Schema.Version)
	}
	for name, n := range in.Axes {
		if n < 1 || n > most {
			return invalid("--axis", "%s is %d, want 1 to %d", name, n, int64(most))
		}
		if flag, ok := axisFlags[name]; ok {
			return invalid("--axis", "names %s, want %s for it", name, flag)
		}
		if !slices.ContainsFunc(in.Schema.Features, func(f sluice.SchemaFeature) bool {
			return slices.Contains(strings.Split(strings.Join(f.Axes, "*"), "*"), name)
		}) {
			return invalid("--axis", "names %s, which is no axis of %s version %d", name, in.Schema.Name, in.Schema.Version)
		}
	}
	if in.DType == 0 {
		in.DType = sluice.BFloat16
	}
	if in.LogitsDType == 0 {
		in.LogitsDType = in.DType
	}
	in.Nodes = max(in.Nodes, 1)
	return nil
}

// axisFlags says where the length of an axis comes from that schemas share. B is one: a sample is one row.
var axisFlags = map[string]string{"B": "nothing, it is 1", "S": "--mean-len and --max-len", "H": "--hidden", "K": "--aux", "V": "--vocab", "Vd": "--draft-vocab", "docs": "--packing"}

// features lists what samples have: the required features, those of the encoding, those of packing.
func (in *Input) features() (list []*sluice.SchemaFeature, encoding string, err error) {
	s := in.Schema
	encoding = in.Supervision
	if encoding == "" {
		encoding = s.Supervision.Default
	}
	known := []string{}
	var of []string
	if s.Supervision.Rule != "exactly_one" {
		known = append(known, NoSupervision)
	}
	if encoding == "" {
		encoding = NoSupervision
	}
	found := slices.Contains(known, encoding)
	for _, e := range s.Supervision.Encodings {
		known = append(known, e.Name)
		if e.Name == encoding {
			found, of = true, e.Features
		}
	}
	if !found {
		return nil, "", invalid("--supervision", "is %q, want one of %s: those are what %s version %d has", encoding, strings.Join(known, ", "), s.Name, s.Version)
	}
	for i := range s.Features {
		if f := &s.Features[i]; f.Required || slices.Contains(of, f.Name) || in.Packing && slices.Contains(s.Packing, f.Name) {
			list = append(list, f)
		}
	}
	return list, encoding, nil
}

// dtype is what a producer stores the feature as.
func (in *Input) dtype(f *sluice.SchemaFeature) (sluice.DType, error) {
	want, flag := sluice.Int64, ""
	switch f.From {
	case sluice.RoleAux, sluice.RoleLast:
		want, flag = in.DType, "--dtype"
	case sluice.RoleLogits, sluice.RoleTargetProbs:
		want, flag = in.LogitsDType, "--logits-dtype"
	case sluice.RolePositionMask:
		want = sluice.Bool
	case "":
		// Only its own producer knows: the type of the states if that is allowed, or else the largest.
		if want = in.DType; !slices.Contains(f.DTypes, want) {
			want = slices.MaxFunc(f.DTypes, func(a, b sluice.DType) int { return int(a.Size() - b.Size()) })
		}
	}
	if !slices.Contains(f.DTypes, want) {
		if flag == "" {
			return 0, invalid("--schema", "has %s as %v, want %s in it: that is what producers make", f.Name, f.DTypes, want)
		}
		return 0, invalid(flag, "is %s, want one of %v for %s", want, f.DTypes, f.Name)
	}
	return want, nil
}

// measure works out the features, at the mean and at the largest length.
func (p *Plan) measure(in *Input, meanDocs, mostDocs int64) error {
	list, encoding, err := in.features()
	if err != nil {
		return err
	}
	p.Supervision = encoding
	var m meter
	for _, f := range list {
		d, err := in.dtype(f)
		if err != nil {
			return err
		}
		p.logits = p.logits || f.From == sluice.RoleLogits || f.From == sluice.RoleTargetProbs
		row := Feature{Name: f.Name, Axes: f.Axes, DType: d}
		bytesAt := func(tokens, docs int64) (int64, error) {
			spec := sluice.Spec{DType: d}
			row.perSeq = 0
			for _, axis := range f.Axes {
				length := int64(1)
				for factor := range strings.SplitSeq(axis, "*") {
					n, err := p.length(in, f, factor, tokens, docs)
					if err != nil {
						return 0, err
					}
					if factor == "S" {
						row.perSeq++
					}
					length = m.times(f.Name, length, n)
				}
				spec.Shape = append(spec.Shape, length)
			}
			if m.err != nil {
				return 0, m.err
			}
			if err := spec.Validate(); err != nil {
				return 0, &sluice.Error{Kind: sluice.Invalid, Op: "plan", Subject: f.Name, Detail: fmt.Sprintf("with %d tokens it is too large", tokens), Err: err}
			}
			return spec.Bytes(), nil
		}
		if row.LargestBytes, err = bytesAt(p.LargestTokens, mostDocs); err != nil {
			return err
		}
		if row.MeanBytes, err = bytesAt(p.MeanTokens, meanDocs); err != nil {
			return err
		}
		switch row.perSeq {
		case 0:
		case 1:
			row.BytesPerToken = row.MeanBytes / p.MeanTokens
		default:
			p.quadratic = true
		}
		p.BytesPerToken = m.plus("bytes_per_token", p.BytesPerToken, row.BytesPerToken)
		p.MeanSampleBytes = m.plus("mean_sample_bytes", p.MeanSampleBytes, row.MeanBytes)
		p.LargestSampleBytes = m.plus("largest_sample_bytes", p.LargestSampleBytes, row.LargestBytes)
		p.Features = append(p.Features, row)
	}
	if m.err == nil && p.MeanSampleBytes == 0 {
		return invalid("--schema", "has no bytes in a sample with the supervision %s, want at least one required feature", p.Supervision)
	}
	return m.err
}

// length is that of a factor of an axis.
func (p *Plan) length(in *Input, f *sluice.SchemaFeature, factor string, tokens, docs int64) (int64, error) {
	if factor[0] >= '0' && factor[0] <= '9' {
		n, err := strconv.ParseInt(factor, 10, 64)
		if err != nil {
			return 0, invalid("--schema", "has the axis %s, want a number below 2^63", factor)
		}
		return n, nil
	}
	var n int64
	switch factor {
	case "B":
		return 1, nil
	case "S":
		return tokens, nil
	case "docs":
		return docs, nil
	case "H":
		n = in.Hidden
	case "K":
		n = in.Aux
	case "V":
		n = in.Vocab
	case "Vd":
		n = in.DraftVocab
	default:
		n = in.Axes[factor]
	}
	if n == 0 {
		flag, ok := axisFlags[factor]
		if !ok {
			flag = "--axis " + factor + "=N"
		}
		return 0, invalid(flag, "is 0 or not set, want the length of the axis %s of %s [%s]", factor, f.Name, strings.Join(f.Axes, ","))
	}
	p.Axes[factor] = n
	return n, nil
}

// findCaps asks the run's own check for the least caps that it accepts.
func (p *Plan) findCaps(in *Input) error {
	w := sluice.Windows{Ranks: in.Ranks, PerRank: in.PerRank, Prefetch: in.Prefetch}
	p.WindowSamples = w.Size()
	resolve := func(c sluice.Caps) (sluice.RunConfig, error) {
		return sluice.RunConfig{RunID: "plan", Schema: in.Schema, Caps: c, Windows: &w, LargestSample: p.LargestSampleBytes, StepsPerCheckpoint: in.StepsPerCheckpoint}.Resolve()
	}
	least := func(caps func(int64) sluice.Caps) (int64, error) {
		if _, err := resolve(caps(most)); err != nil {
			return 0, err
		}
		refused, accepted := int64(0), int64(most)
		for accepted-refused > 1 {
			n := refused + (accepted-refused)/2
			if _, err := resolve(caps(n)); err != nil {
				refused = n
			} else {
				accepted = n
			}
		}
		return accepted, nil
	}
	var err error
	if p.LeastMaxBytes, err = least(func(n int64) sluice.Caps { return sluice.Caps{MaxBytes: n} }); err != nil {
		return err
	}
	if p.LeastMaxSamples, err = least(func(n int64) sluice.Caps { return sluice.Caps{MaxSamples: n} }); err != nil {
		return err
	}
	p.HeldSamples = p.LeastMaxSamples - 1 // what consumers hold, and one more

	caps := sluice.Caps{MaxBytes: roundUp(p.LeastMaxBytes)}
	caps.MaxSamples = max(p.LeastMaxSamples, ceil(caps.MaxBytes, p.MeanSampleBytes)) // so that neither cap makes the other useless
	cfg, err := resolve(caps)
	if err != nil {
		return err
	}
	p.Run = Run{Caps: cfg.Caps, Windows: *cfg.Windows, LargestSample: cfg.LargestSample, StepsPerCheckpoint: cfg.StepsPerCheckpoint}
	return nil
}

// roundUp makes a cap that people can read: at most a sixteenth more, in steps of a power of two from 1 MiB to 1 GiB.
func roundUp(n int64) int64 {
	step := int64(1 << 20)
	for step < 1<<30 && step*32 <= n {
		step *= 2
	}
	if n > most-step {
		return n
	}
	return ceil(n, step) * step
}

func ceil(n, by int64) int64 {
	if n%by == 0 {
		return n / by
	}
	return n/by + 1
}

// meter multiplies and adds; the first overflow stays in err, with the name of the figure.
type meter struct{ err error }

func (m *meter) times(figure string, a, b int64) int64 {
	if a != 0 && b > math.MaxInt64/a {
		m.fail(figure, fmt.Sprintf("%d times %d", a, b))
		return 0
	}
	return a * b
}

func (m *meter) plus(figure string, a, b int64) int64 {
	if a > math.MaxInt64-b {
		m.fail(figure, fmt.Sprintf("%d plus %d", a, b))
		return 0
	}
	return a + b
}

func (m *meter) fail(figure, what string) {
	if m.err == nil {
		m.err = invalid(figure, "is %s, want less than 2^63", what)
	}
}
