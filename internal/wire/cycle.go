package wire

import "github.com/sluice-ml/sluice"

// Producer is [sluice.Producer].
type Producer struct {
	Name        string `json:"name" maxLength:"200"`
	Incarnation int64  `json:"incarnation,omitempty" doc:"Grows with every start of the process; a newer one takes over."`
}

// Consumer is [sluice.Consumer].
type Consumer struct {
	Name        string `json:"name" maxLength:"200"`
	Incarnation int64  `json:"incarnation,omitempty" doc:"Grows with every start of the process; a newer one takes over."`
	Rank        int    `json:"rank,omitempty" doc:"Data-parallel rank, where the run has windows."`
	Member      int    `json:"member,omitempty" doc:"Place in its replica group, from 0."`
	Members     int    `json:"members,omitempty" doc:"Size of its replica group; 0 or 1 is none."`
}

// Reserve is the body of POST /v1/runs/{run}/reserve: the run's gate. The answer waits for the first reservation; the others come with it as far as they are
// granted without waiting.
type Reserve struct {
	Producer    *Producer `json:"producer,omitempty" doc:"None: an anonymous producer, which nothing watches over."`
	Bytes       []int64   `json:"bytes" minItems:"1" maxItems:"1024" doc:"Sizes of the samples that will be produced."`
	WaitSeconds Seconds   `json:"wait_seconds,omitempty" minimum:"0" maximum:"60" doc:"How long to wait for the first; 0 asks without waiting."`
	RequestID   string    `json:"request_id,omitempty" maxLength:"190" doc:"Makes the call repeatable for ten minutes."`
	// Ungated is the Reserve of a store, which looks at the caps alone.
	Ungated bool `json:"ungated,omitempty" doc:"Go by the caps alone, past marks and line, at once or not at all: the error full if it does not fit. It takes no producer and no wait."`
}

// Reservations answers a [Reserve]: as many as were granted, from the front; none is not an error.
type Reservations struct {
	Reservations []Reservation `json:"reservations"`
}

// Reservation is room for one sample.
type Reservation struct {
	ID             string  `json:"id"`
	Bytes          int64   `json:"bytes"`
	ExpiresSeconds Seconds `json:"expires_seconds" doc:"It ends then, or with its session, unless it is used."`
}

// Unreserve is the body of POST /v1/runs/{run}/unreserve. What is not there is passed over.
type Unreserve struct {
	Reservations []string `json:"reservations" minItems:"1" maxItems:"1024"`
}

// SampleFields are what a ref says that a safetensors file does not, for [SampleHeader]. A file that carries its ref under "sluice.ref" in its metadata needs none.
type SampleFields struct {
	RunID              string            `json:"run_id,omitempty" doc:"In a mixed run, where the file does not carry its ref: the run that the ref names. Otherwise it is the run's own."`
	Generation         string            `json:"generation,omitempty" doc:"Fresh id of this put; the service makes one. Give it, and the upload may be repeated."`
	Algorithm          string            `json:"algorithm"`
	SchemaVersion      int64             `json:"schema_version,omitempty" doc:"1 if left out."`
	NumTokens          int64             `json:"num_tokens"`
	TargetModelVersion string            `json:"target_model_version,omitempty"`
	DraftWeightVersion string            `json:"draft_weight_version,omitempty"`
	Attributes         map[string]string `json:"attributes,omitempty"`
	Features           []string          `json:"features,omitempty" doc:"Their order; that of the file's data if left out."`
}

// Stored answers an upload (PUT /v1/runs/{run}/samples/{sample_id}) and a [Stage].
type Stored struct {
	Ref sluice.Ref `json:"ref"`
}

// Stage is the body of POST /v1/runs/{run}/stage: the file is taken out of the staging directory and becomes a sample. It must be the caller's own regular file with one name, and
// nobody may have it open for writing.
type Stage struct {
	File        string        `json:"file" doc:"Bare name in the staging directory." maxLength:"255"`
	SampleID    string        `json:"sample_id" maxLength:"200"`
	Reservation string        `json:"reservation,omitempty"`
	Fields      *SampleFields `json:"fields,omitempty" doc:"As in the Sluice-Sample header."`
}

// Commit is the body of POST /v1/runs/{run}/commit: samples that are stored are enqueued, in order, with one record for all.
type Commit struct {
	Producer *Producer    `json:"producer,omitempty"`
	Items    []CommitItem `json:"items" minItems:"1" maxItems:"1024"`
	// Below is the PutBlocksUntilBelow of a queue.
	Below       bool    `json:"below,omitempty" doc:"Commit when the gate is open, or consumers starve; for one item that is no stage."`
	WaitSeconds Seconds `json:"wait_seconds,omitempty" minimum:"0" maximum:"60" doc:"With below: how long to wait for that. If it does not come, nothing is done and the answer says paused."`
}

// CommitItem is one sample: stored before, or staged and enqueued at once.
type CommitItem struct {
	Ref       *sluice.Ref       `json:"ref,omitempty" doc:"Of a sample that was uploaded or staged before."`
	Stage     *Stage            `json:"stage,omitempty" doc:"Or a file to stage now."`
	Positions []sluice.Position `json:"positions,omitempty" doc:"Where its rows come from in the prompt stream; kept with it."`
}

// Commits answers a [Commit], in the order of its items.
type Commits struct {
	Results []CommitResult `json:"results"`
	Paused  bool           `json:"paused,omitempty" doc:"The gate did not open in time: nothing was done, and there are no results."`
}

// CommitResult is the answer for one item: a status or an error.
type CommitResult struct {
	Status sluice.PutStatus `json:"status,omitempty" doc:"enqueued; already (it was, this is a repetition); settled (it is trained on); gated (a version gate dropped it)."`
	Ref    *sluice.Ref      `json:"ref,omitempty" doc:"Of an item that was staged."`
	Error  *Problem         `json:"error,omitempty"`
}

// Acquire is the body of POST /v1/runs/{run}/acquire.
type Acquire struct {
	Consumer    Consumer `json:"consumer"`
	Max         int      `json:"max,omitempty" minimum:"0" maximum:"1024" doc:"Leases wanted at most; 1."`
	WaitSeconds Seconds  `json:"wait_seconds,omitempty" minimum:"0" maximum:"60" doc:"How long to wait for the first one."`
	Ahead       bool     `json:"ahead,omitempty" doc:"The consumer asks ahead of need, so it does not count as one that waits."`
	RequestID   string   `json:"request_id,omitempty" maxLength:"200" doc:"Makes the call repeatable for ten minutes."`
}

// Delivery answers an [Acquire]: leases; nothing yet (no lease and no end); or the end.
type Delivery struct {
	Leases []Lease  `json:"leases"`
	End    bool     `json:"end" doc:"The stream is over for this consumer."`
	Cause  *Problem `json:"cause,omitempty" doc:"Why the run was closed, if that was not its regular end."`
	// The leases run from then: who knows when it asked knows a time that is not too late for them.
	WaitedSeconds Seconds `json:"waited_seconds,omitempty" doc:"How long the call had waited when the leases were given."`
}

// Lease is [sluice.Lease].
type Lease struct {
	ID              sluice.LeaseID     `json:"id"`
	Ref             sluice.Ref         `json:"ref"`
	TimeLeftSeconds Seconds            `json:"time_left_seconds" doc:"It runs out then unless it is renewed."`
	Redelivery      int                `json:"redelivery" doc:"Deliveries before this one."`
	Window          *sluice.WindowSlot `json:"window,omitempty"`
}

// Settle is the body of POST /v1/runs/{run}/settle.
type Settle struct {
	Consumer    Consumer     `json:"consumer"`
	Settlements []Settlement `json:"settlements" minItems:"1" maxItems:"1024"`
	RequestID   string       `json:"request_id,omitempty" maxLength:"200"`
}

// Settlement is [sluice.Settlement].
type Settlement struct {
	Lease   sluice.LeaseID `json:"lease"`
	Verdict sluice.Verdict `json:"verdict" enum:"ack,fail,fail_permanent,return" doc:"ack frees the sample; fail tries it again later; fail_permanent makes a dead letter; return gives it back unused."`
	Reason  string         `json:"reason,omitempty" doc:"Of a fail; at most 4 KiB are kept."`
}

// Settled answers a [Settle] and a [Renew], in the order of what was asked.
type Settled struct {
	Results []SettleResult `json:"results"`
}

// SettleResult is [sluice.SettleResult].
type SettleResult struct {
	Lease  sluice.LeaseID      `json:"lease"`
	Status sluice.SettleStatus `json:"status" doc:"settled, already_settled (as 'as'), renewed, or stale: the lease ran out or was taken over, nothing changed."`
	As     sluice.Verdict      `json:"as,omitempty"`
	Dead   bool                `json:"dead,omitempty" doc:"The sample became a dead letter by this."`
}

// Renew is the body of POST /v1/runs/{run}/renew.
type Renew struct {
	Consumer Consumer          `json:"consumer"`
	Leases   *[]sluice.LeaseID `json:"leases,omitempty" doc:"All that the consumer holds, if left out."`
}

// Leave is the body of POST /v1/runs/{run}/leave: the consumer's leases return to the head.
type Leave struct {
	Consumer Consumer `json:"consumer"`
}

// Report is the body of POST /v1/runs/{run}/report.
type Report struct {
	Producer Producer             `json:"producer"`
	State    sluice.ProducerState `json:"state" enum:"running,done,failed"`
	Cause    string               `json:"cause,omitempty" maxLength:"4096" doc:"For failed: consumers are told so after the drain."`
}

// Reclaimed answers POST /v1/runs/{run}/reclaim.
type Reclaimed struct {
	Reclaimed int `json:"reclaimed"`
}

// Positions answers GET /v1/runs/{run}/positions?source=S.
type Positions struct {
	Taken []sluice.Taken `json:"taken"`
}
