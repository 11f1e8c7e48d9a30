package natsjournal

import (
	"bytes"
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-ml/sluice"
	"pgregory.net/rapid"
)

func record(lazy bool, data string) sluice.Record {
	return sluice.Record{Lazy: lazy, Data: []byte(data)}
}

func TestMessagesComeBackAsTheyWere(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		body := rapid.SliceOf(rapid.Byte()).Draw(t, "body")
		want := message{kind: rapid.SampledFrom([]byte{kindPart, kindRecords, kindSnapshot, kindClaim}).Draw(t, "kind"), parts: rapid.Uint32().Draw(t, "parts"), seq: rapid.Uint64().Draw(t, "seq"), body: body}
		copy(want.writer[:], rapid.SliceOfN(rapid.Byte(), 8, 8).Draw(t, "writer"))
		b := append(make([]byte, headSize), body...)
		seal(b, want.kind, want.parts, want.seq, want.writer)
		got, err := parse(b)
		if err != nil || got.kind != want.kind || got.parts != want.parts || got.seq != want.seq || got.writer != want.writer || !bytes.Equal(got.body, body) {
			t.Fatalf("got %+v, %v, want %+v", got, err, want)
		}
		// Every bit counts.
		b[rapid.IntRange(0, len(b)-1).Draw(t, "at")] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
		if m, err := parse(b); err == nil {
			t.Fatalf("a damaged message is taken for %+v", m)
		}
	})
}

func TestBadMessagesAreRefused(t *testing.T) {
	t.Parallel()
	sealed := func(kind byte) []byte {
		b := make([]byte, headSize)
		seal(b, kind, 0, 1, writerID{})
		return b
	}
	newer := sealed(kindRecords)
	newer[0] = 2
	for _, c := range []struct {
		data []byte
		want string
	}{
		{nil, "is 0 bytes, shorter than a head"},
		{sealed(kindRecords)[:headSize-1], "is 25 bytes, shorter than a head"},
		{newer, "is of version 2, want 1; was it written by a newer release?"},
		{sealed('x'), "is of the unknown kind 'x'"},
		{append(sealed(kindClaim), 1), "has the checksum"},
	} {
		if _, err := parse(c.data); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%x: got %v, want %q", c.data, err, c.want)
		}
	}
}

// pieces is a run of messages as a journal would write them.
func pieces(bodies ...string) []message {
	var list []message
	for i, b := range bodies {
		m := message{kind: kindPart, parts: uint32(i), seq: uint64(i + 1), body: []byte(b)}
		if i == len(bodies)-1 {
			m.kind = kindRecords
		}
		list = append(list, m)
	}
	return list
}

func TestPiecesThatDoNotFitAreRefused(t *testing.T) {
	t.Parallel()
	whole := string(appendRecord(nil, record(false, "a record of some length")))
	for _, c := range []struct {
		name     string
		messages []message
		want     string
	}{
		{"a piece is missing", slices.Delete(pieces(whole[:5], whole[5:9], whole[9:]), 1, 2), "lacks pieces"},
		{"the first is missing", pieces(whole[:5], whole[5:9], whole[9:])[1:], "is a piece out of turn"},
		{"the end is cut", pieces(whole[:5], whole[5:9]), errUneven.Error()},
		{"a length is impossible", pieces(strings.Repeat("\xff", binary.MaxVarintLen64)), "has a record of an impossible length"},
		{"a length is larger than any record", pieces(string(binary.AppendUvarint(nil, 1<<40))), "has a record of an impossible length"},
	} {
		r := reader{f: func(sluice.Record) error { return nil }}
		var err error
		for _, m := range c.messages {
			if err = r.take(m); err != nil {
				break
			}
		}
		if err == nil || err.Error() != c.want {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
	}
}

// The server names the last snapshot. Were it to name an earlier one, or none, what the last one replaces must not be taken for what is before it.
func TestASnapshotThatTheServerDidNotNameIsDamage(t *testing.T) {
	t.Parallel()
	for _, named := range []uint64{0, 1} {
		r := reader{snapshot: named, f: func(sluice.Record) error { return nil }}
		if err := r.take(message{kind: kindSnapshot, seq: 2, body: appendRecord(nil, record(false, "x"))}); err == nil {
			t.Errorf("the end of a snapshot at 2 is taken, and %d was named", named)
		}
	}
}

func TestPiecesWithoutAnEndDoNotCount(t *testing.T) {
	t.Parallel()
	whole := appendRecord(nil, record(true, "whole"))
	var got []string
	r := reader{f: func(r sluice.Record) error { got = append(got, string(r.Data)); return nil }}
	messages := append(pieces("\x20half of", "it")[:1], message{kind: kindClaim}, message{kind: kindRecords, body: whole})
	for _, m := range messages {
		if err := r.take(m); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(got, []string{"whole"}) {
		t.Errorf("got %q", got)
	}
}

// Whatever the bytes: no panic, and what is taken for records can be written again.
func FuzzRecords(f *testing.F) {
	f.Add([]byte{}, 0)
	f.Add(appendRecord(appendRecord(nil, record(true, "lazy")), record(false, "")), 3)
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01}, 1)
	f.Add([]byte{0x80}, 0)
	f.Fuzz(func(t *testing.T, data []byte, cut int) {
		var list []sluice.Record
		rest, err := takeRecords(data, func(r sluice.Record) error { list = append(list, r); return nil })
		var again []byte
		for _, r := range list {
			again = appendRecord(again, r)
		}
		var back []sluice.Record
		if left, err := takeRecords(again, func(r sluice.Record) error { back = append(back, r); return nil }); err != nil || len(left) > 0 || len(back) != len(list) {
			t.Fatalf("%d records, again %d, %x left, %v", len(list), len(back), left, err)
		}
		if err != nil {
			return
		}
		// In pieces it reads the same.
		var inPieces []sluice.Record
		r := reader{snapshot: 2, f: func(r sluice.Record) error { inPieces = append(inPieces, r); return nil }}
		at := 0
		if len(data) > 0 {
			at = int(uint(cut) % uint(len(data)))
		}
		err = r.take(message{kind: kindPart, seq: 1, body: data[:at]})
		if err == nil {
			err = r.take(message{kind: kindSnapshot, parts: 1, seq: 2, body: data[at:]})
		}
		if (err == nil) != (len(rest) == 0) || len(inPieces) != len(list) {
			t.Fatalf("%d records, in pieces %d, %v", len(list), len(inPieces), err)
		}
	})
}

func FuzzMessage(f *testing.F) {
	b := append(make([]byte, headSize), "body"...)
	seal(b, kindRecords, 0, 7, writerID{1})
	f.Add(b)
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := parse(data)
		if err != nil {
			return
		}
		again := append(make([]byte, headSize), m.body...)
		seal(again, m.kind, m.parts, m.seq, m.writer)
		if !bytes.Equal(again, data) {
			t.Fatalf("%x, again %x", data, again)
		}
	})
}
