package testbed

import (
	"bufio"
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
)

// keeperCgroup holds the processes that keep nodes running.
const keeperCgroup = "keepers"

// cgroupMounts returns where the machine mounts cgroup hierarchies: one place
// under version 2, one for each controller under version 1.
func cgroupMounts() ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	var mounts []string
	scanner := bufio.NewScanner(f)
	for scanner.Scan() {
		before, after, _ := strings.Cut(scanner.Text(), " - ")
		fields := strings.Fields(before)
		if len(fields) < 5 || !strings.HasPrefix(after, "cgroup") || !strings.HasPrefix(fields[4], "/sys/fs/cgroup") {
			continue
		}
		mounts = append(mounts, fields[4])
	}
	if err := scanner.Err(); err != nil {
		return nil, err
	}
	if len(mounts) == 0 {
		return nil, errors.New("no cgroup hierarchy is mounted under /sys/fs/cgroup; mount one")
	}
	return mounts, nil
}

func cgroupRoot(mount, testbed string) string {
	return filepath.Join(mount, "millwright-testbed-"+testbed)
}

// cgroupPaths returns the folders of one cgroup of the testbed, one in each
// hierarchy. An empty name is the testbed's own.
func (t *Testbed) cgroupPaths(name string) []string {
	var paths []string
	for _, mount := range t.cgroups {
		paths = append(paths, filepath.Join(cgroupRoot(mount, t.state.Name), name))
	}
	return paths
}

// makeCgroup makes the cgroup in every hierarchy, with those above it.
func (t *Testbed) makeCgroup(name string) error {
	for _, mount := range t.cgroups {
		parent := mount
		rel := filepath.Join(filepath.Base(cgroupRoot(mount, t.state.Name)), name)
		for part := range strings.SplitSeq(rel, "/") {
			child := filepath.Join(parent, part)
			if err := makeOneCgroup(parent, child); err != nil {
				return fmt.Errorf("cgroup %s: %w", child, err)
			}
			parent = child
		}
	}
	return nil
}

func makeOneCgroup(parent, child string) error {
	if err := os.Mkdir(child, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	// Version 1 lets no process into a cpuset that has no processors.
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		data, err := os.ReadFile(filepath.Join(parent, file))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(child, file), data, 0o644); err != nil {
			return err
		}
	}
	// Version 2 gives a child the controllers that its parent passes on.
	available, err := os.ReadFile(filepath.Join(parent, "cgroup.controllers"))
	if err != nil {
		return ignoreNotExist(err)
	}
	for controller := range strings.FieldsSeq(string(available)) {
		if err := os.WriteFile(filepath.Join(parent, "cgroup.subtree_control"), []byte("+"+controller), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// cgroupProcs returns the processes under the folders, each once.
func cgroupProcs(paths []string) ([]int, error) {
	seen := map[int]bool{}
	var pids []int
	for _, path := range paths {
		err := filepath.WalkDir(path, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return ignoreNotExist(err)
			}
			if d.IsDir() || d.Name() != "cgroup.procs" {
				return nil
			}
			data, err := os.ReadFile(path)
			if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ENODEV) {
				return err
			}
			for field := range strings.FieldsSeq(string(data)) {
				pid, err := strconv.Atoi(field)
				if err != nil {
					return err
				}
				if !seen[pid] {
					seen[pid] = true
					pids = append(pids, pid)
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return pids, nil
}

// killCgroup kills until no process is left, and waits until each has ended:
// the kernel takes one out of its cgroup a little before that.
func killCgroup(ctx context.Context, paths []string) error {
	started := map[int]string{}
	return poll(ctx, 10*time.Millisecond, func() (bool, error) {
		pids, err := cgroupProcs(paths)
		if err != nil {
			return false, err
		}
		for _, pid := range pids {
			started[pid] = processStart(pid)
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return false, fmt.Errorf("kill %d: %w", pid, err)
			}
		}
		for pid, start := range started {
			if start == "" || processStart(pid) != start {
				delete(started, pid)
			}
		}
		return len(pids) == 0 && len(started) == 0, nil
	})
}

// removeCgroup removes the folder and those in it. The kernel needs a moment
// after the last process of one has ended.
func removeCgroup(ctx context.Context, path string) error {
	return poll(ctx, 10*time.Millisecond, func() (bool, error) {
		var dirs []string
		err := filepath.WalkDir(path, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return ignoreNotExist(err)
			}
			if d.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		if err != nil {
			return false, err
		}
		for i := len(dirs) - 1; i >= 0; i-- {
			err := syscall.Rmdir(dirs[i])
			if errors.Is(err, syscall.EBUSY) {
				return false, nil
			}
			if err != nil && !errors.Is(err, syscall.ENOENT) {
				return false, fmt.Errorf("remove %s: %w", dirs[i], err)
			}
		}
		return true, nil
	})
}

func ignoreNotExist(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
