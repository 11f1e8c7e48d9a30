package queue

import (
	"syscall"
	"time"
)

// cpuTime is what the calling thread has used: on a shared machine the wall clock says little. Lock the goroutine to its thread.
func cpuTime() time.Duration {
	var u syscall.Rusage
	const thread = 1
	if syscall.Getrusage(thread, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
