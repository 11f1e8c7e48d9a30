package client

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/queue/queuetest"
)

// late is a handler whose answer is on its way when the caller goes: the first call hangs until its caller has gone, the next ones are answered.
func late(t *testing.T, hangs chan<- struct{}, then http.HandlerFunc) http.HandlerFunc {
	var once sync.Once
	return func(w http.ResponseWriter, r *http.Request) {
		first := false
		once.Do(func() { first = true })
		if !first {
			then(w, r)
			return
		}
		_ = json.NewDecoder(r.Body).Decode(new(any)) // only then the server sees that the caller goes
		hangs <- struct{}{}
		select {
		case <-r.Context().Done():
		case <-time.After(10 * time.Second):
			t.Error("the cancellation does not reach the service")
		}
		hangsUp(w, r)
	}
}

func TestWhatACancelledAcquireWasGivenIsItsAnswer(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	hangs, ids := make(chan struct{}, 1), make(chan string, 4)
	lease := wire.Lease{ID: sluice.NewLeaseID(), Ref: queuetest.NewRef("file:///elsewhere", "r1", "s-1", 10, nil)}
	f.onEach("POST /v1/runs/r1/acquire", late(t, hangs, func(w http.ResponseWriter, r *http.Request) {
		var in wire.Acquire
		if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
			t.Error(err)
		}
		if in.WaitSeconds != 0 {
			t.Errorf("the question waits %v s", in.WaitSeconds)
		}
		ids <- in.RequestID
		answer(w, http.StatusOK, wire.Delivery{Leases: []wire.Lease{lease}})
	}))
	q := opened(t, dialed(t, f, nil)).Queue()
	ctx, cancel := context.WithCancel(bg)
	go func() { <-hangs; cancel() }() // ends with the call below
	d, err := q.Acquire(ctx, sluice.AcquireRequest{Consumer: sluice.Consumer{Name: "ann"}, Wait: -1, RequestID: "mine"})
	if err != nil || len(d.Leases) != 1 || d.Leases[0].ID != lease.ID || d.Leases[0].Consumer != "ann" {
		t.Fatalf("got %+v, %v", d, err)
	}
	if id := <-ids; id != "mine" {
		t.Errorf("it asked for the answer to %q", id)
	}
	if n := len(f.of("POST", "/v1/runs/r1/settle")); n != 0 {
		t.Errorf("%d settlements: they are the caller's", n)
	}
}

func TestACancelledAcquireThatWasGivenNothingSaysWhyItEnded(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	hangs := make(chan struct{}, 1)
	f.onEach("POST /v1/runs/r1/acquire", late(t, hangs, says(wire.Delivery{})))
	q := opened(t, dialed(t, f, nil)).Queue()
	ctx, cancel := context.WithCancel(bg)
	go func() { <-hangs; cancel() }() // ends with the call below
	if d, err := q.Acquire(ctx, sluice.AcquireRequest{Consumer: sluice.Consumer{Name: "ann"}, Wait: -1}); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %+v, %v", d, err)
	}
}

func TestWhatACancelledReserveWasGivenIsGivenBack(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(*Run, context.Context) error{
		"queue": func(r *Run, ctx context.Context) error {
			_, err := r.Queue().Reserve(ctx, sluice.ReserveRequest{Bytes: 10})
			return err
		},
		"store": func(r *Run, ctx context.Context) error { _, err := r.Store().Reserve(ctx, 10); return err },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t)
			hangs := make(chan struct{}, 1)
			f.onEach("POST /v1/runs/r1/reserve", late(t, hangs, says(wire.Reservations{Reservations: []wire.Reservation{{ID: "room-1", Bytes: 10}}})))
			back := make(chan wire.Unreserve, 1)
			f.onEach("POST /v1/runs/r1/unreserve", func(w http.ResponseWriter, r *http.Request) {
				var in wire.Unreserve
				if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
					t.Error(err)
				}
				back <- in
				w.WriteHeader(http.StatusNoContent)
			})
			r := opened(t, dialed(t, f, nil))
			ctx, cancel := context.WithCancel(bg)
			go func() { <-hangs; cancel() }() // ends with the call below
			if err := call(r, ctx); !errors.Is(err, context.Canceled) {
				t.Fatalf("got %v", err)
			}
			select {
			case in := <-back:
				if len(in.Reservations) != 1 || in.Reservations[0] != "room-1" {
					t.Errorf("gave back %v", in)
				}
			default:
				t.Error("nothing was given back")
			}
		})
	}
}

func TestAWaitIsCutIntoSlices(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	var waits []time.Duration
	ids := map[string]bool{}
	f.onEach("POST /v1/runs/r1/acquire", func(w http.ResponseWriter, r *http.Request) {
		var in wire.Acquire
		if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
			t.Error(err)
		}
		waits = append(waits, in.WaitSeconds.Duration())
		ids[in.RequestID] = true
		answer(w, http.StatusOK, wire.Delivery{End: len(waits) == 4})
	})
	q := opened(t, dialed(t, f, nil)).Queue()
	d, err := q.Acquire(bg, sluice.AcquireRequest{Consumer: sluice.Consumer{Name: "ann"}, Wait: -1, RequestID: "mine"})
	if err != nil || !d.End || !ids["mine"] {
		t.Fatalf("got %+v, %v, with the ids %v", d, err, ids)
	}
	for _, w := range waits {
		if w != slice {
			t.Errorf("the slices are %v", waits)
		}
	}
	if len(ids) != 4 {
		t.Errorf("four slices have %d ids: one would be answered with what another came to", len(ids))
	}
	for _, wait := range []time.Duration{0, time.Second, slice} { // what fits one slice is one, whatever the clocks say
		waits = nil
		if _, err := q.Acquire(bg, sluice.AcquireRequest{Consumer: sluice.Consumer{Name: "ann"}, Wait: wait}); err != nil {
			t.Fatal(err)
		}
		if len(waits) != 1 || waits[0] != wait {
			t.Errorf("a wait of %v is asked as %v", wait, waits)
		}
	}
}

func TestAPutThatWaitsAsksItsCallerAndIsNeverGivenUpUnderWay(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	paused := says(wire.Commits{Results: []wire.CommitResult{}, Paused: true})
	f.onEach("POST /v1/runs/r1/commit", paused, paused, says(wire.Commits{Results: []wire.CommitResult{{Status: sluice.Enqueued}}}))
	q := opened(t, dialed(t, f, nil)).Queue()
	put := sluice.PutRequest{Ref: queuetest.NewRef("file:///elsewhere", "r1", "s-1", 10, nil)}
	asked := 0
	_, err := q.PutBlocksUntilBelow(bg, put, func() bool { asked++; return asked == 2 })
	if !errors.Is(err, sluice.ErrAborted) || len(f.of("POST", "/v1/runs/r1/commit")) != 1 {
		t.Errorf("got %v", err)
	}
	if st, err := q.PutBlocksUntilBelow(bg, put, nil); err != nil || st != sluice.Enqueued {
		t.Errorf("got %v, %v", st, err)
	}
}

func TestDeadlinesAreByTheClientsClockAndNeverTooLate(t *testing.T) {
	t.Parallel()
	f := newFake(t)
	lease := wire.Lease{ID: sluice.NewLeaseID(), Ref: queuetest.NewRef("file:///elsewhere", "r1", "s-1", 10, nil), TimeLeftSeconds: 12.5}
	const waited, slow = 20 * time.Millisecond, 100 * time.Millisecond
	var given time.Time
	f.onEach("POST /v1/runs/r1/acquire", func(w http.ResponseWriter, _ *http.Request) {
		time.Sleep(waited)
		given = time.Now()
		time.Sleep(slow) // on its way
		answer(w, http.StatusOK, wire.Delivery{Leases: []wire.Lease{lease}, WaitedSeconds: wire.SecondsOf(waited)})
	})
	q := opened(t, dialed(t, f, nil)).Queue()
	for _, wait := range []time.Duration{0, time.Second} {
		before := time.Now()
		d, err := q.Acquire(bg, sluice.AcquireRequest{Consumer: sluice.Consumer{Name: "ann"}, Wait: wait})
		if err != nil {
			t.Fatal(err)
		}
		l := d.Leases[0]
		if l.TimeLeft != 12500*time.Millisecond || l.Deadline.Before(before.Add(waited+l.TimeLeft)) || l.Deadline.After(given.Add(l.TimeLeft)) || l.Consumer != "ann" {
			t.Errorf("got %+v", l)
		}
	}
}
