package prompt

import (
	"slices"

	"github.com/sluice-ml/sluice"
)

// row is one admitted line.
type row struct {
	ids        []int64
	mask       []byte
	supervised int64
	pos        sluice.Position
}

func (r *row) tokens() int64 { return int64(len(r.ids)) }

// bytes is what a row takes in memory.
func (r *row) bytes() int64 { return 9 * r.tokens() }

// grouper decides which rows make a batch. Every group is a list of batch rows, and a batch row is a list of documents.
type grouper interface {
	add(r *row)
	// take returns a group that is ready, or with flush whatever is left, or nil.
	take(flush bool) [][]*row
}

func newGrouper(o *Options) grouper {
	switch {
	case o.PackTokens > 0:
		return &packer{rows: o.Rows, limit: o.PackTokens, smallest: o.MinTokens, maxBins: o.PackBins}
	case o.Bucket > 0:
		return &bucketer{rows: o.Rows, ahead: o.Bucket, bytes: o.BufferBytes}
	}
	return &inOrder{rows: o.Rows}
}

// inOrder groups rows as they come.
type inOrder struct {
	rows int
	next [][]*row
}

func (g *inOrder) add(r *row) { g.next = append(g.next, []*row{r}) }

func (g *inOrder) take(flush bool) [][]*row {
	if len(g.next) == 0 || len(g.next) < g.rows && !flush {
		return nil
	}
	out := g.next
	g.next = nil
	return out
}

// bucketer holds rows sorted by length, and makes each group around the oldest of them.
type bucketer struct {
	rows, ahead int
	bytes, held int64
	pool        []*row // by length, then by age
}

func (g *bucketer) add(r *row) {
	i, _ := slices.BinarySearchFunc(g.pool, r, func(a, b *row) int {
		if a.tokens() != b.tokens() {
			return int(a.tokens() - b.tokens())
		}
		return int(a.pos.Index - b.pos.Index)
	})
	g.pool = slices.Insert(g.pool, i, r)
	g.held += r.bytes()
}

func (g *bucketer) take(flush bool) [][]*row {
	full := len(g.pool) >= g.ahead || g.held >= g.bytes && len(g.pool) >= g.rows
	if len(g.pool) == 0 || !full && !flush {
		return nil
	}
	oldest := 0
	for i, r := range g.pool {
		if r.pos.Index < g.pool[oldest].pos.Index {
			oldest = i
		}
	}
	// Of all neighbourhoods of the oldest row, the one that needs least padding.
	n := min(g.rows, len(g.pool))
	best, least := -1, int64(0)
	for start := max(0, oldest-n+1); start <= oldest && start+n <= len(g.pool); start++ {
		padding, longest := int64(0), g.pool[start+n-1].tokens()
		for _, r := range g.pool[start : start+n] {
			padding += longest - r.tokens()
		}
		if best < 0 || padding < least {
			best, least = start, padding
		}
	}
	taken := slices.Clone(g.pool[best : best+n])
	g.pool = slices.Delete(g.pool, best, best+n)
	slices.SortFunc(taken, func(a, b *row) int { return int(a.pos.Index - b.pos.Index) })
	out := make([][]*row, n)
	for i, r := range taken {
		out[i] = []*row{r}
		g.held -= r.bytes()
	}
	return out
}

// packer puts documents first-fit into a bounded number of open bins.
type packer struct {
	rows, maxBins   int
	limit, smallest int64
	open            []*bin // oldest first
	closed          [][]*row
}

type bin struct {
	docs []*row
	used int64
}

func (g *packer) add(r *row) {
	for i, b := range g.open {
		if b.used+r.tokens() <= g.limit {
			b.docs = append(b.docs, r)
			b.used += r.tokens()
			if g.limit-b.used < g.smallest {
				g.close(i)
			}
			return
		}
	}
	// No bin waits for ever: what fits nowhere opens a bin, and one bin too many closes the oldest.
	g.open = append(g.open, &bin{docs: []*row{r}, used: r.tokens()})
	if last := len(g.open) - 1; g.limit-r.tokens() < g.smallest {
		g.close(last)
	} else if len(g.open) > g.maxBins {
		g.close(0)
	}
}

func (g *packer) close(i int) {
	g.closed = append(g.closed, g.open[i].docs)
	g.open = slices.Delete(g.open, i, i+1)
}

func (g *packer) take(flush bool) [][]*row {
	for flush && len(g.open) > 0 {
		g.close(0)
	}
	if len(g.closed) == 0 || len(g.closed) < g.rows && !flush {
		return nil
	}
	n := min(g.rows, len(g.closed))
	out := slices.Clone(g.closed[:n])
	g.closed = slices.Delete(g.closed, 0, n)
	return out
}

// build makes the tensors. It returns the padding with them.
func build(group [][]*row, o *Options) (batch *sluice.PromptBatch, padding int64) {
	packed := o.PackTokens > 0
	var cols, docs, tokens int64
	n := 0
	for _, r := range group {
		length := int64(0)
		for _, d := range r {
			length += d.tokens()
		}
		cols, docs = max(cols, length), max(docs, int64(len(r)))
		tokens += length
		n += len(r)
	}
	cols = (cols + o.PadMultiple - 1) / o.PadMultiple * o.PadMultiple
	rows := int64(len(group))
	b := &sluice.PromptBatch{
		InputIDs:      sluice.NewTensor(sluice.Int64, rows, cols),
		AttentionMask: sluice.NewTensor(sluice.Int64, rows, cols),
		LossMask:      sluice.NewTensor(sluice.Int64, rows, cols),
		Positions:     make([]sluice.Position, 0, n),
	}
	ids, attn, loss := sluice.View[int64](b.InputIDs), sluice.View[int64](b.AttentionMask), sluice.View[int64](b.LossMask)
	var pos, rem, lens []int64
	if packed {
		b.PositionIDs = sluice.NewTensor(sluice.Int64, rows, cols)
		b.SeqLens = sluice.NewTensor(sluice.Int64, rows, docs)
		b.DocRemaining = sluice.NewTensor(sluice.Int64, rows, cols)
		pos, rem, lens = sluice.View[int64](b.PositionIDs), sluice.View[int64](b.DocRemaining), sluice.View[int64](b.SeqLens)
	}
	for i, r := range group {
		at := int64(i) * cols
		for k, d := range r {
			b.Positions = append(b.Positions, d.pos)
			copy(ids[at:], d.ids)
			for t, m := range d.mask {
				attn[at+int64(t)] = 1
				loss[at+int64(t)] = int64(m)
			}
			if packed {
				lens[int64(i)*docs+int64(k)] = d.tokens()
				for t := range d.tokens() {
					pos[at+t] = t
					rem[at+t] = d.tokens() - 1 - t
				}
			}
			at += d.tokens()
		}
		if o.PadID != 0 {
			for end := int64(i+1) * cols; at < end; at++ {
				ids[at] = o.PadID
			}
		}
	}
	return b, rows*cols - tokens
}
