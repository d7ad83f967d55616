package boltstore

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// encoder turns a change into writes. It keeps the first error.
type encoder struct {
	v      view
	writes []write
	err    error
}

// encode checks a change and returns its writes; it writes nothing itself.
func encode(v view, c *store.Change) ([]write, error) {
	e := &encoder{v: v}
	e.entries(c.Entries)
	for _, t := range c.Tasks {
		e.task(t)
	}
	for _, n := range c.Nodes {
		e.named("node", n.GetName())
		e.row(bucketNodes, []byte(n.GetName()), n)
	}
	for _, j := range c.Journals {
		e.named("node", j.GetNode())
		e.named("journal id", j.GetJournalId())
		e.row(bucketJournals, name(j.GetNode(), j.GetJournalId()), j)
	}
	for _, r := range c.Requests {
		e.named("caller", r.GetCaller())
		e.named("request id", r.GetRequestId())
		e.row(bucketRequests, name(r.GetCaller(), r.GetRequestId()), r)
	}
	for _, t := range c.Tokens {
		e.digest("token", t.GetTokenSha256())
		e.row(bucketTokens, t.GetTokenSha256(), t)
	}
	for _, s := range c.Seen {
		e.named("node", s.GetNode())
		e.row(bucketSeen, []byte(s.GetNode()), s)
	}
	for _, k := range c.HealthGone {
		e.named("node", k.Node)
		e.named("condition", k.Key)
		e.remove(bucketHealth, name(k.Node, k.Key))
	}
	for _, h := range c.Health {
		e.named("node", h.GetNode())
		e.named("condition", h.GetCondition().GetKey())
		e.row(bucketHealth, name(h.GetNode(), h.GetCondition().GetKey()), h)
	}
	for _, trim := range c.HealthTrims {
		e.trim(trim)
	}
	for _, env := range c.Envelopes {
		sum := sha256.Sum256(env.GetPayload())
		e.row(bucketEnvelopes, sum[:], env)
	}
	if c.Cluster != nil {
		e.row(bucketMeta, keyCluster, c.Cluster)
	}
	if c.RaiseGeneration {
		e.put(bucketMeta, keyGeneration, number(v.Generation()+1))
	}
	if e.err != nil {
		return nil, fmt.Errorf("encode change: %w", e.err)
	}
	return e.writes, nil
}

func (e *encoder) fail(err error) {
	if e.err == nil {
		e.err = err
	}
}

func (e *encoder) named(what, s string) {
	if err := checkName(what, s); err != nil {
		e.fail(err)
	}
}

func (e *encoder) digest(what string, b []byte) {
	if len(b) != sha256.Size {
		e.fail(fmt.Errorf("digest of %s has %d bytes", what, len(b)))
	}
}

func (e *encoder) put(bucket, key, value []byte) {
	if value == nil {
		value = []byte{}
	}
	e.writes = append(e.writes, write{bucket, key, value})
}

func (e *encoder) remove(bucket, key []byte) {
	e.writes = append(e.writes, write{bucket, key, nil})
}

func (e *encoder) row(bucket, key []byte, m proto.Message) {
	b, err := proto.Marshal(m)
	if err != nil {
		e.fail(err)
		return
	}
	e.put(bucket, key, b)
}

func (e *encoder) entries(entries []store.Entry) {
	next := e.v.LastIndex() + 1
	for _, entry := range entries {
		if entry.Index != next || len(entry.Bytes) == 0 {
			e.fail(fmt.Errorf("log entry %d of %d bytes where %d is next", entry.Index, len(entry.Bytes), next))
			return
		}
		next++
		index := number(entry.Index)
		e.put(bucketLog, index, entry.Bytes)
		if ev := entry.Event; ev != nil {
			e.named("task id", ev.GetTaskId())
			e.row(bucketEvents, index, ev)
			e.put(bucketHistory, historyKey(ev.GetTaskId(), entry.Index), nil)
		}
		if entry.Frame != (store.FrameKey{}) {
			e.named("node", entry.Frame.Node)
			e.named("journal id", entry.Frame.JournalID)
			e.put(bucketFrames, frameKey(entry.Frame), index)
		}
		if entry.HealthOf != "" {
			e.named("node", entry.HealthOf)
			e.put(bucketChanges, nodeIndexKey(entry.HealthOf, entry.Index), nil)
		}
	}
}

// trim takes what a node's history has up to an entry out of it.
func (e *encoder) trim(trim store.HealthTrim) {
	e.named("node", trim.Node)
	prefix := name(trim.Node)
	c := e.v.tx.Bucket(bucketChanges).Cursor()
	for k, _ := c.Seek(prefix); k != nil && bytes.HasPrefix(k, prefix); k, _ = c.Next() {
		if bytes.Compare(k, nodeIndexKey(trim.Node, trim.Through)) > 0 {
			break
		}
		e.remove(bucketChanges, bytes.Clone(k))
	}
	e.put(bucketTrimmed, []byte(trim.Node), number(trim.Through))
}

// task writes a row and moves it in the indexes.
func (e *encoder) task(row *serverv1.TaskRow) {
	t := row.GetTask()
	e.named("task id", t.GetId())
	e.named("node", t.GetNode())
	if t.GetCreateIndex() == 0 {
		e.fail(fmt.Errorf("task %s has no create index", t.GetId()))
	}
	before := map[string]indexKey{}
	old, err := e.v.Task(t.GetId())
	switch {
	case err == nil:
		before = indexKeys(old.GetTask())
	case !errors.Is(err, store.ErrNotFound):
		e.fail(err)
		return
	}
	after := indexKeys(t)
	for id, k := range before {
		if _, stays := after[id]; !stays {
			e.remove(k.bucket, k.key)
		}
	}
	for id, k := range after {
		if _, there := before[id]; !there {
			e.put(k.bucket, k.key, k.value)
		}
	}
	e.row(bucketTasks, []byte(t.GetId()), row)
}

// indexKey is one index entry of a task.
type indexKey struct {
	bucket, key, value []byte
}

// indexKeys returns the index entries of a task, by bucket and key.
func indexKeys(t *taskv1.Task) map[string]indexKey {
	id := []byte(t.GetId())
	byNode := nodeIndexKey(t.GetNode(), t.GetCreateIndex())
	keys := []indexKey{
		{bucketCreated, number(t.GetCreateIndex()), id},
		{bucketByNode, byNode, id},
	}
	switch store.OpenAs(t.GetState()) {
	case store.Queued:
		keys = append(keys, indexKey{bucketQueued, byNode, id},
			indexKey{bucketDue, dueKey(t.GetNotAfter().AsTime(), t.GetId()), []byte{}})
	case store.Sent:
		keys = append(keys, indexKey{bucketSent, byNode, id})
	}
	out := make(map[string]indexKey, len(keys))
	for _, k := range keys {
		out[string(bytes.Join([][]byte{k.bucket, k.key}, []byte{0}))] = k
	}
	return out
}
