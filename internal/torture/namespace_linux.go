package torture

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice/internal/child"
)

// isolate makes cmd run in mount namespace of its own, so that it may mount a small file system and fill it, and nobody else sees that. Who is not root gets a user namespace with it.
func isolate(cmd *exec.Cmd) {
	attr := &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	if uid := os.Geteuid(); uid != 0 {
		attr.Cloneflags |= syscall.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: uid, Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: os.Getegid(), HostID: os.Getegid(), Size: 1}}
		attr.AmbientCaps = []uintptr{unix.CAP_SYS_ADMIN}
	}
	cmd.SysProcAttr = attr
}

// mountSmall mounts a tmpfs of the given size on dir. It works in a process that isolate started.
func mountSmall(dir string, size int64) error {
	if err := unix.Mount("none", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, fmt.Sprintf("size=%d,mode=0700", size)); err != nil {
		return fmt.Errorf("mount a tmpfs: %w", err)
	}
	return nil
}

// fill takes all the room there is in dir, and returns what gives it back.
func fill(dir string) (empty func() error, err error) {
	name := filepath.Join(dir, "filler")
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	piece := make([]byte, 64<<10)
	for err == nil {
		_, err = f.Write(piece)
	}
	if !errors.Is(err, unix.ENOSPC) {
		return nil, errors.Join(err, f.Close(), os.Remove(name))
	}
	return func() error { return errors.Join(f.Close(), os.Remove(name)) }, nil
}

// usedBytes is what is in use of the file system of dir, also by files that have no name any more.
func usedBytes(dir string) (int64, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return int64(fs.Blocks-fs.Bfree) * fs.Bsize, nil
}

// supported says why this system can't be tortured, if so.
func supported() error { return nil }

func unmount(dir string) error { return unix.Unmount(dir, unix.MNT_DETACH) }

// Isolated runs this binary with the arguments where it may mount file systems that nobody else sees, and returns its exit status. ok is false if this host does not allow that.
func Isolated(ctx context.Context, args []string, stdout, stderr io.Writer) (status int, ok bool, err error) {
	exe, err := program()
	if err != nil {
		return 0, false, err
	}
	cmd := exec.CommandContext(ctx, exe, args...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = nil, stdout, stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) }
	isolate(cmd)
	ended, err := child.Start(cmd) // a terminal's interrupt reaches it through Cancel alone: a second signal would end it before it has cleaned up
	if err != nil {
		return 0, false, nil //nolint:nilerr // the caller goes on without, and says so
	}
	err = <-ended
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() >= 0 {
		return exit.ExitCode(), true, nil
	}
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ctx.Err() != nil && status.Signal() == unix.SIGTERM {
		return 0, true, context.Cause(ctx) // it had not begun, and so had nothing to clean up
	}
	return 0, true, err
}
