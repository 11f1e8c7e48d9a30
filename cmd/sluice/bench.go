package main

import (
	"io"

	"github.com/spf13/cobra"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/bench"
	"github.com/sluice-ml/sluice/internal/plan"
)

func benchCommand(stdout, stderr io.Writer) *cobra.Command {
	var (
		o      bench.Options
		sample = byteSize(84e6)
		asJSON bool
	)
	c := &cobra.Command{
		Use:   "bench",
		Short: "Measure stores, queue and model against the floors of this machine",
		Long: `Bench measures what Sluice does beside what the same would cost without it: a copy, a write, a wake-up, a matrix product. Floor and work take turns, so that
what else the machine does slows down both: the ratio is what to compare. Figures are medians, which leave out what happens rarely, a garbage collection for one.

A cycle is reserve, put, enqueue, lease, get, release and ack. It takes about a minute, a few samples' memory, more than 1 GiB for the queue of a million, and
room for five samples in --dir. Files lie in a folder of its own and are removed at the end, also after an interrupt.`,
		Example: `  sluice bench
  sluice bench --only memstore --sample 16MiB
  sluice bench --disk /var/tmp --json`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			people := stdout
			if asJSON {
				people = stderr
			}
			given := cmd.Flags().Changed
			o.Sample = int64(sample)
			if o.Quick && !given("sample") {
				o.Sample = 1 << 20
			}
			table := bench.NewTable(people)
			o.Begin, o.Each = table.Begin, table.Each
			r, err := func() (*bench.Result, error) {
				if o.Disk == "" && given("disk") {
					return nil, &sluice.Error{Kind: sluice.Invalid, Op: "bench", Subject: "--disk", Detail: `is "", want a directory`}
				}
				return bench.Run(cmd.Context(), o)
			}()
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(stdout, r)
			}
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&o.Dir, "dir", plan.DefaultStore, "`directory` in which dirstore is measured; best on tmpfs")
	f.StringVar(&o.Disk, "disk", "", "`directory` on a disk in which dirstore is measured too")
	f.Var(&sample, "sample", "bytes of a sample: a `size` such as 16MiB, 64KiB to 1GiB")
	f.StringVar(&o.Only, "only", "", "measure only the rows whose names match the `regexp`")
	f.BoolVar(&o.Quick, "quick", false, "few rounds of small work, and samples of 1MiB: to try the command, not for figures")
	f.BoolVar(&asJSON, "json", false, "make the last line of stdout one JSON object, {\"error\",\"kind\"} if it fails; everything for people goes to stderr")
	return c
}
