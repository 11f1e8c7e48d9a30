package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-ml/sluice"
	"github.com/sluice-ml/sluice/internal/wire"
	"github.com/sluice-ml/sluice/service/access"
)

func tokenCommand(stdout io.Writer) *cobra.Command {
	var state string
	c := &cobra.Command{
		Use:   "token",
		Short: "List, make and revoke the tokens that callers over TCP need",
		Long: `Tokens are in tokens.json in the state directory of the service, which makes one a role at its first start. A service that runs knows of a change within a second.

A token's value is never printed: create writes it to a file, which SLUICE_TOKEN_FILE or --token-file then names.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	c.PersistentFlags().StringVar(&state, "state", "", "state `directory` of the service (default $SLUICE_STATE, $XDG_STATE_HOME/sluice or ~/.local/state/sluice)")

	var asJSON bool
	list := &cobra.Command{
		Use:   "list",
		Short: "List the tokens, without their values",
		Args:  noArguments,
		RunE: func(*cobra.Command, []string) error {
			dir, err := stateDir(state)
			if err != nil {
				return err
			}
			tokens, err := wire.ReadTokens(dir)
			if errors.Is(err, sluice.ErrNotFound) {
				return &sluice.Error{Kind: sluice.NotFound, Op: "tokens", Subject: dir, Detail: "no service has made tokens in this state directory", Hint: "start `sluice serve` once, or name another with --state"}
			}
			if err != nil {
				return err
			}
			return listTokens(stdout, tokens, asJSON)
		},
	}
	list.Flags().BoolVar(&asJSON, "json", false, "print one JSON object, {\"error\",\"kind\"} if it fails")

	var name, role, run, out string
	create := &cobra.Command{
		Use:     "create",
		Short:   "Make a token and write its value to a file that only you can read",
		Example: "  sluice token create --name trainer-7 --role consumer --run r1 --out trainer-7.token\n  SLUICE_TOKEN_FILE=trainer-7.token SLUICE_URL=https://host:7447 ./train",
		Args:    noArguments,
		RunE: func(*cobra.Command, []string) (err error) {
			for _, f := range [][2]string{{"--name", name}, {"--role", role}, {"--out", out}} {
				if f[1] == "" {
					return usageError{fmt.Errorf("%s is missing", f[0])}
				}
			}
			dir, err := stateDir(state)
			if err != nil {
				return err
			}
			f, err := os.OpenFile(out, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) // a name that is taken, also by a link, is refused
			if err != nil {
				return &sluice.Error{Kind: sluice.Denied, Op: "token", Subject: "--out", Detail: "want a file that is not there yet", Err: err}
			}
			defer func() {
				if err = errors.Join(err, f.Close()); err != nil {
					err = errors.Join(err, os.Remove(out))
				}
			}()
			t, err := access.CreateToken(dir, name, access.Role(role), run)
			if err != nil {
				return err
			}
			if _, err := fmt.Fprintln(f, t.Value); err != nil {
				return errors.Join(err, access.RevokeToken(dir, name))
			}
			of := "any run"
			if run != "" {
				of = "the run " + run
			}
			fmt.Fprintf(stdout, "token %s, %s of %s, is in %s\n", name, role, of, out)
			return nil
		},
	}
	f := create.Flags()
	f.StringVar(&name, "name", "", "name of the token, for lists, logs and to revoke it")
	f.StringVar(&role, "role", "", "what its bearer may do: producer, consumer, or operator, who may do everything")
	f.StringVar(&run, "run", "", "the one run that it is good for (default all)")
	f.StringVar(&out, "out", "", "`file` to write it to, which must not exist")

	revoke := &cobra.Command{
		Use:   "revoke NAME",
		Short: "Revoke a token: its bearer, and dashboards opened with it, are refused from then on",
		Args:  arguments(cobra.ExactArgs(1)),
		RunE: func(_ *cobra.Command, args []string) error {
			dir, err := stateDir(state)
			if err != nil {
				return err
			}
			return access.RevokeToken(dir, args[0])
		},
	}
	c.AddCommand(list, create, revoke)
	return c
}

// listTokens shows everything but the values.
func listTokens(w io.Writer, tokens []wire.Token, asJSON bool) error {
	type shown struct {
		Name    string    `json:"name"`
		Role    string    `json:"role"`
		Run     string    `json:"run,omitempty"`
		Created time.Time `json:"created"`
	}
	list := make([]shown, 0, len(tokens))
	for _, t := range tokens {
		list = append(list, shown{t.Name, t.Role, t.Run, t.Created})
	}
	if asJSON {
		return printJSON(w, map[string]any{"tokens": list})
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "NAME\tROLE\tRUN\tCREATED")
	for _, t := range list {
		if t.Run == "" {
			t.Run = "all"
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", t.Name, t.Role, t.Run, t.Created.Local().Format(time.DateTime))
	}
	return table.Flush()
}
