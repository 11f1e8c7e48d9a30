//go:build linux

package dirstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
)

// Get pins the sample, locks its file shared, and maps it. The pin comes first: a pinned sample's file stays in its place.
func (s *Store) Get(ctx context.Context, ref sluice.Ref) (*sluice.Tensors, error) {
	if err := s.enter(ctx, "get"); err != nil {
		return nil, err
	}
	defer s.life.RUnlock()
	if err := s.checkDirectory("get"); err != nil {
		return nil, err
	}
	if err := s.known("get", ref); err != nil {
		return nil, err
	}
	handle, at, err := s.pin(ref)
	if err != nil {
		return nil, err
	}
	features, unmap, err := s.load(ref, at)
	if err != nil {
		return nil, s.undoPin(ref, handle, at, err)
	}
	return sluice.NewTensors(s, handle, features, func() error {
		err := unmap()
		s.drop(handle, pinOpen)
		return err
	}), nil
}

// pin notes a new handle and mapping of a published sample.
func (s *Store) pin(ref sluice.Ref) (handle sluice.Handle, at slotCopy, err error) {
	handle = sluice.Handle{StoreURI: s.uri, SampleID: ref.SampleID(), ID: sluice.NewHandleID()}
	err = s.do(func(l *ledger) error {
		i, sl := l.published(ref.SampleID(), digest(ref.Generation()))
		if sl == nil {
			return notFound("get", ref)
		}
		at = slotCopy{index: i, uid: sl.uid, ino: sl.ino, size: sl.size, verify: s.opts.Verify || !s.medium.tmpfs && sl.epoch != l.epoch}
		_, err := l.newPin(i, handle.ID)
		return err
	})
	if err == nil {
		s.hooks.reach("pinned")
	}
	return handle, at, err
}

// slotCopy is what get needs of a slot after it has let go of the ledger.
type slotCopy struct {
	index  uint32
	uid    uint64
	ino    uint64
	size   int64
	verify bool
}

// known refuses refs that this store can't have. The id of every ref is valid, so it is a safe file name.
func (s *Store) known(op string, ref sluice.Ref) error {
	if ref.IsZero() {
		return fail(sluice.NotFound, op, "", "the ref is the zero Ref")
	}
	if ref.StoreURI() != s.uri {
		return fail(sluice.NotFound, op, ref.SampleID(), "is in the store %s, this is %s", ref.StoreURI(), s.uri)
	}
	return nil
}

func notFound(op string, ref sluice.Ref) error {
	return fail(sluice.NotFound, op, ref.SampleID(), "is not here in generation %s", ref.Generation())
}

// load opens, locks, maps and checks a pinned sample. unmap gives memory and lock back.
func (s *Store) load(ref sluice.Ref, at slotCopy) (features []sluice.Feature, unmap func() error, err error) {
	f, m, features, err := s.openPinned(ref, at)
	if err != nil {
		return nil, nil, err
	}
	if s.medium.maps && s.medium.keepFD {
		return features, func() error { return errors.Join(m.Close(), f.Close()) }, nil
	}
	_ = f.Close()
	return features, m.Close, nil
}

// openPinned opens and locks the file of a pinned sample, maps and checks it.
func (s *Store) openPinned(ref sluice.Ref, at slotCopy) (f *os.File, m *safetensors.Mapping, features []sluice.Feature, err error) {
	id := ref.SampleID()
	fd, err := s.openSample(id)
	if err != nil {
		if errors.Is(err, unix.ENOENT) {
			return nil, nil, nil, &sluice.Error{Kind: sluice.NotFound, Op: "dirstore: get", Subject: id, Detail: "its file was deleted by someone else", Err: err}
		}
		return nil, nil, nil, sysError("get", id, "open the file", err)
	}
	f = os.NewFile(uintptr(fd), s.samplePath(id))
	good := false
	defer func() {
		if !good {
			_ = f.Close()
		}
	}()
	if !s.hooks.noLocks {
		if err := flock(fd, unix.LOCK_SH|unix.LOCK_NB); err != nil {
			return nil, nil, nil, &sluice.Error{Kind: sluice.Unavailable, Op: "dirstore: get", Subject: id, Detail: "another process holds an exclusive lock on the file", Err: err}
		}
	}
	// What is looked at from here on can't change.
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, nil, nil, sysError("get", id, "stat the file", err)
	}
	broken := func(format string, args ...any) error { return s.corrupt(id, fmt.Sprintf(format, args...), nil) }
	if st.Ino != at.ino {
		return nil, nil, nil, broken("is inode %d, the store wrote inode %d: someone replaced the file", st.Ino, at.ino)
	}
	if st.Size != at.size {
		return nil, nil, nil, broken("is %d bytes, the store wrote %d", st.Size, at.size)
	}
	if s.medium.tmpfs && st.Blocks*512 < st.Size { // elsewhere a hole is read as zeros
		if err := s.fillHoles(id, at.size); err != nil {
			return nil, nil, nil, err
		}
	}
	if s.medium.maps {
		m, err = safetensors.Map(f, at.size)
	} else {
		m, err = safetensors.Read(io.NewSectionReader(f, 0, at.size), at.size)
	}
	if err != nil {
		if errors.Is(err, sluice.ErrCorrupt) {
			err = s.corrupt(id, "", err)
		}
		return nil, nil, nil, err
	}
	if features, err = s.check(ref, m, at); err != nil {
		_ = m.Close()
		return nil, nil, nil, err
	}
	good = true
	return f, m, features, nil
}

// fillHoles gives the file of a sample that came by a copy that saves room its pages: who reads a hole through a mapping on a full file system is sent a SIGBUS.
func (s *Store) fillHoles(id string, size int64) error {
	fd, err := unix.Openat(s.dirfd, id+sampleSuffix, unix.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return sysError("get", id, "open the file", err)
	}
	defer func() { _ = unix.Close(fd) }()
	return s.allocate("get", id, fd, size)
}

// check compares the file with the ref, and its bytes with their checksums where that is due.
func (s *Store) check(ref sluice.Ref, m *safetensors.Mapping, at slotCopy) ([]sluice.Feature, error) {
	id := ref.SampleID()
	features, err := m.Features(ref.FeatureNames())
	if err != nil {
		return nil, s.corrupt(id, "", err)
	}
	if n := len(m.Header().Entries); n != len(features) {
		return nil, s.corrupt(id, fmt.Sprintf("has %d features, the ref promises %d", n, len(features)), nil)
	}
	if err := ref.CheckFeatures("dirstore: get", features); err != nil {
		return nil, err
	}
	if text := m.Header().Metadata[safetensors.RefKey]; text != ref.Canonical() {
		return nil, s.corrupt(id, "has another ref in its metadata than the one that was asked for", nil)
	}
	if !at.verify {
		return features, nil
	}
	checked, err := m.Verify()
	if err != nil {
		return nil, s.corrupt(id, "", err)
	}
	switch {
	case !checked && !s.medium.tmpfs:
		return nil, s.corrupt(id, "has no checksums under "+safetensors.ChecksumsKey+" in its metadata, want one a feature", nil)
	case checked:
		_ = s.do(func(l *ledger) error {
			if sl := l.slot(at.index); sl.uid == at.uid {
				sl.epoch = l.epoch
			}
			return nil
		})
	}
	return features, nil
}

func (s *Store) corrupt(id, detail string, err error) error {
	return &sluice.Error{Kind: sluice.Corrupt, Op: "dirstore: get", Subject: id, Detail: strings.TrimSpace("the file " + s.samplePath(id) + " " + detail), Err: err}
}

// undoPin takes back the pin of a get that failed, and returns the error to report. It is no release: a sample that nobody claims stays.
func (s *Store) undoPin(ref sluice.Ref, h sluice.Handle, at slotCopy, cause error) error {
	err := s.do(func(l *ledger) error {
		i, p := l.findPin(h.ID)
		if p == nil {
			return nil
		}
		l.clearPin(i, pinHandle|pinOpen)
		switch sl := l.slot(at.index); {
		case sl.uid != at.uid:
		case sl.state != stPublished:
			// It was aborted behind the pin: what has its name now is nobody's, or another sample's.
			cause = notFound("get", ref)
			l.settle(at.index)
		case errors.Is(cause, unix.ENOENT):
			l.lost(at.index)
		default:
			l.settle(at.index)
		}
		return nil
	})
	if err != nil {
		return errors.Join(cause, err)
	}
	return cause
}

// Release gives up a pin, of whichever session.
func (s *Store) Release(_ context.Context, h sluice.Handle) error {
	if h.StoreURI != s.uri {
		return nil
	}
	err := s.do(func(l *ledger) error {
		i, p := l.findPin(h.ID)
		if p == nil || p.state&pinHandle == 0 {
			return nil
		}
		sl := l.slot(p.slot - 1)
		if sl.uid != p.uid || sl.name() != h.SampleID {
			return nil
		}
		sl.flags |= flTouched
		l.settle(l.clearPin(i, pinHandle))
		return nil
	})
	if errors.Is(err, sluice.ErrClosed) {
		return nil // nothing is out any more
	}
	return err
}

// drop takes bits from this session's own pin.
func (s *Store) drop(h sluice.Handle, bits uint32) {
	err := s.do(func(l *ledger) error {
		if i, p := l.findPin(h.ID); p != nil {
			l.settle(l.clearPin(i, bits))
		}
		return nil
	})
	if err != nil && !errors.Is(err, sluice.ErrClosed) {
		s.log.Warn("dirstore: can't note that a mapping is gone", "dir", s.dir, "sample", h.SampleID, "error", err)
	}
}
