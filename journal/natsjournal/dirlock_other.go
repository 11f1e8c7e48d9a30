//go:build !unix

package natsjournal

import "github.com/sluice-ml/sluice"

type dirLock struct{}

func lockDir(dir string, _ Owner) (*dirLock, error) {
	return nil, fail(sluice.Unsupported, "open", dir, "there are no locks on directories on this system; connect to a server elsewhere")
}

func (*dirLock) release() error { return nil }
