//go:build linux

package dirstore

import (
	"context"
	"errors"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

// Find returns the ref of the sample that is here under the id in the generation. It reads the head of its file. ErrNotFound if there is none.
func (s *Store) Find(ctx context.Context, id, generation string) (sluice.Ref, error) {
	if err := s.enter(ctx, "find"); err != nil {
		return sluice.Ref{}, err
	}
	defer s.life.RUnlock()
	if err := s.checkDirectory("find"); err != nil {
		return sluice.Ref{}, err
	}
	return s.find("find", id, generation)
}

func (s *Store) find(op, id, generation string) (sluice.Ref, error) {
	missing := fail(sluice.NotFound, op, id, "is not here in generation %s", generation)
	here := false
	if err := s.do(func(l *ledger) error {
		_, sl := l.published(id, digest(generation))
		here = sl != nil
		return nil
	}); err != nil {
		return sluice.Ref{}, err
	}
	if !here {
		return sluice.Ref{}, missing
	}
	ref, _, err := s.readRef(id)
	switch {
	case errors.Is(err, unix.ENOENT), err == nil && ref.Generation() != generation: // it was freed at this moment
		return sluice.Ref{}, missing
	case err != nil:
		return sluice.Ref{}, s.corrupt(id, "", err)
	}
	return ref, nil
}
