package tinyllama

import (
	"sync/atomic"

	"github.com/sluice-ml/sluice"
)

// Model is a Llama model in memory. Its weights never change, so that any number of goroutines may call any method at once.
type Model struct {
	name        string
	fingerprint string
	cfg         config
	embeddings  []float32 // [V,H]
	headRows    []float32 // [V,H]; the embeddings, if the two are tied
	norm        []float32 // [H]
	layers      []layer
	head        matrix
	closed      atomic.Bool
}

var (
	_ sluice.Target    = (*Model)(nil)
	_ sluice.Tokenizer = (*Model)(nil)
)

// layer holds the weights of a decoder layer. Matrices that multiply the same vector are one.
type layer struct {
	attnNorm, mlpNorm      []float32
	qkv, out, gateUp, down matrix
}

// qkvWidth is the number of columns of a layer's joint query, key and value matrix.
func (c *config) qkvWidth() int { return (c.heads + 2*c.kvHeads) * c.headDim }

// Info describes the model. Its fingerprint covers the weights' bytes as stored and every setting that enters the
// arithmetic, and is the same however the weights are spread over files.
func (m *Model) Info() sluice.TargetInfo {
	info := sluice.TargetInfo{
		Name:        m.name,
		Fingerprint: m.fingerprint,
		Layers:      m.cfg.layers,
		HiddenSize:  int64(m.cfg.hidden),
		VocabSize:   int64(m.cfg.vocab),
		MaxTokens:   int64(m.cfg.maxTokens),
		DType:       sluice.Float32,
		Concurrent:  true,
	}
	if m.tokenises() {
		info.Tokenizer = tokenizerFingerprint
	}
	return info
}

// Embeddings returns a copy of the input embeddings, float32 [V,H].
func (m *Model) Embeddings() sluice.Tensor { return m.vocabByHidden(m.embeddings) }

// Head returns a copy of the output head, float32 [V,H]: logits are a post-norm state times its transpose. Draft trainers
// recompute logits from last hidden states with it. If the model ties the two, it equals Embeddings.
func (m *Model) Head() sluice.Tensor { return m.vocabByHidden(m.headRows) }

func (m *Model) vocabByHidden(values []float32) sluice.Tensor {
	return sluice.TensorOf(sluice.Float32, values, int64(m.cfg.vocab), int64(m.cfg.hidden))
}

// FinalNorm returns a copy of the final norm's weight, float32 [H], and its epsilon: what turns a pre-norm state into a post-norm one.
func (m *Model) FinalNorm() (weight sluice.Tensor, epsilon float64) {
	return sluice.TensorOf(sluice.Float32, m.norm, int64(m.cfg.hidden)), m.cfg.eps
}

// Close makes later calls of Forward fail with [sluice.ErrClosed]; one that runs now ends as usual. It may be called
// more than once, and its error is always nil.
func (m *Model) Close() error {
	m.closed.Store(true)
	return nil
}
