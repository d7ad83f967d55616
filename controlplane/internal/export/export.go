// Package export gives the whole event log, and the rows that follow from it,
// to whoever wants to check it elsewhere. Beside a running server it answers on
// a unix socket in the server's state directory, whose mode decides who may
// ask: the store's file is the server's alone while it runs.
package export

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"
	serverv1 "github.com/gpuaas/millwright/proto/millwright/server/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"

	"github.com/gpuaas/millwright/controlplane/internal/store"
)

// Limits of one view.
const (
	pageRows  = 256
	pageBytes = 256 << 10
)

// Emit takes the next line. Its error ends the export.
type Emit func(*auditv1.LogLine) error

// All gives all lines to emit, in the order that [auditv1.LogLine] says. It
// reads in short views, so that a slow taker holds up no writer. An error of
// emit is returned as it is.
func All(ctx context.Context, r store.Reader, emit Emit) error {
	if err := cluster(ctx, r, emit); err != nil {
		return err
	}
	if err := entries(ctx, r, emit); err != nil {
		return err
	}
	if err := taskRows(ctx, r, emit); err != nil {
		return err
	}
	return nodes(ctx, r, emit)
}

func cluster(ctx context.Context, r store.Reader, emit Emit) error {
	var row *serverv1.ClusterRow
	err := r.View(ctx, func(v store.View) (err error) {
		row, err = v.Cluster()
		return err
	})
	if err != nil {
		return fmt.Errorf("export cluster: %w", err)
	}
	return emit(&auditv1.LogLine{Line: &auditv1.LogLine_Cluster{Cluster: row}})
}

func entries(ctx context.Context, r store.Reader, emit Emit) error {
	for from := uint64(1); ; {
		var page []store.Entry
		err := r.View(ctx, func(v store.View) (err error) {
			page, err = v.Entries(from, pageRows, pageBytes)
			return err
		})
		if err != nil {
			return fmt.Errorf("export log from entry %d: %w", from, err)
		}
		if len(page) == 0 {
			return nil
		}
		for _, e := range page {
			if err := emit(entryLine(e)); err != nil {
				return err
			}
		}
		from = page[len(page)-1].Index + 1
	}
}

// entryLine is an entry with its bytes; what cannot be read has only those.
func entryLine(e store.Entry) *auditv1.LogLine {
	sum := sha256.Sum256(e.Bytes)
	line := &auditv1.ExportedEntry{Index: e.Index, Hash: sum[:], Bytes: e.Bytes}
	if decoded, err := e.Decode(); err == nil {
		line.Entry = decoded
	}
	if frame := line.GetEntry().GetNodeFrame().GetFrame(); frame != nil {
		event := new(taskv1.Event)
		if proto.Unmarshal(frame, event) == nil {
			line.Event = event
		}
	}
	return &auditv1.LogLine{Line: &auditv1.LogLine_Entry{Entry: line}}
}

func taskRows(ctx context.Context, r store.Reader, emit Emit) error {
	q := store.TaskQuery{Limit: pageRows, MaxBytes: pageBytes, ScanLimit: pageRows}
	for {
		var page store.TaskPage
		err := r.View(ctx, func(v store.View) (err error) {
			page, err = v.ListTasks(q)
			return err
		})
		if err != nil {
			return fmt.Errorf("export tasks: %w", err)
		}
		for _, row := range page.Tasks {
			if err := emit(&auditv1.LogLine{Line: &auditv1.LogLine_Task{Task: row}}); err != nil {
				return err
			}
		}
		if q.Before = page.Next; q.Before == 0 {
			return nil
		}
	}
}

func nodes(ctx context.Context, r store.Reader, emit Emit) error {
	for after := ""; ; {
		var lines []*auditv1.LogLine
		err := r.View(ctx, func(v store.View) error {
			rows, err := v.Nodes(after, pageRows)
			for _, row := range rows {
				after = row.GetName()
				lines = append(lines, &auditv1.LogLine{Line: &auditv1.LogLine_Node{Node: row}})
				if row.GetJournalId() == "" {
					continue
				}
				journal, err := v.Journal(row.GetName(), row.GetJournalId())
				if errors.Is(err, store.ErrNotFound) {
					continue
				}
				if err != nil {
					return err
				}
				lines = append(lines, &auditv1.LogLine{Line: &auditv1.LogLine_Journal{Journal: journal}})
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("export nodes: %w", err)
		}
		if len(lines) == 0 {
			return nil
		}
		for _, l := range lines {
			if err := emit(l); err != nil {
				return err
			}
		}
	}
}
