package mig

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
	"github.com/gpuaas/millwright/test/fakenvml"
	"github.com/gpuaas/millwright/test/testbed"
)

// gresConf is the site's: which files stand for which GPUs. They are the rights to
// the compute instances of the two layouts, by the driver's numbers of them, and
// the GPU that stays whole.
const gresConf = `Name=gpu Type=3g.40gb File=/dev/nvidia-caps/nvidia-cap[13,22]
Name=gpu Type=1g.10gb File=/dev/nvidia-caps/nvidia-cap[103,112]
Name=gpu Type=h100 File=/dev/nvidia1
`

// What Slurm has of the node in either layout.
const (
	gresHalves = "gpu:3g.40gb:2,gpu:h100:1"
	gresMixed  = "gpu:1g.10gb:2,gpu:3g.40gb:1,gpu:h100:1"
)

// compute is a job that computes on the first MIG device until it is let go.
const compute = `#!/bin/sh
cd /; fakenvml-state hold 0 compute 1 0 > /var/lib/job.holds & p=$!
until test -e /var/lib/job.go; do kill -0 $p || echo lost > /var/lib/job.lost; sleep 0.05; done
echo "$(date +%s%N) $(cat /var/lib/job.lost 2>/dev/null)" > /var/lib/job.end; kill $p`

// member is a node of a Slurm cluster that tells its GPUs as they are.
func member(t *testing.T, c *clustertest.Cluster, lib *fakenvml.Library) {
	n := &node{t: t, Cluster: c.With(t), name: "n3"}
	n.equip(lib, "H100")
	n.joins()
	n.gets("3g.40gb", 2)
	n.waitsForAJob()
	n.gets("1g.10gb", 2)
	n.gets("3g.40gb", 1)
	n.foreignDrain()
	n.bootsFirst()
	n.bootGoesOn()
}

// joins: the node has a layout, and then becomes a member.
func (n *node) joins() {
	n.t.Helper()
	n.configure(succeeded, halves)
	n.Sh(testbed.SlurmNode, "printf '"+strings.ReplaceAll(gresConf, "\n", `\n`)+"' > /etc/slurm/gres.conf; scontrol reconfigure")
	key, err := n.Machine(testbed.SlurmNode).ReadFile(n.t.Context(), "/etc/munge/munge.key")
	if err == nil {
		err = n.Machine(n.name).WriteFile(n.t.Context(), "/etc/munge/munge.key", key, 0o400)
	}
	if err == nil {
		err = n.Machine(n.name).WriteFile(n.t.Context(), "/usr/local/bin/compute", []byte(compute), 0o755)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	// The devices of both layouts are there from the boot on, since the site's
	// gres.conf names them all, and slurmd ends without one.
	n.sh(`chown munge: /etc/munge/munge.key; echo 'd /dev/nvidia-caps 0755' > /etc/tmpfiles.d/caps.conf
for i in nvidia1 nvidia-caps/nvidia-cap13 nvidia-caps/nvidia-cap22 nvidia-caps/nvidia-cap103 nvidia-caps/nvidia-cap112; do echo "c+ /dev/$i 0666 root root - 1:3"; done >> /etc/tmpfiles.d/caps.conf; systemd-tmpfiles --create /etc/tmpfiles.d/caps.conf`)
	if task := n.Do("slurm.join", n.name, "controllers: [slurm]\ndynamic:\n  features: [mw]\n  gpus: true\n"); task.GetState() != succeeded {
		n.t.Fatalf("slurm.join: %s", told(task))
	}
	n.idle(gresHalves)
}

// settles waits until the controller says what it should.
func (n *node) settles(command, want string) {
	n.t.Helper()
	got := n.Sh(testbed.SlurmNode, `for i in $(seq 300); do got=$(`+command+`); test "$got" = "`+want+`" && break; sleep 0.1; done; echo "$got"`)
	if got != want {
		n.t.Errorf("%s says %q after half a minute, want %q", command, got, want)
	}
}

// idle waits until the controller has the node without a drain, with these GPUs.
func (n *node) idle(gres string) {
	n.t.Helper()
	n.settles("sinfo --noheader -N -n "+n.name+" -o '%T %G'", "idle "+gres)
}

// gets: a job is given so many MIG devices of a profile, and not one more.
func (n *node) gets(profile string, count int) {
	n.t.Helper()
	ask := func(count int) string {
		return fmt.Sprintf("srun -w %s --gres=gpu:%s:%d -t1 --immediate=20 sh -c 'echo $(hostname) devices=$CUDA_VISIBLE_DEVICES; scontrol -d show job $SLURM_JOB_ID | grep -o \"GRES=[^ ]*IDX[^ ]*\"'", n.name, profile, count)
	}
	got := strings.Fields(n.Sh(testbed.SlurmNode, ask(count)))
	n.t.Logf("a job that asks for %d of %s gets %v", count, profile, got)
	if len(got) != 3 || got[0] != n.name || got[1] == "devices=" || len(strings.Split(got[1], ",")) != count || !strings.HasPrefix(got[2], fmt.Sprintf("GRES=gpu:%s:%d(IDX:", profile, count)) {
		n.t.Errorf("a job that asks for %d of %s says %q", count, profile, got)
	}
	if more := n.Sh(testbed.SlurmNode, ask(count+1)+" 2>&1 || true"); !strings.Contains(more, "Requested node configuration is not available") {
		n.t.Errorf("a job that asks for one more of %s says %q", profile, more)
	}
}

const drains = "drain,gpu-reset"

func (n *node) patient(instances string) string {
	return strings.Replace(n.spec(instances), "wait_for_jobs: 5s", "wait_for_jobs: 100s", 1)
}

// waitsForAJob: the task drains the node by its own tag, waits for a job that
// computes on a MIG device, also after its agent was killed, and touches nothing
// before the job has ended. Then the node is back with other GPUs.
func (n *node) waitsForAJob() {
	n.t.Helper()
	job := n.Sh(testbed.SlurmNode, "sbatch --parsable -w "+n.name+" --gres=gpu:3g.40gb:1 -t 10 -o /dev/null -D / --wrap /usr/local/bin/compute")
	n.await("the job computes", func() bool { return n.sh("cat /var/lib/job.holds 2>/dev/null || true") == "holding" })
	devices := n.devices()
	if task := n.Do("mig.configure", n.name, n.patient(mixed), "--allow-impact", "gpu-reset"); task.GetReason() != "IMPACT_NOT_ALLOWED" {
		n.t.Errorf("signed without the drain: %s", told(task))
	}
	id := n.Start("mig.configure", n.name, n.patient(mixed), "--allow-impact", drains)
	n.waits(id, job)
	n.sh("systemctl kill --signal=KILL --kill-whom=main millwrightd; for i in $(seq 300); do systemctl is-active -q millwrightd && exit 0; sleep 0.1; done; exit 1")
	if err := n.WaitConnected(n.t.Context(), n.name); err != nil {
		n.t.Fatal(err)
	}
	n.waits(id, job)
	if now := n.devices(); strings.Join(now, " ") != strings.Join(devices, " ") {
		n.t.Errorf("while the job runs the devices are %v, and were %v", now, devices)
	}
	n.sh("touch /var/lib/job.go; for i in $(seq 300); do test -e /var/lib/job.end && exit 0; sleep 0.1; done; exit 1")
	end := strings.Fields(n.sh("cat /var/lib/job.end"))
	task := n.End(id)
	if task.GetState() != succeeded {
		n.t.Fatalf("mig.configure after the job: %s", told(task))
	}
	n.settles("scontrol show job "+job+" | grep -o 'JobState=[A-Z]*\\|Restarts=[0-9]*' | xargs", "JobState=COMPLETED Restarts=0")
	if len(end) != 1 {
		n.t.Fatalf("the job was disturbed: %v", end)
	}
	ns, err := strconv.ParseInt(end[0], 10, 64)
	if err != nil {
		n.t.Fatal(err)
	}
	n.after(task, time.Unix(0, ns))
	n.is("after the job", hasMixed)
	n.cdi("after the job")
	n.idle(gresMixed)
}

// waits waits until the task says for which job it waits, and the node is drained
// in its name.
func (n *node) waits(id, job string) {
	n.t.Helper()
	task, err := n.WaitTask(n.t.Context(), id, time.Minute, func(k *taskv1.Task) bool {
		for _, w := range k.GetConditions() {
			if w.GetType() == "Waiting" && w.GetReason() == "SLURM_JOBS" && strings.Contains(w.GetMessage(), "job "+job+" of root (running, until ") {
				return true
			}
		}
		return k.GetState() >= succeeded
	})
	if err != nil || task.GetState() != taskv1.TaskState_TASK_STATE_RUNNING {
		n.t.Fatalf("it does not say that it waits for job %s: %s (%v)", job, told(task), err)
	}
	n.settles("sinfo --noheader -R -n "+n.name+" -o %E | grep -c '^mw:mig.configure-[0-9a-f]*: '", "1")
	n.settles("sinfo --noheader -N -n "+n.name+" -o %T", "draining")
	n.is("while it waits", hasHalves)
}

// after asks that no step that changes a GPU began before a time.
func (n *node) after(task *taskv1.Task, ended time.Time) {
	n.t.Helper()
	changes := 0
	for i, p := range task.GetPlan().GetSteps() {
		if p.GetType() == "mig.clear" || p.GetType() == "mig.create" {
			changes++
			if at := task.GetSteps()[i].GetStartTime().AsTime(); at.Before(ended) {
				n.t.Errorf("step %s began at %v, and the job ended at %v", p.GetType(), at, ended)
			}
		}
	}
	if changes == 0 {
		n.t.Errorf("no step changes a GPU: %v", task.GetPlan())
	}
}

// foreignDrain: an administrator's drain would be lost when the node registers
// with other GPUs, and so nothing is done; where nothing is to be done it stays.
func (n *node) foreignDrain() {
	n.t.Helper()
	const reason, kept = "bad fan", "bad fan|n3"
	n.Sh(testbed.SlurmNode, "scontrol update nodename="+n.name+" state=drain reason='"+reason+"'")
	if task := n.Do("mig.configure", n.name, n.patient(halves), "--allow-impact", drains); task.GetState() != taskv1.TaskState_TASK_STATE_REFUSED || !strings.Contains(task.GetMessage(), reason) {
		n.t.Errorf("over an administrator's drain: %s", told(task))
	}
	if task := n.Do("mig.configure", n.name, n.patient(mixed), "--allow-impact", drains); task.GetState() != succeeded || len(task.GetPlan().GetSteps()) > 0 {
		n.t.Errorf("of what stands: %s", told(task))
	}
	n.is("under an administrator's drain", hasMixed)
	n.settles("sinfo --noheader -R -n "+n.name+" -o '%E|%N'", kept)
	n.Sh(testbed.SlurmNode, "scontrol update nodename="+n.name+" state=undrain")
	n.idle(gresMixed)
}

// watched has systemd note what is on the GPU at the boot, before the agent, and
// when a unit starts.
func (n *node) watched(unit string) {
	n.t.Helper()
	for of, when := range map[string]string{unit: "ExecStartPre", "fakenvml": "ExecStart"} {
		n.sh(fmt.Sprintf(`d=/etc/systemd/system/%s.service.d; mkdir -p $d; printf "[Service]\n%s=/bin/sh -c '/usr/local/bin/fakenvml-state dump > /run/at-%s.json'\n" > $d/60-seen.conf; systemctl daemon-reload`, of, when, of))
	}
}

// seen is what was on the first GPU then.
func (n *node) seen(unit string) string {
	n.t.Helper()
	var s fakenvml.State
	if err := json.Unmarshal([]byte(n.sh("cat /run/at-"+unit+".json")), &s); err != nil {
		n.t.Fatal(err)
	}
	return layoutOf(s)
}

// bootsFirst: a boot takes the layout, and it is back before slurmd starts.
func (n *node) bootsFirst() {
	n.t.Helper()
	n.watched("slurmd")
	if err := n.Machine(n.name).Reboot(n.t.Context()); err != nil {
		n.t.Fatal(err)
	}
	if got := n.seen("fakenvml"); got != "" {
		n.t.Errorf("the boot left %q on the GPU: this shows nothing", got)
	}
	if got := n.seen("slurmd"); got != hasMixed {
		n.t.Errorf("slurmd started when the layout was %q, want %q", got, hasMixed)
	}
	n.idle(gresMixed)
	n.gets("1g.10gb", 2)
}

// bootGoesOn: where the layout cannot be made, because the driver hangs, slurmd
// starts all the same once the wait is over.
func (n *node) bootGoesOn() {
	n.t.Helper()
	n.waitAtMost("5s")
	n.sh("echo 'call=nvmlInit_v2 sleep=inf' > /var/lib/fakenvml/at-boot")
	if err := n.Machine(n.name).Reboot(n.t.Context()); err != nil {
		n.t.Fatal(err)
	}
	if got := n.sh("systemctl is-active slurmd"); got != "active" {
		n.t.Errorf("slurmd is %s", got)
	}
	if got := n.seen("slurmd"); got != "" {
		n.t.Errorf("slurmd started when the layout was %q: this shows nothing", got)
	}
	if got := n.sh("journalctl -b -u millwright-restored --no-pager"); !strings.Contains(got, "after 5s it is not known that the GPUs have the layouts") {
		n.t.Errorf("the wait says %s", got)
	}
	n.sh("rm /run/fakenvml/state.faults")
	n.await("the layout is back", func() bool { return n.layout() == hasMixed })
	n.idle(gresMixed)
}

// waitAtMost bounds what others wait for at boot.
func (n *node) waitAtMost(most string) {
	n.t.Helper()
	n.sh(`d=/etc/systemd/system/millwright-restored.service.d; mkdir -p $d
printf '[Service]\nExecStart=\nExecStart=/usr/bin/millwrightd await-restored --at-most ` + most + `\n' > $d/most.conf; systemctl daemon-reload`)
}
