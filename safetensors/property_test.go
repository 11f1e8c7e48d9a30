package safetensors

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/sluice-ml/sluice"
)

func drawFeatures(t *rapid.T) []sluice.Feature {
	names := rapid.SliceOfNDistinct(rapid.String().Filter(func(s string) bool { return s != metadataKey }), 0, 24, rapid.ID).Draw(t, "names")
	var features []sluice.Feature
	for i, name := range names {
		d := rapid.SampledFrom(sluice.DTypes()).Draw(t, "dtype")
		shape := rapid.SliceOfN(rapid.Int64Range(0, 9), 0, 4).Draw(t, "shape")
		features = append(features, feature(name, byte(i), d, shape...))
	}
	return features
}

func TestWhatIsWrittenIsWhatIsMapped(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		features := drawFeatures(t)
		metadata := rapid.MapOfN(rapid.String().Filter(func(s string) bool { return s != ChecksumsKey }), rapid.String(), 0, 5).Draw(t, "metadata")
		checksums := rapid.Bool().Draw(t, "checksums")
		l, err := newLayout(features, metadata, checksums)
		if err != nil {
			t.Fatal(err)
		}
		f, err := os.CreateTemp(dir, "")
		if err != nil {
			t.Fatal(err)
		}
		defer os.Remove(f.Name())
		defer f.Close()
		if err := l.WriteFile(f, 0, features); err != nil {
			t.Fatal(err)
		}
		m, err := Map(f, l.Size())
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if checked, err := m.Verify(); checked != checksums || err != nil {
			t.Fatalf("checked %t, want %t: %v", checked, checksums, err)
		}
		for key, want := range metadata {
			if got := m.Header().Metadata[key]; got != want {
				t.Errorf("metadata %q is %q, want %q", key, got, want)
			}
		}
		order := rapid.Permutation(features).Draw(t, "order")
		var wanted []string
		for _, f := range order {
			wanted = append(wanted, f.Name)
		}
		got, err := m.Features(wanted)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(order, got, cmpopts.EquateEmpty()); diff != "" {
			t.Error(diff)
		}
		for _, f := range got {
			if !aligned(f.Data, f.DType.Size()) {
				t.Errorf("%q is not aligned to its elements", f.Name)
			}
		}
		if again := layoutAgain(t, rapid.Permutation(features).Draw(t, "other order"), metadata, checksums); !bytes.Equal(again.HeaderBytes(), l.HeaderBytes()) {
			t.Error("the bytes depend on the caller's order")
		}
	})
	if left, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

func layoutAgain(t *rapid.T, features []sluice.Feature, metadata map[string]string, checksums bool) *Layout {
	l, err := newLayout(features, metadata, checksums)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestAnyInterruptedWriteIsFinished(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		features := drawFeatures(t)
		l, err := newLayout(features, nil, rapid.Bool().Draw(t, "checksums"))
		if err != nil {
			t.Fatal(err)
		}
		steps := rapid.SliceOfN(rapid.IntRange(1, 200), 1, 8).Draw(t, "steps")
		f := &fakeFile{before: func(call, n int) (int, error) { return min(steps[call%len(steps)], n), nil }}
		if err := l.writeAt(f.write, "f", 0, features); err != nil {
			t.Fatal(err)
		}
		want, err := l.Buffers(features)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(f.data, bytes.Join(want, nil)) {
			t.Error("the file differs from Buffers")
		}
	})
}

// A file that was cut or has bytes behind its end is never taken for a whole one.
func TestNoOtherSizeIsAccepted(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		features := drawFeatures(t)
		l, err := NewLayout(features, nil)
		if err != nil {
			t.Fatal(err)
		}
		head := l.HeaderBytes()
		size := rapid.Int64Range(0, 2*l.Size()).Filter(func(n int64) bool { return n != l.Size() }).Draw(t, "size")
		if _, err := ParseHeader(head[:min(size, int64(len(head)))], size); sluice.KindOf(err) != sluice.Corrupt {
			t.Errorf("%d bytes instead of %d: %v", size, l.Size(), err)
		}
		order := names(l.Header())
		if !slices.IsSortedFunc(l.Header().Entries, func(a, b Entry) int { return int(a.Begin - b.Begin) }) {
			t.Errorf("entries are not in the order of their data: %q", order)
		}
	})
}
