// Package cli is the command line of millwright-server.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/gpuaas/millwright/tasks/all"

	"github.com/gpuaas/millwright/controlplane"
	"github.com/gpuaas/millwright/controlplane/internal/configfile"
	"github.com/gpuaas/millwright/controlplane/internal/store/look"
)

// Exit codes. The unit does not start a server again that ended with exitStore.
const (
	exitOK    = 0
	exitError = 1
	exitUsage = 2
	exitStore = 3
)

// defaultConfig is where the package puts the config.
const defaultConfig = "/etc/millwright/server.yaml"

// usageError is an error of how the program was called.
type usageError struct{ error }

// Main runs the command line and returns the exit code: 0 for good, 1 for an
// error, 2 for a wrong call, 3 for a store that cannot be used. Data goes to stdout, all else to stderr.
func Main(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if len(args) > 0 && args[0] == look.Command {
		return look.Main(args[1:], stderr)
	}
	root := command(stdout, stderr)
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	var usage *usageError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &usage):
		_, _ = fmt.Fprintf(stderr, "millwright-server: %v\nsee: millwright-server --help\n", err)
		return exitUsage
	}
	_, _ = fmt.Fprintf(stderr, "millwright-server: %v\n", err)
	if errors.Is(err, controlplane.ErrStore) {
		return exitStore
	}
	return exitError
}

func command(stdout, stderr io.Writer) *cobra.Command {
	path := defaultConfig
	root := &cobra.Command{
		Use:           "millwright-server",
		Short:         "The control plane of Millwright",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          noArgs,
		RunE: func(*cobra.Command, []string) error {
			return &usageError{errors.New("a command is missing: run, init, config check or log export")}
		},
		Version: version(),
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.PersistentFlags().StringVar(&path, "config", path, "the config file")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &usageError{err} })
	config := &cobra.Command{Use: "config", Short: "Look at the config file", Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			return &usageError{errors.New("a command is missing: config check")}
		}}
	config.AddCommand(checkCommand(&path, stdout))
	root.AddCommand(runCommand(&path, stderr), initCommand(&path, stdout, stderr), config, logCommand(&path, stdout, stderr))
	root.AddCommand(faultCommands(stdout)...)
	return root
}

func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return &usageError{fmt.Errorf("%s: unknown command or argument %q", cmd.CommandPath(), args[0])}
	}
	return nil
}

func runCommand(path *string, stderr io.Writer) *cobra.Command {
	return &cobra.Command{
		Use: "run", Short: "Serve until SIGTERM or SIGINT", Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := readConfig(*path, stderr)
			if err != nil {
				return err
			}
			return controlplane.New(cfg).Run(cmd.Context())
		},
	}
}

func checkCommand(path *string, stdout io.Writer) *cobra.Command {
	return &cobra.Command{
		Use: "check", Short: "Check the config file", Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			if _, err := configfile.Read(*path); err != nil {
				return err
			}
			_, err := fmt.Fprintf(stdout, "%s is good\n", *path)
			return err
		},
	}
}

func readConfig(path string, stderr io.Writer) (controlplane.Config, error) {
	f, err := configfile.Read(path)
	if err != nil {
		return controlplane.Config{}, err
	}
	executable, err := os.Executable()
	if err != nil {
		return controlplane.Config{}, fmt.Errorf("find the path of this program: %w", err)
	}
	return controlplane.Config{
		Executable: executable, StateDir: f.StateDir, SecretsKeyFile: f.SecretsKeyFile,
		Listen: f.Listen, HTTPListen: f.HTTPListen, AdvertiseAddress: f.AdvertiseAddress,
		Registry: all.Registry(), Version: version(), Heartbeat: f.HeartbeatInterval, NodeTTL: f.NodeCertificateTTL,
		HealthHistoryAge: f.HealthHistoryAge, HealthHistoryCount: f.HealthHistoryCount,
		Logger: slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: f.LogLevel})),
	}, nil
}

// version is the version that the build stamped.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "devel"
	}
	return info.Main.Version
}
