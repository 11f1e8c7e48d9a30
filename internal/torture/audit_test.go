package torture

import (
	"strings"
	"testing"
	"time"
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
		{"a living lease on what somebody else acked, though nobody was killed", last(
			line{Who: "consumer-3", At: 20, Op: opDeliver, Sample: "a", Generation: "g", Lease: "l0", Asked: 5},
			line{Who: "consumer-3", At: 21, Op: opRead, Sample: "a", Generation: "g", Lease: "l0", Status: "not_found", LeftNanos: 1},
		), func(a *audit) int64 { return a.Missing }, "can't read it: not_found"},
		{"a dead letter that was acked", func(l []line, t *testimony) []line { t.dead["a"] = "g"; return l }, func(a *audit) int64 { return a.Forgotten }, "a dead letter at the end"},
		{"an ack without an answer, whose process goes on", func(l []line, _ *testimony) []line {
			return append(l[:len(l)-1], line{Who: "consumer-1", At: 14, Op: opDone})
		}, func(a *audit) int64 { return a.Lost }, "s/0: a was put and is neither"},
		{"a stale ack, though nobody was killed", func(l []line, _ *testimony) []line {
			l[len(l)-1].Status = "stale"
			return l
		}, func(a *audit) int64 { return a.Lost }, "s/0: a was put and is neither"},
		{"a stale ack, and a kill that was over before", func(l []line, _ *testimony) []line {
			l[len(l)-1].Status = "stale"
			return append([]line{{Who: "torture", At: 1, Op: opKill}, {Who: "torture", At: 2, Op: opKill, End: true}}, l...)
		}, func(a *audit) int64 { return a.Lost }, "s/0: a was put and is neither"},
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

func TestAnAckWhoseAnswerWasLostCounts(t *testing.T) {
	t.Parallel()
	lines, said := story()
	if a := examine(lines[:len(lines)-1], said); !a.clean() || a.Acked != 1 || a.Unanswered != 1 {
		t.Errorf("its process was killed: %+v", a)
	}
	for _, upset := range []op{opKill, opFull} {
		lines, said := story()
		lines[len(lines)-1].Status = "stale" // the first attempt was it
		lines = append(lines[:len(lines)-1], line{Who: "torture", At: 12, Op: upset}, lines[len(lines)-1])
		if a := examine(lines, said); !a.clean() || a.Acked != 1 || a.Unanswered != 1 {
			t.Errorf("%s meanwhile: %+v", upset, a)
		}
	}
}

func TestALeaseThatWasForgottenWithItsServiceIsNoMissingSample(t *testing.T) {
	t.Parallel()
	lines, said := story()
	lines = append([]line{{Who: "torture", At: 4, Op: opKill}, {Who: "torture", At: 6, Op: opKill, End: true}}, append(lines,
		line{Who: "consumer-3", At: 20, Op: opDeliver, Sample: "a", Generation: "g", Lease: "l0", Asked: 5},
		line{Who: "consumer-3", At: 21, Op: opRead, Sample: "a", Generation: "g", Lease: "l0", Status: "not_found", LeftNanos: 1})...)
	if a := examine(lines, said); !a.clean() || a.Early != 1 {
		t.Errorf("%+v", a)
	}
}

func TestATortureThatProvesNothingHasFailed(t *testing.T) {
	t.Parallel()
	good := func() *Result {
		return &Result{Kills: map[string]int64{"producer": 1, "consumer": 1, "service": 1}, audit: audit{Produced: 100, Acked: 100, put: map[string]int64{"producer-0": 100}, got: map[string]int64{"consumer-0": 100}}}
	}
	o := &Options{Duration: time.Minute, Producers: 1, Consumers: 1}
	for _, c := range []struct {
		edit func(*Result)
		says string
	}{
		{func(*Result) {}, ""},
		{func(r *Result) { r.Produced, r.Acked = 0, 0 }, "nothing flowed"},
		{func(r *Result) { r.Kills = map[string]int64{} }, "nobody was killed"},
		{func(r *Result) { r.Kills["service"] = 0 }, "no service was killed"},
		{func(r *Result) { r.got = nil }, "consumer-0 never got a sample"},
		{func(r *Result) { r.put = nil }, "producer-0 never got a sample into the queue"},
	} {
		r := good()
		c.edit(r)
		r.judge(o)
		if text := strings.Join(r.Findings, "\n"); r.OK() != (c.says == "") || !strings.Contains(text, c.says) {
			t.Errorf("findings are %q, want %q among them", text, c.says)
		}
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
