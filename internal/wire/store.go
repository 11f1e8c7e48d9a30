package wire

import (
	"time"

	"github.com/sluice-ml/sluice"
)

// Pin is the body of POST /v1/runs/{run}/pins: the sample's bytes stay until the pin is released, or its session ends.
type Pin struct {
	Ref    sluice.Ref `json:"ref"`
	Map    bool       `json:"map,omitempty" doc:"The caller maps the file, under flock(LOCK_SH); its bytes count until it is unmapped."`
	Handle string     `json:"handle,omitempty" doc:"32 hexadecimal digits that the caller chose; makes the call repeatable." maxLength:"32"`
	Kind   string     `json:"kind,omitempty" enum:"crc32c,crc32" doc:"Of the checksums in the answer; crc32c."`
}

// The kinds of checksum. Files carry the first; the second is what zlib has, and with it every language.
const (
	CRC32C = "crc32c" // Castagnoli
	CRC32  = "crc32"  // IEEE
)

// Pinned answers a [Pin].
type Pinned struct {
	Handle    string            `json:"handle"`
	File      string            `json:"file" doc:"Name of the sample's file in the store's directory."`
	Size      int64             `json:"size" doc:"Bytes of the file."`
	Checksums map[string]string `json:"checksums,omitempty" doc:"As in Checksums, for a caller that does not map the file; not there if they would have to be computed first."`
}

// Checksums are those of a sample.
type Checksums struct {
	Kind      string            `json:"kind" doc:"crc32c, or crc32: the one of zlib."`
	Checksums map[string]string `json:"checksums" doc:"That of each feature's bytes, eight hexadecimal digits."`
}

// Release is the body of POST /v1/runs/{run}/release. What is not there is passed over.
type Release struct {
	Handles []string `json:"handles" minItems:"1" maxItems:"1024"`
	// Keep tells pins from memory: a consumer may have released a sample and still hold its tensors.
	Keep bool `json:"keep,omitempty" doc:"The pins go, but the files are still mapped: the bytes count until a second call without this, or the end of the session."`
	// Undo is for a Get that failed behind its pin, which is no release: it must not free a sample that nobody claims yet.
	Undo bool `json:"undo,omitempty" doc:"The pins go as if they had never been: that frees nothing."`
}

// Spare is the body of POST /v1/runs/{run}/spare.
type Spare struct {
	Bytes int64 `json:"bytes" minimum:"1" doc:"Size that the staged file will have."`
}

// Spared answers a [Spare].
type Spared struct {
	File string `json:"file,omitempty" doc:"Bare name in the staging directory; not there if there is none to be had, and a fresh file does as well."`
}

// Abort is the body of POST /v1/runs/{run}/abort.
type Abort struct {
	Ref sluice.Ref `json:"ref"`
}

// Collected answers POST /v1/runs/{run}/gc.
type Collected struct {
	Freed int `json:"freed"`
}

// SampleIDs is the body of POST /v1/runs/{run}/dead-letters/requeue and .../drop.
type SampleIDs struct {
	SampleIDs []string `json:"sample_ids,omitempty" maxItems:"1024"`
	All       bool     `json:"all,omitempty" doc:"Every dead letter instead."`
}

// Found answers these.
type Found struct {
	Found int `json:"found"`
}

// DeadLetters answers GET /v1/runs/{run}/dead-letters, oldest first.
type DeadLetters struct {
	DeadLetters []DeadLetter `json:"dead_letters"`
}

// DeadLetter is [sluice.DeadLetter].
type DeadLetter struct {
	Ref      sluice.Ref `json:"ref"`
	Since    time.Time  `json:"since"`
	Fails    int        `json:"fails"`
	Expiries int        `json:"expiries"`
	Reasons  []string   `json:"reasons" doc:"Oldest first, the last ones kept."`
	Freed    bool       `json:"freed" doc:"Its bytes were freed to keep dead letters within their share of the cap; it cannot be requeued."`
}

// Session answers GET /v1/sessions/{session} piece by piece, for as long as the client process lives: a line of white space every few seconds. When the connection
// ends, and no other comes within the grace, the session has ended: its reservations and pins go, and the leases of its consumers return to the head. A session that
// never held a connection ends a minute after its last call. DELETE ends it at once.
type Session struct {
	GraceSeconds Seconds `json:"grace_seconds"`
}
