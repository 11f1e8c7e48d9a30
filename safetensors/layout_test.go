package safetensors

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/sluice-ml/sluice"
)

func names(h *Header) []string {
	var names []string
	for i := range h.Entries {
		names = append(names, h.Entries[i].Name)
	}
	return names
}

func TestLayoutIsWhatAReaderFinds(t *testing.T) {
	t.Parallel()
	l := layoutOf(t, sample(), map[string]string{RefKey: `{"sample_id":"r1-0-17"}`, "other": "\x00é"})
	got, err := ParseHeader(l.HeaderBytes(), l.Size())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(l.Header(), got, cmpopts.IgnoreUnexported(Header{})); diff != "" {
		t.Error(diff)
	}
}

func TestLayoutBytesAreFixed(t *testing.T) {
	t.Parallel()
	l := layoutOf(t, []sluice.Feature{
		feature("b", 0, sluice.UInt8, 3),
		feature("a", 0, sluice.Int64, 2, 4),
		feature(`q"`, 0, sluice.Float32),
	}, map[string]string{"z": "1", "a": "2\n"})
	const want = `{"__metadata__":{"a":"2\u000a","z":"1"},` +
		`"a":{"dtype":"I64","shape":[2,4],"data_offsets":[0,64]},` +
		`"q\"":{"dtype":"F32","shape":[],"data_offsets":[64,68]},` +
		`"b":{"dtype":"U8","shape":[3],"data_offsets":[68,71]}}`
	head := l.HeaderBytes()
	if got := strings.TrimRight(string(head[8:]), " "); got != want {
		t.Errorf("header is\n%s\nwant\n%s", got, want)
	}
	if len(head)%Alignment != 0 || len(head)-len(want)-8 >= Alignment {
		t.Errorf("header takes %d bytes, want the next multiple of %d above %d", len(head), Alignment, len(want)+8)
	}
	if l.Size() != int64(len(head))+71 {
		t.Errorf("size is %d, want %d", l.Size(), len(head)+71)
	}
}

// The files are made by tools/safetensors/layouts.py, and the Python package is held against the same ones.
func TestLayoutGivesGoldenBytesBack(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../testdata/layouts/*.safetensors")
	if err != nil || len(files) < 6 {
		t.Fatalf("golden layouts: %v, %v", files, err)
	}
	for _, path := range files {
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		h, err := ParseHeader(want, int64(len(want)))
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		var features []sluice.Feature
		for _, e := range h.Entries {
			features = append(features, sluice.Feature{Name: e.Name, Tensor: sluice.Tensor{Spec: e.Spec, Data: want[h.DataStart+e.Begin : h.DataStart+e.End]}})
		}
		slices.Reverse(features)
		var got bytes.Buffer
		if _, err := layoutOf(t, features, h.Metadata).Stream(&got, features); err != nil {
			t.Errorf("%s: %v", path, err)
		}
		if !bytes.Equal(got.Bytes(), want) {
			t.Errorf("%s:\n got %q\nwant %q", path, got.Bytes(), want)
		}
	}
}

func TestLayoutDoesNotDependOnTheCallersOrder(t *testing.T) {
	t.Parallel()
	want := layoutOf(t, sample(), map[string]string{"a": "1", "b": "2", "c": "3"}).HeaderBytes()
	features := sample()
	slices.Reverse(features)
	for range 10 {
		got := layoutOf(t, features, map[string]string{"c": "3", "b": "2", "a": "1"}).HeaderBytes()
		if !bytes.Equal(got, want) {
			t.Fatalf("header is %s, want %s", got, want)
		}
	}
}

func TestLayoutPutsWholeCacheLinesFirstThenWideElementsThenNames(t *testing.T) {
	t.Parallel()
	l := layoutOf(t, []sluice.Feature{
		feature("odd bytes", 0, sluice.UInt8, 63),
		feature("odd longs b", 0, sluice.Int64, 3),
		feature("odd longs a", 0, sluice.Int64, 5),
		feature("whole bytes", 0, sluice.UInt8, 128),
		feature("whole longs", 0, sluice.Int64, 8),
		feature("empty", 0, sluice.Float32, 0, 7),
		feature("odd halves", 0, sluice.BFloat16, 1),
	}, nil)
	want := []string{"whole longs", "empty", "whole bytes", "odd longs a", "odd longs b", "odd halves", "odd bytes"}
	if got := names(l.Header()); !slices.Equal(got, want) {
		t.Errorf("order is %q, want %q", got, want)
	}
}

func TestLayoutOffsetsCountFromTheBeginningOfTheFile(t *testing.T) {
	t.Parallel()
	features := sample()
	l := layoutOf(t, features, nil)
	bufs, err := l.Buffers(features)
	if err != nil {
		t.Fatal(err)
	}
	file := bytes.Join(bufs, nil)
	for _, f := range features {
		at, ok := l.Offset(f.Name)
		if !ok || !bytes.Equal(file[at:at+int64(len(f.Data))], f.Data) {
			t.Errorf("%s is not at %d", f.Name, at)
		}
	}
	if _, ok := l.Offset("other"); ok {
		t.Error("an unknown name has an offset")
	}
}

func TestLayoutDoesNotNeedData(t *testing.T) {
	t.Parallel()
	bare := sample()
	for i := range bare {
		bare[i].Data = nil
	}
	if got, want := layoutOf(t, bare, nil).HeaderBytes(), layoutOf(t, sample(), nil).HeaderBytes(); !bytes.Equal(got, want) {
		t.Errorf("header is %s, want %s", got, want)
	}
}

func TestLayoutIsNotChangedThroughItsArguments(t *testing.T) {
	t.Parallel()
	features, metadata := sample(), map[string]string{"k": "v"}
	l := layoutOf(t, features, metadata)
	head := l.HeaderBytes()
	features[0].Shape[0], features[0].Name, metadata["k"] = 7, "x", "w"
	clear(head)
	bufs, err := l.Buffers(sample())
	if err != nil {
		t.Fatal(err)
	}
	clear(bufs[0])
	if got, err := ParseHeader(l.HeaderBytes(), l.Size()); err != nil || got.Metadata["k"] != "v" {
		t.Errorf("changed: %+v, %v", got, err)
	}
}

func TestLayoutRefuses(t *testing.T) {
	t.Parallel()
	huge := func(name string) sluice.Feature {
		return sluice.Feature{Name: name, Tensor: sluice.Tensor{Spec: sluice.Spec{DType: sluice.UInt8, Shape: []int64{1<<53 - 1}}}}
	}
	var many []sluice.Feature
	for i := range 1025 {
		many = append(many, huge(fmt.Sprintf("t%04d", i)))
	}
	twice := append(slices.Clone(many[:40]), many[7])
	for name, c := range map[string]struct {
		features []sluice.Feature
		metadata map[string]string
		want     string
	}{
		"a name twice":             {[]sluice.Feature{feature("a", 0, sluice.Bool, 1), feature("a", 0, sluice.Int8, 1)}, nil, `safetensors: layout "a": is there twice, want each name once`},
		"a name twice among many":  {twice, nil, `safetensors: layout "t0007": is there twice, want each name once`},
		"the name of the metadata": {[]sluice.Feature{feature("__metadata__", 0, sluice.Bool, 1)}, nil, `safetensors: layout "__metadata__": is the name of the metadata, want another`},
		"a name that is not UTF-8": {[]sluice.Feature{feature("a\xff", 0, sluice.Bool, 1)}, nil, `safetensors: layout "a?": is not valid UTF-8 at byte 1 of the name`},
		"no dtype":                 {[]sluice.Feature{{Name: "a"}}, nil, `safetensors: layout "a": the dtype is missing or unknown (dtype(0))`},
		"a negative axis":          {[]sluice.Feature{{Name: "a", Tensor: sluice.Tensor{Spec: sluice.Spec{DType: sluice.Bool, Shape: []int64{-1}}}}}, nil, `safetensors: layout "a": shape[0] is -1, want 0 or more`},
		"metadata key not UTF-8":   {nil, map[string]string{"\xff": ""}, `safetensors: layout "?": or its value in the metadata is not valid UTF-8`},
		"metadata value not UTF-8": {nil, map[string]string{"k": "\xff"}, `safetensors: layout "k": or its value in the metadata is not valid UTF-8`},
		"metadata too long":        {nil, map[string]string{"k": strings.Repeat("v", MaxHeader)}, `safetensors: layout "header": is 100000056 bytes long, want at most 100000000`},
		"sizes that overflow":      {many, nil, fmt.Sprintf(`safetensors: layout "t1023": begins at byte %d and takes %d more, which overflows`, int64(1023*(1<<53-1)), int64(1<<53-1))},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := NewLayout(c.features, c.metadata)
			wantKind(t, err, sluice.Invalid, c.want)
		})
	}
}

func TestChecksummedLayoutRefusesChecksumsOfTheCaller(t *testing.T) {
	t.Parallel()
	_, err := NewChecksummedLayout(nil, map[string]string{ChecksumsKey: "{}"})
	wantKind(t, err, sluice.Invalid, `safetensors: layout "sluice.crc32c": is set in the metadata of a layout that computes it`)
}

func TestHeaderWithChecksumsFillsThemIn(t *testing.T) {
	t.Parallel()
	features := []sluice.Feature{feature("plain", 0, sluice.Int8, 3), feature("q\"\\\n\x00é/", 1, sluice.Int64, 8), feature("", 2, sluice.Int8, 0)}
	l, err := NewChecksummedLayout(features, map[string]string{"a": "1", "z": "2"})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]uint32{"plain": 0x00000001, "q\"\\\n\x00é/": math.MaxUint32, "": 0xdeadbeef}
	head, err := l.HeaderWithChecksums(want)
	if err != nil {
		t.Fatal(err)
	}
	h, err := ParseHeader(head, l.Size())
	if err != nil {
		t.Fatal(err)
	}
	got, err := h.Checksums()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if h.Metadata["a"] != "1" || h.Metadata["z"] != "2" || h.Metadata[ChecksumsKey] != EncodeChecksums(want) {
		t.Errorf("metadata is %q", h.Metadata)
	}
	zeros, err := ParseHeader(l.HeaderBytes(), l.Size())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(l.Header(), zeros, cmpopts.IgnoreUnexported(Header{})); diff != "" {
		t.Error(diff)
	}
}

func TestHeaderWithChecksumsWantsOneForEachTensor(t *testing.T) {
	t.Parallel()
	features := []sluice.Feature{feature("a", 0, sluice.Int8, 3)}
	l, err := NewChecksummedLayout(features, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, err = l.HeaderWithChecksums(map[string]uint32{"b": 1})
	wantKind(t, err, sluice.Invalid, `safetensors: checksums "a": has no checksum`)
	_, err = l.HeaderWithChecksums(map[string]uint32{"a": 1, "b": 1})
	wantKind(t, err, sluice.Invalid, `safetensors: checksums "sluice.crc32c": are 2, the layout has 1 tensors`)
	_, err = layoutOf(t, features, nil).HeaderWithChecksums(map[string]uint32{"a": 1})
	wantKind(t, err, sluice.Invalid, `safetensors: checksums "sluice.crc32c": has no room in this layout; make it with NewChecksummedLayout`)
}
