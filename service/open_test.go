package service

import (
	"context"
	"errors"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/journal/natsjournal"
)

// TestAServiceWhoseJournalsCanNotBeOpenedSaysSo holds on to nothing: another one can start at once.
func TestAServiceWhoseJournalsCanNotBeOpenedSaysSo(t *testing.T) {
	t.Parallel()
	o := Options{StateDir: t.TempDir(), StoreDir: t.TempDir() + "/store", MaxBytes: 1 << 20, Logger: quietLog(t)}
	j, err := natsjournal.Open(t.Context(), o.StateDir+"/journal", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), o); !errors.Is(err, sluice.ErrConflict) {
		t.Errorf("with the journals in use Open says %v, want a conflict", err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Open(ctx, o); err == nil {
		t.Error("Open succeeds although its context has ended")
	}
	s, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
