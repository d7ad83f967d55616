// Package gpukinds shows gpu.reset and gpu.diagnose on real nodes: the packaged
// agent, millwright-gpu and the shim under systemd, over stand-ins for the driver's
// library, nvidia-smi and dcgmi.
package gpukinds

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
	"github.com/gpuaas/millwright/test/fakenvml"
)

const (
	succeeded = taskv1.TaskState_TASK_STATE_SUCCEEDED
	failed    = taskv1.TaskState_TASK_STATE_FAILED
	refused   = taskv1.TaskState_TASK_STATE_REFUSED
	held      = taskv1.TaskState_TASK_STATE_HELD
	patience  = 2 * time.Minute
	kmsg      = "/run/fakenvml/kmsg"
	faults    = "/run/fakenvml/state.faults"
	calls     = "/run/fakenvml/calls"
)

func TestGPUKinds(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 3})
	lib, err := fakenvml.Build(t.Context(), fakenvml.Variant{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []struct {
		name, node, products string
		story                func(*node)
	}{
		{"reset", "n1", strings.Repeat("H100 ", 8), resets}, {"diagnose", "n2", strings.Repeat("H100 ", 8), diagnoses},
		{"before Hopper", "n3", "A100-80 A100-80", together},
	} {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			n := &node{t: t, Cluster: c.With(t), name: s.node}
			n.equip(lib, s.products)
			s.story(n)
		})
	}
}

// node is a node with GPUs.
type node struct {
	*clustertest.Cluster
	t    *testing.T
	name string
}

func (n *node) sh(line string) string { n.t.Helper(); return n.Sh(n.name, line) }

// equip gives a node the stand-in where a driver's library and programs are. How
// often nvidia-smi is run is noted.
func (n *node) equip(lib *fakenvml.Library, products string) {
	n.t.Helper()
	for from, to := range map[string]string{
		"libnvidia-ml.so.1": "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "fakenvml-state": "/usr/local/bin/fakenvml-state", "nvidia-smi": "/usr/local/bin/nvidia-smi",
	} {
		n.put(filepath.Join(lib.Dir, from), to)
	}
	n.sh(`set -e; mkdir -p /run/fakenvml; ln -sfn /dev /run/fakenvml/dev; : > ` + kmsg + `
printf '#!/bin/sh\necho "$*" >> ` + calls + `\nexec /usr/local/bin/nvidia-smi "$@"\n' > /usr/local/sbin/nvidia-smi; chmod 755 /usr/local/sbin/nvidia-smi
fakenvml-state create ` + products + `; nvidia-smi -L > /dev/null; nvidia-smi -pm 1 > /dev/null
printf 'gpu:\n  mode: on\n  period: 1s\n  slow_period: 2s\n  kernel_log: ` + kmsg + `\n' >> /etc/millwright/agent.yaml
systemctl restart millwrightd`)
}

func (n *node) put(from, to string) {
	n.t.Helper()
	b, err := os.ReadFile(from)
	if err == nil {
		err = n.Machine(n.name).WriteFile(n.t.Context(), to, b, 0o755)
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

// gpus are the GPUs as the stand-in has them.
func (n *node) gpus() []fakenvml.GPU {
	n.t.Helper()
	var s fakenvml.State
	if err := json.Unmarshal([]byte(n.sh("fakenvml-state dump")), &s); err != nil {
		n.t.Fatal(err)
	}
	return s.GPUs
}

// sick makes the driver ask for something for a GPU.
func (n *node) sick(i int, values string) {
	n.t.Helper()
	n.sh(fmt.Sprintf("fakenvml-state set %d %s", i, values))
}

// reset resets the GPU with an index, and asks how that ends.
func (n *node) reset(want taskv1.TaskState, i int, more string) *taskv1.Task {
	n.t.Helper()
	task := n.Do("gpu.reset", n.name, n.spec(i, more), "--allow-impact", "gpu-reset")
	if task.GetState() != want {
		n.t.Fatalf("gpu.reset: %s, want %v", told(task), want)
	}
	return task
}

func (n *node) spec(i int, more string) string {
	n.t.Helper()
	return fmt.Sprintf("select: {uuids: [%s]}\nwait_for_jobs: 3s\n%s", n.gpus()[i].UUID, more)
}

func told(task *taskv1.Task) string {
	return fmt.Sprintf("%s, undo %s: %s: %s", task.GetState(), task.GetUndo(), task.GetReason(), task.GetMessage())
}

// says asks that a task tells something.
func (n *node) says(task *taskv1.Task, words ...string) {
	n.t.Helper()
	for _, w := range words {
		if !strings.Contains(told(task), w) {
			n.t.Errorf("%q is not in: %s", w, told(task))
		}
	}
}

// resetsRun is how often nvidia-smi was run to reset.
func (n *node) resetsRun() int {
	n.t.Helper()
	return strings.Count(n.sh("cat "+calls+" 2>/dev/null || true"), "--gpu-reset")
}

// untouched runs something that is about one GPU, and asks that all others are as
// they were.
func (n *node) untouched(but int, do func()) {
	n.t.Helper()
	before := n.gpus()
	do()
	for i, g := range n.gpus() {
		if i != but && !reflect.DeepEqual(g, before[i]) {
			n.t.Errorf("GPU %d was to be left alone, and is %+v, was %+v", i, g, before[i])
		}
	}
}

// result is the typed result of a task.
func result[M proto.Message](t *testing.T, task *taskv1.Task) M {
	t.Helper()
	m, err := task.GetResult().UnmarshalNew()
	if err != nil {
		t.Fatal(err)
	}
	out, ok := m.(M)
	if !ok {
		t.Fatalf("the result is %T", m)
	}
	return out
}

// await polls until something is so.
func (n *node) await(what string, is func() bool) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-ctx.Done():
			n.t.Fatalf("%s: not within %s", what, patience)
		case <-tick.C:
		}
	}
}
