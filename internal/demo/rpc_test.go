package demo

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/sluice-ml/sluice"
)

// scripted is a queue of which a test says what it answers.
type scripted struct {
	sluice.Queue
	acquire func(context.Context) (sluice.Delivery, error)
	reserve func(context.Context) (sluice.Reservation, error)
}

func (s scripted) Reserve(ctx context.Context, _ sluice.ReserveRequest) (sluice.Reservation, error) {
	return s.reserve(ctx)
}

func (s scripted) Acquire(ctx context.Context, _ sluice.AcquireRequest) (sluice.Delivery, error) {
	return s.acquire(ctx)
}

// over serves q to the queue that it returns. end ends the serving, and what serve said comes out of served.
func over(t *testing.T, q sluice.Queue) (far remoteQueue, end context.CancelFunc, served <-chan error) {
	t.Helper()
	near, away := net.Pipe()
	ctx, end := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() { result <- serve(ctx, near, queueHandlers(q)); close(result) }()
	c := newCaller(away)
	t.Cleanup(func() {
		_ = c.Close()
		end()
		<-result
	})
	return remoteQueue{c}, end, result
}

func TestErrorsKeepTheirKindOnTheWay(t *testing.T) {
	t.Parallel()
	var answer sluice.Delivery
	var fail error
	q, _, _ := over(t, scripted{acquire: func(context.Context) (sluice.Delivery, error) { return answer, fail }})
	ask := func() (sluice.Delivery, error) { return q.Acquire(t.Context(), sluice.AcquireRequest{}) }
	kinds := []error{
		sluice.ErrInvalid, sluice.ErrNotFound, sluice.ErrDuplicate, sluice.ErrFull, sluice.ErrNoSpace, sluice.ErrClosed, sluice.ErrStale, sluice.ErrSchema,
		sluice.ErrCorrupt, sluice.ErrDenied, sluice.ErrConflict, sluice.ErrUnavailable, sluice.ErrWedged, sluice.ErrAborted, sluice.ErrUnsupported, sluice.ErrTargetFault,
	}
	for _, kind := range kinds {
		sent := &sluice.Error{Kind: sluice.KindOf(kind), Op: "queue: acquire", Subject: "c", Detail: "says\nno", Hint: "ask later", Err: io.EOF}
		fail = sent
		_, err := ask()
		if err == nil || err.Error() != sent.Error() || errors.Is(err, io.EOF) {
			t.Errorf("%s came as %v", sent, err)
		}
		for _, other := range kinds {
			if errors.Is(err, other) != (other == kind) { //nolint:errorlint // it is the very sentinel
				t.Errorf("%v is %v: %v", err, other, !errors.Is(err, other))
			}
		}
	}
	fail = errors.New("of no kind")
	if _, err := ask(); err == nil || err.Error() != "of no kind" || sluice.KindOf(err) != "" {
		t.Errorf("got %v", err)
	}
	fail = context.DeadlineExceeded // of the parent's own
	if _, err := ask(); !errors.Is(err, context.Canceled) || t.Context().Err() != nil {
		t.Errorf("got %v", err)
	}
	fail, answer = nil, sluice.Delivery{End: true, Cause: &sluice.Error{Kind: sluice.TargetFault, Detail: "broken"}}
	if d, err := ask(); err != nil || !d.End || !errors.Is(d.Cause, sluice.ErrTargetFault) || d.Cause.Error() != "broken" {
		t.Errorf("got %+v, %v", d, err)
	}
	if _, err := q.Drop(t.Context()); !errors.Is(err, sluice.ErrUnsupported) {
		t.Errorf("got %v", err)
	}
	if err := q.c.call(t.Context(), "nosuch", nil, nil); !errors.Is(err, sluice.ErrUnsupported) {
		t.Errorf("got %v", err)
	}
}

func TestACallThatIsCancelledHasItsAnswer(t *testing.T) {
	t.Parallel()
	waits := make(chan struct{}, 1)
	room := sluice.Reservation{ID: "r", Bytes: 5}
	give := false
	q, _, _ := over(t, scripted{reserve: func(ctx context.Context) (sluice.Reservation, error) {
		waits <- struct{}{}
		<-ctx.Done()
		if give { // it was on its way already
			return room, nil
		}
		return sluice.Reservation{}, context.Cause(ctx)
	}})
	cause := errors.New("enough")
	for _, give = range []bool{false, true} {
		ctx, cancel := context.WithCancelCause(t.Context())
		go func() { <-waits; cancel(cause) }()
		switch got, err := q.Reserve(ctx, sluice.ReserveRequest{}); {
		case !give && !errors.Is(err, cause):
			t.Errorf("got %v", err)
		case give && (err != nil || got != room):
			t.Errorf("got %+v, %v", got, err)
		}
		if _, err := q.Reserve(ctx, sluice.ReserveRequest{}); !errors.Is(err, cause) {
			t.Errorf("a call under a context that has ended: %v", err)
		}
	}
}

func TestALostPeerEndsWhatIsOut(t *testing.T) {
	t.Parallel()
	for _, parentGoes := range []bool{false, true} {
		waits, cancelled := make(chan struct{}), make(chan error, 1)
		q, end, served := over(t, scripted{acquire: func(ctx context.Context) (sluice.Delivery, error) {
			close(waits)
			<-ctx.Done()
			cancelled <- context.Cause(ctx)
			return sluice.Delivery{}, ctx.Err()
		}})
		failed := make(chan error, 1)
		go func() {
			_, err := q.Acquire(context.Background(), sluice.AcquireRequest{Wait: -1})
			failed <- err
		}()
		<-waits
		if parentGoes {
			end()
		} else if err := q.c.Close(); err != nil { // as the kernel does for a child that was killed
			t.Error(err)
		}
		if err := <-failed; !errors.Is(err, sluice.ErrClosed) {
			t.Errorf("the caller got %v", err)
		}
		if err := <-cancelled; err == nil {
			t.Error("the call was not cancelled")
		}
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
		if err := q.Leave(t.Context(), sluice.Consumer{}); !errors.Is(err, sluice.ErrClosed) {
			t.Errorf("a later call got %v", err)
		}
	}
}

func TestWhatIsNoCallIsRefused(t *testing.T) {
	t.Parallel()
	near, away := net.Pipe()
	served := make(chan error, 1)
	go func() { served <- serve(t.Context(), near, queueHandlers(scripted{})) }()
	answers := bufio.NewScanner(away)
	if _, err := away.Write([]byte(`{"id":7,"call":"settle","body":"x"}` + "\n")); err != nil {
		t.Fatal(err)
	}
	answers.Scan()
	var m message
	if err := json.Unmarshal(answers.Bytes(), &m); err != nil || m.ID != 7 || m.Err == nil || m.Err.Kind != sluice.Invalid {
		t.Errorf("got %s (%v)", answers.Text(), err)
	}
	if _, err := away.Write([]byte("}\n")); err != nil {
		t.Fatal(err)
	}
	if err := <-served; err == nil || !strings.Contains(err.Error(), "invalid character") {
		t.Errorf("serve: %v", err)
	}
}
