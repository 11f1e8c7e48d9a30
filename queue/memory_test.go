package queue

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
	"pgregory.net/rapid"
)

// What is remembered is compared with two plain lists, also where keys coincide, in part or as a whole.
func TestRecentFindsWhatWasAddedLast(t *testing.T) {
	type entry struct{ who, what int }
	rapid.Check(t, func(t *rapid.T) {
		type added struct {
			key   uint64
			value entry
		}
		var m recent[entry]
		m.init(rapid.IntRange(2, 40).Draw(t, "limit"))
		var young, old []added
		now, turned, n := int64(0), int64(0), 0
		keys := rapid.SampledFrom([]uint64{0, 1, 17, 1 << 63, 1<<63 | 1, 1<<48 | 1, 1<<48 | 17, 1<<47 | 1, 1<<64 - 1})
		find := func(k uint64, who int) (entry, bool) {
			for _, list := range [][]added{young, old} {
				for _, a := range slices.Backward(list) {
					if a.key == k && a.value.who == who {
						return a.value, true
					}
				}
			}
			return entry{}, false
		}
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				if len(young) >= m.limit/2 || now-turned >= int64(memory) {
					young, old, turned = nil, young, now
				}
				n++
				a := added{keys.Draw(t, "key"), entry{rapid.IntRange(0, 2).Draw(t, "who"), n}}
				young = append(young, a)
				m.turn(now)
				m.young.add(a.key, a.value)
			},
			"wait": func(t *rapid.T) { now += rapid.Int64Range(0, int64(memory)).Draw(t, "time") },
			"find": func(t *rapid.T) {
				k, who := keys.Draw(t, "key"), rapid.IntRange(0, 2).Draw(t, "who")
				got, ok := m.find(k, func(_ *ageGroup[entry], e *entry) bool { return e.who == who })
				if want, there := find(k, who); got != want || ok != there {
					t.Fatalf("found %v, %v; want %v, %v", got, ok, want, there)
				}
			},
			"": func(t *rapid.T) {
				if m.len() != len(young)+len(old) {
					t.Fatalf("%d are remembered, want %d", m.len(), len(young)+len(old))
				}
			},
		})
	})
}

func TestPutsAndLeasesAreRememberedWhileThereIsRoomAndTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const room = 64
		f := newFixture(t, nil, &Options{memoryCount: room})
		var leases []sluice.Lease
		var refs []sluice.Ref
		cycle := func(n int) {
			for range n {
				f.put(1)
				l := f.acquire(alice, 1)
				f.settle(alice, sluice.Ack, l...)
				leases, refs = append(leases, l...), append(refs, l[0].Ref)
			}
		}
		check := func(known int) { // so many of the last ones
			t.Helper()
			for i, ref := range refs {
				st, err := f.q.Put(bg, sluice.PutRequest{Ref: ref})
				r := f.settle(alice, sluice.Fail, leases[i])[0]
				if i >= len(refs)-known {
					if st != sluice.WasSettled || err != nil || r.Status != sluice.AlreadySettled || r.As != sluice.Ack {
						t.Errorf("%d of %d: the put was answered %q, %v and the settlement %+v", i, len(refs), st, err, r)
					}
				} else if i < len(refs)-room || known == 0 {
					if !errors.Is(err, sluice.ErrNotFound) || r.Status != sluice.StaleLease {
						t.Errorf("%d of %d: the put was answered %q, %v and the settlement %+v", i, len(refs), st, err, r)
					}
				}
			}
		}
		for range 5 {
			cycle(room/2 + 3)
			check(room / 2)
		}
		time.Sleep(memory - time.Nanosecond)
		check(room / 2)
		time.Sleep(2 * time.Nanosecond)
		check(0)
	})
}

// A sample or a lease that is done with makes room for the next. Whoever still has its ref, or its id, must not meet that one.
func TestWhatIsDoneWithIsNotMistakenForTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, journal := range map[string]sluice.Journal{"in memory": nil, "with a journal": &memJournal{}} {
			f := newFixture(t, nil, &Options{Journal: journal})
			var last sluice.Lease
			for i := range 20 {
				f.put(1)
				l := f.acquire(alice, 1)[0]
				if want := fmt.Sprint("s", i); l.Ref.SampleID() != want || l.Redelivery != 0 {
					t.Errorf("%s: the lease is of %s, redelivery %d, want %s and 0", name, l.Ref.SampleID(), l.Redelivery, want)
				}
				if i > 0 {
					if r := f.settle(alice, sluice.FailPermanent, last)[0]; r.Status != sluice.AlreadySettled || r.As == sluice.FailPermanent {
						t.Errorf("%s: the settled lease of %s was answered %+v", name, last.Ref.SampleID(), r)
					}
				}
				if i%3 == 0 { // its next has been failed before
					f.settle(alice, sluice.Fail, l)
					l = f.acquire(alice, 1)[0]
				}
				f.settle(alice, sluice.Ack, l)
				if owner, there := f.store.Owner(l.Ref.SampleID()); there {
					t.Errorf("%s: %s is still claimed by %q", name, l.Ref.SampleID(), owner)
				}
				last = l
			}
			if s, err := f.q.Status(bg); err != nil || s.Acked != 20 || s.Failed != 7 || s.Dead != 0 || s.Pending != 0 || s.Outstanding != 0 || s.BytesAcked != 2000 {
				t.Errorf("%s: status %+v, %v", name, s, err)
			}
			f.q.Stop(bg)
		}
	})
}

// unclaimStore tells of every claim that is given up.
type unclaimStore struct {
	*queuetest.Store
	unclaimed func()
}

func (s *unclaimStore) Unclaim(ref sluice.Ref, owner string) error {
	err := s.Store.Unclaim(ref, owner)
	s.unclaimed()
	return err
}

func TestAPutBetweenTheStoreCallsOfAnAckDoesNotDisturbThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil, nil)
		f.q.Stop(bg)
		unclaims := 0
		store := &unclaimStore{f.store, func() {
			if unclaims++; unclaims <= 2 {
				f.put(1)
			}
		}}
		var err error
		if f.q, err = Open(bg, f.cfg, store, nil); err != nil {
			t.Fatal(err)
		}
		defer f.q.Stop(bg)
		f.put(2)
		f.settle(alice, sluice.Fail, f.acquire(alice, 2)...)
		leases := f.acquire(alice, 2)
		f.settle(alice, sluice.Ack, leases...)
		for _, l := range leases {
			if owner, there := f.store.Owner(l.Ref.SampleID()); there {
				t.Errorf("%s is still claimed by %q", l.Ref.SampleID(), owner)
			}
		}
		if got := ids(f.acquire(alice, 5)); unclaims != 2 || got != "s2 s3 " {
			t.Errorf("%d claims were given up, and then came %s", unclaims, got)
		}
	})
}

// The sieve may be wrong about what it never heard of, but seldom, however long it has been in use.
func TestTheSieveStaysSparse(t *testing.T) {
	const limit = 1 << 12
	var s goneSieve
	s.init(limit)
	keys := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		s.turn()
		var recent [limit / 2]uint64
		for i := range recent {
			recent[i] = keys.Uint64()
			s.add(recent[i])
		}
		for _, k := range recent {
			if !s.knows(k) {
				t.Fatal("does not know what was added last")
			}
		}
	}
	wrong := 0
	for range 10_000 {
		if s.knows(keys.Uint64()) {
			wrong++
		}
	}
	if wrong > 500 {
		t.Errorf("takes %d of 10,000 keys that it never heard of for known", wrong)
	}
}

func TestPutsOfOneKeyAreToldApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newFixture(t, nil, nil).q
		q.rememberPut(7, "a", "g", bygone{at: q.now})
		for _, put := range [][2]string{{"a", "g"}, {"a", "h"}, {"b", "g"}, {"ag", ""}, {"", "ag"}} {
			if _, ok := q.generation(7, put[0], put[1]); ok != (put == [2]string{"a", "g"}) {
				t.Errorf("%q is remembered: %v", put, ok)
			}
		}
	})
}

func TestAnUnknownVerdictInAJournalIsCorrupt(t *testing.T) {
	for _, record := range []string{
		`{"t":"end","lease":"00000000000000000000000000000000","seq":1,"consumer":"alice","incarnation":0,"as":"maybe","how":"ack","at":1}`,
		`{"t":"snap-settled","list":[{"lease":"00000000000000000000000000000000","consumer":"alice","incarnation":0,"as":"maybe","at":1}]}`,
	} {
		synctest.Test(t, func(t *testing.T) {
			j := &memJournal{}
			f := newFixture(t, nil, &Options{Journal: j})
			f.put(1)
			f.acquire(alice, 1)
			f.q.Stop(bg)
			j.records = append(j.records, sluice.Record{Data: []byte(record)})
			if q, err := Open(bg, f.cfg, f.store, &Options{Journal: j}); !errors.Is(err, sluice.ErrCorrupt) {
				t.Errorf("%s: opened with %v", record, err)
				if err == nil {
					q.Stop(bg)
				}
			}
		})
	}
}
