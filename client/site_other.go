//go:build !linux

package client

import (
	"os"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/safetensors"
)

// site is where a store's files are on this host: nowhere, since the service runs on Linux only.
type site struct{ stages bool }

var errElsewhere = &sluice.Error{Kind: sluice.Unsupported, Op: "client", Detail: "files of the service are mapped on Linux only"}

func findSite(*wire.StoreInfo) (*site, string) { return nil, errElsewhere.Detail }

func (*site) load(string, int64) (*safetensors.Mapping, func() error, error) {
	return nil, nil, errElsewhere
}

func (*site) create(string) (*os.File, error) { return nil, errElsewhere }

func (*site) openSpare(string) (*os.File, error) { return nil, errElsewhere }

func (*site) remove(string) error { return nil }
