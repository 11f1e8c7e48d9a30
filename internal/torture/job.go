package torture

import (
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/client"
	"github.com/sluice-ml/sluice/internal/wire"
)

// Job is what a worker's process is told, as its one argument.
type Job struct {
	Name        string `json:"name"`
	Incarnation int64  `json:"incarnation"`
	Books       string `json:"books"`
	URL         string `json:"url"`   // of a remote worker, which does not map files; others find the service by themselves
	UntilNanos  int64  `json:"until"` // of the host's monotonic clock
	Seed        uint64 `json:"seed"`
}

// Work is a worker's process.
func Work(ctx context.Context, argument string) (err error) {
	var j Job
	if err := json.Unmarshal([]byte(argument), &j); err != nil {
		return &sluice.Error{Kind: sluice.Invalid, Op: "torture: worker", Detail: "is started by `sluice torture`, and by nobody else", Err: err}
	}
	b, err := openBook(j.Books, j.Name, j.Incarnation)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	w := &worker{runID: runID, book: b, name: j.Name, inc: j.Incarnation, rand: rand.New(rand.NewPCG(j.Seed, uint64(j.Incarnation)<<8+uint64(j.Name[len(j.Name)-1])))}
	o := client.Options{URL: j.URL, HTTPOnly: j.URL != "", Patience: time.Second}
	if j.URL != "" {
		if o.Token, err = w.token(); err != nil {
			return err
		}
	}
	c, err := again(ctx, func() (*client.Client, error) { return client.Dial(ctx, o) })
	if err != nil {
		return w.trouble("dial", err)
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	run, err := again(ctx, func() (*client.Run, error) { return c.Open(ctx, runID) })
	if err != nil {
		return w.trouble("open the run", err)
	}
	w.store, w.queue = run.Store(), run.Queue()
	if strings.HasPrefix(j.Name, "producer") {
		return w.produce(ctx, time.Now().Add(time.Duration(j.UntilNanos-now())))
	}
	return w.consume(ctx)
}

// token is the one of the worker's role.
func (w *worker) token() (string, error) {
	dir, err := wire.StateDir()
	if err != nil {
		return "", err
	}
	tokens, err := wire.ReadTokens(dir)
	if err != nil {
		return "", err
	}
	for _, t := range tokens {
		if strings.HasPrefix(w.name, t.Role) {
			return t.Value, nil
		}
	}
	return "", w.trouble("token", &sluice.Error{Kind: sluice.NotFound, Op: "torture", Subject: w.name, Detail: "there is no token of its role"})
}
