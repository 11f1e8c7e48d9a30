package access

import (
	"net"

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
