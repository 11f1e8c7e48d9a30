// Package wire is what the service and its clients say to each other: the bodies of the HTTP API under /v1, its error codes, and where a client on the same host
// finds the service. It decides nothing; docs/api.md explains the calls, and the service's OpenAPI document is made from these types.
//
// Times on the wire are seconds, as numbers, and always relative: the two ends need not agree on what time it is. Sizes are bytes. Refs are in their canonical form.
//
// Every call may be repeated when its answer was lost. Those that change something carry an id for that: a request id (reserve, acquire, settle), the generation of a
// sample (upload, stage, commit), an incarnation (report, leave); what the others do can be done twice.
package wire

import "time"

// Limits of one call.
const (
	MaxBatch = 1024             // items in one call: reservations, commits, leases, settlements, ids
	MaxWait  = 60 * time.Second // for a call that waits; who wants to wait longer asks again
	MaxBody  = 8 << 20          // bytes of a JSON body
)

// Headers of the API.
const (
	// SessionHeader names the client process a call comes from: 32 hexadecimal digits that it chose at its start. What a session holds (reservations, pins) and the
	// leases of consumers that called in it are given back when it ends, see [Session].
	SessionHeader = "Sluice-Session"
	// SampleHeader carries a [SampleFields] in JSON for an upload whose file does not say these things itself.
	SampleHeader = "Sluice-Sample"
	// RequestHeader is the id of one call in the service's log; the service makes one if the caller has none.
	RequestHeader = "Sluice-Request"
	// ChecksumTrailer is the crc32c of an uploaded file's data section, eight hexadecimal digits, sent behind the body; it is optional.
	ChecksumTrailer = "Sluice-Crc32c"
)

// Seconds is a duration on the wire.
type Seconds float64

// Duration is s as the rest of the program has it.
func (s Seconds) Duration() time.Duration { return time.Duration(float64(s) * float64(time.Second)) }

// SecondsOf is d on the wire.
func SecondsOf(d time.Duration) Seconds { return Seconds(d.Seconds()) }
