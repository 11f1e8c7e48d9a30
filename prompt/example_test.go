package prompt_test

import (
	"context"
	"fmt"
	"log"
	"testing/fstest"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/prompt"
)

var files = fstest.MapFS{
	"train.jsonl": {Data: []byte(`{"input_ids":[1,15,7,9],"loss_mask":[0,0,1,1]}
{"input_ids":[1,22,4],"loss_mask":[0,0,1]}
`)},
}

func Example() {
	r, err := prompt.Open(prompt.Options{FS: files, Files: []string{"train.jsonl"}, Vocab: 32000, MaxTokens: 2048})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	for batch, err := range r.All(context.Background()) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(batch.InputIDs.Spec, sluice.View[int64](batch.InputIDs), "row", batch.Positions[0].Index)
	}
	s := r.Stats()
	fmt.Println(s.Rows, "rows,", s.Tokens, "tokens,", s.Supervised, "supervised")
	// Output:
	// int64[1,4] [1 15 7 9] row 0
	// int64[1,3] [1 22 4] row 1
	// 2 rows, 7 tokens, 3 supervised
}

// A producer that restarts passes over what was taken before it stopped.
func ExampleOptions_resume() {
	taken := map[int64]bool{0: true} // a queue's answer, in real life
	r, err := prompt.Open(prompt.Options{FS: files, Files: []string{"train.jsonl"}, Skip: func(p sluice.Position) bool { return taken[p.Index] }})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	batch, err := r.Next(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("goes on at", batch.Positions[0].Index, "after", r.Stats().Skipped[prompt.Taken], "taken before")
	// Output: goes on at 1 after 1 taken before
}

// Several documents share a row, with position ids that restart.
func ExampleOptions_packing() {
	r, err := prompt.Open(prompt.Options{FS: files, Files: []string{"train.jsonl"}, PackTokens: 8})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	batch, err := r.Next(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(sluice.View[int64](batch.InputIDs))
	fmt.Println(sluice.View[int64](batch.PositionIDs))
	fmt.Println(sluice.View[int64](batch.SeqLens), len(batch.Positions))
	// Output:
	// [1 15 7 9 1 22 4]
	// [0 1 2 3 0 1 2]
	// [4 3] 2
}
