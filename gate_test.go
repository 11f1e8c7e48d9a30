package sluice

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// fakeRoom is a store reduced to its counters.
type fakeRoom struct {
	mu        sync.Mutex
	h         Health
	n         int
	err       error  // what Reserve fails with, if set
	onReserve func() // called inside Reserve, as a store calls OnFreed when it finds room on the way
}

func newRoom(c Caps) *fakeRoom {
	c, err := c.Resolve()
	if err != nil {
		panic(err)
	}
	return &fakeRoom{h: Health{Caps: c}}
}

func (r *fakeRoom) Health() Health {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.h
}

func (r *fakeRoom) Reserve(_ context.Context, bytes int64) (Reservation, error) {
	if f := r.onReserve; f != nil {
		f()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return Reservation{}, r.err
	}
	if !r.h.Fits(bytes) {
		return Reservation{}, &Error{Kind: Full, Op: "room: reserve"}
	}
	r.n++
	r.h.ReservedBytes += bytes
	r.h.ReservedSamples++
	return Reservation{ID: fmt.Sprint(r.n), Bytes: bytes}, nil
}

// publish turns a reservation into a resident sample; free ends that.
func (r *fakeRoom) publish(bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.h.ReservedBytes -= bytes
	r.h.ReservedSamples--
	r.h.ResidentBytes += bytes
	r.h.ResidentSamples++
}

func (r *fakeRoom) free(bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.h.ResidentBytes -= bytes
	r.h.ResidentSamples--
}

func (r *fakeRoom) fill(bytes int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.h.ResidentBytes += bytes
	r.h.ResidentSamples++
}

func (g *Gate) reserveAsync(ctx context.Context, bytes int64) chan error {
	ch := make(chan error, 1)
	go func() {
		_, err := g.Reserve(ctx, bytes)
		ch <- err
	}()
	synctest.Wait()
	return ch
}

func TestGateRefusesWhatCanNeverFit(t *testing.T) {
	g := NewGate(newRoom(Caps{MaxBytes: 100}), nil)
	_, err := g.Reserve(context.Background(), 101)
	if !errors.Is(err, ErrFull) || !strings.Contains(err.Error(), "a sample of 101 bytes") || !strings.Contains(err.Error(), "the cap of 100 bytes") {
		t.Errorf("101 bytes under a cap of 100: %v", err)
	}
	if _, err := g.Reserve(context.Background(), -1); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "-1 bytes, want 0 or more") {
		t.Errorf("-1 bytes: %v", err)
	}
	if _, err := g.Reserve(context.Background(), 100); err != nil {
		t.Errorf("the whole cap: %v", err)
	}
}

func TestGatePausesAtTheHighMarkAndResumesAtTheLow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRoom(Caps{MaxBytes: 100})
		var events []string
		g := NewGate(r, &GateOptions{
			OnPause:  func(h Health) { events = append(events, fmt.Sprint("pause ", h.UsedBytes())) },
			OnResume: func(h Health) { events = append(events, fmt.Sprint("resume ", h.UsedBytes())) },
		})
		ctx := context.Background()
		for range 8 {
			if _, err := g.Reserve(ctx, 10); err != nil {
				t.Fatal(err)
			}
			r.publish(10)
			if s := g.State(); s.Paused {
				break
			}
		}
		ch := g.reserveAsync(ctx, 10)
		for used := 80; used > 30; used -= 10 {
			if len(ch) > 0 {
				t.Fatalf("granted at %d", used)
			}
			r.free(10)
			g.Poke()
			synctest.Wait()
		}
		time.Sleep(time.Second)
		r.free(10)
		g.Poke()
		if err := <-ch; err != nil {
			t.Error(err)
		}
		if want := []string{"pause 80", "resume 20"}; !slices.Equal(events, want) {
			t.Errorf("events %v, want %v", events, want)
		}
		if s := g.State(); s.Paused || s.PausedFor != time.Second || s.Waiting != 0 {
			t.Errorf("state %+v", s)
		}
	})
}

func TestGateGrantsInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRoom(Caps{MaxBytes: 100, HighWatermarkBytes: 100, LowWatermarkBytes: 99})
		r.fill(60)
		g := NewGate(r, nil)
		big := g.reserveAsync(context.Background(), 50)
		small := g.reserveAsync(context.Background(), 10) // it would fit, but it came later
		if len(big)+len(small) > 0 {
			t.Fatal("the small one overtook the big one")
		}
		if s := g.State(); s.Waiting != 2 || s.HeadBytes != 50 {
			t.Errorf("state %+v", s)
		}
		r.free(60)
		g.Poke()
		if err := errors.Join(<-big, <-small); err != nil {
			t.Error(err)
		}
	})
}

func TestGateCancellationLosesNoGrantAndServesTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRoom(Caps{MaxBytes: 100, HighWatermarkBytes: 100, LowWatermarkBytes: 99})
		r.fill(60)
		g := NewGate(r, nil)
		cause := errors.New("enough")
		ctx, cancel := context.WithCancelCause(context.Background())
		big := g.reserveAsync(ctx, 50)
		small := g.reserveAsync(context.Background(), 10)
		cancel(cause)
		if err := <-big; !errors.Is(err, cause) {
			t.Errorf("the cancelled one got %v", err)
		}
		if err := <-small; err != nil {
			t.Errorf("the one behind got %v", err)
		}
		if h := r.Health(); h.ReservedBytes != 10 {
			t.Errorf("reserved %d, want 10", h.ReservedBytes)
		}
	})
	// Grant and cancellation at once: every call that says nil has room, and no room belongs to a call that failed.
	synctest.Test(t, func(t *testing.T) {
		for range 200 {
			r := newRoom(Caps{MaxBytes: 100, HighWatermarkBytes: 100, LowWatermarkBytes: 99})
			r.fill(100)
			g := NewGate(r, nil)
			ctx, cancel := context.WithCancel(context.Background())
			ch := g.reserveAsync(ctx, 10)
			r.free(100)
			go cancel()
			go g.Poke()
			err := <-ch
			synctest.Wait()
			if held := r.Health().ReservedSamples == 1; held != (err == nil) {
				t.Fatalf("err %v, reserved %v", err, held)
			}
		}
	})
}

func TestGateWaitOpenAndClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRoom(Caps{MaxSamples: 4})
		for range 3 {
			r.fill(1)
		}
		g := NewGate(r, nil)
		open := make(chan error, 9)
		wait := func() { go func() { open <- g.WaitOpen(context.Background()) }(); synctest.Wait() }
		wait()
		if len(open) > 0 {
			t.Fatal("open while paused")
		}
		g.SetStarving(true)
		if err := <-open; err != nil {
			t.Error(err)
		}
		g.SetStarving(false)
		wait()
		ch := g.reserveAsync(context.Background(), 1)
		g.Fail(&Error{Kind: Wedged})
		if err := <-open; !errors.Is(err, ErrWedged) {
			t.Errorf("wait open: %v", err)
		}
		if err := <-ch; !errors.Is(err, ErrWedged) {
			t.Errorf("reserve: %v", err)
		}
		wait()
		g.Close(nil)
		g.Close(errors.New("too late"))
		if err := <-open; !errors.Is(err, ErrClosed) {
			t.Errorf("wait open: %v", err)
		}
		if _, err := g.Reserve(context.Background(), 1); !errors.Is(err, ErrClosed) {
			t.Errorf("reserve: %v", err)
		}
		if err := g.WaitOpen(context.Background()); !errors.Is(err, ErrClosed) {
			t.Errorf("wait open: %v", err)
		}
	})
}

func TestGateTellsWhenTheMediumIsFull(t *testing.T) {
	r := newRoom(Caps{MaxBytes: 100})
	r.err = &Error{Kind: NoSpace, Detail: "the file system is full"}
	if _, err := NewGate(r, nil).Reserve(context.Background(), 1); !errors.Is(err, ErrNoSpace) {
		t.Errorf("got %v", err)
	}
}

func TestGateWaitsWhenAnotherProcessIsFaster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRoom(Caps{MaxBytes: 100})
		r.fill(10)
		r.err = &Error{Kind: Full} // the room that the health showed is gone
		g := NewGate(r, nil)
		ch := g.reserveAsync(context.Background(), 50)
		if len(ch) > 0 {
			t.Fatal(<-ch)
		}
		r.mu.Lock()
		r.err = nil
		r.mu.Unlock()
		g.Poke()
		if err := <-ch; err != nil {
			t.Error(err)
		}
	})
}

func TestGateCallbacksMayCallTheGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRoom(Caps{MaxBytes: 100})
		var g *Gate
		var events []string
		g = NewGate(r, &GateOptions{
			OnPause: func(Health) {
				events = append(events, "pause")
				r.free(80) // a callback that makes room
				g.Poke()
				g.State()
				g.SetStarving(true)
				g.SetStarving(false)
				events = append(events, "paused")
			},
			OnResume: func(Health) { events = append(events, "resume") },
		})
		r.fill(80)
		g.Poke()
		if want := []string{"pause", "paused", "resume"}; !slices.Equal(events, want) {
			t.Errorf("events %v, want %v", events, want)
		}
	})
	// One that panics does not silence those after it.
	r := newRoom(Caps{MaxBytes: 100})
	resumed := false
	g := NewGate(r, &GateOptions{OnPause: func(Health) { panic("boom") }, OnResume: func(Health) { resumed = true }})
	r.fill(80)
	func() {
		defer func() { recover() }()
		g.Poke()
	}()
	r.free(80)
	g.Poke()
	if !resumed {
		t.Error("the resume was not reported")
	}
}

// A store that finds room while it reserves says so from inside Reserve; the gate must neither deadlock nor forget it.
func TestGateMayBePokedFromInsideReserve(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRoom(Caps{MaxBytes: 100, HighWatermarkBytes: 100, LowWatermarkBytes: 99})
		r.fill(95)
		g := NewGate(r, nil)
		first, second := g.reserveAsync(context.Background(), 10), g.reserveAsync(context.Background(), 90)
		once := sync.OnceFunc(func() {
			r.free(85)
			g.Poke()
		})
		r.onReserve = once
		r.free(10)
		r.fill(5)
		g.Poke()
		if err := <-first; err != nil {
			t.Error(err)
		}
		r.publish(10)
		r.free(10)
		g.Poke()
		synctest.Wait()
		if err := <-second; err != nil {
			t.Error(err)
		}
	})
}

// Many callers at once, some of whom give up: the cap holds, every grant belongs to a call that said so, and nobody is left waiting when there is room.
func TestGateStorm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRoom(Caps{MaxBytes: 100, MaxSamples: 7})
		g := NewGate(r, nil)
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				for j := range 300 {
					n := int64((i*31+j*17)%100 + 1)
					ctx, cancel := context.WithCancel(context.Background())
					if j%5 == 0 {
						go cancel()
					}
					res, err := g.Reserve(ctx, n)
					cancel()
					switch {
					case err == nil && res.Bytes == n:
						if h := r.Health(); h.UsedBytes() > 100 || h.UsedSamples() > 7 {
							t.Errorf("over the caps: %+v", h)
						}
						r.publish(n)
						if err := g.WaitOpen(context.Background()); err != nil {
							t.Error(err)
						}
						r.free(n)
						g.Poke()
					case !errors.Is(err, context.Canceled):
						t.Errorf("%+v, %v", res, err)
					}
				}
			})
		}
		done := make(chan struct{})
		go func() { // the consumers: every now and then they starve, which is what lets a sample over the low mark through
			for {
				select {
				case <-done:
					return
				case <-time.After(time.Millisecond):
					g.SetStarving(true)
					g.SetStarving(false)
				}
			}
		}()
		wg.Wait()
		close(done)
		if h := r.Health(); h.UsedBytes() != 0 || h.UsedSamples() != 0 {
			t.Errorf("left: %+v", h)
		}
		if s := g.State(); s.Waiting != 0 || s.Paused {
			t.Errorf("state %+v", s)
		}
	})
}

// pair runs one producer and consumers that each keep hold samples until they get another, under the given caps and sizes, and reports whether all
// arrived. It is a simulation: the queue is a channel.
func pair(r *fakeRoom, sizes []int64, hold int, starving bool) bool {
	ok := false
	synctestRun(func() {
		g := NewGate(r, nil)
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		q := make(chan int64, len(sizes))
		go func() {
			defer close(q)
			for _, n := range sizes {
				if _, err := g.Reserve(ctx, n); err != nil {
					return
				}
				time.Sleep(time.Millisecond)
				r.publish(n)
				q <- n
			}
		}()
		var held []int64
		got := 0
		for {
			var n int64
			var more bool
			select {
			case n, more = <-q:
			default:
				if starving {
					g.SetStarving(true)
				}
				select {
				case n, more = <-q:
				case <-ctx.Done():
					return
				}
				if starving {
					g.SetStarving(false)
				}
			}
			if !more {
				ok = got == len(sizes)
				return
			}
			got++
			held = append(held, n)
			time.Sleep(time.Millisecond)
			for len(held) > hold {
				r.free(held[0])
				held = held[1:]
				g.Poke()
			}
		}
	})
	return ok
}

var synctestRun func(func())

func TestGateNeverWedgesWithTheStarvingRule(t *testing.T) {
	synctestRun = func(f func()) { synctest.Test(t, func(*testing.T) { f() }) }
	repeat := func(n int64) []int64 { return slices.Repeat([]int64{n}, 20) }
	// The contract's examples: each stops for ever without the rule.
	for _, c := range []struct {
		name  string
		caps  Caps
		sizes []int64
	}{
		{"steps of 40 % of the cap", Caps{MaxBytes: 100}, repeat(40)},
		{"steps of 48 % of the cap", Caps{MaxBytes: 100}, repeat(48)},
		{"a sample larger than the low mark", Caps{MaxBytes: 100, HighWatermarkBytes: 50, LowWatermarkBytes: 10}, repeat(50)},
		{"the sample cap", Caps{MaxSamples: 2}, repeat(1)},
	} {
		if !pair(newRoom(c.caps), c.sizes, 1, true) {
			t.Errorf("%s wedges", c.name)
		}
		if pair(newRoom(c.caps), c.sizes, 1, false) {
			t.Errorf("%s does not wedge without the starving rule: the example proves nothing", c.name)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		c := Caps{MaxBytes: int64(rapid.IntRange(10, 200).Draw(t, "cap"))}
		c.HighWatermarkBytes = int64(rapid.IntRange(1, int(c.MaxBytes)).Draw(t, "high"))
		c.LowWatermarkBytes = int64(rapid.IntRange(0, int(c.HighWatermarkBytes)-1).Draw(t, "low"))
		hold := rapid.IntRange(0, 3).Draw(t, "held")
		// What consumers hold by design, and one more, must fit: that is what RunConfig.Resolve sees to.
		most := int(c.MaxBytes) / (hold + 1)
		sizes := rapid.SliceOfN(rapid.Int64Range(1, int64(most)), 1, 30).Draw(t, "sizes")
		if rapid.Bool().Draw(t, "samples too") {
			c.MaxSamples = int64(hold + 1 + rapid.IntRange(0, 3).Draw(t, "more"))
		}
		if !pair(newRoom(c), sizes, hold, true) {
			t.Fatalf("wedged: %+v, hold %d, sizes %v", c, hold, sizes)
		}
	})
}

func TestAGateThatIsReopenedLetsPeopleWaitAgain(t *testing.T) {
	t.Parallel()
	r := newRoom(Caps{MaxBytes: 100})
	g := NewGate(r, nil)
	g.Close(nil)
	if _, err := g.Reserve(t.Context(), 10); !errors.Is(err, ErrClosed) {
		t.Fatalf("closed: %v", err)
	}
	g.Reopen()
	if _, err := g.Reserve(t.Context(), 10); err != nil {
		t.Errorf("reopened: %v", err)
	}
	g.Close(nil)
	if _, err := g.Reserve(t.Context(), 10); !errors.Is(err, ErrClosed) {
		t.Errorf("closed again: %v", err)
	}
}

func TestAGateGoesByMarksThatChanged(t *testing.T) {
	t.Parallel()
	r := newRoom(Caps{MaxBytes: 100, HighWatermarkBytes: 50, LowWatermarkBytes: 10})
	var events []string
	g := NewGate(r, &GateOptions{OnPause: func(Health) { events = append(events, "pause") }, OnResume: func(Health) { events = append(events, "resume") }})
	if _, err := g.Reserve(t.Context(), 60); err != nil {
		t.Fatal(err)
	}
	if !g.State().Paused {
		t.Fatal("60 bytes do not pause it at 50")
	}
	granted := make(chan error, 1)
	go func() {
		_, err := g.Reserve(t.Context(), 5)
		granted <- err
	}()
	for g.State().Waiting == 0 {
		time.Sleep(time.Millisecond)
	}
	r.mu.Lock()
	r.h.Caps.HighWatermarkBytes = 90
	r.mu.Unlock()
	g.Remeasure()
	if err := <-granted; err != nil || g.State().Paused {
		t.Errorf("whoever waited got %v; paused at 65 of 90: %v", err, g.State().Paused)
	}
	r.mu.Lock()
	r.h.Caps.HighWatermarkBytes = 20
	r.mu.Unlock()
	g.Remeasure()
	if !g.State().Paused || fmt.Sprint(events) != "[pause resume pause]" {
		t.Errorf("paused at 65 of 20: %v; reported %v", g.State().Paused, events)
	}
}
