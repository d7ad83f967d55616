package crash

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

// cutFor is how long a node is without network.
const cutFor = time.Minute

// nodes takes power or network away in the middle of a mount and a command.
func nodes(t *testing.T, c *clustertest.Cluster, seen *table) {
	mounting := func(label string) string { return "/run/begun-" + label }
	var side sync.WaitGroup
	side.Go(func() {
		t.Run("cut in a mount", func(t *testing.T) { cut(t, c.With(t), "n1", held(), mounting("cut"), seen) })
	})
	side.Go(func() {
		t.Run("cut in a command", func(t *testing.T) { cut(t, c.With(t), "n2", gated(), effectFile("cut"), seen) })
	})
	side.Go(func() {
		t.Run("power in a command", func(t *testing.T) {
			want := expectation{resumed: 1, found: begun, rebooted: true, held: true, runs: []int{1}}
			power(t, c.With(t), gated(), effectFile("power"), want, seen)
		})
		t.Run("power in a mount", func(t *testing.T) {
			want := expectation{resumed: 1, found: begun, rebooted: true}
			power(t, c.With(t), held(), mounting("power"), want, seen)
		})
	})
	side.Wait()
}

// power cuts the power of n3 once the file says that the task is in its middle.
func power(t *testing.T, c *clustertest.Cluster, k kind, middle string, want expectation, seen *table) {
	const node, label = "n3", "power"
	id := begin(c, k, node, label, middle)
	c.Await(id, taskv1.TaskState_TASK_STATE_RUNNING)
	n := c.Machine(node)
	if err := n.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if task, err := c.Task(t.Context(), id); err != nil || task.GetState() != taskv1.TaskState_TASK_STATE_RUNNING {
		t.Errorf("without the node's word it is %s (%v)", task.GetState(), err)
	}
	if err := n.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	seen.add("power", "cut in its middle", k.name, check(t, c, k, id, label, want))
}

func begin(c *clustertest.Cluster, k kind, node, label, middle string) string {
	c.Sh(node, k.prepare(label))
	id := c.Start(k.name, node, k.spec(label))
	c.Sh(node, fmt.Sprintf("for i in $(seq 300); do test -e %[1]s && exit 0; sleep 0.1; done; echo 'no %[1]s' >&2; exit 1", middle))
	return id
}

// cut takes the network of a node away for a minute. The task ends meanwhile on
// the node, and the server learns it afterwards.
func cut(t *testing.T, c *clustertest.Cluster, node string, k kind, middle string, seen *table) {
	const label = "cut"
	restarts := count(t, c, node)
	id := begin(c, k, node, label, middle)
	c.Await(id, taskv1.TaskState_TASK_STATE_RUNNING)
	n := c.Machine(node)
	from := time.Now()
	if err := n.Cut(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.Sh(node, fmt.Sprintf(`touch /run/go-%s; for i in $(seq 300); do millwrightd journal list %s -o json | grep -q '"state": *"%s"' && exit 0; sleep 0.1; done; exit 1`,
		label, id, k.state))
	ended := time.Now()
	c.Sh(node, fmt.Sprintf("sleep %.1f", (cutFor-time.Since(from)).Seconds()))
	running(t, c, node, id)
	if err := n.Heal(t.Context()); err != nil {
		t.Fatal(err)
	}
	healed := time.Now()
	outcome := check(t, c, k, id, label, expectation{})
	if got := count(t, c, node); got != restarts {
		t.Errorf("the agent was started again %d times", got-restarts)
	}
	events := c.Events(id)
	last := events[len(events)-1]
	if last.GetEventTime().AsTime().After(ended) || last.GetRecordTime().AsTime().Before(healed.Add(-time.Second)) {
		t.Errorf("the end is told as of %s and recorded at %s; it was before %s, and the network was back at %s",
			last.GetEventTime().AsTime(), last.GetRecordTime().AsTime(), ended, healed)
	}
	seen.add("network", fmt.Sprintf("away for %s", cutFor), k.name, outcome)
}

// running asks that the server decided nothing of a node that it does not hear.
func running(t *testing.T, c *clustertest.Cluster, node, id string) {
	t.Helper()
	n, err := c.Node(t.Context(), node)
	if err != nil || n.GetState() != nodev1.NodeState_NODE_STATE_DISCONNECTED {
		t.Errorf("node %s is %s after a minute without network (%v)", node, n.GetState(), err)
	}
	told := strings.Join(types(c.Events(id)), " ")
	if strings.Contains(told, "REQUEUED") || !strings.Contains(told, "STARTED") {
		t.Errorf("the history tells meanwhile: %s", told)
	}
	c.Await(id, taskv1.TaskState_TASK_STATE_RUNNING)
}
