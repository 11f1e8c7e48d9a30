//go:build linux

package dirstore

import (
	"errors"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// settle applies the rule of ownership to a slot from which a hold was taken: free is what nobody claims and nobody has a handle or a mapping of.
func (l *ledger) settle(i uint32) {
	switch sl := l.slot(i); {
	case sl.state == stPublished && sl.owner == 0 && sl.pins == 0 && sl.flags&flTouched != 0:
		l.evict(i)
	case sl.state == stLingering && sl.pins == 0 && sl.open == 0:
		l.uncount(sl)
		l.dispose(i, false)
	}
}

func (l *ledger) uncount(sl *slot) {
	l.residentBytes.Add(-sl.bytes)
	l.point()
	l.residentSamples.Add(-1)
	l.released = true
}

// evict takes a published sample away: its id is free at once, its bytes when nobody has a handle or a mapping any more.
func (l *ledger) evict(i uint32) {
	sl := l.slot(i)
	if sl.flags&flDead != 0 {
		l.setDead(sl, false)
	}
	sl.owner = 0
	l.setState(sl, stFreeing)
	l.unindex(i)
	if sl.pins == 0 && (sl.open == 0 || l.s.hooks.forceReuse) {
		l.uncount(sl)
		l.dispose(i, true)
		return
	}
	if err := unix.Renameat(l.s.dirfd, sl.fileName(), l.s.dirfd, sl.scratch()); err != nil && err != unix.ENOENT {
		l.s.log.Warn("dirstore: can't take a sample's name away", "dir", l.s.dir, "sample", sl.name(), "error", err)
		sl.flags |= flNamed | flTainted
	}
	l.setState(sl, stLingering)
}

// lost frees a published slot whose file somebody deleted. Mappings of it stay, and stay counted.
func (l *ledger) lost(i uint32) {
	sl := l.slot(i)
	l.s.log.Warn("dirstore: a sample's file is gone, nobody here removed it", "dir", l.s.dir, "sample", sl.name())
	sl.flags |= flTainted
	l.evict(i)
}

// dispose gets rid of the file of a slot that is counted nowhere: into the pool, or off the disk. published says that it has its name yet, and not the scratch one.
func (l *ledger) dispose(i uint32, published bool) {
	sl := l.slot(i)
	published = published || sl.flags&flNamed != 0
	name := sl.scratch()
	if published {
		name = sl.fileName()
	}
	keep := l.poolTakes(sl)
	if !keep && sl.size <= smallFile {
		if err := unix.Unlinkat(l.s.dirfd, name, 0); err == nil || err == unix.ENOENT {
			l.point()
			l.freeSlot(i)
			return
		}
	}
	if published {
		if err := unix.Renameat(l.s.dirfd, name, l.s.dirfd, sl.scratch()); err == unix.ENOENT {
			l.freeSlot(i)
			return
		} else if err != nil {
			keep = false
			sl.flags |= flNamed
		} else {
			sl.flags &^= flNamed
		}
	}
	if keep {
		sl.session = 0
		l.setState(sl, stPool)
		sl.next = l.pool
		l.point()
		l.pool = i + 1
		l.point()
		l.poolBytes.Add(sl.size)
		l.poolFiles.Add(1)
		return
	}
	sl.session = l.me
	l.setState(sl, stTrash)
	l.trash = append(l.trash, i)
}

// poolTakes says whether a freed file is worth keeping and may be overwritten. Files in use, room reserved and the pool together never exceed the cap.
func (l *ledger) poolTakes(sl *slot) bool {
	s := l.s
	if s.hooks.forceReuse {
		return true
	}
	if s.opts.NoPool || sl.flags&(flTainted|flNamed) != 0 || sl.size < poolFrom || l.poolFiles.Load() >= poolMost || s.closed.Load() {
		return false
	}
	pool := l.poolBytes.Load() + sl.size
	if most := s.caps.MaxBytes; most > 0 {
		return pool <= most/2 && l.residentBytes.Load()+l.reservedBytes.Load()+pool <= most
	}
	return pool <= s.poolRoom
}

// takePooled takes the smallest file that is large enough out of the pool. A crash right behind it leaves a file without a slot, which is swept.
func (l *ledger) takePooled(size int64) (file uint64, ok bool) {
	if l.s.opts.NoPool || l.pool == 0 {
		return 0, false
	}
	var best *uint32
	steps := 0
	for at := &l.pool; *at != 0; at = &l.slot(*at - 1).next {
		if *at > l.slotTop || steps > maxSlots {
			panic(brokenLedger("pool"))
		}
		steps++
		if n := l.slot(*at - 1).size; n >= size && (best == nil || n < l.slot(*best-1).size) {
			best = at
		}
	}
	if best == nil {
		return 0, false
	}
	i := *best - 1
	sl := l.slot(i)
	*best = sl.next
	l.point()
	l.poolBytes.Add(-sl.size)
	l.poolFiles.Add(-1)
	file = sl.file
	l.freeSlot(i)
	return file, true
}

// trimPool keeps what is in use and the pool together within the cap, when a put has found no pooled file that is large enough.
func (l *ledger) trimPool() {
	most := l.s.caps.MaxBytes
	for most > 0 && l.pool != 0 && l.residentBytes.Load()+l.stagingBytes.Load()+l.poolBytes.Load() > most {
		i, sl := l.popPool()
		sl.session = l.me
		l.setState(sl, stTrash)
		l.trash = append(l.trash, i)
	}
}

// popPool takes the first file off the pool's list.
func (l *ledger) popPool() (uint32, *slot) {
	i := l.pool - 1
	if i >= l.slotTop || l.slot(i).state != stPool {
		panic(brokenLedger("pool"))
	}
	sl := l.slot(i)
	l.pool = sl.next
	l.point()
	l.poolBytes.Add(-sl.size)
	l.poolFiles.Add(-1)
	return i, sl
}

// purgePool unlinks pooled files until n bytes came free; all of them if n is 0.
func (l *ledger) purgePool(n int64) {
	freed := int64(0)
	for l.pool != 0 && (n == 0 || freed < n) {
		i, sl := l.popPool()
		freed += sl.size
		_ = unix.Unlinkat(l.s.dirfd, sl.scratch(), 0) // what fails is swept
		l.freeSlot(i)
	}
}

// purgeTrash unlinks files whose unlink failed before, or, if all is set, those too that wait for somebody's reaper. It returns the number of those that are gone.
func (l *ledger) purgeTrash(all bool) (gone int) {
	for i := range l.slotTop {
		sl := l.slot(i)
		if sl.state != stTrash || sl.session != 0 && !all {
			continue
		}
		if err := unix.Unlinkat(l.s.dirfd, l.trashFile(i).name, 0); err == nil || err == unix.ENOENT {
			l.freeSlot(i)
			gone++
		}
	}
	return gone
}

func (l *ledger) setDead(sl *slot, dead bool) {
	if dead == (sl.flags&flDead != 0) {
		return
	}
	sign := int64(1)
	if sl.flags ^= flDead; !dead {
		sign = -1
	}
	l.point()
	l.deadBytes.Add(sign * sl.bytes)
	l.deadSamples.Add(sign)
}

// trashFile is a file whose unlink takes too long to be done under the ledger's lock.
type trashFile struct {
	slot uint32
	uid  uint64
	name string
}

func (l *ledger) trashFile(i uint32) trashFile {
	sl := l.slot(i)
	name := sl.scratch()
	if sl.flags&flNamed != 0 {
		name = sl.fileName()
	}
	return trashFile{slot: i, uid: sl.uid, name: name}
}

// discard unlinks files: at once on tmpfs, where that takes a moment, and in the background on disks.
func (s *Store) discard(files []trashFile) {
	if len(files) == 0 {
		return
	}
	if s.medium.tmpfs || !s.reaper.add(s, files) {
		for _, f := range files {
			s.unlink(f)
		}
	}
}

func (s *Store) unlink(f trashFile) {
	s.files.RLock()
	err := error(unix.EBADF)
	if s.dirfd >= 0 {
		err = unix.Unlinkat(s.dirfd, f.name, 0)
	}
	s.files.RUnlock()
	gone := err == nil || errors.Is(err, unix.ENOENT)
	if !gone {
		s.log.Warn("dirstore: can't unlink a freed file; gc will try again", "dir", s.dir, "file", f.name, "error", err)
	}
	_, _ = s.change(func(l *ledger) error {
		if sl := l.slot(f.slot); sl.uid == f.uid && sl.state == stTrash {
			if !gone {
				sl.session = 0 // gc's
				return nil
			}
			l.freeSlot(f.slot)
		}
		return nil
	})
}

// reaper unlinks files of a disk, one at a time and with pauses, since an unlink of a big file takes 10 ms and disturbs the syncs of others. Its
// goroutine starts with the first file and ends when there is none, or, having hurried, with close.
type reaper struct {
	mu      sync.Mutex
	files   []trashFile
	running bool
	hurry   chan struct{} // closed by close
	done    sync.WaitGroup
}

// add takes files over; it is false once the reaper has closed.
func (r *reaper) add(s *Store, files []trashFile) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.hurry == nil {
		r.hurry = make(chan struct{})
	}
	select {
	case <-r.hurry:
		return false
	default:
	}
	r.files = append(r.files, files...)
	if !r.running {
		r.running = true
		r.done.Go(func() { r.run(s) })
	}
	return true
}

func (r *reaper) run(s *Store) {
	for {
		r.mu.Lock()
		if len(r.files) == 0 {
			r.running = false
			r.mu.Unlock()
			return
		}
		f := r.files[0]
		r.files = r.files[1:]
		r.mu.Unlock()
		begun := time.Now()
		s.unlink(f)
		pause := time.NewTimer(min(max(time.Since(begun), time.Millisecond), 100*time.Millisecond))
		select {
		case <-pause.C:
		case <-r.hurry:
			pause.Stop()
		}
	}
}

func (r *reaper) close() {
	r.mu.Lock()
	if r.hurry == nil {
		r.hurry = make(chan struct{})
	}
	select {
	case <-r.hurry:
	default:
		close(r.hurry)
	}
	r.mu.Unlock()
	r.done.Wait()
}
