package natsjournal

import (
	"context"
	"errors"
	"fmt"
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
	from := source{j: j}
	defer from.stop()
	r := reader{snapshot: j.snapshot, f: f}
	for seq := j.begin; seq <= j.end; seq++ {
		data, err := from.next(ctx, seq)
		if err != nil {
			return err
		}
		m, err := parse(data)
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

// source is where a replay gets its messages: a consumer of the stream, and another one from the same place where that breaks off. The client's own ordered consumer would
// do that too, but for ever, and without heeding a context.
type source struct {
	j        *journal
	messages jetstream.MessagesContext
}

// next returns the message at seq, and waits for it as long as the patience lasts and the server can say that there is one.
func (s *source) next(ctx context.Context, seq uint64) ([]byte, error) {
	j := s.j
	deadline := time.Now().Add(j.js.opts.Patience)
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		data, err := s.ask(ctx, seq)
		if err == nil {
			return data, nil
		}
		if why := j.line.cause(); why != nil {
			return nil, why
		}
		// Is the server slow, or can it not read the message?
		once, cancel := j.line.once(ctx)
		_, gone := j.stream.GetMsg(once, seq)
		cancel()
		if errors.Is(gone, jetstream.ErrMsgNotFound) {
			return nil, failBy(err, sluice.Corrupt, "replay", j.name, "message %d is missing or can't be read", seq)
		}
		if ctx.Err() != nil || time.Now().After(deadline) {
			return nil, j.line.explain(err, "replay", j.name)
		}
		s.stop()
		j.line.sleep(ctx, pause)
	}
}

func (s *source) ask(ctx context.Context, seq uint64) ([]byte, error) {
	once, cancel := s.j.line.once(ctx)
	defer cancel()
	if s.messages == nil {
		consumer, err := s.j.stream.CreateConsumer(once, jetstream.ConsumerConfig{
			DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: seq, AckPolicy: jetstream.AckNonePolicy,
			MemoryStorage: true, Replicas: 1, InactiveThreshold: s.j.js.opts.Patience,
		})
		if err != nil {
			return nil, err
		}
		if s.messages, err = consumer.Messages(jetstream.PullMaxMessagesWithBytesLimit(fetchMessages, fetchBytes)); err != nil {
			return nil, err
		}
	}
	msg, err := s.messages.Next(jetstream.NextContext(once))
	if err != nil {
		return nil, err
	}
	meta, err := msg.Metadata()
	if err != nil {
		return nil, err
	}
	if meta.Sequence.Stream != seq {
		return nil, fmt.Errorf("message %d came instead", meta.Sequence.Stream)
	}
	return msg.Data(), nil
}

// stop lets go of the consumer, which the server forgets after a while.
func (s *source) stop() {
	if s.messages != nil {
		s.messages.Stop()
		s.messages = nil
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
	if m.kind == kindSnapshot && m.seq != r.snapshot { // it replaces what was read already
		return errors.New("is the end of a later snapshot than the server named")
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
