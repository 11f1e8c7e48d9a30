package queue

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
)

func mustConfigure(t *testing.T, q *Queue, c sluice.RunChange) {
	t.Helper()
	for range 2 { // it may be repeated
		if err := q.Configure(bg, c); err != nil {
			t.Fatal(err)
		}
	}
}

// reopened stops the queue and opens it again over the same journal and store, once as it was written and once more from a snapshot.
func (f *fixture) reopened(j *memJournal, o Options) {
	f.t.Helper()
	for _, compact := range []int{0, 1} {
		if err := f.q.Stop(bg); err != nil {
			f.t.Fatal(err)
		}
		o.Journal, o.compactRecords, o.memoryCount = j, compact, 1
		f.q = newQueue(f.t, f.cfg, f.store, &o)
		if compact == 0 {
			continue
		}
		before := j.compacts
		for range 10 { // more records than what they come to
			f.put(1)
			f.settle(alice, sluice.Ack, f.acquire(alice, 1)...)
		}
		if j.compacts == before {
			f.t.Fatal("there was no snapshot, so that none is tried")
		}
	}
	if err := f.q.Stop(bg); err != nil {
		f.t.Fatal(err)
	}
	o.compactRecords, o.memoryCount = 0, 0
	f.q = newQueue(f.t, f.cfg, f.store, &o)
}

func TestAChangedTimeoutIsThatOfNewLeasesAndOfRenewedOnesIfItIsLonger(t *testing.T) {
	t.Parallel()
	for _, to := range []time.Duration{5 * time.Second, time.Hour} {
		clock := queuetest.NewClock()
		f := newFixture(t, nil, &Options{Clock: clock})
		f.put(3)
		old, renewed := f.acquire(alice, 1), f.acquire(alice, 1)
		clock.Advance(time.Second)
		mustConfigure(t, f.q, sluice.RunChange{VisibilityTimeout: &to})
		young := f.acquire(alice, 1)
		if _, err := f.q.Renew(bg, sluice.RenewRequest{Consumer: alice, Leases: []sluice.LeaseID{renewed[0].ID}}); err != nil {
			t.Fatal(err)
		}
		if young[0].TimeLeft != to {
			t.Errorf("a lease that is given then has %v, want %v", young[0].TimeLeft, to)
		}
		out := func() (ids string) {
			for _, l := range f.q.expiry.all() {
				ids += l.s.id + " "
			}
			return ids
		}
		want := "s0 s1 s2 "
		if out() != want {
			t.Fatalf("leased are %q, want %q", out(), want)
		}
		switch {
		case to < 30*time.Second: // the new one runs out first, in 5 s, and the others in 29 and 30
			clock.Advance(5 * time.Second)
			want = "s0 s1 "
		default:
			clock.Advance(29 * time.Second)
			want = "s1 s2 "
		}
		if _, err := f.q.ReclaimExpired(bg); err != nil {
			t.Fatal(err)
		}
		if out() != want {
			t.Errorf("with %v, leased are %q, want %q", to, out(), want)
		}
		clock.Advance(time.Hour)
		if _, err := f.q.ReclaimExpired(bg); err != nil || out() != "" {
			t.Errorf("in the end, leased are %q, %v", out(), err)
		}
		_ = old
	}
}

// A loader renews by the time that its leases were given with: with less from one renewal to the next it would lose them.
func TestALeaseThatIsRenewedOutlivesAShorterTimeout(t *testing.T) {
	t.Parallel()
	clock, j := queuetest.NewClock(), &memJournal{}
	f := newFixture(t, nil, &Options{Clock: clock, Journal: j})
	f.put(1)
	l := f.acquire(alice, 1)[0]
	to := 2 * time.Second
	mustConfigure(t, f.q, sluice.RunChange{VisibilityTimeout: &to})
	for _, restart := range []bool{false, true} {
		if restart {
			f.reopened(j, Options{Clock: clock})
		}
		for range 4 {
			clock.Advance(l.TimeLeft / 3)
			r, err := f.q.Renew(bg, sluice.RenewRequest{Consumer: alice, Leases: []sluice.LeaseID{l.ID}})
			if err != nil || r[0].Status != sluice.Renewed {
				t.Fatalf("%+v, %v; want it renewed; after a restart: %v", r, err, restart)
			}
		}
	}
}

func TestLinesOfTimeoutsThatAreOverGo(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil, nil)
	f.put(1)
	for i := range 100 {
		to := time.Duration(i+1) * time.Minute
		mustConfigure(t, f.q, sluice.RunChange{VisibilityTimeout: &to})
		f.settle(alice, sluice.Return, f.acquire(alice, 1)...)
	}
	if n := len(f.q.expiry.lines); n > 2 || f.q.expiry.n != 0 {
		t.Errorf("%d lines with %d leases are left", n, f.q.expiry.n)
	}
}

func TestWhatWasConfiguredSurvivesARestart(t *testing.T) {
	t.Parallel()
	clock, j := queuetest.NewClock(), &memJournal{}
	f := newFixture(t, func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 10_000, MaxSamples: 100} }, &Options{Clock: clock, Journal: j})
	before := f.q.Health().Caps
	to, high, low := 7*time.Second, int64(900), int64(0)
	mustConfigure(t, f.q, sluice.RunChange{VisibilityTimeout: &to})
	mustConfigure(t, f.q, sluice.RunChange{HighWatermarkBytes: &high, LowWatermarkBytes: &low})
	f.put(1)
	f.acquire(alice, 1)
	f.reopened(j, Options{Clock: clock})
	want := before
	want.HighWatermarkBytes, want.LowWatermarkBytes = 900, 0
	if st, err := f.q.Status(bg); err != nil || st.Health.Caps != want {
		t.Errorf("caps %+v, %v; want %+v", st.Health.Caps, err, want)
	}
	f.put(1)
	if l := f.acquire(alice, 1)[0]; l.TimeLeft != to {
		t.Errorf("a lease has %v, want %v", l.TimeLeft, to)
	}
	if l := f.q.expiry.first(); l == nil || l.deadline != f.q.now+int64(to) {
		t.Error("a lease of before has not the changed time")
	}
}

func TestAJournalWithoutConfigurationReplays(t *testing.T) {
	t.Parallel()
	j := &memJournal{}
	f := newFixture(t, nil, &Options{Journal: j})
	f.put(1)
	f.reopened(j, Options{})
	f.cfg.VisibilityTimeout = time.Minute // as nothing was changed, the run's own counts
	if err := f.q.Stop(bg); err != nil {
		t.Fatal(err)
	}
	f.q = newQueue(t, f.cfg, f.store, &Options{Journal: j})
	f.put(1)
	if l := f.acquire(alice, 1)[0]; l.TimeLeft < 50*time.Second {
		t.Errorf("a lease has %v, want a minute", l.TimeLeft)
	}
}

func TestChangedMarksPauseAndResume(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 1000} }, nil)
	paused := func() bool {
		st, err := f.q.Status(bg)
		if err != nil {
			t.Fatal(err)
		}
		return st.Paused
	}
	f.put(5)
	if paused() {
		t.Fatal("500 of 1000 bytes pause it")
	}
	high, low := int64(400), int64(100)
	mustConfigure(t, f.q, sluice.RunChange{HighWatermarkBytes: &high, LowWatermarkBytes: &low})
	if !paused() {
		t.Error("500 bytes do not pause it with a high mark of 400")
	}
	high = 600
	mustConfigure(t, f.q, sluice.RunChange{HighWatermarkBytes: &high})
	if paused() {
		t.Error("500 bytes pause it with a high mark of 600, and no pause came since")
	}
	if caps := f.q.Health().Caps; caps.LowWatermarkBytes != 100 {
		t.Errorf("the low mark was not given and is %d, want 100", caps.LowWatermarkBytes)
	}
}

func TestAClosedAndDrainedRunTakesPutsAgain(t *testing.T) {
	t.Parallel()
	j := &memJournal{}
	f := newFixture(t, nil, &Options{Journal: j})
	p := sluice.Producer{Name: "p"}
	report := func(s sluice.ProducerState) error {
		return f.q.Report(bg, sluice.ProducerReport{Producer: p, State: s})
	}
	if err := report(sluice.ProducerRunning); err != nil {
		t.Fatal(err)
	}
	f.put(2)
	if err := report(sluice.ProducerDone); err != nil || !f.q.IsClosed() {
		t.Fatalf("%v, closed: %v", err, f.q.IsClosed())
	}
	reopen := sluice.RunChange{Reopen: true}
	wantConflict := func(when string) {
		t.Helper()
		to := time.Hour
		c := reopen
		c.VisibilityTimeout = &to
		var e *sluice.Error
		if err := f.q.Configure(bg, c); !errors.As(err, &e) || e.Kind != sluice.Conflict || e.Subject != "reopen" {
			t.Errorf("%s: %v, want a conflict about reopen", when, err)
		}
		if f.q.cfg.VisibilityTimeout != 30*time.Second {
			t.Error("what was refused has changed the timeout")
		}
	}
	wantConflict("with samples pending")
	leases := f.acquire(alice, 2)
	wantConflict("with samples leased")
	f.settle(alice, sluice.Ack, leases...)
	mustConfigure(t, f.q, reopen)
	for _, restart := range []bool{false, true} {
		if restart {
			f.reopened(j, Options{})
		}
		if f.q.IsClosed() {
			t.Fatalf("it is closed; after a restart: %v", restart)
		}
		f.put(1)
		if got := f.acquire(alice, 5); len(got) != 1 {
			t.Fatalf("%d leases", len(got))
		} else {
			f.settle(alice, sluice.Ack, got...)
		}
		if _, err := f.q.Reserve(bg, sluice.ReserveRequest{Bytes: 1}); err != nil {
			t.Errorf("reserve: %v", err)
		}
	}
	if err := report(sluice.ProducerDone); err != nil || !f.q.IsClosed() { // a new session, whose end closes it again
		t.Errorf("%v, closed: %v", err, f.q.IsClosed())
	}
	d, err := f.q.Acquire(bg, sluice.AcquireRequest{Consumer: alice})
	if err != nil || !d.End {
		t.Errorf("%+v, %v; want the end", d, err)
	}
}

func TestAReopenedRunForgetsItsCause(t *testing.T) {
	t.Parallel()
	f := newFixture(t, nil, nil)
	if err := f.q.Close(bg, errors.New("the target failed")); err != nil {
		t.Fatal(err)
	}
	mustConfigure(t, f.q, sluice.RunChange{Reopen: true})
	if err := f.q.Close(bg, nil); err != nil {
		t.Fatal(err)
	}
	if d, err := f.q.Acquire(bg, sluice.AcquireRequest{Consumer: alice}); err != nil || !d.End || d.Cause != nil {
		t.Errorf("%+v, %v; want the end without a cause", d, err)
	}
}

func TestReopeningWithAProducerAtTheGate(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 100} }, nil)
	if _, err := f.q.Reserve(bg, sluice.ReserveRequest{Bytes: 100}); err != nil {
		t.Fatal(err)
	}
	waited := make(chan error, 1)
	go func() {
		_, err := f.q.Reserve(bg, sluice.ReserveRequest{Producer: sluice.Producer{Name: "p"}, Bytes: 100})
		waited <- err
	}()
	for f.q.gate.State().Waiting == 0 {
		time.Sleep(time.Millisecond)
	}
	if err := f.q.Close(bg, nil); err != nil {
		t.Fatal(err)
	}
	mustConfigure(t, f.q, sluice.RunChange{Reopen: true})
	if err := <-waited; !errors.Is(err, sluice.ErrClosed) {
		t.Errorf("it was told %v, want ErrClosed", err)
	}
	if f.q.alive.head != nil && f.q.producers[f.q.alive.head.name] != f.q.alive.head {
		t.Error("a producer that was forgotten is watched")
	}
}

func TestConfigureRefusesByField(t *testing.T) {
	t.Parallel()
	f := newFixture(t, func(c *sluice.RunConfig) { c.Caps = sluice.Caps{MaxBytes: 1000} }, nil)
	n := func(v int64) *int64 { return &v }
	zero, negative := time.Duration(0), -time.Second
	for _, c := range []struct {
		change        sluice.RunChange
		subject, want string
	}{
		{sluice.RunChange{}, "", "changes nothing"},
		{sluice.RunChange{VisibilityTimeout: &zero}, "visibility_timeout", "more than 0"},
		{sluice.RunChange{VisibilityTimeout: &negative}, "visibility_timeout", "more than 0"},
		{sluice.RunChange{HighWatermarkBytes: n(1001)}, "high_watermark_bytes", "up to max_bytes (1000)"},
		{sluice.RunChange{HighWatermarkBytes: n(0)}, "high_watermark_bytes", "1 or more"},
		{sluice.RunChange{HighWatermarkBytes: n(250)}, "high_watermark_bytes", "more than low_watermark_bytes (250)"},
		{sluice.RunChange{LowWatermarkBytes: n(750)}, "low_watermark_bytes", "less than high_watermark_bytes (750)"},
		{sluice.RunChange{LowWatermarkBytes: n(-1)}, "low_watermark_bytes", "0 or more"},
		{sluice.RunChange{LowWatermarkSamples: n(1)}, "low_watermark_samples", "high_watermark_samples beside it"},
		{sluice.RunChange{HighWatermarkSamples: n(1 << 53)}, "high_watermark_samples", "less than 2^53"},
	} {
		var e *sluice.Error
		if err := f.q.Configure(bg, c.change); !errors.As(err, &e) || e.Kind != sluice.Invalid || e.Subject != c.subject || !strings.Contains(e.Error(), c.want) {
			t.Errorf("%+v: %v, want %q about %q", c.change, err, c.want, c.subject)
		}
	}
	mustConfigure(t, f.q, sluice.RunChange{HighWatermarkSamples: n(9)})
	if caps := f.q.Health().Caps; caps.HighWatermarkSamples != 9 || caps.LowWatermarkSamples != 3 || caps.HighWatermarkBytes != 750 {
		t.Errorf("caps %+v", caps)
	}
	windows := newFixture(t, func(c *sluice.RunConfig) { c.Windows, c.LargestSample = &sluice.Windows{Ranks: 1, PerRank: 1}, 1 }, nil)
	if err := windows.q.Close(bg, nil); err != nil {
		t.Fatal(err)
	}
	if err := windows.q.Configure(bg, sluice.RunChange{Reopen: true}); !errors.Is(err, sluice.ErrConflict) {
		t.Errorf("a run with windows: %v, want ErrConflict", err)
	}
}
