package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/testbed"
)

// taskLimit bounds a wait for something that takes a second or two.
const taskLimit = time.Minute

// workScript counts how often it was started, waits to be told to go on, and
// exits as its argument says.
const workScript = `#!/bin/sh
# demo-work NAME CODE
dir=/var/lib/demo
mkdir -p $dir
echo started >>$dir/$1.count
echo "work $1: start number $(wc -l <$dir/$1.count)"
until [ -e $dir/$1.go ]; do sleep 0.1; done
echo "work $1: told to go on; it ends with $2"
exit "$2"
`

// policyRule is the line that the demo adds to the default policy.
const policyRule = `  - allow: system.command
    roles: [operator]
    argv: ["/usr/local/bin/demo-*"]

`

type demo struct {
	c      *cluster.Cluster
	n1, n2 *testbed.Node
	// killed is the task during which the agent was killed.
	killed string
}

func newDemo(bed *testbed.Testbed, root, variant string, log *slog.Logger) (*demo, error) {
	policy, err := os.ReadFile(filepath.Join(root, "packaging/config/policy.yaml"))
	if err != nil {
		return nil, err
	}
	before, after, found := strings.Cut(string(policy), `  - deny: "*"`)
	if !found {
		return nil, errors.New(`packaging/config/policy.yaml does not end with - deny: "*"`)
	}
	d := &demo{c: cluster.New(bed, cluster.Config{
		Root: root, Agent: variant, Server: cluster.Release, Policy: before + policyRule + `  - deny: "*"` + after, Log: log,
	})}
	d.n1, err = bed.Node("n1")
	if err != nil {
		return nil, err
	}
	d.n2, err = bed.Node("n2")
	return d, err
}

// say tells something that has been checked.
func say(format string, args ...any) { fmt.Printf("   "+format+"\n", args...) }

func (d *demo) join(ctx context.Context) error {
	if err := d.c.Found(ctx); err != nil {
		return err
	}
	say("the server listens on %s, with its own CA; the operator's key never left the operator", d.c.Address())
	for _, n := range []*testbed.Node{d.n1, d.n2} {
		if err := n.WriteFile(ctx, "/usr/local/bin/demo-work", []byte(workScript), 0o755); err != nil {
			return err
		}
		if err := d.c.Join(ctx, n); err != nil {
			return err
		}
		say("%s: the agent was installed from its package and has joined", n.Name())
	}
	return d.print(ctx, "node", "list")
}

func (d *demo) mount(ctx context.Context) error {
	const spec = "target: /mnt/shared\nglusterfs:\n  servers: [storage]\n  volume: " + testbed.Volume + "\n"
	ids, err := d.c.Run(ctx, "storage.mount", "n1,n2", spec, "--wait")
	if err != nil {
		return err
	}
	var tasks []*taskv1.Task
	for _, id := range ids {
		t, err := d.c.WaitState(ctx, id, taskLimit, taskv1.TaskState_TASK_STATE_SUCCEEDED)
		if err != nil {
			return err
		}
		tasks = append(tasks, t)
	}
	if len(tasks) != 2 || !tasks[0].GetIssuedAt().AsTime().Equal(tasks[1].GetIssuedAt().AsTime()) {
		return fmt.Errorf("%d tasks, which were not signed at once", len(tasks))
	}
	for _, n := range []*testbed.Node{d.n1, d.n2} {
		if err := mounted(ctx, n); err != nil {
			return err
		}
	}
	if err := d.n1.WriteFile(ctx, "/mnt/shared/hello", []byte("from n1"), 0o644); err != nil {
		return err
	}
	if got, err := d.n2.ReadFile(ctx, "/mnt/shared/hello"); err != nil || string(got) != "from n1" {
		return fmt.Errorf("n2 reads %q of what n1 wrote: %w", got, err)
	}
	say("both nodes have mounted it through systemd, and n2 reads what n1 wrote")
	if ids, err = d.c.Run(ctx, "storage.mount", "n1,n2", spec, "--wait"); err != nil {
		return err
	}
	for _, id := range ids {
		t, err := d.c.Task(ctx, id)
		if err != nil {
			return err
		}
		if steps := len(t.GetPlan().GetSteps()); t.GetPlan() == nil || steps != 0 {
			return fmt.Errorf("the same task once more planned %d steps on %s, want none", steps, t.GetNode())
		}
	}
	say("the same task once more finds nothing to do")
	return nil
}

// mounted asks the kernel of the node.
func mounted(ctx context.Context, n *testbed.Node) error {
	res, err := n.Exec(ctx, "findmnt", "--noheadings", "--output", "FSTYPE,SOURCE", "/mnt/shared")
	if got := strings.Join(strings.Fields(string(res.Stdout)), " "); err != nil || got != "fuse.glusterfs storage:/v1" {
		return fmt.Errorf("node %s has %q at /mnt/shared: %w", n.Name(), got, err)
	}
	return nil
}

func (d *demo) policy(ctx context.Context) error {
	ids, err := d.c.Run(ctx, "system.command", "n1", "argv: [/usr/bin/id]\n")
	if err != nil {
		return err
	}
	t, err := d.c.WaitEnd(ctx, ids[0], taskLimit)
	if err != nil {
		return err
	}
	if t.GetState() != taskv1.TaskState_TASK_STATE_REFUSED || !strings.Contains(t.GetMessage(), "policy.yaml") {
		return fmt.Errorf("a command that no line allows is %s: %s, want it refused by policy.yaml", t.GetState(), t.GetMessage())
	}
	say("a command that no line allows was refused: %s", t.GetMessage())
	if err := release(ctx, d.n1, "hello"); err != nil {
		return err
	}
	if ids, err = d.c.Run(ctx, "system.command", "n1", workSpec("hello", 0), "--wait"); err != nil {
		return err
	}
	if err := d.ended(ctx, ids[0], "hello", 0); err != nil {
		return err
	}
	if err := d.logged(ctx, ids[0], "hello", 0); err != nil {
		return err
	}
	say("a command that a line allows ran, and its output is here")
	return d.print(ctx, "task", "logs", ids[0])
}

// logged waits until the output of a work has arrived, which comes after the
// task's end, and compares all of it.
func (d *demo) logged(ctx context.Context, id, name string, code int) error {
	want := fmt.Sprintf("work %[1]s: start number 1\nwork %[1]s: told to go on; it ends with %[2]d\n", name, code)
	return until(ctx, "the output of task "+id+" has arrived", func() error {
		out, err := d.c.Millctl(ctx, "task", "logs", id)
		if err == nil && out.Stdout != want {
			err = fmt.Errorf("it is %q, want %q", out.Stdout, want)
		}
		return err
	})
}

// print runs millctl and shows what it prints, as a person would see it.
func (d *demo) print(ctx context.Context, args ...string) error {
	out, err := d.c.Millctl(ctx, args...)
	if err != nil {
		return err
	}
	fmt.Printf("\n   $ millctl %s\n", strings.Join(args, " "))
	for line := range strings.Lines(out.Stdout) {
		fmt.Print("   " + line)
	}
	return nil
}

func (d *demo) history(ctx context.Context) error {
	events, err := d.c.History(ctx, d.killed)
	if err != nil {
		return err
	}
	finished := 0
	for _, e := range events {
		if e.GetState() >= taskv1.TaskState_TASK_STATE_SUCCEEDED && !e.GetLate() && e.GetNodeEvent().GetFinished() != nil {
			finished++
		}
	}
	if finished != 1 {
		return fmt.Errorf("the history of task %s says %d times that it ended, want once", d.killed, finished)
	}
	if err := d.logged(ctx, d.killed, "steady", 0); err != nil {
		return err
	}
	for _, args := range [][]string{
		{"task", "list"}, {"task", "get", d.killed}, {"task", "history", d.killed}, {"task", "logs", d.killed}, {"node", "list"},
	} {
		if err := d.print(ctx, args...); err != nil {
			return err
		}
	}
	return nil
}

func workSpec(name string, code int) string {
	return fmt.Sprintf("argv: [/usr/local/bin/demo-work, %s, %q]\n", name, strconv.Itoa(code))
}
