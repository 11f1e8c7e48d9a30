package dirstore

import "github.com/sluice-ml/sluice"

// Incoming is what the sender of a safetensors file says of the sample beside the file, for [Store.Receive] and [Store.Adopt].
//
// A file may carry its ref in its metadata, under "sluice.ref". Then SampleID, and RunID if it is set, must be the ref's, the ref must be of this store, and of the other fields those that are
// set must agree with it. Otherwise the ref is made of these fields.
type Incoming struct {
	SampleID string
	RunID    string // empty: that of the ref in the file, which there must be one of

	// Generation is the fresh id of this put. A call that is repeated with it finds what the first one has stored. Receive and Adopt make one if neither this nor the file has it.
	Generation         string
	Algorithm          sluice.Algorithm
	SchemaVersion      int64 // 1 if it is 0
	NumTokens          int64
	TargetModelVersion string // "0" if empty
	DraftWeightVersion string // "0" if empty
	Attributes         map[string]string
	Features           []string // names, in the order of the ref; that of the file's data if nil

	// Checksum, if set, is called once, behind the last byte of the body. If it is known there, the crc32c of the file's data section is compared with what came.
	// Receive alone looks at it.
	Checksum func() (sum uint32, known bool)
}
