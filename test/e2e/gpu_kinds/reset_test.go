package gpukinds

import (
	"fmt"
	"strings"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// third is the GPU that all is done to.
const third = 3

// resets tells of a node with eight GPUs, one of which is reset.
func resets(n *node) {
	n.mig()
	for _, part := range []func(){n.needed, n.inUse, n.agentKilled, n.commandKilled, n.hangs, n.noHelp, n.virtual} {
		n.untouched(third, part)
	}
}

// instances names the instances of the GPU.
func (n *node) instances() string {
	n.t.Helper()
	var out []string
	for _, i := range n.gpus()[third].Instances {
		out = append(out, fmt.Sprintf("%s/%d", i.Profile, len(i.Compute)))
	}
	return strings.Join(out, " ")
}

const layout = "3g.40gb/1 3g.40gb/1"

// mig partitions the GPU, so that a reset has something to take.
func (n *node) mig() {
	n.t.Helper()
	spec := fmt.Sprintf("layouts:\n- select: {uuids: [%s]}\n  instances: [{profile: 3g.40gb, count: 2}]\nwait_for_jobs: 5s\n", n.gpus()[third].UUID)
	if task := n.Do("mig.configure", n.name, spec); task.GetState() != succeeded {
		n.t.Fatalf("mig.configure: %s", told(task))
	}
}

// whole asks that the GPU has what it had: its layout and persistence mode.
func (n *node) whole(when string) {
	n.t.Helper()
	if g := n.gpus()[third]; n.instances() != layout || g.Values["persistence"] != 1 || g.Values["mig_current"] != 1 {
		n.t.Errorf("%s the GPU has %q, persistence %d, MIG %d", when, n.instances(), g.Values["persistence"], g.Values["mig_current"])
	}
}

// needed: what needs no reset is not reset; what needs one is, once, and has its
// layout again.
func (n *node) needed() {
	n.reset(succeeded, third, "")
	if got := n.resetsRun(); got != 0 {
		n.t.Errorf("a GPU that needs none was reset (%d)", got)
	}
	n.sick(third, "recovery_action=1")
	r := result[*gpuv1.ResetResult](n.t, n.reset(succeeded, third, ""))
	g := r.GetGpus()[0]
	if g.GetResetBy() != gpuv1.ResetBy_RESET_BY_COMMAND || g.GetRecoveryBefore() != "gpu_reset" || g.GetRecoveryAfter() != "none" || !strings.Contains(g.GetMigLayout(), "3g.40gb") {
		n.t.Errorf("the result is %v", r)
	}
	if got := n.resetsRun(); got != 1 {
		n.t.Errorf("nvidia-smi was run %d times, want once", got)
	}
	n.whole("after a reset")
}

// inUse: a process holds the GPU. It is named, and neither ended nor disturbed.
func (n *node) inUse() {
	n.sick(third, "recovery_action=4")
	n.sh("systemd-run --quiet --unit=train fakenvml-state hold 3")
	n.await("train holds the GPU", func() bool {
		return strings.Contains(n.sh("ls -l /proc/$(systemctl show -P MainPID train)/fd"), "/dev/nvidia3")
	})
	before := n.resetsRun()
	n.says(n.reset(failed, third, ""), "GPU_IN_USE", "fakenvml-state hold 3", "/dev/nvidia3")
	if n.sh("systemctl is-active train") != "active" || n.resetsRun() != before {
		n.t.Error("the process was disturbed, or a reset was tried in spite of it")
	}
	n.whole("while it is in use")
	n.sh("systemctl stop train")
}

// unit is the one in which nvidia-smi runs.
const unit = `systemctl list-units --plain --no-legend --state=active,activating 'millwright-task-*' | awk '{print $1}'`

// inFlight begins a reset that takes a while, and waits until it is under way.
func (n *node) inFlight(latency string) string {
	n.t.Helper()
	n.sick(third, "recovery_action=1")
	n.sh("echo 'call=nvidia-smi latency=" + latency + "' > " + faults)
	before := n.resetsRun()
	id := n.Start("gpu.reset", n.name, n.spec(third, ""), "--allow-impact", "gpu-reset")
	n.await("nvidia-smi runs", func() bool { return n.resetsRun() == before+1 && n.sh(unit) != "" })
	return id
}

// agentKilled: the agent dies while nvidia-smi runs. That is found again, and no
// other is run.
func (n *node) agentKilled() {
	before := n.resetsRun()
	id := n.inFlight("6s")
	n.sh("systemctl kill --kill-whom=main --signal=KILL millwrightd")
	task := n.End(id)
	if task.GetState() != succeeded {
		n.t.Errorf("the agent was killed in the reset: %s", told(task))
	}
	n.sh("rm -f " + faults)
	if got := n.resetsRun() - before; got != 1 {
		n.t.Errorf("nvidia-smi was run %d times, want once", got)
	}
	n.whole("after the agent was killed in a reset")
}

// commandKilled: nvidia-smi dies with all of its unit, so that nobody knows what it
// did. A person is asked, and it is not run again.
func (n *node) commandKilled() {
	before := n.resetsRun()
	id := n.inFlight("60s")
	n.sh("systemctl kill --signal=KILL $(" + unit + ")")
	task := n.End(id)
	if task.GetState() != held || task.GetReason() != "OUTCOME_UNKNOWN" {
		n.t.Errorf("nvidia-smi was killed: %s", told(task))
	}
	n.sh("rm -f " + faults + "; systemctl restart millwrightd")
	if _, err := n.Millctl(n.t.Context(), "task", "resolve", id, "--as", "undo", "--reason", "looked at it", "--wait"); err != nil {
		n.t.Error(err)
	}
	n.Await(id, failed)
	if got := n.resetsRun() - before; got != 1 {
		n.t.Errorf("nvidia-smi was run %d times, want once", got)
	}
	n.whole("after nvidia-smi was killed")
}

// hangs: the driver hangs in the reset. nvidia-smi is stopped, the task says so, and
// the agent does other work.
func (n *node) hangs() {
	n.sick(third, "recovery_action=1")
	n.sh("echo 'call=nvidia-smi sleep=inf' > " + faults + "; mkdir -p /export /data")
	task := n.reset(failed, third, "timeout: 5s\n")
	n.says(task, "GPU_DRIVER", "did not end in time")
	if task := n.Do("storage.mount", n.name, "target: /data\nbind: {path: /export}"); task.GetState() != succeeded {
		n.t.Errorf("another task afterwards: %s", told(task))
	}
	n.sh("rm -f " + faults)
	n.whole("after a reset that hung")
}

// noHelp: after the reset the driver asks for a reboot.
func (n *node) noHelp() {
	n.sick(third, "recovery_action=1 recovery_stays=2")
	n.says(n.reset(failed, third, ""), "GPU_RECOVERY", "node_reboot", "system.reboot")
	n.whole("after a reset that did not help")
	n.says(n.reset(refused, third, ""), "system.reboot")
	n.sick(third, "recovery_action=0 recovery_stays=0")
}

// virtual: no reset where a hypervisor has the GPU.
func (n *node) virtual() {
	n.sick(third, "recovery_action=1 virtualization=1")
	before := n.resetsRun()
	n.says(n.reset(refused, third, ""), "hypervisor")
	if n.resetsRun() != before {
		n.t.Error("it was tried all the same")
	}
	n.sick(third, "recovery_action=0 virtualization=0")
}

// together tells of a node before Hopper, whose GPUs NVLink joins.
func together(n *node) {
	all := n.gpus()
	n.sick(0, "recovery_action=4 reset_group=1")
	n.sick(1, "reset_group=1")
	n.says(n.reset(refused, 0, ""), all[1].UUID)
	spec := "select: {all: true}\nwait_for_jobs: 3s\n"
	task := n.Do("gpu.reset", n.name, spec, "--allow-impact", "gpu-reset")
	if task.GetState() != succeeded {
		n.t.Fatalf("both together: %s", told(task))
	}
	for _, g := range result[*gpuv1.ResetResult](n.t, task).GetGpus() {
		if g.GetResetBy() != gpuv1.ResetBy_RESET_BY_COMMAND || g.GetRecoveryAfter() != "none" {
			n.t.Errorf("GPU %d: %v", g.GetIndex(), g)
		}
	}
	if got := n.resetsRun(); got != 1 {
		n.t.Errorf("nvidia-smi was run %d times, want once for both", got)
	}
}
