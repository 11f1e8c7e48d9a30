package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/queue/queuetest"
	"github.com/sluice-ml/sluice/safetensors"
)

// largeSample is fetched by several connections, and its features do not end where their pieces do.
func largeSample() *sluice.Sample {
	s := queuetest.NewSample("r1", "large", 9<<20+3)
	feature := s.Features[0]
	for i, n := range []int64{0, 70_001, 64, 14 << 20} {
		feature.Name, feature.Tensor = fmt.Sprint("f", i), sluice.NewTensor(sluice.UInt8, n)
		s.Features = append(s.Features, feature)
	}
	for i, f := range s.Features {
		for j := range f.Data {
			f.Data[j] = byte(i + j*j>>9)
		}
	}
	return s
}

// meddler changes what goes out of a service's large answers.
type meddler struct {
	http.ResponseWriter
	flip, breakOff int64 // where a byte is changed, and where the connection breaks
	at             int64
}

func (m *meddler) Write(p []byte) (int, error) {
	p = bytes.Clone(p)
	if i := m.flip - m.at; i >= 0 && i < int64(len(p)) {
		p[i] ^= 4
	}
	m.at += int64(len(p))
	if m.at > m.breakOff {
		panic(http.ErrAbortHandler)
	}
	return m.ResponseWriter.Write(p)
}

func TestWhatIsFetchedIsComparedWithItsChecksums(t *testing.T) {
	t.Parallel()
	const never = 1 << 40
	var sample, flip, breakOff, asked atomic.Int64
	l := serve(t, tmpfs(t), nil, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch {
			case strings.HasSuffix(r.URL.Path, "/checksums"):
				asked.Add(1)
			case r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/samples/") && !strings.HasPrefix(r.Header.Get("Range"), "bytes=0-"):
				// Of the ranges behind the head, one after the other is dealt with.
				w = &meddler{ResponseWriter: w, flip: flip.Swap(never), breakOff: breakOff.Swap(never)}
			}
			h.ServeHTTP(w, r)
		})
	})
	local, remote := l.run(l.dial(overUnix, nil), bytesRun(1<<28)).Store(), l.run(l.dial(overHTTP, nil), bytesRun(1<<28)).Store()
	for _, from := range []struct {
		name  string
		store sluice.Store
		asks  int64
	}{{"staged", local, 0}, {"staged without checksums", unsummed{local.(*store)}, 1}, {"uploaded", remote, 0}} {
		for _, c := range []struct {
			name           string
			flip, breakOff int64
			corrupt        bool
		}{
			{"whole", never, never, false},
			{"broken off", never, 3 << 20, false},
			{"changed at the start of a range", 0, never, true},
			{"changed in the middle", 5_000_001, never, true},
			{"changed, then broken off", 100, 3 << 20, true},
		} {
			s := largeSample()
			s.SampleID = fmt.Sprint("s", sample.Add(1))
			ref, err := from.store.Put(bg, s, sluice.Reservation{})
			if err != nil {
				t.Fatal(err)
			}
			asked.Store(0)
			flip.Store(c.flip)
			breakOff.Store(c.breakOff)
			ts, err := remote.Get(bg, ref)
			if n := asked.Load(); n != from.asks {
				t.Errorf("%s, %s: checksums were asked for %d times, want %d", from.name, c.name, n, from.asks)
			}
			if c.corrupt {
				if !errors.Is(err, sluice.ErrCorrupt) || !strings.Contains(err.Error(), "crc32c") {
					t.Errorf("%s, %s: %v, want a wrong checksum", from.name, c.name, err)
				}
				if err := remote.Abort(bg, ref); err != nil {
					t.Error(err)
				}
				continue
			}
			if err != nil {
				t.Fatalf("%s, %s: %v", from.name, c.name, err)
			}
			for i, f := range ts.Features {
				if !bytes.Equal(f.Data, s.Features[i].Data) {
					t.Errorf("%s, %s: other bytes came of %s", from.name, c.name, f.Name)
				}
			}
			if err := ts.Release(bg); err != nil {
				t.Error(err)
			}
		}
	}
}

// However a file is cut into ranges, and those into reads, each feature gets the checksum of its bytes.
func TestTalliesAddUp(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		h := &safetensors.Header{DataStart: rapid.Int64Range(8, 100).Draw(t, "start")}
		end := int64(0)
		for i, n := range rapid.SliceOfN(rapid.Int64Range(0, 40), 0, 6).Draw(t, "sizes") {
			h.Entries = append(h.Entries, safetensors.Entry{Name: fmt.Sprint("f", i), Begin: end, End: end + n})
			end += n
		}
		data := rapid.SliceOfN(rapid.Byte(), int(end), int(end)).Draw(t, "data")
		d := &download{header: h, sample: "s"}
		var tallies []*tally
		for at := 0; at < len(data); {
			to := rapid.IntRange(at+1, len(data)).Draw(t, "range")
			ta := d.tally(h.DataStart + int64(at))
			tallies = append(tallies, ta)
			for at < to {
				n := rapid.IntRange(1, to-at).Draw(t, "read")
				ta.add(data[at : at+n])
				at += n
			}
		}
		for _, ta := range rapid.Permutation(tallies).Draw(t, "order") {
			d.keep(ta)
		}
		want := map[string]string{}
		for _, e := range h.Entries {
			want[e.Name] = fmt.Sprintf("%08x", safetensors.Checksum(data[e.Begin:e.End]))
		}
		if err := d.check(want); err != nil {
			t.Fatal(err)
		}
		for name := range want {
			want[name] = "00000001"
			if err := d.check(want); !errors.Is(err, sluice.ErrCorrupt) {
				t.Fatalf("another checksum of %s: %v", name, err)
			}
			delete(want, name)
			if err := d.check(want); !errors.Is(err, sluice.ErrCorrupt) {
				t.Fatalf("no checksum of %s: %v", name, err)
			}
			break
		}
	})
}

// unsummed stages files as a producer does that computes no checksums.
type unsummed struct{ *store }

func (s unsummed) Put(ctx context.Context, sample *sluice.Sample, r sluice.Reservation) (sluice.Ref, error) {
	ref, _, err := s.plan(sample)
	if err != nil {
		return sluice.Ref{}, err
	}
	layout, err := safetensors.NewLayout(sample.Features, map[string]string{safetensors.RefKey: ref.Canonical()})
	if err != nil {
		return sluice.Ref{}, err
	}
	return ref, s.stage(ctx, ref, layout, sample.Features, r)
}
