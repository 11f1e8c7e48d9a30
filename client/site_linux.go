package client

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/safetensors"
)

// site is where a store's files are on this host.
type site struct {
	dir, staging string
	stages       bool // samples may be written to staging
	keepFile     bool // the mapping does not keep the lock of the file here, the descriptor does
}

// findSite proves that this process sees the service's own files, by the random id in the one beside them, and that they may be mapped there. If not, it says why.
func findSite(info *wire.StoreInfo) (*site, string) {
	id, err := readID(info.IDFile)
	if err != nil {
		return nil, err.Error()
	}
	if len(info.ID) != 32 || id != info.ID {
		return nil, "the id in " + info.IDFile + " is another store's"
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(info.Dir, &fs); err != nil {
		return nil, (&os.PathError{Op: "statfs", Path: info.Dir, Err: err}).Error()
	}
	s := &site{dir: info.Dir, staging: info.StagingDir}
	switch fs.Type {
	case unix.TMPFS_MAGIC, unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC:
	case unix.OVERLAYFS_SUPER_MAGIC:
		s.keepFile = true
	default:
		return nil, fmt.Sprintf("the file system of %s (%#x) is not known to map safely", info.Dir, fs.Type)
	}
	if err := unix.Access(info.Dir, unix.X_OK); err != nil {
		return nil, (&os.PathError{Op: "access", Path: info.Dir, Err: err}).Error()
	}
	s.stages = info.StagingDir != "" && unix.Access(info.StagingDir, unix.W_OK|unix.X_OK) == nil
	return s, ""
}

func readID(path string) (string, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close() //nolint:errcheck // it was only read
	data, err := io.ReadAll(io.LimitReader(f, 64))
	return strings.TrimSpace(string(data)), err
}

// load maps a pinned file. The lock comes before the mapping: a file that is locked by a reader is never written again. free gives memory and lock back.
func (s *site) load(name string, size int64) (m *safetensors.Mapping, free func() error, err error) {
	fail := func(kind sluice.Kind, detail string, err error) error {
		return &sluice.Error{Kind: kind, Op: "client: map", Subject: name, Detail: detail, Err: err}
	}
	if name != filepath.Base(name) || name == "." || name == ".." {
		return nil, nil, fail(sluice.Corrupt, "the service gave no bare file name", nil)
	}
	f, err := os.OpenFile(filepath.Join(s.dir, name), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, nil, fail(sluice.NotFound, "the file is gone", err)
	case err != nil:
		return nil, nil, fail(sluice.Denied, "the file can't be opened", err)
	}
	if err = unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != nil {
		err = fail(sluice.Unavailable, "another process holds an exclusive lock on the file", err)
	} else {
		m, err = safetensors.Map(f, size)
	}
	if err != nil || !s.keepFile {
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return nil, nil, err
	}
	if s.keepFile {
		return m, func() error { return errors.Join(m.Close(), f.Close()) }, nil
	}
	return m, m.Close, nil
}

// create makes a file in the staging directory that was not there.
func (s *site) create(name string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(s.staging, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err == nil {
		return f, nil
	}
	kind := sluice.Denied
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		kind = sluice.NoSpace
	}
	return nil, &sluice.Error{Kind: kind, Op: "client: put", Subject: s.staging, Err: err}
}

// openSpare opens a file that the service has put into the staging directory to be written over; nil if somebody may still read it, as whose pin a restart has lost.
func (s *site) openSpare(name string) (*os.File, error) {
	fail := func(kind sluice.Kind, detail string, err error) error {
		return &sluice.Error{Kind: kind, Op: "client: put", Subject: name, Detail: detail, Err: err}
	}
	if name != filepath.Base(name) || name == "." || name == ".." {
		return nil, fail(sluice.Corrupt, "the service gave no bare file name", nil)
	}
	f, err := os.OpenFile(filepath.Join(s.staging, name), os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fail(sluice.Denied, "the file that the service has spared can't be opened", err)
	}
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
		return f, nil
	}
	return nil, errors.Join(f.Close(), s.remove(name))
}

// remove takes a file away that the service has not.
func (s *site) remove(name string) error {
	if err := os.Remove(filepath.Join(s.staging, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
