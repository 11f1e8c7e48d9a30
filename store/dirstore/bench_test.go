//go:build linux

package dirstore

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

const benchBytes = 84 << 20

// floor measures one pwritev of n bytes in bytes a second, to a fresh file or over one that is there: the median of five.
func floor(b *testing.B, dir string, data []byte, fresh bool) float64 {
	b.Helper()
	path := filepath.Join(filepath.Dir(dir), "floor")
	defer os.Remove(path)
	var speeds []float64
	for i := range 6 {
		if fresh {
			_ = os.Remove(path)
		}
		fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
		must(b, err)
		begun := time.Now()
		if n, err := unix.Pwritev(fd, [][]byte{data}, 0); err != nil || n != len(data) {
			b.Fatal(n, err)
		}
		if i > 0 || fresh {
			speeds = append(speeds, float64(len(data))/time.Since(begun).Seconds())
		}
		must(b, unix.Close(fd))
	}
	slices.Sort(speeds)
	return speeds[len(speeds)/2]
}

// benchmark runs op, whose bytes a second are compared with a floor measured before and after.
func benchmark(b *testing.B, o *Options, fresh bool, op func(b *testing.B, s *Store, i int, sample *sluice.Sample)) {
	dir := shm(b)
	o.Caps = sluice.Caps{MaxBytes: 400 << 20}
	s := mustOpen(b, dir, o)
	sample := sampleOf("warm", 1, benchBytes)
	ref, err := s.Put(b.Context(), sample, sluice.Reservation{})
	must(b, err)
	must(b, s.Abort(b.Context(), ref)) // so that the pool has a file, where there is one
	before := floor(b, dir, sample.Features[0].Data, fresh)
	b.SetBytes(benchBytes)
	b.ResetTimer()
	i := 0
	for b.Loop() {
		sample.SampleID = "s-" + strconv.Itoa(i)
		op(b, s, i, sample)
		i++
	}
	b.StopTimer()
	speed := benchBytes * float64(i) / b.Elapsed().Seconds()
	after := floor(b, dir, sample.Features[0].Data, fresh)
	b.ReportMetric(speed/((before+after)/2), "of-floor")
}

func BenchmarkPutFresh(b *testing.B) {
	benchmark(b, &Options{NoPool: true}, true, func(b *testing.B, s *Store, _ int, sample *sluice.Sample) {
		ref, err := s.Put(b.Context(), sample, sluice.Reservation{})
		must(b, err)
		b.StopTimer() // the floor does not unlink either
		must(b, s.Abort(b.Context(), ref))
		b.StartTimer()
	})
}

func BenchmarkPutRecycled(b *testing.B) {
	benchmark(b, &Options{}, false, func(b *testing.B, s *Store, _ int, sample *sluice.Sample) {
		ref, err := s.Put(b.Context(), sample, sluice.Reservation{})
		must(b, err)
		must(b, s.Abort(b.Context(), ref))
	})
}

// BenchmarkCycle is reserve, put, claim, get, release, unclaim of 84 MB. unread does not look at the bytes, read touches every cache line.
func BenchmarkCycle(b *testing.B) {
	for _, read := range []bool{false, true} {
		b.Run(map[bool]string{false: "unread", true: "read"}[read], func(b *testing.B) {
			benchmark(b, &Options{}, false, func(b *testing.B, s *Store, _ int, sample *sluice.Sample) {
				r, err := s.Reserve(b.Context(), benchBytes)
				must(b, err)
				ref, err := s.Put(b.Context(), sample, r)
				must(b, err)
				must(b, s.Claim(ref, "queue"))
				ts, err := s.Get(b.Context(), ref)
				must(b, err)
				if read {
					sink += touch(ts.Features[0].Data)
				}
				must(b, ts.Release(b.Context()))
				must(b, s.Unclaim(ref, "queue"))
			})
		})
	}
}

var sink byte

func touch(data []byte) (x byte) {
	for i := 0; i < len(data); i += 64 {
		x += data[i]
	}
	return x
}

// BenchmarkGet is get and release of a claimed sample; its floor is open, map, unmap and close.
func BenchmarkGet(b *testing.B) {
	dir := shm(b)
	s := mustOpen(b, dir, &Options{Caps: sluice.Caps{MaxBytes: 400 << 20}})
	ref, err := s.Put(b.Context(), sampleOf("a", 1, benchBytes), sluice.Reservation{})
	must(b, err)
	must(b, s.Claim(ref, "queue"))
	path := filepath.Join(dir, "a.safetensors")
	begun := time.Now()
	const rounds = 20_000
	for range rounds {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		must(b, err)
		mem, err := unix.Mmap(fd, 0, benchBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
		must(b, err)
		must(b, unix.Munmap(mem))
		must(b, unix.Close(fd))
	}
	least := time.Since(begun) / rounds
	n := 0
	for b.Loop() {
		ts, err := s.Get(b.Context(), ref)
		must(b, err)
		must(b, ts.Release(b.Context()))
		n++
	}
	b.ReportMetric(float64(b.Elapsed())/float64(n)/float64(least), "times-floor")
}

func BenchmarkHealth(b *testing.B) {
	s := mustOpen(b, shm(b), &Options{Caps: sluice.Caps{MaxBytes: 400 << 20}})
	for b.Loop() {
		s.Health()
	}
}

// BenchmarkSmallCycle is a cycle of 4 KiB: the ledger's own cost.
func BenchmarkSmallCycle(b *testing.B) {
	s := mustOpen(b, shm(b), &Options{Caps: sluice.Caps{MaxBytes: 400 << 20}})
	sample := sampleOf("a", 1, 4096)
	i := 0
	for b.Loop() {
		sample.SampleID = fmt.Sprint("s-", i)
		i++
		ref, err := s.Put(b.Context(), sample, sluice.Reservation{})
		must(b, err)
		must(b, s.Claim(ref, "queue"))
		ts, err := s.Get(b.Context(), ref)
		must(b, err)
		must(b, ts.Release(b.Context()))
		must(b, s.Unclaim(ref, "queue"))
	}
}
