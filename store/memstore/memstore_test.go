package memstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/store/storetest"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func harness(change func(*Options)) storetest.Harness {
	return storetest.Harness{
		Volatile: true,
		Open: func(t testing.TB, o storetest.Options) sluice.Store {
			opts := &Options{Caps: o.Caps, Clock: o.Clock}
			if change != nil {
				change(opts)
			}
			s, err := New(opts)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { s.Close() })
			return s
		},
	}
}

func TestConformance(t *testing.T) { storetest.Run(t, harness(nil)) }

func TestConformanceOnTheHeapAlone(t *testing.T) {
	storetest.Run(t, harness(func(o *Options) { o.noFile = true }))
}

func open(t testing.TB, o *Options) *Store {
	t.Helper()
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// sample has n bytes in two tensors, which follow from seed.
func sample(id string, n int64, seed byte) *sluice.Sample {
	s := &sluice.Sample{SampleID: id, RunID: "run", Algorithm: sluice.EAGLE3, SchemaVersion: 1, Features: []sluice.Feature{
		{Name: "a", Tensor: sluice.NewTensor(sluice.Int8, n/3)}, {Name: "b", Tensor: sluice.NewTensor(sluice.UInt8, n-n/3)}}}
	block := make([]byte, 5003)
	for i := range block {
		block[i] = seed + byte(i>>7) + byte(i)
	}
	for _, f := range s.Features {
		for data := f.Data; len(data) > 0; {
			data = data[copy(data, block):]
		}
	}
	return s
}

func put(t testing.TB, s *Store, sm *sluice.Sample) sluice.Ref {
	t.Helper()
	ref, err := s.Put(t.Context(), sm, sluice.Reservation{})
	if err != nil {
		t.Fatal(err)
	}
	return ref
}

func get(t testing.TB, s *Store, ref sluice.Ref) *sluice.Tensors {
	t.Helper()
	ts, err := s.Get(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	return ts
}

func same(ts *sluice.Tensors, sm *sluice.Sample) bool {
	for i := range sm.Features {
		if !bytes.Equal(ts.Features[i].Data, sm.Features[i].Data) {
			return false
		}
	}
	return true
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestNewRefusesCapsThatDoNotResolve(t *testing.T) {
	for _, o := range []*Options{nil, {}, {Caps: sluice.Caps{MaxBytes: -1}}, {Caps: sluice.Caps{MaxBytes: 10, HighWatermarkBytes: 11}}} {
		s, err := New(o)
		if s != nil || !errors.Is(err, sluice.ErrInvalid) || !strings.HasPrefix(err.Error(), "memstore: new: ") {
			t.Errorf("New(%+v) = %v, %v", o, s, err)
		}
	}
}

func TestReserveAndFreshMemoryAskWhatTheMachineHas(t *testing.T) {
	left := int64(1 << 20)
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: 1 << 40}, free: func() (int64, error) { return left, nil }})
	empty := s.Health()
	_, err := s.Reserve(t.Context(), 1<<20+1)
	if !errors.Is(err, sluice.ErrNoSpace) || !strings.Contains(err.Error(), "1048577") || !strings.Contains(err.Error(), "1048576") || !strings.Contains(err.Error(), memoryHint) {
		t.Errorf("Reserve: %v", err)
	}
	for _, n := range []int64{2 << 20, heapBelow - 1} { // a segment, and one for the heap
		left = n / 2
		s.machine.at = time.Time{}
		_, err = s.Put(t.Context(), sample("s", n, 1), sluice.Reservation{})
		if !errors.Is(err, sluice.ErrNoSpace) || !strings.Contains(err.Error(), `"s"`) {
			t.Errorf("Put: %v", err)
		}
		if h := s.Health(); h != empty {
			t.Errorf("Health after a refused Put is %+v", h)
		}
	}
	left = 16 << 20
	s.machine.at = time.Time{}
	r, err := s.Reserve(t.Context(), 10<<20)
	must(t, err)
	if _, err := s.Reserve(t.Context(), 10<<20); !errors.Is(err, sluice.ErrNoSpace) {
		t.Errorf("Reserve of what an earlier reservation needs: %v", err)
	}
	ref, err := s.Put(t.Context(), sample("s", 10<<20, 1), r)
	must(t, err)
	must(t, s.Abort(t.Context(), ref))
	left = 0
	s.machine.at = time.Time{}
	r, err = s.Reserve(t.Context(), 10<<20) // the pool has it
	must(t, err)
	_, err = s.Put(t.Context(), sample("s", 10<<20, 1), r)
	must(t, err)
}

func TestAMachineThatCannotBeReadIsNoLimit(t *testing.T) {
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: 1 << 30}, free: func() (int64, error) { return 0, errors.New("no /proc") }})
	_, err := s.Reserve(t.Context(), 1<<29)
	must(t, err)
	put(t, s, sample("s", 1<<20, 1))
}

func TestAStoreWithoutMemoryFilesLogsItOnceAndCopies(t *testing.T) {
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: 1 << 20}, noFile: true, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	sm := sample("s", 200_000, 3)
	if ts := get(t, s, put(t, s, sm)); !same(ts, sm) {
		t.Error("content differs")
	}
	if p := s.Health().PoolBytes; p != 0 {
		t.Errorf("pool has %d bytes", p)
	}
}

func TestGCGivesIdleMemoryBackAfterAMinute(t *testing.T) {
	clock := storetest.NewClock()
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}, Clock: clock})
	if s.arena == nil {
		t.Skip("no anonymous memory files")
	}
	must(t, s.Abort(t.Context(), put(t, s, sample("s", 1<<20, 1))))
	idle := s.Health().PoolBytes
	if idle < 1<<20 {
		t.Fatalf("the pool has %d bytes after a sample of 1 MiB", idle)
	}
	for _, c := range []struct {
		after time.Duration
		pool  int64
	}{{0, idle}, {59 * time.Second, idle}, {time.Second, 0}} {
		clock.Advance(c.after)
		if n, err := s.GC(t.Context()); n != 0 || err != nil {
			t.Errorf("GC = %d, %v", n, err)
		}
		if p := s.Health().PoolBytes; p != c.pool {
			t.Errorf("the pool has %d bytes, want %d", p, c.pool)
		}
	}
}

func TestSmallSamplesLieOnTheHeap(t *testing.T) {
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}})
	must(t, s.Abort(t.Context(), put(t, s, sample("s", heapBelow-1, 1))))
	if p := s.Health().PoolBytes; p != 0 {
		t.Errorf("the pool has %d bytes", p)
	}
}

func TestUnreserveDuringThePutThatUsesIt(t *testing.T) {
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: 64 << 20}})
	for _, c := range []struct {
		fail bool
		want sluice.Health
	}{{true, sluice.Health{}}, {false, sluice.Health{ResidentBytes: 20 << 20, ResidentSamples: 1}}} {
		r, err := s.Reserve(t.Context(), 30<<20)
		must(t, err)
		ctx := &stepContext{Context: t.Context()}
		ctx.at(2, func() error {
			if h := s.Health(); h.StagingBytes != 20<<20 || h.ReservedBytes != 30<<20 || h.ReservedSamples != 1 || h.ResidentSamples != 0 {
				t.Errorf("Health while a put is under way: %+v", h)
			}
			if l, err := s.Samples(t.Context()); len(l) != 0 || err != nil {
				t.Errorf("Samples while a put is under way: %v, %v", l, err)
			}
			must(t, s.Unreserve(t.Context(), r))
			if _, err := s.Put(t.Context(), sample("s", 1, 1), sluice.Reservation{}); !errors.Is(err, sluice.ErrDuplicate) {
				t.Errorf("Put of an id that is being put: %v", err)
			}
			if c.fail {
				return context.DeadlineExceeded
			}
			return nil
		})
		_, err = s.Put(ctx, sample("s", 20<<20, 1), r)
		if c.fail != errors.Is(err, context.DeadlineExceeded) || !c.fail && err != nil {
			t.Fatalf("Put: %v", err)
		}
		h := s.Health()
		c.want.Caps, c.want.PoolBytes = h.Caps, h.PoolBytes
		if h != c.want {
			t.Errorf("Health is %+v, want %+v", h, c.want)
		}
	}
}

// stepContext is a context whose nth question for its error calls a function: a way into the middle of a copy.
type stepContext struct {
	context.Context
	n, when int
	f       func() error
	err     error
}

func (c *stepContext) at(n int, f func() error) { c.when, c.f = n, f }

func (c *stepContext) Err() error {
	if c.n++; c.n == c.when {
		c.err = c.f()
	}
	return c.err
}

func (c *stepContext) Done() <-chan struct{} { return nil }

func (c *stepContext) Value(any) any { return nil }

func TestCloseDuringAPut(t *testing.T) {
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: 64 << 20}})
	r, err := s.Reserve(t.Context(), 1)
	must(t, err)
	ctx := &stepContext{Context: t.Context()}
	ctx.at(2, s.Close)
	if _, err := s.Put(ctx, sample("s", 20<<20, 1), r); !errors.Is(err, sluice.ErrClosed) {
		t.Errorf("Put: %v", err)
	}
	if h := s.Health(); h != (sluice.Health{Caps: h.Caps}) {
		t.Errorf("Health is %+v", h)
	}
}

func TestMemoryOfAPutThatFailedMidwayIsSafeToReuse(t *testing.T) {
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: 64 << 20}})
	ctx := &stepContext{Context: t.Context()}
	ctx.at(3, func() error { return context.Canceled })
	r, err := s.Reserve(t.Context(), 40<<20)
	must(t, err)
	if _, err := s.Put(ctx, sample("s", 40<<20, 1), r); !errors.Is(err, context.Canceled) {
		t.Fatalf("Put: %v", err)
	}
	for seed := range byte(3) {
		sm := sample("s", 40<<20, seed)
		ref, err := s.Put(t.Context(), sm, r) // the first finds its reservation as it was, which leaves no room for one without
		must(t, err)
		ts := get(t, s, ref)
		if !same(ts, sm) {
			t.Fatal("content differs")
		}
		must(t, ts.Release(t.Context()))
	}
}

func TestPutAndGetOfMixedSizesFromManyGoroutines(t *testing.T) {
	const limit = 24 << 20
	s := open(t, &Options{Caps: sluice.Caps{MaxBytes: limit}})
	rounds := 60
	if testing.Short() {
		rounds = 15
	}
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 1))
			for i := range rounds {
				sm := sample(fmt.Sprintf("s-%d", w), 1+rng.Int64N(3<<20), byte(rng.Int()))
				ref, err := s.Put(t.Context(), sm, sluice.Reservation{})
				if err != nil {
					t.Errorf("Put: %v", err)
					return
				}
				ts, err := s.Get(t.Context(), ref)
				if err != nil {
					t.Errorf("Get: %v", err)
					return
				}
				if i%2 == 0 { // only the memory is held
					if err := s.Release(t.Context(), ts.Handle); err != nil {
						t.Errorf("Release: %v", err)
					}
				}
				if !same(ts, sm) {
					t.Errorf("content of %s differs", ref)
				}
				if h := s.Health(); h.UsedBytes()+h.PoolBytes > limit+limit/4 {
					t.Errorf("used %d and pool %d, the cap is %d", h.UsedBytes(), h.PoolBytes, limit)
				}
				if err := ts.Release(t.Context()); err != nil {
					t.Errorf("Tensors.Release: %v", err)
				}
			}
		})
	}
	wg.Wait()
	if h := s.Health(); h.UsedBytes() != 0 || h.PoolBytes > limit {
		t.Errorf("Health is %+v", h)
	}
}

func TestListenersAreNeverCalledTwiceAtOnceAndMissNothing(t *testing.T) {
	var n notifier
	var mu sync.Mutex
	var seen, freed int
	inside := false
	stop := n.add(func() {
		mu.Lock()
		if inside {
			t.Error("two calls at once")
		}
		inside = true
		seen = freed
		again := freed%3 == 0 && freed < 1000
		if again {
			freed++
		}
		mu.Unlock()
		if again {
			n.notify() // from within
		}
		mu.Lock()
		inside = false
		mu.Unlock()
	})
	defer stop()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 100 {
				mu.Lock()
				freed++
				mu.Unlock()
				n.notify()
			}
		})
	}
	wg.Wait()
	if seen != freed {
		t.Errorf("the last call saw %d of %d frees", seen, freed)
	}
}
