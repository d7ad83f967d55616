package ctl

import (
	"context"
	"fmt"
	"io"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/all"
)

// app is one run of millctl.
type app struct {
	in       io.Reader
	out      io.Writer // data
	err      io.Writer // everything else
	getenv   func(string) string
	registry *tasks.Registry
	now      func() time.Time

	context string // --context
	format  string // -o
}

// Main runs millctl with args, which do not hold the program's name, and
// returns the exit code. getenv looks up the environment. It returns soon after
// ctx ends, with 130; tasks go on without it.
func Main(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer, getenv func(string) string) int {
	a := &app{in: stdin, out: stdout, err: stderr, getenv: getenv, registry: all.Registry(), now: time.Now}
	root := a.root()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	return exitCode(ctx, stderr, root.ExecuteContext(ctx))
}

func (a *app) root() *cobra.Command {
	root := group("millctl", "Run signed, audited work on nodes and read its history",
		a.operatorCmd(), a.contextCmd(), a.nodeCmd(), a.gpuCmd(), a.healthCmd(), a.migCmd(), a.secretCmd(), a.taskCmd(), a.whoamiCmd())
	root.Long = root.Short + `.

Exit codes: 0 done; 1 error; 2 usage, or a spec or value that is not valid; 3 a
task ended and did not succeed, or is held; 4 not authenticated or not allowed;
5 not found; 6 conflict; 7 timed out waiting; 130 interrupted.

Data goes to standard output, the rest to standard error. -o json is stable: it
is the JSON form of the public API messages. Tables are for people and may
change.

Environment: MILLWRIGHT_HOME is the directory of keys and contexts, by default
$XDG_CONFIG_HOME/millwright or ~/.config/millwright. MILLWRIGHT_CONTEXT is the
context to use.`
	root.Version = version()
	root.SilenceErrors = true
	root.SilenceUsage = true
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usagef("%w; see %s --help", err, cmd.CommandPath())
	})
	root.PersistentFlags().StringVar(&a.context, "context", "", "the context to use instead of the current one")
	return root
}

// version is the version that the build stamped.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "devel"
	}
	return info.Main.Version
}

// group is a command that only holds others.
func group(use, short string, cmds ...*cobra.Command) *cobra.Command {
	g := &cobra.Command{
		Use:   use,
		Short: short,
		Args:  cobra.ArbitraryArgs,
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

// exactly demands arguments by their names.
func exactly(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names):
			return usagef("%s is missing; usage: %s", names[len(args)], cmd.UseLine())
		case len(args) > len(names):
			return usagef("unexpected argument %q; usage: %s", args[len(names)], cmd.UseLine())
		}
		return nil
	}
}

// none allows no argument.
func none() cobra.PositionalArgs { return exactly() }

// outputFlag adds -o with the formats of a command; table is the default.
func (a *app) outputFlag(cmd *cobra.Command, formats ...string) {
	formats = append([]string{formatTable, formatJSON}, formats...)
	cmd.Flags().StringVarP(&a.format, "output", "o", formatTable, "the form of the output: "+strings.Join(formats, ", "))
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if slices.Contains(formats, a.format) {
			return nil
		}
		return usagef("--output: %q: must be one of %s", a.format, strings.Join(formats, ", "))
	}
}

// remark tells something that is not data.
func (a *app) remark(format string, args ...any) {
	fmt.Fprintf(a.err, format+"\n", args...)
}
