package nodehost

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/gpuaas/millwright/agent/internal/host/gpus"
	"github.com/gpuaas/millwright/agent/internal/host/systemd"
)

// longestChange is longer than any change of the GPUs may take.
const longestChange = 20 * time.Minute

// AwaitGPUChange waits until no change of the GPUs runs that an earlier life of the
// agent with the state directory began, and says when one does not end.
func AwaitGPUChange(ctx context.Context, stateDir string, log *slog.Logger) error {
	dir := filepath.Join(stateDir, "gpus")
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil // none was ever made
	}
	ctx, done := context.WithTimeout(ctx, longestChange)
	defer done()
	sd := systemd.New(systemd.Config{Logger: log})
	defer sd.Close()
	return gpus.InUnits(sd, dir).Idle(ctx)
}
