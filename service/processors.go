package service

import (
	"os"
	"runtime"
)

// AddProcessor lets Go's runtime use one processor more than it does, and returns what takes that back. It does nothing where GOMAXPROCS is set in the environment. A call into the kernel keeps
// its processor for its first 20 µs, and a service makes many that last longer: with as many processors as cores, cores are idle while goroutines wait for one. It is for a program that is a
// service and nothing else, as sluice serve is; the runtime then no longer follows a limit of the cgroup that changes.
func AddProcessor() (undo func()) {
	if os.Getenv("GOMAXPROCS") != "" {
		return func() {}
	}
	had := runtime.GOMAXPROCS(0)
	runtime.GOMAXPROCS(had + 1)
	return func() { runtime.GOMAXPROCS(had) }
}
