package dirstore

import (
	"os"
	"time"

	"github.com/sluice-ml/sluice"
)

// Inspection is what [Inspect] saw in a store's directory. It marshals to JSON with stable names.
type Inspection struct {
	Dir     string    `json:"dir"`
	URI     string    `json:"uri"`
	StoreID string    `json:"store_id"`
	Taken   time.Time `json:"taken"`
	// Torn says why the picture may mix states before and after a change, or is "". Then totals are not compared with slots.
	Torn          string        `json:"torn,omitempty"`
	HostRestarted bool          `json:"host_restarted"` // since the ledger was written: the next open compares it with the files
	Epoch         uint64        `json:"epoch"`          // counts opens that found no other session
	LedgerBytes   int64         `json:"ledger_bytes"`
	Health        sluice.Health `json:"health"` // the ledger's own totals
	PoolFiles     int64         `json:"pool_files"`

	Sessions     []InspectedSession     `json:"sessions"`
	Samples      []InspectedSample      `json:"samples"`
	Reservations []InspectedReservation `json:"reservations"`
	Orphans      []InspectedFile        `json:"orphans"` // files that no slot knows
	Notes        []string               `json:"notes"`   // what is worth knowing and not wrong
	// Findings is what is corrupt, or what ledger and directory do not agree on. It is empty for a store that is well, however busy.
	Findings []Finding `json:"problems"`
}

// InspectedSession is an Open: a process may have several.
type InspectedSession struct {
	Index        int       `json:"index"`
	PID          int       `json:"pid"` // as the session wrote it, in its own pid namespace
	Alive        bool      `json:"alive"`
	Started      time.Time `json:"started"`
	Pins         int       `json:"pins"`
	Mappings     int       `json:"mappings"`
	Samples      int       `json:"samples"` // that it put and that are here
	Reservations int       `json:"reservations"`
}

// The states of an [InspectedSample].
const (
	StatePublished = "published"
	StateReleased  = "released" // freed, but somebody has it pinned or mapped yet
	StateStaging   = "staging"  // being written
	StateFreeing   = "freeing"  // a process died while it freed it
)

// InspectedSample is a slot with a sample. What only its file says is zero if the file could not be read.
type InspectedSample struct {
	SampleID  string    `json:"sample_id"`
	State     string    `json:"state"`
	Bytes     int64     `json:"bytes"`
	Owner     string    `json:"owner"` // who claims it, or ""
	Dead      bool      `json:"dead"`
	Pins      int       `json:"pins"`
	Mappings  int       `json:"mappings"`
	Session   int       `json:"session"` // index of who put it, or -1 if that session is gone
	Adopted   bool      `json:"adopted"` // found as a file, without a slot
	Put       time.Time `json:"put"`     // zero while it is written
	File      string    `json:"file"`
	FileBytes int64     `json:"file_bytes"`
	Left      bool      `json:"left"` // it went while the store was looked at

	RunID         string           `json:"run_id"`
	Generation    string           `json:"generation"`
	Algorithm     sluice.Algorithm `json:"algorithm"`
	SchemaVersion int64            `json:"schema_version"`
	NumTokens     int64            `json:"num_tokens"`

	slot uint32
	uid  uint64
}

// InspectedReservation is room that was set aside.
type InspectedReservation struct {
	Bytes    int64  `json:"bytes"`
	Session  int    `json:"session"`
	SampleID string `json:"sample_id"` // that is being written under it, or ""
}

// The kinds of an [InspectedFile].
const (
	KindScratch    = "scratch"    // a scratch file of no slot: the next open or GC removes it
	KindSample     = "sample"     // a sample of no slot: the next open or GC adopts it
	KindUnreadable = "unreadable" // has a sample's name and can't be read: GC removes it after a day
	KindTemporary  = "temporary"  // a ledger that is being made, or a probe
	KindForeign    = "foreign"    // not the store's, which leaves it alone
)

// InspectedFile is a file in the directory that no slot knows.
type InspectedFile struct {
	Name     string    `json:"name"`
	Kind     string    `json:"kind"`
	Bytes    int64     `json:"bytes"`
	Modified time.Time `json:"modified"`
	Detail   string    `json:"detail,omitempty"`
}

// Finding is something that is wrong.
type Finding struct {
	Subject string `json:"subject"`
	Detail  string `json:"detail"`
}

// InspectOptions tune [Inspect].
type InspectOptions struct {
	// Check looks into the file of a published sample, and returns what is wrong with it. It is called with the file locked shared, so that nobody
	// recycles it, and must not keep it. What it finds is dropped if the sample was freed meanwhile.
	Check func(f *os.File, sample *InspectedSample) []string
}
