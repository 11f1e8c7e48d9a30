package memstore

import (
	"fmt"
	"sync"
	"time"
)

// machine knows what memory the machine, or the cgroup, has left for us. Reading that takes some ten microseconds, so
// a reading serves for a second, or until a quarter of it was taken.
type machine struct {
	read func() (int64, error)

	mu    sync.Mutex // guards what follows
	at    time.Time
	left  int64 // as read
	taken int64 // since
	blind bool  // it cannot be read: then anything goes
}

// has reports whether n bytes more could be had.
func (m *machine) has(n int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.check(n)
}

// take is has, and counts them.
func (m *machine) take(n int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.check(n)
	if err == nil {
		m.taken += max(n, 0)
	}
	return err
}

// retake is take after memory was given back.
func (m *machine) retake(n int64) error {
	m.mu.Lock()
	m.at = time.Time{}
	m.mu.Unlock()
	return m.take(n)
}

func (m *machine) check(n int64) error {
	if n <= 0 {
		return nil
	}
	// It is the machine's time that counts here, and not the store's.
	if m.at.IsZero() || time.Since(m.at) > time.Second || m.taken > m.left/4 || n > m.left-m.taken {
		left, err := m.read()
		m.at, m.left, m.taken, m.blind = time.Now(), left, 0, err != nil
	}
	if !m.blind && n > m.left-m.taken {
		return fmt.Errorf("%d bytes more are needed, the machine or the cgroup has %d bytes of memory left", n, m.left-m.taken)
	}
	return nil
}
