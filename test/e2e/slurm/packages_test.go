package slurm

import (
	_ "embed"
	"strings"
	"testing"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/cluster/clustertest"
)

//go:embed packages.sh
var takeOff string

const (
	// packagesThere is what the node has of packages, and of what they bring.
	packagesThere = `dpkg-query --show --showformat='${Package} ${Version} ${db:Status-Abbrev}\n'; dpkg --audit
ls -d /etc/munge/* /usr/sbin/munged /usr/sbin/slurmd /usr/bin/srun /usr/sbin/policy-rc.d 2>/dev/null; true`
	// packagesInstalled is that without the packages that left their configuration.
	packagesInstalled = "{ " + packagesThere + "; } | grep -v ' rc *$'"
)

// packages: a node without Slurm and munge gets them with its join, from a source
// of the site's and from a file, and leave takes away what the join brought.
func packages(t *testing.T, c *clustertest.Cluster) {
	const node = "n3"
	succeed(t, c.Do("slurm.leave", node, "{}"))
	versions := c.Sh(node, "dpkg-query --show --showformat='${Version} ' munge slurmd; "+
		"for p in munge slurmd slurm-client; do dpkg-query --show --showformat='${Status}' $p | grep -q 'ok installed' || exit 1; done")
	munge, slurmd, ok := strings.Cut(versions, " ")
	if !ok {
		t.Fatalf("the versions of munge and slurmd: %q", versions)
	}
	c.Sh(node, takeOff)
	sum := c.Sh(node, "sha256sum /opt/local/slurmd.deb | cut -d' ' -f1")
	spec := func(munge, slurm string) string {
		return keyed(2) + "packages:\n- {name: munge, version: " + munge + "}\n- {name: slurm-client, version: " + slurm + "}\n" +
			"- {name: slurmd, version: " + slurmd + ", file: /opt/local/slurmd.deb, sha256: " + sum + "}\n"
	}
	before, installed := c.Sh(node, packagesThere), c.Sh(node, packagesInstalled)
	for _, tc := range []struct{ name, spec, words string }{
		{"a version that no source has", spec("0.6-1", slurmd), "package munge: version 0.6-1: no source of the node offers it; they have " + munge},
		{"a file with another digest", strings.ReplaceAll(spec(munge, slurmd), sum, strings.Repeat("0", 64)), "package slurmd: /opt/local/slurmd.deb has the SHA-256 " + sum},
		{"without a key", strings.ReplaceAll(spec(munge, slurmd), "munge_key: {name: munge-key}\n", ""), "munge_key is needed"},
	} {
		if task := c.Do("slurm.join", node, tc.spec); task.GetState() != taskv1.TaskState_TASK_STATE_REFUSED || !strings.Contains(task.GetMessage(), tc.words) {
			t.Errorf("%s: %s %s: %s", tc.name, task.GetState(), task.GetReason(), task.GetMessage())
		}
	}
	same(t, c, node, "refused joins", packagesThere, before)

	// Undone, what was installed is gone, with its configuration.
	c.Put("other-key", []byte(strings.Repeat("a key of a third cluster ", 4)))
	task := c.Do("slurm.join", node, strings.ReplaceAll(spec(munge, slurmd), "munge-key", "other-key"))
	if task.GetState() != taskv1.TaskState_TASK_STATE_FAILED || task.GetReason() != "MUNGE_KEY_REFUSED" || task.GetUndo() != taskv1.UndoState_UNDO_STATE_COMPLETE {
		t.Errorf("with another key: %s %s, undo %s: %s", task.GetState(), task.GetReason(), task.GetUndo(), task.GetMessage())
	}
	same(t, c, node, "a join that was undone", packagesThere, before)

	joined := succeed(t, c.Do("slurm.join", node, spec(munge, slurmd)))
	if s := joined.GetPlan().GetSteps(); len(s) == 0 || s[0].GetType() != "package.install" {
		t.Errorf("the packages do not come first: %v", s)
	}
	idle(t, c, node)
	isMember(t, c, node, "gpu:h100:2")
	if got := c.Sh(node, "apt-mark showhold | sort | xargs; grep -c '^# Package: ' /etc/default/millwright-slurmd; cat /var/lib/millwright/packages/brought.json | grep -c :"); got != "munge slurm-client slurmd\n3\n3" {
		t.Errorf("held and recorded: %q", got)
	}
	nothing(t, c, node, spec(munge, slurmd))
	succeed(t, c.Do("slurm.leave", node, "{}"))
	same(t, c, node, "leave", packagesInstalled, installed)
	if got := c.Sh("slurm", "scontrol show node "+node+" || true"); !strings.Contains(got, "not found") {
		t.Errorf("the controller still has the node: %s", got)
	}
}

// same asks that a node has the packages that it had.
func same(t *testing.T, c *clustertest.Cluster, node, what, look, before string) {
	t.Helper()
	if after := c.Sh(node, look); after != before {
		t.Errorf("after %s the node has\n%s\nbefore:\n%s", what, after, before)
	}
}

// rotates gives the cluster another key while nodes are members: a node that gets
// it before the controller has it is put back, and works; then both get it.
func rotates(t *testing.T, c *clustertest.Cluster) {
	next := strings.Repeat("the cluster's next key ", 4)
	if _, err := c.MillctlInput(t.Context(), next, "secret", "rotate", "munge-key", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	fails(t, c, "a key that the controller does not have yet", "slurm.reconfigure", "n1", reconfigure(1, "0s"), "MUNGE_KEY_REFUSED", "munge key is not the cluster's")
	idle(t, c, "n1")
	isMember(t, c, "n1", "gpu:h100:1")

	// The site rotates its controller, and the node that has its key by hand.
	for _, n := range []string{"slurm", "n5"} {
		give(t, c, n, []byte(next))
		c.Sh(n, "systemctl restart munge")
	}
	c.Sh("slurm", "systemctl restart slurmctld; for i in $(seq 300); do scontrol ping | grep -q ' is UP' && exit 0; sleep 0.1; done; exit 1")
	for n, gpus := range map[string]int{"n1": 1, "n2": 2} {
		task := succeed(t, c.Do("slurm.join", n, keyed(gpus)))
		if len(task.GetPlan().GetSteps()) == 0 {
			t.Errorf("%s: a join with another key plans nothing", n)
		}
		idle(t, c, n)
		nothing(t, c, n, keyed(gpus))
	}
	isMember(t, c, "n1", "gpu:h100:1")
	isMember(t, c, "n2", "gpu:h100:2")
}
