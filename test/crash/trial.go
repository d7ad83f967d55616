package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"google.golang.org/protobuf/encoding/protojson"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster"
	"github.com/gpuaas/millwright/test/testbed"
)

// patience bounds each wait.
const patience = 40 * time.Second

// crashDir is the directory of the crash points on a node.
const crashDir = "/var/lib/millwright-crash"

// trial is one story, told once on one node, with an injury or without.
type trial struct {
	c      *cluster.Cluster
	node   *testbed.Node
	story  story
	injury *injury
	label  string

	id       string // the task
	held     string // a task that setup has brought there
	before   string
	restarts int
}

// result is what came of a trial.
type result struct {
	sight
	hit     bool
	trace   map[string]map[string]int // by program, by point: how often it came by
	journal *agentv1.JournalTask
}

// onServer reports whether it is the server that is injured.
func (t *trial) onServer() bool { return t.injury != nil && t.injury.point.Program == server }

// sh runs a script on the node and returns what it printed.
func (t *trial) sh(ctx context.Context, script string) (string, error) {
	res, err := t.node.Exec(ctx, "sh", "-c", script)
	if err != nil {
		return "", fmt.Errorf("on %s: %w", t.node.Name(), err)
	}
	return strings.TrimSpace(string(res.Stdout)), nil
}

// operator runs millctl, and again while the server is away.
func (t *trial) operator(ctx context.Context, stdin string, args ...string) (string, error) {
	deadline := time.Now().Add(patience)
	for {
		out, err := t.c.MillctlInput(ctx, stdin, args...)
		if err == nil || !t.onServer() || time.Now().After(deadline) || ctx.Err() != nil {
			return out.Stdout, err
		}
		pause(ctx, 50*time.Millisecond)
	}
}

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// make creates a task and returns its id. A request whose answer was lost is
// made again, as one request.
func (t *trial) make(ctx context.Context, kind, spec string) (string, error) {
	out, err := t.operator(ctx, spec, "task", "run", kind, "-n", t.node.Name(), "-f", "-", "-o", "json", "--request-id", uuid.NewString())
	return created(out, err)
}

func created(out string, err error) (string, error) {
	if err != nil {
		return "", err
	}
	var resp taskv1.CreateTasksResponse
	if err := protojson.Unmarshal([]byte(out), &resp); err != nil || len(resp.GetTasks()) != 1 {
		return "", fmt.Errorf("task run made %d tasks, want 1 (%w)\n%s", len(resp.GetTasks()), err, out)
	}
	return resp.GetTasks()[0].GetId(), nil
}

// done creates a task and waits until it has succeeded.
func (t *trial) done(ctx context.Context, kind, spec string) error {
	id, err := t.make(ctx, kind, spec)
	if err == nil {
		_, err = t.c.WaitState(ctx, id, patience, succeeded)
	}
	return err
}

func (t *trial) resolve(ctx context.Context, id string) (string, error) {
	out, err := t.operator(ctx, "", "task", "resolve", id, "--as", "abandon", "--reason", "test", "-o", "json", "--request-id", uuid.NewString())
	return created(out, err)
}

func (t *trial) cancel(ctx context.Context) error {
	_, err := t.operator(ctx, "", "task", "cancel", t.id, "--reason", "test")
	if err != nil && (strings.Contains(err.Error(), "TASK_HELD") || strings.Contains(err.Error(), "is held") || strings.Contains(err.Error(), "has ended")) {
		return nil // its shim was killed, or the first answer was lost
	}
	return err
}

// await waits for a file on the node. It gives up once the injury has struck and
// the file has not come for a while.
func (t *trial) await(ctx context.Context, file string) error {
	hit := "nothing"
	if t.injury != nil && t.injury.point.Program == shim {
		hit = t.injury.point.Name
	}
	_, err := t.sh(ctx, fmt.Sprintf(`for i in $(seq 600); do test -s %[1]s -o -e %[1]s && exit 0
if test -e %[2]s/hit-%[3]s; then sleep 0.5; test -e %[1]s && exit 0; echo "no %[1]s" >&2; exit 9; fi; sleep 0.05; done; echo "no %[1]s" >&2; exit 1`, file, crashDir, hit))
	return err
}

// killShim kills the shim of a task's command.
func (t *trial) killShim(ctx context.Context, id string) error {
	_, err := t.sh(ctx, "systemctl kill --kill-whom=main --signal=KILL 'millwright-task-"+id+"-*'")
	return err
}

// run tells the story.
func (t *trial) run(ctx context.Context, tracing bool) (*result, error) {
	if err := t.begin(ctx, tracing); err != nil {
		return nil, fmt.Errorf("prepare: %w", err)
	}
	stop := func() error { return nil }
	if t.onServer() {
		stop = t.supervise(ctx)
	}
	err := t.tell(ctx)
	var out *result
	if err == nil {
		out, err = t.finish(ctx, tracing)
	}
	if serr := stop(); err == nil && serr != nil {
		err = serr
	}
	if err != nil {
		return out, err
	}
	if t.onServer() {
		out.hit = t.c.Hit(ctx, nil, t.injury.point.Name)
		if err := os.RemoveAll(filepath.Join(t.c.CrashDir(), "arm-"+t.injury.point.Name)); err != nil {
			return out, err
		}
	}
	if err := t.look(ctx, out); err != nil {
		return out, err
	}
	return out, t.takeBack(ctx)
}

// begin prepares the node and arms the points.
func (t *trial) begin(ctx context.Context, tracing bool) error {
	if err := t.revive(ctx); err != nil {
		return err
	}
	script := "systemctl stop --no-block 'millwright-task-*' 2>/dev/null; set -e; rm -f " + crashDir + "/*; " + t.story.prepare(t.label) + "\n"
	if t.story.own || t.onServer() {
		// The agent waits longer each time that the server goes away soon after it
		// came; a new one begins with short waits.
		script += "systemctl restart millwrightd.service\n"
	}
	script += `for i in $(seq 100); do millwrightd status -o json 2>/dev/null | grep -q '"connected": *true' && break; sleep 0.2; done`
	if _, err := t.sh(ctx, script); err != nil {
		return err
	}
	if t.story.setup != nil {
		if err := t.story.setup(ctx, t); err != nil {
			return err
		}
	}
	if err := t.countRestarts(ctx); err != nil {
		return err
	}
	script = t.story.facts(t.label) + "; echo FACTS >&2\n"
	if t.story.first != "" {
		script += fmt.Sprintf("echo kill 1 > %s/arm-%s\n", crashDir, t.story.first)
	}
	if t.injury != nil && !t.onServer() {
		script += fmt.Sprintf("echo %s %d > %s/arm-%s\n", t.injury.mode, t.injury.nth, crashDir, t.injury.point.Name)
	}
	if tracing {
		script += "touch " + crashDir + "/trace\n"
	}
	before, err := t.sh(ctx, script)
	if err != nil {
		return err
	}
	t.before = strings.Join(strings.Fields(before), " ") // as what is seen after it is told
	return t.armServer(tracing)
}

// countRestarts notes how often the agent was restarted so far. It does so after
// the story's setup: one that stops and starts the agent begins another count.
func (t *trial) countRestarts(ctx context.Context) error {
	out, err := t.sh(ctx, "systemctl show -P NRestarts millwrightd.service")
	if err != nil {
		return err
	}
	if _, err := fmt.Sscan(out, &t.restarts); err != nil {
		return fmt.Errorf("read %q: %w", out, err)
	}
	return nil
}

// revive starts the server that died at its point after the trial before was
// over: nobody watched it any more.
func (t *trial) revive(ctx context.Context) error {
	if !t.onServer() || t.c.Serving(ctx) {
		return nil
	}
	if err := t.c.KillServer(ctx); err != nil {
		return err
	}
	return t.c.StartServer(ctx)
}

func (t *trial) armServer(tracing bool) error {
	dir := t.c.CrashDir()
	if tracing {
		return os.WriteFile(filepath.Join(dir, "trace"), nil, 0o600)
	}
	if !t.onServer() {
		return nil
	}
	name := t.injury.point.Name
	if err := os.RemoveAll(filepath.Join(dir, "hit-"+name)); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "arm-"+name), fmt.Appendf(nil, "kill %d", t.injury.nth), 0o600)
}

// supervise starts the server again when it has died at its point. The function
// that it returns ends that.
func (t *trial) supervise(ctx context.Context) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	var err error
	var watch sync.WaitGroup
	watch.Go(func() { err = t.watchServer(ctx) })
	return func() error {
		cancel()
		watch.Wait()
		return err
	}
}

func (t *trial) watchServer(ctx context.Context) error {
	for ctx.Err() == nil {
		if t.c.Hit(ctx, nil, t.injury.point.Name) {
			up := context.WithoutCancel(ctx)
			err := t.c.KillServer(up) // it is dying; this waits for its end
			if err == nil {
				err = t.c.StartServer(up)
			}
			return err
		}
		pause(ctx, 10*time.Millisecond)
	}
	return nil
}

func (t *trial) tell(ctx context.Context) (err error) {
	if t.story.custom != nil {
		if err := t.story.custom(ctx, t); err != nil {
			return err
		}
	}
	if t.story.create != nil {
		t.id, err = t.story.create(ctx, t)
	} else {
		t.id, err = t.make(ctx, t.story.does(), t.story.spec(t.label))
	}
	if err == nil && t.story.during != nil {
		err = t.story.during(ctx, t)
	}
	return err
}

var errNotEnded = errors.New("it has not ended")
