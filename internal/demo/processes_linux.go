package demo

import "syscall"

// dieWithParent has the kernel kill a child whose parent is gone. The signal may come several times, once for every thread of a parent that was killed, so it can't be one that is
// heeded once.
func dieWithParent(a *syscall.SysProcAttr) { a.Pdeathsig = syscall.SIGKILL }
