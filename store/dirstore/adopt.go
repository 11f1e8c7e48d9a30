//go:build linux

package dirstore

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
)

// Adopt makes a sample of a safetensors file that lies, complete, under a bare name in a staging directory on the store's file system. The file must be a regular one, with
// a single name, of the user uid, and nobody may have it open for writing or mapped shared and writable. It is moved, which costs no copy, and looked at again
// after that, when nobody can reach it by name.
//
// A file is moved as it is, whatever the order of its tensors, if its metadata has the ref in canonical form under "sluice.ref", and every tensor
// is aligned to its elements. On a medium that wants checksums, and if it carries any, its header must be the one that package safetensors lays out with checksums; zeros are
// filled in, and others compared with the data, but in memory, where they are for readers far away, who compare them. Any other valid file, and every file if the kernel can't tell whether it is open for writing, is copied as [Store.Receive] would, and then removed.
//
// If Adopt succeeds, the name is gone. If it fails, the file has its name again, perhaps with mode 0600 and checksums filled in, unless
// another file has taken the name meanwhile. A process that dies while the file is moved takes it along. A call that repeats one of the same generation returns the same
// ref, also when the file is gone, if in names the generation.
//
// Errors are those of Receive, and ErrNotFound if there is no such file, ErrDenied for a link, another user's file, and one with several names, ErrInvalid for a name that is not bare, another kind
// of file, and a directory on another file system, ErrConflict for a file that is open for writing.
func (s *Store) Adopt(ctx context.Context, staging *os.Root, name string, uid int, in Incoming, r sluice.Reservation) (sluice.Ref, error) {
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
		return sluice.Ref{}, fail(sluice.Invalid, "adopt", name, "is no bare file name")
	}
	if err := s.enter(ctx, "adopt"); err != nil {
		return sluice.Ref{}, err
	}
	defer s.life.RUnlock()
	if err := s.checkDirectory("adopt"); err != nil {
		return sluice.Ref{}, err
	}
	dir, err := staging.Open(".")
	if err != nil {
		return sluice.Ref{}, sysError("adopt", staging.Name(), "open the staging directory", err)
	}
	defer func() { _ = dir.Close() }()
	a := &adoption{s: s, dirfd: int(dir.Fd()), name: name, uid: uid, in: in}
	var st unix.Stat_t
	if err := unix.Fstat(a.dirfd, &st); err != nil {
		return sluice.Ref{}, sysError("adopt", staging.Name(), "stat the staging directory", err)
	}
	if st.Dev != s.dev {
		return sluice.Ref{}, a.elsewhere()
	}
	f, err := a.open()
	if errors.Is(err, sluice.ErrNotFound) {
		if ref, again := s.stored("adopt", in); again != nil || !ref.IsZero() {
			return ref, again
		}
	}
	if err != nil {
		return sluice.Ref{}, err
	}
	defer func() { _ = f.Close() }()
	ref, err := a.adopt(ctx, f, r)
	if err == nil {
		a.remove(f) // unless it was moved
	}
	return ref, err
}

// adoption is one call of Adopt.
type adoption struct {
	s     *Store
	dirfd int // the staging directory
	name  string
	uid   int
	gid   int // of the file
	in    Incoming
}

// open opens the file, if it is one that may be adopted. Of what else may lie there, nothing is opened: a device could do anything at that.
func (a *adoption) open() (*os.File, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(a.dirfd, a.name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, sysError("adopt", a.name, "find the file", err)
	}
	if err := a.check(&st); err != nil {
		return nil, err
	}
	fd, err := unix.Openat(a.dirfd, a.name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, sysError("adopt", a.name, "open the file", err)
	}
	f := os.NewFile(uintptr(fd), a.name)
	if err = unix.Fstat(fd, &st); err != nil {
		err = sysError("adopt", a.name, "stat the file", err)
	} else {
		a.gid, err = int(st.Gid), a.check(&st)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func (a *adoption) elsewhere() error {
	return &sluice.Error{Kind: sluice.Invalid, Op: "dirstore: adopt", Subject: a.name, Detail: "is on another file system than the store " + a.s.dir, Hint: "stage on the same one, or upload the sample"}
}

func (a *adoption) check(st *unix.Stat_t) error {
	switch {
	case st.Mode&unix.S_IFMT == unix.S_IFLNK:
		return fail(sluice.Denied, "adopt", a.name, "is a symbolic link, want a regular file")
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return fail(sluice.Invalid, "adopt", a.name, "is no regular file (mode %o)", st.Mode)
	case st.Uid != uint32(a.uid):
		return fail(sluice.Denied, "adopt", a.name, "belongs to user %d, want %d", st.Uid, a.uid)
	case st.Nlink != 1:
		return fail(sluice.Denied, "adopt", a.name, "has %d names, want one", st.Nlink)
	}
	return nil
}

// adopt decides whether the file can be taken as it is.
func (a *adoption) adopt(ctx context.Context, f *os.File, r sluice.Reservation) (sluice.Ref, error) {
	s := a.s
	before, err := a.look(ctx, f)
	if err != nil {
		return sluice.Ref{}, err
	}
	unwritten, err := a.unwritten(f)
	if err != nil {
		return sluice.Ref{}, err
	}
	if !unwritten || !before.asIs {
		return s.receive(before.stream, before.header, before.ref, before.features, nil, r)
	}
	return s.put(ctx, before.ref, r, source{size: before.size, moved: true,
		fill: func(p staged) (*os.File, error) { return a.move(ctx, p, f, before) },
		back: func(name string) {
			if a.uid != os.Geteuid() {
				_ = unix.Fchownat(s.dirfd, name, a.uid, a.gid, unix.AT_SYMLINK_NOFOLLOW) // whom it may have been taken from
			}
			// It stays in the store, and is removed there, if the name is taken.
			_ = unix.Renameat2(s.dirfd, name, a.dirfd, a.name, unix.RENAME_NOREPLACE)
		},
	})
}

// sight is what was seen of a file.
type sight struct {
	stream   *stream // behind the header
	header   *safetensors.Header
	ref      sluice.Ref
	features []sluice.Feature
	size     int64
	asIs     bool
	layout   *safetensors.Layout // where checksums are to be filled in, or nil
}

func (a *adoption) look(ctx context.Context, f *os.File) (*sight, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, sysError("adopt", a.name, "stat the file", err)
	}
	w := &sight{stream: &stream{s: a.s, ctx: ctx, body: io.NewSectionReader(f, 0, st.Size), id: a.in.SampleID}, size: st.Size}
	var err error
	if w.header, err = w.stream.header(st.Size); err != nil {
		return nil, err
	}
	if w.ref, w.features, err = a.s.describe("adopt", w.header, a.in); err != nil {
		return nil, err
	}
	said, err := w.header.Checksums()
	if err != nil {
		return nil, &sluice.Error{Kind: sluice.Corrupt, Op: "dirstore: adopt", Subject: a.name, Err: err}
	}
	w.asIs = w.header.Metadata[safetensors.RefKey] == w.ref.Canonical()
	for i := range w.header.Entries {
		e := &w.header.Entries[i]
		w.asIs = w.asIs && (w.header.DataStart+e.Begin)%e.Spec.DType.Size() == 0
	}
	if !w.asIs || said == nil && a.s.medium.tmpfs && !a.s.opts.Verify {
		return w, nil
	}
	w.layout, err = safetensors.NewChecksummedLayout(w.features, map[string]string{safetensors.RefKey: w.ref.Canonical()})
	if err != nil {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: "dirstore: adopt", Subject: a.name, Err: err}
	}
	want := w.layout.HeaderBytes()
	if said != nil {
		if want, err = w.layout.HeaderWithChecksums(said); err != nil {
			return nil, &sluice.Error{Kind: sluice.Corrupt, Op: "dirstore: adopt", Subject: a.name, Err: err}
		}
	}
	have := make([]byte, len(want))
	n, err := f.ReadAt(have, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, sysError("adopt", a.name, "read the file", err)
	}
	w.asIs = bytes.Equal(want, have[:n])
	return w, nil
}

// unwritten reports whether it is known that nobody has the file open for writing: the kernel gives a lease only then. ErrConflict if somebody has. Leases are for the owner of the
// file, and not every file system has them. Whoever opens the file in the moment in which it is leased waits for that moment; the signal that it sends us is SIGIO, which Go passes over.
func (a *adoption) unwritten(f *os.File) (bool, error) {
	_, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_RDLCK)
	switch {
	case errors.Is(err, unix.EAGAIN):
		return false, &sluice.Error{Kind: sluice.Conflict, Op: "dirstore: adopt", Subject: a.name, Detail: "is open for writing, or mapped shared and writable, by somebody", Hint: "close and unmap it first"}
	case err != nil:
		a.s.log.Debug("dirstore: a staged file is copied, since it can't be told whether it is open for writing", "dir", a.s.dir, "file", a.name, "error", err)
		return false, nil
	}
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_UNLCK)
	if err != nil {
		return false, sysError("adopt", a.name, "give the lease back", err)
	}
	return true, nil
}

// move takes the file into the store under the put's scratch name, where it makes sure that it is what it was.
func (a *adoption) move(ctx context.Context, p staged, f *os.File, before *sight) (*os.File, error) {
	s := a.s
	if err := unix.Renameat2(a.dirfd, a.name, s.dirfd, p.scratch, unix.RENAME_NOREPLACE); err != nil {
		if errors.Is(err, unix.EXDEV) { // a mount of the same file system is another one to rename
			return nil, a.elsewhere()
		}
		return nil, sysError("adopt", a.name, "move the file", err)
	}
	s.hooks.reach("moved")
	var was, is unix.Stat_t
	if err := errors.Join(unix.Fstat(int(f.Fd()), &was), unix.Fstatat(s.dirfd, p.scratch, &is, unix.AT_SYMLINK_NOFOLLOW)); err != nil {
		return nil, sysError("adopt", a.name, "stat the file", err)
	}
	if was.Ino != is.Ino || was.Dev != is.Dev {
		return nil, fail(sluice.Conflict, "adopt", a.name, "was replaced by another file meanwhile")
	}
	if err := a.check(&is); err != nil {
		return nil, err
	}
	if unwritten, err := a.unwritten(f); err != nil {
		return nil, err
	} else if !unwritten {
		return nil, fail(sluice.Unavailable, "adopt", a.name, "the kernel no longer tells whether the file is open for writing")
	}
	now, err := a.look(ctx, f)
	if err != nil {
		return nil, err
	}
	if !now.asIs || now.size != before.size || !now.ref.Equal(before.ref) {
		return nil, fail(sluice.Conflict, "adopt", a.name, "was changed meanwhile")
	}
	if a.uid != os.Geteuid() {
		err = f.Chown(os.Geteuid(), os.Getegid())
	}
	if err == nil {
		err = f.Chmod(0o600)
	}
	if err != nil {
		return nil, sysError("adopt", a.name, "make the file ours", err)
	}
	fd, err := unix.Openat(s.dirfd, p.scratch, unix.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, sysError("adopt", a.name, "open the file for writing", err)
	}
	mine := os.NewFile(uintptr(fd), s.dir+"/"+p.scratch)
	if err = a.fillHoles(fd, now); err == nil {
		err = a.fillIn(mine, now)
	}
	if err != nil {
		_ = mine.Close()
		return nil, err
	}
	return mine, nil
}

// fillHoles gives room to what the sender has never written. A reader that maps a hole of a tmpfs that is full would be killed.
func (a *adoption) fillHoles(fd int, w *sight) error {
	if hole, err := unix.Seek(fd, 0, unix.SEEK_HOLE); err == nil && hole == w.size {
		return nil
	}
	return a.s.allocate("adopt", a.name, fd, w.size)
}

// fillIn compares the file's checksums with its data, and writes those that are zeros.
func (a *adoption) fillIn(f *os.File, w *sight) error {
	if w.layout == nil {
		return nil
	}
	said, err := w.header.Checksums()
	if err != nil {
		return &sluice.Error{Kind: sluice.Corrupt, Op: "dirstore: adopt", Subject: a.name, Err: err}
	}
	if a.s.medium.tmpfs && !a.s.opts.Verify && filledIn(w.header, said) {
		return nil // as the header and the data, which nobody compares in memory, they are the writer's word
	}
	sums, err := sumFile(w.stream.ctx, f, w.header, nil)
	if err != nil {
		return err
	}
	if err := compareSums("adopt", w.ref.SampleID(), said, sums); err != nil {
		return err
	}
	head, err := w.layout.HeaderWithChecksums(sums)
	if err != nil {
		return err
	}
	if _, err := f.WriteAt(head, 0); err != nil {
		return a.s.writeError(w.ref.SampleID(), w.size, err)
	}
	return nil
}

// remove takes away a file that was copied. It is not there if it was moved, and another one is left alone.
func (a *adoption) remove(f *os.File) {
	var was, is unix.Stat_t
	if unix.Fstat(int(f.Fd()), &was) != nil || unix.Fstatat(a.dirfd, a.name, &is, unix.AT_SYMLINK_NOFOLLOW) != nil || was.Ino != is.Ino || was.Dev != is.Dev {
		return
	}
	if err := unix.Unlinkat(a.dirfd, a.name, 0); err != nil {
		a.s.log.Warn("dirstore: can't remove a staged file that was copied", "dir", a.s.dir, "file", a.name, "error", err)
	}
}

// sumFile computes the crc32c of every tensor of a file, and shows all that it reads, in pieces.
func sumFile(ctx context.Context, f io.ReaderAt, h *safetensors.Header, show func(tensor string, piece []byte)) (map[string]uint32, error) {
	piece := pieces.Get().(*[pieceBytes]byte)
	defer pieces.Put(piece)
	sums := make(map[string]uint32, len(h.Entries))
	for i := range h.Entries {
		e := &h.Entries[i]
		sum := uint32(0)
		for at := e.Begin; at < e.End; {
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
			buf := piece[:min(e.End-at, pieceBytes)]
			if n, err := f.ReadAt(buf, h.DataStart+at); n < len(buf) {
				return nil, &sluice.Error{Kind: sluice.Corrupt, Op: "dirstore: checksum", Subject: e.Name, Detail: "can't be read to its end", Err: err}
			}
			sum = safetensors.UpdateChecksum(sum, buf)
			if show != nil {
				show(e.Name, buf)
			}
			at += int64(len(buf))
		}
		sums[e.Name] = sum
	}
	return sums, nil
}

// filledIn reports whether the file's own checksums are there: zeros stand for one that is not, unless there is nothing to sum.
func filledIn(h *safetensors.Header, said map[string]uint32) bool {
	for i := range h.Entries {
		if e := &h.Entries[i]; said[e.Name] == 0 && e.Bytes() > 0 {
			return false
		}
	}
	return true
}
