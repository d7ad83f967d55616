// Package clustertest gives tests a cluster on real nodes.
package clustertest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/testbed"
	"github.com/gpuaas/millwright/test/testbed/testbedtest"
)

// AllowAll is a policy for tests that are not about the policy.
const AllowAll = `version: 1
rules:
  - allow: container.run
  - allow: container.stop
  - allow: gpu.diagnose
  - allow: gpu.reset
  - allow: mig.configure
  - allow: secret.place
  - allow: secret.remove
  - allow: slurm.drain
  - allow: slurm.join
  - allow: slurm.leave
  - allow: slurm.reconfigure
  - allow: slurm.resume
  - allow: storage.mount
  - allow: storage.scratch
  - allow: storage.unmount
  - allow: system.reboot
  - allow: task.resolve
  - allow: system.command
    argv: ["/bin/*", "/usr/bin/*", "/root/*"]
`

// Config says what cluster a test needs.
type Config struct {
	// Nodes is the number of nodes that join.
	Nodes int
	// Storage adds the storage node; it does not join.
	Storage bool
	// Slurm adds the node with Slurm's controller; it does not join.
	Slurm bool
	// Agent and Server are the variants of the programs.
	Agent, Server string
	// Policy is the nodes' policy; empty: AllowAll.
	Policy string
	// Tracer and ServerDir are as in [cluster.Config].
	Tracer    []string
	ServerDir string
	// StateMiB gives each node a disk of its own for its state, of that size.
	StateMiB int
	// Apart leaves the nodes without an agent: the test installs and joins.
	Apart bool
}

// Cluster is a cluster whose failures end the test.
type Cluster struct {
	*cluster.Cluster
	t   testing.TB
	end *expectations
}

// Up makes a testbed, founds a server on it, and lets all nodes join. All of it
// goes away with the test, after the invariants were checked over all that was
// recorded; a test that breaks some on purpose says so with [Cluster.Expect]. It needs root and what `make deb-all` built.
func Up(t testing.TB, cfg Config) *Cluster {
	t.Helper()
	testbedtest.NeedRoot(t)
	root := Root(t)
	if _, err := os.Stat(filepath.Join(root, "dist", cfg.Agent, "millwright-agent.deb")); err != nil {
		t.Fatalf("%v: run make deb-all first", err)
	}
	if cfg.Policy == "" {
		cfg.Policy = AllowAll
	}
	bed := testbedtest.Up(t, testbed.Config{Nodes: cfg.Nodes, Storage: cfg.Storage, Slurm: cfg.Slurm, StateMiB: cfg.StateMiB})
	c := &Cluster{t: t, end: &expectations{gone: map[string]string{}}, Cluster: cluster.New(bed, cluster.Config{
		Root: root, Agent: cfg.Agent, Server: cfg.Server, Policy: cfg.Policy, Log: testbedtest.Log(t),
		Tracer: cfg.Tracer, ServerDir: cfg.ServerDir,
	})}
	t.Cleanup(c.showServerLog)
	c.ok(c.Found(t.Context()))
	var group errgroup.Group
	for _, n := range bed.Nodes() {
		if !n.IsFixture() && !cfg.Apart {
			group.Go(func() error { return c.Join(t.Context(), n) })
		}
	}
	c.ok(group.Wait())
	t.Cleanup(c.checkInvariants)
	return c
}

// With returns the cluster for a subtest, whose failures end that one.
func (c *Cluster) With(t testing.TB) *Cluster { return &Cluster{Cluster: c.Cluster, t: t, end: c.end} }

// Root returns the repository's directory.
func Root(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		if dir == filepath.Dir(dir) {
			t.Fatal("no go.mod above the test's directory")
		}
		dir = filepath.Dir(dir)
	}
}

func (c *Cluster) showServerLog() {
	if !c.t.Failed() {
		return
	}
	log, err := os.ReadFile(c.ServerLog())
	if err == nil {
		c.t.Logf("end of the server's log:\n%s", log[max(0, len(log)-6000):])
	}
}

func (c *Cluster) ok(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

// Machine returns a node of the testbed.
func (c *Cluster) Machine(name string) *testbed.Node {
	c.t.Helper()
	n, err := c.Bed().Node(name)
	c.ok(err)
	return n
}

// Sh runs a shell line as root on a node, asks that it exits with 0, and
// returns what it wrote to its standard output, without space around it.
func (c *Cluster) Sh(node, line string) string {
	c.t.Helper()
	return strings.TrimSpace(testbedtest.Exec(c.t, c.Machine(node), "sh", "-c", line))
}

// Start creates a task on one node and returns its id.
func (c *Cluster) Start(kind, node, spec string, flags ...string) string {
	c.t.Helper()
	ids, err := c.Run(c.t.Context(), kind, node, spec, flags...)
	c.ok(err)
	if len(ids) != 1 {
		c.t.Fatalf("task run made %d tasks, want 1", len(ids))
	}
	return ids[0]
}

// Do creates a task on one node and waits for its end.
func (c *Cluster) Do(kind, node, spec string, flags ...string) *taskv1.Task {
	c.t.Helper()
	return c.End(c.Start(kind, node, spec, flags...))
}

// End waits until a task has ended or is held, at most two minutes.
func (c *Cluster) End(id string) *taskv1.Task {
	c.t.Helper()
	t, err := c.WaitEnd(c.t.Context(), id, 2*time.Minute)
	c.ok(err)
	return t
}

// Await waits until a task is in one of the states, at most a minute.
func (c *Cluster) Await(id string, states ...taskv1.TaskState) *taskv1.Task {
	c.t.Helper()
	t, err := c.WaitState(c.t.Context(), id, time.Minute, states...)
	c.ok(err)
	return t
}

// Events returns a task's history.
func (c *Cluster) Events(id string) []*taskv1.TaskEvent {
	c.t.Helper()
	events, err := c.History(c.t.Context(), id)
	c.ok(err)
	return events
}
