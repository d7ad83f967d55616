package harness

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/ecdsa"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/controlplane"
	"github.com/gpuaas/millwright/pki"
	"github.com/gpuaas/millwright/pki/envelope"
	"github.com/gpuaas/millwright/pki/trustroot"
	nodev1 "github.com/gpuaas/millwright/proto/millwright/node/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// Saved is what is known of a cluster that was saved.
type Saved struct {
	// Time is when it was saved.
	Time time.Time
	// Boot is how long its nodes had been up.
	Boot time.Duration
	// Version is the release that wrote it.
	Version string
	// Tasks are ids of tasks, by what they stand for.
	Tasks map[string]string
	// Boots are the boot ids of the nodes, by name.
	Boots map[string]string
}

// Save writes the files of the server and of nodes, none of which may run, with
// the operator's keys, so that a later release can go on from them.
func (c *Cluster) Save(file, version string, tasks map[string]string, nodes ...*Node) {
	c.t.Helper()
	var b bytes.Buffer
	zip := must(gzip.NewWriterLevel(&b, gzip.BestCompression))(c.t)
	w := tar.NewWriter(zip)
	add := func(name string, data []byte) {
		if err := errors.Join(w.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: int64(len(data))}), second(w.Write(data))); err != nil {
			c.t.Fatal(err)
		}
	}
	saved := Saved{Time: c.clock.Now(), Boot: c.clock.Boot(), Version: version, Tasks: tasks, Boots: map[string]string{}}
	for _, n := range nodes {
		saved.Boots[n.Name] = n.BootID()
	}
	add("saved.json", must(json.Marshal(saved))(c.t))
	add("context.json", must(protojson.Marshal(c.file))(c.t))
	add("genesis.binpb", must(proto.Marshal(c.root.Chain()[0]))(c.t))
	add("operator.pem", must(pki.MarshalPrivateKey(c.operator))(c.t))
	for name, key := range map[string]*envelope.Key{"task.pem": c.key, "slurm.pem": c.slurm, "recovery.pem": c.recovery} {
		add(name, must(key.MarshalPEM())(c.t))
	}
	addDir(c.t, add, c.cfg.StateDir, "server")
	for _, n := range nodes {
		addDir(c.t, add, n.Dir, "nodes/"+n.Name)
	}
	if err := errors.Join(w.Close(), zip.Close(), os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, b.Bytes(), 0o644)); err != nil {
		c.t.Fatal(err)
	}
}

func second(_ int, err error) error { return err }

func addDir(t *testing.T, add func(string, []byte), dir, as string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		data, err := os.ReadFile(p)
		add(path.Join(as, filepath.ToSlash(rel)), data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Load goes on from a cluster that was saved, at a time after it was, and runs
// its server. Its nodes are in the same boot, and nothing was ever done on them.
func Load(t *testing.T, file string, after time.Duration) (*Cluster, Saved, map[string]*Node) {
	t.Helper()
	dir := t.TempDir()
	unpack(t, file, dir)
	read := func(name string) []byte { return must(os.ReadFile(filepath.Join(dir, name)))(t) }
	c := &Cluster{t: t, clock: new(Clock), log: slog.New(slog.NewTextHandler(&testWriter{t: t}, &slog.HandlerOptions{Level: slog.LevelDebug})), file: new(nodev1.ContextFile)}
	var saved Saved
	if err := errors.Join(json.Unmarshal(read("saved.json"), &saved), protojson.Unmarshal(read("context.json"), c.file)); err != nil {
		t.Fatal(err)
	}
	c.clock.goOn(saved, after)
	c.operator = must(pki.ParsePrivateKey(read("operator.pem")))(t).(*ecdsa.PrivateKey)
	c.key = must(envelope.ParseKey(read("task.pem")))(t)
	c.slurm = must(envelope.ParseKey(read("slurm.pem")))(t)
	c.recovery = must(envelope.ParseKey(read("recovery.pem")))(t)
	genesis := new(taskv1.Envelope)
	if err := proto.Unmarshal(read("genesis.binpb"), genesis); err != nil {
		t.Fatal(err)
	}
	c.root = must(trustroot.OpenGenesis(genesis))(t)
	c.configure(filepath.Join(dir, "server"))
	c.stop = run(t, controlplane.New(c.cfg).Run)
	c.connect()
	nodes := map[string]*Node{}
	for _, e := range must(os.ReadDir(filepath.Join(dir, "nodes")))(t) {
		n := &Node{Node: fakehost.New(), Name: e.Name(), Dir: filepath.Join(dir, "nodes", e.Name()), c: c}
		for range 10 {
			if n.BootID() != saved.Boots[n.Name] {
				n.Reboot()
			}
		}
		nodes[n.Name] = n
		c.nodes = append(c.nodes, n)
	}
	return c, saved, nodes
}

func unpack(t *testing.T, file, dir string) {
	t.Helper()
	f := must(os.Open(file))(t)
	defer f.Close() // it was only read
	r := tar.NewReader(must(gzip.NewReader(f))(t))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil || !filepath.IsLocal(h.Name) || strings.HasSuffix(h.Name, "/") {
			t.Fatalf("entry %v of %s: %v", h, file, err)
		}
		to := filepath.Join(dir, filepath.FromSlash(h.Name))
		data := must(io.ReadAll(r))(t)
		if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o700), os.WriteFile(to, data, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
}
