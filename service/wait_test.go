package service

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/service/access"
)

// goingAway makes a call whose caller goes away: before it is answered, or in the very moment.
func (b *bed) goingAway(ctx context.Context, path string, in any) {
	b.t.Helper()
	data, err := json.Marshal(in)
	if err != nil {
		b.t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, b.url+path, bytes.NewReader(data))
	if err != nil {
		b.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if resp, err := b.client.Do(req); err == nil {
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
}

func TestACancelledWaitLeavesTheLine(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { b.goingAway(ctx, "/v1/runs/r1/acquire", wire.Acquire{Consumer: trainer, WaitSeconds: 60}) })
	wg.Go(func() {
		b.goingAway(ctx, "/v1/runs/r1/acquire", wire.Acquire{Consumer: wire.Consumer{Name: "other"}, WaitSeconds: 60, RequestID: "q"})
	})
	b.poll("the waits", func() bool { return b.status("r1").ConsumersWaiting == 2 })
	cancel()
	wg.Wait()
	b.poll("the end of the waits", func() bool { return b.status("r1").ConsumersWaiting == 0 })
	b.put("r1", "s-1")
	if st := b.status("r1"); st.Pending != 1 || st.Outstanding != 0 {
		t.Errorf("status %+v", st)
	}
}

// fading is the context of a caller who is there when the queue is asked, and gone when it has answered.
type fading struct {
	context.Context
	asked int
}

func (f *fading) Err() error {
	if f.asked++; f.asked == 1 {
		return nil
	}
	return context.Canceled
}

// A lease that was given to a connection that died in the same moment waits for the repetition of its request, or goes back if there can be none.
func TestALeaseForACallerWhoHasGoneIsNotLost(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	b.put("r1", "s-1")
	b.put("r1", "s-2")
	run, err := b.s.find("r1")
	if err != nil {
		t.Fatal(err)
	}
	call := func(request string) (*wire.Delivery, error) {
		c := &call{s: b.s, run: run, r: httptest.NewRequest(http.MethodPost, "/", nil)}
		return b.s.acquire(&fading{Context: context.Background()}, c, &wire.Acquire{Consumer: trainer, RequestID: request})
	}
	if d, err := call(""); err == nil {
		t.Errorf("answered %+v", d)
	}
	if st := b.status("r1"); st.Outstanding != 0 || st.Pending != 2 || st.Returned != 1 {
		t.Errorf("without a request id: %+v", st)
	}
	d, err := call("q")
	if err != nil || len(d.Leases) != 1 || d.Leases[0].Ref.SampleID() != "s-1" {
		t.Fatalf("with a request id: %+v, %v", d, err)
	}
	again := do[wire.Delivery](b, "POST", "/v1/runs/r1/acquire", wire.Acquire{Consumer: trainer, Max: 1, RequestID: "q"})
	if len(again.Leases) != 1 || again.Leases[0].ID != d.Leases[0].ID {
		t.Errorf("asked again: %+v", again)
	}
}

func TestAReservationThatIsAskedForAgainIsTheSame(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	in := wire.Reserve{Bytes: []int64{10, 20}, RequestID: "q"}
	one := do[wire.Reservations](b, "POST", "/v1/runs/r1/reserve", in).Reservations
	two := do[wire.Reservations](b, "POST", "/v1/runs/r1/reserve", in).Reservations
	if len(one) != 2 || len(two) != 2 || one[0].ID != two[0].ID || one[1].ID != two[1].ID {
		t.Errorf("%+v, and again %+v", one, two)
	}
	if h := b.status("r1").Health; h.ReservedSamples != 2 {
		t.Errorf("health %+v", h)
	}
}

func TestADeliverySaysHowLongItWaited(t *testing.T) {
	t.Parallel()
	b, clock := clocked(t, Options{})
	b.create("r1")
	got := make(chan wire.Delivery)
	go func() {
		got <- do[wire.Delivery](b, "POST", "/v1/runs/r1/acquire", wire.Acquire{Consumer: trainer, WaitSeconds: 60})
	}()
	b.poll("the wait", func() bool { return b.status("r1").ConsumersWaiting == 1 })
	clock.Advance(7 * time.Second)
	b.put("r1", "s-1")
	if d := <-got; len(d.Leases) != 1 || d.WaitedSeconds != 7 {
		t.Errorf("%+v", d)
	}
	b.put("r1", "s-2")
	if d := do[wire.Delivery](b, "POST", "/v1/runs/r1/acquire", wire.Acquire{Consumer: trainer}); len(d.Leases) != 1 || d.WaitedSeconds != 0 {
		t.Errorf("without a wait: %+v", d)
	}
}

// The first size waits at the gate, the others come along only if they need not.
func TestAReservationWaitsForItsFirst(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	spec := b.spec("r1")
	spec.Caps = wire.Caps{MaxBytes: 100, HighWatermarkBytes: 100}
	do[wire.Run](b, "POST", "/v1/runs", spec)
	one := do[wire.Reservations](b, "POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{60, 60, 30}}).Reservations
	if len(one) != 1 {
		t.Fatalf("%+v", one)
	}
	if none := do[wire.Reservations](b, "POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{50}, WaitSeconds: 0.05}).Reservations; len(none) != 0 {
		t.Errorf("%+v", none)
	}
	got := make(chan wire.Reservations)
	go func() {
		got <- do[wire.Reservations](b, "POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{50}, WaitSeconds: 60})
	}()
	b.poll("the wait", func() bool { return b.status("r1").ProducersWaiting == 1 })
	do[struct{}](b, "POST", "/v1/runs/r1/unreserve", wire.Unreserve{Reservations: []string{one[0].ID, "unknown"}})
	if r := <-got; len(r.Reservations) != 1 || r.Reservations[0].Bytes != 50 {
		t.Errorf("%+v", r)
	}
}

// Between two slices of a wait for much room nobody who asks for little gets ahead of it.
func TestAPlaceInTheLineIsKeptBetweenTwoSlices(t *testing.T) {
	t.Parallel()
	b, clock := clocked(t, Options{})
	spec := b.spec("r1")
	spec.Caps = wire.Caps{MaxBytes: 100, HighWatermarkBytes: 100}
	do[wire.Run](b, "POST", "/v1/runs", spec)
	first := do[wire.Reservations](b, "POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{60}}).Reservations
	session := newID()
	ask := func() chan answer {
		got := make(chan answer, 1)
		go func() {
			got <- b.try("POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{90}, WaitSeconds: 30, RequestID: "big"}, session)
		}()
		return got
	}
	big := ask()
	b.poll("the wait", func() bool { return b.status("r1").ProducersWaiting == 1 })
	clock.Advance(30 * time.Second)
	if a := <-big; a.status != 200 || strings.Contains(string(a.body), "bytes") {
		t.Fatalf("%d %s", a.status, a.body)
	}
	small := make(chan wire.Reservations, 1)
	go func() {
		small <- do[wire.Reservations](b, "POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{20}, WaitSeconds: 60, RequestID: "small"})
	}()
	b.poll("both waits", func() bool { return b.status("r1").ProducersWaiting == 2 })
	again := ask()
	do[struct{}](b, "POST", "/v1/runs/r1/unreserve", wire.Unreserve{Reservations: []string{first[0].ID}})
	if a := <-again; !strings.Contains(string(a.body), `"bytes":90`) {
		t.Fatalf("the second slice got %s", a.body)
	}
	select {
	case r := <-small:
		t.Errorf("a small one got ahead: %+v", r)
	default:
	}
	do[struct{}](b, "DELETE", "/v1/sessions/"+session, nil)
	if r := <-small; len(r.Reservations) != 1 {
		t.Errorf("%+v", r)
	}
}

// Who does not come back gives the place up, and the room too when the session ends.
func TestAPlaceInTheLineIsNotKeptForEver(t *testing.T) {
	t.Parallel()
	b, clock := clocked(t, Options{})
	spec := b.spec("r1")
	spec.Caps = wire.Caps{MaxBytes: 100, HighWatermarkBytes: 100}
	do[wire.Run](b, "POST", "/v1/runs", spec)
	do[wire.Reservations](b, "POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{60}})
	session := newID()
	for _, leave := range []func(){
		func() { clock.Advance(mostKept) },
		func() { // a question what came of it
			b.try("POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{90}, RequestID: "big"}, session)
		},
	} {
		got := make(chan answer, 1)
		go func() {
			got <- b.try("POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{90}, WaitSeconds: 30, RequestID: "big"}, session)
		}()
		b.poll("the wait", func() bool { return b.status("r1").ProducersWaiting == 1 })
		clock.Advance(30 * time.Second)
		if a := <-got; strings.Contains(string(a.body), "bytes") {
			t.Fatalf("%s", a.body)
		}
		if n := b.status("r1").ProducersWaiting; n != 1 {
			t.Errorf("%d wait between the slices, want 1", n)
		}
		leave()
		b.poll("the end of the wait", func() bool { return b.status("r1").ProducersWaiting == 0 })
	}
}

func TestEventsComeAsTheyHappen(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	b.create("r2")
	open := func(path string) *bufio.Scanner {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, b.url+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := b.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { resp.Body.Close() })
		if ct := resp.Header.Get("Content-Type"); resp.StatusCode != http.StatusOK || ct != "text/event-stream" {
			t.Fatalf("%d %s", resp.StatusCode, ct)
		}
		return bufio.NewScanner(resp.Body)
	}
	next := func(s *bufio.Scanner, name string) (data string) {
		for s.Scan() {
			if s.Text() == "event: "+name && s.Scan() {
				return strings.TrimPrefix(s.Text(), "data: ")
			}
		}
		t.Fatalf("no %s came: %v", name, s.Err())
		return ""
	}
	all, one := open("/v1/events"), open("/v1/runs/r1/events")
	var service wire.ServiceStatus
	if err := json.Unmarshal([]byte(next(all, "status")), &service); err != nil || len(service.Runs) != 2 {
		t.Errorf("%+v, %v", service, err)
	}
	var run wire.Status
	if err := json.Unmarshal([]byte(next(one, "status")), &run); err != nil || run.RunID != "r1" {
		t.Errorf("%+v, %v", run, err)
	}
	do[struct{}](b, "POST", "/v1/runs/r2/close", nil)
	do[struct{}](b, "POST", "/v1/runs/r1/close", wire.CloseRun{Cause: "enough"})
	var e wire.Event
	if err := json.Unmarshal([]byte(next(all, "event")), &e); err != nil || e.RunID != "r2" || e.Kind != "closed" {
		t.Errorf("%+v, %v", e, err)
	}
	if err := json.Unmarshal([]byte(next(one, "event")), &e); err != nil || e.RunID != "r1" || !strings.Contains(e.Text, "enough") {
		t.Errorf("%+v, %v", e, err)
	}
	b.as = access.Caller{Name: "c", Role: access.Consumer, Run: "r1", UID: -1}
	mine := open("/v1/events")
	if err := json.Unmarshal([]byte(next(mine, "status")), &service); err != nil || len(service.Runs) != 1 || service.Runs[0].RunID != "r1" {
		t.Errorf("a caller of r1 sees %+v, %v", service, err)
	}
	b.as.Role = access.Operator
	b.as.Run = ""
}

func TestAPanicIsA500WithItsRequestInTheLog(t *testing.T) {
	t.Parallel()
	var log syncBuffer
	b := newBed(t, Options{Logger: testLogger(&log)})
	a := &api{s: b.s, mux: http.NewServeMux()}
	handle(a, operation{method: "GET", path: "/panic", id: "panic", open: true}, func(context.Context, *call, *nothing) (*alive, error) { panic("with colours") })
	w := httptest.NewRecorder()
	a.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/panic", nil))
	var p wire.Problem
	if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil || w.Code != 500 || p.Code != wire.CodeInternal || strings.Contains(w.Body.String(), "colours") {
		t.Errorf("%d %s, %v", w.Code, w.Body, err)
	}
	if !strings.Contains(log.String(), "request="+p.Request) || !strings.Contains(log.String(), "wait_test.go") {
		t.Errorf("the log has %s", log.String())
	}
}

// A body that does not come is given up when its deadline has passed, which the door sets, and leaves nothing.
func TestASlowBodyIsGivenUp(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	srv := httptest.NewUnstartedServer(b.srv.Config.Handler)
	srv.Config.ReadTimeout = 100 * time.Millisecond
	srv.Start()
	defer srv.Close()
	for _, c := range []struct{ name, head string }{
		{"an upload", "PUT /v1/runs/r1/samples/s-1 HTTP/1.1\r\nHost: x\r\nContent-Length: 300\r\nSluice-Sample: " + fields + "\r\n\r\nabcd"},
		{"a call", "POST /v1/runs/r1/reserve HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 300\r\n\r\n{"},
	} {
		conn, err := net.Dial("tcp", srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write([]byte(c.head)); err != nil {
			t.Fatal(err)
		}
		answer, err := io.ReadAll(conn)
		conn.Close()
		if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 408 ") || !strings.Contains(string(answer), `"code":"timeout"`) {
			t.Errorf("%s: %s, %v", c.name, answer, err)
		}
	}
	if h := b.status("r1").Health; h.UsedBytes() != 0 || h.StagingBytes != 0 {
		t.Errorf("health %+v", h)
	}
}

// What is read leaves by the kernel's own hands, also a part of a file: the writer that the server hands us must see the file.
func TestFilesAreSentByTheKernel(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	ref := b.uploadWide("s-1")
	for _, path := range []string{sampleURL(ref), sampleURL(ref) + "/features/hidden_states"} {
		for _, rng := range []string{"", "bytes=3-20000"} {
			r := httptest.NewRequest(http.MethodGet, path+"?generation="+ref.Generation(), nil)
			if rng != "" {
				r.Header.Set("Range", rng)
			}
			w := &fileTaker{ResponseRecorder: httptest.NewRecorder()}
			b.s.Handler().ServeHTTP(w, r.WithContext(access.WithCaller(r.Context(), b.as)))
			if w.Code >= 300 || !w.sawFile {
				t.Errorf("%s %s: %d, saw a file: %t", path, rng, w.Code, w.sawFile)
			}
		}
	}
}

// fileTaker is a writer that takes files.
type fileTaker struct {
	*httptest.ResponseRecorder
	sawFile bool
}

func (w *fileTaker) ReadFrom(r io.Reader) (int64, error) {
	if l, ok := r.(*io.LimitedReader); ok {
		_, w.sawFile = l.R.(interface {
			SyscallConn() (syscall.RawConn, error)
		})
	}
	return io.Copy(w.ResponseRecorder, r)
}

// uploadWide brings a sample into r1 that is more than a server holds in its buffers.
func (b *bed) uploadWide(id string) sluice.Ref {
	b.t.Helper()
	fs := features(1)
	fs[0].Tensor = sluice.NewTensor(sluice.Float32, 1, 2, 16<<10)
	a := b.send("PUT", "/v1/runs/r1/samples/"+id, map[string]string{"Content-Type": binary, wire.SampleHeader: fields}, bytes.NewReader(fileOf(b.t, fs)))
	var st wire.Stored
	if err := json.Unmarshal(a.body, &st); err != nil || a.status != http.StatusCreated {
		b.t.Fatalf("upload: %d %s", a.status, a.body)
	}
	return st.Ref
}

// Who has all bytes of a sample may give it up at once, while the call that sent them has not returned: then it is free.
func TestASampleIsLetGoBeforeItsLastBytesAreSent(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	for name, ref := range map[string]sluice.Ref{"small": b.upload("r1", "s-1", ""), "wide": b.uploadWide("s-2")} {
		pin := do[wire.Pinned](b, "POST", "/v1/runs/r1/pins", wire.Pin{Ref: ref})
		r := httptest.NewRequest(http.MethodGet, sampleURL(ref)+"?generation="+ref.Generation(), nil)
		w := &meter{ResponseRecorder: httptest.NewRecorder()}
		before := b.status("r1").Health.ResidentSamples
		w.all = func() bool { return int64(w.Body.Len()) == pin.Size }
		w.then = func() {
			do[nothing](b, "POST", "/v1/runs/r1/abort", wire.Abort{Ref: ref}) // it goes with its last pin
			do[nothing](b, "POST", "/v1/runs/r1/release", wire.Release{Handles: []string{pin.Handle}})
			if after := b.status("r1").Health.ResidentSamples; after != before-1 {
				t.Errorf("%s: %d samples are resident, and %d when all bytes are there", name, before, after)
			}
		}
		b.s.Handler().ServeHTTP(w, r.WithContext(access.WithCaller(r.Context(), b.as)))
		if w.Code != http.StatusOK || w.then != nil {
			t.Errorf("%s: %d, %d bytes", name, w.Code, w.Body.Len())
		}
	}
}

// meter is a writer that does something once all is there.
type meter struct {
	*httptest.ResponseRecorder
	all  func() bool
	then func()
}

func (w *meter) Write(p []byte) (int, error) {
	n, err := w.ResponseRecorder.Write(p)
	if w.then != nil && w.all() {
		w.then()
		w.then = nil
	}
	return n, err
}

func TestAClockThatJumpsBackEndsNothing(t *testing.T) {
	t.Parallel()
	clock := &jumping{}
	b := newBed(t, Options{Clock: clock})
	b.create("r1")
	session := newID()
	b.put("r1", "s-1")
	do[wire.Reservations](b, "POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{10}}, session)
	d := b.acquire("r1", 1, session)
	for _, jump := range []time.Duration{-time.Hour, -24 * 365 * time.Hour, time.Second} {
		clock.jump(jump)
		b.s.clean()
		st := b.status("r1")
		if st.Outstanding != 1 || st.Health.ReservedBytes != 10 || b.s.sessions.count() != 1 {
			t.Errorf("after a jump by %v: %+v, %d sessions", jump, st, b.s.sessions.count())
		}
	}
	if r := b.settle("r1", sluice.Ack, d.Leases...); r[0].Status != sluice.Settled {
		t.Errorf("settled %+v", r)
	}
}

// A jump of the system's wall clock can't be played here; what keeps it from mattering is that every time which something ends at has a monotonic reading.
func TestWhatEndsByItselfGoesByTheMonotonicClock(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	session := newID()
	do[wire.Reservations](b, "POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{10}}, session)
	ref := b.upload("r1", "s-1", "", session)
	do[wire.Pinned](b, "POST", "/v1/runs/r1/pins", wire.Pin{Ref: ref})
	run, err := b.s.find("r1")
	if err != nil {
		t.Fatal(err)
	}
	b.s.sessions.mu.Lock()
	times := map[string]time.Time{"session": b.s.sessions.byID[session].last, "next": run.next, "upload": run.uploads["s-1"].expires}
	b.s.sessions.mu.Unlock()
	for _, r := range run.reservations {
		times["reservation"] = r.expires
	}
	for _, p := range run.pins {
		times["pin"] = p.expires
	}
	if len(times) != 5 {
		t.Errorf("%v", times)
	}
	for what, at := range times {
		if !strings.Contains(at.String(), " m=") {
			t.Errorf("%s: %v has no monotonic reading", what, at)
		}
	}
}

// jumping is a clock whose hands somebody moves.
type jumping struct {
	sluice.SystemClock
	mu  sync.Mutex
	off time.Duration
}

func (c *jumping) jump(d time.Duration) { c.mu.Lock(); c.off += d; c.mu.Unlock() }

func (c *jumping) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Round(0).Add(c.off) // without the monotonic reading, which would not jump
}

func TestAGracefulStopIsBounded(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	run := b.create("r1")
	b.put("r1", "s-1")
	var wg sync.WaitGroup
	wait := func(path string, in any) {
		wg.Go(func() {
			if a := b.try("POST", path, in); a.problem.Code != "unavailable" {
				t.Errorf("%s ended with %d %s", path, a.status, a.body)
			}
		})
	}
	b.acquire("r1", 1)
	wait("/v1/runs/r1/acquire", wire.Acquire{Consumer: wire.Consumer{Name: "other"}, WaitSeconds: 60})
	b.poll("the wait", func() bool { return b.status("r1").ConsumersWaiting == 1 })
	defer b.hold(newID())()
	// An upload that would go on for ever.
	pr, pw := io.Pipe()
	defer pw.Close()
	wg.Go(func() {
		req, err := http.NewRequest(http.MethodPut, b.url+"/v1/runs/r1/samples/s-2", pr)
		if err != nil {
			t.Error(err)
			return
		}
		req.Header.Set(wire.SampleHeader, fields)
		if resp, err := b.client.Do(req); err == nil {
			resp.Body.Close()
			if resp.StatusCode < 400 {
				t.Errorf("the upload: %d", resp.StatusCode)
			}
		}
	})
	data := file(t, 1)
	if _, err := pw.Write(data[:len(data)-4]); err != nil {
		t.Fatal(err)
	}
	b.poll("the upload", func() bool { return b.status("r1").Health.StagingBytes > 0 })
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	begun := time.Now()
	if err := b.s.Close(ctx); err != nil {
		t.Errorf("close: %v", err)
	}
	if took := time.Since(begun); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	pw.CloseWithError(io.ErrUnexpectedEOF)
	wg.Wait()
	b.wants("unavailable", "GET", "/v1/runs/r1/status", nil)
	b.wants("unavailable", "GET", "/readyz", nil)
	files, err := os.ReadDir(run.Store.Dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if strings.HasSuffix(f.Name(), ".safetensors") && f.Name() != "s-1.safetensors" {
			t.Errorf("left: %s", f.Name())
		}
	}
}

// Who asks without waiting what came of a call that is under way hears it, also in the moment in which that is granted: nobody else may hear of the room.
func TestAGrantIsNotLostToTheQuestionWhatCameOfIt(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	session := newID()
	for i := range 300 {
		id := "q" + strconv.Itoa(i)
		var both [2]wire.Reservations
		var group sync.WaitGroup
		for j, wait := range []wire.Seconds{30, 0} {
			group.Go(func() {
				a := b.try("POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{1}, WaitSeconds: wait, RequestID: id}, session)
				if err := json.Unmarshal(a.body, &both[j]); err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
		if len(both[0].Reservations) != 1 || len(both[1].Reservations) != 1 || both[0].Reservations[0].ID != both[1].Reservations[0].ID {
			t.Fatalf("%d: the call got %+v, the question %+v", i, both[0], both[1])
		}
		do[struct{}](b, "POST", "/v1/runs/r1/unreserve", wire.Unreserve{Reservations: []string{both[0].Reservations[0].ID}})
	}
}
