//go:build unix

package natsjournal

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"

	"github.com/sluice-ml/sluice"
	"golang.org/x/sys/unix"
)

// dirLock is the lock on a directory. The kernel lets go of it when the process dies.
type dirLock struct{ file *os.File }

func lockDir(dir string, me Owner) (*dirLock, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, dirError(err, dir, "can't be made")
	}
	path := filepath.Join(dir, "owner")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, dirError(err, path, "can't be opened")
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errors.Join(dirError(err, path, "can't be locked"), f.Close())
		}
		var other Owner
		data, err := io.ReadAll(io.LimitReader(f, 4096))
		if err != nil || json.Unmarshal(data, &other) != nil {
			other = Owner{} // it has not yet written its name
		}
		refusal := fail(sluice.Conflict, "open", dir, "is owned by %v", other)
		refusal.Hint = "stop it, or choose another directory"
		return nil, errors.Join(refusal, f.Close())
	}
	data, err := json.Marshal(me)
	if err == nil {
		err = f.Truncate(0)
	}
	if err == nil {
		_, err = f.WriteAt(append(data, '\n'), 0)
	}
	if err != nil {
		return nil, errors.Join(dirError(err, path, "can't be written"), f.Close())
	}
	return &dirLock{f}, nil
}

// release empties the file, which stays: taking it away would let two processes lock two files of one name. The lock is given up by name: a program that is being started by this process has a copy
// of the descriptor until it runs, and would hold the lock over the close.
func (l *dirLock) release() error {
	return errors.Join(l.file.Truncate(0), unix.Flock(int(l.file.Fd()), unix.LOCK_UN), l.file.Close())
}
