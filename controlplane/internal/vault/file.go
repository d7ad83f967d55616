package vault

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// unfinished is the name of a file that is being written.
const unfinished = ".new-secret-*"

// sweep removes what a crash has left of files that were being written: a secret
// that is removed later would live on there, and the key itself. A death in between
// leaves the rest to the next start.
func sweep(dirs ...string) error {
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) { // the key's may be another's
			return fmt.Errorf("look for unfinished secrets: %w", err)
		}
		for _, e := range entries {
			if ok, _ := filepath.Match(unfinished, e.Name()); !ok { // the pattern is good
				continue
			}
			if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
				return fmt.Errorf("remove unfinished secret: %w", err)
			}
		}
	}
	return nil
}

// writeNew makes a file that only its owner can read, whole and durable.
func writeNew(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), unfinished) // with mode 0600
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Chmod(fileMode)
	}
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Link(f.Name(), path) // unlike a rename it replaces nothing
	}
	err = errors.Join(err, os.Remove(f.Name()))
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
