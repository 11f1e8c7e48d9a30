package queue

import (
	"cmp"
	"encoding/binary"
	"hash/maphash"
	"math/bits"
	"slices"

	"github.com/sluice-ml/sluice"
)

// recent remembers what was added lately, for [memory] at least unless more than limit is added within it. It keeps two generations and lets go of the older one
// as a whole: taking entries out one by one, each long cold, would cost more than the rest of a cycle. Nothing in it is a pointer, so that the garbage collector
// need not look through it, and it keeps nothing else alive.
//
// To add is to append; the index is brought up to date when something is asked for.
type recent[V any] struct {
	young, old ageGroup[V]
	turned     int64
	limit      int
}

type ageGroup[V any] struct {
	list    []remembered[V]
	text    []byte   // of which the values hold spans
	index   []uint32 // open addressing, at most half full: a place in list, plus 1, below 16 bits of its key
	indexed int      // so many of list
}

type remembered[V any] struct {
	key   uint64
	value V
}

// span is a part of a group's text.
type span struct{ from, to uint32 }

const (
	placeBits = 16
	// maxText bounds the text of a group: ids are short, but those of a journal can be anything.
	maxText = 1 << 30
)

func (m *recent[V]) init(limit int) { m.limit = min(max(limit, 2), 1<<placeBits) }

// turn makes room for another, and reports whether the older generation went for it.
func (m *recent[V]) turn(now int64) bool {
	if len(m.young.list) < m.limit/2 && len(m.young.text) <= maxText && now-m.turned < int64(memory) {
		return false
	}
	m.young, m.old, m.turned = m.old, m.young, now
	m.young.list, m.young.text, m.young.indexed = m.young.list[:0], m.young.text[:0], 0
	clear(m.young.index)
	return true
}

// find returns what was added last under k that is the wanted: keys may coincide.
func (m *recent[V]) find(k uint64, wanted func(*ageGroup[V], *V) bool) (v V, ok bool) {
	for _, g := range [...]*ageGroup[V]{&m.young, &m.old} {
		if i := g.find(k, wanted); i >= 0 {
			return g.list[i].value, true
		}
	}
	return v, false
}

func (m *recent[V]) groups() [2]*ageGroup[V] { return [...]*ageGroup[V]{&m.old, &m.young} }

func (m *recent[V]) len() int { return len(m.young.list) + len(m.old.list) }

func (g *ageGroup[V]) add(k uint64, v V) { g.list = append(g.list, remembered[V]{k, v}) }

func (g *ageGroup[V]) find(k uint64, wanted func(*ageGroup[V], *V) bool) int {
	if len(g.list) == 0 {
		return -1
	}
	if len(g.index) < 2*len(g.list) {
		n := max(len(g.index), 16)
		for n < 2*len(g.list) {
			n *= 2
		}
		g.index, g.indexed = make([]uint32, n), 0
	}
	mask := uint64(len(g.index) - 1)
	for ; g.indexed < len(g.list); g.indexed++ {
		k := g.list[g.indexed].key
		at := k & mask
		for g.index[at] != 0 {
			at = (at + 1) & mask
		}
		g.index[at] = uint32(k>>(64-placeBits))<<placeBits | uint32(g.indexed+1)
	}
	found := -1
	for at := k & mask; g.index[at] != 0; at = (at + 1) & mask {
		if slot := g.index[at]; uint64(slot>>placeBits) == k>>(64-placeBits) {
			i := int(slot&(1<<placeBits-1)) - 1
			if r := &g.list[i]; r.key == k && wanted(g, &r.value) {
				found = i // what was added later lies behind
			}
		}
	}
	return found
}

func (g *ageGroup[V]) keep(s string) span {
	from := len(g.text)
	g.text = append(g.text, s...)
	return span{uint32(from), uint32(len(g.text))}
}

func (g *ageGroup[V]) read(s span) []byte { return g.text[s.from:s.to] }

// key is a short key for a lease: its bits are random anyway. What is found under it must still be compared.
func key(id sluice.LeaseID) uint64 { return binary.NativeEndian.Uint64(id[:8]) }

// putKey is one for a put.
func (q *Queue) putKey(id, gen string) uint64 {
	return bits.RotateLeft64(maphash.String(q.seed, id), 1) ^ maphash.String(q.seed, gen)
}

// bygone is what is left of a sample that is done with.
type bygone struct {
	id, gen span
	at      int64
	lsn     uint64
	ending  ending
}

// outcome is what is left of a lease that was settled.
type outcome struct {
	id          sluice.LeaseID
	consumer    int64 // its number
	incarnation int64
	at          int64
	lsn         uint64
	as          verdictCode
	dead        bool
}

// verdictCode is a verdict without a pointer: its place in verdicts.
type verdictCode uint8

var verdicts = [...]sluice.Verdict{sluice.Ack, sluice.Fail, sluice.FailPermanent, sluice.Return}

// codeOf returns the code of a verdict; false if it is none.
func codeOf(v sluice.Verdict) (verdictCode, bool) {
	i := slices.Index(verdicts[:], v)
	return verdictCode(i), i >= 0
}

// goneSieve spares a put, whose generation is nearly always new, the search among those that are gone: what it does not know is not there.
type goneSieve struct {
	words [][2]uint64 // as many as a power of two: four bits for every key, in one word; one word a generation
	young int
}

func (s *goneSieve) init(limit int) { s.words = make([][2]uint64, 1<<bits.Len(uint(limit/16))) }

func (s *goneSieve) turn() {
	s.young = 1 - s.young
	for i := range s.words {
		s.words[i][s.young] = 0
	}
}

func (s *goneSieve) of(k uint64) (words *[2]uint64, bits uint64) {
	return &s.words[k>>32&uint64(len(s.words)-1)], 1<<(k&63) | 1<<(k>>6&63) | 1<<(k>>12&63) | 1<<(k>>18&63)
}

func (s *goneSieve) add(k uint64) {
	words, bits := s.of(k)
	words[s.young] |= bits
}

// knows reports whether k may have been added.
func (s *goneSieve) knows(k uint64) bool {
	words, bits := s.of(k)
	return words[0]&bits == bits || words[1]&bits == bits
}

func (q *Queue) rememberPut(k uint64, id, gen string, b bygone) {
	if q.gone.turn(q.now) {
		q.sieve.turn()
	}
	g := &q.gone.young
	b.id, b.gen = g.keep(id), g.keep(gen)
	g.add(k, b)
	q.sieve.add(k)
}

func (q *Queue) rememberLease(o outcome) {
	q.settled.turn(q.now)
	q.settled.young.add(key(o.id), o)
}

// generation returns what became of a put, of the given key, that is done with and not forgotten.
func (q *Queue) generation(k uint64, id, gen string) (bygone, bool) {
	if !q.sieve.knows(k) {
		return bygone{}, false
	}
	b, ok := q.gone.find(k, func(g *ageGroup[bygone], b *bygone) bool {
		return string(g.read(b.id)) == id && string(g.read(b.gen)) == gen
	})
	return b, ok && b.at >= q.now-int64(memory)
}

// settlement returns what a lease was settled as, if that is not forgotten.
func (q *Queue) settlement(id sluice.LeaseID) (outcome, bool) {
	o, ok := q.settled.find(key(id), func(_ *ageGroup[outcome], o *outcome) bool { return o.id == id })
	return o, ok && o.at >= q.now-int64(memory)
}

// rememberedPuts lists what is not forgotten, oldest first.
func (q *Queue) rememberedPuts() []gonePut {
	var list []gonePut
	for _, g := range q.gone.groups() {
		for i := range g.list {
			if b := &g.list[i].value; b.at >= q.now-int64(memory) {
				list = append(list, gonePut{string(g.read(b.id)), string(g.read(b.gen)), b.ending, b.at})
			}
		}
	}
	slices.SortFunc(list, func(a, b gonePut) int {
		return cmp.Or(cmp.Compare(a.At, b.At), cmp.Compare(a.ID, b.ID), cmp.Compare(a.Generation, b.Generation))
	})
	return list
}

func (q *Queue) rememberedLeases() []settledLease {
	names := make(map[int64]string, len(q.consumers))
	for name, c := range q.consumers {
		names[c.number] = name
	}
	var list []settledLease
	for _, g := range q.settled.groups() {
		for i := range g.list {
			o := &g.list[i].value
			if name, ok := names[o.consumer]; ok && o.at >= q.now-int64(memory) {
				list = append(list, settledLease{o.id, name, o.incarnation, verdicts[o.as], o.dead, o.at})
			}
		}
	}
	slices.SortFunc(list, func(a, b settledLease) int {
		return cmp.Or(cmp.Compare(a.At, b.At), slices.Compare(a.Lease[:], b.Lease[:]))
	})
	return list
}
