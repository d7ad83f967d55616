package cluster

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"runtime"
)

// NodePrograms are mounts of a container.run, in YAML, that give a container the
// programs of its node.
const NodePrograms = `- {source: /usr, target: /usr, readOnly: true}
- {source: /usr/lib, target: /lib, readOnly: true}
- {source: /usr/lib64, target: /lib64, readOnly: true}
`

// EmptyImage returns an OCI archive of an image with one empty layer, and its
// digest: one image for each mark. What a container of it runs is the node's own, seen
// through mounts: see [NodePrograms].
func EmptyImage(mark string) (archive []byte, digest string) {
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
			panic("cluster: encode the image: " + err.Error()) // maps of strings always can be
		}
		return b
	}
	layer := blob("layer.v1.tar", make([]byte, 1024)) // the end of a tar
	config := blob("config.v1+json", encode(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "author": mark, "rootfs": map[string]any{"type": "layers", "diff_ids": []any{layer["digest"]}},
	}))
	manifest := blob("manifest.v1+json", encode(map[string]any{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": []any{layer},
	}))
	add("index.json", encode(map[string]any{"schemaVersion": 2, "manifests": []any{manifest}}))
	add("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`))
	_ = w.Close() // likewise
	return out.Bytes(), fmt.Sprint(manifest["digest"])
}
