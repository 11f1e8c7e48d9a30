//go:build !linux

package demo

import "syscall"

// dieWithParent is for Linux, where the service runs.
func dieWithParent(*syscall.SysProcAttr) {}
