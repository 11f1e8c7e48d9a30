package client

import (
	"errors"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
)

func TestARunIsConfiguredThroughTheClient(t *testing.T) {
	t.Parallel()
	l := serve(t, tmpfs(t), nil)
	c := l.dial(overUnix, nil)
	r := l.run(c, sluice.RunConfig{RunID: "r1", Schema: queuetest.Schema(), Caps: sluice.Caps{MaxBytes: 1 << 20}})
	if err := r.Queue().Close(t.Context(), errors.New("the target failed")); err != nil {
		t.Fatal(err)
	}
	timeout, low := 90*time.Second, int64(0)
	info, err := c.Configure(t.Context(), "r1", sluice.RunChange{VisibilityTimeout: &timeout, LowWatermarkBytes: &low, Reopen: true})
	if err != nil {
		t.Fatal(err)
	}
	if info.Status.Closed || info.Config.VisibilityTimeout != timeout || info.Status.Health.Caps.LowWatermarkBytes != 0 || info.Status.Health.Caps.HighWatermarkBytes == 0 {
		t.Errorf("the run is %+v", info)
	}
	if h := r.Store().Health(); h.Caps != info.Status.Health.Caps {
		t.Errorf("its store has the caps %+v, want %+v", h.Caps, info.Status.Health.Caps)
	}
	high := int64(2 << 20)
	var e *sluice.Error
	if _, err := c.Configure(t.Context(), "r1", sluice.RunChange{HighWatermarkBytes: &high}); !errors.As(err, &e) || e.Kind != sluice.Invalid || e.Subject != "high_watermark_bytes" {
		t.Errorf("%v, want ErrInvalid about high_watermark_bytes", err)
	}
}
