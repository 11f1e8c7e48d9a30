package queue_test

import (
	"context"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue"
	"github.com/sluice-ml/sluice/queue/queuetest"
)

func TestConformance(t *testing.T) {
	queuetest.Run(t, queuetest.Harness{Open: func(t *testing.T, cfg sluice.RunConfig, store *queuetest.Store, clock *queuetest.Clock) sluice.Queue {
		q, err := queue.Open(context.Background(), cfg, store, &queue.Options{Clock: clock})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { q.Stop(context.Background()) })
		return q
	}})
}
