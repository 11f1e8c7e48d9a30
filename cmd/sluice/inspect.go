package main

import (
	"encoding/json"
	"fmt"
	"io"
	"unicode/utf16"

	"github.com/spf13/cobra"

	"github.com/sluice-ml/sluice/internal/inspect"
)

func inspectCommand(stdout, stderr io.Writer) *cobra.Command {
	var verify, asJSON bool
	c := &cobra.Command{
		Use:   "inspect FILE|DIR",
		Short: "Look into a sample file or a store, also one in use, and change nothing",
		Long: `Inspect shows what is in a safetensors file, ours or not: its features, whether their bytes are what was written and their values finite, and the ref. Of a store's directory it shows
caps, totals, sessions, samples with their owners and pins, reservations, and files and slots that do not belong together.

It opens no session and takes no lock that anybody waits for, so it may look at a store in use. The status is 1 if anything is corrupt or inconsistent; a value that is NaN or infinite counts as that.`,
		Example: `  sluice inspect s-17.safetensors
  sluice inspect /dev/shm/sluice-1000/3bf2aa6b9c332364/runs/r1    # as sluice runs describe r1 shows it
  sluice inspect --verify --json /mnt/nvme/sluice/runs/r1`,
		Args: arguments(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			var report interface {
				Text(io.Writer)
				ProblemTexts() []string
			}
			isDir, err := inspect.Stat(args[0])
			switch {
			case err != nil:
				return err
			case isDir:
				report, err = inspect.Store(cmd.Context(), args[0], verify)
			default:
				report, err = inspect.File(cmd.Context(), args[0])
			}
			if err != nil {
				return err
			}
			if asJSON {
				if err := writeASCII(stdout, report); err != nil {
					return err
				}
			} else {
				report.Text(stdout)
			}
			if wrong := report.ProblemTexts(); len(wrong) > 0 {
				first := inspect.Clean(wrong[0])
				if n := len(wrong); n > 1 {
					first = fmt.Sprintf("%d problems, the first: %s", n, first)
				}
				fmt.Fprintf(stderr, "sluice: inspect %q: %s\n", args[0], first)
				return errSilent
			}
			return nil
		},
	}
	f := c.Flags()
	f.BoolVar(&verify, "verify", false, "of a store, read every sample's file too: checksums, finite values, ref and schema (a single file is always read)")
	f.BoolVar(&asJSON, "json", false, "print one JSON object, {\"error\",\"kind\"} if there is nothing to look into")
	return c
}

// writeASCII writes v as one line of JSON without any byte that a terminal could take for more than text: names from files stay exact.
func writeASCII(w io.Writer, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	line := make([]byte, 0, len(data)+1)
	for _, r := range string(data) {
		switch {
		case r < 0x7f:
			line = append(line, byte(r))
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			line = fmt.Appendf(line, "\\u%04x\\u%04x", high, low)
		default:
			line = fmt.Appendf(line, "\\u%04x", r)
		}
	}
	_, err = w.Write(append(line, '\n'))
	return err
}
