package prompt

import (
	"bytes"
	"context"
	"io"
	"math/bits"
	"math/rand/v2"
)

// readChunk is what one read asks of a file.
const readChunk = 256 << 10

// line is one line that is not blank, without its terminator.
type line struct {
	data     []byte // nil if long; otherwise valid until the next line is scanned, unless it was copied
	length   int64  // in the file, with the terminator
	long     bool   // above the bound; data was dropped
	block    block
	offset   int64 // where it starts in its file
	newlines int64 // between the start of its block and its own start
}

// scanner cuts a byte range of one file into lines. Every step can be cut short by its context and taken up again.
type scanner struct {
	at      io.ReaderAt
	file    *file
	max     int64
	buf     []byte
	r, w    int   // buf[r:w] was read and not yet handed out
	pos     int64 // file offset of buf[r]
	dropped int64 // bytes of a long line that were dropped up to now
}

func (s *scanner) reset(at io.ReaderAt, f *file, pos int64) {
	s.at, s.file, s.pos, s.r, s.w, s.dropped = at, f, pos, 0, 0, 0
}

// fill reads more behind buf[r:w]. There must be more in the file.
func (s *scanner) fill(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if s.r > 0 {
		s.w = copy(s.buf, s.buf[s.r:s.w])
		s.r = 0
	}
	if s.w == len(s.buf) {
		grown := make([]byte, max(readChunk, 2*len(s.buf)))
		copy(grown, s.buf[:s.w])
		s.buf = grown
	}
	at := s.pos + int64(s.w)
	part := s.buf[s.w:]
	part = part[:min(int64(len(part)), s.file.size-at)]
	n, err := s.at.ReadAt(part, at)
	if n < len(part) {
		return shortRead(s.file, at+int64(n), err)
	}
	s.w += n
	return nil
}

func (s *scanner) advance(n int) { s.r += n; s.pos += int64(n) }

// seek goes to the first byte behind a newline, and gives up at limit. It reports whether there was a newline before limit.
func (s *scanner) seek(ctx context.Context, limit int64) (bool, error) {
	for s.pos < limit {
		part := s.buf[s.r:s.w]
		part = part[:min(int64(len(part)), limit-s.pos)]
		if i := bytes.IndexByte(part, '\n'); i >= 0 {
			s.advance(i + 1)
			return true, nil
		}
		s.advance(len(part))
		if s.pos < limit {
			if err := s.fill(ctx); err != nil {
				return false, err
			}
		}
	}
	return false, nil
}

// next returns the next line without its newline, and its length with it; io.EOF at the end of the file.
func (s *scanner) next(ctx context.Context) (data []byte, length int64, long bool, err error) {
	searched := 0
	for {
		if i := bytes.IndexByte(s.buf[s.r+searched:s.w], '\n'); i >= 0 {
			data = s.buf[s.r : s.r+searched+i]
			s.advance(len(data) + 1)
			return s.line(data, 1)
		}
		searched = s.w - s.r
		if s.dropped+int64(searched) > s.max {
			s.dropped += int64(searched)
			s.advance(searched)
			searched = 0
		}
		if s.pos+int64(searched) >= s.file.size {
			if searched == 0 && s.dropped == 0 {
				return nil, 0, false, io.EOF
			}
			data = s.buf[s.r:s.w]
			s.advance(len(data))
			return s.line(data, 0)
		}
		if err := s.fill(ctx); err != nil {
			return nil, 0, false, err
		}
	}
}

func (s *scanner) line(data []byte, terminator int64) ([]byte, int64, bool, error) {
	n := s.dropped + int64(len(data))
	s.dropped = 0
	if n > s.max {
		return nil, n + terminator, true, nil
	}
	return data, n + terminator, false, nil
}

// lineSource gives the lines of one epoch in their order.
type lineSource struct {
	set   *fileSet
	count func(bytes int64)

	order []uint32 // the permuted block numbers; nil in file order
	block int      // the next block, as an index of order

	open     handle // of openFile
	openFile int
	scan     scanner
	cur      block
	inBlock  bool
	seeking  bool  // the first line of the block has not been found yet
	newlines int64 // from the start of the block to scan.pos

	rng       *rand.PCG // nil in file order
	rows      int
	bytes     int64
	buffer    []line
	held      int64 // bytes of the lines in buffer
	ahead     line  // scanned, but did not fit the buffer
	hasAhead  bool
	exhausted bool
}

func newLineSource(set *fileSet, o *Options, count func(int64)) *lineSource {
	return &lineSource{set: set, count: count, openFile: -1, scan: scanner{max: o.MaxLineBytes}, rows: o.BufferRows, bytes: o.BufferBytes}
}

// start begins an epoch. The order is made of PCG's raw output only, which is fixed for good, and of no helper that a later Go may draw differently.
func (l *lineSource) start(o *Options, epoch int64) {
	l.block, l.inBlock, l.exhausted, l.hasAhead = 0, false, false, false
	if !o.Shuffle {
		return
	}
	l.rng = rand.NewPCG(o.Seed, uint64(epoch))
	if l.order == nil {
		l.order = make([]uint32, l.set.blocks)
	}
	for i := range l.order {
		l.order[i] = uint32(i)
	}
	for i := len(l.order) - 1; i > 0; i-- {
		j := draw(l.rng, i+1)
		l.order[i], l.order[j] = l.order[j], l.order[i]
	}
}

// draw returns a uniform number in [0, n), by Lemire's method.
func draw(rng *rand.PCG, n int) int {
	hi, lo := bits.Mul64(rng.Uint64(), uint64(n))
	if lo < uint64(n) {
		for threshold := -uint64(n) % uint64(n); lo < threshold; {
			hi, lo = bits.Mul64(rng.Uint64(), uint64(n))
		}
	}
	return int(hi)
}

// next returns the next line, or io.EOF at the end of the epoch. Its data is valid until the next call.
func (l *lineSource) next(ctx context.Context) (line, error) {
	if l.rng == nil {
		return l.scanLine(ctx)
	}
	for !l.exhausted {
		if !l.hasAhead {
			ln, err := l.scanLine(ctx)
			if err == io.EOF { //nolint:errorlint // an error that wraps io.EOF is no end
				l.exhausted = true
				break
			}
			if err != nil {
				return line{}, err
			}
			l.ahead, l.hasAhead = ln, true
		}
		// A long line counts with its full length although it is not held: the order must not depend on MaxLineBytes.
		if len(l.buffer) == l.rows || (len(l.buffer) > 0 && l.held+l.ahead.length > l.bytes) {
			break
		}
		l.ahead.data = bytes.Clone(l.ahead.data)
		l.buffer = append(l.buffer, l.ahead)
		l.held += l.ahead.length
		l.ahead, l.hasAhead = line{}, false
	}
	if len(l.buffer) == 0 {
		return line{}, io.EOF
	}
	last := len(l.buffer) - 1
	i := draw(l.rng, len(l.buffer))
	ln := l.buffer[i]
	l.buffer[i] = l.buffer[last]
	l.buffer[last] = line{}
	l.buffer = l.buffer[:last]
	l.held -= ln.length
	return ln, nil
}

// scanLine returns the next line of the blocks in their order.
func (l *lineSource) scanLine(ctx context.Context) (line, error) {
	for {
		if !l.inBlock {
			if l.block == l.set.blocks {
				return line{}, io.EOF
			}
			if err := l.enter(); err != nil {
				return line{}, err
			}
		}
		if l.seeking {
			// A line belongs to the block where it starts. One byte before the block tells whether a line starts right at it.
			found, err := l.scan.seek(ctx, l.cur.end-1)
			if err != nil {
				return line{}, err
			}
			l.seeking = false
			if !found {
				if err := l.leave(); err != nil {
					return line{}, err
				}
				continue
			}
			if l.scan.pos > l.cur.start {
				l.newlines = 1
			}
		}
		if l.scan.pos >= l.cur.end && l.scan.dropped == 0 {
			if err := l.leave(); err != nil {
				return line{}, err
			}
			continue
		}
		offset := l.scan.pos - l.scan.dropped
		data, n, long, err := l.scan.next(ctx)
		if err != nil {
			return line{}, err
		}
		ln := line{data: data, length: n, long: long, block: l.cur, offset: offset, newlines: l.newlines}
		l.newlines++
		l.count(n)
		if !long {
			if offset == 0 {
				ln.data = bytes.TrimPrefix(ln.data, []byte("\xef\xbb\xbf"))
			}
			ln.data = bytes.Trim(ln.data, " \t\r")
			if len(ln.data) == 0 {
				continue
			}
		}
		return ln, nil
	}
}

func (l *lineSource) enter() error {
	n := l.block
	if l.order != nil {
		n = int(l.order[n])
	}
	b := l.set.block(n)
	if b.file != l.openFile {
		if err := l.close(); err != nil {
			return err
		}
		h, err := l.set.openAgain(b.file)
		if err != nil {
			return err
		}
		l.open, l.openFile = h, b.file
	} else if err := l.set.unchanged(b.file); err != nil {
		return err
	}
	l.cur, l.inBlock, l.newlines = b, true, 0
	l.seeking = b.start > 0
	l.scan.reset(l.open, &l.set.files[b.file], max(b.start-1, 0))
	l.block++
	return nil
}

func (l *lineSource) leave() error {
	l.inBlock = false
	return l.set.unchanged(l.cur.file)
}

func (l *lineSource) close() error {
	if l.open == nil {
		return nil
	}
	h, i := l.open, l.openFile
	l.open, l.openFile = nil, -1
	if err := h.Close(); err != nil {
		return pathError("prompt: close", l.set.files[i].path, err)
	}
	return nil
}

// lineNumber counts from 1. In a shuffled file it may have to read all that comes before.
func (l *lineSource) lineNumber(ctx context.Context, ln *line) (int64, error) {
	before, err := l.set.newlinesBefore(ctx, ln.block)
	return before + ln.newlines + 1, err
}
