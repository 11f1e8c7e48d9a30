package access

import (
	"errors"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// peerUID asks the kernel whose process is at the other end of a unix socket.
func peerUID(c *net.UnixConn) (int, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, err
	}
	var cred *unix.Ucred
	var sockErr error
	if err := raw.Control(func(fd uintptr) { cred, sockErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return -1, err
	}
	if sockErr != nil {
		return -1, sockErr
	}
	return int(cred.Uid), nil
}

// giveUpAfter makes the kernel end a connection whose other side does not answer for so long. Without it, a host that lost its power or its network while something was on its way to it is
// given up after a quarter of an hour, and until then its sessions live.
func giveUpAfter(c *net.TCPConn, d time.Duration) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var sockErr error
	err = raw.Control(func(fd uintptr) {
		sockErr = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
	})
	return errors.Join(err, sockErr)
}
