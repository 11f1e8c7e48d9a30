package sluice

import "time"

// Clock is the time that a component goes by. Conformance suites bring their own.
type Clock interface {
	Now() time.Time
	// AfterFunc calls f in its own goroutine when d has passed, unless stop is called first; stop reports whether it prevented the call.
	AfterFunc(d time.Duration, f func()) (stop func() bool)
}

// SystemClock is the real time: monotonic within a process, as package time has it.
type SystemClock struct{}

// Now is time.Now.
func (SystemClock) Now() time.Time { return time.Now() }

// AfterFunc is time.AfterFunc.
func (SystemClock) AfterFunc(d time.Duration, f func()) func() bool { return time.AfterFunc(d, f).Stop }
