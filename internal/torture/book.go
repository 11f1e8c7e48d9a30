package torture

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// line is one line of a process's book. A call is two: the intent, which is written before it is made, and the outcome, written when its answer is there. So a process
// that is killed at any instant has said what it may have done.
type line struct {
	Who string `json:"who"` // producer-0, consumer-1
	Inc int64  `json:"inc"` // its incarnation
	At  int64  `json:"at"`  // nanoseconds of the host's monotonic clock, which all processes share
	Op  op     `json:"op"`
	End bool   `json:"end,omitempty"` // the outcome; otherwise the intent

	Sample     string `json:"sample,omitempty"`
	Generation string `json:"generation,omitempty"`
	Source     string `json:"source,omitempty"`
	Index      int64  `json:"index,omitempty"` // of the position in the source

	Lease      string `json:"lease,omitempty"`
	Redelivery int    `json:"redelivery,omitempty"`
	Asked      int64  `json:"asked,omitempty"` // of a delivery: when the acquire was made
	LeftNanos  int64  `json:"left,omitempty"`  // of a delivery: time left of the lease, from Asked

	Status string `json:"status,omitempty"` // of an outcome: what the service said, or the kind of the error
	Dead   bool   `json:"dead,omitempty"`   // the settlement made a dead letter
	Text   string `json:"text,omitempty"`
	Detail string `json:"detail,omitempty"`
}

type op string

const (
	opStore   op = "store"   // bytes into the store
	opCommit  op = "commit"  // the ref into the queue
	opTaken   op = "taken"   // a producer that starts learns that its predecessor's commit counts
	opDeliver op = "deliver" // a lease was handed out
	opRead    op = "read"    // the sample's bytes, compared
	opSettle  op = "settle"  // Text has the verdict
	opDone    op = "done"    // the process has no more to do
	opTrouble op = "trouble" // an error that nothing explains

	// In the torture's own book: from before it is done to when it is over.
	opKill op = "kill" // of the service
	opFull op = "full" // the disk is
)

// Outcomes that are no words of the service.
const (
	statusOK    = "ok"
	statusWrong = "wrong" // other bytes than were produced
)

// book is a process's own log: a file that only it writes to. A line is one write, so it is there whole or not at all, whatever happens to the process afterwards.
type book struct {
	mu  sync.Mutex
	f   *os.File
	who string
	inc int64
}

func openBook(dir, who string, incarnation int64) (*book, error) {
	f, err := os.OpenFile(filepath.Join(dir, fmt.Sprintf("%s.%d.book", who, incarnation)), os.O_WRONLY|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	return &book{f: f, who: who, inc: incarnation}, nil
}

// write adds a line. A book that cannot be written to proves nothing: the process must stop.
func (b *book) write(l line) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	l.Who, l.Inc, l.At = b.who, b.inc, now()
	data, err := json.Marshal(l)
	if err != nil {
		return err
	}
	_, err = b.f.Write(append(data, '\n'))
	return err
}

func (b *book) close() error { return b.f.Close() }

// now is the host's monotonic clock.
func now() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err) // there is no host without one
	}
	return t.Nano()
}

// readBooks reads every book in the directory, in the order of time.
func readBooks(dir string) ([]line, error) {
	names, err := filepath.Glob(filepath.Join(dir, "*.book"))
	if err != nil {
		return nil, err
	}
	var all []line
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		for i, text := range bytes.Split(bytes.TrimSuffix(data, []byte("\n")), []byte("\n")) {
			var l line
			if len(text) == 0 {
				continue
			}
			if err := json.Unmarshal(text, &l); err != nil {
				return nil, fmt.Errorf("%s, line %d: %w", filepath.Base(name), i+1, err)
			}
			all = append(all, l)
		}
	}
	slices.SortStableFunc(all, func(a, b line) int {
		switch {
		case a.At < b.At:
			return -1
		case a.At > b.At:
			return 1
		}
		return strings.Compare(a.Who, b.Who)
	})
	return all, nil
}
