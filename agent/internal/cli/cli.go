// Package cli is the command line of millwrightd: the agent itself, the shim
// and the probe child that it starts, and the commands with which people on
// the node ask it.
package cli

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/configfile"
	"github.com/gpuaas/millwright/agent/internal/containerlog"
	"github.com/gpuaas/millwright/agent/internal/gate"
	"github.com/gpuaas/millwright/agent/internal/shim"
	"github.com/gpuaas/millwright/agent/internal/state"
)

// app is one run of the program.
type app struct {
	out     io.Writer // data
	err     io.Writer // everything else
	version string
	config  string // --config
	format  string // -o
}

// Main runs millwrightd with args, which do not hold the program's name, and
// returns the exit code: 0 done, 1 error, 2 usage, 4 not allowed, 5 not found,
// 6 conflict, 130 interrupted.
func Main(ctx context.Context, version string, args []string, stdout, stderr io.Writer) int {
	a := &app{out: stdout, err: stderr, version: version}
	root := a.root()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	return exitCode(ctx, stderr, root.ExecuteContext(ctx))
}

func (a *app) root() *cobra.Command {
	root := group("millwrightd", "The agent of a node: it takes signed tasks and carries them out",
		a.runCmd(), a.joinCmd(), a.statusCmd(), a.journalCmd(), a.taskCmd(), a.clockCmd(), a.gpuCmd(),
		a.configCmd(), a.policyCmd(), a.versionCmd(), a.shimCmd(), a.containerLogCmd(), a.awaitRestoredCmd(), a.probeCmd(), a.verifyStateCmd())
	root.AddCommand(a.faultCmds()...)
	root.Long = root.Short + `.

Exit codes: 0 done; 1 error; 2 usage; 4 not allowed; 5 not found; 6 conflict;
130 interrupted. Data goes to standard output, the rest to standard error.`
	root.SilenceErrors, root.SilenceUsage = true, true
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usagef("%w; see %s --help", err, cmd.CommandPath())
	})
	root.PersistentFlags().StringVar(&a.config, "config", configfile.DefaultPath, "the agent's configuration")
	return root
}

// group is a command that only holds others.
func group(use, short string, cmds ...*cobra.Command) *cobra.Command {
	g := &cobra.Command{
		Use: use, Short: short, Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			var names []string
			for _, c := range cmd.Commands() {
				if c.IsAvailableCommand() {
					names = append(names, c.Name())
				}
			}
			return usagef("unknown command %q for %s; known commands: %s", args[0], cmd.CommandPath(), strings.Join(names, ", "))
		},
	}
	g.AddCommand(cmds...)
	return g
}

// between demands at least low and at most high arguments.
func between(low, high int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < low:
			return usagef("an argument is missing; usage: %s", cmd.UseLine())
		case len(args) > high:
			return usagef("unexpected argument %q; usage: %s", args[high], cmd.UseLine())
		}
		return nil
	}
}

func (a *app) configCmd() *cobra.Command {
	return group("config", "Look at the agent's configuration", &cobra.Command{
		Use: "check [FILE]", Short: "Check the configuration, by default the one of --config", Args: between(0, 1),
		RunE: func(_ *cobra.Command, args []string) error {
			path := append(args, a.config)[0]
			if _, err := configfile.Load(path); err != nil {
				return err
			}
			return a.say("%s is valid\n", path)
		},
	})
}

func (a *app) policyCmd() *cobra.Command {
	return group("policy", "Look at the node's policy", &cobra.Command{
		Use: "check [FILE]", Short: "Check the policy, by default the one that the configuration names", Args: between(0, 1),
		RunE: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				cfg, err := configfile.Load(a.config)
				if err != nil {
					return err
				}
				args = []string{cfg.PolicyFile}
			}
			if _, err := gate.ReadPolicy(args[0]); err != nil {
				return err
			}
			return a.say("%s is valid\n", args[0])
		},
	})
}

func (a *app) versionCmd() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: between(0, 0),
		RunE: func(*cobra.Command, []string) error { return a.say("millwrightd %s\n", a.version) },
	}
}

// shimCmd is the wrapper of every command that the agent starts.
func (a *app) shimCmd() *cobra.Command {
	return &cobra.Command{
		Use: "shim DIRECTORY", Short: "Run a command of a task; the agent uses it", Hidden: true, DisableFlagParsing: true,
		RunE: func(_ *cobra.Command, args []string) error { return exitWith(shim.Main(args, a.err)) },
	}
}

// containerLogCmd keeps the output of a container, for its shim.
func (a *app) containerLogCmd() *cobra.Command {
	return &cobra.Command{
		Use: "container-log DIRECTORY", Short: "Keep the output of a container; its shim uses it", Hidden: true, DisableFlagParsing: true,
		RunE: func(_ *cobra.Command, args []string) error { return exitWith(containerlog.Main(args, a.err)) },
	}
}

// probeCmd is a check that may hang, in a process of its own.
func (a *app) probeCmd() *cobra.Command {
	return &cobra.Command{
		Use: "probe KIND DIRECTORY", Short: "Check a file system; the agent uses it", Hidden: true, DisableFlagParsing: true,
		RunE: func(_ *cobra.Command, args []string) error { return exitWith(child.ProbeMain(args, a.out, a.err)) },
	}
}

// verifyStateCmd looks at a state file, which can end the process that does it.
func (a *app) verifyStateCmd() *cobra.Command {
	return &cobra.Command{
		Use: "verify-state HOW FILE WAIT", Short: "Look at a state file; the agent uses it", Hidden: true, DisableFlagParsing: true,
		RunE: func(_ *cobra.Command, args []string) error { return exitWith(state.VerifyMain(args, a.out, a.err)) },
	}
}

// say writes data.
func (a *app) say(format string, args ...any) error {
	if _, err := fmt.Fprintf(a.out, format, args...); err != nil {
		return fmt.Errorf("write output: %w", err)
	}
	return nil
}
