//go:build linux

package dirstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
)

// yard is a store with a staging directory beside it.
type yard struct {
	t    testing.TB
	s    *Store
	dir  string
	root *os.Root
}

func newYard(t testing.TB, dir string, o *Options) *yard {
	t.Helper()
	y := &yard{t: t, s: mustOpen(t, dir, o), dir: filepath.Join(filepath.Dir(dir), "staging")}
	must(t, os.Mkdir(y.dir, 0o700))
	var err error
	y.root, err = os.OpenRoot(y.dir)
	must(t, err)
	t.Cleanup(func() { _ = y.root.Close() })
	return y
}

func (y *yard) path(name string) string { return filepath.Join(y.dir, name) }

// stage writes a file and returns its inode.
func (y *yard) stage(name string, data []byte) uint64 {
	y.t.Helper()
	must(y.t, os.WriteFile(y.path(name), data, 0o644))
	return y.inode(y.path(name))
}

func (y *yard) inode(path string) uint64 {
	y.t.Helper()
	var st unix.Stat_t
	must(y.t, unix.Lstat(path, &st))
	return st.Ino
}

func (y *yard) adopt(name string, in Incoming) (sluice.Ref, error) {
	return y.s.Adopt(context.Background(), y.root, name, os.Geteuid(), in, sluice.Reservation{})
}

// staged lists what is in the staging directory.
func (y *yard) staged() []string {
	y.t.Helper()
	entries, err := os.ReadDir(y.dir)
	must(y.t, err)
	names := []string{}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// wantStaged checks that the directory has these files and no others.
func (y *yard) wantStaged(when string, names ...string) {
	y.t.Helper()
	if have := y.staged(); !slices.Equal(have, names) {
		y.t.Errorf("%s: the staging directory has %q, want %q", when, have, names)
	}
}

// padded is stockFile with its header lengthened by spaces so that the data begins at a multiple of 8.
func padded(meta map[string]string, features ...sluice.Feature) []byte {
	file := stockFile(meta, features...)
	end := 8 + int(file[0]) + int(file[1])<<8 + int(file[2])<<16
	pad := -end & 7
	head := slices.Concat(file[:end], []byte(strings.Repeat(" ", pad)))
	head[0], head[1], head[2] = byte(end+pad-8), byte((end+pad-8)>>8), byte((end+pad-8)>>16)
	return append(head, file[end:]...)
}

// withRef is the metadata of a file that can be taken as it is.
func (y *yard) withRef() map[string]string {
	return map[string]string{safetensors.RefKey: refOf(y.s).Canonical()}
}

// ours is a file in our layout, with room for checksums if asked for.
func (y *yard) ours(checksummed bool) []byte {
	y.t.Helper()
	layoutOf := safetensors.NewLayout
	if checksummed {
		layoutOf = safetensors.NewChecksummedLayout
	}
	l, err := layoutOf(three(), y.withRef())
	must(y.t, err)
	file := l.HeaderBytes()
	for _, e := range l.Header().Entries {
		ft, _ := sluice.FindFeature(three(), e.Name)
		file = append(file, ft.Data...)
	}
	return file
}

func TestAdoptMovesAFileThatIsReadyAndCopiesOthers(t *testing.T) {
	t.Parallel()
	aligned := []int{1, 2, 0} // int64, bfloat16, uint8: each aligned behind the other
	for _, tc := range []struct {
		name  string
		disk  bool
		file  func(y *yard) []byte
		moved bool
	}{
		{"our layout", false, func(y *yard) []byte { return y.ours(false) }, true},
		{"our layout with zeros for checksums", false, func(y *yard) []byte { return y.ours(true) }, true},
		{"another legal layout", false, func(y *yard) []byte { return padded(y.withRef(), reordered(aligned...)...) }, true},
		{"another layout with other metadata", false, func(y *yard) []byte {
			m := y.withRef()
			m["format"] = "pt"
			return padded(m, reordered(aligned...)...)
		}, true},
		{"another layout with checksums", false, func(y *yard) []byte {
			m, sums := y.withRef(), map[string]uint32{}
			for _, f := range three() {
				sums[f.Name] = safetensors.Checksum(f.Data)
			}
			m[safetensors.ChecksumsKey] = safetensors.EncodeChecksums(sums)
			return padded(m, reordered(aligned...)...)
		}, false},
		{"tensors that are not aligned", false, func(y *yard) []byte { return padded(y.withRef(), reordered(0, 1, 2)...) }, false},
		{"data that is not aligned", false, func(y *yard) []byte {
			for pad := ""; ; pad += "x" {
				m := y.withRef()
				m["pad"] = pad
				if f := stockFile(m, reordered(aligned...)...); f[0]&7 != 0 {
					return f
				}
			}
		}, false},
		{"no ref", false, func(y *yard) []byte { return padded(nil, reordered(aligned...)...) }, false},
		{"a ref that is not canonical", false, func(y *yard) []byte {
			return padded(map[string]string{safetensors.RefKey: " " + refOf(y.s).Canonical()}, reordered(aligned...)...)
		}, false},
		{"zeros for checksums on a disk", true, func(y *yard) []byte { return y.ours(true) }, true},
		{"no checksums on a disk", true, func(y *yard) []byte { return y.ours(false) }, false},
		{"another layout on a disk", true, func(y *yard) []byte { return padded(y.withRef(), reordered(aligned...)...) }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			dir := shm(t)
			if tc.disk {
				dir = freshDir(t, diskDir(t))
			}
			y := newYard(t, dir, someCaps)
			ino := y.stage("f", tc.file(y))
			ref, err := y.adopt("f", incoming())
			if err != nil || !ref.Equal(refOf(y.s)) {
				t.Fatal(ref, err)
			}
			y.wantStaged("afterwards")
			if moved := y.inode(y.s.samplePath("a")) == ino; moved != tc.moved {
				t.Errorf("moved: %v, want %v", moved, tc.moved)
			}
			info, err := os.Lstat(y.s.samplePath("a"))
			must(t, err)
			if info.Mode() != 0o600 {
				t.Errorf("the sample's mode is %v", info.Mode())
			}
			mustAudit(t, y.s, "afterwards")
			must(t, y.s.Claim(ref, "test"))
			must(t, y.s.Close())
			y.s = mustOpen(t, dir, nil) // on a disk, its first get compares the checksums
			ts := mustGet(t, y.s, ref)
			sums, err := safetensors.ReadHeader(openFile(t, y.s.samplePath("a")), info.Size())
			must(t, err)
			if said, err := sums.Checksums(); err != nil || tc.disk && said == nil {
				t.Errorf("checksums %v, %v", said, err)
			} else {
				for name, sum := range said {
					if f, _ := ts.Feature(name); sum != safetensors.Checksum(f.Data) {
						t.Errorf("the file says %08x of %s", sum, name)
					}
				}
			}
			must(t, ts.Release(t.Context()))
			wantSample(t, y.s, ref, three())
		})
	}
}

func openFile(t testing.TB, path string) *os.File {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func TestAdoptRefusesWhatIsNoPlainFileOfTheSender(t *testing.T) {
	t.Parallel()
	y := newYard(t, shm(t), someCaps)
	good := y.ours(false)
	outside := filepath.Join(filepath.Dir(y.dir), "outside")
	must(t, os.WriteFile(outside, good, 0o600))
	must(t, os.Mkdir(y.path("dir"), 0o700))
	must(t, os.WriteFile(y.path("dir/f"), good, 0o600))
	must(t, os.Symlink(outside, y.path("link")))
	must(t, os.Symlink("good", y.path("near")))
	must(t, unix.Mkfifo(y.path("fifo"), 0o600))
	y.stage("good", good)
	y.stage("two", good)
	must(t, os.Link(y.path("two"), y.path("two-again")))
	before := y.staged()
	for _, c := range []struct {
		name string
		uid  int
		kind sluice.Kind
		want string
	}{
		{"", 0, sluice.Invalid, "bare"}, {".", 0, sluice.Invalid, "bare"}, {"..", 0, sluice.Invalid, "bare"}, {"/", 0, sluice.Invalid, "bare"},
		{"dir/f", 0, sluice.Invalid, "bare"}, {"../outside", 0, sluice.Invalid, "bare"}, {outside, 0, sluice.Invalid, "bare"}, {"good\x00", 0, sluice.Invalid, "bare"},
		{strings.Repeat("x", 256), 0, sluice.Invalid, "find"}, {"absent", 0, sluice.NotFound, "find"},
		{"dir", 0, sluice.Invalid, "no regular file"}, {"fifo", 0, sluice.Invalid, "no regular file"},
		{"link", 0, sluice.Denied, "symbolic link"}, {"near", 0, sluice.Denied, "symbolic link"},
		{"two", 0, sluice.Denied, "2 names"}, {"good", 1, sluice.Denied, "belongs to user"},
	} {
		_, err := y.s.Adopt(t.Context(), y.root, c.name, os.Geteuid()+c.uid, incoming(), sluice.Reservation{})
		wantError(t, fmt.Sprintf("%q", c.name), err, c.kind, c.want)
	}
	y.wantStaged("afterwards", before...)
	wantEmpty(t, y.s, "afterwards", 0)
}

func TestAdoptRefusesAFileThatSomebodyCanWriteTo(t *testing.T) {
	t.Parallel()
	y := newYard(t, shm(t), someCaps)
	y.stage("f", y.ours(false))
	f, err := os.OpenFile(y.path("f"), os.O_RDWR, 0)
	must(t, err)
	_, err = y.adopt("f", incoming())
	wantError(t, "open for writing", err, sluice.Conflict, "open for writing")
	mem, err := unix.Mmap(int(f.Fd()), 0, 100, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)
	must(t, f.Close())
	_, err = y.adopt("f", incoming())
	wantError(t, "mapped", err, sluice.Conflict, "mapped")
	must(t, unix.Munmap(mem))
	y.wantStaged("afterwards", "f")
	wantEmpty(t, y.s, "afterwards", 0)
	r := openFile(t, y.path("f")) // readers do no harm
	ref, err := y.adopt("f", incoming())
	must(t, err)
	wantSample(t, y.s, ref, three())
	_ = r
}

// TestAWriterThatComesWhileAFileIsMovedIsNoticed opens the file for writing at the last moment at which it has its name.
func TestAWriterThatComesWhileAFileIsMovedIsNoticed(t *testing.T) {
	t.Parallel()
	y := newYard(t, shm(t), someCaps)
	for what, c := range map[string]struct {
		act  func() (undo func())
		kind sluice.Kind
		want string
		left []string
	}{
		"a writer": {func() func() {
			f, err := os.OpenFile(y.path("f"), os.O_RDWR, 0)
			must(t, err)
			return func() { must(t, f.Close()) }
		}, sluice.Conflict, "open for writing", []string{"f"}},
		"a link": {func() func() {
			must(t, os.Link(y.path("f"), y.path("g")))
			return func() { must(t, os.Remove(y.path("g"))) }
		}, sluice.Denied, "2 names", []string{"f", "g"}},
		"another file": {func() func() {
			must(t, os.Rename(y.path("f"), y.path("g")))
			y.stage("f", y.ours(false))
			return func() { must(t, os.Remove(y.path("g"))) }
		}, sluice.Conflict, "replaced", []string{"f", "g"}},
		"a symbolic link": {func() func() {
			must(t, os.Rename(y.path("f"), y.path("g")))
			must(t, os.Symlink("g", y.path("f")))
			return func() { must(t, os.Remove(y.path("f"))); must(t, os.Rename(y.path("g"), y.path("f"))) }
		}, sluice.Conflict, "replaced", []string{"f", "g"}},
		"no file": {func() func() {
			must(t, os.Remove(y.path("f")))
			return func() {}
		}, sluice.NotFound, "move", []string{}},
		"a change": {func() func() {
			must(t, os.WriteFile(y.path("f"), padded(map[string]string{"format": "pt"}, three()...), 0o600))
			return func() {}
		}, sluice.Conflict, "changed", []string{"f"}},
		"a cut": {func() func() {
			must(t, os.Truncate(y.path("f"), 200))
			return func() {}
		}, sluice.Corrupt, "header", []string{"f"}},
	} {
		y.stage("f", y.ours(false))
		undo := func() {}
		y.s.hooks.at = func(point string) {
			if point == "staged" {
				undo = c.act()
			}
		}
		_, err := y.adopt("f", incoming())
		y.s.hooks.at = nil
		wantError(t, what, err, c.kind, c.want)
		y.wantStaged(what, c.left...)
		wantEmpty(t, y.s, what, 0)
		undo()
	}
}

func TestAFileThatIsRefusedIsPutBackUnlessItsNameIsTaken(t *testing.T) {
	t.Parallel()
	for _, point := range []string{"moved", "written", "named", "a sync of the file", "a sync of the directory"} {
		y := newYard(t, shm(t), &Options{Caps: someCaps.Caps, Durability: Power})
		r, err := y.s.Reserve(t.Context(), 20)
		must(t, err)
		ino := y.stage("f", y.ours(true))
		ctx, cancel := context.WithCancel(t.Context())
		y.s.hooks.at = func(p string) {
			if p == point {
				cancel()
			}
		}
		y.s.hooks.sync = func(fd int) error {
			if (fd == y.s.dirfd) == (point == "a sync of the directory") && strings.HasPrefix(point, "a sync") {
				return unix.EIO
			}
			return nil
		}
		_, err = y.s.Adopt(ctx, y.root, "f", os.Geteuid(), incoming(), r)
		if !errors.Is(err, context.Canceled) && !errors.Is(err, unix.EIO) {
			t.Fatalf("at %s: %v", point, err)
		}
		cancel()
		y.wantStaged(point, "f")
		wantEmpty(t, y.s, point, 20)
		y.s.hooks = hooks{}
		if ref, err := y.adopt("f", incoming()); err != nil || y.inode(y.s.samplePath("a")) != ino {
			t.Errorf("once more after %s: %v, %v", point, ref, err)
		}
	}
	y := newYard(t, shm(t), &Options{Caps: someCaps.Caps, Verify: true})
	y.stage("f", y.wrong())
	_, err := y.adopt("f", incoming())
	wantError(t, "wrong bytes", err, sluice.Corrupt, "crc32c")
	y.wantStaged("wrong bytes", "f")
	y.s.hooks.at = func(p string) {
		if p == "moved" {
			y.stage("f", []byte("new"))
		}
	}
	_, err = y.adopt("f", incoming())
	y.s.hooks.at = nil
	wantError(t, "wrong bytes", err, sluice.Corrupt, "crc32c")
	if got, err := os.ReadFile(y.path("f")); err != nil || string(got) != "new" {
		t.Errorf("the new file of that name has %q, %v", got, err)
	}
	wantEmpty(t, y.s, "at the end", 0)
}

// wrong is a file in our layout whose checksums are those of other data.
func (y *yard) wrong() []byte {
	y.t.Helper()
	bad := y.ours(true)
	bad[len(bad)-1] ^= 1
	sums := map[string]uint32{}
	for _, f := range three() {
		sums[f.Name] = safetensors.Checksum(f.Data)
	}
	l, err := safetensors.NewChecksummedLayout(three(), y.withRef())
	must(y.t, err)
	head, err := l.HeaderWithChecksums(sums)
	must(y.t, err)
	copy(bad, head)
	return bad
}

// In memory they are for readers far away, who find out; to read the file for them would cost more than the writer saved. On a disk they are compared at once.
func TestChecksumsThatAFileInMemoryBringsAreItsWritersWord(t *testing.T) {
	t.Parallel()
	y := newYard(t, shm(t), someCaps)
	y.stage("f", y.wrong())
	ref, err := y.adopt("f", incoming())
	must(t, err)
	loan, err := y.s.Lend(t.Context(), ref, false)
	must(t, err)
	defer func() { must(t, loan.Drop()) }()
	want := map[string]uint32{}
	for _, f := range three() {
		want[f.Name] = safetensors.Checksum(f.Data)
	}
	if sums, err := loan.Checksums(t.Context()); err != nil || !maps.Equal(sums, want) {
		t.Errorf("checksums %v, %v; want %v", sums, err, want)
	}
	y = newYard(t, freshDir(t, diskDir(t)), someCaps)
	y.stage("f", y.wrong())
	_, err = y.adopt("f", incoming())
	wantError(t, "wrong bytes on a disk", err, sluice.Corrupt, "crc32c")
}

func TestARefusedAdoptionLeavesTheFileWhereItIs(t *testing.T) {
	t.Parallel()
	y := newYard(t, shm(t), &Options{Caps: sluice.Caps{MaxBytes: 1000}})
	y.stage("f", y.ours(false))
	mustPut(t, y.s, "b", 1, 900)
	_, err := y.adopt("f", incoming())
	wantError(t, "over the cap", err, sluice.Full)
	in := incoming()
	in.RunID = "other"
	_, err = y.adopt("f", in)
	wantError(t, "another run", err, sluice.Invalid, "run_id")
	must(t, y.s.Abort(t.Context(), refIn(t, y.s, "b")))
	mustPut(t, y.s, "a", 1, 10)
	_, err = y.adopt("f", incoming())
	wantError(t, "a duplicate", err, sluice.Duplicate)
	must(t, y.s.Abort(t.Context(), refIn(t, y.s, "a")))
	y.wantStaged("afterwards", "f")
	ref, err := y.adopt("f", incoming())
	must(t, err)
	wantSample(t, y.s, ref, three())
	for what, file := range map[string][]byte{"nothing": {}, "garbage": []byte("hello, this is no file of that format"), "a cut file": y.ours(false)[:400], "a cut header": y.ours(false)[:100]} {
		y.stage("f", file)
		_, err = y.adopt("f", incoming())
		wantError(t, what, err, sluice.Corrupt)
		y.wantStaged(what, "f")
	}
	wantEmpty(t, y.s, "at the end", 0)
}

func TestARepeatedAdoptionFindsWhatTheFirstOneStored(t *testing.T) {
	t.Parallel()
	y := newYard(t, shm(t), someCaps)
	file := y.ours(false)
	y.stage("f", file)
	first, err := y.adopt("f", incoming())
	must(t, err)
	ref, err := y.adopt("f", incoming())
	if err != nil || !ref.Equal(first) {
		t.Fatalf("without the file: %v, %v", ref, err)
	}
	y.stage("f", file)
	ref, err = y.adopt("f", Incoming{SampleID: "a", RunID: "r"})
	if err != nil || !ref.Equal(first) {
		t.Fatalf("with a file: %v, %v", ref, err)
	}
	y.wantStaged("after the repetition")
	_, err = y.adopt("f", Incoming{SampleID: "a", RunID: "r"})
	wantError(t, "without file and generation", err, sluice.NotFound)
	in := incoming()
	in.Generation = "g2"
	_, err = y.adopt("f", in)
	wantError(t, "without the file, another generation", err, sluice.NotFound)
	in = incoming()
	in.Algorithm = "other"
	_, err = y.adopt("f", in)
	wantError(t, "without the file, another ref", err, sluice.Invalid, "algorithm")
	mustAudit(t, y.s, "at the end")
}

func TestAdoptRefusesAnotherFileSystem(t *testing.T) {
	t.Parallel()
	y := newYard(t, shm(t), someCaps)
	other := filepath.Dir(freshDir(t, diskDir(t)))
	root, err := os.OpenRoot(other)
	must(t, err)
	defer root.Close()
	for what, file := range map[string][]byte{"to be moved": y.ours(false), "to be copied": stockFile(nil, three()...)} {
		must(t, os.WriteFile(filepath.Join(other, "f"), file, 0o600))
		_, err = y.s.Adopt(t.Context(), root, "f", os.Geteuid(), incoming(), sluice.Reservation{})
		wantError(t, what, err, sluice.Invalid, "another file system")
		if _, err := os.Lstat(filepath.Join(other, "f")); err != nil {
			t.Error(err)
		}
	}
	wantEmpty(t, y.s, "afterwards", 0)
}

func TestAdoptMakesTheFileOurs(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root can make a file that is another user's")
	}
	y := newYard(t, shm(t), someCaps)
	y.stage("f", y.ours(true))
	must(t, os.Chown(y.path("f"), 12345, 12345))
	must(t, os.Chmod(y.path("f"), 0o444))
	_, err := y.adopt("f", incoming())
	wantError(t, "of another user", err, sluice.Denied, "12345")
	ctx, cancel := context.WithCancel(t.Context())
	y.s.hooks.at = func(point string) {
		if point == "written" {
			cancel()
		}
	}
	_, err = y.s.Adopt(ctx, y.root, "f", 12345, incoming(), sluice.Reservation{})
	y.s.hooks.at = nil
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("an adoption that was interrupted: %v", err)
	}
	y.wantStaged("an adoption that was interrupted", "f") // and still its owner's, or the next would refuse it
	ref, err := y.s.Adopt(t.Context(), y.root, "f", 12345, incoming(), sluice.Reservation{})
	must(t, err)
	var st unix.Stat_t
	must(t, unix.Lstat(y.s.samplePath("a"), &st))
	if st.Uid != 0 || st.Mode != unix.S_IFREG|0o600 {
		t.Errorf("the sample is of user %d, mode %o", st.Uid, st.Mode)
	}
	wantSample(t, y.s, ref, three())
}

func TestAFileThatIsMovedTakesNoneOutOfThePool(t *testing.T) {
	t.Parallel()
	y := newYard(t, shm(t), someCaps)
	must(t, y.s.Abort(t.Context(), mustPut(t, y.s, "old", 9, 300_000)))
	pool := y.s.Health().PoolBytes
	if pool == 0 {
		t.Fatal("nothing is in the pool")
	}
	ino := y.stage("f", y.ours(false))
	_, err := y.adopt("f", incoming())
	must(t, err)
	if y.inode(y.s.samplePath("a")) != ino || y.s.Health().PoolBytes != pool {
		t.Errorf("another file was taken: %+v", y.s.Health())
	}
	mustAudit(t, y.s, "afterwards")
}

func TestAFileWithHolesIsGivenItsRoom(t *testing.T) {
	t.Parallel()
	y := newYard(t, shm(t), someCaps)
	f := feature("x", sluice.UInt8, 0, 1<<20)
	clear(f.Data)
	fields := refOf(y.s).Fields()
	fields.Features, fields.EstimatedBytes = []sluice.RefFeature{{Name: "x", Key: "a/x", Spec: f.Spec}}, f.Bytes()
	ref, err := sluice.NewRef(fields)
	must(t, err)
	file := padded(map[string]string{safetensors.RefKey: ref.Canonical()}, f)
	ino := y.stage("f", file[:len(file)-len(f.Data)])
	must(t, os.Truncate(y.path("f"), int64(len(file))))
	_, err = y.adopt("f", Incoming{SampleID: "a", RunID: "r"})
	must(t, err)
	var st unix.Stat_t
	must(t, unix.Lstat(y.s.samplePath("a"), &st))
	if st.Ino != ino || st.Blocks*512 < st.Size {
		t.Errorf("the sample is inode %d (staged was %d), %d bytes in %d blocks", st.Ino, ino, st.Size, st.Blocks)
	}
	wantSample(t, y.s, ref, []sluice.Feature{f})
}
