package client

import (
	"errors"
	"fmt"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
)

func TestAMixedRunIsAStoreAndAQueueForSamplesOfOtherRuns(t *testing.T) {
	t.Parallel()
	l := serve(t, tmpfs(t), nil)
	for i, w := range ways {
		run := fmt.Sprint("m", i)
		t.Run(w.name, func(t *testing.T) {
			c := l.dial(w, nil)
			r := l.run(c, sluice.RunConfig{RunID: run, Mixed: true, Caps: sluice.Caps{MaxSamples: 8, MaxBytes: 1 << 20}})
			if !r.Info().Config.Mixed || r.Info().Config.Schema != nil {
				t.Errorf("the run is described as %+v, want mixed and without a schema", r.Info().Config)
			}
			for _, of := range []string{"upstream", run} {
				ref, err := r.Store().Put(t.Context(), queuetest.NewSample(of, "s-"+of, 100), sluice.Reservation{})
				if err != nil {
					t.Fatal(err)
				}
				if st, err := r.Queue().Put(t.Context(), sluice.PutRequest{Ref: ref}); err != nil || st != sluice.Enqueued {
					t.Fatalf("put: %v, %v", st, err)
				}
				if err := c.Check(t.Context(), ref, queuetest.Schema()); err != nil {
					t.Errorf("held against its schema: %v", err)
				}
				eagle3, err := sluice.SchemaOf(sluice.EAGLE3)
				if err != nil {
					t.Fatal(err)
				}
				if err := c.Check(t.Context(), ref, eagle3); !errors.Is(err, sluice.ErrSchema) {
					t.Errorf("held against another: %v, want ErrSchema", err)
				}
			}
			d, err := r.Queue().Acquire(t.Context(), sluice.AcquireRequest{Consumer: sluice.Consumer{Name: "c"}, Max: 8})
			if err != nil || len(d.Leases) != 2 || d.Leases[0].Ref.RunID() != "upstream" {
				t.Fatalf("%+v, %v", d, err)
			}
			for _, lease := range d.Leases {
				x, err := r.Store().Get(t.Context(), lease.Ref)
				if err != nil {
					t.Fatal(err)
				}
				if err := x.Release(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}
