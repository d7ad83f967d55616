// Package mig shows GPUs partitioned on real nodes: the packaged agent and
// millwright-gpu under systemd, over a stand-in for the driver's library.
package mig

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
	"github.com/gpuaas/millwright/test/fakenvml"
)

const (
	succeeded = taskv1.TaskState_TASK_STATE_SUCCEEDED
	failed    = taskv1.TaskState_TASK_STATE_FAILED
	patience  = 2 * time.Minute
	changing  = "millwright-gpu-change.service"
	cdiFile   = "/run/cdi/millwright-gpu.json"
)

func TestMIG(t *testing.T) {
	c := clustertest.Up(t, clustertest.Config{Nodes: 3, Slurm: true})
	lib, err := fakenvml.Build(t.Context(), fakenvml.Variant{})
	if err != nil {
		t.Fatal(err)
	}
	archive, digest := clustertest.Image(t, "looks", looks, "out")
	for name, product := range map[string]string{"n1": "A100-80", "n2": "H100"} {
		t.Run(product, func(t *testing.T) {
			t.Parallel()
			n := &node{t: t, Cluster: c.With(t), name: name}
			n.equip(lib, product)
			n.story(archive, digest)
		})
	}
	t.Run("a member of a Slurm cluster", func(t *testing.T) {
		t.Parallel()
		member(t, c, lib)
	})
}

// node is a node with two GPUs, of which the first is partitioned.
type node struct {
	*clustertest.Cluster
	t    *testing.T
	name string
	uuid string
}

func (n *node) sh(line string) string { n.t.Helper(); return strings.TrimSpace(n.Sh(n.name, line)) }

// equip gives a node the stand-in where a driver's library and programs are. Its
// state outlives a boot of the node, and learns of it before the agent starts.
func (n *node) equip(lib *fakenvml.Library, product string) {
	n.t.Helper()
	for from, to := range map[string]string{
		"libnvidia-ml.so.1": "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "fakenvml-state": "/usr/local/bin/fakenvml-state", "nvidia-smi": "/usr/local/bin/nvidia-smi",
	} {
		b, err := os.ReadFile(filepath.Join(lib.Dir, from))
		if err == nil {
			err = n.Machine(n.name).WriteFile(n.t.Context(), to, b, 0o755)
		}
		if err != nil {
			n.t.Fatal(err)
		}
	}
	n.sh(`set -e; mkdir -p /var/lib/fakenvml; ln -sfn /dev /var/lib/fakenvml/dev
echo 'L+ /run/fakenvml - - - - /var/lib/fakenvml' > /etc/tmpfiles.d/fakenvml.conf; systemd-tmpfiles --create /etc/tmpfiles.d/fakenvml.conf
printf '[Unit]\nBefore=millwrightd.service\n[Service]\nType=oneshot\nExecStart=/usr/local/bin/fakenvml-state reboot\nExecStart=/usr/local/bin/nvidia-smi -L\nExecStart=-mv /var/lib/fakenvml/at-boot /var/lib/fakenvml/state.faults\n[Install]\nWantedBy=multi-user.target\n' > /etc/systemd/system/fakenvml.service
systemctl enable -q fakenvml.service
fakenvml-state create ` + product + " " + product + `; nvidia-smi -L > /dev/null
printf 'gpu:\n  mode: on\n  period: 1s\n  slow_period: 2s\n' >> /etc/millwright/agent.yaml
systemctl restart millwrightd`)
	n.uuid = n.state().GPUs[0].UUID
}

func (n *node) state() fakenvml.State {
	n.t.Helper()
	var s fakenvml.State
	if err := json.Unmarshal([]byte(n.sh("fakenvml-state dump")), &s); err != nil {
		n.t.Fatal(err)
	}
	return s
}

// layout names the instances of the first GPU, each with how many compute
// instances it has.
func (n *node) layout() string {
	n.t.Helper()
	return layoutOf(n.state())
}

func layoutOf(s fakenvml.State) string {
	var out []string
	for _, i := range s.GPUs[0].Instances {
		out = append(out, fmt.Sprintf("%s/%d", i.Profile, len(i.Compute)))
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// devices are the UUIDs of the MIG devices of the first GPU.
func (n *node) devices() []string {
	n.t.Helper()
	var out []string
	for _, i := range n.state().GPUs[0].Instances {
		for _, c := range i.Compute {
			out = append(out, c.UUID)
		}
	}
	slices.Sort(out)
	return out
}

func (n *node) spec(instances string) string {
	return fmt.Sprintf("layouts:\n- select: {uuids: [%s]}\n  instances: [%s]\nallow_reset: true\nwait_for_jobs: 5s\n", n.uuid, instances)
}

// The layouts, and how they look.
const (
	halves    = "{profile: 3g.40gb, count: 2}"
	hasHalves = "3g.40gb/1 3g.40gb/1"
	mixed     = "{profile: 3g.40gb, count: 1}, {profile: 1g.10gb, count: 2}"
	hasMixed  = "1g.10gb/1 1g.10gb/1 3g.40gb/1"
)

func (n *node) is(when, want string) {
	n.t.Helper()
	if got := n.layout(); got != want {
		n.t.Errorf("%s the layout is %q, want %q", when, got, want)
	}
	if others := n.state().GPUs[1]; others.Values["mig_current"] != 0 || others.Values["mig_pending"] != 0 || len(others.Instances) > 0 {
		n.t.Errorf("%s the other GPU is %+v", when, others)
	}
}

// cdi is what the specification has; it must be what the driver has.
func (n *node) cdi(when string) {
	n.t.Helper()
	var spec struct{ Devices []struct{ Name string } }
	if err := json.Unmarshal([]byte(n.sh("cat "+cdiFile)), &spec); err != nil {
		n.t.Fatal(err)
	}
	var names []string
	for _, d := range spec.Devices {
		if strings.HasPrefix(d.Name, "MIG-") {
			names = append(names, d.Name)
		}
	}
	slices.Sort(names)
	if want := n.devices(); !slices.Equal(names, want) {
		n.t.Errorf("%s the specification has %v, the driver %v", when, names, want)
	}
}

func told(task *taskv1.Task) string {
	return fmt.Sprintf("%s, undo %s: %s: %s", task.GetState(), task.GetUndo(), task.GetReason(), task.GetMessage())
}

func (n *node) configure(want taskv1.TaskState, instances string) *taskv1.Task {
	n.t.Helper()
	task := n.Do("mig.configure", n.name, n.spec(instances), "--allow-impact", "gpu-reset")
	if task.GetState() != want {
		n.t.Fatalf("mig.configure of %s: %s, want %v", instances, told(task), want)
	}
	return task
}

func (n *node) story(archive []byte, digest string) {
	n.configure(succeeded, halves)
	n.is("after the first task", hasHalves)
	n.cdi("after the first task")
	was := n.devices()
	n.configure(succeeded, halves)
	if now := n.devices(); !slices.Equal(was, now) {
		n.t.Errorf("a layout that stood was made again: %v, %v", was, now)
	}
	n.inUse(was)
	n.stays()
	n.containers(archive, digest)
	n.cut("the agent", "systemctl kill --kill-whom=main --signal=KILL millwrightd", halves, hasHalves, mixed, hasMixed)
	n.cut("the program that changes", "systemctl kill --signal=KILL "+changing, mixed, hasMixed, halves, hasHalves)
	n.reboot()
	n.hangs()
}

// inUse: a process computes on an instance that would have to go. The task fails
// with its name, and all stands as before.
func (n *node) inUse(was []string) {
	n.t.Helper()
	n.sh("systemd-run --quiet --unit=train fakenvml-state hold 0 compute")
	n.await("train computes", func() bool {
		return len(n.state().Clients) > 0 && strings.Contains(n.sh("systemctl is-active train || true"), "active")
	})
	task := n.configure(failed, mixed)
	if said := told(task); !strings.Contains(said, "fakenvml-state hold 0 compute") {
		n.t.Errorf("who is in the way is not named: %s", said)
	}
	n.is("with a process in the way", hasHalves)
	if now := n.devices(); !slices.Equal(was, now) {
		n.t.Errorf("instances were made again: %v, %v", was, now)
	}
	n.sh("systemctl stop train")
}

// stays: a process that computes on an instance is not disturbed when the layout
// stands, nor when all that is missing fits into the slices that are free.
func (n *node) stays() {
	n.t.Helper()
	n.configure(succeeded, "{profile: 3g.40gb, count: 1}")
	n.is("with one instance", "3g.40gb/1")
	one := n.state().GPUs[0].Instances[0]
	n.sh(fmt.Sprintf("systemd-run --quiet --unit=train fakenvml-state hold 0 compute %d %d", one.ID, one.Compute[0].ID))
	n.await("train computes", func() bool {
		return n.sh("systemctl is-active train || true") == "active" && len(n.state().Clients) > 0
	})
	train := n.sh("systemctl show -P MainPID train")
	if task := n.configure(succeeded, "{profile: 3g.40gb, count: 1}"); len(task.GetPlan().GetSteps()) > 0 {
		n.t.Errorf("a layout that stands has the plan %v", task.GetPlan())
	}
	n.configure(succeeded, mixed)
	n.is("beside a process that computes", hasMixed)
	n.cdi("beside a process that computes")
	if now := n.sh("systemctl show -P MainPID train"); now != train || train == "0" {
		n.t.Errorf("train was process %s, and is %s", train, now)
	}
	if now := n.devices(); !slices.Contains(now, one.Compute[0].UUID) {
		n.t.Errorf("the device %s is gone: %v", one.Compute[0].UUID, now)
	}
	n.sh("systemctl stop train")
}

// cut ends something in the middle of a change from one layout to another. The
// GPU comes to one of the two, and never stays between.
func (n *node) cut(what, command, from, hasFrom, to, hasTo string) {
	n.t.Helper()
	n.configure(succeeded, from)
	n.is("before "+what+" is killed", hasFrom)
	n.sh("printf 'call=nvmlDeviceCreateGpuInstanceWithPlacement latency=2s\\n' > /run/fakenvml/state.faults")
	id := n.Start("mig.configure", n.name, n.spec(to), "--allow-impact", "gpu-reset")
	// Only an instance that is made takes long enough for the kill to meet it.
	n.await("an instance is being made", func() bool {
		shown := n.sh("systemctl show -P ActiveState -P Description " + changing)
		return strings.Contains(shown, "activating") && strings.Contains(shown, "create GPU instance")
	})
	if n.layout() == hasFrom {
		n.t.Errorf("%s is killed before anything has changed", what)
	}
	n.sh(command)
	n.sh("rm -f /run/fakenvml/state.faults")
	task := n.End(id)
	want := map[taskv1.TaskState]string{succeeded: hasTo, failed: hasFrom}[task.GetState()]
	if want == "" {
		n.t.Errorf("%s was killed: the task is %s", what, told(task))
	}
	n.t.Logf("%s was killed: %s", what, told(task))
	n.is("after "+what+" was killed", want)
	n.cdi("after " + what + " was killed")
}

// reboot: what a boot takes from the GPU is there again.
func (n *node) reboot() {
	n.t.Helper()
	n.configure(succeeded, mixed)
	n.watched("containerd")
	if err := n.Machine(n.name).Reboot(n.t.Context()); err != nil {
		n.t.Fatal(err)
	}
	if atBoot, then := n.seen("fakenvml"), n.seen("containerd"); atBoot != "" || then != hasMixed {
		n.t.Errorf("the layout was %q at the boot, and %q when containerd started; want none, and %q", atBoot, then, hasMixed)
	}
	n.await("the layout is back", func() bool { return n.layout() == hasMixed })
	n.await("the specification is back", func() bool { return n.sh("test -e "+cdiFile+" && echo yes || true") == "yes" })
	n.await("nothing changes any more", func() bool { return n.sh("systemctl is-active "+changing+" || true") != "activating" })
	n.is("after a boot", hasMixed)
}

// hangs: the driver hangs from the boot on. The agent is there and does its other
// work; once the driver answers, the layout is there again.
func (n *node) hangs() {
	n.t.Helper()
	n.waitAtMost("5s")
	n.sh("echo 'call=nvmlInit_v2 sleep=inf' > /var/lib/fakenvml/at-boot; mkdir -p /export /data")
	if err := n.Machine(n.name).Reboot(n.t.Context()); err != nil {
		n.t.Fatal(err)
	}
	n.await("the agent answers", func() bool {
		return n.sh("timeout 5 millwrightd journal list -o json >/dev/null && echo yes || true") == "yes"
	})
	if task := n.Do("storage.mount", n.name, "target: /data\nbind: {path: /export}"); task.GetState() != succeeded {
		n.t.Errorf("another task while the driver hangs: %s", told(task))
	}
	if got := n.layout(); got != "" {
		n.t.Errorf("the driver hangs and the layout is %q: this shows nothing", got)
	}
	n.sh("rm /run/fakenvml/state.faults")
	n.await("the layout is back", func() bool { return n.layout() == hasMixed })
	n.is("after a boot with a driver that hangs", hasMixed)
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
			n.t.Fatalf("%s: not within %s; the layout is %s", what, patience, n.layout())
		case <-tick.C:
		}
	}
}
