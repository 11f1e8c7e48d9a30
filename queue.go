package sluice

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"time"
)

// LeaseID is the random identity of one delivery. Only its holder can settle it, and once the lease has run out or was taken over, nobody.
type LeaseID [16]byte

// NewLeaseID returns 128 fresh random bits.
func NewLeaseID() (id LeaseID) {
	rand.Read(id[:])
	return id
}

func (l LeaseID) String() string { return hex.EncodeToString(l[:]) }

// MarshalText gives 32 hexadecimal digits.
func (l LeaseID) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// UnmarshalText accepts 32 hexadecimal digits.
func (l *LeaseID) UnmarshalText(text []byte) error {
	if len(text) == 2*len(l) {
		if _, err := hex.Decode(l[:], text); err == nil {
			return nil
		}
	}
	return &Error{Kind: Invalid, Op: "lease id", Subject: string(text), Detail: "wants 32 hexadecimal digits"}
}

// Lease is the right to consume one sample until a deadline. (Upstream's Lease.)
type Lease struct {
	ID       LeaseID
	Ref      Ref
	Consumer string // who it was given to
	// Deadline is when it runs out unless it is renewed, by the queue's clock; TimeLeft is what was left of it when it was handed out, which is what a
	// consumer with another clock must go by.
	Deadline time.Time
	TimeLeft time.Duration
	// Redelivery counts the deliveries before this one: 0 at first.
	Redelivery int
	// Window is set where the run deals out windows.
	Window *WindowSlot
}

// WindowSlot says which place of which window a lease fills.
type WindowSlot struct {
	Number           int64 `json:"number"` // of the window, from 0
	Rank             int   `json:"rank"`   // whose share it is
	Slot             int   `json:"slot"`   // place in that share, from 0
	Pad              bool  `json:"pad"`    // a stand-in: the sample is in the window already, so it must not count in the loss
	Tokens           int64 `json:"tokens"` // in the whole window, pads left out
	SupervisedTokens int64 `json:"supervised_tokens"`
}

// Consumer identifies who acquires and settles. A newer incarnation of a name takes over at once: the old one's leases return, and its later calls are
// ErrStale.
type Consumer struct {
	Name        string // [ValidateID]
	Incarnation int64  // grows with every start of the process; 0 or more
	Rank        int    // its data-parallel rank, where the run has windows

	// Member and Members describe a replica group: consumers of one Name that hold shards of one model (tensor, context or sequence parallel).
	// All Members get the same sample under one lease, which is settled when all have settled it. Members 0 or 1 is no group.
	Member, Members int
}

// AcquireRequest asks for leases.
type AcquireRequest struct {
	Consumer Consumer
	// Max is how many leases are wanted at most; 1 if it is 0. In a run with windows no more are given than the rank's open share has left.
	Max int
	// Wait is how long to wait for the first one: 0 returns at once, below 0 waits as long as the context lives.
	Wait time.Duration
	// Ahead says that the consumer asks ahead of need, and has work in hand: while such a call waits, its consumer does not count as one that waits, neither
	// in the look-out for deadlock nor in the time that consumers waited. The gate counts it as starving all the same, within the caps.
	Ahead bool
	// RequestID, if not empty, makes the call repeatable: for ten minutes the same id gets the same answer, as far as those leases are still held. A member of a
	// group is given the ones that have ended as well, like the members that were faster: its answers to them are stale, but it stays in step.
	RequestID string
}

// Delivery is the answer to an acquire, one of four: leases; nothing yet (no lease, no End, no error); the end; or an error, ErrUnavailable among them,
// which is not the end.
type Delivery struct {
	Leases []Lease
	// End says that the stream is over for this consumer: the queue is closed and nothing is pending, and either the consumer still holds leases (which it will
	// settle) or nobody does.
	End bool
	// Cause is why the queue was closed, if that was not its regular end: the consumer must raise it rather than call a cut-off epoch complete.
	Cause error
}

// Verdict is what a consumer says of a lease.
type Verdict string

// The verdicts.
const (
	Ack           Verdict = "ack"            // trained on: the claim ends
	Fail          Verdict = "fail"           // try again, behind those that wait for their first try; counts against MaxFails
	FailPermanent Verdict = "fail_permanent" // no try can succeed: a dead letter at once
	Return        Verdict = "return"         // unused: back to the head, counts nothing
)

// Settlement settles one lease.
type Settlement struct {
	Lease   LeaseID
	Verdict Verdict
	Reason  string // for the two fails: at most 4 KiB are kept, control characters stripped
}

// SettleRequest settles leases. Each is settled by itself: one that is stale keeps none of the others from being settled.
type SettleRequest struct {
	Consumer    Consumer
	Settlements []Settlement
	RequestID   string // as in AcquireRequest
}

// SettleStatus is the answer to a settlement or a renewal.
type SettleStatus string

// The answers.
const (
	Settled        SettleStatus = "settled"         // it counts; the first time that this was said (or the repetition of a request id)
	AlreadySettled SettleStatus = "already_settled" // the same lease was settled before, as SettleResult.As
	StaleLease     SettleStatus = "stale"           // run out, taken over, or never a lease: nothing changed
	Renewed        SettleStatus = "renewed"         // a renewal: the lease has its full time again
)

// SettleResult is the answer for one lease.
type SettleResult struct {
	Lease  LeaseID
	Status SettleStatus
	As     Verdict // what it was settled as, where it was
	Dead   bool    // the sample became a dead letter by this
}

// RenewRequest gives leases their full time again.
type RenewRequest struct {
	Consumer Consumer
	Leases   []LeaseID // all that the consumer holds, if nil
}

// ReserveRequest asks the run's gate for room.
type ReserveRequest struct {
	Producer  Producer
	Bytes     int64
	RequestID string
}

// Producer identifies a producer session. The zero Producer is anonymous: nothing watches over it, and the queue must be closed by hand.
type Producer struct {
	Name        string
	Incarnation int64
}

// PutRequest enqueues a ref whose sample is in the store.
type PutRequest struct {
	Ref       Ref
	Producer  Producer
	Positions []Position // where its rows come from; recorded with the put
}

// PutStatus is the answer to a put that is no error.
type PutStatus string

// The answers.
const (
	Enqueued   PutStatus = "enqueued"
	AlreadyPut PutStatus = "already" // this generation is pending, leased or dead: the put that is repeated has succeeded
	WasSettled PutStatus = "settled" // this generation was settled before; it is not enqueued again
	Gated      PutStatus = "gated"   // a version gate dropped it: counted and freed
)

// ProducerState is what a producer says of itself.
type ProducerState string

// The states. When all of a run's producers are done, its queue closes.
const (
	ProducerRunning ProducerState = "running" // hello, and heartbeat
	ProducerDone    ProducerState = "done"
	ProducerFailed  ProducerState = "failed" // the queue closes with the cause
)

// ProducerReport registers a producer session, keeps it alive, or ends it.
type ProducerReport struct {
	Producer Producer
	State    ProducerState
	Cause    string // for ProducerFailed
}

// DeadLetter is a sample that ran out of tries.
type DeadLetter struct {
	Ref      Ref
	Since    time.Time
	Fails    int
	Expiries int
	Reasons  []string // oldest first, the last ones kept
	Freed    bool     // its bytes were freed to keep dead letters within their share of the cap; it cannot be requeued
}

// Taken says which positions of a source and epoch were put: a set of half-open ranges, sorted, disjoint.
type Taken struct {
	Source string     `json:"source"`
	Epoch  int64      `json:"epoch"`
	Ranges [][2]int64 `json:"ranges"`
}

// Contains reports whether the index was taken.
func (t *Taken) Contains(index int64) bool {
	lo, hi := 0, len(t.Ranges)
	for lo < hi {
		mid := (lo + hi) / 2
		switch r := t.Ranges[mid]; {
		case index < r[0]:
			hi = mid
		case index >= r[1]:
			lo = mid + 1
		default:
			return true
		}
	}
	return false
}

// Queue is the control plane of one run: it carries refs and nothing heavier. (Upstream's SampleRefQueue.)
//
// Delivery is at least once. First deliveries come in put order; a sample that was failed or whose lease ran out goes behind those that still wait for their
// first try; a returned one goes to the head. A put, fail, return, expiry and close wake those who wait at once; nothing polls.
//
// All methods may be called from any goroutine, and all but Status, ReclaimExpired and Close fail with ErrClosed where closing says so.
// ErrUnavailable means that the queue cannot answer now (a service that restarts, a journal that failed): nothing is known of the call, and it may be repeated.
type Queue interface {
	// Reserve waits at the run's gate. See [Gate.Reserve]. ErrStale if a newer incarnation of the producer has come.
	Reserve(ctx context.Context, r ReserveRequest) (Reservation, error)

	// Put enqueues a ref and takes the claim on its sample. It ignores the marks. Errors: ErrClosed; ErrSchema and ErrInvalid (another store or
	// run); ErrDuplicate (the id is here in another generation); ErrNotFound (no such sample in the store); ErrStale.
	Put(ctx context.Context, r PutRequest) (PutStatus, error)

	// PutBlocksUntilBelow is Put behind the gate: it waits while the gate is paused and no consumer starves. It never blocks a
	// put that the consumers wait for. abortWhen, if not nil, is asked whenever it wakes and at least every 50 ms; when it says true the call fails with
	// ErrAborted. (Upstream's put_blocks_until_below.)
	PutBlocksUntilBelow(ctx context.Context, r PutRequest, abortWhen func() bool) (PutStatus, error)

	// Acquire leases samples. See [Delivery] for its answers. Leases that it was given in the moment in which ctx ended are its answer all the same. ErrStale if a newer incarnation of the consumer has come; ErrWedged if waiting has no
	// prospect.
	Acquire(ctx context.Context, r AcquireRequest) (Delivery, error)

	// Settle acks, fails or returns leases. The results are in the order of the settlements.
	Settle(ctx context.Context, r SettleRequest) ([]SettleResult, error)

	// Renew gives leases their full visibility timeout again.
	Renew(ctx context.Context, r RenewRequest) ([]SettleResult, error)

	// ReclaimExpired takes back the leases that have run out and returns their number. Nobody has to call it: expiry is automatic.
	ReclaimExpired(ctx context.Context) (int, error)

	// Leave ends a consumer: its leases return to the head. ErrStale if a newer incarnation has come.
	Leave(ctx context.Context, c Consumer) error

	// Report registers a producer session, keeps it alive, or ends it.
	Report(ctx context.Context, r ProducerReport) error

	// Taken returns which positions of a source were put, by epoch.
	Taken(ctx context.Context, source string) ([]Taken, error)

	// DeadLetters lists the dead letters, oldest first. Requeue gives those of the given sample ids new budgets and puts them behind all others; Drop frees them.
	// Both return how many they found.
	DeadLetters(ctx context.Context) ([]DeadLetter, error)
	Requeue(ctx context.Context, sampleIDs ...string) (int, error)
	Drop(ctx context.Context, sampleIDs ...string) (int, error)

	// Reshape changes the number of ranks and of samples a rank and step. ErrConflict while a lease is out.
	Reshape(ctx context.Context, ranks, perRank int) error

	// Status is a snapshot.
	Status(ctx context.Context) (Status, error)

	// Close ends the puts; what is pending drains. A cause that is not nil reaches the consumers behind the drain. It is idempotent; the first
	// cause stays.
	Close(ctx context.Context, cause error) error
}

// Status is a snapshot of a queue. Counters count since the run began.
type Status struct {
	RunID  string `json:"run_id"`
	Closed bool   `json:"closed"`
	// StepsPerCheckpoint is what the run declares; consumers may ack at checkpoints only if it is above 0.
	StepsPerCheckpoint int    `json:"steps_per_checkpoint,omitempty"`
	Cause              string `json:"cause,omitempty"`

	Pending     int `json:"pending"`     // waiting for a lease (upstream's pending_count)
	Outstanding int `json:"outstanding"` // leased (upstream's outstanding_count)
	Dead        int `json:"dead"`        // dead letters now

	Put         int64 `json:"put"`
	Delivered   int64 `json:"delivered"`   // leases handed out
	Redelivered int64 `json:"redelivered"` // of these, not the first of their sample; pads are not counted
	Padded      int64 `json:"padded"`      // stand-in leases
	Acked       int64 `json:"acked"`
	Failed      int64 `json:"failed"`
	Expired     int64 `json:"expired"`
	Returned    int64 `json:"returned"`
	DeadTotal   int64 `json:"dead_total"`
	Dropped     int64 `json:"dropped"`      // dead letters dropped by hand
	TailDropped int64 `json:"tail_dropped"` // samples of an incomplete last window
	Gated       int64 `json:"gated"`        // dropped by version gates
	Stale       int64 `json:"stale"`        // calls that came too late

	TokensPut     int64 `json:"tokens_put"`
	TokensAcked   int64 `json:"tokens_acked"`
	BytesPut      int64 `json:"bytes_put"`
	BytesAcked    int64 `json:"bytes_acked"`
	WindowsOpened int64 `json:"windows_opened"`

	Health Health `json:"health"` // of the store

	Elapsed          time.Duration `json:"elapsed"` // since the queue was opened
	Ended            time.Duration `json:"ended"`   // how long ago the last sample was settled, once the run is closed and none is left; 0 before
	Paused           bool          `json:"paused"`
	Starving         bool          `json:"starving"`
	ProducersWaiting int           `json:"producers_waiting"`
	ConsumersWaiting int           `json:"consumers_waiting"`
	ProducerPaused   time.Duration `json:"producer_paused"` // time in which at least one producer waited at the gate
	ConsumerWaited   time.Duration `json:"consumer_waited"` // time in which at least one consumer waited for a sample, and not ahead of need
	OldestLease      time.Duration `json:"oldest_lease"`    // age

	Wedged string `json:"wedged,omitempty"` // says who waits for whom, with the numbers, when nothing can move
	// MissingRanks are those of a run with windows that the others wait for: samples are dealt to them, and no consumer of theirs holds a lease, waits, or
	// has been heard of within a visibility timeout. In order.
	MissingRanks []int            `json:"missing_ranks,omitempty"`
	Consumers    []ConsumerStatus `json:"consumers,omitempty"`
	Producers    []ProducerStatus `json:"producers,omitempty"`
}

// ConsumerStatus describes one consumer in a Status.
type ConsumerStatus struct {
	Name        string        `json:"name"`
	Incarnation int64         `json:"incarnation"`
	Rank        int           `json:"rank"`
	Leases      int           `json:"leases"`
	LeasedBytes int64         `json:"leased_bytes"`
	Waiting     bool          `json:"waiting"`
	Delivered   int64         `json:"delivered"`
	Acked       int64         `json:"acked"`
	LastSeen    time.Duration `json:"last_seen"` // ago
}

// ProducerStatus describes one producer in a Status.
type ProducerStatus struct {
	Name        string        `json:"name"`
	Incarnation int64         `json:"incarnation"`
	State       ProducerState `json:"state"`
	Put         int64         `json:"put"`
	LastSeen    time.Duration `json:"last_seen"` // ago
}

// Bottleneck says in a sentence which side the run waits for: none if neither has waited for a twentieth of the time. A rank that is missing now is named before any
// sum of waits, since the run stands still until it comes.
func (s *Status) Bottleneck() string {
	p, c, worked := s.ProducerPaused, s.ConsumerWaited, s.Elapsed-s.Ended // what came of a run stays true however long it has been over
	switch {
	case s.Wedged != "":
		return "wedged: " + s.Wedged
	case len(s.MissingRanks) > 0:
		return "a missing rank: no consumer asks for the samples of " + rankNames(s.MissingRanks) + ", and the others wait"
	case max(p, c) < worked/20 || p+c < 100*time.Millisecond:
		return fmt.Sprintf("none: of %v, producers waited %v for room and consumers %v for samples", worked.Round(time.Millisecond), p.Round(time.Millisecond), c.Round(time.Millisecond))
	case p > 2*c:
		return fmt.Sprintf("the trainer: producers waited %v for room, consumers %v for samples", p.Round(time.Millisecond), c.Round(time.Millisecond))
	case c > 2*p:
		return fmt.Sprintf("the target: consumers waited %v for samples, producers %v for room", c.Round(time.Millisecond), p.Round(time.Millisecond))
	}
	return fmt.Sprintf("balanced: producers waited %v, consumers %v", p.Round(time.Millisecond), c.Round(time.Millisecond))
}

// rankNames names ranks, but no more than a sentence bears.
func rankNames(ranks []int) string {
	const most = 8
	if len(ranks) == 1 {
		return fmt.Sprintf("rank %d", ranks[0])
	}
	text := "ranks"
	for i, r := range ranks[:min(len(ranks), most)] {
		if i > 0 {
			text += ","
		}
		text += fmt.Sprintf(" %d", r)
	}
	if more := len(ranks) - most; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}
