package service

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/store/dirstore"
)

// callers is how many clients the control benchmarks have.
const callers = 16

// BenchmarkControl is the cycle of four calls (reserve, commit, acquire, settle) beside its floor: four calls of a plain JSON echo with the same bodies. Both also put a small sample into a store
// and free it, in process, since a commit needs one.
func BenchmarkControl(b *testing.B) {
	for _, d := range []dirstore.Durability{dirstore.Process, dirstore.Power} {
		name := "process"
		if d == dirstore.Power {
			name = "power"
		}
		b.Run(name, func(b *testing.B) {
			for _, batch := range []int{1, 64} {
				b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) { benchControl(b, d, batch) })
			}
		})
	}
	b.Run("echo", func(b *testing.B) {
		for _, batch := range []int{1, 64} {
			b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) { benchEcho(b, batch) })
		}
	})
}

// memory is a directory for a store in memory: what is measured here is not the disk.
func memory(b *testing.B) string {
	dir, err := os.MkdirTemp("/dev/shm", "sluice-bench-")
	if err != nil {
		b.Skip(err)
	}
	b.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir + "/store"
}

type caller struct {
	b   *testing.B
	c   *http.Client
	url string
}

func (c *caller) do(path string, in, out any) {
	data, err := json.Marshal(in)
	if err != nil {
		c.b.Error(err)
		return
	}
	resp, err := c.c.Post(c.url+path, "application/json", bytes.NewReader(data))
	if err != nil {
		c.b.Error(err)
		return
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode >= 300 {
		c.b.Errorf("%s: %d %s, %v", path, resp.StatusCode, body, err)
		return
	}
	if err := json.Unmarshal(body, out); err != nil {
		c.b.Error(err)
	}
}

// each runs f in all callers until b.N is used up, n at a time.
func each(b *testing.B, n int, f func(caller int)) {
	var left atomic.Int64
	left.Store(int64(b.N))
	var wg sync.WaitGroup
	before := cpuTime(b)
	b.ResetTimer()
	for i := range callers {
		wg.Go(func() {
			for left.Add(int64(-n)) > int64(-n) && !b.Failed() {
				f(i)
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "cycles/s")
	b.ReportMetric(float64((cpuTime(b)-before).Microseconds())/float64(b.N), "cpu-us/op") // of both ends
}

func benchControl(b *testing.B, d dirstore.Durability, batch int) {
	bed := newBed(b, Options{Durability: d, Logger: slog.New(slog.DiscardHandler), StoreDir: memory(b)})
	spec := bed.spec("r")
	spec.Caps = wire.Caps{MaxBytes: 1 << 29}
	do[wire.Run](bed, "POST", "/v1/runs", spec)
	run, err := bed.s.find("r")
	if err != nil {
		b.Fatal(err)
	}
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: callers}}
	defer client.CloseIdleConnections()
	c := &caller{b, client, bed.srv.URL + "/v1/runs/r"}
	var n atomic.Int64
	sizes := make([]int64, batch)
	for i := range sizes {
		sizes[i] = sampleBytes
	}
	each(b, batch, func(i int) {
		who := wire.Consumer{Name: fmt.Sprintf("c%d", i)}
		var rooms wire.Reservations
		c.do("/reserve", wire.Reserve{Bytes: sizes, WaitSeconds: 10}, &rooms)
		commit := wire.Commit{}
		for _, r := range rooms.Reservations {
			k := n.Add(1)
			ref, err := run.store.Put(context.Background(), &sluice.Sample{SampleID: fmt.Sprintf("s-%d", k), RunID: "r", Algorithm: "mine", SchemaVersion: 1, NumTokens: 2, Features: features(k)}, sluice.Reservation{ID: r.ID, Bytes: r.Bytes})
			if err != nil {
				b.Error(err)
				return
			}
			commit.Items = append(commit.Items, wire.CommitItem{Ref: &ref})
		}
		var commits wire.Commits
		c.do("/commit", commit, &commits)
		for got := 0; got < len(commit.Items) && !b.Failed(); {
			var dl wire.Delivery
			c.do("/acquire", wire.Acquire{Consumer: who, Max: batch, WaitSeconds: 10}, &dl)
			set := wire.Settle{Consumer: who}
			for _, l := range dl.Leases {
				set.Settlements = append(set.Settlements, wire.Settlement{Lease: l.ID, Verdict: sluice.Ack})
			}
			if got += len(dl.Leases); len(dl.Leases) > 0 {
				var st wire.Settled
				c.do("/settle", set, &st)
			}
		}
	})
}

func benchEcho(b *testing.B, batch int) {
	store, err := dirstore.Open(memory(b), &dirstore.Options{Caps: sluice.Caps{MaxBytes: 1 << 29}})
	if err != nil {
		b.Fatal(err)
	}
	defer store.Close()
	mux := http.NewServeMux()
	mux.HandleFunc("POST /commit", echo[wire.Commit])
	mux.HandleFunc("POST /settle", echo[wire.Settle])
	mux.HandleFunc("POST /reserve", echo[wire.Reserve])
	mux.HandleFunc("POST /delivery", echo[wire.Delivery])
	srv := httptest.NewServer(mux)
	defer srv.Close()
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: callers}}
	defer client.CloseIdleConnections()
	c := &caller{b, client, srv.URL}
	var n atomic.Int64
	sizes := make([]int64, batch)
	each(b, batch, func(i int) {
		var rooms wire.Reserve
		c.do("/reserve", wire.Reserve{Bytes: sizes, WaitSeconds: 10}, &rooms)
		commit, delivery, settle := wire.Commit{}, wire.Delivery{}, wire.Settle{}
		var refs []sluice.Ref
		for range batch {
			k := n.Add(1)
			ref, err := store.Put(context.Background(), &sluice.Sample{SampleID: fmt.Sprintf("s-%d", k), RunID: "r", Algorithm: "mine", SchemaVersion: 1, NumTokens: 2, Features: features(k)}, sluice.Reservation{})
			if err != nil {
				b.Error(err)
				return
			}
			refs = append(refs, ref)
			commit.Items = append(commit.Items, wire.CommitItem{Ref: &ref})
			delivery.Leases = append(delivery.Leases, wire.Lease{ID: sluice.NewLeaseID(), Ref: ref})
			settle.Settlements = append(settle.Settlements, wire.Settlement{Lease: delivery.Leases[0].ID, Verdict: sluice.Ack})
		}
		c.do("/commit", commit, &wire.Commit{})
		c.do("/delivery", delivery, &wire.Delivery{})
		c.do("/settle", settle, &wire.Settle{})
		for _, ref := range refs {
			if err := store.Abort(context.Background(), ref); err != nil {
				b.Error(err)
			}
		}
	})
}

func echo[T any](w http.ResponseWriter, r *http.Request) {
	var v T
	if err := json.NewDecoder(r.Body).Decode(&v); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}
