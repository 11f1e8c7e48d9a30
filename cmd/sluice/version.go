package main

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/sluice-ml/sluice/internal/wire"
)

func versionCommand(stdout io.Writer) *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use: "version", Short: "Print the version, as --version does", Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if asJSON {
				return json.NewEncoder(stdout).Encode(struct {
					Version string `json:"version"`
					API     int    `json:"api"`
				}{version(), wire.API})
			}
			_, err := fmt.Fprintf(stdout, "%s version %s\n", cmd.Root().Name(), version())
			return err
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "as a JSON object, with the number of the API that clients compare")
	return c
}
