package memstore

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
)

// large is an eagle3 sample of 84 MB: 2048 tokens of a target with a hidden size of 4096, and their masks.
func large(id string) *sluice.Sample {
	s := &sluice.Sample{SampleID: id, RunID: "bench", Algorithm: sluice.EAGLE3, SchemaVersion: 1, NumTokens: 2048, Features: []sluice.Feature{
		{Name: "aux_hidden_states", Tensor: sluice.NewTensor(sluice.BFloat16, 1, 2048, 3*4096)},
		{Name: "input_ids", Tensor: sluice.NewTensor(sluice.Int64, 1, 2048)},
		{Name: "attention_mask", Tensor: sluice.NewTensor(sluice.Int64, 1, 2048)},
		{Name: "loss_mask", Tensor: sluice.NewTensor(sluice.Int64, 1, 2048)},
		{Name: "last_hidden_states", Tensor: sluice.NewTensor(sluice.BFloat16, 1, 2048, 4096*2)},
	}}
	for i := range s.Features {
		for j := range s.Features[i].Data {
			s.Features[i].Data[j] = byte(j)
		}
	}
	return s
}

func small(id string) *sluice.Sample {
	return &sluice.Sample{SampleID: id, RunID: "bench", Algorithm: sluice.EAGLE3, SchemaVersion: 1, NumTokens: 16, Features: []sluice.Feature{
		{Name: "aux_hidden_states", Tensor: sluice.NewTensor(sluice.BFloat16, 1, 16, 240)},
		{Name: "input_ids", Tensor: sluice.NewTensor(sluice.Int64, 1, 16)},
		{Name: "attention_mask", Tensor: sluice.NewTensor(sluice.Int64, 1, 16)},
		{Name: "loss_mask", Tensor: sluice.NewTensor(sluice.Int64, 1, 16)},
	}}
}

// meter compares the work of a benchmark with its floor: the copy of the sample by one goroutine into memory that is warm. The two take turns, so that a
// machine that others use too slows down both.
type meter struct {
	b           *testing.B
	sample      *sluice.Sample
	dst         [][]byte
	work, floor []time.Duration
}

func newMeter(b *testing.B, s *sluice.Sample) *meter {
	m := &meter{b: b, sample: s, dst: make([][]byte, len(s.Features))}
	for i := range m.dst {
		m.dst[i] = make([]byte, len(s.Features[i].Data))
	}
	m.copy()
	return m
}

func (m *meter) copy() {
	for i := range m.dst {
		copy(m.dst[i], m.sample.Features[i].Data)
	}
}

// time is one turn of each. Only f counts for the benchmark.
func (m *meter) time(f func()) {
	m.b.StopTimer()
	start := time.Now()
	m.copy()
	m.floor = append(m.floor, time.Since(start))
	m.b.StartTimer()
	start = time.Now()
	f()
	m.work = append(m.work, time.Since(start))
}

// report gives medians. A ratio of 1 is as fast as the bare copy.
func (m *meter) report() {
	slices.Sort(m.work)
	slices.Sort(m.floor)
	took, floor := m.work[len(m.work)/2].Seconds(), m.floor[len(m.floor)/2].Seconds()
	m.b.ReportMetric(float64(m.sample.Bytes())/took/1e6, "MB/s")
	m.b.ReportMetric(float64(m.sample.Bytes())/floor/1e6, "floor-MB/s")
	m.b.ReportMetric(floor/took, "ratio")
	m.b.ReportMetric(m.floor[0].Seconds()/m.work[0].Seconds(), "best-ratio")
}

func benchStore(b *testing.B) *Store {
	s, err := New(&Options{Caps: sluice.Caps{MaxBytes: 1 << 30}})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { s.Close() })
	return s
}

func cycle(b *testing.B, s *Store, sample *sluice.Sample, use func(*sluice.Tensors)) {
	r, err := s.Reserve(b.Context(), sample.Bytes())
	if err != nil {
		b.Fatal(err)
	}
	ref, err := s.Put(b.Context(), sample, r)
	if err != nil {
		b.Fatal(err)
	}
	ts, err := s.Get(b.Context(), ref)
	if err != nil {
		b.Fatal(err)
	}
	if use != nil {
		use(ts)
	}
	if err := ts.Release(b.Context()); err != nil {
		b.Fatal(err)
	}
}

// BenchmarkPut84MB is a put into recycled memory, as all are but the first of a run, and one into a pool that is empty.
func BenchmarkPut84MB(b *testing.B) {
	for _, fresh := range []bool{false, true} {
		b.Run(map[bool]string{false: "recycled", true: "fresh"}[fresh], func(b *testing.B) {
			s, sample := benchStore(b), large("s")
			for range 3 {
				cycle(b, s, sample, nil)
			}
			m := newMeter(b, sample)
			for b.Loop() {
				if fresh {
					b.StopTimer()
					s.arena.trim(time.Now())
				}
				var ref sluice.Ref
				var err error
				m.time(func() { ref, err = s.Put(b.Context(), sample, sluice.Reservation{}) })
				if err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				if err := s.Abort(b.Context(), ref); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
			m.report()
		})
	}
}

func BenchmarkGet84MB(b *testing.B) {
	s, sample := benchStore(b), large("s")
	ref, err := s.Put(b.Context(), sample, sluice.Reservation{})
	if err != nil {
		b.Fatal(err)
	}
	if err := s.Claim(ref, "bench"); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		ts, err := s.Get(b.Context(), ref)
		if err != nil {
			b.Fatal(err)
		}
		if err := ts.Release(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkCycle84MB is reserve, put, get and release; "read" loads every cache line of what it got.
func BenchmarkCycle84MB(b *testing.B) {
	var sum byte
	for _, c := range []struct {
		name string
		use  func(*sluice.Tensors)
	}{{"unread", nil}, {"read", func(ts *sluice.Tensors) {
		n := byte(0)
		for _, f := range ts.Features {
			for i := 0; i < len(f.Data); i += 64 {
				n += f.Data[i]
			}
		}
		sum += n
	}}} {
		b.Run(c.name, func(b *testing.B) {
			s, sample := benchStore(b), large("s")
			for range 3 {
				cycle(b, s, sample, c.use)
			}
			m := newMeter(b, sample)
			for b.Loop() {
				m.time(func() { cycle(b, s, sample, c.use) })
			}
			m.report()
		})
	}
}

func BenchmarkCycle8KB(b *testing.B) {
	s, sample := benchStore(b), small("s")
	b.ReportAllocs()
	for b.Loop() {
		cycle(b, s, sample, nil)
	}
}

// BenchmarkHealth asks while another goroutine puts and gets all the time.
func BenchmarkHealth(b *testing.B) {
	for _, busy := range []bool{false, true} {
		b.Run(fmt.Sprintf("busy=%v", busy), func(b *testing.B) {
			s, sample := benchStore(b), large("s")
			stop, done := make(chan struct{}), make(chan struct{})
			go func() { // ends with the benchmark
				defer close(done)
				for busy {
					select {
					case <-stop:
						return
					default:
						cycle(b, s, sample, nil)
					}
				}
			}()
			for b.Loop() {
				s.Health()
			}
			close(stop)
			<-done
		})
	}
}
