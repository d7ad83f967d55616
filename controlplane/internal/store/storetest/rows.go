package storetest

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

const (
	queued   = taskv1.TaskState_TASK_STATE_QUEUED
	running  = taskv1.TaskState_TASK_STATE_RUNNING
	held     = taskv1.TaskState_TASK_STATE_HELD
	finished = taskv1.TaskState_TASK_STATE_SUCCEEDED
)

func testRows(t *testing.T, open Opener) {
	s, _ := open(t)
	env := &taskv1.Envelope{PayloadType: "t", Payload: []byte("p")}
	sum := sha256.Sum256(env.GetPayload())
	token := bytes.Repeat([]byte{7}, sha256.Size)
	cluster := &serverv1.ClusterRow{TrustDomain: "d"}
	request := &serverv1.RequestRow{Caller: "alice", RequestId: "r", TaskIds: []string{"a", "b"}}
	tokenRow := &serverv1.TokenRow{TokenSha256: token, Node: "n"}
	view(t, s, func(v store.View) {
		_, err := v.Cluster()
		notFound(t, "Cluster", err)
		_, err = v.Request("alice", "r")
		notFound(t, "Request", err)
		_, err = v.Token(token)
		notFound(t, "Token", err)
		_, err = v.Envelope(sum[:])
		notFound(t, "Envelope", err)
	})
	update(t, s, &store.Change{
		Cluster: cluster, Requests: []*serverv1.RequestRow{request},
		Tokens: []*serverv1.TokenRow{tokenRow}, Envelopes: []*taskv1.Envelope{env},
	})
	view(t, s, func(v store.View) {
		gotCluster, err := v.Cluster()
		check(t, "Cluster", gotCluster, err, cluster)
		gotRequest, err := v.Request("alice", "r")
		check(t, "Request", gotRequest, err, request)
		_, err = v.Request("bob", "r")
		notFound(t, "another caller's request", err)
		gotToken, err := v.Token(token)
		check(t, "Token", gotToken, err, tokenRow)
		gotEnvelope, err := v.Envelope(sum[:])
		check(t, "Envelope", gotEnvelope, err, env)
	})
}

func testTaskIndexes(t *testing.T, open Opener) {
	s, _ := open(t)
	update(t, s, &store.Change{Tasks: []*serverv1.TaskRow{
		task("a1", "n", 1, queued), task("a2", "n", 2, running), task("b1", "n", 3, held),
		task("b2", "n", 4, finished), task("c1", "nn", 5, queued), task("c2", "n", 6, queued),
	}})
	open1 := func(t *testing.T, what string, node string, which store.Open, after uint64, limit int, want []string) {
		t.Helper()
		view(t, s, func(v store.View) {
			rows, err := v.OpenTasks(node, which, after, limit)
			check(t, what, ids(rows), err, want)
			if after == 0 {
				n, err := v.CountOpen(node, which, limit)
				check(t, "count of "+what, n, err, len(want))
			}
		})
	}
	open1(t, "queued", "n", store.Queued, 0, 10, []string{"a1", "c2"})
	open1(t, "queued, a page", "n", store.Queued, 0, 1, []string{"a1"})
	open1(t, "queued, the next page", "n", store.Queued, 1, 10, []string{"c2"})
	open1(t, "sent", "n", store.Sent, 0, 10, []string{"a2", "b1"})
	open1(t, "of a node whose name begins alike", "nn", store.Queued, 0, 10, []string{"c1"})
	open1(t, "of no node", "x", store.Queued, 0, 10, nil)
	due := func(at int64, limit int, want []string) {
		t.Helper()
		view(t, s, func(v store.View) {
			rows, err := v.DueTasks(time.Unix(at, 0), limit)
			check(t, fmt.Sprintf("DueTasks(%d)", at), ids(rows), err, want)
		})
	}
	due(1000, 10, nil)
	due(1001, 10, []string{"a1"})
	due(2000, 10, []string{"a1", "c1", "c2"})
	due(2000, 2, []string{"a1", "c1"})

	update(t, s, &store.Change{Tasks: []*serverv1.TaskRow{task("a1", "n", 1, running), task("a2", "n", 2, finished), task("c1", "nn", 5, running)}})
	open1(t, "queued after a move", "n", store.Queued, 0, 10, []string{"c2"})
	open1(t, "sent after a move", "n", store.Sent, 0, 10, []string{"a1", "b1"})
	due(2000, 10, []string{"c2"})
	update(t, s, &store.Change{Tasks: []*serverv1.TaskRow{task("a1", "n", 1, queued)}})
	open1(t, "queued after the way back", "n", store.Queued, 0, 10, []string{"a1", "c2"})
	due(2000, 10, []string{"a1", "c2"})
	view(t, s, func(v store.View) {
		got, err := v.TaskIDs("b", 10)
		check(t, "TaskIDs(b)", got, err, []string{"b1", "b2"})
		got, err = v.TaskIDs("", 3)
		check(t, "TaskIDs with a limit", got, err, []string{"a1", "a2", "b1"})
		got, err = v.TaskIDs("x", 3)
		check(t, "TaskIDs(x)", got, err, nil)
		_, err = v.Task("b")
		notFound(t, "Task by a prefix", err)
	})
}

func testListTasks(t *testing.T, open Opener) {
	s, _ := open(t)
	var rows []*serverv1.TaskRow
	for i := uint64(1); i <= 10; i++ {
		rows = append(rows, task(fmt.Sprint("t", i), fmt.Sprint("n", i%2), i, queued))
	}
	rows[2].Task.State = finished
	rows[2].Task.Labels = []*taskv1.Label{{Key: "k", Value: "v"}}
	update(t, s, &store.Change{Tasks: rows})
	for _, c := range []struct {
		name string
		q    store.TaskQuery
		want []string
	}{
		{"all", store.TaskQuery{}, []string{"t10", "t9", "t8", "t7", "t6", "t5", "t4", "t3", "t2", "t1"}},
		{"one node", store.TaskQuery{Nodes: []string{"n1"}}, []string{"t9", "t7", "t5", "t3", "t1"}},
		{"a state", store.TaskQuery{States: []taskv1.TaskState{finished}}, []string{"t3"}},
		{"a label", store.TaskQuery{Labels: []*taskv1.Label{{Key: "k", Value: "v"}}}, []string{"t3"}},
		{"a time", store.TaskQuery{CreatedAfter: time.Unix(8, 0), CreatedBefore: time.Unix(10, 0)}, []string{"t9", "t8"}},
		{"from below", store.TaskQuery{Before: 3}, []string{"t2", "t1"}},
		{"nothing", store.TaskQuery{Kinds: []string{"x"}}, nil},
		{"a node that has none", store.TaskQuery{Nodes: []string{"n"}}, nil},
	} {
		for _, limit := range []int{1, 3, 100} {
			for _, scan := range []int{1, 4, 100} {
				c.q.Limit, c.q.ScanLimit, c.q.MaxBytes = limit, scan, 1<<20
				got := allPages(t, s, c.q)
				check(t, fmt.Sprintf("%s by %d of %d", c.name, limit, scan), got, nil, c.want)
			}
		}
		c.q.Limit, c.q.ScanLimit, c.q.MaxBytes = 1, 100, 1 // less than any task
		check(t, c.name+" by bytes", allPages(t, s, c.q), nil, c.want)
	}
	view(t, s, func(v store.View) {
		page, err := v.ListTasks(store.TaskQuery{Limit: 100, ScanLimit: 100, MaxBytes: proto.Size(rows[9].Task) + 1})
		check(t, "a page of two tasks by bytes", ids(page.Tasks), err, []string{"t10", "t9"})
	})
}

// allPages reads all pages.
func allPages(t *testing.T, s Store, q store.TaskQuery) []string {
	t.Helper()
	var out []string
	for {
		var page store.TaskPage
		view(t, s, func(v store.View) {
			var err error
			if page, err = v.ListTasks(q); err != nil {
				t.Fatalf("ListTasks: %v", err)
			}
		})
		if len(page.Tasks) > q.Limit {
			t.Fatalf("a page of %d where %d were asked for", len(page.Tasks), q.Limit)
		}
		out = append(out, ids(page.Tasks)...)
		if page.Next == 0 {
			return out
		}
		q.Before = page.Next
	}
}

func testNodes(t *testing.T, open Opener) {
	s, _ := open(t)
	seen := &serverv1.SeenRow{Node: "b", ClockOffsetMs: 5}
	update(t, s, &store.Change{Nodes: []*serverv1.NodeRow{{Name: "c"}, {Name: "a"}, {Name: "b"}}, Seen: []*serverv1.SeenRow{seen}})
	view(t, s, func(v store.View) {
		got, err := v.Nodes("", 2)
		check(t, "Nodes", got, err, []*serverv1.NodeRow{{Name: "a"}, {Name: "b"}})
		got, err = v.Nodes("b", 2)
		check(t, "Nodes after b", got, err, []*serverv1.NodeRow{{Name: "c"}})
		got, err = v.Nodes("aa", 2)
		check(t, "Nodes after aa", got, err, []*serverv1.NodeRow{{Name: "b"}, {Name: "c"}})
		_, err = v.Node("x")
		notFound(t, "Node(x)", err)
		gotSeen, err := v.Seen("b")
		check(t, "Seen", gotSeen, err, seen)
		_, err = v.Seen("a")
		notFound(t, "Seen(a)", err)
	})
}

func testFrames(t *testing.T, open Opener) {
	s, _ := open(t)
	e := entry(1, "a")
	e.Frame = store.FrameKey{Node: "n", JournalID: "j", Seq: 9}
	journal := &serverv1.JournalRow{Node: "n", JournalId: "j", LastSeq: 9}
	update(t, s, &store.Change{Entries: []store.Entry{e}, Journals: []*serverv1.JournalRow{journal}})
	view(t, s, func(v store.View) {
		got, err := v.Frame(e.Frame)
		check(t, "Frame", got, err, e)
		for _, key := range []store.FrameKey{{Node: "n", JournalID: "j", Seq: 8}, {Node: "n", JournalID: "k", Seq: 9}, {Node: "m", JournalID: "j", Seq: 9}} {
			_, err = v.Frame(key)
			notFound(t, fmt.Sprint("Frame ", key), err)
		}
		gotJournal, err := v.Journal("n", "j")
		check(t, "Journal", gotJournal, err, journal)
		_, err = v.Journal("n", "k")
		notFound(t, "Journal(k)", err)
	})
}

func testDurable(t *testing.T, open Opener) {
	s, reopen := open(t)
	update(t, s, &store.Change{Entries: []store.Entry{entry(1, "a")}, Tasks: []*serverv1.TaskRow{task("a", "n", 1, queued)}, RaiseGeneration: true})
	s = reopen()
	view(t, s, func(v store.View) {
		if v.LastIndex() != 1 || v.Generation() != 2 {
			t.Errorf("after it was opened again the log ends at %d, generation %d", v.LastIndex(), v.Generation())
		}
		row, err := v.Task("a")
		check(t, "Task", row, err, task("a", "n", 1, queued))
	})
	update(t, s, &store.Change{Entries: []store.Entry{entry(2, "a")}})
}

func testGeneration(t *testing.T, open Opener) {
	s, _ := open(t)
	update(t, s, &store.Change{RaiseGeneration: true})
	update(t, s, &store.Change{})
	view(t, s, func(v store.View) { check(t, "Generation", v.Generation(), nil, uint64(2)) })
}
