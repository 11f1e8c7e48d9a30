package safetensors

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/sluice-ml/sluice"
)

// fakeFile is memory behind pwritev, with a say in how each call ends.
type fakeFile struct {
	data  []byte
	calls int
	// before returns how many bytes the call with this number may write, and the error it returns.
	before func(call int, bytes int) (int, error)
}

func (f *fakeFile) write(bufs [][]byte, at int64) (int, error) {
	if len(bufs) > maxVectors {
		return 0, syscall.EINVAL
	}
	all := bytes.Join(bufs, nil)
	limit, err := len(all), error(nil)
	if f.before != nil {
		limit, err = f.before(f.calls, len(all))
	}
	f.calls++
	all = all[:min(max(limit, 0), len(all))]
	if need := int(at) + len(all); need > len(f.data) {
		f.data = append(f.data, make([]byte, need-len(f.data))...)
	}
	copy(f.data[at:], all)
	return limit, err
}

func joined(t *testing.T, l *Layout, features []sluice.Feature) []byte {
	t.Helper()
	bufs, err := l.Buffers(features)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Join(bufs, nil)
}

func checksummed(t testing.TB, features []sluice.Feature) *Layout {
	t.Helper()
	l, err := NewChecksummedLayout(features, map[string]string{RefKey: "{}"})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestBuffersShareTheCallersMemory(t *testing.T) {
	t.Parallel()
	features := append(sample(), feature("empty", 0, sluice.Int64, 0))
	l := layoutOf(t, features, nil)
	bufs, err := l.Buffers(features)
	if err != nil {
		t.Fatal(err)
	}
	if len(bufs) != 1+len(features)-1 {
		t.Fatalf("%d buffers, want the header and each tensor that has bytes", len(bufs))
	}
	for _, b := range bufs[1:] {
		shared := false
		for _, f := range features {
			shared = shared || (len(f.Data) > 0 && &f.Data[0] == &b[0])
		}
		if !shared {
			t.Error("a tensor was copied")
		}
	}
}

func TestWriteFileWritesWhatBuffersHold(t *testing.T) {
	t.Parallel()
	features := sample()
	for name, l := range map[string]*Layout{"plain": layoutOf(t, features, nil), "checksummed": checksummed(t, features)} {
		for _, off := range []int64{0, 1, 4096} {
			t.Run(fmt.Sprintf("%s at %d", name, off), func(t *testing.T) {
				t.Parallel()
				path := filepath.Join(t.TempDir(), "f")
				f := opened(t, path, os.O_RDWR|os.O_CREATE)
				if err := l.WriteFile(f, off, features); err != nil {
					t.Fatal(err)
				}
				got, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				if want := joined(t, l, features); !bytes.Equal(got[off:], want) || int64(len(want)) != l.Size() {
					t.Errorf("file is %d bytes that differ from the %d of Buffers", len(got), len(want))
				}
				if pos, _ := f.Seek(0, io.SeekCurrent); pos != 0 {
					t.Errorf("the file offset moved to %d", pos)
				}
			})
		}
	}
}

func TestStreamWritesWhatBuffersHold(t *testing.T) {
	t.Parallel()
	features := sample()
	for _, l := range []*Layout{layoutOf(t, features, nil), checksummed(t, features)} {
		var got bytes.Buffer
		n, err := l.Stream(&got, features)
		if err != nil || n != l.Size() {
			t.Fatalf("%d bytes, %v; want %d", n, err, l.Size())
		}
		if !bytes.Equal(got.Bytes(), joined(t, l, features)) {
			t.Error("the stream differs from Buffers")
		}
	}
}

func TestPlainWriteIsOneCall(t *testing.T) {
	t.Parallel()
	features := sample()
	l := layoutOf(t, features, nil)
	f := &fakeFile{}
	if err := l.writeAt(f.write, "f", 0, features); err != nil {
		t.Fatal(err)
	}
	if f.calls != 1 || !bytes.Equal(f.data, joined(t, l, features)) {
		t.Errorf("%d calls, want 1", f.calls)
	}
}

func TestWriteSplitsWhatExceedsTheVectorLimit(t *testing.T) {
	t.Parallel()
	var features []sluice.Feature
	for i := range 2500 {
		features = append(features, feature(fmt.Sprintf("t%d", i), byte(i), sluice.Int16, int64(i%3)))
	}
	for _, l := range []*Layout{layoutOf(t, features, nil), checksummed(t, features)} {
		f := &fakeFile{}
		if err := l.writeAt(f.write, "f", 0, features); err != nil {
			t.Fatal(err)
		}
		if f.calls > 3 || !bytes.Equal(f.data, joined(t, l, features)) {
			t.Errorf("%d calls, want at most 3 with the right bytes", f.calls)
		}
	}
}

func TestWriteGoesOnAfterPartOfItWasWritten(t *testing.T) {
	t.Parallel()
	features := append(sample(), feature("empty", 0, sluice.Int64, 0))
	for _, l := range []*Layout{layoutOf(t, features, nil), checksummed(t, features)} {
		for _, step := range []int{1, 7, 64, 1000} {
			f := &fakeFile{before: func(_, n int) (int, error) { return min(step, n), nil }}
			if err := l.writeAt(f.write, "f", 0, features); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(f.data, joined(t, l, features)) {
				t.Errorf("%d bytes a call: the file differs", step)
			}
		}
	}
}

func TestWriteGoesOnAfterAnInterrupt(t *testing.T) {
	t.Parallel()
	features := sample()
	l := layoutOf(t, features, nil)
	f := &fakeFile{before: func(call, n int) (int, error) {
		switch call % 3 {
		case 0:
			return -1, syscall.EINTR
		case 1:
			return min(100, n), syscall.EINTR
		}
		return min(50, n), nil
	}}
	if err := l.writeAt(f.write, "f", 0, features); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(f.data, joined(t, l, features)) {
		t.Error("the file differs")
	}
}

func TestWriteFailures(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		err  error
		kind sluice.Kind
		want string
	}{
		"no space":    {syscall.ENOSPC, sluice.NoSpace, `safetensors: write "f": stopped after 100 of 1024 bytes: no space left on device`},
		"quota":       {syscall.EDQUOT, sluice.NoSpace, `safetensors: write "f": stopped after 100 of 1024 bytes: disk quota exceeded`},
		"too large":   {syscall.EFBIG, sluice.NoSpace, `safetensors: write "f": stopped after 100 of 1024 bytes: file too large`},
		"read only":   {syscall.EROFS, sluice.Denied, `safetensors: write "f": stopped after 100 of 1024 bytes: read-only file system`},
		"i/o error":   {syscall.EIO, sluice.Unavailable, `safetensors: write "f": stopped after 100 of 1024 bytes: input/output error`},
		"no progress": {nil, sluice.Unavailable, `safetensors: write "f": stopped after 100 of 1024 bytes: short write`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			features := []sluice.Feature{feature("a", 0, sluice.Int8, 896)}
			l := layoutOf(t, features, nil)
			f := &fakeFile{before: func(call, n int) (int, error) {
				if call == 0 {
					return 100, nil
				}
				return 0, c.err
			}}
			err := l.writeAt(f.write, "f", 0, features)
			wantKind(t, err, c.kind, c.want)
			if c.err != nil && !errors.Is(err, c.err) {
				t.Error("the cause is lost")
			}
		})
	}
}

func TestChecksummedWriteThatFailsLeavesNoHeader(t *testing.T) {
	t.Parallel()
	features := []sluice.Feature{feature("a", 0, sluice.Int8, 3*checksumChunk+5)}
	l := checksummed(t, features)
	for fail := range 5 {
		f := &fakeFile{before: func(call, n int) (int, error) {
			if call == fail {
				return 0, syscall.ENOSPC
			}
			return n, nil
		}}
		wantKind(t, l.writeAt(f.write, "f", 0, features), sluice.NoSpace, "")
		f.data = append(f.data, make([]byte, l.Size()-int64(len(f.data)))...)
		if _, err := ParseHeader(f.data, l.Size()); err == nil {
			t.Errorf("call %d failed, and the file looks whole", fail)
		}
	}
}

func TestChecksumsOfLongTensorsAreThoseOfTheWhole(t *testing.T) {
	t.Parallel()
	features := []sluice.Feature{
		feature("long", 3, sluice.Float32, checksumChunk/2+17),
		feature("exact", 4, sluice.Int8, checksumChunk),
		feature("short", 5, sluice.Int64, 3),
		feature("empty", 6, sluice.Bool, 0),
	}
	l := checksummed(t, features)
	sums, err := mapped(t, written(t, l, features)).Header().Checksums()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range features {
		if sums[f.Name] != Checksum(f.Data) {
			t.Errorf("%s: %08x, want %08x", f.Name, sums[f.Name], Checksum(f.Data))
		}
	}
}

func TestWritersRefuseOtherFeatures(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		features []sluice.Feature
		want     string
	}{
		"another number": {nil, `safetensors: write "features": are 0, the layout has 2`},
		"another order":  {[]sluice.Feature{feature("b", 0, sluice.Int8, 3), feature("a", 0, sluice.Int8, 3)}, `safetensors: write "b": is feature 0, where the layout has "a"`},
		"another spec":   {[]sluice.Feature{feature("a", 0, sluice.UInt8, 3), feature("b", 0, sluice.Int8, 3)}, `safetensors: write "a": is uint8[3], the layout has int8[3]`},
		"another length": {[]sluice.Feature{{Name: "a", Tensor: sluice.Tensor{Spec: sluice.Spec{DType: sluice.Int8, Shape: []int64{3}}, Data: make([]byte, 4)}}, feature("b", 0, sluice.Int8, 3)}, `safetensors: write "a": has 4 bytes of data, want 3 for int8[3]`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := layoutOf(t, []sluice.Feature{feature("a", 0, sluice.Int8, 3), feature("b", 0, sluice.Int8, 3)}, nil)
			_, err := l.Buffers(c.features)
			wantKind(t, err, sluice.Invalid, c.want)
			f := &fakeFile{}
			wantKind(t, l.writeAt(f.write, "f", 0, c.features), sluice.Invalid, c.want)
			var w bytes.Buffer
			_, err = l.Stream(&w, c.features)
			wantKind(t, err, sluice.Invalid, c.want)
			if f.calls > 0 || w.Len() > 0 {
				t.Error("something was written")
			}
		})
	}
}

func TestWriteFileNamesTheFileThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	l := layoutOf(t, nil, nil)
	f := onDisk(t, nil)
	wantKind(t, l.WriteFile(f, 0, nil), sluice.Invalid, fmt.Sprintf(`safetensors: write "%s": stopped after 0 of 64 bytes: bad file descriptor`, f.Name()))
	wantKind(t, l.WriteFile(f, -1, nil), sluice.Invalid, fmt.Sprintf(`safetensors: write "%s": offset is -1, want from 0 to 2^62`, f.Name()))
	f.Close()
	wantKind(t, l.WriteFile(f, 0, nil), sluice.Closed, "")
}

func TestWriteFileReportsAFullDevice(t *testing.T) {
	t.Parallel()
	f, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skipf("no /dev/full here: %v", err)
	}
	defer f.Close()
	wantKind(t, layoutOf(t, nil, nil).WriteFile(f, 0, nil), sluice.NoSpace, `safetensors: write "/dev/full": stopped after 0 of 64 bytes: no space left on device`)
}

type limitedWriter struct {
	room int
	err  error
}

func (w *limitedWriter) Write(b []byte) (int, error) {
	n := min(w.room, len(b))
	w.room -= n
	if n < len(b) {
		return n, w.err
	}
	return n, nil
}

func TestStreamSaysHowFarItCame(t *testing.T) {
	t.Parallel()
	features := []sluice.Feature{feature("a", 0, sluice.Int8, 896)}
	l := layoutOf(t, features, nil)
	n, err := l.Stream(&limitedWriter{room: 200, err: syscall.ECONNRESET}, features)
	wantKind(t, err, sluice.Unavailable, `safetensors: write "stream": stopped after 200 of 1024 bytes: connection reset by peer`)
	if n != 200 {
		t.Errorf("%d bytes, want 200", n)
	}
	_, err = l.Stream(&limitedWriter{room: 200}, features)
	if !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("%v, want a short write", err)
	}
}
