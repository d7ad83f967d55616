// The program verdict says what an agent would find in a state directory: it
// opens it as the agent does at its start. It is no part of the product. The
// suite test/powerloss builds it, gives it copies of disks, one directory a
// line, and reads a line of JSON for each.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/gpuaas/millwright/agent/internal/clock"
	"github.com/gpuaas/millwright/agent/internal/enrol"
	"github.com/gpuaas/millwright/agent/internal/shim"
	"github.com/gpuaas/millwright/agent/internal/state"
)

// verdict is what was found.
type verdict struct {
	// Error says what an agent could not get over.
	Error string `json:"error,omitempty"`
	// Joined says that the node has its identity.
	Joined bool `json:"joined"`
	// Journal is the id of the journal.
	Journal string `json:"journal,omitempty"`
	// Head is the last frame, Acked the last that the server has.
	Head  uint64 `json:"head"`
	Acked uint64 `json:"acked"`
	// Outputs are the tasks with output that is not all on the server.
	Outputs []string `json:"outputs,omitempty"`
	// Ran are the commands that were started, Ended those with a result.
	Ran   []string `json:"ran,omitempty"`
	Ended []string `json:"ended,omitempty"`
}

func main() {
	in, out := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	for in.Scan() {
		v := &verdict{}
		if err := v.judge(in.Text()); err != nil {
			v.Error = err.Error()
		}
		if err := out.Encode(v); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

func (v *verdict) judge(dir string) error {
	if err := v.commands(dir); err != nil {
		return err
	}
	e, err := enrol.Open(enrol.Config{Dir: filepath.Join(dir, "identity")})
	if errors.Is(err, enrol.ErrNotJoined) {
		return nil
	}
	if err != nil {
		return err
	}
	v.Joined = true
	s, err := state.Open(context.Background(), state.Config{
		Dir: dir, Node: e.Node(), Generation: e.Generation(), BootID: "verdict",
		Clock: clock.System{}, Logger: slog.New(slog.DiscardHandler), JoinFloor: e.Floor(), IdentityNotBefore: e.NotBefore(),
		LockTimeout: time.Second,
	})
	if err != nil {
		return err
	}
	err = s.View(func(tx *state.Tx) error {
		h, err := tx.Head()
		if err != nil {
			return err
		}
		v.Journal, v.Head, v.Acked = h.JournalID, h.LastSeq, h.AckedSeq
		outputs, err := tx.Outputs()
		for _, o := range outputs {
			v.Outputs = append(v.Outputs, o.TaskID)
		}
		return err
	})
	return errors.Join(err, s.Check(), s.Close())
}

// commands reads the files of all commands. Those that have their name are
// whole.
func (v *verdict) commands(dir string) error {
	all, err := filepath.Glob(filepath.Join(dir, "commands", "*", "*-*"))
	if err != nil {
		return err
	}
	for _, d := range all {
		_, errMarker := shim.Dir(d).Marker()
		_, errResult := shim.Dir(d).Result()
		for _, err := range []error{errMarker, errResult} {
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
		if task := filepath.Base(filepath.Dir(d)); errMarker == nil {
			v.Ran = append(v.Ran, task)
			if errResult == nil {
				v.Ended = append(v.Ended, task)
			}
		}
	}
	return nil
}
