package safetensors

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

// Mapping is the content of one file: mapped privately by [Map], or in memory of its own after [Read]. Its methods may
// be called by several goroutines at once.
//
// The tensors that it hands out may be written to, and nobody else sees what was written; two requests for the same
// aligned tensor share its memory. From Map, they are memory of the mapping, and touching one after Close is a crash
// that Go can't recover from. From Read, they are ordinary memory and outlive Close.
type Mapping struct {
	header *Header

	mu     sync.RWMutex // guards what follows; Close waits for readers
	closed bool
	data   []byte // the data section
	mapped []byte // the whole file, if it is mapped
}

// Map maps f and checks its header against the size that the file has. want is the size in bytes that the caller
// expects, and a file of another size is [sluice.Corrupt]; below zero, any size will do. f must be open for reading,
// and may be closed afterwards.
//
// The mapping is private and writable, and not populated: a page costs memory once it is written to. It is no snapshot:
// a page that was not written to shows what the file holds now, and one behind the end of a file that was truncated
// since is a crash. So whoever maps a file holds a lock that keeps writers away, and the header is read, not mapped.
func Map(f *os.File, want int64) (*Mapping, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, failed("map", f.Name(), "", err)
	}
	if !info.Mode().IsRegular() {
		return nil, invalid("map", f.Name(), "is not a regular file (%s)", info.Mode().Type())
	}
	size := info.Size()
	if want >= 0 && size != want {
		return nil, corrupt("map", f.Name(), "is %d bytes long, want %d", size, want)
	}
	header, err := ReadHeader(f, size)
	if err != nil {
		return nil, err
	}
	if int64(int(size)) != size {
		return nil, refused(sluice.NoSpace, "map", f.Name(), "%d bytes do not fit the address space", size)
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, notOpen("map", f.Name(), err)
	}
	var mapped []byte
	var mapErr error
	err = conn.Control(func(fd uintptr) {
		// Without MAP_NORESERVE, the kernel would count every page as if it were going to be written to, and
		// refuse a file larger than memory.
		const protection, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_PRIVATE | unix.MAP_NORESERVE
		mapped, mapErr = unix.Mmap(int(fd), 0, int(size), protection, flags)
	})
	if err != nil {
		return nil, notOpen("map", f.Name(), err)
	}
	if mapErr != nil {
		return nil, mapFailed(f.Name(), size, mapErr)
	}
	return &Mapping{header: header, mapped: mapped, data: mapped[header.DataStart:]}, nil
}

func mapFailed(name string, size int64, err error) error {
	e := &sluice.Error{Op: "safetensors: map", Subject: name, Detail: fmt.Sprintf("%d bytes", size), Err: err}
	switch {
	case errors.Is(err, syscall.ENOMEM):
		e.Kind, e.Hint = sluice.NoSpace, "the limit may be on mappings: raise vm.max_map_count or release samples"
	case errors.Is(err, syscall.ENODEV):
		e.Kind, e.Hint = sluice.Unsupported, "this file system can't map files; read it instead"
	default:
		return failed("map", name, e.Detail, err)
	}
	return e
}

// Read reads a file of the given size in bytes through r into fresh memory, for media that must not be mapped. Data is
// aligned to 64 bytes, as in a mapping of a file that a [Layout] describes. The header is checked before memory is
// taken for the data; size is the caller's word, who compares it with what there is room for.
func Read(r io.ReaderAt, size int64) (*Mapping, error) {
	header, err := ReadHeader(r, size)
	if err != nil {
		return nil, err
	}
	return ReadData(r, header)
}

// ReadData is the second half of Read, for a header that was read already.
func ReadData(r io.ReaderAt, header *Header) (*Mapping, error) {
	n := header.Size() - header.DataStart
	if int64(int(n)) != n || n > 1<<46 {
		return nil, refused(sluice.NoSpace, "read", "data", "%d bytes do not fit the address space", n)
	}
	m := &Mapping{header: header, data: alignedBytes(int(n))}
	if err := readFull(r, m.data, header.DataStart, "data"); err != nil {
		return nil, err
	}
	return m, nil
}

// alignedBytes returns n zeroed bytes that begin at a multiple of Alignment.
func alignedBytes(n int) []byte {
	if n == 0 {
		return nil
	}
	b := make([]byte, n+Alignment-1)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) % Alignment)
	return b[skip : skip+n : skip+n]
}

// Header returns the file's header, which stays valid after Close. It must not be modified.
func (m *Mapping) Header() *Header { return m.header }

// Feature returns the tensor with the given name. Its shape is the header's and must not be modified.
//
// In a file by another writer, data may begin at an offset that is not a multiple of the element size. Then the tensor
// is a copy, a new one each time, because [sluice.View] demands alignment.
func (m *Mapping) Feature(name string) (sluice.Feature, error) {
	e, ok := m.header.Find(name)
	if !ok {
		return sluice.Feature{}, refused(sluice.NotFound, "feature", name, "is not among the %d tensors of the file", len(m.header.Entries))
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.feature(e)
}

// Features returns the tensors with the given names, in that order; the rules are those of Feature. A nil order means
// all, in the order of their data.
func (m *Mapping) Features(order []string) ([]sluice.Feature, error) {
	if order == nil {
		m.mu.RLock()
		defer m.mu.RUnlock()
		features := make([]sluice.Feature, 0, len(m.header.Entries))
		for i := range m.header.Entries {
			f, err := m.feature(&m.header.Entries[i])
			if err != nil {
				return nil, err
			}
			features = append(features, f)
		}
		return features, nil
	}
	features := make([]sluice.Feature, 0, len(order))
	for _, name := range order {
		f, err := m.Feature(name)
		if err != nil {
			return nil, err
		}
		features = append(features, f)
	}
	return features, nil
}

// feature views, or copies, the data of e. The caller holds mu.
func (m *Mapping) feature(e *Entry) (sluice.Feature, error) {
	f := sluice.Feature{Name: e.Name, Tensor: sluice.Tensor{Spec: e.Spec}}
	if !e.Spec.DType.Valid() {
		return sluice.Feature{}, refused(sluice.Unsupported, "feature", e.Name, "has dtype %s, which no feature may have", e.RawDType)
	}
	data, err := m.bytes(e)
	if err != nil || len(data) == 0 {
		return f, err
	}
	if uintptr(unsafe.Pointer(unsafe.SliceData(data)))%uintptr(e.Spec.DType.Size()) != 0 {
		aligned := alignedBytes(len(data))
		copy(aligned, data)
		data = aligned
	}
	f.Data = data
	return f, nil
}

// bytes is the data of e. The caller holds mu.
func (m *Mapping) bytes(e *Entry) ([]byte, error) {
	if m.closed {
		return nil, refused(sluice.Closed, "feature", e.Name, "the mapping is closed")
	}
	return m.data[e.Begin:e.End:e.End], nil
}

// Verify compares each tensor's data with the checksums in the metadata, which reads all of it. checked is false,
// without an error, if the file carries none. The first tensor that differs is [sluice.Corrupt].
//
// It must run before a tensor is written to, and Close waits for it.
func (m *Mapping) Verify() (checked bool, err error) {
	sums, err := m.header.Checksums()
	if sums == nil || err != nil {
		return false, err
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	for i := range m.header.Entries {
		e := &m.header.Entries[i]
		data, err := m.bytes(e)
		if err != nil {
			return false, err
		}
		if got := Checksum(data); got != sums[e.Name] {
			return false, corrupt("verify", e.Name, "has crc32c %08x, the metadata says %08x", got, sums[e.Name])
		}
	}
	return true, nil
}

// Close unmaps the file, or lets go of the memory that it was read into. It is idempotent. No tensor of a mapped file
// may be in use.
func (m *Mapping) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil
	}
	mapped := m.mapped
	m.closed, m.data, m.mapped = true, nil, nil
	if mapped == nil {
		return nil
	}
	if err := unix.Munmap(mapped); err != nil {
		return failed("unmap", "file", "", err)
	}
	return nil
}
