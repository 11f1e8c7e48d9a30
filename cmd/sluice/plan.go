package main

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/plan"
)

// usualAux is what --aux is if it is not given: the number of layers that drafts of the family usually read.
var usualAux = map[sluice.Algorithm]int64{sluice.EAGLE3: 3, sluice.DFlash: 5, sluice.DSpark: 5}

// noStore is the --store that looks at no file system.
const noStore = "none"

func planCommand(stdout, stderr io.Writer) *cobra.Command {
	var (
		in                             plan.Input
		algorithm, schema, link, store string
		dtype, logitsDType             string
		axes                           []string
		asJSON                         bool
	)
	c := &cobra.Command{
		Use:   "plan",
		Short: "Say how big a run will be before anyone commits to it",
		Long: `Plan works out, from the schema and the sizes of the target, the bytes of a token, a sample, a window and an epoch, the caps and marks to set, what the
target's speed means for links, cores and the store, and whether a file system has the room. It computes nothing else and writes nothing.

What the store must hold is asked of the check that a run is made with, so that a run with these caps is accepted.

It ends with status 1 if --store is given and does not hold the store.`,
		Example: `  sluice plan --hidden 4096 --mean-len 2000 --max-len 8192 --ranks 8 --per-rank 4
  sluice plan --algorithm dflash --hidden 4096 --mean-len 2000 --max-len 8192 --prompts 100000 --tokens-per-s 20000 --link 25GB/s --store /dev/shm
  sluice plan --supervision logits --vocab 152064 --hidden 4096 --mean-len 2000 --max-len 8192 --json`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			p, err := func() (*plan.Plan, error) {
				given := cmd.Flags().Changed
				var err error
				if in.Schema, err = planSchema(algorithm, schema, given("algorithm")); err != nil {
					return nil, err
				}
				if !given("aux") && schema == "" {
					in.Aux = usualAux[in.Schema.Name]
				}
				if in.DType, err = planDType("--dtype", dtype); err != nil {
					return nil, err
				}
				if in.LogitsDType, err = planDType("--logits-dtype", logitsDType); err != nil {
					return nil, err
				}
				if in.Axes, err = planAxes(axes); err != nil {
					return nil, err
				}
				if given("link") {
					if in.Link, err = plan.ParseLink(link); err != nil {
						return nil, err
					}
				}
				if in.Disk, err = planDisk(store, given("store")); err != nil {
					return nil, err
				}
				return plan.New(in)
			}()
			if err != nil {
				return err
			}
			if asJSON {
				fmt.Fprint(stderr, p.String())
				if err := printJSON(stdout, p); err != nil {
					return err
				}
			} else if _, err := io.WriteString(stdout, p.String()); err != nil {
				return err
			}
			if cmd.Flags().Changed("store") && p.Store != nil && !p.Store.Fits {
				fmt.Fprintln(stderr, "sluice: plan: the store does not fit; see above")
				return errSilent
			}
			return nil
		},
	}
	f := c.Flags()
	f.StringVar(&algorithm, "algorithm", string(sluice.EAGLE3), "draft family: eagle3, dflash or dspark")
	f.StringVar(&schema, "schema", "", "schema document in `file` instead of a built-in one")
	f.StringVar(&in.Supervision, "supervision", "", "`encoding` of the schema that carries the supervision, or none (default the schema's own)")
	f.Int64Var(&in.Hidden, "hidden", 0, "`H`, hidden size of the target")
	f.Int64Var(&in.Layers, "layers", 0, "decoder `layers` of the target; only checks --aux")
	f.Int64Var(&in.Aux, "aux", 0, "`K`, number of aux layers (default 3 for eagle3, 5 for dflash and dspark; none for --schema)")
	f.Int64Var(&in.Vocab, "vocab", 0, "`V`, vocabulary of the target, for full logits")
	f.Int64Var(&in.DraftVocab, "draft-vocab", 0, "`Vd`, vocabulary of the draft, for target probabilities")
	f.StringArrayVar(&axes, "axis", nil, "length of another axis of --schema, as `NAME=N` (may be repeated)")
	f.StringVar(&dtype, "dtype", sluice.BFloat16.String(), "`dtype` of hidden states")
	f.StringVar(&logitsDType, "logits-dtype", "", "`dtype` of logits and target probabilities (default that of --dtype)")
	f.Int64Var(&in.MeanLen, "mean-len", 0, "mean number of `tokens` of a prompt")
	f.Int64Var(&in.MaxLen, "max-len", 0, "`tokens` of the longest row")
	f.BoolVar(&in.Packing, "packing", false, "fill rows of --max-len tokens with several prompts")
	f.IntVar(&in.Ranks, "ranks", 1, "data-parallel ranks")
	f.IntVar(&in.PerRank, "per-rank", 1, "samples a rank and step")
	f.IntVar(&in.Prefetch, "prefetch", 1, "`windows` fetched ahead")
	f.IntVar(&in.StepsPerCheckpoint, "steps-per-checkpoint", 0, "`steps` whose samples trainers hold until a checkpoint; 0 if they acknowledge every step")
	f.Int64Var(&in.Prompts, "prompts", 0, "`rows` of an epoch")
	f.Int64Var(&in.TokensPerS, "tokens-per-s", 0, "`tokens` a second of the target, all nodes together")
	f.Int64Var(&in.Nodes, "nodes", 1, "`nodes` that the target runs on")
	f.StringVar(&link, "link", "", "`speed` of a node's link, such as 100Gbit or 25GB/s")
	f.StringVar(&store, "store", plan.DefaultStore, "`directory` whose file system shall hold the samples, or none")
	f.BoolVar(&asJSON, "json", false, "make the last line of stdout one JSON object, {\"error\",\"kind\"} if there is no plan; everything for people goes to stderr")
	return c
}

func planInvalid(flag, detail string) error {
	return &sluice.Error{Kind: sluice.Invalid, Op: "plan", Subject: flag, Detail: detail}
}

// planSchema reads the document, or takes the built-in one.
func planSchema(algorithm, file string, given bool) (*sluice.Schema, error) {
	if file == "" {
		return sluice.SchemaOf(sluice.Algorithm(algorithm))
	}
	if given {
		return nil, planInvalid("--schema", "is set together with --algorithm, want one of the two")
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, &sluice.Error{Kind: sluice.NotFound, Op: "plan: schema", Subject: file, Detail: "cannot be read", Err: err}
	}
	defer func() { _ = f.Close() }()                  // it was only read
	data, err := io.ReadAll(io.LimitReader(f, 1<<20)) // ParseSchema refuses what is far smaller
	if err != nil {
		return nil, &sluice.Error{Kind: sluice.NotFound, Op: "plan: schema", Subject: file, Detail: "cannot be read", Err: err}
	}
	s, err := sluice.ParseSchema(data)
	if err != nil {
		return nil, &sluice.Error{Kind: sluice.SchemaError, Op: "plan: schema", Subject: file, Err: err}
	}
	return s, nil
}

// planDType reads a dtype; none, if the flag is not set.
func planDType(flag, name string) (sluice.DType, error) {
	if name == "" {
		return 0, nil
	}
	d, err := sluice.ParseDType(name)
	if err != nil {
		return 0, planInvalid(flag, fmt.Sprintf("is %q, want a torch dtype such as bfloat16, float16 or float32", name))
	}
	return d, nil
}

func planAxes(list []string) (map[string]int64, error) {
	axes := map[string]int64{}
	for _, a := range list {
		name, value, ok := strings.Cut(a, "=")
		n, err := strconv.ParseInt(value, 10, 64)
		if _, twice := axes[name]; !ok || err != nil || name == "" || twice {
			return nil, planInvalid("--axis", fmt.Sprintf("is %q, want NAME=N, each name once", a))
		}
		axes[name] = n
	}
	return axes, nil
}

// planDisk looks at the file system of the store; at that of the default one only if it is there.
func planDisk(store string, given bool) (*plan.Disk, error) {
	if store == noStore {
		return nil, nil
	}
	if !given {
		if _, err := os.Stat(store); err != nil {
			return nil, nil //nolint:nilerr // nobody asked for it, and the plan says that nothing was looked at
		}
	}
	if store == "" {
		return nil, planInvalid("--store", `is "", want a directory or none`)
	}
	return plan.Look(store)
}
