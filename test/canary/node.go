package canary

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpuaas/millwright/test/testbed"
)

// Node returns the places of a node: its files that were made or changed since a
// time, also those in memory; the arguments and environments of its processes;
// the properties of all its units, as systemd shows them on the bus; and its
// journal with every field.
func Node(n *testbed.Node, since time.Time) []Place {
	return []Place{
		files(n, since),
		processes(n),
		Command(n, "properties of units", "systemctl", "show", "--all", "*"),
		Command(n, "properties of systemd", "systemctl", "show"),
		Command(n, "journal", "journalctl", "--output=export", "--all", "--no-pager"),
	}
}

// Command returns the place that is the output of a command in a node. One that
// exits with another code than 0 is read too.
func Command(n *testbed.Node, name string, argv ...string) Place {
	return Place{name + " of " + n.Name(), func(ctx context.Context, visit Visit) error {
		res, err := n.Exec(ctx, argv...)
		var exited *testbed.ExitError
		if err != nil && !errors.As(err, &exited) {
			return err
		}
		return visit(strings.Join(argv, " "), bytes.NewReader(append(res.Stdout, res.Stderr...)))
	}}
}

// root is the node's root directory, seen from outside it: what searches leaves
// no trace in the node.
func root(n *testbed.Node) (string, error) {
	pid, err := n.PID()
	if err != nil {
		return "", err
	}
	return filepath.Join("/proc", strconv.Itoa(pid), "root"), nil
}

func files(n *testbed.Node, since time.Time) Place {
	return Place{"files of " + n.Name(), func(_ context.Context, visit Visit) error {
		dir, err := root(n)
		if err != nil {
			return err
		}
		return filepath.WalkDir(dir+"/", func(path string, d fs.DirEntry, err error) error {
			name := strings.TrimPrefix(path, dir)
			switch {
			case errors.Is(err, fs.ErrNotExist):
				return nil // it went meanwhile
			case err != nil:
				return fmt.Errorf("walk %s: %w", name, err)
			case d.IsDir() && (name == "/proc" || name == "/sys"):
				return fs.SkipDir
			case !d.Type().IsRegular():
				return nil
			}
			return visitFile(path, name, since, visit)
		})
	}}
}

func visitFile(path, name string, since time.Time, visit Visit) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it went meanwhile
	}
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("%s: no status", name)
	}
	changed := time.Unix(st.Ctim.Sec, st.Ctim.Nsec)
	if changed.Before(since) && info.ModTime().Before(since) {
		return nil
	}
	return visitPath(path, name, visit)
}

func visitPath(path, name string, visit Visit) error {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
		return nil // it went meanwhile
	}
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // it was only read
	if err := visit(name, f); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

func processes(n *testbed.Node) Place {
	return Place{"processes of " + n.Name(), func(_ context.Context, visit Visit) error {
		dir, err := root(n)
		if err != nil {
			return err
		}
		for _, what := range []string{"cmdline", "environ"} {
			paths, err := filepath.Glob(filepath.Join(dir, "proc/[0-9]*", what))
			if err != nil {
				return err
			}
			for _, p := range paths {
				if err := visitPath(p, strings.TrimPrefix(p, dir), visit); err != nil {
					return err
				}
			}
		}
		return nil
	}}
}
