package wire

import (
	"fmt"
	"strings"

	"github.com/sluice-ml/sluice"
)

// Checks of the bodies: what the struct tags promise to a reader of the OpenAPI document is refused here. What the domain checks by itself, such as ids, is left to it.

func bad(field, format string, args ...any) error {
	return &sluice.Error{Kind: sluice.Invalid, Op: "body", Subject: field, Detail: fmt.Sprintf(format, args...)}
}

func checkCount(field string, n int) error {
	if n < 1 || n > MaxBatch {
		return bad(field, "has %d items, want 1 to %d", n, MaxBatch)
	}
	return nil
}

func checkText(field, s string, limit int) error {
	if len(s) > limit {
		return bad(field, "is %d bytes long, want at most %d", len(s), limit)
	}
	return nil
}

func checkWait(s Seconds) error {
	if most := SecondsOf(MaxWait); s < 0 || s > most {
		return bad("wait_seconds", "is %v, want 0 to %v", float64(s), float64(most))
	}
	return nil
}

// maxSeconds bounds the times of a run: a month.
const maxSeconds = Seconds(30 * 24 * 3600)

func checkSeconds(field string, s Seconds) error {
	if s < 0 || s > maxSeconds {
		return bad(field, "is %v, want 0 to %v", float64(s), float64(maxSeconds))
	}
	return nil
}

// checkID is for an id that a call must have.
func checkID(name, id string) error {
	if id == "" {
		return bad(name, "is missing")
	}
	return sluice.ValidateID(id)
}

func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// Check refuses what the fields may not hold.
func (s *RunSpec) Check() error {
	return first(checkSeconds("visibility_timeout_seconds", s.VisibilityTimeoutSeconds), checkSeconds("producer_timeout_seconds", s.ProducerTimeoutSeconds),
		checkID("run_id", s.RunID))
}

// Check refuses what the fields may not hold.
func (b *Reserve) Check() error {
	if err := first(checkCount("bytes", len(b.Bytes)), checkWait(b.WaitSeconds), checkText("request_id", b.RequestID, 190)); err != nil {
		return err
	}
	if b.Ungated && (b.Producer != nil || b.WaitSeconds != 0) {
		return bad("ungated", "takes neither producer nor wait_seconds")
	}
	for i, n := range b.Bytes {
		if n < 0 || n >= 1<<53 {
			return bad(fmt.Sprintf("bytes[%d]", i), "is %d, want 0 or more and less than 2^53", n)
		}
	}
	return nil
}

// Check refuses what the fields may not hold.
func (b *Unreserve) Check() error { return checkCount("reservations", len(b.Reservations)) }

// Check refuses what the fields may not hold.
func (b *Stage) Check() error {
	if b.File == "" || len(b.File) > 255 || b.File == "." || b.File == ".." || strings.ContainsAny(b.File, "/\x00") {
		return bad("file", "is no bare file name: want 1 to 255 bytes without a slash")
	}
	return checkID("sample_id", b.SampleID)
}

// Check refuses what the fields may not hold.
func (b *Commit) Check() error {
	if err := first(checkCount("items", len(b.Items)), checkWait(b.WaitSeconds)); err != nil {
		return err
	}
	if b.Below && (len(b.Items) != 1 || b.Items[0].Stage != nil) {
		return bad("below", "takes one item that has a ref")
	}
	if !b.Below && b.WaitSeconds != 0 {
		return bad("wait_seconds", "is %v, want 0 without below", float64(b.WaitSeconds))
	}
	for i := range b.Items {
		it := &b.Items[i]
		at := fmt.Sprintf("items[%d]", i)
		for k := range it.Positions {
			if it.Positions[k].Source == "" {
				return bad(fmt.Sprintf("%s.positions[%d].source", at, k), "is missing")
			}
		}
		switch {
		case (it.Ref == nil) == (it.Stage == nil):
			return bad(at, "wants a ref or a stage, one of them")
		case it.Ref != nil && it.Ref.IsZero():
			return bad(at+".ref", "is empty")
		case it.Stage != nil:
			if err := it.Stage.Check(); err != nil {
				return err
			}
		}
	}
	return nil
}

// Check refuses what the fields may not hold.
func (b *Acquire) Check() error {
	if b.Max < 0 || b.Max > MaxBatch {
		return bad("max", "is %d, want 0 (for 1) to %d", b.Max, MaxBatch)
	}
	return first(checkWait(b.WaitSeconds), checkText("request_id", b.RequestID, 200), b.Consumer.check())
}

func (c *Consumer) check() error { return checkID("consumer.name", c.Name) }

// Check refuses what the fields may not hold.
func (b *Settle) Check() error {
	for i := range b.Settlements {
		if b.Settlements[i].Lease == (sluice.LeaseID{}) {
			return bad(fmt.Sprintf("settlements[%d].lease", i), "is missing")
		}
	}
	return first(checkCount("settlements", len(b.Settlements)), checkText("request_id", b.RequestID, 200), b.Consumer.check())
}

// Check refuses what the fields may not hold.
func (b *Renew) Check() error {
	if b.Leases != nil && len(*b.Leases) > MaxBatch {
		return bad("leases", "has %d items, want at most %d", len(*b.Leases), MaxBatch)
	}
	return b.Consumer.check()
}

// Check refuses what the fields may not hold.
func (b *Leave) Check() error { return b.Consumer.check() }

// Check refuses what the fields may not hold.
func (b *Report) Check() error {
	return first(checkText("cause", b.Cause, 4096), checkID("producer.name", b.Producer.Name))
}

// Check refuses what the fields may not hold.
func (b *CloseRun) Check() error { return checkText("cause", b.Cause, 4096) }

// Check refuses what the fields may not hold.
func (c *Configure) Check() error {
	if s := c.VisibilityTimeoutSeconds; s != nil {
		if *s <= 0 || s.Duration() <= 0 || *s > maxSeconds {
			return bad("visibility_timeout_seconds", "is %v, want more than 0 and at most %v", float64(*s), float64(maxSeconds))
		}
	}
	change := c.Change()
	return change.Validate()
}

// Check refuses what the fields may not hold.
func (b *Versions) Check() error {
	if len(b.TargetVersions) > MaxBatch {
		return bad("target_versions", "has %d items, want at most %d", len(b.TargetVersions), MaxBatch)
	}
	return nil
}

// Check refuses what the fields may not hold.
func (b *Pin) Check() error {
	if b.Ref.IsZero() {
		return bad("ref", "is missing")
	}
	return CheckKind(b.Kind)
}

// CheckKind refuses what is no kind of checksum; empty is crc32c.
func CheckKind(kind string) error {
	switch kind {
	case "", CRC32C, CRC32:
		return nil
	}
	return bad("kind", "is no kind of checksum, want %s or %s", CRC32C, CRC32)
}

// Check refuses what the fields may not hold.
func (j *Judge) Check() error {
	if j.Ref.IsZero() {
		return bad("ref", "is missing")
	}
	return nil
}

// Check refuses what the fields may not hold.
func (b *Release) Check() error { return checkCount("handles", len(b.Handles)) }

// Check refuses what the fields may not hold.
func (b *Abort) Check() error {
	if b.Ref.IsZero() {
		return bad("ref", "is missing")
	}
	return nil
}

// Check refuses what the fields may not hold.
func (b *Spare) Check() error {
	if b.Bytes < 1 || b.Bytes >= 1<<53 {
		return bad("bytes", "is %d, want 1 or more, and less than 2^53", b.Bytes)
	}
	return nil
}

// Check refuses what the fields may not hold.
func (b *SampleIDs) Check() error {
	if b.All && len(b.SampleIDs) > 0 {
		return bad("all", "is true beside %d sample_ids, want one of them", len(b.SampleIDs))
	}
	if b.All {
		return nil
	}
	return checkCount("sample_ids", len(b.SampleIDs))
}
