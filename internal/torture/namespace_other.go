//go:build !linux

package torture

import (
	"context"
	"io"

	"github.com/sluice-ml/sluice"
)

// supported says why this system can't be tortured: the service runs on Linux only.
func supported() error {
	return &sluice.Error{Kind: sluice.Unsupported, Op: "torture", Detail: "the service that would be tortured runs on Linux only"}
}

// Isolated is for Linux.
func Isolated(context.Context, []string, io.Writer, io.Writer) (status int, ok bool, err error) {
	return 0, false, nil
}

func mountSmall(string, int64) error { return supported() }

func unmount(string) error { return supported() }

func fill(string) (empty func() error, err error) { return nil, supported() }

func usedBytes(string) (int64, error) { return 0, supported() }
