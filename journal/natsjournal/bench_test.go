package natsjournal

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/sluice-ml/sluice"
)

// BenchmarkCycle is the bare journal cycle: what a put, an acquire and an ack write, without a queue. The floor for the control plane.
func BenchmarkCycle(b *testing.B) {
	put := sluice.Record{Data: bytes.Repeat([]byte("p"), 1000)} // about what a put with its ref takes
	lease := sluice.Record{Data: bytes.Repeat([]byte("l"), 150), Lazy: true}
	end := sluice.Record{Data: bytes.Repeat([]byte("e"), 200)}
	for _, d := range []struct {
		name string
		Durability
	}{{"process", Process}, {"power", Power}} {
		for _, callers := range []int{1, 16} {
			for _, batch := range []int{1, 64} {
				b.Run(fmt.Sprintf("%s/callers=%d/batch=%d", d.name, callers, batch), func(b *testing.B) {
					j := mustJournal(b, mustOpen(b, b.TempDir(), &Options{Durability: d.Durability}), "a")
					repeat := func(r sluice.Record) []sluice.Record {
						list := make([]sluice.Record, batch)
						for i := range list {
							list[i] = r
						}
						return list
					}
					steps := [][]sluice.Record{repeat(put), repeat(lease), repeat(end)}
					left := make(chan struct{}, b.N)
					for range b.N {
						left <- struct{}{}
					}
					close(left)
					b.ResetTimer()
					var wg sync.WaitGroup
					for range callers {
						wg.Go(func() {
							for range left {
								for _, records := range steps {
									if err := j.Append(context.Background(), records); err != nil {
										b.Error(err)
										return
									}
								}
							}
						})
					}
					wg.Wait()
					b.ReportMetric(float64(b.N*batch)/b.Elapsed().Seconds(), "cycles/s")
				})
			}
		}
	}
}

// BenchmarkPublish is the floor of an append: one message of the size to the same server, and its reply.
func BenchmarkPublish(b *testing.B) {
	for _, d := range []struct {
		name string
		Durability
	}{{"process", Process}, {"power", Power}} {
		for _, size := range []int{1000, 64_000, 500_000} {
			b.Run(fmt.Sprintf("%s/bytes=%d", d.name, size), func(b *testing.B) {
				js := mustOpen(b, b.TempDir(), &Options{Durability: d.Durability})
				mustJournal(b, js, "a")
				data := bytes.Repeat([]byte("x"), size)
				b.SetBytes(int64(size))
				b.ResetTimer()
				for range b.N {
					if _, err := js.line.js.Publish(context.Background(), js.subject("a")+".log", data); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
