package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

// serviceFlags say which service a command talks to.
type serviceFlags struct{ url, tokenFile, caFile, state string }

func (s *serviceFlags) register(c *cobra.Command) {
	f := c.PersistentFlags()
	f.StringVar(&s.url, "url", "", "`address` of the service: http://host:port, https://host:port or unix:/path (default $SLUICE_URL, or the service of the state directory)")
	f.StringVar(&s.tokenFile, "token-file", "", "`file` that holds the token and nothing else (default $SLUICE_TOKEN_FILE; the unix socket needs none)")
	f.StringVar(&s.caFile, "ca-file", "", "`file` with the certificate to trust, PEM, instead of the system's")
	f.StringVar(&s.state, "state", "", "state `directory` of a service on this host (default $SLUICE_STATE, $XDG_STATE_HOME/sluice or ~/.local/state/sluice)")
}

// stateDir is the directory of the flag, or the default.
func stateDir(flag string) (string, error) {
	if flag != "" {
		return flag, nil
	}
	return wire.StateDir()
}

// caller makes single calls: what fails is reported, not repeated.
type caller struct {
	where string // for messages
	base  string
	token string
	http  *http.Client
}

// callTime is how long a call of the command line may take.
const callTime = 30 * time.Second

func (s *serviceFlags) dial(stderr io.Writer) (*caller, error) {
	where, from := s.url, "--url"
	if where == "" {
		where, from = os.Getenv(wire.EnvURL), wire.EnvURL
	}
	dir, err := stateDir(s.state)
	if where == "" {
		if err != nil {
			return nil, err
		}
		e, err := wire.ReadEndpoint(dir)
		if err != nil {
			return nil, err
		}
		where = "unix:" + e.Socket
	}
	token, err := s.token()
	if err != nil {
		return nil, err
	}
	ca := s.caFile
	invalid := func(detail string) (*caller, error) {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: "service", Subject: from, Detail: detail, Hint: "want http://host:port, https://host:port or unix:/path"}
	}
	transport := &http.Transport{DisableKeepAlives: true}
	c := &caller{where: where, base: where, token: token, http: &http.Client{Transport: transport, Timeout: callTime, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}
	if path, ok := strings.CutPrefix(where, "unix:"); ok {
		c.base = "http://localhost"
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}
	} else {
		u, err := url.Parse(where)
		switch {
		case !strings.ContainsAny(where, "/@?#"): // what has none of these holds no secret
			return invalid(fmt.Sprintf("is %q: http:// or https:// is missing before it", where))
		case err != nil:
			return invalid("is no address") // err may quote a secret
		case u.User != nil || u.RawQuery != "" || u.Fragment != "":
			return invalid("holds more than an address; a token goes into a file")
		case u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.Path != "" && u.Path != "/":
			return invalid("is no address of a service")
		}
		c.base = u.Scheme + "://" + u.Host
		if token == "" && dir != "" {
			var own string
			if c.token, own, err = wire.OwnToken(dir, c.base); err != nil {
				return nil, err
			}
			if ca == "" {
				ca = own
			}
		}
		if ip := net.ParseIP(u.Hostname()); c.token != "" && u.Scheme == "http" && u.Hostname() != "localhost" && (ip == nil || !ip.IsLoopback()) {
			fmt.Fprintln(stderr, "sluice: warning: the token crosses the network in the clear, since the address is http")
		}
	}
	if ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, &sluice.Error{Kind: sluice.Invalid, Op: "service", Subject: "--ca-file", Err: err}
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return nil, &sluice.Error{Kind: sluice.Invalid, Op: "service", Subject: "--ca-file", Detail: "holds no certificate in PEM"}
		}
		transport.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	return c, nil
}

// token is what the file holds that was named.
func (s *serviceFlags) token() (token string, err error) {
	file := s.tokenFile
	if file == "" {
		file = os.Getenv(wire.EnvTokenFile)
	}
	if file == "" {
		return "", nil
	}
	return wire.ReadToken(file)
}

// do makes one call. in and out may be nil. What the service refuses comes back as it said it.
func (c *caller) do(ctx context.Context, method, path string, in, out any) error {
	unavailable := func(err error) error {
		var u *url.Error
		if errors.As(err, &u) {
			err = u.Err // without the address, which is the subject
		}
		detail, hint := "does not answer", "is it running? start one with `sluice serve`"
		var (
			unknown x509.UnknownAuthorityError
			name    x509.HostnameError
			plain   tls.RecordHeaderError
		)
		switch {
		case errors.As(err, &unknown):
			detail, hint = "its certificate is not trusted", "name a certificate to trust with --ca-file; `serve --tls-self-signed` makes tls-cert.pem in its state directory"
		case errors.As(err, &name):
			detail, hint = "its certificate is for other names", "call it by one of these, or have it serve with --allow-host"
		case errors.As(err, &plain):
			detail, hint = "does not answer with TLS", "does it serve http:// there?"
		}
		return &sluice.Error{Kind: sluice.Unavailable, Op: "service", Subject: c.where, Detail: detail, Err: err, Hint: hint}
	}
	var body io.Reader
	if in != nil {
		data, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, body)
	if err != nil {
		return err
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return unavailable(err)
	}
	defer resp.Body.Close() //nolint:errcheck // it was read to its end
	data, err := io.ReadAll(io.LimitReader(resp.Body, 256<<20))
	if err != nil {
		return unavailable(err)
	}
	if resp.StatusCode/100 != 2 {
		var p wire.Problem
		if json.Unmarshal(data, &p) != nil || p.Code == "" {
			return unavailable(fmt.Errorf("it answered %s without a problem document: that is no Sluice service", resp.Status))
		}
		switch p.Hint {
		case wire.HintCreateRun:
			p.Hint = "create it with `sluice runs create`"
		case wire.HintToken:
			p.Hint = "name a file with a token with --token-file, see `sluice token`"
		}
		return p.Err()
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(data, out); err != nil {
		return &sluice.Error{Kind: sluice.Corrupt, Op: "service", Subject: c.where, Detail: "its answer can't be read", Err: err}
	}
	return nil
}
