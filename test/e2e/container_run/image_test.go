package container_run

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

// program is what the image runs: a server that says who it is, or one that ends
// at once.
const program = `package main

import (
	"fmt"
	"net/http"
	"os"
	"strconv"
)

func main() {
	if len(os.Args) > 2 && os.Args[1] == "exit" {
		fmt.Fprintln(os.Stderr, "last words")
		code, _ := strconv.Atoi(os.Args[2])
		os.Exit(code)
	}
	runs, err := os.OpenFile("/runs/starts", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err == nil {
		fmt.Fprintln(runs, os.Args[1:])
	}
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, os.Getenv("SAY")) })
	fmt.Println(http.ListenAndServe("127.0.0.1:8099", nil))
	os.Exit(1)
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
	if err := os.WriteFile(filepath.Join(dir, "main.go"), []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-ldflags=-s -w", "-o", filepath.Join(dir, "program"), filepath.Join(dir, "main.go"))
	build.Dir, build.Env = dir, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the image's program: %v: %s", err, out)
	}
	binary, err := os.ReadFile(filepath.Join(dir, "program"))
	if err != nil {
		t.Fatal(err)
	}
	blobs := map[string][]byte{"oci-layout": []byte("{\"imageLayoutVersion\":\"1.0.0\"}")}
	add := func(mediaType string, data []byte) descriptor {
		sum := sha256.Sum256(data)
		name := hex.EncodeToString(sum[:])
		blobs["blobs/sha256/"+name] = data
		return descriptor{"application/vnd.oci.image." + mediaType, "sha256:" + name, len(data)}
	}
	layer := add("layer.v1.tar", tarOf(t, map[string][]byte{"program": binary, "runs/.keep": nil}, 0o755))
	config := add("config.v1+json", marshal(t, map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "config": map[string]any{"Entrypoint": []string{"/program"}},
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
