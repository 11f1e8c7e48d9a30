package stream

import (
	"errors"
	"io"
	"slices"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/target/targettest"
)

// ownSchema is a schema "own" with the given features and whatever comes behind them.
func ownSchema(t testing.TB, features, more string) *sluice.Schema {
	t.Helper()
	s, err := sluice.ParseSchema([]byte(`{"name":"own","version":1,"features":[` + features + `]` + more + `}`))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const (
	ownIDs        = `{"name":"input_ids","from":"input_ids","axes":["B","S"],"dtypes":["int64"],"required":true}`
	ownShiftedIDs = `{"name":"input_ids","from":"input_ids","axes":["B","S"],"dtypes":["int64"],"required":true,"shift":true}`
	ownStates     = `{"name":"states","axes":["S","H"],"dtypes":["int64"],"required":true}`
)

// putOwn enqueues a sample of a schema of the run's own, as another program would write it, and closes the queue.
func (r *rig) putOwn(t testing.TB, attributes map[string]string, features ...sluice.Feature) {
	t.Helper()
	ref, err := r.store.Put(t.Context(), &sluice.Sample{SampleID: "s-0", RunID: "r1", Algorithm: "own", SchemaVersion: 1, NumTokens: 3, Attributes: attributes, Features: features}, sluice.Reservation{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.queue.Put(t.Context(), sluice.PutRequest{Ref: ref}); err != nil {
		t.Fatal(err)
	}
	_ = r.queue.Close(t.Context(), nil)
}

func feature(name string, values []int64, shape ...int64) sluice.Feature {
	return sluice.Feature{Name: name, Tensor: sluice.TensorOf(sluice.Int64, values, shape...)}
}

func TestASampleThatSaysNothingOfShiftIsUnshiftedUnlessItsSchemaAsks(t *testing.T) {
	t.Parallel()
	const declared = `,"attributes":[{"name":"shift"}]`
	for name, c := range map[string]struct {
		features, more string
		says           map[string]string
		want           []int64 // nil is refused
	}{
		"not declared, shifted":              {ownShiftedIDs, ``, nil, []int64{2, 3, 0}},
		"not declared, not shifted":          {ownIDs, ``, nil, []int64{1, 2, 3}},
		"declared, not shifted":              {ownIDs, declared, nil, []int64{1, 2, 3}},
		"declared, shifted":                  {ownShiftedIDs, declared, nil, nil},
		"not declared, comes shifted":        {ownShiftedIDs, ``, map[string]string{"shift": "1"}, []int64{1, 2, 3}},
		"not declared, says something else":  {ownShiftedIDs, ``, map[string]string{"shift": "left"}, nil},
		"not declared, says an empty string": {ownShiftedIDs, ``, map[string]string{"shift": ""}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, plenty, targettest.Options{}, nil)
			r.putOwn(t, c.says, feature("input_ids", []int64{1, 2, 3}, 1, 3))
			l := r.loader(t, func(cfg *LoaderConfig) { cfg.Schema = ownSchema(t, c.features, c.more) })
			defer closeLoader(t, l)
			b, err := l.Next(t.Context())
			if c.want == nil {
				wantKind(t, err, sluice.ErrSchema)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got := ints(t, b, "input_ids"); !slices.Equal(got, c.want) {
				t.Errorf("input_ids %v, want %v", got, c.want)
			}
			if _, err := l.Next(t.Context()); !errors.Is(err, io.EOF) {
				t.Errorf("then %v", err)
			}
		})
	}
}

func TestALoaderRefusesASchemaThatItCannotCollate(t *testing.T) {
	t.Parallel()
	r := newRig(t, plenty, targettest.Options{}, nil)
	asTheyAre := CollateFunc(func(s []Sample) ([]sluice.Feature, error) { return s[0].Features, nil })
	for _, c := range []struct {
		features string
		batch    int
		collate  Collator
		want     string // empty is accepted
	}{
		{ownStates, 1, nil, `stream: pad "own": has no feature with the axes [B,S,...], so its samples have no rows to pad; let a CollateFunc join them (LoaderConfig.Collate)`},
		{ownStates, 1, asTheyAre, ``},
		{ownStates, 2, asTheyAre, ``},
		{ownIDs, 2, nil, ``},
		{ownIDs + `,` + ownStates, 1, nil, ``},
		{ownIDs + `,` + ownStates, 2, nil, `stream: collate "states": has no batch axis, so samples can't be joined; use a batch of 1 or a CollateFunc`},
		{ownIDs + `,` + ownStates, 2, asTheyAre, ``},
	} {
		_, err := NewLoader(LoaderConfig{Queue: r.queue, Store: r.store, Schema: ownSchema(t, c.features, ``), Batch: c.batch, Collate: c.collate})
		if c.want == "" {
			if err != nil {
				t.Errorf("%s: %v", c.features, err)
			}
			continue
		}
		wantRefused(t, err, sluice.ErrSchema, c.want)
	}
}

func TestACollateFunctionGetsSamplesWithoutRowsAsTheyAre(t *testing.T) {
	t.Parallel()
	r := newRig(t, plenty, targettest.Options{}, nil)
	r.putOwn(t, nil, feature("states", []int64{1, 2, 3, 4, 5, 6}, 3, 2))
	l := r.loader(t, func(cfg *LoaderConfig) {
		cfg.Schema = ownSchema(t, ownStates, ``)
		cfg.Collate = CollateFunc(func(s []Sample) ([]sluice.Feature, error) { return s[0].Features, nil })
	})
	defer closeLoader(t, l)
	b := next(t, l)
	if got := ints(t, b, "states"); !slices.Equal(got, []int64{1, 2, 3, 4, 5, 6}) {
		t.Errorf("states %v", got)
	}
}

// A schema of a user's own may give a mask another form than one number a token. It is carried as it is, and counts no tokens.
func TestMasksAndLengthsOfAnotherFormAreCarriedAsTheyAre(t *testing.T) {
	t.Parallel()
	const (
		rowMask  = `,{"name":"loss_mask","from":"loss_mask","axes":["B"],"dtypes":["int64"],"required":true}`
		rowMark  = `,{"name":"attention_mask","from":"attention_mask","axes":["B"],"dtypes":["int64"],"required":true}`
		rowsOnly = `{"name":"lens","from":"seq_lens","axes":["N"],"dtypes":["int64"],"required":true}`
	)
	ids := feature("input_ids", []int64{1, 2, 3}, 1, 3)
	asTheyAre := CollateFunc(func(s []Sample) ([]sluice.Feature, error) { return s[0].Features, nil })
	for name, c := range map[string]struct {
		features string
		collate  Collator
		sample   []sluice.Feature
		which    string
		want     []int64
	}{
		"a loss mask a row":                    {ownIDs + rowMask, PadTo(4), []sluice.Feature{ids, feature("loss_mask", []int64{1}, 1)}, "input_ids", []int64{1, 2, 3, 0}},
		"an attention mask a row":              {ownIDs + rowMark, PadTo(4), []sluice.Feature{ids, feature("attention_mask", []int64{1}, 1)}, "input_ids", []int64{1, 2, 3, 0}},
		"lengths in a schema that has no rows": {rowsOnly, asTheyAre, []sluice.Feature{feature("lens", []int64{2, 1}, 2)}, "lens", []int64{2, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, plenty, targettest.Options{}, nil)
			r.putOwn(t, nil, c.sample...)
			l := r.loader(t, func(cfg *LoaderConfig) { cfg.Schema, cfg.Collate = ownSchema(t, c.features, ``), c.collate })
			defer closeLoader(t, l)
			b := next(t, l)
			if got := ints(t, b, c.which); !slices.Equal(got, c.want) {
				t.Errorf("%s is %v, want %v", c.which, got, c.want)
			}
			if b.SupervisedTokens != 0 {
				t.Errorf("%d supervised tokens, want none", b.SupervisedTokens)
			}
		})
	}
}
