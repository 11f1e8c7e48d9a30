package inspect

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
	"github.com/sluice-ml/sluice/store/dirstore"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// encoded returns values in a dtype's own bits.
func encoded[E sluice.Element](dtype sluice.DType, bits ...E) sluice.Feature {
	return sluice.Feature{Name: "x", Tensor: sluice.TensorOf(dtype, bits, int64(len(bits)))}
}

// write makes a safetensors file with the features and, unless fields is nil, a ref made of them and changed by it.
func write(t testing.TB, checksums bool, fields func(*sluice.RefFields), features ...sluice.Feature) string {
	t.Helper()
	metadata := map[string]string{}
	if fields != nil {
		s := sluice.Sample{SampleID: "s", RunID: "r", Algorithm: "mine", SchemaVersion: 1, NumTokens: 3, Features: features}
		f, err := s.RefFields("file:///nowhere", "g")
		must(t, err)
		fields(&f)
		f.EstimatedBytes, err = sluice.SumBytes(f.Features)
		must(t, err)
		ref, err := sluice.NewRef(f)
		must(t, err)
		metadata[safetensors.RefKey] = ref.Canonical()
	}
	return writeWith(t, checksums, metadata, features...)
}

func writeWith(t testing.TB, checksums bool, metadata map[string]string, features ...sluice.Feature) string {
	t.Helper()
	layoutOf := safetensors.NewLayout
	if checksums {
		layoutOf = safetensors.NewChecksummedLayout
	}
	layout, err := layoutOf(features, metadata)
	must(t, err)
	path := filepath.Join(t.TempDir(), "s.safetensors")
	f, err := os.Create(path)
	must(t, err)
	must(t, layout.WriteFile(f, 0, features))
	must(t, f.Close())
	return path
}

func mustFile(t testing.TB, path string) *FileReport {
	t.Helper()
	r, err := File(t.Context(), path)
	must(t, err)
	return r
}

func TestEveryFloatTypeIsLookedAt(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		feature        sluice.Feature
		nan, inf       int64
		min, max, mean float64
	}{
		{encoded(sluice.Float64, math.NaN(), math.Inf(-1), -3, 5), 1, 1, -3, 5, 1},
		{encoded(sluice.Float64, math.MaxFloat64, math.MaxFloat64, math.MaxFloat64), 0, 0, math.MaxFloat64, math.MaxFloat64, math.MaxFloat64},
		{encoded(sluice.Float32, float32(math.NaN()), float32(math.Inf(1)), -3, 5), 1, 1, -3, 5, 1},
		{encoded(sluice.BFloat16, uint16(0x7fc0), 0xff80, 0xc040, 0x40a0), 1, 1, -3, 5, 1},
		{encoded(sluice.Float16, uint16(0x7e00), 0xfc00, 0xc200, 0x4500), 1, 1, -3, 5, 1},
		{encoded(sluice.Float16, uint16(0x0001), 0x7bff), 0, 0, 0x1p-24, 65504, 32752.00000002980232238769531},
		{encoded(sluice.Float8E4M3FN, uint8(0x7f), 0xff, 0xc4, 0x4a), 2, 0, -3, 5, 1},
		{encoded(sluice.Float8E4M3FN, uint8(0x01), 0x7e), 0, 0, 0x1p-9, 448, 224.0009765625},
		{encoded(sluice.Float8E5M2, uint8(0x7d), 0xfc, 0xc2, 0x45), 1, 1, -3, 5, 1},
		{encoded(sluice.Float8E5M2, uint8(0x01), 0x7b), 0, 0, 0x1p-16, 57344, 28672.00000762939453125},
	} {
		r := mustFile(t, write(t, false, nil, c.feature))
		s := r.Features[0].Stats
		if s == nil || s.NaN != c.nan || s.Inf != c.inf || *s.Min != c.min || *s.Max != c.max || math.Abs(*s.Mean-c.mean) > 1e-12*math.Abs(c.mean) {
			t.Errorf("%s: %+v, want %+v", c.feature.Spec, s, c)
			continue
		}
		if finite := c.nan+c.inf == 0; s.Finite != finite || r.Finite != finite || r.OK != finite {
			t.Errorf("%s: finite %v, %v, ok %v", c.feature.Spec, s.Finite, r.Finite, r.OK)
		}
	}
}

func TestSmallFloatsAreAllDecoded(t *testing.T) {
	t.Parallel()
	// Every finite value is above its lower neighbour, which with the ends of the range leaves no room for mistakes of the exponent.
	ascending := func(name string, table []float32, top int, most float64) {
		for x := 1; x <= top; x++ {
			if table[x] <= table[x-1] || table[x+len(table)/2] != -table[x] {
				t.Fatalf("%s: %#x is %v behind %v, and %v with its sign", name, x, table[x], table[x-1], table[x+len(table)/2])
			}
		}
		if float64(table[top]) != most || table[0] != 0 {
			t.Errorf("%s: from %v to %v, want 0 to %v", name, table[0], table[top], most)
		}
	}
	ascending("float16", float16s()[:], 0x7bff, 65504)
	ascending("float8_e4m3fn", float8E4M3FNs()[:], 0x7e, 448)
}

func TestWhatIsNoFloatHasNoStats(t *testing.T) {
	t.Parallel()
	r := mustFile(t, write(t, true, nil, encoded(sluice.Int64, int64(1), 2)))
	if f := r.Features[0]; f.Stats != nil || f.Checksum != OK || !r.OK {
		t.Errorf("%+v", f)
	}
	r = mustFile(t, write(t, false, nil, sluice.Feature{Name: "x", Tensor: sluice.NewTensor(sluice.Float32, 0, 3)}))
	if s := r.Features[0].Stats; s == nil || !s.Finite || s.Min != nil || s.Mean != nil {
		t.Errorf("of an empty tensor: %+v", s)
	}
}

func TestALargeTensorIsReadInPieces(t *testing.T) {
	t.Parallel()
	values := make([]float32, 3*pieceBytes/4+5)
	values[len(values)-1], values[pieceBytes/4] = -7, float32(math.NaN())
	r := mustFile(t, write(t, true, nil, encoded(sluice.Float32, values...)))
	if s := r.Features[0].Stats; r.Features[0].Checksum != OK || *s.Min != -7 || s.NaN != 1 {
		t.Errorf("%+v, min %v", r.Features[0], *s.Min)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := File(ctx, write(t, true, nil, encoded(sluice.Float32, values...))); !errors.Is(err, context.Canceled) {
		t.Errorf("after an interrupt: %v", err)
	}
}

func TestAFlippedByteIsFound(t *testing.T) {
	t.Parallel()
	path := write(t, true, func(*sluice.RefFields) {}, encoded(sluice.Int64, int64(1), 2))
	data, err := os.ReadFile(path)
	must(t, err)
	data[len(data)-9] ^= 4
	must(t, os.WriteFile(path, data, 0o600))
	r := mustFile(t, path)
	if r.OK || r.Checksums != Bad || r.Features[0].Checksum != Bad || len(r.Problems) != 1 || r.Problems[0].Subject != "x" {
		t.Errorf("%+v", r)
	}
}

func TestARefIsComparedWithTensorsAndSchema(t *testing.T) {
	t.Parallel()
	x := encoded(sluice.Int64, int64(1), 2)
	for _, c := range []struct {
		name           string
		change         func(*sluice.RefFields)
		agrees, schema string
		problem        string
	}{
		{"agrees", func(*sluice.RefFields) {}, OK, None, ""},
		{"other shape", func(f *sluice.RefFields) { f.Features[0].Shape = []int64{2, 1} }, Bad, None, `"x": is int64[2], the ref promises int64[2,1]`},
		{"missing", func(f *sluice.RefFields) {
			f.Features = append(f.Features, sluice.RefFeature{Name: "y", Key: "s/y", Spec: x.Spec})
		}, Bad, None, `"y": is promised by the ref and not in the file`},
		{"unknown", func(f *sluice.RefFields) { f.Features[0].Name = "z" }, Bad, None, `"x": is in the file, and the ref does not know it`},
		{"schema", func(f *sluice.RefFields) { f.Algorithm = sluice.EAGLE3 }, OK, Bad, `does not agree with its schema: schema eagle3 "s": lacks the required feature`},
	} {
		r := mustFile(t, write(t, false, c.change, x))
		if r.RefAgrees != c.agrees || r.Schema != c.schema || !strings.Contains(strings.Join(r.ProblemTexts(), "\n"), c.problem) || r.OK != (c.problem == "") {
			t.Errorf("%s: ref %s, schema %s, %v", c.name, r.RefAgrees, r.Schema, r.ProblemTexts())
		}
	}
	r := mustFile(t, writeWith(t, false, map[string]string{safetensors.RefKey: "{", safetensors.ChecksumsKey: "{}"}, x))
	if r.RefAgrees != Bad || r.Checksums != Bad || r.Ref != nil || len(r.Problems) != 2 {
		t.Errorf("of metadata that can't be read: %+v", r)
	}
}

func TestAForeignFileIsShownAsItIs(t *testing.T) {
	t.Parallel()
	header := `{"__metadata__":{"format":"p\u001bt"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b\u009b\u202e":{"dtype":"F32","shape":[1],"data_offsets":[1,5]},"c":{"dtype":"F8_E8M0","shape":[2],"data_offsets":[5,7]}}`
	data := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
	data = append(data, 1, 0, 0, 0x80, 0x3f, 9, 9)
	path := filepath.Join(t.TempDir(), "x")
	must(t, os.WriteFile(path, data, 0o600))
	r := mustFile(t, path)
	at := int64(8 + len(header))
	if !r.OK || len(r.Features) != 3 || r.Features[1].Offset != at+1 || r.Features[1].Aligned != ((at+1)%4 == 0) || r.Features[2].DType != "F8_E8M0" || *r.Features[1].Stats.Max != 1 {
		t.Errorf("%+v", r)
	}
	var text bytes.Buffer
	r.Text(&text)
	if i := strings.IndexFunc(text.String(), func(r rune) bool { return r < 0x20 && r != '\n' || r >= 0x7f && r < 0xa0 || r == 0x202e }); i >= 0 {
		t.Errorf("a control character in %q", text.String())
	}
	if !strings.Contains(text.String(), "b??   float32  [1] ") || !strings.Contains(text.String(), "p?t") {
		t.Error(text.String())
	}
}

func TestBadFilesAreRefusedByName(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	good, err := os.ReadFile(write(t, true, nil, encoded(sluice.Int64, int64(1), 2)))
	must(t, err)
	for i, c := range []struct {
		data  []byte
		wants string
	}{
		{nil, "is 0 bytes long, want at least the 8"},
		{[]byte("garbage of some length"), `"header length": is`},
		{good[:20], "but only 12 bytes follow it"},
		{good[:len(good)-1], "but the file has only 15 bytes of data"},
		{append(bytes.Clone(good), 0), "is 17 bytes long, but the tensors end at byte 16"},
	} {
		path := filepath.Join(dir, fmt.Sprint(i))
		must(t, os.WriteFile(path, c.data, 0o600))
		if _, err := File(t.Context(), path); !errors.Is(err, sluice.ErrCorrupt) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), c.wants) {
			t.Errorf("%d: %v, want %q", i, err, c.wants)
		}
	}
	if _, err := File(t.Context(), filepath.Join(dir, "nosuch")); !errors.Is(err, sluice.ErrNotFound) {
		t.Errorf("of no file: %v", err)
	}
	if _, err := File(t.Context(), dir); !errors.Is(err, sluice.ErrInvalid) {
		t.Errorf("of a folder: %v", err)
	}
}

func TestAStoreIsVerified(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "store")
	s, err := dirstore.Open(dir, &dirstore.Options{Caps: sluice.Caps{MaxBytes: 1 << 20, MaxSamples: 10}, Verify: true})
	must(t, err)
	defer s.Close()
	put := func(id string, f sluice.Feature) {
		_, err := s.Put(t.Context(), &sluice.Sample{SampleID: id, RunID: "r", Algorithm: "mine", SchemaVersion: 1, Features: []sluice.Feature{f}}, sluice.Reservation{})
		must(t, err)
	}
	put("good", encoded(sluice.Float32, float32(1), 2))
	put("nan", encoded(sluice.Float32, float32(math.NaN()), 2))
	put("flipped", encoded(sluice.Float32, float32(1), 2))
	path := filepath.Join(dir, "flipped.safetensors")
	data, err := os.ReadFile(path)
	must(t, err)
	data[len(data)-1] ^= 1
	must(t, os.WriteFile(path, data, 0o600)) // in place
	r, err := Store(t.Context(), dir, false)
	must(t, err)
	if !r.OK || r.Verified != nil {
		t.Errorf("without a look at the bytes: %v", r.ProblemTexts())
	}
	r, err = Store(t.Context(), dir, true)
	must(t, err)
	want := map[string]Verified{"good": {OK, true}, "nan": {OK, false}, "flipped": {Bad, true}}
	if d := cmp.Diff(want, r.Verified); d != "" || r.OK || len(r.ProblemTexts()) != 2 {
		t.Errorf("%v\n%s", r.ProblemTexts(), d)
	}
	line, err := json.Marshal(r)
	must(t, err)
	for _, part := range []string{`"kind":"store","ok":false,"dir":`, `"resident_bytes":24`, `"problems":[{"subject":"`, `"verified":{"flipped":{"checksums":"bad","finite":true}`, `"max_bytes":1048576`} {
		if !bytes.Contains(line, []byte(part)) {
			t.Errorf("%s lacks %s", line, part)
		}
	}
	var text bytes.Buffer
	r.Text(&text)
	for _, part := range []string{"1 session, 1 alive; 3 samples", "24 B of 1.0 MiB used; marks 256.0 KiB, 768.0 KiB", "3 of 10 used; marks 2, 8", "2 problems"} {
		if !strings.Contains(text.String(), part) {
			t.Errorf("no %q in\n%s", part, text.String())
		}
	}
}

func TestVerifyingABusyStoreIsNeverWrong(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "store")
	s, err := dirstore.Open(dir, &dirstore.Options{Caps: sluice.Caps{MaxBytes: 4 << 20}, Verify: true})
	must(t, err)
	defer s.Close()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { // ends with ctx
		for n := 0; ; n++ {
			values := make([]float32, 20_000+n%7*1000) // large enough for the pool
			for i := range values {
				values[i] = float32(n)
			}
			ref, err := s.Put(ctx, &sluice.Sample{SampleID: fmt.Sprint("s", n%5), RunID: "r", Algorithm: "mine", SchemaVersion: 1, Features: []sluice.Feature{encoded(sluice.Float32, values...)}}, sluice.Reservation{})
			if err == nil {
				err = s.Abort(ctx, ref)
			}
			if err != nil {
				done <- err
				return
			}
		}
	}()
	for range 40 {
		r, err := Store(t.Context(), dir, true)
		if err != nil {
			t.Error(err)
		} else if !r.OK {
			t.Error(r.ProblemTexts())
		}
	}
	stop()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
