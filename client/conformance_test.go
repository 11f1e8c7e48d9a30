package client

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
	"github.com/sluice-ml/sluice/safetensors"
	"github.com/sluice-ml/sluice/service"
	"github.com/sluice-ml/sluice/store/dirstore"
	"github.com/sluice-ml/sluice/store/storetest"
)

// storeHarness gives every store a service of its own, since the suite's samples are all of a run called "run". The service goes by the real time: a clock that jumps ends reservations there,
// which is its own affair.
func storeHarness(w way, dir func(testing.TB) string) storetest.Harness {
	type home struct {
		l *live
		c *Client
	}
	var mu sync.Mutex
	homes := map[sluice.Store]home{}
	open := func(t testing.TB, l *live, caps sluice.Caps) sluice.Store {
		t.Helper()
		schema, err := sluice.SchemaOf(sluice.EAGLE3)
		if err != nil {
			t.Fatal(err)
		}
		c := l.dial(w, nil)
		s := l.run(c, sluice.RunConfig{RunID: "run", Schema: schema, Caps: caps, LargestSample: min(max(caps.MaxBytes, 1), 1<<20)}).Store()
		mu.Lock()
		homes[s] = home{l, c}
		mu.Unlock()
		t.Cleanup(func() {
			mu.Lock()
			delete(homes, s)
			mu.Unlock()
			if err := s.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
		return s
	}
	at := func(s sluice.Store) home {
		mu.Lock()
		defer mu.Unlock()
		return homes[s]
	}
	return storetest.Harness{
		Open: func(t testing.TB, o storetest.Options) sluice.Store {
			t.Helper()
			return open(t, serve(t, dir(t), nil), o.Caps)
		},
		Peer: func(t testing.TB, s sluice.Store) sluice.Store {
			t.Helper()
			return open(t, at(s).l, s.Health().Caps)
		},
		Corrupt: func(t testing.TB, s sluice.Store, ref sluice.Ref, d storetest.Damage) sluice.Store {
			t.Helper()
			h := at(s)
			info := h.l.storeInfo(h.c, "run")
			path := filepath.Join(info.Dir, ref.SampleID()+".safetensors")
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			at := int64(40)
			switch d {
			case storetest.Truncate:
				if err := f.Truncate(int64(len(data)) - 7); err != nil {
					t.Fatal(err)
				}
				return s
			case storetest.FlipHeader:
			case storetest.FlipData:
				if !info.Checksummed || w.mapped {
					return nil // memory is not checked, nor is a file that was checked since the service began
				}
				at = int64(len(data)) - 9
			}
			if _, err := f.WriteAt([]byte{data[at] ^ 1}, at); err != nil {
				t.Fatal(err)
			}
			return s
		},
		Detached: !w.mapped,
		Handles:  2000,
	}
}

func TestStoreConformance(t *testing.T) {
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) { storetest.Run(t, storeHarness(w, tmpfs)) })
	}
}

func TestStoreConformanceOnDisk(t *testing.T) {
	for _, w := range []way{overUnix, overHTTP} { // with checksums
		t.Run(w.name, func(t *testing.T) { storetest.Run(t, storeHarness(w, disk)) })
	}
}

// samples is the store of a service as queuetest wants it.
type samples struct {
	t *testing.T
	*store
}

// Add uploads a file of zeros with the ref.
func (s samples) Add(ref sluice.Ref, r sluice.Reservation) error {
	var features []sluice.Feature
	for f := range ref.Features() {
		features = append(features, sluice.Feature{Name: f.Name, Tensor: sluice.NewTensor(f.DType, f.Shape...)})
	}
	layout, err := safetensors.NewLayout(features, map[string]string{safetensors.RefKey: ref.Canonical()})
	if err != nil {
		return err
	}
	return s.upload(context.Background(), ref, layout, features, r)
}

// Owner looks into the store's directory.
func (s samples) Owner(id string) (string, bool) {
	seen, err := dirstore.Inspect(context.Background(), s.info.Dir, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, x := range seen.Samples {
		if x.SampleID == id && x.State == dirstore.StatePublished {
			return x.Owner, true
		}
	}
	return "", false
}

func TestQueueConformance(t *testing.T) {
	for _, w := range []way{overUnix, overHTTP} {
		t.Run(w.name, func(t *testing.T) {
			queuetest.Run(t, queuetest.Harness{OpenBoth: func(t *testing.T, cfg sluice.RunConfig, clock *queuetest.Clock) (sluice.Queue, queuetest.Samples) {
				l := serve(t, tmpfs(t), func(o *service.Options) { o.Clock = clock })
				r := l.run(l.dial(w, nil), cfg)
				return r.Queue(), samples{t, r.store}
			}})
		})
	}
}
