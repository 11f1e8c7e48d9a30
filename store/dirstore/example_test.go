//go:build linux

package dirstore_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/store/dirstore"
)

// A producer and a consumer, normally two processes, share a directory.
func Example() {
	ctx := context.Background()
	base, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(base)
	dir := filepath.Join(base, "run-1") // made by Open, with mode 0700

	producer, err := dirstore.Open(dir, &dirstore.Options{Caps: sluice.Caps{MaxBytes: 1 << 20}})
	if err != nil {
		log.Fatal(err)
	}
	defer producer.Close()
	ref, err := producer.Put(ctx, &sluice.Sample{
		SampleID: "run-1-0", RunID: "run-1", Algorithm: sluice.DFlash, SchemaVersion: 1, NumTokens: 3,
		Features: []sluice.Feature{{Name: "input_ids", Tensor: sluice.TensorOf(sluice.Int64, []int64{10, 11, 12}, 1, 3)}},
	}, sluice.Reservation{})
	if err != nil {
		log.Fatal(err)
	}

	consumer, err := dirstore.Open(dir, nil) // takes the store's caps
	if err != nil {
		log.Fatal(err)
	}
	defer consumer.Close()
	tensors, err := consumer.Get(ctx, ref)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(sluice.View[int64](tensors.Features[0].Tensor))
	if err := tensors.Release(ctx); err != nil {
		log.Fatal(err)
	}
	fmt.Println(producer.Health().ResidentBytes)
	// Output:
	// [10 11 12]
	// 0
}
