package safetensors

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

const (
	// maxVectors is the kernel's IOV_MAX.
	maxVectors = 1024
	// checksumChunk is how much data is written before it is checksummed: little enough that the checksum finds it in the
	// processor's cache, and enough that the calls don't count. The write goes first since it reads memory in order, at full
	// speed; a crc32c reads three places in turn and gets a third of that out of memory, and all of it out of the cache.
	checksumChunk = 1 << 20
)

// Buffers returns the file as a list of slices: the header, then the tensors' data in file order, without empty ones.
// The data is the caller's own, not a copy. It suits one vectored write; net.Buffers does that on a socket.
//
// features must be those that the layout was made for, in the same order. In a layout with checksums, they are computed
// here.
func (l *Layout) Buffers(features []sluice.Feature) ([][]byte, error) {
	bufs, err := l.buffers(features)
	if err != nil {
		return nil, err
	}
	head := l.bytes
	if l.sumsAt != nil {
		sums := make([]uint32, len(l.ordered))
		for at, i := range l.ordered {
			sums[at] = Checksum(features[i].Data)
		}
		head = l.fillChecksums(sums)
	} else {
		// The slice leaves the package, and the layout's own must stay as it is.
		head = append([]byte(nil), head...)
	}
	bufs[0] = head
	return bufs, nil
}

// buffers checks the features against the layout and lists their data in file order, behind room for the header.
func (l *Layout) buffers(features []sluice.Feature) ([][]byte, error) {
	if len(features) != len(l.listed) {
		return nil, invalid("write", "features", "are %d, the layout has %d", len(features), len(l.listed))
	}
	for i := range features {
		f, e := &features[i], &l.header.Entries[l.listed[i]]
		switch {
		case f.Name != e.Name:
			return nil, invalid("write", f.Name, "is feature %d, where the layout has %q", i, clip(e.Name))
		case !f.Equal(e.Spec):
			return nil, invalid("write", f.Name, "is %s, the layout has %s", f.Spec, e.Spec)
		case int64(len(f.Data)) != e.Bytes():
			return nil, invalid("write", f.Name, "has %d bytes of data, want %d for %s", len(f.Data), e.Bytes(), f.Spec)
		}
	}
	bufs := make([][]byte, 1, len(features)+1)
	for _, i := range l.ordered {
		if len(features[i].Data) > 0 {
			bufs = append(bufs, features[i].Data)
		}
	}
	return bufs, nil
}

// Stream writes the file to w in one pass, straight from the features' data, and returns the number of bytes written.
// features are as for [Layout.Buffers]. Since the header goes first, checksums cost a pass over the data before it.
//
// An error of w comes back as the cause of a [*sluice.Error] that tells how far it came.
func (l *Layout) Stream(w io.Writer, features []sluice.Feature) (int64, error) {
	bufs, err := l.Buffers(features)
	if err != nil {
		return 0, err
	}
	total := int64(0)
	for _, b := range bufs {
		n, err := w.Write(b)
		total += int64(n)
		if err == nil && n < len(b) {
			err = io.ErrShortWrite
		}
		if err != nil {
			return total, failed("write", "stream", fmt.Sprintf("stopped after %d of %d bytes", total, l.Size()), err)
		}
	}
	return total, nil
}

// WriteFile writes the file to f at offset off, which is 0 unless the file lies within a larger one. features are as
// for [Layout.Buffers]; the kernel copies straight from their data, which must not change meanwhile. It neither
// truncates nor syncs, and moves no file offset.
//
// Without checksums that is one system call for each two gigabytes or thousand tensors. With checksums, they are
// computed piece by piece just after the piece is written, and the header is written last: a fresh file that was not
// finished has no header.
//
// After an error, which part was written is undefined. Having run out of room is [sluice.NoSpace].
func (l *Layout) WriteFile(f *os.File, off int64, features []sluice.Feature) error {
	if off < 0 || off > 1<<62 {
		return invalid("write", f.Name(), "offset is %d, want from 0 to 2^62", off)
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return notOpen("write", f.Name(), err)
	}
	var result error
	// Control keeps the descriptor from being closed, and reused for another file, under the write.
	err = conn.Control(func(fd uintptr) {
		result = l.writeAt(func(bufs [][]byte, at int64) (int, error) {
			return unix.Pwritev(int(fd), bufs, at)
		}, f.Name(), off, features)
	})
	if err != nil {
		return notOpen("write", f.Name(), err)
	}
	return result
}

// vectoredWrite is pwritev(2): it may write less than it was given.
type vectoredWrite func(bufs [][]byte, at int64) (int, error)

func (l *Layout) writeAt(write vectoredWrite, name string, off int64, features []sluice.Feature) error {
	bufs, err := l.buffers(features)
	if err != nil {
		return err
	}
	out := fileWriter{write: write, name: name, at: off, total: l.Size()}
	if l.sumsAt == nil {
		bufs[0] = l.bytes
		return out.all(bufs)
	}
	sums := make([]uint32, len(l.ordered))
	out.at += l.header.DataStart
	var batch [][]byte
	var of []int // the places in sums of what is in batch
	n := 0
	flush := func() error {
		if err := out.all(slices.Clone(batch)); err != nil {
			return err
		}
		for k, piece := range batch {
			sums[of[k]] = UpdateChecksum(sums[of[k]], piece)
		}
		batch, of, n = batch[:0], of[:0], 0
		return nil
	}
	for at, i := range l.ordered {
		for piece := range slices.Chunk(features[i].Data, checksumChunk) {
			batch, of, n = append(batch, piece), append(of, at), n+len(piece)
			if n >= checksumChunk {
				if err := flush(); err != nil {
					return err
				}
			}
		}
	}
	if err := flush(); err != nil {
		return err
	}
	out.at = off
	return out.all([][]byte{l.fillChecksums(sums)})
}

// fileWriter writes slices one behind the other.
type fileWriter struct {
	write vectoredWrite
	name  string
	at    int64 // where the next byte goes
	done  int64 // bytes written
	total int64 // of the whole file, for messages
}

// all writes all of bufs, in as few calls as the kernel allows. It modifies the list, not the bytes.
func (w *fileWriter) all(bufs [][]byte) error {
	for len(bufs) > 0 {
		if len(bufs[0]) == 0 {
			bufs = bufs[1:]
			continue
		}
		n, err := w.write(bufs[:min(len(bufs), maxVectors)], w.at)
		if n > 0 {
			w.at += int64(n)
			w.done += int64(n)
			bufs = advance(bufs, n)
		}
		switch {
		case errors.Is(err, syscall.EINTR):
			continue
		case err == nil && n <= 0:
			// Asking again would never end.
			err = io.ErrShortWrite
		}
		if err != nil {
			return failed("write", w.name, fmt.Sprintf("stopped after %d of %d bytes", w.done, w.total), err)
		}
	}
	return nil
}

// advance drops the first n bytes of bufs.
func advance(bufs [][]byte, n int) [][]byte {
	for n > 0 && n >= len(bufs[0]) {
		n -= len(bufs[0])
		bufs = bufs[1:]
		if len(bufs) == 0 {
			return nil
		}
	}
	bufs[0] = bufs[0][n:]
	return bufs
}
