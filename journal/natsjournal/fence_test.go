package natsjournal

import (
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
)

// asleep keeps an owner from renewing its record, and from finding out that it lost it.
func asleep(what string) error {
	if what == "renew" {
		return errors.New("asleep")
	}
	return nil
}

// An owner that was superseded and does not know it yet can't take a journal back by opening it again, as a service does when an append fails; nor delete it.
func TestASupersededOwnerCanNeitherOpenNorDelete(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	srv := startServer(t, nil)
	connect := func(opts *Options) *Journals {
		js, err := Connect(ctx, srv.ClientURL(), opts)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { js.Close() })
		return js
	}
	for what, touch := range map[string]func(js *Journals) error{
		"open":   func(js *Journals) error { _, err := js.Journal(ctx, "a"); return err },
		"create": func(js *Journals) error { _, err := js.Journal(ctx, "new"); return err },
		"delete": func(js *Journals) error { return js.Delete(ctx, "a") },
	} {
		earlier := connect(&Options{Prefix: what, Lapse: 300 * time.Millisecond, step: asleep})
		mustAppend(t, mustJournal(t, earlier, "a"), "x")
		later := connect(&Options{Prefix: what})
		j := mustJournal(t, later, "a")
		if err := touch(earlier); !errors.Is(err, sluice.ErrStale) {
			t.Errorf("%s by the one before: %v, want stale", what, err)
		}
		mustAppend(t, j, "y")
		if _, err := earlier.Journal(ctx, "b"); !errors.Is(err, sluice.ErrStale) {
			t.Errorf("%s: it has been told, and goes on: %v", what, err)
		}
		if got, err := contents(mustJournal(t, later, "a")); err != nil || !slices.Equal(got, []string{"x", "y"}) {
			t.Errorf("%s: %q, %v", what, got, err)
		}
	}
}

// A journal is taken from a writer that never pauses, whose next message is nearly always there first.
func TestAJournalIsTakenFromABusyWriter(t *testing.T) {
	t.Parallel()
	js := mustOpen(t, t.TempDir(), nil)
	j := mustJournal(t, js, "a")
	for round := range 100 {
		var writers sync.WaitGroup
		for range 16 {
			writers.Go(func() {
				for {
					if err := j.Append(t.Context(), []sluice.Record{{Data: []byte("x")}}); err != nil {
						if !errors.Is(err, sluice.ErrStale) {
							t.Errorf("round %d: append: %v", round, err)
						}
						return
					}
				}
			})
		}
		next, err := js.Journal(t.Context(), "a")
		if err != nil {
			j.fail(errDied)
			writers.Wait()
			t.Fatalf("round %d: open: %v", round, err)
		}
		writers.Wait()
		j = next.(*journal)
	}
}

// A renewal that was cut off by Close may have arrived all the same.
func TestAPrefixIsGivenUpBehindARenewalThatNobodyKnowsOf(t *testing.T) {
	t.Parallel()
	srv := startServer(t, nil)
	js, err := Connect(t.Context(), srv.ClientURL(), &Options{Lapse: time.Hour, step: asleep})
	if err != nil {
		t.Fatal(err)
	}
	renewal := js.line.held.me
	renewal.Beat++
	data, err := json.Marshal(renewal)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.line.js.Publish(t.Context(), "sluice.owner", data); err != nil {
		t.Fatal(err)
	}
	if err := js.Close(); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	js, err = Connect(t.Context(), srv.ClientURL(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer js.Close()
	if d := time.Since(begin); d > time.Minute {
		t.Errorf("it took %v", d)
	}
}

// Lazy records that could not be written, and that nobody was told of, are not lost in silence.
func TestCloseTellsOfAFailureThatNobodyHasHeardOf(t *testing.T) {
	t.Parallel()
	js := mustOpen(t, t.TempDir(), nil)
	j := mustJournal(t, js, "a")
	mustJournal(t, js, "a")
	if err := j.Append(t.Context(), []sluice.Record{{Lazy: true}}); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		j.mu.Lock()
		broken := j.broken
		j.mu.Unlock()
		if broken != nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the record was never written, nor refused")
		}
	}
	if err := j.Close(); !errors.Is(err, sluice.ErrStale) {
		t.Errorf("close: %v, want stale", err)
	}
	j = mustJournal(t, js, "a")
	mustJournal(t, js, "a")
	if err := j.Append(t.Context(), []sluice.Record{{}}); !errors.Is(err, sluice.ErrStale) {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Errorf("close says once more what was said: %v", err)
	}
}
