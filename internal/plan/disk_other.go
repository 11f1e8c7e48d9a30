//go:build !linux

package plan

import "github.com/sluice-ml/sluice"

// DefaultStore is where samples lie best, if it is there.
const DefaultStore = ""

// Look reads what there is to know about the file system of dir: here, nothing.
func Look(dir string) (*Disk, error) {
	return nil, &sluice.Error{Kind: sluice.Unsupported, Op: "plan: store", Subject: dir, Detail: "cannot be looked at on this operating system", Hint: "a store in a directory wants Linux"}
}
