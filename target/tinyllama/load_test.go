package tinyllama

import (
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/target/targettest"
)

// refused checks that loading fails with the kind, in a message that holds all of the words.
func refused(t *testing.T, fsys fs.FS, kind error, words ...string) {
	t.Helper()
	m, err := Load(fsys)
	if m != nil || !errors.Is(err, kind) {
		t.Errorf("Load: model %v, error %v, want %v", m != nil, err, kind)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("the message does not say %q: %v", w, err)
		}
	}
}

func TestLoadNamesTheFieldOfConfigThatItRefuses(t *testing.T) {
	t.Parallel()
	folder := small.folder(small.random(1))
	for _, c := range []struct {
		field string
		value any // nil removes the field
		words []string
	}{
		{"architectures", []string{"MistralForCausalLM"}, []string{"MistralForCausalLM", "LlamaForCausalLM"}},
		{"architectures", "LlamaForCausalLM", []string{"LlamaForCausalLM"}},
		{"hidden_act", "gelu", []string{`"gelu"`, `"silu"`}},
		{"rope_scaling", map[string]any{"type": "linear", "factor": 2}, []string{"linear", "not supported"}},
		{"rope_scaling", map[string]any{"factor": 2}, []string{"not supported"}},
		{"rope_scaling", 7, []string{"7"}},
		{"rope_parameters", map[string]any{"rope_type": "yarn"}, []string{"yarn", "not supported"}},
		{"rope_parameters", map[string]any{"rope_type": "default", "rope_theta": 0}, []string{"rope_theta"}},
		{"attention_bias", true, []string{"not supported"}},
		{"mlp_bias", true, []string{"not supported"}},
		{"mlp_bias", "no", []string{`"no"`, "true or false"}},
		{"quantization_config", map[string]any{"bits": 4}, []string{"not supported"}},
		{"hidden_size", nil, []string{"missing"}},
		{"hidden_size", 0, []string{"0", "1 to 16384"}},
		{"hidden_size", -4, []string{"-4"}},
		{"hidden_size", 24.5, []string{"24.5", "integer"}},
		{"hidden_size", "24", []string{`"24"`, "integer"}},
		{"hidden_size", 1 << 40, []string{"1099511627776"}},
		{"intermediate_size", nil, []string{"missing"}},
		{"num_hidden_layers", 513, []string{"513", "512"}},
		{"num_attention_heads", nil, []string{"missing"}},
		{"num_key_value_heads", 3, []string{"3", "divisor", "4"}},
		{"num_key_value_heads", 0, []string{"0"}},
		{"head_dim", 7, []string{"7", "even"}},
		{"head_dim", 0, []string{"0"}},
		{"vocab_size", nil, []string{"missing"}},
		{"vocab_size", 1<<20 + 1, []string{"1048577"}},
		{"max_position_embeddings", 0, []string{"0"}},
		{"rms_norm_eps", 0, []string{"0", "above 0"}},
		{"rms_norm_eps", "small", []string{"small"}},
		{"rope_theta", -1, []string{"-1"}},
		{"rope_theta", 1e300, []string{"1e+300"}},
		{"tie_word_embeddings", 1, []string{"true or false"}},
	} {
		config := small.config()
		config[c.field] = c.value
		changed := maps.Clone(folder)
		changed[configFile] = &fstest.MapFile{Data: toJSON(config)}
		refused(t, changed, sluice.ErrInvalid, append(c.words, configFile, c.field)...)
	}

	config := small.config()
	delete(config, "head_dim")
	config["hidden_size"] = 26
	refused(t, fstest.MapFS{configFile: {Data: toJSON(config)}}, sluice.ErrInvalid, "hidden_size", "26", "4 heads", "head_dim")
	delete(config, "architectures")
	config["model_type"] = "gpt2"
	refused(t, fstest.MapFS{configFile: {Data: toJSON(config)}}, sluice.ErrInvalid, "architectures", "gpt2")
	maps.Copy(config, map[string]any{"model_type": "llama", "head_dim": 1024, "hidden_size": 1 << 14, "num_attention_heads": 512, "num_key_value_heads": 512})
	refused(t, fstest.MapFS{configFile: {Data: toJSON(config)}}, sluice.ErrInvalid, configFile, "parameters", "2147483648")
}

func TestConfigHasTheDefaultsOfTransformers(t *testing.T) {
	t.Parallel()
	got, err := parseConfig([]byte(`{"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
		"num_attention_heads": 8, "vocab_size": 100, "rope_scaling": null, "head_dim": null, "unknown": [1]}`))
	want := config{hidden: 64, intermediate: 96, layers: 2, heads: 8, kvHeads: 8, headDim: 8, vocab: 100, maxTokens: 2048, eps: 1e-6, theta: 10000}
	if err != nil || got != want {
		t.Errorf("%+v, error %v, want %+v", got, err, want)
	}
	got, err = parseConfig([]byte(`{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
		"num_attention_heads": 8, "vocab_size": 100, "rope_parameters": {"rope_type": "default", "rope_theta": 500000}}`))
	want.theta = 500000
	if err != nil || got != want {
		t.Errorf("as transformers 5 writes it: %+v, error %v, want %+v", got, err, want)
	}
}

func TestLoadRefusesAFolderThatIsNoModel(t *testing.T) {
	t.Parallel()
	good := small.folder(small.random(1))
	with := func(file string, data []byte) fstest.MapFS {
		c := maps.Clone(good)
		if data == nil {
			delete(c, file)
		} else {
			c[file] = &fstest.MapFile{Data: data}
		}
		return c
	}
	refused(t, fstest.MapFS{}, sluice.ErrNotFound, configFile, "does not exist", "Hugging Face folder")
	refused(t, with(configFile, []byte("name: llama")), sluice.ErrInvalid, configFile, "not a JSON object")
	refused(t, with(configFile, []byte("[]")), sluice.ErrInvalid, configFile, "not a JSON object")
	refused(t, with(configFile, []byte("null")), sluice.ErrInvalid, configFile, "null")
	refused(t, with(configFile, make([]byte, maxConfigBytes+1)), sluice.ErrInvalid, configFile, "larger")
	refused(t, with(modelFile, nil), sluice.ErrNotFound, modelFile)
	refused(t, with(modelFile, []byte{}), sluice.ErrCorrupt, modelFile)
	refused(t, with(modelFile, []byte("version https://git-lfs.github.com/spec/v1\n")), sluice.ErrCorrupt, modelFile)
	whole := good[modelFile].Data
	for _, n := range []int{4, 8, 100, len(whole) / 2, len(whole) - 1} {
		refused(t, with(modelFile, whole[:n]), sluice.ErrCorrupt, modelFile)
	}
	refused(t, with(modelFile, slices.Concat(whole, []byte{0})), sluice.ErrCorrupt, modelFile)
	folder := maps.Clone(good)
	folder[configFile] = &fstest.MapFile{Mode: fs.ModeDir}
	refused(t, folder, sluice.ErrInvalid, configFile, "not a regular file")
}

func TestLoadNamesTheTensorThatItRefuses(t *testing.T) {
	t.Parallel()
	name := layerTensor(2, "self_attn.k_proj")
	change := func(change func(weights)) fstest.MapFS {
		w := small.random(1)
		change(w)
		return small.folder(w)
	}
	refused(t, change(func(w weights) { delete(w, name) }), sluice.ErrInvalid, modelFile, name, "no tensor")
	refused(t, change(func(w weights) { delete(w, "lm_head.weight") }), sluice.ErrInvalid, modelFile, "lm_head.weight")
	refused(t, change(func(w weights) { w[name] = sluice.NewTensor(sluice.Float32, 24, 16) }), sluice.ErrInvalid, modelFile, name, "[24 16]", "[16 24]")
	refused(t, change(func(w weights) { w[name] = sluice.NewTensor(sluice.Float32, 16*24) }), sluice.ErrInvalid, modelFile, name, "[384]", "[16 24]")
	refused(t, change(func(w weights) { w[name] = sluice.NewTensor(sluice.Float64, 16, 24) }), sluice.ErrInvalid, modelFile, name, "F64", "BF16")
	refused(t, change(func(w weights) { sluice.View[float32](w[name])[17] = float32(math.Inf(-1)) }), sluice.ErrInvalid, modelFile, name, "-Inf", "17")
	bias := "model.layers.0.self_attn.q_proj.bias"
	refused(t, change(func(w weights) { w[bias] = sluice.NewTensor(sluice.Float32, 32) }), sluice.ErrInvalid, modelFile, bias, "does not have")
	extra := layerTensor(5, "input_layernorm")
	refused(t, change(func(w weights) { w[extra] = sluice.NewTensor(sluice.Float32, 24) }), sluice.ErrInvalid, modelFile, extra, "5 layers")

	if _, err := Load(change(func(w weights) {
		w["model.layers.0.self_attn.rotary_emb.inv_freq"] = sluice.NewTensor(sluice.Float32, 4)
	})); err != nil {
		t.Errorf("with the rotary frequencies of old checkpoints: %v", err)
	}
}

// sharded spreads weights over files, with an index.
func (s shape) sharded(w weights, files ...string) fstest.MapFS {
	parts, index := map[string]weights{}, map[string]string{}
	for i, name := range slices.Sorted(maps.Keys(w)) {
		file := files[i%len(files)]
		if parts[file] == nil {
			parts[file] = weights{}
		}
		parts[file][name], index[name] = w[name], file
	}
	folder := fstest.MapFS{
		configFile: {Data: toJSON(s.config())},
		indexFile:  {Data: toJSON(map[string]any{"metadata": map[string]any{"total_size": 1}, "weight_map": index})},
	}
	for file, part := range parts {
		folder[file] = &fstest.MapFile{Data: part.file()}
	}
	return folder
}

func TestShardsAreTheSameModel(t *testing.T) {
	t.Parallel()
	w := small.random(1)
	one, err := Load(small.folder(w))
	if err != nil {
		t.Fatal(err)
	}
	many, err := Load(small.sharded(w, "a.safetensors", "b.safetensors", "c.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	if one.Info() != many.Info() {
		t.Errorf("%+v in shards, %+v in one file", many.Info(), one.Info())
	}
}

func TestLoadRefusesABadIndex(t *testing.T) {
	t.Parallel()
	w := small.random(1)
	with := func(change func(folder fstest.MapFS, weightMap map[string]string)) fstest.MapFS {
		folder := small.sharded(w, "a.safetensors", "b.safetensors")
		var index struct {
			WeightMap map[string]string `json:"weight_map"`
		}
		if err := json.Unmarshal(folder[indexFile].Data, &index); err != nil {
			t.Fatal(err)
		}
		change(folder, index.WeightMap)
		folder[indexFile] = &fstest.MapFile{Data: toJSON(index)}
		return folder
	}
	const norm = "model.norm.weight"
	for _, name := range []string{"../a.safetensors", "/etc/passwd", "sub/a.safetensors", `..\a.safetensors`, "", ".", "a.bin"} {
		refused(t, with(func(_ fstest.MapFS, m map[string]string) { m[norm] = name }), sluice.ErrInvalid, indexFile, norm, "bare name")
	}
	refused(t, with(func(_ fstest.MapFS, m map[string]string) { m[norm] = "z.safetensors" }), sluice.ErrNotFound, "z.safetensors")
	refused(t, with(func(_ fstest.MapFS, m map[string]string) { m["extra"] = "a.safetensors" }), sluice.ErrInvalid, "a.safetensors", `no tensor "extra"`)
	refused(t, with(func(_ fstest.MapFS, m map[string]string) { delete(m, norm) }), sluice.ErrInvalid, indexFile, norm)
	refused(t, with(func(f fstest.MapFS, _ map[string]string) { f["b.safetensors"].Data = f["b.safetensors"].Data[:50] }), sluice.ErrCorrupt, "b.safetensors")
	refused(t, with(func(_ fstest.MapFS, m map[string]string) { clear(m) }), sluice.ErrInvalid, indexFile, "weight_map")

	folder := small.sharded(w, "a.safetensors")
	folder[indexFile].Data = []byte(`{"weight_map": ["a"]}`)
	refused(t, folder, sluice.ErrInvalid, indexFile, "weight_map")
}

// plain hides everything of a file system but what fs.FS asks for, so that files have no ReadAt.
type plain struct{ fs.FS }

type plainFile struct{ fs.File }

func (p plain) Open(name string) (fs.File, error) {
	f, err := p.FS.Open(name)
	return plainFile{f}, err
}

func TestLoadTakesAnyFileSystem(t *testing.T) {
	t.Parallel()
	folder := small.folder(small.random(1))
	want, err := Load(folder)
	if err != nil {
		t.Fatal(err)
	}
	got, err := Load(plain{folder})
	if err != nil || got.Info() != want.Info() {
		t.Errorf("without random access: %+v, error %v, want %+v", got, err, want.Info())
	}
}

func TestOpenNamesTheFolder(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "my-model")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir); !errors.Is(err, sluice.ErrNotFound) || !strings.Contains(err.Error(), filepath.Join(dir, configFile)) {
		t.Errorf("an empty folder: %v, want ErrNotFound with the path", err)
	}
	for file, f := range small.folder(small.random(1)) {
		if err := os.WriteFile(filepath.Join(dir, file), f.Data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	m, err := Open(dir)
	if err != nil || m.Info().Name != "my-model" {
		t.Errorf("Open: %v, error %v", m, err)
	}
	if _, err := Open(filepath.Join(dir, "none")); !errors.Is(err, sluice.ErrNotFound) {
		t.Errorf("a folder that is not there: %v", err)
	}
	if _, err := Open(filepath.Join(dir, configFile)); !errors.Is(err, sluice.ErrInvalid) || !strings.Contains(err.Error(), "not a folder") {
		t.Errorf("a file: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, configFile), []byte(`{"model_type": "llama"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir); err == nil || !strings.Contains(err.Error(), filepath.Join(dir, configFile)) {
		t.Errorf("a bad config: %v, want the path", err)
	}
}

func TestTheFingerprintIsOfWeightsAndArithmetic(t *testing.T) {
	t.Parallel()
	base := small.model(t).Info().Fingerprint
	fingerprint := func(w weights, field string, value any) string {
		folder := small.folder(w)
		if field != "" {
			config := small.config()
			config[field] = value
			folder[configFile].Data = toJSON(config)
		}
		m, err := Load(folder)
		if err != nil {
			t.Fatal(err)
		}
		return m.Info().Fingerprint
	}
	if got := fingerprint(small.random(1), "use_cache", false); got != base {
		t.Error("a setting that enters nothing changes it")
	}
	w := small.random(1)
	w[layerTensor(4, "mlp.down_proj")].Data[0] ^= 1
	seen := map[string]string{base: "the model"}
	for what, got := range map[string]string{
		"a bit of a weight": fingerprint(w, "", nil),
		"rope_theta":        fingerprint(small.random(1), "rope_theta", 20000),
		"rms_norm_eps":      fingerprint(small.random(1), "rms_norm_eps", 1e-6),
		"tied":              fingerprint(small.random(1), "tie_word_embeddings", true),
	} {
		if other, ok := seen[got]; ok {
			t.Errorf("%s does not change it: as %s", what, other)
		}
		seen[got] = what
	}
}

func TestWeightsOfSixteenBitsAreWidenedExactly(t *testing.T) {
	t.Parallel()
	for _, dtype := range []sluice.DType{sluice.Float16, sluice.BFloat16} {
		wide, narrow := small.random(1), weights{}
		for name, full := range wide {
			n := sluice.NewTensor(dtype, full.Shape...)
			for i, v := range sluice.View[float32](full) {
				// Values that both types hold: 4 significant bits, exponents from -8 to 3.
				_, exponent := math.Frexp(float64(v))
				scale := math.Ldexp(1, min(max(exponent, -8), 3)-4)
				short := float32(math.Round(float64(v)/scale) * scale)
				sluice.View[float32](full)[i] = short
				bits := math.Float32bits(short)
				if dtype == sluice.BFloat16 {
					sluice.View[uint16](n)[i] = uint16(bits >> 16)
				} else if short != 0 {
					sluice.View[uint16](n)[i] = uint16(bits>>31<<15 | (bits>>23&0xff-112)<<10 | bits>>13&0x3ff)
				}
			}
			narrow[name] = n
		}
		ids := small.text(1, 10)
		var outs []sluice.Tensor
		for _, w := range []weights{wide, narrow} {
			m, err := Load(small.folder(w))
			if err != nil {
				t.Fatal(err)
			}
			out, err := m.Forward(t.Context(), targettest.Batch(0, ids), sluice.Want{Logits: true})
			if err != nil {
				t.Fatal(err)
			}
			outs = append(outs, out.Logits)
		}
		if !slices.Equal(outs[0].Data, outs[1].Data) {
			t.Errorf("%s weights give other logits than the same weights in float32", dtype)
		}
	}
}

func TestFromHalf(t *testing.T) {
	t.Parallel()
	for bits, want := range map[uint16]float32{
		0x0000: 0, 0x3c00: 1, 0xbc00: -1, 0x3555: 0.333251953125, 0x7bff: 65504, 0x0400: 6.103515625e-05,
		0x03ff: 6.097555160522461e-05, 0x0001: 5.960464477539063e-08, 0x8001: -5.960464477539063e-08,
		0x7c00: float32(math.Inf(1)), 0xfc00: float32(math.Inf(-1)),
	} {
		if got := fromHalf(bits); got != want {
			t.Errorf("%#04x is %v, want %v", bits, got, want)
		}
	}
	if v := fromHalf(0x7e00); v == v {
		t.Errorf("0x7e00 is %v, want NaN", v)
	}
	if v := fromHalf(0x8000); v != 0 || !math.Signbit(float64(v)) {
		t.Errorf("0x8000 is %v, want -0", v)
	}
}

// Whatever a config says, parsing it ends with a configuration within its limits, or a refusal that names the file.
func FuzzConfig(f *testing.F) {
	f.Add(toJSON(small.config()))
	f.Add([]byte(`{"model_type":"llama","hidden_size":8,"intermediate_size":8,"num_hidden_layers":1,"num_attention_heads":2,"vocab_size":9}`))
	f.Add([]byte(`{"architectures":["LlamaForCausalLM"],"rope_parameters":{"rope_theta":1e9,"rope_type":"default"}}`))
	f.Add([]byte(`{"hidden_size":1e99,"rope_scaling":{"type":1}}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := parseConfig(data)
		if err != nil {
			if !errors.Is(err, sluice.ErrInvalid) || !strings.Contains(err.Error(), configFile) || c != (config{}) {
				t.Errorf("config %+v beside error %v", c, err)
			}
			return
		}
		in := func(v, high int) bool { return v >= 1 && v <= high }
		if !in(c.hidden, maxHidden) || !in(c.intermediate, maxIntermediate) || !in(c.layers, maxLayers) || !in(c.heads, maxHeads) || !in(c.kvHeads, c.heads) ||
			!in(c.headDim, maxHeadDim) || !in(c.vocab, maxVocab) || !in(c.maxTokens, maxPositions) || c.heads%c.kvHeads != 0 || c.headDim%2 != 0 ||
			!(c.eps > 0 && c.eps <= 1) || !(c.theta > 0 && c.theta <= math.MaxFloat32) || c.parameters() < 1 {
			t.Errorf("out of bounds: %+v", c)
		}
	})
}
