package natsjournal

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/sluice-ml/sluice"
)

// Journals are the journals of one service, which owns them alone. Its methods may be called at once.
type Journals struct {
	opts  Options
	dir   string // of the embedded server, or
	url   string // of the one elsewhere
	lock  *dirLock
	owner Owner

	mu     sync.Mutex
	line   *line
	open   map[string]*journal
	closed bool
}

// line is a connection to a server that answers. It ends for good when the embedded server broke, ownership was lost, or the journals were closed; its
// context's cause says why.
type line struct {
	ctx   context.Context
	end   context.CancelCauseFunc
	nc    *nats.Conn
	js    jetstream.JetStream
	held  *holder // of the ownership at a server elsewhere
	owned func()  // gives it up
	stop  func()  // of the embedded server

	patience time.Duration
	mu       sync.Mutex
	link     context.Context // of the present connection; nobody answers what was asked over an earlier one
	cut      context.CancelFunc
	damaged  map[string]error // journals that the embedded server did not take up
}

func (l *line) close(why error) {
	l.end(why)
	if l.owned != nil {
		l.owned()
	}
	if l.nc != nil {
		l.nc.Close()
	}
	if l.stop != nil {
		l.stop()
	}
}

// call asks the server for something that may be asked for twice, and does so while it does not answer, as long as the patience lasts.
func (l *line) call(ctx context.Context, op, name string, ask func(ctx context.Context) error) error {
	deadline := time.Now().Add(l.patience)
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		if why := l.cause(); why != nil {
			return why
		}
		once, cancel := l.once(ctx)
		err := ask(once)
		cancel()
		if err == nil {
			return nil
		}
		err = l.explain(err, op, name)
		if !errors.Is(err, sluice.ErrUnavailable) || ctx.Err() != nil || time.Now().After(deadline) {
			return err
		}
		l.sleep(ctx, pause)
	}
}

// mine makes sure that nobody has taken over: an owner that was asleep may not know yet. Over the embedded server there is a lock.
func (l *line) mine(ctx context.Context) error {
	if l.held == nil {
		return nil
	}
	return l.held.check(ctx)
}

// once bounds one question.
func (l *line) once(ctx context.Context) (context.Context, context.CancelFunc) {
	l.mu.Lock()
	link := l.link
	l.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, askAgain)
	stop := context.AfterFunc(link, cancel)
	return ctx, func() { stop(); cancel() }
}

// relink ends what was asked over the connection that is lost.
func (l *line) relink() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut != nil {
		l.cut()
	}
	l.link, l.cut = context.WithCancel(l.ctx)
}

// sleep waits for the pause, or until there is no sense in it any more.
func (l *line) sleep(ctx context.Context, pause time.Duration) {
	select {
	case <-time.After(pause):
	case <-ctx.Done():
	case <-l.ctx.Done():
	}
}

// cause is why the line has ended, or nil.
func (l *line) cause() error {
	if l.ctx.Err() != nil {
		return context.Cause(l.ctx)
	}
	return nil
}

func fail(kind sluice.Kind, op, subject, format string, args ...any) *sluice.Error {
	return &sluice.Error{Kind: kind, Op: "natsjournal: " + op, Subject: subject, Detail: fmt.Sprintf(format, args...)}
}

func failBy(err error, kind sluice.Kind, op, subject, format string, args ...any) *sluice.Error {
	e := fail(kind, op, subject, format, args...)
	e.Err = err
	return e
}

// Open starts a JetStream server over the directory, which it makes if it is not there, and owns it until Close or the end of the process. If another process
// owns it, the error is ErrConflict and names that; if stored bytes are damaged it is ErrCorrupt.
func Open(ctx context.Context, dir string, opts *Options) (*Journals, error) {
	o, err := opts.resolve("open", false)
	if err != nil {
		return nil, err
	}
	js := &Journals{opts: o, dir: dir, owner: newOwner(), open: map[string]*journal{}}
	if js.lock, err = lockDir(dir, js.owner); err != nil {
		return nil, err
	}
	if js.line, err = js.embed(ctx); err != nil {
		return nil, errors.Join(err, js.lock.release())
	}
	return js, nil
}

// Connect uses the JetStream server, or servers, at the URL: nats://host:4222, tls://host:4222, several with commas between. It waits for the lapse of an owner that has
// fallen silent, and refuses (ErrConflict) as soon as one is seen alive. Lost connections come back by themselves.
func Connect(ctx context.Context, urls string, opts *Options) (*Journals, error) {
	o, err := opts.resolve("connect", true)
	if err != nil {
		return nil, err
	}
	js := &Journals{opts: o, url: urls, owner: newOwner(), open: map[string]*journal{}}
	if js.line, err = js.dial(ctx); err != nil {
		return nil, err
	}
	return js, nil
}

// Owner says as whom these journals are owned.
func (js *Journals) Owner() Owner { return js.owner }

// connect makes a line over a connection with the given options.
func (js *Journals) connect(urls string, more ...nats.Option) (*line, error) {
	log := js.opts.Logger
	l := &line{patience: js.opts.Patience}
	l.ctx, l.end = context.WithCancelCause(context.Background())
	l.relink()
	options := append([]nats.Option{
		nats.Name("sluice " + js.owner.ID),
		nats.MaxReconnects(-1),
		nats.ReconnectBufSize(-1), // what can't be sent fails: an append asks before it sends again
		nats.ReconnectWait(100 * time.Millisecond),
		nats.ReconnectJitter(100*time.Millisecond, time.Second),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			l.relink()
			if err != nil {
				log.Warn("the connection to the journal's server is lost", "err", err)
			}
		}),
		nats.ReconnectHandler(func(*nats.Conn) { log.Info("the connection to the journal's server is back") }),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			log.Error("the journal's server reports an error", "err", err)
		}),
	}, more...)
	var err error
	if l.nc, err = nats.Connect(urls, options...); err != nil {
		l.end(err)
		return nil, err
	}
	if l.nc.MaxPayload() < 2*headRoom {
		err = fail(sluice.Unsupported, "connect", redact(urls), "the server takes messages of %d bytes, at least %d are needed", l.nc.MaxPayload(), 2*headRoom)
	} else {
		l.js, err = jetstream.New(l.nc)
	}
	if err != nil {
		l.close(err)
		return nil, err
	}
	return l, nil
}

func (js *Journals) dial(ctx context.Context) (*line, error) {
	var more []nats.Option
	if js.opts.CredentialsFile != "" {
		more = append(more, nats.UserCredentials(js.opts.CredentialsFile))
	}
	if js.opts.Token != "" {
		more = append(more, nats.Token(js.opts.Token))
	}
	if js.opts.CAFile != "" {
		more = append(more, nats.RootCAs(js.opts.CAFile))
	}
	l, err := js.connect(js.url, more...)
	if err != nil {
		kind := sluice.Unavailable
		var bad *url.Error
		switch {
		case errors.As(err, &bad): // its text has the whole URL in it, with the password
			return nil, fail(sluice.Invalid, "connect", redact(js.url), "is no URL of a server, want nats://host:4222 or tls://host:4222")
		case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired):
			kind = sluice.Denied
		}
		return nil, failBy(err, kind, "connect", redact(js.url), "no connection")
	}
	if err := js.own(ctx, l); err != nil {
		l.close(err)
		return nil, err
	}
	return l, nil
}

// redact takes passwords out of a URL that goes into a message.
func redact(urls string) string {
	parts := strings.Split(urls, ",")
	for i, p := range parts {
		scheme, rest, ok := strings.Cut(p, "://")
		if !ok {
			scheme, rest = "", p
		} else {
			scheme += "://"
		}
		if at := strings.LastIndexByte(rest, '@'); at >= 0 {
			parts[i] = scheme + "..." + rest[at:]
		}
	}
	return strings.Join(parts, ",")
}

// live returns the line, a new one if the embedded server broke.
func (js *Journals) live(ctx context.Context) (*line, error) {
	js.mu.Lock()
	defer js.mu.Unlock()
	if js.closed {
		return nil, fail(sluice.Closed, "open", "", "the journals are closed")
	}
	why := js.line.cause()
	if why == nil {
		return js.line, nil
	}
	if js.dir == "" {
		return nil, why // ownership was lost
	}
	js.line.close(why)
	js.opts.Logger.Warn("the journal's server starts again", "after", why)
	l, err := js.embed(ctx)
	if err != nil {
		return nil, err
	}
	js.line = l
	return l, nil
}

// The name of a stream is the prefix, an equals sign, and that of the journal, with what the names of streams and subjects may not hold replaced by what the
// names of journals don't hold.
var (
	toStream   = strings.NewReplacer(".", "~", ":", "+")
	fromStream = strings.NewReplacer("~", ".", "+", ":")
)

func (js *Journals) stream(name string) string  { return js.opts.Prefix + "=" + toStream.Replace(name) }
func (js *Journals) subject(name string) string { return js.opts.Prefix + "." + toStream.Replace(name) }

// Journal opens the journal with the given name, in the form of an id, and makes it if there is none. From then on no earlier writer of it can append. The context
// bounds the opening only. Close the journal when its queue has stopped.
func (js *Journals) Journal(ctx context.Context, name string) (sluice.Journal, error) {
	if err := sluice.ValidateID(name); err != nil {
		return nil, failBy(err, sluice.Invalid, "open", name, "")
	}
	l, err := js.live(ctx)
	if err != nil {
		return nil, err
	}
	js.mu.Lock()
	err = l.damaged[name]
	js.mu.Unlock()
	if err != nil {
		return nil, err
	}
	j := newJournal(js, l, name)
	if err := j.claim(ctx); err != nil {
		return nil, err
	}
	js.mu.Lock()
	closed := js.closed
	if !closed {
		js.open[name] = j
	}
	js.mu.Unlock()
	if closed {
		return nil, errors.Join(fail(sluice.Closed, "open", name, "the journals are closed"), j.Close())
	}
	return j, nil
}

// List returns the names of all journals, in order; those among them that are damaged can't be opened.
func (js *Journals) List(ctx context.Context) ([]string, error) {
	l, err := js.live(ctx)
	if err != nil {
		return nil, err
	}
	names, err := js.list(ctx, l)
	js.mu.Lock()
	for name := range l.damaged {
		names = append(names, name)
	}
	js.mu.Unlock()
	slices.Sort(names)
	return names, err
}

func (js *Journals) list(ctx context.Context, l *line) ([]string, error) {
	var names []string
	err := l.call(ctx, "list", js.opts.Prefix, func(ctx context.Context) error {
		names = nil
		streams := l.js.StreamNames(ctx, jetstream.WithStreamListSubject(js.opts.Prefix+".*.*"))
		for stream := range streams.Name() {
			if name, ok := strings.CutPrefix(stream, js.opts.Prefix+"="); ok {
				names = append(names, fromStream.Replace(name))
			}
		}
		return streams.Err()
	})
	return names, err
}

// Delete removes a journal and all that is in it. A writer that has it open finds it closed.
func (js *Journals) Delete(ctx context.Context, name string) error {
	if err := sluice.ValidateID(name); err != nil {
		return failBy(err, sluice.Invalid, "delete", name, "")
	}
	l, err := js.live(ctx)
	if err != nil {
		return err
	}
	if err := l.mine(ctx); err != nil {
		return err
	}
	js.mu.Lock()
	j := js.open[name]
	delete(js.open, name)
	_, damaged := l.damaged[name]
	delete(l.damaged, name)
	js.mu.Unlock()
	if j != nil {
		j.fail(fail(sluice.Closed, "append", name, "the journal was deleted"))
		j.settle()
	}
	// What was acknowledged is forgotten first: a journal without that is one in whose making or deleting the process died, and no damage.
	if err := js.forgetAcked(name); err != nil {
		return err
	}
	if damaged {
		if err := os.RemoveAll(js.streamDir(name)); err != nil {
			return dirError(err, js.streamDir(name), "can't be removed")
		}
		return nil
	}
	asked := false
	return l.call(ctx, "delete", name, func(ctx context.Context) error {
		err := l.js.DeleteStream(ctx, js.stream(name))
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			if asked {
				return nil
			}
			err = fail(sluice.NotFound, "delete", name, "there is no such journal")
		}
		asked = true
		return err
	})
}

// Close writes what is left of open journals, closes them, and lets go of the directory or the prefix.
func (js *Journals) Close() error {
	js.mu.Lock()
	open := js.open
	js.open = nil
	closed := js.closed
	js.closed = true
	js.mu.Unlock()
	if closed {
		return nil
	}
	// At once: each waits for a server that is away as long as its patience lasts.
	failed := make(chan error, len(open))
	for _, j := range open {
		go func() { failed <- j.Close() }()
	}
	var errs []error
	for range open {
		errs = append(errs, <-failed)
	}
	js.line.close(fail(sluice.Closed, "append", "", "the journals are closed"))
	if js.lock != nil {
		errs = append(errs, js.lock.release())
	}
	return errors.Join(errs...)
}

func (js *Journals) forget(j *journal) {
	js.mu.Lock()
	if js.open[j.name] == j {
		delete(js.open, j.name)
	}
	js.mu.Unlock()
}

// explain gives an error of the server its kind.
func (l *line) explain(err error, op, name string) error {
	if why := l.cause(); why != nil {
		return why
	}
	if e := new(sluice.Error); errors.As(err, &e) {
		return err
	}
	kind, detail := sluice.Unavailable, "the server does not answer"
	var api *jetstream.APIError
	switch {
	case errors.As(err, &api):
		detail = "the server refuses"
		switch {
		case api.ErrorCode == codeResources, api.ErrorCode == codeAccountResources, api.ErrorCode == codeStorage:
			kind = sluice.NoSpace
		case api.Code == 400 && api.ErrorCode != codePeers, api.ErrorCode == codeReplicas: // the settings don't suit it
			kind = sluice.Invalid
		}
	case errors.Is(err, nats.ErrPermissionViolation), errors.Is(err, nats.ErrAuthorization):
		kind, detail = sluice.Denied, "the server refuses"
	}
	return failBy(err, kind, op, name, "%s", detail)
}

// Codes of the server that nats.go does not name.
const (
	codeAccountResources jetstream.ErrorCode = 10002
	codePeers            jetstream.ErrorCode = 10005 // too few servers of a cluster are there yet
	codeResources        jetstream.ErrorCode = 10023
	codeStorage          jetstream.ErrorCode = 10047
	codeReplicas         jetstream.ErrorCode = 10074
)
