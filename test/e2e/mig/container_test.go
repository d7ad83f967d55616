package mig

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

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

type descriptor struct {
	MediaType string `json:"mediaType"`
	Digest    string `json:"digest"`
	Size      int    `json:"size"`
}

// image builds the program and an OCI archive with it.
func image(t *testing.T) (archive []byte, digest string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "main.go"), []byte(looks), 0o600); err != nil {
		t.Fatal(err)
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-ldflags=-s -w", "-o", filepath.Join(dir, "looks"), filepath.Join(dir, "main.go"))
	build.Dir, build.Env = dir, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the image's program: %v: %s", err, out)
	}
	binary, err := os.ReadFile(filepath.Join(dir, "looks"))
	if err != nil {
		t.Fatal(err)
	}
	blobs := map[string][]byte{"oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`)}
	add := func(mediaType string, data []byte) descriptor {
		sum := sha256.Sum256(data)
		name := hex.EncodeToString(sum[:])
		blobs["blobs/sha256/"+name] = data
		return descriptor{"application/vnd.oci.image." + mediaType, "sha256:" + name, len(data)}
	}
	layer := add("layer.v1.tar", tarOf(t, map[string][]byte{"looks": binary, "out/.keep": nil}, 0o755))
	config := add("config.v1+json", marshal(t, map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "config": map[string]any{"Entrypoint": []string{"/looks"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{layer.Digest}},
	}))
	manifest := add("manifest.v1+json", marshal(t, map[string]any{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": []descriptor{layer},
	}))
	blobs["index.json"] = marshal(t, map[string]any{"schemaVersion": 2, "manifests": []descriptor{manifest}})
	return tarOf(t, blobs, 0o644), manifest.Digest
}

func tarOf(t *testing.T, files map[string][]byte, mode int64) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, data := range files {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(data))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func marshal(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

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
