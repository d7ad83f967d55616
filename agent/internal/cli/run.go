package cli

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"github.com/gpuaas/millwright/agent"
	"github.com/gpuaas/millwright/agent/internal/configfile"
	"github.com/gpuaas/millwright/agent/internal/enrol"
	"github.com/gpuaas/millwright/agent/internal/gpu"
	"github.com/gpuaas/millwright/tasks/all"
)

const (
	// memoryLimit is where the garbage collector begins to work hard. Output
	// flows through the shims; the agent itself needs little.
	memoryLimit = 40 << 20
	gcPercent   = 50
)

func (a *app) runCmd() *cobra.Command {
	return &cobra.Command{
		Use: "run", Short: "Run the agent, as the service does", Args: between(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := configfile.Load(a.config)
			if err != nil {
				return err
			}
			return a.run(cmd.Context(), cfg)
		},
	}
}

func (a *app) run(ctx context.Context, cfg configfile.Config) error {
	debug.SetMemoryLimit(memoryLimit)
	debug.SetGCPercent(gcPercent)
	log := slog.New(a.logHandler(cfg.LogLevel))
	executable, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find own program: %w", err)
	}
	watchdog, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		return fmt.Errorf("read watchdog interval: %w", err)
	}
	log.InfoContext(ctx, "agent starts", "version", a.version, "state_dir", cfg.StateDir)
	return agent.New(agent.Config{
		StateDir: cfg.StateDir, RunDir: cfg.RunDir, PolicyFile: cfg.PolicyFile, JoinFile: cfg.JoinFile,
		Executable: executable, Version: a.version, Registry: all.Registry(), Logger: log,
		Server: cfg.Server, SocketGroup: cfg.SocketGroup, Labels: cfg.Labels,
		OutputBytesPerSecond: cfg.OutputBytesPerSecond, OutputRetention: cfg.OutputRetention,
		RebootsMost: cfg.RebootsMost, RebootsWithin: cfg.RebootsWithin,
		GPUMode: gpu.Mode(cfg.GPU.Mode), GPUProgram: cfg.GPU.Program, GPULibrary: cfg.GPU.Library, GPUPeriod: cfg.GPU.Period,
		GPUSlowPeriod: cfg.GPU.SlowPeriod, GPUExpected: cfg.GPU.Expected, XIDs: cfg.GPU.XIDs, KernelLog: cfg.GPU.KernelLog,
		Watchdog: watchdog,
		Notify: func(state string) {
			if _, err := daemon.SdNotify(false, state); err != nil {
				log.WarnContext(ctx, "service manager not told", "state", state, "err", err)
			}
		},
	}).Run(ctx)
}

// joinWithin bounds a join by hand.
const joinWithin = 2 * time.Minute

func (a *app) joinCmd() *cobra.Command {
	var bundle string
	cmd := &cobra.Command{
		Use: "join --bundle FILE", Short: "Join the cluster with a bundle; the service does so by itself", Args: between(0, 0),
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := configfile.Load(a.config)
			if err != nil {
				return err
			}
			if bundle == "" {
				bundle = cfg.JoinFile
			}
			b, err := enrol.ReadBundle(bundle)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), joinWithin)
			defer cancel()
			e, err := enrol.Join(ctx, enrol.Config{
				Dir: filepath.Join(cfg.StateDir, "identity"), Server: cfg.Server, Log: slog.New(a.logHandler(cfg.LogLevel)),
			}, b)
			if err != nil {
				return err
			}
			return a.say("joined %s as node %s; now: systemctl restart millwrightd\n", e.TrustDomain(), e.Node())
		},
	}
	cmd.Flags().StringVar(&bundle, "bundle", "", "the join bundle, by default the join_file of the configuration")
	return cmd
}
