package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/demo"
)

func demoCommand(stdout, stderr io.Writer) *cobra.Command {
	var (
		o         demo.Options
		algorithm string
		asJSON    bool
	)
	c := &cobra.Command{
		Use:   "demo",
		Short: "Run the main job end to end on a real model and check every sample",
		Long: `Demo streams the hidden states of a small Llama that ships with the project from a producer to a consumer, through a store that is far smaller than the
stream, and checks every sample bit for bit against a forward of its own.

It ends with status 0 only if nothing was lost and every sample was right.`,
		Example: `  sluice demo
  sluice demo --algorithm dspark --ranks 2
  sluice demo --prompts mine.jsonl --model ./my-llama --store /dev/shm/demo --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Algorithm = sluice.Algorithm(algorithm)
			width, terminal := terminalWidth(stderr)
			if terminal {
				o.Interval = 100 * time.Millisecond
			}
			o.Progress = demo.NewDisplay(stderr, terminal, width).Show
			r, err := demo.Run(cmd.Context(), o)
			if err != nil {
				return err
			}
			people := stdout
			if asJSON {
				people = stderr
			}
			fmt.Fprint(people, r.Summary())
			if asJSON {
				line, err := json.Marshal(r)
				if err != nil {
					return err
				}
				if _, err := fmt.Fprintf(stdout, "%s\n", line); err != nil {
					return err
				}
			}
			if !r.OK() {
				fmt.Fprintln(stderr, "sluice: demo: the stream was not right; see above")
				return errSilent
			}
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&algorithm, "algorithm", string(sluice.EAGLE3), "draft family: eagle3, dflash or dspark")
	f.StringArrayVar(&o.Prompts, "prompts", nil, "JSONL `file` of prompts instead of the shipped ones (may be repeated)")
	f.StringVar(&o.Model, "model", "", "Hugging Face `folder` of a Llama instead of the shipped checkpoint")
	f.IntSliceVar(&o.AuxLayers, "aux-layers", nil, "decoder `layers` whose states are streamed, counted from 0 (default 1, N/2-1, N-4)")
	f.StringVar(&o.Store, "store", "mem", "where samples lie: mem, or a `directory`")
	f.IntVar(&o.Ranks, "ranks", 1, "data-parallel ranks; with more than one the run deals out windows")
	f.IntVar(&o.Batch, "batch", 4, "samples a rank and step")
	f.Int64Var(&o.MaxTokens, "max-tokens", 384, "truncate rows to this many tokens")
	f.Int64Var(&o.MaxBytes, "max-bytes", 0, "cap of the store in bytes (default 8 MiB, or what the windows need)")
	f.BoolVar(&asJSON, "json", false, "make the last line of stdout one JSON object; everything for people goes to stderr")
	return c
}

// terminalWidth returns the width of w in columns if w is a terminal.
func terminalWidth(w io.Writer) (int, bool) {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" {
		return 0, false
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, false
	}
	return int(size.Col), true
}
