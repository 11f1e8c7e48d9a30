//go:build linux

package dirstore

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
)

// stockFile lays tensors end to end in the order given, without padding, as the format's other writers do.
func stockFile(metadata map[string]string, features ...sluice.Feature) []byte {
	header := map[string]any{}
	if metadata != nil {
		header["__metadata__"] = metadata
	}
	var data []byte
	for _, f := range features {
		shape := f.Shape
		if shape == nil {
			shape = []int64{}
		}
		header[f.Name] = map[string]any{"dtype": safetensors.DTypeName(f.DType), "shape": shape, "data_offsets": []int{len(data), len(data) + len(f.Data)}}
		data = append(data, f.Data...)
	}
	text, err := json.Marshal(header)
	if err != nil {
		panic(err)
	}
	file := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
	return append(append(file, text...), data...)
}

func feature(name string, dtype sluice.DType, seed byte, shape ...int64) sluice.Feature {
	spec := sluice.Spec{DType: dtype, Shape: shape}
	return sluice.Feature{Name: name, Tensor: sluice.Tensor{Spec: spec, Data: pattern(seed, int(spec.Bytes()))}}
}

// three are features whose order in a layout of ours is neither this one nor that of their names.
func three() []sluice.Feature {
	return []sluice.Feature{feature("x", sluice.UInt8, 1, 5), feature("mask", sluice.Int64, 2, 1, 3), feature("h", sluice.BFloat16, 3, 1, 3, 32)}
}

// incoming describes the sample "a" of three().
func incoming() Incoming {
	return Incoming{SampleID: "a", RunID: "r", Generation: "g1", Algorithm: sluice.EAGLE3, NumTokens: 3, Attributes: map[string]string{"k": "v"}, Features: []string{"x", "mask", "h"}}
}

// refOf is the ref that Receive will make of incoming().
func refOf(s *Store) sluice.Ref {
	f := sluice.RefFields{SampleID: "a", RunID: "r", StoreURI: s.uri, Generation: "g1", Algorithm: sluice.EAGLE3, SchemaVersion: 1, NumTokens: 3,
		TargetModelVersion: "0", DraftWeightVersion: "0", Attributes: map[string]string{"k": "v"}}
	for _, ft := range three() {
		f.Features = append(f.Features, sluice.RefFeature{Name: ft.Name, Key: "a/" + ft.Name, Spec: ft.Spec})
		f.EstimatedBytes += ft.Bytes()
	}
	ref, err := sluice.NewRef(f)
	if err != nil {
		panic(err)
	}
	return ref
}

// reordered returns three() with the given permutation.
func reordered(order ...int) []sluice.Feature {
	var fs []sluice.Feature
	for _, i := range order {
		fs = append(fs, three()[i])
	}
	return fs
}

// wantEmpty checks that nothing is stored, counted or left in the directory but a reservation of so many bytes.
func wantEmpty(t testing.TB, s *Store, when string, reserved int64) {
	t.Helper()
	mustAudit(t, s, when)
	h := s.Health()
	if h.ResidentSamples != 0 || h.ResidentBytes != 0 || h.ReservedBytes != reserved || h.StagingBytes != 0 || reserved == 0 && h.ReservedSamples != 0 {
		t.Fatalf("%s: %+v", when, h)
	}
	names, err := s.list()
	must(t, err)
	if len(names) != 1 {
		t.Fatalf("%s: the directory has %q", when, names)
	}
}

// wantSample checks that a get gives these features.
func wantSample(t testing.TB, s *Store, ref sluice.Ref, want []sluice.Feature) {
	t.Helper()
	must(t, s.Claim(ref, "test"))
	ts := mustGet(t, s, ref)
	for i, f := range ts.Features {
		if f.Name != want[i].Name || !f.Equal(want[i].Spec) || !bytes.Equal(f.Data, want[i].Data) {
			t.Fatalf("feature %d is %s %s, or has other bytes; want %s %s", i, f.Name, f.Spec, want[i].Name, want[i].Spec)
		}
	}
	must(t, ts.Release(context.Background()))
	must(t, s.Unclaim(ref, "test"))
	if n := s.Health().ResidentSamples; n != 0 {
		t.Fatalf("%d samples are left", n)
	}
}

func TestReceiveTakesTensorsInAnyOrder(t *testing.T) {
	t.Parallel()
	for _, verify := range []bool{false, true} {
		s := mustOpen(t, shm(t), &Options{Caps: someCaps.Caps, Verify: verify})
		for _, order := range [][]int{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
			for _, meta := range []map[string]string{nil, {"format": "pt"}, {safetensors.RefKey: refOf(s).Canonical()}} {
				body := stockFile(meta, reordered(order...)...)
				for _, size := range []int64{int64(len(body)), -1} {
					ref, err := s.Receive(t.Context(), bytes.NewReader(body), size, incoming(), sluice.Reservation{})
					if err != nil || !ref.Equal(refOf(s)) {
						t.Fatalf("order %v, metadata %v: %v, %v", order, meta, ref, err)
					}
					wantSample(t, s, ref, three())
				}
			}
		}
	}
}

func TestReceiveOfOurOwnLayoutIsWhatPutWrites(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), &Options{Caps: someCaps.Caps, Verify: true})
	put := mustPut(t, s, "a", 7, 100_000)
	want, err := os.ReadFile(s.samplePath("a"))
	must(t, err)
	must(t, s.Abort(t.Context(), put))
	ref, err := s.Receive(t.Context(), bytes.NewReader(want), int64(len(want)), Incoming{SampleID: "a", RunID: "r"}, sluice.Reservation{})
	if err != nil || !ref.Equal(put) {
		t.Fatal(ref, err)
	}
	if got, err := os.ReadFile(s.samplePath("a")); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the file differs, %v", err)
	}
}

func TestInMemoryTooWhatIsReceivedCarriesChecksums(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), someCaps)
	ref, err := s.Receive(t.Context(), bytes.NewReader(stockFile(nil, three()...)), -1, incoming(), sluice.Reservation{})
	must(t, err)
	n := mustLend(t, s, ref, false)
	said, err := n.Header().Checksums()
	if err != nil || len(said) != 3 || !n.Summed() {
		t.Fatalf("checksums %v, %v", said, err)
	}
	for _, f := range three() {
		if said[f.Name] != safetensors.Checksum(f.Data) {
			t.Errorf("%s has the checksum %08x, want %08x", f.Name, said[f.Name], safetensors.Checksum(f.Data))
		}
	}
}

// TestReceiveMatchesPut stores random samples through readers that give the body in random pieces.
func TestReceiveMatchesPut(t *testing.T) {
	t.Parallel()
	plain := mustOpen(t, shm(t), &Options{Caps: sluice.Caps{MaxBytes: 64 << 20}})
	summed := mustOpen(t, shm(t), &Options{Caps: sluice.Caps{MaxBytes: 64 << 20}, Verify: true})
	rapid.Check(t, func(rt *rapid.T) {
		s := rapid.SampledFrom([]*Store{plain, summed}).Draw(rt, "store")
		n := rapid.IntRange(1, 6).Draw(rt, "features")
		var features []sluice.Feature
		for i := range n {
			shape := rapid.SliceOfN(rapid.Int64Range(0, 5), 0, 4).Draw(rt, "shape")
			if i == 0 && rapid.Bool().Draw(rt, "large") {
				shape = []int64{rapid.Int64Range(100_000, 9<<18).Draw(rt, "length")}
			}
			dtype := rapid.SampledFrom(sluice.DTypes()).Draw(rt, "dtype")
			features = append(features, feature(fmt.Sprintf("f%d", i), dtype, byte(i+1), shape...))
		}
		sent := slices.Clone(features)
		seed := rapid.Uint64().Draw(rt, "seed")
		rng := rand.New(rand.NewPCG(seed, 1))
		rng.Shuffle(n, func(i, j int) { sent[i], sent[j] = sent[j], sent[i] })
		in := incoming()
		in.Generation, in.Features = "", nil
		for _, f := range features {
			in.Features = append(in.Features, f.Name)
		}
		meta, dataSum := map[string]string{}, uint32(0)
		sums := map[string]uint32{}
		for _, f := range sent {
			sums[f.Name] = safetensors.Checksum(f.Data)
			dataSum = safetensors.UpdateChecksum(dataSum, f.Data)
		}
		if rapid.Bool().Draw(rt, "sums") {
			meta[safetensors.ChecksumsKey] = safetensors.EncodeChecksums(sums)
		}
		known := rapid.Bool().Draw(rt, "trailer")
		in.Checksum = func() (uint32, bool) { return dataSum, known }
		body := stockFile(meta, sent...)
		size := int64(-1)
		if rapid.Bool().Draw(rt, "length") {
			size = int64(len(body))
		}
		var r sluice.Reservation
		if rapid.Bool().Draw(rt, "reserve") {
			var err error
			r, err = s.Reserve(t.Context(), rapid.Int64Range(0, 100).Draw(rt, "reserved"))
			must(t, err)
		}
		ref, err := s.Receive(t.Context(), &uneven{bytes.NewReader(body), rng}, size, in, r)
		if err != nil {
			rt.Fatal(err)
		}
		wantSample(t, s, ref, features)
		wantEmpty(t, poolless(s), "at the end", 0)
	})
}

// poolless gives the pool back first, so that the directory shows what is left.
func poolless(s *Store) *Store {
	_ = s.do(func(l *ledger) error { l.purgePool(0); return nil })
	return s
}

// uneven reads random amounts, sometimes none, and gives the end together with the last bytes or after them.
type uneven struct {
	r   *bytes.Reader
	rng *rand.Rand
}

func (p *uneven) Read(buf []byte) (int, error) {
	if p.rng.IntN(10) == 0 {
		return 0, nil
	}
	n, err := p.r.Read(buf[:min(len(buf), 1<<p.rng.IntN(22))])
	if p.r.Len() == 0 && p.rng.IntN(2) == 0 {
		err = io.EOF
	}
	return n, err
}

func TestABodyThatIsCutOrGoesOnLeavesNothing(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), someCaps)
	r, err := s.Reserve(t.Context(), 50)
	must(t, err)
	body := stockFile(map[string]string{safetensors.RefKey: refOf(s).Canonical()}, three()...)
	for n := range body {
		for _, size := range []int64{-1, int64(n), int64(len(body))} {
			_, err := s.Receive(t.Context(), iotest.DataErrReader(bytes.NewReader(body[:n])), size, incoming(), r)
			wantError(t, fmt.Sprintf("%d of %d bytes, said to be %d", n, len(body), size), err, sluice.Corrupt)
		}
		wantEmpty(t, s, fmt.Sprintf("after %d bytes", n), 50)
	}
	long := append(slices.Clone(body), 0)
	for _, size := range []int64{-1, int64(len(body)), int64(len(long))} {
		_, err := s.Receive(t.Context(), bytes.NewReader(long), size, incoming(), r)
		wantError(t, fmt.Sprintf("a byte too many, said to be %d", size), err, sluice.Corrupt)
	}
	wantEmpty(t, s, "after the long body", 50)
	ref, err := s.Receive(t.Context(), bytes.NewReader(body), -1, incoming(), r)
	must(t, err)
	wantSample(t, s, ref, three())
	wantEmpty(t, s, "at the end", 0)
}

func TestAReadThatFailsLeavesNothing(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), someCaps)
	body := stockFile(nil, three()...)
	cause := errors.New("connection reset")
	for n := range len(body) + 1 {
		_, err := s.Receive(t.Context(), io.MultiReader(bytes.NewReader(body[:n]), iotest.ErrReader(cause)), int64(len(body)), incoming(), sluice.Reservation{})
		wantError(t, fmt.Sprintf("after %d bytes", n), err, sluice.Unavailable, fmt.Sprintf("stopped after %d bytes", n))
		if !errors.Is(err, cause) {
			t.Errorf("%v does not wrap the cause", err)
		}
	}
	_, err := s.Receive(t.Context(), io.MultiReader(bytes.NewReader(body[:99]), iotest.ErrReader(&sluice.Error{Kind: sluice.Denied})), -1, incoming(), sluice.Reservation{})
	wantError(t, "an error of ours", err, sluice.Denied)
	_, err = s.Receive(t.Context(), io.MultiReader(bytes.NewReader(body[:99]), stuck{}), -1, incoming(), sluice.Reservation{})
	if !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("a reader that gives nothing: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("the client went")
	_, err = s.Receive(ctx, io.MultiReader(bytes.NewReader(body[:len(body)-3]), &canceler{func() { cancel(gone) }}, onRead(func() { t.Error("the body is read on") })), -1, incoming(), sluice.Reservation{})
	if !errors.Is(err, gone) {
		t.Errorf("a context that ended: %v", err)
	}
	wantEmpty(t, s, "at the end", 0)
}

type stuck struct{}

func (stuck) Read([]byte) (int, error) { return 0, nil }

// canceler ends a context with its first read, which gives nothing, and is at its end with the second.
type canceler struct{ cancel func() }

func (c *canceler) Read([]byte) (int, error) {
	if c.cancel == nil {
		return 0, io.EOF
	}
	c.cancel()
	c.cancel = nil
	return 0, nil
}

type onRead func()

func (f onRead) Read([]byte) (int, error) { f(); return 0, io.EOF }

func TestNothingIsSeenOfABodyBeforeItsLastByte(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), someCaps)
	body := stockFile(nil, three()...)
	ref := refOf(s)
	look := func() {
		if _, err := s.Get(t.Context(), ref); !errors.Is(err, sluice.ErrNotFound) {
			t.Errorf("Get in the middle: %v", err)
		}
		if infos, err := s.Samples(t.Context()); err != nil || len(infos) != 0 {
			t.Errorf("Samples in the middle: %v, %v", infos, err)
		}
		if _, err := os.Lstat(s.samplePath("a")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the file in the middle: %v", err)
		}
		if h := s.Health(); h.StagingBytes != ref.EstimatedBytes() || h.ReservedBytes != ref.EstimatedBytes() {
			t.Errorf("in the middle: %+v", h)
		}
		_, err := s.Receive(t.Context(), bytes.NewReader(body), -1, incoming(), sluice.Reservation{})
		wantError(t, "the same put beside it", err, sluice.Unavailable)
		in := incoming()
		in.Generation = "g2"
		_, err = s.Receive(t.Context(), bytes.NewReader(body), -1, in, sluice.Reservation{})
		wantError(t, "another put beside it", err, sluice.Duplicate)
	}
	_, err := s.Receive(t.Context(), io.MultiReader(bytes.NewReader(body[:len(body)-1]), onRead(look), bytes.NewReader(body[len(body)-1:])), -1, incoming(), sluice.Reservation{})
	must(t, err)
	wantSample(t, s, ref, three())
}

func TestARepeatedUploadFindsWhatTheFirstOneStored(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), someCaps)
	carried := stockFile(map[string]string{safetensors.RefKey: refOf(s).Canonical()}, three()...)
	bare := stockFile(nil, three()...)
	first, err := s.Receive(t.Context(), bytes.NewReader(bare), -1, incoming(), sluice.Reservation{})
	must(t, err)
	r, err := s.Reserve(t.Context(), 1000)
	must(t, err)
	nameless := Incoming{SampleID: "a", RunID: "r"}
	for what, repeat := range map[string]struct {
		body io.Reader
		in   Incoming
	}{
		"without a body":             {iotest.ErrReader(errors.New("was read")), incoming()},
		"with the ref in the header": {bytes.NewReader(carried), nameless},
	} {
		ref, err := s.Receive(t.Context(), repeat.body, -1, repeat.in, r)
		if err != nil || !ref.Equal(first) {
			t.Errorf("%s: %v, %v", what, ref, err)
		}
	}
	in := incoming()
	in.Generation = "g2"
	_, err = s.Receive(t.Context(), bytes.NewReader(bare), -1, in, r)
	wantError(t, "another generation", err, sluice.Duplicate)
	in.Generation = ""
	_, err = s.Receive(t.Context(), bytes.NewReader(bare), -1, in, r)
	wantError(t, "no generation", err, sluice.Duplicate)
	in = incoming()
	in.NumTokens++
	_, err = s.Receive(t.Context(), bytes.NewReader(bare), -1, in, r)
	wantError(t, "the same generation, another ref", err, sluice.Invalid, "num_tokens")
	other := refOf(s).Fields()
	other.NumTokens++
	otherRef, err := sluice.NewRef(other)
	must(t, err)
	_, err = s.Receive(t.Context(), bytes.NewReader(stockFile(map[string]string{safetensors.RefKey: otherRef.Canonical()}, three()...)), -1, nameless, r)
	wantError(t, "the same generation, another ref in the header", err, sluice.Duplicate)
	if h := s.Health(); h.ReservedBytes != 1000 || h.ResidentSamples != 1 {
		t.Errorf("the repetitions changed %+v", h)
	}
	mustAudit(t, s, "at the end")
}

func TestFindReturnsTheRefOfWhatIsHere(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), someCaps)
	ref := mustPut(t, s, "a", 1, 100)
	generation := ref.Generation()
	if got, err := s.Find(t.Context(), "a", generation); err != nil || !got.Equal(ref) {
		t.Errorf("%v, %v", got, err)
	}
	for _, c := range [][2]string{{"b", generation}, {"a", "other"}, {"a", ""}, {"../a", generation}, {"", ""}} {
		_, err := s.Find(t.Context(), c[0], c[1])
		wantError(t, fmt.Sprint(c), err, sluice.NotFound)
	}
	must(t, os.Remove(s.samplePath("a")))
	_, err := s.Find(t.Context(), "a", generation)
	wantError(t, "a file that is gone", err, sluice.NotFound)
	must(t, os.WriteFile(s.samplePath("a"), []byte("garbage, longer than eight bytes"), 0o600))
	_, err = s.Find(t.Context(), "a", generation)
	wantError(t, "a file that is broken", err, sluice.Corrupt)
	must(t, s.Close())
	_, err = s.Find(t.Context(), "a", generation)
	wantError(t, "a closed store", err, sluice.Closed)
}

func TestReceiveRefusesHeadersBeforeItTakesRoom(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), someCaps)
	raw := func(text string, data int) []byte {
		return append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...), make([]byte, data)...)
	}
	length := func(n uint64) []byte { return append(binary.LittleEndian.AppendUint64(nil, n), make([]byte, 100)...) }
	meta := func(change func(f *sluice.RefFields)) []byte {
		f := refOf(s).Fields()
		change(&f)
		ref, err := sluice.NewRef(f)
		must(t, err)
		return stockFile(map[string]string{safetensors.RefKey: ref.Canonical()}, three()...)
	}
	in := func(change func(in *Incoming)) Incoming {
		i := incoming()
		change(&i)
		return i
	}
	many := func(n int) (fs []sluice.Feature) {
		for i := range n {
			fs = append(fs, feature(fmt.Sprintf("f%d", i), sluice.UInt8, 1, 1))
		}
		return fs
	}
	bare := stockFile(nil, three()...)
	for what, c := range map[string]struct {
		body []byte
		in   Incoming
		kind sluice.Kind
		want string
	}{
		"a header as long as 2^64":      {length(1<<64 - 1), incoming(), sluice.Corrupt, "header length"},
		"a header over the format":      {length(safetensors.MaxHeader + 1), incoming(), sluice.Corrupt, "header length"},
		"a header over what we take":    {length(maxIncomingHeader + 1), incoming(), sluice.Invalid, "the header is"},
		"no header":                     {length(0), incoming(), sluice.Corrupt, "empty"},
		"no JSON":                       {raw("hello", 5), incoming(), sluice.Corrupt, "want '{'"},
		"a hole":                        {raw(`{"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, 2), incoming(), sluice.Corrupt, "nothing covers"},
		"a size that overflows":         {raw(`{"x":{"dtype":"F64","shape":[4294967296,4294967296],"data_offsets":[0,8]}}`, 8), incoming(), sluice.Corrupt, `"x"`},
		"a size that no store has":      {raw(`{"x":{"dtype":"U8","shape":[4503599627370496],"data_offsets":[0,4503599627370496]}}`, 8), in(func(i *Incoming) { i.Features = nil }), sluice.Full, "cap"},
		"a dtype of others":             {raw(`{"x":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}`, 1), in(func(i *Incoming) { i.Features = nil }), sluice.Unsupported, "F4"},
		"no tensors":                    {raw(`{}`, 0), in(func(i *Incoming) { i.Features = nil }), sluice.Invalid, "at least one feature"},
		"65 tensors":                    {stockFile(nil, many(65)...), in(func(i *Incoming) { i.Features = nil }), sluice.Invalid, "at most 64"},
		"a tensor too many":             {bare, in(func(i *Incoming) { i.Features = i.Features[:2] }), sluice.Invalid, "3 tensors"},
		"a tensor too few":              {bare, in(func(i *Incoming) { i.Features = []string{"x", "mask", "h", "y"} }), sluice.Invalid, `no tensor "y"`},
		"a tensor twice":                {bare, in(func(i *Incoming) { i.Features = []string{"x", "mask", "x"} }), sluice.Invalid, "has too"},
		"a path for an id":              {bare, in(func(i *Incoming) { i.SampleID = "../a" }), sluice.Invalid, "sample_id"},
		"an empty id":                   {bare, in(func(i *Incoming) { i.SampleID = "" }), sluice.Invalid, "sample_id"},
		"no run":                        {bare, in(func(i *Incoming) { i.RunID = "" }), sluice.Invalid, "run_id"},
		"no algorithm":                  {bare, in(func(i *Incoming) { i.Algorithm = "" }), sluice.Invalid, "algorithm"},
		"a bad generation":              {bare, in(func(i *Incoming) { i.Generation = "-" }), sluice.Invalid, "generation"},
		"a negative count":              {bare, in(func(i *Incoming) { i.NumTokens = -1 }), sluice.Invalid, "num_tokens"},
		"a ref that is none":            {stockFile(map[string]string{safetensors.RefKey: "{}"}, three()...), incoming(), sluice.Invalid, safetensors.RefKey},
		"another sample's ref":          {meta(func(f *sluice.RefFields) { f.SampleID = "b" }), incoming(), sluice.Invalid, "sample_id"},
		"another run's ref":             {meta(func(f *sluice.RefFields) { f.RunID = "b" }), incoming(), sluice.Invalid, "run_id"},
		"another store's ref":           {meta(func(f *sluice.RefFields) { f.StoreURI = "mem:1" }), incoming(), sluice.Invalid, "store_uri"},
		"another put's ref":             {meta(func(f *sluice.RefFields) { f.Generation = "b" }), incoming(), sluice.Invalid, "generation"},
		"another algorithm's ref":       {meta(func(f *sluice.RefFields) { f.Algorithm = "b" }), incoming(), sluice.Invalid, "algorithm"},
		"another schema version":        {meta(func(f *sluice.RefFields) { f.SchemaVersion = 2 }), in(func(i *Incoming) { i.SchemaVersion = 1 }), sluice.Invalid, "schema_version"},
		"other tokens":                  {meta(func(f *sluice.RefFields) { f.NumTokens = 4 }), incoming(), sluice.Invalid, "num_tokens"},
		"another target":                {meta(func(f *sluice.RefFields) { f.TargetModelVersion = "4" }), in(func(i *Incoming) { i.TargetModelVersion = "5" }), sluice.Invalid, "target_model_version"},
		"another draft":                 {meta(func(f *sluice.RefFields) { f.DraftWeightVersion = "4" }), in(func(i *Incoming) { i.DraftWeightVersion = "5" }), sluice.Invalid, "draft_weight_version"},
		"other attributes":              {meta(func(f *sluice.RefFields) { f.Attributes = nil }), incoming(), sluice.Invalid, "attributes"},
		"another order":                 {meta(func(f *sluice.RefFields) { slices.Reverse(f.Features) }), incoming(), sluice.Invalid, "features"},
		"a feature that is not there":   {meta(func(f *sluice.RefFields) { f.Features[0].Name = "y" }), in(func(i *Incoming) { i.Features = nil }), sluice.Invalid, "no tensor y"},
		"a feature with another shape":  {meta(func(f *sluice.RefFields) { f.Features[0].Shape = []int64{5, 1} }), incoming(), sluice.Invalid, "tensor x"},
		"checksums that can't be read":  {stockFile(map[string]string{safetensors.ChecksumsKey: "{"}, three()...), incoming(), sluice.Corrupt, safetensors.ChecksumsKey},
		"checksums of other tensors":    {stockFile(map[string]string{safetensors.ChecksumsKey: `{"x":"00000000"}`}, three()...), incoming(), sluice.Corrupt, "has no checksum"},
		"metadata that is no string":    {raw(`{"__metadata__":{"a":1},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1), incoming(), sluice.Corrupt, "string"},
		"another's file, cut to 8 byte": {bare[:8], incoming(), sluice.Corrupt, "ends after 8 bytes"},
	} {
		read := &counter{r: bytes.NewReader(c.body)}
		_, err := s.Receive(t.Context(), read, -1, c.in, sluice.Reservation{})
		wantError(t, what, err, c.kind, c.want)
		head := 8 + int(min(binary.LittleEndian.Uint64(c.body), maxIncomingHeader))
		if read.n > head {
			t.Errorf("%s: %d bytes were read, the header ends at %d", what, read.n, head)
		}
	}
	wantEmpty(t, s, "at the end", 0)
	for _, c := range []struct {
		size int64
		want string
	}{{0, "0 bytes"}, {7, "7 bytes"}, {20, "only 12 bytes follow"}, {int64(len(bare)) - 1, "the file has only"}, {int64(len(bare)) + 1, "tensors end at"}} {
		_, err := s.Receive(t.Context(), bytes.NewReader(bare), c.size, incoming(), sluice.Reservation{})
		wantError(t, fmt.Sprintf("a wrong size %d", c.size), err, sluice.Corrupt, c.want)
	}
	wantEmpty(t, s, "after wrong sizes", 0)
}

type counter struct {
	r io.Reader
	n int
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += n
	return n, err
}

func TestReceiveComparesChecksums(t *testing.T) {
	t.Parallel()
	for _, verify := range []bool{false, true} {
		s := mustOpen(t, shm(t), &Options{Caps: someCaps.Caps, Verify: verify})
		sums, data := map[string]uint32{}, []byte{}
		for _, f := range three() {
			sums[f.Name] = safetensors.Checksum(f.Data)
			data = append(data, f.Data...)
		}
		file := func(change func(map[string]uint32)) []byte {
			m := maps.Clone(sums)
			change(m)
			return stockFile(map[string]string{safetensors.ChecksumsKey: safetensors.EncodeChecksums(m)}, three()...)
		}
		_, err := s.Receive(t.Context(), bytes.NewReader(file(func(m map[string]uint32) { m["h"] ^= 1 })), -1, incoming(), sluice.Reservation{})
		wantError(t, "a wrong checksum in the file", err, sluice.Corrupt, "feature h")
		in := incoming()
		in.Checksum = func() (uint32, bool) { return safetensors.Checksum(data) ^ 1, true }
		_, err = s.Receive(t.Context(), bytes.NewReader(stockFile(nil, three()...)), -1, in, sluice.Reservation{})
		wantError(t, "a wrong checksum behind it", err, sluice.Corrupt, fmt.Sprintf("%08x", safetensors.Checksum(data)))
		wantEmpty(t, s, "after wrong checksums", 0)
		in.Checksum = func() (uint32, bool) { return safetensors.Checksum(data), true }
		ref, err := s.Receive(t.Context(), bytes.NewReader(file(func(m map[string]uint32) { clear(m); m["x"], m["mask"], m["h"] = 0, 0, sums["h"] })), -1, in, sluice.Reservation{})
		must(t, err)
		wantSample(t, s, ref, three())
	}
}

func TestReceiveAccountsForItsReservation(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), &Options{Caps: sluice.Caps{MaxBytes: 1000, MaxSamples: 2}})
	body := stockFile(nil, three()...)
	n := refOf(s).EstimatedBytes()
	for _, room := range []int64{0, n - 1, n, n + 1, 1000} {
		r, err := s.Reserve(t.Context(), room)
		must(t, err)
		ref, err := s.Receive(t.Context(), bytes.NewReader(body), -1, incoming(), r)
		must(t, err)
		if h := s.Health(); h.ResidentBytes != n || h.ReservedBytes != 0 || h.ReservedSamples != 0 || h.StagingBytes != 0 {
			t.Errorf("under a reservation of %d: %+v", room, h)
		}
		mustAudit(t, s, "after a receive")
		wantSample(t, s, ref, three())
	}
	r, err := s.Reserve(t.Context(), 10)
	must(t, err)
	other, err := s.Reserve(t.Context(), 900)
	must(t, err)
	_, err = s.Receive(t.Context(), bytes.NewReader(body), -1, incoming(), r)
	wantError(t, "over reservation and cap", err, sluice.Full)
	wantEmpty(t, s, "after the refusal", 910)
	must(t, s.Unreserve(t.Context(), other))
	_, err = s.Receive(t.Context(), bytes.NewReader(body), -1, incoming(), r)
	must(t, err)
}

func TestReceiveIntoAFullFileSystem(t *testing.T) {
	t.Parallel()
	mnt := filepath.Dir(shm(t))
	if err := unix.Mount("tmpfs", mnt, "tmpfs", 0, "size=8m"); err != nil {
		t.Skipf("no tmpfs can be mounted here: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(mnt, unix.MNT_DETACH) })
	s, err := Open(filepath.Join(mnt, "s"), &Options{Caps: sluice.Caps{MaxSamples: 100}})
	must(t, err)
	defer s.Close()
	f := feature("x", sluice.UInt8, 1, 3<<20)
	in := incoming()
	in.Features = nil
	body := stockFile(nil, f)
	r, err := s.Reserve(t.Context(), f.Bytes())
	must(t, err)
	must(t, os.WriteFile(filepath.Join(mnt, "hog"), make([]byte, 5<<20), 0o600)) // after the reservation was given
	read := &counter{r: bytes.NewReader(body)}
	_, err = s.Receive(t.Context(), read, -1, in, r)
	wantError(t, "Receive", err, sluice.NoSpace, `"a"`)
	if read.n > 1000 {
		t.Errorf("%d bytes were read before the room was missed", read.n)
	}
	wantEmpty(t, s, "after the refusal", f.Bytes())
	must(t, os.Remove(filepath.Join(mnt, "hog")))
	ref, err := s.Receive(t.Context(), bytes.NewReader(body), -1, in, r)
	must(t, err)
	wantSample(t, s, ref, []sluice.Feature{f})
}

func TestReceiveWritesIntoRecycledFiles(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), someCaps)
	must(t, s.Abort(t.Context(), mustPut(t, s, "old", 9, 300_000)))
	before, err := s.list()
	must(t, err)
	if s.Health().PoolBytes == 0 {
		t.Fatal("nothing is in the pool")
	}
	var was, is unix.Stat_t
	for _, n := range before {
		if n != ledgerName {
			must(t, unix.Stat(filepath.Join(s.dir, n), &was))
		}
	}
	f := feature("x", sluice.UInt8, 1, 200_000)
	in := incoming()
	in.Features = nil
	_, err = s.Receive(t.Context(), bytes.NewReader(stockFile(nil, f)), -1, in, sluice.Reservation{})
	must(t, err)
	must(t, unix.Stat(s.samplePath("a"), &is))
	if is.Ino != was.Ino {
		t.Error("the file is a fresh one")
	}
	must(t, os.Truncate(s.samplePath("a"), is.Size)) // it is a file of its own size
	ts := mustGet(t, s, refIn(t, s, "a"))
	if !bytes.Equal(ts.Features[0].Data, f.Data) {
		t.Error("it has other bytes")
	}
	must(t, ts.Release(t.Context()))
}

func refIn(t testing.TB, s *Store, id string) sluice.Ref {
	t.Helper()
	ref, _, err := s.readRef(id)
	must(t, err)
	return ref
}

func TestOnDisksWhatIsReceivedCarriesChecksums(t *testing.T) {
	t.Parallel()
	dir := freshDir(t, diskDir(t))
	s := mustOpen(t, dir, &Options{Caps: someCaps.Caps, Durability: Power})
	ref, err := s.Receive(t.Context(), bytes.NewReader(stockFile(nil, three()...)), -1, incoming(), sluice.Reservation{})
	must(t, err)
	must(t, s.Claim(ref, "queue"))
	must(t, s.Close())
	s = mustOpen(t, dir, nil) // whose first get checks them
	must(t, mustGet(t, s, ref).Release(t.Context()))
	must(t, s.Unclaim(ref, "queue"))
}

func TestAClosedStoreReceivesNothing(t *testing.T) {
	t.Parallel()
	s := mustOpen(t, shm(t), someCaps)
	must(t, s.Close())
	_, err := s.Receive(t.Context(), bytes.NewReader(stockFile(nil, three()...)), -1, incoming(), sluice.Reservation{})
	wantError(t, "Receive", err, sluice.Closed)
	_, err = s.Lend(t.Context(), refOf(s), false)
	wantError(t, "Lend", err, sluice.Closed)
}

// FuzzReceive takes whole bodies. What is refused leaves nothing; what is accepted can be got, and is what the codec reads in the body.
func FuzzReceive(f *testing.F) {
	s := mustOpen(f, shm(f), &Options{Caps: sluice.Caps{MaxBytes: 1 << 20}})
	f.Add(stockFile(nil, three()...), true)
	f.Add(stockFile(map[string]string{safetensors.RefKey: refOf(s).Canonical(), safetensors.ChecksumsKey: `{"x":"00000000","mask":"00000000","h":"00000000"}`}, reordered(2, 0, 1)...), false)
	f.Add(stockFile(nil, feature("x", sluice.Float32, 1, 0, 7), feature("y", sluice.Int64, 1)), true)
	f.Add([]byte("\x02\x00\x00\x00\x00\x00\x00\x00{}"), true)
	f.Add([]byte(strings.Repeat("\xff", 20)), false)
	f.Fuzz(func(t *testing.T, body []byte, sized bool) {
		size := int64(-1)
		if sized {
			size = int64(len(body))
		}
		in := incoming()
		in.Features, in.Generation, in.Attributes, in.NumTokens = nil, "", nil, 0
		ref, err := s.Receive(t.Context(), iotest.HalfReader(bytes.NewReader(body)), size, in, sluice.Reservation{})
		if err != nil {
			switch sluice.KindOf(err) {
			case sluice.Corrupt, sluice.Invalid, sluice.Unsupported, sluice.Full:
			default:
				t.Fatalf("%q: %v", sluice.KindOf(err), err)
			}
			if h := s.Health(); h.UsedSamples() != 0 || h.UsedBytes() != 0 || h.StagingBytes != 0 {
				t.Fatalf("a refused body left %+v", h)
			}
			return
		}
		m, err := safetensors.Read(bytes.NewReader(body), int64(len(body)))
		must(t, err)
		want, err := m.Features(ref.FeatureNames())
		must(t, err)
		wantSample(t, s, ref, want)
		mustAudit(t, s, "after the sample")
	})
}

// BenchmarkReceive is of a body of 256 MiB in memory; its floor writes the same with pieces of 1 MiB into a file that has its room.
func BenchmarkReceive(b *testing.B) {
	const n = 256 << 20
	for _, bc := range []struct {
		name string
		opts Options
		sum  bool
	}{{name: "plain"}, {"trailer", Options{}, true}, {"checksummed", Options{Verify: true}, false}} {
		b.Run(bc.name, func(b *testing.B) {
			dir := shm(b)
			bc.opts.Caps, bc.opts.NoPool = sluice.Caps{MaxBytes: 400 << 20}, true
			s := mustOpen(b, dir, &bc.opts)
			body := stockFile(nil, feature("x", sluice.UInt8, 1, n))
			in := incoming()
			in.Features, in.Generation = nil, ""
			if bc.sum {
				in.Checksum = func() (uint32, bool) { return 0, false }
			}
			var floors, took time.Duration
			rounds := 0
			b.SetBytes(n)
			for b.Loop() {
				begun := time.Now()
				ref, err := s.Receive(b.Context(), bytes.NewReader(body), int64(len(body)), in, sluice.Reservation{})
				must(b, err)
				took += time.Since(begun)
				b.StopTimer()
				must(b, s.Abort(b.Context(), ref))
				floors += plainReceive(b, filepath.Join(filepath.Dir(dir), "floor"), body)
				rounds++
				b.StartTimer()
			}
			b.ReportMetric(float64(floors)/float64(took), "of-floor")
		})
	}
}

// plainReceive copies a body into a fresh file, through a buffer of 1 MiB.
func plainReceive(b *testing.B, path string, body []byte) time.Duration {
	b.Helper()
	buf := make([]byte, 1<<20)
	r := bytes.NewReader(body)
	begun := time.Now()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	must(b, err)
	must(b, unix.Fallocate(int(f.Fd()), 0, 0, int64(len(body))))
	for {
		n, err := r.Read(buf)
		if errors.Is(err, io.EOF) {
			break
		}
		must(b, err)
		_, err = f.Write(buf[:n])
		must(b, err)
	}
	must(b, f.Close())
	took := time.Since(begun)
	must(b, os.Remove(path))
	return took
}
