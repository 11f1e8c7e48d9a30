package demo

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/target/tinyllama"
)

func TestEveryShippedPromptMakesARow(t *testing.T) {
	t.Parallel()
	o, err := Options{}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	model, err := loadModel("")
	if err != nil {
		t.Fatal(err)
	}
	schema, err := sluice.SchemaOf(o.Algorithm)
	if err != nil {
		t.Fatal(err)
	}
	rows, err := openPrompts(&o, model, schema)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	n := 0
	for {
		b, err := rows.Next(t.Context())
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if ids := sluice.View[int64](b.InputIDs); ids[0] != tinyllama.BOS {
			t.Fatalf("row %d begins with %d", n, ids[0])
		}
		n++
	}
	if s := rows.Stats(); n != 240 || s.Truncated != 0 || len(s.Skipped) != 0 {
		t.Errorf("%d rows, %+v", n, s)
	}
}

// The demo without a single option, until it is seen to flow; all of it would take a test too long.
func TestTheDemoFlowsWithoutOptions(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var last sluice.Status
	_, err := Run(ctx, Options{Interval: 20 * time.Millisecond, Progress: func(s Snapshot) {
		if last = s.Status; last.Acked >= 4 {
			cancel()
		}
	}})
	if !errors.Is(err, context.Canceled) || last.Acked < 4 || last.DeadTotal > 0 {
		t.Errorf("%v, status %+v", err, last)
	}
}
