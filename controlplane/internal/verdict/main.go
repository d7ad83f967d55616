// The program verdict says what a server would find in a state directory: it
// opens it as millwright-server does at its start. It is no part of the product.
// The suite test/powerloss builds it, gives it copies of disks, one directory a
// line, and reads a line of JSON for each.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/gpuaas/millwright/controlplane/internal/store"
	"github.com/gpuaas/millwright/controlplane/internal/store/boltstore"
	"github.com/gpuaas/millwright/pki/ca"
)

// verdict is what was found.
type verdict struct {
	// Error says what a server could not get over.
	Error string `json:"error,omitempty"`
	// Founded says that the store, the cluster and the authority are there.
	Founded bool `json:"founded"`
	// Last is the index of the last entry of the log.
	Last uint64 `json:"last"`
	// Tasks are the ids of all tasks.
	Tasks []string `json:"tasks,omitempty"`
	// Nodes are the nodes that have joined; Frames says by the journal's id how
	// many of its frames are stored.
	Nodes  []string          `json:"nodes,omitempty"`
	Frames map[string]uint64 `json:"frames,omitempty"`
}

func main() {
	in, out := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	for in.Scan() {
		v := &verdict{Frames: map[string]uint64{}}
		if err := v.judge(in.Text()); err != nil {
			v.Error = err.Error()
		}
		if err := out.Encode(v); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

const most = 1000

func (v *verdict) judge(dir string) error {
	db, err := boltstore.Open(filepath.Join(dir, "store.db"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // init makes it, again if need be
	}
	if err != nil {
		return err
	}
	return errors.Join(db.View(context.Background(), func(view store.View) error { return v.read(view, dir) }), db.Close())
}

func (v *verdict) read(view store.View, dir string) error {
	row, err := view.Cluster()
	if errors.Is(err, store.ErrNotFound) {
		return nil // init goes on from here
	}
	if err != nil {
		return err
	}
	switch _, err := ca.Load(filepath.Join(dir, "ca"), ca.Config{TrustDomain: row.GetTrustDomain()}); {
	case err == nil:
		v.Founded = true
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	v.Last = view.LastIndex()
	if v.Tasks, err = view.TaskIDs("", most); err != nil {
		return err
	}
	nodes, err := view.Nodes("", most)
	if err != nil {
		return err
	}
	for _, n := range nodes {
		if n.GetGeneration() > 0 {
			v.Nodes = append(v.Nodes, n.GetName())
		}
		j, err := view.Journal(n.GetName(), n.GetJournalId())
		if errors.Is(err, store.ErrNotFound) {
			continue
		}
		if err != nil {
			return err
		}
		v.Frames[n.GetJournalId()] = j.GetLastSeq()
	}
	return nil
}
