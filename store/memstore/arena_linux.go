package memstore

import (
	"errors"
	"math/bits"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/sluice-ml/sluice"
	"golang.org/x/sys/unix"
)

// regionSize is how much of the file one shared mapping shows. It is address space, no memory: pages exist once they were written.
const regionSize = 1 << 30

// arena is an anonymous memory file and what of it is mapped. The file is only ever extended: offsets are plenty, and a segment that is emptied keeps its
// place for the next one of its class.
type arena struct {
	fd      int
	page    int64
	limit   int64 // of bytes in use and pooled; 0 is none
	number  int   // of segments in use and pooled; 0 is none
	clock   sluice.Clock
	machine *machine
	pooled  atomic.Int64 // bytes of idle segments; written under mu

	mu     sync.Mutex // guards what follows, and the kernel calls that go with it, but no copy and no private mapping
	closed bool
	shown  [][]byte             // the regions
	rest   []byte               // what is not cut up yet of the last one
	offset int64                // of rest in the file
	idle   map[int64][]*segment // by size, the longest idle first
	empty  map[int64][]*segment // by size: places without pages
	live   int                  // segments in use
	used   int64                // their bytes that have pages
	spare  int64                // those of them that no sample needs
}

// segment is a piece of the file.
type segment struct {
	arena  *arena
	off    int64
	shared []byte // all of it, through the region's mapping
	backed int64  // bytes from the start that have pages, page by page
	size   int64  // bytes wanted by the current user
	booked int64  // bytes counted as used for the current user
	wrote  int64  // end of what the current user wrote through the file
	since  time.Time
}

func newArena(caps sluice.Caps, clock sluice.Clock, m *machine) (*arena, error) {
	fd, err := unix.MemfdCreate("sluice", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	return &arena{fd: fd, page: int64(os.Getpagesize()), limit: caps.MaxBytes, number: int(caps.MaxSamples), clock: clock, machine: m,
		idle: map[int64][]*segment{}, empty: map[int64][]*segment{}}, nil
}

// classOf rounds n up to one of eight sizes an octave, in whole pages: the size of the place, not of the memory.
func (a *arena) classOf(n int64) int64 {
	step := max(int64(1)<<max(bits.Len64(uint64(n-1))-4, 0), a.page)
	return (n + step - 1) / step * step
}

// alloc returns a segment for n bytes, with as many pages as can be had from the pool. The rest of the pages comes with write.
func (a *arena) alloc(n int64) (block, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	need := a.inPages(n)
	s := a.recycle(n)
	if s != nil {
		// A tail that nobody needs may stay while all of them together are no more than a sample: samples take at most a sample more than the cap.
		if spare := s.backed - need; spare > need/8 || spare > 0 && a.spare+spare > need {
			if a.punch(s, need) == nil {
				s.backed = need
			}
		}
	}
	if s == nil {
		var err error
		if s, err = a.place(a.classOf(n)); err != nil {
			return block{}, err
		}
	}
	grow := max(need-s.backed, 0)
	a.makeRoom(grow, s.backed)
	if err := a.machine.take(grow); err != nil {
		a.evict(func() bool { return true })
		if err = a.machine.retake(grow); err != nil {
			a.putAway(s)
			return block{}, err
		}
	}
	s.size, s.booked, s.wrote = n, s.backed+grow, 0
	a.live++
	a.used += s.booked
	a.spare += s.booked - need
	return block{seg: s}, nil
}

// inPages rounds n up to whole pages.
func (a *arena) inPages(n int64) int64 { return (n + a.page - 1) / a.page * a.page }

// recycle takes the smallest idle segment that holds n bytes and is not much too large, the last used first: the processor may still
// know it.
func (a *arena) recycle(n int64) *segment {
	best := int64(0)
	for class, idle := range a.idle {
		if len(idle) > 0 && class >= n && class <= 2*a.classOf(n) && (best == 0 || class < best) {
			best = class
		}
	}
	if best == 0 {
		return nil
	}
	idle := a.idle[best]
	s := idle[len(idle)-1]
	a.idle[best] = slices.Delete(idle, len(idle)-1, len(idle))
	a.pooled.Add(-s.backed)
	return s
}

// place finds address space for a segment without pages.
func (a *arena) place(class int64) (*segment, error) {
	if empty := a.empty[class]; len(empty) > 0 {
		s := empty[len(empty)-1]
		a.empty[class] = slices.Delete(empty, len(empty)-1, len(empty))
		return s, nil
	}
	if int64(len(a.rest)) < class {
		end := a.offset + int64(len(a.rest)) // what is left over stays unused
		size := max(regionSize, class)
		p, err := unix.MmapPtr(a.fd, end, nil, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil && size > class { // a limit on address space, perhaps
			size = class
			p, err = unix.MmapPtr(a.fd, end, nil, uintptr(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		}
		if err != nil {
			return nil, os.NewSyscallError("mmap", err)
		}
		a.rest, a.offset = unsafe.Slice((*byte)(p), size), end
		a.shown = append(a.shown, a.rest)
	}
	s := &segment{arena: a, off: a.offset, shared: a.rest[:class:class]}
	a.rest, a.offset = a.rest[class:], a.offset+class
	return s, nil
}

// makeRoom shrinks the pool so that grow fresh bytes beside the mine of a segment keep to the bounds.
func (a *arena) makeRoom(grow, mine int64) {
	a.evict(func() bool {
		pooled := 0
		for _, idle := range a.idle {
			pooled += len(idle)
		}
		return a.limit > 0 && grow > 0 && a.used+a.pooled.Load()+mine+grow > a.limit || a.number > 0 && a.live+pooled+1 > a.number
	})
}

// evict gives the longest idle segments back to the machine while more says so.
func (a *arena) evict(more func() bool) {
	for more() {
		var oldest *segment
		for _, idle := range a.idle {
			if len(idle) > 0 && (oldest == nil || idle[0].since.Before(oldest.since)) {
				oldest = idle[0]
			}
		}
		if oldest == nil {
			return
		}
		class := int64(len(oldest.shared))
		a.idle[class] = slices.Delete(a.idle[class], 0, 1)
		a.pooled.Add(-oldest.backed)
		a.putAway(oldest)
	}
}

// putAway takes the pages of s and keeps its place.
func (a *arena) putAway(s *segment) {
	if a.punch(s, 0) != nil {
		return // the pages stay until the file goes; nobody uses this place again
	}
	s.backed = 0
	class := int64(len(s.shared))
	a.empty[class] = append(a.empty[class], s)
}

// punch gives the pages of s from the given offset on back.
func (a *arena) punch(s *segment, from int64) error {
	for {
		err := unix.Fallocate(a.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, s.off+from, int64(len(s.shared))-from)
		if err != unix.EINTR {
			return err
		}
	}
}

// trim gives back what is idle since before the given time.
func (a *arena) trim(before time.Time) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.evict(func() bool {
		for _, idle := range a.idle {
			if len(idle) > 0 && !idle[0].since.After(before) {
				return true
			}
		}
		return false
	})
}

func (a *arena) poolBytes() int64 {
	if a == nil {
		return 0
	}
	return a.pooled.Load()
}

// close gives back all but the segments in use; the last of those takes the file with it.
func (a *arena) close() {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	a.evict(func() bool { return true })
	a.endIfUnused()
}

func (a *arena) endIfUnused() {
	if !a.closed || a.live > 0 || a.fd < 0 {
		return
	}
	for _, r := range a.shown {
		_ = unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(r)), uintptr(len(r))) // fails only for what is no mapping
	}
	_ = unix.Close(a.fd)
	a.fd, a.shown, a.rest, a.empty = -1, nil, nil, nil
}

func (s *segment) bytes() []byte { return s.shared[:s.size] }

// write copies data to the given offset. Pages that exist are written through the mapping. Pages that do not are written through the file: that is
// faster than faulting them in, and running out of memory is an error there, not a signal.
func (s *segment) write(off int64, data []byte) error {
	if warm := s.backed - off; warm > 0 {
		n := copy(s.shared[off:min(s.backed, off+int64(len(data)))], data)
		off, data = off+int64(n), data[n:]
	}
	for len(data) > 0 {
		n, err := unix.Pwrite(s.arena.fd, data, s.off+off)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return os.NewSyscallError("pwrite", err)
		}
		if n == 0 {
			return errors.New("pwrite wrote nothing")
		}
		off, data = off+int64(n), data[n:]
		s.wrote = off
	}
	return nil
}

// private maps the segment for one consumer. It never populates the mapping: that would copy all of it.
func (s *segment) private() (private, error) {
	p, err := unix.MmapPtr(s.arena.fd, s.off, nil, uintptr(s.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_NORESERVE)
	if err != nil {
		return private{}, os.NewSyscallError("mmap", err)
	}
	return private{mem: unsafe.Slice((*byte)(p), s.size), mapped: true}, nil
}

func (p private) unmap() error {
	if !p.mapped {
		return nil
	}
	return os.NewSyscallError("munmap", unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(p.mem)), uintptr(len(p.mem))))
}

// free makes the segment idle.
func (s *segment) free() {
	a := s.arena
	a.mu.Lock()
	defer a.mu.Unlock()
	a.used -= s.booked
	a.spare -= s.booked - a.inPages(s.size)
	a.live--
	if a.closed {
		_ = a.punch(s, 0) // what stays goes with the file
		a.endIfUnused()
		return
	}
	// Only what was really written has pages, and lies before the end of the file: a put may have failed midway, and touching more
	// through the mapping would be a fault.
	s.backed = max(s.backed, a.inPages(s.wrote))
	s.since = a.clock.Now()
	class := int64(len(s.shared))
	a.idle[class] = append(a.idle[class], s)
	a.pooled.Add(s.backed)
}
