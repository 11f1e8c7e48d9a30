package storetest

import (
	"bytes"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/sluice-ml/sluice"
)

// fill writes bytes that follow from seed alone, so that contents can be checked without being kept.
func fill(data []byte, seed uint64) {
	var block [4096]byte
	for len(data) > 0 {
		for i := 0; i < len(block); i += 8 {
			seed += 0x9e3779b97f4a7c15
			z := seed
			z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
			z = (z ^ z>>27) * 0x94d049bb133111eb
			binary.LittleEndian.PutUint64(block[i:], z^z>>31)
		}
		data = data[copy(data, block[:]):]
	}
}

func filled(seed uint64, dtype sluice.DType, shape ...int64) sluice.Tensor {
	t := sluice.NewTensor(dtype, shape...)
	fill(t.Data, seed)
	return t
}

// sampleOf wraps features, which get their seeds from seed and their index.
func sampleOf(id string, seed uint64, features ...sluice.Feature) *sluice.Sample {
	for i := range features {
		fill(features[i].Data, seed+uint64(i)<<32)
	}
	return &sluice.Sample{SampleID: id, RunID: "run", Algorithm: sluice.EAGLE3, SchemaVersion: 1, NumTokens: 7, Features: features,
		Attributes: map[string]string{"source": "storetest"}}
}

// sampleSized is a sample of exactly n bytes in two features, the second of which is not aligned in any packed layout if n is odd.
func sampleSized(id string, seed uint64, n int64) *sluice.Sample {
	head := min(n, 3)
	return sampleOf(id, seed,
		sluice.Feature{Name: "loss_mask", Tensor: sluice.NewTensor(sluice.UInt8, head)},
		sluice.Feature{Name: "hidden_states", Tensor: sluice.NewTensor(sluice.Int8, n-head)})
}

// eagle is a small sample of the usual form, with features whose names are not in any sorted order.
func eagle(id string, seed uint64) *sluice.Sample {
	return sampleOf(id, seed,
		sluice.Feature{Name: "last_hidden_states", Tensor: sluice.NewTensor(sluice.BFloat16, 1, 16, 8)},
		sluice.Feature{Name: "input_ids", Tensor: sluice.NewTensor(sluice.Int64, 1, 16)},
		sluice.Feature{Name: "aux_hidden_states", Tensor: sluice.NewTensor(sluice.BFloat16, 1, 16, 24)},
		sluice.Feature{Name: "attention_mask", Tensor: sluice.NewTensor(sluice.Int64, 1, 16)},
		sluice.Feature{Name: "loss_mask", Tensor: sluice.NewTensor(sluice.Int64, 1, 16)})
}

// clone is a deep copy of the features: what a test compares with after its sample was scribbled over.
func clone(features []sluice.Feature) []sluice.Feature {
	c := slices.Clone(features)
	for i := range c {
		c[i].Shape = slices.Clone(c[i].Shape)
		c[i].Data = bytes.Clone(c[i].Data)
	}
	return c
}

// scribble inverts every bit.
func scribble(features []sluice.Feature) {
	for i := range features {
		for data := features[i].Data; len(data) > 0; {
			data = data[subtle.XORBytes(data, data, ones):]
		}
	}
}

var ones = bytes.Repeat([]byte{0xff}, 4096)

// diffFeatures describes the first difference between two lists of features, or is "".
func diffFeatures(got, want []sluice.Feature) string {
	if len(got) != len(want) {
		return fmt.Sprintf("%d features, want %d", len(got), len(want))
	}
	for i := range want {
		switch g, w := &got[i], &want[i]; {
		case g.Name != w.Name:
			return fmt.Sprintf("feature %d is %q, want %q", i, g.Name, w.Name)
		case !g.Equal(w.Spec):
			return fmt.Sprintf("feature %q is %s, want %s", w.Name, g.Spec, w.Spec)
		case len(g.Data) != len(w.Data):
			return fmt.Sprintf("feature %q has %d bytes, want %d", w.Name, len(g.Data), len(w.Data))
		case !bytes.Equal(g.Data, w.Data):
			for j := range w.Data {
				if g.Data[j] != w.Data[j] {
					return fmt.Sprintf("feature %q differs from byte %d of %d on: %#02x, want %#02x", w.Name, j, len(w.Data), g.Data[j], w.Data[j])
				}
			}
		}
	}
	return ""
}

func wantFeatures(t testing.TB, what string, got, want []sluice.Feature) {
	t.Helper()
	if d := diffFeatures(got, want); d != "" {
		t.Fatalf("%s: %s", what, d)
	}
}

// wantRead gets the sample, compares it, and gives everything back but the sample itself, which therefore must be claimed or pinned elsewhere.
func wantRead(t testing.TB, s sluice.Store, ref sluice.Ref, want []sluice.Feature) {
	t.Helper()
	ts := mustGet(t, s, ref)
	wantFeatures(t, "Get "+ref.SampleID(), ts.Features, want)
	noError(t, "Tensors.Release", ts.Release(bg))
}

// wantError checks the kind of an error, and that its text, which people act on, contains all fragments.
func wantError(t testing.TB, what string, err, kind error, fragments ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("%s worked, want: %v", what, kind)
	}
	if !errors.Is(err, kind) {
		t.Fatalf("%s failed with %v (kind %q), want kind %v", what, err, sluice.KindOf(err), kind)
	}
	for _, f := range fragments {
		if !strings.Contains(err.Error(), f) {
			t.Errorf("%s failed with the message %q, which does not mention %q", what, err, f)
		}
	}
}

// wantNumbers checks that a message gives the numbers, each in bytes or in a binary unit.
func wantNumbers(t testing.TB, what string, err error, numbers ...int64) {
	t.Helper()
	for _, n := range numbers {
		forms := []string{strconv.FormatInt(n, 10)}
		for i, unit := range []string{"KiB", "MiB", "GiB", "TiB"} {
			v := float64(n) / float64(int64(1)<<(10*(i+1)))
			forms = append(forms, fmt.Sprintf("%.0f %s", v, unit), fmt.Sprintf("%.1f %s", v, unit), fmt.Sprintf("%.2f %s", v, unit))
		}
		if !slices.ContainsFunc(forms, func(f string) bool { return strings.Contains(err.Error(), f) }) {
			t.Errorf("%s failed with the message %q, which does not give the number %d", what, err, n)
		}
	}
}

// ignoreOwn leaves out what is the store's own affair.
var ignoreOwn = cmpopts.IgnoreFields(sluice.Health{}, "PoolBytes", "Caps")

// wantHealth compares the counters that the contract defines.
func wantHealth(t testing.TB, when string, s sluice.Store, want sluice.Health) {
	t.Helper()
	if d := cmp.Diff(want, s.Health(), ignoreOwn); d != "" {
		t.Fatalf("%s: Health differs (-want +got):\n%s", when, d)
	}
}

// held is the health of a store that holds the given samples and nothing else.
func held(refs ...sluice.Ref) (h sluice.Health) {
	for _, r := range refs {
		h.ResidentBytes += r.EstimatedBytes()
		h.ResidentSamples++
	}
	return h
}

// listing is what Samples says, by sample and generation; nil for a store that has no such list.
func listing(t testing.TB, s sluice.Store) map[string]sluice.SampleInfo {
	t.Helper()
	c, ok := s.(sluice.ClaimStore)
	if !ok {
		return nil
	}
	infos, err := c.Samples(bg)
	noError(t, "Samples", err)
	m := make(map[string]sluice.SampleInfo, len(infos))
	for _, i := range infos {
		m[key(i.Ref)] = i
	}
	if len(m) != len(infos) {
		t.Fatalf("Samples lists a sample twice: %v", infos)
	}
	return m
}

// wantListed checks that Samples lists exactly the given refs.
func wantListed(t testing.TB, when string, s sluice.Store, refs ...sluice.Ref) {
	t.Helper()
	m := listing(t, s)
	if m == nil {
		return
	}
	want := map[string]bool{}
	for _, r := range refs {
		want[key(r)] = true
		if got, ok := m[key(r)]; ok && !got.Ref.Equal(r) {
			t.Errorf("%s: Samples has %s, want %s", when, got.Ref.Canonical(), r.Canonical())
		}
	}
	if got := slices.Sorted(maps.Keys(m)); !slices.Equal(got, slices.Sorted(maps.Keys(want))) {
		t.Fatalf("%s: Samples lists %v, want %v", when, got, slices.Sorted(maps.Keys(want)))
	}
}

func key(r sluice.Ref) string { return r.SampleID() + "@" + r.Generation() }

// snapshot is all that can be seen of a store from outside, for tests that a call changed nothing.
type snapshot struct {
	health sluice.Health
	list   map[string]sluice.SampleInfo
}

func look(t testing.TB, s sluice.Store) snapshot {
	t.Helper()
	return snapshot{s.Health(), listing(t, s)}
}

func (before snapshot) wantSame(t testing.TB, after string, s sluice.Store) {
	t.Helper()
	now := look(t, s)
	if d := cmp.Diff(before.health, now.health, cmpopts.IgnoreFields(sluice.Health{}, "PoolBytes")); d != "" {
		t.Errorf("%s changed Health (-before +after):\n%s", after, d)
	}
	if d := cmp.Diff(before.list, now.list, cmp.Comparer(sluice.Ref.Equal)); d != "" {
		t.Errorf("%s changed Samples (-before +after):\n%s", after, d)
	}
}

// retold is ref with changed fields: a ref that someone made up.
func retold(t testing.TB, ref sluice.Ref, change func(*sluice.RefFields)) sluice.Ref {
	t.Helper()
	f := ref.Fields()
	change(&f)
	r, err := sluice.NewRef(f)
	noError(t, "NewRef", err)
	return r
}
