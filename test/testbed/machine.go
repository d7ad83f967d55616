package testbed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// machinePackages are what the machine itself needs, with a program of each.
var machinePackages = []struct{ program, name string }{
	{"mmdebstrap", "mmdebstrap"},
	{"systemd-nspawn", "systemd-container"},
	{"ip", "iproute2"},
	{"nsenter", "util-linux"},
	{"journalctl", "systemd"},
}

// Each node's systemd watches files, and all nodes count as one user: with the
// kernel's 128 instances the units of a tenth node fail.
const (
	inotifyFile = "/proc/sys/fs/inotify/max_user_instances"
	inotifyMost = 8192
)

// allowWatches raises the machine's limit of inotify instances.
func allowWatches(log *slog.Logger) error {
	b, err := os.ReadFile(inotifyFile)
	if err != nil {
		return err
	}
	if have, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && have >= inotifyMost {
		return nil
	}
	log.Info("raising a limit of this machine", "file", inotifyFile, "from", strings.TrimSpace(string(b)), "to", inotifyMost)
	return os.WriteFile(inotifyFile, []byte(strconv.Itoa(inotifyMost)), 0o644)
}

// prepareMachine installs what is missing.
func prepareMachine(ctx context.Context, log *slog.Logger) error {
	if os.Geteuid() != 0 {
		return errors.New("the testbed boots nodes and makes networks: run it as root")
	}
	if err := allowWatches(log); err != nil {
		return err
	}
	var missing []string
	for _, p := range machinePackages {
		if _, err := exec.LookPath(p.program); err != nil {
			missing = append(missing, p.name)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	unlock, err := lockFile(ctx, "/run/millwright-testbed-install.lock")
	if err != nil {
		return err
	}
	defer unlock()
	log.Info("installing Debian packages on this machine", "packages", strings.Join(missing, " "))
	if _, err := run(ctx, "apt-get", "-q", "update"); err != nil {
		return err
	}
	_, err = run(ctx, "env", append([]string{"DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-y",
		"--no-install-recommends", "install"}, missing...)...)
	return err
}

// run runs a program of the machine and returns what it wrote to its standard
// output; the error holds the end of what it wrote to its standard error.
func run(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if ctx.Err() != nil {
		return stdout.String(), fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), context.Cause(ctx))
	}
	if err != nil {
		return stdout.String(), fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, lastBytes(stderr.Bytes(), 2000))
	}
	return stdout.String(), nil
}

func lastBytes(b []byte, limit int) []byte {
	b = bytes.TrimSpace(b)
	return b[max(0, len(b)-limit):]
}

// poll calls done every interval until it returns true or an error, or ctx
// ends.
func poll(ctx context.Context, interval time.Duration, done func() (bool, error)) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		ok, err := done()
		if ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
		}
	}
}
