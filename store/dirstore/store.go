//go:build linux

package dirstore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

const (
	sampleSuffix  = ".safetensors"
	scratchPrefix = ".sluice-file-" // and 16 hexadecimal digits: a sample that is not, or no longer, to be seen
	newPrefix     = ".sluice-new-"  // a ledger that is being made, a probe

	orphanAge    = 60 * time.Second // of unclaimed samples whose session is gone
	ownerlessAge = 24 * time.Hour   // of files without a slot

	smallFile = 1 << 20  // unlinked where the ledger is changed, since a second change costs more
	poolFrom  = 64 << 10 // smaller files are not worth keeping
	poolMost  = 64       // files
)

// Store is a session on a shared directory. It implements [sluice.ClaimStore].
type Store struct {
	dir      string
	uri      string
	opts     Options
	clock    sluice.Clock
	log      *slog.Logger
	hooks    hooks
	caps     sluice.Caps
	medium   medium
	cgroups  []cgroup
	reading  groupReading // of the cgroups; guarded by mu
	ino, dev uint64       // of the directory
	made     bool         // this session has made the directory
	poolRoom int64        // bound of the pool where MaxBytes sets none

	// life is held shared by every call for its time, and alone by Close.
	life   sync.RWMutex
	closed atomic.Bool

	mu  sync.Mutex // beside the ledger's lock, which does not keep the goroutines of one session apart; guards led
	led *ledger    // nil once the session has ended

	leaving atomic.Bool // the session has closed, and ends with its last pin

	files sync.RWMutex // held shared by those who use dirfd outside of a call, so that it is not closed under them
	dirfd int

	// view guards the mapping of the ledger's head for those who read it without the lock.
	view  sync.RWMutex
	shown *head // nil once it is unmapped
	final sluice.Health

	computed computed

	watch  watcher
	reaper reaper
}

var _ sluice.ClaimStore = (*Store)(nil)

// hooks are for tests.
type hooks struct {
	fsType  int64
	fsTotal int64
	room    func() int64
	// forceReuse recycles files that are mapped, against what the ledger says; noLocks takes no lock on samples. They show what either is for.
	forceReuse, noLocks bool
	// sync is called instead of fsync.
	sync func(fd int) error
	// at is called at named points of a put.
	at func(point string)
	// die is called at many points of every change of the ledger, and may panic.
	die func()
}

func (h *hooks) reach(point string) {
	if h.at != nil {
		h.at(point)
	}
	if h.die != nil {
		h.die()
	}
}

// Open opens a session on the store in dir, and makes both if they are not there. The parent of dir must exist.
//
// Errors: ErrDenied if dir is a symbolic link, another user's, or open to others; ErrUnsupported on a network file system; ErrInvalid for caps that do not resolve; ErrConflict
// for caps other than those that open sessions have; ErrNoSpace for caps that the file system could never hold; ErrCorrupt if there is a ledger that can't be read.
func Open(dir string, opts *Options) (*Store, error) {
	return open(dir, opts, hooks{})
}

func open(dir string, opts *Options, h hooks) (*Store, error) {
	s := &Store{hooks: h, dirfd: -1}
	if opts != nil {
		s.opts = *opts
	}
	if s.clock = s.opts.Clock; s.clock == nil {
		s.clock = sluice.SystemClock{}
	}
	if s.log = s.opts.Logger; s.log == nil {
		s.log = slog.Default()
	}
	if s.opts.Durability != Process && s.opts.Durability != Power {
		return nil, fail(sluice.Invalid, "open", dir, "durability is %d, want Process or Power", s.opts.Durability)
	}
	if s.opts.Caps != (sluice.Caps{}) {
		caps, err := s.opts.Caps.Resolve()
		if err != nil {
			return nil, &sluice.Error{Kind: sluice.Invalid, Op: "dirstore: open", Subject: dir, Err: err}
		}
		if caps.MaxSamples > maxSlots/2 {
			return nil, fail(sluice.Invalid, "open", dir, "max_samples is %d, want at most %d", caps.MaxSamples, maxSlots/2)
		}
		s.opts.Caps = caps
	}
	if err := s.openDir(dir); err != nil {
		return nil, err
	}
	if err := s.join(); err != nil {
		_ = unix.Close(s.dirfd)
		if s.made {
			_ = unix.Rmdir(s.dir) // refuses if another session has come meanwhile
		}
		return nil, err
	}
	return s, nil
}

// openDir opens the directory itself: what is below is reached through the descriptor, so that nobody can exchange a part of the path.
func (s *Store) openDir(dir string) error {
	abs, err := filepath.Abs(dir)
	if err != nil || dir == "" {
		return fail(sluice.Invalid, "open", dir, "is no path")
	}
	// The directory's own name must not be a link, but its parents may be: they are resolved, so that all sessions have one URI.
	parent, err := filepath.EvalSymlinks(filepath.Dir(abs))
	if err != nil {
		return sysError("open", abs, "find the parent directory", err)
	}
	abs = filepath.Join(parent, filepath.Base(abs))
	err = unix.Mkdir(abs, 0o700)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return sysError("open", abs, "create the directory", err)
	}
	s.made = err == nil
	var st unix.Stat_t
	if err := unix.Lstat(abs, &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK {
		return &sluice.Error{Kind: sluice.Denied, Op: "dirstore: open", Subject: abs, Detail: "is a symbolic link, want a directory", Hint: "give the directory it points to"}
	}
	fd, err := unix.Open(abs, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return sysError("open", abs, "open the directory", err)
	}
	if err := unix.Fstat(fd, &st); err != nil {
		_ = unix.Close(fd)
		return sysError("open", abs, "stat the directory", err)
	}
	if err := checkDir(abs, &st); err != nil {
		_ = unix.Close(fd)
		return err
	}
	s.dir, s.dirfd, s.ino, s.dev = abs, fd, st.Ino, st.Dev
	s.uri = (&url.URL{Scheme: "file", Path: abs}).String()
	return nil
}

func checkDir(abs string, st *unix.Stat_t) error {
	if uid := os.Geteuid(); st.Uid != uint32(uid) {
		return &sluice.Error{Kind: sluice.Denied, Op: "dirstore: open", Subject: abs, Detail: fmt.Sprintf("belongs to user %d, want our own, %d", st.Uid, uid), Hint: "choose a directory of your own"}
	}
	if mode := st.Mode & 0o777; mode != 0o700 {
		return &sluice.Error{Kind: sluice.Denied, Op: "dirstore: open", Subject: abs, Detail: fmt.Sprintf("has mode %04o, want 0700: others could read or replace samples", mode), Hint: "chmod 700 it, or name a directory in it that is not there yet"}
	}
	return nil
}

// join opens the ledger and makes this session known in it.
func (s *Store) join() error {
	if err := s.inspectMedium(); err != nil {
		return err
	}
	if s.medium.tmpfs {
		s.cgroups = cgroups()
	}
	// What is wrong with the caps is found before there is a ledger: a refused open leaves nothing.
	if s.opts.Caps != (sluice.Caps{}) {
		if err := s.checkCaps(s.opts.Caps); err != nil {
			return err
		}
	} else if err := unix.Fstatat(s.dirfd, ledgerName, &unix.Stat_t{}, unix.AT_SYMLINK_NOFOLLOW); errors.Is(err, unix.ENOENT) {
		return s.noCaps()
	}
	l, err := s.openLedger()
	if err != nil {
		return err
	}
	s.led = l
	err = s.do(func(l *ledger) error {
		l.reapDead()
		others := l.others()
		if b := bootID(); b != l.boot && others == 0 {
			// The file may be older than the samples, in parts.
			l.verifySlots()
			l.repair()
			l.boot = b
		}
		if err := l.adoptCaps(others); err != nil {
			return err
		}
		if others == 0 {
			l.epoch++
		}
		return l.enter()
	})
	if err == nil {
		err = s.do(func(l *ledger) error {
			_, err := l.sweep()
			free, _ := s.room(true)
			s.poolRoom = free / 8
			return err
		})
	}
	if err != nil {
		s.led = nil
		l.unmap()
		return err
	}
	s.shown = l.head
	return nil
}

// adoptCaps agrees with the other sessions on the caps.
func (l *ledger) adoptCaps(others int) error {
	s := l.s
	have, want := capsOf(l.caps), s.opts.Caps
	switch {
	case want == (sluice.Caps{}) && have == (sluice.Caps{}):
		return s.noCaps()
	case want == (sluice.Caps{}):
		want = have
	case have != want && others > 0:
		return &sluice.Error{Kind: sluice.Conflict, Op: "dirstore: open", Subject: s.dir, Detail: fmt.Sprintf("the caps %s differ from those of %d open sessions, %s", capsText(want), others, capsText(have)),
			Hint: "give the same caps, or none to take the store's"}
	}
	if err := s.checkCaps(want); err != nil {
		return err
	}
	l.caps = [6]int64{want.MaxBytes, want.MaxSamples, want.HighWatermarkBytes, want.LowWatermarkBytes, want.HighWatermarkSamples, want.LowWatermarkSamples}
	s.caps = want
	return nil
}

// noCaps refuses to make a store without caps.
func (s *Store) noCaps() error {
	_, err := sluice.Caps{}.Resolve()
	return &sluice.Error{Kind: sluice.Invalid, Op: "dirstore: open", Subject: s.dir, Err: err}
}

func capsOf(c [6]int64) sluice.Caps {
	return sluice.Caps{MaxBytes: c[0], MaxSamples: c[1], HighWatermarkBytes: c[2], LowWatermarkBytes: c[3], HighWatermarkSamples: c[4], LowWatermarkSamples: c[5]}
}

func capsText(c sluice.Caps) string {
	return fmt.Sprintf("{%d bytes (marks %d, %d), %d samples (marks %d, %d)}", c.MaxBytes, c.HighWatermarkBytes, c.LowWatermarkBytes, c.MaxSamples, c.HighWatermarkSamples, c.LowWatermarkSamples)
}

// do makes one change to the ledger, under its lock, and afterwards what is too slow to be done under it.
func (s *Store) do(change func(l *ledger) error) error {
	trash, err := s.change(change)
	s.discard(trash)
	if s.closed.Load() {
		s.retire()
	}
	return err
}

func (s *Store) change(change func(l *ledger) error) (trash []trashFile, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.led
	if l == nil {
		return nil, s.closedError("call")
	}
	if err := l.acquire(); err != nil {
		return nil, err
	}
	whole := false
	defer func() {
		for _, i := range l.trash {
			trash = append(trash, l.trashFile(i))
		}
		l.trash = nil
		l.release(whole)
		if whole {
			return
		}
		switch p := recover().(type) {
		case brokenLedger:
			err = fail(sluice.Corrupt, "ledger", s.dir, "its %s are broken; the next call repairs them", string(p))
		case nil:
		default:
			panic(p)
		}
	}()
	err = change(l)
	whole = true
	return nil, err
}

// retire ends a session that has closed, once nothing of it is out.
func (s *Store) retire() {
	if !s.leaving.Load() {
		return
	}
	over := false
	_, err := s.change(func(l *ledger) error {
		if over = !l.havePins(); over {
			l.endSession(l.me)
		}
		return nil
	})
	// Without a ledger, there is nothing to keep.
	if over || sluice.KindOf(err) == sluice.Unavailable {
		s.letGo()
	}
}

// letGo gives up the mapping of the ledger, the locks and the descriptors.
func (s *Store) letGo() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.led == nil {
		return
	}
	l := s.led
	s.led = nil
	s.view.Lock()
	if s.shown != nil {
		s.final, s.shown = l.health(s.caps), nil
	}
	s.view.Unlock()
	s.files.Lock()
	_ = unix.Close(s.dirfd)
	s.dirfd = -1
	s.files.Unlock()
	l.unmap()
}

// URI is "file://" and the absolute path of the directory.
func (s *Store) URI() string { return s.uri }

// Caps are those of the store, as resolved.
func (s *Store) Caps() sluice.Caps { return s.caps }

// Health reads the totals that all sessions share. It takes no lock that a put, a get or a disk could hold.
func (s *Store) Health() sluice.Health {
	s.view.RLock()
	defer s.view.RUnlock()
	if s.shown == nil {
		return s.final
	}
	return s.shown.health(s.caps)
}

func (h *head) health(caps sluice.Caps) sluice.Health {
	return sluice.Health{
		ResidentBytes: h.residentBytes.Load(), ResidentSamples: h.residentSamples.Load(),
		ReservedBytes: h.reservedBytes.Load(), ReservedSamples: h.reservedSamples.Load(),
		DeadBytes: h.deadBytes.Load(), DeadSamples: h.deadSamples.Load(),
		StagingBytes: h.stagingBytes.Load(), PoolBytes: h.poolBytes.Load(), Caps: caps,
	}
}

// enter begins a call that a closed store refuses. The caller ends it with s.life.RUnlock if there is no error.
func (s *Store) enter(ctx context.Context, op string) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	s.life.RLock()
	if s.closed.Load() {
		s.life.RUnlock()
		return s.closedError(op)
	}
	return nil
}

func (s *Store) closedError(op string) error {
	return fail(sluice.Closed, op, s.dir, "the store is closed")
}

// checkDirectory notices that the path leads elsewhere now: new sessions would share nothing with this one.
func (s *Store) checkDirectory(op string) error {
	var st unix.Stat_t
	err := unix.Lstat(s.dir, &st)
	if err == nil && st.Ino == s.ino && st.Dev == s.dev {
		return nil
	}
	what := "was replaced by another directory"
	switch {
	case err != nil:
		what = "can no longer be found"
	case st.Mode&unix.S_IFMT == unix.S_IFLNK:
		what = "was replaced by a symbolic link"
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		what = "was replaced by something that is no directory"
	}
	return &sluice.Error{Kind: sluice.Unavailable, Op: "dirstore: " + op, Subject: s.dir, Detail: what + " under the open store", Err: err, Hint: "close the store and open it again"}
}

// Close ends the session, or, while handles are unreleased or tensors unclosed, leaves it just for these. Its reservations
// end; samples that nobody has claimed are freed by the GC of another session after 60 s. It waits for calls that are under way, and must not be called
// from a callback of OnFreed.
func (s *Store) Close() error {
	s.life.Lock()
	if s.closed.Swap(true) {
		s.life.Unlock()
		return nil
	}
	s.life.Unlock()
	s.watch.close(s.shown)
	s.reaper.close()
	err := s.do(func(l *ledger) error {
		l.leave(l.me, false)
		if l.others() == 0 {
			l.purgePool(0) // nobody is left to put
		}
		return nil
	})
	s.leaving.Store(true)
	s.retire()
	if sluice.KindOf(err) == sluice.Unavailable {
		err = nil // the directory was deleted: closing is what is left to do
	}
	return err
}

func fail(kind sluice.Kind, op, subject, format string, args ...any) error {
	return &sluice.Error{Kind: kind, Op: "dirstore: " + op, Subject: subject, Detail: fmt.Sprintf(format, args...)}
}

// sysError wraps a failed system call.
func sysError(op, subject, what string, err error) error {
	e := &sluice.Error{Kind: sluice.Unavailable, Op: "dirstore: " + op, Subject: subject, Detail: "can't " + what, Err: err}
	switch {
	case isFull(err):
		e.Kind, e.Hint = sluice.NoSpace, "free room on the file system, or inodes (df -i)"
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM), errors.Is(err, unix.EROFS):
		e.Kind = sluice.Denied
	case errors.Is(err, unix.ELOOP):
		e.Kind, e.Hint = sluice.Denied, "a symbolic link is not followed here"
	case errors.Is(err, unix.ENOENT):
		e.Kind = sluice.NotFound
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EISDIR), errors.Is(err, unix.ENAMETOOLONG):
		e.Kind = sluice.Invalid
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		e.Hint = "raise the limit on open files"
	}
	return e
}

func isFull(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// spaceError wraps a failed system call that was to give a file its room.
func (s *Store) spaceError(op, subject, what string, err error) error {
	kind := sluice.NoSpace
	if !isFull(err) {
		kind = sluice.Unavailable
	}
	return &sluice.Error{Kind: kind, Op: "dirstore: " + op, Subject: subject, Detail: "can't " + what, Err: err, Hint: "free room there, or " + s.moreRoom()}
}
