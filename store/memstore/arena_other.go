//go:build !linux

package memstore

import (
	"errors"
	"time"

	"github.com/sluice-ml/sluice"
)

// Without anonymous memory files every sample lies on the heap, and every get copies.

type arena struct{}

type segment struct{}

func newArena(sluice.Caps, sluice.Clock, *machine) (*arena, error) { return nil, errors.ErrUnsupported }

func (*arena) alloc(int64) (block, error) { return block{}, errors.ErrUnsupported }
func (*arena) trim(time.Time)             {}
func (*arena) poolBytes() int64           { return 0 }
func (*arena) close()                     {}

func (*segment) write(int64, []byte) error { return errors.ErrUnsupported }
func (*segment) bytes() []byte             { return nil }
func (*segment) private() (private, error) { return private{}, errors.ErrUnsupported }
func (*segment) free()                     {}

func (private) unmap() error { return nil }

func freeMemory() (int64, error) { return 0, errors.ErrUnsupported }
