package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"

	"github.com/gpuaas/millwright/controlplane/internal/export"
	"github.com/gpuaas/millwright/controlplane/internal/store/boltstore"
)

// copyTries is how often a store is copied that is written meanwhile.
const copyTries = 5

// Export gives the whole event log of cfg.StateDir to emit, and the rows that
// follow from it, in the order that [auditv1.LogLine] says. It asks the server
// that runs there; when none does it reads a copy of the store, which lies in
// the directory for temporary files meanwhile. The store itself is neither
// locked nor changed. An error of emit ends it and is returned as it is.
func Export(ctx context.Context, cfg Config, emit func(*auditv1.LogLine) error) error {
	err := export.Ask(ctx, cfg.StateDir, emit)
	if !errors.Is(err, export.ErrNoServer) {
		return err
	}
	return exportCopy(ctx, cfg.storePath(), emit)
}

func exportCopy(ctx context.Context, path string, emit func(*auditv1.LogLine) error) (err error) {
	dir, err := os.MkdirTemp("", "millwright-export-")
	if err != nil {
		return fmt.Errorf("make directory for a copy of %s: %w", path, err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	copied := filepath.Join(dir, "store.db")
	if err := copySettled(path, copied); err != nil {
		return err
	}
	db, err := boltstore.Open(copied)
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return errors.Join(export.All(ctx, db, emit), db.Close())
}

// copySettled copies a file, again when it was written meanwhile: every commit
// changes one of its first two pages.
func copySettled(from, to string) error {
	for range copyTries {
		before, err := firstPages(from)
		if err != nil {
			return err
		}
		if err := copyFile(from, to); err != nil {
			return err
		}
		after, err := firstPages(from)
		if err != nil {
			return err
		}
		if bytes.Equal(before, after) {
			return nil
		}
	}
	return fmt.Errorf("%s is being written by a server that does not answer", from)
}

func firstPages(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read store: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 2*int64(os.Getpagesize())))
	if err != nil {
		return nil, fmt.Errorf("read store: %w", err)
	}
	return b, nil
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return fmt.Errorf("copy store: %w", err)
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("copy store: %w", err)
	}
	_, err = io.Copy(out, in)
	if err := errors.Join(err, out.Close()); err != nil {
		return fmt.Errorf("copy store: %w", err)
	}
	return nil
}
