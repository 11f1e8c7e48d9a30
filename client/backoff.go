package client

import (
	"context"
	"math/rand/v2"
	"time"
)

// backoff is how long to wait before the next attempt: from 20 ms doubling to 2 s, each less up to a half by chance, so that the clients of a service that comes
// back do not all come at once.
type backoff struct{ d time.Duration }

const (
	firstBackoff = 20 * time.Millisecond
	lastBackoff  = 2 * time.Second
)

func (b *backoff) next() time.Duration {
	b.d = min(max(2*b.d, firstBackoff), lastBackoff)
	return b.d - rand.N(b.d/2+1)
}

// wait waits for the next attempt, or for the end of ctx, whose cause it returns.
func (b *backoff) wait(ctx context.Context) error {
	t := time.NewTimer(b.next())
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
