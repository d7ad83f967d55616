package export

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// SocketName is the socket's name in the state directory.
const SocketName = "export.sock"

// ErrNoServer is wrapped by [Ask] when no server answers in the directory.
var ErrNoServer = errors.New("no server runs here")

// Server answers on the socket.
type Server struct {
	auditv1.UnimplementedExportServiceServer
	dir    string
	reader store.Reader
}

// New returns a server for the state directory dir that does nothing until
// [Server.Run].
func New(dir string, r store.Reader) *Server { return &Server{dir: dir, reader: r} }

// Run answers until ctx ends and returns nil then. Exports that go on are cut.
// A socket that an earlier server left is replaced: who holds the store is the
// one server.
func (s *Server) Run(ctx context.Context) error {
	l, err := listen(ctx, s.dir)
	if err != nil {
		return err
	}
	srv := grpc.NewServer()
	auditv1.RegisterExportServiceServer(srv, s)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		if err := srv.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			return fmt.Errorf("serve exports: %w", err)
		}
		return nil
	})
	g.Go(func() error {
		<-ctx.Done()
		srv.Stop()
		return nil
	})
	return g.Wait()
}

// ExportLog implements auditv1.ExportServiceServer.
func (s *Server) ExportLog(_ *auditv1.ExportLogRequest, stream grpc.ServerStreamingServer[auditv1.ExportLogResponse]) error {
	piece, size := new(auditv1.ExportLogResponse), 0
	err := All(stream.Context(), s.reader, func(line *auditv1.LogLine) error {
		piece.Lines = append(piece.Lines, line)
		if size += proto.Size(line); size < pageBytes {
			return nil
		}
		full := piece
		piece, size = new(auditv1.ExportLogResponse), 0
		return stream.Send(full)
	})
	if err != nil {
		return status.FromContextError(errors.Join(err, stream.Context().Err())).Err()
	}
	return stream.Send(piece)
}

// Ask gives all lines of the server that runs on the state directory to emit.
// The error wraps [ErrNoServer] when there is none.
func Ask(ctx context.Context, dir string, emit Emit) error {
	conn, err := grpc.NewClient("passthrough:///"+SocketName,
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the directory's mode says who may connect
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return dial(ctx, dir) }))
	if err != nil {
		return fmt.Errorf("dial the server's socket: %w", err)
	}
	defer conn.Close() //nolint:errcheck // all is read
	probe, err := dial(ctx, dir)
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%s: %w", filepath.Join(dir, SocketName), ErrNoServer)
	case err != nil:
		return fmt.Errorf("reach the server: %w", err)
	}
	if err := probe.Close(); err != nil {
		return fmt.Errorf("reach the server: %w", err)
	}
	stream, err := auditv1.NewExportServiceClient(conn).ExportLog(ctx, &auditv1.ExportLogRequest{})
	for err == nil {
		var piece *auditv1.ExportLogResponse
		if piece, err = stream.Recv(); err != nil {
			break
		}
		for _, line := range piece.GetLines() {
			if err := emit(line); err != nil {
				return err
			}
		}
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	if status.Code(err) == codes.Unavailable {
		return fmt.Errorf("the server went away: %w", err)
	}
	return err
}

// within calls fn with a path of the socket by which the kernel finds it
// however long the directory's own path is: a socket's may have 107 bytes.
func within(dir string, fn func(path string) error) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = fn(fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), SocketName))
	return errors.Join(err, d.Close())
}

func listen(ctx context.Context, dir string) (l net.Listener, err error) {
	err = within(dir, func(path string) error {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		l, err = new(net.ListenConfig).Listen(ctx, "unix", path)
		if err != nil {
			return err
		}
		if u, ok := l.(*net.UnixListener); ok {
			u.SetUnlinkOnClose(false) // its path ends with this function
		}
		return os.Chmod(path, 0o600)
	})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", filepath.Join(dir, SocketName), err)
	}
	return l, nil
}

func dial(ctx context.Context, dir string) (c net.Conn, err error) {
	err = within(dir, func(path string) error {
		c, err = new(net.Dialer).DialContext(ctx, "unix", path)
		return err
	})
	return c, err
}
