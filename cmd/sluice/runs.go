package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/inspect"
	"github.com/sluice-ml/sluice/internal/wire"
)

func runPath(run, rest string) string { return "/v1/runs/" + url.PathEscape(run) + rest }

func runsCommand(stdout, stderr io.Writer) *cobra.Command {
	var (
		service serviceFlags
		asJSON  bool
	)
	list := func(cmd *cobra.Command, _ []string) error {
		call, err := service.dial(stderr)
		if err != nil {
			return err
		}
		var runs wire.RunList
		if err := call.do(cmd.Context(), http.MethodGet, "/v1/runs", nil, &runs); err != nil {
			return err
		}
		if asJSON {
			return writeASCII(stdout, runs)
		}
		return listRuns(stdout, runs.Runs)
	}
	c := &cobra.Command{
		Use:   "runs",
		Short: "List, create, describe, configure, close and delete the runs of a service",
		Example: `  sluice runs
  sluice runs create r1 --algorithm eagle3 --max-bytes 4GiB
  sluice runs close r1 --cause "the target failed"
  sluice runs delete r1 --yes`,
		Args: noArguments,
		RunE: list,
	}
	service.register(c)
	c.PersistentFlags().BoolVar(&asJSON, "json", false, "print one JSON object, as the service answers, or {\"error\",\"kind\"}")
	c.AddCommand(&cobra.Command{Use: "list", Short: "List the runs (the default)", Args: noArguments, RunE: list})

	describe := &cobra.Command{
		Use:   "describe RUN",
		Short: "Show a run: what it was created with, where its samples are, what it is doing",
		Args:  arguments(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			call, err := service.dial(stderr)
			if err != nil {
				return err
			}
			var r wire.Run
			if err := call.do(cmd.Context(), http.MethodGet, runPath(args[0], ""), nil, &r); err != nil {
				return err
			}
			return showRun(stdout, &r, asJSON)
		},
	}

	var cause string
	closing := &cobra.Command{
		Use:   "close RUN",
		Short: "Close a run: nothing more is put into it, and its consumers drain what is there",
		Args:  arguments(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			call, err := service.dial(stderr)
			if err != nil {
				return err
			}
			return call.do(cmd.Context(), http.MethodPost, runPath(args[0], "/close"), wire.CloseRun{Cause: cause}, nil)
		},
	}
	closing.Flags().StringVar(&cause, "cause", "", "why, if this is not the regular end: consumers are told so after the drain")

	var yes bool
	deleting := &cobra.Command{
		Use:   "delete RUN",
		Short: "Delete a run with all its samples, refs and dead letters",
		Args:  arguments(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			call, err := service.dial(stderr)
			if err != nil {
				return err
			}
			if !yes {
				var r wire.Run
				if err := call.do(cmd.Context(), http.MethodGet, runPath(args[0], ""), nil, &r); err != nil {
					return err
				}
				if n := r.Status.Pending + r.Status.Outstanding + r.Status.Dead; n > 0 {
					return &sluice.Error{Kind: sluice.Conflict, Op: "runs delete", Subject: args[0], Detail: fmt.Sprintf("it has %s that nobody has trained on: %d pending, %d leased, %d dead", count(n, "sample"), r.Status.Pending, r.Status.Outstanding, r.Status.Dead), Hint: "give --yes if they may go"}
				}
			}
			return call.do(cmd.Context(), http.MethodDelete, runPath(args[0], ""), nil, nil)
		},
	}
	deleting.Flags().BoolVar(&yes, "yes", false, "also if it holds samples")

	c.AddCommand(describe, closing, deleting, createRunCommand(&service, stdout, stderr, &asJSON), configureRunCommand(&service, stdout, stderr, &asJSON))
	return c
}

func createRunCommand(service *serviceFlags, stdout, stderr io.Writer, asJSON *bool) *cobra.Command {
	var (
		spec                      wire.RunSpec
		windows                   wire.Windows
		specFile, schemaFile      string
		maxBytes, high, low, size byteSize
		timeout, producerTimeout  time.Duration
	)
	c := &cobra.Command{
		Use:   "create RUN",
		Short: "Create a run; to create it again with the same settings is success",
		Example: `  sluice runs create r1 --algorithm eagle3 --max-bytes 4GiB
  sluice runs create r2 --algorithm dspark --max-bytes 4GiB --ranks 4 --per-rank 4 --largest-sample 64MiB
  sluice runs create r3 --spec r3.json`,
		Args: arguments(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if specFile != "" {
				if err := readJSON(specFile, "--spec", &spec); err != nil {
					return err
				}
			}
			if spec.RunID != "" && spec.RunID != args[0] {
				return &sluice.Error{Kind: sluice.Invalid, Op: "runs create", Subject: "--spec", Detail: fmt.Sprintf("it is for the run %q, not %q", inspect.Clean(spec.RunID), args[0])}
			}
			spec.RunID = args[0]
			if schemaFile != "" {
				if err := readJSON(schemaFile, "--schema", &spec.Schema); err != nil {
					return err
				}
			}
			changed := cmd.Flags().Changed
			for name, set := range map[string]func(){
				"max-bytes": func() { spec.Caps.MaxBytes = int64(maxBytes) }, "high-mark": func() { spec.Caps.HighWatermarkBytes = int64(high) },
				"low-mark": func() { spec.Caps.LowWatermarkBytes = int64(low) }, "largest-sample": func() { spec.LargestSample = int64(size) },
				"visibility-timeout": func() { spec.VisibilityTimeoutSeconds = wire.SecondsOf(timeout) }, "producer-timeout": func() { spec.ProducerTimeoutSeconds = wire.SecondsOf(producerTimeout) },
			} {
				if changed(name) {
					set()
				}
			}
			if changed("ranks") || changed("per-rank") || changed("prefetch") || changed("drop-tail") {
				spec.Windows = &windows
			}
			call, err := service.dial(stderr)
			if err != nil {
				return err
			}
			var r wire.Run
			if err := call.do(cmd.Context(), http.MethodPost, "/v1/runs", &spec, &r); err != nil {
				return err
			}
			return showRun(stdout, &r, *asJSON)
		},
	}
	f := c.Flags()
	f.StringVar(&specFile, "spec", "", "`file` with everything, JSON as POST /v1/runs takes it; other flags change it")
	f.StringVar(&spec.Algorithm, "algorithm", "", "eagle3, dflash or dspark")
	f.StringVar(&schemaFile, "schema", "", "`file` with a schema document of your own instead")
	f.BoolVar(&spec.Mixed, "mixed", false, "take samples of any schema, and of any run id, instead")
	f.Var(&maxBytes, "max-bytes", "hard cap, a `size` such as 4GiB")
	f.Int64Var(&spec.Caps.MaxSamples, "max-samples", 0, "hard cap in samples")
	f.Var(&high, "high-mark", "`size` at which producers pause (default 75 % of the cap)")
	f.Var(&low, "low-mark", "`size` at which they go on (default 25 %)")
	f.DurationVar(&timeout, "visibility-timeout", 0, "how long a lease lives unless it is renewed (default 30s)")
	f.IntVar(&spec.MaxFails, "max-fails", 0, "fails that make a dead letter (default 5)")
	f.IntVar(&spec.MaxExpiries, "max-expiries", 0, "expiries that make a dead letter (default 20)")
	f.IntVar(&spec.Producers, "producers", 0, "producers that the run waits for before it ends (default 1)")
	f.DurationVar(&producerTimeout, "producer-timeout", 0, "silence after which a named producer counts as lost (default 1m)")
	f.Var(&size, "largest-sample", "most bytes that a sample can have, a `size`; needed with windows and checkpoints")
	f.IntVar(&spec.StepsPerCheckpoint, "steps-per-checkpoint", 0, "consumers ack at checkpoints, so many steps apart")
	f.IntVar(&spec.SamplesPerStep, "samples-per-step", 0, "samples that all consumers take in a step, with --steps-per-checkpoint and without windows")
	f.IntVar(&windows.Ranks, "ranks", 0, "deal the stream out to so many data-parallel ranks in equal shares")
	f.IntVar(&windows.PerRank, "per-rank", 0, "samples a rank and step")
	f.IntVar(&windows.Prefetch, "prefetch", 0, "windows opened ahead")
	f.BoolVar(&windows.DropTail, "drop-tail", false, "drop an incomplete last window instead of padding it")
	f.StringSliceVar(&spec.TargetVersions, "target-versions", nil, "target `versions` that are let in (default any)")
	f.StringVar(&spec.MinDraftVersion, "min-draft-version", "", "lowest draft version that is let in (default any)")
	return c
}

func configureRunCommand(service *serviceFlags, stdout, stderr io.Writer, asJSON *bool) *cobra.Command {
	var (
		timeout   time.Duration
		high, low byteSize
		reopen    bool
	)
	c := &cobra.Command{
		Use:   "configure RUN",
		Short: "Change the lease time and the marks of a run, and reopen one that is closed and drained",
		Example: `  sluice runs configure r1 --visibility-timeout 2m --high-mark 3GiB
  sluice runs configure r1 --reopen`,
		Args: arguments(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			change := sluice.RunChange{Reopen: reopen}
			changed := cmd.Flags().Changed
			if changed("visibility-timeout") {
				change.VisibilityTimeout = &timeout
			}
			if changed("high-mark") {
				change.HighWatermarkBytes = (*int64)(&high)
			}
			if changed("low-mark") {
				change.LowWatermarkBytes = (*int64)(&low)
			}
			if err := change.Validate(); err != nil {
				return err
			}
			call, err := service.dial(stderr)
			if err != nil {
				return err
			}
			var r wire.Run
			if err := call.do(cmd.Context(), http.MethodPost, runPath(args[0], "/configure"), wire.ConfigureOf(&change), &r); err != nil {
				return err
			}
			return showRun(stdout, &r, *asJSON)
		},
	}
	f := c.Flags()
	f.DurationVar(&timeout, "visibility-timeout", 0, "how long a lease lives that is given from now on, or renewed if it had less")
	f.Var(&high, "high-mark", "`size` at which producers pause")
	f.Var(&low, "low-mark", "`size` at which they go on")
	f.BoolVar(&reopen, "reopen", false, "take puts again; the run must be drained")
	return c
}

// readJSON reads a file that the flag names, and takes no field that v does not have.
func readJSON(path, flag string, v any) error {
	refuse := func(err error) error {
		return &sluice.Error{Kind: sluice.Invalid, Op: "runs create", Subject: flag, Err: err}
	}
	f, err := os.Open(path)
	if err != nil {
		return refuse(err)
	}
	defer f.Close() //nolint:errcheck // nothing was written
	d := json.NewDecoder(io.LimitReader(f, wire.MaxBody))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return refuse(fmt.Errorf("%s: %w", path, wire.Misfit(err)))
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return refuse(fmt.Errorf("%s: something follows the JSON object", path))
	}
	return nil
}

func listRuns(w io.Writer, runs []wire.Run) error {
	if len(runs) == 0 {
		_, err := fmt.Fprintln(w, "no runs; create one with `sluice runs create`")
		return err
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "RUN\tSTATE\tUSED\tCAP\tPENDING\tLEASED\tACKED\tDEAD\tBOTTLENECK")
	for i := range runs {
		r := &runs[i].Status
		state, _, _ := strings.Cut(stateOf(r), ":")
		if r.Unavailable != "" {
			fmt.Fprintf(t, "%s\t%s\t-\t-\t-\t-\t-\t-\t-\n", inspect.Clean(r.RunID), state)
			continue
		}
		level := levelOf(r)
		side, _, _ := strings.Cut(r.Bottleneck, ":")
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%s\n", inspect.Clean(r.RunID), state, level.Unit(level.Level), level.Unit(level.Cap), r.Pending, r.Outstanding, r.Acked, r.Dead, inspect.Clean(side))
	}
	return t.Flush()
}

func showRun(w io.Writer, r *wire.Run, asJSON bool) error {
	if asJSON {
		return writeASCII(w, r)
	}
	s := &r.Spec
	what := "a schema of its own"
	if s.Mixed {
		what = "mixed: samples of any schema"
	}
	var schema struct {
		Name    string `json:"name"`
		Version int    `json:"version"`
	}
	if json.Unmarshal(s.Schema, &schema) == nil && schema.Name != "" { // it is shown as far as it is known
		what = fmt.Sprintf("schema %s version %d", inspect.Clean(schema.Name), schema.Version)
	}
	lines := runLines(&r.Status, 100)
	lines = append(lines,
		fmt.Sprintf("  created %s, %s", r.Created.Local().Format(time.DateTime), what),
		fmt.Sprintf("  leases live %s, dead after %s or %d expiries, %s", ago(s.VisibilityTimeoutSeconds), count(s.MaxFails, "fail"), s.MaxExpiries, count(s.Producers, "producer")),
	)
	if win := s.Windows; win != nil {
		lines = append(lines, fmt.Sprintf("  windows: %s with %s a step, %d ahead", count(win.Ranks, "rank"), count(win.PerRank, "sample"), win.Prefetch))
	}
	lines = append(lines, "  samples in "+inspect.Clean(r.Store.Dir), "  staging in "+inspect.Clean(r.Store.StagingDir))
	_, err := fmt.Fprintln(w, strings.Join(lines, "\n"))
	return err
}
