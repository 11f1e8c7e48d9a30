package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/torture"
)

func tortureCommand(stdout, stderr io.Writer) *cobra.Command {
	var (
		o      torture.Options
		asJSON bool
	)
	c := &cobra.Command{
		Use:   "torture",
		Short: "Kill producers, consumers and the service at random, and audit that nothing was lost",
		Long: `Torture starts a service of its own, with producers and consumers as processes of their own, and kills them at random with SIGKILL while samples flow; it stops
consumers beyond their leases, and fills the store's file system for a while where it may mount one (as root, or where user namespaces are allowed).

Every process writes down what it is about to do and what came of it. At the end these books are joined: every sample that was put must be acked, or be accounted for as
dead; none acked under two leases, no ack forgotten, no other bytes read than were produced; and no file, reservation or byte left.

It ends with status 0 only if that is so.`,
		Example: `  sluice torture --duration 1m
  sluice torture --duration 10m --json > torture.json`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.Duration < 2*time.Second {
				return &sluice.Error{Kind: sluice.Invalid, Op: "torture", Subject: "--duration", Detail: fmt.Sprintf("is %v, want 2s or more", o.Duration)}
			}
			for name, n := range map[string]int{"producers": o.Producers, "consumers": o.Consumers} {
				if n < 1 || n > 64 {
					return &sluice.Error{Kind: sluice.Invalid, Op: "torture", Subject: "--" + name, Detail: fmt.Sprintf("is %d, want 1 to 64", n)}
				}
			}
			if !o.Small {
				status, ok, err := torture.Isolated(cmd.Context(), append(os.Args[1:], "--small"), stdout, stderr)
				if ok && err == nil && status == interrupted && cmd.Context().Err() != nil {
					return errors.Join(cmd.Context().Err(), errSilent)
				}
				if ok && err == nil && status != 0 {
					return errSilent
				}
				if ok || err != nil {
					return err
				}
			}
			o.Say = func(text string) { fmt.Fprintln(stderr, text) }
			r, err := torture.Run(cmd.Context(), o)
			if err != nil {
				if r != nil && r.Books != "" {
					fmt.Fprintf(stderr, "the books and logs are in %s\n", r.Books)
				}
				return err
			}
			people := stdout
			if asJSON {
				people = stderr
				if err := printJSON(stdout, r); err != nil {
					return err
				}
			}
			r.Print(people)
			if !r.OK() {
				return errSilent
			}
			return nil
		},
	}
	c.AddCommand(&cobra.Command{
		Use:    "worker",
		Short:  "Be a process of a torture; it is started by the torture itself",
		Hidden: true,
		Args:   arguments(cobra.ExactArgs(1)),
		RunE:   func(cmd *cobra.Command, args []string) error { return torture.Work(cmd.Context(), args[0]) },
	})
	f := c.Flags()
	f.DurationVar(&o.Duration, "duration", time.Minute, "how long samples are produced and processes killed; what is under way then is finished")
	f.IntVar(&o.Producers, "producers", 2, "producer processes; every other one reaches the service over TCP")
	f.IntVar(&o.Consumers, "consumers", 3, "consumer processes; every other one reaches the service over TCP, the others map the files")
	f.Uint64Var(&o.Seed, "seed", 0, "seed of who is killed when; 0 takes a random one")
	f.StringVar(&o.Dir, "dir", "", "`directory` to work in (default the temporary directory)")
	f.BoolVar(&o.Power, "power", false, "torture a service that makes everything durable against power cuts")
	f.BoolVar(&o.Keep, "keep", false, "keep the books and logs although nothing was found")
	f.BoolVar(&asJSON, "json", false, "make the last line of stdout one JSON object, {\"error\",\"kind\"} if it breaks off; everything for people goes to stderr")
	f.StringVar(&o.Fault, "fault", "", "have the service forget-ack, lose-ref or free-early: the audit must find it")
	f.BoolVar(&o.Small, "small", false, "this process may mount a file system of its own")
	for _, name := range []string{"fault", "small"} {
		if err := f.MarkHidden(name); err != nil {
			panic(err) // the flag is defined a line above
		}
	}
	return c
}
