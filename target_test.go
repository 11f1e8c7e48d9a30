package sluice

import (
	"errors"
	"strings"
	"testing"
)

func ints(rows, cols int64, v ...int64) Tensor { return TensorOf(Int64, v, rows, cols) }

func testBatch() *PromptBatch {
	return &PromptBatch{
		InputIDs:      ints(2, 4, 5, 6, 7, 0, 8, 9, 0, 0),
		AttentionMask: ints(2, 4, 1, 1, 1, 0, 1, 1, 0, 0),
		LossMask:      ints(2, 4, 0, 1, 1, 0, 0, 1, 0, 0),
	}
}

func packedBatch() *PromptBatch {
	return &PromptBatch{
		InputIDs:      ints(1, 6, 5, 6, 7, 8, 9, 0),
		AttentionMask: ints(1, 6, 1, 1, 1, 1, 1, 0),
		LossMask:      ints(1, 6, 0, 1, 1, 0, 1, 0),
		PositionIDs:   ints(1, 6, 0, 1, 2, 0, 1, 0),
		SeqLens:       ints(1, 3, 3, 2, 0),
		DocRemaining:  ints(1, 6, 2, 1, 0, 1, 0, 0),
	}
}

func TestPromptBatchAcceptsRowsAndPackedRows(t *testing.T) {
	t.Parallel()
	if err := testBatch().Validate(10); err != nil {
		t.Error(err)
	}
	if err := packedBatch().Validate(0); err != nil {
		t.Error(err)
	}
	if testBatch().Packed() || !packedBatch().Packed() {
		t.Error("packed and not are confused")
	}
}

func TestPromptBatchRefusesWhatWouldRuinTraining(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		make func() *PromptBatch
		edit func(*PromptBatch)
		want string
	}{
		{"no ids", testBatch, func(b *PromptBatch) { b.InputIDs = Tensor{} }, `"input_ids": is dtype(0)[], want int64 [B,S]`},
		{"float ids", testBatch, func(b *PromptBatch) { b.InputIDs = NewTensor(Float64, 2, 4) }, `"input_ids": is float64[2,4], want int64 [B,S]`},
		{"no rows", testBatch, func(b *PromptBatch) { b.InputIDs = NewTensor(Int64, 0, 4) }, "want at least one row and one token"},
		{"mask shape", testBatch, func(b *PromptBatch) { b.LossMask = NewTensor(Int64, 2, 3) }, `"loss_mask": is int64[2,3], want int64 [2,4] like input_ids`},
		{"short data", testBatch, func(b *PromptBatch) { b.AttentionMask.Data = b.AttentionMask.Data[:8] }, "needs 64 bytes, has 8"},
		{"unaligned data", testBatch, func(b *PromptBatch) { b.LossMask.Data = NewTensor(UInt8, 65).Data[1:] }, `"loss_mask": begins at an address that is no multiple of 8`},
		{"id over the vocabulary", testBatch, func(b *PromptBatch) { View[int64](b.InputIDs)[5] = 10 }, `row 1, token 1: id 10 is outside the vocabulary of 10`},
		{"negative id", testBatch, func(b *PromptBatch) { View[int64](b.InputIDs)[0] = -1 }, "row 0, token 0: id -1"},
		{"mask of 2", testBatch, func(b *PromptBatch) { View[int64](b.LossMask)[1] = 2 }, `"loss_mask": row 0, token 1: 2, want 0 or 1`},
		{"supervised padding", testBatch, func(b *PromptBatch) { View[int64](b.LossMask)[3] = 1 }, "row 0, token 3: supervised but not attended"},
		{"left padding", testBatch, func(b *PromptBatch) { View[int64](b.AttentionMask)[0], View[int64](b.LossMask)[0] = 0, 0 }, "row 0, token 1: a token after padding"},
		{"two of three", packedBatch, func(b *PromptBatch) { b.SeqLens = Tensor{} }, "2 of the three are set; packing needs all three or none"},
		{"swapped", packedBatch, func(b *PromptBatch) { b.PositionIDs, b.DocRemaining = b.DocRemaining, b.PositionIDs }, `"position_ids": row 0, token 0: 2, want 0 in document 0 (are packing fields swapped?)`},
		{"doc_remaining", packedBatch, func(b *PromptBatch) { View[int64](b.DocRemaining)[3] = 2 }, `"doc_remaining": row 0, token 3: 2, want 1 in document 1`},
		{"lengths too long", packedBatch, func(b *PromptBatch) { View[int64](b.SeqLens)[1] = 4 }, `"seq_lens": row 0: entry 1 is 4, with 3 of 6 tokens already taken`},
		{"lengths too short", packedBatch, func(b *PromptBatch) { View[int64](b.SeqLens)[1] = 0 }, `the lengths add up to 3, but token 3 is attended`},
		{"a hole in the lengths", packedBatch, func(b *PromptBatch) { b.SeqLens = ints(1, 3, 3, 0, 2) }, "want positive lengths, then zeros"},
		{"negative length", packedBatch, func(b *PromptBatch) { b.SeqLens = ints(1, 1, -3) }, "entry 0 is -3"},
		{"huge length", packedBatch, func(b *PromptBatch) { b.SeqLens = ints(1, 2, 3, 1<<62) }, "entry 1 is 4611686018427387904"},
		{"covers padding", packedBatch, func(b *PromptBatch) { View[int64](b.SeqLens)[2] = 1 }, "covers token 5, which attention_mask calls padding"},
		{"remaining on padding", packedBatch, func(b *PromptBatch) { View[int64](b.DocRemaining)[5] = 1 }, "row 0, token 5: 1 on padding, want 0"},
		{"rows of seq_lens", packedBatch, func(b *PromptBatch) { b.SeqLens = ints(2, 1, 3, 2) }, `"seq_lens": is int64[2,1], want int64 [1,docs]`},
	} {
		b := tc.make()
		tc.edit(b)
		if err := b.Validate(10); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: got %v, want ...%s...", tc.name, err, tc.want)
		}
	}
}

func TestDefaultAuxLayers(t *testing.T) {
	t.Parallel()
	if got := (TargetInfo{Layers: 32}).DefaultAuxLayers(); got[0] != 1 || got[1] != 15 || got[2] != 28 {
		t.Errorf("32 layers: %v", got)
	}
	for n := range 12 {
		got := (TargetInfo{Layers: n}).DefaultAuxLayers()
		if (got == nil) != (n < 7) || got != nil && (got[0] >= got[1] || got[1] >= got[2] || got[2] >= n) {
			t.Errorf("%d layers: %v", n, got)
		}
	}
}
