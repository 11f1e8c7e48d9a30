package torture

import (
	"strings"
	"testing"
)

// story is a short one in which all goes well: one sample, delivered twice, acked the second time; another is dead.
func story() ([]line, testimony) {
	return []line{
		{Who: "producer-0", At: 1, Op: opStore, Sample: "a", Generation: "g"},
		{Who: "producer-0", At: 2, Op: opStore, End: true, Sample: "a", Generation: "g", Status: statusOK},
		{Who: "producer-0", At: 3, Op: opCommit, Sample: "a", Generation: "g", Source: "s", Index: 0},
		{Who: "producer-0", At: 4, Op: opCommit, End: true, Sample: "a", Generation: "g", Status: "enqueued"},
		{Who: "producer-0", At: 5, Op: opCommit, Sample: "b", Generation: "h", Source: "s", Index: 1},
		{Who: "producer-0", At: 6, Op: opCommit, End: true, Sample: "b", Generation: "h", Status: "enqueued"},
		{Who: "consumer-0", At: 7, Op: opDeliver, Sample: "a", Generation: "g", Lease: "l1", Asked: 6},
		{Who: "consumer-0", At: 8, Op: opRead, Sample: "a", Generation: "g", Lease: "l1", Status: statusOK},
		{Who: "consumer-0", At: 9, Op: opSettle, Sample: "a", Generation: "g", Lease: "l1", Text: "fail"},
		{Who: "consumer-0", At: 10, Op: opSettle, End: true, Sample: "a", Generation: "g", Lease: "l1", Text: "fail", Status: "settled"},
		{Who: "consumer-1", At: 11, Op: opDeliver, Sample: "a", Generation: "g", Lease: "l2", Redelivery: 1, Asked: 10},
		{Who: "consumer-1", At: 12, Op: opSettle, Sample: "a", Generation: "g", Lease: "l2", Text: "ack"},
		{Who: "consumer-1", At: 13, Op: opSettle, End: true, Sample: "a", Generation: "g", Lease: "l2", Text: "ack", Status: "settled"},
	}, testimony{dead: map[string]string{"b": "h"}, taken: map[position]bool{{"s", 0}: true, {"s", 1}: true}}
}

func TestAuditFindsNothingWhereNothingIsWrong(t *testing.T) {
	t.Parallel()
	lines, said := story()
	a := examine(lines, said)
	if !a.clean() || a.Produced != 2 || a.Acked != 1 || a.Dead != 1 || a.Redelivered != 1 {
		t.Errorf("%+v", a)
	}
}

func TestAuditFindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	last := func(l ...line) func([]line, *testimony) []line {
		return func(lines []line, _ *testimony) []line { return append(lines, l...) }
	}
	for _, c := range []struct {
		name  string
		edit  func([]line, *testimony) []line
		count func(*audit) int64
		says  string
	}{
		{"a sample that is neither acked nor dead is lost", func(l []line, t *testimony) []line { t.dead = nil; return l }, func(a *audit) int64 { return a.Lost }, "s/1: b was put and is neither acked nor dead"},
		{"a commit without an answer that the queue took is lost if nobody got it", func(l []line, t *testimony) []line {
			t.taken[position{"s", 2}] = true
			return append(l, line{Who: "producer-0", At: 20, Op: opCommit, Sample: "c", Generation: "i", Source: "s", Index: 2})
		}, func(a *audit) int64 { return a.Lost }, "s/2: c was put"},
		{"two acks", last(
			line{Who: "consumer-2", At: 14, Op: opDeliver, Sample: "a", Generation: "g", Lease: "l3", Redelivery: 1, Asked: 10},
			line{Who: "consumer-2", At: 15, Op: opSettle, Sample: "a", Generation: "g", Lease: "l3", Text: "ack"},
			line{Who: "consumer-2", At: 16, Op: opSettle, End: true, Sample: "a", Generation: "g", Lease: "l3", Text: "ack", Status: "settled"},
		), func(a *audit) int64 { return a.DoubleAcked }, "a: acked under 2 leases"},
		{"a later delivery of an acked sample", last(line{Who: "consumer-2", At: 14, Op: opDeliver, Sample: "a", Generation: "g", Lease: "l3", Redelivery: 2, Asked: 9}), func(a *audit) int64 { return a.Forgotten }, "was delivered again as l3"},
		{"a delivery that was asked for after the ack was confirmed", last(line{Who: "consumer-2", At: 15, Op: opDeliver, Sample: "a", Generation: "g", Lease: "l3", Asked: 14}), func(a *audit) int64 { return a.Forgotten }, "was delivered again as l3"},
		{"other bytes", last(line{Who: "consumer-1", At: 14, Op: opRead, Sample: "a", Generation: "g", Lease: "l2", Status: statusWrong}), func(a *audit) int64 { return a.Wrong }, "other bytes"},
		{"a living lease on nothing", last(line{Who: "consumer-1", At: 14, Op: opRead, Sample: "a", Generation: "g", Lease: "l2", Status: "not_found", LeftNanos: 1}), func(a *audit) int64 { return a.Missing }, "can't read it: not_found"},
		{"one position put twice", last(
			line{Who: "producer-0", At: 14, Op: opCommit, Sample: "a2", Generation: "k", Source: "s", Index: 0},
			line{Who: "producer-0", At: 15, Op: opCommit, End: true, Sample: "a2", Generation: "k", Status: "enqueued"},
		), func(a *audit) int64 { return a.Repeated }, "s/0: is in the queue 2 times"},
		{"an error that nothing explains", last(line{Who: "consumer-1", At: 14, Op: opTrouble, Status: "invalid", Text: "what"}), func(a *audit) int64 { return a.Trouble }, "consumer-1: invalid what"},
		{"a delivery of what was never put", last(line{Who: "consumer-1", At: 14, Op: opDeliver, Sample: "z", Generation: "z", Lease: "l9"}), func(a *audit) int64 { return a.Trouble }, "z: was delivered and never committed"},
		{"a position taken that nobody put", func(l []line, t *testimony) []line { t.taken[position{"s", 9}] = true; return l }, func(a *audit) int64 { return a.Trouble }, "s/9: the queue says"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			lines, said := story()
			a := examine(c.edit(lines, &said), said)
			if c.count(a) != 1 || a.clean() {
				t.Errorf("%+v", a)
			}
			if text := strings.Join(a.findings, "\n"); !strings.Contains(text, c.says) {
				t.Errorf("findings are %q, want %q among them", text, c.says)
			}
		})
	}
}

func TestAnAckWhoseProcessWasKilledCounts(t *testing.T) {
	t.Parallel()
	lines, said := story()
	if a := examine(lines[:len(lines)-1], said); !a.clean() || a.Acked != 1 {
		t.Errorf("%+v", a)
	}
}

func TestBooksAreReadInTheOrderOfTime(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, who := range []string{"consumer-0", "producer-0"} {
		b, err := openBook(dir, who, 1)
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if err := b.write(line{Op: opDone}); err != nil {
				t.Fatal(err)
			}
		}
		if err := b.close(); err != nil {
			t.Fatal(err)
		}
		if _, err := openBook(dir, who, 1); err == nil {
			t.Error("an incarnation opened the book of another one")
		}
	}
	lines, err := readBooks(dir)
	if err != nil || len(lines) != 6 {
		t.Fatal(len(lines), err)
	}
	for i := range lines[1:] {
		if lines[i].At > lines[i+1].At {
			t.Errorf("line %d comes at %d, the next at %d", i, lines[i].At, lines[i+1].At)
		}
	}
}
