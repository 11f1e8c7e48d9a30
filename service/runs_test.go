package service

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/service/access"
)

func TestCreatingAgainIsSuccessOnlyWithAnEqualSpec(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	b.create("r1")
	other := b.spec("r1")
	other.MaxFails = 7
	if p := b.wants("conflict", "POST", "/v1/runs", other); !strings.Contains(p.Detail, "max_fails is 5, not 7") {
		t.Errorf("the conflict does not name the field: %s", p.Detail)
	}
	b.restart()
	b.create("r1")
	b.wants("conflict", "POST", "/v1/runs", other)
}

func TestCapsOfAllRunsFitTheService(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{MaxBytes: 3 << 20})
	b.create("r1")
	b.create("r2")
	spec := b.spec("r3")
	spec.Caps.MaxBytes = 1<<20 + 1
	if p := b.wants("full", "POST", "/v1/runs", spec); !strings.Contains(p.Detail, "3145729") || !strings.Contains(p.Detail, "3145728") {
		t.Errorf("both numbers are wanted: %s", p.Detail)
	}
	do[struct{}](b, "DELETE", "/v1/runs/r1", nil)
	do[wire.Run](b, "POST", "/v1/runs", spec)

	spec = b.spec("r4")
	spec.Caps = wire.Caps{MaxSamples: 4}
	if p := b.wants("invalid", "POST", "/v1/runs", spec); !strings.Contains(p.Detail, "max_bytes is missing") {
		t.Errorf("got %s", p.Detail)
	}
	spec.LargestSample = 100
	do[wire.Run](b, "POST", "/v1/runs", spec)
	if st := b.s.Status(t.Context()); st.CapBytes != 1<<20+1<<20+1+400 {
		t.Errorf("the caps add up to %d", st.CapBytes)
	}
}

func TestDeletionFreesEverythingAndEndsEveryWait(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	run := b.create("r1")
	b.put("r1", "s-1")
	session := newID()
	d := b.acquire("r1", 1, session)
	pinned := do[wire.Pinned](b, "POST", "/v1/runs/r1/pins", wire.Pin{Ref: d.Leases[0].Ref, Map: true}, session)
	if _, err := os.Stat(run.Store.Dir + "/" + pinned.File); err != nil {
		t.Fatal(err)
	}
	waits := make(chan answer, 2)
	go func() {
		waits <- b.try("POST", "/v1/runs/r1/acquire", wire.Acquire{Consumer: trainer, WaitSeconds: 60})
	}()
	go func() { waits <- b.try("GET", "/v1/runs/r1/events", nil) }()
	b.poll("the wait", func() bool { return b.status("r1").ConsumersWaiting == 1 })
	do[struct{}](b, "DELETE", "/v1/runs/r1", nil)
	do[struct{}](b, "DELETE", "/v1/runs/r1", nil)
	for range 2 {
		if a := <-waits; a.status != 200 && a.problem.Code != "not_found" && a.problem.Code != "unavailable" {
			t.Errorf("a wait ended with %d %s", a.status, a.body)
		}
	}
	for _, dir := range []string{run.Store.Dir, run.Store.StagingDir} {
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", dir, err)
		}
	}
	names, err := b.s.journals.List(t.Context())
	if err != nil || len(names) != 1 {
		t.Errorf("journals %v, %v", names, err)
	}
	b.create("r1") // the name is free
	if st := b.status("r1"); st.Put != 0 || st.Health.UsedBytes() != 0 {
		t.Errorf("the new run has %+v", st)
	}
}

func TestShapeAndVersionsSurvive(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	spec := b.spec("r1")
	spec.Windows = &wire.Windows{Ranks: 2, PerRank: 1, Prefetch: 1, DropTail: true}
	spec.LargestSample = 100
	do[wire.Run](b, "POST", "/v1/runs", spec)
	do[struct{}](b, "POST", "/v1/runs/r1/reshape", wire.Reshape{Ranks: 3, PerRank: 2})
	do[struct{}](b, "POST", "/v1/runs/r1/versions", wire.Versions{TargetVersions: []string{"7"}, MinDraftVersion: "3"})
	b.wants("invalid", "POST", "/v1/runs/r1/versions", wire.Versions{MinDraftVersion: "three"})
	for range 2 {
		got := do[wire.Run](b, "GET", "/v1/runs/r1", nil).Spec
		if w := got.Windows; *w != (wire.Windows{Ranks: 3, PerRank: 2, Prefetch: 1, DropTail: true}) || len(got.TargetVersions) != 1 || got.MinDraftVersion != "3" {
			t.Errorf("described as %+v, %+v", got, w)
		}
		ref := b.upload("r1", newID(), "")
		if r := b.commit("r1", ref).Results[0]; r.Status != sluice.Gated {
			t.Errorf("committed %+v", r)
		}
		do[wire.Run](b, "POST", "/v1/runs", spec) // the spec that it was created with still is its spec
		b.restart()
	}
}

func TestARunIsClosedWithItsCause(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	b.put("r1", "s-1")
	do[struct{}](b, "POST", "/v1/runs/r1/close", wire.CloseRun{Cause: "the \x1b[31mtarget died"})
	b.wants("closed", "POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{1}})
	d := b.acquire("r1", 1)
	b.settle("r1", sluice.Ack, d.Leases...)
	if d = b.acquire("r1", 1); !d.End || d.Cause == nil || d.Cause.Code != "target_fault" || strings.Contains(d.Cause.Detail, "\x1b") {
		t.Errorf("the end is %+v", d)
	}
}

func TestTwoHundredRunsAtOnce(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("takes seconds")
	}
	const n = 200
	b := newBed(t, Options{})
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := w; i < n; i += 8 {
				id := fmt.Sprintf("run-%d", i)
				b.create(id)
				b.put(id, "s")
			}
		})
	}
	wg.Wait()
	begun := time.Now()
	b.restart()
	t.Logf("%d runs were open again after %v", n, time.Since(begun))
	st := b.s.Status(t.Context())
	if len(st.Runs) != n {
		t.Fatalf("%d runs", len(st.Runs))
	}
	for i := range st.Runs {
		if st.Runs[i].Pending != 1 {
			t.Errorf("%s has %d pending", st.Runs[i].RunID, st.Runs[i].Pending)
		}
	}
}

func TestASecondServiceIsRefusedAndToldWhoTheFirstIs(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	_, err := Open(t.Context(), Options{StateDir: b.o.StateDir, StoreDir: t.TempDir() + "/other", Logger: b.o.Logger})
	if !errors.Is(err, sluice.ErrConflict) || !strings.Contains(err.Error(), fmt.Sprintf("process %d on ", os.Getpid())) {
		t.Errorf("the same state: %v", err)
	}
	_, err = Open(t.Context(), Options{StateDir: t.TempDir() + "/other", StoreDir: b.o.StoreDir, Logger: b.o.Logger})
	if !errors.Is(err, sluice.ErrConflict) || !strings.Contains(err.Error(), fmt.Sprintf("process %d on ", os.Getpid())) {
		t.Errorf("the same store: %v", err)
	}
}

func TestAStoreOfAnotherStateIsNotTouched(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	run := b.create("r1")
	b.put("r1", "s-1")
	b.stop()
	_, err := Open(t.Context(), Options{StateDir: t.TempDir() + "/other", StoreDir: b.o.StoreDir, Logger: b.o.Logger})
	if !errors.Is(err, sluice.ErrConflict) || !strings.Contains(err.Error(), "is the store of another service state") {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(run.Store.Dir + "/s-1.safetensors"); err != nil {
		t.Error(err)
	}
}

func TestAForgottenStoreIsRefusedAndCostsNothing(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	b.put("r1", "s-1")
	b.stop()
	// On a disk that is not mounted, and with another directory than before: both are refused, and nothing is touched.
	away := b.o.StoreDir + "-away"
	other := b.o
	other.StoreDir = t.TempDir() + "/other"
	for _, c := range []struct {
		name    string
		o       Options
		unmount bool
		says    string
	}{
		{"another directory", other, false, "the samples of its 1 runs are in " + b.o.StoreDir},
		{"not mounted", b.o, true, "is its disk mounted?"},
		{"another directory, and not mounted", other, true, "is its disk mounted?"},
	} {
		if c.unmount {
			if err := os.Rename(b.o.StoreDir, away); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := Open(t.Context(), c.o); !errors.Is(err, sluice.ErrConflict) || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), "--abandon-samples") {
			t.Errorf("%s: %v", c.name, err)
		}
		if c.unmount {
			if err := os.Rename(away, b.o.StoreDir); err != nil {
				t.Fatal(err)
			}
		}
	}
	asked := b.o.StoreDir
	b.o.StoreDir = "" // forgotten: it is where it was
	b.start()
	b.waitReady()
	if got := b.s.StoreDir(); got != asked {
		t.Errorf("without a directory the store is %s, want %s", got, asked)
	}
	if st := b.status("r1"); st.Pending != 1 || st.Dead != 0 {
		t.Errorf("after that: %+v", st)
	}
	b.stop()
	b.o.StoreDir, b.o.AbandonSamples = other.StoreDir, true
	b.start()
	b.waitReady()
	if st := b.status("r1"); st.Dead != 1 {
		t.Errorf("abandoned on purpose: %+v", st)
	}
}

func TestADirectoryThatOthersMayWriteToIsRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir() + "/state"
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o770); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), Options{StateDir: dir, StoreDir: t.TempDir() + "/store", Logger: quietLog(t)}); !errors.Is(err, sluice.ErrDenied) {
		t.Errorf("open to the group: %v", err)
	}
	link := t.TempDir() + "/link"
	if err := os.Symlink(t.TempDir(), link); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), Options{StateDir: link, StoreDir: t.TempDir() + "/store", Logger: quietLog(t)}); !errors.Is(err, sluice.ErrDenied) {
		t.Errorf("a link: %v", err)
	}
}

func TestTheStoreStaysWhereItIsAndGoesWhereThereIsRoom(t *testing.T) {
	t.Parallel()
	o := Options{StateDir: t.TempDir(), MaxBytes: 1 << 20}
	dir, _ := chooseRoot(&o, "/dev/shm")
	if !strings.HasPrefix(dir, fmt.Sprintf("/dev/shm/sluice-%d/", os.Geteuid())) {
		t.Errorf("with room in memory: %s", dir)
	}
	o.MaxBytes = 1 << 52
	if dir, why := chooseRoot(&o, "/dev/shm"); dir != o.StateDir+"/store" || !strings.Contains(why, "less than twice") {
		t.Errorf("without: %s, %s", dir, why)
	}
	if dir, why := chooseRoot(&o, "/"); dir != o.StateDir+"/store" || !strings.Contains(why, "not in memory") {
		t.Errorf("no memory: %s, %s", dir, why)
	}
	o.MaxBytes = NoCap
	if free, _, err := roomOf("/dev/shm"); err != nil {
		t.Error(err)
	} else if dir, why := chooseRoot(&o, "/dev/shm"); strings.HasPrefix(dir, "/dev/shm/") != (free >= leastMemory) {
		t.Errorf("without a cap, with %d bytes free: %s, %s", free, dir, why)
	}
	o.MaxBytes = 1 << 20
	if err := os.MkdirAll(o.StateDir+"/store", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(o.StateDir+"/store/id", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if dir, _ := chooseRoot(&o, "/dev/shm"); dir != o.StateDir+"/store" {
		t.Errorf("where it lies: %s", dir)
	}
}

func TestRolesAreHeeded(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	b.create("r1")
	b.create("r2")
	b.put("r1", "s-1")
	b.as = access.Caller{Name: "p", Role: access.Producer, Run: "r1", UID: -1}
	b.wants("denied", "POST", "/v1/runs", b.spec("r3"))
	b.wants("denied", "POST", "/v1/runs/r1/acquire", wire.Acquire{Consumer: trainer})
	b.wants("denied", "POST", "/v1/runs/r2/reserve", wire.Reserve{Bytes: []int64{1}})
	b.wants("denied", "DELETE", "/v1/runs/r1", nil)
	b.wants("denied", "GET", "/v1/runs/no-such-run", nil) // not even whether there is one
	b.wants("denied", "POST", "/v1/runs/r1/stage", wire.Stage{File: "f", SampleID: "s"})
	if l := do[wire.RunList](b, "GET", "/v1/runs", nil); len(l.Runs) != 1 || l.Runs[0].Spec.RunID != "r1" {
		t.Errorf("it sees %+v", l)
	}
	do[wire.Reservations](b, "POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{1}})
	b.as = access.Caller{Name: "c", Role: access.Consumer, UID: -1}
	b.wants("denied", "POST", "/v1/runs/r1/reserve", wire.Reserve{Bytes: []int64{1}})
	b.wants("denied", "POST", "/v1/runs/r1/dead-letters/drop", wire.SampleIDs{All: true})
	if d := b.acquire("r1", 1); len(d.Leases) != 1 {
		t.Errorf("acquired %+v", d)
	}
	b.as = access.Caller{Role: "none"}
	b.wants("denied", "POST", "/v1/runs/r1/acquire", wire.Acquire{Consumer: trainer})
}
