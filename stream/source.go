package stream

import (
	"context"
	"fmt"
	"io"
	"iter"
	"sync"

	"github.com/sluice-ml/sluice"
)

// Source supplies prompt batches. (Upstream's PromptSource.)
//
// Next returns io.EOF at the end; (nil, nil) means the same. A [Pipeline] calls it from one goroutine at a time, and from then on owns the batch. Next must return soon after ctx
// has ended, since the pipeline can't stop before that. A Source that is an io.Closer is closed when the pipeline ends.
type Source interface {
	Next(ctx context.Context) (*sluice.PromptBatch, error)
}

// SourceFunc is a function as a Source.
type SourceFunc func(ctx context.Context) (*sluice.PromptBatch, error)

// Next calls f.
func (f SourceFunc) Next(ctx context.Context) (*sluice.PromptBatch, error) { return f(ctx) }

// FromSeq makes a Source of an iterator. A step of the iterator can't be interrupted by the context; use a [SourceFunc] for one that may wait long.
func FromSeq(seq iter.Seq2[*sluice.PromptBatch, error]) Source {
	return &seqSource{seq: seq}
}

type seqSource struct {
	seq iter.Seq2[*sluice.PromptBatch, error]

	mu     sync.Mutex // guards what follows, and one step at a time
	next   func() (*sluice.PromptBatch, error, bool)
	stop   func()
	closed bool
}

func (s *seqSource) Next(ctx context.Context) (*sluice.PromptBatch, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	if s.closed {
		return nil, io.EOF
	}
	if s.next == nil {
		s.next, s.stop = iter.Pull2(s.seq)
	}
	b, err, ok := s.next()
	if !ok {
		return nil, io.EOF
	}
	return b, err
}

// Close ends the iterator, so that its deferred calls run.
func (s *seqSource) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.stop != nil {
		s.stop()
	}
	return nil
}

// FromTensors makes a Source of a function that returns the three or six tensors of [BatchOf], or none at the end.
func FromTensors(next func(ctx context.Context) ([]sluice.Tensor, error)) Source {
	return SourceFunc(func(ctx context.Context) (*sluice.PromptBatch, error) {
		fields, err := next(ctx)
		if err != nil {
			return nil, err
		}
		if len(fields) == 0 {
			return nil, io.EOF
		}
		return BatchOf(fields...)
	})
}

// BatchOf makes a batch of the tensors input_ids, attention_mask and loss_mask, followed by position_ids, seq_lens and doc_remaining where rows are packed, and checks
// it: packing tensors in the wrong order are refused.
func BatchOf(fields ...sluice.Tensor) (*sluice.PromptBatch, error) {
	if len(fields) != 3 && len(fields) != 6 {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: "prompt batch", Detail: fmt.Sprintf("has %d tensors, want 3 (input_ids, attention_mask, loss_mask) or 6 (position_ids, seq_lens, doc_remaining too)", len(fields))}
	}
	b := &sluice.PromptBatch{InputIDs: fields[0], AttentionMask: fields[1], LossMask: fields[2]}
	if len(fields) == 6 {
		b.PositionIDs, b.SeqLens, b.DocRemaining = fields[3], fields[4], fields[5]
		if !b.PositionIDs.DType.Valid() || !b.SeqLens.DType.Valid() || !b.DocRemaining.DType.Valid() {
			return nil, &sluice.Error{Kind: sluice.Invalid, Op: "prompt batch", Detail: "a packing tensor has no dtype; packing needs all three"}
		}
	}
	if err := b.Validate(0); err != nil {
		return nil, err
	}
	return b, nil
}
