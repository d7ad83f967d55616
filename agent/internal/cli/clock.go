package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

func (a *app) clockCmd() *cobra.Command {
	show := &cobra.Command{
		Use: "show", Short: "Say what the node believes of its clock", Args: between(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.ask(cmd.Context(), func(ctx context.Context, c agentv1.LocalServiceClient) error {
				st, err := c.GetStatus(ctx, &agentv1.GetStatusRequest{})
				switch {
				case err != nil:
					return err
				case st.GetClock() == nil:
					return fmt.Errorf("the agent has no journal yet: %s", st.GetConnectionError())
				case a.format == "json":
					return a.printJSON(st.GetClock())
				}
				return a.printClock(st.GetClock())
			})
		},
	}
	a.outputFlag(show)
	return group("clock", "Look at the node's clock, and settle doubts about it", show, a.clockResetCmd())
}

func (a *app) clockResetCmd() *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use: "reset --yes", Short: "Say by root's word that the clock is right now", Args: between(0, 0),
		Long: `Say that the wall clock of this node is right now, although it has shown a later
time before. Check it with date first.

The high water of the clock becomes the time now, so that tasks are begun again.
The floor becomes the time now too: whatever was signed before it is refused from
now on, and must be signed again. Tasks that run go on.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !yes {
				return usagef("clock reset makes the node refuse all that was signed until now: check the clock with date, then repeat it with --yes")
			}
			return a.ask(cmd.Context(), func(ctx context.Context, c agentv1.LocalServiceClient) error {
				r, err := c.ResetClock(ctx, &agentv1.ResetClockRequest{})
				if err != nil {
					return err
				}
				return a.say("the clock's high water was %s; it and the floor are %s: sign again what was signed before\n",
					clock(r.GetBefore()), clock(r.GetNow()))
			})
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "the clock is right now")
	return cmd
}

func (a *app) printClock(st *agentv1.ClockStatus) error {
	doubt := st.GetDoubt()
	if doubt == "" {
		doubt = "none"
	}
	return a.table([][]string{
		{"wall clock", clock(st.GetWallTime())},
		{"high water", clock(st.GetHighWater())},
		{"sure of", clock(st.GetSureTime())},
		{"synchronised", fmt.Sprint(st.GetSynchronised())},
		{"doubt", doubt},
	})
}
