//go:build millwright_node

package nodehost_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuaas/millwright/tasks/host"
)

// program is what the test binary does as the program of an image.
func program(args []string) int {
	switch args[0] {
	case "run":
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGTERM)
		<-c
		return 0
	case "exit":
		fmt.Fprintln(os.Stderr, "last words")
		code, _ := strconv.Atoi(args[1])
		return code
	default: // hog
		var all [][]byte
		for {
			all = append(all, bytes.Repeat([]byte{1}, 1<<20))
		}
	}
}

// image writes an OCI archive whose program is this test binary.
func image(t testing.TB) (archive, dgst string) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	binary, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	blobs := map[string][]byte{}
	add := func(mediaType string, data []byte) ocispec.Descriptor {
		sum := sha256.Sum256(data)
		blobs["blobs/sha256/"+hex.EncodeToString(sum[:])] = data
		return ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(data), Size: int64(len(data))}
	}
	marshal := func(v any) []byte {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	layer := add(ocispec.MediaTypeImageLayer, tarOf(t, map[string][]byte{"program": binary}, 0o755))
	config := add(ocispec.MediaTypeImageConfig, marshal(ocispec.Image{
		Platform: ocispec.Platform{OS: "linux", Architecture: runtime.GOARCH},
		Config:   ocispec.ImageConfig{Entrypoint: []string{"/program"}, Cmd: []string{"run"}},
		RootFS:   ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{layer.Digest}},
	}))
	manifest := add(ocispec.MediaTypeImageManifest, marshal(ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest,
		Config: config, Layers: []ocispec.Descriptor{layer},
	}))
	blobs["index.json"] = marshal(ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, Manifests: []ocispec.Descriptor{manifest}})
	blobs["oci-layout"] = []byte(`{"imageLayoutVersion":"1.0.0"}`)
	archive = filepath.Join(t.TempDir(), "image.tar")
	if err := os.WriteFile(archive, tarOf(t, blobs, 0o644), 0o600); err != nil {
		t.Fatal(err)
	}
	return archive, manifest.Digest.String()
}

func tarOf(t testing.TB, files map[string][]byte, mode int64) []byte {
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

// runtimeState is all that containers leave on a machine.
func runtimeState(t *testing.T) string {
	t.Helper()
	out := ""
	for _, what := range []string{"containers ls -q", "tasks ls -q", "images ls -q", "snapshots ls", "leases ls -q", "content ls -q"} {
		b, err := exec.Command("sh", "-c", "ctr -n millwright "+what).Output()
		if err != nil {
			t.Fatalf("ctr %s: %v: %s", what, err, b)
		}
		out += what + "\n" + string(b)
	}
	b, _ := exec.Command("sh", "-c", "pgrep -a containerd-shim | grep 'namespace millwright'; systemctl list-units --all --no-legend 'millwright-container-*'; ls -d /run/containerd/io.containerd.runtime.v2.task/millwright/* 2>/dev/null").Output() // pgrep finds nothing
	return out + string(b)
}

// TestContainerLeavesNothing runs a container over a restart of containerd, and
// compares the machine before and after. Others' containers stay.
func TestContainerLeavesNothing(t *testing.T) {
	h := newHost(t)
	needNode(t)
	archive, dgst := image(t)
	before := runtimeState(t)
	c := host.Container{Name: "mwtest-a", Image: dgst, Argv: []string{"/program", "run"}, Record: []byte("r"), MemoryBytes: 64 << 20}
	must(t, h.ImportImage(t.Context(), archive, dgst))
	must(t, h.CreateContainer(t.Context(), c))
	must(t, h.StartContainer(t.Context(), c.Name))
	first, err := h.ProbeContainer(t.Context(), c.Name)
	if err != nil || !first.Running {
		t.Fatalf("it is %+v, %v", first, err)
	}
	limit, _ := exec.Command("sh", "-c", "cat /sys/fs/cgroup/memory"+first.ControlGroup+"/memory.limit_in_bytes /sys/fs/cgroup"+first.ControlGroup+"/memory.max 2>/dev/null").Output() // one of them
	if strings.TrimSpace(string(limit)) != strconv.Itoa(64<<20) {
		t.Errorf("its limit is %s", limit)
	}
	shell(t, "systemctl restart containerd")
	if again, err := h.ProbeContainer(t.Context(), c.Name); err != nil || again.Process != first.Process || !again.Running {
		t.Errorf("after a restart of containerd it is %+v, %v; it was %+v", again, err, first)
	}
	must(t, h.RemoveContainer(t.Context(), c.Name))
	must(t, h.RemoveImage(t.Context(), dgst))
	if after := runtimeState(t); after != before {
		t.Errorf("left:\n%s\nbefore:\n%s", after, before)
	}
}

// What a start that was cut off has left in containerd's directory is not in the
// way for good, and what is mounted there is not deleted with it.
func TestContainerLeftOver(t *testing.T) {
	h := newHost(t)
	needNode(t)
	archive, dgst := image(t)
	before := runtimeState(t)
	c := host.Container{Name: "mwtest-left", Image: dgst, Argv: []string{"/program", "run"}, Record: []byte("r")}
	must(t, h.ImportImage(t.Context(), archive, dgst))
	must(t, h.CreateContainer(t.Context(), c))
	theirs := t.TempDir()
	must(t, os.WriteFile(filepath.Join(theirs, "kept"), nil, 0o600))
	shell(t, "d=/run/containerd/io.containerd.runtime.v2.task/millwright/mwtest-left/rootfs; mkdir -p $d && mount --bind "+theirs+" $d")
	must(t, h.StartContainer(t.Context(), c.Name))
	if st, err := h.ProbeContainer(t.Context(), c.Name); err != nil || !st.Running {
		t.Errorf("it is %+v, %v", st, err)
	}
	if _, err := os.Stat(filepath.Join(theirs, "kept")); err != nil {
		t.Error("what was mounted there was deleted")
	}
	must(t, h.RemoveContainer(t.Context(), c.Name))
	must(t, h.RemoveImage(t.Context(), dgst))
	if after := runtimeState(t); after != before {
		t.Errorf("left:\n%s\nbefore:\n%s", after, before)
	}
}

// A container that needs more memory than it may have ends, and it is told why.
func TestContainerOutOfMemory(t *testing.T) {
	h := newHost(t)
	needNode(t)
	archive, dgst := image(t)
	c := host.Container{Name: "mwtest-oom", Image: dgst, Argv: []string{"/program", "hog"}, Record: []byte("r"), MemoryBytes: 32 << 20}
	must(t, h.ImportImage(t.Context(), archive, dgst))
	must(t, h.CreateContainer(t.Context(), c))
	must(t, h.StartContainer(t.Context(), c.Name))
	if st, err := h.ProbeContainer(t.Context(), c.Name); err != nil || st.Running || !st.OOMKilled || st.ExitCode != 137 {
		t.Errorf("it is %+v, %v", st, err)
	}
	must(t, h.RemoveContainer(t.Context(), c.Name))
	must(t, h.RemoveImage(t.Context(), dgst))
}
