package demo

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/stream"
)

// books are kept apart from every counter of the stream: what was read from the prompts on one side, what a consumer has acknowledged on the
// other. Rows are known by a hash of their ids and mask.
type books struct {
	mu   sync.Mutex
	rows map[[sha256.Size]byte]int64 // read minus acknowledged
	done map[string]bool             // sample ids that were acknowledged
}

func newBooks() *books {
	return &books{rows: map[[sha256.Size]byte]int64{}, done: map[string]bool{}}
}

func rowHash(ids, lossMask sluice.Tensor) [sha256.Size]byte {
	h := sha256.New()
	h.Write(ids.Data)
	h.Write(lossMask.Data)
	return [sha256.Size]byte(h.Sum(nil))
}

// noting is a source that tells note of every row on its way to the producer.
func noting(s stream.Source, note func(ctx context.Context, row [sha256.Size]byte) error) stream.Source {
	return stream.SourceFunc(func(ctx context.Context) (*sluice.PromptBatch, error) {
		batch, err := s.Next(ctx)
		if err == nil && batch != nil {
			err = note(ctx, rowHash(batch.InputIDs, batch.LossMask))
		}
		return batch, err
	})
}

// read notes a row that was read.
func (b *books) read(row [sha256.Size]byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rows[row]++
}

// acked notes a sample that was acknowledged. At-least-once delivery may do that twice; it counts once.
func (b *books) acked(id string, row [sha256.Size]byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.done[id] {
		b.done[id] = true
		b.rows[row]--
	}
}

// open is how many rows were read and not acknowledged; unknown is how many were acknowledged and never read.
func (b *books) open() int64 { return b.sum(1) }

func (b *books) unknown() int64 { return b.sum(-1) }

func (b *books) sum(sign int64) (n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, v := range b.rows {
		n += max(sign*v, 0)
	}
	return n
}

// checker is the consumer's own opinion of what it gets. It belongs to one goroutine.
type checker struct {
	target    sluice.Target
	auxLayers []int
	store     sluice.Store
	schema    *sluice.Schema
	differs   string // the first difference that was found
}

// tally is what the consumer of a rank has done, or its successors, one after the other.
type tally struct {
	samples, steps int64
	differs        string
}

// seen is a sample that a step will acknowledge.
type seen struct {
	ID     string            `json:"id"`
	Row    [sha256.Size]byte `json:"row"`
	Tokens int64             `json:"tokens"`
}

// check compares every sample of the batch with a forward of its own, bit for bit, and the batch with the samples. It returns what it saw, stand-ins
// left out, since after the step the batch is gone.
func (c *checker) check(ctx context.Context, batch *stream.Batch) ([]seen, error) {
	var all []seen
	for i := range batch.Samples {
		s := &batch.Samples[i]
		one, err := c.checkSample(ctx, batch, s)
		if err != nil {
			return nil, err
		}
		if !s.Pad {
			all = append(all, one)
		}
	}
	return all, nil
}

func (c *checker) checkSample(ctx context.Context, batch *stream.Batch, s *stream.BatchSample) (one seen, err error) {
	stored, err := c.store.Get(ctx, s.Ref)
	if err != nil {
		return one, err
	}
	defer func() { err = errors.Join(err, stored.Release(context.WithoutCancel(ctx))) }()

	direct, err := c.direct(ctx, stored)
	if err != nil {
		return one, err
	}
	for _, f := range stored.Features {
		if want, ok := direct[f.Name]; !ok || !f.Equal(want.Spec) || !bytes.Equal(f.Data, want.Data) {
			c.difference(s.Ref, "feature %s is not what a direct forward gives", f.Name)
		}
		if !c.inBatch(batch, s, f) {
			c.difference(s.Ref, "feature %s came into the batch changed", f.Name)
		}
	}
	ids := c.role(stored, sluice.RoleInputIDs)
	mask := c.role(stored, sluice.RoleLossMask)
	return seen{s.Ref.SampleID(), rowHash(ids, mask), ids.Elements()}, nil
}

// role is the stored feature of a role that every built-in schema has.
func (c *checker) role(t *sluice.Tensors, r sluice.Role) sluice.Tensor {
	f, _ := t.Feature(c.schema.Role(r).Name)
	return f
}

// direct computes the features of a stored sample again, from its token ids alone.
func (c *checker) direct(ctx context.Context, stored *sluice.Tensors) (map[string]sluice.Tensor, error) {
	ids := c.role(stored, sluice.RoleInputIDs)
	mask := c.role(stored, sluice.RoleLossMask)
	attention := sluice.NewTensor(sluice.Int64, ids.Shape...)
	for i := range sluice.View[int64](attention) {
		sluice.View[int64](attention)[i] = 1 // a sample of the demo is one row without padding
	}
	out, err := c.target.Forward(ctx, &sluice.PromptBatch{InputIDs: ids, AttentionMask: attention, LossMask: mask},
		sluice.Want{AuxLayers: c.auxLayers, Last: sluice.PostNorm})
	if err != nil {
		return nil, err
	}
	if c.schema.Role(sluice.RoleAux).FinalLayerNorm == sluice.PostNorm {
		c.postNorm(out)
	}
	features := map[string]sluice.Tensor{}
	for role, t := range map[sluice.Role]sluice.Tensor{
		sluice.RoleInputIDs: ids, sluice.RoleLossMask: mask, sluice.RoleAttentionMask: attention, sluice.RoleAux: out.Aux, sluice.RoleLast: out.Last,
	} {
		if f := c.schema.Role(role); f != nil {
			features[f.Name] = t
		}
	}
	return features, nil
}

// postNorm puts the normed last state in the place of the final layer's among the aux states.
func (c *checker) postNorm(out *sluice.TargetOutput) {
	final := c.target.Info().Layers - 1
	aux, last := sluice.View[float32](out.Aux), sluice.View[float32](out.Last)
	h := int(c.target.Info().HiddenSize)
	for k, layer := range c.auxLayers {
		for t := 0; layer == final && t < len(last)/h; t++ {
			copy(aux[(t*len(c.auxLayers)+k)*h:], last[t*h:(t+1)*h])
		}
	}
}

// inBatch checks that the sample's row of the batch is the feature: moved left by one with zeros behind if the schema says so, zeros on the padding. A stand-in's loss mask must be all zeros.
func (c *checker) inBatch(batch *stream.Batch, s *stream.BatchSample, f sluice.Feature) bool {
	got, ok := batch.Feature(f.Name)
	if !ok || len(got.Shape) < 2 || got.Shape[1] < f.Shape[1] {
		return false
	}
	token := int64(len(f.Data)) / f.Shape[1] // bytes a position; B is 1
	want := make([]byte, token*got.Shape[1])
	sf := c.schema.Feature(f.Name)
	switch {
	case s.Pad && sf.From == sluice.RoleLossMask:
	case sf.Shift:
		copy(want, f.Data[token:])
	default:
		copy(want, f.Data)
	}
	row := int64(len(want))
	return bytes.Equal(got.Data[s.Row*row:(s.Row+1)*row], want)
}

func (c *checker) difference(ref sluice.Ref, format string, args ...any) {
	if c.differs == "" {
		c.differs = ref.SampleID() + ": " + fmt.Sprintf(format, args...)
	}
}
