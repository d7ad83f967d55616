// Package local answers people on the node itself, over a unix socket: how the
// agent is, what its journal holds, and root's word on a held task.
package local

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// SocketName is the socket's name in the run directory.
const SocketName = "agent.sock"

var (
	// ErrNotFound is wrapped by a [Node] for a task that it does not know.
	ErrNotFound = errors.New("not found")
	// ErrNotHeld is wrapped by a [Node] for a task that cannot be resolved as
	// it is.
	ErrNotHeld = errors.New("the task cannot be settled so")
	// ErrRunning is wrapped by the error of [Server.Run] while another agent
	// has the run directory.
	ErrRunning = errors.New("another millwrightd is running")
)

// Node is what the socket tells about.
type Node interface {
	// Status says how the agent is.
	Status(ctx context.Context) (*agentv1.GetStatusResponse, error)
	// Journal returns tasks, the newest first; the limit has been checked and
	// set. It wraps ErrNotFound without the task that was named.
	Journal(ctx context.Context, r *agentv1.ListJournalRequest) (*agentv1.ListJournalResponse, error)
	// Resolve settles a held task by root's word. It wraps ErrNotFound or
	// ErrNotHeld.
	Resolve(ctx context.Context, r *agentv1.ResolveTaskRequest) (taskv1.TaskState, error)
	// Export gives all that the journal holds to emit, whose error it returns
	// as it is. It wraps ErrNotFound while there is no journal.
	Export(ctx context.Context, emit func(*agentv1.JournalLine) error) error
	// GPUs returns the node's GPUs, or why they cannot be asked.
	GPUs(ctx context.Context) (*agentv1.ListGpusResponse, error)
	// ResetClock takes the caller's word that the wall clock is right now. It
	// returns the high water before, and the wall clock.
	ResetClock(ctx context.Context) (before, now time.Time, err error)
}

// Config is what a server needs. All fields without "optional" must be set.
type Config struct {
	Node Node
	// RunDir is where the socket is; it is made 0750 when missing.
	RunDir string
	// Group may read, beside root; optional.
	Group  string
	Logger *slog.Logger
	// Ready is called once the socket answers; optional.
	Ready func()
}

// Server serves the socket.
type Server struct {
	agentv1.UnimplementedLocalServiceServer
	cfg Config
}

// New returns a server that does nothing until Run.
func New(cfg Config) *Server { return &Server{cfg: cfg} }

// Run serves until ctx ends and returns nil then. A socket that a dead agent
// left is replaced; while another agent lives the error wraps [ErrRunning].
func (s *Server) Run(ctx context.Context) error {
	if err := os.MkdirAll(s.cfg.RunDir, 0o750); err != nil {
		return fmt.Errorf("make directory of the local socket: %w", err)
	}
	lock, err := s.lock()
	if err != nil {
		return err
	}
	defer lock.Close()
	l, err := s.listen()
	if err != nil {
		return err
	}
	srv := grpc.NewServer(grpc.Creds(peerCredentials{}), grpc.UnaryInterceptor(s.intercept), grpc.StreamInterceptor(s.interceptStream), grpc.MaxRecvMsgSize(64<<10))
	agentv1.RegisterLocalServiceServer(srv, s)
	if s.cfg.Ready != nil {
		s.cfg.Ready()
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		// It is stopped already when the end comes before it began.
		if err := srv.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			return fmt.Errorf("serve local socket: %w", err)
		}
		return nil
	})
	g.Go(func() error {
		<-ctx.Done()
		// Calls are short; one that hangs must not keep the agent.
		timer := time.AfterFunc(2*time.Second, srv.Stop)
		defer timer.Stop()
		srv.GracefulStop()
		return nil
	})
	return g.Wait()
}

// lock keeps a second agent from taking the socket away from a living one. The
// kernel gives the lock back when the process ends, however it does.
func (s *Server) lock() (*os.File, error) {
	path := filepath.Join(s.cfg.RunDir, "agent.lock")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock of the agent: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = ErrRunning
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return f, nil
}

func (s *Server) listen() (net.Listener, error) {
	path := filepath.Join(s.cfg.RunDir, SocketName)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove old local socket: %w", err)
	}
	// It appears under its name only once its mode is set.
	hidden := path + ".new"
	if err := os.Remove(hidden); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove unfinished local socket: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: hidden, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on local socket: %w", err)
	}
	l.SetUnlinkOnClose(false)
	if err := s.permit(hidden); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	if err := os.Rename(hidden, path); err != nil {
		return nil, errors.Join(fmt.Errorf("put local socket in place: %w", err), l.Close())
	}
	return l, nil
}

// permit lets root and the group connect: the kernel checks the mode of a
// socket when someone connects.
func (s *Server) permit(socket string) error {
	if err := os.Chmod(s.cfg.RunDir, 0o750); err != nil {
		return fmt.Errorf("set mode of the run directory: %w", err)
	}
	if err := os.Chmod(socket, 0o660); err != nil {
		return fmt.Errorf("set mode of the local socket: %w", err)
	}
	if s.cfg.Group == "" {
		return nil
	}
	g, err := user.LookupGroup(s.cfg.Group)
	if err != nil {
		return fmt.Errorf("look up socket_group: %w", err)
	}
	gid, err := strconv.Atoi(g.Gid)
	if err != nil {
		return fmt.Errorf("look up socket_group %s: gid %q: %w", s.cfg.Group, g.Gid, err)
	}
	for _, path := range []string{s.cfg.RunDir, socket} {
		if err := os.Lchown(path, -1, gid); err != nil {
			return fmt.Errorf("give local socket to group %s: %w", s.cfg.Group, err)
		}
	}
	return nil
}

// intercept names the caller and lets only root change anything. It fails
// closed: a call that is not listed is root's.
func (s *Server) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	who, ok := caller(ctx)
	if !ok {
		return nil, status.Error(codes.Unauthenticated, "the caller's credentials are not known")
	}
	switch info.FullMethod {
	case agentv1.LocalService_GetStatus_FullMethodName, agentv1.LocalService_ListJournal_FullMethodName, agentv1.LocalService_ListGpus_FullMethodName:
	default:
		if who.UID != 0 {
			return nil, status.Errorf(codes.PermissionDenied, "only root may do this; you are uid %d", who.UID)
		}
	}
	resp, err := handler(ctx, req)
	if err != nil && status.Code(err) == codes.Internal {
		s.cfg.Logger.WarnContext(ctx, "local call not answered", "method", info.FullMethod, "uid", who.UID, "err", err)
	}
	return resp, err
}

func caller(ctx context.Context) (Peer, bool) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return Peer{}, false
	}
	who, ok := p.AuthInfo.(Peer)
	return who, ok
}
