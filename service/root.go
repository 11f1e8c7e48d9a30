//go:build unix

package service

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

// root is the directory that all samples are in:
//
//	owner.json       who has it, locked
//	id               32 hexadecimal digits: who reads the same sees the same files
//	runs/<run>       the store of a run
//	staging/<run>    where local producers leave files to be staged
type root struct {
	dir  string
	id   string
	lock *os.File
	disk bool // it lies on a disk: sample files carry checksums
}

const (
	memoryDir = "/dev/shm"
	// leastMemory is what must be free there for a service without a cap.
	leastMemory = 1 << 30
	idName      = "id"
)

// chooseRoot is where the samples go if nobody says where: into memory if there is room for twice the cap, else beside the state. Where they lie already, they stay.
func chooseRoot(o *Options, memory string) (dir, why string) {
	beside := filepath.Join(o.StateDir, "store")
	sum := sha256.Sum256([]byte(o.StateDir))
	inMemory := filepath.Join(memory, fmt.Sprintf("sluice-%d", os.Geteuid()), hex.EncodeToString(sum[:8]))
	for _, dir := range []string{beside, inMemory} {
		if _, err := os.Lstat(filepath.Join(dir, idName)); err == nil {
			return dir, "it holds this service's store already"
		}
	}
	enough := o.MaxBytes * 2 // no overflow: less than 2^54
	if o.MaxBytes == NoCap {
		enough = leastMemory
	}
	free, inRAM, err := roomOf(memory)
	switch {
	case err != nil:
		return beside, fmt.Sprintf("%s: %v", memory, err)
	case !inRAM:
		return beside, memory + " is not in memory"
	case free < enough && o.MaxBytes == NoCap:
		return beside, fmt.Sprintf("%s has %d bytes free, less than %d", memory, free, enough)
	case free < enough:
		return beside, fmt.Sprintf("%s has %d bytes free, less than twice the cap of %d", memory, free, o.MaxBytes)
	}
	if o.MaxBytes == NoCap {
		return inMemory, fmt.Sprintf("%s has %d bytes free", memory, free)
	}
	return inMemory, memory + " has room for twice the cap"
}

// openRoot takes the root for this process. id is that of a root that is not there yet.
func openRoot(dir string, me owner, id string) (*root, error) {
	parent := filepath.Dir(dir)
	inMemory := strings.HasPrefix(parent, memoryDir+"/")
	if inMemory {
		if err := ownParent(parent); err != nil {
			return nil, err
		}
	}
	lock, err := own(dir, me)
	if err != nil {
		return nil, err
	}
	if inMemory { // a private service that ended may have removed it in between, and somebody else have made it
		if err := checkPrivate(parent); err != nil {
			return nil, errors.Join(err, lock.Close())
		}
	}
	r := &root{lock: lock}
	// Sample files are named to clients by the path that the store has in its URI, which is without links.
	if r.dir, err = filepath.EvalSymlinks(dir); err == nil {
		err = r.prepare(id)
	}
	if err != nil {
		_ = lock.Close()
		return nil, err
	}
	return r, nil
}

// ownParent makes the directory of this user's stores in memory. Anybody may make directories there, so the one of our name may be a stranger's.
func ownParent(dir string) error {
	for tries := 1; ; tries++ {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return &sluice.Error{Kind: kindOfOS(err), Op: "service: open", Subject: dir, Detail: "can't be made", Err: err}
		}
		err := checkPrivate(dir)
		if err == nil || tries == 100 || !errors.Is(err, sluice.ErrNotFound) { // else a private service that ended has just removed it
			return err
		}
	}
}

func (r *root) prepare(id string) error {
	_, inRAM, err := roomOf(r.dir)
	if err != nil {
		return &sluice.Error{Kind: kindOfOS(err), Op: "service: open", Subject: r.dir, Err: err}
	}
	r.disk = !inRAM
	for _, sub := range []string{"runs", "staging"} {
		dir := filepath.Join(r.dir, sub)
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return &sluice.Error{Kind: kindOfOS(err), Op: "service: open", Subject: dir, Detail: "can't be made", Err: err}
		}
		if err := checkPrivate(dir); err != nil {
			return err
		}
	}
	data, err := os.ReadFile(r.idFile())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		r.id = id
		err = writeWhole(r.idFile(), []byte(r.id+"\n"))
	case err == nil:
		if r.id = strings.TrimSpace(string(data)); !isID(r.id) {
			return &sluice.Error{Kind: sluice.Corrupt, Op: "service: open", Subject: r.idFile(), Detail: "wants 32 hexadecimal digits", Hint: "remove it if no sample of the store is needed any more"}
		}
	}
	if err != nil {
		return &sluice.Error{Kind: kindOfOS(err), Op: "service: open", Subject: r.idFile(), Err: err}
	}
	return nil
}

func (r *root) idFile() string               { return filepath.Join(r.dir, idName) }
func (r *root) runDir(run string) string     { return filepath.Join(r.dir, "runs", run) }
func (r *root) stagingDir(run string) string { return filepath.Join(r.dir, "staging", run) }

// strays lists the directories of runs that are not known.
func (r *root) strays(known func(run string) bool) ([]string, error) {
	var list []string
	for _, sub := range []string{"runs", "staging"} {
		entries, err := os.ReadDir(filepath.Join(r.dir, sub))
		if err != nil {
			return nil, &sluice.Error{Kind: kindOfOS(err), Op: "service: open", Subject: filepath.Join(r.dir, sub), Err: err}
		}
		for _, e := range entries {
			if !known(e.Name()) {
				list = append(list, filepath.Join(r.dir, sub, e.Name()))
			}
		}
	}
	return list, nil
}

// newSuffix is that of a file which is being written.
const newSuffix = ".new"

// writeWhole writes a small file so that it is there whole or not at all.
func writeWhole(path string, data []byte) error {
	temp := path + newSuffix
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		_ = os.Remove(temp)
	}
	return err
}
