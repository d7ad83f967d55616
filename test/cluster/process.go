package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// TrustDomain is the trust domain of every cluster.
const TrustDomain = trustDomain

// MillctlCommand is millctl as the operator runs it, not yet started.
func (c *Cluster) MillctlCommand(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, c.binary("millctl", Release), args...)
	cmd.Env = append(os.Environ(), "MILLWRIGHT_HOME="+c.bed.HomeDir(), "NO_COLOR=1")
	return cmd
}

// ServerPID returns the id of the server's process.
func (c *Cluster) ServerPID() (int, error) {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return 0, err
	}
	want := strings.Join([]string{c.binary("millwright-server", c.cfg.Server), "run", "--config", c.serverConfig(), ""}, "\x00")
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && string(b) == want {
			return strconv.Atoi(filepath.Base(filepath.Dir(f)))
		}
	}
	return 0, errors.New("the server does not run")
}

// MemoryOf reads a field of a process' memory, such as VmRSS or VmHWM, in bytes
// from the content of its /proc/PID/status.
func MemoryOf(status []byte, field string) (uint64, error) {
	for line := range bytes.Lines(status) {
		if rest, ok := bytes.CutPrefix(line, []byte(field+":")); ok {
			kib, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(string(rest)), " kB"), 10, 64)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("no %s in %q", field, status)
}
