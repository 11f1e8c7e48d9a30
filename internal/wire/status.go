package wire

import (
	"time"

	"github.com/sluice-ml/sluice"
)

// Status is [sluice.Status] with times in seconds.
type Status struct {
	RunID              string `json:"run_id"`
	Unavailable        string `json:"unavailable,omitempty" doc:"Why the run can't answer now: it is being opened, or could not be. All else is not known then."`
	Closed             bool   `json:"closed"`
	Cause              string `json:"cause,omitempty"`
	StepsPerCheckpoint int    `json:"steps_per_checkpoint,omitempty"`

	Pending     int `json:"pending" doc:"Samples that wait for a lease."`
	Outstanding int `json:"outstanding" doc:"Samples that are leased."`
	Dead        int `json:"dead" doc:"Dead letters now."`

	Put           int64 `json:"put"`
	Delivered     int64 `json:"delivered"`
	Redelivered   int64 `json:"redelivered"`
	Padded        int64 `json:"padded"`
	Acked         int64 `json:"acked"`
	Failed        int64 `json:"failed"`
	Expired       int64 `json:"expired"`
	Returned      int64 `json:"returned"`
	DeadTotal     int64 `json:"dead_total"`
	Dropped       int64 `json:"dropped"`
	TailDropped   int64 `json:"tail_dropped"`
	Gated         int64 `json:"gated"`
	Stale         int64 `json:"stale"`
	TokensPut     int64 `json:"tokens_put"`
	TokensAcked   int64 `json:"tokens_acked"`
	BytesPut      int64 `json:"bytes_put"`
	BytesAcked    int64 `json:"bytes_acked"`
	WindowsOpened int64 `json:"windows_opened"`

	Health sluice.Health `json:"health"`

	ElapsedSeconds        Seconds `json:"elapsed_seconds"`
	EndedSeconds          Seconds `json:"ended_seconds,omitempty" doc:"How long ago the last sample was settled, once the run is closed and none is left."`
	Paused                bool    `json:"paused"`
	Starving              bool    `json:"starving"`
	ProducersWaiting      int     `json:"producers_waiting"`
	ConsumersWaiting      int     `json:"consumers_waiting"`
	ProducerPausedSeconds Seconds `json:"producer_paused_seconds"`
	ConsumerWaitedSeconds Seconds `json:"consumer_waited_seconds"`
	OldestLeaseSeconds    Seconds `json:"oldest_lease_seconds"`

	Wedged       string           `json:"wedged,omitempty" doc:"Who waits for whom, with the numbers, when nothing can move."`
	MissingRanks []int            `json:"missing_ranks,omitempty" doc:"Ranks that the others wait for: samples are dealt to them, and no consumer of theirs holds a lease, waits, or has been heard of within a visibility timeout."`
	Bottleneck   string           `json:"bottleneck" doc:"Which side the run waits for, in a sentence. It begins with none, the target, the trainer, balanced, wedged or a missing rank, and a colon."`
	Consumers    []ConsumerStatus `json:"consumers"`
	Producers    []ProducerStatus `json:"producers"`
}

// ConsumerStatus is [sluice.ConsumerStatus].
type ConsumerStatus struct {
	Name            string  `json:"name"`
	Incarnation     int64   `json:"incarnation"`
	Rank            int     `json:"rank"`
	Leases          int     `json:"leases"`
	LeasedBytes     int64   `json:"leased_bytes"`
	Waiting         bool    `json:"waiting"`
	Delivered       int64   `json:"delivered"`
	Acked           int64   `json:"acked"`
	LastSeenSeconds Seconds `json:"last_seen_seconds" doc:"Ago."`
}

// ProducerStatus is [sluice.ProducerStatus].
type ProducerStatus struct {
	Name            string               `json:"name"`
	Incarnation     int64                `json:"incarnation"`
	State           sluice.ProducerState `json:"state"`
	Put             int64                `json:"put"`
	LastSeenSeconds Seconds              `json:"last_seen_seconds" doc:"Ago."`
}

// StatusOf is a status on the wire.
func StatusOf(s *sluice.Status) Status {
	w := Status{
		RunID: s.RunID, Closed: s.Closed, Cause: s.Cause, StepsPerCheckpoint: s.StepsPerCheckpoint, Pending: s.Pending, Outstanding: s.Outstanding, Dead: s.Dead,
		Put: s.Put, Delivered: s.Delivered, Redelivered: s.Redelivered, Padded: s.Padded, Acked: s.Acked, Failed: s.Failed, Expired: s.Expired, Returned: s.Returned,
		DeadTotal: s.DeadTotal, Dropped: s.Dropped, TailDropped: s.TailDropped, Gated: s.Gated, Stale: s.Stale, TokensPut: s.TokensPut, TokensAcked: s.TokensAcked,
		BytesPut: s.BytesPut, BytesAcked: s.BytesAcked, WindowsOpened: s.WindowsOpened, Health: s.Health, ElapsedSeconds: SecondsOf(s.Elapsed), EndedSeconds: SecondsOf(s.Ended), Paused: s.Paused,
		Starving: s.Starving, ProducersWaiting: s.ProducersWaiting, ConsumersWaiting: s.ConsumersWaiting, ProducerPausedSeconds: SecondsOf(s.ProducerPaused),
		ConsumerWaitedSeconds: SecondsOf(s.ConsumerWaited), OldestLeaseSeconds: SecondsOf(s.OldestLease), Wedged: s.Wedged, MissingRanks: s.MissingRanks, Bottleneck: s.Bottleneck(),
		Consumers: make([]ConsumerStatus, 0, len(s.Consumers)), Producers: make([]ProducerStatus, 0, len(s.Producers)),
	}
	for i := range s.Consumers {
		c := &s.Consumers[i]
		w.Consumers = append(w.Consumers, ConsumerStatus{c.Name, c.Incarnation, c.Rank, c.Leases, c.LeasedBytes, c.Waiting, c.Delivered, c.Acked, SecondsOf(c.LastSeen)})
	}
	for i := range s.Producers {
		p := &s.Producers[i]
		w.Producers = append(w.Producers, ProducerStatus{p.Name, p.Incarnation, p.State, p.Put, SecondsOf(p.LastSeen)})
	}
	return w
}

// Domain is the status as the domain has it.
func (w *Status) Domain() sluice.Status {
	s := sluice.Status{
		RunID: w.RunID, Closed: w.Closed, Cause: w.Cause, StepsPerCheckpoint: w.StepsPerCheckpoint, Pending: w.Pending, Outstanding: w.Outstanding, Dead: w.Dead,
		Put: w.Put, Delivered: w.Delivered, Redelivered: w.Redelivered, Padded: w.Padded, Acked: w.Acked, Failed: w.Failed, Expired: w.Expired, Returned: w.Returned,
		DeadTotal: w.DeadTotal, Dropped: w.Dropped, TailDropped: w.TailDropped, Gated: w.Gated, Stale: w.Stale, TokensPut: w.TokensPut, TokensAcked: w.TokensAcked,
		BytesPut: w.BytesPut, BytesAcked: w.BytesAcked, WindowsOpened: w.WindowsOpened, Health: w.Health, Elapsed: w.ElapsedSeconds.Duration(), Ended: w.EndedSeconds.Duration(), Paused: w.Paused,
		Starving: w.Starving, ProducersWaiting: w.ProducersWaiting, ConsumersWaiting: w.ConsumersWaiting, ProducerPaused: w.ProducerPausedSeconds.Duration(),
		ConsumerWaited: w.ConsumerWaitedSeconds.Duration(), OldestLease: w.OldestLeaseSeconds.Duration(), Wedged: w.Wedged, MissingRanks: w.MissingRanks,
	}
	for _, c := range w.Consumers {
		s.Consumers = append(s.Consumers, sluice.ConsumerStatus{Name: c.Name, Incarnation: c.Incarnation, Rank: c.Rank, Leases: c.Leases, LeasedBytes: c.LeasedBytes, Waiting: c.Waiting, Delivered: c.Delivered, Acked: c.Acked, LastSeen: c.LastSeenSeconds.Duration()})
	}
	for _, p := range w.Producers {
		s.Producers = append(s.Producers, sluice.ProducerStatus{Name: p.Name, Incarnation: p.Incarnation, State: p.State, Put: p.Put, LastSeen: p.LastSeenSeconds.Duration()})
	}
	return s
}

// ServiceStatus answers GET /v1/status.
type ServiceStatus struct {
	Version       string    `json:"version"`
	Host          string    `json:"host"`
	PID           int       `json:"pid"`
	Started       time.Time `json:"started"`
	UptimeSeconds Seconds   `json:"uptime_seconds"`
	Ready         bool      `json:"ready"`
	Durability    string    `json:"durability" doc:"process or power."`
	StoreDir      string    `json:"store_dir"`
	MaxBytes      int64     `json:"max_bytes" doc:"What the caps of all runs may add up to; 0: anything."`
	CapBytes      int64     `json:"cap_bytes" doc:"What they add up to."`
	Sessions      int       `json:"sessions"`
	Abandoned     int64     `json:"abandoned" doc:"Samples that were uploaded or staged, never committed, and freed, since the service started."`
	Runs          []Status  `json:"runs"`
}

// Event is what GET /v1/events and GET /v1/runs/{run}/events send as server-sent events: named "event", with one of these as data, beside events named
// "status" that carry a [ServiceStatus] or a [Status].
type Event struct {
	Time    time.Time `json:"time"`
	RunID   string    `json:"run_id"`
	Kind    string    `json:"kind"`
	Subject string    `json:"subject,omitempty"`
	Text    string    `json:"text,omitempty"`
}
