//go:build linux

package dirstore

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

// Spare moves a file of the pool under a bare name into a staging directory on the store's file system, cut to size bytes, for a producer who writes a sample over it and then stages it: pages that
// are there are written nearly twice as fast as fresh ones, and need not be freed first. It is false if the pool has none that is large enough and may be written to. The file is this user's, and counts
// nowhere while it lies there.
//
// Nobody has pinned the file. Who writes to it takes an exclusive lock on it first, as [Store.Put] does, because a reader whose pin a restart has lost may still take a shared one.
//
// Errors: ErrInvalid for a name that is not bare, ErrConflict if the name is taken, ErrClosed, and those of the file system.
func (s *Store) Spare(ctx context.Context, staging *os.Root, name string, size int64) (bool, error) {
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
		return false, fail(sluice.Invalid, "spare", name, "is no bare file name")
	}
	if err := s.enter(ctx, "spare"); err != nil {
		return false, err
	}
	defer s.life.RUnlock()
	if size < poolFrom {
		return false, nil
	}
	dir, err := staging.Open(".")
	if err != nil {
		return false, sysError("spare", staging.Name(), "open the staging directory", err)
	}
	defer func() { _ = dir.Close() }()
	var file uint64
	var ok bool
	if err := s.do(func(l *ledger) error { file, ok = l.takePooled(size); return nil }); err != nil || !ok {
		return false, err
	}
	scratch := fmt.Sprintf("%s%016x", scratchPrefix, file)
	fd, ok := s.recycle(scratch, size)
	if ok {
		defer func() { _ = unix.Close(fd) }() // only now may others have its lock
		// Its age is that of its stay in the directory, from which old files are swept.
		now := []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Nsec: unix.UTIME_NOW}}
		if err = unix.UtimesNanoAt(s.dirfd, scratch, now, unix.AT_SYMLINK_NOFOLLOW); err == nil {
			err = unix.Renameat2(s.dirfd, scratch, int(dir.Fd()), name, unix.RENAME_NOREPLACE)
		}
		if err == nil {
			return true, nil
		}
	}
	if uerr := unix.Unlinkat(s.dirfd, scratch, 0); uerr != nil && uerr != unix.ENOENT && err == nil {
		err = uerr
	}
	switch {
	case errors.Is(err, unix.EEXIST):
		return false, fail(sluice.Conflict, "spare", name, "there is a file of the name")
	case err != nil:
		return false, sysError("spare", name, "move the file", err)
	}
	return false, nil
}
