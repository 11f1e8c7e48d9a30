//go:build !linux

package queue

import "time"

var started = time.Now()

func cpuTime() time.Duration { return time.Since(started) }
