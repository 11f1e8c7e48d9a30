// Package journaltest is the conformance suite for sluice.Journal: what any journal must do so that a queue on it loses nothing, repeats nothing and
// changes no order.
package journaltest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-ml/sluice"
	"pgregory.net/rapid"
)

// Harness makes the journals under test.
type Harness struct {
	// New returns a place with an empty journal, which ends with the test.
	New func(t testing.TB) Place

	// MaxRecord is how many bytes of data a record may hold. 0: there is no limit, or none that a test should reach.
	MaxRecord int

	// Fences says that opening a journal keeps the writer before from appending.
	Fences bool
}

// Place is where one journal lies. It is used by one test, its functions by one goroutine at a time.
type Place struct {
	// Open opens the journal. What it holds is there; who opened it before is done with it, or is fenced.
	Open func(ctx context.Context) (sluice.Journal, error)

	// Kill ends the writer as the death of its process would: what was not durable is lost, and nothing more of it arrives.
	Kill func()

	// DieAt makes the writer die between two steps of its writing: step is how many are still taken. Nil if there are no steps between which
	// a death would matter.
	DieAt func(step int)
}

// bench is a journal under test.
type bench struct {
	testing.TB
	ctx   context.Context
	h     Harness
	place Place
	j     sluice.Journal
}

// Run runs the suite.
func Run(t *testing.T, h Harness) {
	claims := []struct {
		name  string
		check func(*bench)
	}{
		{"an empty journal replays nothing", empty},
		{"records come back whole and in order", order},
		{"what was acknowledged survives a kill", kill},
		{"only lazy records may be missing after a kill", lazy},
		{"lazy records are not waited for and ride along", lazyRides},
		{"opened again and again it only grows", grows},
		{"appends from many goroutines keep the order of each", concurrent},
		{"the caller may reuse its memory", reuse},
		{"a snapshot replaces what was appended", compact},
		{"a snapshot may be empty, and large", compactSizes},
		{"appends during a compaction come before or behind it", compactMeanwhile},
		{"a death anywhere in a compaction leaves the old records or the snapshot", compactDeath},
		{"a death in a large append leaves all of a record or nothing", appendDeath},
		{"an earlier writer is stale and nothing of it lands", fence},
		{"a closed journal refuses everything", closed},
		{"large records", large},
		{"an append or a compaction whose context is done changes nothing", cancelled},
		{"an error of the reader stops the replay and is returned", readerFails},
		{"a replay whose context is done stops", replayCancelled},
		{"whatever happens in whatever order", anything},
	}
	for _, c := range claims {
		t.Run(strings.ReplaceAll(c.name, " ", "_"), func(t *testing.T) {
			t.Parallel()
			b := newBench(t, h)
			c.check(b)
		})
	}
}

func newBench(t testing.TB, h Harness) *bench {
	b := &bench{TB: t, ctx: t.Context(), h: h, place: h.New(t)}
	b.open()
	return b
}

// open opens the journal and returns what it replays.
func (b *bench) open() []sluice.Record {
	b.Helper()
	j, err := b.place.Open(b.ctx)
	if err != nil {
		b.Fatalf("open: %v", err)
	}
	b.j = j
	var got []sluice.Record
	if err := j.Replay(b.ctx, func(r sluice.Record) error { got = append(got, r); return nil }); err != nil {
		b.Fatalf("replay: %v", err)
	}
	return got
}

// reopen closes the journal in good order and opens it.
func (b *bench) reopen() []sluice.Record {
	b.Helper()
	b.close()
	return b.open()
}

func (b *bench) close() {
	b.Helper()
	if err := b.j.Close(); err != nil {
		b.Fatalf("close: %v", err)
	}
}

func (b *bench) kill() []sluice.Record {
	b.Helper()
	b.place.Kill()
	return b.open()
}

func (b *bench) append(records ...sluice.Record) {
	b.Helper()
	if err := b.j.Append(b.ctx, records); err != nil {
		b.Fatalf("append: %v", err)
	}
}

func (b *bench) compact(records ...sluice.Record) {
	b.Helper()
	if err := b.j.Compact(b.ctx, records); err != nil {
		b.Fatalf("compact: %v", err)
	}
}

// is fails unless err is of the kind.
func (b *bench) is(what string, err, kind error) {
	b.Helper()
	if !errors.Is(err, kind) {
		b.Errorf("%s: got %v, want %v", what, err, kind)
	}
}

// whole fails unless got is want, but for lazy records of want.
func (b *bench) whole(got, want []sluice.Record) {
	b.Helper()
	if why := differs(got, want); why != "" {
		b.Fatal(why)
	}
}

// differs says how got is not what may be left of want.
func differs(got, want []sluice.Record) string {
	i := 0
	for n, w := range want {
		if i < len(got) && same(got[i], w) {
			i++
			continue
		}
		if !w.Lazy {
			next := "the end"
			if i < len(got) {
				next = show(got[i])
			}
			return fmt.Sprintf("record %d of %d, %s, is missing or out of order: in its place is %s (%d came back)", n, len(want), show(w), next, len(got))
		}
	}
	if i < len(got) {
		return fmt.Sprintf("%d records more than were appended, the first is %s", len(got)-i, show(got[i]))
	}
	return ""
}

func same(a, b sluice.Record) bool { return a.Lazy == b.Lazy && bytes.Equal(a.Data, b.Data) }

func show(r sluice.Record) string {
	lazy := ""
	if r.Lazy {
		lazy = "lazy "
	}
	if len(r.Data) > 40 {
		return fmt.Sprintf("%s%q... (%d bytes)", lazy, r.Data[:40], len(r.Data))
	}
	return fmt.Sprintf("%s%q", lazy, r.Data)
}

func record(format string, args ...any) sluice.Record {
	return sluice.Record{Data: fmt.Appendf(nil, format, args...)}
}

func lazyRecord(format string, args ...any) sluice.Record {
	r := record(format, args...)
	r.Lazy = true
	return r
}

// filler returns n bytes that differ from place to place and by seed.
func filler(seed, n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}).Read(b) // it never fails
	return b
}

func empty(b *bench) {
	for range 2 {
		if got := b.reopen(); len(got) > 0 {
			b.Fatalf("%d records in an empty journal", len(got))
		}
		b.append()
	}
}

func order(b *bench) {
	var want []sluice.Record
	for i := range 100 {
		batch := []sluice.Record{record("%d first", i), {}, {Data: filler(i, i*i)}, record(`{"t":"put\x00"}`)}
		want = append(want, batch...)
		b.append(batch...)
	}
	b.whole(b.reopen(), want)
}

func kill(b *bench) {
	var want []sluice.Record
	for i := range 50 {
		r := record("%d", i)
		b.append(r)
		want = append(want, r)
		if i%10 == 3 {
			b.whole(b.kill(), want)
		}
	}
}

func lazy(b *bench) {
	var want []sluice.Record
	for i := range 60 {
		batch := []sluice.Record{lazyRecord("%d lazy", i)}
		if i%3 == 0 {
			batch = append(batch, record("%d", i), lazyRecord("%d lazy too", i))
		}
		want = append(want, batch...)
		b.append(batch...)
		if i%20 == 19 {
			got := b.kill()
			b.whole(got, want)
			want = got
		}
	}
}

func lazyRides(b *bench) {
	b.append(lazyRecord("a"))
	b.append(lazyRecord("b"))
	b.append(record("c"))
	if got := b.kill(); len(got) != 3 {
		b.Errorf("%d of 3 records came back: the lazy ones stand before one that was acknowledged, and need not be lost", len(got))
	}
}

func grows(b *bench) {
	var want []sluice.Record
	for i := range 8 {
		r := record("opening %d", i)
		b.append(r)
		want = append(want, r)
		b.whole(b.reopen(), want)
	}
}

func concurrent(b *bench) {
	const writers, each = 16, 40
	var wg sync.WaitGroup
	errs := make(chan error, writers)
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				if err := b.j.Append(b.ctx, []sluice.Record{record("%d %d 0", w, i), record("%d %d 1", w, i)}); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		b.Fatal(err)
	}
	next := make([]int, writers)
	for _, r := range b.kill() {
		var w, i, k int
		if n, err := fmt.Sscanf(string(r.Data), "%d %d %d", &w, &i, &k); n != 3 || err != nil {
			b.Fatalf("a record that nobody appended: %s", show(r))
		}
		if i*2+k != next[w] {
			b.Fatalf("writer %d: record %d came where %d was due", w, i*2+k, next[w])
		}
		next[w]++
	}
	for w, n := range next {
		if n != 2*each {
			b.Errorf("writer %d: %d of %d records came back", w, n, 2*each)
		}
	}
}

func reuse(b *bench) {
	data := []byte("0123456789")
	var want []sluice.Record
	for i := range 20 {
		data[0] = byte('a' + i)
		want = append(want, sluice.Record{Data: bytes.Clone(data), Lazy: true})
		b.append(sluice.Record{Data: data, Lazy: true})
	}
	copy(data, "overwriten")
	last := record("last")
	b.append(last)
	b.whole(b.reopen(), append(want, last))
}

func compact(b *bench) {
	for round := range 4 {
		for i := range 20 {
			b.append(record("round %d, %d", round, i), lazyRecord("lazy"))
		}
		b.append(lazyRecord("waits while the snapshot comes"))
		snapshot := []sluice.Record{record("snapshot %d", round), record("and more")}
		b.compact(snapshot...)
		if round%2 == 0 {
			b.whole(b.kill(), snapshot)
		}
		behind := record("behind %d", round)
		b.append(behind)
		b.whole(b.kill(), append(snapshot, behind))
	}
}

func compactSizes(b *bench) {
	b.append(record("old"))
	b.compact()
	b.whole(b.kill(), nil)
	b.append(record("new"))
	var snapshot []sluice.Record
	for i := range 50 {
		snapshot = append(snapshot, sluice.Record{Data: filler(i, 100_000+i)})
	}
	b.compact(snapshot...)
	b.append(record("behind"))
	want := append(slices.Clone(snapshot), record("behind"))
	b.whole(b.kill(), want)
	b.compact(want...)
	b.whole(b.kill(), want)
}

func compactMeanwhile(b *bench) {
	const writers = 4
	var wg sync.WaitGroup
	done := make(chan struct{})
	var acked [writers]int // before the last compaction began
	var mu sync.Mutex
	var last [writers]int
	for w := range writers {
		wg.Go(func() {
			for i := 1; ; i++ {
				select {
				case <-done:
					return
				default:
				}
				if err := b.j.Append(b.ctx, []sluice.Record{record("%d %d", w, i)}); err != nil {
					b.Error(err)
					return
				}
				mu.Lock()
				last[w] = i
				mu.Unlock()
			}
		})
	}
	for round := range 10 {
		mu.Lock()
		acked = last
		mu.Unlock()
		if err := b.j.Compact(b.ctx, []sluice.Record{record("snapshot %d", round)}); err != nil {
			b.Error(err)
		}
	}
	close(done)
	wg.Wait()
	got := b.kill()
	if len(got) == 0 || string(got[0].Data) != "snapshot 9" {
		b.Fatal("the last snapshot does not stand first")
	}
	var next [writers]int
	for _, r := range got[1:] {
		var w, i int
		if n, err := fmt.Sscanf(string(r.Data), "%d %d", &w, &i); n != 2 || err != nil {
			b.Fatalf("%s stands behind the last snapshot", show(r))
		}
		if i <= acked[w] {
			b.Fatalf("record %d of writer %d was appended before the compaction and stands behind it", i, w)
		}
		if next[w] != 0 && i != next[w] {
			b.Fatalf("writer %d: record %d came where %d was due", w, i, next[w])
		}
		next[w] = i + 1
	}
	for w := range writers {
		if next[w] != 0 && next[w] != last[w]+1 {
			b.Errorf("writer %d: the last of the records behind the snapshot is %d, want %d", w, next[w]-1, last[w])
		}
	}
}

// deaths calls f with fresh journals that die one step later each time, until f says that it came through.
func (b *bench) deaths(f func(b *bench, step int) (through bool)) {
	if b.place.DieAt == nil {
		b.Skip("there are no steps to die between")
	}
	const most = 1000
	for step := range most {
		one := newBench(b.TB, b.h)
		one.place.DieAt(step)
		if f(one, step) {
			if step == 0 {
				b.Fatal("it never died: DieAt does nothing")
			}
			return
		}
	}
	b.Fatalf("it does not come through in %d steps", most)
}

func compactDeath(b *bench) {
	old := []sluice.Record{record("old 1"), record("old 2")}
	var snapshot []sluice.Record
	for i := range 15 {
		snapshot = append(snapshot, sluice.Record{Data: filler(i, 150_000)})
	}
	var olds, news int
	b.deaths(func(b *bench, step int) bool {
		b.place.DieAt(1 << 30)
		for _, r := range old {
			b.append(r)
		}
		b.place.DieAt(step)
		through := b.j.Compact(b.ctx, snapshot) == nil
		if !through {
			if err := b.j.Append(b.ctx, old); err == nil {
				b.Fatal("a journal that failed goes on")
			}
		}
		b.place.DieAt(1 << 30)
		got := b.kill()
		want := snapshot
		if !through && differs(got, old) == "" {
			want = old
			olds++
		} else {
			news++
		}
		b.whole(got, want)
		// And all goes on from there.
		behind := record("behind")
		b.append(behind)
		want = append(slices.Clone(want), behind)
		b.whole(b.kill(), want)
		b.compact(want...)
		b.append(behind)
		b.whole(b.kill(), append(want, behind))
		b.close()
		return through
	})
	if olds == 0 || news < 2 {
		b.Errorf("%d deaths left the old records and %d the snapshot: the steps do not cover the moment between", olds, news-1)
	}
}

func appendDeath(b *bench) {
	size := 3 << 20
	if b.h.MaxRecord > 0 {
		size = min(size, b.h.MaxRecord)
	}
	b.deaths(func(b *bench, step int) bool {
		b.place.DieAt(1 << 30)
		first, big := record("first"), sluice.Record{Data: filler(1, size)}
		b.append(first)
		b.place.DieAt(step)
		through := b.j.Append(b.ctx, []sluice.Record{big}) == nil
		b.place.DieAt(1 << 30)
		got := b.kill()
		want := []sluice.Record{first}
		if through || len(got) > 1 {
			want = append(want, big)
		}
		b.whole(got, want)
		b.append(first)
		b.whole(b.kill(), append(want, first))
		b.close()
		return through
	})
}

func fence(b *bench) {
	if !b.h.Fences {
		b.Skip("it does not fence")
	}
	b.append(record("first"))
	earlier := b.j
	b.whole(b.open(), []sluice.Record{record("first")})
	later := b.j
	want := []sluice.Record{record("first")}
	for i := range 3 {
		if i > 0 { // whether or not the later one has written meanwhile
			b.append(record("later"))
			want = append(want, record("later"))
		}
		b.is("append by the earlier writer", earlier.Append(b.ctx, []sluice.Record{record("stale")}), sluice.ErrStale)
		b.is("compaction by the earlier writer", earlier.Compact(b.ctx, []sluice.Record{record("stale")}), sluice.ErrStale)
	}
	_ = earlier.Close() // it may say once more that it is stale
	b.j = later
	b.append(record("later"))
	b.whole(b.kill(), append(want, record("later")))
	// The first that an earlier writer does may be a compaction, or an append that nobody waits for.
	earlier = b.j
	got := b.open()
	b.is("compaction by the earlier writer", earlier.Compact(b.ctx, nil), sluice.ErrStale)
	_ = earlier.Close()
	earlier = b.j
	b.whole(b.open(), got)
	_ = earlier.Append(b.ctx, []sluice.Record{lazyRecord("stale")})
	_ = earlier.Close()
	b.whole(b.kill(), got)
}

func closed(b *bench) {
	b.append(record("a"))
	b.close()
	b.close()
	b.is("append", b.j.Append(b.ctx, []sluice.Record{record("b")}), sluice.ErrClosed)
	b.is("lazy append", b.j.Append(b.ctx, []sluice.Record{lazyRecord("b")}), sluice.ErrClosed)
	b.is("compact", b.j.Compact(b.ctx, nil), sluice.ErrClosed)
	b.is("replay", b.j.Replay(b.ctx, func(sluice.Record) error { return nil }), sluice.ErrClosed)
	b.whole(b.open(), []sluice.Record{record("a")})
}

func large(b *bench) {
	var want []sluice.Record
	for i, n := range []int{1 << 10, 256 << 10, 512<<10 - 1, 512 << 10, 1<<20 - 1, 1 << 20, 3<<20 + 7} {
		if b.h.MaxRecord > 0 && n > b.h.MaxRecord {
			continue
		}
		batch := []sluice.Record{{Data: filler(i, n)}, record("between")}
		b.append(batch...)
		want = append(want, batch...)
	}
	if n := b.h.MaxRecord; n > 0 {
		b.is("append of a record over the limit", b.j.Append(b.ctx, []sluice.Record{record("before"), {Data: make([]byte, n+1)}}), sluice.ErrInvalid)
		b.is("snapshot with a record over the limit", b.j.Compact(b.ctx, []sluice.Record{{Data: make([]byte, n+1)}}), sluice.ErrInvalid)
		r := sluice.Record{Data: filler(9, n)}
		b.append(r)
		want = append(want, r)
	}
	b.whole(b.kill(), want)
}

func cancelled(b *bench) {
	ctx, cancel := context.WithCancel(b.ctx)
	cancel()
	err := b.j.Append(ctx, []sluice.Record{record("never")})
	b.is("append", err, context.Canceled)
	b.append(record("after"))
	b.is("compact", b.j.Compact(ctx, []sluice.Record{record("never")}), context.Canceled)
	b.whole(b.kill(), []sluice.Record{record("after")})
}

func readerFails(b *bench) {
	b.append(record("a"), record("b"), record("c"))
	b.close()
	j, err := b.place.Open(b.ctx)
	if err != nil {
		b.Fatal(err)
	}
	mine, n := errors.New("mine"), 0
	err = j.Replay(b.ctx, func(sluice.Record) error {
		n++
		if n == 2 {
			return mine
		}
		return nil
	})
	if !errors.Is(err, mine) || n != 2 {
		b.Errorf("got %v after %d records, want my error after 2", err, n)
	}
	if err := j.Close(); err != nil {
		b.Error(err)
	}
	b.whole(b.open(), []sluice.Record{record("a"), record("b"), record("c")})
}

func replayCancelled(b *bench) {
	for i := range 10 {
		b.append(record("%d", i))
	}
	b.close()
	j, err := b.place.Open(b.ctx)
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.ctx)
	cancel()
	err = j.Replay(ctx, func(sluice.Record) error { return nil })
	b.is("replay", err, context.Canceled)
	if err := j.Close(); err != nil {
		b.Error(err)
	}
}

// anything compares the journal with a plain list.
func anything(b *bench) {
	rapid.Check(b, func(t *rapid.T) {
		one := newBench(b.TB, b.h)
		defer one.place.Kill()
		var model []sluice.Record
		n := 0
		draw := func(label string, lazy bool) []sluice.Record {
			var list []sluice.Record
			for range rapid.IntRange(0, 4).Draw(t, label) {
				n++
				r := sluice.Record{Data: fmt.Appendf(nil, "%d %s", n, strings.Repeat("x", rapid.SampledFrom([]int{0, 0, 1, 1, 1000, 1000, 1000, 300_000, 700_000}).Draw(t, "size")))}
				r.Lazy = lazy && rapid.Bool().Draw(t, "lazy")
				list = append(list, r)
			}
			return list
		}
		check := func(got []sluice.Record) {
			if why := differs(got, model); why != "" {
				t.Fatal(why)
			}
			model = got
		}
		for range rapid.IntRange(1, 12).Draw(t, "steps") {
			switch rapid.IntRange(0, 9).Draw(t, "what") {
			case 0:
				check(one.reopen())
			case 1:
				check(one.kill())
			case 2, 3:
				model = draw("snapshot", false)
				one.compact(model...)
			default:
				records := draw("records", true)
				model = append(model, records...)
				one.append(records...)
			}
		}
		check(one.kill())
	})
}
