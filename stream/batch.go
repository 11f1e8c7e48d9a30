package stream

import (
	"github.com/sluice-ml/sluice"
)

// Batch is what a trainer steps on: collated features, [B,S,...], under the schema's names.
//
// A Batch of a [Loader] belongs to the caller until the next call of Next, Step, Checkpoint, ConsumeNow, Fail or Close. Its tensors may be written to until then, and must
// not be touched afterwards: some are views of memory that is gone. Copy what is to be kept.
type Batch struct {
	Features []sluice.Feature
	// Shift is "1" where flagged features were shifted left by one, "0" where the schema has none.
	Shift string
	// LastNorm is the norm state of the last hidden states; empty where the samples have none (or both), or one of them does not say.
	LastNorm sluice.Norm
	Tokens   int64 // attended tokens (supervised ones where the schema has no attention mask), stand-ins left out
	// SupervisedTokens leaves out stand-ins and the first tokens of documents, which nothing predicts. Samples that came shifted are counted as their loss_mask has it,
	// which in upstream's packed rows includes the first tokens of all documents but a row's first.
	SupervisedTokens int64
	Samples          []BatchSample // in the order of their leases

	aliases bool
	pieces  []*piece
	stepped bool
}

// BatchSample says where a sample lies in a batch, and how it came.
type BatchSample struct {
	Ref        sluice.Ref
	Lease      sluice.LeaseID
	Redelivery int                // deliveries before this one
	Window     *sluice.WindowSlot // where the run deals out windows
	Pad        bool               // a stand-in: its loss_mask and position_mask are 0
	Row        int64              // the batch row in which the sample begins
	Column     int64              // and the column, where samples are packed
}

// Feature returns the tensor with the given name.
func (b *Batch) Feature(name string) (sluice.Tensor, bool) {
	return sluice.FindFeature(b.Features, name)
}

// Bytes is the size of all features.
func (b *Batch) Bytes() (n int64) {
	for i := range b.Features {
		n += int64(len(b.Features[i].Data))
	}
	return n
}

// Clone returns a copy that the loader does not take back.
func (b *Batch) Clone() *Batch {
	c := &Batch{Shift: b.Shift, LastNorm: b.LastNorm, Tokens: b.Tokens, SupervisedTokens: b.SupervisedTokens, Samples: append([]BatchSample(nil), b.Samples...)}
	for _, f := range b.Features {
		t := sluice.NewTensor(f.DType, append([]int64(nil), f.Shape...)...)
		copy(t.Data, f.Data)
		c.Features = append(c.Features, sluice.Feature{Name: f.Name, Tensor: t})
	}
	return c
}
