package natsjournal

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/sluice-ml/sluice"
)

const (
	// fetchMessages and fetchBytes bound what a replay asks the server for ahead.
	fetchMessages = 2048
	fetchBytes    = 8 << 20
)

// Replay implements [sluice.Journal]. The data of a record is f's to keep; a record that is kept keeps its whole message.
func (j *journal) Replay(ctx context.Context, f func(sluice.Record) error) error {
	j.mu.Lock()
	err := j.refusal("replay")
	if err == nil && j.touched {
		err = fail(sluice.Conflict, "replay", j.name, "something was appended already; open the journal again")
	}
	j.mu.Unlock()
	if err != nil {
		return err
	}
	consumer, err := j.stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: j.begin, InactiveThreshold: j.js.opts.Patience})
	if err != nil {
		return j.line.explain(err, "replay", j.name)
	}
	messages, err := consumer.Messages(jetstream.PullMaxMessagesWithBytesLimit(fetchMessages, fetchBytes))
	if err != nil {
		return j.line.explain(err, "replay", j.name)
	}
	defer messages.Stop()
	r := reader{snapshot: j.snapshot, f: f}
	for seq := j.begin; seq <= j.end; seq++ {
		msg, err := j.next(ctx, messages, seq)
		if err != nil {
			return err
		}
		meta, err := msg.Metadata()
		if err != nil {
			return j.corrupt("replay", "the server sent something that is no message of a stream: %v", err)
		}
		if meta.Sequence.Stream != seq {
			return j.corrupt("replay", "message %d is missing; the next is %d", seq, meta.Sequence.Stream)
		}
		m, err := parse(msg.Data())
		if err == nil && m.seq != seq {
			err = errors.New("belongs elsewhere")
		}
		if err == nil {
			err = r.take(m)
		}
		if r.failed != nil {
			return r.failed
		}
		if err != nil {
			return failBy(err, sluice.Corrupt, "replay", j.name, "message %d", seq)
		}
	}
	return nil
}

// next waits for the next message as long as the server can say that there is one.
func (j *journal) next(ctx context.Context, messages jetstream.MessagesContext, seq uint64) (jetstream.Msg, error) {
	deadline := time.Now().Add(j.js.opts.Patience)
	for {
		once, cancel := j.line.once(ctx)
		msg, err := messages.Next(jetstream.NextContext(once))
		cancel()
		if err == nil {
			return msg, nil
		}
		if why := j.line.cause(); why != nil {
			return nil, why
		}
		if ctx.Err() != nil || time.Now().After(deadline) || errors.Is(err, jetstream.ErrMsgIteratorClosed) {
			return nil, j.line.explain(err, "replay", j.name)
		}
		// Is the server slow, or can it not read the message?
		if _, err := j.stream.GetMsg(ctx, seq); errors.Is(err, jetstream.ErrMsgNotFound) {
			return nil, j.corrupt("replay", "message %d can't be read", seq)
		}
	}
}

// reader puts messages together to records.
type reader struct {
	snapshot uint64 // where one ends that is known to be whole
	f        func(sluice.Record) error
	failed   error // f's

	parts uint32
	carry []byte
}

var errUneven = errors.New("ends in the middle of a record")

func (r *reader) take(m message) error {
	switch m.kind {
	case kindClaim: // the writer before died in the middle of pieces that never counted
		r.parts, r.carry = 0, nil
		return nil
	case kindPart:
		if m.parts != r.parts {
			return errors.New("is a piece out of turn")
		}
		r.parts++
		r.carry = append(r.carry, m.body...) // never in a message's memory, whose records f may keep
		if m.seq < r.snapshot {              // it may be large, and is whole
			return r.emit()
		}
		return nil
	}
	if m.parts != r.parts {
		return errors.New("lacks pieces")
	}
	if r.carry == nil {
		r.carry = m.body
	} else {
		r.carry = append(r.carry, m.body...)
	}
	if err := r.emit(); err != nil {
		return err
	}
	if len(r.carry) > 0 {
		return errUneven
	}
	r.parts, r.carry = 0, nil
	return nil
}

func (r *reader) emit() error {
	rest, err := takeRecords(r.carry, func(record sluice.Record) error {
		r.failed = r.f(record)
		return r.failed
	})
	r.carry = rest
	return err
}
