//go:build linux

package dirstore

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
)

// died is the panic that plays the death of a process at a point.
type died struct{ at int }

// TestDeathAtEveryPointOfEveryChangeIsRepaired lets a session die at the first, second, third ... point of each operation, until the operation gets through, and looks at what
// another session then finds.
func TestDeathAtEveryPointOfEveryChangeIsRepaired(t *testing.T) {
	t.Parallel()
	const n = 100_000 // large enough for the pool
	type scene struct {
		s   *Store
		ref sluice.Ref // a sample that is in the store
		ts  *sluice.Tensors
		r   sluice.Reservation
		y   *yard
		n   *Loan
	}
	ctx := t.Context()
	described := Incoming{SampleID: "new", RunID: "r", Algorithm: sluice.EAGLE3, NumTokens: 1, Attributes: map[string]string{"seed": "9"}}
	receive := func(sc *scene) error {
		_, err := sc.s.Receive(ctx, bytes.NewReader(stockFile(nil, sampleOf("new", 9, n).Features...)), -1, described, sc.r)
		return err
	}
	// stage writes a file that is moved if it has a ref, and copied otherwise.
	stage := func(sc *scene, meta func(sluice.Ref) map[string]string) {
		sample := sampleOf("new", 9, n)
		fields, err := sample.RefFields(sc.s.uri, "g")
		must(t, err)
		ref, err := sluice.NewRef(fields)
		must(t, err)
		sc.y.stage("f", padded(meta(ref), sample.Features...))
	}
	adopt := func(sc *scene) error {
		_, err := sc.s.Adopt(ctx, sc.y.root, "f", os.Geteuid(), described, sc.r)
		return err
	}
	lend := func(mapped bool) func(sc *scene) error {
		return func(sc *scene) (err error) {
			sc.n, err = sc.s.Lend(ctx, sc.ref, mapped)
			return err
		}
	}
	lent := func(mapped bool) func(t *testing.T, sc *scene) {
		return func(t *testing.T, sc *scene) {
			sc.ref = mustPut(t, sc.s, "mine", 6, n)
			must(t, lend(mapped)(sc))
		}
	}
	for _, tc := range []struct {
		name  string
		setup func(t *testing.T, sc *scene)
		op    func(sc *scene) error
	}{
		{"reserve", nil, func(sc *scene) error { _, err := sc.s.Reserve(ctx, 10); return err }},
		{"unreserve", func(t *testing.T, sc *scene) { sc.r, _ = sc.s.Reserve(ctx, 10) }, func(sc *scene) error { return sc.s.Unreserve(ctx, sc.r) }},
		{"put", nil, func(sc *scene) error {
			_, err := sc.s.Put(ctx, sampleOf("new", 9, n), sluice.Reservation{})
			return err
		}},
		{"put under a reservation", func(t *testing.T, sc *scene) { sc.r, _ = sc.s.Reserve(ctx, n/2) }, func(sc *scene) error {
			_, err := sc.s.Put(ctx, sampleOf("new", 9, n), sc.r)
			return err
		}},
		{"put into a recycled file", func(t *testing.T, sc *scene) {
			must(t, sc.s.Abort(ctx, mustPut(t, sc.s, "old", 5, n+3000)))
			if sc.s.Health().PoolBytes == 0 {
				t.Fatal("nothing is in the pool")
			}
		}, func(sc *scene) error {
			_, err := sc.s.Put(ctx, sampleOf("new", 9, n), sluice.Reservation{})
			return err
		}},
		{"receive", nil, receive},
		{"receive under a reservation", func(t *testing.T, sc *scene) { sc.r, _ = sc.s.Reserve(ctx, n/2) }, receive},
		{"receive into a recycled file", func(t *testing.T, sc *scene) {
			must(t, sc.s.Abort(ctx, mustPut(t, sc.s, "old", 5, n+3000)))
		}, receive},
		{"adopt by moving", func(t *testing.T, sc *scene) {
			stage(sc, func(ref sluice.Ref) map[string]string { return map[string]string{safetensors.RefKey: ref.Canonical()} })
		}, adopt},
		{"adopt by copying", func(t *testing.T, sc *scene) {
			stage(sc, func(sluice.Ref) map[string]string { return nil })
		}, adopt},
		{"lend", nil, lend(false)},
		{"release of a loan", lent(false), func(sc *scene) error { return sc.n.Release() }},
		{"release and close of a mapped loan", lent(true), func(sc *scene) error { return errors.Join(sc.n.Release(), sc.n.Close()) }},
		{"loss of a loan", lent(true), func(sc *scene) error { return sc.n.Lost() }},
		{"get", nil, func(sc *scene) error {
			ts, err := sc.s.Get(ctx, sc.ref)
			if err == nil {
				sc.ts = ts
			}
			return err
		}},
		{"release", func(t *testing.T, sc *scene) { sc.ts = mustGet(t, sc.s, sc.ref) }, func(sc *scene) error { return sc.s.Release(ctx, sc.ts.Handle) }},
		{"release of the last pin of what nobody claims", func(t *testing.T, sc *scene) {
			ref := mustPut(t, sc.s, "mine", 6, n)
			sc.ts = mustGet(t, sc.s, ref)
			must(t, sc.ts.Close())
		}, func(sc *scene) error { return sc.s.Release(ctx, sc.ts.Handle) }},
		{"release, then close", func(t *testing.T, sc *scene) {
			ref := mustPut(t, sc.s, "mine", 6, n)
			sc.ts = mustGet(t, sc.s, ref)
		}, func(sc *scene) error { return sc.ts.Release(ctx) }},
		{"abort of a small sample", func(t *testing.T, sc *scene) { sc.ref = mustPut(t, sc.s, "mine", 6, 100) }, func(sc *scene) error { return sc.s.Abort(ctx, sc.ref) }},
		{"abort of a mapped sample", func(t *testing.T, sc *scene) {
			sc.ref = mustPut(t, sc.s, "mine", 6, n)
			sc.ts = mustGet(t, sc.s, sc.ref)
		}, func(sc *scene) error { return errors.Join(sc.s.Abort(ctx, sc.ref), sc.ts.Release(ctx)) }},
		{"claim", func(t *testing.T, sc *scene) { sc.ref = mustPut(t, sc.s, "mine", 6, n) }, func(sc *scene) error { return sc.s.Claim(sc.ref, "other") }},
		{"claim, mark dead and unclaim", func(t *testing.T, sc *scene) { sc.ref = mustPut(t, sc.s, "mine", 6, n) }, func(sc *scene) error {
			return errors.Join(sc.s.Claim(sc.ref, "other"), sc.s.MarkDead(sc.ref, "other", true), sc.s.Unclaim(sc.ref, "other"))
		}},
		{"gc and close", func(t *testing.T, sc *scene) { _, _ = sc.s.Reserve(ctx, 10) }, func(sc *scene) error {
			_, err := sc.s.GC(ctx)
			return errors.Join(err, sc.s.Close())
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var points int
			for k := 0; ; k++ {
				dir := shm(t)
				clock := &handClock{}
				opts := &Options{Caps: sluice.Caps{MaxBytes: 4 << 20, MaxSamples: 10}, Clock: clock}
				observer := mustOpen(t, dir, opts)
				kept := mustPut(t, observer, "kept", 3, n)
				must(t, observer.Claim(kept, "queue"))
				sc := &scene{s: mustOpen(t, dir, opts), ref: kept}
				sc.y = newYard(t, dir, opts)
				must(t, sc.y.s.Close())
				if tc.setup != nil {
					tc.setup(t, sc)
				}
				count := 0
				sc.s.hooks.die = func() {
					if count++; count > k {
						panic(died{count})
					}
				}
				through := func() (through bool) {
					defer func() {
						switch p := recover().(type) {
						case nil:
						case died:
						default:
							panic(p)
						}
					}()
					if err := tc.op(sc); err != nil {
						t.Errorf("%v", err)
					}
					return true
				}()
				sc.s.crash()
				when := fmt.Sprintf("after a death at point %d", k)
				if _, err := observer.GC(ctx); err != nil {
					t.Fatalf("%s: GC: %v", when, err)
				}
				mustAudit(t, observer, when)
				if h := observer.Health(); h.ReservedSamples != 0 || h.StagingBytes != 0 {
					t.Fatalf("%s: %+v", when, h)
				}
				ts := mustGet(t, observer, kept)
				if !bytes.Equal(ts.Features[0].Data, pattern(3, n)) {
					t.Fatalf("%s: the claimed sample has other bytes", when)
				}
				must(t, ts.Release(ctx))
				// Whatever else is left is whole, and goes after a minute unless it is claimed.
				infos, err := observer.Samples(ctx)
				must(t, err)
				for _, i := range infos {
					ts := mustGet(t, observer, i.Ref)
					seed, _ := i.Ref.Attribute("seed")
					if want := pattern(map[string]byte{"3": 3, "5": 5, "6": 6, "9": 9}[seed], int(i.Ref.EstimatedBytes())); !bytes.Equal(ts.Features[0].Data, want) {
						t.Fatalf("%s: %s has other bytes", when, i.Ref)
					}
					if i.Owner == "" {
						must(t, observer.Claim(i.Ref, "queue")) // so that the release does not free it
					}
					must(t, ts.Release(ctx))
					switch i.Owner {
					case "other":
						must(t, observer.Unclaim(i.Ref, "other"))
					case "":
						must(t, observer.Unclaim(i.Ref, "queue"))
					}
				}
				clock.ahead += 2 * time.Minute
				if _, err := observer.GC(ctx); err != nil {
					t.Fatal(err)
				}
				mustAudit(t, observer, when+", a minute later")
				if h := observer.Health(); h.ResidentSamples != 1 || h.DeadSamples != 0 {
					t.Fatalf("%s: %+v, want the claimed sample alone", when, h)
				}
				if sc.ts != nil {
					_ = sc.ts.Close() // in truth the mapping ends with the process
				}
				if sc.n != nil {
					_ = sc.n.Close()
				}
				_ = sc.y.root.Close()
				must(t, observer.Close())
				if through {
					points = k
					break
				}
			}
			if points == 0 {
				t.Error("the operation passes no point")
			}
			t.Logf("%d points", points)
		})
	}
}

// TestDeathWhileADeathIsRepairedIsRepaired lets a second session die at each point of the GC that finds the first one dead.
func TestDeathWhileADeathIsRepairedIsRepaired(t *testing.T) {
	t.Parallel()
	const n = 100_000
	ctx := t.Context()
	dieAt := func(s *Store, k int, op func() error) (through bool) {
		count := 0
		s.hooks.die = func() {
			if count++; count > k {
				panic(died{count})
			}
		}
		defer func() {
			switch p := recover().(type) {
			case nil:
			case died:
			default:
				panic(p)
			}
			s.crash()
		}()
		if err := op(); err != nil {
			t.Error(err)
		}
		return true
	}
	rounds := 0
	for k, done := 0, false; !done; k++ {
		for j, cleared := 0, false; !cleared; j++ {
			dir := shm(t)
			clock := &handClock{}
			opts := &Options{Caps: sluice.Caps{MaxBytes: 4 << 20}, Clock: clock}
			third := mustOpen(t, dir, opts)
			kept := mustPut(t, third, "kept", 3, n)
			must(t, third.Claim(kept, "queue"))
			must(t, third.Abort(ctx, mustPut(t, third, "pooled", 5, n+500)))
			first, second := mustOpen(t, dir, opts), mustOpen(t, dir, opts)
			_, err := first.Reserve(ctx, 100)
			must(t, err)
			pinned := mustGet(t, first, mustPut(t, first, "pinned", 6, n))
			done = dieAt(first, k, func() error {
				ref, err := first.Put(ctx, sampleOf("new", 9, n), sluice.Reservation{})
				return errors.Join(err, first.Abort(ctx, ref))
			})
			cleared = dieAt(second, j, func() error { _, err := second.GC(ctx); return err })
			when := fmt.Sprintf("after deaths at points %d and %d", k, j)
			for range 2 {
				if _, err := third.GC(ctx); err != nil {
					t.Fatal(err)
				}
				mustAudit(t, third, when)
				clock.ahead += 2 * time.Minute
			}
			if h := third.Health(); h.UsedSamples() != 1 || h.UsedBytes() != n {
				t.Fatalf("%s: %+v", when, h)
			}
			must(t, mustGet(t, third, kept).Release(ctx))
			_ = pinned.Close()
			must(t, third.Close())
			rounds++
		}
	}
	t.Logf("%d pairs of points", rounds)
}
