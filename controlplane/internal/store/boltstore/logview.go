package boltstore

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

func (v view) LastIndex() uint64 {
	k, _ := v.tx.Bucket(bucketLog).Cursor().Last()
	if k == nil {
		return 0
	}
	return binary.BigEndian.Uint64(k)
}

func (v view) Generation() uint64 {
	return binary.BigEndian.Uint64(v.tx.Bucket(bucketMeta).Get(keyGeneration))
}

func (v view) Entries(from uint64, limit, maxBytes int) ([]store.Entry, error) {
	var out []store.Entry
	size := 0
	c := v.tx.Bucket(bucketLog).Cursor()
	for k, b := c.Seek(number(from)); k != nil && len(out) < limit && (len(out) == 0 || size < maxBytes); k, b = c.Next() {
		index := binary.BigEndian.Uint64(k)
		if want := max(from, 1) + uint64(len(out)); index != want {
			return nil, fmt.Errorf("read log from %d: %w", want, store.ErrTooOld)
		}
		e, err := v.entry(index, b)
		if err != nil {
			return nil, err
		}
		out = append(out, e)
		size += len(b)
	}
	return out, nil
}

func (v view) TaskEntries(taskID string, from uint64, limit, maxBytes int) ([]store.Entry, error) {
	return v.indexed(bucketHistory, taskID, from, limit, maxBytes)
}

func (v view) HealthEntries(node string, from uint64, limit, maxBytes int) ([]store.Entry, error) {
	return v.indexed(bucketChanges, node, from, limit, maxBytes)
}

func (v view) HealthTrimmed(node string) (uint64, error) {
	b := v.tx.Bucket(bucketTrimmed).Get([]byte(node))
	if b == nil {
		return 0, nil
	}
	return parseNumber(b)
}

func (v view) HealthBeyond(node string, keep int) (uint64, error) {
	prefix := name(node)
	c := v.tx.Bucket(bucketChanges).Cursor()
	k, _ := c.Seek(nodeIndexKey(node, math.MaxUint64)) // behind the last of the node
	if k == nil {
		k, _ = c.Last()
	} else {
		k, _ = c.Prev()
	}
	for n := 0; k != nil && bytes.HasPrefix(k, prefix); k, _ = c.Prev() {
		if n == keep {
			return parseNumber(k[len(prefix):])
		}
		n++
	}
	return 0, nil
}

// indexed reads the entries that an index has of a task or node.
func (v view) indexed(bucket []byte, of string, from uint64, limit, maxBytes int) ([]store.Entry, error) {
	var out []store.Entry
	size := 0
	prefix := name(of)
	c := v.tx.Bucket(bucket).Cursor()
	for k, _ := c.Seek(historyKey(of, from)); k != nil && bytes.HasPrefix(k, prefix) && len(out) < limit && (len(out) == 0 || size < maxBytes); k, _ = c.Next() {
		index := binary.BigEndian.Uint64(k[len(prefix):])
		b := v.tx.Bucket(bucketLog).Get(number(index))
		if b == nil {
			return nil, fmt.Errorf("log entry %d of %s: %w", index, of, store.ErrNotFound)
		}
		e, err := v.entry(index, b)
		if err != nil {
			return nil, err
		}
		out = append(out, e)
		size += len(b)
	}
	return out, nil
}

func (v view) Frame(key store.FrameKey) (store.Entry, error) {
	index := v.tx.Bucket(bucketFrames).Get(frameKey(key))
	if index == nil {
		return store.Entry{}, fmt.Errorf("frame %d of journal %s of node %s: %w", key.Seq, key.JournalID, key.Node, store.ErrNotFound)
	}
	n, err := parseNumber(index)
	if err != nil {
		return store.Entry{}, err
	}
	e, err := v.entry(n, v.tx.Bucket(bucketLog).Get(index))
	e.Frame = key
	return e, err
}

// entry copies an entry out of the transaction.
func (v view) entry(index uint64, b []byte) (store.Entry, error) {
	e := store.Entry{Index: index, Bytes: bytes.Clone(b)}
	if ev := v.tx.Bucket(bucketEvents).Get(number(index)); ev != nil {
		e.Event = &taskv1.TaskEvent{}
		if err := proto.Unmarshal(ev, e.Event); err != nil {
			return store.Entry{}, fmt.Errorf("decode event of log entry %d: %w", index, err)
		}
	}
	return e, nil
}
