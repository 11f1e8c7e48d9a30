package journaltest

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-ml/sluice"
)

// memory is a place in memory. Its faults are what a journal may do wrong.
type memory struct {
	mu      sync.Mutex
	durable []sluice.Record
	writer  *writer
	left    int // steps until it dies
	fault   string
}

type writer struct {
	m       *memory
	waiting []sluice.Record // lazy ones
	err     error
}

const limit = 1 << 20

var errDead = errors.New("dead")

func (m *memory) place() Place {
	m.left = 1 << 30
	return Place{
		Open: func(context.Context) (sluice.Journal, error) {
			m.mu.Lock()
			defer m.mu.Unlock()
			if m.writer != nil && m.writer.err == nil && m.fault != "no fence" {
				m.writer.err = sluice.ErrStale
			}
			m.writer = &writer{m: m}
			return m.writer, nil
		},
		Kill: func() {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.writer.err = errDead
			if m.fault == "kill loses" && len(m.durable) > 0 {
				m.durable = m.durable[:len(m.durable)-1]
			}
		},
		DieAt: func(step int) {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.left = step
			if m.fault == "never dies" {
				m.left = 1 << 30
			}
		},
	}
}

func (m *memory) dies() bool {
	m.left--
	return m.left < 0
}

func tooLarge(records []sluice.Record) bool {
	return slices.ContainsFunc(records, func(r sluice.Record) bool { return len(r.Data) > limit })
}

func (w *writer) Append(ctx context.Context, records []sluice.Record) error {
	m := w.m
	m.mu.Lock()
	defer m.mu.Unlock()
	undead := errors.Is(w.err, errDead) && m.fault == "goes on"
	if w.err != nil && !undead {
		return w.err
	}
	if err := context.Cause(ctx); err != nil && m.fault != "ignores the context" {
		return err
	}
	if tooLarge(records) && m.fault != "no limit" {
		return sluice.ErrInvalid
	}
	durable := false
	for _, r := range records {
		if m.fault != "keeps memory" {
			r.Data = slices.Clone(r.Data)
		}
		if m.fault == "forgets lazy" {
			r.Lazy = false
		}
		durable = durable || !r.Lazy
		if r.Lazy && m.fault == "drops lazy" {
			continue
		}
		w.waiting = append(w.waiting, r)
	}
	if !durable && len(records) > 0 {
		return nil
	}
	if m.fault == "reverses" {
		slices.Reverse(w.waiting)
	}
	if m.fault == "lazy later" {
		slices.SortStableFunc(w.waiting, func(a, b sluice.Record) int {
			if a.Lazy == b.Lazy {
				return 0
			}
			if a.Lazy {
				return 1
			}
			return -1
		})
	}
	if undead {
		return nil
	}
	if m.dies() {
		w.err = errDead
		if m.fault == "half a record" && len(w.waiting) > 0 {
			r := w.waiting[0]
			r.Data = r.Data[:len(r.Data)/2]
			m.durable = append(m.durable, r)
		}
		return w.err
	}
	m.durable = append(m.durable, w.waiting...)
	if m.fault == "twice" && len(w.waiting) > 0 {
		m.durable = append(m.durable, w.waiting[len(w.waiting)-1])
	}
	w.waiting = nil
	if m.dies() {
		w.err = errDead
	}
	return w.err
}

func (w *writer) Replay(ctx context.Context, f func(sluice.Record) error) error {
	w.m.mu.Lock()
	err, records := w.err, slices.Clone(w.m.durable)
	w.m.mu.Unlock()
	if err != nil {
		return err
	}
	for _, r := range records {
		if err := context.Cause(ctx); err != nil && w.m.fault != "ignores the context" {
			return err
		}
		if err := f(r); err != nil && w.m.fault != "ignores the reader" {
			return err
		}
	}
	return nil
}

func (w *writer) Compact(ctx context.Context, snapshot []sluice.Record) error {
	m := w.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if w.err != nil {
		return w.err
	}
	if err := context.Cause(ctx); err != nil && m.fault != "compacts without a context" {
		return err
	}
	if tooLarge(snapshot) && m.fault != "no limit" {
		return sluice.ErrInvalid
	}
	if m.dies() {
		w.err = errDead
		return w.err
	}
	if m.fault == "purges first" {
		m.durable = nil
	}
	if m.dies() {
		w.err = errDead
		return w.err
	}
	if m.fault == "compaction keeps the old" {
		m.durable = append(m.durable, snapshot...)
	} else {
		m.durable = slices.Clone(snapshot)
	}
	w.waiting = nil
	if m.dies() {
		w.err = errDead
	}
	return w.err
}

func (w *writer) Close() error {
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	if w.err == nil && w.m.fault != "never closes" {
		w.m.durable = append(w.m.durable, w.waiting...)
		w.err = sluice.ErrClosed
	}
	return nil
}

const faultEnv = "SLUICE_JOURNALTEST_FAULT"

func TestMemory(t *testing.T) {
	Run(t, Harness{MaxRecord: limit, Fences: true, New: func(testing.TB) Place {
		m := &memory{fault: os.Getenv(faultEnv)}
		return m.place()
	}})
}

// Every fault must turn the suite red.
func TestTheSuiteFindsFaults(t *testing.T) {
	if os.Getenv(faultEnv) != "" {
		t.Skip("this is the suite over a fault")
	}
	t.Parallel()
	for _, fault := range []string{
		"no fence", "kill loses", "never dies", "goes on", "ignores the context", "compacts without a context", "ignores the reader", "no limit", "keeps memory", "forgets lazy",
		"drops lazy", "reverses", "lazy later", "half a record", "twice", "purges first", "compaction keeps the old", "never closes",
	} {
		t.Run(strings.ReplaceAll(fault, " ", "_"), func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(os.Args[0], "-test.run=^TestMemory$", "-rapid.nofailfile", "-rapid.checks=20", "-rapid.shrinktime=0")
			cmd.Env = append(os.Environ(), faultEnv+"="+fault)
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || !strings.Contains(string(out), "--- FAIL: TestMemory/") {
				t.Errorf("the suite passes (%v):\n%s", err, out)
			}
		})
	}
}
