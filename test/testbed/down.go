package testbed

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// down takes away whatever there is of a testbed, so it needs no more than its
// state, and nothing that it looks for has to exist.
func down(ctx context.Context, s state, log *slog.Logger) error {
	mounts, err := cgroupMounts()
	if err != nil {
		return err
	}
	log.Info("taking the testbed down", "testbed", s.Name)
	var roots, keepers []string
	for _, mount := range mounts {
		root := cgroupRoot(mount, s.Name)
		roots = append(roots, root)
		keepers = append(keepers, filepath.Join(root, keeperCgroup))
	}
	// The keepers go first, or they would start nodes again.
	if err := errors.Join(killCgroup(ctx, keepers), killCgroup(ctx, roots)); err != nil {
		return fmt.Errorf("end the processes of testbed %s: %w", s.Name, err)
	}
	data := filepath.Join(dataRoot, s.Name)
	locks := nspawnLocks(s)
	if err := unmountUnder(ctx, data); err != nil {
		return err
	}
	var errs []error
	for _, name := range s.nodeNames() {
		errs = append(errs, deleteNodeLink(ctx, s, name), removeNspawnFiles(s.machine(name)))
	}
	errs = append(errs, deleteLink(ctx, s.bridge()), deleteLink(ctx, s.deadBridge()))
	for _, lock := range locks {
		errs = append(errs, ignoreNotExist(os.Remove(lock)))
	}
	for _, root := range roots {
		errs = append(errs, removeCgroup(ctx, root))
	}
	if err := errors.Join(append(errs, os.RemoveAll(data))...); err != nil {
		return fmt.Errorf("take down testbed %s: %w", s.Name, err)
	}
	// The state goes last: until then Down can be called again. The folder
	// above goes with the last testbed.
	_ = os.Remove(dataRoot)
	return os.RemoveAll(s.dir())
}

// unmountUnder unmounts everything below dir, the innermost first.
func unmountUnder(ctx context.Context, dir string) error {
	return poll(ctx, 20*time.Millisecond, func() (bool, error) {
		points, err := mountsUnder(dir)
		if err != nil {
			return false, err
		}
		for _, point := range slices.Backward(points) {
			err := syscall.Unmount(point, 0)
			if errors.Is(err, syscall.EBUSY) {
				return false, nil
			}
			if err != nil {
				return false, fmt.Errorf("unmount %s: %w", point, err)
			}
		}
		return len(points) == 0, nil
	})
}

// mountsUnder returns the mount points below dir in the order of the table. No
// path of a testbed has a character that the table escapes.
func mountsUnder(dir string) ([]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	var points []string
	scanner := bufio.NewScanner(f)
	for scanner.Scan() {
		fields := strings.Fields(scanner.Text())
		if len(fields) > 4 && strings.HasPrefix(fields[4], dir+"/") {
			points = append(points, fields[4])
		}
	}
	return points, scanner.Err()
}

// nspawnLocks returns the files by which nspawn locked the nodes' roots, which
// are named by device and inode, so only while the roots are mounted. A killed
// nspawn leaves them.
func nspawnLocks(s state) []string {
	var locks []string
	for _, name := range s.nodeNames() {
		var st syscall.Stat_t
		if err := syscall.Stat(filepath.Join(dataRoot, s.Name, name, "root"), &st); err == nil {
			locks = append(locks, fmt.Sprintf("/run/systemd/nspawn/locks/inode-%d:%d", st.Dev, st.Ino))
		}
	}
	return locks
}

// removeNspawnFiles removes what nspawn leaves in /run for a machine.
func removeNspawnFiles(machine string) error {
	var errs []error
	for _, kind := range []string{"propagate", "unix-export"} {
		errs = append(errs, os.RemoveAll(filepath.Join("/run/systemd/nspawn", kind, machine)))
	}
	return errors.Join(errs...)
}
