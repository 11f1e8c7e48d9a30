package tinyllama_test

import (
	"context"
	"fmt"
	"log"
	"slices"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/target/tinyllama"
)

// A conversation becomes hidden states of three layers and the last state that the head multiplies.
func Example() {
	model, err := tinyllama.Shipped()
	if err != nil {
		log.Fatal(err)
	}
	defer model.Close()

	ids, loss, err := model.Encode([]sluice.Message{
		{Role: "user", Content: "Is he rich?"},
		{Role: "assistant", Content: "Very rich."},
	})
	if err != nil {
		log.Fatal(err)
	}
	shape := []int64{1, int64(len(ids))}
	batch := &sluice.PromptBatch{
		InputIDs:      sluice.TensorOf(sluice.Int64, ids, shape...),
		AttentionMask: sluice.TensorOf(sluice.Int64, slices.Repeat([]int64{1}, len(ids)), shape...),
		LossMask:      sluice.TensorOf(sluice.Int64, loss, shape...),
	}
	out, err := model.Forward(context.Background(), batch, sluice.Want{
		AuxLayers: model.Info().DefaultAuxLayers(),
		Last:      sluice.PostNorm,
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("aux ", out.Aux.Spec)
	fmt.Println("last", out.Last.Spec)
	// Output:
	// aux  float32[1,26,384]
	// last float32[1,26,128]
}

func ExampleModel_Encode() {
	model, err := tinyllama.Shipped()
	if err != nil {
		log.Fatal(err)
	}
	ids, loss, err := model.Encode([]sluice.Message{{Role: "user", Content: "Hi"}, {Role: "assistant", Content: "Yo"}})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(ids)
	fmt.Println(loss)
	fmt.Println(tinyllama.Decode(ids))
	// Output:
	// [256 260 72 105 262 261 89 111 262]
	// [0 0 0 0 0 0 1 1 1]
	// <bos><user>Hi<end><assistant>Yo<end>
}

// A draft trainer recomputes logits with the frozen head.
func ExampleModel_Head() {
	model, err := tinyllama.Shipped()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(model.Head().Spec)
	// Output: float32[264,128]
}

func ExampleOpen() {
	if _, err := tinyllama.Open("testdata"); err != nil {
		fmt.Println(err)
	}
	// Output: tinyllama: open "testdata/config.json": does not exist; a model is a Hugging Face folder with config.json and model.safetensors
}
