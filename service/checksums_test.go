package service

import (
	"fmt"
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/safetensors"
)

// diskDir is a directory of the test's own that does not lie in memory.
func diskDir(t *testing.T) string {
	t.Helper()
	for _, under := range []string{os.TempDir(), "/var/tmp", "."} {
		if _, inRAM, err := roomOf(under); err != nil || inRAM {
			continue
		}
		dir, err := os.MkdirTemp(under, "sluice-service-")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := os.RemoveAll(dir); err != nil {
				t.Error(err)
			}
		})
		return dir
	}
	t.Skip("there is no directory outside of memory")
	return ""
}

// sums are the checksums of the features of file(t, 1), by kind.
func sums() map[string]map[string]string {
	m := map[string]map[string]string{"crc32c": {}, "crc32": {}}
	for _, f := range features(1) {
		m["crc32c"][f.Name] = fmt.Sprintf("%08x", safetensors.Checksum(f.Data))
		m["crc32"][f.Name] = fmt.Sprintf("%08x", crc32.ChecksumIEEE(f.Data))
	}
	return m
}

func TestAProducerWithoutChecksumsMayStageOnADisk(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{StoreDir: diskDir(t) + "/store"})
	run := b.create("r1")
	if !run.Store.Checksummed {
		t.Fatal("the store wants no checksums, so that nothing is shown by leaving them out")
	}
	fs := features(1)
	for i, carries := range []string{"nothing", "a ref", "a ref and zeros for checksums"} {
		id := fmt.Sprint("s-", i)
		s := sluice.Sample{SampleID: id, RunID: "r1", Algorithm: "mine", SchemaVersion: 1, NumTokens: 2, Features: fs}
		f, err := s.RefFields(run.Store.URI, sluice.NewGeneration())
		if err != nil {
			t.Fatal(err)
		}
		ref, err := sluice.NewRef(f)
		if err != nil {
			t.Fatal(err)
		}
		meta := map[string]string{safetensors.RefKey: ref.Canonical()}
		layout, err := safetensors.NewLayout(fs, meta)
		if i == 2 {
			layout, err = safetensors.NewChecksummedLayout(fs, meta)
		}
		if err != nil {
			t.Fatal(err)
		}
		data := file(t, 1)
		if i > 0 { // the header, with zeros where it has checksums, and the data as they lie in any file of ours
			h, err := safetensors.ParseHeader(data, int64(len(data)))
			if err != nil {
				t.Fatal(err)
			}
			data = append(layout.HeaderBytes(), data[h.DataStart:]...)
		}
		if err := os.WriteFile(filepath.Join(run.Store.StagingDir, id), data, 0o600); err != nil {
			t.Fatal(err)
		}
		st := wire.Stage{File: id, SampleID: id, Fields: &wire.SampleFields{Algorithm: "mine", NumTokens: 2}}
		stored := do[wire.Stored](b, "POST", "/v1/runs/r1/stage", st).Ref
		whole := b.send("GET", sampleURL(stored)+"?generation="+stored.Generation(), nil, nil)
		h, err := safetensors.ParseHeader(whole.body, int64(len(whole.body)))
		if err != nil {
			t.Fatalf("a file that carries %s: %v", carries, err)
		}
		have, err := h.Checksums()
		if err != nil || !maps.Equal(encodeSums(have), sums()["crc32c"]) {
			t.Errorf("a file that carried %s has the checksums %v, %v; want %v", carries, encodeSums(have), err, sums()["crc32c"])
		}
		got := do[wire.Checksums](b, "GET", sampleURL(stored)+"/checksums?kind=crc32&generation="+stored.Generation(), nil)
		if got.Kind != "crc32" || !maps.Equal(got.Checksums, sums()["crc32"]) {
			t.Errorf("%+v, want %v", got, sums()["crc32"])
		}
	}
}

func TestChecksumsComeInTheKindThatIsAskedFor(t *testing.T) {
	t.Parallel()
	b := newBed(t, Options{})
	run := b.create("r1")
	if err := os.WriteFile(run.Store.StagingDir+"/a", file(t, 1), 0o600); err != nil {
		t.Fatal(err)
	}
	ref := do[wire.Stored](b, "POST", "/v1/runs/r1/stage", wire.Stage{File: "a", SampleID: "s-1", Fields: &wire.SampleFields{Algorithm: "mine", NumTokens: 2}}).Ref
	path := sampleURL(ref) + "/checksums?generation=" + ref.Generation()
	for query, kind := range map[string]string{"": "crc32c", "&kind=crc32c": "crc32c", "&kind=crc32": "crc32"} {
		for range 2 {
			if got := do[wire.Checksums](b, "GET", path+query, nil); got.Kind != kind || !maps.Equal(got.Checksums, sums()[kind]) {
				t.Errorf("%q: %+v, want %v", query, got, sums()[kind])
			}
		}
		pin := wire.Pin{Ref: ref, Kind: strings.TrimPrefix(query, "&kind=")}
		if got := do[wire.Pinned](b, "POST", "/v1/runs/r1/pins", pin); !maps.Equal(got.Checksums, sums()[kind]) {
			t.Errorf("pinned with %q: %v, want %v", pin.Kind, got.Checksums, sums()[kind])
		}
	}
	b.wants("invalid", "GET", path+"&kind=md5", nil)
	b.wants("invalid", "POST", "/v1/runs/r1/pins", wire.Pin{Ref: ref, Kind: "md5"})
}
