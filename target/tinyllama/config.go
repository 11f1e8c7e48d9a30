package tinyllama

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-ml/sluice"
)

// config is what config.json says about a Llama model, validated, with the defaults filled in.
type config struct {
	hidden       int
	intermediate int
	layers       int
	heads        int
	kvHeads      int
	headDim      int
	vocab        int
	maxTokens    int
	eps          float64
	theta        float64
	tied         bool
	bytes        bool // the vocabulary is the byte tokenizer's
}

// What a configuration may ask for. The limits keep every product of two of them far from overflow, and a hostile file from
// reserving memory; real small models are far below.
const (
	maxHidden       = 1 << 14
	maxIntermediate = 1 << 17
	maxLayers       = 512
	maxHeads        = 512
	maxHeadDim      = 1 << 10
	maxVocab        = 1 << 20
	maxPositions    = 1 << 20
)

const opOpen = "tinyllama: open"

func badConfig(field, detail string) error {
	return &sluice.Error{Kind: sluice.Invalid, Op: opOpen, Subject: "config.json", Detail: field + " " + detail}
}

// parseConfig reads Hugging Face's config.json of a LlamaForCausalLM. What would change the arithmetic and is not built is
// refused by name: a forward that is nearly right trains a draft on nonsense.
func parseConfig(data []byte) (config, error) {
	var c config
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(data, &fields); err != nil {
		return c, &sluice.Error{Kind: sluice.Invalid, Op: opOpen, Subject: "config.json", Detail: "is not a JSON object", Err: err}
	}
	if fields == nil {
		return c, &sluice.Error{Kind: sluice.Invalid, Op: opOpen, Subject: "config.json", Detail: "is null, want a JSON object"}
	}
	p := configParser{fields: fields}

	p.architecture()
	for _, name := range []string{"attention_bias", "mlp_bias"} {
		if p.boolean(name) {
			p.fail(name, "is true; linear layers with a bias are not supported")
		}
	}
	if raw, ok := p.get("quantization_config"); ok {
		p.fail("quantization_config", "is "+show(raw)+"; quantised weights are not supported")
	}
	if act := p.text("hidden_act", "silu"); act != "silu" {
		p.fail("hidden_act", fmt.Sprintf("is %q, want \"silu\"", act))
	}
	p.ropeType("rope_scaling")
	p.ropeType("rope_parameters")

	c.hidden = p.integer("hidden_size", 1, maxHidden, -1)
	c.intermediate = p.integer("intermediate_size", 1, maxIntermediate, -1)
	c.layers = p.integer("num_hidden_layers", 1, maxLayers, -1)
	c.heads = p.integer("num_attention_heads", 1, maxHeads, -1)
	c.vocab = p.integer("vocab_size", 1, maxVocab, -1)
	c.kvHeads = p.integer("num_key_value_heads", 1, maxHeads, c.heads)
	c.maxTokens = p.integer("max_position_embeddings", 1, maxPositions, 2048)
	c.eps = p.float("rms_norm_eps", 1e-6, 1)
	c.theta = p.ropeTheta()
	c.tied = p.boolean("tie_word_embeddings")
	if c.bytes = p.boolean("byte_tokenizer"); c.bytes && c.vocab < tokenizerVocab {
		p.fail("byte_tokenizer", fmt.Sprintf("is true, but vocab_size is %d; that tokenizer needs %d entries", c.vocab, tokenizerVocab))
	}
	if p.err != nil {
		return config{}, p.err
	}
	if c.heads%c.kvHeads != 0 {
		return config{}, badConfig("num_key_value_heads", fmt.Sprintf("is %d, want a divisor of num_attention_heads, which is %d", c.kvHeads, c.heads))
	}
	if _, ok := p.get("head_dim"); ok {
		c.headDim = p.integer("head_dim", 2, maxHeadDim, -1)
	} else if c.hidden%c.heads != 0 {
		return config{}, badConfig("hidden_size", fmt.Sprintf("is %d, which %d heads do not divide, and there is no head_dim", c.hidden, c.heads))
	} else {
		c.headDim = c.hidden / c.heads
	}
	if p.err != nil {
		return config{}, p.err
	}
	if c.headDim%2 != 0 || c.headDim > maxHeadDim {
		return config{}, badConfig("head_dim", fmt.Sprintf("is %d, want an even number of at most %d", c.headDim, maxHeadDim))
	}
	return c, nil
}

// configParser remembers the first fault, so that the fields can be read one after another.
type configParser struct {
	fields map[string]json.RawMessage
	err    error
}

func (p *configParser) fail(field, detail string) {
	if p.err == nil {
		p.err = badConfig(field, detail)
	}
}

// get treats null as absent, as transformers does.
func (p *configParser) get(field string) (json.RawMessage, bool) {
	raw, ok := p.fields[field]
	return raw, ok && !bytes.Equal(raw, []byte("null"))
}

func (p *configParser) architecture() {
	if raw, ok := p.get("architectures"); ok {
		var names []string
		if json.Unmarshal(raw, &names) != nil || !slices.Equal(names, []string{"LlamaForCausalLM"}) {
			p.fail("architectures", "is "+show(raw)+", want [\"LlamaForCausalLM\"]")
		}
		return
	}
	if name := p.text("model_type", ""); name != "llama" {
		p.fail("architectures", "is missing and model_type is "+strconv.Quote(name)+"; want [\"LlamaForCausalLM\"], or \"llama\"")
	}
}

// ropeType accepts a description of rotary embeddings only if it describes the plain ones.
func (p *configParser) ropeType(field string) {
	raw, ok := p.get(field)
	if !ok {
		return
	}
	var rope struct {
		RopeType *string `json:"rope_type"`
		Type     *string `json:"type"`
	}
	if err := json.Unmarshal(raw, &rope); err != nil {
		p.fail(field, "is "+show(raw)+", want an object or null")
		return
	}
	for _, kind := range []*string{rope.RopeType, rope.Type} {
		if kind != nil && *kind != "default" {
			p.fail(field, fmt.Sprintf("asks for type %q; scaled rotary embeddings are not supported", *kind))
		}
	}
	if field == "rope_scaling" && rope.RopeType == nil && rope.Type == nil {
		p.fail(field, "is "+show(raw)+"; scaled rotary embeddings are not supported")
	}
}

// ropeTheta looks where transformers 4 (rope_theta) and transformers 5 (rope_parameters.rope_theta) write it.
func (p *configParser) ropeTheta() float64 {
	if raw, ok := p.get("rope_parameters"); ok {
		var inner map[string]json.RawMessage
		if json.Unmarshal(raw, &inner) == nil {
			if theta, ok := inner["rope_theta"]; ok {
				q := configParser{fields: map[string]json.RawMessage{"rope_parameters.rope_theta": theta}}
				v := q.float("rope_parameters.rope_theta", 10000, math.MaxFloat32)
				if p.err == nil {
					p.err = q.err
				}
				return v
			}
		}
	}
	return p.float("rope_theta", 10000, math.MaxFloat32)
}

// integer reads a field in [low,high]. A negative missing value says that the field is required.
func (p *configParser) integer(field string, low, high, missing int) int {
	raw, ok := p.get(field)
	if !ok {
		if missing < 0 {
			p.fail(field, "is missing")
		}
		return max(missing, low)
	}
	n, err := strconv.ParseInt(string(raw), 10, 64)
	if err != nil || n < int64(low) || n > int64(high) {
		p.fail(field, fmt.Sprintf("is %s, want an integer from %d to %d", show(raw), low, high))
		return low
	}
	return int(n)
}

// float reads a positive field up to high.
func (p *configParser) float(field string, missing, high float64) float64 {
	raw, ok := p.get(field)
	if !ok {
		return missing
	}
	v, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || !(v > 0) || v > high {
		p.fail(field, fmt.Sprintf("is %s, want a number above 0 and at most %g", show(raw), high))
		return missing
	}
	return v
}

// boolean reads a field that is false where it is missing.
func (p *configParser) boolean(field string) bool {
	raw, ok := p.get(field)
	if !ok {
		return false
	}
	var v bool
	if err := json.Unmarshal(raw, &v); err != nil {
		p.fail(field, "is "+show(raw)+", want true or false")
	}
	return v
}

func (p *configParser) text(field, missing string) string {
	raw, ok := p.get(field)
	if !ok {
		return missing
	}
	var v string
	if err := json.Unmarshal(raw, &v); err != nil {
		p.fail(field, "is "+show(raw)+", want a string")
	}
	return v
}

// show shortens a JSON value for a message.
func show(raw json.RawMessage) string {
	return clip(strings.Join(strings.Fields(string(raw)), " "))
}
