//go:build linux

package dirstore

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

func mustInspect(t testing.TB, dir string) *Inspection {
	t.Helper()
	r, err := Inspect(t.Context(), dir, nil)
	if err != nil {
		t.Fatalf("Inspect: %v", err)
	}
	return r
}

// traces is all that a look at a directory could leave: names, inodes, sizes, three times, and the ledger's bytes.
func traces(t testing.TB, dir string) map[string]string {
	t.Helper()
	read := func(name string, flags int) *os.File {
		fd, err := openQuietly(unix.AT_FDCWD, name, flags)
		must(t, err)
		return os.NewFile(uintptr(fd), name)
	}
	ledger, folder := read(filepath.Join(dir, ledgerName), 0), read(dir, unix.O_DIRECTORY)
	defer ledger.Close()
	defer folder.Close()
	data, err := io.ReadAll(ledger)
	must(t, err)
	names, err := folder.Readdirnames(-1)
	must(t, err)
	all := map[string]string{"ledger": string(data)}
	for _, name := range append(names, ".") {
		var st unix.Stat_t
		must(t, unix.Lstat(filepath.Join(dir, name), &st))
		all["file "+name] = fmt.Sprint(st.Ino, st.Nlink, st.Mode, st.Size, st.Blocks, st.Atim, st.Mtim, st.Ctim)
	}
	return all
}

func TestInspectShowsAStoreAndLeavesNoTrace(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 10 << 20, MaxSamples: 100}})
	a, b, c := mustPut(t, s, "a", 1, 100_000), mustPut(t, s, "b", 2, 2000), mustPut(t, s, "c", 3, 3000)
	must(t, s.Claim(a, "queue-1"))
	must(t, s.Claim(b, "queue-1"))
	must(t, s.MarkDead(b, "queue-1", true))
	ts := mustGet(t, s, c)
	defer ts.Close()
	must(t, s.Abort(t.Context(), c))
	must(t, s.Abort(t.Context(), mustPut(t, s, "pooled", 4, 200_000)))
	_, err := s.Reserve(t.Context(), 4096)
	must(t, err)

	before := traces(t, dir)
	r := mustInspect(t, dir)
	if d := cmp.Diff(before, traces(t, dir)); d != "" {
		t.Errorf("the look left a trace:\n%.500s", d)
	}
	if r.Torn != "" || len(r.Findings) != 0 || len(r.Orphans) != 0 || len(r.Notes) != 0 {
		t.Errorf("of a store that is well: torn %q, findings %v, orphans %v, notes %v", r.Torn, r.Findings, r.Orphans, r.Notes)
	}
	if r.Health != s.Health() || r.URI != s.URI() || r.PoolFiles != 1 {
		t.Errorf("Health %+v, want %+v; URI %s, %d pool files", r.Health, s.Health(), r.URI, r.PoolFiles)
	}
	if len(r.Sessions) != 1 || !r.Sessions[0].Alive || r.Sessions[0].PID != os.Getpid() || r.Sessions[0].Samples != 2 || r.Sessions[0].Pins != 1 || r.Sessions[0].Reservations != 1 {
		t.Errorf("sessions %+v", r.Sessions)
	}
	if len(r.Reservations) != 1 || r.Reservations[0] != (InspectedReservation{Bytes: 4096}) {
		t.Errorf("reservations %+v", r.Reservations)
	}
	var got []string
	for _, s := range r.Samples {
		got = append(got, fmt.Sprint(s.SampleID, s.State, s.Bytes, s.Owner, s.Dead, s.Pins, s.Mappings, s.RunID, s.NumTokens, time.Since(s.Put) < time.Minute))
	}
	want := []string{fmt.Sprint("a", StatePublished, 100_000, "queue-1", false, 0, 0, "r", 1, true), fmt.Sprint("b", StatePublished, 2000, "queue-1", true, 0, 0, "r", 1, true), fmt.Sprint("c", StateReleased, 3000, "", false, 1, 1, "", 0, true)}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestInspectTellsDeadSessions(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}})
	v := startVictim(t, "holder", dir)
	v.await(t, "ready")
	if r := mustInspect(t, dir); len(r.Sessions) != 2 || !r.Sessions[1].Alive || len(r.Findings) != 0 {
		t.Errorf("while it lives: %+v, %v", r.Sessions, r.Findings)
	}
	v.kill()
	r := mustInspect(t, dir)
	if len(r.Sessions) != 2 || !r.Sessions[0].Alive || r.Sessions[1].Alive || r.Sessions[1].PID != v.cmd.Process.Pid || r.Sessions[1].Pins != 2 || len(r.Findings) != 0 {
		t.Errorf("after the kill: %+v, %v", r.Sessions, r.Findings)
	}
	_, err := s.GC(t.Context())
	must(t, err)
	if r := mustInspect(t, dir); len(r.Sessions) != 1 || len(r.Findings) != 0 {
		t.Errorf("after the GC: %+v, %v", r.Sessions, r.Findings)
	}
}

func TestInspectOfABusyStoreIsNeverWrong(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 40 << 20}, Verify: true})
	var drains sync.WaitGroup
	t.Cleanup(drains.Wait) // behind the victims' own clean-up, which ends them
	for range 2 {
		v := startVictim(t, "churn", dir)
		v.await(t, "ready")
		said := v.lines
		v.lines = bufio.NewReader(strings.NewReader(""))
		drains.Go(func() { _, _ = io.Copy(io.Discard, said) })
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { // in this process, before the race detector
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			ref, err := s.Put(t.Context(), sampleOf(fmt.Sprint("own-", n%3), byte(n), 1+rand.IntN(150_000)), sluice.Reservation{})
			if err != nil {
				t.Errorf("Put: %v", err)
				return
			}
			ts, err := s.Get(t.Context(), ref)
			if err != nil {
				t.Errorf("Get: %v", err)
				return
			}
			_, _ = ts.Release(t.Context()), s.Abort(t.Context(), ref)
		}
	})
	torn, samples := 0, 0
	looks := envInt("DIRSTORE_LOOKS", 25)
	for n := range looks {
		o := &InspectOptions{}
		if n%2 == 0 {
			o.Check = func(f *os.File, s *InspectedSample) []string { // every byte is that of the put
				data, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<20))
				if err != nil {
					return []string{err.Error()}
				}
				body := data[int64(len(data))-s.Bytes:]
				if seed := body[0]; !bytes.Equal(body, pattern(seed, len(body))) {
					return []string{"its bytes are not those of one put"}
				}
				return nil
			}
		}
		r, err := Inspect(t.Context(), dir, o)
		if err != nil {
			t.Errorf("look %d: %v", n, err)
			break
		}
		if r.Torn != "" {
			torn++
		}
		samples += len(r.Samples)
		if len(r.Findings) > 0 {
			t.Errorf("look %d: %v (torn: %q)", n, r.Findings, r.Torn)
			break
		}
	}
	close(stop)
	wg.Wait()
	t.Logf("%d looks, %d torn, %d samples a look", looks, torn, samples/looks)
	if torn > looks/2 {
		t.Errorf("%d of %d pictures were torn", torn, looks)
	}
}

func TestInspectFindsWhatDoesNotBelongTogether(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, s *Store, path func(string) string)
		kind   string // of the orphan
		wants  string // in the only finding; "" for none
	}{
		{"nothing", func(*testing.T, *Store, func(string) string) {}, "", ""},
		{"file gone", func(t *testing.T, _ *Store, path func(string) string) { must(t, os.Remove(path("a.safetensors"))) }, "", `{a has no file "a.safetensors": someone else deleted it}`},
		{"file cut", func(t *testing.T, _ *Store, path func(string) string) {
			must(t, os.Truncate(path("a.safetensors"), 99))
		}, "", `"a.safetensors" is 99 bytes, the store wrote`},
		{"file replaced", func(t *testing.T, _ *Store, path func(string) string) {
			must(t, os.WriteFile(path("x"), []byte("x"), 0o600))
			must(t, os.Rename(path("x"), path("a.safetensors")))
		}, "", `someone replaced it`},
		{"header damaged", func(t *testing.T, _ *Store, path func(string) string) { overwrite(t, path("a.safetensors"), 8, "!") }, "", `"a.safetensors" can't be read`},
		{"stray scratch", func(t *testing.T, _ *Store, path func(string) string) {
			must(t, os.WriteFile(path(".sluice-file-00000000000000ff"), nil, 0o600))
		}, KindScratch, `is a scratch file that no slot names`},
		{"ledger being made", func(t *testing.T, _ *Store, path func(string) string) {
			must(t, os.WriteFile(path(".sluice-new-00000000000000ff"), nil, 0o600))
		}, KindTemporary, ""},
		{"foreign", func(t *testing.T, _ *Store, path func(string) string) {
			must(t, os.WriteFile(path("no\x1btes.txt"), nil, 0o600))
		}, KindForeign, ""},
		{"unreadable", func(t *testing.T, _ *Store, path func(string) string) {
			must(t, os.WriteFile(path("z.safetensors"), []byte("garbage"), 0o600))
		}, KindUnreadable, `has no slot and is no readable sample`},
		{"sample without slot", func(t *testing.T, s *Store, path func(string) string) {
			must(t, os.Link(path("a.safetensors"), path("keep")))
			must(t, s.Abort(t.Context(), mustRef(t, s, "a")))
			must(t, os.Rename(path("keep"), path("a.safetensors")))
		}, KindSample, `is a sample of this store that has no slot`},
		{"totals", func(_ *testing.T, s *Store, _ func(string) string) { s.led.residentBytes.Add(5) }, "", `counts 1005 resident bytes, its slots give 1000`},
		{"pins", func(_ *testing.T, s *Store, _ func(string) string) { s.led.slot(0).pins++ }, "", `slot 0 ("a") counts 1 pins and 0 mappings, the pins give 0 and 0`},
		{"died in a change", func(_ *testing.T, s *Store, _ func(string) string) { s.led.dirty.Store(1) }, "", `a process died while it changed the ledger`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := shm(t)
			s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}})
			mustPut(t, s, "a", 1, 1000)
			c.damage(t, s, func(name string) string { return filepath.Join(dir, name) })
			before := traces(t, dir)
			r := mustInspect(t, dir)
			if d := cmp.Diff(before, traces(t, dir)); d != "" {
				t.Errorf("the look left a trace:\n%.500s", d)
			}
			switch text := fmt.Sprint(r.Findings); {
			case c.wants == "" && len(r.Findings) > 0:
				t.Errorf("findings %s", text)
			case c.wants != "" && (len(r.Findings) != 1 || !strings.Contains(text, c.wants)):
				t.Errorf("findings %s, want one with %s", text, c.wants)
			}
			if c.kind == "" && len(r.Orphans) > 0 || c.kind != "" && (len(r.Orphans) != 1 || r.Orphans[0].Kind != c.kind) {
				t.Errorf("orphans %+v, want kind %q", r.Orphans, c.kind)
			}
		})
	}
}

func mustRef(t testing.TB, s *Store, id string) sluice.Ref {
	t.Helper()
	ref, _, err := s.readRef(id)
	must(t, err)
	return ref
}

func overwrite(t testing.TB, path string, at int64, text string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteAt([]byte(text), at)
	must(t, err)
	must(t, f.Close())
}

func TestInspectDoesNotWaitForAProcessThatStoppedInAChange(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}})
	mustPut(t, s, "a", 1, 1000)
	must(t, s.do(func(l *ledger) error {
		l.residentBytes.Add(5) // halfway
		defer l.residentBytes.Add(-5)
		if r := mustInspect(t, dir); r.Torn == "" || len(r.Findings) != 0 || len(r.Samples) != 1 {
			t.Errorf("torn %q, findings %v", r.Torn, r.Findings)
		}
		return nil
	}))
}

func TestInspectSaysWhatIsNoStore(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, wants string
		kind        sluice.Kind
		damage      func(t *testing.T, dir, ledger string)
	}{
		{"no directory", "find the directory", sluice.NotFound, func(t *testing.T, dir, _ string) { must(t, os.RemoveAll(dir)) }},
		{"no ledger", "is no store: it has no file .sluice-ledger", sluice.NotFound, func(t *testing.T, _, ledger string) { must(t, os.Remove(ledger)) }},
		{"empty ledger", `begins with "", want "SLUICELG"`, sluice.Corrupt, func(t *testing.T, _, ledger string) { must(t, os.Truncate(ledger, 0)) }},
		{"garbage", `begins with "garbage!", want "SLUICELG"`, sluice.Corrupt, func(t *testing.T, _, ledger string) { overwrite(t, ledger, 0, "garbage!") }},
		{"cut in the header", "is 60 bytes, want at least", sluice.Corrupt, func(t *testing.T, _, ledger string) { must(t, os.Truncate(ledger, 60)) }},
		{"cut in the slots", "is 300000 bytes, want at least", sluice.Corrupt, func(t *testing.T, _, ledger string) { must(t, os.Truncate(ledger, 300_000)) }},
		{"other version", "has version 50", sluice.Corrupt, func(t *testing.T, _, ledger string) { overwrite(t, ledger, 8, "2") }},
		{"header damaged", "has the header checksum", sluice.Corrupt, func(t *testing.T, _, ledger string) { overwrite(t, ledger, 40, "x") }},
		{"too many segments", "bytes and claims 777 segments, want 407633920 bytes", sluice.Corrupt, func(t *testing.T, _, ledger string) { overwrite(t, ledger, int64(segmentsOffset), "\x09\x03") }},
		{"more segments than there can be", "claims 2048 segments, want 1 to 1024", sluice.Corrupt, func(t *testing.T, _, ledger string) { overwrite(t, ledger, int64(segmentsOffset), "\x00\x08") }},
		{"more slots than there can be", "claims 65535 slots and 0 pins in 1 segments, want at most 1024 and 2048", sluice.Corrupt, func(t *testing.T, _, ledger string) {
			overwrite(t, ledger, int64(unsafe.Offsetof(header{}.slotTop)), "\xff\xff")
		}},
		{"a link", "open the ledger", sluice.Denied, func(t *testing.T, _, ledger string) {
			must(t, os.Rename(ledger, ledger+"2"))
			must(t, os.Symlink(ledger+"2", ledger))
		}},
		{"a folder", "is no regular file", sluice.Corrupt, func(t *testing.T, _, ledger string) {
			must(t, os.Remove(ledger))
			must(t, os.Mkdir(ledger, 0o700))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := shm(t)
			s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}})
			must(t, s.Close())
			c.damage(t, dir, filepath.Join(dir, ledgerName))
			_, err := Inspect(t.Context(), dir, nil)
			if sluice.KindOf(err) != c.kind || !strings.Contains(err.Error(), c.wants) || !strings.Contains(err.Error(), dir) {
				t.Errorf("got %v (kind %s), want %s with %q", err, sluice.KindOf(err), c.kind, c.wants)
			}
		})
	}
}
