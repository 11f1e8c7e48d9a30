package stream

import (
	"errors"
	"fmt"
	"math"

	"github.com/sluice-ml/sluice"
)

// FinalNorm is the target's final norm, an RMSNorm: x / sqrt(mean(x^2) + Epsilon) * Weight. It makes a post-norm state, which the head multiplies, of
// the residual stream after the last layer.
type FinalNorm struct {
	Weight  sluice.Tensor // [H]: float32, bfloat16 or float16
	Epsilon float64
}

// rmsNorm is a FinalNorm that was checked.
type rmsNorm struct {
	weight  []float32
	epsilon float64
}

// prepare copies the weight. Nil stays nil.
func (n *FinalNorm) prepare(op string) (*rmsNorm, error) {
	if n == nil {
		return nil, nil
	}
	bad := func(format string, args ...any) error {
		return &sluice.Error{Kind: sluice.Invalid, Op: op, Subject: "FinalNorm", Detail: fmt.Sprintf(format, args...)}
	}
	switch {
	case len(n.Weight.Shape) != 1 || n.Weight.Shape[0] == 0 || !normed(n.Weight.DType):
		return nil, bad("has a weight of %s, want float32, bfloat16 or float16 [H]", n.Weight.Spec)
	case n.Weight.Validate() != nil:
		return nil, bad("has a bad weight: %v", n.Weight.Validate())
	case firstNotFinite(n.Weight) >= 0:
		return nil, bad("has a weight that is not finite at %d", firstNotFinite(n.Weight))
	case !(n.Epsilon > 0) || math.IsInf(n.Epsilon, 1):
		return nil, bad("has the epsilon %g, want more than 0", n.Epsilon)
	}
	weight := make([]float32, n.Weight.Shape[0])
	widen(weight, aligned(n.Weight), 0)
	return &rmsNorm{weight, n.Epsilon}, nil
}

// normed reports whether states of this type can be normed.
func normed(d sluice.DType) bool {
	return d == sluice.Float32 || d == sluice.BFloat16 || d == sluice.Float16
}

// fits refuses states that the norm is not for.
func (n *rmsNorm) fits(s sluice.Spec) error {
	switch {
	case !normed(s.DType):
		return fmt.Errorf("is %s, and a FinalNorm takes float32, bfloat16 or float16", s)
	case len(s.Shape) == 0 || s.Shape[len(s.Shape)-1] != int64(len(n.weight)):
		return fmt.Errorf("is %s, and the FinalNorm has %d weights", s, len(n.weight))
	}
	return nil
}

// apply returns the normed states, computed in float32 and rounded once, to the type of t. The input is not changed: it may be the store's, or wanted once more.
func (n *rmsNorm) apply(t sluice.Tensor) (sluice.Tensor, error) {
	in, out := aligned(t), sluice.NewTensor(t.DType, t.Shape...)
	row := make([]float32, len(n.weight))
	for at := int64(0); at < elements(t); at += int64(len(row)) {
		widen(row, in, at)
		sum := 0.0
		for _, v := range row {
			sum += float64(v) * float64(v)
		}
		scale := float32(1 / math.Sqrt(sum/float64(len(row))+n.epsilon))
		for i, v := range row {
			row[i] = v * scale * n.weight[i]
		}
		narrow(out, at, row)
	}
	if t.DType == sluice.Float16 && firstNotFinite(out) >= 0 && firstNotFinite(in) < 0 {
		return out, errors.New("is too large for float16 behind the FinalNorm")
	}
	return out, nil
}

func elements(t sluice.Tensor) int64 { return int64(len(t.Data)) / t.DType.Size() }
