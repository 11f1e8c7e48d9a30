package sluice

import (
	"context"
	"fmt"
)

// Position says where in a prompt stream a row was taken. Source names the stream and everything that fixes its
// order (file, seed, options); Index counts the rows of one epoch in that order, from 0. A producer that restarts asks the queue
// which positions were taken and goes on behind them.
type Position struct {
	Source string `json:"source"`
	Epoch  int64  `json:"epoch"`
	Index  int64  `json:"index"`
}

func (p Position) String() string { return fmt.Sprintf("%s@%d/%d", p.Source, p.Epoch, p.Index) }

// PromptBatch is what a target is run on: token ids that are final, B rows of S tokens, right-padded.
//
// The last three tensors describe packing (several documents in one row) and are all set or all zero.
type PromptBatch struct {
	InputIDs      Tensor // int64 [B,S]
	AttentionMask Tensor // int64 [B,S], 1 on tokens, 0 on padding
	LossMask      Tensor // int64 [B,S], 1 on tokens that supervise the draft

	PositionIDs  Tensor // int64 [B,S], restarting at 0 with every document
	SeqLens      Tensor // int64 [B,docs], the documents' lengths, filled up with 0
	DocRemaining Tensor // int64 [B,S], real tokens after this one in its document, 0 on padding

	Positions []Position // where the rows (or the documents packed in them) come from
}

// Packed reports whether the batch carries the packing tensors.
func (b *PromptBatch) Packed() bool { return b.PositionIDs.DType.Valid() }

// Validate checks shapes and dtypes, that the packing tensors are all there or all absent, and that they were not swapped:
// position ids restart at document starts, seq_lens add up to the attended tokens, doc_remaining counts down
// to zero. Ids must lie in [0, vocab) where vocab is above zero.
func (b *PromptBatch) Validate(vocab int64) error {
	bad := func(field, detail string) error {
		return &Error{Kind: Invalid, Op: "prompt batch", Subject: field, Detail: detail}
	}
	if len(b.InputIDs.Shape) != 2 || b.InputIDs.DType != Int64 {
		return bad("input_ids", fmt.Sprintf("is %s, want int64 [B,S]", b.InputIDs.Spec))
	}
	rows, cols := b.InputIDs.Shape[0], b.InputIDs.Shape[1]
	if rows == 0 || cols == 0 {
		return bad("input_ids", fmt.Sprintf("is %s, want at least one row and one token", b.InputIDs.Spec))
	}
	check := func(field string, t Tensor, want ...int64) error {
		if t.DType != Int64 || len(t.Shape) != 2 || t.Shape[0] != want[0] || (len(want) > 1 && t.Shape[1] != want[1]) {
			shape := fmt.Sprintf("[%d,%d] like input_ids", rows, cols)
			if len(want) == 1 {
				shape = fmt.Sprintf("[%d,docs]", rows)
			}
			return bad(field, fmt.Sprintf("is %s, want int64 %s", t.Spec, shape))
		}
		if err := t.Validate(); err != nil {
			return bad(field, err.Error())
		}
		if !t.aligned() {
			return bad(field, "begins at an address that is no multiple of 8, want data that is aligned to its elements")
		}
		return nil
	}
	for _, f := range []struct {
		name string
		t    Tensor
	}{{"input_ids", b.InputIDs}, {"attention_mask", b.AttentionMask}, {"loss_mask", b.LossMask}} {
		if err := check(f.name, f.t, rows, cols); err != nil {
			return err
		}
	}
	ids, attn, loss := View[int64](b.InputIDs), View[int64](b.AttentionMask), View[int64](b.LossMask)
	for i := range ids {
		switch {
		case ids[i] < 0 || (vocab > 0 && ids[i] >= vocab):
			return bad("input_ids", fmt.Sprintf("row %d, token %d: id %d is outside the vocabulary of %d", int64(i)/cols, int64(i)%cols, ids[i], vocab))
		case attn[i] != 0 && attn[i] != 1:
			return bad("attention_mask", fmt.Sprintf("row %d, token %d: %d, want 0 or 1", int64(i)/cols, int64(i)%cols, attn[i]))
		case loss[i] != 0 && loss[i] != 1:
			return bad("loss_mask", fmt.Sprintf("row %d, token %d: %d, want 0 or 1", int64(i)/cols, int64(i)%cols, loss[i]))
		case loss[i] == 1 && attn[i] == 0:
			return bad("loss_mask", fmt.Sprintf("row %d, token %d: supervised but not attended", int64(i)/cols, int64(i)%cols))
		case int64(i)%cols > 0 && attn[i] == 1 && attn[i-1] == 0:
			return bad("attention_mask", fmt.Sprintf("row %d, token %d: a token after padding; rows must be padded at the right", int64(i)/cols, int64(i)%cols))
		}
	}
	n := 0
	for _, t := range []Tensor{b.PositionIDs, b.SeqLens, b.DocRemaining} {
		if t.DType.Valid() {
			n++
		}
	}
	switch n {
	case 0:
		return nil
	case 3:
		return b.validatePacking(rows, cols, attn, check, bad)
	}
	return bad("position_ids, seq_lens, doc_remaining", fmt.Sprintf("%d of the three are set; packing needs all three or none", n))
}

func (b *PromptBatch) validatePacking(rows, cols int64, attn []int64, check func(string, Tensor, ...int64) error, bad func(string, string) error) error {
	if err := check("position_ids", b.PositionIDs, rows, cols); err != nil {
		return err
	}
	if err := check("seq_lens", b.SeqLens, rows); err != nil {
		return err
	}
	if err := check("doc_remaining", b.DocRemaining, rows, cols); err != nil {
		return err
	}
	pos, lens, rem, docs := View[int64](b.PositionIDs), View[int64](b.SeqLens), View[int64](b.DocRemaining), b.SeqLens.Shape[1]
	for r := range rows {
		t, ended := int64(0), false
		for d := range docs {
			n := lens[r*docs+d]
			switch {
			case n == 0:
				ended = true
				continue
			case n < 0 || ended || n > cols-t:
				return bad("seq_lens", fmt.Sprintf("row %d: entry %d is %d, with %d of %d tokens already taken; want positive lengths, then zeros", r, d, n, t, cols))
			}
			for i := range n {
				switch at := r*cols + t + i; {
				case attn[at] != 1:
					return bad("seq_lens", fmt.Sprintf("row %d: document %d covers token %d, which attention_mask calls padding", r, d, t+i))
				case pos[at] != i:
					return bad("position_ids", fmt.Sprintf("row %d, token %d: %d, want %d in document %d (are packing fields swapped?)", r, t+i, pos[at], i, d))
				case rem[at] != n-1-i:
					return bad("doc_remaining", fmt.Sprintf("row %d, token %d: %d, want %d in document %d (are packing fields swapped?)", r, t+i, rem[at], n-1-i, d))
				}
			}
			t += n
		}
		if t < cols && attn[r*cols+t] == 1 {
			return bad("seq_lens", fmt.Sprintf("row %d: the lengths add up to %d, but token %d is attended", r, t, t))
		}
		for ; t < cols; t++ {
			if rem[r*cols+t] != 0 {
				return bad("doc_remaining", fmt.Sprintf("row %d, token %d: %d on padding, want 0", r, t, rem[r*cols+t]))
			}
		}
	}
	return nil
}

// Norm says whether the target's final norm was applied to the last hidden state. Feeding a pre-norm state to the head gives logits that look
// plausible and are wrong, so nothing here ever guesses it.
type Norm string

const (
	NoLast   Norm = ""     // the last hidden state is not wanted
	PreNorm  Norm = "pre"  // the residual stream after the last layer
	PostNorm Norm = "post" // after the final norm: what the head multiplies
)

// Want names the outputs that a forward shall return.
type Want struct {
	// AuxLayers are decoder layers in the "hf" numbering: i is the output of decoder layer i, counted from 0, so it is
	// Hugging Face's hidden_states[i+1] and vLLM's id i+1; -1 is the embedding output. The states are concatenated
	// along the last axis in the order given.
	AuxLayers []int
	Last      Norm
	Logits    bool
}

// TargetInfo describes a target model.
type TargetInfo struct {
	Name        string // for people
	Fingerprint string // of the weights: equal fingerprints give equal outputs
	Tokenizer   string // fingerprint of the tokenizer and the chat template
	Layers      int    // decoder layers
	HiddenSize  int64  // H
	VocabSize   int64  // V
	MaxTokens   int64  // longest row it takes, in tokens
	DType       DType  // of aux and last hidden states
	Concurrent  bool   // whether Forward may be called again before it returned
}

// DefaultAuxLayers is the choice of three layers (low, middle, high) that EAGLE-3 trainers expect, in "hf" numbering: 1, N/2-1, N-4. It is nil
// for a target of less than seven layers, where these are not three layers in ascending order.
func (i TargetInfo) DefaultAuxLayers() []int {
	if i.Layers < 7 {
		return nil
	}
	return []int{1, i.Layers/2 - 1, i.Layers - 4}
}

// TargetOutput holds what Want asked for, row t = position t (no shift). What was not asked for is a zero Tensor.
// The caller owns the memory.
type TargetOutput struct {
	Aux    Tensor // [B,S,K*H]
	Last   Tensor // [B,S,H]
	Logits Tensor // float32 [B,S,V]
}

// Target runs the frozen model. Values at padded positions are unspecified, but finite.
//
// Forward must not be called again before it returned unless Info().Concurrent says so. An output that cannot be right (wrong
// rows, wrong ids, not finite) is ErrTargetFault, never data.
type Target interface {
	Info() TargetInfo
	Forward(ctx context.Context, batch *PromptBatch, want Want) (*TargetOutput, error)
	Close() error
}

// Message is one turn of a conversation.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// Tokenizer turns a conversation into token ids with the target's own template. The loss mask is 1 on the tokens of
// assistant turns. It is implemented by targets that tokenise; for others, token ids come in from outside.
type Tokenizer interface {
	Encode(conversation []Message) (ids, lossMask []int64, err error)
}
