package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// members are stories of nodes and servers and not of one task. They end with a
// command that must run once.
func members() []story {
	tell := func(title string, do func(context.Context, *trial) error) story {
		s := commands()[0]
		s.kind, s.variant, s.own, s.custom = title, "", true, do
		return s
	}
	return []story{
		tell("(node evicted, joins again)", rejoin),
		tell("(node with a used token)", usedToken),
		tell("(policy broken for a while)", badPolicy),
		tell("(task expires)", expire),
		tell("(server stops in good order)", drain),
	}
}

const (
	stopAgent = "systemctl stop millwrightd.service\n"
	wipe      = stopAgent + "rm -rf /var/lib/millwright /etc/millwright/join.json\n"
)

// rejoin evicts the node and lets it join again, as a new machine.
func rejoin(ctx context.Context, t *trial) error {
	name := t.node.Name()
	if _, err := t.operator(ctx, "", "node", "evict", name, "--yes"); err != nil {
		return err
	}
	// Its agent is told, and would stay with that.
	if _, err := t.sh(ctx, `for i in $(seq 100); do millwrightd status -o json 2>/dev/null | grep -q '"connected": *true' || break; sleep 0.05; done; sleep 0.3
`+wipe); err != nil {
		return err
	}
	bundle, err := t.bundle(ctx)
	if err != nil {
		return err
	}
	return t.join(ctx, bundle)
}

// bundle makes a join bundle.
func (t *trial) bundle(ctx context.Context) ([]byte, error) {
	file := filepath.Join(t.c.Bed().Dir(), "join-"+t.label+".json")
	if err := os.RemoveAll(file); err != nil {
		return nil, err
	}
	if _, err := t.operator(ctx, "", "node", "token", "create", t.node.Name(), "--rejoin", "--out", file); err != nil {
		return nil, err
	}
	return os.ReadFile(file)
}

// join starts the agent with a bundle, and waits until it is there.
func (t *trial) join(ctx context.Context, bundle []byte) error {
	if err := t.node.WriteFile(ctx, "/etc/millwright/join.json", bundle, 0o600); err != nil {
		return err
	}
	if _, err := t.sh(ctx, "systemctl start --no-block millwrightd.service"); err != nil {
		return err
	}
	return t.connected(ctx)
}

// connected waits on the node until its agent has a session.
func (t *trial) connected(ctx context.Context) error {
	_, err := t.sh(ctx, `for i in $(seq 600); do millwrightd status -o json 2>/dev/null | grep -q '"connected": *true' && exit 0; sleep 0.05; done; millwrightd status; exit 1`)
	return err
}

// usedToken lets another host come with a token that was used. The server tells
// of it within a minute.
func usedToken(ctx context.Context, t *trial) error {
	if _, err := t.sh(ctx, wipe); err != nil {
		return err
	}
	bundle, err := t.bundle(ctx)
	if err != nil {
		return err
	}
	if err := t.join(ctx, bundle); err != nil {
		return err
	}
	if _, err := t.sh(ctx, "set -e\n"+stopAgent+"mv /var/lib/millwright /var/lib/millwright.kept"); err != nil {
		return err
	}
	if err := t.node.WriteFile(ctx, "/etc/millwright/join.json", bundle, 0o600); err != nil {
		return err
	}
	// The agent is told no, and the server notes it at its next minute.
	if _, err := t.sh(ctx, `systemctl start --no-block millwrightd.service; sleep 63; set -e
`+stopAgent+`rm -rf /var/lib/millwright; mv /var/lib/millwright.kept /var/lib/millwright; systemctl start millwrightd.service`); err != nil {
		return err
	}
	return t.connected(ctx)
}

// badPolicy breaks the policy, has a task deferred for it, and mends it.
func badPolicy(ctx context.Context, t *trial) error {
	if _, err := t.sh(ctx, "cp /etc/millwright/policy.yaml /root/policy; echo '???' >> /etc/millwright/policy.yaml; sleep 3"); err != nil {
		return err
	}
	id, err := t.make(ctx, "system.command", "argv: [/bin/true]")
	if err != nil {
		return err
	}
	if _, err := t.sh(ctx, "sleep 1; cp /root/policy /etc/millwright/policy.yaml; sleep 3"); err != nil {
		return err
	}
	_, err = t.c.WaitState(ctx, id, patience, succeeded)
	return err
}

// expire lets the window of a task pass while its node is away.
func expire(ctx context.Context, t *trial) error {
	if _, err := t.sh(ctx, stopAgent); err != nil {
		return err
	}
	out, err := t.operator(ctx, "argv: [/bin/true]", "task", "run", "system.command", "-n", t.node.Name(), "-f", "-", "-o", "json", "--valid-for", "2s")
	id, err := created(out, err)
	if err != nil {
		return err
	}
	if err := t.stateOf(ctx, id, taskv1.TaskState_TASK_STATE_EXPIRED); err != nil {
		return err
	}
	if _, err := t.sh(ctx, "systemctl start millwrightd.service"); err != nil {
		return err
	}
	return t.connected(ctx)
}

// stateOf waits for the state of a task, also while the server is away.
func (t *trial) stateOf(ctx context.Context, id string, state taskv1.TaskState) error {
	var err error
	for range 5 {
		if _, err = t.c.WaitState(ctx, id, patience/4, state); err == nil {
			return nil
		}
	}
	return err
}

// drain stops the server in good order and starts it again.
func drain(ctx context.Context, t *trial) error {
	struck := func() bool { return t.onServer() && t.c.Hit(ctx, nil, t.injury.point.Name) }
	before := struck()
	if err := t.c.StopServer(ctx); err != nil && !struck() {
		return fmt.Errorf("stop: %w", err)
	}
	if before || !struck() { // else the one who watches it starts it
		if err := t.c.KillServer(ctx); err != nil { // it has ended; this waits for it
			return err
		}
		if err := t.c.StartServer(ctx); err != nil {
			return err
		}
	}
	return t.connected(ctx)
}
