package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue"
	"github.com/sluice-ml/sluice/store/dirstore"
	"github.com/sluice-ml/sluice/store/memstore"
)

const (
	runID         = "bench"
	hidden        = 4096
	bytesPerToken = 4*hidden*2 + 3*8 // three aux layers and the last, in bfloat16, and three columns of int64
)

// newSample is an eagle3 sample of a target with a hidden size of 4096.
func (b *bench) newSample() *sluice.Sample {
	s := &sluice.Sample{SampleID: "s", RunID: runID, Algorithm: sluice.EAGLE3, SchemaVersion: 1, NumTokens: b.tokens,
		Attributes: map[string]string{"shift": "0", "aux_layers": "hf:1,2,3", "last_norm": "post"},
		Features: []sluice.Feature{
			{Name: "aux_hidden_states", Tensor: sluice.NewTensor(sluice.BFloat16, 1, b.tokens, 3*hidden)},
			{Name: "input_ids", Tensor: sluice.NewTensor(sluice.Int64, 1, b.tokens)},
			{Name: "attention_mask", Tensor: sluice.NewTensor(sluice.Int64, 1, b.tokens)},
			{Name: "loss_mask", Tensor: sluice.NewTensor(sluice.Int64, 1, b.tokens)},
			{Name: "last_hidden_states", Tensor: sluice.NewTensor(sluice.BFloat16, 1, b.tokens, hidden)},
		}}
	for _, f := range s.Features {
		for i := range f.Data {
			f.Data[i] = byte(i)
		}
	}
	return s
}

func (b *bench) caps() sluice.Caps { return sluice.Caps{MaxBytes: 4 * b.sample} }

// gbPerS makes speeds of the times of one sample.
func (b *bench) gbPerS(floorS, workS float64, err error) (value, floor float64, _ error) {
	if err != nil {
		return 0, 0, err
	}
	n := float64(b.sample) / 1e9
	return n / workS, n / floorS, nil
}

// site is where a store lies for the time of a row.
type site struct {
	store sluice.ClaimStore
	dir   string // for the floor's file; empty for memory
	close func() error
}

func (b *bench) memSite() (*site, error) {
	s, err := memstore.New(&memstore.Options{Caps: b.caps()})
	if err != nil {
		return nil, err
	}
	return &site{store: s, close: s.Close}, nil
}

func (b *bench) dirSite(p *place, noPool bool) (*site, error) {
	dir, err := os.MkdirTemp(p.folder.Path, "row-")
	if err != nil {
		return nil, err
	}
	s, err := dirstore.Open(filepath.Join(dir, "store"), &dirstore.Options{Caps: b.caps(), NoPool: noPool})
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return &site{store: s, dir: dir, close: func() error { return errors.Join(s.Close(), os.RemoveAll(dir)) }}, nil
}

// floorOf makes the turn of the floor, which may leave a file in dir.
type floorOf func(s *sluice.Sample, dir string) turn

// warmCopy copies the sample by one goroutine into memory that is warm.
func warmCopy(s *sluice.Sample, _ string) turn {
	dst := make([][]byte, len(s.Features))
	for i := range dst {
		dst[i] = make([]byte, len(s.Features[i].Data))
	}
	return timed(func(context.Context) error {
		for i := range dst {
			copy(dst[i], s.Features[i].Data)
		}
		return nil
	})
}

// fileWrite writes the sample to a file of the store's file system, a fresh one each time or over one that is there. Only the writing counts.
func fileWrite(fresh, disk bool) floorOf {
	return func(s *sluice.Sample, dir string) turn {
		path := filepath.Join(dir, "floor")
		var bufs [][]byte
		for _, f := range s.Features {
			bufs = append(bufs, f.Data)
		}
		write := func(f *os.File) error {
			n, err := unix.Pwritev(int(f.Fd()), bufs, 0)
			if err == nil && int64(n) != s.Bytes() {
				err = fmt.Errorf("pwritev wrote %d bytes of %d", n, s.Bytes())
			}
			return err
		}
		if disk {
			write = func(f *os.File) error {
				for _, data := range bufs {
					if _, err := f.Write(data); err != nil {
						return err
					}
				}
				return nil
			}
		}
		return func(context.Context) (time.Duration, error) {
			f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
			if err != nil {
				return 0, err
			}
			begun := time.Now()
			err = write(f)
			took := time.Since(begun)
			err = errors.Join(err, f.Close())
			if fresh {
				err = errors.Join(err, os.Remove(path)) // as the sample goes that work has put
			}
			return took, err
		}
	}
}

// putRow measures puts of a sample that is aborted each time, outside the time that counts.
func (b *bench) putRow(open func() (*site, error), floor floorOf) func(context.Context) (float64, float64, error) {
	return func(ctx context.Context) (float64, float64, error) {
		return b.gbPerS(b.onSite(ctx, open, floor, func(s *site, sample *sluice.Sample) (turn, func() error, error) {
			return func(ctx context.Context) (time.Duration, error) {
				begun := time.Now()
				ref, err := s.store.Put(ctx, sample, sluice.Reservation{})
				took := time.Since(begun)
				if err == nil {
					err = s.store.Abort(ctx, ref)
				}
				return took, err
			}, nil, nil
		}))
	}
}

// cycleRow measures reserve, put, enqueue, lease, get, release and ack, with a real queue.
func (b *bench) cycleRow(open func() (*site, error), floor floorOf, read bool) func(context.Context) (float64, float64, error) {
	return func(ctx context.Context) (float64, float64, error) {
		return b.gbPerS(b.onSite(ctx, open, floor, func(s *site, sample *sluice.Sample) (turn, func() error, error) {
			schema, err := sluice.SchemaOf(sluice.EAGLE3)
			if err != nil {
				return nil, nil, err
			}
			q, err := queue.Open(ctx, sluice.RunConfig{RunID: runID, Schema: schema, Caps: b.caps(), LargestSample: b.sample}, s.store, nil)
			if err != nil {
				return nil, nil, err
			}
			n := 0
			return timed(func(ctx context.Context) error {
				n++
				sample.SampleID = "s-" + strconv.Itoa(n)
				return cycle(ctx, s.store, q, sample, read)
			}), func() error { return q.Stop(context.WithoutCancel(ctx)) }, nil
		}))
	}
}

// onSite opens a store for the time of the row, and lets floor and work take turns.
func (b *bench) onSite(ctx context.Context, open func() (*site, error), floor floorOf,
	work func(*site, *sluice.Sample) (turn, func() error, error),
) (floorS, workS float64, err error) {
	s, err := open()
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	sample := b.newSample()
	above, stop, err := work(s, sample)
	if err != nil {
		return 0, 0, err
	}
	if stop != nil {
		defer func() { err = errors.Join(err, stop()) }()
	}
	return b.turns(ctx, 25, floor(sample, s.dir), above)
}

var consumer = sluice.Consumer{Name: "bench"}

// touch loads every cache line.
func touch(ts *sluice.Tensors) (sum byte) {
	for _, f := range ts.Features {
		for i := 0; i < len(f.Data); i += 64 {
			sum += f.Data[i]
		}
	}
	return sum
}

func cycle(ctx context.Context, store sluice.ClaimStore, q sluice.Queue, sample *sluice.Sample, read bool) error {
	room, err := q.Reserve(ctx, sluice.ReserveRequest{Bytes: sample.Bytes()})
	if err != nil {
		return err
	}
	ref, err := store.Put(ctx, sample, room)
	if err != nil {
		return err
	}
	if _, err := q.Put(ctx, sluice.PutRequest{Ref: ref}); err != nil {
		return err
	}
	lease, err := acquire(ctx, q)
	if err != nil {
		return err
	}
	ts, err := store.Get(ctx, lease.Ref)
	if err != nil {
		return err
	}
	if read {
		runtime.KeepAlive(touch(ts))
	}
	if err := ts.Release(ctx); err != nil {
		return err
	}
	return ack(ctx, q, lease.ID, make([]sluice.Settlement, 1))
}

// plainCycle is a put, a get and a release without a queue.
func plainCycle(ctx context.Context, store sluice.Store, sample *sluice.Sample) error {
	ref, err := store.Put(ctx, sample, sluice.Reservation{})
	if err != nil {
		return err
	}
	ts, err := store.Get(ctx, ref)
	if err != nil {
		return err
	}
	return ts.Release(ctx)
}

func (b *bench) memJobs() []job {
	const copying = "one-goroutine copy into warm memory"
	return []job{
		{name: "memstore: put, recycled segment, unread", unit: "GB/s", floor: copying, run: b.putRow(b.memSite, warmCopy)},
		{name: "memstore: get and release, unread", unit: "ms", floor: "map and unmap as many bytes", time: true, run: b.memGet},
		{name: "memstore: cycle with a queue, unread", unit: "GB/s", floor: copying, run: b.cycleRow(b.memSite, warmCopy, false)},
		{name: "memstore: cycle with a queue, read", unit: "GB/s", floor: copying, run: b.cycleRow(b.memSite, warmCopy, true)},
	}
}

func (b *bench) memGet(ctx context.Context) (value, floor float64, err error) {
	s, err := b.memSite()
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	ref, err := s.store.Put(ctx, b.newSample(), sluice.Reservation{})
	if err != nil {
		return 0, 0, err
	}
	if err := s.store.Claim(ref, "bench"); err != nil { // or the first release would free it
		return 0, 0, err
	}
	const times = 100
	floorS, workS, err := b.turns(ctx, 51,
		timed(func(context.Context) error {
			for range times {
				m, err := unix.Mmap(-1, 0, int(b.sample), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
				if err != nil {
					return err
				}
				if err := unix.Munmap(m); err != nil {
					return err
				}
			}
			return nil
		}),
		timed(func(ctx context.Context) error {
			for range times {
				ts, err := s.store.Get(ctx, ref)
				if err != nil {
					return err
				}
				if err := ts.Release(ctx); err != nil {
					return err
				}
			}
			return nil
		}))
	return workS / times * 1e3, floorS / times * 1e3, err
}

func (b *bench) dirJobs(p *place) []job {
	fresh, over := "one pwritev to a fresh file", "one pwritev over pages that exist"
	if p.disk {
		fresh, over = "write(2) to a fresh file there", "write(2) over a file there"
	}
	noPool := func() (*site, error) { return b.dirSite(p, true) }
	pool := func() (*site, error) { return b.dirSite(p, false) }
	overwrite := fileWrite(false, p.disk)
	return []job{
		{name: p.label + ": put, fresh file, unread", unit: "GB/s", floor: fresh, in: p, run: b.putRow(noPool, fileWrite(true, p.disk))},
		{name: p.label + ": put, recycled file, unread", unit: "GB/s", floor: over, in: p, run: b.putRow(pool, overwrite)},
		{name: p.label + ": cycle with a queue, unread", unit: "GB/s", floor: over, in: p, run: b.cycleRow(pool, overwrite, false)},
		{name: p.label + ": cycle with a queue, read", unit: "GB/s", floor: over, in: p, run: b.cycleRow(pool, overwrite, true)},
	}
}

func (b *bench) healthJobs(p *place) []job {
	const lock = "lock and unlock a free mutex"
	return []job{
		{name: "memstore: health while another goroutine puts and gets", unit: "ns", floor: lock, time: true, run: b.healthRow(b.memSite)},
		{name: p.label + ": health while another goroutine puts and gets", unit: "ns", floor: lock, time: true, in: p,
			run: b.healthRow(func() (*site, error) { return b.dirSite(p, false) })},
	}
}

// healthRow asks while another goroutine is at work in the store.
func (b *bench) healthRow(open func() (*site, error)) func(context.Context) (float64, float64, error) {
	return func(ctx context.Context) (value, floor float64, err error) {
		s, err := open()
		if err != nil {
			return 0, 0, err
		}
		defer func() { err = errors.Join(err, s.close()) }()
		sample := b.newSample()
		work, stop := context.WithCancel(ctx)
		through := make(chan error, 1)
		go func() { // ends with work
			var err error
			for work.Err() == nil && err == nil {
				err = plainCycle(ctx, s.store, sample)
			}
			through <- err
		}()
		defer func() { stop(); err = errors.Join(err, <-through) }()
		const times = 1000
		var mu sync.Mutex
		var resident int64
		floorS, workS, err := b.turns(ctx, 501,
			timed(func(context.Context) error {
				for range times {
					mu.Lock()
					resident++
					mu.Unlock()
				}
				return nil
			}),
			timed(func(context.Context) error {
				for range times {
					resident += s.store.Health().ResidentBytes
				}
				return nil
			}))
		runtime.KeepAlive(resident)
		return workS / times * 1e9, floorS / times * 1e9, err
	}
}
