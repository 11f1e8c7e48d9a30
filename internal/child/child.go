// Package child starts processes that end with this one.
package child

import (
	"os/exec"
	"runtime"
	"syscall"
)

// Start starts cmd, and has the kernel kill it when this process is gone, however that ended; elsewhere than on Linux nobody does. It is in a process group of its own, so that an interrupt
// from the terminal reaches this process alone, which then ends its children. What cmd.SysProcAttr says beside stays.
//
// What cmd.Wait returns comes once, through ended; nobody else may call Wait.
func Start(cmd *exec.Cmd) (ended <-chan error, err error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	dieWithParent(cmd.SysProcAttr)
	started, end := make(chan error, 1), make(chan error, 1)
	go func() { // ends with the child
		runtime.LockOSThread() // to the kernel the parent is the thread that starts it, which must not end before
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			end <- cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return end, nil
}
