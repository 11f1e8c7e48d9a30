//go:build !linux

package dirstore

import (
	"context"
	"runtime"

	"github.com/sluice-ml/sluice"
)

// Inspect fails with ErrUnsupported: the store works on Linux only.
func Inspect(_ context.Context, dir string, _ *InspectOptions) (*Inspection, error) {
	return nil, &sluice.Error{Kind: sluice.Unsupported, Op: "dirstore: inspect", Subject: dir, Detail: "works on Linux only, this is " + runtime.GOOS}
}
