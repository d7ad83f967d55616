package cli

import (
	"github.com/spf13/cobra"

	"github.com/gpuaas/millwright/test/testbed"
)

func (c *command) fill() *cobra.Command {
	var leave uint64
	cmd := &cobra.Command{
		Use:   "fill NODE [DIRECTORY]",
		Short: "Fill the disk that holds a directory of a node, its state without one",
		Args:  cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			n, err := c.node(args[0])
			if err != nil {
				return err
			}
			return n.Fill(cmd.Context(), directory(args), leave)
		},
	}
	cmd.Flags().Uint64Var(&leave, "leave", 0, "how many bytes stay free")
	return cmd
}

func (c *command) free() *cobra.Command {
	return &cobra.Command{
		Use:   "free NODE [DIRECTORY]",
		Short: "Give back the room that fill has taken",
		Args:  cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			n, err := c.node(args[0])
			if err != nil {
				return err
			}
			return n.Free(cmd.Context(), directory(args))
		},
	}
}

func directory(args []string) string {
	if len(args) > 1 {
		return args[1]
	}
	return testbed.StateDir
}
