package agent_test

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpuaas/millwright/agent"
	"github.com/gpuaas/millwright/agent/internal/local"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// notes are what the service manager was told.
type notes struct {
	mu  sync.Mutex
	all []string
	now chan string
}

func (n *notes) notify(state string) {
	n.mu.Lock()
	n.all = append(n.all, state)
	n.mu.Unlock()
	select {
	case n.now <- state:
	default:
	}
}

func (n *notes) has(state string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Contains(n.all, state)
}

// start runs an agent in dir until stop is called, and waits until it is ready.
func start(t *testing.T, dir string, n *notes) (c agentv1.LocalServiceClient, stop func()) {
	t.Helper()
	n.now = make(chan string, 100)
	a := agent.New(agent.Config{
		StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"),
		PolicyFile: filepath.Join(dir, "policy.yaml"), JoinFile: filepath.Join(dir, "join.json"),
		Executable: "/usr/bin/millwrightd", Version: "v1", Registry: all.Registry(), Logger: slog.New(slog.DiscardHandler),
		Hosts: fakehost.New().Hosts(nil), Notify: n.notify, Watchdog: 30 * time.Millisecond,
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := a.Run(ctx); err != nil {
			t.Errorf("Run() = %v, want nil", err)
		}
	})
	stop = func() { cancel(); wg.Wait() }
	t.Cleanup(stop)
	deadline := time.After(10 * time.Second)
	for ready := false; !ready; {
		select {
		case s := <-n.now:
			ready = s == "READY=1"
		case <-deadline:
			t.Fatal("the agent is not ready")
		}
	}
	c, closeConn, err := local.Dial(filepath.Join(dir, "run"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = closeConn() })
	return c, stop
}

// eventually waits until the agent says of itself what is wanted.
func eventually(t *testing.T, c agentv1.LocalServiceClient, want string) {
	t.Helper()
	deadline := time.After(10 * time.Second)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		st, err := c.GetStatus(t.Context(), &agentv1.GetStatusRequest{})
		if err == nil && strings.Contains(st.GetConnectionError(), want) {
			return
		}
		select {
		case <-deadline:
			t.Fatalf("GetStatus() = %v, %v; want it to say %q", st, err, want)
		case <-tick.C:
		}
	}
}

// TestWithoutIdentity starts an agent that has neither identity nor bundle: it
// lives, is ready, says the way out, and takes a bundle that comes later.
func TestWithoutIdentity(t *testing.T) {
	dir, n := t.TempDir(), &notes{}
	c, stop := start(t, dir, n)
	eventually(t, c, "millctl node token create")
	if _, err := c.ListJournal(t.Context(), &agentv1.ListJournalRequest{}); err == nil || !strings.Contains(err.Error(), "there is no journal yet") {
		t.Errorf("ListJournal() = %v, want that there is no journal", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "join.json"), []byte(`{"version": 1, "sever": "x"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, c, `unknown field "sever"`)
	deadline := time.After(10 * time.Second)
	for !n.has("WATCHDOG=1") {
		select {
		case <-n.now:
		case <-deadline:
			t.Fatal("no sign of life was given")
		}
	}
	stop()
	if !n.has("STOPPING=1") {
		t.Error("the service manager was not told that the agent stops")
	}
}

func TestSecondAgent(t *testing.T) {
	dir := t.TempDir()
	start(t, dir, &notes{})
	err := agent.New(agent.Config{
		StateDir: filepath.Join(dir, "state2"), RunDir: filepath.Join(dir, "run"), JoinFile: filepath.Join(dir, "join.json"),
		Executable: "/usr/bin/millwrightd", Registry: all.Registry(), Logger: slog.New(slog.DiscardHandler), Hosts: fakehost.New().Hosts(nil),
	}).Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "another millwrightd is running") {
		t.Errorf("Run() of a second agent = %v, want that another is running", err)
	}
}
