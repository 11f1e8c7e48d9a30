//go:build linux

package dirstore

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
)

// digest stands for a generation in the ledger. The file has the generation itself.
func digest(generation string) (d [16]byte) {
	sum := sha256.Sum256([]byte(generation))
	copy(d[:], sum[:])
	return d
}

// Reserve sets room aside, in the caps and on the medium.
func (s *Store) Reserve(ctx context.Context, bytes int64) (r sluice.Reservation, err error) {
	if bytes < 0 || bytes >= 1<<53 {
		return r, fail(sluice.Invalid, "reserve", "", "bytes is %d, want 0 or more and less than 2^53", bytes)
	}
	if err := s.enter(ctx, "reserve"); err != nil {
		return r, err
	}
	defer s.life.RUnlock()
	if err := s.checkDirectory("reserve"); err != nil {
		return r, err
	}
	err = s.do(func(l *ledger) error {
		if err := l.makeRoom("reserve", "", bytes, 0, 0); err != nil {
			return err
		}
		i, sl, err := l.reserve(bytes)
		if err == nil {
			r = sluice.Reservation{ID: reservationID(i, sl), Bytes: bytes}
		}
		return err
	})
	return r, err
}

// reserve takes a slot. The caps have been checked.
func (l *ledger) reserve(bytes int64) (uint32, *slot, error) {
	i, sl, err := l.newSlot()
	if err != nil {
		return 0, nil, err
	}
	sl.held = bytes
	rand.Read(sl.token[:])
	l.setState(sl, stReserved)
	l.reservedBytes.Add(bytes)
	l.reservedSamples.Add(1)
	return i, sl, nil
}

// reservationID says where the slot is and, in bits that nobody can guess, that the caller was given it.
func reservationID(i uint32, sl *slot) string { return fmt.Sprintf("%08x%x", i, sl.token) }

// reservation finds a live reservation, or nil.
func (l *ledger) reservation(id string) (uint32, *slot) {
	var raw [4 + 16]byte
	if len(id) != 2*len(raw) {
		return 0, nil
	}
	if _, err := hex.Decode(raw[:], []byte(id)); err != nil {
		return 0, nil
	}
	i := binary.BigEndian.Uint32(raw[:4])
	if i >= l.slotTop {
		return 0, nil
	}
	sl := l.slot(i)
	if sl.state != stReserved || subtle.ConstantTimeCompare(sl.token[:], raw[4:]) != 1 {
		return 0, nil
	}
	return i, sl
}

// makeRoom checks that n bytes in a sample fit when hadBytes and hadSamples of what is counted are given up for them. Before it refuses, it ends dead sessions and gives
// back what waits for its unlink, and the pool.
func (l *ledger) makeRoom(op, subject string, n, hadBytes, hadSamples int64) error {
	caps := l.s.caps
	if caps.MaxBytes > 0 && n > caps.MaxBytes {
		return &sluice.Error{Kind: sluice.Full, Op: "dirstore: " + op, Subject: subject, Detail: fmt.Sprintf("a sample of %d bytes (%s) does not fit the cap of %d bytes (%s)", n, human(n), caps.MaxBytes, human(caps.MaxBytes)),
			Hint: "raise max_bytes or shorten the sample"}
	}
	err := l.fits(op, subject, n, hadBytes, hadSamples)
	if err != nil {
		l.reapDead()
		err = l.fits(op, subject, n, hadBytes, hadSamples)
	}
	if err != nil {
		return err
	}
	need := n - hadBytes + l.reservedBytes.Load() - l.stagingBytes.Load()
	if free, _ := l.s.room(false); need <= free {
		return nil
	}
	l.purgeTrash(true)
	if free, _ := l.s.room(true); need > free {
		l.purgePool(need - free)
	}
	free, of := l.s.room(true)
	if need <= free {
		return nil
	}
	return &sluice.Error{Kind: sluice.NoSpace, Op: "dirstore: " + op, Subject: subject,
		Detail: fmt.Sprintf("%d bytes (%s) are wanted beside %d that are reserved, the %s of %s has %d (%s) free", n, human(n), need-n+hadBytes, of, l.s.dir, free, human(free)),
		Hint:   "free room there, or " + l.s.moreRoom()}
}

func (l *ledger) fits(op, subject string, n, hadBytes, hadSamples int64) error {
	caps, h := l.s.caps, l.health(l.s.caps)
	if used := h.UsedBytes() - hadBytes; caps.MaxBytes > 0 && n > caps.MaxBytes-used {
		return fail(sluice.Full, op, subject, "%d bytes (%s) do not fit beside %d in use: the cap is %d bytes (%s)", n, human(n), used, caps.MaxBytes, human(caps.MaxBytes))
	}
	if used := h.UsedSamples() - hadSamples; caps.MaxSamples > 0 && used >= caps.MaxSamples {
		return fail(sluice.Full, op, subject, "%d samples are in use: the cap is %d samples", used, caps.MaxSamples)
	}
	return nil
}

// Unreserve ends a reservation.
func (s *Store) Unreserve(_ context.Context, r sluice.Reservation) error {
	if err := s.enter(context.Background(), "unreserve"); err != nil {
		return err
	}
	defer s.life.RUnlock()
	if r.ID == "" {
		return nil
	}
	return s.do(func(l *ledger) error {
		if i, sl := l.reservation(r.ID); sl != nil {
			l.unreserve(i)
		}
		return nil
	})
}

// staged is a put between its two changes of the ledger.
type staged struct {
	slot     uint32
	uid      uint64
	scratch  string
	recycled bool
	reserved bool  // a reservation was given, which comes back if the put fails
	room     int64 // its size
}

// Put copies the sample into a scratch file beside the samples, and links it to its name. Under a reservation that has ended it goes by the caps, as under none.
func (s *Store) Put(ctx context.Context, sample *sluice.Sample, r sluice.Reservation) (sluice.Ref, error) {
	if sample == nil {
		return sluice.Ref{}, fail(sluice.Invalid, "put", "", "the sample is nil")
	}
	if err := s.enter(ctx, "put"); err != nil {
		return sluice.Ref{}, err
	}
	defer s.life.RUnlock()
	if err := s.checkDirectory("put"); err != nil {
		return sluice.Ref{}, err
	}
	ref, layout, err := s.plan(sample)
	if err != nil {
		return sluice.Ref{}, err
	}
	id, size := ref.SampleID(), layout.Size()
	return s.put(ctx, ref, r, source{size: size, fill: func(p staged) (*os.File, error) {
		return s.writeScratch(id, p, size, s.medium.ahead, func(f *os.File) error {
			err := layout.WriteFile(f, 0, sample.Features)
			if isFull(err) {
				s.giveBack()
				err = layout.WriteFile(f, 0, sample.Features)
			}
			if err != nil {
				return s.writeError(id, size, err)
			}
			return nil
		})
	}})
}

// source is where the file of a put comes from.
type source struct {
	size int64 // of the file
	// fill puts the whole file under the scratch name, and returns it open.
	fill func(p staged) (*os.File, error)
	// moved says that fill moves a file there, so that it needs none from the pool.
	moved bool
	// back, if set, takes the file of a put that failed out of the store again, from the name that it has there.
	back func(name string)
}

// put takes the room for a sample, has its file made, and publishes it: what all ways into the store have in common. If the sample is here in this very generation already,
// nothing is made, and its ref is returned: the call was repeated.
func (s *Store) put(ctx context.Context, ref sluice.Ref, r sluice.Reservation, src source) (sluice.Ref, error) {
	id := ref.SampleID()
	var p staged
	var here bool
	if err := s.do(func(l *ledger) (err error) {
		if _, sl := l.published(id, digest(ref.Generation())); sl != nil {
			here = true
			return nil
		}
		p, err = l.stage(ref, src, r)
		return err
	}); err != nil {
		return sluice.Ref{}, err
	}
	if here {
		return s.repeated(ref)
	}
	s.hooks.reach("staged")
	ino, linked, err := s.writeSample(id, p, src)
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err == nil {
		s.hooks.reach("linked")
		err = s.do(func(l *ledger) error { return l.publish(p, ino) })
	}
	if err != nil {
		name := p.scratch
		if linked {
			name = id + sampleSuffix
		}
		if src.back != nil {
			src.back(name)
		}
		_ = unix.Unlinkat(s.dirfd, name, 0)
		_ = unix.Unlinkat(s.dirfd, p.scratch, 0)
		_ = s.do(func(l *ledger) error { l.unstage(p); return nil })
		return sluice.Ref{}, err
	}
	s.hooks.reach("published")
	return ref, nil
}

// repeated is the answer to a put of a sample that is here in this generation.
func (s *Store) repeated(ref sluice.Ref) (sluice.Ref, error) {
	have, err := s.find("put", ref.SampleID(), ref.Generation())
	switch {
	case errors.Is(err, sluice.ErrNotFound):
		return sluice.Ref{}, fail(sluice.Unavailable, "put", ref.SampleID(), "was here and was freed at this moment")
	case err != nil:
		return sluice.Ref{}, err
	case !have.Equal(ref):
		return sluice.Ref{}, fail(sluice.Duplicate, "put", ref.SampleID(), "is here in the same generation with another ref: a generation stands for one put")
	}
	return have, nil
}

// plan checks everything about a sample that can be known without the store's state.
func (s *Store) plan(sample *sluice.Sample) (sluice.Ref, *safetensors.Layout, error) {
	invalid := func(err error) error { return &sluice.Error{Kind: sluice.Invalid, Op: "dirstore: put", Err: err} }
	fields, err := sample.RefFields(s.uri, sluice.NewGeneration())
	if err != nil {
		return sluice.Ref{}, nil, invalid(err)
	}
	ref, err := sluice.NewRef(fields)
	if err != nil {
		return sluice.Ref{}, nil, invalid(err)
	}
	layout, err := s.layout(ref, sample.Features)
	if err != nil {
		return sluice.Ref{}, nil, invalid(err)
	}
	return ref, layout, nil
}

// layout is how the store writes a sample. Data of the features may be nil.
func (s *Store) layout(ref sluice.Ref, features []sluice.Feature) (*safetensors.Layout, error) {
	layoutOf := safetensors.NewChecksummedLayout
	if s.medium.tmpfs && !s.opts.Verify {
		layoutOf = safetensors.NewLayout
	}
	return layoutOf(features, map[string]string{safetensors.RefKey: ref.Canonical()})
}

// stage takes id and room for a put.
func (l *ledger) stage(ref sluice.Ref, src source, r sluice.Reservation) (p staged, err error) {
	id, n := ref.SampleID(), ref.EstimatedBytes()
	_, other := l.find(id)
	if other != nil && other.state == stStaging {
		l.reapDead() // it may be a put that died
		_, other = l.find(id)
	}
	switch {
	case other == nil:
	case other.state == stStaging && other.generation == digest(ref.Generation()):
		return p, &sluice.Error{Kind: sluice.Unavailable, Op: "dirstore: put", Subject: id, Detail: "is being put in this generation at the moment", Hint: "try again"}
	default:
		return p, fail(sluice.Duplicate, "put", id, "the id is taken by a sample that is here")
	}
	i, sl := l.reservation(r.ID)
	if sl != nil {
		p.reserved, p.room = true, sl.held
		if n > sl.held {
			if err := l.makeRoom("put", id, n, sl.held, 1); err != nil {
				return p, err
			}
		}
	} else {
		if err := l.makeRoom("put", id, n, 0, 0); err != nil {
			return p, err
		}
		if i, sl, err = l.reserve(n); err != nil {
			return p, err
		}
	}
	if more := n - sl.held; more > 0 {
		sl.held = n
		l.reservedBytes.Add(more)
	}
	sl.session, sl.bytes, sl.size, sl.generation = l.me, n, src.size, digest(ref.Generation())
	sl.setName(id)
	if !src.moved {
		if file, ok := l.takePooled(src.size); ok {
			sl.file, p.recycled = file, true
		}
	}
	l.setState(sl, stStaging)
	l.stagingBytes.Add(n)
	l.index(i)
	l.trimPool()
	p.slot, p.uid, p.scratch = i, sl.uid, sl.scratch()
	return p, nil
}

// mine returns the slot of a put if it still has it.
func (l *ledger) mine(p staged) *slot {
	if sl := l.slot(p.slot); sl.uid == p.uid && sl.state == stStaging {
		return sl
	}
	return nil
}

// unstage ends a put that failed; its files are gone.
func (l *ledger) unstage(p staged) {
	sl := l.mine(p)
	if sl == nil {
		return
	}
	l.unindex(p.slot)
	l.stagingBytes.Add(-sl.bytes)
	if !p.reserved {
		l.unreserve(p.slot)
		return
	}
	more := sl.held - p.room
	l.setState(sl, stReserved)
	sl.bytes, sl.size, sl.held, sl.idLen, sl.file = 0, 0, p.room, 0, sl.uid
	if more > 0 {
		l.reservedBytes.Add(-more)
		l.released = true
	}
}

func (l *ledger) publish(p staged, ino uint64) error {
	sl := l.mine(p)
	if sl == nil {
		return fail(sluice.Unavailable, "put", l.s.dir, "the ledger has lost the put: another process took this session for dead")
	}
	held := sl.held
	sl.put, sl.ino, sl.epoch, sl.orphaned, sl.flags = l.now(), ino, l.epoch, 0, 0
	l.setState(sl, stPublished)
	l.stagingBytes.Add(-sl.bytes)
	l.point()
	l.reservedBytes.Add(-held)
	l.reservedSamples.Add(-1)
	l.point()
	l.residentBytes.Add(sl.bytes)
	l.residentSamples.Add(1)
	sl.held = 0
	if held > sl.bytes {
		l.released = true
	}
	return nil
}

// writeScratch opens the scratch file, with its room if it is to have that ahead, and has it written.
func (s *Store) writeScratch(id string, p staged, size int64, ahead bool, write func(f *os.File) error) (f *os.File, err error) {
	fd, err := s.scratchFile(id, p, size, ahead)
	if err != nil {
		return nil, err
	}
	f = os.NewFile(uintptr(fd), s.dir+"/"+p.scratch)
	done := false
	defer func() {
		if !done {
			_ = f.Close()
		}
	}()
	s.hooks.reach("created")
	if err := write(f); err != nil {
		return nil, err
	}
	done = true
	return f, nil
}

func (s *Store) writeError(id string, size int64, err error) error {
	if isFull(err) {
		return s.spaceError("put", id, fmt.Sprintf("write %d bytes (%s)", size, human(size)), err)
	}
	kind := sluice.KindOf(err)
	if kind == "" {
		kind = sluice.Unavailable
	}
	return &sluice.Error{Kind: kind, Op: "dirstore: put", Subject: id, Err: err}
}

// writeSample makes the scratch file and links it to the sample's name. linked says whether the name was taken.
func (s *Store) writeSample(id string, p staged, src source) (ino uint64, linked bool, err error) {
	f, err := src.fill(p)
	if err != nil {
		return 0, false, err
	}
	defer func() {
		if f != nil {
			_ = f.Close()
		}
	}()
	fd := int(f.Fd())
	s.hooks.reach("written")
	if s.opts.Durability == Power {
		if err := s.sync(fd); err != nil {
			return 0, false, sysError("put", id, "sync the file", err)
		}
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, false, sysError("put", id, "stat the file", err)
	}
	if p.recycled {
		// The exclusive lock must end before anybody can open the file by its name. Closing alone is not enough: a child that is between fork and exec shares the lock.
		_ = flock(fd, unix.LOCK_UN)
	}
	err = f.Close()
	f = nil
	if err != nil {
		return 0, false, sysError("put", id, "close the file", err)
	}
	if err := unix.Linkat(s.dirfd, p.scratch, s.dirfd, id+sampleSuffix, 0); err != nil {
		if err == unix.EEXIST {
			return 0, false, &sluice.Error{Kind: sluice.Duplicate, Op: "dirstore: put", Subject: id, Detail: "a file that is not the store's has the name " + id + sampleSuffix, Hint: "move it out of the directory"}
		}
		return 0, false, sysError("put", id, "link the file to its name", err)
	}
	s.hooks.reach("named")
	if err := unix.Unlinkat(s.dirfd, p.scratch, 0); err != nil {
		return 0, true, sysError("put", id, "unlink the scratch name", err)
	}
	if s.opts.Durability == Power {
		if err := s.sync(s.dirfd); err != nil {
			return 0, true, sysError("put", id, "sync the directory", err)
		}
	}
	return st.Ino, true, nil
}

func (s *Store) sync(fd int) error {
	if f := s.hooks.sync; f != nil {
		return f(fd)
	}
	for {
		if err := unix.Fsync(fd); err != unix.EINTR {
			return err
		}
	}
}

// scratchFile opens the put's scratch file for size bytes: one from the pool if it has one that nobody can have mapped, or a fresh one, which gets its room at once if ahead
// is set and the file system can do that.
func (s *Store) scratchFile(id string, p staged, size int64, ahead bool) (fd int, err error) {
	if p.recycled {
		if fd, ok := s.recycle(p.scratch, size); ok {
			return fd, nil
		}
		if err := unix.Unlinkat(s.dirfd, p.scratch, 0); err != nil && err != unix.ENOENT {
			return 0, sysError("put", id, "unlink a file that can't be recycled", err)
		}
	}
	fd, err = unix.Openat(s.dirfd, p.scratch, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return 0, sysError("put", id, "create the scratch file", err)
	}
	if ahead {
		if err := s.allocate("put", id, fd, size); err != nil {
			_ = unix.Close(fd)
			return 0, err
		}
	}
	return fd, nil
}

// allocate gives a sample's file room where it has none, if the file system can do that.
func (s *Store) allocate(op, id string, fd int, size int64) error {
	err := fallocate(fd, 0, size)
	if isFull(err) {
		s.giveBack()
		err = fallocate(fd, 0, size)
	}
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return s.spaceError(op, id, fmt.Sprintf("allocate %d bytes (%s)", size, human(size)), err)
	}
	return nil
}

// giveBack frees what no sample needs, for a call that has found the medium full.
func (s *Store) giveBack() {
	_ = s.do(func(l *ledger) error {
		l.purgeTrash(true)
		l.purgePool(0)
		return nil
	})
}

// recycle opens the pooled file under an exclusive lock, cut to size; ok is false if it must not be written to. The lock fails while any process has the file mapped,
// whatever the ledger says.
func (s *Store) recycle(name string, size int64) (fd int, ok bool) {
	fd, err := unix.Openat(s.dirfd, name, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return 0, false
	}
	var st unix.Stat_t
	ok = s.hooks.noLocks || flock(fd, unix.LOCK_EX|unix.LOCK_NB) == nil
	// A second name is somebody's copy by hard link.
	ok = ok && unix.Fstat(fd, &st) == nil && st.Nlink == 1 && st.Size >= size
	if ok && st.Size > size {
		ok = unix.Ftruncate(fd, size) == nil
	}
	if !ok {
		_ = unix.Close(fd)
	}
	return fd, ok
}
