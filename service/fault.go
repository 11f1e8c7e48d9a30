package service

import (
	"sync/atomic"

	"github.com/sluice-ml/sluice"
)

// Fault is a mistake that the service makes on purpose, now and then, so that a test can see whether an audit finds it. It has no use but that.
type Fault string

// The faults.
const (
	ForgetAck Fault = "forget-ack" // says "settled" to an ack, and does not tell the queue
	LoseRef   Fault = "lose-ref"   // says "enqueued" to a commit, and does not tell the queue
	FreeEarly Fault = "free-early" // frees a sample when it is leased
)

// every is how often a fault happens: one in so many calls.
const every = 3

// faults counts the calls in which the service's fault might happen.
type faults struct {
	fault Fault
	calls atomic.Int64
}

// strikes reports whether it happens now.
func (f *faults) strikes(which Fault) bool {
	return f.fault == which && f.calls.Add(1)%every == 0
}

func (f Fault) check() error {
	switch f {
	case "", ForgetAck, LoseRef, FreeEarly:
		return nil
	}
	return &sluice.Error{Kind: sluice.Invalid, Op: "service: open", Subject: "Fault", Detail: "is " + plain(string(f)) + ", want forget-ack, lose-ref or free-early"}
}
