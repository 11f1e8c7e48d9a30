//go:build !linux

package dirstore

import (
	"context"
	"io"
	"os"
	"runtime"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
)

// Store needs Linux; here there is none.
type Store struct{ sluice.ClaimStore }

// Open fails with ErrUnsupported: the store needs Linux's file locks and futexes.
func Open(dir string, _ *Options) (*Store, error) {
	return nil, &sluice.Error{Kind: sluice.Unsupported, Op: "dirstore: open", Subject: dir, Detail: "works on Linux only, this is " + runtime.GOOS}
}

func unsupported(op string) error {
	return &sluice.Error{Kind: sluice.Unsupported, Op: "dirstore: " + op, Detail: "works on Linux only, this is " + runtime.GOOS}
}

// Receive fails with ErrUnsupported.
func (s *Store) Receive(context.Context, io.Reader, int64, Incoming, sluice.Reservation) (sluice.Ref, error) {
	return sluice.Ref{}, unsupported("receive")
}

// Adopt fails with ErrUnsupported.
func (s *Store) Adopt(context.Context, *os.Root, string, int, Incoming, sluice.Reservation) (sluice.Ref, error) {
	return sluice.Ref{}, unsupported("adopt")
}

// Spare fails with ErrUnsupported.
func (s *Store) Spare(context.Context, *os.Root, string, int64) (bool, error) {
	return false, unsupported("spare")
}

// Lend fails with ErrUnsupported.
func (s *Store) Lend(context.Context, sluice.Ref, bool) (*Loan, error) {
	return nil, unsupported("lend")
}

// Find fails with ErrUnsupported.
func (s *Store) Find(context.Context, string, string) (sluice.Ref, error) {
	return sluice.Ref{}, unsupported("find")
}

// SamplesExcept fails with ErrUnsupported.
func (s *Store) SamplesExcept(context.Context, func(string) bool) ([]sluice.SampleInfo, error) {
	return nil, unsupported("samples")
}

// ClaimAll fails with ErrUnsupported.
func (s *Store) ClaimAll(refs []sluice.Ref, _ string) []error { return refuseAll("claim", len(refs)) }

// UnclaimAll fails with ErrUnsupported.
func (s *Store) UnclaimAll(refs []sluice.Ref, _ string) []error {
	return refuseAll("unclaim", len(refs))
}

func refuseAll(op string, n int) []error {
	errs := make([]error, n)
	for i := range errs {
		errs[i] = unsupported(op)
	}
	return errs
}

// Loan needs Linux; here there is none.
type Loan struct{}

// Handle is zero.
func (*Loan) Handle() (h sluice.Handle) { return h }

// Name is "".
func (*Loan) Name() string { return "" }

// Size is 0.
func (*Loan) Size() int64 { return 0 }

// Header is nil.
func (*Loan) Header() *safetensors.Header { return nil }

// File is nil.
func (*Loan) File() *os.File { return nil }

// Checksums fails with ErrUnsupported.
func (*Loan) Checksums(context.Context) (map[string]uint32, error) { return nil, unsupported("lend") }

// IEEE fails with ErrUnsupported.
func (*Loan) IEEE(context.Context) (map[string]uint32, error) { return nil, unsupported("lend") }

// Summed is false.
func (*Loan) Summed() bool { return false }

// Release does nothing.
func (*Loan) Release() error { return nil }

// Close does nothing.
func (*Loan) Close() error { return nil }

// Drop does nothing.
func (*Loan) Drop() error { return nil }

// Lost does nothing.
func (*Loan) Lost() error { return nil }
