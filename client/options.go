package client

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

// Options say where the service is and how to talk to it. The zero value finds the service of this host.
type Options struct {
	// URL of the service: http://host:port, https://host:port or unix:/path of its socket. If it is empty, $SLUICE_URL counts, and if that is too, the
	// service that has left word in StateDir, whose unix socket is preferred to its TCP address.
	URL string
	// StateDir is the state directory of a service on this host. If it is empty, it is the one that `sluice serve` uses by default.
	StateDir string

	// Token proves who calls; the unix socket needs none, and the service of StateDir is called with the token that lies there. A program that keeps its secrets elsewhere gives it here, all others name TokenFile, a file that holds the
	// token and nothing else, and that nobody else has access to; if that is empty too, $SLUICE_TOKEN_FILE counts. Tokens never appear in logs and errors.
	Token     string
	TokenFile string

	// CAFile holds the certificates, in PEM, that vouch for an https service, instead of those of the system.
	CAFile string

	// HTTPOnly says that files of the service are never mapped or written directly, even if this process sees them.
	HTTPOnly bool

	// Ranges is how many connections at most carry one sample when it is not mapped; 4.
	Ranges int

	// Patience is how long a call goes on asking a service that does not answer, as one that restarts, before it fails with ErrUnavailable; 2 minutes. It
	// starts anew with every call and whenever a transfer has moved on.
	Patience time.Duration

	Logger *slog.Logger // slog.Default() if nil
}

// target is where the service is, resolved.
type target struct {
	name   string // for messages
	base   string // what paths are appended to
	socket string // of the unix socket, or ""
	tls    *tls.Config
	token  string
}

const defaultPatience = 2 * time.Minute

func invalid(subject, format string, args ...any) error {
	return &sluice.Error{Kind: sluice.Invalid, Op: "client", Subject: subject, Detail: fmt.Sprintf(format, args...)}
}

func (o *Options) resolve() (target, error) {
	if o.Ranges < 0 || o.Ranges > 64 {
		return target{}, invalid("Ranges", "is %d, want 1 to 64, or 0 for 4", o.Ranges)
	}
	if o.Patience < 0 {
		return target{}, invalid("Patience", "is %v, want more than 0, or 0 for %v", o.Patience, defaultPatience)
	}
	where, ca := o.URL, o.CAFile
	if where == "" {
		where = os.Getenv(wire.EnvURL)
	}
	if where == "" {
		e, err := o.discover()
		if err != nil {
			return target{}, err
		}
		where = "unix:" + e.Socket
		if e.Socket == "" {
			where = e.URL
			if ca == "" {
				ca = e.CAFile
			}
		}
	}
	t, err := parseURL(where)
	if err != nil {
		return t, err
	}
	if t.token, err = o.token(); err != nil {
		return t, err
	}
	if t.token == "" && t.socket == "" {
		var own string
		if t.token, own, err = o.ownToken(t.base); err != nil {
			return t, err
		}
		if ca == "" {
			ca = own
		}
	}
	if ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return t, &sluice.Error{Kind: sluice.Invalid, Op: "client", Subject: "CAFile", Err: err}
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return t, invalid("CAFile", "%s holds no certificate in PEM", ca)
		}
		t.tls = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	return t, nil
}

func (o *Options) discover() (wire.Endpoint, error) {
	dir := o.StateDir
	if dir == "" {
		var err error
		if dir, err = wire.StateDir(); err != nil {
			return wire.Endpoint{}, err
		}
	}
	e, err := wire.ReadEndpoint(dir)
	if err == nil && e.Socket == "" && e.URL == "" {
		err = &sluice.Error{Kind: sluice.Corrupt, Op: "client", Subject: filepath.Join(dir, wire.EndpointFile), Detail: "names neither a socket nor a url"}
	}
	return e, err
}

func (o *Options) token() (string, error) {
	if o.Token != "" {
		if !wire.ValidTokenValue(o.Token) {
			return "", invalid("Token", "holds no token: want 26 to 256 letters, digits, - and _")
		}
		return o.Token, nil
	}
	file := o.TokenFile
	if file == "" {
		file = os.Getenv(wire.EnvTokenFile)
	}
	if file == "" {
		return "", nil
	}
	return wire.ReadToken(file)
}

// ownToken is that of the service of the state directory, if it is the one that is called.
func (o *Options) ownToken(url string) (token, caFile string, err error) {
	dir := o.StateDir
	if dir == "" {
		if dir, err = wire.StateDir(); err != nil {
			return "", "", nil //nolint:nilerr // there is no such directory, and so no service of it
		}
	}
	return wire.OwnToken(dir, url)
}

func parseURL(where string) (target, error) {
	bad := func(detail string) (target, error) {
		return target{}, &sluice.Error{Kind: sluice.Invalid, Op: "client", Subject: "url", Detail: detail, Hint: "want http://host:port, https://host:port or unix:/path"}
	}
	if path, ok := strings.CutPrefix(where, "unix:"); ok {
		path = strings.TrimPrefix(path, "//")
		if !filepath.IsAbs(path) {
			return bad("the path of the unix socket is not absolute")
		}
		return target{name: "unix:" + path, base: "http://localhost", socket: path}, nil
	}
	u, err := url.Parse(where)
	switch {
	case err != nil:
		return bad("can't be read") // the error would quote what may be a secret
	case u.Scheme != "http" && u.Scheme != "https":
		return bad(fmt.Sprintf("has the scheme %q", u.Scheme))
	case u.Host == "":
		return bad("names no host")
	case u.User != nil:
		return bad("holds a user or password; a token goes into a file")
	case u.RawQuery != "" || u.Fragment != "":
		return bad("has a query or a fragment")
	}
	base := u.Scheme + "://" + u.Host + strings.TrimSuffix(u.EscapedPath(), "/")
	return target{name: base, base: base}, nil
}

// inClear reports whether a token would cross a network unencrypted.
func (t *target) inClear() bool {
	u, err := url.Parse(t.base)
	if err != nil || t.token == "" || t.socket != "" || u.Scheme == "https" || u.Hostname() == "localhost" {
		return false
	}
	ip := net.ParseIP(u.Hostname())
	return ip == nil || !ip.IsLoopback()
}
