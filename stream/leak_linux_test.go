package stream_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue"
	"github.com/sluice-ml/sluice/store/dirstore"
	"github.com/sluice-ml/sluice/stream"
	"github.com/sluice-ml/sluice/target/targettest"
)

// held lists what the process holds of files: open descriptors and mapped files, sorted.
func held(t *testing.T) (descriptors, mappings []string) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil { // the one that lists is gone
			descriptors = append(descriptors, to)
		}
	}
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	defer maps.Close()
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		if _, file, ok := strings.Cut(lines.Text(), "/"); ok { // anonymous memory comes and goes with the heap
			mappings = append(mappings, file)
		}
	}
	slices.Sort(descriptors)
	slices.Sort(mappings)
	return descriptors, mappings
}

// It is not parallel: what other tests open and start would be counted.
func TestAWholeRunOverADirectoryLeavesNothingBehind(t *testing.T) {
	runDirectory(t, t.TempDir()) // the runtime's own descriptors, such as the poller's, come with the first run and stay
	descriptors, mappings := held(t)
	dir := t.TempDir()
	runDirectory(t, dir)
	d, m := held(t)
	if !slices.Equal(d, descriptors) {
		t.Errorf("descriptors before:\n%s\nafter:\n%s", strings.Join(descriptors, "\n"), strings.Join(d, "\n"))
	}
	if !slices.Equal(m, mappings) {
		t.Errorf("mapped files before:\n%s\nafter:\n%s", strings.Join(mappings, "\n"), strings.Join(m, "\n"))
	}
	left, err := filepath.Glob(filepath.Join(dir, "store", "*.safetensors*"))
	if err != nil || len(left) > 0 {
		t.Errorf("%v are left, %v", left, err)
	}
}

// runDirectory runs a pipeline and two ranks, each with a session of the store, one of which is restarted in the middle. TestMain sees to the goroutines.
func runDirectory(t *testing.T, dir string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	const rows, perRank = 23, 2
	schema, err := sluice.SchemaOf(sluice.EAGLE3)
	if err != nil {
		t.Fatal(err)
	}
	caps := sluice.Caps{MaxBytes: 1 << 20, MaxSamples: 12} // the two windows that may be open, and a little: the producer waits
	open := func() *dirstore.Store {
		s, err := dirstore.Open(filepath.Join(dir, "store"), &dirstore.Options{Caps: caps})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	store := open()
	q, err := queue.Open(ctx, sluice.RunConfig{RunID: "r", Schema: schema, Caps: caps, LargestSample: 1000, Windows: &sluice.Windows{Ranks: 2, PerRank: perRank, Prefetch: 1}}, store, nil)
	if err != nil {
		t.Fatal(err)
	}
	producer, err := stream.NewProducer(stream.ProducerConfig{Target: targettest.New(targettest.Options{}), Store: store, Queue: q, Schema: schema, RunID: "r"})
	if err != nil {
		t.Fatal(err)
	}
	pipeline, err := stream.NewPipeline(producer, q, prompts(rows), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := pipeline.Start(ctx); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	trained := map[string]int{} // by sample, stand-ins left out
	var steps [2]int
	// life is a rank's process: it steps until the end, or so many times.
	life := func(rank int, incarnation int64, most int) error {
		mine := open()
		defer mine.Close()
		l, err := stream.NewLoader(stream.LoaderConfig{Queue: q, Store: mine, Schema: schema, Batch: perRank,
			Consumer: sluice.Consumer{Name: fmt.Sprint("rank-", rank), Rank: rank, Incarnation: incarnation}})
		if err != nil {
			return err
		}
		for range most {
			b, err := l.Next(ctx)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return errors.Join(err, l.CloseWithError(ctx, err))
			}
			steps[rank]++
			for _, s := range b.Samples {
				if !s.Pad {
					mu.Lock()
					trained[s.Ref.SampleID()]++
					mu.Unlock()
				}
			}
			for _, f := range b.Features {
				clear(f.Data) // the trainer may write
			}
		}
		return l.Close(ctx)
	}
	var ranks sync.WaitGroup
	for rank := range 2 {
		ranks.Go(func() {
			for incarnation, most := range []int{2 + 1000*(1-rank), 1000} {
				if err := life(rank, int64(incarnation), most); err != nil {
					t.Errorf("rank %d: %v", rank, err)
					cancel()
				}
			}
		})
	}
	ranks.Wait()
	if err := pipeline.Wait(ctx); err != nil {
		t.Error(err)
	}
	for id, n := range trained {
		if n != 1 {
			t.Errorf("%s was trained on %d times", id, n)
		}
	}
	if len(trained) != rows || steps != [2]int{6, 6} {
		t.Errorf("%d samples of %d were trained on, in %v steps", len(trained), rows, steps)
	}
	if h := store.Health(); h.UsedSamples() != 0 || h.UsedBytes() != 0 {
		t.Errorf("the store holds %+v", h)
	}
	if err := producer.Close(); err != nil {
		t.Error(err)
	}
	if err := q.Stop(ctx); err != nil {
		t.Error(err)
	}
	if err := store.Close(); err != nil {
		t.Error(err)
	}
}
