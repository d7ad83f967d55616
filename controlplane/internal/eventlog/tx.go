package eventlog

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// Tx is one decision: it reads the store with its own changes laid over it.
// What it returns may be changed by the caller and put back. It lives no longer
// than the function it was given to, and has one user.
type Tx struct {
	store.View
	cfg  Config
	now  time.Time
	next uint64

	entries   []store.Entry
	followUps []followUp
	tasks     map[string]*serverv1.TaskRow
	nodes     map[string]*serverv1.NodeRow
	journals  map[store.FrameKey]*serverv1.JournalRow // Seq is 0
	frames    map[store.FrameKey]store.Entry
	envelopes map[string]*taskv1.Envelope
	// conditions are of the GPU side of nodes; nil for one that is removed.
	conditions map[store.HealthKey]*serverv1.HealthRow
	kept       map[string]map[string]bool // the keys of the conditions of a node, once they were read
	healthOf   string                     // the node of which the entry that is being appended changes a condition
	trims      []store.HealthTrim
	requests   []*serverv1.RequestRow
	tokens     []*serverv1.TokenRow
	seen       []*serverv1.SeenRow
	cluster    *serverv1.ClusterRow
	raise      bool
}

func newTx(cfg Config, v store.View) *Tx {
	return &Tx{
		View: v, cfg: cfg, now: cfg.Now(), next: v.LastIndex() + 1,
		tasks:     map[string]*serverv1.TaskRow{},
		nodes:     map[string]*serverv1.NodeRow{},
		journals:  map[store.FrameKey]*serverv1.JournalRow{},
		frames:    map[store.FrameKey]store.Entry{},
		envelopes: map[string]*taskv1.Envelope{}, conditions: map[store.HealthKey]*serverv1.HealthRow{}, kept: map[string]map[string]bool{},
	}
}

// Now is the time of the decision.
func (t *Tx) Now() time.Time { return t.now }

// Task is [store.TaskView.Task], with the changes of this decision.
func (t *Tx) Task(id string) (*serverv1.TaskRow, error) {
	if row, ok := t.tasks[id]; ok {
		return row, nil
	}
	return t.View.Task(id)
}

// Node is [store.NodeView.Node], with the changes of this decision.
func (t *Tx) Node(name string) (*serverv1.NodeRow, error) {
	if row, ok := t.nodes[name]; ok {
		return row, nil
	}
	return t.View.Node(name)
}

// Journal is [store.NodeView.Journal], with the changes of this decision.
func (t *Tx) Journal(node, journalID string) (*serverv1.JournalRow, error) {
	if row, ok := t.journals[store.FrameKey{Node: node, JournalID: journalID}]; ok {
		return row, nil
	}
	return t.View.Journal(node, journalID)
}

// Frame is [store.LogView.Frame], with the changes of this decision.
func (t *Tx) Frame(key store.FrameKey) (store.Entry, error) {
	if e, ok := t.frames[key]; ok {
		return e, nil
	}
	return t.View.Frame(key)
}

// Envelope is [store.FoundingView.Envelope], with the changes of this decision.
func (t *Tx) Envelope(sha []byte) (*taskv1.Envelope, error) {
	if env, ok := t.envelopes[string(sha)]; ok {
		return env, nil
	}
	return t.View.Envelope(sha)
}

// PutNode stores what a node said of itself. What is in the log is not changed
// this way.
func (t *Tx) PutNode(row *serverv1.NodeRow) { t.nodes[row.GetName()] = row }

// PutJournal stores how far a journal has been read.
func (t *Tx) PutJournal(row *serverv1.JournalRow) {
	t.journals[store.FrameKey{Node: row.GetNode(), JournalID: row.GetJournalId()}] = row
}

// PutRequest stores a request, so that it can be repeated.
func (t *Tx) PutRequest(row *serverv1.RequestRow) { t.requests = append(t.requests, row) }

// PutToken stores a join token.
func (t *Tx) PutToken(row *serverv1.TokenRow) { t.tokens = append(t.tokens, row) }

// PutSeen stores when a node was last heard.
func (t *Tx) PutSeen(row *serverv1.SeenRow) { t.seen = append(t.seen, row) }

// PutCluster stores what the server is founded with.
func (t *Tx) PutCluster(row *serverv1.ClusterRow) { t.cluster = row }

// PutEnvelope stores an envelope under the SHA-256 of its payload, which it
// returns.
func (t *Tx) PutEnvelope(env *taskv1.Envelope) []byte {
	sum := sha256.Sum256(env.GetPayload())
	t.envelopes[string(sum[:])] = env
	return sum[:]
}

// RaiseGeneration makes all watch tokens of now invalid: the log was found to
// have gone back.
func (t *Tx) RaiseGeneration() { t.raise = true }

// Append numbers an entry that actor caused, projects it and adds it to the
// log. An entry that cannot be projected is an error and is not added, unless
// it is a node's frame: that is stored with the reason why not.
func (t *Tx) Append(actor string, entry *auditv1.LogEntry) error {
	entry.Index = t.next
	entry.RecordTime = timestamppb.New(t.now)
	entry.Actor = actor
	t.healthOf = ""
	event, err := t.project(entry)
	frame := entry.GetNodeFrame()
	switch {
	case err == nil:
	case frame != nil:
		frame.NotApplied = shorten(err.Error())
		if err := t.foundOnNode(frame.GetNode(), "EventsNotApplied", "NOT_APPLIED",
			fmt.Sprintf("event %d of journal %s: %s; see log entry %d", frame.GetSeq(), frame.GetJournalId(), frame.GetNotApplied(), entry.Index)); err != nil {
			return err
		}
	default:
		return err
	}
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(entry)
	if err != nil {
		return fmt.Errorf("serialise log entry: %w", err)
	}
	e := store.Entry{Index: t.next, Bytes: b, Event: event, HealthOf: t.healthOf}
	if frame != nil {
		e.Frame = store.FrameKey{Node: frame.GetNode(), JournalID: frame.GetJournalId(), Seq: frame.GetSeq()}
		t.frames[e.Frame] = e
	}
	t.entries = append(t.entries, e)
	t.next++
	for len(t.followUps) > 0 {
		f := t.followUps[0]
		t.followUps = t.followUps[1:]
		if err := t.Append(f.actor, f.entry); err != nil {
			return err
		}
	}
	return nil
}

// shorten keeps a reason short that holds what a node said.
func shorten(s string) string {
	const limit = 1 << 10
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit], "") + "..."
}

func (t *Tx) change() *store.Change {
	health, gone := t.healthChange()
	return &store.Change{
		Health:          health,
		HealthGone:      gone,
		HealthTrims:     t.trims,
		Entries:         t.entries,
		Tasks:           slices.Collect(maps.Values(t.tasks)),
		Nodes:           slices.Collect(maps.Values(t.nodes)),
		Journals:        slices.Collect(maps.Values(t.journals)),
		Envelopes:       slices.Collect(maps.Values(t.envelopes)),
		Requests:        t.requests,
		Tokens:          t.tokens,
		Seen:            t.seen,
		Cluster:         t.cluster,
		RaiseGeneration: t.raise,
	}
}

// foundOnNode sets a condition that the server itself found.
func (t *Tx) foundOnNode(name, kind, reason, message string) error {
	node, err := t.nodeOrNew(name)
	if err != nil {
		return err
	}
	SetCondition(&node.Found, t.now, &taskv1.Condition{
		Type: kind, Status: taskv1.ConditionStatus_CONDITION_STATUS_TRUE, Reason: reason, Message: message,
	})
	t.PutNode(node)
	return nil
}

// nodeOrNew returns a node's row, or a new one: a restored store may not know a
// node that others know.
func (t *Tx) nodeOrNew(name string) (*serverv1.NodeRow, error) {
	row, err := t.Node(name)
	if errors.Is(err, store.ErrNotFound) {
		return &serverv1.NodeRow{Name: name}, nil
	}
	return row, err
}
