package plan

import (
	"fmt"
	"math"
)

// Disk is a file system on which a store could lie.
type Disk struct {
	Path       string `json:"path"`
	Type       string `json:"type"`        // tmpfs, ext4, ...; a hexadecimal number where it has no name here
	Network    bool   `json:"network"`     // other hosts may share it: a store in a directory refuses that
	TotalBytes int64  `json:"total_bytes"` // of the file system
	FreeBytes  int64  `json:"free_bytes"`  // for this user
	// RoomBytes is what can be written now: free bytes, and on tmpfs no more than the memory that is available.
	RoomBytes int64  `json:"room_bytes"`
	LimitedBy string `json:"limited_by"` // "file system", "available memory" or "memory cgroup"
}

// Room is a disk and what the plan thinks of it.
type Room struct {
	Disk
	NeedBytes  int64 `json:"need_bytes"`   // MaxBytes, and what files take beside their tensors
	Fits       bool  `json:"fits"`         // the cap to set has room now
	FitsLeast  bool  `json:"fits_least"`   // the least cap has
	FitsIfFree bool  `json:"fits_if_free"` // it would have, were the file system empty
}

// fileOverhead is what a sample's file may take beside its tensors: header, ref, checksums and the rest of a page.
const fileOverhead = 8 << 10

// need is the room that a store of these caps takes on a disk.
func need(maxBytes, samples int64) int64 {
	if samples > (math.MaxInt64-maxBytes)/fileOverhead {
		return math.MaxInt64
	}
	return maxBytes + samples*fileOverhead
}

// judge says whether the disk holds the store.
func (p *Plan) judge(d *Disk) {
	caps := p.Run.Caps
	if d == nil {
		p.Verdict = fmt.Sprintf("The store needs %s; no file system was looked at.", size(caps.MaxBytes))
		return
	}
	r := &Room{Disk: *d, NeedBytes: need(caps.MaxBytes, caps.MaxSamples)}
	least := need(p.LeastMaxBytes, p.LeastMaxSamples)
	if !d.Network {
		r.Fits, r.FitsLeast, r.FitsIfFree = r.NeedBytes <= d.RoomBytes, least <= d.RoomBytes, r.NeedBytes <= d.TotalBytes
	}
	p.Store = r
	has := fmt.Sprintf("%s has room for %s now (%s)", d.Type, size(d.RoomBytes), d.LimitedBy)
	wants := fmt.Sprintf("the store wants %s", size(r.NeedBytes))
	switch {
	case d.Network:
		p.Verdict = fmt.Sprintf("NO: %s lies on %s, which other hosts may share, and a store in a directory is for the processes of one host; want tmpfs, ext4, xfs, btrfs or overlay.", d.Path, d.Type)
	case r.Fits:
		p.Verdict = fmt.Sprintf("YES: %s holds it: %s, and %s.", d.Path, has, wants)
	case r.FitsLeast:
		p.Verdict = fmt.Sprintf("JUST: %s holds it only with the least cap: %s, and %s; set MaxBytes to %d and leave MaxSamples unset.", d.Path, has, wants, p.LeastMaxBytes)
	default:
		p.Verdict = fmt.Sprintf("NO: %s does not hold it: %s, and %s; that is room for %s of the %s largest samples that the run must be able to hold. %s", d.Path, has, wants,
			count(d.RoomBytes/need(p.LargestSampleBytes, 1)), count(p.LeastMaxSamples), r.remedy())
	}
}

// remedy says what the reader can do, the cheapest first.
func (r *Room) remedy() string {
	switch {
	case r.FitsIfFree && r.LimitedBy == "file system":
		return "It would fit if the file system were empty: free some of it, shorten the longest row, or lower prefetch, ranks or samples a rank."
	case r.FitsIfFree:
		return "The file system is large enough, the memory behind it is not: give it more, choose a disk, shorten the longest row, or lower prefetch, ranks or samples a rank."
	case r.Type == "tmpfs":
		return "Give it more memory (docker run --shm-size=..., mount -o remount,size=...), choose a disk, shorten the longest row, or lower prefetch, ranks or samples a rank."
	}
	return "Choose a larger file system, shorten the longest row, or lower prefetch, ranks or samples a rank."
}
