package boltstore

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/protobuf/proto"

	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// view reads one transaction. Decoded messages share no memory with it.
type view struct{ tx *bolt.Tx }

var _ store.View = view{}

// get decodes the value at key into m.
func (v view) get(bucket, key []byte, m proto.Message, what string) error {
	b := v.tx.Bucket(bucket).Get(key)
	if b == nil {
		return fmt.Errorf("%s: %w", what, store.ErrNotFound)
	}
	if err := proto.Unmarshal(b, m); err != nil {
		return fmt.Errorf("decode %s: %w", what, err)
	}
	return nil
}

func (v view) Task(id string) (*serverv1.TaskRow, error) {
	row := &serverv1.TaskRow{}
	return row, v.get(bucketTasks, []byte(id), row, "task "+id)
}

func (v view) TaskIDs(prefix string, limit int) ([]string, error) {
	var ids []string
	c := v.tx.Bucket(bucketTasks).Cursor()
	for k, _ := c.Seek([]byte(prefix)); k != nil && bytes.HasPrefix(k, []byte(prefix)) && len(ids) < limit; k, _ = c.Next() {
		ids = append(ids, string(k))
	}
	return ids, nil
}

func (v view) ListTasks(q store.TaskQuery) (store.TaskPage, error) {
	bucket, prefix := bucketCreated, []byte(nil)
	if len(q.Nodes) == 1 {
		bucket, prefix = bucketByNode, name(q.Nodes[0])
	}
	var page store.TaskPage
	c := v.tx.Bucket(bucket).Cursor()
	k, id := lastBefore(c, prefix, q.Before)
	size := 0
	for scanned := 0; k != nil && bytes.HasPrefix(k, prefix); k, id = c.Prev() {
		if len(page.Tasks) == q.Limit || size >= q.MaxBytes || scanned == q.ScanLimit {
			// What comes next is at or below k: the page ends above it.
			page.Next = binary.BigEndian.Uint64(k[len(prefix):]) + 1
			return page, nil
		}
		scanned++
		row, err := v.Task(string(id))
		if err != nil {
			return store.TaskPage{}, err
		}
		if q.Match(row.GetTask()) {
			page.Tasks = append(page.Tasks, row)
			size += proto.Size(row.GetTask())
		}
	}
	return page, nil
}

// lastBefore moves c to the last key of the prefix whose number is below
// before; 0 means the last of all.
func lastBefore(c *bolt.Cursor, prefix []byte, before uint64) (k, id []byte) {
	if before == 0 {
		before = ^uint64(0)
	}
	if k, _ := c.Seek(binary.BigEndian.AppendUint64(bytes.Clone(prefix), before)); k == nil {
		return c.Last()
	}
	return c.Prev()
}

func (v view) OpenTasks(node string, which store.Open, after uint64, limit int) ([]*serverv1.TaskRow, error) {
	prefix := name(node)
	var rows []*serverv1.TaskRow
	c := v.tx.Bucket(openBucket(which)).Cursor()
	for k, id := c.Seek(nodeIndexKey(node, after+1)); k != nil && bytes.HasPrefix(k, prefix) && len(rows) < limit; k, id = c.Next() {
		row, err := v.Task(string(id))
		if err != nil {
			return nil, err
		}
		rows = append(rows, row)
	}
	return rows, nil
}

func (v view) CountOpen(node string, which store.Open, limit int) (int, error) {
	prefix := name(node)
	n := 0
	c := v.tx.Bucket(openBucket(which)).Cursor()
	for k, _ := c.Seek(prefix); k != nil && bytes.HasPrefix(k, prefix) && n < limit; k, _ = c.Next() {
		n++
	}
	return n, nil
}

func openBucket(which store.Open) []byte {
	if which == store.Sent {
		return bucketSent
	}
	return bucketQueued
}

func (v view) DueTasks(t time.Time, limit int) ([]*serverv1.TaskRow, error) {
	var rows []*serverv1.TaskRow
	c := v.tx.Bucket(bucketDue).Cursor()
	for k, _ := c.First(); k != nil && len(rows) < limit; k, _ = c.Next() {
		if binary.BigEndian.Uint64(k) > dueNumber(t) {
			break
		}
		row, err := v.Task(string(k[8:]))
		if err != nil {
			return nil, err
		}
		rows = append(rows, row)
	}
	return rows, nil
}

func (v view) Node(name string) (*serverv1.NodeRow, error) {
	row := &serverv1.NodeRow{}
	return row, v.get(bucketNodes, []byte(name), row, "node "+name)
}

func (v view) Nodes(after string, limit int) ([]*serverv1.NodeRow, error) {
	var rows []*serverv1.NodeRow
	c := v.tx.Bucket(bucketNodes).Cursor()
	k, b := c.Seek([]byte(after))
	if string(k) == after {
		k, b = c.Next()
	}
	for ; k != nil && len(rows) < limit; k, b = c.Next() {
		row := &serverv1.NodeRow{}
		if err := proto.Unmarshal(b, row); err != nil {
			return nil, fmt.Errorf("decode node %s: %w", k, err)
		}
		rows = append(rows, row)
	}
	return rows, nil
}

func (v view) Seen(node string) (*serverv1.SeenRow, error) {
	row := &serverv1.SeenRow{}
	return row, v.get(bucketSeen, []byte(node), row, "last word of node "+node)
}

func (v view) Journal(node, journalID string) (*serverv1.JournalRow, error) {
	row := &serverv1.JournalRow{}
	return row, v.get(bucketJournals, name(node, journalID), row, "journal "+journalID+" of node "+node)
}

func (v view) Condition(key store.HealthKey) (*serverv1.HealthRow, error) {
	row := &serverv1.HealthRow{}
	return row, v.get(bucketHealth, name(key.Node, key.Key), row, "condition "+key.Key+" of node "+key.Node)
}

func (v view) Health(node string, limit int) ([]*serverv1.HealthRow, error) {
	prefix := name(node)
	var rows []*serverv1.HealthRow
	c := v.tx.Bucket(bucketHealth).Cursor()
	for k, b := c.Seek(prefix); k != nil && bytes.HasPrefix(k, prefix) && len(rows) < limit; k, b = c.Next() {
		row := &serverv1.HealthRow{}
		if err := proto.Unmarshal(b, row); err != nil {
			return nil, fmt.Errorf("decode a condition of node %s: %w", node, err)
		}
		rows = append(rows, row)
	}
	return rows, nil
}

func (v view) Token(sha []byte) (*serverv1.TokenRow, error) {
	row := &serverv1.TokenRow{}
	return row, v.get(bucketTokens, sha, row, "join token")
}

func (v view) Cluster() (*serverv1.ClusterRow, error) {
	row := &serverv1.ClusterRow{}
	return row, v.get(bucketMeta, keyCluster, row, "cluster")
}

func (v view) Request(caller, requestID string) (*serverv1.RequestRow, error) {
	row := &serverv1.RequestRow{}
	return row, v.get(bucketRequests, name(caller, requestID), row, "request "+requestID)
}

func (v view) Envelope(sha []byte) (*taskv1.Envelope, error) {
	env := &taskv1.Envelope{}
	return env, v.get(bucketEnvelopes, sha, env, fmt.Sprintf("envelope %x", sha))
}
