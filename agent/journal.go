package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/executor"
	nodehost "github.com/gpuaas/millwright/agent/internal/host"
	"github.com/gpuaas/millwright/agent/internal/output"
	"github.com/gpuaas/millwright/agent/internal/session"
	"github.com/gpuaas/millwright/agent/internal/state"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

// journal is the executor's outbox as the session uses it.
type journal struct {
	*executor.Executor
	node *node
}

// Head says where the journal stands.
func (j journal) Head(context.Context) (session.Head, error) {
	h, err := j.node.head()
	return session.Head{JournalID: h.JournalID, InstanceID: h.InstanceID, FirstSeq: h.FirstSeq, LastSeq: h.LastSeq, AckedSeq: h.AckedSeq}, err
}

// Behind has the journal replaced by a new one.
func (j journal) Behind(context.Context, string, uint64) error {
	if err := j.node.store.Condemn(); err != nil {
		return err
	}
	select {
	case j.node.condemned <- struct{}{}:
	default:
	}
	return nil
}

// scrubAgain is the pause between looks at all of the journal.
const scrubAgain = 24 * time.Hour

// scrub looks at all of the journal from time to time, since a start looks at what
// it goes on with, and a medium loses bits without a word. It ends the work when
// the journal is damaged.
func (n *node) scrub(ctx context.Context) error {
	for pause := n.cfg.ScrubAfter; clock.Sleep(ctx, pause); pause = scrubAgain {
		err := n.store.Scrub(ctx)
		switch {
		case errors.Is(err, state.ErrDamaged):
			return fmt.Errorf("%w: %w", errDamaged, err)
		case err != nil && ctx.Err() == nil:
			n.log.ErrorContext(ctx, "the journal could not be looked at", "err", err, "retry_in", scrubAgain)
		}
	}
	return nil
}

func (n *node) head() (state.Head, error) { return n.store.Head() }

// files are the commands' files on the machine as the uploader uses them.
type files struct{ machine *nodehost.Node }

// Commands returns the commands that have files.
func (f files) Commands() ([]output.ID, error) {
	all, err := f.machine.Commands()
	var out []output.ID
	for _, id := range all {
		out = append(out, output.ID{TaskID: id.TaskID, Step: id.Step})
	}
	return out, err
}

// State describes a stream.
func (f files) State(id output.ID, s taskv1.Stream) (output.State, error) {
	o, err := f.machine.Output(id.TaskID, id.Step, s)
	return output.State{Total: o.Total, Head: o.Head, Tail: o.Tail, Ended: o.Ended}, err
}

// ReadHead reads from a head.
func (f files) ReadHead(id output.ID, s taskv1.Stream, p []byte, offset int64) (int, error) {
	return f.machine.ReadHead(id.TaskID, id.Step, s, p, offset)
}

// ReadTail reads from a tail.
func (f files) ReadTail(id output.ID, s taskv1.Stream, p []byte, offset int64) (int, error) {
	return f.machine.ReadTail(id.TaskID, id.Step, s, p, offset)
}

// Delete deletes the files of a task's commands.
func (f files) Delete(taskID string) error { return f.machine.DeleteCommands(taskID) }

// ledger is what the journal knows of outputs.
type ledger struct{ node *node }

// Unsent returns the commands whose output is not all on the server. Task ids
// begin with their time, so that the order of ids is that of age.
func (l ledger) Unsent(context.Context) ([]output.ID, error) {
	var out []output.ID
	err := l.node.store.View(func(tx *state.Tx) error {
		all, err := tx.Outputs()
		for _, o := range all {
			out = append(out, output.ID{TaskID: o.TaskID, Step: o.Step})
		}
		return err
	})
	return out, err
}

// Sent records that the output of a command is all on the server.
func (l ledger) Sent(_ context.Context, id output.ID) error {
	return l.node.store.Update(func(tx *state.Tx) error {
		tx.DeleteOutput(state.Output{TaskID: id.TaskID, Step: id.Step})
		return nil
	})
}

// Ended reports whether a task has ended. One that the journal does not know
// has.
func (l ledger) Ended(_ context.Context, taskID string) (ended bool, err error) {
	err = l.node.store.View(func(tx *state.Tx) error {
		rec, err := tx.Task(taskID)
		ended = errors.Is(err, state.ErrNotFound) || err == nil && state.Terminal(rec.GetState())
		if errors.Is(err, state.ErrNotFound) {
			return nil
		}
		return err
	})
	return ended, err
}

// Disposable reports whether a task's files may go. Those of a task that the
// journal does not know, because a journal was lost, are kept until they are
// old: its command may still run, and a person may want to look.
func (l ledger) Disposable(_ context.Context, taskID string, endedBefore time.Time) (ok bool, err error) {
	err = l.node.store.View(func(tx *state.Tx) error {
		rec, err := tx.Task(taskID)
		if errors.Is(err, state.ErrNotFound) {
			ok, err = untouchedSince(filepath.Join(l.node.cfg.StateDir, "commands", taskID), endedBefore)
			return err
		}
		if err != nil || !state.Terminal(rec.GetState()) {
			return err
		}
		unsent, err := tx.HasOutput(taskID)
		ok = rec.GetAcknowledged() && !unsent || rec.GetEndTime().AsTime().Before(endedBefore)
		return err
	})
	return ok && err == nil, err
}

// untouchedSince reports whether nothing was added to the directory, or to one
// in it, since t.
func untouchedSince(dir string, t time.Time) (bool, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			return false, err
		}
		if !info.ModTime().Before(t) {
			return false, nil
		}
	}
	return true, nil
}
