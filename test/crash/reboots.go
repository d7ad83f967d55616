package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// reboots are system.reboot. What counts is how often the node booted: each boot
// leaves a line in a file.
func reboots() []story {
	return []story{{
		kind: "system.reboot", action: true, boots: true, slow: true, state: succeeded,
		spec: func(string) string { return "reason: test\ntimeout: 60s" },
		prepare: func(l string) string {
			return fmt.Sprintf(`printf '[Service]\nType=oneshot\nExecStart=/bin/sh -c "echo boot >> %[1]s"\n[Install]\nWantedBy=multi-user.target\n' > /etc/systemd/system/boots-%[2]s.service
systemctl enable --quiet boots-%[2]s.service
grep -q '^reboots:' /etc/millwright/agent.yaml || { printf 'reboots:\n  most: 1000\n' >> /etc/millwright/agent.yaml; systemctl restart millwrightd.service; }`, runs(l), l)
		},
		facts: func(l string) string {
			return "echo runs=$(cat " + runs(l) + " 2>/dev/null | wc -l)"
		},
		create: func(ctx context.Context, t *trial) (string, error) {
			out, err := t.operator(ctx, t.story.spec(t.label), "task", "run", "system.reboot", "-n", t.node.Name(), "-f", "-", "-o", "json",
				"--allow-impact", "reboot", "--request-id", uuid.NewString())
			return created(out, err)
		},
		during: rebooted,
	}}
}

// rebooted waits until the node has booted again, or the task has ended without.
func rebooted(ctx context.Context, t *trial) error {
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	defer cancel()
	for ctx.Err() == nil {
		if _, err := t.sh(ctx, "test -s "+runs(t.label)); err == nil {
			return t.node.WaitRunning(ctx)
		}
		if task, err := t.c.Task(ctx, t.id); err == nil && task.GetState() >= taskv1.TaskState_TASK_STATE_SUCCEEDED {
			return nil
		}
		pause(ctx, 200*time.Millisecond)
	}
	return errors.Join(errors.New("the node has not booted again"), ctx.Err())
}
