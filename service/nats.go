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
		return whole(natsjournal.Connect(ctx, o.NATSURL, &opts))
	}
	if o.Durability == dirstore.Power {
		opts.Durability = natsjournal.Power
	}
	return whole(natsjournal.Open(ctx, filepath.Join(o.StateDir, "journal"), &opts))
}

// whole keeps a nil pointer from becoming journals that are not nil.
func whole(j *natsjournal.Journals, err error) (Journals, error) {
	if err != nil {
		return nil, err
	}
	return j, nil
}
