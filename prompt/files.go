package prompt

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"sort"
	"strings"

	"github.com/sluice-ml/sluice"
)

// maxBlocks bounds the memory of a permutation (4 bytes a block).
const maxBlocks = 1 << 24

// file is one input as it was at Open.
type file struct {
	path       string
	size       int64
	firstBlock int     // number of blocks in the files before it
	newlines   []int64 // newlines before block i, for as many blocks as were ever asked for
}

// fileSet is all inputs, cut into blocks that are numbered through.
type fileSet struct {
	fsys       fs.FS
	files      []file
	blockBytes int64
	blocks     int
	size       int64
}

// block is a byte range of one file.
type block struct {
	file       int
	start, end int64
}

type handle interface {
	io.ReaderAt
	io.Closer
}

// openFiles looks at every file once and leaves none open: there may be very many.
func openFiles(fsys fs.FS, paths []string, blockBytes int64) (*fileSet, error) {
	s := &fileSet{fsys: fsys, files: make([]file, 0, len(paths)), blockBytes: blockBytes}
	for _, p := range paths {
		f := file{path: p}
		info, err := s.stat(p)
		if err != nil {
			return nil, pathError("prompt: open", p, err)
		}
		switch mode := info.Mode(); {
		case mode.IsDir():
			return nil, &sluice.Error{Kind: sluice.Invalid, Op: "prompt: open", Subject: p, Detail: "is a directory, want a JSONL file", Hint: "name the files in it"}
		case !mode.IsRegular():
			return nil, &sluice.Error{Kind: sluice.Invalid, Op: "prompt: open", Subject: p, Detail: "is not a regular file (" + mode.String() + "), so it has no size to fix positions by",
				Hint: "write the rows to a file first"}
		}
		f.size = info.Size()
		h, err := s.open(p)
		if err != nil {
			return nil, pathError("prompt: open", p, err)
		}
		if err := h.Close(); err != nil {
			return nil, pathError("prompt: open", p, err)
		}
		f.firstBlock = s.blocks
		s.size += f.size
		if f.size > 0 {
			n := (f.size-1)/blockBytes + 1
			if n > maxBlocks || s.blocks+int(n) > maxBlocks {
				return nil, &sluice.Error{Kind: sluice.Invalid, Op: "prompt: open", Subject: "BlockBytes",
					Detail: fmt.Sprintf("is %d, which cuts the files into more than %d blocks", blockBytes, maxBlocks), Hint: "raise it"}
			}
			s.blocks += int(n)
		}
		s.files = append(s.files, f)
	}
	if s.size == 0 {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: "prompt: open", Subject: paths[0], Detail: "there is no data: all files given are empty"}
	}
	return s, nil
}

func (s *fileSet) stat(p string) (fs.FileInfo, error) {
	if s.fsys != nil {
		return fs.Stat(s.fsys, p)
	}
	return os.Stat(p)
}

func (s *fileSet) open(p string) (handle, error) {
	if s.fsys == nil {
		return os.Open(p)
	}
	f, err := s.fsys.Open(p)
	if err != nil {
		return nil, err
	}
	h, ok := f.(handle)
	if !ok {
		_ = f.Close()
		return nil, &sluice.Error{Kind: sluice.Unsupported, Detail: fmt.Sprintf("%T does not implement io.ReaderAt, which prompt files need", f)}
	}
	return h, nil
}

// openAgain opens file i and checks that it still is what it was at Open.
func (s *fileSet) openAgain(i int) (handle, error) {
	if err := s.unchanged(i); err != nil {
		return nil, err
	}
	h, err := s.open(s.files[i].path)
	if err != nil {
		return nil, pathError("prompt: read", s.files[i].path, err)
	}
	return h, nil
}

// unchanged looks the file up by its name, so that one that was replaced or removed is noticed although its handle still reads.
func (s *fileSet) unchanged(i int) error {
	f := &s.files[i]
	info, err := s.stat(f.path)
	if err != nil {
		return pathError("prompt: read", f.path, err)
	}
	if info.Size() != f.size {
		return changed(f, info.Size())
	}
	return nil
}

func changed(f *file, size int64) error {
	return &sluice.Error{Kind: sluice.Corrupt, Op: "prompt: read", Subject: f.path,
		Detail: fmt.Sprintf("has %d bytes, but had %d when it was opened; positions in it would no longer hold", size, f.size),
		Hint:   "do not change prompt files while they are read"}
}

func pathError(op, p string, err error) *sluice.Error {
	e := &sluice.Error{Kind: sluice.Unavailable, Op: op, Subject: p, Err: err}
	var own *sluice.Error
	var pe *fs.PathError
	if errors.As(err, &own) {
		e.Kind, e.Detail, e.Err = own.Kind, own.Detail, nil
		return e
	}
	if errors.As(err, &pe) {
		e.Err = pe.Err // the path is the subject already
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		e.Kind, e.Detail = sluice.NotFound, "there is no such file"
	case errors.Is(err, fs.ErrPermission):
		e.Kind, e.Detail = sluice.Denied, "may not be read by this user"
	case errors.Is(err, fs.ErrInvalid):
		e.Kind, e.Detail = sluice.Invalid, "is not a path that this file system takes"
	}
	return e
}

// block returns the block with the given number.
func (s *fileSet) block(n int) block {
	// The last file that begins at or before n; empty files begin there too, but come before the one that has it.
	i := sort.Search(len(s.files), func(i int) bool { return s.files[i].firstBlock > n }) - 1
	for s.files[i].size == 0 {
		i--
	}
	f := &s.files[i]
	start := int64(n-f.firstBlock) * s.blockBytes
	return block{file: i, start: start, end: start + min(s.blockBytes, f.size-start)}
}

// newlinesBefore counts the newlines in front of a block. Counts are kept, so that all calls together read a file once at most.
func (s *fileSet) newlinesBefore(ctx context.Context, b block) (int64, error) {
	f := &s.files[b.file]
	n := int(b.start / s.blockBytes)
	if n == 0 {
		return 0, nil
	}
	if len(f.newlines) == 0 {
		f.newlines = append(f.newlines, 0)
	}
	if n < len(f.newlines) {
		return f.newlines[n], nil
	}
	h, err := s.openAgain(b.file)
	if err != nil {
		return 0, err
	}
	defer func() { _ = h.Close() }()
	buf := make([]byte, min(1<<20, s.blockBytes))
	for i := len(f.newlines) - 1; i < n; i++ {
		count := f.newlines[i]
		for at, end := int64(i)*s.blockBytes, int64(i+1)*s.blockBytes; at < end; {
			if err := ctx.Err(); err != nil {
				return 0, err
			}
			part := buf[:min(int64(len(buf)), end-at)]
			if k, err := h.ReadAt(part, at); k < len(part) {
				return 0, shortRead(f, at+int64(k), err)
			}
			count += int64(bytes.Count(part, newline))
			at += int64(len(part))
		}
		f.newlines = append(f.newlines, count)
	}
	return f.newlines[n], nil
}

var newline = []byte{'\n'}

func shortRead(f *file, at int64, err error) error {
	if err == nil || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return &sluice.Error{Kind: sluice.Corrupt, Op: "prompt: read", Subject: f.path,
			Detail: fmt.Sprintf("ends at byte %d, but had %d bytes when it was opened: it shrank while it was read", at, f.size)}
	}
	e := pathError("prompt: read", f.path, err)
	if e.Detail == "" {
		e.Detail = fmt.Sprintf("cannot be read at byte %d", at)
	}
	return e
}

// fingerprint names the stream by everything that fixes the order of its lines.
func (s *fileSet) fingerprint(o *Options) string {
	h := sha256.New()
	_, _ = io.WriteString(h, "sluice prompt stream 1\n")
	base := filepath.Base
	if s.fsys != nil {
		base = path.Base
	}
	for _, f := range s.files {
		_, _ = fmt.Fprintf(h, "file %d %q\n", f.size, base(f.path))
	}
	if o.Shuffle {
		_, _ = fmt.Fprintf(h, "shuffle %d %d %d %d\n", o.Seed, o.BlockBytes, o.BufferRows, o.BufferBytes)
	}
	return idText(base(s.files[0].path), 48) + ":" + hex.EncodeToString(h.Sum(nil)[:8])
}

// idText makes a file name fit the form of ids, which allows neither a leading dot nor two dots in a row.
func idText(name string, limit int) string {
	var b strings.Builder
	last := byte('.')
	for i := 0; i < len(name) && b.Len() < limit; i++ {
		c := name[i]
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '_':
		case c == '-' && b.Len() > 0:
		case c == '.' && last != '.':
		default:
			c = '_'
		}
		b.WriteByte(c)
		last = c
	}
	return b.String()
}
