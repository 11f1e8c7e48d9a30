package safetensors

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/sluice-ml/sluice"
)

// contents opens a file in both ways.
func contents(t *testing.T, f *os.File, size int64) map[string]*Mapping {
	t.Helper()
	r, err := Read(f, size)
	if err != nil {
		t.Fatal(err)
	}
	return map[string]*Mapping{"mapped": mapped(t, f), "read": r}
}

func TestEveryDTypeSurvives(t *testing.T) {
	t.Parallel()
	var features []sluice.Feature
	var order []string
	for i, d := range sluice.DTypes() {
		for _, shape := range [][]int64{{}, {0}, {3, 0, 2}, {5}, {2, 3}, {1, 64}} {
			name := fmt.Sprintf("%s%v", d, shape)
			features = append(features, feature(name, byte(i), d, shape...))
			order = append(order, name)
		}
	}
	l := checksummed(t, features)
	for how, m := range contents(t, written(t, l, features), l.Size()) {
		got, err := m.Features(order)
		if err != nil {
			t.Fatal(how, err)
		}
		if diff := cmp.Diff(features, got, cmpopts.EquateEmpty()); diff != "" {
			t.Error(how, diff)
		}
		if checked, err := m.Verify(); !checked || err != nil {
			t.Error(how, checked, err)
		}
	}
}

func TestTensorsAreAlignedToTheirElements(t *testing.T) {
	t.Parallel()
	var features []sluice.Feature
	for i, d := range sluice.DTypes() {
		features = append(features, feature(fmt.Sprintf("odd %s", d), byte(i), d, 3), feature(fmt.Sprintf("whole %s", d), byte(i), d, 64))
	}
	l := layoutOf(t, features, nil)
	for how, m := range contents(t, written(t, l, features), l.Size()) {
		got, err := m.Features(nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range got {
			to := f.DType.Size()
			if len(f.Data)%Alignment == 0 {
				to = Alignment
			}
			if !aligned(f.Data, to) {
				t.Errorf("%s: %s is not aligned to %d bytes", how, f.Name, to)
			}
		}
	}
}

func TestFeaturesComeInTheOrderAskedFor(t *testing.T) {
	t.Parallel()
	features := sample()
	l := layoutOf(t, features, nil)
	m := mapped(t, written(t, l, features))
	order := []string{"loss_mask", "aux_hidden_states"}
	got, err := m.Features(order)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0].Name != order[0] || got[1].Name != order[1] {
		t.Errorf("got %v", got)
	}
	all, err := m.Features(nil)
	if err != nil {
		t.Fatal(err)
	}
	for i, f := range all {
		if f.Name != l.Header().Entries[i].Name {
			t.Errorf("feature %d is %s", i, f.Name)
		}
	}
	none, err := m.Features([]string{})
	if err != nil || len(none) != 0 {
		t.Errorf("got %v, %v, want none", none, err)
	}
}

func TestFeatureRefusesWhatIsNotThere(t *testing.T) {
	t.Parallel()
	m := mapped(t, onDisk(t, fileOf(`{"a":{"dtype":"F8_E8M0","shape":[4],"data_offsets":[0,4]}}`, 4)))
	_, err := m.Feature("b")
	wantKind(t, err, sluice.NotFound, `safetensors: feature "b": is not among the 1 tensors of the file`)
	_, err = m.Features([]string{"b"})
	wantKind(t, err, sluice.NotFound, "")
	_, err = m.Feature("a")
	wantKind(t, err, sluice.Unsupported, `safetensors: feature "a": has dtype F8_E8M0, which no feature may have`)
	_, err = m.Features(nil)
	wantKind(t, err, sluice.Unsupported, "")
}

func TestWritesToATensorArePrivate(t *testing.T) {
	t.Parallel()
	features := sample()
	l := layoutOf(t, features, nil)
	f := written(t, l, features)
	before, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	mine, other := mapped(t, f), mapped(t, f)
	got, err := mine.Features(nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range got {
		clear(g.Data)
	}
	again, err := mine.Feature("input_ids")
	if err != nil || !bytes.Equal(again.Data, make([]byte, len(again.Data))) {
		t.Errorf("the writer does not see its own writes: %v, %v", again.Data, err)
	}
	if after, err := os.ReadFile(f.Name()); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the file changed, %v", err)
	}
	theirs, err := other.Feature("input_ids")
	if want, _ := sluice.FindFeature(features, "input_ids"); err != nil || !bytes.Equal(theirs.Data, want.Data) {
		t.Errorf("another mapping sees the writes, %v", err)
	}
}

func TestATensorCannotBeExtendedIntoTheNext(t *testing.T) {
	t.Parallel()
	features := sample()
	l := layoutOf(t, features, nil)
	for how, m := range contents(t, written(t, l, features), l.Size()) {
		got, err := m.Features(nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range got {
			if cap(f.Data) != len(f.Data) {
				t.Errorf("%s: %s has room for %d bytes more", how, f.Name, cap(f.Data)-len(f.Data))
			}
		}
	}
}

func TestMisalignedTensorsOfOtherWritersAreCopied(t *testing.T) {
	t.Parallel()
	file := fileOf(`{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"I64","shape":[2],"data_offsets":[3,19]},"c":{"dtype":"F16","shape":[1],"data_offsets":[19,21]}}`, 21)
	for how, m := range contents(t, onDisk(t, file), int64(len(file))) {
		for _, name := range []string{"a", "b", "c"} {
			f, err := m.Feature(name)
			if err != nil {
				t.Fatal(err)
			}
			e, _ := m.Header().Find(name)
			start := m.Header().DataStart
			if !bytes.Equal(f.Data, file[start+e.Begin:start+e.End]) || !aligned(f.Data, f.DType.Size()) {
				t.Errorf("%s: %s is % x, aligned: %t", how, name, f.Data, aligned(f.Data, f.DType.Size()))
			}
		}
		f, _ := m.Feature("b")
		if got := sluice.View[int64](f.Tensor)[0]; got != 0x0a09080706050403 {
			t.Errorf("%s: b[0] is %x", how, got)
		}
	}
}

func TestMapRefuses(t *testing.T) {
	t.Parallel()
	whole := fileOf(`{`+one+`}`, 4)
	for name, c := range map[string]struct {
		data []byte
		want int64
		kind sluice.Kind
		text string
	}{
		"an empty file":                   {nil, -1, sluice.Corrupt, `safetensors: parse "file": is 0 bytes long, want at least the 8 of the header length`},
		"a file shorter than a length":    {whole[:5], -1, sluice.Corrupt, `safetensors: parse "file": is 5 bytes long, want at least the 8 of the header length`},
		"a file shorter than its header":  {whole[:30], -1, sluice.Corrupt, `safetensors: parse "header length": is 53, but only 22 bytes follow it in the file`},
		"a file without its data":         {whole[:len(whole)-4], -1, sluice.Corrupt, `safetensors: parse "a": ends at byte 4 of the data, but the file has only 0 bytes of data`},
		"a file longer than it should be": {append(bytes.Clone(whole), 0), -1, sluice.Corrupt, `safetensors: parse "data": is 5 bytes long, but the tensors end at byte 4`},
		"another size than expected":      {whole, 66, sluice.Corrupt, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, err := Map(onDisk(t, c.data), c.want)
			wantKind(t, err, c.kind, c.text)
			if m != nil {
				t.Error("there is a mapping all the same")
			}
		})
	}
}

func TestMapNamesBothSizes(t *testing.T) {
	t.Parallel()
	f := onDisk(t, fileOf(`{}`, 0))
	_, err := Map(f, 11)
	wantKind(t, err, sluice.Corrupt, fmt.Sprintf(`safetensors: map "%s": is 10 bytes long, want 11`, f.Name()))
}

func TestMapRefusesWhatIsNoFile(t *testing.T) {
	t.Parallel()
	dir := opened(t, t.TempDir(), os.O_RDONLY)
	_, err := Map(dir, -1)
	wantKind(t, err, sluice.Invalid, fmt.Sprintf(`safetensors: map "%s": is not a regular file (d---------)`, dir.Name()))
	f := onDisk(t, fileOf(`{}`, 0))
	f.Close()
	_, err = Map(f, -1)
	wantKind(t, err, sluice.Closed, "")
	path := filepath.Join(t.TempDir(), "w")
	_, err = Map(opened(t, path, os.O_WRONLY|os.O_CREATE), -1)
	wantKind(t, err, sluice.Corrupt, "")
	if err := os.WriteFile(path, fileOf(`{}`, 0), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = Map(opened(t, path, os.O_WRONLY), -1)
	wantKind(t, err, sluice.Invalid, `safetensors: read "header": stopped after 0 of 10 bytes: read `+path+`: bad file descriptor`)
}

func TestAMappingOutlivesItsFile(t *testing.T) {
	t.Parallel()
	features := sample()
	f := written(t, layoutOf(t, features, nil), features)
	m := mapped(t, f)
	f.Close()
	os.Remove(f.Name())
	for _, want := range features {
		got, err := m.Feature(want.Name)
		if err != nil || !bytes.Equal(got.Data, want.Data) {
			t.Errorf("%s differs, %v", want.Name, err)
		}
	}
}

func TestCloseIsIdempotentAndEndsAccess(t *testing.T) {
	t.Parallel()
	features := sample()
	l := checksummed(t, features)
	for how, m := range contents(t, written(t, l, features), l.Size()) {
		for range 2 {
			if err := m.Close(); err != nil {
				t.Fatal(how, err)
			}
		}
		_, err := m.Feature("input_ids")
		wantKind(t, err, sluice.Closed, `safetensors: feature "input_ids": the mapping is closed`)
		_, err = m.Features(nil)
		wantKind(t, err, sluice.Closed, "")
		_, err = m.Verify()
		wantKind(t, err, sluice.Closed, "")
		if m.Header().Size() != l.Size() {
			t.Error("the header is gone")
		}
	}
}

func TestTensorsThatWereReadOutliveClose(t *testing.T) {
	t.Parallel()
	features := sample()
	l := layoutOf(t, features, nil)
	m, err := Read(written(t, l, features), l.Size())
	if err != nil {
		t.Fatal(err)
	}
	got, err := m.Feature("input_ids")
	if err != nil {
		t.Fatal(err)
	}
	m.Close()
	if want, _ := sluice.FindFeature(features, "input_ids"); !bytes.Equal(got.Data, want.Data) {
		t.Error("the data changed")
	}
}

func TestAFileOfNoTensorsIsFine(t *testing.T) {
	t.Parallel()
	l := layoutOf(t, nil, map[string]string{"k": "v"})
	for how, m := range contents(t, written(t, l, nil), l.Size()) {
		got, err := m.Features(nil)
		if err != nil || len(got) != 0 || m.Header().Metadata["k"] != "v" {
			t.Errorf("%s: %v, %v", how, got, err)
		}
	}
}

func TestReadRefusesDataThatEndsEarly(t *testing.T) {
	t.Parallel()
	file := fileOf(`{`+one+`}`, 4)
	_, err := Read(bytes.NewReader(file[:len(file)-1]), int64(len(file)))
	// The header is within the first read, which is as long as the file claims to be.
	wantKind(t, err, sluice.Corrupt, fmt.Sprintf(`safetensors: read "header": ends after %d bytes, want %d`, len(file)-1, len(file)))

	features := []sluice.Feature{feature("a", 0, sluice.Int8, 3*firstRead)}
	l := layoutOf(t, features, nil)
	file = joined(t, l, features)
	_, err = Read(bytes.NewReader(file[:len(file)-1]), int64(len(file)))
	wantKind(t, err, sluice.Corrupt, fmt.Sprintf(`safetensors: read "data": ends after %d bytes, want %d`, len(file)-1, len(file)))
}

func TestReadDoesNotTakeMemoryThatNoHostHas(t *testing.T) {
	t.Parallel()
	features := []sluice.Feature{{Name: "a", Tensor: sluice.Tensor{Spec: sluice.Spec{DType: sluice.Int8, Shape: []int64{1 << 50}}}}}
	l := layoutOf(t, features, nil)
	_, err := Read(endless{l.HeaderBytes()}, l.Size())
	wantKind(t, err, sluice.NoSpace, fmt.Sprintf(`safetensors: read "data": %d bytes do not fit the address space`, int64(1<<50)))
}

// endless is a header with zeros behind it.
type endless struct{ head []byte }

func (e endless) ReadAt(b []byte, off int64) (int, error) {
	clear(b)
	if off < int64(len(e.head)) {
		copy(b, e.head[off:])
	}
	return len(b), nil
}

func TestVerifyFindsAFlippedBit(t *testing.T) {
	t.Parallel()
	features := sample()
	l := checksummed(t, features)
	for _, f := range features {
		file := joined(t, l, features)
		at, _ := l.Offset(f.Name)
		file[at+int64(len(f.Data))-1] ^= 1
		checked, err := mapped(t, onDisk(t, file)).Verify()
		var e *sluice.Error
		if checked || !errors.Is(err, sluice.ErrCorrupt) || !errors.As(err, &e) || e.Subject != f.Name {
			t.Errorf("%s: %t, %v", f.Name, checked, err)
		}
	}
}

func TestVerifyNamesBothChecksums(t *testing.T) {
	t.Parallel()
	l := layoutOf(t, []sluice.Feature{feature("a", 0, sluice.UInt8, 0)}, map[string]string{ChecksumsKey: `{"a":"0badf00d"}`})
	m := mapped(t, onDisk(t, l.HeaderBytes()))
	_, err := m.Verify()
	wantKind(t, err, sluice.Corrupt, `safetensors: verify "a": has crc32c 00000000, the metadata says 0badf00d`)
}

func TestVerifySaysWhenThereIsNothingToCheck(t *testing.T) {
	t.Parallel()
	features := sample()
	m := mapped(t, written(t, layoutOf(t, features, nil), features))
	if checked, err := m.Verify(); checked || err != nil {
		t.Errorf("%t, %v, want nothing checked", checked, err)
	}
}

func TestAMappingMayBeUsedAndClosedFromSeveralGoroutines(t *testing.T) {
	t.Parallel()
	features := sample()
	l := checksummed(t, features)
	m := mapped(t, written(t, l, features))
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for range 100 {
				_, err := m.Features(nil)
				if err == nil {
					_, err = m.Verify()
				}
				if err != nil && !errors.Is(err, sluice.ErrClosed) {
					t.Error(err)
				}
			}
			if i%2 == 0 {
				if err := m.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}

func TestMapSaysWhatToDoWhenTheKernelRefuses(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		kind sluice.Kind
		want string
	}{
		{syscall.ENOMEM, sluice.NoSpace, `safetensors: map "f": 7 bytes: cannot allocate memory; the limit may be on mappings: raise vm.max_map_count or release samples`},
		{syscall.ENODEV, sluice.Unsupported, `safetensors: map "f": 7 bytes: no such device; this file system can't map files; read it instead`},
		{syscall.EACCES, sluice.Denied, `safetensors: map "f": 7 bytes: permission denied`},
	} {
		wantKind(t, mapFailed("f", 7, c.err), c.kind, c.want)
	}
}
