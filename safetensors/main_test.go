package safetensors

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"go.uber.org/goleak"

	"github.com/sluice-ml/sluice"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fileOf is a file with the given JSON, unpadded, and n bytes of data that count up.
func fileOf(json string, n int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(json)))
	b = append(b, json...)
	for i := range n {
		b = append(b, byte(i))
	}
	return b
}

func onDisk(t testing.TB, data []byte) *os.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file.safetensors")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return opened(t, path, os.O_RDONLY)
}

func opened(t testing.TB, path string, flags int) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// feature is a tensor whose bytes count up from seed.
func feature(name string, seed byte, d sluice.DType, shape ...int64) sluice.Feature {
	t := sluice.NewTensor(d, shape...)
	for i := range t.Data {
		t.Data[i] = seed + byte(i)
	}
	return sluice.Feature{Name: name, Tensor: t}
}

// sample is what an eagle3 producer puts, made small.
func sample() []sluice.Feature {
	return []sluice.Feature{
		feature("aux_hidden_states", 1, sluice.BFloat16, 1, 8, 24),
		feature("input_ids", 2, sluice.Int64, 1, 8),
		feature("attention_mask", 3, sluice.Int64, 1, 8),
		feature("loss_mask", 4, sluice.Int64, 1, 8),
		feature("last_hidden_states", 5, sluice.BFloat16, 1, 8, 7),
	}
}

func written(t testing.TB, l *Layout, features []sluice.Feature) *os.File {
	t.Helper()
	f := opened(t, filepath.Join(t.TempDir(), "file.safetensors"), os.O_RDWR|os.O_CREATE|os.O_EXCL)
	if err := l.WriteFile(f, 0, features); err != nil {
		t.Fatal(err)
	}
	return f
}

func mapped(t testing.TB, f *os.File) *Mapping {
	t.Helper()
	m, err := Map(f, -1)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func layoutOf(t testing.TB, features []sluice.Feature, metadata map[string]string) *Layout {
	t.Helper()
	l, err := NewLayout(features, metadata)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func aligned(data []byte, to int64) bool {
	return len(data) == 0 || uintptr(unsafe.Pointer(unsafe.SliceData(data)))%uintptr(to) == 0
}

func wantKind(t *testing.T, err error, kind sluice.Kind, message string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want %q", message)
	}
	if got := sluice.KindOf(err); got != kind {
		t.Errorf("kind is %q, want %q (%v)", got, kind, err)
	}
	if message != "" && err.Error() != message {
		t.Errorf("message is\n\t%s\nwant\n\t%s", err, message)
	}
}
