package child

import "syscall"

// dieWithParent asks for SIGKILL. The signal may come several times, once for every thread of a parent that was killed, so it can't be one that is heeded once.
func dieWithParent(a *syscall.SysProcAttr) { a.Pdeathsig = syscall.SIGKILL }
