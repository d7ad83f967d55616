package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"syscall"
	"time"

	"github.com/gpuaas/millwright/agent/internal/local"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

// Export gives all that the journal in stateDir holds to emit, in the order that
// [agentv1.JournalLine] says. It asks the agent that serves runDir; when none
// does it reads a copy of the state file, which is neither locked nor changed.
// An error of emit ends it and is returned as it is.
func Export(ctx context.Context, stateDir, runDir string, emit func(*agentv1.JournalLine) error) error {
	err := local.Reach(ctx, runDir)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return ExportFile(state.Path(stateDir), emit)
	}
	if err != nil {
		return err
	}
	c, stop, err := local.Dial(runDir)
	if err != nil {
		return err
	}
	defer stop() //nolint:errcheck // all is read
	return receive(ctx, c, emit)
}

func receive(ctx context.Context, c agentv1.LocalServiceClient, emit func(*agentv1.JournalLine) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.ExportJournal(ctx, &agentv1.ExportJournalRequest{})
	if err != nil {
		return err
	}
	for {
		piece, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, line := range piece.GetLines() {
			if err := emit(line); err != nil {
				return err
			}
		}
	}
}

// ExportFile is [Export] of a state file that no agent has open, also of one
// that was set aside.
func ExportFile(path string, emit func(*agentv1.JournalLine) error) error {
	return state.ExportFile(path, emit)
}

// CheckJournal looks at all of the journal in stateDir, which no agent has open,
// and holds it against the mark beside it, as millwrightd journal check does with
// a copy in a process of its own: a damaged file may end this one. An error says
// what is wrong.
func CheckJournal(stateDir string) error {
	path := state.Path(stateDir)
	f, err := state.CheckFile(path, time.Second)
	if err != nil {
		return fmt.Errorf("check %s: %w", path, err)
	}
	mark, err := state.Mark(stateDir)
	if err != nil {
		return err
	}
	if says, behind := state.AgainstMark(f, mark, true); behind {
		return fmt.Errorf("check %s: mark: %s", path, says)
	}
	return nil
}
