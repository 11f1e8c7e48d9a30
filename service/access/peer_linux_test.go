package access

import (
	"context"
	"crypto/tls"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A host that dies without a word must not keep its sessions: the kernel gives it up in the time that the door gives anybody who stands still.
func TestTheKernelGivesUpHostsThatDoNotAnswer(t *testing.T) {
	t.Parallel()
	for name, secure := range map[string]bool{"plain": false, "tls": true} {
		w := open(t, nil, func(o *Options) { o.TLSSelfSigned, o.Limits.StallTime = secure, 7*time.Second })
		listener, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		client, err := net.Dial("tcp", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		accepted, err := listener.AcceptTCP()
		if err != nil {
			t.Fatal(err)
		}
		defer accepted.Close()
		var conn net.Conn = accepted
		if secure {
			conn = tls.Server(accepted, w.d.tls)
		}
		w.d.connContext(context.Background(), conn)
		raw, err := accepted.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var ms int
		if err := raw.Control(func(fd uintptr) { ms, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT) }); err != nil {
			t.Fatal(err)
		}
		if err != nil || ms != 7000 {
			t.Errorf("%s: %d ms, %v", name, ms, err)
		}
	}
}
