package tinyllama

import (
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
	"github.com/sluice-ml/sluice/target/targettest"
)

// What tools/tinyllama/reference.py computed with PyTorch in float64, for every folder in testdata and for the shipped model.
func TestForwardAgreesWithPyTorch(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(filepath.Join("testdata", "expected-*.safetensors"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no expectations in testdata (error %v); tools/tinyllama/reference.py makes them", err)
	}
	checked := map[string]bool{}
	for _, file := range files {
		name := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "expected-"), ".safetensors")
		folder := strings.TrimSuffix(name, "-packed")
		checked[folder] = true
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join("testdata", folder)
			if folder == "austen" {
				dir = folder
			}
			m, err := Open(dir)
			if err != nil {
				t.Fatal(err)
			}
			compareWithGolden(t, m, file)
		})
	}
	entries, err := os.ReadDir("testdata")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if _, err := os.Stat(filepath.Join("testdata", e.Name(), configFile)); err == nil && !checked[e.Name()] {
			t.Errorf("testdata/%s has no expectations", e.Name())
		}
	}
	if !checked["austen"] {
		t.Error("the shipped model has no expectations")
	}
}

func compareWithGolden(t *testing.T, m *Model, file string) {
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	golden, err := safetensors.Read(f, info.Size())
	if err != nil {
		t.Fatal(err)
	}
	defer golden.Close()
	get := func(name string) sluice.Tensor {
		t.Helper()
		feature, err := golden.Feature(name)
		if err != nil {
			t.Fatal(err)
		}
		return feature.Tensor
	}
	batch := goldenBatch(get, strings.Contains(file, "-packed"))

	most := 0.0
	check := func(name string, got sluice.Tensor) {
		t.Helper()
		want := get(name)
		if !got.Equal(want.Spec) {
			t.Errorf("%s is %s, want %s", name, got.Spec, want.Spec)
			return
		}
		d := deviation(sluice.View[float32](got), sluice.View[float32](want))
		if d > 1e-4 {
			t.Errorf("%s deviates by %.2g of its largest value", name, d)
		}
		most = max(most, d)
	}
	forward := func(want sluice.Want) *sluice.TargetOutput {
		t.Helper()
		out, err := m.Forward(t.Context(), batch, want)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	layers := 0
	for _, e := range golden.Header().Entries {
		if text, ok := strings.CutPrefix(e.Name, "hidden_"); ok {
			layer, err := strconv.Atoi(text)
			if err != nil {
				t.Fatal(err)
			}
			check(e.Name, forward(sluice.Want{AuxLayers: []int{layer}}).Aux)
			layers++
		}
	}
	if layers == 0 {
		t.Error("no hidden states are expected")
	}
	check("last_pre", forward(sluice.Want{Last: sluice.PreNorm}).Last)
	check("last_post", forward(sluice.Want{Last: sluice.PostNorm}).Last)
	check("logits", forward(sluice.Want{Logits: true}).Logits)
	t.Logf("%d layers; at most %.2g of a tensor's largest value", layers, most)
}

// goldenBatch rebuilds the batch from ids, mask and document lengths.
func goldenBatch(get func(string) sluice.Tensor, packed bool) *sluice.PromptBatch {
	ids, mask := get("input_ids"), sluice.View[int64](get("attention_mask"))
	rows, cols := int(ids.Shape[0]), int(ids.Shape[1])
	if !packed {
		return &sluice.PromptBatch{InputIDs: ids, AttentionMask: get("attention_mask"), LossMask: get("attention_mask")}
	}
	lens := get("seq_lens")
	docs := int(lens.Shape[1])
	var out [][][]int64
	for r := range rows {
		row, at := [][]int64{}, r*cols
		for _, n := range sluice.View[int64](lens)[r*docs : (r+1)*docs] {
			if n > 0 {
				row = append(row, sluice.View[int64](ids)[at:at+int(n)])
				at += int(n)
			}
		}
		if n := at - r*cols; n < cols && mask[at] != 0 {
			panic("the documents do not cover the row")
		}
		out = append(out, row)
	}
	b := targettest.Pack(cols, out...)
	if !slices.Equal(sluice.View[int64](b.PositionIDs), sluice.View[int64](get("position_ids"))) {
		panic("position_ids are not those of seq_lens")
	}
	return b
}

// heldOut is from "The Watsons" and "Lady Susan" by Jane Austen (public domain), neither of which is in the training text.
const heldOut = `The first winter assembly in the town of D. in Surrey was to be held on Tuesday, October 13th, and it was generally expected to be a very good one. A long list of county families was confidently run over as sure of attending, and sanguine hopes were entertained that the Osbornes themselves would be there. The Edwards's invitation to the Watsons followed, of course. The Edwards's were people of fortune, who lived in the town and kept their coach. The Watsons inhabited a village about three miles distant, were poor, and had no close carriage; and ever since there had been balls in the place, the former were accustomed to invite the latter to dress, dine, and sleep at their house on every monthly return throughout the winter. My dear Brother, I can no longer refuse myself the pleasure of profiting by your kind invitation when we last parted of spending some weeks with you at Churchhill.`

// crossEntropy is the mean negative log-probability that the model gives to every id after the first, in nats.
func crossEntropy(t *testing.T, m *Model, ids []int64) float64 {
	t.Helper()
	out, err := m.Forward(t.Context(), targettest.Batch(0, ids), sluice.Want{Logits: true})
	if err != nil {
		t.Fatal(err)
	}
	logits, v, sum := sluice.View[float32](out.Logits), m.cfg.vocab, 0.0
	for i, next := range ids[1:] {
		row := logits[i*v : (i+1)*v]
		total, high := 0.0, slices.Max(row)
		for _, l := range row {
			total += math.Exp(float64(l - high))
		}
		sum += math.Log(total) - float64(row[next]-high)
	}
	return sum / float64(len(ids)-1)
}

func unigramEntropy(text string) float64 {
	var counts [256]float64
	for _, b := range []byte(text) {
		counts[b]++
	}
	h := 0.0
	for _, c := range counts {
		if c > 0 {
			h -= c / float64(len(text)) * math.Log(c/float64(len(text)))
		}
	}
	return h
}

func TestTheShippedModelHasLearned(t *testing.T) {
	t.Parallel()
	m, err := Shipped()
	if err != nil {
		t.Fatal(err)
	}
	ids := []int64{BOS}
	for _, b := range []byte(heldOut) {
		ids = append(ids, int64(b))
	}
	got, unigram := crossEntropy(t, m, ids), unigramEntropy(heldOut)
	t.Logf("held-out text: %.3f nats a byte; unigram entropy %.3f", got, unigram)
	if got > 2 || unigram < 2.7 {
		t.Errorf("%.3f nats a byte, want below 2.0, with a unigram entropy (%.3f) above 2.7", got, unigram)
	}
	backwards := ids[1:257]
	slices.Reverse(backwards)
	if b := crossEntropy(t, m, backwards); b < 2.7 {
		t.Errorf("%.3f nats a byte backwards, want above 2.7: rows seem to see what follows", b)
	}
}

func TestTheShippedModelPassesTheSuite(t *testing.T) {
	t.Parallel()
	targettest.Run(t, targettest.Harness{New: func(t *testing.T) sluice.Target {
		m, err := Shipped()
		if err != nil {
			t.Fatal(err)
		}
		return m
	}})
}

func TestShippedDescribesItself(t *testing.T) {
	t.Parallel()
	m, err := Shipped()
	if err != nil {
		t.Fatal(err)
	}
	want := sluice.TargetInfo{
		Name: "austen", Fingerprint: m.fingerprint, Tokenizer: tokenizerFingerprint,
		Layers: 8, HiddenSize: 128, VocabSize: 264, MaxTokens: 1024, DType: sluice.Float32, Concurrent: true,
	}
	if got := m.Info(); got != want {
		t.Errorf("Info is %+v, want %+v", got, want)
	}
	opened, err := Open("austen")
	if err != nil {
		t.Fatal(err)
	}
	if opened.Info() != m.Info() {
		t.Errorf("Open gives %+v, Shipped %+v", opened.Info(), m.Info())
	}
	if _, err := fs.Stat(Checkpoint(), "training.json"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("training.json is embedded (error %v); it is for people who read the repository", err)
	}
}
