package targettest

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/sluice-ml/sluice"
)

// Call is what a hook learns about a forward.
type Call struct {
	Number int // 0 for the first forward of the Fake
	Batch  *sluice.PromptBatch
	Want   sluice.Want
}

// Fault says what shall go wrong with a forward. The zero value is nothing.
type Fault struct {
	// Err is returned instead of an output.
	Err error
	// Panic is raised, if it is not nil.
	Panic any
	// Rows is added to the number of rows of every output: -1 loses the last row, 1 invents one of zeros. At least one row stays.
	Rows int
	// Columns is added to the number of tokens of every output. At least one stays.
	Columns int
	// NaN lists rows in which every value of every output becomes NaN.
	NaN []int
	// Change, if set, may do anything else to the output before it is returned.
	Change func(*sluice.TargetOutput)
}

// Options configure a Fake. The zero value of a field stands for the default that its comment names.
type Options struct {
	Name       string       // "fake"
	HiddenSize int64        // 4
	VocabSize  int64        // 64
	Layers     int          // 8
	MaxTokens  int64        // 4096
	DType      sluice.DType // float32; bfloat16 is the other one that it knows
	Seed       uint64       // another seed is another model, with another fingerprint
	Concurrent bool         // whether Info claims it; if not, a forward that overlaps another fails with [sluice.ErrConflict]

	// Hook is called in every forward that was not refused for its input, before the work, outside all locks. It may wait for whatever it likes, to play a slow model;
	// when ctx is done afterwards, the forward returns its error.
	Hook func(ctx context.Context, call Call) Fault
}

// Fake is a target without a model: a pure function of the ids. It honours the whole contract of [sluice.Target] and passes [Run], so what is
// true of a stream over a Fake is true over a model:
//
//   - the state of a token is a hash of all ids of its document up to it, so a shift, a lost token, a mixed-up row or a leak
//     between documents changes values;
//   - every layer has its own values, and last states before and after the norm differ;
//   - logits are the post-norm state times [Fake.Head], added up in order in float32, so that they can be recomputed from last
//     hidden states: to the bit in that order where DType is float32, to rounding otherwise.
//
// All methods may be called at once.
type Fake struct {
	o      Options
	closed atomic.Bool

	mu      sync.Mutex // guards what follows
	calls   int
	running int
	most    int
}

var _ sluice.Target = (*Fake)(nil)

// New returns a Fake. It panics on options that make no model.
func New(o Options) *Fake {
	set := func(field *int64, value int64) {
		if *field == 0 {
			*field = value
		}
	}
	set(&o.HiddenSize, 4)
	set(&o.VocabSize, 64)
	set(&o.MaxTokens, 4096)
	if o.Name == "" {
		o.Name = "fake"
	}
	if o.Layers == 0 {
		o.Layers = 8
	}
	if o.DType == 0 {
		o.DType = sluice.Float32
	}
	if o.HiddenSize < 1 || o.VocabSize < 1 || o.MaxTokens < 1 || o.Layers < 1 || (o.DType != sluice.Float32 && o.DType != sluice.BFloat16) {
		panic(fmt.Sprintf("targettest: no target has hidden size %d, vocabulary %d, %d layers, rows of %d and dtype %s", o.HiddenSize, o.VocabSize, o.Layers, o.MaxTokens, o.DType))
	}
	return &Fake{o: o}
}

// Info describes the fake.
func (f *Fake) Info() sluice.TargetInfo {
	return sluice.TargetInfo{
		Name:        f.o.Name,
		Fingerprint: fmt.Sprintf("fake:%d-%d-%d-%s-%d", f.o.HiddenSize, f.o.VocabSize, f.o.Layers, f.o.DType, f.o.Seed),
		Layers:      f.o.Layers,
		HiddenSize:  f.o.HiddenSize,
		VocabSize:   f.o.VocabSize,
		MaxTokens:   f.o.MaxTokens,
		DType:       f.o.DType,
		Concurrent:  f.o.Concurrent,
	}
}

// Calls is the number of forwards that were begun.
func (f *Fake) Calls() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls
}

// MostConcurrent is the largest number of forwards that ran at the same time.
func (f *Fake) MostConcurrent() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.most
}

// Closed reports whether Close was called.
func (f *Fake) Closed() bool { return f.closed.Load() }

// Close makes later forwards fail with [sluice.ErrClosed].
func (f *Fake) Close() error {
	f.closed.Store(true)
	return nil
}

// Head is the output head, float32 [V,H].
func (f *Fake) Head() sluice.Tensor {
	t := sluice.NewTensor(sluice.Float32, f.o.VocabSize, f.o.HiddenSize)
	h := sluice.View[float32](t)
	for i := range h {
		h[i] = unit(mix(f.o.Seed^0x68656164, uint64(i)))
	}
	return t
}

const opForward = "fake: forward"

// Forward computes the outputs, after the hook.
func (f *Fake) Forward(ctx context.Context, batch *sluice.PromptBatch, want sluice.Want) (*sluice.TargetOutput, error) {
	f.mu.Lock()
	call := Call{Number: f.calls, Batch: batch, Want: want}
	f.calls++
	f.running++
	f.most = max(f.most, f.running)
	overlap := f.running > 1 && !f.o.Concurrent
	f.mu.Unlock()
	defer func() {
		f.mu.Lock()
		f.running--
		f.mu.Unlock()
	}()
	if overlap {
		return nil, &sluice.Error{Kind: sluice.Conflict, Op: opForward, Subject: f.o.Name, Detail: "was called again before it returned, and Info does not say that it is concurrent"}
	}
	if f.closed.Load() {
		return nil, &sluice.Error{Kind: sluice.Closed, Op: opForward, Subject: f.o.Name, Detail: "the target was closed"}
	}
	if err := f.check(batch, want); err != nil {
		return nil, err
	}
	var fault Fault
	if f.o.Hook != nil {
		fault = f.o.Hook(ctx, call)
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%s %q: stopped: %w", opForward, f.o.Name, err)
	}
	if fault.Panic != nil {
		panic(fault.Panic)
	}
	if fault.Err != nil {
		return nil, fault.Err
	}
	out := f.compute(batch, want)
	fault.apply(out)
	return out, nil
}

func (f *Fake) check(batch *sluice.PromptBatch, want sluice.Want) error {
	bad := func(field, detail string) error {
		return &sluice.Error{Kind: sluice.Invalid, Op: opForward, Subject: field, Detail: detail}
	}
	if batch == nil {
		return bad("batch", "is nil")
	}
	if err := batch.Validate(f.o.VocabSize); err != nil {
		return err
	}
	if cols := batch.InputIDs.Shape[1]; cols > f.o.MaxTokens {
		return bad("input_ids", fmt.Sprintf("has rows of %d tokens, the model takes at most %d", cols, f.o.MaxTokens))
	}
	for _, l := range want.AuxLayers {
		if l < -1 || l >= f.o.Layers {
			return bad("aux_layers", fmt.Sprintf("asks for layer %d; the model has layers 0 to %d, and -1 for the embedding output", l, f.o.Layers-1))
		}
	}
	switch want.Last {
	case sluice.NoLast, sluice.PreNorm, sluice.PostNorm:
		return nil
	}
	return bad("last", fmt.Sprintf("is %q, want %q, %q or nothing", want.Last, sluice.PreNorm, sluice.PostNorm))
}

func (f *Fake) compute(batch *sluice.PromptBatch, want sluice.Want) *sluice.TargetOutput {
	rows, cols := int(batch.InputIDs.Shape[0]), int(batch.InputIDs.Shape[1])
	h, v, k := int(f.o.HiddenSize), int(f.o.VocabSize), len(want.AuxLayers)
	tensor := func(width int) []float32 { return make([]float32, rows*cols*width) }
	var aux, last, logits, head []float32
	if k > 0 {
		aux = tensor(k * h)
	}
	if want.Last != sluice.NoLast {
		last = tensor(h)
	}
	if want.Logits {
		logits, head = tensor(v), sluice.View[float32](f.Head())
	}
	ids, attended := sluice.View[int64](batch.InputIDs), sluice.View[int64](batch.AttentionMask)
	var positions []int64
	if batch.Packed() {
		positions = sluice.View[int64](batch.PositionIDs)
	}
	pre, post := make([]float32, h), make([]float32, h)
	for r := range rows {
		state := f.o.Seed
		for c := range cols {
			at := r*cols + c
			if attended[at] == 0 {
				break
			}
			if positions != nil && positions[at] == 0 {
				state = f.o.Seed
			}
			state = mix(state, uint64(ids[at]))
			for slot, l := range want.AuxLayers {
				f.hidden(aux[(at*k+slot)*h:][:h], state, l)
			}
			f.hidden(pre, state, f.o.Layers-1)
			normalise(post, pre)
			switch want.Last {
			case sluice.PreNorm:
				copy(last[at*h:], pre)
			case sluice.PostNorm:
				copy(last[at*h:], post)
			}
			if want.Logits {
				for i := range v {
					sum := float32(0)
					for j, p := range post {
						sum += p * head[i*h+j]
					}
					logits[at*v+i] = sum
				}
			}
		}
	}
	out := &sluice.TargetOutput{}
	shape := func(width int) []int64 { return []int64{int64(rows), int64(cols), int64(width)} }
	if aux != nil {
		out.Aux = narrow(f.o.DType, aux, shape(k*h))
	}
	if last != nil {
		out.Last = narrow(f.o.DType, last, shape(h))
	}
	if logits != nil {
		out.Logits = sluice.TensorOf(sluice.Float32, logits, shape(v)...)
	}
	return out
}

// hidden sets dst to the state of a token after a layer. The last layer's is also the last hidden state before the norm.
func (f *Fake) hidden(dst []float32, state uint64, layer int) {
	for j := range dst {
		dst[j] = unit(mix(state, uint64(layer+1)<<32|uint64(j)))
	}
}

// normalise scales to unit root mean square, as a final norm does.
func normalise(dst, src []float32) {
	sum := 1e-6
	for _, v := range src {
		sum += float64(v) * float64(v) / float64(len(src))
	}
	scale := float32(1 / math.Sqrt(sum))
	for i, v := range src {
		dst[i] = v * scale
	}
}

// mix hashes a value into a state (splitmix64's finaliser).
func mix(state, value uint64) uint64 {
	z := state*0x9e3779b97f4a7c15 + value + 0x632be59bd9b4e019
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// unit maps a hash to [-1,1) with 8 significant bits at most, so that bfloat16 holds it exactly.
func unit(z uint64) float32 { return float32(int8(z>>56)) / 128 }

func narrow(dtype sluice.DType, values []float32, shape []int64) sluice.Tensor {
	if dtype == sluice.Float32 {
		return sluice.TensorOf(dtype, values, shape...)
	}
	bits := make([]uint16, len(values))
	for i, v := range values {
		b := math.Float32bits(v)
		bits[i] = uint16((b + 0x7fff + b>>16&1) >> 16)
	}
	return sluice.TensorOf(dtype, bits, shape...)
}

// apply does what the fault says to an output that was right.
func (f Fault) apply(out *sluice.TargetOutput) {
	for _, t := range []*sluice.Tensor{&out.Aux, &out.Last, &out.Logits} {
		if !t.DType.Valid() {
			continue
		}
		*t = reshape(*t, max(1, t.Shape[0]+int64(f.Rows)), max(1, t.Shape[1]+int64(f.Columns)))
		row := t.Bytes() / t.Shape[0]
		for _, r := range f.NaN {
			values := t.Data[int64(r)*row : int64(r+1)*row]
			for i := range values {
				values[i] = 0xff // every bit set is NaN in float32 and in bfloat16
			}
		}
	}
	if f.Change != nil {
		f.Change(out)
	}
}

// reshape cuts or fills up rows and columns.
func reshape(t sluice.Tensor, rows, cols int64) sluice.Tensor {
	if rows == t.Shape[0] && cols == t.Shape[1] {
		return t
	}
	out := sluice.NewTensor(t.DType, rows, cols, t.Shape[2])
	width := t.DType.Size() * t.Shape[2]
	for r := range min(rows, t.Shape[0]) {
		n := min(cols, t.Shape[1]) * width
		copy(out.Data[r*cols*width:][:n], t.Data[r*t.Shape[1]*width:])
	}
	return out
}
