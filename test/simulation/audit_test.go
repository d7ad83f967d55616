package simulation

import (
	"bytes"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"

	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// TestAuditFindsWhatIsWrong is the negative control of what is looked at after
// each schedule: rows that were changed behind the log's back, and a journal with
// a broken frame, are found; the same disks before are sound.
func TestAuditFindsWhatIsWrong(t *testing.T) {
	if *seed != 0 || *worker {
		t.Skip("schedules were asked for")
	}
	tp := newTemplate(t, shm(t))
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, filepath.Join(tp.dir, "audited"), slog.New(slog.DiscardHandler), nil)
		w.play(tp)
		w.audit()
		if len(w.broken) > 0 {
			t.Fatalf("sound disks: %q", w.broken)
		}
		store := filepath.Join(w.dir, "server", "store.db")
		id := changeFirst(t, store, "tasks", func(b []byte) []byte {
			row := &serverv1.TaskRow{}
			must(t, proto.Unmarshal(b, row))
			row.Task.State, row.CancelBy = taskv1.TaskState_TASK_STATE_WAITING, "nobody"
			out, err := proto.Marshal(row)
			must(t, err)
			return out
		})
		changeFirst(t, store, "nodes", func(b []byte) []byte {
			row := &serverv1.NodeRow{}
			must(t, proto.Unmarshal(b, row))
			row.Evicted = true
			out, err := proto.Marshal(row)
			must(t, err)
			return out
		})
		got := w.replayed()
		for _, want := range []string{
			"task " + id + ": state is TASK_STATE_WAITING, and from the log alone ",
			"delivery of task " + id + ": cancel_by is nobody, and from the log alone ",
			"node n1: evicted is true, and from the log alone not set",
		} {
			if !slices.ContainsFunc(got, func(s string) bool { return strings.HasPrefix(s, want) }) {
				t.Errorf("a changed row: %q, want one with %q", got, want)
			}
		}
		if broke := w.broke(); !slices.ContainsFunc(broke, func(s string) bool { return strings.HasPrefix(s, "rows: ") && strings.Contains(s, id) }) {
			t.Errorf("a changed row, in the merged history: %q, want rows with %s", broke, id)
		}
		if len(got) != 3 {
			t.Errorf("three fields were changed, and %d are told: %q", len(got), got)
		}
		n := w.nodes[0]
		changeFirst(t, filepath.Join(n.dir, "state", "state.db"), "frames", func(b []byte) []byte {
			e := &taskv1.Event{}
			must(t, proto.Unmarshal(b, e))
			e.BootId = "another"
			out, err := proto.Marshal(e)
			must(t, err)
			return out
		})
		if err := n.journal(); err == nil || !strings.Contains(err.Error(), "frame 2 does not follow frame 1") {
			t.Errorf("a journal with a broken frame: %v", err)
		}
		for _, other := range w.nodes[1:] {
			if err := other.journal(); err != nil {
				t.Errorf("journal of %s, which nobody touched: %v", other.name, err)
			}
		}
	})
}

// TestAuditFindsAnOlderJournal puts an older copy in the place of a journal: all
// in it is sound, and its mark tells.
func TestAuditFindsAnOlderJournal(t *testing.T) {
	if *seed != 0 || *worker {
		t.Skip("schedules were asked for")
	}
	tp := newTemplate(t, shm(t))
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, filepath.Join(tp.dir, "audited"), slog.New(slog.DiscardHandler), nil)
		w.play(tp)
		n := w.nodes[0]
		must(t, copyFile(filepath.Join(n.dir, "state", "state.db"), filepath.Join(tp.dir, n.name, "state", "state.db")))
		if err := n.journal(); err == nil || !strings.Contains(err.Error(), "the file is older") {
			t.Errorf("an older journal: %v", err)
		}
	})
}

// changeFirst changes the first value of a bucket, and returns its key.
func changeFirst(t *testing.T, path, bucket string, change func([]byte) []byte) (key string) {
	db, err := bolt.Open(path, fs.FileMode(0o600), nil)
	must(t, err)
	must(t, db.Update(func(tx *bolt.Tx) error {
		k, v := tx.Bucket([]byte(bucket)).Cursor().First()
		if k == nil {
			t.Fatalf("%s has nothing in %s: this seed shows nothing", path, bucket)
		}
		key = string(k)
		return tx.Bucket([]byte(bucket)).Put(bytes.Clone(k), change(v))
	}))
	must(t, db.Close())
	return key
}
