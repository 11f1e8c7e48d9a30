//go:build unix

package service

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

// ownerFile is the file in an owned directory that is locked, and that says who has it.
const ownerFile = "owner.json"

// owner is who has a directory.
type owner struct {
	Host  string    `json:"host"`
	PID   int       `json:"pid"`
	Since time.Time `json:"since"`
}

func (o owner) String() string {
	if o.PID == 0 {
		return "another process"
	}
	return fmt.Sprintf("process %d on %s, since %s", o.PID, plain(o.Host), o.Since.UTC().Format(time.RFC3339))
}

func (o owner) is(p owner) bool { return o.Host == p.Host && o.PID == p.PID && o.Since.Equal(p.Since) }

// own takes a directory for this process alone, and makes it if it is not there. The kernel lets go of it when the process dies.
func own(dir string, me owner) (*os.File, error) {
	for tries := 1; ; tries++ {
		f, err := ownOnce(dir, me)
		if f != nil || err != nil && (tries == 100 || !errors.Is(err, sluice.ErrNotFound)) {
			return f, err
		}
		// A private service that ended has just removed the directory, owner file and all.
	}
}

// ownOnce is one attempt; without an error and without a file, or with ErrNotFound, the directory was removed meanwhile.
func ownOnce(dir string, me owner) (*os.File, error) {
	fail := func(kind sluice.Kind, detail string, err error) (*os.File, error) {
		return nil, &sluice.Error{Kind: kind, Op: "service: open", Subject: dir, Detail: detail, Err: err}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fail(kindOfOS(err), "can't be made", err)
	}
	if err := checkPrivate(dir); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, ownerFile), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fail(kindOfOS(err), "can't be locked", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		defer func() { _ = f.Close() }()
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return fail(sluice.Unsupported, "can't be locked", err)
		}
		var other owner
		if data, err := io.ReadAll(io.LimitReader(f, 4096)); err != nil || json.Unmarshal(data, &other) != nil {
			other = owner{} // it has not yet written its name
		}
		return nil, &sluice.Error{Kind: sluice.Conflict, Op: "service: open", Subject: dir, Detail: "is owned by " + other.String(), Hint: "stop that service, or choose another directory"}
	}
	if !still(f) {
		return nil, f.Close()
	}
	data, err := json.Marshal(me)
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = f.WriteAt(append(data, '\n'), 0)
	}
	if err != nil {
		_ = f.Close()
		return fail(kindOfOS(err), "can't be written", err)
	}
	return f, nil
}

// checkPrivate refuses a directory that others could change under us.
func checkPrivate(dir string) error {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return &sluice.Error{Kind: kindOfOS(err), Op: "service: open", Subject: dir, Err: err}
	}
	switch uid := os.Geteuid(); {
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return &sluice.Error{Kind: sluice.Denied, Op: "service: open", Subject: dir, Detail: "is no directory (a link is not followed here)"}
	case st.Uid != uint32(uid):
		return &sluice.Error{Kind: sluice.Denied, Op: "service: open", Subject: dir, Detail: fmt.Sprintf("belongs to user %d, want our own, %d", st.Uid, uid), Hint: "choose a directory of your own"}
	case st.Mode&0o022 != 0:
		return &sluice.Error{Kind: sluice.Denied, Op: "service: open", Subject: dir, Detail: fmt.Sprintf("has mode %04o: others could replace what is in it", st.Mode&0o777), Hint: "chmod 700 it"}
	}
	return nil
}

func kindOfOS(err error) sluice.Kind {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return sluice.NoSpace
	case errors.Is(err, os.ErrPermission), errors.Is(err, unix.EROFS), errors.Is(err, unix.ELOOP):
		return sluice.Denied
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ENAMETOOLONG):
		return sluice.Invalid
	case errors.Is(err, os.ErrNotExist):
		return sluice.NotFound
	}
	return sluice.Unavailable
}
