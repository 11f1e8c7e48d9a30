package tinyllama

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"

	"github.com/sluice-ml/sluice"
)

const opForward = "tinyllama: forward"

// chunkTokens is the number of adjacent tokens of a document that are worked on together: enough to use a tile of weights
// often while it is in the cache, few enough that a short batch keeps every processor busy.
const chunkTokens = 32

// chunk is a run of adjacent real tokens of one document. Padding is in no chunk and costs nothing.
type chunk struct {
	row, col int // where the first token is in the batch
	tokens   int
	first    int // its number among the real tokens of the batch
	doc      int // the number of its document's first token
	position int // its position in the document
}

// Forward runs the model on the batch. See [sluice.Target] for the contract; the values of padded positions are zero.
//
// It works on as many processors as GOMAXPROCS allows and needs about 4*(H + heads*head_dim + 2*kv_heads*head_dim) bytes a token
// beside its output. It looks at ctx between blocks of tokens, so that a cancelled call returns within milliseconds,
// with ctx's error.
func (m *Model) Forward(ctx context.Context, batch *sluice.PromptBatch, want sluice.Want) (*sluice.TargetOutput, error) {
	if m.closed.Load() {
		return nil, &sluice.Error{Kind: sluice.Closed, Op: opForward, Subject: m.name, Detail: "the target was closed"}
	}
	if err := m.check(batch, want); err != nil {
		return nil, err
	}
	f := m.newForward(ctx, batch, want)
	if err := f.run(); err != nil {
		return nil, err
	}
	return f.out, nil
}

func (m *Model) check(batch *sluice.PromptBatch, want sluice.Want) error {
	bad := func(field, detail string) error {
		return &sluice.Error{Kind: sluice.Invalid, Op: opForward, Subject: field, Detail: detail}
	}
	if batch == nil {
		return bad("batch", "is nil")
	}
	if err := batch.Validate(int64(m.cfg.vocab)); err != nil {
		return err
	}
	rows, cols := batch.InputIDs.Shape[0], batch.InputIDs.Shape[1]
	if cols > int64(m.cfg.maxTokens) {
		return bad("input_ids", fmt.Sprintf("has rows of %d tokens, the model takes at most %d", cols, m.cfg.maxTokens))
	}
	if k := len(want.AuxLayers); k > m.cfg.layers+1 {
		return bad("aux_layers", fmt.Sprintf("asks for %d states, the model has %d", k, m.cfg.layers+1))
	}
	for _, l := range want.AuxLayers {
		if l < -1 || l >= m.cfg.layers {
			return bad("aux_layers", fmt.Sprintf("asks for layer %d; the model has layers 0 to %d, and -1 for the embedding output", l, m.cfg.layers-1))
		}
	}
	switch want.Last {
	case sluice.NoLast, sluice.PreNorm, sluice.PostNorm:
	default:
		return bad("last", fmt.Sprintf("is %q, want %q, %q or nothing", want.Last, sluice.PreNorm, sluice.PostNorm))
	}
	for _, width := range []int{len(want.AuxLayers) * m.cfg.hidden, m.cfg.vocab} {
		if err := (sluice.Spec{DType: sluice.Float32, Shape: []int64{rows, cols, int64(width)}}).Validate(); err != nil {
			return err
		}
	}
	return nil
}

// forward is one call's state; nothing of it outlives the call, and calls share only weights.
type forward struct {
	m    *Model
	ctx  context.Context
	want sluice.Want
	out  *sluice.TargetOutput

	cols    int
	chunks  []chunk
	tokens  int // real ones
	ids     []int64
	rotary  rotary
	workers []scratch

	aux, last, logits []float32 // views of out

	x       []float32 // [tokens,H]: the residual stream
	q       []float32 // [tokens,heads*head_dim]
	kT      []float32 // [kv_heads,head_dim,kStride]: keys, transposed for the product with q
	v       []float32 // [tokens,kv_heads*head_dim]
	kStride int

	mu    sync.Mutex
	fault *fault
}

// fault is where a value was found that is not finite.
type fault struct{ row, col int }

// scratch is what one worker needs for a chunk.
type scratch struct {
	normed []float32 // [chunkTokens,H]
	wide   []float32 // [chunkTokens,max(qkv,2*intermediate,H)]
	attn   []float32 // [chunkTokens,heads*head_dim]
	scores []float32 // [chunkTokens,longest document]
}

func (m *Model) newForward(ctx context.Context, batch *sluice.PromptBatch, want sluice.Want) *forward {
	c := &m.cfg
	f := &forward{m: m, ctx: ctx, want: want, cols: int(batch.InputIDs.Shape[1]), ids: sluice.View[int64](batch.InputIDs)}
	longest := f.split(batch)

	shape := func(width int) []int64 { return append(slices.Clone(batch.InputIDs.Shape), int64(width)) }
	f.out = &sluice.TargetOutput{}
	if k := len(want.AuxLayers); k > 0 {
		f.out.Aux = sluice.NewTensor(sluice.Float32, shape(k*c.hidden)...)
		f.aux = sluice.View[float32](f.out.Aux)
	}
	if want.Last != sluice.NoLast {
		f.out.Last = sluice.NewTensor(sluice.Float32, shape(c.hidden)...)
		f.last = sluice.View[float32](f.out.Last)
	}
	if want.Logits {
		f.out.Logits = sluice.NewTensor(sluice.Float32, shape(c.vocab)...)
		f.logits = sluice.View[float32](f.out.Logits)
	}

	f.rotary = newRotary(longest, c.headDim, c.theta)
	f.x = make([]float32, f.tokens*c.hidden)
	f.q = make([]float32, f.tokens*c.heads*c.headDim)
	f.v = make([]float32, f.tokens*c.kvHeads*c.headDim)
	// An odd multiple of a cache line, so that the rows of a block of keys do not fall on the same few sets of the cache.
	f.kStride = (f.tokens+15)&^15 | 16
	f.kT = make([]float32, c.kvHeads*c.headDim*f.kStride)
	f.workers = make([]scratch, max(1, min(runtime.GOMAXPROCS(0), len(f.chunks))))
	for i := range f.workers {
		f.workers[i] = scratch{
			normed: make([]float32, chunkTokens*c.hidden),
			wide:   make([]float32, chunkTokens*max(c.qkvWidth(), 2*c.intermediate, c.hidden)),
			attn:   make([]float32, chunkTokens*c.heads*c.headDim),
			scores: make([]float32, chunkTokens*longest),
		}
	}
	return f
}

// split lists the chunks of the batch, those with the longest attention first, since they take the longest. It returns the length
// of the longest document. Without packing, a row is one document.
func (f *forward) split(batch *sluice.PromptBatch) (longest int) {
	attended := sluice.View[int64](batch.AttentionMask)
	for row := range int(batch.InputIDs.Shape[0]) {
		var lens []int64
		if batch.Packed() {
			docs := int(batch.SeqLens.Shape[1])
			lens = sluice.View[int64](batch.SeqLens)[row*docs : (row+1)*docs]
		} else {
			n := int64(0)
			for _, a := range attended[row*f.cols : (row+1)*f.cols] {
				n += a
			}
			lens = []int64{n}
		}
		col := 0
		for _, n := range lens {
			n, doc := int(n), f.tokens
			longest = max(longest, n)
			for at := 0; at < n; at += chunkTokens {
				f.chunks = append(f.chunks, chunk{
					row: row, col: col + at, tokens: min(chunkTokens, n-at),
					first: doc + at, doc: doc, position: at,
				})
			}
			f.tokens += n
			col += n
		}
	}
	slices.SortStableFunc(f.chunks, func(a, b chunk) int { return b.position - a.position })
	return longest
}

// run computes the layers one after another. Within a layer, keys and values of all tokens come first, since attention needs those
// of earlier chunks; everything else of a chunk needs nothing of any other.
func (f *forward) run() error {
	if err := f.each(-1, f.embed); err != nil {
		return err
	}
	layers := 0
	for _, l := range f.want.AuxLayers {
		layers = max(layers, l+1)
	}
	if f.want.Last != sluice.NoLast || f.want.Logits {
		layers = f.m.cfg.layers
	}
	for l := range layers {
		w := &f.m.layers[l]
		if err := f.each(l, func(s *scratch, c chunk) { f.project(w, s, c) }); err != nil {
			return err
		}
		if err := f.each(l, func(s *scratch, c chunk) { f.layer(l, w, s, c) }); err != nil {
			return err
		}
	}
	if f.want.Last == sluice.NoLast && !f.want.Logits {
		return nil
	}
	return f.each(f.m.cfg.layers, f.finish)
}

// each runs do on every chunk and turns what it noted into an error.
func (f *forward) each(layer int, do func(s *scratch, c chunk)) error {
	err := parallel(f.ctx, len(f.workers), len(f.chunks), func(worker, i int) { do(&f.workers[worker], f.chunks[i]) })
	if err != nil {
		return fmt.Errorf("%s %q: stopped: %w", opForward, f.m.name, err)
	}
	if f.fault == nil {
		return nil
	}
	what := fmt.Sprintf("the output of layer %d", layer)
	if layer == f.m.cfg.layers {
		what = "the output of the final norm or the head"
	}
	return &sluice.Error{
		Kind: sluice.TargetFault, Op: opForward, Subject: f.m.name,
		Detail: fmt.Sprintf("row %d, token %d: %s is not finite", f.fault.row, f.fault.col, what),
	}
}

// inspect notes the first place, in the order of the batch, where one of the chunk's vectors is not finite.
func (f *forward) inspect(c chunk, values []float32, stride, width int) {
	for t := range c.tokens {
		if notFinite(values[t*stride:t*stride+width]) < 0 {
			continue
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		if at := (fault{c.row, c.col + t}); f.fault == nil || at.row < f.fault.row || (at.row == f.fault.row && at.col < f.fault.col) {
			f.fault = &at
		}
		return
	}
}

// at is the chunk's offset in an output of the given width.
func (f *forward) at(c chunk, width int) int { return (c.row*f.cols + c.col) * width }

func (f *forward) embed(_ *scratch, c chunk) {
	h := f.m.cfg.hidden
	for t := range c.tokens {
		id := int(f.ids[f.at(c, 1)+t])
		copy(f.x[(c.first+t)*h:(c.first+t+1)*h], f.m.embeddings[id*h:(id+1)*h])
	}
	f.keep(-1, c)
}

// keep copies the residual stream to wherever it was asked for.
func (f *forward) keep(layer int, c chunk) {
	h, k := f.m.cfg.hidden, len(f.want.AuxLayers)
	for slot, l := range f.want.AuxLayers {
		if l != layer {
			continue
		}
		for t := range c.tokens {
			copy(f.aux[f.at(c, k*h)+(t*k+slot)*h:][:h], f.x[(c.first+t)*h:])
		}
	}
}

// project computes queries, keys and values of a chunk.
func (f *forward) project(w *layer, s *scratch, c chunk) {
	cfg := &f.m.cfg
	h, hd := cfg.hidden, cfg.headDim
	for t := range c.tokens {
		rmsNorm(s.normed[t*h:(t+1)*h], f.x[(c.first+t)*h:(c.first+t+1)*h], w.attnNorm, cfg.eps)
	}
	width := cfg.qkvWidth()
	w.qkv.mul(c.tokens, s.normed, h, s.wide, width)

	qw, kvw := cfg.heads*hd, cfg.kvHeads*hd
	for t := range c.tokens {
		row := s.wide[t*width : (t+1)*width]
		for head := range cfg.heads + cfg.kvHeads {
			f.rotary.apply(row[head*hd:(head+1)*hd], c.position+t)
		}
		copy(f.q[(c.first+t)*qw:], row[:qw])
		for i, k := range row[qw : qw+kvw] {
			f.kT[i*f.kStride+c.first+t] = k
		}
		copy(f.v[(c.first+t)*kvw:], row[qw+kvw:])
	}
}

// layer is the rest of a decoder layer for a chunk: attention and the gated MLP, each added to the residual stream.
func (f *forward) layer(l int, w *layer, s *scratch, c chunk) {
	cfg := &f.m.cfg
	h, inter := cfg.hidden, cfg.intermediate
	x := f.x[c.first*h : (c.first+c.tokens)*h]

	f.attend(s, c)
	w.out.mul(c.tokens, s.attn, cfg.heads*cfg.headDim, s.wide, h)
	add(x, s.wide)

	for t := range c.tokens {
		rmsNorm(s.normed[t*h:(t+1)*h], x[t*h:(t+1)*h], w.mlpNorm, cfg.eps)
	}
	w.gateUp.mul(c.tokens, s.normed, h, s.wide, 2*inter)
	for t := range c.tokens {
		gate, up := s.wide[t*2*inter:][:inter], s.wide[t*2*inter+inter:][:inter]
		for i, g := range gate {
			gate[i] = silu(g) * up[i]
		}
	}
	w.down.mul(c.tokens, s.wide, 2*inter, s.normed, h)
	add(x, s.normed)

	f.inspect(c, x, h, h)
	f.keep(l, c)
}

// add adds b to a, as far as a goes.
func add(a, b []float32) {
	b = b[:len(a)]
	for i, v := range b {
		a[i] += v
	}
}

// attend sets s.attn to the chunk's attention over its document's tokens up to each one's own. Every sum runs over the document's keys
// in order, and what lies behind the diagonal has weight zero and is skipped, so neither the chunk nor the neighbours show in the result.
func (f *forward) attend(s *scratch, c chunk) {
	cfg := &f.m.cfg
	hd := cfg.headDim
	qw, kvw := cfg.heads*hd, cfg.kvHeads*hd
	keys := c.position + c.tokens
	scale := float32(1 / math.Sqrt(float64(hd)))
	for head := range cfg.heads {
		kv := head / (cfg.heads / cfg.kvHeads)
		multiply(c.tokens, keys, hd, f.q[c.first*qw+head*hd:], qw, f.kT[kv*hd*f.kStride+c.doc:], f.kStride, s.scores, keys)
		var inverse [chunkTokens]float32
		for t := range c.tokens {
			row := s.scores[t*keys : (t+1)*keys]
			inverse[t] = 1 / softmax(row[:c.position+t+1], scale)
			clear(row[c.position+t+1:])
		}
		out := s.attn[head*hd:]
		multiply(c.tokens, hd, keys, s.scores, keys, f.v[c.doc*kvw+kv*hd:], kvw, out, qw)
		for t := range c.tokens {
			for i := range out[t*qw:][:hd] {
				out[t*qw+i] *= inverse[t]
			}
		}
	}
}

// softmax replaces scores by exp(scale*(score-max)) and returns their sum; the caller divides after the product with the values, which is shorter.
func softmax(scores []float32, scale float32) float32 {
	high := scores[0]
	for _, s := range scores {
		high = max(high, s)
	}
	sum := 0.0
	for i, s := range scores {
		e := exp32((s - high) * scale)
		scores[i] = e
		sum += float64(e)
	}
	return float32(sum)
}

// finish applies the final norm and the head.
func (f *forward) finish(s *scratch, c chunk) {
	cfg := &f.m.cfg
	h, v := cfg.hidden, cfg.vocab
	x := f.x[c.first*h : (c.first+c.tokens)*h]
	if f.want.Last == sluice.PreNorm {
		copy(f.last[f.at(c, h):], x)
		if !f.want.Logits {
			return
		}
	}
	for t := range c.tokens {
		rmsNorm(s.normed[t*h:(t+1)*h], x[t*h:(t+1)*h], f.m.norm, cfg.eps)
	}
	f.inspect(c, s.normed, h, h)
	if f.want.Last == sluice.PostNorm {
		copy(f.last[f.at(c, h):], s.normed[:c.tokens*h])
	}
	if f.want.Logits {
		logits := f.logits[f.at(c, v):]
		f.m.head.mul(c.tokens, s.normed, h, logits, v)
		f.inspect(c, logits, v, v)
	}
}
