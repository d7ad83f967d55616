package nodehost

import (
	"context"
	"fmt"
	"io/fs"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/tasks/host"
)

const (
	resolveTimeout = 6 * time.Second
	dialTimeout    = 3 * time.Second
	// getentNotFound is how getent(1) says that a name has no address.
	getentNotFound = 2
)

// network implements host.Network.
type network struct{ children *child.Runner }

// ResolveHost asks getent(1), in a child with a deadline: mount helpers find
// names by the C library and its switches, which this program does not have.
func (n network) ResolveHost(ctx context.Context, name string) ([]string, error) {
	res, err := n.children.Run(ctx, child.Spec{
		Argv: []string{"/usr/bin/getent", "ahosts", name}, Timeout: resolveTimeout, Key: "getent " + name, MaxOutput: 16 << 10,
	})
	if err != nil {
		return nil, fmt.Errorf("resolve host name %s: %w", name, err)
	}
	if res.ExitCode == getentNotFound {
		return nil, fmt.Errorf("resolve host name %s: %w", name, fs.ErrNotExist)
	}
	var out []string
	for line := range strings.Lines(string(res.Stdout)) {
		if f := strings.Fields(line); len(f) > 0 {
			out = append(out, f[0])
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("resolve host name %s: getent exited with %d", name, res.ExitCode)
	}
	return out, nil
}

// DialPort implements host.Network.
func (network) DialPort(ctx context.Context, address string, port uint32) error {
	dialer := net.Dialer{Timeout: dialTimeout}
	conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(address, strconv.FormatUint(uint64(port), 10)))
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("reach port %d of %s: %w", port, address, err)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", host.ErrNoAnswer, err)
	}
	return conn.Close()
}
