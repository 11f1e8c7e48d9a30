package main

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/gauge"
	"github.com/sluice-ml/sluice/internal/inspect"
	"github.com/sluice-ml/sluice/internal/wire"
)

func deadLettersCommand(stdout, stderr io.Writer) *cobra.Command {
	var (
		service     serviceFlags
		all, asJSON bool
	)
	c := &cobra.Command{
		Use:   "dead-letters RUN [list | requeue ID... | drop ID...]",
		Short: "List the samples that no consumer could use, try them again, or drop them",
		Long: `A sample that has failed too often becomes a dead letter. It keeps its reasons, and its bytes as long as dead letters take no more than a tenth of the run's cap.

requeue gives it a new start, with fresh budgets; drop frees it.`,
		Example: `  sluice dead-letters r1
  sluice dead-letters r1 requeue r1-0-17 r1-0-18
  sluice dead-letters r1 drop --all`,
		Args: arguments(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			run, action, ids := args[0], "list", []string(nil)
			if len(args) > 1 {
				action, ids = args[1], args[2:]
			}
			switch {
			case !slices.Contains([]string{"list", "requeue", "drop"}, action):
				return usageError{fmt.Errorf("unknown action %q, want list, requeue or drop", action)}
			case action == "list" && (len(ids) > 0 || all):
				return usageError{fmt.Errorf("list takes no ids: it shows all")}
			case action != "list" && all == (len(ids) > 0):
				return usageError{fmt.Errorf("%s wants ids, or --all", action)}
			}
			call, err := service.dial(stderr)
			if err != nil {
				return err
			}
			if action == "list" {
				var letters wire.DeadLetters
				if err := call.do(cmd.Context(), http.MethodGet, runPath(run, "/dead-letters"), nil, &letters); err != nil {
					return err
				}
				if asJSON {
					return writeASCII(stdout, letters)
				}
				return listDeadLetters(stdout, letters.DeadLetters)
			}
			var found, asked int
			for batch := range slices.Chunk(ids, wire.MaxBatch) {
				var f wire.Found
				if err := call.do(cmd.Context(), http.MethodPost, runPath(run, "/dead-letters/"+action), wire.SampleIDs{SampleIDs: batch}, &f); err != nil {
					return err
				}
				found, asked = found+f.Found, asked+len(batch)
			}
			if all {
				var f wire.Found
				if err := call.do(cmd.Context(), http.MethodPost, runPath(run, "/dead-letters/"+action), wire.SampleIDs{All: true}, &f); err != nil {
					return err
				}
				found, asked = f.Found, f.Found
			}
			if asJSON {
				err = writeASCII(stdout, wire.Found{Found: found})
			} else {
				_, err = fmt.Fprintf(stdout, "%s: %s\n", action, count(found, "dead letter"))
			}
			if err == nil && found < asked {
				return printedError{&sluice.Error{Kind: sluice.NotFound, Op: "dead-letters " + action, Subject: run, Detail: fmt.Sprintf("%d of the %d samples are no dead letters, or were freed", asked-found, asked)}}
			}
			return err
		},
	}
	service.register(c)
	c.Flags().BoolVar(&all, "all", false, "requeue or drop every dead letter of the run")
	c.Flags().BoolVar(&asJSON, "json", false, "print one JSON object, as the service answers, or {\"error\",\"kind\"}")
	return c
}

func listDeadLetters(w io.Writer, letters []wire.DeadLetter) error {
	if len(letters) == 0 {
		_, err := fmt.Fprintln(w, "no dead letters")
		return err
	}
	for i := range letters {
		l := &letters[i]
		kept := gauge.Size(l.Ref.EstimatedBytes())
		if l.Freed {
			kept = "its bytes were freed"
		}
		if _, err := fmt.Fprintf(w, "%s  since %s, %s, %d expiries, %s\n", inspect.Clean(l.Ref.SampleID()), l.Since.Local().Format(time.DateTime), count(l.Fails, "fail"), l.Expiries, kept); err != nil {
			return err
		}
		for _, reason := range l.Reasons {
			if _, err := fmt.Fprintf(w, "  %s\n", inspect.Clean(reason)); err != nil {
				return err
			}
		}
	}
	return nil
}
