//go:build linux

package dirstore

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

// The ledger file is a head of fixed size and then segments of fixed size, each with slots and pins. It only grows, so that a mapped
// part stays what it is. All of it is allocated before it is mapped: a full disk is an error here, never a SIGBUS.
//
// Slots and pins, by their states, are the truth. Everything else (chains, free lists, counts of pins, totals) follows from them and is computed anew by repair. A change
// raises dirty first and lowers it last, under the lock; whoever gets the lock and finds it raised knows that the holder died halfway, and repairs.

const (
	ledgerName    = ".sluice-ledger"
	ledgerMagic   = "SLUICELG"
	ledgerVersion = 1

	maxIDBytes    = 200
	maxOwnerBytes = 248
	maxSessions   = 1024
	maxOwners     = 128
	maxSegments   = 1024
	slotBuckets   = 16384
	pinBuckets    = 16384
	segmentSlots  = 1024
	segmentPins   = 2048

	maxSlots = maxSegments * segmentSlots

	// Locks are on bytes far behind the end: byte 0 from here guards the ledger, the others are one a session.
	lockBase = int64(1) << 40
)

type header struct {
	magic                             [8]byte
	version                           uint32
	headSize, slotSize, pinSize       uint32
	sessionSize                       uint32
	segmentSlots, segmentPins, segMax uint32
	storeID                           [16]byte
	check                             uint32 // crc32c of all before
	_                                 uint32

	boot     [16]byte // the boot of the host that wrote last; another one means that the file may be torn
	caps     [6]int64
	epoch    uint64 // counts restarts: opens that found no other session
	nextUID  uint64
	_        [32]byte
	dirty    atomic.Uint32
	segments atomic.Uint32

	// Heads of lists are index+1, 0 for none; tops bound what was ever used.
	slotTop, slotFree uint32
	pinTop, pinFree   uint32
	pool              uint32
	_                 uint32

	freed atomic.Uint64 // counts events of room becoming free
	futex atomic.Uint32 // changes with freed, and when a waiter is to look up
	_     uint32

	residentBytes, residentSamples atomic.Int64
	reservedBytes, reservedSamples atomic.Int64
	deadBytes, deadSamples         atomic.Int64
	stagingBytes                   atomic.Int64
	poolBytes, poolFiles           atomic.Int64
}

// session is an Open. Its lock, on the byte of its index, says whether it lives.
type session struct {
	state   uint32 // 0 free, 1 taken
	pid     uint32 // for people; never used to tell whether it lives
	started int64
	_       [48]byte
}

type owner struct {
	n    uint32 // 0 free
	_    uint32
	name [maxOwnerBytes]byte
}

// The states of a slot.
const (
	stFree      = iota
	stReserved  // room for a sample that is being made
	stStaging   // being written to its scratch file
	stPublished // readable under its id
	stFreeing   // between published and the next; seen only after a crash
	stLingering // nobody can get it any more, somebody still has it: in its scratch file
	stPool      // nobody has it, the scratch file waits for another put
	stTrash     // the scratch file waits for its unlink
	stStates
)

// The flags of a slot.
const (
	flDead    = 1 << iota // a dead letter
	flTouched             // was released or unclaimed: free when nobody holds it
	flTainted             // a holder died: the file must not be overwritten
	flAdopted             // found as a file, without a slot
	flNamed               // trash that could not be taken from its published name
)

type slot struct {
	state      uint32
	flags      uint32
	next       uint32 // in the index, the free list or the pool
	session    uint32 // index+1 of who reserved, put, or is busy with it
	owner      uint32 // index+1 of who claims it
	pins, open uint32 // handles; mappings
	idLen      uint32
	uid        uint64 // never used twice
	file       uint64 // names the scratch file; another's uid where the file was recycled
	bytes      int64  // logical
	held       int64  // counted as reserved
	size       int64  // of the file
	put        int64  // unix nanoseconds
	orphaned   int64  // when its session was found to be gone, or 0
	ino        uint64
	epoch      uint64 // in which its checksums were last known to be right
	token      [16]byte
	generation [16]byte // digest
	id         [maxIDBytes]byte
	_          [48]byte
}

// The bits of a pin's state.
const (
	pinHandle = 1 << iota // not released
	pinOpen               // tensors not closed
)

type pin struct {
	state   uint32
	next    uint32
	slot    uint32 // index+1
	session uint32 // index+1
	uid     uint64 // of the slot
	id      [16]byte
	_       [24]byte
}

// head is the part of the ledger before the segments.
type head struct {
	header
	_        [4096 - unsafe.Sizeof(header{})]byte
	sessions [maxSessions]session
	owners   [maxOwners]owner
	slots    [slotBuckets]uint32
	pins     [pinBuckets]uint32
	_        [28672]byte // up to a multiple of 64 KiB, the largest page
}

type segment struct {
	slots [segmentSlots]slot
	pins  [segmentPins]pin
}

const (
	headSize    = int64(unsafe.Sizeof(head{}))
	segmentSize = int64(unsafe.Sizeof(segment{}))
)

var _ = [1]struct{}{}[headSize%(64<<10)|segmentSize%(64<<10)]

// brokenLedger is the panic of a change that met what can't be, such as a chain without an end. Store.do makes an error of it, and the next change repairs.
type brokenLedger string

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ledger is this session's view. Its methods, unless they say otherwise, are called with the lock held.
type ledger struct {
	*head
	s        *Store
	fd       int
	mem      []byte
	segs     []*segment
	segMem   [][]byte
	me       uint32 // session index+1
	released bool   // room became free in this change
	trash    []uint32
}

func bootID() (id [16]byte) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err == nil {
		text := []byte{}
		for _, c := range data {
			if c != '-' && c != '\n' {
				text = append(text, c)
			}
		}
		if len(text) == 32 {
			_, _ = hex.Decode(id[:], text)
		}
	}
	return id
}

func newName() string {
	var b [8]byte
	rand.Read(b[:])
	return newPrefix + hex.EncodeToString(b[:])
}

// createLedger makes a ledger under another name and links it, so that a ledger that has its name is complete. Another process may be faster, which is as good.
func (s *Store) createLedger() error {
	name := newName()
	fd, err := unix.Openat(s.dirfd, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return sysError("open", s.dir, "create the ledger", err)
	}
	defer func() { _ = unix.Close(fd) }()
	defer func() { _ = unix.Unlinkat(s.dirfd, name, 0) }()
	_ = flock(fd, unix.LOCK_EX|unix.LOCK_NB) // tells a sweep that its writer lives
	if err := allocate(fd, 0, headSize+segmentSize); err != nil {
		return s.spaceError("open", s.dir, fmt.Sprintf("allocate a ledger of %d bytes", headSize+segmentSize), err)
	}
	var h header
	copy(h.magic[:], ledgerMagic)
	h.version, h.headSize, h.slotSize, h.pinSize = ledgerVersion, uint32(headSize), uint32(unsafe.Sizeof(slot{})), uint32(unsafe.Sizeof(pin{}))
	h.sessionSize, h.segmentSlots, h.segmentPins, h.segMax = uint32(unsafe.Sizeof(session{})), segmentSlots, segmentPins, maxSegments
	rand.Read(h.storeID[:])
	h.boot = bootID()
	h.check = h.sum()
	h.nextUID = 1
	h.segments.Store(1)
	if _, err := unix.Pwrite(fd, unsafe.Slice((*byte)(unsafe.Pointer(&h)), unsafe.Sizeof(h)), 0); err != nil {
		return sysError("open", s.dir, "write the ledger", err)
	}
	if s.opts.Durability == Power {
		if err := errors.Join(s.sync(fd), s.sync(s.dirfd)); err != nil {
			return sysError("open", s.dir, "sync the ledger", err)
		}
	}
	if err := unix.Linkat(s.dirfd, name, s.dirfd, ledgerName, 0); err != nil && !errors.Is(err, unix.EEXIST) && !errors.Is(err, unix.ENOENT) {
		return sysError("open", s.dir, "name the ledger", err)
	}
	return nil
}

func (h *header) sum() uint32 {
	return crc32.Checksum(unsafe.Slice((*byte)(unsafe.Pointer(h)), unsafe.Offsetof(h.check)), castagnoli)
}

// allocate gives the file room, in zeros.
func allocate(fd int, off, n int64) error {
	err := fallocate(fd, off, n)
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	buf := make([]byte, 64<<10)
	for n > 0 {
		k, err := unix.Pwrite(fd, buf[:min(n, int64(len(buf)))], off)
		if err != nil {
			return err
		}
		off, n = off+int64(k), n-int64(k)
	}
	return nil
}

// fallocate gives the file blocks where it has none; what it holds stays.
func fallocate(fd int, off, n int64) error {
	for {
		if err := unix.Fallocate(fd, 0, off, n); err != unix.EINTR {
			return err
		}
	}
}

// openLedger opens the ledger, checks that it is one, and maps its head.
func (s *Store) openLedger() (*ledger, error) {
	var fd int
	for try := 0; ; try++ {
		var err error
		fd, err = unix.Openat(s.dirfd, ledgerName, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		if err == nil {
			break
		}
		if err != unix.ENOENT || try == 10 {
			return nil, sysError("open", s.dir, "open the ledger "+ledgerName, err)
		}
		if err := s.createLedger(); err != nil {
			return nil, err
		}
	}
	l := &ledger{s: s, fd: fd}
	size, err := l.validate()
	if err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	// A ledger that was copied may have holes, and a write to one through the mapping has no way to fail but a SIGBUS.
	if err := fallocate(fd, 0, size); err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		_ = unix.Close(fd)
		return nil, s.spaceError("open", s.dir, "give the ledger the blocks that it lacks", err)
	}
	mem, err := unix.Mmap(fd, 0, int(headSize), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		_ = unix.Close(fd)
		return nil, sysError("open", s.dir, "map the ledger", err)
	}
	l.mem, l.head = mem, (*head)(unsafe.Pointer(&mem[0]))
	return l, nil
}

// validate returns the size of what is in use.
func (l *ledger) validate() (size int64, err error) {
	bad := func(format string, args ...any) (int64, error) {
		return 0, &sluice.Error{Kind: sluice.Corrupt, Op: "dirstore: open", Subject: l.s.dir + "/" + ledgerName, Detail: fmt.Sprintf(format, args...),
			Hint: "if no process uses the store, remove the file: the samples are kept and wait for a claim for a day"}
	}
	var st unix.Stat_t
	if err := unix.Fstat(l.fd, &st); err != nil {
		return 0, sysError("open", l.s.dir, "stat the ledger", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Uid != uint32(os.Geteuid()) {
		return bad("is no regular file of ours (mode %o, user %d), want one of user %d", st.Mode, st.Uid, os.Geteuid())
	}
	if st.Size < headSize+segmentSize {
		return bad("is %d bytes, want at least %d", st.Size, headSize+segmentSize)
	}
	var h header
	if n, err := unix.Pread(l.fd, unsafe.Slice((*byte)(unsafe.Pointer(&h)), unsafe.Sizeof(h)), 0); err != nil || n != int(unsafe.Sizeof(h)) {
		return 0, sysError("open", l.s.dir, "read the ledger", errors.Join(err, unix.EIO))
	}
	switch {
	case string(h.magic[:]) != ledgerMagic:
		return bad("begins with %q, want %q: it is no ledger", h.magic[:], ledgerMagic)
	case h.version != ledgerVersion:
		return bad("has version %d, this program reads %d", h.version, ledgerVersion)
	case h.check != h.sum():
		return bad("has the header checksum %08x, its header gives %08x", h.check, h.sum())
	case int64(h.headSize) != headSize || h.slotSize != uint32(unsafe.Sizeof(slot{})) || h.pinSize != uint32(unsafe.Sizeof(pin{})) || h.sessionSize != uint32(unsafe.Sizeof(session{})) ||
		h.segmentSlots != segmentSlots || h.segmentPins != segmentPins || h.segMax != maxSegments:
		return bad("has parts of other sizes than this program knows")
	}
	n := int64(h.segments.Load())
	if size = headSize + n*segmentSize; n < 1 || n > maxSegments || st.Size < size {
		return bad("is %d bytes and claims %d segments, want 1 to %d and %d bytes for that many", st.Size, n, maxSegments, size)
	}
	return size, nil
}

func (l *ledger) unmap() {
	for _, m := range l.segMem {
		_ = unix.Munmap(m)
	}
	_ = unix.Munmap(l.mem)
	// The mapping holds the file description too, and with it the locks, until here.
	_ = unix.Close(l.fd)
}

func (l *ledger) rangeLock(cmd int, kind int16, at int64) (unix.Flock_t, error) {
	lk := unix.Flock_t{Type: kind, Whence: 0, Start: lockBase + at, Len: 1}
	for {
		err := unix.FcntlFlock(uintptr(l.fd), cmd, &lk)
		if err != unix.EINTR {
			return lk, err
		}
	}
}

// acquire takes the lock on the ledger and makes it whole. The caller holds Store.mu, since sessions share the lock with themselves.
func (l *ledger) acquire() error {
	if _, err := l.rangeLock(unix.F_OFD_SETLKW, unix.F_WRLCK, 0); err != nil {
		return sysError("lock", l.s.dir, "lock the ledger", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(l.fd, &st); err == nil && st.Nlink == 0 {
		l.drop()
		return &sluice.Error{Kind: sluice.Unavailable, Op: "dirstore", Subject: l.s.dir, Detail: "the ledger was deleted under the open store", Hint: "close the store and open it again"}
	}
	if err := l.mapSegments(); err != nil {
		l.drop()
		return err
	}
	if l.dirty.Load() != 0 {
		l.repair()
	}
	l.dirty.Store(1)
	return nil
}

// release ends a change. A change that panicked leaves the ledger dirty for the next one to repair.
func (l *ledger) release(whole bool) {
	if whole {
		if l.released {
			l.freed.Add(1)
			l.wake()
		}
		l.dirty.Store(0)
	}
	l.released = false
	l.drop()
}

func (l *ledger) drop() { _, _ = l.rangeLock(unix.F_OFD_SETLK, unix.F_UNLCK, 0) }

func (l *ledger) mapSegments() error {
	n := int(l.segments.Load())
	if n > maxSegments {
		return &sluice.Error{Kind: sluice.Corrupt, Op: "dirstore", Subject: l.s.dir + "/" + ledgerName, Detail: fmt.Sprintf("claims %d segments, want at most %d", n, maxSegments)}
	}
	for len(l.segs) < n {
		mem, err := unix.Mmap(l.fd, headSize+int64(len(l.segs))*segmentSize, int(segmentSize), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return sysError("lock", l.s.dir, "map the ledger", err)
		}
		l.segMem = append(l.segMem, mem)
		l.segs = append(l.segs, (*segment)(unsafe.Pointer(&mem[0])))
	}
	return nil
}

// grow adds a segment. It has its room before anybody learns of it.
func (l *ledger) grow() error {
	n := int64(len(l.segs))
	if n == maxSegments {
		return &sluice.Error{Kind: sluice.Full, Op: "dirstore: ledger", Subject: l.s.dir, Detail: fmt.Sprintf("has all of its %d slots or %d pins in use", maxSlots, maxSegments*segmentPins)}
	}
	if err := allocate(l.fd, headSize+n*segmentSize, segmentSize); err != nil {
		return l.s.spaceError("ledger", l.s.dir, fmt.Sprintf("grow by %d bytes", segmentSize), err)
	}
	l.point()
	l.segments.Add(1)
	l.point()
	return l.mapSegments()
}

func (l *ledger) slot(i uint32) *slot { return &l.segs[i/segmentSlots].slots[i%segmentSlots] }
func (l *ledger) pin(i uint32) *pin   { return &l.segs[i/segmentPins].pins[i%segmentPins] }

// setState is the one store that makes a transition: a crash before it leaves the old state, one behind it the new.
func (l *ledger) setState(sl *slot, st uint32) {
	l.point()
	atomic.StoreUint32(&sl.state, st)
	l.point()
}

// point is where tests let a process die in the middle of a change.
func (l *ledger) point() {
	if l.s.hooks.die != nil {
		l.s.hooks.die()
	}
}

func (sl *slot) name() string     { return string(sl.id[:min(sl.idLen, maxIDBytes)]) }
func (sl *slot) fileName() string { return sl.name() + sampleSuffix }
func (sl *slot) scratch() string  { return fmt.Sprintf("%s%016x", scratchPrefix, sl.file) }

func (sl *slot) setName(id string) {
	sl.idLen = uint32(copy(sl.id[:], id))
	clear(sl.id[sl.idLen:])
}

func bucketOf(id string) uint32 {
	h := uint64(14695981039346656037)
	for i := range len(id) {
		h = (h ^ uint64(id[i])) * 1099511628211
	}
	return uint32((h ^ h>>32) % slotBuckets)
}

// find returns the slot that has the id: staging or published.
func (l *ledger) find(id string) (uint32, *slot) {
	steps := 0
	for at := l.slots[bucketOf(id)]; at != 0; {
		if at > l.slotTop || steps > maxSlots {
			panic(brokenLedger("index"))
		}
		sl := l.slot(at - 1)
		if sl.idLen == uint32(len(id)) && string(sl.id[:sl.idLen]) == id {
			return at - 1, sl
		}
		at = sl.next
		steps++
	}
	return 0, nil
}

// published returns the slot of a sample in a generation.
func (l *ledger) published(id string, generation [16]byte) (uint32, *slot) {
	i, sl := l.find(id)
	if sl == nil || sl.state != stPublished || sl.generation != generation {
		return 0, nil
	}
	return i, sl
}

func (l *ledger) index(i uint32) {
	sl := l.slot(i)
	b := &l.slots[bucketOf(sl.name())]
	sl.next = *b
	l.point()
	*b = i + 1
}

func (l *ledger) unindex(i uint32) {
	sl := l.slot(i)
	for at, steps := &l.slots[bucketOf(sl.name())], 0; *at != 0; steps++ {
		if *at > l.slotTop || steps > maxSlots {
			panic(brokenLedger("index"))
		}
		if *at == i+1 {
			*at = sl.next
			l.point()
			sl.next = 0
			return
		}
		at = &l.slot(*at - 1).next
	}
}

// newSlot takes a slot off the free list. It stays free until its state is set.
func (l *ledger) newSlot() (uint32, *slot, error) {
	var i uint32
	if l.slotFree != 0 {
		i = l.slotFree - 1
		l.slotFree = l.slot(i).next
	} else {
		if int(l.slotTop) == len(l.segs)*segmentSlots {
			if err := l.grow(); err != nil {
				return 0, nil, err
			}
		}
		i = l.slotTop
		l.slotTop++
	}
	l.point()
	sl := l.slot(i)
	*sl = slot{}
	uid := l.nextUID
	l.nextUID++
	sl.uid, sl.file, sl.session = uid, uid, l.me
	return i, sl, nil
}

func (l *ledger) freeSlot(i uint32) {
	sl := l.slot(i)
	l.setState(sl, stFree)
	*sl = slot{next: l.slotFree}
	l.point()
	l.slotFree = i + 1
}

func pinBucket(id [16]byte) uint32 {
	return (uint32(id[0]) | uint32(id[1])<<8 | uint32(id[2])<<16) % pinBuckets
}

func (l *ledger) newPin(slotIdx uint32, id [16]byte) (uint32, error) {
	var i uint32
	if l.pinFree != 0 {
		i = l.pinFree - 1
		l.pinFree = l.pin(i).next
	} else {
		if int(l.pinTop) == len(l.segs)*segmentPins {
			if err := l.grow(); err != nil {
				return 0, err
			}
		}
		i = l.pinTop
		l.pinTop++
	}
	p, sl := l.pin(i), l.slot(slotIdx)
	*p = pin{slot: slotIdx + 1, session: l.me, uid: sl.uid, id: id}
	b := &l.pins[pinBucket(id)]
	p.next = *b
	l.point()
	atomic.StoreUint32(&p.state, pinHandle|pinOpen)
	l.point()
	*b = i + 1
	l.point()
	sl.pins++
	sl.open++
	return i, nil
}

func (l *ledger) findPin(id [16]byte) (uint32, *pin) {
	steps := 0
	for at := l.pins[pinBucket(id)]; at != 0; steps++ {
		if at > l.pinTop || steps > maxSegments*segmentPins {
			panic(brokenLedger("pins"))
		}
		p := l.pin(at - 1)
		if p.id == id {
			return at - 1, p
		}
		at = p.next
	}
	return 0, nil
}

// clearPin takes bits from a pin, and frees it with the last one. It does not look whether the slot is free now.
func (l *ledger) clearPin(i uint32, bits uint32) (slotIdx uint32) {
	p := l.pin(i)
	slotIdx = p.slot - 1
	sl := l.slot(slotIdx)
	gone := p.state & bits
	l.point()
	atomic.StoreUint32(&p.state, p.state&^bits)
	l.point()
	if gone&pinHandle != 0 {
		sl.pins--
	}
	if gone&pinOpen != 0 {
		sl.open--
	}
	if p.state != 0 {
		return slotIdx
	}
	for at, steps := &l.pins[pinBucket(p.id)], 0; *at != 0; steps++ {
		if *at > l.pinTop || steps > maxSegments*segmentPins {
			panic(brokenLedger("pins"))
		}
		if *at == i+1 {
			*at = p.next
			l.point()
			break
		}
		at = &l.pin(*at - 1).next
	}
	*p = pin{next: l.pinFree}
	l.pinFree = i + 1
	return slotIdx
}

// ownerIndex returns the index+1 of an owner's name, 0 if it is not there and make is false.
func (l *ledger) ownerIndex(name string, create bool) (uint32, error) {
	free := -1
	for i := range l.owners {
		switch o := &l.owners[i]; {
		case o.n == 0 && free < 0:
			free = i
		case o.n == uint32(len(name)) && string(o.name[:o.n]) == name:
			return uint32(i) + 1, nil
		}
	}
	if !create {
		return 0, nil
	}
	if free < 0 {
		used := [maxOwners]bool{}
		for i := range l.slotTop {
			if o := l.slot(i).owner; o > 0 && o <= maxOwners {
				used[o-1] = true
			}
		}
		for i := range used {
			if !used[i] {
				l.owners[i].n, free = 0, i
			}
		}
		if free < 0 {
			return 0, &sluice.Error{Kind: sluice.Full, Op: "dirstore: claim", Subject: name, Detail: fmt.Sprintf("%d other owners have claims, at most %d are kept", maxOwners, maxOwners)}
		}
	}
	o := &l.owners[free]
	copy(o.name[:], name)
	l.point()
	atomic.StoreUint32(&o.n, uint32(len(name)))
	return uint32(free) + 1, nil
}

func (l *ledger) ownerName(sl *slot) string {
	if sl.owner == 0 || sl.owner > maxOwners {
		return ""
	}
	o := &l.owners[sl.owner-1]
	return string(o.name[:min(o.n, maxOwnerBytes)])
}

// repair makes all that is derived anew, and finishes what a dead holder of the lock had begun.
func (l *ledger) repair() {
	l.s.log.Info("dirstore: a process died while it changed the ledger, which is repaired", "dir", l.s.dir)
	clear(l.slots[:])
	clear(l.pins[:])
	l.slotFree, l.pinFree, l.pool = 0, 0, 0
	slots, pins := uint32(len(l.segs)*segmentSlots), uint32(len(l.segs)*segmentPins)
	l.slotTop, l.pinTop = min(l.slotTop, slots), min(l.pinTop, pins)
	for l.slotTop > 0 && l.slot(l.slotTop-1).state == stFree {
		l.slotTop--
	}
	for l.pinTop > 0 && l.pin(l.pinTop-1).state == 0 {
		l.pinTop--
	}
	for _, n := range l.totals() {
		n.Store(0)
	}
	for i := range l.slotTop {
		sl := l.slot(i)
		sl.pins, sl.open = 0, 0
		l.nextUID = max(l.nextUID, sl.uid+1, sl.file+1)
	}
	for i := l.pinTop; i > 0; i-- {
		p := l.pin(i - 1)
		good := p.state != 0 && p.state&^(pinHandle|pinOpen) == 0 && p.slot > 0 && p.slot <= l.slotTop && p.session > 0 && p.session <= maxSessions
		if good {
			sl := l.slot(p.slot - 1)
			good = sl.uid == p.uid && (sl.state == stPublished || sl.state == stFreeing || sl.state == stLingering)
		}
		if !good {
			*p = pin{next: l.pinFree}
			l.pinFree = i
			continue
		}
		sl := l.slot(p.slot - 1)
		if p.state&pinHandle != 0 {
			sl.pins++
		}
		if p.state&pinOpen != 0 {
			sl.open++
		}
		b := &l.pins[pinBucket(p.id)]
		p.next = *b
		*b = i
	}
	for i := l.slotTop; i > 0; i-- {
		l.repairSlot(i - 1)
	}
	l.released = true
}

func (l *ledger) repairSlot(i uint32) {
	sl := l.slot(i)
	named := sluice.ValidateID(sl.name()) == nil && sl.idLen <= maxIDBytes
	sane := sl.state < stStates && sl.bytes >= 0 && sl.held >= 0 && sl.size >= 0 && sl.session <= maxSessions && sl.owner <= maxOwners
	if sl.owner != 0 && (!sane || l.owners[sl.owner-1].n == 0) {
		sl.owner = 0
	}
	if !sane || !named && (sl.state == stStaging || sl.state == stPublished || sl.state == stFreeing) {
		sl.state = stFree
	}
	if sl.state == stPublished || sl.state == stStaging {
		if _, other := l.find(sl.name()); other != nil { // torn by a power cut
			sl.state = stFree
		}
	}
	if sl.state == stFreeing {
		_ = unix.Renameat(l.s.dirfd, sl.fileName(), l.s.dirfd, sl.scratch())
		sl.flags &^= flDead
		if sl.pins+sl.open > 0 {
			l.setState(sl, stLingering)
		} else {
			l.setState(sl, stTrash)
		}
	}
	switch sl.state {
	case stFree:
		*sl = slot{next: l.slotFree}
		l.slotFree = i + 1
	case stReserved:
		l.reservedBytes.Add(sl.held)
		l.reservedSamples.Add(1)
	case stStaging:
		l.reservedBytes.Add(sl.held)
		l.reservedSamples.Add(1)
		l.stagingBytes.Add(sl.bytes)
		l.index(i)
	case stPublished:
		l.residentBytes.Add(sl.bytes)
		l.residentSamples.Add(1)
		if sl.flags&flDead != 0 {
			if sl.owner == 0 {
				sl.flags &^= flDead
			} else {
				l.deadBytes.Add(sl.bytes)
				l.deadSamples.Add(1)
			}
		}
		l.index(i)
		l.settle(i) // the dead process may have taken the last hold away
	case stLingering:
		l.residentBytes.Add(sl.bytes)
		l.residentSamples.Add(1)
		l.settle(i)
	case stPool:
		l.poolBytes.Add(sl.size)
		l.poolFiles.Add(1)
		sl.next = l.pool
		l.pool = i + 1
	case stTrash:
		l.trash = append(l.trash, i)
	}
}

func (l *ledger) totals() []*atomic.Int64 {
	return []*atomic.Int64{&l.residentBytes, &l.residentSamples, &l.reservedBytes, &l.reservedSamples, &l.deadBytes, &l.deadSamples, &l.stagingBytes, &l.poolBytes, &l.poolFiles}
}
