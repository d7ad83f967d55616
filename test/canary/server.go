package canary

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Directory returns the place that is all regular files below a directory of
// this machine.
func Directory(name, dir string) Place {
	return Place{name, func(_ context.Context, visit Visit) error {
		return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			switch {
			case errors.Is(err, fs.ErrNotExist):
				return nil // it went meanwhile
			case err != nil:
				return fmt.Errorf("walk %s: %w", path, err)
			case !d.Type().IsRegular():
				return nil
			}
			return visitPath(path, path, visit)
		})
	}}
}

// File returns the place that is one file of this machine.
func File(name, path string) Place {
	return Place{name, func(_ context.Context, visit Visit) error {
		if _, err := os.Lstat(path); err != nil {
			return err
		}
		return visitPath(path, path, visit)
	}}
}

// Answer returns the place that is a text which ask gets, such as an answer of
// the API.
func Answer(name string, ask func(context.Context) (string, error)) Place {
	return Place{name, func(ctx context.Context, visit Visit) error {
		text, err := ask(ctx)
		if err != nil {
			return err
		}
		return visit(name, strings.NewReader(text))
	}}
}

// Process returns the place that is the arguments and the environment of one
// process of this machine.
func Process(name string, pid int) Place {
	return Place{name, func(_ context.Context, visit Visit) error {
		for _, what := range []string{"cmdline", "environ"} {
			path := filepath.Join("/proc", fmt.Sprint(pid), what)
			if err := visitPath(path, path, visit); err != nil {
				return err
			}
		}
		return nil
	}}
}
