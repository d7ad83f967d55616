package clustertest

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
)

type descriptor struct {
	MediaType string `json:"mediaType"`
	Digest    string `json:"digest"`
	Size      int    `json:"size"`
}

// Image builds a Go program from its source, and an OCI archive whose image runs
// it as /name and has the directory dir besides. It returns the image's digest too.
func Image(t *testing.T, name, source, dir string) (archive []byte, digest string) {
	t.Helper()
	work := t.TempDir()
	if err := os.WriteFile(filepath.Join(work, "main.go"), []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-ldflags=-s -w", "-o", filepath.Join(work, name), filepath.Join(work, "main.go"))
	build.Dir, build.Env = work, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the image's program: %v: %s", err, out)
	}
	binary, err := os.ReadFile(filepath.Join(work, name))
	if err != nil {
		t.Fatal(err)
	}
	blobs := map[string][]byte{"oci-layout": []byte("{\"imageLayoutVersion\":\"1.0.0\"}")}
	add := func(mediaType string, data []byte) descriptor {
		sum := sha256.Sum256(data)
		hash := hex.EncodeToString(sum[:])
		blobs["blobs/sha256/"+hash] = data
		return descriptor{"application/vnd.oci.image." + mediaType, "sha256:" + hash, len(data)}
	}
	layer := add("layer.v1.tar", tarOf(t, map[string][]byte{name: binary, dir + "/.keep": nil}, 0o755))
	config := add("config.v1+json", marshal(t, map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "config": map[string]any{"Entrypoint": []string{"/" + name}},
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
