//go:build unix

package service

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

// A private service begins with nothing and leaves nothing: see [Options].RemoveState. What one that was killed has left is told from what is in use by the locks on the owner files, which
// the kernel gives up with the process, and from what belongs to other services by a file that only private ones write.

// privateFile is in the state directory of a private service, and names its store.
const privateFile = "private.json"

type private struct {
	Store   string `json:"store,omitempty"`
	StoreID string `json:"store_id,omitempty"`
	Owner   owner  `json:"owner"` // as the store's owner file has it, unless somebody else has taken the store since
}

func readPrivate(state string) (p private, found bool, err error) {
	path := filepath.Join(state, privateFile)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return p, false, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &p)
	}
	if err != nil {
		return p, true, &sluice.Error{Kind: sluice.Corrupt, Op: "service: open", Subject: path, Detail: "can't be read", Hint: "remove that state directory if no service uses it", Err: err}
	}
	return p, true, nil
}

func (p private) write(state string) error {
	data, err := json.Marshal(p)
	if err == nil {
		err = writeWhole(filepath.Join(state, privateFile), append(data, '\n'))
	}
	if err != nil {
		return &sluice.Error{Kind: kindOfOS(err), Op: "service: open", Subject: state, Detail: "can't be marked as private", Err: err}
	}
	return nil
}

// beginEmpty clears the state directory, which is locked, of what an earlier private service left, and marks it. State that was to be kept is refused.
func (s *Service) beginEmpty() error {
	dir := s.opts.StateDir
	p, found, err := readPrivate(dir)
	if err != nil {
		return err
	}
	if !found {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return &sluice.Error{Kind: kindOfOS(err), Op: "service: open", Subject: dir, Detail: "can't be looked at", Err: err}
		}
		for _, e := range entries { // whatever it is and whosever, it would be removed in the end
			if name := e.Name(); isStateName(name) && name != privateFile+newSuffix {
				return &sluice.Error{Kind: sluice.Conflict, Op: "service: open", Subject: dir, Detail: "holds what a service was to keep (" + name + ")", Hint: "choose another state directory, or start without --remove-state"}
			}
		}
		return s.mark()
	}
	s.log.Info("what a killed service left is removed", "state", dir, "store", p.Store)
	if err := p.removeStore(); err != nil {
		return err
	}
	if err := removeState(dir, false); err != nil {
		return err
	}
	return s.mark()
}

// keep makes the state, which is locked, one that stays: a private service that was killed may have left it.
func keep(state string) error {
	if err := os.Remove(filepath.Join(state, privateFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return &sluice.Error{Kind: kindOfOS(err), Op: "service: open", Subject: state, Detail: "can't be kept", Err: err}
	}
	return nil
}

// mark says that the state is that of a private service: from then on whoever finds it without an owner may remove it.
func (s *Service) mark() error {
	if err := (private{}).write(s.opts.StateDir); err != nil {
		return err
	}
	s.marked = true
	return nil
}

// willHave notes which store this service is about to make.
func (s *Service) willHave(store, id string, me owner) error {
	for _, name := range storeNames {
		if _, err := os.Lstat(filepath.Join(store, name)); err == nil {
			return &sluice.Error{Kind: sluice.Conflict, Op: "service: open", Subject: store, Detail: "holds " + name + ", of another service or of somebody else, and this one would remove it in the end", Hint: "choose another directory, or start without --remove-state"}
		}
	}
	s.private = private{Store: store, StoreID: id, Owner: me}
	return s.private.write(s.opts.StateDir)
}

// sweepBeside removes what private services left whose state directories lie beside this one's and whose processes are gone.
func (s *Service) sweepBeside() {
	parent := filepath.Dir(s.opts.StateDir)
	entries, err := os.ReadDir(parent)
	if err != nil {
		s.log.Warn("the state directories beside this one can't be looked at", "dir", parent, "err", err)
		return
	}
	for _, e := range entries {
		dir := filepath.Join(parent, e.Name())
		if _, err := os.Lstat(filepath.Join(dir, privateFile)); err != nil || dir == s.opts.StateDir || checkPrivate(dir) != nil {
			continue
		}
		switch removed, err := sweepDead(dir); {
		case err != nil:
			s.log.Warn("what a killed service left can't be removed", "state", dir, "err", err)
		case removed:
			s.log.Info("what a killed service left was removed", "state", dir)
		}
	}
}

// sweepDead removes a private service's state directory and store, unless it lives.
func sweepDead(dir string) (removed bool, err error) {
	lock, err := lockOwner(dir)
	if err != nil || lock == nil {
		return false, err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	p, found, err := readPrivate(dir)
	if err != nil || !found { // it became another's just now
		return false, err
	}
	if err := p.removeStore(); err != nil {
		return false, err
	}
	return true, removeState(dir, true)
}

// lockOwner locks a directory's owner file; nil if somebody else has it, or nobody has made it yet.
func lockOwner(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, ownerFile), os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		cerr := f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = nil
		}
		return nil, errors.Join(err, cerr)
	}
	if !still(f) { // whoever had it has removed it
		return nil, f.Close()
	}
	return f, nil
}

// still reports whether the file has its name yet.
func still(f *os.File) bool {
	mine, err := f.Stat()
	if err != nil {
		return false
	}
	there, err := os.Lstat(f.Name())
	return err == nil && os.SameFile(mine, there)
}

// removeStore removes the store of a private service that is gone.
func (p private) removeStore() error {
	if p.Store == "" {
		return nil
	}
	lock, err := lockOwner(p.Store)
	if err != nil {
		return err
	}
	if lock == nil { // nobody has made it, or somebody else has it
		return nil
	}
	var last owner
	if err := json.NewDecoder(io.LimitReader(lock, 4096)).Decode(&last); err != nil || !last.is(p.Owner) {
		return lock.Close() // somebody else has had it since, or it was not yet ours
	}
	return errors.Join(removeRoot(p.Store, p.StoreID), lock.Close())
}

// storeNames are what a service makes in its store, beside the owner file.
var storeNames = []string{"runs", "staging", idName, idName + newSuffix}

// removeRoot removes the store of the given id, whose owner file is locked, and nothing else that lies there.
func removeRoot(dir, id string) error {
	if have := idOf(dir); have != id && have != "" {
		return nil // another's
	}
	for _, name := range append(storeNames[:len(storeNames):len(storeNames)], ownerFile) { // the owner last: until then nobody else comes in
		if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	if err := removeIfEmpty(dir); err != nil {
		return err
	}
	if parent := filepath.Dir(dir); strings.HasPrefix(parent, memoryDir+"/") {
		return removeIfEmpty(parent)
	}
	return nil
}

// removeState removes what services keep in a state directory, whose owner file is locked; with whole also owner and mark, and the directory if nothing else is in it.
func removeState(dir string, whole bool) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if name := e.Name(); isStateName(name) && name != privateFile {
			if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
				return err
			}
		}
	}
	if !whole {
		return nil
	}
	// The mark goes when all else is gone, and the owner last: until then nobody else comes in.
	for _, name := range []string{privateFile, ownerFile} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return removeIfEmpty(dir)
}

// isStateName reports whether services make a file or directory of the name in their state directory, or make one by way of it.
func isStateName(name string) bool {
	switch name {
	case "journal", "store", "tokens.lock", wire.SocketFile, privateFile, privateFile + newSuffix:
		return true
	}
	for _, replaced := range []string{wire.TokensFile, wire.EndpointFile, "tls-cert.pem", "tls-key.pem"} {
		if rest, ok := strings.CutPrefix(name, replaced); ok && (rest == "" || replacing.MatchString(rest)) {
			return true
		}
	}
	return false
}

// replacing is what package access puts behind the name of a file that it is about to replace.
var replacing = regexp.MustCompile(`^\.[A-Z2-7]{8}$`)

// removeIfEmpty removes a directory, unless something is in it, or it is gone.
func removeIfEmpty(dir string) error {
	err := unix.Rmdir(dir)
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EBUSY) {
		return nil
	}
	return err
}

// leaveNothing is the end of a private service: its locks are held until all else is gone.
func (s *Service) leaveNothing() error {
	var errs []error
	if s.root != nil {
		errs = append(errs, removeRoot(s.root.dir, s.private.StoreID))
	} else {
		errs = append(errs, s.private.removeStore()) // it may have been made in part
	}
	errs = append(errs, removeState(s.opts.StateDir, true))
	for i, err := range errs {
		if err != nil {
			errs[i] = &sluice.Error{Kind: kindOfOS(err), Op: "service: close", Subject: s.opts.StateDir, Detail: "something can't be removed", Err: err}
		}
	}
	return errors.Join(errs...)
}
