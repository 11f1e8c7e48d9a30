package tinyllama

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// parallel calls do(worker, i) for every i in [0,n), from at most the given number of goroutines, the caller's among them, all of
// which have ended when it returns. Once ctx is done no further i is started, and its error is returned.
// A panic in do is raised again in the caller, where it can be recovered.
func parallel(ctx context.Context, workers, n int, do func(worker, i int)) error {
	var (
		next     atomic.Int64
		wg       sync.WaitGroup
		once     sync.Once
		panicked atomic.Bool
		cause    any
	)
	work := func(worker int) {
		defer func() {
			if r := recover(); r != nil {
				once.Do(func() { cause = fmt.Sprintf("%v\n\n%s", r, debug.Stack()) })
				panicked.Store(true)
			}
		}()
		for !panicked.Load() && ctx.Err() == nil {
			i := int(next.Add(1)) - 1
			if i >= n {
				return
			}
			do(worker, i)
		}
	}
	for w := 1; w < min(workers, n); w++ {
		wg.Go(func() { work(w) })
	}
	work(0)
	wg.Wait()
	if panicked.Load() {
		panic(cause)
	}
	return ctx.Err()
}
