package demo

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"go.uber.org/goleak"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/store/memstore"
	"github.com/sluice-ml/sluice/target/tinyllama"
)

func TestMain(m *testing.M) {
	if slices.Equal(os.Args[1:], childArgs) {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		if err := Child(ctx); err != nil {
			panic(err)
		}
		return
	}
	if dir := os.Getenv(parentOver); dir != "" {
		parentMain(dir)
	}
	goleak.VerifyTestMain(m)
}

// parentOver names the variable that makes the test binary a demo of several processes over the directory that it says.
const parentOver = "SLUICE_TEST_DEMO_OVER"

func parentMain(dir string) {
	_, err := Run(context.Background(), Options{Store: dir, Processes: true, Interval: 10 * time.Millisecond, Progress: func(s Snapshot) {
		if s.Status.Acked > 0 {
			fmt.Println("flows") // from now on it can be killed
		}
	}})
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

const tiny = "../../target/tinyllama/testdata/tiny-untied"

func promptFile(t *testing.T) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "p.jsonl")
	var b strings.Builder
	for _, row := range []string{"1,2,3,4,5", "11,12,13,14", "21,22,23", "31,32,33,34,35,36", "41,42,43,44"} {
		n := strings.Count(row, ",")
		b.WriteString(`{"input_ids":[` + row + `],"loss_mask":[0` + strings.Repeat(",1", n) + "]}\n")
	}
	if err := os.WriteFile(name, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// runOver runs the demo's stream over a store of the test's own.
func runOver(t *testing.T, ctx context.Context, o Options, wrap func(sluice.ClaimStore) sluice.ClaimStore) (*Result, error) {
	t.Helper()
	o, err := o.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	model, err := tinyllama.Open(tiny)
	if err != nil {
		t.Fatal(err)
	}
	defer model.Close()
	schema, err := sluice.SchemaOf(o.Algorithm)
	if err != nil {
		t.Fatal(err)
	}
	rows, err := openPrompts(&o, model, schema)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	o.MaxBytes, o.AuxLayers = 1<<20, []int{0, 1, 2}
	caps := sluice.Caps{MaxBytes: o.MaxBytes}
	store, err := memstore.New(&memstore.Options{Caps: caps})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	return run(ctx, &o, sluice.RunConfig{RunID: "demo", Schema: schema, Caps: caps}, model, rows, wrap(store))
}

// flipStore changes one bit of one feature of the first sample that is read.
type flipStore struct {
	sluice.ClaimStore
	feature string
	done    atomic.Bool
}

func (s *flipStore) Get(ctx context.Context, ref sluice.Ref) (*sluice.Tensors, error) {
	t, err := s.ClaimStore.Get(ctx, ref)
	if err == nil && s.done.CompareAndSwap(false, true) {
		f, _ := t.Feature(s.feature)
		f.Data[len(f.Data)-8] ^= 1 // of the last position: the first one is shifted away
	}
	return t, err
}

func TestDemoFindsASingleWrongBit(t *testing.T) {
	t.Parallel()
	for _, feature := range []string{"aux_hidden_states", "last_hidden_states", "attention_mask"} {
		r, err := runOver(t, t.Context(), Options{Prompts: []string{promptFile(t)}}, func(s sluice.ClaimStore) sluice.ClaimStore {
			return &flipStore{ClaimStore: s, feature: feature}
		})
		if err != nil {
			t.Fatal(err)
		}
		if r.Parity == bitExact || !strings.Contains(r.Parity, feature) || len(r.Faults()) == 0 || !strings.Contains(r.Summary(), "BROKEN") {
			t.Errorf("%s: parity %q, faults %q", feature, r.Parity, r.Faults())
		}
	}
}

func TestDemoFindsALostAndAnInventedRow(t *testing.T) {
	t.Parallel()
	b := newBooks()
	row := func(s string) [sha256.Size]byte { return sha256.Sum256([]byte(s)) }
	b.rows[row("read twice")] = 2
	b.acked("a", row("read twice"))
	b.acked("a", row("read twice")) // delivered again
	if b.open() != 1 || b.unknown() != 0 {
		t.Errorf("open %d, unknown %d; want 1, 0", b.open(), b.unknown())
	}
	b.acked("b", row("read twice"))
	b.acked("c", row("never read"))
	if b.open() != 0 || b.unknown() != 1 {
		t.Errorf("open %d, unknown %d; want 0, 1", b.open(), b.unknown())
	}
}

func TestResultNamesEveryFault(t *testing.T) {
	t.Parallel()
	good := Result{Produced: 5, Acked: 5, Parity: bitExact, StepsPerRank: []int64{2, 2}}
	if f := good.Faults(); len(f) > 0 || strings.Contains(good.Summary(), "WRONG") {
		t.Fatalf("a good result has faults: %q", f)
	}
	for name, spoil := range map[string]func(*Result){
		"lost": func(r *Result) { r.Lost = 1 }, "dead": func(r *Result) { r.Dead = 1 }, "parity": func(r *Result) { r.Parity = "x" },
		"never came again": func(r *Result) { r.Kills = 1 }, "resident": func(r *Result) { r.ResidentBytes = 1 }, "unacked": func(r *Result) { r.Acked = 4 }, "steps": func(r *Result) { r.StepsPerRank = []int64{2, 3} },
	} {
		r := good
		spoil(&r)
		if f := r.Faults(); len(f) != 1 || !strings.Contains(r.Summary(), "WRONG       "+f[0]) {
			t.Errorf("%s: faults %q", name, f)
		}
	}
}

func TestDemoEndsSoonWhenInterrupted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	dir := filepath.Join(t.TempDir(), "store")
	o := Options{Model: tiny, Prompts: []string{promptFile(t)}, Store: dir, AuxLayers: []int{0, 1, 2}, Interval: time.Millisecond, Progress: func(Snapshot) { cancel() }}
	if _, err := Run(ctx, o); !errors.Is(err, context.Canceled) && err != nil {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the store is left behind: %v", err)
	}
}

func TestDisplayIsPlainWhereThereIsNoTerminal(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	d := NewDisplay(&b, nil)
	d.Show(Snapshot{Elapsed: time.Second})
	d.Show(Snapshot{Elapsed: 2 * time.Second})
	d.Show(Snapshot{Elapsed: 2500 * time.Millisecond, Done: true})
	if got := strings.Count(b.String(), "\n"); got != 2 || strings.Contains(b.String(), "\x1b") {
		t.Errorf("%d lines:\n%s", got, b.String())
	}
	b.Reset()
	width := 80
	d = NewDisplay(&b, func() int { return width })
	d.Show(Snapshot{})
	d.Show(Snapshot{})
	if !strings.Contains(b.String(), "\x1b[7A") {
		t.Errorf("the panel is not redrawn in place: %q", b.String())
	}
	b.Reset()
	d.Warn("look out")
	if got := b.String(); got != "\x1b[7A\r\x1b[Jwarning: look out\n" {
		t.Errorf("a warning does not stand above the panel: %q", got)
	}
	b.Reset()
	width = 20 // somebody made the window narrower
	d.Show(Snapshot{})
	for line := range strings.SplitSeq(strings.TrimRight(b.String(), "\n"), "\n") {
		if n := utf8.RuneCountInString(line); n > 20 {
			t.Errorf("%d columns: %q", n, line)
		}
	}
}
