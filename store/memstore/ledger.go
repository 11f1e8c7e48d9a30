package memstore

import (
	"fmt"
	"sync"

	"github.com/sluice-ml/sluice"
)

// ledger keeps the counters and holds them to the caps. Its mutex is held for a few additions only, so that Health waits for
// nothing, not even for a list of all samples.
type ledger struct {
	mu sync.Mutex // guards h; innermost
	h  sluice.Health
}

func (l *ledger) snapshot() sluice.Health {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.h
}

// room checks that n bytes and a sample fit beside what is used, less what a reservation has set aside for them. The caller holds mu.
func (l *ledger) room(op, subject string, n, bookedBytes, bookedSamples int64) error {
	c := l.h.Caps
	fail := func(hint, format string, args ...any) error {
		return &sluice.Error{Kind: sluice.Full, Op: "memstore: " + op, Subject: subject, Detail: fmt.Sprintf(format, args...), Hint: hint}
	}
	if c.MaxBytes > 0 && n > c.MaxBytes {
		return fail("raise max_bytes or shorten the sample", "a sample of %d bytes does not fit the cap of %d bytes", n, c.MaxBytes)
	}
	if used := l.h.UsedBytes() - bookedBytes; c.MaxBytes > 0 && n > bookedBytes && n > c.MaxBytes-used {
		return fail("", "%d bytes do not fit beside the %d in use of the cap of %d bytes", n, used, c.MaxBytes)
	}
	if used := l.h.UsedSamples() - bookedSamples; c.MaxSamples > 0 && bookedSamples == 0 && used >= c.MaxSamples {
		return fail("", "one more does not fit beside the %d in use of the cap of %d samples", used, c.MaxSamples)
	}
	return nil
}

func (l *ledger) reserve(n int64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.room("reserve", "", n, 0, 0); err != nil {
		return err
	}
	l.h.ReservedBytes += n
	l.h.ReservedSamples++
	return nil
}

func (l *ledger) unreserve(n int64) {
	l.mu.Lock()
	l.h.ReservedBytes -= n
	l.h.ReservedSamples--
	l.mu.Unlock()
}

// stage books n bytes for a put, under the reservation own unless that is nil. While it lasts, reserved holds the larger of both.
func (l *ledger) stage(id string, n int64, own *reservation) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	bytes, samples := int64(0), int64(0)
	if own != nil {
		bytes, samples = own.bytes, 1
	}
	if err := l.room("put", id, n, bytes, samples); err != nil {
		return err
	}
	l.h.ReservedBytes += max(n-bytes, 0)
	l.h.ReservedSamples += 1 - samples
	l.h.StagingBytes += n
	return nil
}

// unstage undoes stage: the reservation is as it was.
func (l *ledger) unstage(n int64, own *reservation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.h.StagingBytes -= n
	if own != nil {
		l.h.ReservedBytes -= max(n-own.bytes, 0)
		return
	}
	l.h.ReservedBytes -= n
	l.h.ReservedSamples--
}

// publish turns what stage booked into a resident sample, and the reservation into nothing.
func (l *ledger) publish(n int64, own *reservation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	booked := n
	if own != nil {
		booked = max(n, own.bytes)
	}
	l.h.StagingBytes -= n
	l.h.ReservedBytes -= booked
	l.h.ReservedSamples--
	l.h.ResidentBytes += n
	l.h.ResidentSamples++
}

func (l *ledger) free(n int64) {
	l.mu.Lock()
	l.h.ResidentBytes -= n
	l.h.ResidentSamples--
	l.mu.Unlock()
}

// mark counts a sample of n bytes among the dead letters, or no longer.
func (l *ledger) mark(n int64, dead bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if dead {
		l.h.DeadBytes += n
		l.h.DeadSamples++
	} else {
		l.h.DeadBytes -= n
		l.h.DeadSamples--
	}
}
