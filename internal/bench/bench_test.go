package bench

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/scratch"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func isEmpty(t *testing.T, dir string) {
	t.Helper()
	left, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(left) > 0 {
		t.Errorf("%s is left in the directory", left[0].Name())
	}
}

// Whatever row is being measured when the interrupt comes, nothing is left.
func TestAnInterruptLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	var names []string
	o := Options{Sample: leastSample, Dir: dir, Disk: dir, Quick: true}
	ctx, cancel := context.WithCancel(t.Context())
	o.Begin = func(_ string, all []string) { names = all; cancel() }
	if _, err := Run(ctx, o); !errors.Is(err, context.Canceled) {
		t.Fatalf("Run gives %v, want the cancellation", err)
	}
	isEmpty(t, dir)
	for i, name := range names {
		ctx, cancel := context.WithCancel(t.Context())
		o.Only = "^" + regexp.QuoteMeta(name) + "$"
		o.Begin = func(string, []string) { time.AfterFunc(time.Duration(i%7)*time.Millisecond, cancel) }
		_, err := Run(ctx, o)
		cancel()
		if err != nil && !errors.Is(err, context.Canceled) { // a fast row may have come to its end
			t.Errorf("%s, interrupted: %v", name, err)
		}
		isEmpty(t, dir)
	}
}

func TestOneRunSweepsWhatAKilledOneLeft(t *testing.T) {
	dir := t.TempDir()
	old, foreign, running := filepath.Join(dir, folderPrefix+"old"), filepath.Join(dir, "old"), filepath.Join(dir, folderPrefix+"running")
	for _, d := range []string{old, foreign, running} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	l, err := scratch.Lock(running)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := Run(t.Context(), Options{Sample: leastSample, Dir: dir, Quick: true, Only: "dirstore.*: put, fresh"}); err != nil {
		t.Fatal(err)
	}
	var left []string
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		left = append(left, e.Name())
	}
	if d := cmp.Diff([]string{"old", folderPrefix + "running"}, left); d != "" {
		t.Errorf("-want +left\n%s", d)
	}
}

// Names say whether the consumer read the bytes, and tell rows apart; the JSON has these fields and no others.
func TestRows(t *testing.T) {
	dir := t.TempDir()
	r, err := Run(t.Context(), Options{Sample: leastSample, Dir: dir, Disk: dir, Quick: true, Only: "memstore|dirstore|waiting|alloc"})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, row := range r.Rows {
		if seen[row.Name] {
			t.Errorf("two rows are named %q", row.Name)
		}
		seen[row.Name] = true
		if !strings.Contains(row.Name, "health") && !strings.HasSuffix(row.Name, ", unread") && !strings.HasSuffix(row.Name, ", read") && !strings.HasSuffix(row.Name, ", no bytes") {
			t.Errorf("%q does not say whether the bytes were read", row.Name)
		}
		if row.Value <= 0 || row.Unit == "" || (row.FloorName == "") != (row.Floor == nil) || (row.Floor == nil) != (row.Ratio == nil) {
			t.Errorf("%+v is not whole", row)
		}
	}
	data, err := json.Marshal(Row{Name: "a", Unit: "ns"})
	if want := `{"name":"a","value":0,"unit":"ns","floor_name":"","floor":null,"ratio":null}`; err != nil || string(data) != want {
		t.Errorf("a row is %s (%v), want %s", data, err, want)
	}
}

func TestTooLittleRoomIsToldBefore(t *testing.T) {
	dir := t.TempDir()
	if typeOf(dir) == "" {
		t.Skip("this operating system does not tell what is free")
	}
	err := newPlace("--dir", dir, false).open(1 << 60)
	if sluice.KindOf(err) != sluice.NoSpace || !strings.Contains(err.Error(), "smaller --sample") {
		t.Errorf("open gives %v", err)
	}
	isEmpty(t, dir)
}

func TestTable(t *testing.T) {
	var b strings.Builder
	table := NewTable(&b)
	floor, ratio := 1234567.0, 0.5
	table.Begin("a machine", []string{"short", "a longer µname"})
	table.Each(Row{Name: "short", Value: 0.001234, Unit: "ms"})
	table.Each(Row{Name: "a longer µname", Value: 999.4, Unit: "cycles/s", FloorName: "a floor", Floor: &floor, Ratio: &ratio})
	_, got, _ := strings.Cut(b.String(), "\n\n")
	want := `                     VALUE UNIT          RATIO       FLOOR  THE FLOOR IS
short              0.00123 ms                -           -  -
a longer µname         999 cycles/s       0.50   1,234,567  a floor
`
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got\n%s", d)
	}
}
