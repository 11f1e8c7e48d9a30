package targettest_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/target/targettest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTheFakePassesTheSuite(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]targettest.Options{
		"default":    {},
		"concurrent": {Concurrent: true, MaxTokens: 64},
		"bfloat16":   {DType: sluice.BFloat16, HiddenSize: 8, Seed: 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			targettest.Run(t, targettest.Harness{New: func(*testing.T) sluice.Target { return targettest.New(o) }})
		})
	}
}

// limited can do less than the contract, and says so, like a server that returns only what it captures.
type limited struct{ *targettest.Fake }

func cannot(w sluice.Want, packed bool) bool { return packed || w.Logits || w.Last == sluice.PreNorm }

func (l limited) Forward(ctx context.Context, batch *sluice.PromptBatch, want sluice.Want) (*sluice.TargetOutput, error) {
	if batch != nil && batch.Validate(0) == nil && cannot(want, batch.Packed()) {
		return nil, &sluice.Error{Kind: sluice.Unsupported, Op: "limited: forward"}
	}
	return l.Fake.Forward(ctx, batch, want)
}

func TestATargetMayDoLessAndSayIt(t *testing.T) {
	t.Parallel()
	targettest.Run(t, targettest.Harness{
		New:         func(*testing.T) sluice.Target { return limited{targettest.New(targettest.Options{})} },
		Unsupported: cannot,
		LongestRow:  16,
	})
}

// broken is a fake with a fault of a kind that real targets have had.
type broken struct {
	*targettest.Fake
	before func(*sluice.PromptBatch) *sluice.PromptBatch
	after  func(*sluice.TargetOutput)
	deaf   bool // to its context
}

func (b broken) Forward(ctx context.Context, batch *sluice.PromptBatch, want sluice.Want) (*sluice.TargetOutput, error) {
	if b.before != nil && batch != nil && batch.Validate(0) == nil {
		batch = b.before(batch)
	}
	if b.deaf {
		ctx = context.WithoutCancel(ctx)
	}
	out, err := b.Fake.Forward(ctx, batch, want)
	if err == nil && b.after != nil {
		b.after(out)
	}
	return out, err
}

// eachTensor runs change on the values of every float32 output, a [B,S,W] array.
func eachTensor(out *sluice.TargetOutput, change func(values []float32, rows, row int)) {
	for _, t := range []sluice.Tensor{out.Aux, out.Last, out.Logits} {
		if t.DType.Valid() {
			change(sluice.View[float32](t), int(t.Shape[0]), int(t.Shape[1]*t.Shape[2]))
		}
	}
}

// brokenTargets are by the name of the check that must fail.
var brokenTargets = map[string]broken{
	"row_t_is_position_t": {after: func(out *sluice.TargetOutput) {
		for _, t := range []sluice.Tensor{out.Aux, out.Last, out.Logits} {
			if t.DType.Valid() { // shifted left by one, zero at the tail
				token := t.Shape[2] * t.DType.Size()
				for r := range t.Shape[0] {
					row := t.Data[r*t.Shape[1]*token : (r+1)*t.Shape[1]*token]
					clear(row[copy(row, row[token:]):])
				}
			}
		}
	}},
	"neighbours_change_nothing": {after: func(out *sluice.TargetOutput) {
		eachTensor(out, func(v []float32, rows, row int) {
			if rows > 3 { // rows 0 and 1 swapped
				a := slices.Clone(v[:row])
				copy(v, v[row:2*row])
				copy(v[row:], a)
			}
		})
	}},
	"padding_changes_nothing": {before: func(b *sluice.PromptBatch) *sluice.PromptBatch {
		c := *b // the first token sees how much padding there is
		c.InputIDs = sluice.TensorOf(sluice.Int64, sluice.View[int64](b.InputIDs), b.InputIDs.Shape...)
		ids, mask := sluice.View[int64](c.InputIDs), sluice.View[int64](b.AttentionMask)
		for _, m := range mask {
			if m == 0 {
				ids[0] = (ids[0] + 1) % 64
			}
		}
		return &c
	}},
	"a_packed_document_equals_the_document_alone": {before: func(b *sluice.PromptBatch) *sluice.PromptBatch {
		return &sluice.PromptBatch{InputIDs: b.InputIDs, AttentionMask: b.AttentionMask, LossMask: b.LossMask}
	}},
	"outputs_have_the_shape_and_dtype_that_were_asked_for": {after: func(out *sluice.TargetOutput) {
		eachTensor(out, func(v []float32, _, _ int) { v[len(v)-1] = float32(math.NaN()) })
	}},
	"a_context_that_is_done_stops_it": {deaf: true},
	"aux_states_come_in_the_order_asked_for": {after: func(out *sluice.TargetOutput) {
		if t := out.Aux; t.DType.Valid() && t.Shape[2] == 12 { // three states, sorted by somebody
			v := sluice.View[float32](t)
			for i := 0; i < len(v); i += 12 {
				for j := range 4 {
					v[i+j], v[i+4+j] = v[i+4+j], v[i+j]
				}
			}
		}
	}},
}

const brokenEnv = "TARGETTEST_BROKEN"

// TestBrokenTarget is the other side of TestTheSuiteCatchesBrokenTargets: it must fail, so it runs in a process of its own.
func TestBrokenTarget(t *testing.T) {
	b, ok := brokenTargets[os.Getenv(brokenEnv)]
	if !ok {
		t.Skip("run by TestTheSuiteCatchesBrokenTargets")
	}
	targettest.Run(t, targettest.Harness{New: func(*testing.T) sluice.Target {
		b.Fake = targettest.New(targettest.Options{})
		return b
	}})
}

func TestTheSuiteCatchesBrokenTargets(t *testing.T) {
	t.Parallel()
	for check := range brokenTargets {
		t.Run(check, func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestBrokenTarget$")
			cmd.Env = append(os.Environ(), brokenEnv+"="+check)
			out, err := cmd.CombinedOutput()
			if _, failed := errors.AsType[*exec.ExitError](err); !failed {
				t.Fatalf("the suite passed a target that breaks %q: %v\n%s", check, err, out)
			}
			if !strings.Contains(string(out), "--- FAIL: TestBrokenTarget/"+check) {
				t.Errorf("the suite failed, but not in %q:\n%s", check, out)
			}
		})
	}
}

func TestAFakeIsAPureFunctionOfTheIds(t *testing.T) {
	t.Parallel()
	want := sluice.Want{AuxLayers: []int{1, 3}, Last: sluice.PostNorm, Logits: true}
	batch := targettest.Batch(0, []int64{1, 2, 3}, []int64{4, 5})
	run := func(o targettest.Options) *sluice.TargetOutput {
		out, err := targettest.New(o).Forward(t.Context(), batch, want)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	a, b, c := run(targettest.Options{}), run(targettest.Options{}), run(targettest.Options{Seed: 1})
	if !slices.Equal(a.Aux.Data, b.Aux.Data) || !slices.Equal(a.Logits.Data, b.Logits.Data) {
		t.Error("two fakes of the same options differ")
	}
	if slices.Equal(a.Aux.Data, c.Aux.Data) || targettest.New(targettest.Options{}).Info().Fingerprint == targettest.New(targettest.Options{Seed: 1}).Info().Fingerprint {
		t.Error("two fakes of different seeds do not differ")
	}
}

func TestAFakesLogitsAreItsLastStateTimesItsHead(t *testing.T) {
	t.Parallel()
	f := targettest.New(targettest.Options{})
	out, err := f.Forward(t.Context(), targettest.Batch(0, []int64{7, 8, 9}), sluice.Want{Last: sluice.PostNorm, Logits: true})
	if err != nil {
		t.Fatal(err)
	}
	last, head, logits := sluice.View[float32](out.Last), sluice.View[float32](f.Head()), sluice.View[float32](out.Logits)
	for i := range logits {
		row, id := i/64, i%64
		sum := float32(0)
		for j := range 4 {
			sum += last[row*4+j] * head[id*4+j]
		}
		if sum != logits[i] {
			t.Fatalf("logit %d of token %d is %v, want %v", id, row, logits[i], sum)
		}
	}
}

func TestAHookCanMakeAForwardFail(t *testing.T) {
	t.Parallel()
	boom := errors.New("out of memory")
	var next targettest.Fault
	f := targettest.New(targettest.Options{Hook: func(context.Context, targettest.Call) targettest.Fault { return next }})
	batch := targettest.Batch(0, []int64{1, 2}, []int64{3})
	forward := func(fault targettest.Fault) (*sluice.TargetOutput, error) {
		next = fault
		return f.Forward(t.Context(), batch, sluice.Want{AuxLayers: []int{0}, Last: sluice.PreNorm})
	}

	if _, err := forward(targettest.Fault{Err: boom}); !errors.Is(err, boom) {
		t.Errorf("error %v, want the hook's", err)
	}
	for _, n := range []int{-1, 1} {
		out, err := forward(targettest.Fault{Rows: n})
		if err != nil || out.Aux.Shape[0] != int64(2+n) || out.Last.Shape[0] != int64(2+n) || out.Aux.Validate() != nil {
			t.Errorf("rows %+d: %v, error %v", n, out, err)
		}
		if out, err = forward(targettest.Fault{Columns: n}); err != nil || out.Aux.Shape[1] != int64(2+n) || out.Aux.Validate() != nil {
			t.Errorf("columns %+d: %v, error %v", n, out, err)
		}
	}
	out, err := forward(targettest.Fault{NaN: []int{1}})
	if err != nil {
		t.Fatal(err)
	}
	for i, v := range sluice.View[float32](out.Aux) {
		if math.IsNaN(float64(v)) != (i >= 8) {
			t.Errorf("element %d is %v with row 1 of NaN", i, v)
		}
	}
	out, err = forward(targettest.Fault{Change: func(out *sluice.TargetOutput) { out.Last = sluice.Tensor{} }})
	if err != nil || out.Last.DType.Valid() {
		t.Errorf("Change did not: %v, error %v", out, err)
	}
	func() {
		defer func() {
			if r := recover(); r != "cable pulled" {
				t.Errorf("recovered %v, want the hook's panic", r)
			}
		}()
		_, _ = forward(targettest.Fault{Panic: "cable pulled"})
	}()
	if f.Calls() != 8 {
		t.Errorf("Calls is %d, want 8", f.Calls())
	}
	if _, err := forward(targettest.Fault{}); err != nil {
		t.Errorf("after the panic: %v", err)
	}
}

func TestAHookCanDelayAndIsInterrupted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := targettest.New(targettest.Options{Hook: func(ctx context.Context, _ targettest.Call) targettest.Fault {
			select {
			case <-time.After(time.Hour):
			case <-ctx.Done():
			}
			return targettest.Fault{}
		}})
		batch := targettest.Batch(0, []int64{1})
		if _, err := f.Forward(t.Context(), batch, sluice.Want{Last: sluice.PreNorm}); err != nil {
			t.Error(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := f.Forward(ctx, batch, sluice.Want{Last: sluice.PreNorm}); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v, want the deadline's", err)
		}
	})
}

func TestAFakeThatIsNotConcurrentNoticesOverlap(t *testing.T) {
	t.Parallel()
	entered, leave := make(chan struct{}), make(chan struct{})
	f := targettest.New(targettest.Options{Hook: func(context.Context, targettest.Call) targettest.Fault {
		close(entered)
		<-leave
		return targettest.Fault{}
	}})
	batch, done := targettest.Batch(0, []int64{1}), make(chan error)
	go func() {
		_, err := f.Forward(t.Context(), batch, sluice.Want{Logits: true})
		done <- err
	}()
	<-entered
	if _, err := f.Forward(t.Context(), batch, sluice.Want{Logits: true}); !errors.Is(err, sluice.ErrConflict) {
		t.Errorf("error %v, want ErrConflict", err)
	}
	close(leave)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if f.MostConcurrent() != 2 {
		t.Errorf("MostConcurrent is %d, want 2", f.MostConcurrent())
	}
}

func ExampleFake() {
	fake := targettest.New(targettest.Options{
		HiddenSize: 16,
		Hook: func(_ context.Context, call targettest.Call) targettest.Fault {
			if call.Number == 1 {
				return targettest.Fault{Err: &sluice.Error{Kind: sluice.Unavailable, Op: "fake: forward", Detail: "the server restarts"}}
			}
			return targettest.Fault{}
		},
	})
	defer fake.Close()

	batch := targettest.Batch(0, []int64{5, 6, 7}, []int64{8})
	for range 2 {
		out, err := fake.Forward(context.Background(), batch, sluice.Want{AuxLayers: fake.Info().DefaultAuxLayers()})
		if err != nil {
			fmt.Println(err)
			continue
		}
		fmt.Println(out.Aux.Spec)
	}
	// Output:
	// float32[2,3,48]
	// fake: forward: the server restarts
}
