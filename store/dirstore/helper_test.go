//go:build linux

package dirstore

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
)

// victim starts this test binary again as another process, which plays a role on the directory until it is killed.
type victim struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Reader
}

func startVictim(t testing.TB, role, dir string) *victim {
	t.Helper()
	exe, err := os.Executable()
	must(t, err)
	cmd := exec.Command(exe, "-test.run=^$")
	cmd.Env = append(os.Environ(), "DIRSTORE_ROLE="+role, "DIRSTORE_DIR="+dir)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	v := &victim{cmd, in, bufio.NewReader(out)}
	t.Cleanup(func() { v.kill() })
	return v
}

// await reads lines until one says that the victim is ready.
func (v *victim) await(t testing.TB, want string) {
	t.Helper()
	for {
		line, err := v.lines.ReadString('\n')
		if err != nil {
			t.Fatalf("the other process ended before it said %q: %v", want, err)
		}
		if strings.TrimSpace(line) == want {
			return
		}
	}
}

// ask gives a consumer a command and returns what it says, which must begin with want.
func (v *victim) ask(t testing.TB, want, format string, args ...any) string {
	t.Helper()
	if _, err := fmt.Fprintf(v.in, format+"\n", args...); err != nil {
		t.Fatalf("the other process is gone: %v", err)
	}
	line, err := v.lines.ReadString('\n')
	said, ok := strings.CutPrefix(strings.TrimSpace(line), want)
	if err != nil || !ok {
		t.Fatalf("told to "+format+", the other process says %q, %v, want %q", append(args, line, err, want)...)
	}
	return strings.TrimSpace(said)
}

// kill ends the process by SIGKILL and returns what it had still said.
func (v *victim) kill() (said string) {
	if v.cmd.ProcessState != nil {
		return ""
	}
	_ = v.cmd.Process.Signal(syscall.SIGKILL)
	rest, _ := io.ReadAll(v.lines)
	_ = v.cmd.Wait()
	_ = v.in.Close()
	return string(rest)
}

const victimSample = 200_000

// helper is the victim's main.
func helper(role string) {
	check := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, "victim:", err)
			os.Exit(1)
		}
	}
	block := func() {
		fmt.Println("ready")
		_, _ = io.ReadAll(os.Stdin) // until the parent goes
		os.Exit(2)
	}
	ctx := context.Background()
	h := hooks{}
	point, inPut := strings.CutPrefix(role, "put:")
	if inPut {
		h.at = func(p string) {
			if p == point {
				block()
			}
		}
	}
	s, err := open(os.Getenv("DIRSTORE_DIR"), nil, h)
	check(err)
	put := func(id string, seed byte) sluice.Ref {
		ref, err := s.Put(ctx, sampleOf(id, seed, victimSample), sluice.Reservation{})
		check(err)
		return ref
	}
	switch {
	case inPut:
		put("victim", 7)
	case role == "receive":
		body := stockFile(nil, sampleOf("victim", 7, victimSample).Features...)
		in := Incoming{SampleID: "victim", RunID: "r", Algorithm: sluice.EAGLE3}
		_, err := s.Receive(ctx, io.MultiReader(bytes.NewReader(body[:victimSample/2]), onRead(block)), int64(len(body)), in, sluice.Reservation{})
		check(err)
	case role == "holder":
		_, err := s.Reserve(ctx, 1000)
		check(err)
		put("unclaimed", 8)
		check(s.Claim(put("claimed", 9), "queue"))
		infos, err := s.Samples(ctx)
		check(err)
		for _, i := range infos {
			_, err := s.Get(ctx, i.Ref)
			check(err)
		}
		block()
	case role == "churn":
		fmt.Println("ready")
		churn(s, check)
	case role == "producer":
		fmt.Println("ready")
		produce(s, check)
	case role == "consumer":
		fmt.Println("ready")
		consume(s, check)
	}
}

// produce puts samples for ever, and says each one's ref. It waits for room as it would for a gate.
func produce(s *Store, check func(error)) {
	ctx := context.Background()
	freed := make(chan struct{}, 1)
	s.OnFreed(func() {
		select {
		case freed <- struct{}{}:
		default:
		}
	})
	for n := 0; ; n++ {
		size := 1 + rand.IntN(victimSample)
		r, err := s.Reserve(ctx, int64(size))
		for errors.Is(err, sluice.ErrFull) {
			<-freed
			r, err = s.Reserve(ctx, int64(size))
		}
		check(err)
		ref, err := s.Put(ctx, sampleOf(fmt.Sprintf("p%d-%d", os.Getpid(), n), byte(rand.IntN(256)), size), r)
		check(err)
		_, err = fmt.Println(ref.Canonical()) // one write a line
		check(err)
	}
}

// consume does as it is told, one line a command, and says so in one line:
//
//	get REF        -> got ID HANDLE
//	check ID       -> same ID, or changed ID
//	close ID       -> closed ID: the memory is given up, not the pin
//	release ID     -> released ID: the pin is given up, not the memory
//	use REF        -> used ID: get, check and both
//	fork           -> forked PID: of a copy of this process that does nothing
//	start          -> started PID: of another program that does nothing
func consume(s *Store, check func(error)) {
	ctx := context.Background()
	open := map[string]*sluice.Tensors{}
	get := func(text string) (sluice.Ref, *sluice.Tensors) {
		ref, err := sluice.ParseRef([]byte(text))
		check(err)
		ts, err := s.Get(ctx, ref)
		check(err)
		return ref, ts
	}
	seeds := map[string]string{}
	same := func(id string, ts *sluice.Tensors) bool {
		seed, err := strconv.Atoi(seeds[id])
		check(err)
		data := ts.Features[0].Data
		return bytes.Equal(data, pattern(byte(seed), len(data)))
	}
	in := bufio.NewReader(os.Stdin)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			os.Exit(2) // the parent has gone
		}
		what, arg, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch what {
		case "get", "use":
			ref, ts := get(arg)
			id := ref.SampleID()
			seeds[id], _ = ref.Attribute("seed")
			if what == "get" {
				open[id] = ts
				fmt.Printf("got %s %v\n", id, ts.Handle.ID)
				continue
			}
			if !same(id, ts) {
				check(fmt.Errorf("%s has other bytes", ref))
			}
			check(ts.Release(ctx))
			fmt.Println("used", id)
		case "check":
			if same(arg, open[arg]) {
				fmt.Println("same", arg)
			} else {
				fmt.Println("changed", arg)
			}
		case "close":
			check(open[arg].Close())
			fmt.Println("closed", arg)
		case "release":
			check(s.Release(ctx, open[arg].Handle))
			fmt.Println("released", arg)
		case "fork":
			hangUp := &unix.PollFd{}
			pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
			if pid == 0 { // the copy has no other thread, and must call nothing of Go's; it ends with the test
				unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(hangUp)), 1, 0, 0, 0, 0)
				unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
			}
			if errno != 0 {
				check(errno)
			}
			fmt.Println("forked", pid)
		case "start":
			cmd := exec.Command("sleep", "100")
			check(cmd.Start())
			fmt.Println("started", cmd.Process.Pid)
		default:
			check(fmt.Errorf("no such command: %q", line))
		}
	}
}

// churn does everything in turn, at random. It says which samples it has claimed ("+id seed") and, before the fact, which it will give up ("-id").
func churn(s *Store, check func(error)) {
	ctx := context.Background()
	out := bufio.NewWriterSize(os.Stdout, 1) // unbuffered, but one write a line
	say := func(format string, args ...any) { fmt.Fprintf(out, format+"\n", args...); _ = out.Flush() }
	type kept struct {
		ref sluice.Ref
		ts  *sluice.Tensors
	}
	var claimed []sluice.Ref
	var got []kept
	var loose []sluice.Ref
	for n := 0; ; n++ {
		do := rand.IntN(6)
		switch { // bounded, so that the victims never wait for each other
		case len(claimed) > 20:
			do = 5
		case len(got) > 20:
			do = 4
		case len(loose) > 3:
			check(s.Abort(ctx, loose[0]))
			loose = loose[1:]
		}
		switch do {
		case 0, 1:
			id, seed, size := fmt.Sprintf("v%d-%d", os.Getpid(), n), byte(rand.IntN(256)), 1+rand.IntN(150_000)
			r, err := s.Reserve(ctx, int64(size))
			check(err)
			ref, err := s.Put(ctx, sampleOf(id, seed, size), r)
			check(err)
			if rand.IntN(3) == 0 {
				loose = append(loose, ref)
				continue
			}
			check(s.Claim(ref, "churn"))
			say("+%s", ref.Canonical())
			claimed = append(claimed, ref)
		case 2, 3:
			if len(claimed) > 0 {
				ref := claimed[rand.IntN(len(claimed))]
				ts, err := s.Get(ctx, ref)
				if errors.Is(err, sluice.ErrNotFound) {
					continue
				}
				check(err)
				got = append(got, kept{ref, ts})
			}
		case 4:
			if len(got) > 0 {
				i := rand.IntN(len(got))
				check(got[i].ts.Release(ctx))
				got = append(got[:i], got[i+1:]...)
			}
		case 5:
			if len(claimed) > 0 {
				i := rand.IntN(len(claimed))
				say("-%s", claimed[i].SampleID())
				check(s.Unclaim(claimed[i], "churn"))
				claimed = append(claimed[:i], claimed[i+1:]...)
			}
		}
	}
}
