package queue

import (
	"slices"
	"sort"

	"github.com/sluice-ml/sluice"
)

// stream names one pass over one source.
type stream struct {
	source string
	epoch  int64
}

// chunkRanges bounds what an insertion in the middle has to move.
const chunkRanges = 256

// rangeSet is a set of indexes as merged half-open ranges: sorted chunks of sorted ranges. What producers put is nearly always the next
// index, so a set is normally a handful of ranges however long the stream.
type rangeSet struct {
	chunks [][][2]int64 // none is empty
}

func (s *rangeSet) add(index int64) { s.addRange(index, index+1) }

// addRange adds [lo, hi).
func (s *rangeSet) addRange(lo, hi int64) {
	if len(s.chunks) == 0 {
		s.chunks = [][][2]int64{{{lo, hi}}}
		return
	}
	// c is the last chunk that begins at or before lo, and i the last range in it that does.
	c := max(sort.Search(len(s.chunks), func(c int) bool { return s.chunks[c][0][0] > lo })-1, 0)
	chunk := s.chunks[c]
	i := sort.Search(len(chunk), func(i int) bool { return chunk[i][0] > lo }) - 1
	if i >= 0 && chunk[i][1] >= lo {
		if chunk[i][1] >= hi {
			return
		}
		chunk[i][1] = hi
	} else {
		i++
		chunk = slices.Insert(chunk, i, [2]int64{lo, hi})
		s.chunks[c] = chunk
	}
	s.absorb(c, i)
	if chunk = s.chunks[c]; len(chunk) > chunkRanges {
		half := len(chunk) / 2
		s.chunks = slices.Insert(s.chunks, c+1, slices.Clone(chunk[half:]))
		s.chunks[c] = chunk[:half:half]
	}
}

// absorb merges what follows the range i of chunk c as far as it touches it.
func (s *rangeSet) absorb(c, i int) {
	r := &s.chunks[c][i]
	chunk := s.chunks[c]
	j := i + 1
	for j < len(chunk) && chunk[j][0] <= r[1] {
		r[1] = max(r[1], chunk[j][1])
		j++
	}
	end := j == len(chunk)
	s.chunks[c] = slices.Delete(chunk, i+1, j)
	for end && c+1 < len(s.chunks) && s.chunks[c+1][0][0] <= r[1] {
		next := s.chunks[c+1]
		k := 0
		for k < len(next) && next[k][0] <= r[1] {
			r[1] = max(r[1], next[k][1])
			k++
		}
		if end = k == len(next); end {
			s.chunks = slices.Delete(s.chunks, c+1, c+2)
		} else {
			s.chunks[c+1] = slices.Delete(next, 0, k)
		}
	}
}

func (s *rangeSet) ranges() [][2]int64 { return slices.Concat(s.chunks...) }

// maxPositions bounds the positions of one put: the documents packed into it.
const maxPositions = 1 << 16

func checkPositions(positions []sluice.Position) error {
	bad := func(detail string) error {
		return &sluice.Error{Kind: sluice.Invalid, Op: "queue: put", Subject: "positions", Detail: detail}
	}
	if len(positions) > maxPositions {
		return bad("are more than 65536")
	}
	for i := range positions {
		p := &positions[i]
		if len(p.Source) > 4096 || p.Epoch < 0 || p.Index < 0 || p.Epoch >= 1<<53 || p.Index >= 1<<53 {
			return bad("want a source of at most 4096 bytes, and an epoch and an index from 0 up to 2^53, got " + clean(p.String(), 200))
		}
	}
	return nil
}

func (q *Queue) take(positions []sluice.Position) {
	for i := range positions {
		p := &positions[i]
		set := q.taken[stream{p.Source, p.Epoch}]
		if set == nil {
			set = new(rangeSet)
			q.taken[stream{p.Source, p.Epoch}] = set
		}
		set.add(p.Index)
	}
}
