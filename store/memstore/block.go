package memstore

import (
	"unsafe"

	"github.com/sluice-ml/sluice"
)

// block is the memory of a sample: a piece of the heap, or a segment of the arena.
type block struct {
	heap []byte
	seg  *segment
}

func heapBlock(size int64) block {
	if size == 0 {
		return block{}
	}
	words := make([]uint64, (size+7)/8) // aligned to the widest element
	return block{heap: unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), size)}
}

func (b block) write(off int64, data []byte) error {
	if b.seg != nil {
		return b.seg.write(off, data)
	}
	copy(b.heap[off:], data)
	return nil
}

// bytes is the stored memory: read only once the sample is published.
func (b block) bytes() []byte {
	if b.seg != nil {
		return b.seg.bytes()
	}
	return b.heap
}

// view points the features at their places in b.
func (b block) view(features []sluice.Feature, offsets []int64) {
	viewBytes(b.bytes(), features, offsets)
}

// viewBytes caps each slice, so that appending to one tensor cannot run into the next.
func viewBytes(mem []byte, features []sluice.Feature, offsets []int64) {
	for i := range features {
		from, to := offsets[i], offsets[i]+features[i].Bytes()
		features[i].Data = mem[from:to:to]
	}
}

// private is memory with b's content that its holder may write to: a private mapping of a segment, or a copy.
func (b block) private() private {
	if b.seg != nil {
		if p, err := b.seg.private(); err == nil {
			return p
		}
		// Out of mappings or of address space, most likely. The heap needs neither.
	}
	c := heapBlock(int64(len(b.bytes())))
	copy(c.heap, b.bytes())
	return private{mem: c.heap}
}

// free gives the memory back. Nobody may hold any of it.
func (b block) free() {
	if b.seg != nil {
		b.seg.free()
	}
}

type private struct {
	mem    []byte
	mapped bool
}

func (p private) view(features []sluice.Feature, offsets []int64) {
	viewBytes(p.mem, features, offsets)
}
