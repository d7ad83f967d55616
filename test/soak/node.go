package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/invariants/check"
	"github.com/gpuaas/millwright/test/testbed"
)

const (
	imageFile = "/opt/soak-image.tar"
	boots     = "/var/lib/soak/boots"
	// upWithin is how long a node may take to boot again.
	upWithin = 2 * time.Minute
)

// prepare gives a node the program of the commands, the image of the
// containers, a line in a file for each boot, and a budget of reboots.
func prepare(ctx context.Context, n *testbed.Node) error {
	if err := n.WriteFile(ctx, program, []byte(script), 0o755); err != nil {
		return err
	}
	archive, _ := cluster.EmptyImage("a test")
	if err := n.WriteFile(ctx, imageFile, archive, 0o644); err != nil {
		return err
	}
	unit := "[Service]\nType=oneshot\nExecStart=/bin/sh -c \"echo boot >> " + boots + "\"\n[Install]\nWantedBy=multi-user.target\n"
	if err := n.WriteFile(ctx, "/etc/systemd/system/soak-boots.service", []byte(unit), 0o644); err != nil {
		return err
	}
	_, err := n.Exec(ctx, "sh", "-ec", "mkdir -p /var/lib/soak; systemctl enable --quiet soak-boots.service")
	return err
}

// allowReboots gives the agent of a node that has joined its budget.
func allowReboots(ctx context.Context, n *testbed.Node) error {
	_, err := n.Exec(ctx, "sh", "-ec", `printf 'reboots:\n  most: 1000\n' >> /etc/millwright/agent.yaml; systemctl restart millwrightd.service`)
	return err
}

// container is the spec of a container.run. Another number is another spec.
func container(name string, number int) string {
	_, digest := cluster.EmptyImage("a test")
	return fmt.Sprintf("name: %s\nimage: {digest: %q, ociArchive: %s}\nargv: [/usr/bin/sleep, \"100000\"]\nenvironment: [NUMBER=%d]\nstopGrace: 1s\nmounts:\n%s",
		name, digest, imageFile, number, cluster.NodePrograms)
}

// awaitUp waits until a node is there with its agent, as after a boot.
func awaitUp(ctx context.Context, n *testbed.Node) error {
	ctx, cancel := context.WithTimeout(ctx, upWithin)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		_, err := n.Exec(ctx, "systemctl", "is-active", "--quiet", "millwrightd.service")
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("node %s is not there again: %w", n.Name(), errors.Join(context.Cause(ctx), err))
		case <-tick.C:
		}
	}
}

// histories is what server and nodes recorded, also when a node is just booting.
func histories(ctx context.Context, c *cluster.Cluster, nodes []*testbed.Node) (*check.History, error) {
	for again := 0; ; again++ {
		for _, n := range nodes {
			if err := awaitUp(ctx, n); err != nil {
				return nil, err
			}
		}
		h, err := c.Histories(ctx, nil, marks)
		if err == nil || again == 3 {
			return h, err
		}
	}
}

// seen is what was seen on the nodes beside the marks.
type seen struct {
	boots, reboots int
	duplicated     []string
	wrong          []string
}

// look holds the boots of the nodes against the tasks that were to reboot them,
// and the containers that run against the intents that ask for them.
func look(ctx context.Context, h *check.History, nodes []*testbed.Node) (*seen, error) {
	s := &seen{}
	for _, n := range nodes {
		done, begun, heldContainer := 0, 0, false
		for _, row := range h.Server.Tasks {
			task := row.GetTask()
			switch {
			case task.GetNode() != n.Name():
			case task.GetKind() == "system.reboot":
				begun++
				if task.GetState() == taskv1.TaskState_TASK_STATE_SUCCEEDED {
					done++
				}
			case strings.HasPrefix(task.GetKind(), "container."):
				heldContainer = heldContainer || task.GetState() == taskv1.TaskState_TASK_STATE_HELD
			}
		}
		res, err := n.Exec(ctx, "sh", "-c", "cat "+boots+" 2>/dev/null | wc -l")
		if err != nil {
			return nil, err
		}
		got, err := strconv.Atoi(strings.TrimSpace(string(res.Stdout)))
		if err != nil {
			return nil, err
		}
		s.boots, s.reboots = s.boots+got, s.reboots+begun
		switch {
		case got > begun:
			s.duplicated = append(s.duplicated, fmt.Sprintf("node %s booted %d times by %d tasks", n.Name(), got, begun))
		case got < done:
			s.wrong = append(s.wrong, fmt.Sprintf("node %s booted %d times, and %d reboots are told as done", n.Name(), got, done))
		}
		if heldContainer {
			continue // a person has to look
		}
		wrong, err := containers(ctx, n)
		if err != nil {
			return nil, err
		}
		s.wrong = append(s.wrong, wrong...)
	}
	return s, nil
}

// containers asks that a container runs just when the node has an intent for it.
func containers(ctx context.Context, n *testbed.Node) (wrong []string, err error) {
	for i := range containerNames {
		res, err := n.Exec(ctx, "sh", "-c", fmt.Sprintf(`echo $(millwrightd status | grep -c 'container:soak%[1]d ') $(ctr -n millwright tasks ls | grep -c '^soak%[1]d .*RUNNING') $(pgrep -fc '[c]ontainerd-shim.*-id soak%[1]d ')`, i))
		if err != nil {
			return nil, err
		}
		if got := strings.TrimSpace(string(res.Stdout)); got != "0 0 0" && got != "1 1 1" {
			wrong = append(wrong, fmt.Sprintf("on node %s container soak%d has intents, processes and shims: %s", n.Name(), i, got))
		}
	}
	return wrong, nil
}
