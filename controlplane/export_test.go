package controlplane_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane"
)

// TestExport exports beside the running server, and from a copy once it has
// stopped: both say the same.
func TestExport(t *testing.T) {
	w := newWorld(t)
	w.join("gpu-001")
	const created = 300 // more than a page
	var leaves []*taskv1.TaskLeaf
	for range created {
		leaves = append(leaves, w.leaf("gpu-001"))
	}
	w.create(leaves...)
	export := func() (lines []*auditv1.LogLine) {
		t.Helper()
		err := controlplane.Export(t.Context(), w.cfg, func(l *auditv1.LogLine) error { lines = append(lines, l); return nil })
		if err != nil {
			t.Fatalf("Export() = %v", err)
		}
		return lines
	}
	running := export()
	var entries, rows, index uint64
	for _, l := range running {
		if e := l.GetEntry(); e != nil {
			sum := sha256.Sum256(e.GetBytes())
			if e.GetIndex() != index+1 || !bytes.Equal(sum[:], e.GetHash()) || e.GetEntry().GetIndex() != e.GetIndex() {
				t.Errorf("entry %d does not follow %d", e.GetIndex(), index)
			}
			index = e.GetIndex()
			entries++
		}
		if l.GetTask() != nil {
			rows++
		}
	}
	if running[0].GetCluster() == nil || entries < created || rows != created {
		t.Errorf("cluster first: %v, %d entries, %d tasks; want the cluster and %d tasks", running[0].GetCluster() != nil, entries, rows, created)
	}
	socket, err := os.Stat(filepath.Join(w.cfg.StateDir, "export.sock"))
	if err != nil || socket.Mode().Perm() != 0o600 {
		t.Errorf("the socket: %v, %v; want mode 0600", socket, err)
	}
	w.shut()
	if diff := cmp.Diff(running, export(), protocmp.Transform()); diff != "" {
		t.Errorf("the copy differs (-running +copy):\n%s", diff)
	}
	missing := w.cfg
	missing.StateDir = t.TempDir()
	if err := controlplane.Export(t.Context(), missing, nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Export() of no server = %v, want ErrNotExist", err)
	}
}
