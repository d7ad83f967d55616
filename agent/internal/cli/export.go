package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"syscall"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/gpuaas/millwright/agent/internal/configfile"
	"github.com/gpuaas/millwright/agent/internal/local"
	"github.com/gpuaas/millwright/agent/internal/state"
	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
)

func (a *app) exportCmd() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use: "export", Short: "Write the whole journal as JSON lines, to be checked elsewhere", Args: between(0, 0),
		Long: `Write the whole journal as JSON lines: its head, each frame with its exact bytes
and hashes, the tasks with their steps, and the intents.

It asks the agent that runs. When none does, or with --file, it reads a copy of
the state file; the file itself is never locked nor changed.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if file != "" {
				return state.ExportFile(file, a.printLine)
			}
			cfg, err := configfile.Load(a.config)
			if err != nil {
				return err
			}
			err = local.Reach(cmd.Context(), cfg.RunDir)
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
				return state.ExportFile(state.Path(cfg.StateDir), a.printLine)
			}
			return reach(cmd.Context(), cfg, a.exportFrom)
		},
	}
	cmd.Flags().StringVar(&file, "file", "", "a state file that no agent has open, for example one that was set aside")
	return cmd
}

func (a *app) exportFrom(ctx context.Context, c agentv1.LocalServiceClient) error {
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
			if err := a.printLine(line); err != nil {
				return err
			}
		}
	}
}

// printLine writes a message as one line. An event with a part that this
// release does not know is left as its bytes.
func (a *app) printLine(line *agentv1.JournalLine) error {
	b, err := protojson.Marshal(line)
	if err != nil && line.GetFrame().GetEvent() != nil {
		line.GetFrame().Event = nil
		b, err = protojson.Marshal(line)
	}
	if err != nil {
		return fmt.Errorf("format output: %w", err)
	}
	var out bytes.Buffer
	if err := json.Compact(&out, b); err != nil { // protojson's own spaces vary on purpose
		return fmt.Errorf("format output: %w", err)
	}
	return a.say("%s\n", out.Bytes())
}
