package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/client"
	"github.com/sluice-ml/sluice/internal/child"
	"github.com/sluice-ml/sluice/internal/wire"
)

// runService is run with the store and the queue in a service, and a process for the producer and for each consumer, which reach it as they would on any host.
func runService(ctx context.Context, o *Options, cfg sluice.RunConfig, info sluice.TargetInfo) (result *Result, err error) {
	dir, err := newFolder(o.Store)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, dir.remove()) }()
	service, err := startService(ctx, dir, o.MaxBytes)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, service.stop()) }()
	c, err := client.Dial(ctx, client.Options{StateDir: service.state, Logger: quiet()})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	if _, err := c.CreateRun(ctx, cfg); err != nil {
		return nil, err
	}
	run, err := c.Open(ctx, runID)
	if err != nil {
		return nil, err
	}
	return newSession(o, info, run.Store(), run.Queue()).processes(ctx, job{State: service.state, Folder: dir.Path, Beside: dir.parent})
}

// daemon is the service's process.
type daemon struct {
	state string
	cmd   *exec.Cmd
	ended <-chan error
}

// startService starts a service in the folder, and returns when it answers.
func startService(ctx context.Context, dir *folder, maxBytes int64) (*daemon, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	d := &daemon{state: filepath.Join(dir.Path, "state")}
	log, err := os.OpenFile(filepath.Join(dir.Path, "service.log"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()                                             //nolint:errcheck // the child has its own descriptor of it
	d.cmd = exec.CommandContext(context.WithoutCancel(ctx), self, // an interrupt does not end it: stop does
		"serve", "--state", d.state, "--store", dir.store(), "--max-bytes", fmt.Sprint(maxBytes), "--no-tcp")
	d.cmd.Args[0] = os.Args[0]
	d.cmd.Stdout, d.cmd.Stderr = log, log
	if d.ended, err = child.Start(d.cmd); err != nil {
		return nil, &sluice.Error{Kind: sluice.Denied, Op: "demo: service", Detail: "cannot be started", Err: err}
	}
	for {
		if _, err := wire.ReadEndpoint(d.state); err == nil {
			return d, nil
		}
		select {
		case err := <-d.ended:
			said, _ := os.ReadFile(log.Name()) // whatever there is
			return nil, &sluice.Error{Kind: sluice.Unavailable, Op: "demo: service", Detail: "ended at its start: " + string(said), Err: err}
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), d.stop())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// stop ends the service as an operator would.
func (d *daemon) stop() error {
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case err := <-d.ended:
		return err
	case <-time.After(patience):
		_ = d.cmd.Process.Kill()
		return errors.Join(<-d.ended, &sluice.Error{Kind: sluice.Unavailable, Op: "demo: service", Detail: fmt.Sprintf("did not end within %v of being told to", patience)})
	}
}
