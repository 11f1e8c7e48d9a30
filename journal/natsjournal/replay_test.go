package natsjournal

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/sluice-ml/sluice"
)

// longJournal is a journal at a server elsewhere that holds more than a replay asks for ahead, freshly opened, and a function that replaces the server by another one.
func longJournal(t *testing.T, opts *Options) (j *journal, records int, replace func(edit func(*server.Options))) {
	t.Helper()
	dir := t.TempDir()
	keep := func(o *server.Options) { o.StoreDir = dir }
	srv := startServer(t, keep)
	port := srv.Addr().String()[strings.LastIndex(srv.Addr().String(), ":")+1:]
	js, err := Connect(t.Context(), srv.ClientURL(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { js.Close() })
	j = mustJournal(t, js, "a")
	for records*400_000 < 3*fetchBytes {
		mustAppend(t, j, fmt.Sprint(records, strings.Repeat("x", 400_000)))
		records++
	}
	return mustJournal(t, js, "a"), records, func(edit func(*server.Options)) {
		srv.Shutdown()
		srv.WaitForShutdown()
		srv = startServer(t, func(o *server.Options) {
			keep(o)
			fmt.Sscan(port, &o.Port)
			edit(o)
		})
	}
}

// replay replays in the background, and calls at once, at the second record, what happens then.
func replay(ctx context.Context, j *journal, then func()) (n *int, done chan error) {
	n, done = new(int), make(chan error, 1)
	go func() {
		done <- j.Replay(ctx, func(sluice.Record) error {
			if *n++; *n == 2 {
				then()
			}
			return nil
		})
	}()
	return n, done
}

func await(t *testing.T, done chan error) error {
	t.Helper()
	select {
	case err := <-done:
		return err
	case <-time.After(time.Minute):
		t.Fatal("the replay does not end")
		return nil
	}
}

func TestAReplayGoesOnWhereAServerThatWasStartedAgainBrokeOff(t *testing.T) {
	t.Parallel()
	j, records, replace := longJournal(t, nil)
	n, done := replay(t.Context(), j, func() { replace(func(*server.Options) {}) })
	if err := await(t, done); err != nil || *n != records {
		t.Errorf("%d of %d records came, %v", *n, records, err)
	}
}

// There is a server, which has no JetStream any more.
func TestAReplayThatCanNotGoOnEnds(t *testing.T) {
	t.Parallel()
	without := func(o *server.Options) { o.JetStream = false }
	t.Run("when the patience is over", func(t *testing.T) {
		t.Parallel()
		j, records, replace := longJournal(t, &Options{Patience: time.Second})
		n, done := replay(t.Context(), j, func() { replace(without) })
		if err := await(t, done); !errors.Is(err, sluice.ErrUnavailable) || *n == records {
			t.Errorf("%d of %d records came, %v", *n, records, err)
		}
	})
	t.Run("with its context", func(t *testing.T) {
		t.Parallel()
		j, records, replace := longJournal(t, &Options{Patience: time.Hour})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		n, done := replay(ctx, j, func() {
			replace(without)
			time.AfterFunc(500*time.Millisecond, cancel) // the client has found the other server by then, or not: either must end
		})
		if err := await(t, done); !errors.Is(err, context.Canceled) || *n == records {
			t.Errorf("%d of %d records came, %v", *n, records, err)
		}
	})
	t.Run("with the embedded server", func(t *testing.T) {
		t.Parallel()
		js := mustOpen(t, t.TempDir(), nil)
		j := mustJournal(t, js, "a")
		for range 3 * fetchBytes / 400_000 {
			mustAppend(t, j, strings.Repeat("x", 400_000))
		}
		j = mustJournal(t, js, "a")
		broke := errors.New("broke")
		_, done := replay(t.Context(), j, func() { j.line.close(broke) })
		if err := await(t, done); !errors.Is(err, broke) {
			t.Error(err)
		}
	})
}
