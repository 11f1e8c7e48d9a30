//go:build linux

package dirstore

import (
	"bytes"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
)

func TestAKilledProcessLosesItsPinsAndReservationsOnly(t *testing.T) {
	t.Parallel()
	dir, clock := shm(t), &handClock{}
	s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}, Clock: clock})
	mine := mustPut(t, s, "mine", 3, victimSample)
	must(t, s.Claim(mine, "queue"))
	v := startVictim(t, "holder", dir)
	v.await(t, "ready")
	want := sluice.Health{ResidentBytes: 3 * victimSample, ResidentSamples: 3, ReservedBytes: 1000, ReservedSamples: 1, Caps: s.Caps()}
	if h := s.Health(); h != want {
		t.Fatalf("while it lives: %+v, want %+v", h, want)
	}
	must(t, s.Unclaim(mine, "queue")) // only the victim's pin is left
	if h := s.Health(); h != want {
		t.Fatalf("pinned by the other process: %+v, want %+v", h, want)
	}
	if n, err := s.GC(t.Context()); n != 0 || err != nil {
		t.Fatalf("GC of what a live process holds: %d, %v", n, err)
	}
	v.kill()
	if _, err := s.GC(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustAudit(t, s, "after the kill")
	want = sluice.Health{ResidentBytes: 2 * victimSample, ResidentSamples: 2, Caps: s.Caps()}
	if h := s.Health(); h != want {
		t.Fatalf("after the kill: %+v, want %+v", h, want)
	}
	clock.ahead = 61 * time.Second
	if n, err := s.GC(t.Context()); n != 1 || err != nil {
		t.Fatalf("GC a minute later: %d, %v, want the unclaimed sample", n, err)
	}
	infos, err := s.Samples(t.Context())
	if err != nil || len(infos) != 1 || infos[0].Ref.SampleID() != "claimed" || infos[0].Pins != 0 || infos[0].Owner != "queue" {
		t.Fatalf("what stays is %+v, %v", infos, err)
	}
	mustAudit(t, s, "a minute later")
}

func TestAKillInTheMiddleOfAPutLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, point := range []string{"staged", "created", "written", "named", "linked", "published"} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			dir, clock := shm(t), &handClock{}
			s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}, Clock: clock})
			must(t, s.Abort(t.Context(), mustPut(t, s, "pooled", 1, victimSample))) // so that the victim writes into a recycled file
			v := startVictim(t, "put:"+point, dir)
			v.await(t, "ready")
			_, err := s.Put(t.Context(), sampleOf("victim", 1, 10), sluice.Reservation{})
			if sluice.KindOf(err) != sluice.Duplicate {
				t.Errorf("Put of an id that is being written: %v", err)
			}
			v.kill()
			if _, err := s.GC(t.Context()); err != nil {
				t.Fatal(err)
			}
			mustAudit(t, s, "after the kill")
			if point == "published" {
				clock.ahead = time.Hour
				if _, err := s.GC(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			if h := s.Health(); h.UsedBytes() != 0 || h.UsedSamples() != 0 || h.StagingBytes != 0 {
				t.Errorf("after the kill: %+v", h)
			}
			ref := mustPut(t, s, "victim", 4, 10)
			ts := mustGet(t, s, ref)
			if !bytes.Equal(ts.Features[0].Data, pattern(4, 10)) {
				t.Error("the next put of the id has other bytes")
			}
			must(t, ts.Release(t.Context()))
		})
	}
}

func TestAnIDThatADeadPutHeldIsFree(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	a, b := mustOpen(t, dir, someCaps), mustOpen(t, dir, someCaps)
	a.hooks.at = func(point string) {
		if point == "written" {
			panic(died{})
		}
	}
	func() {
		defer func() {
			if _, ok := recover().(died); !ok {
				t.Error("the put went on")
			}
		}()
		_, _ = a.Put(t.Context(), sampleOf("s", 1, 70_000), sluice.Reservation{})
	}()
	_, err := b.Put(t.Context(), sampleOf("s", 2, 70_000), sluice.Reservation{})
	wantError(t, "Put of an id that a live session puts", err, sluice.Duplicate, `"s"`)
	a.crash()
	mustPut(t, b, "s", 2, 70_000)
	if h := b.Health(); h.ResidentSamples != 1 || h.ReservedSamples != 0 {
		t.Errorf("health is %+v", h)
	}
	mustAudit(t, b, "at the end")
}

func TestAFullStoreEndsDeadSessionsBeforeItRefuses(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 2*victimSample + 1000}})
	v := startVictim(t, "holder", dir)
	v.await(t, "ready")
	if _, err := s.Reserve(t.Context(), 1000); sluice.KindOf(err) != sluice.Full {
		t.Fatalf("Reserve beside a live reservation: %v", err)
	}
	v.kill()
	if _, err := s.Reserve(t.Context(), 1000); err != nil {
		t.Fatalf("Reserve beside a dead one: %v", err)
	}
}

func TestOnFreedTellsOfADeath(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}})
	v := startVictim(t, "holder", dir)
	v.await(t, "ready")
	freed := make(chan struct{}, 100)
	stop := s.OnFreed(func() { freed <- struct{}{} })
	defer stop()
	v.kill()
	select {
	case <-freed:
	case <-time.After(30 * time.Second):
		t.Fatal("nobody told")
	}
}

// TestKillsAtRandom kills processes that do everything at once, and audits what they leave. DIRSTORE_KILLS sets how many.
func TestKillsAtRandom(t *testing.T) {
	t.Parallel()
	rounds := envInt("DIRSTORE_KILLS", 12)
	dir, clock := shm(t), &handClock{}
	s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 64 << 20, MaxSamples: 1000}, Clock: clock})
	for round := range rounds {
		var victims []*victim
		for range 3 {
			v := startVictim(t, "churn", dir)
			v.await(t, "ready")
			victims = append(victims, v)
		}
		ref := mustPut(t, s, "sync-"+strconv.Itoa(round), 1, 100) // a few changes between theirs
		must(t, s.Abort(t.Context(), ref))
		claimed := map[string]sluice.Ref{}
		for _, v := range victims {
			for range rand.IntN(200) {
				line, err := v.lines.ReadString('\n')
				if err != nil {
					t.Fatal("a victim died by itself")
				}
				note(t, claimed, line)
			}
		}
		for _, v := range victims {
			for line := range strings.Lines(v.kill()) {
				note(t, claimed, line)
			}
		}
		if _, err := s.GC(t.Context()); err != nil {
			t.Fatal(err)
		}
		mustAudit(t, s, "after the kills")
		if h := s.Health(); h.ReservedSamples != 0 {
			t.Fatalf("round %d: %+v", round, h)
		}
		for _, ref := range claimed {
			ts := mustGet(t, s, ref)
			seed, _ := ref.Attribute("seed")
			n, _ := strconv.Atoi(seed)
			if !bytes.Equal(ts.Features[0].Data, pattern(byte(n), int(ref.EstimatedBytes()))) {
				t.Fatalf("round %d: %s has other bytes", round, ref)
			}
			must(t, ts.Release(t.Context()))
		}
		infos, err := s.Samples(t.Context())
		must(t, err)
		for _, i := range infos {
			if i.Pins != 0 {
				t.Fatalf("round %d: %s has %d pins of the dead", round, i.Ref, i.Pins)
			}
			must(t, s.Unclaim(i.Ref, i.Owner))
		}
		clock.ahead += 2 * time.Minute
		if _, err := s.GC(t.Context()); err != nil {
			t.Fatal(err)
		}
		if h := s.Health(); h.UsedBytes() != 0 || h.UsedSamples() != 0 {
			t.Fatalf("round %d: when all is freed: %+v", round, h)
		}
		mustAudit(t, s, "when all is freed")
	}
}

func note(t *testing.T, claimed map[string]sluice.Ref, line string) {
	t.Helper()
	if !strings.HasSuffix(line, "\n") {
		return // cut by the kill
	}
	line = strings.TrimSuffix(line, "\n")
	switch {
	case strings.HasPrefix(line, "+"):
		ref, err := sluice.ParseRef([]byte(line[1:]))
		must(t, err)
		claimed[ref.SampleID()] = ref
	case strings.HasPrefix(line, "-"):
		delete(claimed, line[1:])
	}
}
