// Package eventlog is the control plane's one history. Everything that happens
// to a task or a node is an entry of it, made once, numbered without gaps in
// the order of commit; tasks and nodes are projections of the entries and
// change in the same transaction.
package eventlog

import (
	"context"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/anypb"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"

	"github.com/gpuaas/millwright/controlplane/internal/clock"
	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// Config is what a log needs.
type Config struct {
	// Writer carries out the changes.
	Writer store.Writer
	// Now is the wall clock; nil means the machine's.
	Now func() time.Time
	// Spec returns the typed spec of a leaf, or nil when its kind is not known.
	Spec func(*taskv1.TaskLeaf) *anypb.Any
	// Intent returns what a task does to the intents of its node once it has
	// succeeded; nil means nothing.
	Intent func(*taskv1.Task) (key string, change tasks.IntentChange)
	// Authorizer returns who holds a key; nil means that only its id is known.
	Authorizer func(keyID string) *taskv1.Authorizer
	// Verify judges the authorisation of a task that the store does not know
	// and its node does. An error keeps the task unknown.
	Verify func(*taskv1.Envelope, *taskv1.SignedLeaf) error
}

// Log is the sequencer. It is safe for concurrent use.
type Log struct {
	cfg Config

	mu      sync.Mutex
	changed chan struct{} // guarded by mu; closed, and replaced, at each commit
}

// New returns a log.
func New(cfg Config) *Log {
	if cfg.Now == nil {
		cfg.Now = clock.Now
	}
	if cfg.Authorizer == nil {
		cfg.Authorizer = func(id string) *taskv1.Authorizer { return &taskv1.Authorizer{KeyId: id} }
	}
	if cfg.Intent == nil {
		cfg.Intent = func(*taskv1.Task) (string, tasks.IntentChange) { return "", tasks.IntentNone }
	}
	return &Log{cfg: cfg, changed: make(chan struct{})}
}

// Commit runs decide and makes what it appended and put durable, all or
// nothing. An error of decide is returned as it is, and nothing is written.
func (l *Log) Commit(ctx context.Context, decide func(*Tx) error) error {
	appended := false
	err := l.cfg.Writer.Update(ctx, func(v store.View) (*store.Change, error) {
		tx := newTx(l.cfg, v)
		if err := decide(tx); err != nil {
			return nil, err
		}
		appended = len(tx.entries) > 0
		return tx.change(), nil
	})
	if err == nil && appended {
		l.mu.Lock()
		close(l.changed)
		l.changed = make(chan struct{})
		l.mu.Unlock()
	}
	return err
}

// Changed returns a channel that is closed after the next commit of an entry.
// Take it before reading, so that no entry falls between.
func (l *Log) Changed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changed
}
