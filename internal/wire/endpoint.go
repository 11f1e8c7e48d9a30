package wire

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/sluice-ml/sluice"
)

// Names in the service's state directory.
const (
	EndpointFile = "endpoint.json" // an [Endpoint], there while the service runs
	SocketFile   = "sluice.sock"   // the unix socket, 0600
	TokensFile   = "tokens.json"   // the tokens, 0600
)

// Environment variables that the command line and the clients heed, after their flags and options.
const (
	EnvURL       = "SLUICE_URL"        // of the service: http://host:port, https://..., or unix:/path
	EnvTokenFile = "SLUICE_TOKEN_FILE" // a file that holds the token and nothing else; tokens are never given by value
	EnvState     = "SLUICE_STATE"      // the service's state directory
)

// Endpoint says how a running service is reached from its own host.
type Endpoint struct {
	PID     int    `json:"pid"`
	Socket  string `json:"socket"`
	URL     string `json:"url,omitempty"`     // of the TCP address, if it listens on one
	CAFile  string `json:"ca_file,omitempty"` // certificate to trust for it, if it is the service's own
	Version string `json:"version"`
	API     int    `json:"api"` // see the constant
}

// StateDir is the service's state directory if nobody says otherwise: $SLUICE_STATE, $XDG_STATE_HOME/sluice, or ~/.local/state/sluice.
func StateDir() (string, error) {
	if dir := os.Getenv(EnvState); dir != "" {
		return dir, nil
	}
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "sluice"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", &sluice.Error{Kind: sluice.Invalid, Op: "state directory", Detail: "there is no home directory to keep it in", Hint: "set " + EnvState, Err: err}
	}
	return filepath.Join(home, ".local", "state", "sluice"), nil
}

// ReadEndpoint finds the service whose state is in dir. ErrUnavailable if none has left word there.
func ReadEndpoint(dir string) (Endpoint, error) {
	var e Endpoint
	data, err := os.ReadFile(filepath.Join(dir, EndpointFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return e, &sluice.Error{Kind: sluice.Unavailable, Op: "service", Subject: dir, Detail: "no service runs with this state directory", Hint: "start one with `sluice serve`, or name one with --url or " + EnvURL}
	case err != nil:
		return e, &sluice.Error{Kind: sluice.Denied, Op: "service", Subject: dir, Err: err}
	}
	if err := json.Unmarshal(data, &e); err != nil {
		return e, &sluice.Error{Kind: sluice.Corrupt, Op: "service", Subject: filepath.Join(dir, EndpointFile), Err: err}
	}
	return e, nil
}
