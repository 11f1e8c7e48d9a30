package client

import (
	"bytes"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
)

// A producer on the service's host writes its next sample over a freed one's file. What somebody still has mapped is never that file.
func TestStagedSamplesAreWrittenOverFreedOnes(t *testing.T) {
	t.Parallel()
	var asked atomic.Int64
	l := serve(t, tmpfs(t), nil, counting("/spare", &asked))
	r := l.run(l.dial(overUnix, nil), bytesRun(64<<20))
	const n = spareFrom + 1000
	put := func(id string, fill byte) sluice.Ref {
		t.Helper()
		s := queuetest.NewSample("r1", id, n)
		for i := range s.Features[0].Data {
			s.Features[0].Data[i] = fill
		}
		ref, err := r.Store().Put(bg, s, sluice.Reservation{})
		if err != nil {
			t.Fatal(err)
		}
		return ref
	}
	want := func(ref sluice.Ref, fill byte) *sluice.Tensors {
		t.Helper()
		ts, err := r.Store().Get(bg, ref)
		if err != nil {
			t.Fatal(err)
		}
		if data := ts.Features[0].Data; len(data) != n || len(bytes.Trim(data, string([]byte{fill}))) != 0 {
			t.Fatalf("%s has other bytes than were put", ref.SampleID())
		}
		return ts
	}
	kept := want(put("kept", 7), 7) // a get pins it: its release would free it
	if err := r.Store().Release(bg, kept.Handle); err != nil {
		t.Fatal(err)
	}
	for i := range byte(4) {
		pool := r.Store().Health().PoolBytes
		ref := put(fmt.Sprint("s", i), i+1)
		if after := r.Store().Health().PoolBytes; i > 0 && (pool == 0 || after != 0) {
			t.Errorf("put %d: the pool had %d bytes, and has %d", i, pool, after)
		}
		ts := want(ref, i+1)
		if err := ts.Release(bg); err != nil {
			t.Fatal(err)
		}
	}
	if asked.Load() != 5 {
		t.Errorf("the service was asked %d times, want 5", asked.Load())
	}
	if data := kept.Features[0].Data; len(bytes.Trim(data, "\x07")) != 0 {
		t.Error("tensors changed under their holder")
	}
	if err := kept.Close(); err != nil {
		t.Fatal(err)
	}
}
