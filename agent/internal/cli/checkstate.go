package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/millwright/agent/internal/child"
	"github.com/gpuaas/millwright/agent/internal/configfile"
	"github.com/gpuaas/millwright/agent/internal/state"
)

// stateFile is the file that is named, or that of the configuration.
func (a *app) stateFile(args []string) (string, error) {
	if len(args) == 1 {
		return filepath.Abs(args[0])
	}
	cfg, err := configfile.Load(a.config)
	if err != nil {
		return "", err
	}
	return state.Path(cfg.StateDir), nil
}

// checked is the answer of journal check.
type checked struct {
	File   string      `json:"file"`
	Sound  bool        `json:"sound"`
	Facts  state.Facts `json:"facts"`
	Mark   string      `json:"mark"`
	Behind bool        `json:"behind"`
	Wrong  string      `json:"wrong,omitempty"`
}

func (a *app) checkStateCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "check [FILE]", Short: "Check a copy of the state file, all of it, in a process of its own", Args: between(0, 1),
		Long: `Check a copy of the state file, all of it, in a process of its own, and hold it
against the high-water mark beside it. The file is neither locked nor changed, so
that the agent may run.

Exit code 0: sound, and not older than its mark; 1: not so.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			file, err := a.stateFile(args)
			if err != nil {
				return err
			}
			exe, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find millwrightd: %w", err)
			}
			f, err := state.CheckCopy(cmd.Context(), child.New(child.Config{Logger: slog.New(a.logHandler(slog.LevelWarn))}).Run, exe, file)
			if err != nil && !errors.Is(err, state.ErrDamaged) && !errors.Is(err, state.ErrInvariant) {
				return err
			}
			c := checked{File: file, Sound: err == nil, Facts: f}
			if err != nil {
				c.Wrong = err.Error()
			}
			mark, err := state.Mark(filepath.Dir(file))
			if err != nil {
				return err
			}
			c.Mark, c.Behind = state.AgainstMark(f, mark, c.Sound)
			return a.sayChecked(c)
		},
	}
	a.outputFlag(cmd)
	return cmd
}

func (a *app) sayChecked(c checked) error {
	if a.format == "json" {
		b, err := json.MarshalIndent(c, "", "  ")
		if err != nil {
			return fmt.Errorf("format output: %w", err)
		}
		if err := a.say("%s\n", b); err != nil {
			return err
		}
	} else {
		word := "sound"
		if !c.Sound {
			word = "DAMAGED: " + strings.ReplaceAll(c.Wrong, "\n", "\n         ")
		}
		if err := a.say("file     %s\nis       %s\njournal  %s of node %s, frame %d\ntasks    %d, of them %d unfinished\nmark     %s\n",
			c.File, word, c.Facts.JournalID, c.Facts.Node, c.Facts.Seq, c.Facts.Tasks, c.Facts.Unfinished, c.Mark); err != nil {
			return err
		}
	}
	switch {
	case !c.Sound:
		return fmt.Errorf("%s is damaged: at its next start the agent sets it aside and begins a new journal; millwrightd journal repair saves what can be read", c.File)
	case c.Behind:
		return fmt.Errorf("%s is older than what the agent has told: it will not be gone on with", c.File)
	}
	return nil
}

func (a *app) repairStateCmd() *cobra.Command {
	var out string
	cmd := &cobra.Command{
		Use: "repair [FILE] --out NEW", Short: "Save what can be read of a state file into a new one", Args: between(0, 1),
		Long: `Save what can be read of a copy of a state file, in a process of its own, into a
new file, and say what is lost. The file itself is never changed.

The new file is for reading, with millwrightd journal export --file. An agent does
not go on from it: it lacks what was lost, so that the agent, which has begun a new
journal by itself, and the control plane hold what may have run.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if out == "" {
				return usagef("--out: want the file to write")
			}
			file, err := a.stateFile(args)
			if err != nil {
				return err
			}
			exe, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find millwrightd: %w", err)
			}
			r, err := state.RepairCopy(cmd.Context(), child.New(child.Config{Logger: slog.New(a.logHandler(slog.LevelWarn))}).Run, exe, file, out)
			if err != nil {
				return err
			}
			return a.sayRescue(out, r)
		},
	}
	cmd.Flags().StringVar(&out, "out", "", "the new file, which must not exist")
	return cmd
}

func (a *app) sayRescue(out string, r *state.Rescue) error {
	var b strings.Builder
	fmt.Fprintf(&b, "file     %s\njournal  %s of node %s, frame %d\n", out, r.Facts.JournalID, r.Facts.Node, r.Facts.Seq)
	for _, name := range slices.Sorted(maps.Keys(r.Records)) {
		fmt.Fprintf(&b, "saved    %d of %s\n", r.Records[name], name)
	}
	for _, l := range r.Lost {
		fmt.Fprintf(&b, "lost     %s\n", l)
	}
	if r.LostMore > 0 {
		fmt.Fprintf(&b, "lost     and %d more\n", r.LostMore)
	}
	if r.Wrong != "" {
		fmt.Fprintf(&b, "wrong    %s\n", strings.ReplaceAll(r.Wrong, "\n", "\n         "))
	}
	return a.say("%s", b.String())
}
