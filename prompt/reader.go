package prompt

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/sluice-ml/sluice"
)

// Reader is an iterator of prompt batches. It has no goroutine: all work is done in Next. Next may be called from several goroutines,
// one call is served at a time; Stats, Source and Close never wait for it. The callbacks in Options are called from within Next and must not call it.
type Reader struct {
	opts   Options
	set    *fileSet
	source string

	mu     sync.Mutex // guards what follows, held for all of Next
	lines  *lineSource
	parser *lineParser
	groups grouper
	epoch  int64
	index  int64  // of the next line
	seen   counts // of this epoch
	active bool   // the epoch was begun
	flush  bool   // its lines are through, its last groups are not
	failed error  // what ended the stream

	closed  atomic.Bool
	bytes   atomic.Int64
	statsMu sync.Mutex // guards stats
	stats   Stats
}

// counts say whether an epoch was of any use.
type counts struct {
	lines, rows int64
	skipped     map[Reason]int64
}

// Open checks the options and the files. It reads no line yet. The errors are ErrInvalid for an option or a path that is no regular file, ErrNotFound, ErrDenied,
// ErrUnsupported for a file system whose files lack [io.ReaderAt], and ErrUnavailable for other failures of the file system.
func Open(opts Options) (*Reader, error) {
	opts.Files = slices.Clone(opts.Files)
	if err := opts.normalise(); err != nil {
		return nil, err
	}
	blockBytes := opts.BlockBytes
	if !opts.Shuffle {
		blockBytes = 1 << 62 // a file is one block
	}
	set, err := openFiles(opts.FS, opts.Files, blockBytes)
	if err != nil {
		return nil, err
	}
	r := &Reader{opts: opts, set: set, source: set.fingerprint(&opts), parser: newLineParser(opts.Vocab), epoch: opts.FirstEpoch}
	r.groups = newGrouper(&r.opts)
	r.lines = newLineSource(set, &r.opts, func(n int64) { r.bytes.Add(n) })
	r.stats = Stats{EpochBytes: set.size, Epoch: r.epoch, Skipped: map[Reason]int64{}}
	return r, nil
}

// Source is the fingerprint in the positions of all rows: of the files' base names and sizes, their order, and if shuffled the seed and the shuffle options.
func (r *Reader) Source() string { return r.source }

// Next returns the next batch, which the caller owns, or io.EOF behind the last. A cancelled context is reported as ctx.Err() and loses
// nothing: the next call goes on. Any other error ends the stream, and every later call returns it again. After Close it returns ErrClosed.
func (r *Reader) Next(ctx context.Context) (*sluice.PromptBatch, error) {
	r.mu.Lock()
	b, err := r.next(ctx)
	r.mu.Unlock()
	if r.closed.Load() {
		_ = r.release()
		if err != nil {
			err = errClosed()
		}
	}
	return b, err
}

func errClosed() error {
	return &sluice.Error{Kind: sluice.Closed, Op: "prompt: read", Detail: "the reader was closed"}
}

func (r *Reader) next(ctx context.Context) (*sluice.PromptBatch, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if r.closed.Load() {
			return nil, errClosed()
		}
		if r.failed != nil {
			return nil, r.failed
		}
		if group := r.groups.take(r.flush); group != nil {
			return r.build(group), nil
		}
		err := r.step(ctx)
		// Only a cancellation of our own reads comes as ctx.Err() itself; one that a tokenizer reports is wrapped, and its line is spent.
		if err != nil && err != ctx.Err() { //nolint:errorlint // what wraps it is a line's own error
			r.failed = err
			if cerr := r.lines.close(); cerr != nil && err == io.EOF { //nolint:errorlint // an error that wraps io.EOF is no end
				r.failed = cerr
			}
			return nil, r.failed
		}
		if err != nil {
			return nil, err
		}
	}
}

// step takes one line, or goes from one epoch to the next.
func (r *Reader) step(ctx context.Context) error {
	if r.flush {
		r.flush, r.active = false, false
		if r.seen.rows == 0 && r.seen.skipped[Taken] == 0 {
			return r.useless()
		}
		r.epoch++
	}
	if !r.active {
		if r.opts.Epochs != Endless && r.epoch >= r.opts.Epochs {
			return io.EOF
		}
		r.lines.start(&r.opts, r.epoch)
		r.active, r.index, r.seen = true, 0, counts{skipped: map[Reason]int64{}}
		r.count(func(s *Stats) { s.Epoch = r.epoch })
	}
	ln, err := r.lines.next(ctx)
	if err == io.EOF { //nolint:errorlint // an error that wraps io.EOF is no end
		r.flush = true
		return nil
	}
	if err != nil {
		return err
	}
	return r.admit(ctx, &ln)
}

// useless is the error of an epoch without a row: an end of data would be taken for success, and an endless stream would spin.
func (r *Reader) useless() error {
	var why []string
	for _, reason := range []Reason{Bad, Long, Short, Unsupervised} {
		if n := r.seen.skipped[reason]; n > 0 {
			why = append(why, fmt.Sprintf("%d %s", n, reason))
		}
	}
	e := &sluice.Error{Kind: sluice.Invalid, Op: "prompt: read", Subject: r.opts.Files[0], Detail: "holds only blank lines"}
	if len(why) > 0 {
		e.Detail = fmt.Sprintf("not one of %d lines is usable (%s)", r.seen.lines, strings.Join(why, ", "))
	}
	if n := len(r.opts.Files) - 1; n > 0 {
		e.Detail = fmt.Sprintf("and %d more: ", n) + e.Detail
	}
	return e
}

func (r *Reader) count(f func(*Stats)) {
	r.statsMu.Lock()
	f(&r.stats)
	r.statsMu.Unlock()
}

func (r *Reader) skip(why Reason) {
	r.seen.skipped[why]++
	r.count(func(s *Stats) { s.Skipped[why]++ })
}

// admit makes a row of a line, or counts why not.
func (r *Reader) admit(ctx context.Context, ln *line) error {
	pos := sluice.Position{Source: r.source, Epoch: r.epoch, Index: r.index}
	r.index++
	r.seen.lines++
	r.count(func(s *Stats) { s.Lines++ })
	if r.opts.Skip != nil && r.opts.Skip(pos) {
		r.skip(Taken)
		return nil
	}
	if f := r.read(ln); f != nil {
		return r.bad(ctx, ln, f)
	}
	ids, mask := r.parser.ids, r.parser.mask
	if limit := r.opts.MaxTokens; limit > 0 && int64(len(ids)) > limit {
		if r.opts.Long == SkipLong {
			r.skip(Long)
			return nil
		}
		ids, mask = ids[:limit], mask[:limit]
		r.count(func(s *Stats) { s.Truncated++ })
	}
	if int64(len(ids)) < r.opts.MinTokens || len(ids) == 0 {
		r.skip(Short)
		return nil
	}
	// The first token has nothing before it that could predict it.
	later := int64(bytes.Count(mask[1:], []byte{1}))
	if later == 0 {
		r.skip(Unsupervised)
		return nil
	}
	d := &row{ids: slices.Clone(ids), mask: slices.Clone(mask), supervised: later + int64(mask[0]), pos: pos}
	if r.opts.PackTokens > 0 {
		d.mask[0], d.supervised = 0, later
	}
	r.seen.rows++
	r.groups.add(d)
	return nil
}

// read leaves the line's ids and mask in the parser.
func (r *Reader) read(ln *line) *fault {
	p := r.parser
	if ln.long {
		return &fault{detail: fmt.Sprintf("is %d bytes long, want at most %d", ln.length, r.opts.MaxLineBytes), hint: "raise MaxLineBytes if the line is as it should be"}
	}
	if f := p.parse(ln.data); f != nil {
		return f
	}
	if p.turns == nil {
		return nil
	}
	if r.opts.Tokenizer == nil {
		return &fault{detail: "is a conversation, but this target does not tokenise: token ids are needed",
			hint: "give input_ids and loss_mask, made with the target's own tokenizer and chat template"}
	}
	ids, mask, err := r.opts.Tokenizer.Encode(p.turns)
	if err != nil {
		// A tokenizer that is away would otherwise turn a whole epoch into bad lines.
		if k := sluice.KindOf(err); k != "" && k != sluice.Invalid {
			return &fault{detail: "the tokenizer failed", err: err, kind: k}
		}
		return &fault{detail: "the tokenizer refuses the conversation", err: err}
	}
	if len(ids) != len(mask) {
		return faultf("the tokenizer gave %d ids and a loss mask of %d, want equal lengths", len(ids), len(mask))
	}
	for i, id := range ids {
		if id < 0 || uint64(id) >= p.limit {
			return faultf("the tokenizer gave id %d for token %d, want 0 or more and less than %d", id, i, p.limit)
		}
		if mask[i] != 0 && mask[i] != 1 {
			return faultf("the tokenizer gave loss mask %d for token %d, want 0 or 1", mask[i], i)
		}
		p.ids, p.mask = append(p.ids, id), append(p.mask, byte(mask[i]))
	}
	return nil
}

// bad reports a bad line, or passes over it.
func (r *Reader) bad(ctx context.Context, ln *line, f *fault) error {
	if r.opts.OnBad == SkipBad && f.kind == "" {
		r.skip(Bad)
		if r.opts.OnSkip != nil {
			r.opts.OnSkip(r.lineError(ctx, ln, f))
		}
		return nil
	}
	return r.lineError(ctx, ln, f)
}

func (r *Reader) lineError(ctx context.Context, ln *line, f *fault) error {
	e := &sluice.Error{Kind: cmp.Or(f.kind, sluice.Invalid), Op: "prompt: read", Subject: tail(r.set.files[ln.block.file].path), Detail: f.detail, Hint: f.hint, Err: f.err}
	if r.opts.Shuffle {
		e.Detail = fmt.Sprintf("at byte %d: ", ln.offset) + e.Detail
	}
	// Where counting fails or is cancelled, the byte offset says enough: the line's own fault must not be lost over it.
	if n, err := r.lines.lineNumber(ctx, ln); err == nil {
		e.Subject += fmt.Sprintf(":%d", n)
	}
	return e
}

// tail keeps a path short enough for the line number to be shown behind it.
func tail(path string) string {
	const limit = 160
	if len(path) <= limit {
		return path
	}
	return "..." + path[len(path)-limit:]
}

func (r *Reader) build(group [][]*row) *sluice.PromptBatch {
	b, padding := build(group, &r.opts)
	r.count(func(s *Stats) {
		s.Batches++
		s.Padding += padding
		for _, docs := range group {
			for _, d := range docs {
				s.Rows++
				s.Tokens += d.tokens()
				s.Supervised += d.supervised
			}
		}
	})
	return b
}

// All iterates over the batches. An error, ctx.Err() among them, comes once, as the last element; the end of data is the end of the iteration. It
// does not close the Reader, so that another iteration may go on where this one stopped.
func (r *Reader) All(ctx context.Context) iter.Seq2[*sluice.PromptBatch, error] {
	return func(yield func(*sluice.PromptBatch, error) bool) {
		for {
			b, err := r.Next(ctx)
			if err == io.EOF { //nolint:errorlint // an error that wraps io.EOF is no end
				return
			}
			if !yield(b, err) || err != nil {
				return
			}
		}
	}
}

// Close ends the stream. It may be called at any time and any number of times; a Next that is under way returns ErrClosed at its next line, and then gives the file back.
func (r *Reader) Close() error {
	r.closed.Store(true)
	return r.release()
}

// release gives the open file back unless Next holds it: then Next does so, since it looks at closed after it let go of mu.
func (r *Reader) release() error {
	if !r.mu.TryLock() {
		return nil
	}
	defer r.mu.Unlock()
	return r.lines.close()
}
