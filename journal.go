package sluice

import "context"

// Record is one transition of a queue, encoded by the queue; a journal does not look inside.
type Record struct {
	// Lazy says that the record may be lost in a crash: an acquire that is lost merely redelivers early.
	Lazy bool
	Data []byte
}

// Journal is where a queue writes what must survive. A queue without one lives in memory only.
//
// Append keeps order: records that are durable are those of a prefix of all that was appended, from which lazy ones may be missing.
// A call whose context is done already changes nothing.
// One writer owns a journal; a writer that was superseded gets ErrStale and must stop.
type Journal interface {
	// Append adds the records in order and returns when all that are not lazy are durable. Several goroutines may call it; a journal
	// is expected to make many records durable at once. After an error the queue must be reopened: what was appended may or may not be there.
	Append(ctx context.Context, records []Record) error

	// Replay calls f for every record since the last snapshot, that snapshot's first, in order. It is called once, before the first Append.
	Replay(ctx context.Context, f func(Record) error) error

	// Compact replaces everything appended so far by the snapshot, atomically: after a crash either is there.
	Compact(ctx context.Context, snapshot []Record) error

	Close() error
}
