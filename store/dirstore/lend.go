//go:build linux

package dirstore

import (
	"context"
	"hash/crc32"
	"os"
	"sync"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
)

// Loan is a sample that somebody outside of this process reads: a pin, and the sample's file under a shared lock, so that its bytes stay as they are. Its methods may be called from
// any goroutine.
type Loan struct {
	s      *Store
	handle sluice.Handle
	mapped bool
	header *safetensors.Header
	file   *os.File
	uid    uint64 // of the sample's slot

	over sync.Once
	err  error // of closing the file
}

// Lend pins the sample for a reader outside of this process. It is a [Store.Get] that leaves the mapping to the reader: the same is checked, with the same errors.
//
// mapped says that the reader maps the file in the store's directory, for which it takes a flock(LOCK_SH) of its own first. Then the bytes count until Close, as those of tensors do; otherwise
// Release ends the loan as a whole. A loan takes a file descriptor. It ends with the session's process, like every pin; a store that is closed stays for its loans.
func (s *Store) Lend(ctx context.Context, ref sluice.Ref, mapped bool) (*Loan, error) {
	if err := s.enter(ctx, "lend"); err != nil {
		return nil, err
	}
	defer s.life.RUnlock()
	if err := s.checkDirectory("lend"); err != nil {
		return nil, err
	}
	if err := s.known("lend", ref); err != nil {
		return nil, err
	}
	handle, at, err := s.pin(ref)
	if err != nil {
		return nil, err
	}
	f, m, _, err := s.openPinned(ref, at)
	if err != nil {
		return nil, s.undoPin(ref, handle, at, err)
	}
	n := &Loan{s: s, handle: handle, mapped: mapped, header: m.Header(), file: f, uid: at.uid}
	if err := m.Close(); err != nil {
		_ = f.Close()
		return nil, s.undoPin(ref, handle, at, err)
	}
	return n, nil
}

// Handle is the pin. The store's Release takes it too.
func (n *Loan) Handle() sluice.Handle { return n.handle }

// Name is the file's name in the store's directory, while the sample is neither aborted nor freed.
func (n *Loan) Name() string { return n.handle.SampleID + sampleSuffix }

// Size is the size of the file in bytes.
func (n *Loan) Size() int64 { return n.header.Size() }

// Header is what the file says of itself. It must not be modified.
func (n *Loan) Header() *safetensors.Header { return n.header }

// File is the sample's file, open for reading, for ReadAt and for handing on to a socket. It is the loan's: the caller neither closes it nor, since others use it too, moves its
// offset. Once the loan is closed, reading fails with os.ErrClosed.
func (n *Loan) File() *os.File { return n.file }

// Checksums returns the crc32c of every feature's bytes: those in the file or, if it carries none, those of what is in it now. They are computed once and remembered beyond the loan,
// unless more than a thousand other samples needed that too. The map must not be modified.
func (n *Loan) Checksums(ctx context.Context) (map[string]uint32, error) {
	if sums, err := n.header.Checksums(); sums != nil || err != nil {
		return sums, err
	}
	c := n.s.computed.of(n.uid)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sums == nil {
		sums, err := sumFile(ctx, n.file, n.header, nil)
		if err != nil {
			return nil, err
		}
		c.sums = sums
	}
	return c.sums, nil
}

// IEEE returns the other crc32 of every feature's bytes, the one of zlib and Ethernet, for readers that have no crc32c. It reads all of them, and fails with ErrCorrupt if they disagree with the crc32c
// that the file carries, or that was computed before. What it found is remembered as by Checksums. The map must not be modified.
func (n *Loan) IEEE(ctx context.Context) (map[string]uint32, error) {
	want, err := n.header.Checksums()
	if err != nil {
		return nil, err
	}
	c := n.s.computed.of(n.uid)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ieee != nil {
		return c.ieee, nil
	}
	if want == nil {
		want = c.sums
	}
	ieee := make(map[string]uint32, len(n.header.Entries))
	sums, err := sumFile(ctx, n.file, n.header, func(feature string, piece []byte) {
		ieee[feature] = crc32.Update(ieee[feature], crc32.IEEETable, piece)
	})
	if err != nil {
		return nil, err
	}
	for i := range n.header.Entries {
		switch name := n.header.Entries[i].Name; {
		case want != nil && want[name] != sums[name]:
			return nil, fail(sluice.Corrupt, "checksum", n.handle.SampleID, "the feature %s has the crc32c %08x, want %08x", name, sums[name], want[name])
		case n.header.Entries[i].Bytes() == 0:
			ieee[name] = 0 // nothing of it has passed
		}
	}
	if want == nil {
		c.sums = sums
	}
	c.ieee = ieee
	return ieee, nil
}

// Summed reports whether the file carries checksums, so that [Loan.Checksums] need not read its data.
func (n *Loan) Summed() bool {
	_, carried := n.header.Metadata[safetensors.ChecksumsKey]
	return carried
}

// computed are the checksums that files do not carry, by the uid of their slot, which is never another sample's.
type computed struct {
	mu    sync.Mutex
	slots map[uint64]*sums
}

// sums are computed by one reader while the others wait.
type sums struct {
	mu   sync.Mutex
	sums map[string]uint32 // crc32c; nil until they are there
	ieee map[string]uint32
}

const mostComputed = 1024

func (c *computed) of(uid uint64) *sums {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.slots[uid]
	if s == nil {
		for old := range c.slots {
			if len(c.slots) < mostComputed {
				break
			}
			delete(c.slots, old)
		}
		if c.slots == nil {
			c.slots = map[uint64]*sums{}
		}
		s = &sums{}
		c.slots[uid] = s
	}
	return s
}

// Release gives the pin up, and the whole loan unless it is mapped. It is idempotent, as Close is.
func (n *Loan) Release() error {
	err := n.s.Release(context.Background(), n.handle)
	if !n.mapped {
		if cerr := n.Close(); err == nil {
			err = cerr
		}
	}
	return err
}

// Close says that the reader has unmapped the file: it counts no longer as a mapping. It does not touch the pin.
func (n *Loan) Close() error {
	n.over.Do(func() {
		n.err = n.file.Close()
		n.s.drop(n.handle, pinOpen)
	})
	return n.err
}

// Lost ends the loan of a reader that went without a word, and may have the file mapped yet: like a pin of a process that died, it is no release, and the file will never be overwritten.
func (n *Loan) Lost() error { return n.end(flTainted) }

// Drop ends the loan of a reader that is done with the file and has not taken the sample: it is no release, which would free a sample that nobody claims.
func (n *Loan) Drop() error { return n.end(0) }

func (n *Loan) end(flags uint32) error {
	err := n.s.do(func(l *ledger) error {
		if i, p := l.findPin(n.handle.ID); p != nil {
			l.slot(p.slot - 1).flags |= flags
			l.settle(l.clearPin(i, pinHandle|pinOpen))
		}
		return nil
	})
	if sluice.KindOf(err) == sluice.Closed {
		err = nil // so has the session, and nothing is out any more
	}
	if cerr := n.Close(); err == nil {
		err = cerr
	}
	return err
}
