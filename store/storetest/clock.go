package storetest

import "github.com/sluice-ml/sluice/internal/fakeclock"

// Clock is a sluice.Clock that stands still until it is told to advance.
type Clock = fakeclock.Clock

// NewClock returns a clock that stands at noon of the first of January 2026, UTC.
func NewClock() *Clock { return fakeclock.New() }
