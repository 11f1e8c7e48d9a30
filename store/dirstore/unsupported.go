//go:build !linux

package dirstore

import (
	"runtime"

	"github.com/sluice-ml/sluice"
)

// Store needs Linux; here there is none.
type Store struct{ sluice.ClaimStore }

// Open fails with ErrUnsupported: the store needs Linux's file locks and futexes.
func Open(dir string, _ *Options) (*Store, error) {
	return nil, &sluice.Error{Kind: sluice.Unsupported, Op: "dirstore: open", Subject: dir, Detail: "works on Linux only, this is " + runtime.GOOS}
}
