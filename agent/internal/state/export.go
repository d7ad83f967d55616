package state

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	// exportRecords and exportBytes bound what is read in one view.
	exportRecords = 256
	exportBytes   = 256 << 10
	// copyTries is how often a file is copied that is written meanwhile.
	copyTries = 5
)

// Export gives all that the journal holds to emit, in the order that
// [agentv1.JournalLine] says. It reads in short views, one after the other, so
// that a slow reader holds up no writer: of a node at work, tasks may be newer
// than the last frame. An error of emit ends it and is returned as it is.
func (s *Store) Export(emit func(*agentv1.JournalLine) error) error {
	return export(s.View, emit)
}

// ExportFile is [Store.Export] of a state file that no agent has open, also of
// one that was set aside. It works on a copy in the directory for temporary
// files, takes no lock and changes nothing.
func ExportFile(path string, emit func(*agentv1.JournalLine) error) error {
	return withCopy(path, func(copied string) error { return exportCopy(copied, path, emit) })
}

func exportCopy(copied, path string, emit func(*agentv1.JournalLine) error) (err error) {
	if err := checkStructure(copied); err != nil {
		return fmt.Errorf("read %s: %w; millwrightd journal repair saves what can be read", path, err)
	}
	db, err := openBolt(copied, defaultLockTimeout, true)
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("read %s: %w: %v", path, ErrDamaged, r)
		}
	}()
	if err := view(db, func(tx *Tx) error { return checkVersion(tx.bolt, len(migrations)) }); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return export(func(fn func(*Tx) error) error { return view(db, fn) }, emit)
}

// copySettled copies a file, again when it was written meanwhile.
func copySettled(from, to string) error {
	for range copyTries {
		before, err := metaPages(from)
		if err != nil {
			return err
		}
		if err := copyFile(from, to); err != nil {
			return err
		}
		after, err := metaPages(from)
		if err != nil {
			return err
		}
		if bytes.Equal(before, after) {
			return nil
		}
	}
	return fmt.Errorf("%s is being written: ask the agent that has it", from)
}

// metaPages are the pages that every commit of bbolt changes one of.
func metaPages(path string) (head []byte, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read state file: %w", err)
	}
	defer f.Close()
	head, err = io.ReadAll(io.LimitReader(f, 2*int64(os.Getpagesize())))
	if err != nil {
		return nil, fmt.Errorf("read state file: %w", err)
	}
	return head, nil
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return fmt.Errorf("copy state file: %w", err)
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("copy state file: %w", err)
	}
	_, err = io.Copy(out, in)
	if err := errors.Join(err, out.Close()); err != nil {
		return fmt.Errorf("copy state file: %w", err)
	}
	return nil
}

func export(view func(func(*Tx) error) error, emit func(*agentv1.JournalLine) error) error {
	var first, last uint64
	err := view(func(tx *Tx) error {
		meta, err := tx.Journal()
		if err != nil {
			return err
		}
		h, err := tx.Head()
		first, last = h.FirstSeq, h.LastSeq
		if err != nil {
			return err
		}
		return emit(&agentv1.JournalLine{Line: &agentv1.JournalLine_Head{Head: &agentv1.JournalHead{
			Meta: meta, FirstSeq: h.FirstSeq, LastSeq: h.LastSeq, AcknowledgedSeq: h.AckedSeq,
		}}})
	})
	if err != nil {
		return err
	}
	for _, part := range []struct {
		bucket, from []byte
		lines        func(*Tx, []byte, []byte) ([]*agentv1.JournalLine, error)
	}{
		{bucketFrames, number(first), func(_ *Tx, _, v []byte) ([]*agentv1.JournalLine, error) { return frameLine(v), nil }},
		{bucketTasks, nil, taskLines},
		{bucketIntents, nil, intentLine},
	} {
		if err := exportBucket(view, part.bucket, part.from, part.lines, emit); err != nil {
			return fmt.Errorf("export %s of a journal of %d frames: %w", part.bucket, last, err)
		}
	}
	return nil
}

// exportBucket emits the lines of each record, a page after the other.
func exportBucket(view func(func(*Tx) error) error, bucket, from []byte,
	lines func(tx *Tx, k, v []byte) ([]*agentv1.JournalLine, error), emit func(*agentv1.JournalLine) error) error {
	for more := true; more; {
		var page []*agentv1.JournalLine
		size := 0
		err := view(func(tx *Tx) error {
			more = false
			return tx.scan(bucket, nil, from, func(k, v []byte) (bool, error) {
				if len(page) >= exportRecords || size >= exportBytes {
					from, more = append([]byte(nil), k...), true
					return false, nil
				}
				got, err := lines(tx, k, v)
				page = append(page, got...)
				size += len(v)
				return true, err
			})
		})
		if err != nil {
			return err
		}
		for _, l := range page {
			if err := emit(l); err != nil {
				return err
			}
		}
	}
	return nil
}

func frameLine(frame []byte) []*agentv1.JournalLine {
	sum := sha256.Sum256(frame)
	f := &agentv1.JournalFrame{Hash: sum[:], Bytes: append([]byte(nil), frame...)}
	event := new(taskv1.Event)
	if proto.Unmarshal(frame, event) == nil { // what cannot be read is exported as it is
		f.Seq, f.PrevHash, f.Event = event.GetSeq(), event.GetPrevHash(), event
	}
	return []*agentv1.JournalLine{{Line: &agentv1.JournalLine_Frame{Frame: f}}}
}

func taskLines(tx *Tx, k, _ []byte) ([]*agentv1.JournalLine, error) {
	id := string(k)
	rec, err := tx.Task(id)
	if err != nil {
		return nil, err
	}
	out := []*agentv1.JournalLine{{Line: &agentv1.JournalLine_Task{Task: rec}}}
	err = tx.Steps(id, func(i uint32, s *agentv1.StepRecord) error {
		s.Before = nil
		out = append(out, &agentv1.JournalLine{Line: &agentv1.JournalLine_Step{Step: &agentv1.JournalStepLine{TaskId: id, Step: i, Record: s}}})
		return nil
	})
	return out, err
}

func intentLine(tx *Tx, k, _ []byte) ([]*agentv1.JournalLine, error) {
	in, err := tx.Intent(string(k))
	return []*agentv1.JournalLine{{Line: &agentv1.JournalLine_Intent{Intent: in}}}, err
}

// Path is where the state file of a state directory is.
func Path(dir string) string { return filepath.Join(dir, dbName) }
