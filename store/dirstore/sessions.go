//go:build linux

package dirstore

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
)

// enter makes this session known. Its lock comes first, so that nobody takes it for a dead one.
func (l *ledger) enter() error {
	for i := range l.sessions {
		if l.sessions[i].state != 0 {
			continue
		}
		if _, err := l.rangeLock(unix.F_OFD_SETLK, unix.F_WRLCK, int64(i)+1); err != nil {
			return sysError("open", l.s.dir, "lock the session", err)
		}
		l.sessions[i] = session{pid: uint32(os.Getpid()), started: l.now()}
		atomic.StoreUint32(&l.sessions[i].state, 1)
		l.me = uint32(i) + 1
		l.wake() // whoever was alone looks after us from now on
		return nil
	}
	return fail(sluice.Full, "open", l.s.dir, "has %d open sessions, at most %d are kept", maxSessions, maxSessions)
}

func (l *ledger) now() int64 { return l.s.clock.Now().UnixNano() }

// others counts the sessions beside this one that the ledger believes to live.
func (l *ledger) others() (n int) {
	for i := range l.sessions {
		if l.sessions[i].state != 0 && uint32(i)+1 != l.me {
			n++
		}
	}
	return n
}

// reapDead ends the sessions whose lock is gone, and returns the number of half-written files that it removed.
func (l *ledger) reapDead() (removed int) {
	for i := range l.sessions {
		who := uint32(i) + 1
		if l.sessions[i].state == 0 || who == l.me {
			continue
		}
		lk, err := l.rangeLock(unix.F_OFD_GETLK, unix.F_WRLCK, int64(who))
		if err != nil || lk.Type != unix.F_UNLCK {
			continue
		}
		l.s.log.Info("dirstore: a session died and is ended", "dir", l.s.dir, "pid", l.sessions[i].pid)
		removed += l.leave(who, true)
		l.endSession(who)
	}
	return removed
}

// leave gives up what a session holds; of the pins, only a dead one's.
func (l *ledger) leave(who uint32, dead bool) (removed int) {
	if dead {
		for i := range l.pinTop {
			if p := l.pin(i); p.state != 0 && p.session == who {
				at := l.clearPin(i, pinHandle|pinOpen)
				l.slot(at).flags |= flTainted
				l.settle(at)
			}
		}
	}
	for i := range l.slotTop {
		sl := l.slot(i)
		if sl.session != who {
			continue
		}
		switch sl.state {
		case stReserved:
			l.unreserve(i)
		case stStaging:
			l.scrap(i)
			removed++
		case stPublished:
			sl.orphaned, sl.session = l.now(), 0
		case stTrash:
			sl.session = 0
			if dead {
				l.trash = append(l.trash, i)
			}
		default:
			sl.session = 0
		}
	}
	return removed
}

func (l *ledger) havePins() bool {
	for i := range l.pinTop {
		if p := l.pin(i); p.state != 0 && p.session == l.me {
			return true
		}
	}
	return false
}

// endSession frees the entry, of which nothing may be left.
func (l *ledger) endSession(who uint32) {
	atomic.StoreUint32(&l.sessions[who-1].state, 0)
	if who == l.me {
		_, _ = l.rangeLock(unix.F_OFD_SETLK, unix.F_UNLCK, int64(who))
		l.me = 0
	}
}

// scrap removes what a put left behind that ended between reservation and publication.
func (l *ledger) scrap(i uint32) {
	sl := l.slot(i)
	_ = unix.Unlinkat(l.s.dirfd, sl.scratch(), 0)
	// It may have had its name already. The generation tells it from a stranger's file, at which the put would have failed.
	if ref, _, err := l.s.readRef(sl.name()); err == nil && digest(ref.Generation()) == sl.generation {
		_ = unix.Unlinkat(l.s.dirfd, sl.fileName(), 0)
	}
	l.unindex(i)
	l.stagingBytes.Add(-sl.bytes)
	l.unreserve(i)
}

// unreserve frees a slot that is counted as reserved and in no index.
func (l *ledger) unreserve(i uint32) {
	sl := l.slot(i)
	l.reservedBytes.Add(-sl.held)
	l.reservedSamples.Add(-1)
	l.freeSlot(i)
	l.released = true
}

// readRef reads the ref from the metadata of a sample's file.
func (s *Store) readRef(id string) (ref sluice.Ref, st unix.Stat_t, err error) {
	fd, err := s.openSample(id)
	if err != nil {
		return ref, st, err
	}
	f := os.NewFile(uintptr(fd), s.samplePath(id))
	defer func() { _ = f.Close() }()
	if err := unix.Fstat(fd, &st); err != nil {
		return ref, st, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return ref, st, errForeign
	}
	h, err := safetensors.ReadHeader(f, st.Size)
	if err != nil {
		return ref, st, err
	}
	text, ok := h.Metadata[safetensors.RefKey]
	if !ok {
		return ref, st, errForeign
	}
	if ref, err = sluice.ParseRef([]byte(text)); err != nil {
		return ref, st, err
	}
	if ref.SampleID() != id || ref.StoreURI() != s.uri {
		return ref, st, errForeign
	}
	return ref, st, nil
}

func (s *Store) samplePath(id string) string { return s.dir + "/" + id + sampleSuffix }

var errForeign = errors.New("is not a sample of this store")

// openSample opens a published file by its id, which must be valid. What it opened may be no file at all: look at it before use.
func (s *Store) openSample(id string) (fd int, err error) {
	return unix.Openat(s.dirfd, id+sampleSuffix, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
}

// verifySlots is for a ledger that may be torn: the host went down since it was written. No process of that time lives. What the files confirm is kept, claims included.
func (l *ledger) verifySlots() {
	l.slotTop, l.pinTop = uint32(len(l.segs)*segmentSlots), uint32(len(l.segs)*segmentPins)
	for i := range l.pinTop {
		l.pin(i).state = 0
	}
	for i := range l.sessions {
		l.sessions[i].state = 0
	}
	for i := range l.slotTop {
		sl := l.slot(i)
		if sl.state != stPublished || sluice.ValidateID(sl.name()) != nil {
			sl.state = stFree // its file, if there is one, is swept
			continue
		}
		ref, st, err := l.s.readRef(sl.name())
		if err != nil || digest(ref.Generation()) != sl.generation || ref.EstimatedBytes() != sl.bytes {
			sl.state = stFree
			continue
		}
		sl.session, sl.size, sl.ino, sl.epoch, sl.flags = 0, st.Size, st.Ino, 0, sl.flags&^flTouched
		if sl.orphaned == 0 {
			sl.orphaned = l.now()
		}
	}
}

// sweep compares the directory with the slots: it removes scratch files that no slot knows, takes in samples without a slot, removes unreadable ones after a day,
// and frees the slots of samples whose file is gone. It returns how many entries it removed.
func (l *ledger) sweep() (removed int, err error) {
	s := l.s
	names, err := s.list()
	if err != nil {
		return 0, err
	}
	scratch, there, leaving := map[string]bool{}, make(map[string]bool, len(names)), map[string]bool{}
	for i := range l.slotTop {
		sl := l.slot(i)
		if sl.state == stFree {
			continue
		}
		scratch[sl.scratch()] = true
		if sl.flags&flNamed != 0 {
			leaving[sl.fileName()] = true
		}
	}
	for _, name := range names {
		switch id, isSample := strings.CutSuffix(name, sampleSuffix); {
		case strings.HasPrefix(name, scratchPrefix):
			if !scratch[name] && unix.Unlinkat(s.dirfd, name, 0) == nil {
				removed++
			}
		case strings.HasPrefix(name, newPrefix):
			if s.abandoned(name) && unix.Unlinkat(s.dirfd, name, 0) == nil {
				removed++
			}
		case isSample && sluice.ValidateID(id) == nil:
			there[id] = true
			if _, sl := l.find(id); sl != nil || leaving[name] {
				continue
			}
			switch ref, st, err := s.readRef(id); {
			case err == nil:
				if err := l.adopt(ref, &st); err != nil {
					return removed, err
				}
			case errors.Is(err, sluice.ErrCorrupt) || errors.Is(err, sluice.ErrInvalid):
				if age := l.now() - st.Mtim.Nano(); age >= int64(ownerlessAge) && unix.Unlinkat(s.dirfd, name, 0) == nil {
					s.log.Warn("dirstore: removed a file that nobody owns and nobody can read", "dir", s.dir, "file", name, "reason", err)
					removed++
				}
			}
		}
	}
	for i := range l.slotTop {
		if sl := l.slot(i); sl.state == stPublished && !there[sl.name()] {
			l.lost(i)
			removed++
		}
	}
	return removed, nil
}

// abandoned reports whether the process that makes a new ledger under the name is gone: it would hold the lock.
func (s *Store) abandoned(name string) bool {
	fd, err := unix.Openat(s.dirfd, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer func() { _ = unix.Close(fd) }()
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || time.Since(time.Unix(st.Mtim.Unix())) < time.Minute {
		return false // its writer may not have come to lock it
	}
	return flock(fd, unix.LOCK_EX|unix.LOCK_NB) == nil
}

func (s *Store) list() ([]string, error) {
	fd, err := unix.Openat(s.dirfd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, sysError("scan", s.dir, "open the directory", err)
	}
	d := os.NewFile(uintptr(fd), s.dir)
	defer func() { _ = d.Close() }()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, sysError("scan", s.dir, "read the directory", err)
	}
	return names, nil
}

// adopt makes a slot for a sample that was found without one. Caps do not keep it out: it takes its room already.
func (l *ledger) adopt(ref sluice.Ref, st *unix.Stat_t) error {
	i, sl, err := l.newSlot()
	if err != nil {
		return err
	}
	sl.setName(ref.SampleID())
	sl.session, sl.flags, sl.bytes, sl.size, sl.ino = 0, flAdopted, ref.EstimatedBytes(), st.Size, st.Ino
	sl.generation, sl.put, sl.orphaned = digest(ref.Generation()), l.now(), l.now()
	l.setState(sl, stPublished)
	l.index(i)
	l.residentBytes.Add(sl.bytes)
	l.residentSamples.Add(1)
	return nil
}

// GC frees what nobody owns, and returns how many entries that were: half-written files of dead sessions, unclaimed samples of sessions that have been gone for
// 60 s, files without an owner after a day, samples whose file is gone, and unlinks that failed. What a live session reserved, put, or pins, and what is claimed, is not
// touched.
func (s *Store) GC(ctx context.Context) (int, error) {
	if err := s.enter(ctx, "gc"); err != nil {
		return 0, err
	}
	defer s.life.RUnlock()
	if err := s.checkDirectory("gc"); err != nil {
		return 0, err
	}
	n := 0
	err := s.do(func(l *ledger) error {
		n += l.reapDead()
		now := l.now()
		n += l.purgeTrash(false)
		for i := range l.slotTop {
			switch sl := l.slot(i); {
			case sl.state == stPublished && sl.owner == 0 && sl.pins == 0 && sl.open == 0 && sl.session == 0:
				age := orphanAge
				if sl.flags&flAdopted != 0 {
					age = ownerlessAge
				}
				if now-sl.orphaned >= int64(age) {
					l.evict(i)
					n++
				}
			}
		}
		k, err := l.sweep()
		n += k
		return err
	})
	return n, err
}
