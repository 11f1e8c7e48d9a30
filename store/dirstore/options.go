package dirstore

import (
	"log/slog"

	"github.com/sluice-ml/sluice"
)

// Durability says what a put survives once it has returned.
type Durability int

const (
	// Process survives the death of any process: the kernel has the bytes.
	Process Durability = iota
	// Power survives a power cut too: file and directory are synced before Put returns.
	Power
)

// Options tune a store. The zero value joins an existing store; the first session of a store must set Caps.
type Options struct {
	// Caps bound the store. Sessions of one store share them: zero takes those of the store; others than the store's are
	// refused (ErrConflict) while another session is open, and replace them otherwise.
	Caps sluice.Caps

	Durability Durability

	// Verify checks the crc32c of every feature at every get, on every medium. On tmpfs, what a session without Verify has put carries none and goes
	// unchecked, so give all sessions the same.
	Verify bool

	// NoPool gives the memory of freed samples back at once, instead of keeping some files for later puts of this session.
	NoPool bool

	Clock  sluice.Clock // SystemClock if nil
	Logger *slog.Logger // slog.Default if nil
}
