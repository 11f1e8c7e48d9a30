package stream

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/target/targettest"
)

const plenty = 1 << 20

func wantKind(t testing.TB, err error, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("error %v, want kind %v", err, want)
	}
}

// wantRefused is wantKind for an error that has to say so much.
func wantRefused(t testing.TB, err, want error, message string) {
	t.Helper()
	if !errors.Is(err, want) || err == nil || err.Error() != message {
		t.Errorf("error %v, want kind %v with the message\n%s", err, want, message)
	}
}

func TestTheStoreHoldsWhatTheTargetReturned(t *testing.T) {
	t.Parallel()
	for _, dtype := range []sluice.DType{sluice.Float32, sluice.BFloat16} {
		t.Run(dtype.String(), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, plenty, targettest.Options{DType: dtype}, nil)
			batch := targettest.Batch(6, []int64{1, 2, 3, 4}, []int64{5, 6, 7, 8, 9, 10})
			loss := sluice.View[int64](batch.LossMask)
			for i := range loss {
				loss[i] = sluice.View[int64](batch.AttentionMask)[i]
			}
			ref, err := r.producer.Produce(t.Context(), batch)
			if err != nil {
				t.Fatal(err)
			}
			out, err := r.target.Forward(t.Context(), batch, sluice.Want{AuxLayers: []int{1, 3, 4}, Last: sluice.PostNorm})
			if err != nil {
				t.Fatal(err)
			}
			got, err := r.store.Get(t.Context(), ref)
			if err != nil {
				t.Fatal(err)
			}
			defer got.Release(t.Context())
			want := map[string]sluice.Tensor{"aux_hidden_states": out.Aux, "last_hidden_states": out.Last, "input_ids": batch.InputIDs, "attention_mask": batch.AttentionMask, "loss_mask": batch.LossMask}
			if len(got.Features) != len(want) {
				t.Errorf("features %v, want %d", ref.FeatureNames(), len(want))
			}
			for name, w := range want {
				if g, _ := got.Feature(name); !g.Equal(w.Spec) || !bytes.Equal(g.Data, w.Data) {
					t.Errorf("%s differs from what the target returned", name)
				}
			}
		})
	}
}

func TestARefSaysWhatMustBeRight(t *testing.T) {
	t.Parallel()
	r := newRig(t, plenty, targettest.Options{}, func(c *ProducerConfig) {
		c.TargetModelVersion, c.DraftWeightVersion = "7", "8"
		c.Attributes = map[string]string{"note": "x", "shift": "1"}
	})
	b := plain([]int64{10, 11, 12, 13}, 0)
	b.Positions = []sluice.Position{{Source: "set", Epoch: 2, Index: 4}, {Source: "set", Epoch: 2, Index: 5}, {Source: "so\ncalled", Index: 9}}
	ref, err := r.producer.Produce(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for k, v := range ref.Attributes() {
		got[k] = v
	}
	delete(got, "ids")
	want := map[string]string{"aux_layers": "hf:1,3,4", "last_norm": "post", "shift": "0", "target": r.target.Info().Fingerprint, "note": "x", "supervised_tokens": "3", "source": "set@2/4-5,so?called@0/9"}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if ref.NumTokens() != 4 || ref.TargetModelVersion() != "7" || ref.DraftWeightVersion() != "8" {
		t.Errorf("ref %v", ref.Canonical())
	}
	if ids, _ := ref.Attribute("ids"); !strings.HasPrefix(ids, "sha256:") {
		t.Errorf("ids %q", ids)
	}
}

func TestDSparkCountsSupervisedTokensAndRemembersRowLengths(t *testing.T) {
	t.Parallel()
	r := newRig(t, plenty, targettest.Options{}, func(c *ProducerConfig) { c.Schema = schema(t, sluice.DSpark); c.AuxLayers = []int{2, 7} })
	b := targettest.Batch(5, []int64{1, 2, 3}, []int64{4, 5, 6, 7, 8})
	copy(sluice.View[int64](b.LossMask), []int64{0, 0, 1, 0, 0, 0, 1, 1, 1, 1})
	ref, err := r.producer.Produce(t.Context(), b)
	if err != nil {
		t.Fatal(err)
	}
	lengths, _ := ref.Attribute("row_lengths")
	if ref.NumTokens() != 5 || lengths != "3,5" {
		t.Errorf("%d tokens, row lengths %q; want 5 and 3,5", ref.NumTokens(), lengths)
	}
	got, err := r.store.Get(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	defer got.Release(t.Context())
	aux, _ := got.Feature("target_hidden_states")
	last, _ := got.Feature("target_last_hidden_states")
	for row := range 10 {
		if !bytes.Equal(aux.Data[row*32+16:row*32+32], last.Data[row*16:row*16+16]) {
			t.Fatalf("row %d: the final layer's block is not the post-norm last state", row)
		}
	}
}

func TestIdsAreUniqueAcrossProducers(t *testing.T) {
	t.Parallel()
	r := newRig(t, plenty, targettest.Options{}, nil)
	other, err := NewProducer(ProducerConfig{Target: r.target, Store: r.store, Schema: schema(t, sluice.EAGLE3), RunID: "r1"})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	seen := map[string]bool{}
	for range 3 {
		for _, p := range []*Producer{r.producer, other} {
			ref, err := p.Produce(t.Context(), plain([]int64{1, 2, 3}, 1))
			if err != nil {
				t.Fatal(err)
			}
			if seen[ref.SampleID()] {
				t.Errorf("id %s twice", ref.SampleID())
			}
			seen[ref.SampleID()] = true
		}
	}
	long := strings.Repeat("a", 149) + "." + strings.Repeat("b", 50)
	p, err := NewProducer(ProducerConfig{Target: r.target, Store: r.store, Schema: schema(t, sluice.EAGLE3), RunID: long})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if _, err := p.Produce(t.Context(), plain([]int64{1, 2, 3}, 1)); err != nil {
		t.Errorf("with the longest run id: %v", err)
	}
}

func TestAdmissionComesBeforeTheForwardAndTheGate(t *testing.T) {
	t.Parallel()
	packed := targettest.Pack(0, [][]int64{{1, 2}, {3}})
	copy(sluice.View[int64](packed.LossMask), []int64{1, 0, 1})
	two := targettest.Batch(3, []int64{1, 2, 3}, []int64{4})
	copy(sluice.View[int64](two.LossMask), []int64{0, 1, 1, 0, 0, 0})
	one := plain([]int64{1, 2, 3}, 9)
	sluice.View[int64](one.LossMask)[0] = 1
	const none = "row 0 has 0 supervised tokens behind the first of a document, eagle3 admits 1 or more"
	for name, c := range map[string]struct {
		batch *sluice.PromptBatch
		want  string
	}{
		"one token":                      {plain([]int64{1}, 0), "row 0 has 1 tokens, eagle3 admits 2 or more"},
		"nothing supervised":             {plain([]int64{1, 2, 3}, 9), none},
		"only the first token":           {one, none},
		"only first tokens of documents": {packed, none},
		"one row of two":                 {two, "row 1 has 1 tokens, eagle3 admits 2 or more"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, plenty, targettest.Options{}, nil)
			r.queue.beforeReserve = func() error { t.Error("room was reserved"); return nil }
			_, err := r.producer.Produce(t.Context(), c.batch)
			wantKind(t, err, ErrNotAdmitted)
			wantRefused(t, err, sluice.ErrInvalid, "stream: produce: "+c.want+": the prompts are not admitted")
			if s := r.producer.Stats(); r.target.Calls() != 0 || s.NotAdmitted != 1 || s.NotAdmittedRows != 1 {
				t.Errorf("%d forwards, stats %+v", r.target.Calls(), s)
			}
		})
	}
}

func TestSwappedPackingFieldsAreCaught(t *testing.T) {
	t.Parallel()
	b := targettest.Pack(0, [][]int64{{1, 2, 3}, {4, 5}})
	if _, err := BatchOf(b.InputIDs, b.AttentionMask, b.LossMask, b.DocRemaining, b.SeqLens, b.PositionIDs); !errors.Is(err, sluice.ErrInvalid) {
		t.Errorf("error %v, want ErrInvalid", err)
	}
	if _, err := BatchOf(b.InputIDs, b.AttentionMask, b.LossMask, b.PositionIDs, b.SeqLens, b.DocRemaining); err != nil {
		t.Error(err)
	}
	if _, err := BatchOf(b.InputIDs, b.AttentionMask); !errors.Is(err, sluice.ErrInvalid) {
		t.Errorf("error %v for two tensors, want ErrInvalid", err)
	}
	r := newRig(t, plenty, targettest.Options{}, nil)
	b.PositionIDs, b.DocRemaining = b.DocRemaining, b.PositionIDs
	_, err := r.producer.Produce(t.Context(), b)
	wantKind(t, err, sluice.ErrInvalid)
}

func TestTheReservationIsExact(t *testing.T) {
	t.Parallel()
	for _, enc := range []string{"last_hidden_states", "logits", "target_probs"} {
		for _, dtype := range []sluice.DType{sluice.Float32, sluice.BFloat16, sluice.Float16} {
			r := newRig(t, plenty, targettest.Options{}, func(c *ProducerConfig) {
				c.Encoding, c.LogitsDType, c.DraftVocab = enc, dtype, []int64{3, 1, 40}
			})
			for _, b := range []*sluice.PromptBatch{plain([]int64{1, 2, 3, 4, 5}, 1), packedBatch()} {
				n, err := r.producer.SampleBytes(b)
				if err != nil {
					t.Fatal(err)
				}
				ref, err := r.producer.Produce(t.Context(), b)
				if err != nil {
					t.Fatal(err)
				}
				if ref.EstimatedBytes() != n {
					t.Errorf("%s %s: reserved %d bytes for %d", enc, dtype, n, ref.EstimatedBytes())
				}
				if err := r.producer.Discard(t.Context(), ref); err != nil {
					t.Error(err)
				}
			}
			clean(t, r.store, r.queue)
		}
	}
}

func packedBatch() *sluice.PromptBatch {
	b := targettest.Pack(0, [][]int64{{1, 2, 3}, {4, 5}})
	copy(sluice.View[int64](b.LossMask), []int64{0, 1, 1, 0, 1})
	return b
}

func TestNothingIsLeftBehindAFailure(t *testing.T) {
	t.Parallel()
	boom := errors.New("boom")
	for name, c := range map[string]struct {
		fault  targettest.Fault
		hook   func(r *rig)
		want   error
		detail string
	}{
		"target error":         {fault: targettest.Fault{Err: boom}, want: sluice.ErrTargetFault, detail: "boom"},
		"target unavailable":   {fault: targettest.Fault{Err: sluice.ErrUnavailable}, want: sluice.ErrUnavailable},
		"target panic":         {fault: targettest.Fault{Panic: "ouch"}, want: sluice.ErrTargetFault, detail: "ouch"},
		"a row lost":           {fault: targettest.Fault{Rows: 1}, want: sluice.ErrTargetFault, detail: "want float32[1,4,12]"},
		"a token lost":         {fault: targettest.Fault{Columns: -1}, want: sluice.ErrTargetFault, detail: "want float32[1,4,12]"},
		"NaN":                  {fault: targettest.Fault{NaN: []int{0}}, want: sluice.ErrTargetFault, detail: "not finite at row 0, token 0"},
		"infinite last":        {fault: targettest.Fault{Change: func(o *sluice.TargetOutput) { sluice.View[float32](o.Last)[6] = float32(math.Inf(-1)) }}, want: sluice.ErrTargetFault, detail: "last is not finite at row 0, token 1, element 2"},
		"no last":              {fault: targettest.Fault{Change: func(o *sluice.TargetOutput) { o.Last = sluice.Tensor{} }}, want: sluice.ErrTargetFault, detail: "last"},
		"wrong dtype":          {fault: targettest.Fault{Change: func(o *sluice.TargetOutput) { o.Aux.DType = sluice.Int32 }}, want: sluice.ErrTargetFault, detail: "int32"},
		"short data":           {fault: targettest.Fault{Change: func(o *sluice.TargetOutput) { o.Aux.Data = o.Aux.Data[:8] }}, want: sluice.ErrTargetFault},
		"put: no space":        {hook: func(r *rig) { r.store.beforePut = func(string) error { return sluice.ErrNoSpace } }, want: sluice.ErrNoSpace},
		"put panics":           {hook: func(r *rig) { r.store.beforePut = func(string) error { panic(boom) } }, want: boom},
		"reserve: no space":    {hook: func(r *rig) { r.store.beforeReserve = func(string) error { return sluice.ErrNoSpace } }, want: sluice.ErrNoSpace},
		"larger than the cap":  {hook: func(r *rig) { r.store.caps.MaxBytes = 100 }, want: sluice.ErrFull},
		"the queue was closed": {hook: func(r *rig) { _ = r.queue.Close(context.Background(), nil) }, want: sluice.ErrClosed},
		"bad sample id":        {hook: func(r *rig) { r.producer.cfg.SampleID = func(int64) string { return "../x" } }, want: sluice.ErrInvalid},
		"sample id panics":     {hook: func(r *rig) { r.producer.cfg.SampleID = func(int64) string { panic("x") } }, want: sluice.ErrInvalid},
		"duplicate id": {hook: func(r *rig) {
			r.producer.cfg.SampleID = func(int64) string { return "same" }
			if _, err := r.producer.Produce(context.Background(), plain([]int64{1, 2}, 1)); err != nil {
				panic(err)
			}
		}, want: sluice.ErrDuplicate},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, plenty, targettest.Options{Hook: func(context.Context, targettest.Call) targettest.Fault { return c.fault }}, nil)
			if c.hook != nil {
				c.hook(r)
			}
			before := r.store.Health()
			err := guard(sluice.Invalid, "test", func() error {
				_, err := r.producer.Produce(t.Context(), plain([]int64{1, 2, 3, 4}, 1))
				return err
			})
			if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.detail) {
				t.Errorf("error %v, want %v with %q", err, c.want, c.detail)
			}
			if h := r.store.Health(); h != before {
				t.Errorf("the store holds %+v, want %+v", h, before)
			}
		})
	}
}

func TestWithoutAGateAFullStoreIsMetAtThePut(t *testing.T) {
	t.Parallel()
	r := newRig(t, 400, targettest.Options{}, func(c *ProducerConfig) { c.Queue = nil })
	first, err := r.producer.Produce(t.Context(), plain([]int64{1, 2, 3}, 1))
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.producer.Produce(t.Context(), plain([]int64{1, 2, 3}, 1))
	wantKind(t, err, sluice.ErrFull)
	if err := r.producer.Discard(t.Context(), first); err != nil {
		t.Error(err)
	}
	clean(t, r.store, nil)
}

func TestASampleThatBreaksTheSchemaCostsNoForward(t *testing.T) {
	t.Parallel()
	// The attribute pattern refuses what the producer says of itself, which only shows in the finished ref.
	s, err := sluice.ParseSchema([]byte(`{"name":"mine","version":1,
		"features":[{"name":"h","from":"aux","axes":["B","S","K*H"],"dtypes":["float32"],"required":true},
			{"name":"ids","from":"input_ids","axes":["B","S"],"dtypes":["int64"],"required":true}],
		"attributes":[{"name":"shift","required":true,"pattern":"0|1"},{"name":"aux_layers","required":true,"pattern":"vllm:.*"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, plenty, targettest.Options{}, func(c *ProducerConfig) { c.Schema = s })
	_, err = r.producer.Produce(t.Context(), plain([]int64{1, 2, 3}, 1))
	wantKind(t, err, sluice.ErrSchema)
	if r.target.Calls() != 0 {
		t.Error("a forward was spent")
	}
	clean(t, r.store, nil)
}

func TestASchemaOfOnesOwnNeedsNoCode(t *testing.T) {
	t.Parallel()
	s, err := sluice.ParseSchema([]byte(`{"name":"medusa","version":3,
		"features":[{"name":"states","from":"last","norm":"pre","axes":["B","S","H"],"dtypes":["float32"],"required":true},
			{"name":"tokens","from":"input_ids","axes":["B","S"],"dtypes":["int64"],"required":true,"shift":true},
			{"name":"weights","from":"loss_mask","axes":["B","S"],"dtypes":["int64"],"required":true}],
		"attributes":[{"name":"shift","required":true,"pattern":"0|1"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, plenty, targettest.Options{}, func(c *ProducerConfig) { c.Schema = s })
	ref, err := r.producer.Produce(t.Context(), plain([]int64{1, 2, 3}, 1))
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"states", "tokens", "weights"}; !slices.Equal(ref.FeatureNames(), want) || ref.NumTokens() != 2 {
		t.Errorf("features %v, %d tokens", ref.FeatureNames(), ref.NumTokens())
	}
	x, err := r.store.Get(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Release(t.Context())
	b, err := Collate(s, PadTo(0), []Sample{{Ref: ref, Features: x.Features}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	tokens, _ := b.Feature("tokens")
	if !slices.Equal(sluice.View[int64](tokens), []int64{2, 3, 0}) {
		t.Errorf("tokens %v", sluice.View[int64](tokens))
	}
}

func TestImpossibleConfigurationsAreRefused(t *testing.T) {
	t.Parallel()
	target := targettest.New(targettest.Options{})
	for _, c := range map[string]struct {
		change func(*ProducerConfig)
		want   error
		says   string
	}{
		"no target":                    {func(c *ProducerConfig) { c.Target = nil }, sluice.ErrInvalid, `"Target": is nil`},
		"no store":                     {func(c *ProducerConfig) { c.Store = nil }, sluice.ErrInvalid, `"Store": is nil`},
		"no schema":                    {func(c *ProducerConfig) { c.Schema = nil }, sluice.ErrInvalid, `"Schema": is nil`},
		"no run":                       {func(c *ProducerConfig) { c.RunID = "" }, sluice.ErrInvalid, `"RunID": ` + sluice.ValidateID("").Error()},
		"unknown encoding":             {func(c *ProducerConfig) { c.Encoding = "hidden" }, sluice.ErrInvalid, `"Encoding": "hidden" is none of the schema eagle3, which has [last_hidden_states logits target_probs]`},
		"probs without vocabulary":     {func(c *ProducerConfig) { c.Encoding = "target_probs" }, sluice.ErrInvalid, `"DraftVocab": is empty; target_probs needs the draft's token ids`},
		"vocabulary out of range":      {func(c *ProducerConfig) { c.Encoding, c.DraftVocab = "target_probs", []int64{64} }, sluice.ErrInvalid, `"DraftVocab": entry 0 is 64, want 0 to 63`},
		"vocabulary twice":             {func(c *ProducerConfig) { c.Encoding, c.DraftVocab = "target_probs", []int64{1, 1} }, sluice.ErrInvalid, `"DraftVocab": entry 1 is 1, which is there before`},
		"layer out of range":           {func(c *ProducerConfig) { c.AuxLayers = []int{8} }, sluice.ErrInvalid, `"AuxLayers": [8]: want layers of -1 to 7, each once`},
		"layer twice":                  {func(c *ProducerConfig) { c.AuxLayers = []int{1, 1} }, sluice.ErrInvalid, `"AuxLayers": [1 1]: want layers of -1 to 7, each once`},
		"too shallow for the default":  {func(c *ProducerConfig) { c.Target = targettest.New(targettest.Options{Layers: 3}) }, sluice.ErrInvalid, `"AuxLayers": is nil, and a target of 3 layers is too shallow for the default; want layers of -1 to 2, each once`},
		"no layers":                    {func(c *ProducerConfig) { c.AuxLayers = []int{} }, sluice.ErrInvalid, `"AuxLayers": is empty; aux_hidden_states needs at least one layer`},
		"logits as integers":           {func(c *ProducerConfig) { c.LogitsDType = sluice.Int64 }, sluice.ErrInvalid, `"LogitsDType": is int64, want float32, bfloat16 or float16`},
		"unknown optional":             {func(c *ProducerConfig) { c.Optional = []string{"x"} }, sluice.ErrInvalid, `"Optional": "x" is no feature of the schema eagle3`},
		"optional of another encoding": {func(c *ProducerConfig) { c.Optional = []string{"logits"} }, sluice.ErrInvalid, `"Optional": "logits" belongs to the encoding "logits" of the schema eagle3; to have it, set Encoding`},
		"part of another encoding":     {func(c *ProducerConfig) { c.Optional = []string{"position_mask"} }, sluice.ErrInvalid, `"Optional": "position_mask" belongs to the encoding "target_probs" of the schema eagle3; to have it, set Encoding`},
		"optional of an encoding that was not asked for": {func(c *ProducerConfig) { c.Schema, c.Optional = schema(t, sluice.DFlash), []string{"logits"} }, sluice.ErrInvalid, `"Optional": "logits" belongs to the encoding "logits" of the schema dflash; to have it, set Encoding`},
		"bad session": {func(c *ProducerConfig) { c.Session.Name = "a b" }, sluice.ErrInvalid, `"Session": ` + sluice.ValidateID("a b").Error()},
		"both norms": {func(c *ProducerConfig) {
			c.Schema = &sluice.Schema{Name: "x", Version: 1, Features: []sluice.SchemaFeature{
				{Name: "a", From: sluice.RoleLast, Norm: sluice.PreNorm, Required: true, DTypes: []sluice.DType{sluice.Float32}},
				{Name: "b", From: sluice.RoleLast, Norm: sluice.PostNorm, Required: true, DTypes: []sluice.DType{sluice.Float32}}}}
		}, sluice.ErrUnsupported, ""},
		"a feature of its owner's": {func(c *ProducerConfig) {
			c.Schema = &sluice.Schema{Name: "x", Version: 1, Features: []sluice.SchemaFeature{{Name: "a", Required: true, DTypes: []sluice.DType{sluice.Float32}}}}
		}, sluice.ErrUnsupported, ""},
		"a dtype that the schema refuses": {func(c *ProducerConfig) {
			c.Schema = &sluice.Schema{Name: "x", Version: 1, Features: []sluice.SchemaFeature{{Name: "a", From: sluice.RoleAux, Required: true, DTypes: []sluice.DType{sluice.Float16}}}}
		}, sluice.ErrSchema, ""},
	} {
		cfg := ProducerConfig{Target: target, Store: newStore(t, plenty), Schema: schema(t, sluice.EAGLE3), RunID: "r"}
		c.change(&cfg)
		_, err := NewProducer(cfg)
		if c.says == "" {
			wantKind(t, err, c.want)
			continue
		}
		wantRefused(t, err, c.want, "stream: new producer "+c.says)
	}
	turns.mu.Lock()
	defer turns.mu.Unlock()
	if turns.of[target] != nil {
		t.Error("a refused producer keeps its target's turn")
	}
}

func TestForwardsOfOneTargetAreSerialised(t *testing.T) {
	t.Parallel()
	for _, concurrent := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			// While one forward sleeps, all that may begin do.
			hook := func(context.Context, targettest.Call) targettest.Fault {
				time.Sleep(time.Second)
				return targettest.Fault{}
			}
			r := newRig(t, plenty, targettest.Options{Concurrent: concurrent, Hook: hook}, nil)
			other, err := NewProducer(ProducerConfig{Target: r.target, Store: r.store, Schema: schema(t, sluice.EAGLE3), RunID: "r1"})
			if err != nil {
				t.Fatal(err)
			}
			defer other.Close()
			var all sync.WaitGroup
			for _, p := range []*Producer{r.producer, other} {
				for range 2 {
					all.Go(func() {
						if _, err := p.Produce(t.Context(), plain([]int64{1, 2, 3}, 1)); err != nil {
							t.Error(err)
						}
					})
				}
			}
			all.Wait()
			if want := map[bool]int{false: 1, true: 4}[concurrent]; r.target.MostConcurrent() != want {
				t.Errorf("%d forwards at once, want %d", r.target.MostConcurrent(), want)
			}
		})
	}
}

func TestAClosedProducersForwardKeepsTheTargetsTurn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, plenty, targettest.Options{Hook: func(context.Context, targettest.Call) targettest.Fault {
			time.Sleep(time.Second)
			return targettest.Fault{}
		}}, nil)
		var all sync.WaitGroup
		produce := func(p *Producer) {
			all.Go(func() {
				if _, err := p.Produce(t.Context(), plain([]int64{1, 2, 3}, 1)); err != nil {
					t.Error(err)
				}
			})
		}
		produce(r.producer)
		synctest.Wait()
		for range 2 {
			r.producer.Close()
		}
		other, err := NewProducer(ProducerConfig{Target: r.target, Store: r.store, Schema: schema(t, sluice.EAGLE3), RunID: "r1"})
		if err != nil {
			t.Fatal(err)
		}
		produce(other)
		all.Wait()
		other.Close()
		if n := r.target.MostConcurrent(); n != 1 {
			t.Errorf("%d forwards at once", n)
		}
		turns.mu.Lock()
		defer turns.mu.Unlock()
		if turns.of[r.target] != nil {
			t.Error("the closed producers keep the target's turn")
		}
	})
}

// uncomparable is a target whose type could be compared and whose value can't.
type uncomparable struct {
	sluice.Target
	extra any
}

func TestATargetNeedNotBeComparable(t *testing.T) {
	t.Parallel()
	p, err := NewProducer(ProducerConfig{Target: uncomparable{targettest.New(targettest.Options{}), []int{1}}, Store: newStore(t, plenty), Schema: schema(t, sluice.EAGLE3), RunID: "r"})
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
}

// recordingQueue remembers its reservations by request, as the contract says.
type recordingQueue struct {
	*fakeQueue
	known map[string]sluice.Reservation
}

func (q recordingQueue) Reserve(ctx context.Context, r sluice.ReserveRequest) (sluice.Reservation, error) {
	if len(r.RequestID) > 200 {
		return sluice.Reservation{}, &sluice.Error{Kind: sluice.Invalid, Op: "fake: reserve", Detail: "the request id is longer than 200 bytes"}
	}
	if room, ok := q.known[r.RequestID]; ok {
		return room, nil
	}
	room, err := q.fakeQueue.Reserve(ctx, r)
	if err == nil {
		q.known[r.RequestID] = room
	}
	return room, err
}

// An id of the caller's own may be as long as ids may be, and come again after a failure.
func TestASampleIDThatComesAgainGetsRoomOfItsOwn(t *testing.T) {
	t.Parallel()
	fail := true
	var q recordingQueue
	r := newRig(t, plenty, targettest.Options{Hook: func(context.Context, targettest.Call) targettest.Fault {
		if fail {
			return targettest.Fault{Err: errors.New("x")}
		}
		return targettest.Fault{}
	}}, nil)
	q = recordingQueue{r.queue, map[string]sluice.Reservation{}}
	id := strings.Repeat("a", 200)
	p, err := NewProducer(ProducerConfig{Target: r.target, Store: r.store, Queue: q, Schema: schema(t, sluice.EAGLE3), RunID: "r", SampleID: func(int64) string { return id }})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	_, err = p.Produce(t.Context(), plain([]int64{1, 2, 3}, 1))
	wantKind(t, err, sluice.ErrTargetFault)
	fail = false
	reserved := int64(0)
	r.store.beforePut = func(string) error { reserved = r.store.Health().ReservedSamples; return nil }
	if _, err := p.Produce(t.Context(), plain([]int64{1, 2, 3}, 1)); err != nil {
		t.Fatal(err)
	}
	if reserved != 1 || len(q.known) != 2 {
		t.Errorf("%d reservations at the put, %d requests; want 1 and 2", reserved, len(q.known))
	}
}

func TestAWaitForTheTargetEndsWithItsContext(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		hook := func(context.Context, targettest.Call) targettest.Fault {
			time.Sleep(time.Hour)
			return targettest.Fault{}
		}
		r := newRig(t, plenty, targettest.Options{Hook: hook}, nil)
		var first sync.WaitGroup
		first.Go(func() { _, _ = r.producer.Produce(t.Context(), plain([]int64{1, 2, 3}, 1)) })
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := r.producer.Produce(ctx, plain([]int64{1, 2, 3}, 1)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		first.Wait()
		if h := r.store.Health(); h.ReservedSamples != 0 {
			t.Errorf("health %+v", h)
		}
	})
}

func TestASourceOfTensorsTakesThreeOrSix(t *testing.T) {
	t.Parallel()
	b, p := plain([]int64{1, 2}, 1), targettest.Pack(0, [][]int64{{1, 2}, {3, 4}})
	three := []sluice.Tensor{b.InputIDs, b.AttentionMask, b.LossMask}
	six := []sluice.Tensor{p.InputIDs, p.AttentionMask, p.LossMask, p.PositionIDs, p.SeqLens, p.DocRemaining}
	for _, c := range []struct {
		fields []sluice.Tensor
		want   string
	}{
		{three, ""}, {six, ""},
		{six[:5], "has 5 tensors, want 3"},
		{[]sluice.Tensor{six[0], six[1], six[2], {}, {}, {}}, "a packing tensor has no dtype"},
		{[]sluice.Tensor{six[0], six[1], six[2], six[5], six[4], six[3]}, "swapped"},
	} {
		got, err := FromTensors(func(context.Context) ([]sluice.Tensor, error) { return c.fields, nil }).Next(t.Context())
		if c.want == "" {
			if err != nil || got.Packed() != (len(c.fields) == 6) {
				t.Errorf("%d tensors: error %v", len(c.fields), err)
			}
			continue
		}
		wantKind(t, err, sluice.ErrInvalid)
		if err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("error %q, want %q in it", err, c.want)
		}
	}
	if _, err := FromTensors(func(context.Context) ([]sluice.Tensor, error) { return nil, nil }).Next(t.Context()); !errors.Is(err, io.EOF) {
		t.Errorf("error %v, want the end", err)
	}
}

func TestTheSizeOfAPackedBatchNeedsPackingFeatures(t *testing.T) {
	t.Parallel()
	s, err := sluice.ParseSchema([]byte(`{"name":"x","version":1,"features":[{"name":"ids","from":"input_ids","axes":["B","S"],"dtypes":["int64"],"required":true}],"attributes":[{"name":"shift"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, plenty, targettest.Options{}, func(c *ProducerConfig) { c.Schema = s })
	n, err := r.producer.SampleBytes(targettest.Pack(0, [][]int64{{1, 2}, {3, 4}}))
	wantKind(t, err, sluice.ErrSchema)
	if n != 0 {
		t.Errorf("%d bytes beside the error", n)
	}
	if n, err := r.producer.SampleBytes(plain([]int64{1, 2}, 1)); n != 16 || err != nil {
		t.Errorf("%d bytes, error %v", n, err)
	}
}

func TestAProducerIsAnonymousUntilAPipelineSpeaksForIt(t *testing.T) {
	t.Parallel()
	r := newRig(t, plenty, targettest.Options{}, nil)
	if got := r.producer.Session(); got != (sluice.Producer{}) {
		t.Errorf("session %+v; a queue would wait for its heartbeats", got)
	}
	r.pipeline(t, batches(nil), PipelineOptions{})
	if got := r.producer.Session(); !strings.HasPrefix(got.Name, "producer-") {
		t.Errorf("session %+v", got)
	}
}

func TestAClosedProducerRefuses(t *testing.T) {
	t.Parallel()
	r := newRig(t, plenty, targettest.Options{}, nil)
	r.producer.Close()
	r.producer.Close()
	_, err := r.producer.Produce(t.Context(), plain([]int64{1, 2}, 1))
	wantKind(t, err, sluice.ErrClosed)
	if r.target.Closed() {
		t.Error("the target was closed, which is the caller's")
	}
}

func TestTheTargetsTokenLimitIsKept(t *testing.T) {
	t.Parallel()
	r := newRig(t, plenty, targettest.Options{MaxTokens: 3}, nil)
	_, err := r.producer.Produce(t.Context(), plain([]int64{1, 2, 3, 4}, 1))
	wantKind(t, err, sluice.ErrInvalid)
	if errors.Is(err, ErrNotAdmitted) {
		t.Error("a row that is too long is no matter of admission")
	}
}

func TestALogitTooLargeForItsTypeIsAFault(t *testing.T) {
	t.Parallel()
	hook := func(context.Context, targettest.Call) targettest.Fault {
		return targettest.Fault{Change: func(o *sluice.TargetOutput) { sluice.View[float32](o.Logits)[64] = 1e6 }}
	}
	r := newRig(t, plenty, targettest.Options{Hook: hook}, func(c *ProducerConfig) { c.Encoding, c.LogitsDType = "logits", sluice.Float16 })
	_, err := r.producer.Produce(t.Context(), plain([]int64{1, 2, 3}, 1))
	wantKind(t, err, sluice.ErrTargetFault)
	if err == nil || !strings.Contains(err.Error(), "row 0, token 1") {
		t.Errorf("error %v does not say where", err)
	}
	clean(t, r.store, nil)
}

func TestDiscardOfAnEnqueuedSampleIsRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t, plenty, targettest.Options{}, nil)
	ref := r.fill(t, 1)[0]
	wantKind(t, r.producer.Discard(t.Context(), ref), sluice.ErrConflict)
}

func TestAContextThatEndsInTheForwardReturnsTheRoom(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("why")
	r := newRig(t, plenty, targettest.Options{Hook: func(context.Context, targettest.Call) targettest.Fault { cancel(why); return targettest.Fault{} }}, nil)
	_, err := r.producer.Produce(ctx, plain([]int64{1, 2, 3}, 1))
	if !errors.Is(err, why) {
		t.Errorf("error %v, want the context's cause", err)
	}
	clean(t, r.store, r.queue)
}

func TestFirstNotFinite(t *testing.T) {
	t.Parallel()
	for d, bad := range map[sluice.DType][]uint64{
		sluice.Float64: {0x7ff0000000000000, 0xfff8000000000001}, sluice.Float32: {0x7f800000, 0xffc00000}, sluice.Float16: {0x7c00, 0xfe01},
		sluice.BFloat16: {0x7f80, 0xffc1}, sluice.Float8E5M2: {0x7c, 0xff}, sluice.Float8E4M3FN: {0x7f, 0xff},
	} {
		for _, n := range []int64{1, 7, 8, 19} {
			x := sluice.NewTensor(d, n)
			largest := map[sluice.DType]uint64{sluice.Float64: 0xffefffffffffffff, sluice.Float32: 0xff7fffff, sluice.Float16: 0xfbff, sluice.BFloat16: 0xff7f, sluice.Float8E5M2: 0xfb, sluice.Float8E4M3FN: 0xfe}[d]
			set := func(i int64, v uint64) {
				for k := range d.Size() {
					x.Data[i*d.Size()+k] = byte(v >> (8 * k))
				}
			}
			for i := range n {
				set(i, largest)
			}
			if i := firstNotFinite(x); i != -1 {
				t.Errorf("%s[%d]: %d is not finite, though all are", d, n, i)
			}
			for i := range n {
				for _, v := range bad {
					set(i, v)
					if got := firstNotFinite(x); got != i {
						t.Errorf("%s[%d]: found %d, want %d", d, n, got, i)
					}
				}
				set(i, largest)
			}
		}
	}
}

func TestHalfRoundsToNearestEven(t *testing.T) {
	t.Parallel()
	for v, want := range map[float32]uint16{0: 0, 1: 0x3c00, -2: 0xc000, 65504: 0x7bff, 65519: 0x7bff, 65520: 0x7c00, 1e9: 0x7c00, 5.9604645e-8: 1, 2.9802322e-8: 0, 2.9802326e-8: 1,
		6.1035156e-5: 0x400, 6.097555e-5: 0x3ff, 1.00048828125: 0x3c00, 1.00146484375: 0x3c02, float32(math.Inf(-1)): 0xfc00} {
		if got := half(v); got != want {
			t.Errorf("half(%g) = %#x, want %#x", v, got, want)
		}
	}
}

func TestEveryHalfComesBackAsItWas(t *testing.T) {
	t.Parallel()
	for i := range 1 << 16 {
		h := uint16(i)
		if v := single(h); v != v {
			if h&0x7c00 != 0x7c00 || h&0x3ff == 0 {
				t.Fatalf("%#x became NaN", h)
			}
		} else if back := half(v); back != h {
			t.Fatalf("%#x became %g, and that %#x", h, v, back)
		}
	}
}

func BenchmarkFirstNotFinite(b *testing.B) {
	x := sluice.NewTensor(sluice.BFloat16, 1<<22)
	b.SetBytes(int64(len(x.Data)))
	for b.Loop() {
		firstNotFinite(x)
	}
}
