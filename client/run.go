package client

import (
	"context"

	"github.com/sluice-ml/sluice"
)

// Run is one run of the service, opened: its store and its queue.
type Run struct {
	info  RunInfo
	store *store
	queue *queue
}

// Open opens a run, which must be there, and finds out whether its files can be mapped. ErrNotFound if there is none of that name.
func (c *Client) Open(ctx context.Context, runID string) (*Run, error) {
	w, err := c.run(ctx, runID)
	if err != nil {
		return nil, err
	}
	info, err := infoOf(w)
	if err != nil {
		return nil, err
	}
	s := newStore(c, runID, &w.Store, w.Status.Health)
	return &Run{info: info, store: s, queue: &queue{c: c, run: runID, store: s}}, nil
}

// Info describes the run as it was when it was opened.
func (r *Run) Info() RunInfo { return r.info }

// Store is the run's store, the same every time. It is no [sluice.ClaimStore]: claims are the service's.
//
// Put is done once: it carries its generation, and an answer that was lost is asked for again. Health asks the service, waits 250 ms at most, and gives the last
// snapshot that arrived if there is no answer by then; so it is never older than what the caller itself did unless the service is slow or away. Close gives back
// the reservations that were made through Store.Reserve and refuses later calls; pins stay until they are released, or the client is closed.
func (r *Run) Store() sluice.Store { return r.store }

// Queue is the run's queue, the same every time. Its Close closes the run, for everybody.
//
// A service that is away, as one that restarts, is asked again for as long as [Options].Patience says, and is ErrUnavailable then; it is never the end. A call that waits
// is made of slices of at most 30 s, so that neither side waits for a peer that is gone. Between two of them a Reserve keeps its place in the line, and an Acquire goes to the end of its own.
func (r *Run) Queue() sluice.Queue { return r.queue }
