package files

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// CreateExclusive makes the file at path with data in it, whole and durable. Of
// any number of racers one succeeds; the others get fs.ErrExist.
func CreateExclusive(path string, data []byte, mode fs.FileMode) error {
	return inParent("create", path, func(dir int, base string) error {
		temp := "." + base + "." + rand.Text()
		if err := writeNew(dir, temp, data, mode); err != nil {
			_ = unix.Unlinkat(dir, temp, 0) // the error that matters is told
			return err
		}
		// A link, unlike a rename, does not replace what is there.
		err := unix.Linkat(dir, temp, dir, base, 0)
		_ = unix.Unlinkat(dir, temp, 0) // a leftover does no harm
		if err != nil {
			return err
		}
		return unix.Fsync(dir)
	})
}

// Replace replaces the file at path, atomically and durably, whoever else does so
// at the same time, in this process or another.
func Replace(path string, data []byte, mode fs.FileMode) error {
	return inParent("replace", path, func(dir int, base string) error {
		temp := "." + base + "." + rand.Text()
		err := writeNew(dir, temp, data, mode)
		if err == nil {
			err = unix.Renameat(dir, temp, dir, base)
		}
		if err != nil {
			_ = unix.Unlinkat(dir, temp, 0) // the error that matters is told
			return err
		}
		return unix.Fsync(dir)
	})
}

// Fill writes data over the beginning of the file at path, cuts it there and
// syncs it. Room that was allocated for the file is used. It is not atomic.
func Fill(path string, data []byte, mode fs.FileMode) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|unix.O_NOFOLLOW, mode)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(data, 0)
	if err == nil {
		err = f.Truncate(int64(len(data)))
	}
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// Rename renames a file within its directory, durably.
func Rename(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(to))
}

// SyncDir makes the entries of a directory durable.
func SyncDir(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("sync directory %s: %w", path, err)
	}
	return nil
}

// MakeDirs makes a directory and those above it that are missing, durably.
func MakeDirs(path string, mode fs.FileMode) error {
	err := inParent("make directory", path, func(dir int, base string) error { return makeDir(dir, base, mode) })
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := MakeDirs(filepath.Dir(path), mode); err != nil {
		return err
	}
	return inParent("make directory", path, func(dir int, base string) error { return makeDir(dir, base, mode) })
}
