package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
)

// counting counts the calls to a path that were answered.
func counting(path string, n *atomic.Int64) func(http.Handler) http.Handler {
	return func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			h.ServeHTTP(w, r)
			if strings.HasSuffix(r.URL.Path, path) {
				n.Add(1)
			}
		})
	}
}

const pooled = 90_000 // bytes: files of that size are used again

// rewrite stores samples of one size, which would come to lie where another one was.
func rewrite(t *testing.T, r *Run) {
	t.Helper()
	for i := range 8 {
		s := queuetest.NewSample("r1", fmt.Sprint("other", i), pooled)
		for j := range s.Features[0].Data {
			s.Features[0].Data[j] = 1
		}
		ref, err := r.Store().Put(bg, s, sluice.Reservation{})
		if err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 {
			if err := r.Store().Abort(bg, ref); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func zeros(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

// leased puts one sample of zeros, which c0 leases.
func leased(t *testing.T, r *Run) sluice.Lease {
	t.Helper()
	ref, err := r.Store().Put(bg, queuetest.NewSample("r1", "s0", pooled), sluice.Reservation{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Queue().Put(bg, sluice.PutRequest{Ref: ref, Producer: sluice.Producer{Name: "p0"}}); err != nil {
		t.Fatal(err)
	}
	d, err := r.Queue().Acquire(bg, sluice.AcquireRequest{Consumer: sluice.Consumer{Name: "c0"}, Max: 1})
	if err != nil || len(d.Leases) != 1 {
		t.Fatalf("got %v, %v", d, err)
	}
	return d.Leases[0]
}

func settled(t *testing.T, r *Run, l *sluice.Lease, v sluice.Verdict) {
	t.Helper()
	results, err := r.Queue().Settle(bg, sluice.SettleRequest{Consumer: sluice.Consumer{Name: l.Consumer}, Settlements: []sluice.Settlement{{Lease: l.ID, Verdict: v}}})
	if err != nil || results[0].Status != sluice.Settled {
		t.Fatalf("%s: %v, %v", v, results, err)
	}
}

// What is mapped counts until it is unmapped, although the service that lent it is another one by then.
func TestPinsOutliveTheService(t *testing.T) {
	t.Parallel()
	var pins atomic.Int64
	l := serve(t, tmpfs(t), nil, counting("/pins", &pins))
	r := l.run(l.dial(overUnix, nil), bytesRun(1<<20))
	lease := leased(t, r)
	ts, err := r.Store().Get(bg, lease.Ref)
	if err != nil {
		t.Fatal(err)
	}
	l.stop()
	l.start()
	eventually(t, func() bool { return pins.Load() == 2 })
	settled(t, r, &lease, sluice.Ack)
	resident := func(want int64, while string) {
		t.Helper()
		if n := r.Store().Health().ResidentSamples; n != want {
			t.Errorf("%d samples are resident while %s, want %d", n, while, want)
		}
	}
	resident(1, "one is pinned")
	if err := r.Store().Release(bg, ts.Handle); err != nil {
		t.Fatal(err)
	}
	resident(1, "one is mapped")
	rewrite(t, r)
	resident(5, "one is mapped and four are there")
	if !zeros(ts.Features[0].Data) {
		t.Error("the tensors changed under their holder")
	}
	if err := ts.Close(); err != nil {
		t.Fatal(err)
	}
	resident(4, "four are there")
}

// Nothing but the kernel's lock knows then that the file is mapped.
func TestAMappedFileIsNotWrittenByALaterService(t *testing.T) {
	t.Parallel()
	l := serve(t, tmpfs(t), nil)
	r := l.run(l.dial(overUnix, nil), bytesRun(1<<20))
	lost := l.dial(overUnix, nil)
	lease := leased(t, r)
	ts, err := l.run(lost, bytesRun(1<<20)).Store().Get(bg, lease.Ref)
	if err != nil {
		t.Fatal(err)
	}
	lost.crash() // so that it takes no pin again
	l.stop()
	l.start()
	settled(t, r, &lease, sluice.Ack)
	if n := r.Store().Health().ResidentSamples; n != 0 {
		t.Fatalf("%d samples are resident, want the acked one to be free", n)
	}
	rewrite(t, r)
	if !zeros(ts.Features[0].Data) {
		t.Error("the tensors changed under their holder")
	}
	if err := ts.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestReleaseWorksAfterTheContextsEnd(t *testing.T) {
	t.Parallel()
	l := serve(t, tmpfs(t), nil)
	r := l.run(l.dial(overUnix, nil), bytesRun(1<<20))
	over, cancel := context.WithCancel(bg)
	cancel()
	lease := leased(t, r)
	ts, err := r.Store().Get(bg, lease.Ref)
	if err != nil {
		t.Fatal(err)
	}
	settled(t, r, &lease, sluice.Ack)
	if err := ts.Release(over); err != nil {
		t.Error(err)
	}
	room, err := r.Store().Reserve(bg, 100)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Store().Unreserve(over, room); err != nil {
		t.Error(err)
	}
	ref, err := r.Store().Put(bg, queuetest.NewSample("r1", "s1", 10), sluice.Reservation{})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Store().Abort(over, ref); err != nil {
		t.Error(err)
	}
	if h := r.Store().Health(); h.UsedBytes() != 0 || h.UsedSamples() != 0 {
		t.Errorf("left: %+v", h)
	}
}

// A release that did not get through is made up for while the service lives on, without another word of the caller.
func TestALostReleaseIsMadeUpFor(t *testing.T) {
	t.Parallel()
	var refuse atomic.Bool
	l := serve(t, tmpfs(t), nil, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if refuse.Load() && strings.HasSuffix(r.URL.Path, "/release") {
				panic(http.ErrAbortHandler)
			}
			h.ServeHTTP(w, r)
		})
	})
	for _, w := range ways {
		r := l.run(l.dial(w, func(o *Options) { o.Patience = 50 * time.Millisecond }), bytesRun(1<<20))
		lease := leased(t, r)
		ts, err := r.Store().Get(bg, lease.Ref)
		if err != nil {
			t.Fatal(err)
		}
		settled(t, r, &lease, sluice.Ack)
		refuse.Store(true)
		if err := ts.Release(bg); !errors.Is(err, sluice.ErrUnavailable) {
			t.Errorf("%s: got %v", w.name, err)
		}
		refuse.Store(false)
		eventually(t, func() bool { h := r.Store().Health(); return h.ResidentSamples == 0 })
	}
}

func TestCloseEndsCallsUnderWay(t *testing.T) {
	t.Parallel()
	l := serve(t, tmpfs(t), nil)
	c := l.dial(overUnix, nil)
	r := l.run(c, bytesRun(1<<20))
	watch := l.run(l.dial(overUnix, nil), bytesRun(1<<20))
	ended := make(chan error, 1)
	go func() {
		_, err := r.Queue().Acquire(bg, sluice.AcquireRequest{Consumer: sluice.Consumer{Name: "c0"}, Max: 1, Wait: -1})
		ended <- err
	}()
	eventually(t, func() bool { st, err := watch.Queue().Status(bg); return err == nil && st.ConsumersWaiting == 1 })
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	select {
	case err := <-ended:
		if !errors.Is(err, sluice.ErrClosed) {
			t.Errorf("got %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the wait goes on")
	}
	lease := leased(t, watch) // and nothing is given to it
	settled(t, watch, &lease, sluice.Ack)
}
