//go:build linux

package dirstore

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
)

var someCaps = &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}}

func wantError(t testing.TB, what string, err error, kind sluice.Kind, fragments ...string) {
	t.Helper()
	if sluice.KindOf(err) != kind {
		t.Fatalf("%s: %v (%q), want kind %q", what, err, sluice.KindOf(err), kind)
	}
	for _, f := range fragments {
		if !strings.Contains(err.Error(), f) {
			t.Errorf("%s: %q does not mention %q", what, err, f)
		}
	}
}

func TestOpenMakesAPrivateDirectoryAndPrivateFiles(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	s := mustOpen(t, dir, someCaps)
	if want := "file://" + dir; s.URI() != want {
		t.Errorf("the URI is %q, want %q", s.URI(), want)
	}
	mustPut(t, s, "a", 1, 100)
	for path, want := range map[string]os.FileMode{dir: 0o700 | os.ModeDir, dir + "/a.safetensors": 0o600, dir + "/" + ledgerName: 0o600} {
		info, err := os.Stat(path)
		must(t, err)
		if info.Mode() != want {
			t.Errorf("%s has mode %v, want %v", path, info.Mode(), want)
		}
	}
	f, err := os.Open(dir + "/a.safetensors")
	must(t, err)
	defer f.Close()
	m, err := safetensors.Map(f, -1) // anybody's reader
	must(t, err)
	defer m.Close()
	if x, err := m.Feature("x"); err != nil || !bytes.Equal(x.Data, pattern(1, 100)) {
		t.Errorf("the file has %v, %v", x, err)
	}
}

func TestOpenRefusesDirectoriesThatOthersReach(t *testing.T) {
	t.Parallel()
	base := filepath.Dir(shm(t))
	for _, mode := range []os.FileMode{0o755, 0o770, 0o1777, 0o701, 0o500} {
		dir := filepath.Join(base, "m")
		must(t, os.Mkdir(dir, 0o700))
		must(t, os.Chmod(dir, mode|mode&0o1000))
		_, err := Open(dir, someCaps)
		wantError(t, mode.String(), err, sluice.Denied, dir, "want 0700", "chmod 700")
		must(t, os.Remove(dir))
	}
	real, link, file := filepath.Join(base, "real"), filepath.Join(base, "link"), filepath.Join(base, "file")
	must(t, os.Mkdir(real, 0o700))
	must(t, os.Symlink(real, link))
	_, err := Open(link, someCaps)
	wantError(t, "a symbolic link", err, sluice.Denied, link, "symbolic link")
	must(t, os.WriteFile(file, nil, 0o600))
	_, err = Open(file, someCaps)
	wantError(t, "a file", err, sluice.Invalid, file)
	_, err = Open(filepath.Join(base, "no", "parent"), someCaps)
	wantError(t, "a missing parent", err, sluice.NotFound)
	_, err = Open("", someCaps)
	wantError(t, "no path", err, sluice.Invalid)
}

func TestOpenRefusesADirectoryOfAnotherUser(t *testing.T) {
	t.Parallel()
	dir, owner := "/", 0
	if os.Geteuid() == 0 {
		dir, owner = shm(t), 65534
		must(t, os.Mkdir(dir, 0o700))
		must(t, os.Chown(dir, owner, owner))
	}
	_, err := Open(dir, someCaps)
	wantError(t, "Open", err, sluice.Denied, fmt.Sprintf("dirstore: open %q: belongs to user %d, want our own, %d", dir, owner, os.Geteuid()), "choose a directory of your own")
	if dir != "/" {
		names, err := os.ReadDir(dir)
		if err != nil || len(names) != 0 {
			t.Errorf("it left %v in it, %v", names, err)
		}
	}
}

func TestALinkedParentGivesTheSameStore(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	s := mustOpen(t, dir, someCaps)
	link := filepath.Dir(dir) + "-link"
	must(t, os.Symlink(filepath.Dir(dir), link))
	t.Cleanup(func() { _ = os.Remove(link) })
	if p := mustOpen(t, filepath.Join(link, "store"), nil); p.URI() != s.URI() {
		t.Errorf("URIs %q and %q", p.URI(), s.URI())
	}
}

func TestOpenRefusesNetworkFileSystems(t *testing.T) {
	t.Parallel()
	for fs, name := range map[int64]string{unix.NFS_SUPER_MAGIC: "nfs", unix.SMB2_SUPER_MAGIC: "smb2", 0x0bd00bd0: "lustre", unix.FUSE_SUPER_MAGIC: "fuse"} {
		_, err := open(shm(t), someCaps, hooks{fsType: fs})
		wantError(t, name, err, sluice.Unsupported, name, "service")
	}
}

func TestAnUnknownFileSystemIsReadAndNotMappedAndThatIsLoggedOnce(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	s, err := open(shm(t), &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}, Logger: slog.New(slog.NewTextHandler(&log, nil))}, hooks{fsType: 0xf2f52010})
	must(t, err)
	defer s.Close()
	ref := mustPut(t, s, "a", 1, 5000)
	must(t, s.Claim(ref, "queue"))
	for range 3 {
		ts := mustGet(t, s, ref)
		if !bytes.Equal(ts.Features[0].Data, pattern(1, 5000)) {
			t.Error("other bytes")
		}
		must(t, ts.Release(t.Context()))
	}
	if n := strings.Count(log.String(), "read instead of mapped"); n != 1 {
		t.Errorf("logged %d times: %s", n, log.String())
	}
	mustAudit(t, s, "at the end")
}

func TestOpenRefusesCapsThatTheMediumCanNeverHold(t *testing.T) {
	t.Parallel()
	_, err := open(shm(t), &Options{Caps: sluice.Caps{MaxBytes: 1 << 30}}, hooks{fsTotal: 64 << 20})
	wantError(t, "a 64 MB /dev/shm", err, sluice.NoSpace, "1073741824", "67108864", "--shm-size", "--ipc=host")
}

func TestOpenRefusesCapsThatContradictThemselvesAndLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		caps sluice.Caps
		want string
	}{
		{sluice.Caps{}, "neither max_bytes nor max_samples is set"},
		{sluice.Caps{MaxBytes: 10, HighWatermarkBytes: 11}, `"high_watermark_bytes": is 11, want 1 to max_bytes (10)`},
		{sluice.Caps{MaxSamples: maxSlots}, "max_samples is"},
	} {
		dir := shm(t)
		_, err := Open(dir, &Options{Caps: tc.caps})
		wantError(t, "Open", err, sluice.Invalid, "dirstore: open", dir, tc.want)
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("Open, refused for %s, left the directory: %v", tc.want, err)
		}
	}
	for what, h := range map[string]hooks{"a network file system": {fsType: unix.NFS_SUPER_MAGIC}, "a small file system": {fsTotal: 1 << 20}} {
		dir := shm(t)
		if _, err := open(dir, someCaps, h); err == nil {
			t.Errorf("%s is taken", what)
		}
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("Open, refused for %s, left the directory: %v", what, err)
		}
	}
	mine := shm(t)
	must(t, os.Mkdir(mine, 0o700))
	_, err := Open(mine, nil)
	wantError(t, "Open of an empty directory without caps", err, sluice.Invalid, "neither max_bytes nor max_samples is set")
	if left, err := os.ReadDir(mine); err != nil || len(left) != 0 {
		t.Errorf("a refused Open left %v in a directory that was there, %v", left, err)
	}
}

func TestRunningOutOfRoomSurfacesAtReservation(t *testing.T) {
	t.Parallel()
	free := int64(50_000)
	s, err := open(shm(t), someCaps, hooks{room: func() int64 { return free }})
	must(t, err)
	defer s.Close()
	_, err = s.Reserve(t.Context(), 60_000)
	wantError(t, "Reserve", err, sluice.NoSpace, "60000", "50000", "--shm-size")
	r, err := s.Reserve(t.Context(), 40_000)
	must(t, err)
	_, err = s.Reserve(t.Context(), 20_000)
	wantError(t, "Reserve beside a reservation", err, sluice.NoSpace, "20000", "40000", "50000")
	_, err = s.Put(t.Context(), sampleOf("a", 1, 20_000), sluice.Reservation{})
	wantError(t, "Put beside a reservation", err, sluice.NoSpace, `"a"`)
	_, err = s.Put(t.Context(), sampleOf("a", 1, 40_000), r)
	must(t, err)
	mustAudit(t, s, "at the end")
}

func TestSessionsAgreeOnCaps(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	_, err := Open(dir, nil)
	wantError(t, "a new store without caps", err, sluice.Invalid)
	a := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 1000, MaxSamples: 5}})
	if b := mustOpen(t, dir, nil); b.Caps() != a.Caps() {
		t.Errorf("the second has %+v, the first %+v", b.Caps(), a.Caps())
	} else {
		defer b.Close()
	}
	mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 1000, MaxSamples: 5}}).Close()
	_, err = Open(dir, &Options{Caps: sluice.Caps{MaxBytes: 2000, MaxSamples: 5}})
	wantError(t, "other caps", err, sluice.Conflict, "2000", "1000")
	must(t, a.Close())
}

func TestALoneSessionMayChangeTheCaps(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	must(t, mustOpen(t, dir, someCaps).Close())
	if s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 5 << 20}}); s.Caps().MaxBytes != 5<<20 {
		t.Errorf("%+v", s.Caps())
	}
}

func TestAGarbageLedgerIsRefused(t *testing.T) {
	t.Parallel()
	good := shm(t)
	s := mustOpen(t, good, someCaps)
	ref := mustPut(t, s, "a", 1, 100)
	must(t, s.Close())
	data, err := os.ReadFile(filepath.Join(good, ledgerName))
	must(t, err)
	for name, tc := range map[string]struct {
		damage func(b []byte) []byte
		say    string
	}{
		"empty":           {func([]byte) []byte { return nil }, "is 0 bytes"},
		"short":           {func(b []byte) []byte { return b[:5000] }, "5000"},
		"magic":           {func(b []byte) []byte { b[0] = 'X'; return b }, "no ledger"},
		"version":         {func(b []byte) []byte { b[8] = 9; return b }, "version 9"},
		"sizes":           {func(b []byte) []byte { b[16]++; return b }, "checksum"},
		"segments":        {func(b []byte) []byte { return b[:len(b)-4096] }, "bytes"},
		"random":          {func(b []byte) []byte { copy(b, pattern(3, len(b))); return b }, "no ledger"},
		"too many claims": {func(b []byte) []byte { b[segmentsOffset] = 200; return b }, "200 segments"},
	} {
		dir := shm(t)
		must(t, os.Mkdir(dir, 0o700))
		must(t, os.WriteFile(filepath.Join(dir, ledgerName), tc.damage(bytes.Clone(data)), 0o600))
		_, err := Open(dir, someCaps)
		wantError(t, name, err, sluice.Corrupt, ledgerName, tc.say)
	}
	// A body of garbage behind a good header, marked as unfinished, is repaired to something consistent.
	copy(data[4096:], pattern(5, len(data)-4096))
	data[dirtyOffset] = 1
	must(t, os.WriteFile(filepath.Join(good, ledgerName), data, 0o600))
	s, err = Open(good, someCaps)
	must(t, err)
	defer s.Close()
	mustAudit(t, s, "after the repair of garbage")
	ts := mustGet(t, s, ref) // found again in its file
	must(t, ts.Release(t.Context()))
	must(t, os.Remove(filepath.Join(good, ledgerName)))
	must(t, os.Symlink("/etc/passwd", filepath.Join(good, ledgerName)))
	_, err = Open(good, nil)
	wantError(t, "a ledger that is a link", err, sluice.Denied)
}

func TestSamplesOutliveTheirLedgerForADay(t *testing.T) {
	t.Parallel()
	dir, clock := shm(t), &handClock{}
	opts := &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}, Clock: clock}
	s := mustOpen(t, dir, opts)
	a, b := mustPut(t, s, "a", 1, 100), mustPut(t, s, "b", 2, victimSample)
	must(t, s.Close())
	must(t, os.Remove(filepath.Join(dir, ledgerName)))
	s = mustOpen(t, dir, opts)
	if h := s.Health(); h.ResidentSamples != 2 || h.ResidentBytes != 100+victimSample {
		t.Fatalf("%+v", h)
	}
	must(t, s.Claim(a, "queue"))
	for _, age := range []time.Duration{time.Hour, 23 * time.Hour} {
		clock.ahead = age
		if n, err := s.GC(t.Context()); n != 0 || err != nil {
			t.Fatalf("GC after %v: %d, %v", age, n, err)
		}
	}
	clock.ahead = 25 * time.Hour
	if n, err := s.GC(t.Context()); n != 1 || err != nil {
		t.Fatalf("GC after a day: %d, %v", n, err)
	}
	_, err := s.Get(t.Context(), b)
	wantError(t, "Get of what nobody claimed", err, sluice.NotFound)
	must(t, mustGet(t, s, a).Release(t.Context()))
	mustAudit(t, s, "at the end")
}

func TestAfterAPowerCutTheFilesDecide(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	s := mustOpen(t, dir, someCaps)
	kept, gone, torn := mustPut(t, s, "kept", 1, 1000), mustPut(t, s, "gone", 2, 1000), mustPut(t, s, "torn", 3, 1000)
	for _, ref := range []sluice.Ref{kept, gone, torn} {
		must(t, s.Claim(ref, "queue"))
	}
	must(t, s.do(func(l *ledger) error {
		l.boot[0] ^= 1 // another boot wrote it
		_, sl := l.find("torn")
		sl.generation[0] ^= 1
		l.residentBytes.Add(12345)
		l.slotTop = 0
		return nil
	}))
	s.crash()
	must(t, os.Remove(filepath.Join(dir, "gone.safetensors")))
	must(t, os.WriteFile(filepath.Join(dir, scratchPrefix+"00000000000000ff"), nil, 0o600))
	s = mustOpen(t, dir, nil)
	mustAudit(t, s, "after the restart")
	infos, err := s.Samples(t.Context())
	must(t, err)
	owners := map[string]string{}
	for _, i := range infos {
		owners[i.Ref.SampleID()] = i.Owner
	}
	if len(owners) != 2 || owners["kept"] != "queue" || owners["torn"] != "" {
		t.Errorf("what is left is %v", owners)
	}
	must(t, s.Claim(torn, "queue")) // what a recovering queue does
}

func TestOwnersWithoutClaimsMakeRoomForOthers(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), &Options{Caps: sluice.Caps{MaxSamples: 1000}})
	pin := mustPut(t, s, "again", 1, 10)
	defer mustGet(t, s, pin).Release(t.Context())
	for i := range 3 * maxOwners { // more in turn than there is room for at once
		owner := fmt.Sprint("queue-", i)
		must(t, s.Claim(pin, owner))
		must(t, s.Unclaim(pin, owner))
	}
	refs := make([]sluice.Ref, maxOwners+1)
	for i := range refs {
		refs[i] = mustPut(t, s, fmt.Sprint("s-", i), 1, 10)
	}
	for i, ref := range refs[:maxOwners] {
		must(t, s.Claim(ref, fmt.Sprint("owner-", i)))
	}
	wantError(t, "Claim by one more", s.Claim(refs[maxOwners], "late"), sluice.Full, "late", "128")
	must(t, s.Unclaim(refs[7], "owner-7"))
	must(t, s.Claim(refs[maxOwners], "late"))
	for i, ref := range refs[:maxOwners] {
		if i != 7 {
			wantError(t, "Claim by another", s.Claim(ref, "late"), sluice.Conflict, fmt.Sprint("owner-", i))
		}
	}
	mustAudit(t, s, "at the end")
}

func TestWhatADeadOpenLeftIsSwept(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), someCaps)
	for name, old := range map[string]bool{"dead": true, "locked": true, "young": false} {
		f, err := os.Create(filepath.Join(s.dir, newPrefix+name))
		must(t, err)
		defer f.Close()
		if name == "locked" {
			must(t, flock(int(f.Fd()), unix.LOCK_EX))
		}
		if old {
			at := time.Now().Add(-2 * time.Minute)
			must(t, os.Chtimes(f.Name(), at, at))
		}
	}
	if n, err := s.GC(t.Context()); n != 1 || err != nil {
		t.Errorf("GC removed %d entries, %v, want 1", n, err)
	}
	for name, there := range map[string]bool{"dead": false, "locked": true, "young": true} {
		if _, err := os.Stat(filepath.Join(s.dir, newPrefix+name)); (err == nil) != there {
			t.Errorf("%s: %v, want it there: %v", name, err, there)
		}
	}
}

func TestForeignFilesAreLeftAlone(t *testing.T) {
	t.Parallel()
	dir, clock := shm(t), &handClock{ahead: 100 * time.Hour}
	s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 10 << 20}, Clock: clock})
	layout, err := safetensors.NewLayout(sampleOf("model", 1, 10).Features, nil)
	must(t, err)
	bufs, err := layout.Buffers(sampleOf("model", 1, 10).Features)
	must(t, err)
	foreign := map[string][]byte{"README": []byte("hello"), ".hidden": nil, "..safetensors": nil, "a..b.safetensors": nil, "model.safetensors": bytes.Join(bufs, nil)}
	for name, data := range foreign {
		must(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
	}
	must(t, os.Mkdir(filepath.Join(dir, "dir.safetensors"), 0o700))
	must(t, os.Symlink("/etc/passwd", filepath.Join(dir, "link.safetensors")))
	must(t, os.WriteFile(filepath.Join(dir, "broken.safetensors"), []byte("half a fi"), 0o600))
	if n, err := s.GC(t.Context()); n != 1 || err != nil {
		t.Errorf("GC: %d, %v, want the broken file removed", n, err)
	}
	for name := range foreign {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Errorf("%v", err)
		}
	}
	before := s.Health()
	for _, id := range []string{"model", "dir", "link"} {
		_, err = s.Put(t.Context(), sampleOf(id, 2, 10), sluice.Reservation{})
		wantError(t, "Put under a foreign file's name", err, sluice.Duplicate, id)
	}
	if s.Health() != before {
		t.Errorf("%+v became %+v", before, s.Health())
	}
	if data, _ := os.ReadFile("/etc/passwd"); len(data) == 0 {
		t.Error("a link was followed")
	}
}

func TestADeletedFileIsNotFoundAndTheCountersHeal(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	s := mustOpen(t, dir, someCaps)
	for i, claimed := range []bool{false, true} {
		for _, n := range []int{100, victimSample} {
			ref := mustPut(t, s, "a", byte(i), n)
			if claimed {
				must(t, s.Claim(ref, "queue"))
			}
			must(t, os.Remove(filepath.Join(dir, "a.safetensors")))
			_, err := s.Get(t.Context(), ref)
			wantError(t, "Get", err, sluice.NotFound, `"a"`)
			if h := s.Health(); h.UsedSamples() != 0 || h.UsedBytes() != 0 {
				t.Fatalf("%+v", h)
			}
			mustAudit(t, s, "after Get of a deleted file")
		}
	}
	ref := mustPut(t, s, "b", 1, 100)
	must(t, os.Remove(filepath.Join(dir, "b.safetensors")))
	if n, err := s.GC(t.Context()); n != 1 || err != nil {
		t.Errorf("GC: %d, %v", n, err)
	}
	must(t, s.Unclaim(ref, "queue"))
	mustAudit(t, s, "after GC of a deleted file")
}

func TestAGetThatLosesItsSampleToAnAbortIsNotFoundEvenIfTheNameIsTakenAgain(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), &Options{Caps: sluice.Caps{MaxBytes: 4 << 20}})
	for _, again := range []bool{false, true} {
		ref := mustPut(t, s, "s", 1, 70_000)
		var later sluice.Ref
		s.hooks.at = func(point string) {
			if point != "pinned" {
				return
			}
			s.hooks.at = nil
			must(t, s.Abort(t.Context(), ref))
			if again {
				later = mustPut(t, s, "s", 2, 70_000)
			}
		}
		if _, err := s.Get(t.Context(), ref); !errors.Is(err, sluice.ErrNotFound) || !strings.Contains(err.Error(), ref.Generation()) {
			t.Errorf("again %v: got %v, want not found in generation %s", again, err, ref.Generation())
		}
		if again {
			must(t, mustGet(t, s, later).Release(t.Context()))
		}
		if h := s.Health(); h.UsedBytes() != 0 || h.ResidentSamples != 0 {
			t.Errorf("again %v: %+v is still counted", again, h)
		}
		mustAudit(t, s, "at the end")
	}
}

func TestHealthWaitsForNoPutAndNoChangeOfTheLedger(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), &Options{Caps: sluice.Caps{MaxBytes: 4 << 20}})
	seen := 0
	s.hooks.at = func(point string) {
		if h := s.Health(); point == "written" && h.StagingBytes == 70_000 && h.ReservedBytes == 70_000 && h.ResidentBytes == 0 {
			seen++
		}
	}
	mustPut(t, s, "s", 1, 70_000)
	must(t, s.do(func(*ledger) error { // with every lock of a change held
		if h := s.Health(); h.ResidentBytes == 70_000 && h.StagingBytes == 0 {
			seen++
		}
		return nil
	}))
	if seen != 2 {
		t.Errorf("health told the truth %d times, want 2", seen)
	}
}

func TestOnDisksAFileThatLostItsChecksumsIsCorrupt(t *testing.T) {
	t.Parallel()
	dir := freshDir(t, diskDir(t))
	s := mustOpen(t, dir, someCaps)
	ref := mustPut(t, s, "s", 1, 70_000)
	path := s.samplePath("s")
	must(t, s.Close())
	data, err := os.ReadFile(path)
	must(t, err)
	at := bytes.Index(data, []byte(safetensors.ChecksumsKey))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	_, err = f.WriteAt([]byte("X"), int64(at))
	must(t, errors.Join(err, f.Close()))
	again := mustOpen(t, dir, someCaps)
	_, err = again.Get(t.Context(), ref)
	wantError(t, "Get of a file without checksums", err, sluice.Corrupt, path, "has no checksums")
}

func TestATruncatedOrReplacedFileIsCorruptAndNamed(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	s := mustOpen(t, dir, someCaps)
	ref := mustPut(t, s, "a", 1, victimSample)
	path := filepath.Join(dir, "a.safetensors")
	data, err := os.ReadFile(path)
	must(t, err)
	must(t, os.Truncate(path, 5000))
	_, err = s.Get(t.Context(), ref)
	wantError(t, "Get of a truncated file", err, sluice.Corrupt, path, "5000")
	must(t, os.Remove(path))
	must(t, os.WriteFile(path, data, 0o600))
	_, err = s.Get(t.Context(), ref)
	wantError(t, "Get of a replaced file", err, sluice.Corrupt, path, "inode")
	must(t, s.Abort(t.Context(), ref))
	mustAudit(t, s, "at the end")
}

func TestADirectoryThatIsExchangedUnderTheStoreIsNoticed(t *testing.T) {
	t.Parallel()
	away := func(dir string) error { return os.Rename(dir, dir+"-away") }
	for _, tc := range []struct {
		name     string
		exchange func(dir string) error
		want     string
		deleted  bool // the ledger too: then nothing can be written down any more
	}{
		{"deleted", os.RemoveAll, "can no longer be found under the open store", true},
		{"renamed", away, "can no longer be found under the open store", false},
		{"replaced by a directory", func(dir string) error { return errors.Join(away(dir), os.Mkdir(dir, 0o700)) }, "was replaced by another directory under the open store", false},
		{"replaced by a link to itself", func(dir string) error { return errors.Join(away(dir), os.Symlink(dir+"-away", dir)) }, "was replaced by a symbolic link under the open store", false},
		{"replaced by a link to nothing", func(dir string) error { return errors.Join(away(dir), os.Symlink("nowhere", dir)) }, "was replaced by a symbolic link under the open store", false},
		{"deleted, and replaced by a file", func(dir string) error { return errors.Join(os.RemoveAll(dir), os.WriteFile(dir, nil, 0o600)) }, "was replaced by something that is no directory under the open store", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ctx, dir := t.Context(), shm(t)
			s := mustOpen(t, dir, someCaps)
			ref, loose := mustPut(t, s, "a", 1, victimSample), mustPut(t, s, "loose", 2, 100)
			must(t, s.Claim(ref, "queue"))
			r, err := s.Reserve(ctx, 10)
			must(t, err)
			ts := mustGet(t, s, ref)
			must(t, tc.exchange(dir))
			for what, call := range map[string]func() error{
				"reserve": func() error { _, err := s.Reserve(ctx, 1); return err },
				"put":     func() error { _, err := s.Put(ctx, sampleOf("b", 1, 10), sluice.Reservation{}); return err },
				"get":     func() error { _, err := s.Get(ctx, ref); return err },
				"gc":      func() error { _, err := s.GC(ctx); return err },
				"samples": func() error { _, err := s.Samples(ctx); return err },
			} {
				wantError(t, what, call(), sluice.Unavailable, fmt.Sprintf("dirstore: %s %q: %s", what, dir, tc.want), "close the store and open it again")
			}
			// What gives something back works while the ledger is there.
			for what, call := range map[string]func() error{
				"unreserve": func() error { return s.Unreserve(ctx, r) },
				"abort":     func() error { return s.Abort(ctx, loose) },
				"unclaim":   func() error { return s.Unclaim(ref, "queue") },
				"release":   func() error { return s.Release(ctx, ts.Handle) },
			} {
				if err := call(); tc.deleted {
					wantError(t, what, err, sluice.Unavailable, dir, "the ledger was deleted under the open store", "close the store and open it again")
				} else if err != nil {
					t.Errorf("%s: %v", what, err)
				}
			}
			if !bytes.Equal(ts.Features[0].Data, pattern(1, victimSample)) {
				t.Error("the tensors changed")
			}
			must(t, ts.Close())
			must(t, s.Close())
			if _, err := os.Lstat(dir); tc.name == "deleted" && !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the store made it again: %v", err)
			}
		})
	}
}

func TestTheLedgerGrows(t *testing.T) {
	t.Parallel()
	dir := shm(t)
	s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxSamples: 10_000}})
	other := mustOpen(t, dir, nil)
	var last sluice.Ref
	for i := range 3 * segmentSlots {
		if i%2 == 0 {
			_, err := s.Reserve(t.Context(), 1)
			must(t, err)
			continue
		}
		_, err := other.Reserve(t.Context(), 1)
		must(t, err)
	}
	last = mustPut(t, other, "last", 1, 100)
	must(t, mustGet(t, s, last).Release(t.Context()))
	if h := s.Health(); h.ReservedSamples != 3*segmentSlots || h.ResidentSamples != 0 {
		t.Errorf("%+v", h)
	}
	must(t, other.Close())
	mustAudit(t, s, "after growth")
	if h := s.Health(); h.ReservedSamples != 3*segmentSlots/2 {
		t.Errorf("%+v", h)
	}
}

func TestOnDisksTheFirstGetAfterARestartChecksTheBytes(t *testing.T) {
	t.Parallel()
	dir := freshDir(t, diskDir(t))
	s := mustOpen(t, dir, someCaps)
	ref := mustPut(t, s, "a", 1, victimSample)
	must(t, s.Claim(ref, "queue"))
	flip := func() {
		f, err := os.OpenFile(filepath.Join(dir, "a.safetensors"), os.O_RDWR, 0)
		must(t, err)
		defer f.Close()
		var b [1]byte
		_, err = f.ReadAt(b[:], victimSample-100)
		must(t, err)
		b[0] ^= 1
		_, err = f.WriteAt(b[:], victimSample-100)
		must(t, err)
	}
	must(t, s.Close())
	flip()
	s = mustOpen(t, dir, someCaps)
	_, err := s.Get(t.Context(), ref)
	wantError(t, "the first get after a restart", err, sluice.Corrupt, "a.safetensors", "crc32c")
	flip()
	must(t, mustGet(t, s, ref).Release(t.Context()))
	flip()
	must(t, mustGet(t, s, ref).Release(t.Context())) // it has been checked
	must(t, s.Close())
	v := mustOpen(t, dir, &Options{Verify: true})
	_, err = v.Get(t.Context(), ref)
	wantError(t, "get of one who always checks", err, sluice.Corrupt)
}

func TestOnDisksFilesAreReapedInTheBackground(t *testing.T) {
	t.Parallel()
	dir := freshDir(t, diskDir(t))
	s := mustOpen(t, dir, &Options{Caps: sluice.Caps{MaxBytes: 100 << 20}, NoPool: true})
	for range 5 {
		must(t, s.Abort(t.Context(), mustPut(t, s, "a", 1, 2<<20)))
	}
	if h := s.Health(); h.UsedBytes() != 0 {
		t.Errorf("%+v", h)
	}
	must(t, s.Close())
	names, err := os.ReadDir(dir)
	must(t, err)
	if len(names) != 1 {
		t.Errorf("Close left %v", names)
	}
}

// setImmutable makes a file that not even root can unlink or rename, or skips.
func setImmutable(t *testing.T, path string, on bool) {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	const immutable = 0x10 // FS_IMMUTABLE_FL
	flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	if err == nil {
		if flags &^= immutable; on {
			flags |= immutable
		}
		err = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags)
	}
	if err != nil {
		t.Skipf("no file can be made immutable here: %v", err)
	}
}

func TestAnUnlinkThatFailedIsTriedAgainByGC(t *testing.T) {
	t.Parallel()
	for _, n := range []int{100, victimSample, 2 << 20} {
		dir := freshDir(t, diskDir(t))
		s := mustOpen(t, dir, someCaps)
		ref := mustPut(t, s, "a", 1, n)
		ts := mustGet(t, s, ref)
		path := filepath.Join(dir, "a.safetensors")
		setImmutable(t, path, true)
		t.Cleanup(func() {
			if _, err := os.Stat(path); err == nil {
				setImmutable(t, path, false)
			}
		})
		must(t, s.Abort(t.Context(), ref))
		must(t, ts.Release(t.Context()))
		if h := s.Health(); h.UsedSamples() != 0 || h.PoolBytes != 0 {
			t.Errorf("%+v", h)
		}
		s.reaper.close()
		if k, err := s.GC(t.Context()); k != 0 || err != nil {
			t.Errorf("GC that can't unlink either: %d, %v", k, err)
		}
		_, err := s.Put(t.Context(), sampleOf("a", 1, 10), sluice.Reservation{})
		wantError(t, "Put of the id", err, sluice.Duplicate)
		setImmutable(t, path, false)
		if k, err := s.GC(t.Context()); k != 1 || err != nil {
			t.Errorf("GC: %d, %v", k, err)
		}
		mustAudit(t, s, "at the end")
		mustPut(t, s, "a", 2, n)
	}
}
