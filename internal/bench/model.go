package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/target/tinyllama"
)

func (b *bench) modelJobs() []job {
	rows, cols, name := int64(4), int64(512), "4 rows of 512"
	if b.o.Quick {
		rows, cols, name = 1, 64, "1 row of 64"
	}
	return []job{{
		name: "tinyllama: forward to hidden states, " + name, unit: "tokens/s", floor: "gonum's matrix products of the same shapes",
		run: func(ctx context.Context) (float64, float64, error) { return b.forward(ctx, rows, cols) },
	}}
}

// shape is what the products need to know of the shipped model.
type shape struct {
	Hidden       int `json:"hidden_size"`
	Intermediate int `json:"intermediate_size"`
	Layers       int `json:"num_hidden_layers"`
	Heads        int `json:"num_attention_heads"`
	KVHeads      int `json:"num_key_value_heads"`
	HeadDim      int `json:"head_dim"`
}

func (b *bench) forward(ctx context.Context, rows, cols int64) (value, floor float64, err error) {
	config, err := fs.ReadFile(tinyllama.Checkpoint(), "config.json")
	if err != nil {
		return 0, 0, err
	}
	var s shape
	if err := json.Unmarshal(config, &s); err != nil {
		return 0, 0, fmt.Errorf("config.json of the shipped model: %w", err)
	}
	model, err := tinyllama.Shipped()
	if err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, model.Close()) }()
	ids, mask := make([]int64, rows*cols), make([]int64, rows*cols)
	for i := range ids {
		ids[i], mask[i] = int64(i*7%256), 1
	}
	batch := &sluice.PromptBatch{
		InputIDs:      sluice.TensorOf(sluice.Int64, ids, rows, cols),
		AttentionMask: sluice.TensorOf(sluice.Int64, mask, rows, cols),
		LossMask:      sluice.TensorOf(sluice.Int64, mask, rows, cols),
	}
	want := sluice.Want{AuxLayers: model.Info().DefaultAuxLayers(), Last: sluice.PostNorm}
	tokens := float64(rows * cols)
	floorS, workS, err := b.turns(ctx, 7, s.products(int(rows*cols)), timed(func(ctx context.Context) error {
		_, err := model.Forward(ctx, batch, want)
		return err
	}))
	return tokens / workS, tokens / floorS, err
}

// products is a turn of the products of weights of one forward, layer by layer.
func (s shape) products(tokens int) turn {
	type product struct{ x, w, y blas32.General }
	var products []product
	for _, p := range [][2]int{
		{s.Hidden, (s.Heads + 2*s.KVHeads) * s.HeadDim}, {s.Heads * s.HeadDim, s.Hidden}, {s.Hidden, 2 * s.Intermediate}, {s.Intermediate, s.Hidden},
	} {
		products = append(products, product{matrix(tokens, p[0]), matrix(p[0], p[1]), matrix(tokens, p[1])})
	}
	return func(context.Context) (time.Duration, error) {
		begun := time.Now()
		for range s.Layers {
			for _, p := range products {
				blas32.Gemm(blas.NoTrans, blas.NoTrans, 1, p.x, p.w, 0, p.y)
			}
		}
		return time.Since(begun), nil
	}
}

// matrix is one of ones.
func matrix(rows, cols int) blas32.General {
	m := blas32.General{Rows: rows, Cols: cols, Stride: cols, Data: make([]float32, rows*cols)}
	for i := range m.Data {
		m.Data[i] = 1
	}
	return m
}
