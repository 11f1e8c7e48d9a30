package safetensors

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-ml/sluice"
)

// pythonVariable names a Python interpreter that has the packages safetensors and numpy. Where it is set, these tests
// run or fail.
const pythonVariable = "SLUICE_PYTHON"

const interopScript = "../tools/safetensors/interop.py"

// stockPackage returns a function that runs the script with the stock package.
func stockPackage(t *testing.T) func(args ...string) {
	t.Helper()
	// The script runs in another process, where the test cache would not notice that it changed.
	if _, err := os.ReadFile(interopScript); err != nil {
		t.Fatal(err)
	}
	python, demanded := os.LookupEnv(pythonVariable)
	if !demanded {
		python = "python3"
	}
	command := func(args ...string) (string, error) {
		out, err := exec.Command(python, append([]string{interopScript}, args...)...).CombinedOutput()
		return strings.TrimSpace(string(out)), err
	}
	if out, err := command("check"); err != nil {
		if demanded {
			t.Fatalf("%s=%s can't run %s: %v\n%s", pythonVariable, python, interopScript, err, out)
		}
		t.Skipf("no python3 with safetensors and numpy here (%v); to run this test: pip install safetensors numpy, and set %s to that interpreter", err, pythonVariable)
	}
	return func(args ...string) {
		t.Helper()
		out, err := command(args...)
		if err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
		}
		t.Log(out)
	}
}

type manifest struct {
	Files   []manifestFile `json:"files"`
	Skipped []string       `json:"skipped"`
}

type manifestFile struct {
	File     string            `json:"file"`
	Metadata map[string]string `json:"metadata"`
	Tensors  []manifestTensor  `json:"tensors"`
}

type manifestTensor struct {
	Name  string  `json:"name"`
	DType string  `json:"dtype"`
	Shape []int64 `json:"shape"`
	Hex   string  `json:"hex"`
}

func TestStockPackageWritesWhatWeRead(t *testing.T) {
	t.Parallel()
	run := stockPackage(t)
	dir := t.TempDir()
	run("write", dir)
	text, err := os.ReadFile(filepath.Join(dir, "manifest.json"))
	if err != nil {
		t.Fatal(err)
	}
	var files manifest
	if err := json.Unmarshal(text, &files); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, file := range files.Files {
		m := mapped(t, opened(t, filepath.Join(dir, file.File), os.O_RDONLY))
		if diff := cmp.Diff(file.Metadata, m.Header().Metadata); diff != "" {
			t.Errorf("%s: metadata: %s", file.File, diff)
		}
		if got := len(m.Header().Entries); got != len(file.Tensors) {
			t.Errorf("%s: %d tensors, want %d", file.File, got, len(file.Tensors))
		}
		for _, want := range file.Tensors {
			e, ok := m.Header().Find(want.Name)
			if !ok || e.RawDType != want.DType || !slices.Equal(e.Spec.Shape, want.Shape) {
				t.Errorf("%s: %q is %+v, want %s%v", file.File, want.Name, e, want.DType, want.Shape)
				continue
			}
			data, err := hex.DecodeString(want.Hex)
			if err != nil {
				t.Fatal(err)
			}
			if _, ok := ParseDType(want.DType); !ok {
				if _, err := m.Feature(want.Name); sluice.KindOf(err) != sluice.Unsupported || e.Bytes() != int64(len(data)) {
					t.Errorf("%s: %q of dtype %s: %d bytes, %v", file.File, want.Name, want.DType, e.Bytes(), err)
				}
				continue
			}
			seen[want.DType] = true
			f, err := m.Feature(want.Name)
			if err != nil || !bytes.Equal(f.Data, data) {
				t.Errorf("%s: %q is % x, want % x (%v)", file.File, want.Name, f.Data, data, err)
			}
		}
	}
	for _, d := range sluice.DTypes() {
		if !seen[DTypeName(d)] {
			t.Errorf("no file has %s", d)
		}
	}
}

func TestStockPackageReadsWhatWeWrite(t *testing.T) {
	t.Parallel()
	run := stockPackage(t)
	dir := t.TempDir()
	var every []sluice.Feature
	for i, d := range sluice.DTypes() {
		for _, shape := range [][]int64{{}, {0}, {3, 0, 2}, {5}, {2, 3}, {1, 64}} {
			f := feature(fmt.Sprintf("%s%v \"\\\n\x01é\u2028", d, shape), byte(i), d, shape...)
			if d == sluice.Bool {
				for i := range f.Data {
					f.Data[i] &= 1
				}
			}
			every = append(every, f)
		}
	}
	metadata := map[string]string{RefKey: `{"sample_id":"r1-0-17"}`, "quote\"\\": "line\nbreak\x01", "größe": "\u2028😀"}
	checksummed, err := NewChecksummedLayout(every, metadata)
	if err != nil {
		t.Fatal(err)
	}
	var files manifest
	for name, c := range map[string]struct {
		layout   *Layout
		features []sluice.Feature
	}{
		"plain.safetensors":       {layoutOf(t, every, nil), every},
		"metadata.safetensors":    {layoutOf(t, every, metadata), every},
		"checksummed.safetensors": {checksummed, every},
		"sample.safetensors":      {layoutOf(t, sample(), metadata), sample()},
		"empty.safetensors":       {layoutOf(t, nil, metadata), nil},
		"nothing.safetensors":     {layoutOf(t, nil, nil), nil},
	} {
		f := opened(t, filepath.Join(dir, name), os.O_RDWR|os.O_CREATE)
		if err := c.layout.WriteFile(f, 0, c.features); err != nil {
			t.Fatal(err)
		}
		file := manifestFile{File: name, Metadata: mapped(t, f).Header().Metadata, Tensors: []manifestTensor{}}
		for _, f := range c.features {
			file.Tensors = append(file.Tensors, manifestTensor{f.Name, DTypeName(f.DType), append([]int64{}, f.Shape...), hex.EncodeToString(f.Data)})
		}
		files.Files = append(files.Files, file)
	}
	text, err := json.Marshal(files)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "manifest.json"), text, 0o600); err != nil {
		t.Fatal(err)
	}
	run("verify", dir)
}
