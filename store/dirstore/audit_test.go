//go:build linux

package dirstore

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/sluice-ml/sluice"
)

// audit computes all that the ledger derives anew and compares it, and the ledger with the directory.
func (s *Store) audit() error {
	return s.do(func(l *ledger) error {
		var h sluice.Health
		var pool, files int64
		free, indexed, pooled := map[uint32]bool{}, map[uint32]bool{}, map[uint32]bool{}
		for at := l.slotFree; at != 0; at = l.slot(at - 1).next {
			if free[at-1] {
				return fmt.Errorf("the free list of slots has a cycle at %d", at-1)
			}
			free[at-1] = true
		}
		for at := l.pool; at != 0; at = l.slot(at - 1).next {
			pooled[at-1] = true
		}
		for b := range l.slots {
			for at := l.slots[b]; at != 0; at = l.slot(at - 1).next {
				if indexed[at-1] || int(bucketOf(l.slot(at-1).name())) != b {
					return fmt.Errorf("the index has slot %d twice or in a wrong place", at-1)
				}
				indexed[at-1] = true
			}
		}
		type holds struct{ pins, open uint32 }
		held := map[uint32]holds{}
		freePins := 0
		for at := l.pinFree; at != 0; at = l.pin(at - 1).next {
			freePins++
		}
		for i := range l.pinTop {
			p := l.pin(i)
			if p.state == 0 {
				freePins--
				continue
			}
			if at, found := l.findPin(p.id); found == nil || at != i {
				return fmt.Errorf("pin %d is not in the index of pins", i)
			}
			if l.slot(p.slot-1).uid != p.uid || l.sessions[p.session-1].state == 0 {
				return fmt.Errorf("pin %d is of slot %d or session %d, which are gone", i, p.slot-1, p.session)
			}
			x := held[p.slot-1]
			x.pins += p.state & pinHandle
			x.open += p.state & pinOpen / pinOpen
			held[p.slot-1] = x
		}
		if freePins != 0 {
			return fmt.Errorf("the free list of pins differs from the free pins by %d", freePins)
		}
		names, err := s.list()
		if err != nil {
			return err
		}
		present := map[string]bool{}
		for _, n := range names {
			if n != ledgerName {
				present[n] = true
			}
		}
		for i := range l.slotTop {
			sl := l.slot(i)
			if (sl.state == stFree) != free[i] || (sl.state == stPublished || sl.state == stStaging) != indexed[i] || (sl.state == stPool) != pooled[i] {
				return fmt.Errorf("slot %d in state %d: free %v, indexed %v, pooled %v", i, sl.state, free[i], indexed[i], pooled[i])
			}
			if x := held[i]; x.pins != sl.pins || x.open != sl.open {
				return fmt.Errorf("slot %d says %d pins and %d mappings, the pins say %+v", i, sl.pins, sl.open, x)
			}
			if sl.session != 0 && l.sessions[sl.session-1].state == 0 && sl.state != stFree {
				return fmt.Errorf("slot %d in state %d is of session %d, which is gone", i, sl.state, sl.session)
			}
			want := ""
			switch sl.state {
			case stReserved:
				h.ReservedBytes += sl.held
				h.ReservedSamples++
			case stStaging:
				h.ReservedBytes += sl.held
				h.ReservedSamples++
				h.StagingBytes += sl.bytes
				delete(present, sl.scratch())
				delete(present, sl.fileName())
			case stPublished:
				h.ResidentBytes += sl.bytes
				h.ResidentSamples++
				if sl.flags&flDead != 0 {
					h.DeadBytes += sl.bytes
					h.DeadSamples++
				}
				want = sl.fileName()
			case stLingering:
				h.ResidentBytes += sl.bytes
				h.ResidentSamples++
				want = sl.scratch()
			case stPool:
				pool += sl.size
				files++
				want = sl.scratch()
			case stTrash:
				delete(present, sl.scratch())
			case stFreeing:
				return fmt.Errorf("slot %d is between states", i)
			}
			if want != "" {
				if !present[want] {
					return fmt.Errorf("slot %d in state %d has no file %s", i, sl.state, want)
				}
				delete(present, want)
			}
		}
		for n := range present {
			if strings.HasPrefix(n, ".sluice-") {
				return fmt.Errorf("the file %s is of no slot", n)
			}
			return fmt.Errorf("the sample file %s is of no slot", n)
		}
		h.Caps, h.PoolBytes = s.caps, pool
		if got := l.health(s.caps); got != h || l.poolFiles.Load() != files {
			return fmt.Errorf("the totals are %+v and %d files, the slots give %+v and %d", got, l.poolFiles.Load(), h, files)
		}
		return nil
	})
}

func mustAudit(t testing.TB, s *Store, when string) {
	t.Helper()
	if err := s.audit(); err != nil {
		t.Fatalf("%s: %v", when, err)
	}
}

func mustOpen(t testing.TB, dir string, o *Options) *Store {
	t.Helper()
	s, err := Open(dir, o)
	if err != nil {
		t.Fatalf("Open: %v", err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// pattern is content that follows from seed.
func pattern(seed byte, n int) []byte {
	const period = 1 << 16
	b := make([]byte, n)
	for i := range min(n, period) {
		b[i] = seed + byte(i*7) + byte(i>>8)
	}
	for i := period; i < n; i *= 2 {
		copy(b[i:], b[:i])
	}
	return b
}

func sampleOf(id string, seed byte, n int) *sluice.Sample {
	return &sluice.Sample{SampleID: id, RunID: "r", Algorithm: sluice.EAGLE3, SchemaVersion: 1, NumTokens: 1, Attributes: map[string]string{"seed": fmt.Sprint(seed)},
		Features: []sluice.Feature{{Name: "x", Tensor: sluice.Tensor{Spec: sluice.Spec{DType: sluice.UInt8, Shape: []int64{int64(n)}}, Data: pattern(seed, n)}}}}
}

func mustPut(t testing.TB, s *Store, id string, seed byte, n int) sluice.Ref {
	t.Helper()
	ref, err := s.Put(t.Context(), sampleOf(id, seed, n), sluice.Reservation{})
	if err != nil {
		t.Fatalf("Put: %v", err)
	}
	return ref
}

func mustGet(t testing.TB, s *Store, ref sluice.Ref) *sluice.Tensors {
	t.Helper()
	ts, err := s.Get(t.Context(), ref)
	if err != nil {
		t.Fatalf("Get: %v", err)
	}
	return ts
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func openFDs(t testing.TB) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(names)
}

// handClock is moved by hand.
type handClock struct {
	sluice.SystemClock
	ahead time.Duration
}

func (c *handClock) Now() time.Time { return time.Now().Add(c.ahead) }

func envInt(name string, or int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return or
}

const (
	dirtyOffset    = unsafe.Offsetof(header{}.dirty)
	segmentsOffset = unsafe.Offsetof(header{}.segments)
)
