package access

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

// Options say where the door is and who may come in.
type Options struct {
	StateDir string // of the service; it must exist
	Socket   string // path of the unix socket, absolute; sluice.sock in StateDir if empty
	Listen   string // TCP address, host:port; "" for none

	TLSCert, TLSKey   string   // files of a certificate and its key, PEM
	TLSSelfSigned     bool     // or the service makes its own, in the state directory
	InsecurePlaintext bool     // let other hosts call without TLS: whoever is on the network between reads tokens and samples
	AllowHosts        []string // names under which the service is called, beside localhost, Listen and the addresses it is reached at

	Limits  Limits
	Version string       // of the program, for the endpoint file
	Log     *slog.Logger // slog.Default() if nil

	peer func(*net.UnixConn) (int, error) // whose process it is; tests say others
}

// Limits keep one caller from taking the service from the others. What is zero has its default.
type Limits struct {
	Connections int // at once, on the socket and on TCP each; 4096
	Calls       int // at once, those below not counted; 512
	Moving      int // uploads and downloads at once; 512
	Waiting     int // acquire and reserve at once, which may wait; 2048
	Held        int // sessions and event streams at once; 2048

	HeaderBytes int           // of a request; 64 KiB
	HeaderTime  time.Duration // until a request's header is complete, and that of its body which nobody wants; 10 s
	IdleTime    time.Duration // between two requests on a connection; 2 min
	StallTime   time.Duration // without a byte of a body, in or out; 30 s
	StopTime    time.Duration // for calls under way to end when the service stops; 10 s
}

// minBodyRate is how fast a body must come on the whole, in bytes a second, once StallTime is over: a byte now and then is no upload.
const minBodyRate = 4 << 10

func (l *Limits) fill() {
	set(&l.Connections, 4096)
	set(&l.Calls, 512)
	set(&l.Moving, 512)
	set(&l.Waiting, 2048)
	set(&l.Held, 2048)
	set(&l.HeaderBytes, 64<<10)
	set(&l.HeaderTime, 10*time.Second)
	set(&l.IdleTime, 2*time.Minute)
	set(&l.StallTime, 30*time.Second)
	set(&l.StopTime, 10*time.Second)
}

func set[T int | time.Duration](v *T, otherwise T) {
	if *v == 0 {
		*v = otherwise
	}
}

// Door is the way into a service: it listens, and lets through who may come in.
type Door struct {
	o     Options
	keys  *keyring
	hosts map[string]bool // names of the Host allow-list
	self  int             // our own uid

	logins   logins
	failures failures
	origins  *http.CrossOriginProtection
	calls    chan struct{} // a value for each under way; so with the three below
	moving   chan struct{}
	waiting  chan struct{}
	held     chan struct{}

	socket     *net.UnixListener
	socketFile os.FileInfo
	tcp        *net.TCPListener // nil for none
	tls        *tls.Config      // nil for none
}

// Open makes the tokens if there are none yet, and listens; calls are answered when [Door.Serve] runs.
func Open(o Options) (_ *Door, err error) {
	o.Limits.fill()
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.peer == nil {
		o.peer = peerUID
	}
	if err := checkDir("state directory", "--state", o.StateDir); err != nil {
		return nil, err
	}
	if err := EnsureTokens(o.StateDir); err != nil {
		return nil, err
	}
	d := &Door{
		o: o, self: os.Geteuid(), origins: http.NewCrossOriginProtection(),
		calls: make(chan struct{}, o.Limits.Calls), moving: make(chan struct{}, o.Limits.Moving), waiting: make(chan struct{}, o.Limits.Waiting), held: make(chan struct{}, o.Limits.Held),
	}
	d.keys, err = openKeyring(o.StateDir, func(err error) { o.Log.Error("tokens can't be read: nobody is let in over TCP", "error", err) })
	if err != nil {
		return nil, err
	}
	d.hosts = map[string]bool{"localhost": true, "127.0.0.1": true, "::1": true}
	for _, h := range o.AllowHosts {
		d.hosts[strings.ToLower(h)] = true
	}
	if o.Listen != "" {
		if d.tcp, d.tls, err = listenTCP(&o); err != nil {
			return nil, err
		}
		if host, _, err := net.SplitHostPort(o.Listen); err == nil && host != "" {
			d.hosts[strings.ToLower(host)] = true
		}
	}
	if d.o.Socket == "" {
		d.o.Socket = filepath.Join(o.StateDir, wire.SocketFile)
	} else if err = checkDir("directory of the socket", "--socket", filepath.Dir(d.o.Socket)); err != nil {
		return nil, errors.Join(err, d.Close())
	}
	if d.socket, err = listenUnix(d.o.Socket); err == nil {
		d.socketFile, err = os.Lstat(d.o.Socket)
	}
	if err != nil {
		return nil, errors.Join(err, d.Close())
	}
	return d, nil
}

// checkDir refuses a directory into which somebody else may put things.
func checkDir(op, flag, dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return &sluice.Error{Kind: sluice.NotFound, Op: op, Subject: dir, Err: err}
	}
	if !info.IsDir() || info.Mode().Perm()&0o022 != 0 || uidOf(info) != os.Geteuid() {
		return &sluice.Error{Kind: sluice.Denied, Op: op, Subject: dir, Detail: fmt.Sprintf("is %s of uid %d, want a directory of this user's own that nobody else may write to", info.Mode(), uidOf(info)), Hint: "chmod 700 it, or choose another with " + flag}
	}
	return nil
}

// Endpoint says where the door is.
func (d *Door) Endpoint() wire.Endpoint {
	e := wire.Endpoint{PID: os.Getpid(), Socket: d.o.Socket, Version: d.o.Version, API: wire.API}
	if d.tcp != nil {
		e.URL = "http://" + d.reachable()
		if d.tls != nil {
			e.URL = "https://" + d.reachable()
		}
		if d.o.TLSSelfSigned {
			e.CAFile = filepath.Join(d.o.StateDir, certFile)
		}
	}
	return e
}

// reachable is the TCP address as one may call it from this host.
func (d *Door) reachable() string {
	addr, ok := netip.AddrFromSlice(d.tcp.Addr().(*net.TCPAddr).IP) // which a TCP listener has
	addr = addr.Unmap()
	if host, _, err := net.SplitHostPort(d.o.Listen); err == nil && host != "" && net.ParseIP(host) == nil {
		return net.JoinHostPort(host, d.port()) // the name that its certificate is for
	}
	if !ok || addr.IsUnspecified() {
		return net.JoinHostPort("localhost", d.port())
	}
	return net.JoinHostPort(addr.String(), d.port())
}

func (d *Door) port() string {
	_, port, _ := net.SplitHostPort(d.tcp.Addr().String()) // which a listener's address always has
	return port
}

// announce leaves word where the door is, for clients on this host, and returns what takes it back.
func (d *Door) announce() (retract func() error, err error) {
	path := filepath.Join(d.o.StateDir, wire.EndpointFile)
	data, err := json.Marshal(d.Endpoint())
	if err == nil {
		err = replace(path, append(data, '\n'), 0o600)
	}
	if err != nil {
		return nil, &sluice.Error{Kind: sluice.Denied, Op: "endpoint", Subject: path, Err: err}
	}
	return func() error { return os.Remove(path) }, nil
}

// Close ends the listening and takes the socket away. [Door.Serve] does it at its end.
func (d *Door) Close() error {
	var errs []error
	if d.tcp != nil {
		errs = append(errs, d.tcp.Close())
	}
	if d.socket != nil {
		errs = append(errs, d.socket.Close())
		path := d.o.Socket
		if now, err := os.Lstat(path); err == nil && d.socketFile != nil && os.SameFile(now, d.socketFile) {
			errs = append(errs, os.Remove(path))
		}
	}
	for i, err := range errs {
		if errors.Is(err, net.ErrClosed) || errors.Is(err, fs.ErrNotExist) {
			errs[i] = nil
		}
	}
	return errors.Join(errs...)
}

// Serve leaves word in the endpoint file and answers calls with h until ctx ends. Then it stops in bounded time: calls that wait are told at once that the service is unavailable, others may end for StopTime, then their
// connections are cut. h finds out who calls with [CallerOf]; the contexts of its calls end with their connections.
func (d *Door) Serve(ctx context.Context, h http.Handler) (err error) {
	retract, err := d.announce()
	if err != nil {
		return errors.Join(err, d.Close())
	}
	stopping, stop := context.WithCancel(context.Background())
	defer stop()
	g := &guard{d: d, next: h, stopping: stopping}
	full := func(what string) func() {
		return func() {
			d.o.Log.Warn("all connections are taken, more have to wait", "listener", what, "connections", d.o.Limits.Connections)
		}
	}
	socket := bound(d.socket, d.o.Limits.Connections, full("unix"))
	listeners := map[string]*bounded{"unix": socket}
	open := []net.Listener{socket}
	if d.tcp != nil {
		tcp := bound(d.tcp, d.o.Limits.Connections, full("tcp"))
		listeners["tcp"] = tcp
		if d.tls != nil {
			open = append(open, tls.NewListener(tcp, d.tls))
		} else {
			open = append(open, tcp)
		}
	}
	server := &http.Server{
		Handler:        g,
		MaxHeaderBytes: d.o.Limits.HeaderBytes, ReadHeaderTimeout: d.o.Limits.HeaderTime, IdleTimeout: d.o.Limits.IdleTime,
		// A body that a handler reads has deadlines of its own. net/http reads what is left of one before it answers or lets go of the connection, and would wait for that for ever.
		ReadTimeout: d.o.Limits.HeaderTime,
		ConnContext: d.connContext,
		ConnState: func(c net.Conn, s http.ConnState) {
			if s == http.StateClosed || s == http.StateHijacked {
				listeners[c.LocalAddr().Network()].gone()
			}
		},
		ErrorLog: log.New(serverLog{d.o.Log}, "", 0),
	}
	ended := make(chan error, len(open))
	for _, l := range open { // they end with Shutdown or Close below, and are waited for
		go func() { ended <- server.Serve(l) }()
	}
	left := len(open)
	select {
	case <-ctx.Done():
	case err = <-ended:
		left--
		err = fmt.Errorf("access: a listener failed: %w", err)
	}
	err = errors.Join(err, retract())
	stop()
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.o.Limits.StopTime)
	defer cancel()
	if server.Shutdown(bounded) != nil {
		d.o.Log.Warn("calls were still under way when the service stopped; their connections were cut", "after", d.o.Limits.StopTime)
		err = errors.Join(err, server.Close())
	}
	for range left {
		if e := <-ended; !errors.Is(e, http.ErrServerClosed) {
			err = errors.Join(err, e)
		}
	}
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.o.Limits.StopTime)
	defer cancel()
	for _, l := range listeners { // a call whose connection was cut finds its context ended
		if !l.drained(late) {
			err = errors.Join(err, &sluice.Error{Kind: sluice.Unavailable, Op: "access", Detail: "calls went on after their connections were cut"})
		}
	}
	return errors.Join(err, d.Close())
}

// serverLog takes the lines of net/http: a panic is a fault of ours, the rest is what networks and strangers do.
type serverLog struct{ log *slog.Logger }

func (l serverLog) Write(line []byte) (int, error) {
	text := strings.TrimSpace(string(line))
	if strings.Contains(text, "panic") {
		l.log.Error("a call failed", "error", text)
	} else {
		l.log.Debug("connection", "error", text)
	}
	return len(line), nil
}

// conn is what is known of a connection.
type conn struct {
	unix  bool
	uid   int // of the peer on the unix socket; -1 over TCP, or if it can't be known
	local netip.Addr
}

type connKey struct{}

func (d *Door) connContext(ctx context.Context, c net.Conn) context.Context {
	k := &conn{uid: -1}
	switch c := c.(type) {
	case *net.UnixConn:
		k.unix = true
		uid, err := d.o.peer(c)
		if err != nil {
			d.o.Log.Warn("a caller on the unix socket is not known", "error", err)
		} else {
			k.uid = uid
		}
	default:
		if a, err := netip.ParseAddrPort(c.LocalAddr().String()); err == nil {
			k.local = a.Addr().Unmap()
		}
		if t, ok := c.(*tls.Conn); ok {
			c = t.NetConn()
		}
		if t, ok := c.(*net.TCPConn); ok {
			if err := giveUpAfter(t, d.o.Limits.StallTime); err != nil {
				d.o.Log.Warn("a host that dies is noticed late", "error", err)
			}
		}
	}
	return context.WithValue(ctx, connKey{}, k)
}

// hostAllowed keeps out pages of other sites whose names were made to lead here (DNS rebinding): the Host that a browser sends is the name of the page's site. An address that is the
// connection's own is no such name.
func (d *Door) hostAllowed(r *http.Request, c *conn) bool {
	host := strings.ToLower(strings.TrimSuffix((&url.URL{Host: r.Host}).Hostname(), "."))
	if d.hosts[host] {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap() == c.local
}

func uidName(uid int) string { return fmt.Sprintf("uid %d", uid) }

func uidOf(info os.FileInfo) int {
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return int(s.Uid)
	}
	return -1
}
