package queue

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/sluice-ml/sluice"
)

// reopen stops the queue and opens it again, from its records as they are or from a snapshot.
func (f *fixture) reopen(j *memJournal, snapshot bool) {
	f.t.Helper()
	f.q.settleJournal()
	if snapshot {
		f.q.mu.Lock()
		state := f.q.snapshot()
		f.q.mu.Unlock()
		records := make([]sluice.Record, len(state))
		for i := range state {
			records[i].Data = encode(state[i])
		}
		if err := j.Compact(bg, records); err != nil {
			f.t.Fatal(err)
		}
	}
	if err := f.q.Stop(bg); err != nil {
		f.t.Fatal(err)
	}
	f.q = newQueue(f.t, f.cfg, f.store, &Options{Journal: j})
}

// Members that step together hang, or train on different samples, unless each is given the same in the same order: also what has run out meanwhile, also by a
// repeated call, also after a restart.
func TestMembersOfAGroupAreGivenTheSame(t *testing.T) {
	for form := range 4 {
		windows, ended := form&1 > 0, form&2 > 0
		for restart, how := range []string{"none", "records", "snapshot"} {
			t.Run(fmt.Sprintf("windows=%v, ended=%v, restart=%s", windows, ended, how), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					j := &memJournal{}
					f := newFixture(t, func(c *sluice.RunConfig) {
						if windows {
							c.Windows, c.LargestSample = &sluice.Windows{Ranks: 1, PerRank: 2, Prefetch: 1}, 100
						}
					}, &Options{Journal: j})
					member := func(m int, request string) []sluice.Lease {
						d, err := f.q.Acquire(bg, sluice.AcquireRequest{Consumer: sluice.Consumer{Name: "g", Member: m, Members: 3}, Max: 2, RequestID: request})
						if err != nil {
							t.Fatal(err)
						}
						for i := range d.Leases { // times differ
							d.Leases[i].Deadline, d.Leases[i].TimeLeft = time.Time{}, 0
						}
						return d.Leases
					}
					f.put(2)
					for m := range 3 {
						member(m, "")
					}
					time.Sleep(f.q.cfg.VisibilityTimeout + time.Second) // the next are redeliveries
					want := member(0, "first")
					if len(want) != 2 || want[0].Redelivery == 0 || windows && want[0].Window == nil {
						t.Fatalf("leases %+v", want)
					}
					member(1, "second")
					if ended {
						time.Sleep(f.q.cfg.VisibilityTimeout + time.Second) // they run out
						if f.q.OutstandingCount() != 0 {
							t.Fatal("leases are still out")
						}
					}
					if restart > 0 {
						f.reopen(j, how == "snapshot")
					}
					for m, request := range []string{"first", "second", "third"} {
						for range 2 {
							if diff := cmp.Diff(want, member(m, request), cmp.Comparer(sluice.Ref.Equal)); diff != "" {
								t.Errorf("member %d is not given what the others were (-want +got):\n%s", m, diff)
							}
						}
					}
					f.q.Stop(bg)
				})
			})
		}
	}
}
