package service

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

func TestARunIsConfiguredAfterItsCreation(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	was := b.create("r1").Spec
	timeout, high := wire.Seconds(90), int64(500_000)
	change := wire.Configure{VisibilityTimeoutSeconds: &timeout, HighWatermarkBytes: &high}
	for range 2 {
		r := do[wire.Run](b, "POST", "/v1/runs/r1/configure", change)
		if r.Spec.VisibilityTimeoutSeconds != 90 || r.Spec.Caps.HighWatermarkBytes != high || r.Spec.Caps.LowWatermarkBytes != was.Caps.LowWatermarkBytes || r.Spec.Caps.MaxBytes != was.Caps.MaxBytes {
			t.Errorf("described as %+v", r.Spec)
		}
	}
	check := func() {
		t.Helper()
		r := do[wire.Run](b, "GET", "/v1/runs/r1", nil)
		if r.Spec.VisibilityTimeoutSeconds != 90 || r.Spec.Caps.HighWatermarkBytes != high {
			t.Errorf("described as %+v", r.Spec)
		}
		if h := do[sluice.Health](b, "GET", "/v1/runs/r1/health", nil); h.Caps.HighWatermarkBytes != high || h.Caps != r.Status.Health.Caps {
			t.Errorf("health %+v, status %+v", h.Caps, r.Status.Health.Caps)
		}
		b.create("r1") // the spec that it was created with is that of the same run
		b.put("r1", "s-"+newID()[:6])
		if d := b.acquire("r1", 1); len(d.Leases) != 1 || d.Leases[0].TimeLeftSeconds < 80 {
			t.Errorf("acquired %+v", d)
		}
	}
	check()
	b.restart()
	check()
}

func TestARunThatSeveralConfigureAtOnceIsDescribedAsItIs(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	for round := range 20 {
		var all sync.WaitGroup
		for i := range 4 {
			timeout, high := wire.Seconds(100*(i+1)), int64(900_000+round*10+i)
			all.Go(func() {
				b.try("POST", "/v1/runs/r1/configure", wire.Configure{VisibilityTimeoutSeconds: &timeout, HighWatermarkBytes: &high})
			})
		}
		all.Wait()
		r := do[wire.Run](b, "GET", "/v1/runs/r1", nil)
		if is := r.Status.Health.Caps.HighWatermarkBytes; r.Spec.Caps.HighWatermarkBytes != is {
			t.Fatalf("the high mark is %d and described as %d", is, r.Spec.Caps.HighWatermarkBytes)
		}
		b.put("r1", "s-"+newID()[:6])
		d := b.acquire("r1", 1)
		if is, want := d.Leases[0].TimeLeftSeconds, r.Spec.VisibilityTimeoutSeconds; is > want || is < want-50 {
			t.Fatalf("leases live for %v s, and the timeout is described as %v s", is, want)
		}
		b.settle("r1", sluice.Ack, d.Leases...)
	}
}

func TestARunThatIsBeingChangedCanBeDeleted(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	r, err := b.s.find("r1")
	if err != nil {
		t.Fatal(err)
	}
	b.s.admin.Lock()
	answered, deleted := make(chan answer, 1), make(chan error, 1)
	go func() {
		answered <- b.try("POST", "/v1/runs/r1/versions", wire.Versions{TargetVersions: []string{"2"}})
	}()
	b.poll("the change is in the run", func() bool {
		if !r.life.TryLock() {
			return true
		}
		r.life.Unlock()
		return false
	})
	go func() {
		defer b.s.admin.Unlock()
		deleted <- b.s.delete(context.Background(), r)
	}()
	select {
	case err := <-deleted:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the deletion waits for the change, which waits for the deletion")
	}
	if a := <-answered; a.problem.Code != "not_found" {
		t.Errorf("the change: %d %s, want not_found", a.status, a.body)
	}
}

func TestAClosedRunIsReopenedOnceItIsDrained(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	b.put("r1", "s-1")
	b.try("POST", "/v1/runs/r1/close", wire.CloseRun{Cause: "the target failed"})
	reopen := wire.Configure{Reopen: true}
	if p := b.wants("conflict", "POST", "/v1/runs/r1/configure", reopen); p.Subject != "reopen" || !strings.Contains(p.Detail, "1 samples are pending") {
		t.Errorf("%+v", p)
	}
	b.settle("r1", sluice.Ack, b.acquire("r1", 1).Leases...)
	if d := b.acquire("r1", 1); !d.End || d.Cause == nil {
		t.Fatalf("%+v, want the end with its cause", d)
	}
	for range 2 {
		if r := do[wire.Run](b, "POST", "/v1/runs/r1/configure", reopen); r.Status.Closed || r.Status.Cause != "" {
			t.Errorf("closed: %v, cause %q", r.Status.Closed, r.Status.Cause)
		}
	}
	b.restart()
	b.put("r1", "s-2")
	if d := b.acquire("r1", 1); len(d.Leases) != 1 || d.End {
		t.Errorf("%+v", d)
	}
}

func TestAConfigurationIsRefusedByField(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	for body, subject := range map[string]string{
		`{}`: "", `{"visibility_timeout_seconds":0}`: "visibility_timeout_seconds", `{"visibility_timeout_seconds":-1}`: "visibility_timeout_seconds", `{"visibility_timeout_seconds":1e-12}`: "visibility_timeout_seconds",
		`{"visibility_timeout_seconds":1e9}`: "visibility_timeout_seconds", `{"high_watermark_bytes":0}`: "high_watermark_bytes", `{"high_watermark_bytes":2000000}`: "high_watermark_bytes",
		`{"low_watermark_bytes":1000000}`: "low_watermark_bytes", `{"low_watermark_samples":1}`: "low_watermark_samples",
	} {
		if p := b.wants("invalid", "POST", "/v1/runs/r1/configure", body); p.Subject != subject {
			t.Errorf("%s: about %q, want %q: %s", body, p.Subject, subject, p.Detail)
		}
	}
	b.wants("not_found", "POST", "/v1/runs/nobody/configure", `{"reopen":true}`)
	b.as.Role = "producer"
	b.wants("denied", "POST", "/v1/runs/r1/configure", `{"reopen":true}`)
}
