package access

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

// Files of the certificate that the service makes for itself, in its state directory.
const (
	certFile = "tls-cert.pem"
	keyFile  = "tls-key.pem"
)

const (
	certLife  = 365 * 24 * time.Hour
	certRenew = 30 * 24 * time.Hour // a start within so much of its end makes a new one
)

// checkTLS refuses options that contradict each other.
func (o *Options) checkTLS() error {
	switch {
	case (o.TLSCert == "") != (o.TLSKey == ""):
		return &sluice.Error{Kind: sluice.Invalid, Op: "tls", Detail: "a certificate and its key go together", Hint: "give both --tls-cert and --tls-key"}
	case o.TLSCert != "" && o.TLSSelfSigned:
		return &sluice.Error{Kind: sluice.Invalid, Op: "tls", Detail: "there is a certificate and the wish for one of the service's own", Hint: "give --tls-cert and --tls-key, or --tls-self-signed"}
	}
	return nil
}

// tlsConfig is nil if the options, which [Options.checkTLS] has let through, ask for no TLS.
func tlsConfig(o *Options, addr *net.TCPAddr) (*tls.Config, error) {
	certPath, keyPath := o.TLSCert, o.TLSKey
	switch {
	case certPath == "" && !o.TLSSelfSigned:
		return nil, nil
	case o.TLSSelfSigned:
		certPath, keyPath = filepath.Join(o.StateDir, certFile), filepath.Join(o.StateDir, keyFile)
		if err := ensureCertificate(certPath, keyPath, certNames(o, addr)); err != nil {
			return nil, &sluice.Error{Kind: sluice.Denied, Op: "tls", Subject: certPath, Err: err}
		}
	}
	cert, err := loadPair(certPath, keyPath)
	if err != nil {
		return nil, err
	}
	// HTTP/1.1 alone: a held call or a download has its own connection, whose deadlines and buffers are then its own too.
	return &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}, nil
}

func loadPair(certPath, keyPath string) (tls.Certificate, error) {
	refuse := func(subject string, err error) (tls.Certificate, error) {
		return tls.Certificate{}, &sluice.Error{Kind: sluice.Invalid, Op: "tls", Subject: subject, Err: err}
	}
	certPEM, err := os.ReadFile(certPath)
	if err != nil {
		return refuse(certPath, err)
	}
	f, err := wire.OpenPrivate(keyPath, true)
	if err != nil {
		return tls.Certificate{}, err
	}
	defer f.Close() //nolint:errcheck // nothing was written
	keyPEM, err := io.ReadAll(f)
	if err != nil {
		return refuse(keyPath, err)
	}
	cert, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return refuse(certPath, err)
	}
	return cert, nil
}

// certNames are the names under which clients may call: those of the Host allow-list, and the host's own.
func certNames(o *Options, addr *net.TCPAddr) []string {
	names := append([]string{"localhost", "127.0.0.1", "::1"}, o.AllowHosts...)
	if host, _, err := net.SplitHostPort(o.Listen); err == nil && host != "" {
		names = append(names, host)
	}
	if host, err := os.Hostname(); err == nil {
		names = append(names, host)
	}
	if !addr.IP.IsUnspecified() && addr.IP != nil {
		return append(names, addr.IP.String())
	}
	interfaces, err := net.InterfaceAddrs()
	if err != nil {
		return names // clients then need a name of the list
	}
	for _, a := range interfaces {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLinkLocalUnicast() {
			names = append(names, n.IP.String())
		}
	}
	return names
}

// ensureCertificate keeps the certificate that is there if it is good for all names and some time to come, so that clients that trust it go on doing so.
func ensureCertificate(certPath, keyPath string, names []string) error {
	if pair, err := loadPair(certPath, keyPath); err == nil {
		if stillGood(pair.Leaf, names, time.Now()) {
			return nil
		}
	} else if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, sluice.ErrInvalid) { // invalid: half of a pair, from a start that was cut off
		return err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return err
	}
	now := time.Now()
	cert := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "sluice"}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(certLife),
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true, IsCA: true, MaxPathLenZero: true,
	}
	for _, n := range names {
		if ip := net.ParseIP(n); ip != nil {
			cert.IPAddresses = append(cert.IPAddresses, ip)
		} else {
			cert.DNSNames = append(cert.DNSNames, n)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		return err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	if err := replace(keyPath, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), 0o600); err != nil {
		return err
	}
	return replace(certPath, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644)
}

func stillGood(c *x509.Certificate, names []string, now time.Time) bool {
	if now.Before(c.NotBefore) || now.Add(certRenew).After(c.NotAfter) {
		return false
	}
	for _, n := range names {
		if c.VerifyHostname(n) != nil {
			return false
		}
	}
	return true
}
