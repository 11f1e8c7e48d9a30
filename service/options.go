package service

import (
	"log/slog"
	"path/filepath"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/store/dirstore"
)

// Options say where a service keeps what it has and how it goes about it. The zero value is a service in the default state directory.
type Options struct {
	// StateDir holds the journals, the tokens and the endpoint; [wire.StateDir] if empty. One service owns it.
	StateDir string
	// StoreDir holds the samples. If empty, it is a directory in /dev/shm when that has room for twice MaxBytes, and one in StateDir otherwise; where
	// samples lie already, it stays.
	StoreDir string
	// AbandonSamples lets the service start with another store than its runs' samples are in; they become dead letters without bytes.
	AbandonSamples bool
	// MaxBytes is what the caps of all runs may add up to; 8 GiB. With NoCap they may add up to anything, and the machine's room is the bound.
	MaxBytes int64
	// Durability says what survives once a call was answered: the death of any process, or a power cut too.
	Durability dirstore.Durability

	// NATSURL names a JetStream server to keep the journals on, and NATSCredentials the file with its credentials. Empty: one runs in the process, in StateDir.
	NATSURL, NATSCredentials string
	// Journals, if set, are used instead of NATS. The service closes them.
	Journals Journals

	Logger *slog.Logger // slog.Default if nil
	Clock  sluice.Clock // SystemClock if nil

	// SessionGrace is how long a session whose connection broke may take to come back; 5 s. SessionIdle is how long one that never held a connection lives after its last
	// call; 60 s.
	SessionGrace, SessionIdle time.Duration
	// ReservationTime is how long a reservation lives without being used, and a sample that was uploaded without being committed; 10 minutes.
	ReservationTime time.Duration

	// ExitIdle, if set, is how long no client may hold a session before [Service.Idle] says that the service may end: half a minute at least before the first one comes.
	ExitIdle time.Duration
	// RemoveState makes a service that begins with nothing and leaves nothing: state and store go when it is closed. It also removes what one that was killed has left in StateDir, and in the
	// directories beside it. It refuses a state that was to be kept, and does not go with journals elsewhere.
	RemoveState bool

	Version string // of the program, for people

	Fault Fault // for tests of who audits the service: see [Fault]
}

// NoCap is no bound of what the caps of all runs may add up to.
const NoCap = -1

// resolve checks the options and fills in the defaults.
func (o Options) resolve() (Options, error) {
	bad := func(field, detail string) (Options, error) {
		return o, &sluice.Error{Kind: sluice.Invalid, Op: "service: open", Subject: field, Detail: detail}
	}
	if o.StateDir == "" {
		dir, err := wire.StateDir()
		if err != nil {
			return o, err
		}
		o.StateDir = dir
	}
	var err error
	if o.StateDir, err = filepath.Abs(o.StateDir); err != nil {
		return bad("StateDir", err.Error())
	}
	if o.StoreDir != "" {
		if o.StoreDir, err = filepath.Abs(o.StoreDir); err != nil {
			return bad("StoreDir", err.Error())
		}
	}
	if o.MaxBytes == 0 {
		o.MaxBytes = 8 << 30
	}
	if o.MaxBytes != NoCap && (o.MaxBytes < 0 || o.MaxBytes >= 1<<53) {
		return bad("MaxBytes", "wants more than 0 and less than 2^53, or NoCap")
	}
	if o.Durability != dirstore.Process && o.Durability != dirstore.Power {
		return bad("Durability", "wants Process or Power")
	}
	for _, d := range [...]struct {
		field string
		value *time.Duration
		unset time.Duration
	}{{"SessionGrace", &o.SessionGrace, 5 * time.Second}, {"SessionIdle", &o.SessionIdle, time.Minute}, {"ReservationTime", &o.ReservationTime, 10 * time.Minute}, {"ExitIdle", &o.ExitIdle, 0}} {
		if *d.value < 0 {
			return bad(d.field, "is "+d.value.String()+", want more than 0")
		}
		if *d.value == 0 {
			*d.value = d.unset
		}
	}
	if o.RemoveState && (o.NATSURL != "" || o.Journals != nil) {
		return bad("RemoveState", "does not go with journals elsewhere, which would stay")
	}
	if err := o.Fault.check(); err != nil {
		return o, err
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Clock == nil {
		o.Clock = sluice.SystemClock{}
	}
	if o.Version == "" {
		o.Version = "unknown"
	}
	return o, nil
}

// durability is its word on the wire.
func (o *Options) durability() string {
	if o.Durability == dirstore.Power {
		return "power"
	}
	return "process"
}
