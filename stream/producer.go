package stream

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-ml/sluice"
)

// ErrNotAdmitted is in the chain of the error that Produce returns for prompts that the schema's admission rule refuses: rows too short, or without enough supervised
// tokens. No forward was spent on them.
var ErrNotAdmitted = errors.New("the prompts are not admitted")

// ProducerConfig says what a Producer makes samples of, and what for.
type ProducerConfig struct {
	Target sluice.Target  // required; the caller closes it
	Store  sluice.Store   // required
	Schema *sluice.Schema // required
	RunID  string         // required

	// Queue paces the producer: it reserves a sample's room at the queue's gate before the forward. Without one, there is no pacing and a full store is
	// met after the forward; a Pipeline gives such a producer its own queue.
	Queue sluice.Queue

	// Encoding is the supervision encoding; the schema's default (which may be none) if empty.
	Encoding string
	// Optional names further optional features that samples shall have, beside those of the encoding and of packing. Features of another encoding are refused.
	Optional []string
	// AuxLayers are the layers that RoleAux is taken from, in "hf" numbering; the target's DefaultAuxLayers if nil, which a target of less than seven layers is
	// too shallow for.
	AuxLayers []int
	// DraftVocab lists the token ids of the draft's vocabulary, in its order. Target probabilities need it.
	DraftVocab []int64
	// LogitsDType is the type in which logits and target probabilities are stored: float32 (the default), bfloat16 or float16.
	LogitsDType sluice.DType

	TargetModelVersion string            // "0" if empty
	DraftWeightVersion string            // "0" if empty
	Attributes         map[string]string // added to each sample's; those that the producer sets itself can't be overridden

	// SampleID makes the id of the nth sample, from 0. Ids must be unique in the store. By default they are "<run>-<random session>-<n>", unique across ranks, processes and restarts.
	// Several goroutines may call it at once.
	SampleID func(n int64) string
	// Session is who reserves, puts and reports. A Producer without a name is anonymous, so that nothing waits for its heartbeats; a Pipeline,
	// which sends them, gives it the name "producer-<random session>".
	Session sluice.Producer
}

// Producer turns prompts into samples: it runs the target once, checks what came out, builds the features that the schema asks for and puts them into the store.
// (Upstream's FeatureProducer.)
//
// All methods may be called at once. Forwards of one target are serialised across all Producers of the process, unless the target says that it
// is concurrent: hook-based targets mix up batches otherwise.
type Producer struct {
	cfg     ProducerConfig
	info    sluice.TargetInfo
	session string
	want    sluice.Want
	plain   []*sluice.SchemaFeature // features of a sample of unpacked rows, in the schema's order
	packed  []*sluice.SchemaFeature // of packed ones; nil where the schema has no packing
	inDraft []bool                  // by token id
	turn    *turn

	n atomic.Int64

	mu     sync.Mutex // guards cfg.Session, cfg.Queue and what follows
	stats  ProducerStats
	closed bool
	inWork int // calls of produce; the last one behind Close drops the turn
}

// ProducerStats count since the Producer was made.
type ProducerStats struct {
	Samples          int64
	Tokens           int64
	SupervisedTokens int64
	Bytes            int64
	NotAdmitted      int64 // batches refused by the admission rule
	NotAdmittedRows  int64 // of these, the rows that broke it
	Forwards         int64
	TargetFaults     int64         // forwards that failed or whose output cannot be right
	Waited           time.Duration // at the gate
	Computed         time.Duration // in the target, waiting for its turn excluded
	Discarded        int64
}

// NewProducer checks that the target can deliver what the schema and the encoding ask for. Errors: ErrInvalid (an option), ErrSchema (a dtype that the schema does not take),
// ErrUnsupported (a combination that no single forward can give).
func NewProducer(cfg ProducerConfig) (*Producer, error) {
	const op = "stream: new producer"
	bad := func(field, format string, args ...any) error {
		return &sluice.Error{Kind: sluice.Invalid, Op: op, Subject: field, Detail: fmt.Sprintf(format, args...)}
	}
	switch {
	case cfg.Target == nil:
		return nil, bad("Target", "is nil")
	case cfg.Store == nil:
		return nil, bad("Store", "is nil")
	case cfg.Schema == nil:
		return nil, bad("Schema", "is nil")
	}
	if err := sluice.ValidateID(cfg.RunID); err != nil {
		return nil, bad("RunID", "%v", err)
	}
	p := &Producer{cfg: cfg, info: cfg.Target.Info()}
	p.cfg.Attributes = maps.Clone(cfg.Attributes)
	p.cfg.AuxLayers, p.cfg.DraftVocab = slices.Clone(cfg.AuxLayers), slices.Clone(cfg.DraftVocab)
	var bits [8]byte
	rand.Read(bits[:])
	p.session = hex.EncodeToString(bits[:])
	if name := p.cfg.Session.Name; name != "" {
		if err := sluice.ValidateID(name); err != nil {
			return nil, bad("Session", "%v", err)
		}
	}
	if p.cfg.LogitsDType == 0 {
		p.cfg.LogitsDType = sluice.Float32
	}
	switch p.cfg.LogitsDType {
	case sluice.Float32, sluice.BFloat16, sluice.Float16:
	default:
		return nil, bad("LogitsDType", "is %s, want float32, bfloat16 or float16", p.cfg.LogitsDType)
	}
	if err := p.plan(op, bad); err != nil {
		return nil, err
	}
	p.turn = turnOf(cfg.Target, p.info.Concurrent)
	return p, nil
}

// plan settles which features samples have and what the target must return for them.
func (p *Producer) plan(op string, bad func(field, format string, args ...any) error) error {
	s := p.cfg.Schema
	wanted := map[string]bool{}
	for i := range s.Features {
		if s.Features[i].Required {
			wanted[s.Features[i].Name] = true
		}
	}
	if p.cfg.Encoding == "" {
		p.cfg.Encoding = s.Supervision.Default
	}
	if p.cfg.Encoding != "" {
		i := slices.IndexFunc(s.Supervision.Encodings, func(e sluice.Encoding) bool { return e.Name == p.cfg.Encoding })
		if i < 0 {
			var names []string
			for _, e := range s.Supervision.Encodings {
				names = append(names, e.Name)
			}
			return bad("Encoding", "%q is none of the schema %s, which has %v", p.cfg.Encoding, s.Name, names)
		}
		for _, name := range s.Supervision.Encodings[i].Features {
			wanted[name] = true
		}
	}
	for _, name := range p.cfg.Optional {
		if s.Feature(name) == nil {
			return bad("Optional", "%q is no feature of the schema %s", name, s.Name)
		}
		if wanted[name] {
			continue
		}
		// It would make the sample one of two encodings, or of half of one.
		for _, e := range s.Supervision.Encodings {
			if slices.Contains(e.Features, name) {
				return bad("Optional", "%q belongs to the encoding %q of the schema %s; to have it, set Encoding", name, e.Name, s.Name)
			}
		}
		wanted[name] = true
	}
	for i := range s.Features {
		f := &s.Features[i]
		packing := slices.Contains(s.Packing, f.Name)
		if !packing && !wanted[f.Name] {
			continue
		}
		if f.From == "" {
			return &sluice.Error{Kind: sluice.Unsupported, Op: op, Subject: f.Name, Detail: "has no from in the schema " + string(s.Name) + ": only its owner's producer knows how to make it"}
		}
		if d := p.dtype(f.From); !slices.Contains(f.DTypes, d) {
			return &sluice.Error{Kind: sluice.SchemaError, Op: op, Subject: f.Name, Detail: fmt.Sprintf("would be %s, and the schema %s takes %v", d, s.Name, f.DTypes)}
		}
		if len(s.Packing) > 0 {
			p.packed = append(p.packed, f)
		}
		if packing {
			continue
		}
		switch f.From {
		case sluice.RolePositionIDs, sluice.RoleSeqLens, sluice.RoleDocRemaining:
			return &sluice.Error{Kind: sluice.Unsupported, Op: op, Subject: f.Name, Detail: "describes packing but is not among the schema's packing features"}
		}
		p.plain = append(p.plain, f)
		if err := p.ask(op, f, bad); err != nil {
			return err
		}
	}
	return nil
}

// ask adds to want what the feature is made of.
func (p *Producer) ask(op string, f *sluice.SchemaFeature, bad func(field, format string, args ...any) error) error {
	last := func(n sluice.Norm) error {
		if p.want.Last != sluice.NoLast && p.want.Last != n {
			return &sluice.Error{Kind: sluice.Unsupported, Op: op, Subject: f.Name, Detail: fmt.Sprintf("wants the last hidden state %s-norm, and another feature wants it %s-norm; a forward returns one of them", n, p.want.Last)}
		}
		p.want.Last = n
		return nil
	}
	switch f.From {
	case sluice.RoleLast:
		return last(f.Norm)
	case sluice.RoleLogits:
		p.want.Logits = true
	case sluice.RoleTargetProbs, sluice.RolePositionMask:
		p.want.Logits = true
		if p.inDraft != nil {
			return nil
		}
		p.inDraft = make([]bool, p.info.VocabSize)
		if len(p.cfg.DraftVocab) == 0 {
			return bad("DraftVocab", "is empty; %s needs the draft's token ids", f.Name)
		}
		for i, id := range p.cfg.DraftVocab {
			if id < 0 || id >= p.info.VocabSize {
				return bad("DraftVocab", "entry %d is %d, want 0 to %d", i, id, p.info.VocabSize-1)
			}
			if p.inDraft[id] {
				return bad("DraftVocab", "entry %d is %d, which is there before", i, id)
			}
			p.inDraft[id] = true
		}
	case sluice.RoleAux:
		layers := p.cfg.AuxLayers
		if layers == nil {
			if layers = p.info.DefaultAuxLayers(); layers == nil {
				return bad("AuxLayers", "is nil, and a target of %d layers is too shallow for the default; want layers of %d to %d, each once", p.info.Layers, -1, p.info.Layers-1)
			}
		}
		if len(layers) == 0 {
			return bad("AuxLayers", "is empty; %s needs at least one layer", f.Name)
		}
		for i, l := range layers {
			if l < -1 || l >= p.info.Layers || slices.Contains(layers[:i], l) {
				return bad("AuxLayers", "%v: want layers of %d to %d, each once", layers, -1, p.info.Layers-1)
			}
		}
		p.want.AuxLayers = layers
		if f.FinalLayerNorm == sluice.PostNorm && slices.Contains(layers, p.info.Layers-1) {
			return last(sluice.PostNorm)
		}
	}
	return nil
}

// dtype is what a role is stored as.
func (p *Producer) dtype(r sluice.Role) sluice.DType {
	switch r {
	case sluice.RoleAux, sluice.RoleLast:
		return p.info.DType
	case sluice.RoleLogits, sluice.RoleTargetProbs:
		return p.cfg.LogitsDType
	case sluice.RolePositionMask:
		return sluice.Bool
	}
	return sluice.Int64
}

// spec is what a role is stored as for the batch: known before any forward.
func (p *Producer) spec(r sluice.Role, b *sluice.PromptBatch) sluice.Spec {
	shape := slices.Clone(b.InputIDs.Shape)
	switch r {
	case sluice.RoleAux:
		shape = append(shape, int64(len(p.want.AuxLayers))*p.info.HiddenSize)
	case sluice.RoleLast:
		shape = append(shape, p.info.HiddenSize)
	case sluice.RoleLogits:
		shape = append(shape, p.info.VocabSize)
	case sluice.RoleTargetProbs:
		shape = append(shape, int64(len(p.cfg.DraftVocab)))
	case sluice.RolePositionMask:
		shape = append(shape, 1)
	case sluice.RoleSeqLens:
		shape = slices.Clone(b.SeqLens.Shape)
	}
	return sluice.Spec{Shape: shape, DType: p.dtype(r)}
}

// Schema is the schema that the producer works for.
func (p *Producer) Schema() *sluice.Schema { return p.cfg.Schema }

// Session is what the producer calls itself at the queue.
func (p *Producer) Session() sluice.Producer {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cfg.Session
}

// join gives a producer that has none a name, and the gate of the queue that its samples will go to.
func (p *Producer) join(q sluice.Queue) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cfg.Session.Name == "" {
		p.cfg.Session.Name = "producer-" + p.session
	}
	if p.cfg.Queue == nil {
		p.cfg.Queue = q
	}
}

// begin opens a call of produce, which ends with end. The queue is the one whose gate paces it, or nil.
func (p *Producer) begin() (sluice.Queue, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, false
	}
	p.inWork++
	return p.cfg.Queue, true
}

func (p *Producer) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.inWork--; p.inWork == 0 && p.closed {
		p.turn.drop()
	}
}

// Stats returns a snapshot.
func (p *Producer) Stats() ProducerStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stats
}

func (p *Producer) count(f func(s *ProducerStats)) {
	p.mu.Lock()
	f(&p.stats)
	p.mu.Unlock()
}

// Close makes later calls of Produce fail. It closes neither target nor store, which are the caller's. It is idempotent.
func (p *Producer) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed && p.inWork == 0 {
		p.turn.drop()
	}
	p.closed = true
	return nil
}

// SampleBytes is the exact size of the sample that Produce would make of the batch, which must be valid.
func (p *Producer) SampleBytes(b *sluice.PromptBatch) (int64, error) {
	fields, err := p.features(b)
	if err != nil {
		return 0, err
	}
	return sluice.SumBytes(fields)
}

// Produce makes one sample of the batch, all its rows in it, and returns its ref, which is in no queue yet: put it there, or Discard it.
//
// It validates and admits the batch, checks its future ref against the schema, reserves its exact size at the gate, runs the target, checks the output and puts the sample. Nothing
// is left behind when it fails. Errors: ErrInvalid with [ErrNotAdmitted] in its chain (the admission rule) or without (a bad batch); ErrSchema; ErrTargetFault (the target failed,
// or returned wrong shapes or values that are not finite); those of [sluice.Queue.Reserve] and [sluice.Store.Put]; the context's.
func (p *Producer) Produce(ctx context.Context, b *sluice.PromptBatch) (sluice.Ref, error) {
	return p.produce(ctx, b, func(_ context.Context, _ string, _ string, err error) error { return err })
}

// retrier decides after a failure: nil is another try.
type retrier func(ctx context.Context, op, sampleID string, err error) error

func (p *Producer) produce(ctx context.Context, b *sluice.PromptBatch, again retrier) (ref sluice.Ref, err error) {
	const op = "stream: produce"
	queue, ok := p.begin()
	if !ok {
		return ref, &sluice.Error{Kind: sluice.Closed, Op: op, Detail: "the producer was closed"}
	}
	defer p.end()
	if ctx.Err() != nil {
		return ref, context.Cause(ctx)
	}
	if b == nil {
		return ref, &sluice.Error{Kind: sluice.Invalid, Op: op, Detail: "the batch is nil"}
	}
	if err := b.Validate(p.info.VocabSize); err != nil {
		return ref, err
	}
	supervised, err := p.admit(op, b)
	if err != nil {
		return ref, err
	}
	s := &sluice.Sample{
		RunID: p.cfg.RunID, Algorithm: p.cfg.Schema.Name, SchemaVersion: p.cfg.Schema.Version,
		TargetModelVersion: p.cfg.TargetModelVersion, DraftWeightVersion: p.cfg.DraftWeightVersion,
		NumTokens: p.tokens(b),
	}
	n := p.n.Add(1) - 1
	if s.SampleID, err = p.newID(op, n); err != nil {
		return ref, err
	}
	fields, err := p.features(b)
	if err != nil {
		return ref, err
	}
	size, err := sluice.SumBytes(fields)
	if err != nil {
		return ref, err
	}
	s.Attributes = p.attributes(b, fields, supervised)
	// The ref is checked here, where a fault costs nothing, and once more against the real tensors.
	if err := p.checkRef(s, fields, size); err != nil {
		return ref, err
	}

	var room sluice.Reservation
	stored := false
	if queue != nil {
		if room, err = p.reserve(ctx, queue, n, s.SampleID, size, again); err != nil {
			return ref, err
		}
		defer func() {
			if !stored { // for whatever reason: a panic of a backend is one
				if uerr := p.unreserve(ctx, room); uerr != nil {
					err = errors.Join(err, uerr)
				}
			}
		}()
	}
	out, err := p.forward(ctx, s.SampleID, b, again)
	if err != nil {
		return ref, err
	}
	if s.Features, err = p.build(b, out); err != nil {
		return ref, err
	}
	actual, err := s.RefFields(p.cfg.Store.URI(), "0")
	if err != nil {
		return ref, err
	}
	if err := p.checkRef(s, actual.Features, size); err != nil {
		return ref, err
	}
	if ref, err = p.put(ctx, s, room, again); err != nil {
		return sluice.Ref{}, err
	}
	stored = true
	p.count(func(st *ProducerStats) {
		st.Samples++
		st.Tokens += s.NumTokens
		st.SupervisedTokens += supervised
		st.Bytes += size
	})
	return ref, nil
}

// admit counts the supervised tokens, and refuses the batch if one of its rows breaks the rule.
func (p *Producer) admit(op string, b *sluice.PromptBatch) (int64, error) {
	rows, cols := b.InputIDs.Shape[0], b.InputIDs.Shape[1]
	if p.info.MaxTokens > 0 && cols > p.info.MaxTokens {
		return 0, &sluice.Error{Kind: sluice.Invalid, Op: op, Subject: "input_ids", Detail: fmt.Sprintf("has rows of %d tokens, the target takes at most %d", cols, p.info.MaxTokens)}
	}
	attn, loss := int64s(b.AttentionMask), int64s(b.LossMask)
	var starts []int64
	if b.Packed() {
		starts = int64s(b.PositionIDs)
	}
	rule := p.cfg.Schema.Admission
	var all, refused int64
	var first error
	for r := range rows {
		var tokens, supervised int64
		for t := range cols {
			at := r*cols + t
			tokens += attn[at]
			if t > 0 && (starts == nil || starts[at] != 0) {
				supervised += loss[at]
			}
		}
		all += supervised
		var what string
		switch {
		case tokens < rule.MinTokens:
			what = fmt.Sprintf("row %d has %d tokens, %s admits %d or more", r, tokens, p.cfg.Schema.Name, rule.MinTokens)
		case supervised < rule.MinSupervised:
			what = fmt.Sprintf("row %d has %d supervised tokens behind the first of a document, %s admits %d or more", r, supervised, p.cfg.Schema.Name, rule.MinSupervised)
		default:
			continue
		}
		refused++
		if first == nil {
			first = &sluice.Error{Kind: sluice.Invalid, Op: op, Detail: what, Err: ErrNotAdmitted}
		}
	}
	if first != nil {
		p.count(func(st *ProducerStats) { st.NotAdmitted++; st.NotAdmittedRows += refused })
	}
	return all, first
}

// tokens is the sum of the attention mask, or of the loss mask where the schema has none.
func (p *Producer) tokens(b *sluice.PromptBatch) (n int64) {
	mask := b.AttentionMask
	if p.cfg.Schema.Role(sluice.RoleAttentionMask) == nil {
		mask = b.LossMask
	}
	for _, v := range int64s(mask) {
		n += v
	}
	return n
}

func (p *Producer) newID(op string, n int64) (id string, err error) {
	if p.cfg.SampleID == nil {
		// A long run id is cut; the session alone makes the id unique.
		return fmt.Sprintf("%.150s-%s-%d", strings.TrimRight(p.cfg.RunID[:min(150, len(p.cfg.RunID))], "."), p.session, n), nil
	}
	if err = guard(sluice.Invalid, op+": SampleID", func() error { id = p.cfg.SampleID(n); return nil }); err != nil {
		return "", err
	}
	return id, sluice.ValidateID(id)
}

// features describes the future sample's features.
func (p *Producer) features(b *sluice.PromptBatch) ([]sluice.RefFeature, error) {
	plan := p.plain
	if b.Packed() {
		if plan = p.packed; plan == nil {
			return nil, &sluice.Error{Kind: sluice.SchemaError, Op: "stream: produce", Detail: fmt.Sprintf("the batch is packed, and the schema %s has no packing features", p.cfg.Schema.Name)}
		}
	}
	fields := make([]sluice.RefFeature, 0, len(plan))
	for _, f := range plan {
		spec := p.spec(f.From, b)
		if err := spec.Validate(); err != nil {
			return nil, err
		}
		fields = append(fields, sluice.RefFeature{Name: f.Name, Key: f.Name, Spec: spec})
	}
	return fields, nil
}

func (p *Producer) checkRef(s *sluice.Sample, features []sluice.RefFeature, size int64) error {
	uri := p.cfg.Store.URI()
	if uri == "" {
		uri = "unknown:"
	}
	f, err := (&sluice.Sample{SampleID: s.SampleID, RunID: s.RunID, Algorithm: s.Algorithm, SchemaVersion: s.SchemaVersion, NumTokens: s.NumTokens,
		TargetModelVersion: s.TargetModelVersion, DraftWeightVersion: s.DraftWeightVersion, Attributes: s.Attributes}).RefFields(uri, strings.Repeat("0", 32))
	if err != nil {
		return err
	}
	f.Features, f.EstimatedBytes = slices.Clone(features), size
	for i := range f.Features {
		f.Features[i].Key = s.SampleID + "/" + f.Features[i].Name
	}
	ref, err := sluice.NewRef(f)
	if err != nil {
		return err
	}
	return p.cfg.Schema.Validate(ref)
}

const (
	maxSources    = 16  // runs of positions that the source attribute lists
	maxSourceName = 200 // bytes of a source's name in it
)

// attributes says of the sample what silently ruins training when it is wrong.
func (p *Producer) attributes(b *sluice.PromptBatch, features []sluice.RefFeature, supervised int64) map[string]string {
	a := maps.Clone(p.cfg.Attributes)
	if a == nil {
		a = map[string]string{}
	}
	a["shift"] = "0"
	a["supervised_tokens"] = strconv.FormatInt(supervised, 10)
	if p.info.Fingerprint != "" {
		a["target"] = p.info.Fingerprint
	}
	if p.info.Tokenizer != "" {
		a["tokenizer"] = p.info.Tokenizer
	}
	if len(p.want.AuxLayers) > 0 {
		var list strings.Builder
		for i, l := range p.want.AuxLayers {
			if i > 0 {
				list.WriteByte(',')
			}
			list.WriteString(strconv.Itoa(l))
		}
		a["aux_layers"] = "hf:" + list.String()
	}
	for i := range features {
		if f := p.cfg.Schema.Feature(features[i].Name); f.From == sluice.RoleLast {
			a["last_norm"] = string(f.Norm)
		}
	}
	if len(b.Positions) > 0 {
		a["source"] = sources(b.Positions)
	}
	sum := sha256.Sum256(b.InputIDs.Data)
	a["ids"] = "sha256:" + hex.EncodeToString(sum[:16])
	// Without an attention mask in the sample nothing else tells its tokens from its padding.
	if p.cfg.Schema.Role(sluice.RoleAttentionMask) == nil && !b.Packed() {
		var list []string
		short := false
		rows, cols := b.InputIDs.Shape[0], b.InputIDs.Shape[1]
		attn := int64s(b.AttentionMask)
		for r := range rows {
			n := int64(0)
			for _, v := range attn[r*cols : (r+1)*cols] {
				n += v
			}
			short = short || n < cols
			list = append(list, strconv.FormatInt(n, 10))
		}
		if short {
			a["row_lengths"] = strings.Join(list, ",")
		}
	}
	return a
}

// sources lists positions as set@epoch/first-last, bounded.
func sources(positions []sluice.Position) string {
	var b strings.Builder
	runs := 0
	for i := 0; i < len(positions); {
		first, j := positions[i], i+1
		for j < len(positions) && positions[j] == (sluice.Position{Source: first.Source, Epoch: first.Epoch, Index: first.Index + int64(j-i)}) {
			j++
		}
		if runs == maxSources {
			fmt.Fprintf(&b, ",+%d", len(positions)-i)
			break
		}
		if runs++; runs > 1 {
			b.WriteByte(',')
		}
		name := strings.Map(func(r rune) rune {
			if r < 0x20 || r >= 0x7f && r < 0xa0 || r == 0x2028 || r == 0x2029 {
				return '?'
			}
			return r
		}, strings.ToValidUTF8(first.Source[:min(len(first.Source), maxSourceName)], "?"))
		fmt.Fprintf(&b, "%s@%d/%d", name, first.Epoch, first.Index)
		if j-i > 1 {
			fmt.Fprintf(&b, "-%d", first.Index+int64(j-i)-1)
		}
		i = j
	}
	return b.String()
}

// reserve waits at the gate for the nth sample's room. A request is named by the session and n, never by the sample: an id of the caller's own may come
// again, and the queue would answer with the reservation of the time before.
func (p *Producer) reserve(ctx context.Context, queue sluice.Queue, n int64, id string, size int64, again retrier) (sluice.Reservation, error) {
	start := time.Now()
	defer func() { p.count(func(st *ProducerStats) { st.Waited += time.Since(start) }) }()
	r := sluice.ReserveRequest{Producer: p.Session(), Bytes: size}
	for try := 0; ; {
		r.RequestID = fmt.Sprintf("reserve-%s-%d-%d", p.session, n, try)
		room, err := queue.Reserve(ctx, r)
		if err == nil {
			return room, nil
		}
		unknown := errors.Is(err, sluice.ErrUnavailable)
		if !unknown {
			try++ // this request has its answer; the next one is another
		}
		if err := again(ctx, "reserve", id, err); err != nil {
			if unknown {
				p.giveBack(ctx, queue, r)
			}
			return sluice.Reservation{}, err
		}
	}
}

// giveBack asks again for a reservation whose answer was lost, for the sake of returning it. It gives up after a second, since a queue that is away may stay so; then the room comes
// back with the end of the session.
func (p *Producer) giveBack(ctx context.Context, queue sluice.Queue, r sluice.ReserveRequest) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	for {
		room, err := queue.Reserve(ctx, r)
		if err == nil {
			_ = p.cfg.Store.Unreserve(ctx, room)
			return
		}
		if !errors.Is(err, sluice.ErrUnavailable) || !sleep(ctx, sluice.SystemClock{}, 50*time.Millisecond) {
			return
		}
	}
}

func (p *Producer) unreserve(ctx context.Context, room sluice.Reservation) error {
	return insist(ctx, func(ctx context.Context) error { return p.cfg.Store.Unreserve(ctx, room) })
}

func (p *Producer) forward(ctx context.Context, id string, b *sluice.PromptBatch, again retrier) (*sluice.TargetOutput, error) {
	for {
		out, err := p.forwardOnce(ctx, b)
		if err == nil {
			return out, nil
		}
		if err := again(ctx, "forward", id, err); err != nil {
			return nil, err
		}
	}
}

func (p *Producer) forwardOnce(ctx context.Context, b *sluice.PromptBatch) (out *sluice.TargetOutput, err error) {
	const op = "stream: forward"
	if err := p.turn.take(ctx); err != nil {
		return nil, err
	}
	start := time.Now()
	err = guard(sluice.TargetFault, op, func() (err error) {
		defer p.turn.give()
		out, err = p.cfg.Target.Forward(ctx, b, p.want)
		return err
	})
	fault := false
	switch {
	case err == nil:
		err = p.check(op, b, out)
		fault = err != nil
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case sluice.KindOf(err) == "":
		err = &sluice.Error{Kind: sluice.TargetFault, Op: op, Subject: p.info.Name, Err: err}
		fault = true
	default:
		fault = errors.Is(err, sluice.ErrTargetFault)
	}
	p.count(func(st *ProducerStats) {
		st.Forwards++
		st.Computed += time.Since(start)
		if fault {
			st.TargetFaults++
		}
	})
	return out, err
}

// check refuses an output that cannot be right.
func (p *Producer) check(op string, b *sluice.PromptBatch, out *sluice.TargetOutput) error {
	fail := func(what, format string, args ...any) error {
		return &sluice.Error{Kind: sluice.TargetFault, Op: op, Subject: p.info.Name, Detail: what + " " + fmt.Sprintf(format, args...)}
	}
	if out == nil {
		return fail("output", "is nil")
	}
	rows, cols := b.InputIDs.Shape[0], b.InputIDs.Shape[1]
	for _, o := range []struct {
		what   string
		t      sluice.Tensor
		dtype  sluice.DType
		wanted bool
		width  int64
	}{
		{"aux", out.Aux, p.info.DType, len(p.want.AuxLayers) > 0, int64(len(p.want.AuxLayers)) * p.info.HiddenSize},
		{"last", out.Last, p.info.DType, p.want.Last != sluice.NoLast, p.info.HiddenSize},
		{"logits", out.Logits, sluice.Float32, p.want.Logits, p.info.VocabSize},
	} {
		if !o.wanted {
			continue
		}
		want := sluice.Spec{DType: o.dtype, Shape: []int64{rows, cols, o.width}}
		if !o.t.Equal(want) {
			return fail(o.what, "is %s, want %s", o.t.Spec, want)
		}
		if err := o.t.Validate(); err != nil {
			return fail(o.what, "has bad data: %v", err)
		}
		if i := firstNotFinite(o.t); i >= 0 {
			return fail(o.what, "is not finite at row %d, token %d, element %d (of %s)", i/(cols*o.width), i/o.width%cols, i%o.width, o.t.Spec)
		}
	}
	return nil
}

// build makes the features out of prompt and output, in the schema's order.
func (p *Producer) build(b *sluice.PromptBatch, out *sluice.TargetOutput) ([]sluice.Feature, error) {
	plan := p.plain
	if b.Packed() {
		plan = p.packed
	}
	features := make([]sluice.Feature, 0, len(plan))
	for _, f := range plan {
		spec := p.spec(f.From, b)
		var t sluice.Tensor
		switch f.From {
		case sluice.RoleInputIDs:
			t = b.InputIDs
		case sluice.RoleAttentionMask:
			t = b.AttentionMask
		case sluice.RoleLossMask:
			t = b.LossMask
		case sluice.RolePositionIDs:
			t = b.PositionIDs
		case sluice.RoleSeqLens:
			t = b.SeqLens
		case sluice.RoleDocRemaining:
			t = b.DocRemaining
		case sluice.RoleLast:
			t = out.Last
		case sluice.RoleAux:
			t = out.Aux
			if i := slices.Index(p.want.AuxLayers, p.info.Layers-1); i >= 0 && f.FinalLayerNorm == sluice.PostNorm {
				p.substitute(t, out.Last, i)
			}
		case sluice.RoleLogits:
			if t = out.Logits; spec.DType != sluice.Float32 {
				t = convert(float32s(out.Logits), spec.DType, spec.Shape...)
			}
		case sluice.RoleTargetProbs:
			t = convert(draftProbs(float32s(out.Logits), p.info.VocabSize, p.cfg.DraftVocab), spec.DType, spec.Shape...)
		case sluice.RolePositionMask:
			t = positionMask(float32s(out.Logits), p.info.VocabSize, p.inDraft, int64s(b.LossMask), spec.Shape...)
		}
		// The output was finite; what was narrowed may be no longer.
		if f.From == sluice.RoleLogits && spec.DType != sluice.Float32 {
			if i, width := firstNotFinite(t), p.info.VocabSize; i >= 0 {
				return nil, &sluice.Error{Kind: sluice.TargetFault, Op: "stream: produce", Subject: f.Name, Detail: fmt.Sprintf("row %d, token %d: a logit is too large for %s", i/width/spec.Shape[1], i/width%spec.Shape[1], t.DType)}
			}
		}
		features = append(features, sluice.Feature{Name: f.Name, Tensor: t})
	}
	return features, nil
}

// substitute overwrites the block of the final layer in aux by the normed last state. The output is ours, so it may be written to.
func (p *Producer) substitute(aux, last sluice.Tensor, block int) {
	width := p.info.HiddenSize * p.info.DType.Size()
	stride := width * int64(len(p.want.AuxLayers))
	for at, i := int64(block)*width, int64(0); i < int64(len(last.Data)); at, i = at+stride, i+width {
		copy(aux.Data[at:at+width], last.Data[i:i+width])
	}
}

func (p *Producer) put(ctx context.Context, s *sluice.Sample, room sluice.Reservation, again retrier) (sluice.Ref, error) {
	unknown := 0
	for {
		ref, err := p.cfg.Store.Put(ctx, s, room)
		if err == nil {
			return ref, nil
		}
		if errors.Is(err, sluice.ErrDuplicate) && unknown > 0 {
			// An earlier try got through after all, but its ref is lost. The sample goes under another name; the first one has no claim
			// and falls to the store's GC, once the store's session has ended. If it was another's sample all along, the room is not used.
			if err := p.unreserve(ctx, room); err != nil {
				return ref, err
			}
			s.SampleID = fmt.Sprintf("%.190s-r%d", s.SampleID, unknown)
			unknown, room = 0, sluice.Reservation{}
			continue
		}
		if errors.Is(err, sluice.ErrUnavailable) {
			unknown++
		}
		if err := again(ctx, "put", s.SampleID, err); err != nil {
			return ref, err
		}
	}
}

// Discard takes a sample out of the store whose ref did not reach a queue. It is idempotent; ErrConflict means that the ref did reach one. (Upstream's discard.)
func (p *Producer) Discard(ctx context.Context, ref sluice.Ref) error {
	if err := p.cfg.Store.Abort(ctx, ref); err != nil {
		return err
	}
	p.count(func(st *ProducerStats) { st.Discarded++ })
	return nil
}

// turn serialises the forwards of one target across the producers that share it.
type turn struct {
	target sluice.Target
	users  int // guarded by turns.mu
	token  chan struct{}
}

var turns struct {
	mu sync.Mutex
	of map[sluice.Target]*turn
}

func turnOf(target sluice.Target, concurrent bool) *turn {
	t := &turn{}
	if concurrent {
		return t
	}
	t.token = make(chan struct{}, 1)
	if !reflect.ValueOf(target).Comparable() {
		return t
	}
	turns.mu.Lock()
	defer turns.mu.Unlock()
	if shared := turns.of[target]; shared != nil {
		shared.users++
		return shared
	}
	if turns.of == nil {
		turns.of = map[sluice.Target]*turn{}
	}
	t.target, t.users = target, 1
	turns.of[target] = t
	return t
}

func (t *turn) drop() {
	if t.target == nil {
		return
	}
	turns.mu.Lock()
	defer turns.mu.Unlock()
	if t.users--; t.users == 0 {
		delete(turns.of, t.target)
	}
}

func (t *turn) take(ctx context.Context) error {
	if t.token == nil {
		return nil
	}
	select {
	case t.token <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (t *turn) give() {
	if t.token != nil {
		<-t.token
	}
}
