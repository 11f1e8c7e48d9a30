//go:build linux

package dirstore

import (
	"bytes"
	"math/rand/v2"
	"os"
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
	for _, role := range []string{"put:staged", "put:created", "put:written", "put:named", "put:linked", "put:published", "receive"} {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			dir, clock := shm(t), &handClock{}
			s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}, Clock: clock})
			must(t, s.Abort(t.Context(), mustPut(t, s, "pooled", 1, victimSample))) // so that the victim writes into a recycled file
			v := startVictim(t, role, dir)
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
			if role == "put:published" {
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

// flow is a producer and a consumer, two processes over one store, and what a queue between them knows: which samples there are, and which are out.
type flow struct {
	*Store
	producer, consumer *victim
	produced, consumed chan string // what they say; closed when they have ended, and nil from then on
	waiting            []sluice.Ref
	out                map[string]sluice.Ref // the consumer has these
	put, used, again   int
}

func (x *flow) start(t *testing.T, role string) (*victim, chan string) {
	t.Helper()
	v := startVictim(t, role, x.dir)
	v.await(t, "ready")
	said := make(chan string)
	go func() { // ends with the process
		defer close(said)
		for {
			line, err := v.lines.ReadString('\n')
			if err != nil {
				return // the line was cut by the kill
			}
			said <- strings.TrimSpace(line)
		}
	}()
	return v, said
}

func (x *flow) startProducer(t *testing.T) { x.producer, x.produced = x.start(t, "producer") }
func (x *flow) startConsumer(t *testing.T) { x.consumer, x.consumed = x.start(t, "consumer") }

// deliver keeps up to four samples out at the consumer.
func (x *flow) deliver() {
	for x.consumed != nil && len(x.out) < 4 && len(x.waiting) > 0 {
		ref := x.waiting[0]
		x.waiting, x.out[ref.SampleID()] = x.waiting[1:], ref
		_, _ = x.consumer.in.Write([]byte("use " + ref.Canonical() + "\n")) // fails if it was just killed
	}
}

// run lets them go on until all is as it should be.
func (x *flow) run(t *testing.T, until func() bool) {
	t.Helper()
	stuck := time.After(time.Minute)
	for !until() {
		x.deliver()
		select {
		case line, ok := <-x.produced:
			if !ok {
				x.produced = nil
				x.producer.kill()
				continue
			}
			ref, err := sluice.ParseRef([]byte(line))
			must(t, err)
			must(t, x.Claim(ref, "queue"))
			x.waiting = append(x.waiting, ref)
			x.put++
		case line, ok := <-x.consumed:
			if !ok {
				x.consumed = nil
				x.consumer.kill()
				for id, ref := range x.out { // their leases end
					x.waiting = append(x.waiting, ref)
					delete(x.out, id)
					x.again++
				}
				continue
			}
			id, ok := strings.CutPrefix(line, "used ")
			ref, is := x.out[id]
			if !ok || !is {
				t.Fatalf("the consumer says %q, and has %v", line, x.out)
			}
			must(t, x.Unclaim(ref, "queue"))
			delete(x.out, id)
			x.used++
		case <-stuck:
			t.Fatalf("nothing moves: %+v, %d waiting, %d out", x.Health(), len(x.waiting), len(x.out))
		}
	}
}

// TestKillsOfAProducerAConsumerAndBothLoseNothing kills one or both of two processes that stream, at random instants, while the other goes on. Everything that a
// producer has told of is used, once more if a consumer died with it, and nothing else is left. DIRSTORE_KILLS sets the number of rounds.
func TestKillsOfAProducerAConsumerAndBothLoseNothing(t *testing.T) {
	t.Parallel()
	clock := &handClock{}
	x := &flow{Store: mustOpen(t, shm(t), &Options{Caps: sluice.Caps{MaxBytes: 10 * victimSample}, Clock: clock}), out: map[string]sluice.Ref{}}
	x.startProducer(t)
	x.startConsumer(t)
	kills := [3]int{} // of the producer, the consumer, both
	for round := range envInt("DIRSTORE_KILLS", 12) {
		who := round % 3
		kills[who]++
		time.AfterFunc(time.Duration(rand.IntN(20_000))*time.Microsecond, func() {
			if who != 1 {
				_ = x.producer.cmd.Process.Kill()
			}
			if who != 0 {
				_ = x.consumer.cmd.Process.Kill()
			}
		})
		x.run(t, func() bool { return (who == 1 || x.produced == nil) && (who == 0 || x.consumed == nil) })
		if (who == 1) != (x.produced != nil) || (who == 0) != (x.consumed != nil) {
			t.Fatal("one died by itself")
		}
		if _, err := x.GC(t.Context()); err != nil {
			t.Fatal(err)
		}
		mustAudit(t, x.Store, "after the kill")
		clock.ahead += 2 * time.Minute // so that GC takes what the dead have put and not told of
		if _, err := x.GC(t.Context()); err != nil {
			t.Fatal(err)
		}
		mustAudit(t, x.Store, "two minutes later")
		if who == 2 { // nobody is at work: what there is waits
			h, want := x.Health(), int64(0)
			for _, ref := range x.waiting {
				want += ref.EstimatedBytes()
			}
			if h.UsedBytes() != want || h.UsedSamples() != int64(len(x.waiting)) {
				t.Fatalf("round %d: %+v, want %d bytes of %d samples", round, h, want, len(x.waiting))
			}
		}
		if x.produced == nil {
			x.startProducer(t)
		}
		if x.consumed == nil {
			x.startConsumer(t)
		}
	}
	_ = x.producer.cmd.Process.Kill()
	x.run(t, func() bool { return x.produced == nil && len(x.waiting)+len(x.out) == 0 })
	_ = x.consumer.cmd.Process.Kill()
	x.run(t, func() bool { return x.consumed == nil })
	if x.used != x.put {
		t.Errorf("%d samples were put, %d were used", x.put, x.used)
	}
	clock.ahead += 2 * time.Minute
	wantResident(t, "after the last kill", x.Store, 0, 0)
	must(t, x.Close())
	names, err := os.ReadDir(x.dir)
	must(t, err)
	if len(names) != 1 || names[0].Name() != ledgerName {
		t.Errorf("%v are left", names)
	}
	t.Logf("killed: %d producers, %d consumers, %d of both at once; %d samples, %d of them delivered once more; none lost, none left", kills[0], kills[1], kills[2], x.put, x.again)
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
