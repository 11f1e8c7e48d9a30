package safetensors

import (
	"encoding/binary"
	"maps"
	"runtime"
	"slices"
	"testing"

	"github.com/sluice-ml/sluice"
)

// FuzzParseHeader takes the JSON of a header and the length of the data behind it. It checks that no input panics or
// makes the parser allocate out of proportion, and that what is accepted can be laid out again with the same meaning.
func FuzzParseHeader(f *testing.F) {
	for _, seed := range []struct {
		json string
		data uint32
	}{
		{`{}`, 0},
		{`{}  `, 1},
		{`{` + one + `}`, 4},
		{`{"__metadata__":{"sluice.ref":"{\"a\":1}","k":"\u00e9\ud83d\ude00"},` + one + `}  `, 4},
		{`{"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},` + one + `}`, 16},
		{`{"z":{"dtype":"F32","shape":[0,7],"data_offsets":[0,0]},"s":{"dtype":"I64","shape":[],"data_offsets":[0,8]}}`, 8},
		{`{"a":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]},"c":{"dtype":"C64","shape":[1],"data_offsets":[3,11]}}`, 11},
		{`{"a":{"dtype":"U8","shape":[9223372036854775807,2],"data_offsets":[0,4]}}`, 4},
		{manyTensors(20, 19), 20},
		{manyTensors(20, 3), 20},
		{`{"a":{"dtype":"U8","dtype":"U8"}}`, 0},
		{"{\"\xff\":{}}", 0},
	} {
		f.Add([]byte(seed.json), seed.data)
	}
	f.Fuzz(func(t *testing.T, json []byte, data uint32) {
		file := append(binary.LittleEndian.AppendUint64(nil, uint64(len(json))), json...)
		size := int64(len(file)) + int64(data)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		h, err := ParseHeader(file, size)
		runtime.ReadMemStats(&after)
		// The fuzzing engine allocates beside us, hence the constant.
		if got, limit := after.TotalAlloc-before.TotalAlloc, uint64(40*len(json)+1<<20); got > limit {
			t.Errorf("%d bytes of header made it allocate %d bytes, want at most %d", len(json), got, limit)
		}
		if err != nil {
			if sluice.KindOf(err) != sluice.Corrupt || h != nil {
				t.Fatalf("refused as %q with %v: %v", sluice.KindOf(err), h, err)
			}
			if open, err := ParseHeader(file, -1); err == nil {
				if _, err := ParseHeader(file, open.Size()); err != nil {
					t.Fatalf("without the size it is accepted, with the one that it gives refused: %v", err)
				}
			}
			return
		}
		if h.Size() != size {
			t.Fatalf("size is %d, want %d", h.Size(), size)
		}
		if open, err := ParseHeader(file, -1); err != nil || open.Size() != size {
			t.Fatalf("without the size, it is refused (%v) or gives %+v", err, open)
		}
		var features []sluice.Feature
		end := int64(0)
		for i := range h.Entries {
			e := &h.Entries[i]
			if e.Begin != end || e.End < e.Begin {
				t.Fatalf("%+v does not follow byte %d", e, end)
			}
			end = e.End
			if found, ok := h.Find(e.Name); !ok || found != e {
				t.Fatalf("finding %q gives %+v", e.Name, found)
			}
			if !e.Spec.DType.Valid() {
				return // a foreign file; no layout can hold it
			}
			if e.Spec.Bytes() != e.Bytes() || DTypeName(e.Spec.DType) != e.RawDType {
				t.Fatalf("%+v contradicts itself", e)
			}
			features = append(features, sluice.Feature{Name: e.Name, Tensor: sluice.Tensor{Spec: e.Spec}})
		}
		l, err := NewLayout(features, h.Metadata)
		if err != nil {
			t.Fatalf("can't be laid out again: %v", err)
		}
		again, err := ParseHeader(l.HeaderBytes(), l.Size())
		if err != nil {
			t.Fatalf("its own layout is refused: %v", err)
		}
		if !maps.Equal(h.Metadata, again.Metadata) || len(h.Entries) != len(again.Entries) {
			t.Fatalf("%+v became %+v", h, again)
		}
		for i := range h.Entries {
			e, ok := again.Find(h.Entries[i].Name)
			if !ok || !e.Spec.Equal(h.Entries[i].Spec) {
				t.Fatalf("%+v became %+v", h.Entries[i], e)
			}
		}
	})
}

// FuzzChecksums takes the text of checksums. It checks that what is accepted survives being written again, alone and
// within a header whose tensors have these names.
func FuzzChecksums(f *testing.F) {
	for _, seed := range []string{
		`{}`,
		` {"a":"0badf00d" , "b":"ffffffff"} `,
		`{"":"00000000","\"\\\n\u0000":"12345678"}`,
		`{"\ud83d\ude00":"00000001","é":"00000002"}`,
		`{"a":"0BADF00D"}`,
		`{"a":"00000000","a":"00000000"}`,
		`{"a":1}`,
		"{\"\xff\":\"00000000\"}",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		sums, err := DecodeChecksums(text)
		if err != nil {
			if sluice.KindOf(err) != sluice.Corrupt || sums != nil {
				t.Fatalf("refused as %q with %v: %v", sluice.KindOf(err), sums, err)
			}
			return
		}
		encoded := EncodeChecksums(sums)
		again, err := DecodeChecksums(encoded)
		if err != nil || !maps.Equal(sums, again) {
			t.Fatalf("%v became %v by way of %s: %v", sums, again, encoded, err)
		}
		if _, ok := sums[metadataKey]; ok {
			return // fine for checksums, but no tensor has that name
		}
		var features []sluice.Feature
		for _, name := range slices.Sorted(maps.Keys(sums)) {
			features = append(features, feature(name, 0, sluice.UInt8, 1))
		}
		l, err := NewChecksummedLayout(features, nil)
		if err != nil {
			t.Fatal(err)
		}
		head, err := l.HeaderWithChecksums(sums)
		if err != nil {
			t.Fatal(err)
		}
		h, err := ParseHeader(head, l.Size())
		if err != nil {
			t.Fatal(err)
		}
		if h.Metadata[ChecksumsKey] != encoded {
			t.Fatalf("the header has %s, want %s", h.Metadata[ChecksumsKey], encoded)
		}
	})
}
