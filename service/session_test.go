package service

import (
	"bufio"
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/fakeclock"
	"github.com/sluice-ml/sluice/internal/wire"
)

// hold holds a session's connection; cut breaks it.
func (b *bed) hold(session string) (cut func()) {
	b.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, b.srv.URL+"/v1/sessions/"+session, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	resp, err := b.srv.Client().Do(req) //nolint:bodyclose // cut closes it
	if err != nil {
		b.t.Fatal(err)
	}
	line, err := bufio.NewReader(resp.Body).ReadString('\n')
	if err != nil || !strings.Contains(line, "grace_seconds") {
		b.t.Fatalf("%q, %v", line, err)
	}
	return func() { cancel(); resp.Body.Close() }
}

// clocked is a bed whose time stands still until the test moves it.
func clocked(t *testing.T, o Options) (*bed, *fakeclock.Clock) {
	clock := fakeclock.New()
	o.Clock = clock
	b := newBed(t, o)
	return b, clock
}

// holdings is what a session of the tests takes: a reservation, an upload, a pin and a lease.
func (b *bed) takeAll(session string) (sluice.Ref, wire.Delivery) {
	b.t.Helper()
	b.put("r1", "s-"+newID()[:6])
	do[wire.Reservations](b, "POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{1000}}, session)
	uploaded := b.upload("r1", "u-"+newID()[:6], "", session)
	d := b.acquire("r1", 1, session)
	if len(d.Leases) != 1 {
		b.t.Fatalf("acquired %+v", d)
	}
	do[wire.Pinned](b, "POST", "/v1/runs/r1/pins", wire.Pin{Ref: d.Leases[0].Ref}, session)
	if h := b.status("r1").Health; h.ReservedBytes != 1000 || h.ResidentSamples != 2 {
		b.t.Fatalf("health %+v", h)
	}
	return uploaded, d
}

// gone reports whether all of that was given back.
func (b *bed) gone() bool {
	st := b.status("r1")
	return st.Health.ReservedBytes == 0 && st.Health.ResidentSamples == 1 && st.Outstanding == 0 && st.Pending == 1
}

func TestASessionEndsWhenItsConnectionIsLost(t *testing.T) {
	t.Parallel()
	b, clock := clocked(t, Options{})
	b.create("r1")
	session := newID()
	cut := b.hold(session)
	b.takeAll(session)
	clock.Advance(5 * time.Minute) // as long as it holds, time means nothing to it
	do[wire.Settled](b, "POST", "/v1/runs/r1/renew", wire.Renew{Consumer: trainer})
	if b.s.sessions.count() != 1 {
		t.Fatal("the session ended while it was held")
	}
	cut()
	s := b.s.sessions.byID[session]
	b.poll("the break is noticed", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.held == 0 })
	clock.Advance(4 * time.Second)
	again := b.hold(session)
	clock.Advance(10 * time.Second)
	if b.s.sessions.count() != 1 {
		t.Fatal("it came back within the grace, and ended all the same")
	}
	again()
	b.poll("the break is noticed", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.held == 0 })
	clock.Advance(6 * time.Second)
	if b.s.sessions.count() != 0 {
		t.Error("the session goes on")
	}
	d := b.acquire("r1", 1)
	if len(d.Leases) != 1 || d.Leases[0].Redelivery == 0 {
		t.Fatalf("the lease did not return: %+v", d)
	}
	b.settle("r1", sluice.Return, d.Leases...)
	if !b.gone() {
		t.Errorf("left: %+v", b.status("r1"))
	}
	if b.s.Abandoned() != 1 {
		t.Errorf("%d abandoned", b.s.Abandoned())
	}
}

func TestASessionThatNeverHeldAConnectionEndsAMinuteAfterItsLastCall(t *testing.T) {
	t.Parallel()
	b, clock := clocked(t, Options{})
	spec := b.spec("r1")
	spec.VisibilityTimeoutSeconds = 3600
	do[wire.Run](b, "POST", "/v1/runs", spec)
	session := newID()
	b.takeAll(session)
	clock.Advance(50 * time.Second)
	do[sluice.Health](b, "GET", "/v1/runs/r1/health", nil, session)
	clock.Advance(50 * time.Second)
	if b.gone() {
		t.Fatal("it ended although it called")
	}
	clock.Advance(11 * time.Second)
	if !b.gone() {
		t.Errorf("left: %+v", b.status("r1"))
	}
}

func TestASessionIsEndedAtOnceByItsClient(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	session := newID()
	defer b.hold(session)()
	b.takeAll(session)
	do[struct{}](b, "DELETE", "/v1/sessions/"+session, nil)
	do[struct{}](b, "DELETE", "/v1/sessions/"+session, nil)
	if !b.gone() {
		t.Errorf("left: %+v", b.status("r1"))
	}
}

func TestSessionsAreNamedWell(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	for _, bad := range []string{"x", strings.Repeat("g", 32), strings.Repeat("A", 32), newID() + "0"} {
		b.wants("invalid", "GET", "/v1/runs/r1/health", nil, bad)
		b.wants("invalid", "DELETE", "/v1/sessions/"+bad, nil)
		b.wants("invalid", "GET", "/v1/sessions/"+bad, nil)
	}
	if n := b.s.sessions.count(); n != 0 {
		t.Errorf("%d sessions were made of it", n)
	}
}

// A call that waits when its session ends is told so, and what it would have been given is not lost.
func TestAWaitEndsWithItsSession(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	session := newID()
	got := make(chan answer)
	go func() {
		got <- b.try("POST", "/v1/runs/r1/acquire", wire.Acquire{Consumer: trainer, WaitSeconds: 60}, session)
	}()
	b.poll("the wait", func() bool { return b.status("r1").ConsumersWaiting == 1 })
	do[struct{}](b, "DELETE", "/v1/sessions/"+session, nil)
	if a := <-got; a.problem.Code != "stale" {
		t.Errorf("the wait ended with %d %s", a.status, a.body)
	}
	b.put("r1", "s-1")
	if st := b.status("r1"); st.Pending != 1 || st.Outstanding != 0 {
		t.Errorf("status %+v", st)
	}
}

func TestAConsumerThatWasStartedAnewOutlivesTheSessionOfItsPredecessor(t *testing.T) {
	t.Parallel()
	b, clock := clocked(t, Options{})
	b.create("r1")
	old := newID()
	cut := b.hold(old)
	b.takeAll(old)
	cut() // the process was killed; another one goes on under its name, before that is noticed
	s := b.s.sessions.byID[old]
	b.poll("the break is noticed", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.held == 0 })
	fresh := newID()
	hold := b.hold(fresh)
	defer hold()
	b.put("r1", "late")
	d := b.acquire("r1", 1, fresh)
	if len(d.Leases) != 1 {
		t.Fatalf("%+v", d)
	}
	clock.Advance(6 * time.Second)
	if _, there := b.s.sessions.byID[old]; there {
		t.Fatal("the old session goes on")
	}
	if got := b.settle("r1", sluice.Ack, d.Leases...); got[0].Status != sluice.Settled {
		t.Errorf("the successor's ack is %s: its lease went with the predecessor's session", got[0].Status)
	}
}
