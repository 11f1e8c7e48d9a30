package memstore_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/store/memstore"
)

func Example() {
	ctx := context.Background()
	store, err := memstore.New(&memstore.Options{Caps: sluice.Caps{MaxBytes: 1 << 30}})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()

	// A producer sets room aside before it computes, and puts what it computed into it.
	ids := sluice.TensorOf(sluice.Int64, []int64{10, 11, 12, 13}, 1, 4)
	sample := &sluice.Sample{
		SampleID: "s-1", RunID: "run", Algorithm: sluice.EAGLE3, SchemaVersion: 1, NumTokens: 4,
		Features: []sluice.Feature{{Name: "input_ids", Tensor: ids}},
	}
	room, err := store.Reserve(ctx, sample.Bytes())
	if err != nil {
		fmt.Println(err)
		return
	}
	ref, err := store.Put(ctx, sample, room)
	if err != nil {
		fmt.Println(err)
		return
	}

	// A consumer may write to what it gets: the tensors are its own.
	tensors, err := store.Get(ctx, ref)
	if err != nil {
		fmt.Println(err)
		return
	}
	got, _ := tensors.Feature("input_ids")
	sluice.View[int64](got)[0] = 99
	fmt.Println(got.Spec, sluice.View[int64](got))

	// Nobody claimed the sample, so the last release frees it.
	fmt.Println("resident:", store.Health().ResidentBytes)
	tensors.Release(ctx)
	fmt.Println("resident:", store.Health().ResidentBytes)
	// Output:
	// int64[1,4] [99 11 12 13]
	// resident: 32
	// resident: 0
}

func ExampleStore_Claim() {
	ctx := context.Background()
	store, _ := memstore.New(&memstore.Options{Caps: sluice.Caps{MaxSamples: 10}})
	defer store.Close()
	ref, _ := store.Put(ctx, &sluice.Sample{
		SampleID: "s-1", RunID: "run", Algorithm: sluice.EAGLE3, SchemaVersion: 1,
		Features: []sluice.Feature{{Name: "loss_mask", Tensor: sluice.NewTensor(sluice.Int64, 1, 4)}},
	}, sluice.Reservation{})

	// While a queue claims it, a sample survives its consumers: one that failed can read the same bits again.
	store.Claim(ref, "queue-1")
	for range 2 {
		tensors, _ := store.Get(ctx, ref)
		tensors.Release(ctx)
	}
	fmt.Println(errors.Is(store.Abort(ctx, ref), sluice.ErrConflict), store.Health().ResidentSamples)

	store.Unclaim(ref, "queue-1") // the queue settled it
	fmt.Println(store.Health().ResidentSamples)
	// Output:
	// true 1
	// 0
}

func ExampleStore_Reserve() {
	store, _ := memstore.New(&memstore.Options{Caps: sluice.Caps{MaxBytes: 1000}})
	defer store.Close()
	_, err := store.Reserve(context.Background(), 5000)
	fmt.Println(err)
	fmt.Println(errors.Is(err, sluice.ErrFull))
	// Output:
	// memstore: reserve: a sample of 5000 bytes does not fit the cap of 1000 bytes; raise max_bytes or shorten the sample
	// true
}
