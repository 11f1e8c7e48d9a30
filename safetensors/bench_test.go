package safetensors

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

// eagle3 is a sample of the usual size: 64 MiB and a little.
func eagle3() []sluice.Feature {
	return []sluice.Feature{
		feature("aux_hidden_states", 1, sluice.BFloat16, 1, 2048, 12288),
		feature("input_ids", 2, sluice.Int64, 1, 2048),
		feature("attention_mask", 3, sluice.Int64, 1, 2048),
		feature("loss_mask", 4, sluice.Int64, 1, 2048),
		feature("last_hidden_states", 5, sluice.BFloat16, 1, 2048, 4096),
	}
}

// benchRef is as long as a ref, and as rich in characters to escape.
var benchRef = `{"sample_id":"r1-0-17","features":[` + strings.Repeat(`{"name":"aux_hidden_states","key":"r1-0-17/aux_hidden_states","shape":[1,2048,12288],"dtype":"bfloat16"},`, 8) + `]}`

func eightTensors(b *testing.B, metadata map[string]string) ([]byte, int64) {
	var features []sluice.Feature
	for _, name := range []string{"aux_hidden_states", "input_ids", "attention_mask", "loss_mask", "last_hidden_states", "position_ids", "seq_lens", "doc_remaining"} {
		features = append(features, feature(name, 0, sluice.Int64, 1, 2048))
	}
	l := layoutOf(b, features, metadata)
	return l.HeaderBytes(), l.Size()
}

func BenchmarkParseHeader(b *testing.B) {
	for name, metadata := range map[string]map[string]string{"bare": nil, "ref": {RefKey: benchRef}} {
		b.Run("8 tensors "+name, func(b *testing.B) {
			head, size := eightTensors(b, metadata)
			b.SetBytes(int64(len(head)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := ParseHeader(head, size); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	b.Run("1000 tensors", func(b *testing.B) {
		file := fileOf(manyTensors(1000, 999), 1000)
		b.SetBytes(int64(len(file)))
		b.ReportAllocs()
		for b.Loop() {
			if _, err := ParseHeader(file, int64(len(file))); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkNewLayout(b *testing.B) {
	features := sample()
	metadata := map[string]string{RefKey: benchRef}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := NewLayout(features, metadata); err != nil {
			b.Fatal(err)
		}
	}
}

// memoryFolder is on tmpfs where there is one, so that the disk is not what is measured.
func memoryFolder(b *testing.B) string {
	dir, err := os.MkdirTemp("/dev/shm", "sluice-bench")
	if err != nil {
		return b.TempDir()
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// BenchmarkWrite measures a fresh file each time, against the floor: one plain pwritev of as many bytes.
func BenchmarkWrite(b *testing.B) {
	features := eagle3()
	plain := layoutOf(b, features, map[string]string{RefKey: benchRef})
	summed, err := NewChecksummedLayout(features, map[string]string{RefKey: benchRef})
	if err != nil {
		b.Fatal(err)
	}
	bufs, err := plain.Buffers(features)
	if err != nil {
		b.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		write func(f *os.File) error
	}{
		{"floor", func(f *os.File) error { _, err := unix.Pwritev(int(f.Fd()), bufs, 0); return err }},
		{"WriteFile", func(f *os.File) error { return plain.WriteFile(f, 0, features) }},
		{"WriteFile checksummed", func(f *os.File) error { return summed.WriteFile(f, 0, features) }},
		{"layout and WriteFile", func(f *os.File) error {
			l, err := NewLayout(features, map[string]string{RefKey: benchRef})
			if err != nil {
				return err
			}
			return l.WriteFile(f, 0, features)
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			path := memoryFolder(b) + "/f"
			b.SetBytes(plain.Size())
			for b.Loop() {
				f, err := os.Create(path)
				if err != nil {
					b.Fatal(err)
				}
				if err := c.write(f); err != nil {
					b.Fatal(err)
				}
				f.Close()
				b.StopTimer()
				os.Remove(path)
				b.StartTimer()
			}
		})
	}
}

// BenchmarkMap measures mapping and unmapping, against the floor without a header, on an open file and with opening it.
func BenchmarkMap(b *testing.B) {
	features := eagle3()
	l := layoutOf(b, features, map[string]string{RefKey: benchRef})
	path := memoryFolder(b) + "/f"
	f, err := os.Create(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	if err := l.WriteFile(f, 0, features); err != nil {
		b.Fatal(err)
	}
	order := []string{"aux_hidden_states", "input_ids", "attention_mask", "loss_mask", "last_hidden_states"}
	once := func(b *testing.B, f *os.File) {
		m, err := Map(f, l.Size())
		if err != nil {
			b.Fatal(err)
		}
		if _, err := m.Features(order); err != nil {
			b.Fatal(err)
		}
		if err := m.Close(); err != nil {
			b.Fatal(err)
		}
	}
	b.Run("floor", func(b *testing.B) {
		for b.Loop() {
			m, err := unix.Mmap(int(f.Fd()), 0, int(l.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
			if err != nil {
				b.Fatal(err)
			}
			if err := unix.Munmap(m); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("Map", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			once(b, f)
		}
	})
	b.Run("open and Map", func(b *testing.B) {
		for b.Loop() {
			f, err := os.Open(path)
			if err != nil {
				b.Fatal(err)
			}
			once(b, f)
			f.Close()
		}
	})
	b.Run("Read", func(b *testing.B) {
		b.SetBytes(l.Size())
		for b.Loop() {
			if _, err := Read(f, l.Size()); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkChecksum(b *testing.B) {
	data := make([]byte, 1<<20)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		Checksum(data)
	}
}
