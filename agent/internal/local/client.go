package local

import (
	"context"
	"fmt"
	"net"
	"path/filepath"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

// Dial returns a client of the agent whose run directory is runDir. No
// connection is made before the first call. The caller closes it.
func Dial(runDir string) (agentv1.LocalServiceClient, func() error, error) {
	path := filepath.Join(runDir, SocketName)
	conn, err := grpc.NewClient("passthrough:///"+path,
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the kernel vouches for both ends
		grpc.WithContextDialer(func(ctx context.Context, path string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}))
	if err != nil {
		return nil, nil, fmt.Errorf("dial %s: %w", path, err)
	}
	return agentv1.NewLocalServiceClient(conn), conn.Close, nil
}

// Reach returns the error for which the agent's socket cannot be used, such as
// fs.ErrNotExist, fs.ErrPermission or ECONNREFUSED, or nil.
func Reach(ctx context.Context, runDir string) error {
	c, err := new(net.Dialer).DialContext(ctx, "unix", filepath.Join(runDir, SocketName))
	if err != nil {
		return fmt.Errorf("reach the agent: %w", err)
	}
	return c.Close()
}
