package service

import (
	"runtime"
	"testing"
)

func TestAProcessorMoreIsTakenBack(t *testing.T) {
	t.Setenv("GOMAXPROCS", "")
	had := runtime.GOMAXPROCS(0)
	undo := AddProcessor()
	if n := runtime.GOMAXPROCS(0); n != had+1 {
		t.Errorf("it has %d, want %d", n, had+1)
	}
	undo()
	t.Setenv("GOMAXPROCS", "7")
	AddProcessor()()
	if n := runtime.GOMAXPROCS(0); n != had {
		t.Errorf("it has %d, want %d", n, had)
	}
}
