package client

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
	"github.com/sluice-ml/sluice/service"
	"github.com/sluice-ml/sluice/store/dirstore"
)

// bytesRun is a run of the samples that queuetest makes.
func bytesRun(max int64) sluice.RunConfig {
	return sluice.RunConfig{RunID: "r1", Schema: queuetest.Schema(), Caps: sluice.Caps{MaxBytes: max}}
}

// losing answers every call twice, so to speak: the first time the service acts, and its answer is lost. Transfers are left to another test, and so is what says by its answer that it was
// repeated (commits, reshapes, counts of what was found), and Health, which asks once only.
func losing(h http.Handler) http.Handler {
	var seen sync.Map
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		spared := strings.HasPrefix(r.URL.Path, "/v1/sessions/") || r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/samples/")
		for _, s := range []string{"/commit", "/health", "/reshape", "/dead-letters/requeue", "/dead-letters/drop", "/gc", "/reclaim"} {
			spared = spared || strings.HasSuffix(r.URL.Path, s)
		}
		if _, again := seen.LoadOrStore(r.Header.Get("Sluice-Request"), true); again || spared {
			h.ServeHTTP(w, r)
			return
		}
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, r)
		if strings.HasSuffix(r.URL.Path, "/acquire") && strings.Contains(rec.Body.String(), `"leases":[]`) {
			maps.Copy(w.Header(), rec.Header()) // a wait that is over is over: the clock of the suite does not move for another one
			w.WriteHeader(rec.Code)
			_, _ = w.Write(rec.Body.Bytes())
			return
		}
		panic(http.ErrAbortHandler)
	})
}

func TestQueueConformanceWhenEveryAnswerIsLostOnce(t *testing.T) {
	queuetest.Run(t, queuetest.Harness{OpenBoth: func(t *testing.T, cfg sluice.RunConfig, clock *queuetest.Clock) (sluice.Queue, queuetest.Samples) {
		l := serve(t, tmpfs(t), func(o *service.Options) { o.Clock = clock }, losing)
		r := l.run(l.dial(overUnix, nil), cfg)
		return r.Queue(), samples{t, r.store}
	}})
}

func TestEveryCallOfAStoreMayLoseItsAnswer(t *testing.T) {
	t.Parallel()
	for _, w := range []way{overUnix, overHTTP} {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			l := serve(t, tmpfs(t), nil, losing)
			s := l.run(l.dial(w, nil), bytesRun(100_000)).Store()
			check := func(what string, err error, resident, reserved int64) {
				t.Helper()
				if h := s.Health(); err != nil || h.ResidentBytes != resident || h.ReservedBytes != reserved {
					t.Fatalf("%s: %v, health %+v", what, err, h)
				}
			}
			room, err := s.Reserve(bg, 5003)
			check("Reserve", err, 0, 5003)
			other, err := s.Reserve(bg, 10)
			check("Reserve", err, 0, 5013)
			check("Unreserve", s.Unreserve(bg, other), 0, 5003)
			ref, err := s.Put(bg, sampleOf(2), room)
			check("Put under a reservation", err, 5003, 0)
			second, err := s.Put(bg, sampleOf(3), sluice.Reservation{})
			check("Put", err, 75_004, 0)
			_, err = s.Put(bg, sampleOf(3), sluice.Reservation{})
			if !errors.Is(err, sluice.ErrDuplicate) {
				t.Fatalf("Put of a taken id: %v", err)
			}
			ts, err := s.Get(bg, ref)
			check("Get", err, 75_004, 0)
			if string(ts.Features[0].Data) != string(sampleOf(2).Features[0].Data) {
				t.Error("other bytes came")
			}
			check("Release", ts.Release(bg), 70_001, 0)
			check("Abort", s.Abort(bg, second), 0, 0)
		})
	}
}

// storm stands between clients and a service, and breaks connections after a random number of bytes, in either direction, after random pauses.
type storm struct {
	l    net.Listener
	to   string
	most int64 // bytes that a connection carries at most
	cut  atomic.Int64

	mu    sync.Mutex
	conns map[net.Conn]bool
	work  sync.WaitGroup
}

func newStorm(t *testing.T, to string, most int64) *storm {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &storm{l: l, to: to, most: most, conns: map[net.Conn]bool{}}
	s.work.Go(s.run) // ends with the listener
	t.Cleanup(func() {
		s.l.Close()
		s.mu.Lock()
		for c := range s.conns {
			c.Close()
		}
		s.mu.Unlock()
		s.work.Wait()
	})
	return s
}

func (s *storm) run() {
	for {
		in, err := s.l.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", s.to)
		if err != nil {
			in.Close()
			continue
		}
		s.mu.Lock()
		s.conns[in], s.conns[out] = true, true
		s.mu.Unlock()
		var left atomic.Int64
		left.Store(rand.Int64N(s.most))
		end := sync.OnceFunc(func() {
			in.Close()
			out.Close()
			s.mu.Lock()
			delete(s.conns, in)
			delete(s.conns, out)
			s.mu.Unlock()
		})
		pass := func(to, from net.Conn) {
			defer end()
			buf := make([]byte, 32<<10)
			for {
				n, err := from.Read(buf)
				if rand.IntN(50) == 0 {
					time.Sleep(time.Duration(rand.IntN(3)) * time.Millisecond) // a slow network, not a wait for something
				}
				keep := min(int64(n), left.Load())
				if left.Add(-int64(n)) < 0 {
					s.cut.Add(1)
					_, _ = to.Write(buf[:max(keep, 0)])
					return
				}
				if _, werr := to.Write(buf[:n]); err != nil || werr != nil {
					return
				}
			}
		}
		s.work.Go(func() { pass(out, in) }) // both end with the connection
		s.work.Go(func() { pass(in, out) })
	}
}

// In a storm every sample is trained on exactly once, with its own bytes, and nothing is left.
func TestNothingIsLostOrDoneTwiceInAStorm(t *testing.T) {
	t.Parallel()
	for _, mapped := range []bool{true, false} {
		t.Run(fmt.Sprint("mapped ", mapped), func(t *testing.T) {
			t.Parallel()
			l := serve(t, tmpfs(t), nil)
			s := newStorm(t, l.tcp, 120_000)
			t.Cleanup(l.hangUp) // while the storm still blows
			through := way{"storm", mapped, func(_ *live, o *Options) { o.URL, o.HTTPOnly = "http://"+s.l.Addr().String(), !mapped }}
			cfg := bytesRun(400_000)
			const n = 60
			produced := make(chan error, 1)
			producer := l.run(l.dial(through, nil), cfg)
			go func() { produced <- produce(producer, n) }() // ends with its samples, or with the test
			consumer := l.run(l.dial(through, nil), cfg)
			got, err := consume(consumer)
			if err := errors.Join(err, <-produced); err != nil {
				t.Fatal(err)
			}
			if len(got) != n {
				t.Errorf("%d samples were trained on, want %d", len(got), n)
			}
			for id, times := range got {
				if times != 1 {
					t.Errorf("%s was acked %d times", id, times)
				}
			}
			st, err := l.run(l.dial(overUnix, nil), cfg).Queue().Status(bg)
			if err != nil {
				t.Fatal(err)
			}
			if st.Put != n || st.Acked != n || st.Dead != 0 || st.Pending+st.Outstanding != 0 || st.Health.UsedSamples() != 0 || st.Health.UsedBytes() != 0 {
				t.Errorf("left behind: %+v", st)
			}
			if s.cut.Load() < 10 {
				t.Errorf("the storm cut %d connections only", s.cut.Load())
			}
		})
	}
}

// sizeOf makes samples of all sizes that matter.
func sizeOf(i int) int64 { return []int64{1, 100, 5003, 70_001, 90_000}[i%5] }

// sampleOf has bytes that follow from its number.
func sampleOf(i int) *sluice.Sample {
	s := queuetest.NewSample("r1", fmt.Sprint("s", i), sizeOf(i))
	for j := range s.Features[0].Data {
		s.Features[0].Data[j] = byte((i + j) % 2)
	}
	return s
}

func produce(r *Run, n int) error {
	p := sluice.Producer{Name: "p0"}
	for i := range n {
		sample := sampleOf(i)
		room, err := r.Queue().Reserve(bg, sluice.ReserveRequest{Producer: p, Bytes: sample.Bytes()})
		if err != nil {
			return fmt.Errorf("reserve %d: %w", i, err)
		}
		ref, err := r.Store().Put(bg, sample, room)
		if err != nil {
			return fmt.Errorf("store %d: %w", i, err)
		}
		if st, err := r.Queue().Put(bg, sluice.PutRequest{Ref: ref, Producer: p}); err != nil || st != sluice.Enqueued && st != sluice.AlreadyPut && st != sluice.WasSettled {
			return fmt.Errorf("put %d: %v, %w", i, st, err)
		}
	}
	return r.Queue().Report(bg, sluice.ProducerReport{Producer: p, State: sluice.ProducerDone})
}

// consume trains until the end and counts the acks of each sample.
func consume(r *Run) (map[string]int, error) {
	acked := map[string]int{}
	c := sluice.Consumer{Name: "c0"}
	for {
		d, err := r.Queue().Acquire(bg, sluice.AcquireRequest{Consumer: c, Max: 3, Wait: -1})
		if err != nil {
			return acked, fmt.Errorf("acquire: %w", err)
		}
		if d.End {
			return acked, d.Cause
		}
		for _, l := range d.Leases {
			ts, err := r.Store().Get(bg, l.Ref)
			if err != nil {
				return acked, fmt.Errorf("get %s: %w", l.Ref.SampleID(), err)
			}
			var i int
			if _, err := fmt.Sscanf(l.Ref.SampleID(), "s%d", &i); err != nil {
				return acked, err
			}
			if want := sampleOf(i).Features[0].Data; string(ts.Features[0].Data) != string(want) {
				return acked, fmt.Errorf("%s has other bytes than were put", l.Ref.SampleID())
			}
			res, err := r.Queue().Settle(bg, sluice.SettleRequest{Consumer: c, Settlements: []sluice.Settlement{{Lease: l.ID, Verdict: sluice.Ack}}})
			if err != nil {
				return acked, fmt.Errorf("ack %s: %w", l.Ref.SampleID(), err)
			}
			if res[0].Status == sluice.Settled {
				acked[l.Ref.SampleID()]++
			}
			if err := ts.Release(bg); err != nil {
				return acked, fmt.Errorf("release %s: %w", l.Ref.SampleID(), err)
			}
		}
	}
}

// A service that restarts is unavailable for a while, and never the end.
func TestAStreamSurvivesRestarts(t *testing.T) {
	t.Parallel()
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			l := serve(t, tmpfs(t), nil)
			cfg := bytesRun(400_000)
			const n = 200
			produced, trained := make(chan error, 1), make(chan error, 1)
			producer := l.run(l.dial(w, nil), cfg)
			consumer := l.run(l.dial(w, nil), cfg)
			go func() { produced <- produce(producer, n) }() // both end with the stream
			var got map[string]int
			go func() {
				var err error
				got, err = consume(consumer)
				trained <- err
			}()
			for restarts := range 4 {
				eventually(t, func() bool {
					st, err := l.run(l.clients[0], cfg).Queue().Status(bg)
					return err != nil || st.Acked >= int64(n*(restarts+1)/6)
				})
				l.stop()
				l.start()
			}
			if err := errors.Join(<-produced, <-trained); err != nil {
				t.Fatal(err)
			}
			if len(got) != n {
				t.Errorf("%d samples were trained on, want %d", len(got), n)
			}
			st, err := consumer.Queue().Status(bg)
			if err != nil {
				t.Fatal(err)
			}
			if st.Acked != n || st.Dead != 0 || st.Pending+st.Outstanding != 0 || st.Health.UsedSamples() != 0 {
				t.Errorf("left behind: %+v", st)
				if in, err := dirstore.Inspect(bg, l.storeInfo(l.clients[0], "r1").Dir, nil); err == nil {
					t.Logf("in the store: %+v", in.Samples)
				}
			}
		})
	}
}

func TestACrashedClientsPinsAndReservationsEnd(t *testing.T) {
	t.Parallel()
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			l := serve(t, tmpfs(t), func(o *service.Options) { o.SessionGrace = 50 * time.Millisecond })
			cfg := bytesRun(1 << 20)
			alive := l.run(l.dial(overUnix, nil), cfg)
			dying := l.dial(w, nil)
			r := l.run(dying, cfg)
			if err := produce(alive, 2); err != nil {
				t.Fatal(err)
			}
			if _, err := r.Store().Reserve(bg, 1000); err != nil {
				t.Fatal(err)
			}
			d, err := r.Queue().Acquire(bg, sluice.AcquireRequest{Consumer: sluice.Consumer{Name: "c0"}, Max: 2})
			if err != nil || len(d.Leases) != 2 {
				t.Fatalf("got %v, %v", d, err)
			}
			ts, err := r.Store().Get(bg, d.Leases[0].Ref)
			if err != nil {
				t.Fatal(err)
			}
			want := string(ts.Features[0].Data)
			dying.crash()
			again, err := alive.Queue().Acquire(bg, sluice.AcquireRequest{Consumer: sluice.Consumer{Name: "c1"}, Max: 2, Wait: 20 * time.Second})
			if err != nil || len(again.Leases) != 2 || again.Leases[0].Ref.SampleID() != "s0" {
				t.Fatalf("after the crash: %v, %v", again, err)
			}
			settle := sluice.SettleRequest{Consumer: sluice.Consumer{Name: "c1"}}
			for _, x := range again.Leases {
				settle.Settlements = append(settle.Settlements, sluice.Settlement{Lease: x.ID, Verdict: sluice.Ack})
			}
			if _, err := alive.Queue().Settle(bg, settle); err != nil {
				t.Fatal(err)
			}
			eventually(t, func() bool { h := alive.Store().Health(); return h.UsedBytes() == 0 && h.UsedSamples() == 0 })
			if string(ts.Features[0].Data) != want {
				t.Error("the tensors of the dead client changed under it")
			}
			if err := ts.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// crash plays the death of the process: its connections break, and nothing is said.
func (c *Client) crash() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.end(errClosed)
	c.behind.Wait()
	c.hangUp()
}

func TestASlowServiceIsNoLostOne(t *testing.T) {
	t.Parallel()
	l := serve(t, tmpfs(t), nil, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.Contains(r.URL.Path, "/samples/") {
				w = &drip{ResponseWriter: w}
			}
			h.ServeHTTP(w, r)
		})
	})
	r := l.run(l.dial(overHTTP, nil), bytesRun(1<<20))
	ref, err := r.Store().Put(bg, sampleOf(3), sluice.Reservation{})
	if err != nil {
		t.Fatal(err)
	}
	ts, err := r.Store().Get(bg, ref)
	if err != nil {
		t.Fatal(err)
	}
	if string(ts.Features[0].Data) != string(sampleOf(3).Features[0].Data) {
		t.Error("other bytes came")
	}
	if err := ts.Release(bg); err != nil {
		t.Error(err)
	}
}

// drip writes a little at a time.
type drip struct{ http.ResponseWriter }

func (d *drip) Write(p []byte) (n int, err error) {
	for len(p) > 0 && err == nil {
		var m int
		m, err = d.ResponseWriter.Write(p[:min(len(p), 7001)])
		n += m
		p = p[m:]
		_ = http.NewResponseController(d.ResponseWriter).Flush()
		time.Sleep(time.Millisecond) // the slowness itself
	}
	return n, err
}

func (d *drip) Unwrap() http.ResponseWriter { return d.ResponseWriter }
