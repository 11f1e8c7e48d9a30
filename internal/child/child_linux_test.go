package child_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-ml/sluice/internal/child"
)

const roleEnv = "SLUICE_CHILD_TEST"

func TestMain(m *testing.M) {
	switch os.Getenv(roleEnv) {
	case "child":
		echo()
	case "parent":
		if err := parent(); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
	default:
		os.Exit(m.Run())
	}
}

// echo answers each line, until there are no more.
func echo() {
	lines := bufio.NewScanner(os.Stdin)
	for fmt.Println("ready"); lines.Scan(); {
		fmt.Println("echo", lines.Text())
	}
}

// parent starts a child that has its input and output, from a thread that ends right after.
func parent() error {
	runtime.LockOSThread() // of the process's first thread, which does not end with a goroutine
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleEnv+"=child")
	cmd.Stdin, cmd.Stdout = os.Stdin, os.Stdout
	type started struct {
		thread int
		ended  <-chan error
		err    error
	}
	result := make(chan started)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		ended, err := child.Start(cmd)
		result <- started{syscall.Gettid(), ended, err}
	}()
	s := <-result
	if s.err != nil {
		return s.err
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", s.thread)); errors.Is(err, os.ErrNotExist) {
			break
		}
		if time.Now().After(deadline) {
			return errors.New("the thread does not end")
		}
	}
	fmt.Println("the thread has ended")
	return <-s.ended
}

// family starts a parent and its child, and returns what both say.
func family(t *testing.T) (parent *exec.Cmd, in io.WriteCloser, said func() (string, bool)) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleEnv+"=parent")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, theirs, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout = theirs
	if err := errors.Join(cmd.Start(), theirs.Close()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = out.Close()
	})
	if err := out.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	said = func() (string, bool) {
		t.Helper()
		more := lines.Scan()
		if err := lines.Err(); err != nil {
			t.Fatal(err)
		}
		return lines.Text(), more
	}
	var heard []string
	for range 2 {
		line, _ := said()
		heard = append(heard, line)
	}
	if all := strings.Join(heard, ", "); !strings.Contains(all, "ready") || !strings.Contains(all, "the thread has ended") {
		t.Fatalf("they say %q", all)
	}
	return cmd, in, said
}

func TestAChildEndsWithItsParentHoweverThatEnds(t *testing.T) {
	t.Parallel()
	parent, _, said := family(t) // whose input stays open
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if line, more := said(); more { // the output ends when both are gone
		t.Errorf("somebody says %q", line)
	}
}

func TestAChildDoesNotEndWithTheThreadThatAskedForIt(t *testing.T) {
	t.Parallel()
	parent, in, said := family(t)
	fmt.Fprintln(in, "hello")
	if line, _ := said(); line != "echo hello" {
		t.Errorf("it says %q", line)
	}
	if err := in.Close(); err != nil { // its regular end, which is the parent's
		t.Error(err)
	}
	if line, more := said(); more {
		t.Errorf("somebody says %q", line)
	}
	if err := parent.Wait(); err != nil {
		t.Error(err)
	}
}

func TestAChildIsInAGroupOfItsOwnAndItsErrorIsTold(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("sh", "-c", "test $$ = $(cut -d' ' -f5 /proc/$$/stat) && exit 7")
	ended, err := child.Start(cmd)
	if err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := <-ended; !errors.As(err, &exit) || exit.ExitCode() != 7 {
		t.Errorf("it ended with %v, want status 7", err)
	}
	if _, err := child.Start(exec.Command("/no/such/program")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want an error that it is not there", err)
	}
}
