package plan

import (
	"encoding/json"
	"errors"
	"flag"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/stream"
	"github.com/sluice-ml/sluice/target/tinyllama"
)

var update = flag.Bool("update", false, "write the golden files again")

func schemaOf(t testing.TB, a sluice.Algorithm) *sluice.Schema {
	t.Helper()
	s, err := sluice.SchemaOf(a)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func parse(t testing.TB, document string) *sluice.Schema {
	t.Helper()
	s, err := sluice.ParseSchema([]byte(document))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// usual is a plan that is accepted, to be varied.
func usual(t testing.TB, a sluice.Algorithm) Input {
	return Input{Schema: schemaOf(t, a), Hidden: 4096, Aux: 3, Vocab: 152064, DraftVocab: 32000, MeanLen: 2000, MaxLen: 8192, Ranks: 1, PerRank: 1, Prefetch: 1}
}

func mustNew(t testing.TB, in Input) *Plan {
	t.Helper()
	p, err := New(in)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// The figures that are known from elsewhere: bf16, H 4096.
func TestBytesATokenAreThePublishedOnes(t *testing.T) {
	t.Parallel()
	const kib = 1 << 10
	for name, c := range map[string]struct {
		algorithm   sluice.Algorithm
		aux         int64
		supervision string
		states      int64 // floats
		ids         int64 // int64 ids and masks, bools
	}{
		"eagle3":               {sluice.EAGLE3, 3, "", 32 * kib, 24},
		"eagle3 full logits":   {sluice.EAGLE3, 3, "logits", 24*kib + 297*kib, 24},
		"eagle3 target probs":  {sluice.EAGLE3, 3, "target_probs", 24*kib + 64000, 25},
		"dflash, 5 layers":     {sluice.DFlash, 5, "", 40 * kib, 24},
		"dflash with logits":   {sluice.DFlash, 5, "logits", 40*kib + 297*kib, 24},
		"dspark, 5 layers":     {sluice.DSpark, 5, "", 48 * kib, 16},
		"dflash, none at all":  {sluice.DFlash, 5, "none", 40 * kib, 24},
		"eagle3, five layers":  {sluice.EAGLE3, 5, "last_hidden_states", 48 * kib, 24},
		"dspark, a last state": {sluice.DSpark, 1, "", 16 * kib, 16},
	} {
		in := usual(t, c.algorithm)
		in.Aux, in.Supervision = c.aux, c.supervision
		p := mustNew(t, in)
		if want := c.states + c.ids; p.BytesPerToken != want || p.MeanSampleBytes != want*2000 || p.LargestSampleBytes != want*8192 {
			t.Errorf("%s: %d bytes a token, %d a mean, %d the largest sample; want %d a token", name, p.BytesPerToken, p.MeanSampleBytes, p.LargestSampleBytes, want)
		}
	}
}

func TestALargeTargetsWindowIsThePublishedOne(t *testing.T) {
	t.Parallel()
	in := usual(t, sluice.DSpark)
	in.Hidden, in.Aux, in.MeanLen, in.MaxLen, in.Ranks = 7168, 5, 65536, 65536, 128
	p := mustNew(t, in)
	const states, ids = 21 << 28, 16 * 65536 // 5.25 GiB of states
	if p.LargestSampleBytes != states+ids || p.LargestWindowBytes != 672<<30+128*ids {
		t.Errorf("largest sample %d, window %d", p.LargestSampleBytes, p.LargestWindowBytes)
	}
}

// A producer says what its samples take; the plan must say the same.
func TestPlanAndProducerAgree(t *testing.T) {
	t.Parallel()
	model, err := tinyllama.Shipped()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = model.Close() })
	info := model.Info()
	const tokens = 96
	tensor := func(fill func(i int64) int64, shape ...int64) sluice.Tensor {
		x := sluice.NewTensor(sluice.Int64, shape...)
		for i := range sluice.View[int64](x) {
			sluice.View[int64](x)[i] = fill(int64(i))
		}
		return x
	}
	one := tensor(func(int64) int64 { return 1 }, 1, tokens)
	plain := sluice.PromptBatch{InputIDs: one, AttentionMask: one, LossMask: one}
	packed := plain
	packed.PositionIDs = tensor(func(int64) int64 { return 0 }, 1, tokens)
	packed.SeqLens = tensor(func(int64) int64 { return 1 }, 1, tokens) // documents of one token: as many as there can be
	packed.DocRemaining = packed.PositionIDs
	draft := []int64{0, 1, 2, 3, 4}

	for _, a := range sluice.Algorithms() {
		schema := schemaOf(t, a)
		encodings := []string{""}
		for _, e := range schema.Supervision.Encodings {
			encodings = append(encodings, e.Name)
		}
		for _, encoding := range encodings {
			for _, logits := range []sluice.DType{sluice.Float32, sluice.BFloat16} {
				for _, packing := range []bool{false, true} {
					producer, err := stream.NewProducer(stream.ProducerConfig{
						Target: model, Store: noStore{}, Schema: schema, RunID: "r", Encoding: encoding, AuxLayers: []int{0, 1, 2}, DraftVocab: draft, LogitsDType: logits,
					})
					if err != nil {
						t.Fatal(a, encoding, err)
					}
					batch := &plain
					if packing {
						batch = &packed
					}
					want, err := producer.SampleBytes(batch)
					if err != nil {
						t.Fatal(a, encoding, err)
					}
					p := mustNew(t, Input{
						Schema: schema, Supervision: encoding, Hidden: info.HiddenSize, Layers: int64(info.Layers), Aux: 3, Vocab: info.VocabSize, DraftVocab: 5,
						DType: info.DType, LogitsDType: logits, MeanLen: 50, MaxLen: tokens, Packing: packing, Ranks: 1, PerRank: 1,
					})
					if p.LargestSampleBytes != want {
						t.Errorf("%s %q %s packing %v: the producer says %d bytes, the plan %d", a, encoding, logits, packing, want, p.LargestSampleBytes)
					}
				}
			}
		}
	}
}

// noStore is for a producer that only tells sizes.
type noStore struct{ sluice.Store }

func (noStore) URI() string { return "none:" }

// Whatever the run: its check accepts the caps, and refuses a byte or a sample less than the least.
func TestPlanAndRunAgree(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(r *rapid.T) {
		in := Input{
			Schema: schemaOf(t, rapid.SampledFrom(sluice.Algorithms()).Draw(r, "algorithm")), Packing: rapid.Bool().Draw(r, "packing"),
			Hidden: rapid.Int64Range(1, 20000).Draw(r, "hidden"), Aux: rapid.Int64Range(1, 8).Draw(r, "aux"),
			MaxLen: rapid.Int64Range(1, 1<<18).Draw(r, "max"), Ranks: rapid.IntRange(1, 300).Draw(r, "ranks"), PerRank: rapid.IntRange(1, 64).Draw(r, "per rank"),
			Prefetch: rapid.IntRange(0, 4).Draw(r, "prefetch"), StepsPerCheckpoint: rapid.IntRange(0, 50).Draw(r, "steps"), Prompts: rapid.Int64Range(0, 1<<24).Draw(r, "prompts"),
		}
		in.MeanLen = rapid.Int64Range(1, in.MaxLen).Draw(r, "mean")
		p, err := New(in)
		if err != nil {
			r.Skip(err) // too large for any cap
		}
		cfg := sluice.RunConfig{RunID: "r", Schema: in.Schema, Windows: &p.Run.Windows, LargestSample: p.LargestSampleBytes, StepsPerCheckpoint: in.StepsPerCheckpoint}
		accepted := func(c sluice.Caps) bool {
			cfg.Caps = c
			_, err := cfg.Resolve()
			return err == nil
		}
		c := p.Run.Caps
		switch {
		case !accepted(c):
			r.Error("the caps to set are refused")
		case !accepted(sluice.Caps{MaxBytes: p.LeastMaxBytes}) || accepted(sluice.Caps{MaxBytes: p.LeastMaxBytes - 1}):
			r.Error("least_max_bytes is not the least", p.LeastMaxBytes)
		case !accepted(sluice.Caps{MaxSamples: p.LeastMaxSamples}) || accepted(sluice.Caps{MaxSamples: p.LeastMaxSamples - 1}):
			r.Error("least_max_samples is not the least", p.LeastMaxSamples)
		case c.MaxBytes < p.LeastMaxBytes || c.MaxBytes > p.LeastMaxBytes+max(p.LeastMaxBytes/16, 1<<20):
			r.Errorf("MaxBytes %d, least %d", c.MaxBytes, p.LeastMaxBytes)
		case c.MaxSamples < p.LeastMaxSamples:
			r.Errorf("MaxSamples %d, least %d", c.MaxSamples, p.LeastMaxSamples)
		}
		ahead, err := sluice.Caps{MaxBytes: p.AheadMaxBytes, MaxSamples: p.AheadMaxSamples}.Resolve()
		if err != nil || ahead.LowWatermarkBytes < p.MeanHeldBytes || ahead.LowWatermarkSamples < p.HeldSamples {
			r.Errorf("the low marks %d and %d of the roomier caps are below what is held, %d and %d (%v)", ahead.LowWatermarkBytes, ahead.LowWatermarkSamples, p.MeanHeldBytes, p.HeldSamples, err)
		}
	})
}

// Such a run found the way past the check: its least caps fit a number, four times what it holds does not.
func TestARunWhoseRoomierCapsAreNoNumbersIsRefused(t *testing.T) {
	t.Parallel()
	_, err := New(Input{
		Schema: schemaOf(t, sluice.DFlash), Packing: true, Hidden: 3711, Aux: 4, MaxLen: 262120, MeanLen: 1, Ranks: 214, PerRank: 54, Prefetch: 3, StepsPerCheckpoint: 22,
	})
	if !errors.Is(err, sluice.ErrInvalid) || !strings.Contains(err.Error(), "ahead_max_bytes") {
		t.Errorf("got %v", err)
	}
}

func shm(total, free int64) *Disk {
	return &Disk{Path: "/dev/shm", Type: "tmpfs", TotalBytes: total, FreeBytes: free, RoomBytes: free, LimitedBy: "file system"}
}

func TestGolden(t *testing.T) {
	t.Parallel()
	long := usual(t, sluice.EAGLE3)
	long.Hidden, long.Vocab, long.MeanLen, long.MaxLen, long.Prompts, long.Ranks = 2880, 201088, 50800, 65536, 30000, 8
	long.TokensPerS, long.Nodes, long.Link = 125000, 9, 12.5e9
	long.Disk = &Disk{Path: "/mnt/nvme", Type: "xfs", TotalBytes: 3 << 40, FreeBytes: 2 << 40, RoomBytes: 2 << 40, LimitedBy: "file system"}

	dflash := usual(t, sluice.DFlash)
	dflash.Aux, dflash.Ranks, dflash.PerRank, dflash.Prompts, dflash.StepsPerCheckpoint, dflash.TokensPerS = 5, 4, 8, 100000, 10, 20000
	dflash.Disk = shm(512<<30, 500<<30)

	dspark := usual(t, sluice.DSpark)
	dspark.Aux, dspark.Packing, dspark.Prompts, dspark.Link = 5, true, 100000, 25e9

	logits := usual(t, sluice.EAGLE3)
	logits.Supervision, logits.Ranks = "logits", 2

	docker := usual(t, sluice.EAGLE3)
	docker.Disk = shm(64<<20, 64<<20)

	for name, in := range map[string]Input{"eagle3-long": long, "dflash": dflash, "dspark-packed": dspark, "eagle3-logits": logits, "does-not-fit": docker} {
		p := mustNew(t, in)
		line, err := json.MarshalIndent(p, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		for ext, got := range map[string]string{".txt": p.String(), ".json": string(line) + "\n"} {
			file := filepath.Join("testdata", name+ext)
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("%s (go test -run TestGolden -update writes it again):\n%s", file, diff)
			}
		}
	}
}

func TestVerdicts(t *testing.T) {
	t.Parallel()
	in := usual(t, sluice.EAGLE3)
	p := mustNew(t, in)
	full := need(p.Run.Caps.MaxBytes, p.Run.Caps.MaxSamples)
	least := need(p.LeastMaxBytes, p.LeastMaxSamples)
	memory := shm(1<<40, 1<<40)
	memory.RoomBytes, memory.LimitedBy = least-1, "memory cgroup"
	for name, c := range map[string]struct {
		disk            *Disk
		want            string
		fits, fitsLeast bool
	}{
		"room":             {shm(full, full), "YES: /dev/shm holds it", true, true},
		"a byte too few":   {shm(full, full-1), "JUST: /dev/shm holds it only with the least cap", false, true},
		"just the least":   {shm(full, least), "set MaxBytes to ", false, true},
		"less than that":   {shm(full, least-1), "room for 2 of the 3 largest samples that the run must be able to hold. It would fit if the file system were empty", false, false},
		"no room in all":   {shm(64<<20, 64<<20), "room for 0 of the 3 largest samples that the run must be able to hold. Give it more memory", false, false},
		"memory":           {memory, "The file system is large enough, the memory behind it is not", false, false},
		"a disk":           {&Disk{Path: "d", Type: "ext4", TotalBytes: 1, LimitedBy: "file system"}, "Choose a larger file system", false, false},
		"a network":        {&Disk{Path: "n", Type: "nfs", Network: true, TotalBytes: 1 << 50, FreeBytes: 1 << 50, RoomBytes: 1 << 50}, "NO: n lies on nfs", false, false},
		"nothing to be on": {nil, "no file system was looked at", false, false},
	} {
		in.Disk = c.disk
		p := mustNew(t, in)
		if !strings.Contains(p.Verdict, c.want) {
			t.Errorf("%s: %s\nwant %q in it", name, p.Verdict, c.want)
		}
		if !strings.HasSuffix(p.String(), p.Verdict+"\n") {
			t.Errorf("%s: the verdict is not the last line", name)
		}
		if p.Store != nil && (p.Store.Fits != c.fits || p.Store.FitsLeast != c.fitsLeast) {
			t.Errorf("%s: fits %v, least %v", name, p.Store.Fits, p.Store.FitsLeast)
		}
	}
}

func TestBadInputNamesFlagValueAndExpectation(t *testing.T) {
	t.Parallel()
	own := parse(t, `{"name":"own","version":2,"features":[{"name":"x","axes":["B","S","E*2"],"dtypes":["float16","float32"],"required":true},{"name":"y","from":"last","norm":"pre","axes":["B","S","H"],"dtypes":["float32"],"required":true}]}`)
	for want, change := range map[string]func(*Input){
		`"--hidden": is -1, want 0 to 9007199254740991`:                                             func(in *Input) { in.Hidden = -1 },
		`"--hidden": is 0 or not set, want the length of the axis H of aux_hidden_states [B,S,K*H]`: func(in *Input) { in.Hidden = 0 },
		`"--aux": is 0 or not set, want the length of the axis K of aux_hidden_states [B,S,K*H]`:    func(in *Input) { in.Aux = 0 },
		`"--vocab": is 0 or not set, want the length of the axis V of logits [B,S,V]`:               func(in *Input) { in.Vocab, in.Supervision = 0, "logits" },
		`"--draft-vocab": is 0 or not set, want the length of the axis Vd of target_probs`:          func(in *Input) { in.DraftVocab, in.Supervision = 0, "target_probs" },
		`"--draft-vocab": is 32000, want at most --vocab (100)`:                                     func(in *Input) { in.Vocab = 100 },
		`"--aux": is 6, want at most 5: a target of 4 layers`:                                       func(in *Input) { in.Layers, in.Aux = 4, 6 },
		`"--mean-len": is 0 or not set, want the mean number of tokens`:                             func(in *Input) { in.MeanLen = 0 },
		`"--mean-len": is -1, want 1 to`:                                                            func(in *Input) { in.MeanLen = -1 },
		`"--max-len": is 0 or not set, want the number of tokens`:                                   func(in *Input) { in.MaxLen = 0 },
		`"--max-len": is 9007199254740992, want 1 to 9007199254740991`:                              func(in *Input) { in.MaxLen = 1 << 53 },
		`"--mean-len": is 9000, want at most --max-len (8192)`:                                      func(in *Input) { in.MeanLen = 9000 },
		`"--ranks": is 0, want 1 to 1048576`:                                                        func(in *Input) { in.Ranks = 0 },
		`"--per-rank": is 1048577, want 1 to 1048576`:                                               func(in *Input) { in.PerRank = 1<<20 + 1 },
		`"--prefetch": is -1, want 0 to 1048576`:                                                    func(in *Input) { in.Prefetch = -1 },
		`"--steps-per-checkpoint": is -1`:                                                           func(in *Input) { in.StepsPerCheckpoint = -1 },
		`"--prompts": is -1`:                                                                        func(in *Input) { in.Prompts = -1 },
		`"--tokens-per-s": is -1`:                                                                   func(in *Input) { in.TokensPerS = -1 },
		`"--nodes": is -1`:                                                                          func(in *Input) { in.Nodes = -1 },
		`"--supervision": is "soft", want one of last_hidden_states, logits, target_probs`:          func(in *Input) { in.Supervision = "soft" },
		`"--supervision": is "none", want one of last_hidden_states`:                                func(in *Input) { in.Supervision = "none" },
		`"--supervision": is "logits", want one of none: those are what dspark version 1 has`:       func(in *Input) { in.Schema, in.Supervision = schemaOf(t, sluice.DSpark), "logits" },
		`"--dtype": is int8, want one of [bfloat16 float16 float32] for aux_hidden_states`:          func(in *Input) { in.DType = sluice.Int8 },
		`"--logits-dtype": is float64, want one of [bfloat16 float16 float32] for logits`:           func(in *Input) { in.LogitsDType, in.Supervision = sluice.Float64, "logits" },
		`"--packing": is set, but own version 2 has no packing features`:                            func(in *Input) { in.Schema, in.Packing = own, true },
		`"--axis E=N": is 0 or not set, want the length of the axis E of x [B,S,E*2]`:               func(in *Input) { in.Schema = own },
		`"--axis": names H, want --hidden for it`:                                                   func(in *Input) { in.Axes = map[string]int64{"H": 3} },
		`"--axis": names E, which is no axis of eagle3 version 1`:                                   func(in *Input) { in.Axes = map[string]int64{"E": 3} },
		`"--axis": E is 0, want 1 to`:                                                               func(in *Input) { in.Schema, in.Axes = own, map[string]int64{"E": 0} },
		`"--dtype": is bfloat16, want one of [float32] for y`:                                       func(in *Input) { in.Schema, in.Axes = own, map[string]int64{"E": 7} },
		`"--schema": is missing`:                                                                    func(in *Input) { in.Schema = nil },
		`"--schema": has input_ids as [int32], want int64 in it`: func(in *Input) {
			in.Schema = parse(t, `{"name":"o","version":1,"features":[{"name":"input_ids","from":"input_ids","axes":["B","S"],"dtypes":["int32"],"required":true}]}`)
		},
		`"--schema": has no bytes in a sample`: func(in *Input) {
			in.Schema = parse(t, `{"name":"o","version":1,"features":[{"name":"z","axes":["B","S"],"dtypes":["int32"]}]}`)
		},
	} {
		in := usual(t, sluice.EAGLE3)
		change(&in)
		_, err := New(in)
		if err == nil || !strings.Contains(err.Error(), want) || !errors.Is(err, sluice.ErrInvalid) {
			t.Errorf("got %v\nwant %s", err, want)
		}
	}
}

func TestOverflowIsRefusedByName(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]func(*Input){
		`"aux_hidden_states": is 9007199254740991 times 9007199254740991`:             func(in *Input) { in.Aux, in.Hidden = most, most },
		`"aux_hidden_states": with 8192 tokens it is too large: spec: `:               func(in *Input) { in.Hidden = 1 << 38 },
		`"epoch_tokens": is 9007199254740991 times 2000`:                              func(in *Input) { in.Prompts = most },
		`"epoch_bytes": is 4000000000000 times 65584000, want less than 2^63`:         func(in *Input) { in.Prompts = 4e12 },
		`"bytes_per_s": is 9007199254740991 times 65584000`:                           func(in *Input) { in.TokensPerS = most },
		`run "plan": largest_sample is 268632064, and 2 windows of 1099511627776 `:    func(in *Input) { in.Ranks, in.PerRank = 1<<20, 1<<20 },
		`run "plan": largest_sample is 268632064, and 1048577 windows of 1048576 sam`: func(in *Input) { in.Ranks, in.StepsPerCheckpoint = 1<<20, 1<<20 },
	} {
		in := usual(t, sluice.EAGLE3)
		change(&in)
		if _, err := New(in); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v\nwant %s", err, want)
		}
	}
	var m meter
	if m.plus("sum", math.MaxInt64, 1); m.err == nil || !strings.Contains(m.err.Error(), `"sum"`) {
		t.Error(m.err)
	}
	if m = (meter{}); m.plus("sum", math.MaxInt64-1, 1) != math.MaxInt64 || m.times("p", 0, math.MaxInt64) != 0 || m.err != nil {
		t.Error(m.err)
	}
}

func TestASchemaOfOnesOwn(t *testing.T) {
	t.Parallel()
	schema := parse(t, `{"name":"own","version":1,"features":[
		{"name":"gate","axes":["B","S","E*2"],"dtypes":["float16","float32"],"required":true},
		{"name":"attention","axes":["B","S","S"],"dtypes":["uint8"],"required":true},
		{"name":"prefix","axes":["B","16","H"],"dtypes":["bfloat16"],"required":true},
		{"name":"extra","axes":["B","S"],"dtypes":["int64"]}]}`)
	p := mustNew(t, Input{Schema: schema, Hidden: 8, Axes: map[string]int64{"E": 4}, MeanLen: 10, MaxLen: 20, Ranks: 1, PerRank: 1})
	// gate: float32, the largest that is allowed; attention: a square; prefix: the same in every sample; extra: in none.
	if p.BytesPerToken != 32 || p.MeanSampleBytes != 320+100+256 || p.LargestSampleBytes != 640+400+256 {
		t.Errorf("%+v", p)
	}
	if s := p.String(); !strings.Contains(s, "grows faster than the tokens") || !strings.Contains(s, "nothing special") {
		t.Error(s)
	}
	if !strings.Contains(p.String(), "\nat a service: sluice runs create RUN --schema FILE --max-bytes ") {
		t.Errorf("the command does not ask for the schema:\n%s", p)
	}
}

func TestPackedRowsAreFull(t *testing.T) {
	t.Parallel()
	in := usual(t, sluice.EAGLE3)
	in.Packing, in.Prompts = true, 1000
	p := mustNew(t, in)
	const token = 32<<10 + 24 + 16 // position_ids and doc_remaining
	if p.EpochSamples != 245 || p.EpochTokens != 2e6 || p.MeanSampleBytes != token*8192+8*5 || p.LargestSampleBytes != token*8192+8*8192 {
		t.Errorf("%d samples, %d tokens, mean %d, largest %d", p.EpochSamples, p.EpochTokens, p.MeanSampleBytes, p.LargestSampleBytes)
	}
}

func TestRates(t *testing.T) {
	t.Parallel()
	in := usual(t, sluice.EAGLE3)
	in.TokensPerS, in.Nodes, in.Link, in.Prompts = 100000, 4, 12.5e9, 1000
	p := mustNew(t, in)
	r := p.Rate
	if r.SamplesPerS != 50 || r.BytesPerS != 3279200000 || r.GBPerSIn != 3.2792 || r.GBPerSNode != 0.8198 || r.EpochSeconds != 20 || p.Link.PercentIn != 26.2336 || p.Link.PercentNode != 6.5584 {
		t.Errorf("%+v %+v", r, p.Link)
	}
	if want := round(float64(p.Run.Caps.MaxBytes) / 3279200000); r.SecondsToFull != want || r.SecondsToHigh >= want {
		t.Errorf("full after %v s, high mark after %v s", r.SecondsToFull, r.SecondsToHigh)
	}
	if p.Link.MaxTokensPerS != 381190 { // 12.5e9 / 32792
		t.Errorf("a link takes in %d tokens/s", p.Link.MaxTokensPerS)
	}
}

func TestParseLink(t *testing.T) {
	t.Parallel()
	for s, want := range map[string]int64{"100Gbit": 12.5e9, "100Gbit/s": 12.5e9, "25GB/s": 25e9, "25GB": 25e9, "400Gbps": 50e9, "1.5 GiB/s": 3 << 29, "8Mbit": 1e6, "0.8Tbit/s": 100e9} {
		if got, err := ParseLink(s); err != nil || got != want {
			t.Errorf("%q is %d (%v), want %d", s, got, err, want)
		}
	}
	for _, s := range []string{"", "100", "100Gb", "100gbit", "-1GB/s", "0GB/s", "1e3GB", "100Gbps/s", "999999999TB/s", "GB/s", "1GB/h"} {
		if got, err := ParseLink(s); err == nil || !strings.Contains(err.Error(), `"--link": is "`+s+`", want a number and one of GB, Gbit`) {
			t.Errorf("%q is %d (%v), want a refusal", s, got, err)
		}
	}
}

func TestNumbersForPeople(t *testing.T) {
	t.Parallel()
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1536: "1.50 KiB", 5 << 50: "5.00 PiB", math.MaxInt64: "8192.00 PiB"} {
		if got := size(n); got != want {
			t.Errorf("size %d is %s, want %s", n, got, want)
		}
	}
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567"} {
		if got := count(n); got != want {
			t.Errorf("%d is %s, want %s", n, got, want)
		}
	}
	for f, want := range map[float64]string{0: "0", 0.0123: "0.0123", 1: "1.00", 12.34: "12.3", 123.4: "123", 12345.6: "12,346"} {
		if got := decimal(f); got != want {
			t.Errorf("%v is %s, want %s", f, got, want)
		}
	}
}
