//go:build millwright_crash

package cli

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/gpuaas/millwright/controlplane/internal/crash"
)

// faultCommands are those that only a fault build has.
func faultCommands(stdout io.Writer) []*cobra.Command {
	return []*cobra.Command{{
		Use: "crash-points", Short: "List the crash points of the server, as JSON", Hidden: true, Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			b, err := json.MarshalIndent(crash.Registry(), "", "  ")
			if err != nil {
				return fmt.Errorf("encode crash points: %w", err)
			}
			_, err = fmt.Fprintf(stdout, "%s\n", b)
			return err
		},
	}}
}
