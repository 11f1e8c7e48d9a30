package demo

import "syscall"

// dieWithParent has the kernel end a child whose parent is gone. It is told to end, not killed: it removes what the parent has left.
func dieWithParent(a *syscall.SysProcAttr) { a.Pdeathsig = syscall.SIGTERM }
