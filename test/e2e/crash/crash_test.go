// Package crash kills agent, shim, server, node and network in the middle of
// tasks on real nodes.
package crash

import (
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/encoding/protojson"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

const (
	wantAgentPoints  = 12
	wantServerPoints = 6
)

// table is what was seen: a line for each kill.
type table struct {
	mu    sync.Mutex
	lines []string
	hit   map[string]bool
}

func (b *table) add(group, point, kind, outcome string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.hit[group+" "+point] = true
	b.lines = append(b.lines, strings.Join([]string{group, point, kind, outcome}, "\t"))
}

func (b *table) show(t *testing.T) {
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, strings.Join(b.lines, "\n"))
	if err := w.Flush(); err != nil {
		t.Error(err)
	}
	n := map[string]int{}
	for name := range b.hit {
		group, _, _ := strings.Cut(name, " ")
		n[group]++
	}
	t.Logf("killed at %d points of the agent, %d of the shim and %d of the server:\n%s", n["agent"], n["shim"], n["server"], text.String())
	if n["agent"] < wantAgentPoints || n["server"] < wantServerPoints {
		t.Errorf("killed at %d points of the agent and %d of the server, want %d and %d at least", n["agent"], n["server"], wantAgentPoints, wantServerPoints)
	}
}

func TestCrash(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 3, Agent: cluster.Crash, Server: cluster.Crash})
	seen := &table{hit: map[string]bool{}}
	t.Run("agent", func(t *testing.T) {
		var side sync.WaitGroup // not t.Parallel, which runs as many as there are processors
		for i, cases := range shares(3) {
			side.Go(func() {
				node := fmt.Sprintf("n%d", i+1)
				t.Run(node, func(t *testing.T) {
					for _, one := range cases {
						t.Run(one.point.name+"/"+one.kind.title(), func(t *testing.T) { one.run(t, c.With(t), node, seen) })
					}
				})
			})
		}
		side.Wait()
	})
	t.Run("node", func(t *testing.T) { nodes(t, c, seen) })
	t.Run("server", func(t *testing.T) {
		// Only one node comes by the armed point.
		for _, node := range []string{"n2", "n3"} {
			c.With(t).Sh(node, "systemctl stop millwrightd.service")
		}
		for _, p := range serverPoints() {
			for _, a := range asked(p.mount, p.command, nil, nil) {
				t.Run(p.name+"/"+a.kind.title(), func(t *testing.T) { killServer(t, c.With(t), p, a, seen) })
			}
		}
	})
	seen.show(t)
}

// task is a kind with what is expected of it.
type task struct {
	kind kind
	want expectation
}

// asked are the tasks that come by a point.
func asked(onMount, onCommand, onFailing, onBroken *expectation) []task {
	var out []task
	if onMount != nil {
		out = append(out, task{bind(), *onMount})
	}
	if onCommand != nil {
		out = append(out, task{command(), *onCommand})
	}
	if onFailing != nil {
		out = append(out, task{failing(), *onFailing})
	}
	if onBroken != nil {
		out = append(out, task{broken(), *onBroken})
	}
	return out
}

// agentCase is one kill of an agent.
type agentCase struct {
	point agentPoint
	task
}

// shares deals the cases out to nodes, which work side by side.
func shares(n int) [][]agentCase {
	out, i := make([][]agentCase, n), 0
	for _, p := range agentPoints() {
		for _, a := range asked(p.mount, p.command, p.failing, p.broken) {
			out[i%n] = append(out[i%n], agentCase{p, a})
			i++
		}
	}
	return out
}

func (one agentCase) run(t *testing.T, c *clustertest.Cluster, node string, seen *table) {
	n, point, label := c.Machine(node), one.point.name, label(one.point.name, one.kind)
	group, kills := "agent", 1
	switch {
	case one.point.shim:
		group, kills = "shim", 0
	case one.point.provoke:
		kills = 2
	}
	restarts := count(t, c, node)
	c.Sh(node, one.kind.prepare(label))
	if err := c.Arm(t.Context(), n, point); err != nil {
		t.Fatal(err)
	}
	id := c.Start(one.kind.name, node, one.kind.spec(label))
	if one.point.provoke {
		killAgent(c, node, label)
	}
	c.Sh(node, fmt.Sprintf(`for i in $(seq 600); do test -e /var/lib/millwright-crash/hit-%[1]s && break; sleep 0.1; done
test -e /var/lib/millwright-crash/hit-%[1]s || { echo "%[1]s was not reached" >&2; exit 1; }
for i in $(seq 300); do test $(systemctl show -P NRestarts millwrightd.service) = %[2]d && systemctl is-active --quiet millwrightd.service && break; sleep 0.1; done`,
		point, restarts+kills))
	outcome := check(t, c, one.kind, id, label, one.want)
	if got := count(t, c, node); got != restarts+kills {
		t.Errorf("the agent was started again %d times, want %d", got-restarts, kills)
	}
	seen.add(group, point, one.kind.title(), outcome)
}

// killAgent kills the agent by hand while the command of label runs.
func killAgent(c *clustertest.Cluster, node, label string) {
	c.Sh(node, "until test -s "+effectFile(label)+"; do sleep 0.05; done; systemctl kill --kill-whom=main --signal=SIGKILL millwrightd.service")
}

// count is how often systemd has started the agent again.
func count(t testing.TB, c *clustertest.Cluster, node string) int {
	t.Helper()
	n, err := strconv.Atoi(c.Sh(node, "systemctl show -P NRestarts millwrightd.service"))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// label names the effect of a task: one point, one kind.
func label(point string, k kind) string {
	return strings.NewReplacer(".", "-", " ", "-").Replace(point + "-" + k.title())
}

// killServer kills the server at a point and starts it again. What the operator
// asked for is asked for again when its answer was lost, as one request.
func killServer(t *testing.T, c *clustertest.Cluster, p serverPoint, a task, seen *table) {
	const node = "n1"
	k, label := a.kind, label(p.name, a.kind)
	c.Sh(node, k.prepare(label))
	// The agent waits longer each time that the server goes away soon after it
	// came; a new one begins with short waits.
	c.Sh(node, `systemctl restart millwrightd.service
for i in $(seq 300); do millwrightd status -o json | grep -q '"connected": *true' && exit 0; sleep 0.1; done; millwrightd status; exit 1`)
	if err := c.Arm(t.Context(), nil, p.name); err != nil {
		t.Fatal(err)
	}
	request := uuid.NewString()
	create := func() ([]string, error) {
		return c.Run(t.Context(), k.name, node, k.spec(label), "--request-id", request, "--label", "case="+label)
	}
	ids, lost := create()
	if p.provoke {
		killAgent(c, node, label)
	}
	for deadline := time.Now().Add(30 * time.Second); !c.Hit(t.Context(), nil, p.name); {
		if time.Now().After(deadline) {
			t.Fatalf("%s was not reached", p.name)
		}
	}
	// It is dead or dying; this waits for its end.
	if err := c.KillServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.StartServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	if lost != nil {
		t.Logf("the answer was lost: %v", lost)
		var err error
		if ids, err = create(); err != nil {
			t.Fatal(err)
		}
	}
	if len(ids) != 1 {
		t.Fatalf("%d tasks were made, want 1", len(ids))
	}
	outcome := check(t, c, k, ids[0], label, a.want)
	out, err := c.Millctl(t.Context(), "task", "list", "--label", "case="+label, "-o", "json")
	var list taskv1.ListTasksResponse
	if err == nil {
		err = protojson.Unmarshal([]byte(out.Stdout), &list)
	}
	if err != nil || len(list.GetTasks()) != 1 || list.GetTasks()[0].GetId() != ids[0] {
		t.Errorf("the server has %d tasks of this request, want %s alone (%v)", len(list.GetTasks()), ids[0], err)
	}
	seen.add("server", p.name, k.title(), outcome)
}
