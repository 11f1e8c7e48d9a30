package natsjournal

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/sluice-ml/sluice"
)

// Owner is who owns a directory or a prefix.
type Owner struct {
	ID    string    `json:"id"` // of this opening, random
	Host  string    `json:"host"`
	PID   int       `json:"pid"`
	Since time.Time `json:"since"`
}

func newOwner() Owner {
	var id [8]byte
	rand.Read(id[:])
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return Owner{ID: hex.EncodeToString(id[:]), Host: host, PID: os.Getpid(), Since: time.Now().UTC().Truncate(time.Millisecond)}
}

func (o Owner) String() string {
	if o.ID == "" {
		return "another process"
	}
	return fmt.Sprintf("process %d on %s (%s, since %s)", o.PID, o.Host, o.ID, o.Since.Format(time.RFC3339))
}

// tenure is the record by which a prefix is owned at a server elsewhere. It is renewed at a third of the lapse.
type tenure struct {
	Owner
	Lapse    time.Duration `json:"lapse"`
	Beat     int64         `json:"beat"`
	Released bool          `json:"released,omitempty"`
}

// holder renews a tenure.
type holder struct {
	js     *Journals
	line   *line
	stream jetstream.Stream
	me     tenure
	seq    uint64 // of the last record
	fenced bool   // no earlier owner can write any more
}

// own takes the prefix and starts to renew.
func (js *Journals) own(ctx context.Context, l *line) error {
	var stream jetstream.Stream
	err := l.call(ctx, "connect", js.opts.Prefix, func(ctx context.Context) (err error) {
		stream, err = l.js.CreateStream(ctx, jetstream.StreamConfig{
			Name: js.opts.Prefix, Subjects: []string{js.opts.Prefix + ".owner"}, MaxMsgsPerSubject: 1, Replicas: js.opts.Replicas,
		})
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // with other settings
			stream, err = l.js.Stream(ctx, js.opts.Prefix)
		}
		return err
	})
	if err != nil {
		return err
	}
	h := &holder{js: js, line: l, stream: stream, me: tenure{Owner: js.owner, Lapse: js.opts.Lapse}}
	abrupt, err := h.take(ctx)
	if err != nil {
		return err
	}
	l.held = h
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		h.renew(stop)
	}()
	l.owned = sync.OnceFunc(func() {
		close(stop)
		<-done
		h.release()
	})
	if abrupt {
		// The owner before may only be asleep: its places in all journals are taken before anything is read.
		names, err := js.list(ctx, l)
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := newJournal(js, l, name).claim(ctx); err != nil && !errors.Is(err, sluice.ErrCorrupt) {
				return err // a damaged one is reported to whoever opens it
			}
		}
	}
	h.fenced = true
	return nil
}

// take waits until the prefix is nobody's and makes it ours. It reports whether the owner before had not given it up.
func (h *holder) take(ctx context.Context) (abrupt bool, err error) {
	prefix := h.js.opts.Prefix
	var seen uint64
	for {
		m, err := h.stream.GetLastMsgForSubject(ctx, prefix+".owner")
		var last tenure
		switch {
		case errors.Is(err, jetstream.ErrMsgNotFound):
			last.Released, m = true, &jetstream.RawStreamMsg{}
		case err != nil:
			return false, h.line.explain(err, "connect", prefix)
		default:
			if err := json.Unmarshal(m.Data, &last); err != nil || last.Lapse <= 0 {
				return false, failBy(err, sluice.Corrupt, "connect", prefix, "the owner's record can't be read")
			}
		}
		if seen != 0 && m.Sequence != seen && !last.Released {
			return false, fail(sluice.Conflict, "connect", prefix, "is owned by %v, which is alive", last.Owner)
		}
		seen = m.Sequence
		if !last.Released {
			info, err := h.stream.Info(ctx)
			if err != nil {
				return false, h.line.explain(err, "connect", prefix)
			}
			// Both times are the server's. If its clock jumps, an owner may be superseded early, which does not harm the journals.
			if left := last.Lapse - info.TimeStamp.Sub(m.Time); left > 0 {
				select {
				case <-time.After(min(left, last.Lapse/8)):
				case <-ctx.Done():
					return false, failBy(context.Cause(ctx), sluice.Unavailable, "connect", prefix, "is owned by %v", last.Owner)
				}
				continue
			}
			h.js.opts.Logger.Warn("taking over from an owner that fell silent", "prefix", prefix, "owner", last.String())
		}
		switch err := h.put(ctx, m.Sequence); {
		case err == nil:
			return !last.Released, nil
		case !errors.Is(err, sluice.ErrStale):
			return false, err
		}
	}
}

// put writes the record behind the one at seq; ErrStale if there is another one by now.
func (h *holder) put(ctx context.Context, seq uint64) error {
	h.me.Beat++
	data, err := json.Marshal(h.me)
	if err != nil {
		return err
	}
	prefix := h.js.opts.Prefix
	ack, err := h.line.js.Publish(ctx, prefix+".owner", data, jetstream.WithExpectLastSequence(seq))
	if err == nil {
		h.seq = ack.Sequence
		return nil
	}
	m, lookErr := h.stream.GetLastMsgForSubject(ctx, prefix+".owner")
	var last tenure
	switch {
	case errors.Is(lookErr, jetstream.ErrMsgNotFound):
		return h.line.explain(err, "own", prefix)
	case lookErr != nil:
		return h.line.explain(errors.Join(err, lookErr), "own", prefix)
	case string(m.Data) == string(data):
		h.seq = m.Sequence // the reply was lost
		return nil
	case json.Unmarshal(m.Data, &last) == nil && last.ID == h.me.ID:
		h.seq = m.Sequence // an earlier record of ours whose reply was lost
		return h.line.explain(err, "own", prefix)
	case m.Sequence != seq:
		return h.superseded(last)
	}
	return h.line.explain(err, "own", prefix)
}

// check makes sure that the last record is ours. It may be called while another goroutine renews.
func (h *holder) check(ctx context.Context) error {
	prefix := h.js.opts.Prefix
	return h.line.call(ctx, "own", prefix, func(ctx context.Context) error {
		m, err := h.stream.GetLastMsgForSubject(ctx, prefix+".owner")
		if err != nil {
			return err
		}
		var last tenure
		if err := json.Unmarshal(m.Data, &last); err != nil {
			return failBy(err, sluice.Corrupt, "own", prefix, "the owner's record can't be read")
		}
		if last.ID != h.js.owner.ID {
			h.line.end(h.superseded(last))
		}
		return h.line.cause()
	})
}

func (h *holder) superseded(by tenure) error {
	return fail(sluice.Stale, "append", h.js.opts.Prefix, "%v has taken over", by.Owner)
}

func (h *holder) renew(stop <-chan struct{}) {
	tick := time.NewTicker(h.js.opts.Lapse / 3)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-h.line.ctx.Done():
			return
		case <-tick.C:
		}
		if step := h.js.opts.step; step != nil && step("renew") != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(h.line.ctx, h.js.opts.Lapse)
		err := h.put(ctx, h.seq)
		cancel()
		switch {
		case errors.Is(err, sluice.ErrStale):
			h.js.opts.Logger.Error("the journals have another owner", "err", err)
			h.line.end(err)
			return
		case err != nil && h.line.ctx.Err() == nil:
			h.js.opts.Logger.Warn("the ownership of the journals could not be renewed", "err", err)
		}
	}
}

// release gives the prefix up, unless it is another's by now, or an earlier owner may still write: the next one must fence that off then.
func (h *holder) release() {
	if !h.fenced || errors.Is(context.Cause(h.line.ctx), sluice.ErrStale) {
		return
	}
	h.me.Released = true
	ctx, cancel := context.WithTimeout(context.Background(), h.js.opts.Lapse)
	defer cancel()
	err := h.put(ctx, h.seq)
	if err != nil && !errors.Is(err, sluice.ErrStale) {
		err = h.put(ctx, h.seq) // behind a renewal that was cut off and has arrived all the same
	}
	if err != nil {
		h.js.opts.Logger.Warn("the ownership of the journals could not be given up", "err", err)
	}
}
