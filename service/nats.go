package service

import (
	"context"
	"path/filepath"

	"github.com/sluice-ml/sluice/journal/natsjournal"
	"github.com/sluice-ml/sluice/store/dirstore"
)

// openJournals opens the journals in the state directory, or at a server elsewhere.
func openJournals(ctx context.Context, o *Options) (Journals, error) {
	opts := natsjournal.Options{Logger: o.Logger}
	if o.NATSURL != "" {
		opts.CredentialsFile = o.NATSCredentials
		return natsjournal.Connect(ctx, o.NATSURL, &opts)
	}
	if o.Durability == dirstore.Power {
		opts.Durability = natsjournal.Power
	}
	return natsjournal.Open(ctx, filepath.Join(o.StateDir, "journal"), &opts)
}
