package natsjournal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/sluice-ml/sluice"
)

// A message is a head and a body. The body is a piece of a run of records; pieces are parts until the last, whose kind says what they are together.
//
//	 0  version
//	 1  kind
//	 2  parts before this piece, uint32
//	 6  place in the stream, uint64
//	14  writer, 8 bytes
//	22  crc32c of all the rest, uint32
//	26  body
//
// A record in the body is its length doubled, plus one if it is lazy, as a uvarint, and its data. Numbers are little-endian.
type message struct {
	kind   byte
	parts  uint32
	seq    uint64
	writer writerID
	body   []byte
}

const (
	version  = 1
	headSize = 26
	crcAt    = 22

	kindPart     = 'p'
	kindRecords  = 'r'
	kindSnapshot = 's'
	kindClaim    = 'c' // the writer's first message: whoever wrote before is fenced
)

type writerID [8]byte

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(b []byte) uint32 {
	return crc32.Update(crc32.Checksum(b[:crcAt], castagnoli), castagnoli, b[headSize:])
}

// seal fills in the head of b, whose first headSize bytes are free for it.
func seal(b []byte, kind byte, parts uint32, seq uint64, writer writerID) {
	b[0], b[1] = version, kind
	binary.LittleEndian.PutUint32(b[2:], parts)
	binary.LittleEndian.PutUint64(b[6:], seq)
	copy(b[14:], writer[:])
	binary.LittleEndian.PutUint32(b[crcAt:], checksum(b))
}

func parse(b []byte) (message, error) {
	if len(b) < headSize {
		return message{}, fmt.Errorf("is %d bytes, shorter than a head", len(b))
	}
	if b[0] != version {
		return message{}, fmt.Errorf("is of version %d, want %d; was it written by a newer release?", b[0], version)
	}
	if got, want := checksum(b), binary.LittleEndian.Uint32(b[crcAt:]); got != want {
		return message{}, fmt.Errorf("has the checksum %08x, want %08x", got, want)
	}
	m := message{kind: b[1], parts: binary.LittleEndian.Uint32(b[2:]), seq: binary.LittleEndian.Uint64(b[6:]), body: b[headSize:]}
	copy(m.writer[:], b[14:])
	switch m.kind {
	case kindPart, kindRecords, kindSnapshot, kindClaim:
		return m, nil
	}
	return message{}, fmt.Errorf("is of the unknown kind %q", m.kind)
}

func appendRecord(b []byte, r sluice.Record) []byte {
	n := uint64(len(r.Data)) << 1
	if r.Lazy {
		n |= 1
	}
	return append(binary.AppendUvarint(b, n), r.Data...)
}

// recordSize is what a record takes at most.
func recordSize(r sluice.Record) int { return binary.MaxVarintLen64 + len(r.Data) }

// takeRecords calls f for every whole record at the beginning of b and returns the rest. The data is f's to keep.
func takeRecords(b []byte, f func(sluice.Record) error) (rest []byte, err error) {
	for len(b) > 0 {
		n, size := binary.Uvarint(b)
		if size < 0 || size == 0 && len(b) >= binary.MaxVarintLen64 || n>>1 > MaxRecord {
			return b, errors.New("has a record of an impossible length")
		}
		if size == 0 || uint64(len(b)-size) < n>>1 {
			return b, nil
		}
		end := size + int(n>>1)
		if err := f(sluice.Record{Lazy: n&1 != 0, Data: b[size:end:end]}); err != nil {
			return b, err
		}
		b = b[end:]
	}
	return nil, nil
}
