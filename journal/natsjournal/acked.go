package natsjournal

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/sluice-ml/sluice"
)

// ackedFile remembers, beside an embedded server, the last message of a journal that was acknowledged, and in which boot of the machine. A server that finds its files damaged
// cuts them off at the damage and goes on; this is how that is noticed. It is written and never synced: after a power cut it may say too little, which is no lie.
type ackedFile struct {
	file *os.File
	path string
	was  uint64
	boot bool // was written since the machine started
}

const ackedSize = 8

func (js *Journals) ackedPath(name string) string {
	return filepath.Join(js.dir, "acked", toStream.Replace(name))
}

// openAcked opens it, or returns nil, which does nothing, for a server elsewhere.
func (js *Journals) openAcked(name string) (*ackedFile, error) {
	if js.dir == "" {
		return nil, nil
	}
	path := js.ackedPath(name)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, dirError(err, path, "can't be made")
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, dirError(err, path, "can't be opened")
	}
	a := &ackedFile{file: f, path: path}
	data, err := io.ReadAll(io.LimitReader(f, 128))
	if err != nil {
		return nil, errors.Join(dirError(err, path, "can't be read"), f.Close())
	}
	if len(data) >= ackedSize { // else nothing was acknowledged yet
		a.was = binary.LittleEndian.Uint64(data)
		a.boot = string(data[ackedSize:]) == bootID()
	}
	return a, nil
}

// check compares it with the last message that the server has.
func (a *ackedFile) check(last uint64, o Options) error {
	if a == nil || last >= a.was {
		return nil
	}
	if o.Durability == Process && !a.boot {
		o.Logger.Warn("the machine went down and took acknowledged records with it, as durability process allows", "file", a.path, "messages", a.was-last)
		return nil
	}
	e := fail(sluice.Corrupt, "open", a.path, "the journal ends at message %d, but %d was acknowledged: its files were damaged", last, a.was)
	e.Hint = "restore the directory, or remove this file and go on without the rest"
	return e
}

// set writes it. The first of an opening writes the boot as well.
func (a *ackedFile) set(seq uint64) error {
	if a == nil {
		return nil
	}
	data := binary.LittleEndian.AppendUint64(make([]byte, 0, 64), seq)
	if !a.boot {
		data = append(data, bootID()...)
	}
	if _, err := a.file.WriteAt(data, 0); err != nil {
		return dirError(err, a.path, "can't be written")
	}
	a.was, a.boot = seq, true
	return nil
}

func (a *ackedFile) close() error {
	if a == nil {
		return nil
	}
	return a.file.Close()
}

func (js *Journals) forgetAcked(name string) error {
	if js.dir == "" {
		return nil
	}
	if err := os.Remove(js.ackedPath(name)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return dirError(err, js.ackedPath(name), "can't be removed")
	}
	return nil
}

// bootID names this boot of the machine, or is empty where it can't be found out.
func bootID() string {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}
