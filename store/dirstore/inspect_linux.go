//go:build linux

package dirstore

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/maphash"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/safetensors"
)

// Inspect looks at a store without being a session of it: it opens everything for reading, takes no lock on the ledger, changes nothing, not even access times where it owns the files,
// and works while others use the store. Nobody ever waits for it; a file that it holds for Check is not recycled meanwhile, but unlinked.
//
// The ledger is copied again until a copy lies between two changes and is consistent in itself. After 150 copies, a fifth of a second on an idle host, the last one is taken
// and Torn says so. What ledger and directory seem to disagree on is looked at a second time, and counts only if it is still so and neither the slot nor the file is another one.
//
// Errors: ErrNotFound if there is no such directory or it is no store, ErrCorrupt if its ledger is none, ErrDenied if it may not be read, ErrUnavailable if it is deleted meanwhile.
func Inspect(ctx context.Context, dir string, opts *InspectOptions) (*Inspection, error) {
	if opts == nil {
		opts = &InspectOptions{}
	}
	in, err := openInspector(dir)
	if err != nil {
		return nil, err
	}
	defer in.close()
	l, torn, broken, err := in.picture(ctx)
	if err != nil {
		return nil, err
	}
	r := in.report(l)
	r.Torn = torn
	for _, b := range broken {
		r.Findings = append(r.Findings, Finding{ledgerName, b})
	}
	doubts, err := in.lookAtSamples(ctx, l, r, opts.Check)
	if err != nil {
		return nil, err
	}
	if in.elsewhere > 0 {
		r.Notes = append(r.Notes, fmt.Sprintf("%d samples say that they are in the store %s, and this is %s: the directory was moved, or is mounted elsewhere", in.elsewhere, in.elsewhereURI, r.URI))
	}
	if r.HostRestarted {
		r.Notes = append(r.Notes, "the host was restarted since the ledger was written; the next open compares the ledger with the files, which then count")
	}
	strangers, err := in.strangers(l)
	if err != nil {
		return nil, err
	}
	// The second look.
	again, tornAgain, _, err := in.picture(ctx)
	if err != nil {
		return nil, err
	}
	if err := in.stillThere(); err != nil {
		return nil, err
	}
	for _, d := range doubts {
		if d.slot < again.slotTop {
			if sl := again.slot(d.slot); sl.uid == d.uid && sl.state == d.state {
				r.Findings = append(r.Findings, d.Finding)
			}
		}
	}
	for i := range r.Samples {
		s := &r.Samples[i]
		s.Left = s.slot >= again.slotTop || again.slot(s.slot).uid != s.uid || again.slot(s.slot).state == stFree
	}
	for i := range r.Sessions {
		// One that has ended properly in between only looks dead.
		if s := &r.Sessions[i]; !s.Alive && again.sessions[s.Index].state == 0 {
			s.Index = -1
		}
	}
	r.Sessions = slices.DeleteFunc(r.Sessions, func(s InspectedSession) bool { return s.Index < 0 })
	known := named(again)
	for _, f := range strangers {
		if now, err := in.identify(f.Name); err != nil || now != f.identity || known[f.Name] {
			continue
		}
		judged := f.Kind == KindScratch || f.Kind == KindSample || f.Kind == KindUnreadable
		if judged && tornAgain != "" {
			continue // some slot may know it after all
		}
		r.Orphans = append(r.Orphans, f.InspectedFile)
		switch f.Kind {
		case KindScratch:
			r.Findings = append(r.Findings, Finding{f.Name, "is a scratch file that no slot names; the next open or GC removes it"})
		case KindSample:
			r.Findings = append(r.Findings, Finding{f.Name, "is a sample of this store that has no slot; the next open or GC takes it in without an owner"})
		case KindUnreadable:
			r.Findings = append(r.Findings, Finding{f.Name, "has no slot and is no readable sample (" + f.Detail + "); GC removes it after a day"})
		}
	}
	return r, nil
}

type inspector struct {
	dir   string
	dirfd int
	fd    int // of the ledger
	ino   uint64

	elsewhere    int // samples whose ref names another store, such as elsewhereURI
	elsewhereURI string
}

func openInspector(dir string) (*inspector, error) {
	const op = "inspect"
	abs, err := filepath.Abs(dir)
	if err == nil {
		abs, err = filepath.EvalSymlinks(abs)
	}
	if err != nil {
		return nil, sysError(op, dir, "find the directory", err)
	}
	in := &inspector{dir: abs, fd: -1}
	if in.dirfd, err = openQuietly(unix.AT_FDCWD, abs, unix.O_DIRECTORY); err != nil {
		return nil, sysError(op, abs, "open the directory", err)
	}
	if in.fd, err = openQuietly(in.dirfd, ledgerName, 0); err != nil {
		in.close()
		if errors.Is(err, unix.ENOENT) {
			return nil, &sluice.Error{Kind: sluice.NotFound, Op: "dirstore: " + op, Subject: abs, Detail: "is no store: it has no file " + ledgerName, Hint: "give a store's directory, or one safetensors file"}
		}
		return nil, sysError(op, abs+"/"+ledgerName, "open the ledger", err)
	}
	if err := in.validate(); err != nil {
		in.close()
		return nil, err
	}
	return in, nil
}

func (in *inspector) close() {
	for _, fd := range []int{in.dirfd, in.fd} {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// openQuietly opens for reading without leaving an access time, which only the owner of a file may ask for.
func openQuietly(dirfd int, name string, flags int) (int, error) {
	flags |= unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_CLOEXEC | unix.O_NONBLOCK
	fd, err := unix.Openat(dirfd, name, flags|unix.O_NOATIME, 0)
	if err == unix.EPERM {
		fd, err = unix.Openat(dirfd, name, flags, 0)
	}
	return fd, err
}

func (in *inspector) corrupt(format string, args ...any) error {
	return &sluice.Error{Kind: sluice.Corrupt, Op: "dirstore: inspect", Subject: in.dir + "/" + ledgerName, Detail: fmt.Sprintf(format, args...),
		Hint: "if no process uses the store, remove the file: the samples are kept and wait for a claim for a day"}
}

// validate checks what never changes in a ledger, with the same eyes as Open.
func (in *inspector) validate() error {
	var st unix.Stat_t
	if err := unix.Fstat(in.fd, &st); err != nil {
		return sysError("inspect", in.dir+"/"+ledgerName, "stat the ledger", err)
	}
	in.ino = st.Ino
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return in.corrupt("is no regular file (mode %o), want one", st.Mode)
	}
	h := new(head)
	headerBytes := in.headBytes(h)[:unsafe.Sizeof(header{})]
	n, err := readAt(in.fd, headerBytes, 0)
	if err != nil {
		return sysError("inspect", in.dir+"/"+ledgerName, "read the ledger", err)
	}
	magic := headerBytes[:min(n, len(ledgerMagic))]
	switch {
	case string(magic) != ledgerMagic:
		return in.corrupt("begins with %q, want %q: it is no ledger", magic, ledgerMagic)
	case n < len(headerBytes), st.Size < headSize+segmentSize:
		return in.corrupt("is %d bytes, want at least %d: it was cut off", st.Size, headSize+segmentSize)
	case h.version != ledgerVersion:
		return in.corrupt("has version %d, this program reads %d", h.version, ledgerVersion)
	case h.check != h.sum():
		return in.corrupt("has the header checksum %08x, its header gives %08x", h.check, h.sum())
	case int64(h.headSize) != headSize || h.slotSize != uint32(unsafe.Sizeof(slot{})) || h.pinSize != uint32(unsafe.Sizeof(pin{})) || h.sessionSize != uint32(unsafe.Sizeof(session{})) ||
		h.segmentSlots != segmentSlots || h.segmentPins != segmentPins || h.segMax != maxSegments:
		return in.corrupt("has parts of other sizes than this program knows")
	}
	return nil
}

// headBytes is the part of the head that a picture needs: all but the two indexes.
func (in *inspector) headBytes(h *head) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(h)), unsafe.Offsetof(h.slots))
}

// readAt reads until buf is full or the file ends.
func readAt(fd int, buf []byte, off int64) (n int, err error) {
	for n < len(buf) {
		k, err := unix.Pread(fd, buf[n:], off+int64(n))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return n, err
		case k == 0:
			return n, nil
		default:
			n += k
		}
	}
	return n, nil
}

// The bounds of picture. Most copies take microseconds and are whole at once.
const (
	pictureTries = 150
	pictureQuick = 30 // tries without a pause
	picturePause = 1500 * time.Microsecond
	pictureSame  = 3 // equal copies in a row that show that a broken ledger is not merely busy
)

// picture copies the ledger until a copy is whole: taken while no change was under way, with the same header before and after, and with slots and pins that give the header's totals. A copy that comes
// out the same again and again without being so shows a ledger that is broken; torn is then "", or says that a process died in the middle of a change. Otherwise torn says that the ledger was never at rest.
func (in *inspector) picture(ctx context.Context) (l *ledger, torn string, broken []string, err error) {
	seed := maphash.MakeSeed()
	var last uint64
	l = &ledger{head: new(head), fd: -1}
	same := 0
	for try := range pictureTries {
		if ctx.Err() != nil {
			return nil, "", nil, context.Cause(ctx)
		}
		if try >= pictureQuick {
			time.Sleep(picturePause)
		}
		moved, err := in.copyTo(l)
		if err != nil {
			return nil, "", nil, err
		}
		dirty := l.dirty.Load() != 0
		if moved || dirty && in.locked(0) {
			same = 0
			continue
		}
		if !dirty {
			if broken = l.disagreements(); len(broken) == 0 {
				return l, "", nil, nil
			}
		}
		sum := in.sum(seed, l)
		if same++; sum != last {
			same = 1
		}
		last = sum
		if same == 1 && try < pictureQuick {
			time.Sleep(picturePause) // equal copies mean something only some time apart
		}
		if same < pictureSame {
			continue
		}
		if dirty {
			const died = "a process died while it changed the ledger, and nobody has used the store since"
			return l, died, []string{died + "; the next open repairs it"}, nil
		}
		return l, "", broken, nil
	}
	return l, fmt.Sprintf("the ledger changed under each of %d tries to copy it; what is shown may mix states before and after a change", pictureTries), nil, nil
}

// copyTo copies the used part of the ledger into l, whose memory it uses again. moved says that the header was not the same before and after; then the copy may be of a part only.
func (in *inspector) copyTo(l *ledger) (moved bool, err error) {
	if err := in.read(in.headBytes(l.head), 0); err != nil {
		return false, err
	}
	n := l.segments.Load()
	if n < 1 || n > maxSegments {
		return false, in.corrupt("claims %d segments, want 1 to %d", n, maxSegments)
	}
	var st unix.Stat_t // behind the header: a ledger gets its room before it claims it
	if err := unix.Fstat(in.fd, &st); err != nil {
		return false, sysError("inspect", in.dir+"/"+ledgerName, "stat the ledger", err)
	}
	if want := headSize + int64(n)*segmentSize; st.Size < want {
		return false, in.corrupt("is %d bytes and claims %d segments, want %d bytes for that many", st.Size, n, want)
	}
	if l.slotTop > n*segmentSlots || l.pinTop > n*segmentPins {
		if moved, err := in.moved(l); moved || err != nil { // it grew between two words of the header
			l.slotTop, l.pinTop = 0, 0
			return true, err
		}
		return false, in.corrupt("claims %d slots and %d pins in %d segments, want at most %d and %d", l.slotTop, l.pinTop, n, n*segmentSlots, n*segmentPins)
	}
	for len(l.segs) < int(n) {
		l.segs = append(l.segs, new(segment))
	}
	for i := range n {
		at := headSize + int64(i)*segmentSize
		slots, pins := usedBytes(l, i)
		if err := errors.Join(in.read(slots, at), in.read(pins, at+int64(unsafe.Offsetof(segment{}.pins)))); err != nil {
			return false, err
		}
	}
	return in.moved(l)
}

// moved says whether the ledger's header is another one than that of the copy.
func (in *inspector) moved(l *ledger) (bool, error) {
	now := make([]byte, unsafe.Sizeof(header{}))
	if err := in.read(now, 0); err != nil {
		return false, err
	}
	return !bytes.Equal(now, in.headBytes(l.head)[:len(now)]), nil
}

// usedBytes is the part of segment i that was ever used.
func usedBytes(l *ledger, i uint32) (slots, pins []byte) {
	seg := l.segs[i]
	k := min(l.slotTop-min(l.slotTop, i*segmentSlots), segmentSlots)
	slots = unsafe.Slice((*byte)(unsafe.Pointer(&seg.slots)), uintptr(k)*unsafe.Sizeof(slot{}))
	k = min(l.pinTop-min(l.pinTop, i*segmentPins), segmentPins)
	return slots, unsafe.Slice((*byte)(unsafe.Pointer(&seg.pins)), uintptr(k)*unsafe.Sizeof(pin{}))
}

func (in *inspector) read(b []byte, off int64) error {
	n, err := readAt(in.fd, b, off)
	if err != nil {
		return sysError("inspect", in.dir+"/"+ledgerName, "read the ledger", err)
	}
	if n < len(b) {
		return in.corrupt("ends at byte %d, want at least %d: it was cut off", off+int64(n), off+int64(len(b)))
	}
	return nil
}

// sum tells a copy from another one.
func (in *inspector) sum(seed maphash.Seed, l *ledger) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	_, _ = h.Write(in.headBytes(l.head))
	for i := range l.segments.Load() {
		slots, pins := usedBytes(l, i)
		_, _ = h.Write(slots)
		_, _ = h.Write(pins)
	}
	return h.Sum64()
}

// locked asks whether somebody holds the lock at the given place, without taking it.
func (in *inspector) locked(at int64) bool {
	l := ledger{fd: in.fd}
	lk, err := l.rangeLock(unix.F_OFD_GETLK, unix.F_WRLCK, at)
	return err == nil && lk.Type != unix.F_UNLCK
}

// disagreements computes anew what a copied ledger derives, and says what comes out otherwise.
func (l *ledger) disagreements() (wrong []string) {
	say := func(format string, args ...any) { wrong = append(wrong, fmt.Sprintf(format, args...)) }
	type holds struct{ pins, open uint32 }
	held := map[uint32]holds{}
	for i := range l.pinTop {
		p := l.pin(i)
		if p.state == 0 {
			continue
		}
		if p.state&^(pinHandle|pinOpen) != 0 || p.slot == 0 || p.slot > l.slotTop || p.session == 0 || p.session > maxSessions {
			say("pin %d has state %d, slot %d and session %d, which can't be", i, p.state, p.slot, p.session)
			continue
		}
		if sl := l.slot(p.slot - 1); sl.uid != p.uid || sl.state != stPublished && sl.state != stLingering {
			say("pin %d is on slot %d, which no longer has its sample", i, p.slot-1)
			continue
		}
		x := held[p.slot-1]
		x.pins += p.state & pinHandle / pinHandle
		x.open += p.state & pinOpen / pinOpen
		held[p.slot-1] = x
	}
	var h sluice.Health
	var files int64
	ids := map[string]uint32{}
	for i := range l.slotTop {
		sl := l.slot(i)
		if sl.state == stFree {
			continue
		}
		if sl.state >= stStates || sl.session > maxSessions || sl.owner > maxOwners || sl.bytes < 0 || sl.held < 0 || sl.size < 0 {
			say("slot %d has state %d, session %d, owner %d and %d bytes, which can't be", i, sl.state, sl.session, sl.owner, sl.bytes)
			continue
		}
		if x := held[i]; x.pins != sl.pins || x.open != sl.open {
			say("slot %d (%q) counts %d pins and %d mappings, the pins give %d and %d", i, sl.name(), sl.pins, sl.open, x.pins, x.open)
		}
		if sl.owner != 0 && l.owners[sl.owner-1].n == 0 {
			say("slot %d (%q) is claimed by owner %d, who has no name", i, sl.name(), sl.owner)
		}
		if sl.session != 0 && l.sessions[sl.session-1].state == 0 {
			say("slot %d (%q) is of session %d, which has ended", i, sl.name(), sl.session-1)
		}
		switch sl.state {
		case stReserved, stStaging:
			h.ReservedBytes += sl.held
			h.ReservedSamples++
			if sl.state == stStaging {
				h.StagingBytes += sl.bytes
			}
		case stPublished, stLingering:
			h.ResidentBytes += sl.bytes
			h.ResidentSamples++
			if sl.state == stPublished && sl.flags&flDead != 0 {
				h.DeadBytes += sl.bytes
				h.DeadSamples++
			}
		case stFreeing:
			say("slot %d (%q) is between two states, and no change is under way", i, sl.name())
		case stPool:
			h.PoolBytes += sl.size
			files++
		}
		if sl.state == stStaging || sl.state == stPublished {
			if sluice.ValidateID(sl.name()) != nil || sl.idLen > maxIDBytes {
				say("slot %d has the sample id %q, which is none", i, sl.name())
			}
			if other, twice := ids[sl.name()]; twice {
				say("slots %d and %d have the same sample id %q", other, i, sl.name())
			}
			ids[sl.name()] = i
		}
	}
	have := l.health(sluice.Caps{})
	for _, t := range []struct {
		what       string
		have, want int64
	}{
		{"resident bytes", have.ResidentBytes, h.ResidentBytes}, {"resident samples", have.ResidentSamples, h.ResidentSamples},
		{"reserved bytes", have.ReservedBytes, h.ReservedBytes}, {"reserved samples", have.ReservedSamples, h.ReservedSamples},
		{"dead bytes", have.DeadBytes, h.DeadBytes}, {"dead samples", have.DeadSamples, h.DeadSamples},
		{"staging bytes", have.StagingBytes, h.StagingBytes}, {"pool bytes", have.PoolBytes, h.PoolBytes}, {"pool files", l.poolFiles.Load(), files},
	} {
		if t.have != t.want {
			say("counts %d %s, its slots give %d", t.have, t.what, t.want)
		}
	}
	return wrong
}

// report makes the inspection of what the ledger alone says.
func (in *inspector) report(l *ledger) *Inspection {
	r := &Inspection{
		Dir: in.dir, URI: (&url.URL{Scheme: "file", Path: in.dir}).String(), StoreID: hex.EncodeToString(l.storeID[:]), Taken: time.Now(),
		HostRestarted: l.boot != bootID(), Epoch: l.epoch, LedgerBytes: headSize + int64(l.segments.Load())*segmentSize,
		Health: l.health(capsOf(l.caps)), PoolFiles: l.poolFiles.Load(),
		Sessions: []InspectedSession{}, Samples: []InspectedSample{}, Reservations: []InspectedReservation{}, Orphans: []InspectedFile{}, Notes: []string{}, Findings: []Finding{},
	}
	at := map[uint32]int{}
	for i := range l.sessions {
		if s := &l.sessions[i]; s.state != 0 {
			at[uint32(i)+1] = len(r.Sessions)
			r.Sessions = append(r.Sessions, InspectedSession{Index: i, PID: int(s.pid), Started: time.Unix(0, s.started), Alive: in.locked(int64(i) + 1)})
		}
	}
	count := func(who uint32, f func(s *InspectedSession)) {
		if i, ok := at[who]; ok {
			f(&r.Sessions[i])
		}
	}
	for i := range l.pinTop {
		p := l.pin(i)
		count(p.session, func(s *InspectedSession) {
			if p.state&pinHandle != 0 {
				s.Pins++
			}
			if p.state&pinOpen != 0 {
				s.Mappings++
			}
		})
	}
	states := map[uint32]string{stStaging: StateStaging, stPublished: StatePublished, stFreeing: StateFreeing, stLingering: StateReleased}
	for i := range l.slotTop {
		sl := l.slot(i)
		session := int(sl.session) - 1
		if sl.state == stReserved || sl.state == stStaging {
			id := ""
			if sl.state == stStaging {
				id = sl.name()
			}
			r.Reservations = append(r.Reservations, InspectedReservation{sl.held, session, id})
			count(sl.session, func(s *InspectedSession) { s.Reservations++ })
		}
		state, ok := states[sl.state]
		if !ok {
			continue
		}
		s := InspectedSample{SampleID: sl.name(), State: state, Bytes: sl.bytes, Owner: l.ownerName(sl), Dead: sl.flags&flDead != 0, Pins: int(sl.pins), Mappings: int(sl.open), Session: session,
			Adopted: sl.flags&flAdopted != 0, File: sl.scratch(), FileBytes: sl.size, slot: i, uid: sl.uid}
		if sl.put != 0 {
			s.Put = time.Unix(0, sl.put)
		}
		if sl.state == stPublished {
			s.File = sl.fileName()
			count(sl.session, func(s *InspectedSession) { s.Samples++ })
		}
		r.Samples = append(r.Samples, s)
	}
	slices.SortStableFunc(r.Samples, func(a, b InspectedSample) int {
		return cmp.Or(a.Put.Compare(b.Put), strings.Compare(a.SampleID, b.SampleID))
	})
	return r
}

// doubt is a finding that counts if its slot has not changed when it is looked at again.
type doubt struct {
	Finding
	slot, state uint32
	uid         uint64
}

// lookAtSamples compares slots with their files.
func (in *inspector) lookAtSamples(ctx context.Context, l *ledger, r *Inspection, check func(*os.File, *InspectedSample) []string) (doubts []doubt, err error) {
	for i := range r.Samples {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		s := &r.Samples[i]
		if sl := l.slot(s.slot); sl.state == stPublished {
			for _, wrong := range in.lookAtFile(r.URI, sl, s, check) {
				doubts = append(doubts, doubt{Finding{s.SampleID, wrong}, s.slot, stPublished, s.uid})
			}
		}
	}
	for i := range l.slotTop {
		sl := l.slot(i)
		if sl.state != stPool && (sl.state != stLingering || sl.flags&(flTainted|flNamed) != 0) {
			continue
		}
		if _, err := in.identify(sl.scratch()); errors.Is(err, unix.ENOENT) {
			doubts = append(doubts, doubt{Finding{sl.scratch(), "is gone, though a slot names it: someone else deleted it"}, i, sl.state, sl.uid})
		}
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx) // what Check found is not all
	}
	return doubts, nil
}

func (in *inspector) lookAtFile(uri string, sl *slot, s *InspectedSample, check func(*os.File, *InspectedSample) []string) (wrong []string) {
	say := func(format string, args ...any) []string { return append(wrong, fmt.Sprintf(format, args...)) }
	if sluice.ValidateID(s.SampleID) != nil {
		return nil // said already
	}
	fd, err := openQuietly(in.dirfd, s.File, 0)
	if errors.Is(err, unix.ENOENT) {
		return say("has no file %q: someone else deleted it", s.File)
	}
	if err != nil {
		return say("its file %q can't be opened: %v", s.File, err)
	}
	f := os.NewFile(uintptr(fd), filepath.Join(in.dir, s.File))
	defer func() { _ = f.Close() }()
	if check != nil {
		// Nobody waits for this lock: whoever would recycle the file tries and takes another. If it is taken, the slot is no longer the sample's.
		if err := flock(fd, unix.LOCK_SH|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
			return say("another process holds an exclusive lock on its file %q", s.File)
		}
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return say("its file %q can't be looked at: %v", s.File, err)
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return say("its file %q is no regular file (mode %o): someone replaced it", s.File, st.Mode)
	case st.Ino != sl.ino:
		return say("its file %q is inode %d, the store wrote inode %d: someone replaced it", s.File, st.Ino, sl.ino)
	case st.Size != sl.size:
		return say("its file %q is %d bytes, the store wrote %d", s.File, st.Size, sl.size)
	}
	h, err := safetensors.ReadHeader(f, st.Size)
	if err != nil {
		return say("its file %q can't be read: %v", s.File, err)
	}
	text, ok := h.Metadata[safetensors.RefKey]
	if !ok {
		return say("its file %q has no ref in its metadata", s.File)
	}
	ref, err := sluice.ParseRef([]byte(text))
	if err != nil {
		return say("its file %q has a ref that can't be read: %v", s.File, err)
	}
	switch {
	case ref.SampleID() != s.SampleID:
		return say("its file %q has the ref of the sample %q", s.File, ref.SampleID())
	case digest(ref.Generation()) != sl.generation:
		return say("its file %q has a ref of another generation, %s", s.File, ref.Generation())
	case ref.EstimatedBytes() != sl.bytes:
		return say("its file %q has a ref of %d bytes, the ledger says %d", s.File, ref.EstimatedBytes(), sl.bytes)
	}
	s.RunID, s.Generation, s.Algorithm, s.SchemaVersion, s.NumTokens = ref.RunID(), ref.Generation(), ref.Algorithm(), ref.SchemaVersion(), ref.NumTokens()
	if ref.StoreURI() != uri {
		in.elsewhere++
		in.elsewhereURI = ref.StoreURI()
	}
	if check != nil {
		wrong = append(wrong, check(f, s)...)
	}
	return wrong
}

// identity tells a file from another one of the same name.
type identity struct {
	ino, dev            uint64
	size, mtime, change int64
}

func (in *inspector) identify(name string) (identity, error) {
	st, err := in.stat(name)
	return identity{st.Ino, st.Dev, st.Size, st.Mtim.Nano(), st.Ctim.Nano()}, err
}

func (in *inspector) stat(name string) (st unix.Stat_t, err error) {
	err = unix.Fstatat(in.dirfd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	return st, err
}

type stranger struct {
	InspectedFile
	identity identity
}

// named lists the files that slots name, or may.
func named(l *ledger) map[string]bool {
	names := map[string]bool{ledgerName: true}
	for i := range l.slotTop {
		sl := l.slot(i)
		if sl.state == stFree {
			continue
		}
		names[sl.scratch()] = true
		if sl.state == stStaging || sl.state == stPublished || sl.state == stFreeing || sl.flags&flNamed != 0 {
			names[sl.fileName()] = true
		}
	}
	return names
}

// strangers lists the files that no slot names. On a store in use, some of them may only have come or gone meanwhile.
func (in *inspector) strangers(l *ledger) ([]stranger, error) {
	fd, err := openQuietly(in.dirfd, ".", unix.O_DIRECTORY)
	if err != nil {
		return nil, sysError("inspect", in.dir, "open the directory", err)
	}
	d := os.NewFile(uintptr(fd), in.dir)
	defer func() { _ = d.Close() }()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, sysError("inspect", in.dir, "read the directory", err)
	}
	slices.Sort(names)
	known := named(l)
	var found []stranger
	for _, name := range names {
		if known[name] {
			continue
		}
		st, err := in.stat(name)
		if err != nil {
			continue // gone
		}
		f := stranger{InspectedFile{Name: name, Kind: KindForeign, Bytes: st.Size, Modified: time.Unix(0, st.Mtim.Nano())}, identity{st.Ino, st.Dev, st.Size, st.Mtim.Nano(), st.Ctim.Nano()}}
		switch id, isSample := strings.CutSuffix(name, sampleSuffix); {
		case strings.HasPrefix(name, scratchPrefix):
			f.Kind = KindScratch
		case strings.HasPrefix(name, newPrefix):
			f.Kind = KindTemporary
		case isSample && sluice.ValidateID(id) == nil:
			f.Kind, f.Detail = in.kindOf(id)
		}
		found = append(found, f)
	}
	return found, nil
}

// kindOf looks into a file that has a sample's name, as a sweep would.
func (in *inspector) kindOf(id string) (kind, detail string) {
	fd, err := openQuietly(in.dirfd, id+sampleSuffix, 0)
	if err != nil {
		return KindForeign, err.Error()
	}
	f := os.NewFile(uintptr(fd), id)
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return KindForeign, "is no regular file"
	}
	h, err := safetensors.ReadHeader(f, info.Size())
	if err != nil {
		return KindUnreadable, err.Error()
	}
	text, ok := h.Metadata[safetensors.RefKey]
	if !ok {
		return KindForeign, "carries no ref"
	}
	ref, err := sluice.ParseRef([]byte(text))
	if err != nil {
		return KindUnreadable, err.Error()
	}
	if uri := (&url.URL{Scheme: "file", Path: in.dir}).String(); ref.SampleID() != id || ref.StoreURI() != uri {
		return KindForeign, fmt.Sprintf("has the ref of sample %q in the store %s", ref.SampleID(), ref.StoreURI())
	}
	return KindSample, ""
}

// stillThere notices that the store was deleted or made anew meanwhile.
func (in *inspector) stillThere() error {
	if st, err := in.stat(ledgerName); err != nil || st.Ino != in.ino {
		return &sluice.Error{Kind: sluice.Unavailable, Op: "dirstore: inspect", Subject: in.dir, Detail: "was deleted or replaced while it was looked at", Err: err, Hint: "try again"}
	}
	return nil
}
