// Command sluice is the one binary of Sluice: a subcommand a file.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/service"
)

func main() { os.Exit(Main(os.Args[1:], os.Stdout, os.Stderr)) }

// errSilent ends the command with status 1 when everything has been said already.
var errSilent = errors.New("the command has said what is wrong")

// interrupted is the exit status after an interrupt.
const interrupted = 130

// alreadyRuns is that of a service whose state directory another one has.
const alreadyRuns = 3

// errUsage is in the chain of errors of the command line, which end with status 2.
var errUsage = errors.New("")

// printedError is what is wrong with an object that is on stdout already.
type printedError struct{ error }

func (e printedError) Unwrap() error { return e.error }

// failInJSON has every command that takes --json, and fails before it has printed an object, print {"error","kind"}.
func failInJSON(stdout io.Writer, c *cobra.Command) {
	for _, sub := range c.Commands() {
		failInJSON(stdout, sub)
	}
	run := c.RunE
	if run == nil {
		return
	}
	c.RunE = func(cmd *cobra.Command, args []string) error {
		err := run(cmd, args)
		f := cmd.Flags().Lookup("json")
		if err == nil || f == nil || f.Value.String() != "true" || errors.Is(err, errSilent) || errors.Is(err, errUsage) || errors.As(err, new(printedError)) {
			return err
		}
		if werr := writeASCII(stdout, errorObject(err)); werr != nil {
			return errors.Join(err, werr)
		}
		return err
	}
}

func errorObject(err error) any {
	return struct {
		Error string      `json:"error"`
		Kind  sluice.Kind `json:"kind"` // "" if it is none of ours
	}{err.Error(), sluice.KindOf(err)}
}

// noArguments is for commands that take flags only.
func noArguments(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("unexpected argument %q", args[0])}
	}
	return nil
}

// arguments makes what check says of a command's arguments a fault of the command line, and shows how the command is called.
func arguments(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if err := check(c, args); err != nil {
			return usageError{fmt.Errorf("%w: want %s", err, c.UseLine())}
		}
		return nil
	}
}

type usageError struct{ error }

func (usageError) Is(target error) bool { return target == errUsage }

// Main runs the command and returns its exit status: 0; 1 for a failure; 2 for a wrong command line; 3 if another service has the state directory; 130 after an interrupt.
func Main(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second interrupt ends the process the hard way

	root := &cobra.Command{
		Use:           "sluice",
		Short:         "Stream a target model's hidden states to the trainers of a draft model",
		Long:          "Sluice is the channel between a large frozen target model and the trainers of a small draft model in speculative-decoding training:\npaced, without loss, without filling a disk.",
		Version:       version(),
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(benchCommand(stdout, stderr))
	root.AddCommand(deadLettersCommand(stdout, stderr))
	root.AddCommand(demoCommand(stdout, stderr))
	root.AddCommand(inspectCommand(stdout, stderr))
	root.AddCommand(planCommand(stdout, stderr))
	root.AddCommand(tortureCommand(stdout, stderr))
	root.AddCommand(runsCommand(stdout, stderr))
	root.AddCommand(serveCommand(stdout, stderr))
	root.AddCommand(statusCommand(stdout, stderr))
	root.AddCommand(tokenCommand(stdout))
	root.AddCommand(versionCommand(stdout))

	failInJSON(stdout, root)

	command, err := root.ExecuteContextC(ctx)
	switch {
	case err == nil:
		return 0
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		if !errors.Is(err, errSilent) {
			fmt.Fprintln(stderr, "sluice: interrupted")
		}
		return interrupted
	case errors.Is(err, errSilent):
		return 1
	}
	fmt.Fprintln(stderr, "sluice:", err)
	if errors.Is(err, errUsage) || command == root {
		fmt.Fprintf(stderr, "Run '%s --help' for usage.\n", command.CommandPath())
		return 2
	}
	if errors.Is(err, service.ErrRunning) {
		return alreadyRuns
	}
	return 1
}

func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && (v == "" || v == "(devel)") {
			v = s.Value
		}
	}
	return v + " " + info.GoVersion
}
