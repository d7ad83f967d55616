// Package cli is the command line of the testbed.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/gpuaas/millwright/test/testbed"
)

// DefaultName is the testbed that commands mean without --name.
const DefaultName = "dev"

// Run runs the command line and returns the exit status: 0, 1 after an error,
// 130 when ctx was cancelled, or that of the command that exec ran.
func Run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	c := &command{stdin: stdin, stdout: stdout, stderr: stderr}
	c.log = slog.New(slog.NewTextHandler(stderr, nil))
	root := c.root()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	var exited *testbed.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exited) && c.passExit:
		return exited.Result.Code
	case ctx.Err() != nil:
		fmt.Fprintln(stderr, "testbed: interrupted")
		return 130
	}
	fmt.Fprintln(stderr, "testbed:", err)
	return 1
}

type command struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	log            *slog.Logger
	name           string
	passExit       bool // the error of exec is the command's own
}

func (c *command) root() *cobra.Command {
	root := &cobra.Command{
		Use:           "testbed",
		Short:         "Boot real nodes on this machine to develop and test with",
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.PersistentFlags().StringVar(&c.name, "name", DefaultName, "the testbed's name")
	root.AddCommand(c.up(), c.down(), c.list(), c.env(), c.exec(), c.logs(), c.install(), c.fill(), c.free(),
		c.onNode("start NODE", "Boot a node that is off", (*testbed.Node).Start),
		c.onNode("reboot NODE", "Reboot a node and wait until it runs", (*testbed.Node).Reboot),
		c.onNode("kill NODE", "Cut a node's power: end all its processes at once", (*testbed.Node).Kill),
		c.cut(),
		c.onNode("heal NODE", "Let a node's packets through again", (*testbed.Node).Heal))
	return root
}

func (c *command) up() *cobra.Command {
	cfg := testbed.Config{}
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Boot nodes and wait until they run",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.Name, cfg.Log = c.name, c.log
			t, err := testbed.Up(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			return c.printNodes(t)
		},
	}
	cmd.Flags().IntVarP(&cfg.Nodes, "nodes", "n", 1, "how many nodes: n1, n2, ...")
	cmd.Flags().BoolVar(&cfg.Owned, "owned", false, "end the nodes when this process ends; of use only to what runs this in itself")
	_ = cmd.Flags().MarkHidden("owned")
	cmd.Flags().IntVar(&cfg.StateMiB, "state-size", 0, "give each node a disk of its own for "+testbed.StateDir+", of so many MiB")
	cmd.Flags().BoolVar(&cfg.Slurm, "slurm", false, "add the node slurm, which runs the controller of a Slurm cluster")
	cmd.Flags().BoolVar(&cfg.Storage, "storage", false, "add the node storage, which serves the GlusterFS volume v1")
	return cmd
}

func (c *command) down() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:   "down",
		Short: "End the nodes and remove all that they left",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			names := []string{c.name}
			if all {
				var err error
				if names, err = testbed.List(); err != nil {
					return err
				}
			}
			var errs []error
			for _, name := range names {
				errs = append(errs, testbed.Down(cmd.Context(), name, c.log))
			}
			return errors.Join(errs...)
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "take down every testbed of this machine")
	return cmd
}

func (c *command) list() *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Aliases: []string{"ps"},
		Short:   "List all testbeds and their nodes",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			names, err := testbed.List()
			if err != nil {
				return err
			}
			var testbeds []*testbed.Testbed
			for _, name := range names {
				t, err := testbed.Open(name, c.log)
				if err != nil {
					return err
				}
				testbeds = append(testbeds, t)
			}
			return c.printNodes(testbeds...)
		},
	}
}

func (c *command) printNodes(testbeds ...*testbed.Testbed) error {
	w := tabwriter.NewWriter(c.stdout, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "TESTBED\tNODE\tADDRESS\tPOWER\tNETWORK")
	for _, t := range testbeds {
		for _, n := range t.Nodes() {
			power, network := "off", "up"
			if n.IsOn() {
				power = "on"
			}
			if n.IsCut() {
				network = "cut"
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", t.Name(), n.Name(), n.Addr(), power, network)
		}
	}
	return w.Flush()
}

func (c *command) env() *cobra.Command {
	return &cobra.Command{
		Use:   "env",
		Short: "Print what millctl and a server need, for a shell to read",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			t, err := testbed.Open(c.name, c.log)
			if err != nil {
				return err
			}
			var nodes []string
			for _, n := range t.Nodes() {
				if !n.IsFixture() {
					nodes = append(nodes, n.Name())
				}
			}
			_, err = fmt.Fprintf(c.stdout, "export MILLWRIGHT_TESTBED=%s\nexport MILLWRIGHT_TESTBED_ADDRESS=%s\n"+
				"export MILLWRIGHT_TESTBED_NODES='%s'\nexport MILLWRIGHT_TESTBED_DIR=%s\nexport MILLWRIGHT_HOME=%s\n",
				t.Name(), t.Address(), strings.Join(nodes, " "), t.Dir(), t.HomeDir())
			return err
		},
	}
}

func (c *command) node(name string) (*testbed.Node, error) {
	t, err := testbed.Open(c.name, c.log)
	if err != nil {
		return nil, err
	}
	return t.Node(name)
}

func (c *command) onNode(use, short string, do func(*testbed.Node, context.Context) error) *cobra.Command {
	return &cobra.Command{
		Use:   use,
		Short: short,
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			n, err := c.node(args[0])
			if err != nil {
				return err
			}
			return do(n, cmd.Context())
		},
	}
}

func (c *command) cut() *cobra.Command {
	var in, out bool
	cmd := c.onNode("cut NODE", "Drop all packets of a node until it is healed", func(n *testbed.Node, ctx context.Context) error {
		switch {
		case in:
			return n.CutOneWay(ctx, testbed.In)
		case out:
			return n.CutOneWay(ctx, testbed.Out)
		}
		return n.Cut(ctx)
	})
	cmd.Flags().BoolVar(&in, "in", false, "only those to the node")
	cmd.Flags().BoolVar(&out, "out", false, "only those from the node")
	cmd.MarkFlagsMutuallyExclusive("in", "out")
	return cmd
}

func (c *command) exec() *cobra.Command {
	return &cobra.Command{
		Use:   "exec NODE -- COMMAND [ARG ...]",
		Short: "Run a command in a node, as root, and exit with its status",
		Args:  cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			n, err := c.node(args[0])
			if err != nil {
				return err
			}
			c.passExit = true
			return n.Stream(cmd.Context(), c.stdin, c.stdout, c.stderr, args[1:]...)
		},
	}
}

func (c *command) logs() *cobra.Command {
	return &cobra.Command{
		Use:   "logs NODE [-- JOURNALCTL-ARG ...]",
		Short: "Print a node's journal, also when it is off",
		Args:  cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			n, err := c.node(args[0])
			if err != nil {
				return err
			}
			return n.Logs(cmd.Context(), c.stdout, args[1:]...)
		},
	}
}

func (c *command) install() *cobra.Command {
	return &cobra.Command{
		Use:   "install NODE FILE.deb",
		Short: "Install a Debian package in a node",
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			n, err := c.node(args[0])
			if err != nil {
				return err
			}
			path, err := filepath.Abs(args[1])
			if err != nil {
				return err
			}
			return n.Install(cmd.Context(), path)
		},
	}
}
