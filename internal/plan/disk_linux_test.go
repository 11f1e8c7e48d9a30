package plan

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/store/dirstore"
)

func TestLookTellsTheFileSystem(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, at := range []string{dir, filepath.Join(dir, "not-yet")} {
		d, err := Look(at)
		if err != nil {
			t.Fatal(err)
		}
		if d.Path != at || d.Type == "" || d.TotalBytes <= 0 || d.FreeBytes > d.TotalBytes || d.RoomBytes > d.FreeBytes || d.LimitedBy == "" {
			t.Errorf("%+v", d)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "not-yet")); !errors.Is(err, os.ErrNotExist) {
		t.Error("Look has made the directory")
	}
}

func TestLookRefusesWhatIsNoPlaceForAStore(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for at, want := range map[string]error{file: sluice.ErrInvalid, filepath.Join(file, "x"): sluice.ErrDenied, filepath.Join(dir, "no", "such"): sluice.ErrNotFound} {
		if _, err := Look(at); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", at, err, want)
		}
	}
}

func TestMemoryGroupsBoundTheRoom(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) string {
		name = filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	v2 := write("self2", "0::/pod/box\n")
	write("pod/memory.max", "1000\n")
	write("pod/memory.current", "900\n")
	write("pod/memory.stat", "anon 500\ninactive_file 100\nactive_file 50\n")
	write("pod/box/memory.max", "max\n")
	write("pod/box/memory.current", "900\n")
	if got := groupRoom(v2, dir); got != 250 {
		t.Errorf("version 2 leaves %d, want 250: the level above has the limit", got)
	}
	v1 := write("self1", "5:cpu:/\n4:memory:/box\nnonsense\n")
	write("memory/box/memory.limit_in_bytes", "1000")
	write("memory/box/memory.usage_in_bytes", "2000")
	if got := groupRoom(v1, dir); got != 0 {
		t.Errorf("version 1 leaves %d, want 0", got)
	}
	if got := groupRoom(filepath.Join(dir, "nosuch"), dir); got != math.MaxInt64 {
		t.Errorf("without groups %d", got)
	}
}

// The allowance for what a file has beside its tensors holds for a sample with long names, many attributes and every packing feature.
func TestAFileTakesNoMoreThanTheAllowance(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "store")
	store, err := dirstore.Open(dir, &dirstore.Options{Caps: sluice.Caps{MaxBytes: 1 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	s := &sluice.Sample{
		SampleID: strings.Repeat("s", 190), RunID: strings.Repeat("r", 190), Algorithm: sluice.EAGLE3, SchemaVersion: 1, NumTokens: 3,
		Attributes: map[string]string{"shift": "0", "source": strings.Repeat("a", 500), "ids": strings.Repeat("b", 64), "aux_layers": "hf:1,2,3", "target": strings.Repeat("c", 64), "tokenizer": strings.Repeat("d", 64)},
	}
	for _, f := range schemaOf(t, sluice.EAGLE3).Features {
		s.Features = append(s.Features, sluice.Feature{Name: f.Name, Tensor: sluice.NewTensor(f.DTypes[0], 1, 3)})
	}
	if _, err := store.Put(t.Context(), s, sluice.Reservation{}); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.safetensors"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	info, err := os.Stat(files[0])
	if err != nil {
		t.Fatal(err)
	}
	const page = 4096
	if onDisk := (info.Size() + page - 1) / page * page; onDisk-s.Bytes() > fileOverhead {
		t.Errorf("the file takes %d bytes for %d of tensors, %d are allowed beside them", onDisk, s.Bytes(), fileOverhead)
	}
}
