package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/sluice-ml/sluice"
)

// What follows carries calls from a child process of the demo to its parent, over a pipe that nobody else can open: JSON, a message a line. It is no network service
// and no step towards one: it has no versions, no authentication, no repetition and no bound on what a peer may ask for, since both ends are the same binary.

// message is a call, the cancellation of one, or the answer to one.
type message struct {
	ID     int64           `json:"id"`
	Call   string          `json:"call,omitempty"`   // of a call: which one
	Cancel bool            `json:"cancel,omitempty"` // the caller no longer wants to wait for the answer; it comes all the same
	Body   json.RawMessage `json:"body,omitempty"`   // what the call or the answer says
	Err    *wireError      `json:"err,omitempty"`    // of an answer: the failure
}

// wireError is an error on its way. Its kind and its text survive; its chain does not.
type wireError struct {
	Kind     sluice.Kind `json:"kind,omitempty"`
	Text     string      `json:"text"`
	Canceled bool        `json:"canceled,omitempty"` // the context's
}

func toWire(err error) *wireError {
	if err == nil {
		return nil
	}
	w := &wireError{Kind: sluice.KindOf(err), Text: err.Error()}
	w.Canceled = w.Kind == "" && (errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded))
	return w
}

// error returns what errors.Is takes for the kind that was sent.
func (w *wireError) error() error {
	switch {
	case w == nil:
		return nil
	case w.Canceled:
		return fmt.Errorf("%w (%s)", context.Canceled, w.Text)
	case w.Kind == "":
		return errors.New(w.Text)
	}
	return &sluice.Error{Kind: w.Kind, Detail: w.Text}
}

// errPeer ends the calls of a connection whose other end is gone.
var errPeer = &sluice.Error{Kind: sluice.Closed, Op: "demo: processes", Detail: "the other process is gone"}

// handler answers a call.
type handler func(ctx context.Context, body json.RawMessage) (any, error)

// handle makes a handler of a function of what the call says.
func handle[Q, A any](f func(context.Context, Q) (A, error)) handler {
	return func(ctx context.Context, body json.RawMessage) (any, error) {
		var q Q
		if err := json.Unmarshal(body, &q); err != nil {
			return nil, &sluice.Error{Kind: sluice.Invalid, Op: "demo: processes", Detail: "a call cannot be read", Err: err}
		}
		return f(ctx, q)
	}
}

// handleOnly is handle for a function without an answer.
func handleOnly[Q any](f func(context.Context, Q) error) handler {
	return handle(func(ctx context.Context, q Q) (struct{}, error) { return struct{}{}, f(ctx, q) })
}

// serve answers calls until the peer is gone or ctx ends, and closes conn. The calls that are out then are cancelled, and over when serve returns.
func serve(ctx context.Context, conn io.ReadWriteCloser, handlers map[string]handler) error {
	ctx, end := context.WithCancelCause(ctx)
	var calls sync.WaitGroup
	defer calls.Wait()
	defer end(errPeer)
	// Closing the connection is what ends the reading and the writing of a peer that does not move.
	hangUp := sync.OnceFunc(func() { _ = conn.Close() })
	defer hangUp()
	stop := context.AfterFunc(ctx, hangUp)
	defer stop()

	var mu sync.Mutex // guards writing and open
	open := map[int64]context.CancelFunc{}
	answers := json.NewEncoder(conn)
	answer := func(m message) {
		mu.Lock()
		defer mu.Unlock()
		if cancel := open[m.ID]; cancel != nil {
			cancel()
			delete(open, m.ID)
		}
		if ctx.Err() != nil {
			hangUp() // so that nobody takes for an answer what is the consequence of the end
		} else if answers.Encode(m) != nil {
			end(errPeer)
		}
	}
	for messages := json.NewDecoder(conn); ; {
		var m message
		if err := messages.Decode(&m); err != nil {
			var syntax *json.SyntaxError
			var form *json.UnmarshalTypeError
			if errors.As(err, &syntax) || errors.As(err, &form) {
				return fmt.Errorf("demo: processes: %w", err)
			}
			return nil // the connection is at its end, whatever the kernel calls that
		}
		if m.Cancel {
			mu.Lock()
			if cancel := open[m.ID]; cancel != nil {
				cancel()
			}
			mu.Unlock()
			continue
		}
		h := handlers[m.Call]
		if h == nil {
			answer(message{ID: m.ID, Err: toWire(&sluice.Error{Kind: sluice.Unsupported, Op: "demo: processes", Subject: m.Call, Detail: "is no call that this peer answers"})})
			continue
		}
		call, cancel := context.WithCancel(ctx)
		mu.Lock()
		open[m.ID] = cancel
		mu.Unlock()
		calls.Go(func() { // over soon after end
			a := message{ID: m.ID}
			v, err := h(call, m.Body)
			if err == nil {
				a.Body, err = json.Marshal(v)
			}
			a.Err = toWire(err)
			answer(a)
		})
	}
}

// caller is the other end of serve.
type caller struct {
	conn io.ReadWriteCloser
	over chan struct{} // closed when the peer is gone

	writing sync.Mutex

	mu   sync.Mutex // guards what follows
	last int64
	open map[int64]chan message
	gone bool
}

// newCaller begins to read answers, in a goroutine that ends when the peer is gone or with Close.
func newCaller(conn io.ReadWriteCloser) *caller {
	c := &caller{conn: conn, over: make(chan struct{}), open: map[int64]chan message{}}
	go func() { // ends with conn
		defer close(c.over)
		for messages := json.NewDecoder(conn); ; {
			var m message
			if messages.Decode(&m) != nil {
				break
			}
			c.mu.Lock()
			answer := c.open[m.ID]
			delete(c.open, m.ID)
			c.mu.Unlock()
			if answer != nil {
				answer <- m // has room
			}
		}
		c.mu.Lock()
		c.gone = true
		c.mu.Unlock()
	}()
	return c
}

// Close hangs up and waits until nothing is read any more.
func (c *caller) Close() error {
	err := c.conn.Close()
	<-c.over
	return err
}

func (c *caller) send(m message) error {
	line, err := json.Marshal(m)
	if err != nil {
		return err
	}
	c.writing.Lock()
	defer c.writing.Unlock()
	if _, err := c.conn.Write(append(line, '\n')); err != nil {
		return errPeer
	}
	return nil
}

// call asks and waits for the answer. When ctx ends, the peer is told so, and what it answers to that is the answer: one that was on its way is not lost.
func (c *caller) call(ctx context.Context, name string, body, into any) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	m := message{Call: name}
	var err error
	if m.Body, err = json.Marshal(body); err != nil {
		return err
	}
	answer := make(chan message, 1)
	c.mu.Lock()
	if c.gone {
		c.mu.Unlock()
		return errPeer
	}
	c.last++
	m.ID = c.last
	c.open[m.ID] = answer
	c.mu.Unlock()
	if err := c.send(m); err != nil {
		c.mu.Lock()
		delete(c.open, m.ID)
		c.mu.Unlock()
		return err
	}
	ended := ctx.Done()
	for {
		select {
		case <-ended:
			ended = nil
			if err := c.send(message{ID: m.ID, Cancel: true}); err != nil {
				return err
			}
		case <-c.over:
			select {
			case a := <-answer:
				return a.take(ctx, into)
			default:
				return errPeer
			}
		case a := <-answer:
			return a.take(ctx, into)
		}
	}
}

// take is what an answer means to who asked under ctx.
func (m *message) take(ctx context.Context, into any) error {
	switch {
	case m.Err != nil && m.Err.Canceled && ctx.Err() != nil:
		return context.Cause(ctx)
	case m.Err != nil:
		return m.Err.error()
	case into == nil:
		return nil
	}
	return json.Unmarshal(m.Body, into)
}

// wireDelivery is a [sluice.Delivery] whose cause can travel.
type wireDelivery struct {
	Leases []sluice.Lease
	End    bool
	Cause  *wireError
}

// queueHandlers answer what remoteQueue asks.
func queueHandlers(q sluice.Queue) map[string]handler {
	return map[string]handler{
		"reserve": handle(q.Reserve),
		"put":     handle(q.Put),
		"report":  handleOnly(q.Report),
		"acquire": handle(func(ctx context.Context, r sluice.AcquireRequest) (wireDelivery, error) {
			d, err := q.Acquire(ctx, r)
			return wireDelivery{d.Leases, d.End, toWire(d.Cause)}, err
		}),
		"settle": handle(q.Settle),
		"renew":  handle(q.Renew),
		"leave":  handleOnly(q.Leave),
		"status": handle(func(ctx context.Context, _ struct{}) (sluice.Status, error) { return q.Status(ctx) }),
	}
}

// remoteQueue is the parent's queue as a child sees it: what producers and consumers need of it. The rest is the parent's business and ErrUnsupported.
type remoteQueue struct{ c *caller }

var _ sluice.Queue = remoteQueue{}

func (q remoteQueue) Reserve(ctx context.Context, r sluice.ReserveRequest) (room sluice.Reservation, err error) {
	err = q.c.call(ctx, "reserve", r, &room)
	return room, err
}

func (q remoteQueue) Put(ctx context.Context, r sluice.PutRequest) (status sluice.PutStatus, err error) {
	err = q.c.call(ctx, "put", r, &status)
	return status, err
}

func (q remoteQueue) Report(ctx context.Context, r sluice.ProducerReport) error {
	return q.c.call(ctx, "report", r, nil)
}

func (q remoteQueue) Acquire(ctx context.Context, r sluice.AcquireRequest) (sluice.Delivery, error) {
	var d wireDelivery
	err := q.c.call(ctx, "acquire", r, &d)
	return sluice.Delivery{Leases: d.Leases, End: d.End, Cause: d.Cause.error()}, err
}

func (q remoteQueue) Settle(ctx context.Context, r sluice.SettleRequest) (results []sluice.SettleResult, err error) {
	err = q.c.call(ctx, "settle", r, &results)
	return results, err
}

func (q remoteQueue) Renew(ctx context.Context, r sluice.RenewRequest) (results []sluice.SettleResult, err error) {
	err = q.c.call(ctx, "renew", r, &results)
	return results, err
}

func (q remoteQueue) Leave(ctx context.Context, k sluice.Consumer) error {
	return q.c.call(ctx, "leave", k, nil)
}

func (q remoteQueue) Status(ctx context.Context) (status sluice.Status, err error) {
	err = q.c.call(ctx, "status", struct{}{}, &status)
	return status, err
}

func notHere(op string) error {
	return &sluice.Error{Kind: sluice.Unsupported, Op: "demo: processes: " + op, Detail: "is for the process that has the queue"}
}

func (remoteQueue) PutBlocksUntilBelow(context.Context, sluice.PutRequest, func() bool) (sluice.PutStatus, error) {
	return "", notHere("put blocks until below")
}
func (remoteQueue) ReclaimExpired(context.Context) (int, error) {
	return 0, notHere("reclaim expired")
}
func (remoteQueue) Taken(context.Context, string) ([]sluice.Taken, error) {
	return nil, notHere("taken")
}
func (remoteQueue) DeadLetters(context.Context) ([]sluice.DeadLetter, error) {
	return nil, notHere("dead letters")
}
func (remoteQueue) Requeue(context.Context, ...string) (int, error) { return 0, notHere("requeue") }
func (remoteQueue) Drop(context.Context, ...string) (int, error)    { return 0, notHere("drop") }
func (remoteQueue) Reshape(context.Context, int, int) error         { return notHere("reshape") }
func (remoteQueue) Close(context.Context, error) error              { return notHere("close") }
