//go:build millwright_crash

package cli

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/gpuaas/millwright/agent/internal/crash"
)

// faultCmds are the commands that only a fault build has.
func (a *app) faultCmds() []*cobra.Command {
	return []*cobra.Command{{
		Use: "crash-points", Short: "List the crash points of agent and shim, as JSON", Hidden: true, Args: between(0, 0),
		RunE: func(*cobra.Command, []string) error {
			b, err := json.MarshalIndent(crash.Registry(), "", "  ")
			if err != nil {
				return fmt.Errorf("encode crash points: %w", err)
			}
			return a.say("%s\n", b)
		},
	}}
}
