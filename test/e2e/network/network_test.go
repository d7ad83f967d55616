// Package network takes the network away from real nodes, in the middle of every
// kind of task: whole, in one direction, for a reboot, and for a part of the
// packets. It puts two hosts under one identity, too.
package network

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

const (
	succeeded = taskv1.TaskState_TASK_STATE_SUCCEEDED
	failed    = taskv1.TaskState_TASK_STATE_FAILED
	running   = taskv1.TaskState_TASK_STATE_RUNNING
	queued    = taskv1.TaskState_TASK_STATE_QUEUED
	held      = taskv1.TaskState_TASK_STATE_HELD

	connected    = nodev1.NodeState_NODE_STATE_CONNECTED
	disconnected = nodev1.NodeState_NODE_STATE_DISCONNECTED

	// cutFor is how long a node is without network.
	cutFor = 2 * time.Minute
	// noticed bounds how long each side takes to see that the other has gone: 2.5
	// and 3 heartbeats of 2 s, and time for a busy machine. TCP alone would take a
	// quarter of an hour.
	noticed = 20 * time.Second
)

// TestNetwork tells all stories side by side: they mostly wait.
func TestNetwork(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 7, Apart: true})
	var group errgroup.Group
	for _, n := range c.Bed().Nodes() {
		group.Go(func() error {
			if n.Name() == "n7" { // it will be another n6
				return c.Install(t.Context(), n)
			}
			return c.Join(t.Context(), n)
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	var side sync.WaitGroup
	for name, tell := range map[string]func(*testing.T, *clustertest.Cluster){
		"cut in every kind":        cutInEveryKind,
		"cut in a reboot":          cutInReboot,
		"one way from the node":    func(t *testing.T, c *clustertest.Cluster) { oneWay(t, c, "n3", "out") },
		"one way to the node":      func(t *testing.T, c *clustertest.Cluster) { oneWay(t, c, "n4", "in") },
		"half open, then bad line": halfOpenThenBadLine,
		"two hosts, one identity":  twoHosts,
	} {
		side.Go(func() { t.Run(name, func(t *testing.T) { tell(t, c.With(t)) }) })
	}
	side.Wait()
}

// within waits until the check holds, at most for the time given.
func within(t *testing.T, limit time.Duration, what string, ok func() (said string, ok bool)) time.Duration {
	t.Helper()
	begin := time.Now()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		said, good := ok()
		if good {
			return time.Since(begin)
		}
		if time.Since(begin) > limit {
			t.Fatalf("after %s it is not so: %s: %s", limit, what, said)
		}
		<-tick.C
	}
}

// bothNotice waits until node and server each say that the other has gone.
func bothNotice(t *testing.T, c *clustertest.Cluster, node string) {
	t.Helper()
	begin := time.Now()
	agent := within(t, noticed, "the agent sees that the server has gone", func() (string, bool) {
		said := c.Sh(node, "millwrightd status -o json")
		return said, !strings.Contains(strings.ReplaceAll(said, " ", ""), `"connected":true`)
	})
	serverSees(t, c, node, begin)
	t.Logf("%s: the agent saw after %s that the server had gone, and the server within %s", node,
		agent.Round(100*time.Millisecond), time.Since(begin).Round(100*time.Millisecond))
}

func serverSees(t *testing.T, c *clustertest.Cluster, node string, since time.Time) {
	t.Helper()
	within(t, max(noticed-time.Since(since), time.Second), "the server sees that the node has gone", func() (string, bool) {
		n, err := c.Node(t.Context(), node)
		return fmt.Sprint(n.GetState(), err), err == nil && n.GetState() == disconnected
	})
}

// endsOnNode waits until the node's own journal has a task in a state.
func endsOnNode(c *clustertest.Cluster, node, id string, state taskv1.TaskState) {
	c.Sh(node, fmt.Sprintf(`for i in $(seq 600); do o=$(millwrightd journal list %s -o json 2>&1) && printf %%s "$o" | grep -q '"state": *"%s"' && exit 0; sleep 0.1; done; printf '%%s' "$o" >&2; exit 1`, id, state))
}

// story is what is expected of a task that ran while its node was cut off.
type story struct {
	kind, id string
	state    taskv1.TaskState
	reason   string
	// sentAgain says that the server did not know whether the node had it.
	sentAgain bool
	// boots is how often the agent found the task again after a boot.
	boots int
}

// told holds the history of a task against what it has to be: each thing once,
// in order, the end as of the time when it was, and stored after heal.
func told(t *testing.T, c *clustertest.Cluster, s story, ended, healed time.Time) {
	t.Helper()
	task := c.End(s.id)
	if task.GetState() != s.state || task.GetReason() != s.reason {
		t.Errorf("%s ended as %s %s: %s; want %s %s", s.kind, task.GetState(), task.GetReason(), task.GetMessage(), s.state, s.reason)
		return
	}
	events, counts := c.Events(s.id), map[string]int{}
	var types []string
	var seq uint64
	ends := 0
	for i, e := range events {
		counts[e.GetType()]++
		types = append(types, e.GetType())
		if e.GetLate() {
			t.Errorf("%s: %s came after the end", s.kind, e.GetType())
		}
		if i > 0 && e.GetIndex() <= events[i-1].GetIndex() {
			t.Errorf("%s: %s has the index %d after %d", s.kind, e.GetType(), e.GetIndex(), events[i-1].GetIndex())
		}
		if cluster.Terminal(e.GetState()) {
			ends++
		}
		if n := e.GetNodeEvent(); n != nil {
			if n.GetSeq() <= seq || n.GetJournalId() != task.GetJournalId() {
				t.Errorf("%s: %s is frame %d of journal %s after %d of %s", s.kind, e.GetType(), n.GetSeq(), n.GetJournalId(), seq, task.GetJournalId())
			}
			seq = n.GetSeq()
		}
	}
	for _, one := range []string{"CREATED", "ACCEPTED", strings.TrimPrefix(s.state.String(), "TASK_STATE_")} {
		if counts[one] != 1 {
			t.Errorf("%s: %s is told %d times", s.kind, one, counts[one])
		}
	}
	last := events[len(events)-1]
	again := counts["REQUEUED"]
	if ends != 1 || !cluster.Terminal(last.GetState()) || counts["STARTED"] > 1 || counts["PLANNED"] > 1 || counts["RESUMED"] != s.boots || !s.sentAgain && again != 0 {
		t.Errorf("%s: the history is %s", s.kind, strings.Join(types, " "))
	}
	if last.GetEventTime().AsTime().After(ended) || last.GetRecordTime().AsTime().Before(healed.Add(-time.Second)) {
		t.Errorf("%s: its end is told as of %s and stored at %s; it was before %s, and the network was back at %s", s.kind,
			last.GetEventTime().AsTime(), last.GetRecordTime().AsTime(), ended, healed)
	}
	t.Logf("%s: %s", s.kind, strings.Join(types, " "))
}

// untouched asks that the server decided nothing of what a node has that it does
// not hear.
func untouched(t *testing.T, c *clustertest.Cluster, stories []story) {
	t.Helper()
	for _, s := range stories {
		task, err := c.Task(t.Context(), s.id)
		if err != nil || cluster.Terminal(task.GetState()) || task.GetState() == held || task.GetState() == queued && !s.sentAgain {
			t.Errorf("%s is meanwhile %s for the server (%v)", s.kind, task.GetState(), err)
		}
	}
}

// lines is how often an effect left its line.
func lines(c *clustertest.Cluster, node, file string) string {
	return c.Sh(node, "cat "+file+" 2>/dev/null | wc -l")
}

// gated is a command that leaves a line and waits for a file of /run.
func gated(name string) string {
	return fmt.Sprintf(`argv: [/bin/sh, -c, "echo run >> /root/runs-%[1]s; until test -e /run/go-%[1]s; do sleep 0.1; done; echo out; exit 7"]`, name)
}

// awaitFile waits on the node for a file.
func awaitFile(c *clustertest.Cluster, node, file string) {
	c.Sh(node, fmt.Sprintf("for i in $(seq 600); do test -e %[1]s && exit 0; sleep 0.1; done; echo 'no %[1]s' >&2; exit 1", file))
}

// conditionOf returns a condition of a node, or nil.
func conditionOf(n *nodev1.Node, name string) *taskv1.Condition {
	i := slices.IndexFunc(n.GetConditions(), func(one *taskv1.Condition) bool { return one.GetType() == name })
	if i < 0 {
		return nil
	}
	return n.GetConditions()[i]
}
