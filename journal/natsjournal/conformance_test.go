package natsjournal

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/journal/journaltest"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	runChild()
	goleak.VerifyTestMain(m)
}

var errDied = errors.New("the process died here")

// place makes places at whatever open opens. A kill in the test's own process drops what the journal has not sent; every second one, if restart says so, stops the server too.
func place(t testing.TB, opts Options, restart bool, open func(opts *Options) (*Journals, error)) journaltest.Place {
	var left atomic.Int64
	left.Store(1 << 30)
	opts.step = func(what string) error {
		if what != "renew" && left.Add(-1) < 0 {
			return errDied
		}
		return nil
	}
	var js *Journals
	var j sluice.Journal
	kills := 0
	ensure := func() error {
		if js != nil {
			return nil
		}
		var err error
		js, err = open(&opts)
		return err
	}
	shut := func() {
		if js != nil {
			if err := js.Close(); err != nil && !errors.Is(err, errDied) && !errors.Is(err, sluice.ErrStale) {
				t.Errorf("close: %v", err)
			}
			js = nil
		}
	}
	t.Cleanup(shut)
	return journaltest.Place{
		Open: func(ctx context.Context) (sluice.Journal, error) {
			if err := ensure(); err != nil {
				return nil, err
			}
			var err error
			j, err = js.Journal(ctx, "run.1")
			return j, err
		},
		Kill: func() {
			j.(*journal).fail(errDied)
			j.(*journal).settle()
			if kills++; restart && kills%2 == 1 {
				shut()
			}
		},
		DieAt: func(step int) { left.Store(int64(step)) },
	}
}

func TestConformanceEmbedded(t *testing.T) {
	t.Parallel()
	for _, d := range []Durability{Process, Power} {
		t.Run(fmt.Sprint("durability", d), func(t *testing.T) {
			t.Parallel()
			limit := 0 // once is enough for records that large
			if d == Process {
				limit = MaxRecord
			}
			journaltest.Run(t, journaltest.Harness{MaxRecord: limit, Fences: true, New: func(t testing.TB) journaltest.Place {
				dir := t.TempDir()
				return place(t, Options{Durability: d}, true, func(o *Options) (*Journals, error) { return Open(t.Context(), dir, o) })
			}})
		})
	}
}

// startServer starts a server that listens on loopback.
func startServer(t testing.TB, edit func(*server.Options)) *server.Server {
	t.Helper()
	o := &server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true}
	if edit != nil {
		edit(o)
	}
	srv, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	go srv.Start() // until Shutdown
	if !srv.ReadyForConnections(10 * time.Second) {
		t.Fatal("the server does not start")
	}
	t.Cleanup(func() {
		srv.Shutdown()
		srv.WaitForShutdown()
	})
	return srv
}

func TestConformanceElsewhere(t *testing.T) {
	t.Parallel()
	srv := startServer(t, func(o *server.Options) { o.MaxPayload = 64 << 10 }) // smaller messages than ours
	var n atomic.Int64
	journaltest.Run(t, journaltest.Harness{Fences: true, New: func(t testing.TB) journaltest.Place {
		prefix := fmt.Sprint("p", n.Add(1))
		return place(t, Options{Prefix: prefix}, false, func(o *Options) (*Journals, error) { return Connect(t.Context(), srv.ClientURL(), o) })
	}})
}
