package access

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
)

// EnsureTokens makes the tokens file in the state directory, with one token a role, unless there is one.
func EnsureTokens(dir string) error {
	return edit(dir, func(tokens []wire.Token, exists bool) ([]wire.Token, error) {
		if exists {
			return tokens, errUnchanged
		}
		for _, r := range []Role{Producer, Consumer, Operator} {
			tokens = append(tokens, newToken(string(r), r, ""))
		}
		return tokens, nil
	})
}

// CreateToken adds a token to the tokens file in the state directory and returns it. A service that runs there knows it at once. run is "" for all runs.
func CreateToken(dir, name string, role Role, run string) (wire.Token, error) {
	t := newToken(name, role, run)
	err := edit(dir, func(tokens []wire.Token, _ bool) ([]wire.Token, error) {
		invalid := func(subject, detail string) ([]wire.Token, error) {
			return nil, &sluice.Error{Kind: sluice.Invalid, Op: "token", Subject: subject, Detail: detail}
		}
		switch {
		case sluice.ValidateID(name) != nil:
			return invalid(name, "is no valid name, want letters, digits, . _ : and -")
		case !slices.Contains([]Role{Producer, Consumer, Operator}, role):
			return invalid(string(role), "is no role, want producer, consumer or operator")
		case run != "" && sluice.ValidateID(run) != nil:
			return invalid(run, "is no valid run id, want letters, digits, . _ : and -")
		case slices.ContainsFunc(tokens, func(o wire.Token) bool { return o.Name == name }):
			return nil, &sluice.Error{Kind: sluice.Duplicate, Op: "token", Subject: name, Detail: "there is a token of this name", Hint: "revoke it first, or choose another"}
		}
		return append(tokens, t), nil
	})
	return t, err
}

// RevokeToken takes a token out of the tokens file. A service that runs there refuses it, and the dashboard logins made with it, within a second.
func RevokeToken(dir, name string) error {
	return edit(dir, func(tokens []wire.Token, _ bool) ([]wire.Token, error) {
		left := slices.DeleteFunc(slices.Clone(tokens), func(t wire.Token) bool { return t.Name == name })
		if len(left) == len(tokens) {
			return nil, &sluice.Error{Kind: sluice.NotFound, Op: "token", Subject: name, Detail: "there is no token of this name"}
		}
		return left, nil
	})
}

func newToken(name string, role Role, run string) wire.Token {
	return wire.Token{Name: name, Role: string(role), Run: run, Value: rand.Text(), Created: time.Now().UTC().Truncate(time.Second)}
}

var errUnchanged = errors.New("the tokens stay as they are")

// edit changes the tokens file under a lock of its own, so that two commands never lose each other's tokens, and replaces it whole, so that nobody reads half of one.
func edit(dir string, change func(tokens []wire.Token, exists bool) ([]wire.Token, error)) error {
	failed := func(err error) error {
		return &sluice.Error{Kind: sluice.Denied, Op: "tokens", Subject: dir, Err: err}
	}
	lock, err := os.OpenFile(filepath.Join(dir, "tokens.lock"), os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return &sluice.Error{Kind: sluice.NotFound, Op: "tokens", Subject: dir, Detail: "there is no such state directory", Hint: "start `sluice serve` once, or name another with --state"}
	}
	if err != nil {
		return failed(err)
	}
	defer lock.Close() //nolint:errcheck // it holds nothing but the lock
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return failed(err)
	}
	tokens, err := wire.ReadTokens(dir)
	exists := !errors.Is(err, sluice.ErrNotFound)
	if err != nil && exists {
		return err
	}
	tokens, err = change(tokens, exists)
	if errors.Is(err, errUnchanged) {
		return nil
	}
	if err != nil {
		return err
	}
	data, err := wire.FormatTokens(tokens)
	if err != nil {
		return failed(err)
	}
	if err := replace(filepath.Join(dir, wire.TokensFile), data, 0o600); err != nil {
		return failed(err)
	}
	return nil
}

// replace gives path new content: all of it or none, also after a power cut.
func replace(path string, data []byte, mode fs.FileMode) (err error) {
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close() //nolint:errcheck // nothing was written through it
	temp := fmt.Sprintf("%s.%s", path, rand.Text()[:8])
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, mode)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(temp) // err says what matters
		}
	}()
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err = os.Rename(temp, path); err != nil {
		return err
	}
	return dir.Sync()
}

type digest = [sha256.Size]byte

// keyring is the tokens file as the door needs it. It follows the file: a change counts after a second at the latest, and at once for a token that was not known. A file that can't be
// read, or that others can, opens for nobody: the last good one might hold what was revoked since.
type keyring struct {
	dir string
	now func() time.Time
	log func(error) // once a change of the file

	mu      sync.Mutex
	checked time.Time
	seen    fileID
	fault   error
	keys    []key
}

type key struct {
	digest digest
	caller Caller
}

// fileID changes whenever the file does.
type fileID struct {
	inode   uint64
	size    int64
	changed unix.Timespec // inode change: a chmod counts too
}

const recheck = time.Second

func openKeyring(dir string, log func(error)) (*keyring, error) {
	k := &keyring{dir: dir, now: time.Now, log: log}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.refresh()
	return k, k.fault
}

// caller finds whose token this is. All digests are compared, each in constant time, so that the time tells neither which token was nearly hit nor how many there are before it.
func (k *keyring) caller(token string) (Caller, digest, error) {
	d := sha256.Sum256([]byte(token))
	c, err := k.owner(d)
	return c, d, err
}

// owner is [keyring.caller] by the token's digest.
func (k *keyring) owner(d digest) (Caller, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.now().Sub(k.checked) >= recheck {
		k.refresh()
	}
	c, ok := k.find(d)
	if !ok && k.fault == nil && k.refresh() {
		c, ok = k.find(d)
	}
	switch {
	case k.fault != nil:
		return Caller{}, &sluice.Error{Kind: sluice.Unavailable, Op: "access", Detail: "the service can't read its tokens now", Hint: "its log says why"}
	case !ok:
		return Caller{}, errUnknownToken
	}
	return c, nil
}

var errUnknownToken = &sluice.Error{Kind: sluice.Denied, Op: "access", Detail: "the token is not known", Hint: "tokens are in the state directory of the service, see `sluice token`"}

func (k *keyring) find(d digest) (c Caller, ok bool) {
	found := -1
	for i := range k.keys {
		found = subtle.ConstantTimeSelect(subtle.ConstantTimeCompare(k.keys[i].digest[:], d[:]), i, found)
	}
	if found < 0 {
		return Caller{}, false
	}
	return k.keys[found].caller, true
}

// refresh reads the file if it has changed, and says whether it had.
func (k *keyring) refresh() bool {
	k.checked = k.now()
	id, err := identify(filepath.Join(k.dir, wire.TokensFile))
	if err == nil && id == k.seen {
		return false
	}
	k.seen = id
	var tokens []wire.Token
	if err == nil {
		tokens, err = wire.ReadTokens(k.dir)
	}
	if err != nil {
		if k.fault == nil || k.fault.Error() != err.Error() {
			k.log(err)
		}
		k.fault, k.keys, k.seen = err, nil, fileID{} // what can't be read is tried again
		return true
	}
	k.fault, k.keys = nil, make([]key, 0, len(tokens))
	for _, t := range tokens {
		k.keys = append(k.keys, key{sha256.Sum256([]byte(t.Value)), Caller{Name: t.Name, Role: Role(t.Role), Run: t.Run, UID: -1}})
	}
	return true
}

func identify(path string) (fileID, error) {
	var s unix.Stat_t
	if err := unix.Lstat(path, &s); err != nil {
		return fileID{}, &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	return fileID{s.Ino, s.Size, s.Ctim}, nil
}
