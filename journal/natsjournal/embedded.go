package natsjournal

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/sluice-ml/sluice"
)

// embed starts the server over the directory and connects to it.
func (js *Journals) embed(ctx context.Context) (*line, error) {
	ear := &ear{log: js.opts.Logger}
	srv, err := server.NewServer(&server.Options{
		ServerName: "sluice",
		DontListen: true,
		JetStream:  true,
		StoreDir:   js.dir,
		SyncAlways: js.opts.Durability == Power,
		// The room of the file system is the limit; its estimate at start would be another one, that does not grow with it.
		JetStreamMaxStore:      1 << 62,
		NoSigs:                 true,
		DisableJetStreamBanner: true,
	})
	if err != nil {
		return nil, failBy(err, sluice.Invalid, "open", js.dir, "the server refuses its options")
	}
	srv.SetLoggerV2(ear, false, false, false)
	srv.Start() // it returns: without a listener there is nothing to wait at
	stop := func() {
		srv.Shutdown()
		srv.WaitForShutdown()
	}
	if err := ear.fatal(); err != nil || !srv.JetStreamEnabled() {
		stop()
		return nil, failBy(err, kindOf(err), "open", js.dir, "the server does not start")
	}
	l, err := js.connect("", nats.InProcessServer(srv))
	if err != nil {
		stop()
		return nil, failBy(err, sluice.Unavailable, "open", js.dir, "no connection to the server in the process")
	}
	l.stop = stop
	ear.onBroken(func(err error) {
		l.end(failBy(err, kindOf(err), "append", js.dir, "the server can't write; open the journal again when it can"))
	})
	if err := js.checkStreams(ctx, l); err != nil {
		l.close(err)
		return nil, err
	}
	return l, nil
}

// checkStreams finds the journals that were acknowledged and that the server did not take up: it says nothing of those, and starts as if they had never been. What it did not
// take up and nobody acknowledged is left of a journal in whose making or deleting the process died; a new one of that name would begin with its messages.
func (js *Journals) checkStreams(ctx context.Context, l *line) error {
	names, err := js.list(ctx, l)
	if err != nil {
		return err
	}
	l.damaged = map[string]error{}
	root := filepath.Join(js.dir, "acked")
	entries, err := os.ReadDir(root)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return dirError(err, root, "can't be read")
	}
	for _, e := range entries {
		name := fromStream.Replace(e.Name())
		if slices.Contains(names, name) {
			continue
		}
		acked, err := js.openAcked(name)
		if err != nil {
			return err
		}
		if acked.check(0, js.opts) == nil {
			err = js.forgetAcked(name)
		} else {
			bad := fail(sluice.Corrupt, "open", name, "%s is damaged or gone", js.streamDir(name))
			bad.Hint = "restore it, or delete the journal"
			l.damaged[name] = bad
			js.opts.Logger.Error("a journal is damaged", "err", bad)
		}
		if err := errors.Join(err, acked.close()); err != nil {
			return err
		}
	}
	root = filepath.Dir(js.streamDir(""))
	if entries, err = os.ReadDir(root); err != nil && !errors.Is(err, os.ErrNotExist) {
		return dirError(err, root, "can't be read")
	}
	for _, e := range entries {
		name, ok := strings.CutPrefix(e.Name(), js.stream(""))
		name = fromStream.Replace(name)
		if !ok || slices.Contains(names, name) || l.damaged[name] != nil {
			continue
		}
		js.opts.Logger.Warn("what is left of a journal that was not wholly made or deleted is removed", "dir", js.streamDir(name))
		if err := os.RemoveAll(js.streamDir(name)); err != nil {
			return dirError(err, js.streamDir(name), "can't be removed")
		}
	}
	return nil
}

// streamDir is where the server keeps a journal.
func (js *Journals) streamDir(name string) string {
	return filepath.Join(js.dir, "jetstream", "$G", "streams", js.stream(name))
}

func dirError(err error, path, detail string) error {
	return failBy(err, kindOf(err), "open", path, "%s", detail)
}

// kindOf is the kind of an error of the file system.
func kindOf(err error) sluice.Kind {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return sluice.NoSpace
	case errors.Is(err, os.ErrPermission):
		return sluice.Denied
	}
	return sluice.Unavailable
}

// ear is the server's logger: errors go on, and what the server says of itself and tells no caller is taken from them.
type ear struct {
	log *slog.Logger

	mu     sync.Mutex
	died   error
	broken error
	tell   func(error)
}

var _ server.Logger = (*ear)(nil)

func (e *ear) Noticef(string, ...any) {}
func (e *ear) Debugf(string, ...any)  {}
func (e *ear) Tracef(string, ...any)  {}

// Warnf is quiet: after a kill the server warns of what it mends.
func (e *ear) Warnf(format string, v ...any) {
	e.log.Debug(fmt.Sprintf(format, v...))
	e.listen(format, v)
}

func (e *ear) Errorf(format string, v ...any) {
	e.log.Error(fmt.Sprintf(format, v...))
	e.listen(format, v)
}

func (e *ear) Fatalf(format string, v ...any) {
	e.log.Error(fmt.Sprintf(format, v...))
	e.mu.Lock()
	e.died = fmt.Errorf(strings.ReplaceAll(format, "%v", "%w"), v...)
	e.mu.Unlock()
}

// listen looks for a write that failed. The server then answers no publish to the stream until it is started again, or, if it was not allowed to write, none at all.
func (e *ear) listen(format string, v []any) {
	if !strings.Contains(format, "critical write error") && !strings.Contains(format, "disabling JetStream") {
		return
	}
	for _, a := range v {
		if err, ok := a.(error); ok {
			e.mu.Lock()
			e.broken = err
			tell := e.tell
			e.mu.Unlock()
			if tell != nil {
				tell(err)
			}
			return
		}
	}
}

func (e *ear) fatal() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.died
}

func (e *ear) onBroken(tell func(error)) {
	e.mu.Lock()
	e.tell = tell
	broken := e.broken
	e.mu.Unlock()
	if broken != nil {
		tell(broken)
	}
}
