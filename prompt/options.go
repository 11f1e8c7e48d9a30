package prompt

import (
	"fmt"
	"io/fs"

	"github.com/sluice-ml/sluice"
)

// Endless, as the number of epochs, never ends.
const Endless = -1

// Defaults of Options.
const (
	DefaultBlockBytes   = 4 << 20
	DefaultBufferRows   = 4096
	DefaultBufferBytes  = 64 << 20
	DefaultMaxLineBytes = 16 << 20
	DefaultPackBins     = 16
)

// BadPolicy says what a bad line does.
type BadPolicy int

const (
	FailOnBad BadPolicy = iota // the stream ends with the error
	SkipBad                    // the line is counted, reported to OnSkip, and passed over
)

// LongPolicy says what becomes of a row of more than MaxTokens tokens.
type LongPolicy int

const (
	TruncateLong LongPolicy = iota // the first MaxTokens are kept
	SkipLong                       // the row is skipped and counted
)

// Options says what to read and how. Files is the one field that must be set.
type Options struct {
	// Files are read in this order, or shuffled together. They must be regular files. A file may be named twice.
	Files []string

	// FS is where the files are; nil means the operating system's, with Files as paths. Its files must implement [io.ReaderAt].
	FS fs.FS

	// Tokenizer encodes conversations. Without one, lines must carry token ids. It is called from Next, one call at a time.
	Tokenizer sluice.Tokenizer

	// Vocab is the target's vocabulary size: an id at or above it makes a bad line. 0 leaves only the bound of 2^53.
	Vocab int64

	// Shuffle draws the order of lines from Seed and the epoch; otherwise lines come as they stand.
	Shuffle     bool
	Seed        uint64
	BlockBytes  int64 // size of the blocks whose order is permuted; default 4 MiB
	BufferRows  int   // lines in the shuffle buffer, at most; default 4096
	BufferBytes int64 // bytes in the shuffle buffer, and in Bucket's look-ahead, at most; default 64 MiB

	// Epochs is the number of passes over the files: 0 means 1, Endless means no end. Epochs count from 0; with FirstEpoch
	// the epochs before it are taken as done, so that Epochs 3 and FirstEpoch 2 give the last of three.
	Epochs     int64
	FirstEpoch int64

	// Skip is asked before a line is parsed. Lines for which it says true are counted as Taken. It is called from Next.
	Skip func(sluice.Position) bool

	MaxTokens int64 // longest row; 0 means PackTokens where that is set, otherwise no limit
	MinTokens int64 // shortest row, counted after truncation; default 1
	Long      LongPolicy

	// MaxLineBytes bounds a line. A longer one is a bad line, and is never held in memory. Default 16 MiB.
	MaxLineBytes int64

	// OnBad says whether a bad line is fatal, which is the default. OnSkip, if set, is told of every bad line that SkipBad passes over; it is
	// called from Next. To name the line of a shuffled file its newlines must be counted: over its life a Reader with OnSkip reads the files up to once more for that.
	OnBad  BadPolicy
	OnSkip func(error)

	Rows        int   // B, rows a batch; default 1. The last batch of an epoch may have fewer
	PadID       int64 // the id on padding
	PadMultiple int64 // S is a multiple of it; default 1

	// Bucket is the number of rows to look ahead for rows of similar length; 0 turns that off. Each batch is built around the row
	// that has waited longest, so that no row is held for longer than Bucket batches.
	Bucket int

	// PackTokens is the length of rows into which several documents are packed; 0 turns packing off. A document goes into the first of at most
	// PackBins open rows (default 16) that has room. In packed rows the loss mask of each document's first token is 0: a shift by one would make it
	// the label of the document before it.
	PackTokens int64
	PackBins   int
}

func (o *Options) normalise() error {
	bad := func(field, detail, hint string) error {
		return &sluice.Error{Kind: sluice.Invalid, Op: "prompt: open", Subject: field, Detail: detail, Hint: hint}
	}
	if len(o.Files) == 0 {
		return bad("Files", "is empty, want at least one JSONL file", "")
	}
	for _, f := range []struct {
		name string
		v    int64
	}{
		{"Vocab", o.Vocab}, {"BlockBytes", o.BlockBytes}, {"BufferRows", int64(o.BufferRows)}, {"BufferBytes", o.BufferBytes},
		{"FirstEpoch", o.FirstEpoch}, {"MaxTokens", o.MaxTokens}, {"MinTokens", o.MinTokens}, {"MaxLineBytes", o.MaxLineBytes}, {"Rows", int64(o.Rows)},
		{"PadID", o.PadID}, {"PadMultiple", o.PadMultiple}, {"Bucket", int64(o.Bucket)}, {"PackTokens", o.PackTokens}, {"PackBins", int64(o.PackBins)},
	} {
		if f.v < 0 {
			return bad(f.name, fmt.Sprintf("is %d, want 0 or more", f.v), "")
		}
	}
	if o.Epochs < Endless {
		return bad("Epochs", fmt.Sprintf("is %d, want a number of passes, or Endless (%d)", o.Epochs, Endless), "")
	}
	fill(&o.BlockBytes, DefaultBlockBytes)
	fill(&o.BufferRows, DefaultBufferRows)
	fill(&o.BufferBytes, DefaultBufferBytes)
	fill(&o.MaxLineBytes, DefaultMaxLineBytes)
	fill(&o.PackBins, DefaultPackBins)
	fill(&o.Epochs, 1)
	fill(&o.MinTokens, 1)
	fill(&o.Rows, 1)
	fill(&o.PadMultiple, 1)
	fill(&o.MaxTokens, o.PackTokens)
	if o.MaxLineBytes > 1<<30 {
		return bad("MaxLineBytes", fmt.Sprintf("is %d, want at most 1 GiB", o.MaxLineBytes), "")
	}
	if o.Epochs != Endless && o.FirstEpoch > o.Epochs {
		return bad("FirstEpoch", fmt.Sprintf("is %d, want at most Epochs (%d)", o.FirstEpoch, o.Epochs), "")
	}
	switch o.OnBad {
	case FailOnBad, SkipBad:
	default:
		return bad("OnBad", fmt.Sprintf("is %d, want FailOnBad or SkipBad", o.OnBad), "")
	}
	switch o.Long {
	case TruncateLong, SkipLong:
	default:
		return bad("Long", fmt.Sprintf("is %d, want TruncateLong or SkipLong", o.Long), "")
	}
	if o.Vocab > 0 && o.PadID >= o.Vocab {
		return bad("PadID", fmt.Sprintf("is %d, want less than the vocabulary size %d", o.PadID, o.Vocab), "")
	}
	if o.MaxTokens > 0 && o.MinTokens > o.MaxTokens {
		return bad("MinTokens", fmt.Sprintf("is %d, above MaxTokens (%d): no row could pass", o.MinTokens, o.MaxTokens), "")
	}
	if o.PackTokens > 0 && o.MaxTokens > o.PackTokens {
		return bad("MaxTokens", fmt.Sprintf("is %d, above PackTokens (%d): such a row would fit nowhere", o.MaxTokens, o.PackTokens), "")
	}
	if o.PackTokens > 0 && o.Bucket > 0 {
		return bad("Bucket", "is set together with PackTokens, want one of the two", "packed rows are of nearly equal length already")
	}
	if o.Bucket > 0 && o.Bucket < o.Rows {
		return bad("Bucket", fmt.Sprintf("is %d, want at least Rows (%d)", o.Bucket, o.Rows), "")
	}
	// Padding must not carry a row over the length that the target was said to take.
	for _, f := range []struct {
		name string
		v    int64
	}{{"MaxTokens", o.MaxTokens}, {"PackTokens", o.PackTokens}} {
		if f.v%o.PadMultiple != 0 {
			down := f.v / o.PadMultiple * o.PadMultiple
			hint := fmt.Sprintf("use %d", down+o.PadMultiple)
			if down > 0 {
				hint = fmt.Sprintf("use %d or %d", down, down+o.PadMultiple)
			}
			return bad(f.name, fmt.Sprintf("is %d, want a multiple of PadMultiple (%d), or padded rows would be longer", f.v, o.PadMultiple), hint)
		}
	}
	return nil
}

func fill[T int | int64](v *T, def T) {
	if *v == 0 {
		*v = def
	}
}
