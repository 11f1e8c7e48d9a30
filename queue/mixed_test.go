package queue

import (
	"errors"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
)

// foreign is a ref of another run and another schema.
func (f *fixture) foreign(id string, edit func(*sluice.RefFields)) sluice.Ref {
	f.t.Helper()
	ref := queuetest.NewRef(f.store.URI(), "upstream", id, 100, func(r *sluice.RefFields) {
		r.Algorithm, r.SchemaVersion = "dflash", 7
		if edit != nil {
			edit(r)
		}
	})
	if err := f.store.Add(ref, sluice.Reservation{}); err != nil {
		f.t.Fatal(err)
	}
	return ref
}

func mixed(c *sluice.RunConfig) { c.Schema, c.Mixed = nil, true }

func TestAMixedRunTakesRefsOfAnyRunAndSchema(t *testing.T) {
	t.Parallel()
	j := &memJournal{}
	f := newFixture(t, mixed, &Options{Journal: j})
	a, b := f.foreign("a", nil), f.foreign("b", func(r *sluice.RefFields) { r.RunID, r.Algorithm = "r1", "eagle3" })
	for _, ref := range []sluice.Ref{a, b} {
		if st, err := f.q.Put(bg, sluice.PutRequest{Ref: ref}); err != nil || st != sluice.Enqueued {
			t.Fatalf("put: %v, %v", st, err)
		}
	}
	if st, err := f.q.Put(bg, sluice.PutRequest{Ref: a}); err != nil || st != sluice.AlreadyPut {
		t.Errorf("put again: %v, %v", st, err)
	}
	other := queuetest.NewRef("file:///elsewhere", "r1", "c", 100, nil)
	if _, err := f.q.Put(bg, sluice.PutRequest{Ref: other}); !errors.Is(err, sluice.ErrInvalid) {
		t.Errorf("put of a ref of another store: %v, want ErrInvalid", err)
	}
	if err := f.q.Stop(bg); err != nil {
		t.Fatal(err)
	}
	f.q = newQueue(t, f.cfg, f.store, &Options{Journal: j})
	leases := f.acquire(alice, 5)
	if len(leases) != 2 || !leases[0].Ref.Equal(a) || !leases[1].Ref.Equal(b) {
		t.Fatalf("after a restart the leases are %v", ids(leases))
	}
	f.settle(alice, sluice.Ack, leases...)
	if _, claimed := f.store.Owner("a"); claimed {
		t.Error("a is claimed after its ack")
	}
}

func TestWhatAMixedRunClaimsAndDoesNotKnowIsFreed(t *testing.T) {
	t.Parallel()
	clock, j := queuetest.NewClock(), &memJournal{}
	f := newFixture(t, mixed, &Options{Journal: j, Clock: clock})
	f.put(1)
	lost := f.foreign("lost", nil)
	if err := f.store.Claim(lost, "queue:r1"); err != nil { // its put was cut off
		t.Fatal(err)
	}
	if err := f.q.Stop(bg); err != nil {
		t.Fatal(err)
	}
	f.q = newQueue(t, f.cfg, f.store, &Options{Journal: j, Clock: clock})
	clock.Advance(2 * time.Minute)
	if _, err := f.q.ReclaimExpired(bg); err != nil { // whatever is due is done
		t.Fatal(err)
	}
	if _, there := f.store.Owner("lost"); there {
		t.Error("it is claimed yet")
	}
}

func TestAMixedRunHasNoSchema(t *testing.T) {
	t.Parallel()
	for _, cfg := range []sluice.RunConfig{{RunID: "r", Caps: roomy}, {RunID: "r", Caps: roomy, Schema: queuetest.Schema(), Mixed: true}} {
		if _, err := cfg.Resolve(); !errors.Is(err, sluice.ErrInvalid) {
			t.Errorf("%+v: %v, want ErrInvalid", cfg, err)
		}
	}
}
