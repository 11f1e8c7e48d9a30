package client

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

// silence is how long the session's connection may be without a sign of life; the service sends one every few seconds.
const silence = 30 * time.Second

// hold keeps the session's connection open until the client is closed: while it stands, the service knows that this process lives. A broken one is made anew well within the
// service's grace. It calls tried when the first one stands or has failed.
func (c *Client) hold(tried func()) {
	var pause backoff
	down, first := false, true
	for {
		err := c.holdOnce(func() {
			tried()
			if pause = (backoff{}); down {
				down = false
				c.log.Info("client: the service is back", "url", c.target.name)
			}
			if !first {
				c.behind.Go(c.pinAgain)
			}
			first = false
		})
		tried()
		if c.ended.Err() != nil {
			return
		}
		if !down {
			down = true
			c.log.Warn("client: the session's connection is broken; it will be made anew", "url", c.target.name, "error", err)
		}
		if pause.wait(c.ended) != nil {
			return
		}
	}
}

// holdOnce holds one connection until it breaks, and calls held when it stands.
func (c *Client) holdOnce(held func()) error {
	ctx, cancel := context.WithCancelCause(c.ended)
	defer cancel(nil)
	watch := time.AfterFunc(silence, func() { cancel(fmt.Errorf("no sign of life for %v", silence)) })
	defer watch.Stop()
	req, err := c.request(ctx, http.MethodGet, "/v1/sessions/"+c.session, c.newRequestID())
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		a, err := answered(resp)
		if err != nil {
			return err
		}
		return refusal(req.Method, req.URL.Path, a)
	}
	defer resp.Body.Close() //nolint:errcheck // it has been read, or is given up
	held()
	buf := make([]byte, 512)
	for {
		if _, err := resp.Body.Read(buf); err != nil {
			if cause := context.Cause(ctx); cause != nil {
				return cause
			}
			return err
		}
		watch.Reset(silence)
		if c.owes() {
			c.behind.Go(c.payOwed)
		}
	}
}

// owe notes a handle that could not be given back, for when the service is there again. keep says that it is mapped yet.
func (c *Client) owe(runID, handle string, keep bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return // it ends with the session
	}
	if c.owed[runID] == nil {
		c.owed[runID] = map[string]bool{}
	}
	if before, ok := c.owed[runID][handle]; !ok || before {
		c.owed[runID][handle] = keep
	}
}

func (c *Client) owes() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.owed) > 0
}

// payOwed gives back what is owed.
func (c *Client) payOwed() {
	c.mu.Lock()
	owed := c.owed
	c.owed = map[string]map[string]bool{}
	c.mu.Unlock()
	for runID, handles := range owed {
		for _, keep := range []bool{true, false} {
			var some []string
			for h, k := range handles {
				if k == keep {
					some = append(some, h)
				}
			}
			for part := range slices.Chunk(some, wire.MaxBatch) {
				c.pay(runID, part, keep)
			}
		}
	}
}

func (c *Client) pay(runID string, handles []string, keep bool) {
	_, err := c.do(c.ended, call{method: http.MethodPost, path: runPath(runID, "/release"), in: &wire.Release{Handles: handles, Keep: keep}, patience: time.Second})
	switch {
	case errors.Is(err, sluice.ErrUnavailable):
		for _, h := range handles {
			c.owe(runID, h, keep)
		}
	case err != nil && c.ended.Err() == nil:
		c.log.Warn("client: can't give back pins", "run", runID, "pins", len(handles), "error", err)
	}
}

// pinAgain takes the pins of this process again, since a service that was started anew knows nothing of them: what is mapped here is to count there.
func (c *Client) pinAgain() {
	c.mu.Lock()
	stores := slices.Collect(maps.Keys(c.pinners))
	c.mu.Unlock()
	for _, s := range stores {
		s.pinAgain(c.ended)
	}
}
