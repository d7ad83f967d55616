package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"

	auditv1 "github.com/gpuaas/millwright/proto/millwright/audit/v1"

	"github.com/gpuaas/millwright/controlplane"
)

func logCommand(path *string, stdout, stderr io.Writer) *cobra.Command {
	log := &cobra.Command{Use: "log", Short: "Look at the event log", Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			return &usageError{errors.New("a command is missing: log export")}
		}}
	log.AddCommand(&cobra.Command{
		Use: "export", Short: "Write the whole event log as JSON lines, to be checked elsewhere", Args: noArgs,
		Long: "Write the whole event log as JSON lines: each entry with its exact bytes, and the tasks and\n" +
			"nodes that follow from them. It asks the server that runs on the state directory; when none\n" +
			"does, it reads a copy of the store. The store itself is never locked nor changed.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := readConfig(*path, stderr)
			if err != nil {
				return err
			}
			return controlplane.Export(cmd.Context(), cfg, func(line *auditv1.LogLine) error { return printLine(stdout, line) })
		},
	})
	return log
}

// printLine writes a message as one line. An entry with a part that this
// release does not know is left as its bytes.
func printLine(w io.Writer, line *auditv1.LogLine) error {
	b, err := protojson.Marshal(line)
	if err != nil && line.GetEntry() != nil {
		line.GetEntry().Entry, line.GetEntry().Event = nil, nil
		b, err = protojson.Marshal(line)
	}
	if err != nil {
		return fmt.Errorf("format output: %w", err)
	}
	var out bytes.Buffer
	if err := json.Compact(&out, b); err != nil { // protojson's own spaces vary on purpose
		return fmt.Errorf("format output: %w", err)
	}
	out.WriteByte('\n')
	if _, err := w.Write(out.Bytes()); err != nil {
		return fmt.Errorf("write output: %w", err)
	}
	return nil
}
