package tinyllama

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
)

const (
	configFile = "config.json"
	modelFile  = "model.safetensors"
	indexFile  = "model.safetensors.index.json"

	maxConfigBytes = 1 << 20
	maxIndexBytes  = 64 << 20
	maxShards      = 4096
	// maxParameters bounds the weights in memory to 8 GiB; the package is for models far below that.
	maxParameters = 1 << 31
)

// Open loads a model from a folder in the file system, whose last element becomes the model's name. See [Load].
func Open(dir string) (*Model, error) {
	info, err := os.Stat(dir)
	if err != nil {
		return nil, medium(dir, err)
	}
	if !info.IsDir() {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: opOpen, Subject: dir, Detail: "is not a folder"}
	}
	name := filepath.Base(dir)
	if abs, err := filepath.Abs(dir); err == nil {
		name = filepath.Base(abs)
	}
	return load(os.DirFS(dir), name, dir)
}

// Load loads a model from a Hugging Face folder: config.json of a LlamaForCausalLM, and its weights in float32, float16 or bfloat16,
// in model.safetensors or in the shards that model.safetensors.index.json lists.
//
// It reads everything it needs before it returns and keeps no file open. A file that is not there is [sluice.ErrNotFound]; one that is not what
// it should be is [sluice.ErrInvalid] or, if it breaks the safetensors format, [sluice.ErrCorrupt]; the message names the file, and the field or
// the tensor. Weights that are not finite, tensors that the architecture doesn't have, and settings that would change the arithmetic in a way that isn't
// built are refused.
func Load(fsys fs.FS) (*Model, error) { return load(fsys, "tinyllama", "") }

func load(fsys fs.FS, name, dir string) (*Model, error) {
	l := &loader{fsys: fsys, dir: dir, sum: sha256.New()}
	defer l.close()
	text, err := l.readAll(configFile, maxConfigBytes)
	if err != nil {
		return nil, err
	}
	cfg, err := parseConfig(text)
	if err != nil {
		if e, ok := errors.AsType[*sluice.Error](err); ok {
			e.Subject = l.path(configFile)
		}
		return nil, err
	}
	if n := cfg.parameters(); n > maxParameters {
		return nil, &sluice.Error{Kind: sluice.Invalid, Op: opOpen, Subject: l.path(configFile), Detail: fmt.Sprintf("describes %d parameters, at most %d are supported", n, int64(maxParameters))}
	}
	if err := l.openWeights(); err != nil {
		return nil, err
	}
	if err := l.checkNames(&cfg); err != nil {
		return nil, err
	}
	return l.build(name, cfg)
}

// parameters is the number of weights. The limits of config keep it from overflowing.
func (c *config) parameters() int64 {
	h, width := int64(c.hidden), int64(c.heads)*int64(c.headDim)
	n := int64(c.layers) * (h*int64(c.qkvWidth()) + width*h + 3*h*int64(c.intermediate) + 2*h)
	n += int64(c.vocab)*h + h
	if !c.tied {
		n += int64(c.vocab) * h
	}
	return n
}

// loader reads one folder. It remembers the first error, so that the tensors can be read one after another.
type loader struct {
	fsys    fs.FS
	dir     string // for messages
	shards  []*shard
	tensors map[string]stored
	sum     hash.Hash
	err     error
}

type shard struct {
	name   string
	file   fs.File
	reader io.ReaderAt
	header *safetensors.Header
}

type stored struct {
	shard *shard
	entry *safetensors.Entry
}

func (l *loader) close() {
	for _, s := range l.shards {
		_ = s.file.Close() // it was only read
	}
}

func (l *loader) path(file string) string {
	if l.dir == "" {
		return file
	}
	return filepath.Join(l.dir, file)
}

func (l *loader) bad(kind sluice.Kind, file, format string, args ...any) error {
	return &sluice.Error{Kind: kind, Op: opOpen, Subject: l.path(file), Detail: fmt.Sprintf(format, args...)}
}

// medium gives a failure of the file system its kind.
func medium(path string, err error) error {
	e := &sluice.Error{Kind: sluice.Unavailable, Op: opOpen, Subject: path, Detail: "cannot be read", Err: err}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		e.Kind, e.Detail, e.Err = sluice.NotFound, "does not exist", nil
		e.Hint = "a model is a Hugging Face folder with config.json and model.safetensors"
	case errors.Is(err, fs.ErrPermission):
		e.Kind = sluice.Denied
	}
	return e
}

// open opens a regular file. It looks first, since opening a pipe would wait for its other end.
func (l *loader) open(name string) (fs.File, int64, error) {
	info, err := fs.Stat(l.fsys, name)
	if err != nil {
		return nil, 0, medium(l.path(name), err)
	}
	if !info.Mode().IsRegular() {
		return nil, 0, l.bad(sluice.Invalid, name, "is not a regular file")
	}
	f, err := l.fsys.Open(name)
	if err != nil {
		return nil, 0, medium(l.path(name), err)
	}
	return f, info.Size(), nil
}

func (l *loader) readAll(name string, limit int64) ([]byte, error) {
	f, _, err := l.open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // it was only read
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, medium(l.path(name), err)
	}
	if int64(len(data)) > limit {
		return nil, l.bad(sluice.Invalid, name, "is larger than %d bytes, which no such file needs", limit)
	}
	return data, nil
}

// openWeights reads the headers of the folder's safetensors files and notes where each tensor is.
func (l *loader) openWeights() error {
	l.tensors = map[string]stored{}
	_, err := fs.Stat(l.fsys, modelFile)
	if err == nil {
		s, err := l.openShard(modelFile)
		if err != nil {
			return err
		}
		for i := range s.header.Entries {
			e := &s.header.Entries[i]
			l.tensors[e.Name] = stored{s, e}
		}
		return nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return medium(l.path(modelFile), err)
	}
	if _, err := fs.Stat(l.fsys, indexFile); errors.Is(err, fs.ErrNotExist) {
		return medium(l.path(modelFile), fs.ErrNotExist)
	}
	return l.openIndex()
}

func (l *loader) openIndex() error {
	text, err := l.readAll(indexFile, maxIndexBytes)
	if err != nil {
		return err
	}
	var index struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(text, &index); err != nil {
		return &sluice.Error{Kind: sluice.Invalid, Op: opOpen, Subject: l.path(indexFile), Detail: "is not a JSON object with weight_map, an object of file names by tensor", Err: err}
	}
	if len(index.WeightMap) == 0 {
		return l.bad(sluice.Invalid, indexFile, "weight_map is missing or empty")
	}
	shards := map[string]*shard{}
	for _, tensor := range slices.Sorted(maps.Keys(index.WeightMap)) {
		name := index.WeightMap[tensor]
		// The index is data from outside: a shard is a file of the folder, never one that a path leads to.
		if !fs.ValidPath(name) || strings.ContainsAny(name, `/\`) || !strings.HasSuffix(name, ".safetensors") {
			return l.bad(sluice.Invalid, indexFile, "weight_map places %q in %q, want the bare name of a .safetensors file in the folder", clip(tensor), clip(name))
		}
		s := shards[name]
		if s == nil {
			if len(shards) == maxShards {
				return l.bad(sluice.Invalid, indexFile, "weight_map lists more than %d files", maxShards)
			}
			if s, err = l.openShard(name); err != nil {
				return err
			}
			shards[name] = s
		}
		e, ok := s.header.Find(tensor)
		if !ok {
			return l.bad(sluice.Invalid, name, "has no tensor %q, which %s says it has", clip(tensor), indexFile)
		}
		l.tensors[tensor] = stored{s, e}
	}
	return nil
}

func (l *loader) openShard(name string) (*shard, error) {
	f, size, err := l.open(name)
	if err != nil {
		return nil, err
	}
	s := &shard{name: name, file: f}
	l.shards = append(l.shards, s)
	var ok bool
	if s.reader, ok = f.(io.ReaderAt); !ok {
		// A file system without random access: four bytes a parameter are the most that the file can need.
		data, err := io.ReadAll(io.LimitReader(f, 4*maxParameters+safetensors.MaxHeader))
		if err != nil {
			return nil, medium(l.path(name), err)
		}
		s.reader, size = bytes.NewReader(data), int64(len(data))
	}
	if s.header, err = safetensors.ReadHeader(s.reader, size); err != nil {
		return nil, &sluice.Error{Kind: sluice.KindOf(err), Op: opOpen, Subject: l.path(name), Err: err}
	}
	return s, nil
}

// checkNames refuses tensors that a Llama model doesn't have. They would be left out in silence otherwise, biases for one.
func (l *loader) checkNames(cfg *config) error {
	want := map[string]bool{"model.embed_tokens.weight": true, "model.norm.weight": true, "lm_head.weight": true}
	for i := range cfg.layers {
		for _, name := range layerTensors {
			want[layerTensor(i, name)] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(l.tensors)) {
		// Old checkpoints store the rotary frequencies, which follow from rope_theta.
		if !want[name] && !strings.HasSuffix(name, ".rotary_emb.inv_freq") {
			return l.bad(sluice.Invalid, l.tensors[name].shard.name, "has a tensor %q, which a LlamaForCausalLM of %d layers does not have", clip(name), cfg.layers)
		}
	}
	return nil
}

var layerTensors = []string{
	"input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
	"post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
}

func layerTensor(i int, name string) string { return fmt.Sprintf("model.layers.%d.%s.weight", i, name) }

// build reads all tensors in a fixed order, which is also the order of the fingerprint.
func (l *loader) build(name string, cfg config) (*Model, error) {
	m := &Model{name: name, cfg: cfg}
	// The number is that of the arithmetic. It changes when Forward's bits do.
	fmt.Fprintf(l.sum, "sluice tinyllama 1\nheads %d\nkv_heads %d\nhead_dim %d\nrms_norm_eps %x\nrope_theta %x\ntied %t\n",
		cfg.heads, cfg.kvHeads, cfg.headDim, math.Float64bits(cfg.eps), math.Float64bits(cfg.theta), cfg.tied)

	h, hd := cfg.hidden, cfg.headDim
	m.embeddings = l.read("model.embed_tokens.weight", cfg.vocab, h)
	m.headRows = m.embeddings
	if !cfg.tied {
		m.headRows = l.read("lm_head.weight", cfg.vocab, h)
	}
	m.norm = l.read("model.norm.weight", h)
	for i := range cfg.layers {
		read := func(name string, shape ...int) []float32 { return l.read(layerTensor(i, name), shape...) }
		var w layer
		w.attnNorm = read("input_layernorm", h)
		q, k, v := read("self_attn.q_proj", cfg.heads*hd, h), read("self_attn.k_proj", cfg.kvHeads*hd, h), read("self_attn.v_proj", cfg.kvHeads*hd, h)
		o := read("self_attn.o_proj", h, cfg.heads*hd)
		w.mlpNorm = read("post_attention_layernorm", h)
		gate, up := read("mlp.gate_proj", cfg.intermediate, h), read("mlp.up_proj", cfg.intermediate, h)
		down := read("mlp.down_proj", h, cfg.intermediate)
		if l.err != nil {
			return nil, l.err
		}
		w.qkv, w.out = newMatrix(h, q, k, v), newMatrix(cfg.heads*hd, o)
		w.gateUp, w.down = newMatrix(h, gate, up), newMatrix(cfg.intermediate, down)
		m.layers = append(m.layers, w)
	}
	if l.err != nil {
		return nil, l.err
	}
	m.head = newMatrix(h, m.headRows)
	m.fingerprint = "sha256:" + hex.EncodeToString(l.sum.Sum(nil))
	return m, nil
}

// read returns the values of a tensor that must have the given shape.
func (l *loader) read(name string, shape ...int) []float32 {
	if l.err != nil {
		return nil
	}
	values, err := l.readTensor(name, shape)
	l.err = err
	return values
}

func (l *loader) readTensor(name string, shape []int) ([]float32, error) {
	at, ok := l.tensors[name]
	if !ok {
		file := modelFile
		if len(l.shards) != 1 || l.shards[0].name != modelFile {
			file = indexFile
		}
		return nil, l.bad(sluice.Invalid, file, "has no tensor %q", name)
	}
	file, spec := at.shard.name, at.entry.Spec
	switch spec.DType {
	case sluice.Float32, sluice.Float16, sluice.BFloat16:
	default:
		return nil, l.bad(sluice.Invalid, file, "tensor %q has dtype %s, want F32, F16 or BF16", name, at.entry.RawDType)
	}
	if !slices.EqualFunc(spec.Shape, shape, func(a int64, b int) bool { return a == int64(b) }) {
		return nil, l.bad(sluice.Invalid, file, "tensor %q has shape %v, want %v as %s has it", name, spec.Shape, shape, configFile)
	}
	data := sluice.NewTensor(spec.DType, spec.Shape...)
	if n, err := at.shard.reader.ReadAt(data.Data, at.shard.header.DataStart+at.entry.Begin); n < len(data.Data) {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, l.bad(sluice.Corrupt, file, "ends within tensor %q, after %d of its %d bytes", name, n, len(data.Data))
		}
		return nil, medium(l.path(file), err)
	}
	fmt.Fprintf(l.sum, "%s %s\n", name, spec)
	l.sum.Write(data.Data)

	values := toFloat32(data)
	if i := notFinite(values); i >= 0 {
		return nil, l.bad(sluice.Invalid, file, "tensor %q has %v at element %d, want finite weights", name, values[i], i)
	}
	return values, nil
}

// toFloat32 widens a tensor of float32, float16 or bfloat16, which is exact.
func toFloat32(t sluice.Tensor) []float32 {
	if t.DType == sluice.Float32 {
		return sluice.View[float32](t)
	}
	bits := sluice.View[uint16](t)
	values := make([]float32, len(bits))
	if t.DType == sluice.BFloat16 {
		for i, b := range bits {
			values[i] = math.Float32frombits(uint32(b) << 16)
		}
		return values
	}
	for i, b := range bits {
		values[i] = fromHalf(b)
	}
	return values
}

// fromHalf widens an IEEE 754 binary16.
func fromHalf(b uint16) float32 {
	sign := uint32(b>>15) << 31
	exponent, mantissa := uint32(b>>10)&0x1f, uint32(b&0x3ff)
	switch exponent {
	case 0: // zero or subnormal
		v := float32(mantissa) * (1.0 / (1 << 24))
		return math.Float32frombits(sign | math.Float32bits(v))
	case 0x1f: // infinite or NaN
		return math.Float32frombits(sign | 0xff<<23 | mantissa<<13)
	}
	return math.Float32frombits(sign | (exponent+112)<<23 | mantissa<<13)
}

// clip bounds text from a file that goes into a message.
func clip(s string) string {
	if len(s) <= 80 {
		return s
	}
	return strings.ToValidUTF8(s[:80], "?") + "..."
}
