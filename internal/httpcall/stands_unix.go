//go:build unix

package httpcall

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// stands reports whether a connection without a call is open yet: nothing has come that could be read, neither an end nor bytes that nobody has asked for.
func stands(c net.Conn) bool {
	if t, ok := c.(interface{ NetConn() net.Conn }); ok { // of TLS
		c = t.NetConn()
	}
	s, ok := c.(syscall.Conn)
	if !ok {
		return true // the call will tell
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return false
	}
	silent := false
	var b [1]byte
	err = raw.Control(func(fd uintptr) {
		_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		silent = err == unix.EAGAIN || err == unix.EINTR
	})
	return err == nil && silent
}
