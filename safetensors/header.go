package safetensors

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"sync"
	"unicode/utf8"

	"github.com/sluice-ml/sluice"
)

// Entry describes one tensor of a file.
type Entry struct {
	Name string
	// Spec is the shape and dtype. Its DType is zero if the file's dtype has no counterpart; the shape is set
	// regardless.
	Spec sluice.Spec
	// RawDType is the dtype as the file spells it: "BF16", "F8_E8M0".
	RawDType string
	// Begin and End bound the tensor's bytes, counted from the first byte of data.
	Begin, End int64
}

// Bytes is the size of the tensor's data in bytes.
func (e *Entry) Bytes() int64 { return e.End - e.Begin }

// Header is what a file says about itself. One that was returned by this package is valid: entries cover the data
// exactly, from 0 to the end of the file. It must not be modified; then it may be used by several goroutines at once.
type Header struct {
	// Entries are the tensors in the order of their data, whatever the order of their names in the JSON.
	Entries []Entry
	// Metadata is nil if the file has none.
	Metadata map[string]string
	// DataStart is the offset of the first byte of data in the file.
	DataStart int64

	index map[string]int // only for more entries than a scan is good for
}

// indexAbove is the number of entries up to which comparing names one by one is as quick as a map.
const indexAbove = 16

// Find returns the entry of the tensor with the given name.
func (h *Header) Find(name string) (*Entry, bool) {
	if h.index != nil {
		i, ok := h.index[name]
		if !ok {
			return nil, false
		}
		return &h.Entries[i], true
	}
	for i := range h.Entries {
		if h.Entries[i].Name == name {
			return &h.Entries[i], true
		}
	}
	return nil, false
}

// Size is the size of the whole file in bytes.
func (h *Header) Size() int64 {
	if len(h.Entries) == 0 {
		return h.DataStart
	}
	return h.DataStart + h.Entries[len(h.Entries)-1].End
}

// reindex builds the index if there are enough entries for one. The entries must be in their final order.
func (h *Header) reindex() {
	h.index = nil
	if len(h.Entries) <= indexAbove {
		return
	}
	h.index = make(map[string]int, len(h.Entries))
	for i := range h.Entries {
		h.index[h.Entries[i].Name] = i
	}
}

// Checksums returns the checksums in the metadata, by tensor name. It is nil, without an error, if the file carries
// none. Checksums that can't be read, or that are not those of exactly the tensors in the file, are [sluice.Corrupt].
func (h *Header) Checksums() (map[string]uint32, error) {
	text, ok := h.Metadata[ChecksumsKey]
	if !ok {
		return nil, nil
	}
	sums, err := DecodeChecksums(text)
	if err != nil {
		return nil, err
	}
	for i := range h.Entries {
		if _, ok := sums[h.Entries[i].Name]; !ok {
			return nil, corrupt("checksums", h.Entries[i].Name, "has no checksum in the metadata under %s", ChecksumsKey)
		}
	}
	if len(sums) != len(h.Entries) {
		return nil, corrupt("checksums", ChecksumsKey, "lists %d tensors, the file has %d", len(sums), len(h.Entries))
	}
	return sums, nil
}

// ParseHeader reads the header of a file of the given size in bytes; below zero, of a file whose size nobody knows yet, which is
// then the Size of the header. data is the beginning of the file, at least to the end of the header; what follows is not
// looked at. The result shares no memory with data.
//
// Every refusal is [sluice.Corrupt] and names the tensor or the field, what was found and what was expected. Byte numbers
// count from the header's opening brace, those of data from DataStart.
func ParseHeader(data []byte, size int64) (*Header, error) {
	known := size >= 0
	if !known {
		size = math.MaxInt64
	}
	n, err := headerLength(data, size)
	if err != nil {
		return nil, err
	}
	if int64(len(data)) < lengthBytes+n {
		return nil, corrupt("parse", "header", "is %d bytes long, only %d of them are here", n, len(data)-lengthBytes)
	}
	return parseHeader(string(data[lengthBytes:lengthBytes+n]), size, known)
}

// ReadHeader reads the header of a file of the given size in bytes through r, with one read if the header is of usual
// length. The refusals are those of [ParseHeader].
func ReadHeader(r io.ReaderAt, size int64) (*Header, error) {
	first := firstReads.Get().(*[firstRead]byte)
	defer firstReads.Put(first)
	head := first[:min(max(size, 0), firstRead)]
	if err := readFull(r, head, 0, "header"); err != nil {
		return nil, err
	}
	n, err := headerLength(head, size)
	if err != nil {
		return nil, err
	}
	if lengthBytes+n <= int64(len(head)) {
		return parseHeader(string(head[lengthBytes:lengthBytes+n]), size, true)
	}
	text := make([]byte, n)
	got := copy(text, head[lengthBytes:])
	if err := readFull(r, text[got:], firstRead, "header"); err != nil {
		return nil, err
	}
	return parseHeader(string(text), size, true)
}

// firstRead is enough for the header of a sample, ref and checksums included.
const firstRead = 8 << 10

var firstReads = sync.Pool{New: func() any { return new([firstRead]byte) }}

// headerLength checks the first eight bytes against the format's bound and the file's size, so that
// nothing is allocated on the word of the file alone.
func headerLength(data []byte, size int64) (int64, error) {
	if size < lengthBytes || len(data) < lengthBytes {
		have := min(max(size, 0), int64(len(data)))
		return 0, corrupt("parse", "file", "is %d bytes long, want at least the %d of the header length", have, lengthBytes)
	}
	n := binary.LittleEndian.Uint64(data)
	if n > MaxHeader {
		return 0, corrupt("parse", "header length", "is %d, want at most %d", n, MaxHeader)
	}
	if int64(n) > size-lengthBytes {
		return 0, corrupt("parse", "header length", "is %d, but only %d bytes follow it in the file", n, size-lengthBytes)
	}
	return int64(n), nil
}

// readFull fills buf from r at off. Bytes that are not there are corruption; another failure is the medium's.
func readFull(r io.ReaderAt, buf []byte, off int64, what string) error {
	if len(buf) == 0 {
		return nil
	}
	n, err := r.ReadAt(buf, off)
	if n == len(buf) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return corrupt("read", what, "ends after %d bytes, want %d", off+int64(n), off+int64(len(buf)))
	}
	return failed("read", what, fmt.Sprintf("stopped after %d of %d bytes", off+int64(n), off+int64(len(buf))), err)
}

// parseHeader parses the JSON of a header and checks it against the size of its file, or against a bound that the size has if it is not known.
func parseHeader(text string, size int64, known bool) (*Header, error) {
	s := scanner{text: text, op: "parse", subject: "header", maxItems: MaxItems}
	return s.header(size, known)
}

func (s *scanner) header(size int64, known bool) (*Header, error) {
	text := s.text
	if text == "" {
		return nil, s.fail("is empty, want a JSON object")
	}
	if text[0] != '{' {
		return nil, s.fail("starts with %q, want '{'", text[0])
	}
	if !utf8.ValidString(text) {
		return nil, s.fail("is not valid UTF-8 at byte %d", invalidUTF8(text))
	}
	h := &Header{DataStart: lengthBytes + int64(len(text))}
	dataSize := size - h.DataStart
	s.pos++
	for first := true; ; first = false {
		s.subject = "header"
		more, err := s.member(first)
		if err != nil {
			return nil, err
		}
		if !more {
			break
		}
		name, err := s.key("a tensor name")
		if err != nil {
			return nil, err
		}
		s.subject = name
		if name == metadataKey {
			if h.Metadata != nil {
				return nil, s.fail("is there twice, want it once")
			}
			if h.Metadata, err = s.stringMap(); err != nil {
				return nil, err
			}
			continue
		}
		if _, ok := h.Find(name); ok {
			return nil, s.fail("is there twice, want each name once")
		}
		if len(h.Entries) == s.maxItems {
			return nil, s.fail("is tensor %d, want at most %d", s.maxItems+1, s.maxItems)
		}
		e := Entry{Name: name}
		if err := s.entry(&e); err != nil {
			return nil, err
		}
		if e.End > dataSize {
			return nil, s.fail("ends at byte %d of the data, but the file has only %d bytes of data", e.End, max(dataSize, 0))
		}
		if h.Entries == nil {
			h.Entries = make([]Entry, 0, 8)
		}
		h.Entries = append(h.Entries, e)
		if h.index != nil {
			h.index[name] = len(h.Entries) - 1
		} else {
			h.reindex()
		}
	}
	for i := s.pos; i < len(text); i++ {
		if text[i] != ' ' {
			return nil, s.fail("has %q at byte %d behind its closing '}', want nothing but spaces", text[i], i)
		}
	}
	end, err := h.cover()
	if err != nil {
		return nil, err
	}
	if known && end != dataSize {
		return nil, corrupt("parse", "data", "is %d bytes long, but the tensors end at byte %d", dataSize, end)
	}
	return h, nil
}

// cover puts the entries in the order of their data, checks that they leave no hole and overlap nowhere, and returns where
// they end.
func (h *Header) cover() (int64, error) {
	byOffset := func(a, b Entry) int {
		return cmp.Or(cmp.Compare(a.Begin, b.Begin), cmp.Compare(a.End, b.End))
	}
	// Writers list tensors in the order of their data almost without exception. The sort is stable so that empty
	// tensors at one offset keep the order of the JSON.
	if !slices.IsSortedFunc(h.Entries, byOffset) {
		slices.SortStableFunc(h.Entries, byOffset)
		h.reindex()
	}
	end := int64(0)
	for i := range h.Entries {
		switch e := &h.Entries[i]; {
		case e.Begin > end:
			return 0, corrupt("parse", e.Name, "begins at byte %d of the data, want %d: nothing covers the %d bytes between",
				e.Begin, end, e.Begin-end)
		case e.Begin < end:
			return 0, corrupt("parse", e.Name, "begins at byte %d of the data, want %d: it overlaps %q", e.Begin, end, clip(h.Entries[i-1].Name))
		default:
			end = e.End
		}
	}
	return end, nil
}

// entry parses what the header says about one tensor, and checks that shape, dtype and offsets agree.
func (s *scanner) entry(e *Entry) error {
	const hasDType, hasShape, hasOffsets = 1, 2, 4
	if err := s.open('{', "an object with dtype, shape and data_offsets"); err != nil {
		return err
	}
	has := 0
	for first := true; ; first = false {
		more, err := s.member(first)
		if err != nil {
			return err
		}
		if !more {
			break
		}
		field, err := s.key("a field name")
		if err != nil {
			return err
		}
		var bit int
		switch field {
		case "dtype":
			bit = hasDType
		case "shape":
			bit = hasShape
		case "data_offsets":
			bit = hasOffsets
		default:
			return s.fail("has a field %q, want dtype, shape and data_offsets only", clip(field))
		}
		if has&bit != 0 {
			return s.fail("has %s twice, want it once", field)
		}
		has |= bit
		switch bit {
		case hasDType:
			e.RawDType, err = s.str("dtype as a string")
		case hasShape:
			err = s.shape(e)
		case hasOffsets:
			err = s.offsets(e)
		}
		if err != nil {
			return err
		}
	}
	switch {
	case has&hasDType == 0:
		return s.fail("has no dtype")
	case has&hasShape == 0:
		return s.fail("has no shape")
	case has&hasOffsets == 0:
		return s.fail("has no data_offsets")
	}
	want, err := s.bytes(e)
	if err != nil {
		return err
	}
	if e.End < e.Begin {
		return s.fail("data_offsets is [%d,%d], want the end behind the begin", e.Begin, e.End)
	}
	if e.Bytes() != want {
		return s.fail("data_offsets is [%d,%d], %d bytes, want %d for %s%s",
			e.Begin, e.End, e.Bytes(), want, e.RawDType, shapeText(e.Spec.Shape))
	}
	return nil
}

// bytes resolves the dtype and returns the size in bytes of a tensor with the entry's shape.
func (s *scanner) bytes(e *Entry) (int64, error) {
	spec := e.Spec
	if d, ok := ParseDType(e.RawDType); ok {
		e.Spec.DType = d
		e.RawDType = formatNames[d] // the constant, so that the entry does not hold on to the header's text
		if err := e.Spec.Validate(); err != nil {
			return 0, s.fail("%s", detail(err))
		}
		return e.Spec.Bytes(), nil
	}
	bits := foreignBits(e.RawDType)
	if bits == 0 {
		return 0, s.fail("dtype is %q, which the format does not have", clip(e.RawDType))
	}
	// As bytes, the elements are below 2^53, so that their bits cannot overflow.
	spec.DType = sluice.UInt8
	if err := spec.Validate(); err != nil {
		return 0, s.fail("%s", detail(err))
	}
	total := spec.Bytes() * bits
	if total%8 != 0 {
		return 0, s.fail("%s%s is %d bits, want whole bytes", e.RawDType, shapeText(e.Spec.Shape), total)
	}
	return total / 8, nil
}

func (s *scanner) shape(e *Entry) error {
	if err := s.open('[', "shape as an array"); err != nil {
		return err
	}
	var axes [maxRank]int64
	n := 0
	for first := true; ; first = false {
		more, err := s.element(first)
		if err != nil {
			return err
		}
		if !more {
			break
		}
		if n == maxRank {
			return s.fail("shape has more than %d axes", maxRank)
		}
		if axes[n], err = s.integer("shape", n); err != nil {
			return err
		}
		n++
	}
	e.Spec.Shape = append(make([]int64, 0, n), axes[:n]...)
	return nil
}

func (s *scanner) offsets(e *Entry) error {
	if err := s.open('[', "data_offsets as an array"); err != nil {
		return err
	}
	var at [2]int64
	n := 0
	for first := true; ; first = false {
		more, err := s.element(first)
		if err != nil {
			return err
		}
		if !more {
			break
		}
		if n == len(at) {
			return s.fail("data_offsets has more than 2 numbers, want begin and end")
		}
		if at[n], err = s.integer("data_offsets", n); err != nil {
			return err
		}
		n++
	}
	if n != len(at) {
		return s.fail("data_offsets has %d numbers, want begin and end", n)
	}
	e.Begin, e.End = at[0], at[1]
	return nil
}
