//go:build !linux

package demo

import "syscall"

// dieWithParent can do nothing here: the child sees the end of the pipe.
func dieWithParent(*syscall.SysProcAttr) {}
