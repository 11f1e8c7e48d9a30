package queue

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
)

// manyStore is a store that takes many claims at once.
type manyStore struct {
	*queuetest.Store
	calls []string
	fault string
}

func (m *manyStore) ClaimAll(refs []sluice.Ref, owner string) []error {
	return m.all("claim", refs, func(r sluice.Ref) error { return m.Claim(r, owner) })
}

func (m *manyStore) UnclaimAll(refs []sluice.Ref, owner string) []error {
	return m.all("unclaim", refs, func(r sluice.Ref) error { return m.Unclaim(r, owner) })
}

func (m *manyStore) all(what string, refs []sluice.Ref, each func(sluice.Ref) error) []error {
	m.calls = append(m.calls, fmt.Sprint(what, " ", len(refs)))
	switch m.fault {
	case "panic":
		panic("at the disco")
	case "no answers":
		return nil
	}
	errs := make([]error, len(refs))
	for i, r := range refs {
		errs[i] = each(r)
	}
	return errs
}

func (m *manyStore) took(t *testing.T, want ...string) {
	t.Helper()
	if fmt.Sprint(m.calls) != fmt.Sprint(want) {
		t.Errorf("calls %q, want %q", m.calls, want)
	}
	m.calls = nil
}

func TestManyClaimsAreOneCall(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	f := newFixture(t, nil, nil) // for its samples
	m := &manyStore{Store: f.store}
	j := new(memJournal)
	open := func() *Queue {
		t.Helper()
		q, err := Open(ctx, f.cfg, m, &Options{Journal: j})
		if err != nil {
			t.Fatal(err)
		}
		return q
	}
	q := open()
	puts := f.puts(5)
	if err := f.store.Abort(ctx, puts[2].Ref); err != nil {
		t.Fatal(err)
	}
	for _, fault := range []string{"panic", "no answers"} {
		m.fault = fault
		for i, r := range q.PutAll(ctx, puts) {
			if !errors.Is(r.Err, sluice.ErrUnavailable) {
				t.Errorf("%s: put %d was answered %+v", fault, i, r)
			}
		}
		m.took(t, "claim 5")
	}
	m.fault = ""
	for i, r := range q.PutAll(ctx, puts) {
		if i == 2 && !errors.Is(r.Err, sluice.ErrNotFound) || i != 2 && (r.Err != nil || r.Status != sluice.Enqueued) {
			t.Errorf("put %d was answered %+v", i, r)
		}
	}
	m.took(t, "claim 5")
	if err := q.Stop(ctx); err != nil {
		t.Fatal(err)
	}

	// A queue that is opened again claims all of them, and finds the one that the store has lost.
	if err := errors.Join(f.store.Unclaim(puts[3].Ref, "queue:r1"), f.store.Abort(ctx, puts[3].Ref)); err != nil {
		t.Fatal(err)
	}
	q = open()
	m.took(t, "claim 4")
	dead, err := q.DeadLetters(ctx)
	if err != nil || len(dead) != 1 || dead[0].Ref.SampleID() != "s3" || !dead[0].Freed {
		t.Errorf("dead letters %+v, %v", dead, err)
	}
	d, err := q.Acquire(ctx, sluice.AcquireRequest{Consumer: alice, Max: 9})
	if err != nil || strings.TrimSpace(ids(d.Leases)) != "s0 s1 s4" {
		t.Fatalf("acquired %s, %v", ids(d.Leases), err)
	}
	settle := sluice.SettleRequest{Consumer: alice}
	for _, l := range d.Leases {
		settle.Settlements = append(settle.Settlements, sluice.Settlement{Lease: l.ID, Verdict: sluice.Ack})
	}
	if _, err := q.Settle(ctx, settle); err != nil {
		t.Fatal(err)
	}
	m.took(t, "unclaim 3")
	if h := f.store.Health(); h.ResidentSamples != 0 {
		t.Errorf("%d samples stay in the store", h.ResidentSamples)
	}
	if err := q.Stop(ctx); err != nil {
		t.Fatal(err)
	}
}
