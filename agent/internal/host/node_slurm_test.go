//go:build millwright_node

package nodehost_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/millwright/tasks/host"
)

// slurmConf makes the machine a cluster of its own: controller and only node.
const slurmConf = `ClusterName=alone
SlurmctldHost=%[1]s
SlurmUser=slurm
AuthType=auth/munge
CredType=cred/munge
SelectType=select/cons_tres
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
NodeName=%[1]s CPUs=1 RealMemory=100 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
`

// slurm starts a real controller with the machine as its only node.
func slurm(t testing.TB) host.SlurmRef {
	t.Helper()
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("/etc/slurm/slurm.conf", fmt.Appendf(nil, slurmConf, name), 0o644); err != nil {
		t.Fatal(err)
	}
	asRoot(t, "mkdir -p /var/lib/slurm/slurmctld /var/lib/slurm/slurmd /var/log/slurm; chown -R slurm: /var/lib/slurm /var/log/slurm; systemctl start munge slurmctld slurmd")
	t.Cleanup(func() {
		asRoot(t, "systemctl stop slurmd slurmctld munge; rm -r /etc/slurm/slurm.conf /var/lib/slurm /var/log/slurm; systemctl reset-failed slurmd slurmctld munge 2>/dev/null || :")
	})
	for deadline := time.Now().Add(30 * time.Second); ; <-time.After(100 * time.Millisecond) {
		out, err := exec.Command("sinfo", "--noheader", "--format=%T").CombinedOutput()
		if err == nil && strings.TrimSpace(string(out)) == "idle" {
			return host.SlurmRef{Node: name, Servers: []string{name}}
		}
		if time.Now().After(deadline) {
			t.Fatalf("the node is not idle: %s (%v)", out, err)
		}
	}
}

func asRoot(t testing.TB, line string) {
	t.Helper()
	if out, err := exec.Command("sh", "-c", line).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", line, err, out)
	}
}
