package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/gpuaas/millwright/agent"
	"github.com/gpuaas/millwright/agent/internal/configfile"
	"github.com/gpuaas/millwright/agent/internal/local"
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
				return agent.ExportFile(file, a.printLine)
			}
			cfg, err := configfile.Load(a.config)
			if err != nil {
				return err
			}
			err = agent.Export(cmd.Context(), cfg.StateDir, cfg.RunDir, a.printLine)
			if errors.Is(err, fs.ErrPermission) {
				return unreachable(filepath.Join(cfg.RunDir, local.SocketName), err)
			}
			return answered(err)
		},
	}
	cmd.Flags().StringVar(&file, "file", "", "a state file that no agent has open, for example one that was set aside")
	return cmd
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
