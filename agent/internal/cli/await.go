package cli

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/millwright/agent"
	"github.com/gpuaas/millwright/agent/internal/configfile"
)

// lookAgain is how often the wait at boot looks.
const lookAgain = 100 * time.Millisecond

// awaitRestoredCmd is what millwright-restored.service runs. It asks the agent
// nothing, and so ends in time whatever the agent does.
func (a *app) awaitRestoredCmd() *cobra.Command {
	var most time.Duration
	cmd := &cobra.Command{
		Use: "await-restored", Short: "Wait at boot until the GPUs have their layouts; millwright-restored.service uses it", Args: between(0, 0), Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := configfile.Load(a.config)
			if err != nil {
				return err
			}
			there, err := awaitFile(cmd.Context(), filepath.Join(cfg.RunDir, agent.RestoredFile), most)
			if err == nil && !there { // the wait has done its work; how the GPUs are is told by the agent
				fmt.Fprintf(a.err, "after %v it is not known that the GPUs have the layouts that Millwright gave them, and what waited for that goes on: see journalctl -u millwrightd\n", most)
			}
			return err
		},
	}
	cmd.Flags().DurationVar(&most, "at-most", 2*time.Minute, "how long to wait")
	return cmd
}

// awaitFile waits until a file is there, and says whether it came in time.
func awaitFile(ctx context.Context, path string, most time.Duration) (bool, error) {
	over := time.NewTimer(most)
	defer over.Stop()
	again := time.NewTicker(lookAgain)
	defer again.Stop()
	for {
		if _, err := os.Stat(path); err == nil {
			return true, nil
		}
		select {
		case <-over.C:
			return false, nil
		case <-ctx.Done():
			return false, context.Cause(ctx)
		case <-again.C:
		}
	}
}
