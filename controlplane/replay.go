package controlplane

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/gpuaas/millwright/controlplane/internal/replay"
	"github.com/gpuaas/millwright/controlplane/internal/store/boltstore"
)

// Replay reads the event log of the store in cfg.StateDir into an empty one and
// returns how the rows of the two differ, a line for each; none when all that is
// stored of tasks and nodes follows from the log. No server may run there. The
// empty store lies in a directory below dir meanwhile.
func Replay(ctx context.Context, cfg Config, dir string) (differ []string, err error) {
	db, err := boltstore.Open(cfg.storePath())
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	_, root, err := readCluster(ctx, db)
	if err != nil {
		return nil, fmt.Errorf("read cluster from %s: %w", cfg.storePath(), err)
	}
	tmp, err := os.MkdirTemp(dir, "millwright-replay-")
	if err != nil {
		return nil, fmt.Errorf("make directory for an empty store: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	empty, err := boltstore.Create(filepath.Join(tmp, "store.db"))
	if err != nil {
		return nil, err
	}
	writing, stop := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { _ = empty.Run(writing) }) // ends with its context, and without an error
	defer func() {
		stop()
		wg.Wait()
		err = errors.Join(err, empty.Close())
	}()
	return replay.Rows(ctx, db, empty, projection(cfg, root))
}
