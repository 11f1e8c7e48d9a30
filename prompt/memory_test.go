package prompt_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/prompt"
)

const syntheticLine = 8 << 10

var spaces = bytes.Repeat([]byte{' '}, syntheticLine)

// synthetic is a file system with one file, big.jsonl, of the given number of lines of 8 KiB, which are made as they are read.
type synthetic int64

type syntheticFile struct {
	lines int64
	read  int64
}

func (s synthetic) Open(name string) (fs.File, error) {
	if name != "big.jsonl" {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return &syntheticFile{lines: int64(s)}, nil
}

func (f *syntheticFile) Stat() (fs.FileInfo, error) { return f, nil }
func (f *syntheticFile) Name() string               { return "big.jsonl" }
func (f *syntheticFile) Size() int64                { return f.lines * syntheticLine }
func (f *syntheticFile) Mode() fs.FileMode          { return 0o444 }
func (f *syntheticFile) ModTime() time.Time         { return time.Time{} }
func (f *syntheticFile) IsDir() bool                { return false }
func (f *syntheticFile) Sys() any                   { return nil }
func (f *syntheticFile) Close() error               { return nil }

func (f *syntheticFile) Read(p []byte) (int, error) {
	n, err := f.ReadAt(p, f.read)
	f.read += int64(n)
	return n, err
}

func (f *syntheticFile) ReadAt(p []byte, off int64) (int, error) {
	n := 0
	line := make([]byte, syntheticLine)
	for n < len(p) {
		k := (off + int64(n)) / syntheticLine
		if k >= f.lines {
			return n, io.EOF
		}
		text := fmt.Appendf(line[:0], `{"input_ids":[%d,1,2,3],"loss_mask":[0,1,1,1]}`, k)
		copy(line[len(text):], spaces)
		line[syntheticLine-1] = '\n'
		n += copy(p[n:], line[(off+int64(n))%syntheticLine:])
	}
	return n, nil
}

// zeros is what a sparse file reads as.
type zeros struct {
	*syntheticFile
	size int64
}

func (z zeros) Stat() (fs.FileInfo, error) { return z, nil }
func (z zeros) Size() int64                { return z.size }
func (z zeros) Open(string) (fs.File, error) {
	return z, nil
}
func (z zeros) ReadAt(p []byte, off int64) (int, error) {
	tail := []byte("\n" + `{"input_ids":[1,2],"loss_mask":[0,1]}`)
	clear(p)
	for i := max(0, z.size-int64(len(tail))-off); i < int64(len(p)); i++ {
		p[i] = tail[off+i-(z.size-int64(len(tail)))]
	}
	return len(p), nil
}

// heap is what is live.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// memoryLines makes a file of 400 MiB, which is what the bound below is to be held against.
var memoryLines = 50 << 10

// Not parallel: it measures the memory of the whole process.
func TestMemoryStaysBoundedHoweverLargeTheFile(t *testing.T) {
	lines := memoryLines
	for _, o := range []prompt.Options{
		{},
		{Shuffle: true},
		{Shuffle: true, Rows: 8, Bucket: 1024},
		{PackTokens: 2048},
	} {
		o.FS, o.Files = synthetic(lines), []string{"big.jsonl"}
		r := open(t, o)
		before, most, n := heap(), int64(0), 0
		for _, err := range r.All(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			if n++; n%(1+lines/16/max(o.Rows, 1)) == 1 {
				most = max(most, heap()-before)
			}
		}
		if most > 80<<20 {
			t.Errorf("%+v: %d MiB are live at most, want 80 for a file of %d", o, most>>20, lines*syntheticLine>>20)
		}
		if s := r.Stats(); s.Rows != int64(lines) {
			t.Errorf("%d rows, want %d", s.Rows, lines)
		}
	}
}

// Not parallel, for the same reason.
func TestALineThatIsTooLongIsNeverHeld(t *testing.T) {
	const size = 512 << 20
	for _, shuffle := range []bool{false, true} {
		r := open(t, prompt.Options{FS: zeros{&syntheticFile{}, size}, Files: []string{"sparse"}, OnBad: prompt.SkipBad, MaxLineBytes: 1 << 20, Shuffle: shuffle})
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		equal(t, "rows", firstIDs(drain(t, r)), []int64{1})
		runtime.ReadMemStats(&after)
		if n := (after.TotalAlloc - before.TotalAlloc) >> 20; n > 16 {
			t.Errorf("%d MiB were allocated for a line of 512 that was skipped", n)
		}
		equal(t, "bad", r.Stats().Bad(), int64(1))
	}
}

func TestTheFirstRowOfAHugeFileComesAtOnce(t *testing.T) {
	t.Parallel()
	for _, shuffle := range []bool{false, true} {
		r := open(t, prompt.Options{FS: synthetic(1 << 29), Files: []string{"big.jsonl"}, Shuffle: shuffle}) // 4 TiB
		if _, err := r.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
		if n := r.Stats().Bytes; n > 70<<20 {
			t.Errorf("%d MiB were read for the first row", n>>20)
		}
	}
}

func TestALongLineCanBeInterruptedAndTakenUpAgain(t *testing.T) {
	t.Parallel()
	ctx := &patience{Context: t.Context()}
	r := open(t, prompt.Options{FS: zeros{&syntheticFile{}, 8 << 20}, Files: []string{"sparse"}, OnBad: prompt.SkipBad, MaxLineBytes: 1 << 20})
	interrupted := 0
	for {
		ctx.left = 5
		b, err := r.Next(ctx)
		if errors.Is(err, context.Canceled) {
			interrupted++
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		equal(t, "position", b.Positions[0].Index, int64(1))
		break
	}
	if interrupted == 0 {
		t.Error("the long line was read in one go")
	}
	equal(t, "bytes", r.Stats().Bytes, int64(8<<20))
}

// patience is a context that is cancelled after it was asked a few times.
type patience struct {
	context.Context
	left int
}

func (p *patience) Err() error {
	if p.left--; p.left < 0 {
		return context.Canceled
	}
	return nil
}

func benchmark(b *testing.B, tokens int, o prompt.Options) {
	line := []byte(ids(100000, tokens) + "\n")
	data := bytes.Repeat(line, 1+(32<<20)/len(line))
	o.FS, o.Files, o.Epochs = memFile{data}, []string{"x.jsonl"}, prompt.Endless
	r := open(b, o)
	b.SetBytes(int64(len(line)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := r.Next(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "lines/s")
}

// memFile is a file in memory whose ReadAt is one copy.
type memFile struct{ data []byte }

func (m memFile) Open(string) (fs.File, error) {
	return memHandle{&syntheticFile{}, bytes.NewReader(m.data)}, nil
}

type memHandle struct {
	*syntheticFile
	r *bytes.Reader
}

func (m memHandle) Stat() (fs.FileInfo, error)              { return m, nil }
func (m memHandle) Size() int64                             { return m.r.Size() }
func (m memHandle) ReadAt(p []byte, off int64) (int, error) { return m.r.ReadAt(p, off) }

func BenchmarkRead(b *testing.B) {
	for _, n := range []int{128, 2048} {
		b.Run(fmt.Sprintf("tokens=%d", n), func(b *testing.B) { benchmark(b, n, prompt.Options{}) })
		b.Run(fmt.Sprintf("tokens=%d/shuffled", n), func(b *testing.B) { benchmark(b, n, prompt.Options{Shuffle: true}) })
		b.Run(fmt.Sprintf("tokens=%d/resumed", n), func(b *testing.B) {
			skip := true
			benchmark(b, n, prompt.Options{Skip: func(sluice.Position) bool { skip = !skip; return skip }})
		})
	}
}

// broken is a file that cannot be read behind its first bytes.
type broken struct{ memHandle }

func (b broken) Open(string) (fs.File, error) { return b, nil }
func (b broken) ReadAt(p []byte, off int64) (int, error) {
	return 7, &fs.PathError{Op: "read", Path: "x", Err: syscall.EIO}
}

func TestAReadThatFailsIsAnErrorWithItsPlace(t *testing.T) {
	t.Parallel()
	_, err := open(t, prompt.Options{FS: broken{memHandle{&syntheticFile{}, bytes.NewReader([]byte(ids(1, 2)))}}}).Next(t.Context())
	want := `prompt: read "train.jsonl": cannot be read at byte 7: input/output error`
	if err == nil || err.Error() != want || !errors.Is(err, sluice.ErrUnavailable) {
		t.Fatalf("got %v, want %s", err, want)
	}
}
