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
// as a whole: taking entries out one by one, each long cold, would cost more than the rest of a cycle. The maps hold places in a list rather than the
// values, so that asking for what is not there, as every put does, touches little memory.
type recent[V any] struct {
	young, old ageGroup[V]
	turned     int64
	limit      int
}

type ageGroup[V any] struct {
	at    map[uint64]int32
	list  []remembered[V]
	sieve []uint64 // a bit for every key, of sixteen times as many: small enough to stay in the cache, and most of what is asked for falls through
}

func (g *ageGroup[V]) bit(k uint64) (word *uint64, bit uint64) {
	return &g.sieve[k/64%uint64(len(g.sieve))], 1 << (k % 64)
}

func (g *ageGroup[V]) get(k uint64) (v V, ok bool) {
	if len(g.list) == 0 {
		return v, false
	}
	if word, bit := g.bit(k); *word&bit == 0 {
		return v, false
	}
	i, ok := g.at[k]
	if ok {
		v = g.list[i].value
	}
	return v, ok
}

type remembered[V any] struct {
	key   uint64
	value V
}

func (m *recent[V]) init(limit int) {
	m.young.at, m.old.at, m.limit = map[uint64]int32{}, map[uint64]int32{}, max(limit, 2)
}

func (m *recent[V]) add(k uint64, v V, now int64) {
	if len(m.young.list) >= m.limit/2 || now-m.turned >= int64(memory) {
		clear(m.old.at)
		clear(m.old.list)
		clear(m.old.sieve)
		m.old.list = m.old.list[:0]
		m.young, m.old, m.turned = m.old, m.young, now
	}
	if m.young.sieve == nil {
		m.young.sieve = make([]uint64, max(m.limit/8, 1))
	}
	word, bit := m.young.bit(k)
	*word |= bit
	m.young.at[k] = int32(len(m.young.list))
	m.young.list = append(m.young.list, remembered[V]{k, v})
}

func (m *recent[V]) get(k uint64) (v V, ok bool) {
	if v, ok = m.young.get(k); !ok {
		v, ok = m.old.get(k)
	}
	return v, ok
}

func (m *recent[V]) len() int { return len(m.young.list) + len(m.old.list) }

// each visits everything, the oldest first.
func (m *recent[V]) each(f func(V)) {
	for _, g := range []*ageGroup[V]{&m.old, &m.young} {
		for i := range g.list {
			if at, ok := g.at[g.list[i].key]; ok && int(at) == i {
				f(g.list[i].value)
			}
		}
	}
}

// key is a short key for a lease: its bits are random anyway. What is found under it must still be compared.
func key(id sluice.LeaseID) uint64 { return binary.NativeEndian.Uint64(id[:8]) }

// putKey is one for a put. Should two puts ever share it, the earlier is forgotten early.
func (q *Queue) putKey(id, gen string) uint64 {
	return bits.RotateLeft64(maphash.String(q.seed, id), 1) ^ maphash.String(q.seed, gen)
}

// bygone is what is left of a sample that is done with.
type bygone struct {
	id, gen string
	at      int64
	lsn     uint64
	ending  ending
}

// outcome is what is left of a lease that was settled.
type outcome struct {
	id          sluice.LeaseID
	c           *consumer
	incarnation int64
	at          int64
	lsn         uint64
	as          sluice.Verdict
	dead        bool
}

// generation returns what became of a put that is done with and not forgotten.
func (q *Queue) generation(id, gen string) (bygone, bool) {
	b, ok := q.gone.get(q.putKey(id, gen))
	return b, ok && b.at >= q.now-int64(memory) && b.id == id && b.gen == gen
}

// settlement returns what a lease was settled as, if that is not forgotten.
func (q *Queue) settlement(id sluice.LeaseID) (outcome, bool) {
	o, ok := q.settled.get(key(id))
	return o, ok && o.at >= q.now-int64(memory) && o.id == id
}

// rememberedPuts lists what is not forgotten, oldest first.
func (q *Queue) rememberedPuts() []gonePut {
	var list []gonePut
	q.gone.each(func(b bygone) {
		if b.at >= q.now-int64(memory) {
			list = append(list, gonePut{b.id, b.gen, b.ending, b.at})
		}
	})
	slices.SortFunc(list, func(a, b gonePut) int {
		return cmp.Or(cmp.Compare(a.At, b.At), cmp.Compare(a.ID, b.ID), cmp.Compare(a.Generation, b.Generation))
	})
	return list
}

func (q *Queue) rememberedLeases() []settledLease {
	var list []settledLease
	q.settled.each(func(o outcome) {
		if o.at >= q.now-int64(memory) && q.consumers[o.c.name] == o.c {
			list = append(list, settledLease{o.id, o.c.name, o.incarnation, o.as, o.dead, o.at})
		}
	})
	slices.SortFunc(list, func(a, b settledLease) int {
		return cmp.Or(cmp.Compare(a.At, b.At), slices.Compare(a.Lease[:], b.Lease[:]))
	})
	return list
}
