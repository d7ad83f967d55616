package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"

	"github.com/gpuaas/millwright/test/cluster"
)

// containers are container.run and container.stop. Their image is empty: the
// program is the node's, seen through mounts. As a container's first process it
// is deaf to the signal that asks it to end, and so is killed after the grace.
func containers() []story {
	run := story{
		kind: "container.run", facts: containerFacts, state: succeeded,
		spec: func(l string) string {
			_, digest := cluster.EmptyImage(l) // its own: one that is there already is not imported
			return fmt.Sprintf(`name: %[1]s
image: {digest: "%[2]s", ociArchive: /root/image-%[1]s.tar}
argv: [/usr/bin/sleep, "100000"]
stopGrace: 1s
mounts:
%[3]s`, l, digest, cluster.NodePrograms)
		},
		prepare: func(l string) string {
			archive, _ := cluster.EmptyImage(l)
			return fmt.Sprintf("echo %s | base64 -d > /root/image-%s.tar", base64.StdEncoding.EncodeToString(archive), l)
		},
	}
	ends := run
	ends.variant, ends.state, ends.reason, ends.undo = "that ends", failed, "CONTAINER_ENDED", complete
	ends.spec = func(l string) string {
		return string(bytes.Replace([]byte(run.spec(l)), []byte(`[/usr/bin/sleep, "100000"]`), []byte(`[/usr/bin/false]`), 1))
	}
	stop := story{
		kind: "container.stop", facts: containerFacts, state: succeeded, prepare: run.prepare,
		spec: func(l string) string { return "name: " + l },
		setup: func(ctx context.Context, t *trial) error {
			return t.done(ctx, "container.run", run.spec(t.label))
		},
	}
	// containerd refuses to start in a directory that is there, and has no process.
	over := run
	over.own, over.variant = true, "over a start that was cut off"
	over.prepare = func(l string) string {
		return run.prepare(l) + "; mkdir -p /run/containerd/io.containerd.runtime.v2.task/millwright/" + l + "/rootfs; mount -t tmpfs left /run/containerd/io.containerd.runtime.v2.task/millwright/" + l + "/rootfs"
	}
	return []story{run, ends, stop, over}
}

// containerFacts tell what containerd, systemd and the kernel have of a
// container, and the intent.
func containerFacts(l string) string {
	return fmt.Sprintf(`c="ctr -n millwright"
echo container=$($c containers ls -q | grep -cx %[1]s) snapshot=$($c snapshots ls | grep -c '^%[1]s ') lease=$($c leases ls -q | grep -c 'millwright-%[1]s$') \
 shims=$(pgrep -fc 'containerd-shi[m].*-id %[1]s ') running=$(cat /sys/fs/cgroup/pids/millwright.slice/millwright-container-%[1]s.scope/cgroup.procs 2>/dev/null | wc -l) \
 logs=$(ls -d /var/lib/millwright/containers/%[1]s 2>/dev/null | wc -l) intent=$(millwrightd status | grep -c "container:%[1]s ")`, l)
}
