package torture

import (
	"context"
	"errors"
	"io"
	"os/exec"
	"testing"
	"time"
)

// An interrupt may come before the process that it is handed on to listens for anything. That is an interrupt as well, and no failure.
func TestAnInterruptBeforeTheIsolatedProcessListensIsOne(t *testing.T) {
	sleep, err := exec.LookPath("sleep") // which never listens
	if err != nil {
		t.Fatal(err)
	}
	before := program
	program = func() (string, error) { return sleep, nil }
	defer func() { program = before }()
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	_, ok, err := Isolated(ctx, []string{"60"}, io.Discard, io.Discard)
	if !ok {
		t.Skip("this system allows no file system of its own")
	}
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want canceled", err)
	}
}
