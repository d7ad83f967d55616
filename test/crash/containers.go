package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"runtime"
)

// containers are container.run and container.stop. Their image is empty: the
// program is the node's, seen through mounts.
func containers() []story {
	archive, digest := emptyImage()
	run := story{
		kind: "container.run", facts: containerFacts, state: succeeded,
		spec: func(l string) string {
			return fmt.Sprintf(`name: %[1]s
image: {digest: "%[2]s", ociArchive: /root/image-%[1]s.tar}
argv: [/usr/bin/sleep, "100000"]
mounts:
- {source: /usr, target: /usr, readOnly: true}
- {source: /usr/lib, target: /lib, readOnly: true}
- {source: /usr/lib64, target: /lib64, readOnly: true}
`, l, digest)
		},
		prepare: func(l string) string {
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
	return []story{run, ends, stop}
}

// containerFacts tell what containerd, systemd and the kernel have of a
// container, and the intent. Other trials use the same image.
func containerFacts(l string) string {
	return fmt.Sprintf(`c="ctr -n millwright"
echo container=$($c containers ls -q | grep -cx %[1]s) snapshot=$($c snapshots ls | grep -c '^%[1]s ') lease=$($c leases ls -q | grep -c 'millwright-%[1]s$') \
 shims=$(pgrep -fc 'containerd-shim.*-id %[1]s ') running=$(cat /sys/fs/cgroup/pids/millwright.slice/millwright-container-%[1]s.scope/cgroup.procs 2>/dev/null | wc -l) \
 logs=$(ls -d /var/lib/millwright/containers/%[1]s 2>/dev/null | wc -l) intent=$(millwrightd status | grep -c "container:%[1]s ")`, l)
}

// emptyImage is an OCI archive of an image with one empty layer, always the same.
func emptyImage() (archive []byte, digest string) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	add := func(name string, data []byte) {
		// A buffer takes all that is written to it.
		_ = w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(data))})
		_, _ = w.Write(data)
	}
	blob := func(mediaType string, data []byte) map[string]any {
		sum := fmt.Sprintf("%x", sha256.Sum256(data))
		add("blobs/sha256/"+sum, data)
		return map[string]any{"mediaType": "application/vnd.oci.image." + mediaType, "digest": "sha256:" + sum, "size": len(data)}
	}
	encode := func(v any) []byte {
		b, err := json.Marshal(v)
		if err != nil {
			panic("crash: encode the image: " + err.Error()) // maps of strings always can be
		}
		return b
	}
	layer := blob("layer.v1.tar", make([]byte, 1024)) // the end of a tar
	config := blob("config.v1+json", encode(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "rootfs": map[string]any{"type": "layers", "diff_ids": []any{layer["digest"]}},
	}))
	manifest := blob("manifest.v1+json", encode(map[string]any{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": []any{layer},
	}))
	add("index.json", encode(map[string]any{"schemaVersion": 2, "manifests": []any{manifest}}))
	add("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`))
	_ = w.Close() // likewise
	return out.Bytes(), fmt.Sprint(manifest["digest"])
}
