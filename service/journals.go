package service

import (
	"context"

	"github.com/sluice-ml/sluice"
)

// Journals are the journals of one service: one a run, and one for the list of runs.
type Journals interface {
	// Journal opens the journal of the given name, and makes it if there is none. No earlier writer of it can append from then on.
	Journal(ctx context.Context, name string) (sluice.Journal, error)
	// List returns the names of all journals.
	List(ctx context.Context) ([]string, error)
	// Delete removes a journal that nobody writes to any more; ErrNotFound if there is none.
	Delete(ctx context.Context, name string) error
	Close() error
}
