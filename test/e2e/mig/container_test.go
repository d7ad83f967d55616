package mig

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// looks is what the image runs: it tells which of NVIDIA's devices it can open.
const looks = `package main

import (
	"os"
	"path/filepath"
	"sort"
	"strings"
	"time"
)

func main() {
	var seen []string
	for _, pattern := range []string{"/dev/nvidia*", "/dev/nvidia-caps/*"} {
		all, _ := filepath.Glob(pattern)
		for _, p := range all {
			if f, err := os.OpenFile(p, os.O_RDWR, 0); err == nil {
				f.Close()
				seen = append(seen, p)
			}
		}
	}
	sort.Strings(seen)
	os.WriteFile("/out/seen", []byte(strings.Join(seen, " ")+" "+os.Getenv("NVIDIA_VISIBLE_DEVICES")), 0o644)
	time.Sleep(time.Hour)
}
`

// nodesOf are the device nodes that the CDI specification has of a device, and
// those that all have.
func (n *node) nodesOf(uuid string) []string {
	n.t.Helper()
	type edits struct {
		DeviceNodes []struct{ Path string }
	}
	var spec struct {
		Devices []struct {
			Name           string
			ContainerEdits edits
		}
		ContainerEdits edits
	}
	if err := json.Unmarshal([]byte(n.sh("cat "+cdiFile)), &spec); err != nil {
		n.t.Fatal(err)
	}
	var out []string
	all := spec.ContainerEdits.DeviceNodes
	for _, d := range spec.Devices {
		if d.Name == uuid {
			all = append(all, d.ContainerEdits.DeviceNodes...)
		}
	}
	for _, d := range all {
		out = append(out, d.Path)
	}
	slices.Sort(out)
	return out
}

// containers: a container has the device nodes of its MIG device and no others (of
// the rights to instances the driver tells in /proc, where nothing can stand in, so
// that they are not among them here); one that asks for a device that went with a change of the GPUs is refused.
func (n *node) containers(archive []byte, digest string) {
	n.t.Helper()
	n.configure(succeeded, mixed)
	uuid := ""
	for _, i := range n.state().GPUs[0].Instances {
		if i.Profile == "1g.10gb" {
			uuid = i.Compute[0].UUID
		}
	}
	if err := n.Machine(n.name).WriteFile(n.t.Context(), "/opt/image.tar", archive, 0o644); err != nil {
		n.t.Fatal(err)
	}
	// A container can have devices, and no plain files, which stand for them here.
	n.sh(`mkdir -p /srv/out; for p in $(grep -o '"/dev/nvidia[^"]*"' ` + cdiFile + ` | tr -d '"' | sort -u); do rm -f $p; mknod -m 666 $p c 1 3; done`)
	spec := fmt.Sprintf("name: gpu\nimage: {digest: %q, ociArchive: /opt/image.tar}\nmounts: [{source: /srv/out, target: /out}]\ndevices: [millwright.dev/gpu=%s]\n", digest, uuid)
	if task := n.Do("container.run", n.name, spec); task.GetState() != succeeded {
		n.t.Fatalf("container.run with a MIG device: %s", told(task))
	}
	n.await("the container has looked", func() bool { return n.sh("cat /srv/out/seen 2>/dev/null || true") != "" })
	if got, want := n.sh("cat /srv/out/seen"), strings.Join(n.nodesOf(uuid), " ")+" void"; got != want {
		n.t.Errorf("the container can open %q, want %q", got, want)
	}
	if other := n.sh("ls /dev/nvidia1"); slices.Contains(n.nodesOf(uuid), other) {
		n.t.Errorf("%s is not its GPU's: %v", other, n.nodesOf(uuid))
	}
	if task := n.Do("container.stop", n.name, "name: gpu\n"); task.GetState() != succeeded {
		n.t.Fatalf("container.stop: %s", told(task))
	}
	n.configure(succeeded, halves)
	task := n.Do("container.run", n.name, spec)
	if task.GetState() != taskv1.TaskState_TASK_STATE_REFUSED || !strings.Contains(task.GetMessage(), "millwright.dev/gpu="+uuid+": it is gone since a change of the GPUs") {
		n.t.Errorf("with a device that is gone: %s", told(task))
	}
}
