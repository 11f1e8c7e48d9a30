package natsjournal

import (
	"log/slog"
	"strings"
	"time"

	"github.com/sluice-ml/sluice"
)

// Durability says what a record survives once it was acknowledged.
type Durability int

const (
	// Process survives the death of the process: the kernel has the bytes.
	Process Durability = iota
	// Power survives a power cut too: every message is synced before it is acknowledged.
	Power
)

// Options tune [Open] and [Connect]. A nil *Options is fine.
type Options struct {
	// Prefix begins the name of everything that is kept at a server elsewhere, so that several services can share it. "sluice" if empty; letters, digits,
	// hyphens and underscores, at most 32.
	Prefix string

	// Durability is that of the embedded server. A server elsewhere syncs as it was told to, so Connect refuses anything but the zero value.
	Durability Durability

	// Replicas is how many servers of a cluster keep each journal. 1 if 0; Connect only.
	Replicas int

	// CredentialsFile is a NATS credentials file (JWT and seed), Token a token; CAFile holds the certificates to trust instead of the system's. Connect only.
	CredentialsFile string
	Token           string
	CAFile          string

	// Lapse is how long an owner at a server elsewhere may be silent before another may take over, 100 ms or more. 5 s if 0. Connect only.
	Lapse time.Duration

	// Patience is how long an append tries again while the server does not answer. 30 s if 0.
	Patience time.Duration

	// Logger hears of the embedded server's errors, of lost and new connections, and of takeovers. Discards if nil.
	Logger *slog.Logger

	// step is called between the steps of an append and a compaction, and before an owner renews its record, for tests that play a death or a sleep.
	step func(what string) error
}

// shortestLapse is one in which an owner can still renew its record.
const shortestLapse = 100 * time.Millisecond

func (o *Options) resolve(op string, elsewhere bool) (Options, error) {
	var r Options
	if o != nil {
		r = *o
	}
	if r.Prefix == "" {
		r.Prefix = "sluice"
	}
	if r.Lapse == 0 {
		r.Lapse = 5 * time.Second
	}
	if r.Patience == 0 {
		r.Patience = 30 * time.Second
	}
	if r.Replicas == 0 {
		r.Replicas = 1
	}
	if r.Logger == nil {
		r.Logger = slog.New(slog.DiscardHandler)
	}
	const plain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
	switch {
	case len(r.Prefix) > 32 || strings.Trim(r.Prefix, plain) != "":
		return r, fail(sluice.Invalid, op, r.Prefix, "prefix wants at most 32 letters, digits, hyphens and underscores")
	case r.Durability != Process && r.Durability != Power:
		return r, fail(sluice.Invalid, op, "", "durability is %d, want Process or Power", r.Durability)
	case elsewhere && r.Durability != Process:
		return r, fail(sluice.Invalid, op, "", "durability is that of the server: set sync_interval: always there and leave it out here")
	case !elsewhere && (r.CredentialsFile != "" || r.Token != "" || r.CAFile != "" || r.Replicas != 1):
		return r, fail(sluice.Invalid, op, "", "credentials, token, certificates and replicas are for a server elsewhere")
	case r.Replicas < 1 || r.Replicas > 5:
		return r, fail(sluice.Invalid, op, "", "replicas is %d, want 1 to 5", r.Replicas)
	case r.Lapse < shortestLapse || r.Patience < 0:
		return r, fail(sluice.Invalid, op, "", "lapse %v wants to be at least %v, and patience %v more than 0", r.Lapse, shortestLapse, r.Patience)
	}
	return r, nil
}
