package local_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/gpuaas/millwright/agent/internal/local"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

type node struct {
	mu       sync.Mutex
	resolved []string
	limit    int32
}

func (n *node) Status(context.Context) (*agentv1.GetStatusResponse, error) {
	return &agentv1.GetStatusResponse{Node: "gpu-001"}, nil
}

func (n *node) Journal(_ context.Context, r *agentv1.ListJournalRequest) (*agentv1.ListJournalResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.limit = r.GetLimit()
	if r.GetTaskId() == "missing" {
		return nil, fmt.Errorf("task missing: %w", local.ErrNotFound)
	}
	return &agentv1.ListJournalResponse{Tasks: []*agentv1.JournalTask{{Kind: "storage.mount"}}}, nil
}

func (n *node) Resolve(_ context.Context, r *agentv1.ResolveTaskRequest) (taskv1.TaskState, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch r.GetTaskId() {
	case "missing":
		return 0, local.ErrNotFound
	case "running":
		return 0, local.ErrNotHeld
	}
	n.resolved = append(n.resolved, fmt.Sprintf("%s %v: %s", r.GetTaskId(), r.GetAs(), r.GetReason()))
	return taskv1.TaskState_TASK_STATE_ABANDONED, nil
}

func (n *node) Export(_ context.Context, emit func(*agentv1.JournalLine) error) error {
	for seq := range uint64(3) {
		if err := emit(&agentv1.JournalLine{Line: &agentv1.JournalLine_Frame{Frame: &agentv1.JournalFrame{Seq: seq + 1, Bytes: make([]byte, 200<<10)}}}); err != nil {
			return err
		}
	}
	return nil
}

// start serves in a directory that others may reach, and returns it.
func start(t *testing.T, n local.Node) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "run")
	serve(t, dir, n)
	return dir
}

func serve(t *testing.T, dir string, n local.Node) (stop func()) {
	t.Helper()
	s := local.New(local.Config{Node: n, RunDir: dir, Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := s.Run(ctx); err != nil {
			t.Errorf("Run() = %v, want nil", err)
		}
	})
	stop = func() { cancel(); wg.Wait() }
	t.Cleanup(stop)
	deadline := time.After(10 * time.Second)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		c, err := new(net.Dialer).DialContext(t.Context(), "unix", filepath.Join(dir, local.SocketName))
		if err == nil {
			_ = c.Close()
			return stop
		}
		select {
		case <-deadline:
			t.Fatalf("the socket does not answer: %v", err)
		case <-tick.C:
		}
	}
}

func dial(t *testing.T, dir string) agentv1.LocalServiceClient {
	t.Helper()
	c, stop, err := local.Dial(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stop() })
	return c
}

// dialAs connects as another user: the thread that connects gives up its user
// id, and ends with the test's goroutine.
func dialAs(t *testing.T, dir string, uid int) agentv1.LocalServiceClient {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("this test connects as another user, which takes root")
	}
	conn, err := grpc.NewClient("passthrough:///agent", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			var c net.Conn
			var err error
			var wg sync.WaitGroup
			wg.Go(func() {
				runtime.LockOSThread() // and never unlocked: the thread is spoilt
				c, err = connectAs(filepath.Join(dir, local.SocketName), uid)
			})
			wg.Wait()
			return c, err
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return agentv1.NewLocalServiceClient(conn)
}

func connectAs(path string, uid int) (net.Conn, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), path)
	defer file.Close()
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); e != 0 {
		return nil, e
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return nil, err
	}
	return net.FileConn(file)
}

func TestStatusAndJournal(t *testing.T) {
	n := &node{}
	c := dial(t, start(t, n))
	st, err := c.GetStatus(t.Context(), &agentv1.GetStatusRequest{})
	if err != nil || st.GetNode() != "gpu-001" {
		t.Fatalf("GetStatus() = %v, %v; want gpu-001", st, err)
	}
	j, err := c.ListJournal(t.Context(), &agentv1.ListJournalRequest{})
	if err != nil || len(j.GetTasks()) != 1 || n.limit != 100 {
		t.Fatalf("ListJournal() = %v, %v with limit %d; want one task and the limit 100", j, err, n.limit)
	}
	for _, tc := range []struct {
		r    *agentv1.ListJournalRequest
		want codes.Code
	}{
		{&agentv1.ListJournalRequest{Limit: -1}, codes.InvalidArgument},
		{&agentv1.ListJournalRequest{Limit: 1001}, codes.InvalidArgument},
		{&agentv1.ListJournalRequest{Limit: 1000}, codes.OK},
		{&agentv1.ListJournalRequest{TaskId: "missing"}, codes.NotFound},
	} {
		if _, err := c.ListJournal(t.Context(), tc.r); status.Code(err) != tc.want {
			t.Errorf("ListJournal(%v) = %v, want %v", tc.r, err, tc.want)
		}
	}
}

func TestResolve(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("this test resolves a task, which takes root")
	}
	n := &node{}
	c := dial(t, start(t, n))
	for _, tc := range []struct {
		name string
		r    *agentv1.ResolveTaskRequest
		want codes.Code
		says string
	}{
		{"accept", &agentv1.ResolveTaskRequest{TaskId: "t1", As: taskv1.ResolveAs_RESOLVE_AS_ACCEPT, Reason: "seen"}, codes.OK, ""},
		{"abandon", &agentv1.ResolveTaskRequest{TaskId: "t2", As: taskv1.ResolveAs_RESOLVE_AS_ABANDON, Reason: "gone"}, codes.OK, ""},
		{"undo", &agentv1.ResolveTaskRequest{TaskId: "t3", As: taskv1.ResolveAs_RESOLVE_AS_UNDO, Reason: "x"}, codes.OK, ""},
		{"no task", &agentv1.ResolveTaskRequest{As: taskv1.ResolveAs_RESOLVE_AS_ACCEPT, Reason: "x"}, codes.InvalidArgument, "task_id: missing"},
		{"no reason", &agentv1.ResolveTaskRequest{TaskId: "t4", As: taskv1.ResolveAs_RESOLVE_AS_ACCEPT, Reason: " "}, codes.InvalidArgument, "reason:"},
		{"long reason", &agentv1.ResolveTaskRequest{TaskId: "t5", As: taskv1.ResolveAs_RESOLVE_AS_ACCEPT, Reason: strings.Repeat("x", 1025)}, codes.InvalidArgument, "reason:"},
		{"unknown task", &agentv1.ResolveTaskRequest{TaskId: "missing", As: taskv1.ResolveAs_RESOLVE_AS_ACCEPT, Reason: "x"}, codes.NotFound, "missing"},
		{"not held", &agentv1.ResolveTaskRequest{TaskId: "running", As: taskv1.ResolveAs_RESOLVE_AS_ACCEPT, Reason: "x"}, codes.FailedPrecondition, "cannot be settled so"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := c.ResolveTask(t.Context(), tc.r)
			if status.Code(err) != tc.want || err != nil && !strings.Contains(err.Error(), tc.says) {
				t.Errorf("ResolveTask() = %v, want %v that says %q", err, tc.want, tc.says)
			}
		})
	}
	want := []string{"t1 RESOLVE_AS_ACCEPT: seen", "t2 RESOLVE_AS_ABANDON: gone", "t3 RESOLVE_AS_UNDO: x"}
	if got := fmt.Sprint(n.resolved); got != fmt.Sprint(want) {
		t.Errorf("resolved = %v, want %v", got, want)
	}
}

func TestOnlyRootResolves(t *testing.T) {
	n := &node{}
	dir := start(t, n)
	c := dialAs(t, dir, 65534)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	// The mode of the directory keeps others out.
	if _, err := c.GetStatus(ctx, &agentv1.GetStatusRequest{}); !strings.Contains(fmt.Sprint(err), "permission denied") {
		t.Errorf("GetStatus() of a stranger = %v, want permission denied", err)
	}
	// Who may connect, as a member of the group may, can read and not change.
	for p := dir; p != os.TempDir() && p != "/"; p = filepath.Dir(p) {
		if err := os.Chmod(p, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(dir, local.SocketName), 0o666); err != nil {
		t.Fatal(err)
	}
	c = dialAs(t, dir, 65534)
	if _, err := c.GetStatus(ctx, &agentv1.GetStatusRequest{}); err != nil {
		t.Errorf("GetStatus() of a member = %v, want nil", err)
	}
	if _, err := c.ListGpus(ctx, &agentv1.ListGpusRequest{}); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "it went away") {
		t.Errorf("ListGpus() of a member = %v, want Unavailable", err)
	}
	_, err := c.ResolveTask(ctx, &agentv1.ResolveTaskRequest{TaskId: "t1", As: taskv1.ResolveAs_RESOLVE_AS_ACCEPT, Reason: "x"})
	if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "65534") {
		t.Errorf("ResolveTask() of a member = %v, want PermissionDenied that names the uid", err)
	}
	if len(n.resolved) != 0 {
		t.Errorf("resolved = %v, want nothing", n.resolved)
	}
}

func TestModes(t *testing.T) {
	dir := start(t, &node{})
	for path, want := range map[string]os.FileMode{dir: 0o750, filepath.Join(dir, local.SocketName): 0o660} {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := info.Mode().Perm(); got != want {
			t.Errorf("mode of %s = %v, want %v", path, got, want)
		}
	}
}

func TestReplacesTheSocketOfADeadAgent(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, local.SocketName), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		stop := serve(t, dir, &node{})
		if _, err := dial(t, dir).GetStatus(t.Context(), &agentv1.GetStatusRequest{}); err != nil {
			t.Errorf("GetStatus() = %v, want nil", err)
		}
		stop()
	}
}

func TestSecondAgentIsKeptOut(t *testing.T) {
	dir := start(t, &node{})
	s := local.New(local.Config{Node: &node{}, RunDir: dir, Logger: slog.New(slog.DiscardHandler)})
	if err := s.Run(t.Context()); !errors.Is(err, local.ErrRunning) {
		t.Errorf("Run() = %v, want ErrRunning", err)
	}
	if _, err := dial(t, dir).GetStatus(t.Context(), &agentv1.GetStatusRequest{}); err != nil {
		t.Errorf("GetStatus() of the first = %v, want nil", err)
	}
}

func TestNobodyListens(t *testing.T) {
	_, err := dial(t, t.TempDir()).GetStatus(t.Context(), &agentv1.GetStatusRequest{})
	if status.Code(err) != codes.Unavailable {
		t.Errorf("GetStatus() = %v, want Unavailable", err)
	}
}

func TestExport(t *testing.T) {
	dir := start(t, &node{})
	stream, err := dial(t, dir).ExportJournal(t.Context(), &agentv1.ExportJournalRequest{})
	var seqs []uint64
	for err == nil {
		var piece *agentv1.ExportJournalResponse
		if piece, err = stream.Recv(); err == nil {
			for _, l := range piece.GetLines() {
				seqs = append(seqs, l.GetFrame().GetSeq())
			}
		}
	}
	if !errors.Is(err, io.EOF) || !slices.Equal(seqs, []uint64{1, 2, 3}) {
		t.Errorf("ExportJournal() = frames %v, %v; want 1 to 3", seqs, err)
	}
	stream, err = dialAs(t, dir, 65534).ExportJournal(t.Context(), &agentv1.ExportJournalRequest{})
	if err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.PermissionDenied && status.Code(err) != codes.Unavailable {
		t.Errorf("ExportJournal() by another user = %v, want PermissionDenied", err)
	}
}

func (*node) GPUs(context.Context) (*agentv1.ListGpusResponse, error) {
	return nil, errors.New("it went away")
}

func (*node) ResetClock(context.Context) (before, now time.Time, err error) {
	return time.Unix(2000, 0), time.Unix(1000, 0), nil
}
