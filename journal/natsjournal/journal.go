package natsjournal

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/sluice-ml/sluice"
)

const (
	// MaxRecord bounds the data of one record, in bytes.
	MaxRecord = 64 << 20

	// fullBatch is when a batch takes no more records, and the least size of a message's body. A record that is larger fills a batch alone and is cut.
	fullBatch = 512 << 10

	// fullQueue is how many bytes wait for the server before Append itself waits.
	fullQueue = 8 << 20

	// keptBuffer is how large a buffer may be that an idle journal keeps for the next message.
	keptBuffer = 64 << 10

	// company is how long lazy records wait for some that are not.
	company = 10 * time.Millisecond

	// askAgain is how long a publish waits for its reply before it looks for itself whether the message has arrived.
	askAgain = 5 * time.Second
)

// journal implements [sluice.Journal] on one stream.
type journal struct {
	js     *Journals
	line   *line
	name   string
	writer writerID
	stream jetstream.Stream
	acked  *ackedFile // of an embedded server

	// What a replay reads: from begin, which is a snapshot's first piece unless snapshot is 0, to end, our claim.
	begin, snapshot, end uint64

	mu      sync.Mutex // guards the following
	queue   []*batch   // to be written, in order
	queued  int        // bytes in it
	writing chan struct{}
	spare   []byte      // for the body of the next batch
	timer   *time.Timer // company's
	touched bool        // something was appended
	broken  error
	told    bool // somebody has heard of that
	closed  bool

	// The writing goroutine's; before and after it the opener's and the closer's.
	seq uint64 // of the last message
	buf []byte
}

var _ sluice.Journal = (*journal)(nil)

// batch is what goes out together: records, or a snapshot, which stays as it is until it is written.
type batch struct {
	body     []byte
	snapshot []sluice.Record
	replaces bool // it is a snapshot, an empty one perhaps
	done     chan struct{}
	err      error
}

func newJournal(js *Journals, l *line, name string) *journal {
	j := &journal{js: js, line: l, name: name}
	rand.Read(j.writer[:])
	return j
}

func (j *journal) corrupt(op, format string, args ...any) error {
	return fail(sluice.Corrupt, op, j.name, format, args...)
}

// claim finds or makes the stream and takes it over from whoever wrote it before.
func (j *journal) claim(ctx context.Context) error {
	err := j.line.call(ctx, "open", j.name, func(ctx context.Context) (err error) {
		name := j.js.stream(j.name)
		j.stream, err = j.line.js.Stream(ctx, name)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			j.stream, err = j.line.js.CreateStream(ctx, jetstream.StreamConfig{
				Name: name, Subjects: []string{j.js.subject(j.name) + ".*"}, Replicas: j.js.opts.Replicas, DenyDelete: true,
			})
		}
		return err
	})
	if err != nil {
		return err
	}
	if j.acked, err = j.js.openAcked(j.name); err != nil {
		return err
	}
	if err := j.takeOver(ctx); err != nil {
		return errors.Join(err, j.acked.close())
	}
	return nil
}

// takeOver writes our claim behind whatever there is, and finds where a replay begins.
func (j *journal) takeOver(ctx context.Context) error {
	var st jetstream.StreamState
	for deadline := time.Now().Add(j.js.opts.Patience); ; {
		var err error
		if st, err = j.state(ctx, "open"); err != nil {
			return err
		}
		if err := j.acked.check(st.LastSeq, j.js.opts); err != nil {
			return err
		}
		// In this order: who takes the prefix over from now on finds the stream and takes the place that we ask for.
		if err := j.line.mine(ctx); err != nil {
			return err
		}
		j.seq = st.LastSeq
		j.buf = append(j.buf[:0], make([]byte, headSize)...)
		err = j.publish(ctx, kindClaim, 0)
		if err == nil {
			break
		}
		if !errors.Is(err, sluice.ErrStale) || j.line.cause() != nil || ctx.Err() != nil || time.Now().After(deadline) {
			return err
		}
		// Whoever writes has written meanwhile. Sooner or later it finds its place taken.
	}
	j.begin, j.end = 1, j.seq
	if err := j.findSnapshot(ctx); err != nil {
		return err
	}
	first := st.FirstSeq
	if st.Msgs == 0 {
		first = j.end
	}
	switch {
	case first > j.begin:
		return j.corrupt("open", "begins at message %d, want %d", first, j.begin)
	case first < j.begin:
		return j.purge(ctx) // the writer before died when it was about to
	}
	return nil
}

func (j *journal) state(ctx context.Context, op string) (jetstream.StreamState, error) {
	var st jetstream.StreamState
	err := j.line.call(ctx, op, j.name, func(ctx context.Context) error {
		info, err := j.stream.Info(ctx)
		if err == nil {
			st = info.State
		}
		return err
	})
	return st, err
}

// findSnapshot finds where the last snapshot begins and ends.
func (j *journal) findSnapshot(ctx context.Context) error {
	var raw *jetstream.RawStreamMsg
	err := j.line.call(ctx, "open", j.name, func(ctx context.Context) (err error) {
		raw, err = j.stream.GetLastMsgForSubject(ctx, j.js.subject(j.name)+".snapshot")
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			raw, err = nil, nil
		}
		return err
	})
	if err != nil || raw == nil {
		return err
	}
	m, err := parse(raw.Data)
	if err == nil && (m.kind != kindSnapshot || m.seq != raw.Sequence || uint64(m.parts) >= m.seq) {
		err = errors.New("is no snapshot's end")
	}
	if err != nil {
		return failBy(err, sluice.Corrupt, "open", j.name, "message %d", raw.Sequence)
	}
	j.begin, j.snapshot = m.seq-uint64(m.parts), m.seq
	return nil
}

// purge removes what the snapshot replaces. To do it twice does no harm.
func (j *journal) purge(ctx context.Context) error {
	return j.line.call(ctx, "compact", j.name, func(ctx context.Context) error {
		return j.stream.Purge(ctx, jetstream.WithPurgeSequence(j.begin))
	})
}

// Append implements [sluice.Journal]. A record may hold [MaxRecord] bytes.
func (j *journal) Append(ctx context.Context, records []sluice.Record) error {
	for i := range records {
		if n := len(records[i].Data); n > MaxRecord {
			return fail(sluice.Invalid, "append", j.name, "record %d is %d bytes, at most %d are allowed", i, n, MaxRecord)
		}
	}
	j.mu.Lock()
	for j.queued > fullQueue && j.broken == nil && !j.closed {
		head := j.queue[0]
		j.mu.Unlock()
		select {
		case <-head.done:
		case <-ctx.Done():
			return failBy(context.Cause(ctx), sluice.Unavailable, "append", j.name, "nothing was appended")
		}
		j.mu.Lock()
	}
	err := j.refusal("append")
	if err == nil && ctx.Err() != nil {
		err = failBy(context.Cause(ctx), sluice.Unavailable, "append", j.name, "nothing was appended")
	}
	if err != nil || len(records) == 0 {
		j.mu.Unlock()
		return err
	}
	j.touched = true
	var last *batch // with a record that is not lazy
	for _, r := range records {
		b := j.tail(recordSize(r))
		before := len(b.body)
		b.body = appendRecord(b.body, r)
		j.queued += len(b.body) - before
		if !r.Lazy {
			last = b
		}
	}
	if last == nil && j.queued < fullBatch {
		if j.timer == nil && j.writing == nil {
			j.timer = time.AfterFunc(company, func() {
				j.mu.Lock()
				j.start()
				j.mu.Unlock()
			})
		}
		j.mu.Unlock()
		return nil
	}
	j.start()
	j.mu.Unlock()
	if last == nil {
		return nil
	}
	return j.wait(ctx, last, "append")
}

// tail returns the batch that takes a record of the given size.
func (j *journal) tail(size int) *batch {
	if n := len(j.queue); n > 0 {
		if b := j.queue[n-1]; !b.replaces && len(b.body)+size <= fullBatch {
			return b
		}
	}
	b := &batch{body: j.spare, done: make(chan struct{})}
	j.spare = nil
	j.queue = append(j.queue, b)
	return b
}

func (j *journal) wait(ctx context.Context, b *batch, op string) error {
	select {
	case <-b.done:
		if b.err != nil {
			j.mu.Lock()
			j.told = true
			j.mu.Unlock()
		}
		return b.err
	case <-ctx.Done():
		return failBy(context.Cause(ctx), sluice.Unavailable, op, j.name, "it may or may not be there")
	}
}

// refusal says why nothing can be written. The caller holds mu.
func (j *journal) refusal(op string) error {
	switch {
	case j.broken != nil:
		j.told = true
		return j.broken
	case j.closed:
		return fail(sluice.Closed, op, j.name, "the journal is closed")
	}
	return j.line.cause()
}

// Compact implements [sluice.Journal]. Appends may go on meanwhile; they come behind the snapshot. The snapshot must stay as it is until Compact has returned nil or the
// journal is closed.
func (j *journal) Compact(ctx context.Context, snapshot []sluice.Record) error {
	for i := range snapshot {
		if n := len(snapshot[i].Data); n > MaxRecord {
			return fail(sluice.Invalid, "compact", j.name, "record %d is %d bytes, at most %d are allowed", i, n, MaxRecord)
		}
	}
	j.mu.Lock()
	err := j.refusal("compact")
	if err == nil && ctx.Err() != nil {
		err = failBy(context.Cause(ctx), sluice.Unavailable, "compact", j.name, "nothing was written")
	}
	if err != nil {
		j.mu.Unlock()
		return err
	}
	j.touched = true
	b := &batch{snapshot: snapshot, replaces: true, done: make(chan struct{})}
	j.queue = append(j.queue, b)
	j.start()
	j.mu.Unlock()
	return j.wait(ctx, b, "compact")
}

// start sees to it that the queue is written. The caller holds mu.
func (j *journal) start() {
	if j.timer != nil {
		j.timer.Stop()
		j.timer = nil
	}
	if j.writing == nil && len(j.queue) > 0 {
		j.writing = make(chan struct{})
		go j.write()
	}
}

// write writes batch after batch and ends when there is none. While one is on its way the next fills up: that is the group commit.
func (j *journal) write() {
	j.mu.Lock()
	for len(j.queue) > 0 {
		b := j.queue[0]
		j.queue = j.queue[1:]
		j.queued -= len(b.body)
		b.err = j.broken
		if b.err == nil {
			j.mu.Unlock()
			err := j.put(b)
			j.mu.Lock()
			if err != nil && j.broken == nil {
				j.broken = err
			}
			b.err = err
		}
		if cap(b.body) <= keptBuffer {
			j.spare = b.body[:0]
		}
		close(b.done)
	}
	j.queue = nil
	if cap(j.buf) > keptBuffer { // many runs are idle after a burst
		j.buf = make([]byte, headSize)
	}
	close(j.writing)
	j.writing = nil
	j.mu.Unlock()
}

// put writes one batch.
func (j *journal) put(b *batch) error {
	ctx := j.line.ctx
	full := fullBatch
	if n := int(j.line.nc.MaxPayload()) - headRoom; n < full {
		full = n
	}
	var parts uint32
	// piece publishes what is full, so that at least a byte is left for the last piece.
	piece := func(more []byte) error {
		for len(j.buf)+len(more) > headSize+full {
			n := headSize + full - len(j.buf)
			j.buf = append(j.buf, more[:n]...)
			more = more[n:]
			if err := j.publish(ctx, kindPart, parts); err != nil {
				return err
			}
			parts++
			j.buf = j.buf[:headSize]
			if err := j.step("part"); err != nil {
				return err
			}
		}
		j.buf = append(j.buf, more...)
		return nil
	}
	j.buf = j.buf[:headSize]
	if !b.replaces {
		if err := piece(b.body); err != nil {
			return err
		}
		return j.publish(ctx, kindRecords, parts)
	}
	var record []byte
	for _, r := range b.snapshot {
		record = appendRecord(record[:0], r)
		if err := piece(record); err != nil {
			return err
		}
	}
	if err := j.step("snapshot"); err != nil {
		return err
	}
	if err := j.publish(ctx, kindSnapshot, parts); err != nil {
		return err
	}
	j.begin, j.snapshot = j.seq-uint64(parts), j.seq
	if err := j.step("purge"); err != nil {
		return err
	}
	return j.purge(ctx)
}

// headRoom is what the head and the headers of a message take at most, subject and all.
const headRoom = headSize + 512

func (j *journal) step(what string) error {
	if j.js.opts.step != nil {
		return j.js.opts.step(what)
	}
	return nil
}

// publish stores what is in buf behind the last message, once, or says why not. It asks for that place; so if the reply is lost, a look at the place tells
// whether the message has arrived, and to send it again can't store it twice.
func (j *journal) publish(ctx context.Context, kind byte, parts uint32) error {
	place := j.seq + 1
	seal(j.buf, kind, parts, place, j.writer)
	subject := j.js.subject(j.name) + ".log"
	if kind == kindSnapshot {
		subject = j.js.subject(j.name) + ".snapshot"
	}
	deadline := time.Now().Add(j.js.opts.Patience)
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		if err := j.line.cause(); err != nil {
			return err
		}
		err := j.send(ctx, subject, place)
		if err != nil {
			err = j.look(ctx, place, err)
		}
		if err == nil {
			j.seq = place
			return j.acked.set(place)
		}
		if !errors.Is(err, errUnknown) {
			return err
		}
		if why := j.line.cause(); why != nil {
			return why
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return j.line.explain(err, "append", j.name)
		}
		j.line.sleep(ctx, pause)
	}
}

// errUnknown joins an error that leaves open whether the message will be stored.
var errUnknown = errors.New("whether the message was stored is not known")

// send publishes as jetstream.PublishMsg does, but for how the acknowledgement is read: that would take a tenth of the time of a small message.
func (j *journal) send(ctx context.Context, subject string, place uint64) error {
	ctx, cancel := j.line.once(ctx)
	defer cancel()
	m := &nats.Msg{Subject: subject, Data: j.buf, Header: nats.Header{jetstream.ExpectedLastSeqHeader: {strconv.FormatUint(place-1, 10)}}}
	reply, err := j.line.nc.RequestMsgWithContext(ctx, m)
	if err != nil {
		return err
	}
	got, err := storedAt(j.js.stream(j.name), reply.Data)
	if err == nil && got != place {
		return j.corrupt("append", "the server stored message %d as %d", place, got)
	}
	return err
}

// storedAt reads an acknowledgement: {"stream":"NAME","seq":N}, or anything else that the server has to say.
func storedAt(stream string, ack []byte) (seq uint64, err error) {
	if digits, ok := bytes.CutPrefix(ack, []byte(`{"stream":"`+stream+`","seq":`)); ok && len(digits) > 0 && digits[0] != '0' {
		if digits, ok = bytes.CutSuffix(digits, []byte("}")); ok {
			if seq, err = strconv.ParseUint(string(digits), 10, 64); err == nil {
				return seq, nil
			}
		}
	}
	var said struct {
		Error *jetstream.APIError `json:"error"`
		*jetstream.PubAck
	}
	switch err := json.Unmarshal(ack, &said); {
	case err != nil:
		return 0, errors.Join(jetstream.ErrInvalidJSAck, err)
	case said.Error != nil:
		return 0, said.Error
	case said.PubAck == nil || said.Stream == "":
		return 0, jetstream.ErrInvalidJSAck
	}
	return said.Sequence, nil
}

// look finds out what became of a message after an error.
func (j *journal) look(ctx context.Context, place uint64, err error) error {
	if why := j.line.cause(); why != nil {
		return why
	}
	if errors.Is(err, sluice.ErrCorrupt) {
		return err
	}
	var api *jetstream.APIError
	if errors.As(err, &api) && api.ErrorCode != jetstream.JSErrCodeStreamWrongLastSequence && api.ErrorCode != jetstream.JSErrCodeStreamWrongLastSequenceConstant {
		if why := j.line.explain(err, "append", j.name); api.Code != 503 || errors.Is(why, sluice.ErrNoSpace) {
			return why
		}
	}
	ctx, cancel := j.line.once(ctx)
	defer cancel()
	raw, lookErr := j.stream.GetMsg(ctx, place)
	switch {
	case lookErr == nil && bytes.Equal(raw.Data, j.buf):
		return nil
	case lookErr == nil:
		return j.stale()
	case !errors.Is(lookErr, jetstream.ErrMsgNotFound):
		return errors.Join(errUnknown, err, lookErr)
	}
	// The place is free, or was and is purged.
	info, infoErr := j.stream.Info(ctx)
	switch {
	case infoErr != nil:
		return errors.Join(errUnknown, err, infoErr)
	case info.State.LastSeq >= place:
		return j.stale()
	case info.State.LastSeq < place-1: // a server that has just begun to lead a cluster may not have caught up yet; if it stays so, it is damage
		err = j.corrupt("append", "the server's last message is %d, but %d was acknowledged", info.State.LastSeq, place-1)
	}
	return errors.Join(errUnknown, err)
}

func (j *journal) stale() error {
	return fail(sluice.Stale, "append", j.name, "another writer has opened the journal")
}

// Close implements [sluice.Journal]: it writes what still waits and then refuses everything. What failed and nobody has heard of yet, since it was lazy, is its error.
func (j *journal) Close() error {
	j.mu.Lock()
	if j.closed {
		j.mu.Unlock()
		return nil
	}
	j.closed = true
	j.start()
	j.mu.Unlock()
	j.settle()
	j.js.forget(j)
	j.mu.Lock()
	err := j.broken
	if j.told {
		err = nil
	}
	j.mu.Unlock()
	return errors.Join(err, j.acked.close())
}

// settle waits until nothing is being written.
func (j *journal) settle() {
	j.mu.Lock()
	writing := j.writing
	j.mu.Unlock()
	if writing != nil {
		<-writing
	}
}

// fail makes the journal refuse everything.
func (j *journal) fail(err error) {
	j.mu.Lock()
	if j.broken == nil {
		j.broken, j.told = err, true
	}
	j.mu.Unlock()
}
