package service

import (
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/fakeclock"
	"github.com/sluice-ml/sluice/internal/wire"
)

// isIdle reports whether the service says that it may end.
func (b *bed) isIdle() bool {
	select {
	case <-b.s.Idle():
		return true
	default:
		return false
	}
}

// holdAndCut holds a session for the time and lets go of it.
func (b *bed) holdAndCut(clock *fakeclock.Clock, d time.Duration) {
	b.t.Helper()
	cut := b.hold(newID())
	clock.Advance(d)
	cut()
	b.poll("the break is noticed", func() bool { b.s.idle.mu.Lock(); defer b.s.idle.mu.Unlock(); return b.s.idle.held == 0 })
}

func TestAServiceThatEndsWhenIdleWaitsHalfAMinuteForItsFirstClient(t *testing.T) {
	t.Parallel()
	b, clock := clocked(t, Options{ExitIdle: 10 * time.Second})
	clock.Advance(29 * time.Second)
	if b.isIdle() {
		t.Fatal("it ends before half a minute is over")
	}
	clock.Advance(3 * time.Second)
	b.poll("it ends", b.isIdle)
	if a := b.send(http.MethodGet, "/v1/sessions/"+newID(), nil, nil); a.problem.Code != "unavailable" {
		t.Errorf("a client that comes after the decision gets %d %s, want unavailable", a.status, a.body)
	}
}

func TestAServiceEndsSoLongAfterItsLastClientAndNoSooner(t *testing.T) {
	t.Parallel()
	b, clock := clocked(t, Options{ExitIdle: 10 * time.Second})
	b.holdAndCut(clock, time.Hour)
	if clock.Advance(9 * time.Second); b.isIdle() {
		t.Fatal("it ends 9 s after its client")
	}
	b.holdAndCut(clock, time.Second)
	if clock.Advance(9 * time.Second); b.isIdle() {
		t.Fatal("it ends although a client came back")
	}
	clock.Advance(3 * time.Second)
	b.poll("it ends", b.isIdle)
}

func TestAServiceDoesNotEndByItselfUnlessItIsToldTo(t *testing.T) {
	t.Parallel()
	b, clock := clocked(t, Options{})
	b.holdAndCut(clock, time.Second)
	if clock.Advance(time.Hour); b.isIdle() {
		t.Error("it ends")
	}
}

// there reports whether something has the name.
func there(t *testing.T, path string) bool {
	t.Helper()
	_, err := os.Lstat(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return err == nil
}

func TestAPrivateServiceLeavesNothing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	o := Options{StateDir: filepath.Join(dir, "state"), StoreDir: filepath.Join(dir, "store"), RemoveState: true}
	b := newBed(t, o)
	b.create("r1")
	b.put("r1", "s-1")
	b.stop()
	if there(t, o.StateDir) || there(t, o.StoreDir) {
		t.Errorf("state there: %v, store there: %v", there(t, o.StateDir), there(t, o.StoreDir))
	}
}

func TestAPrivateServiceTouchesNothingOfOthers(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	o := Options{StateDir: filepath.Join(dir, "state"), StoreDir: filepath.Join(dir, "store"), RemoveState: true}
	mine := []string{filepath.Join(o.StateDir, "notes"), filepath.Join(o.StoreDir, "precious")}
	for _, path := range mine {
		if err := os.MkdirAll(path, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	newBed(t, o).stop()
	for _, path := range mine {
		entries, err := os.ReadDir(filepath.Dir(path))
		if err != nil || len(entries) != 1 || !there(t, path) {
			t.Errorf("%s: %v, %v; want it alone", path, entries, err)
		}
	}
}

// TestAPrivateServiceTouchesNoFilesOfLikeNames is about files of a user's own, which look like a service's.
func TestAPrivateServiceTouchesNoFilesOfLikeNames(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	o := Options{StateDir: filepath.Join(dir, "state"), StoreDir: filepath.Join(dir, "store"), RemoveState: true}
	mine := []string{filepath.Join(o.StateDir, "store.py"), filepath.Join(o.StateDir, "journal.md"), filepath.Join(o.StateDir, "tokens.json.bak"), filepath.Join(o.StoreDir, "runs.csv")}
	for _, path := range mine {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	newBed(t, o).stop()
	for _, path := range mine {
		if !there(t, path) {
			t.Errorf("%s is gone", path)
		}
	}
}

func TestAPrivateServiceRefusesWhatItWouldRemove(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"state/tls-key.pem", "state/tokens.json", "state/store/precious", "state/sluice.sock", "store/runs/precious", "store/staging/precious", "store/id"} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			mine := filepath.Join(dir, path)
			if err := errors.Join(os.MkdirAll(filepath.Dir(mine), 0o700), os.WriteFile(mine, []byte("mine"), 0o600)); err != nil {
				t.Fatal(err)
			}
			o := Options{StateDir: filepath.Join(dir, "state"), StoreDir: filepath.Join(dir, "store"), RemoveState: true}
			if s, err := Open(context.Background(), o); !errors.Is(err, sluice.ErrConflict) {
				t.Errorf("%v, want a conflict", err)
				if err == nil {
					_ = s.Close(context.Background())
				}
			}
			if data, err := os.ReadFile(mine); string(data) != "mine" {
				t.Errorf("it holds %q: %v", data, err)
			}
		})
	}
}

// TestAStoreThatAnotherServiceHasTakenSinceIsNotSwept is about one that was private once, whose service was killed before it could remove it.
func TestAStoreThatAnotherServiceHasTakenSinceIsNotSwept(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	o := Options{StateDir: filepath.Join(dir, "killed"), StoreDir: filepath.Join(dir, "store"), RemoveState: true}
	b := newBed(t, o)
	mark, err := os.ReadFile(filepath.Join(o.StateDir, privateFile))
	if err != nil {
		t.Fatal(err)
	}
	id := b.s.root.id
	b.stop()
	// As it would be had it been killed.
	if err := errors.Join(os.Mkdir(o.StateDir, 0o700), os.WriteFile(filepath.Join(o.StateDir, privateFile), mark, 0o600), os.WriteFile(filepath.Join(o.StateDir, ownerFile), nil, 0o600),
		os.Mkdir(o.StoreDir, 0o700), os.WriteFile(filepath.Join(o.StoreDir, idName), []byte(id), 0o600)); err != nil {
		t.Fatal(err)
	}
	kept := newBed(t, Options{StateDir: filepath.Join(dir, "kept"), StoreDir: o.StoreDir})
	kept.create("r1")
	kept.put("r1", "s-1")
	kept.stop()
	newBed(t, Options{StateDir: filepath.Join(dir, "new"), StoreDir: filepath.Join(dir, "other"), RemoveState: true}).stop()
	if there(t, o.StateDir) {
		t.Error("what the killed one left was not swept")
	}
	kept.start()
	kept.waitReady()
	if d := kept.acquire("r1", 1); len(d.Leases) != 1 {
		t.Errorf("%+v, want the sample", d)
	}
}

func TestAPrivateServiceRefusesStateThatWasToBeKept(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	b.stop()
	o := b.o
	o.RemoveState = true
	if _, err := Open(context.Background(), o); !errors.Is(err, sluice.ErrConflict) || errors.Is(err, ErrRunning) {
		t.Errorf("over the same state: %v, want a conflict", err)
	}
	o.StateDir = t.TempDir() + "/state"
	if _, err := Open(context.Background(), o); !errors.Is(err, sluice.ErrConflict) || errors.Is(err, ErrRunning) {
		t.Errorf("over the same store: %v, want a conflict", err)
	}
	if there(t, o.StateDir) {
		t.Error("the start that was refused has left its state directory")
	}
	b.start()
	b.waitReady()
	do[wire.Run](b, "GET", "/v1/runs/r1", nil) // all is there yet
}

func TestTwoServicesOnOneStateTheSecondNamesTheFirst(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{RemoveState: true})
	o := b.o
	o.StoreDir = t.TempDir() + "/other"
	if _, err := Open(context.Background(), o); !errors.Is(err, ErrRunning) || !errors.Is(err, sluice.ErrConflict) {
		t.Errorf("%v, want a conflict that is ErrRunning", err)
	}
	o.StateDir, o.StoreDir, o.RemoveState = t.TempDir()+"/state", b.o.StoreDir, false
	if _, err := Open(context.Background(), o); errors.Is(err, ErrRunning) || !errors.Is(err, sluice.ErrConflict) {
		t.Errorf("over the same store: %v, want a conflict that is not ErrRunning", err)
	}
}

func TestJournalsElsewhereAreNotPrivate(t *testing.T) {
	t.Parallel()
	o := Options{StateDir: t.TempDir() + "/state", NATSURL: "nats://127.0.0.1:1", RemoveState: true}
	if _, err := Open(context.Background(), o); !errors.Is(err, sluice.ErrInvalid) {
		t.Errorf("%v, want ErrInvalid", err)
	}
}

func TestWithoutACapRunsNeedNoBytesToAddUp(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{MaxBytes: NoCap})
	r := do[wire.Run](b, "POST", "/v1/runs", wire.RunSpec{RunID: "r1", Algorithm: "eagle3", Caps: wire.Caps{MaxSamples: 64}})
	if r.Status.Health.Caps.MaxBytes != 0 || r.Status.Health.Caps.MaxSamples != 64 {
		t.Errorf("caps %+v, want 64 samples and no bytes", r.Status.Health.Caps)
	}
	if st := do[wire.ServiceStatus](b, "GET", "/v1/status", nil); st.MaxBytes != 0 {
		t.Errorf("max_bytes is %d, want 0 for none", st.MaxBytes)
	}
	b.restart()
	b.status("r1")
	b.stop()
	o := b.o
	o.MaxBytes = 1 << 30
	if _, err := Open(context.Background(), o); !errors.Is(err, sluice.ErrConflict) || !strings.Contains(err.Error(), "--max-bytes none") {
		t.Errorf("with a cap again: %v, want a conflict that says what helps", err)
	}
}
