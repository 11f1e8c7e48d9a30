package access

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-ml/sluice"
)

// DefaultListen is the TCP address unless another is chosen.
const DefaultListen = "127.0.0.1:7447"

// maxSocketPath is what the kernel takes as the path of a unix socket, without the zero byte at its end.
const maxSocketPath = 107

// listenUnix makes the socket. It is born under another name in a directory that only we can enter, so that there is no moment in which others could connect,
// and then moved into place. What a dead service left there is replaced; a live one, or anything that is no socket, is not touched.
func listenUnix(path string) (*net.UnixListener, error) {
	refuse := func(kind sluice.Kind, detail, hint string, err error) (*net.UnixListener, error) {
		return nil, &sluice.Error{Kind: kind, Op: "unix socket", Subject: path, Detail: detail, Hint: hint, Err: err}
	}
	if len(path) > maxSocketPath {
		return refuse(sluice.Invalid, fmt.Sprintf("the path has %d bytes, at most %d are possible", len(path), maxSocketPath), "choose a shorter state directory with --state, or another place with --socket", nil)
	}
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return refuse(sluice.Denied, "", "", err)
	case info.Mode().Type() != fs.ModeSocket:
		return refuse(sluice.Conflict, "something that is no socket lies there", "move it away", nil)
	default:
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
		if err == nil {
			_ = conn.Close() // nothing was said
			return refuse(sluice.Conflict, "a service listens there", "stop it first, or choose another state directory with --state", nil)
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return refuse(sluice.Conflict, "it can't be told whether a service listens there", "", err)
		}
	}
	nest := filepath.Join(filepath.Dir(path), "."+strings.ToLower(rand.Text()[:6])) // with /s, no longer than sluice.sock
	if err := os.Mkdir(nest, 0o700); err != nil {
		return refuse(sluice.Denied, "", "", err)
	}
	defer os.Remove(nest) //nolint:errcheck // it is empty by then
	born := filepath.Join(nest, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: born, Net: "unix"})
	if err != nil {
		return refuse(sluice.Denied, "", "", err)
	}
	l.SetUnlinkOnClose(false) // it would unlink by the name it was born with
	err = os.Chmod(born, 0o600)
	if err == nil {
		err = os.Rename(born, path)
	}
	if err != nil {
		_, _ = l.Close(), os.Remove(born) // err says what matters
		return refuse(sluice.Denied, "", "", err)
	}
	return l, nil
}

// listenTCP listens on o.Listen. An address that other hosts can reach needs TLS, unless the option with the honest name is set.
func listenTCP(o *Options) (*net.TCPListener, *tls.Config, error) {
	addr, err := o.address()
	if err != nil {
		return nil, nil, err
	}
	config, err := tlsConfig(o, addr)
	if err != nil {
		return nil, nil, err
	}
	l, err := listenAt(o.Listen, addr)
	return l, config, err
}

// Check refuses what [Open] would refuse, as far as that can be told before there is a state directory: a start that must fail then leaves none behind.
func (o *Options) Check() error {
	if o.Listen == "" {
		return nil
	}
	addr, err := o.address()
	if err != nil {
		return err
	}
	if o.TLSCert != "" {
		if _, err := loadPair(o.TLSCert, o.TLSKey); err != nil {
			return err
		}
	}
	if _, err := os.Stat(o.StateDir); err == nil {
		return nil // if the address is taken, then perhaps by the service that owns the directory, which is the better thing to say
	}
	l, err := listenAt(o.Listen, addr)
	if err != nil {
		return err
	}
	return l.Close()
}

// address is that of o.Listen, if the options allow it.
func (o *Options) address() (*net.TCPAddr, error) {
	refuse := func(detail, hint string, err error) (*net.TCPAddr, error) {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: "listen", Subject: o.Listen, Detail: detail, Hint: hint, Err: err}
	}
	addr, err := net.ResolveTCPAddr("tcp", o.Listen)
	if err != nil {
		return refuse("is no address, want host:port", "", err)
	}
	if err := o.checkTLS(); err != nil {
		return nil, err
	}
	if o.TLSCert == "" && !o.TLSSelfSigned && !addr.IP.IsLoopback() && !o.InsecurePlaintext {
		return refuse("other hosts can reach this address, and tokens and samples would cross the network in the clear",
			"give --tls-cert and --tls-key, or --tls-self-signed; or listen on 127.0.0.1", nil)
	}
	return addr, nil
}

func listenAt(name string, addr *net.TCPAddr) (*net.TCPListener, error) {
	l, err := net.ListenTCP("tcp", addr)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, &sluice.Error{Kind: sluice.Conflict, Op: "listen", Subject: name, Detail: "another program listens there", Hint: "choose another with --listen (port 0 takes a free one), or none with --no-tcp"}
	}
	if err != nil {
		return nil, &sluice.Error{Kind: sluice.Denied, Op: "listen", Subject: name, Err: err}
	}
	return l, nil
}

// bounded accepts no more connections than it has room for; the rest wait in the kernel's line. It does not wrap connections, which would take sendfile from downloads: whoever serves
// them says when one is gone.
type bounded struct {
	net.Listener
	room   chan struct{} // a value for each connection
	closed chan struct{}
	once   sync.Once
	full   func() // called when a connection has to wait
}

func bound(l net.Listener, n int, full func()) *bounded {
	return &bounded{Listener: l, room: make(chan struct{}, n), closed: make(chan struct{}), full: full}
}

func (b *bounded) Accept() (net.Conn, error) {
	select {
	case b.room <- struct{}{}:
	default:
		b.full()
		select {
		case b.room <- struct{}{}:
		case <-b.closed:
			return nil, net.ErrClosed
		}
	}
	c, err := b.Listener.Accept()
	if err != nil {
		<-b.room
	}
	return c, err
}

// gone gives the room of a connection back.
func (b *bounded) gone() { <-b.room }

// drained waits, once nothing is accepted any more, until all connections are gone; false if ctx ends before.
func (b *bounded) drained(ctx context.Context) bool {
	for range cap(b.room) {
		select {
		case b.room <- struct{}{}:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

func (b *bounded) Close() error {
	b.once.Do(func() { close(b.closed) })
	return b.Listener.Close()
}
