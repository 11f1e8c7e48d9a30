package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/demo"
)

// runDemo is replaced by tests.
var runDemo = demo.Run

func demoCommand(stdout, stderr io.Writer) *cobra.Command {
	var (
		o         demo.Options
		algorithm string
		asJSON    bool
		maxBytes  byteSize
	)
	c := &cobra.Command{
		Use:   "demo",
		Short: "Run the main job end to end on a real model and check every sample",
		Long: `Demo streams the hidden states of a small Llama that ships with the project from a producer to a consumer, through a store that is far smaller than the
stream, and checks every sample bit for bit against a forward of its own.

It ends with status 0 only if nothing was lost and every sample was right.`,
		Example: `  sluice demo
  sluice demo --algorithm dspark --ranks 2
  sluice demo --processes --kill
  sluice demo --service
  sluice demo --prompts mine.jsonl --model ./my-llama --store /dev/shm/demo --json`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Algorithm = sluice.Algorithm(algorithm)
			for _, name := range []string{"ranks", "batch", "max-tokens"} {
				if f := cmd.Flags().Lookup(name); f.Changed && f.Value.String() == "0" { // to package demo, 0 means the default
					return &sluice.Error{Kind: sluice.Invalid, Op: "demo", Subject: "--" + name, Detail: "is 0, want 1 or more"}
				}
			}
			o.MaxBytes = int64(maxBytes)
			width := terminalWidth(stderr)
			if width != nil {
				o.Interval = 100 * time.Millisecond
			}
			display := demo.NewDisplay(stderr, width)
			o.Progress, o.Warn = display.Show, display.Warn
			r, err := runDemo(cmd.Context(), o)
			if err != nil {
				return err
			}
			people := stdout
			if asJSON {
				people = stderr
			}
			fmt.Fprint(people, r.Summary())
			if asJSON {
				if err := printJSON(stdout, r); err != nil {
					return err
				}
			}
			if faults := r.Faults(); len(faults) > 0 {
				return printedError{fmt.Errorf("demo: the stream was not right: %s", strings.Join(faults, "; "))}
			}
			return nil
		},
	}
	c.AddCommand(&cobra.Command{
		Use:    demo.ChildCommand,
		Short:  "Be a process of a demo; it is started by the demo itself",
		Hidden: true,
		Args:   noArguments,
		RunE:   func(cmd *cobra.Command, _ []string) error { return demo.Child(cmd.Context()) },
	})
	f := c.Flags()
	f.StringVar(&algorithm, "algorithm", string(sluice.EAGLE3), "draft family: eagle3, dflash or dspark")
	f.StringArrayVar(&o.Prompts, "prompts", nil, "JSONL `file` of prompts instead of the shipped ones (may be repeated)")
	f.StringVar(&o.Model, "model", "", "Hugging Face `folder` of a Llama instead of the shipped checkpoint")
	f.IntSliceVar(&o.AuxLayers, "aux-layers", nil, "decoder `layers` whose states are streamed, counted from 0, -1 for the embeddings (default 1,N/2-1,N-4)")
	f.StringVar(&o.Store, "store", "", "where samples lie while the demo runs: mem, or a `directory`, from which they are removed at the end (default mem; with --processes, shared memory)")
	f.BoolVar(&o.Processes, "processes", false, "make the producer and each consumer a process of its own, over one directory")
	f.BoolVar(&o.Service, "service", false, "start a service (sluice serve) for store and queue; the producer and each consumer are processes that reach it as they would on any host")
	f.BoolVar(&o.Kill, "kill", false, "kill a consumer with SIGKILL in the middle of a batch, and let a new one go on; implies --processes")
	f.IntVar(&o.Ranks, "ranks", 1, "data-parallel ranks, at most 64; with more than one the run deals out windows")
	f.IntVar(&o.Batch, "batch", 4, "samples a rank and step, at most 1024")
	f.Int64Var(&o.MaxTokens, "max-tokens", 384, "truncate rows to this many tokens")
	f.Var(&maxBytes, "max-bytes", "cap of the store: a `size` such as 16MiB (default 8MiB, or twice what the consumers hold)")
	f.BoolVar(&asJSON, "json", false, "make the last line of stdout one JSON object, {\"error\",\"kind\"} if the demo fails; everything for people goes to stderr")
	return c
}

// terminalSize returns what tells the columns and lines of w if w is a terminal, and nil if it is none.
func terminalSize(w io.Writer) func() (columns, lines int) {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" {
		return nil
	}
	columns, lines := 0, 0
	read := func() (int, int) {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil {
			columns, lines = int(size.Col), int(size.Row)
		}
		return columns, lines // the last known ones, if the terminal is gone
	}
	if n, _ := read(); n == 0 {
		return nil
	}
	return read
}

// terminalWidth is [terminalSize] without the lines.
func terminalWidth(w io.Writer) func() int {
	size := terminalSize(w)
	if size == nil {
		return nil
	}
	return func() int {
		columns, _ := size()
		return columns
	}
}

// printJSON writes v as one line.
func printJSON(w io.Writer, v any) error {
	line, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s\n", line)
	return err
}
