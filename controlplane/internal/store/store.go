// Package store says what the control plane keeps: the event log and the rows
// that are projected from it. It holds no database; stores live in packages
// below it and pass the suite in storetest.
//
// All that is written goes through one sequencer. A writer gives a function
// that sees the store as it is and returns a [Change]; the store carries the
// change out whole and durably, or not at all, before the next function runs.
// The function only reads, so a change that is refused has written nothing.
package store

import (
	"context"
	"errors"
	"time"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

var (
	// ErrNotFound is wrapped when a row that was asked for is not there.
	ErrNotFound = errors.New("not found")
	// ErrClosed is returned by a write once the store's writer has ended.
	ErrClosed = errors.New("store is closed")
	// ErrUnwritable is wrapped by the error of a change that the disk did not
	// take: it is full, read-only or broken. The same change may be tried again.
	ErrUnwritable = errors.New("the server cannot write to its disk")
	// ErrTooOld is returned by [LogView.Entries] when the first entry asked for
	// is no longer kept.
	ErrTooOld = errors.New("log no longer reaches back that far")
)

// Decide reads v and returns what is to be written, or an error, and then
// nothing is. A nil change writes nothing. It must not keep v, and must be
// short: no other write runs meanwhile.
type Decide func(v View) (*Change, error)

// Writer carries out changes, one after the other.
type Writer interface {
	// Update runs decide, writes its change and returns once it is durable. The
	// error of decide is returned as it is. ctx is looked at until decide runs;
	// then the outcome is waited for, so that decide may write to variables of
	// its caller.
	Update(ctx context.Context, decide Decide) error
}

// Reader gives out consistent views.
type Reader interface {
	// View runs read on a view that does not change. read must not keep it, and
	// must be short: it returns one page, since an open view holds up a writer
	// that needs more room.
	View(ctx context.Context, read func(View) error) error
}

// Change is what one decision writes, all or nothing. A row replaces the one
// with the same key.
type Change struct {
	// Entries are appended to the log. Their indexes follow [LogView.LastIndex]
	// without a gap.
	Entries   []Entry
	Tasks     []*serverv1.TaskRow
	Nodes     []*serverv1.NodeRow
	Journals  []*serverv1.JournalRow
	Requests  []*serverv1.RequestRow
	Tokens    []*serverv1.TokenRow
	Seen      []*serverv1.SeenRow
	Envelopes []*taskv1.Envelope
	Health    []*serverv1.HealthRow
	// HealthGone are removed, before Health is written.
	HealthGone []HealthKey
	// HealthTrims end the histories of nodes. The log keeps its entries.
	HealthTrims []HealthTrim
	// Cluster is set once, when the server is founded.
	Cluster *serverv1.ClusterRow
	// RaiseGeneration makes the log's generation one more, so that no watch
	// goes on across a time that was lost.
	RaiseGeneration bool
}

// Entry is one entry of the log.
type Entry struct {
	// Index is its place, from 1.
	Index uint64
	// Bytes are the serialised [auditv1.LogEntry], made once.
	Bytes []byte
	// Event is what the entry means for a task, with the node's own event left
	// out; nil when it concerns none.
	Event *taskv1.TaskEvent
	// Frame says which frame of a node it holds; the zero value for none.
	Frame FrameKey
	// HealthOf is the node of which it holds a change of a condition; empty for
	// none. It is not read back.
	HealthOf string
}

// Decode returns the entry's message.
func (e Entry) Decode() (*auditv1.LogEntry, error) { return decodeEntry(e) }

// FrameKey names a frame of a node's journal.
type FrameKey struct {
	Node, JournalID string
	Seq             uint64
}

// HealthKey names a condition of a node's GPU side.
type HealthKey struct{ Node, Key string }

// HealthTrim takes the changes of a node's conditions, up to an entry of the
// log, out of its history.
type HealthTrim struct {
	Node    string
	Through uint64
}

// View is the whole store at one moment.
type View interface {
	TaskView
	NodeView
	HealthView
	LogView
	FoundingView
}

// TaskView reads tasks.
type TaskView interface {
	// Task returns a task by its whole id, or an error that wraps ErrNotFound.
	Task(id string) (*serverv1.TaskRow, error)
	// TaskIDs returns up to limit ids that begin with prefix, in order.
	TaskIDs(prefix string, limit int) ([]string, error)
	// ListTasks returns one page of the tasks that q matches, the newest first.
	ListTasks(q TaskQuery) (TaskPage, error)
	// OpenTasks returns up to limit tasks of a node that have not ended and were
	// created after the given index, the oldest first: those that wait in the
	// queue, or those that were sent to it.
	OpenTasks(node string, which Open, after uint64, limit int) ([]*serverv1.TaskRow, error)
	// CountOpen is how many tasks OpenTasks would return.
	CountOpen(node string, which Open, limit int) (int, error)
	// DueTasks returns up to limit queued tasks whose not_after is at or before
	// t, the first to end first.
	DueTasks(t time.Time, limit int) ([]*serverv1.TaskRow, error)
}

// Open says which open tasks are meant.
type Open int

// The kinds of open tasks.
const (
	// Queued tasks wait for their node to take them.
	Queued Open = iota + 1
	// Sent tasks were handed to their node and have not ended.
	Sent
)

// NodeView reads nodes.
type NodeView interface {
	// Node returns a node, or an error that wraps ErrNotFound.
	Node(name string) (*serverv1.NodeRow, error)
	// Nodes returns up to limit nodes after the given name, by name.
	Nodes(after string, limit int) ([]*serverv1.NodeRow, error)
	// Seen returns when a node was last heard, or an error that wraps
	// ErrNotFound.
	Seen(node string) (*serverv1.SeenRow, error)
	// Journal returns how far a journal of a node is stored, or an error that
	// wraps ErrNotFound.
	Journal(node, journalID string) (*serverv1.JournalRow, error)
	// Token returns a join token by its hash, or an error that wraps
	// ErrNotFound.
	Token(sha256 []byte) (*serverv1.TokenRow, error)
}

// HealthView reads the health of the GPUs of nodes.
type HealthView interface {
	// Condition returns a condition of a node, or an error that wraps
	// ErrNotFound.
	Condition(key HealthKey) (*serverv1.HealthRow, error)
	// Health returns up to limit conditions of a node, by key.
	Health(node string, limit int) ([]*serverv1.HealthRow, error)
	// HealthEntries is [LogView.Entries] for the changes of one node's
	// conditions.
	HealthEntries(node string, from uint64, limit, maxBytes int) ([]Entry, error)
	// HealthTrimmed is the entry through which a node's history was trimmed; 0:
	// it was not.
	HealthTrimmed(node string) (uint64, error)
	// HealthBeyond is the newest change of a node that so many newer ones follow;
	// 0: it has no more than these.
	HealthBeyond(node string, keep int) (uint64, error)
}

// LogView reads the event log.
type LogView interface {
	// LastIndex is the index of the newest entry; 0 when there is none.
	LastIndex() uint64
	// Generation is the log's generation, from 1.
	Generation() uint64
	// Entries returns entries from the given index on, in order: up to limit of
	// them, and no more than about maxBytes in all, but at least one when there
	// is one.
	Entries(from uint64, limit, maxBytes int) ([]Entry, error)
	// TaskEntries is Entries for the history of one task.
	TaskEntries(taskID string, from uint64, limit, maxBytes int) ([]Entry, error)
	// Frame returns the entry that holds a node's frame, or an error that wraps
	// ErrNotFound.
	Frame(key FrameKey) (Entry, error)
}

// FoundingView reads what there is once, and what is looked up by key alone.
type FoundingView interface {
	// Cluster returns what the server was founded with, or an error that wraps
	// ErrNotFound.
	Cluster() (*serverv1.ClusterRow, error)
	// Request returns a request by its caller and id, or an error that wraps
	// ErrNotFound.
	Request(caller, requestID string) (*serverv1.RequestRow, error)
	// Envelope returns an envelope by the SHA-256 of its payload, or an error
	// that wraps ErrNotFound.
	Envelope(sha256 []byte) (*taskv1.Envelope, error)
}
