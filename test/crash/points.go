package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"

	"github.com/gpuaas/millwright/test/cluster"
)

// The programs, as their registries name them.
const (
	agent  = "agent"
	shim   = "shim"
	server = "server"
)

// point is a crash point as a fault build tells it.
type point struct {
	Name    string `json:"name"`
	Program string `json:"program"`
	Spot    string `json:"spot"`
	What    string `json:"what"`
}

// mute reports whether the point says nothing about the task that it comes in.
func (p point) mute() bool { return p.Spot == "apart" || p.Spot == "message" }

// enumerate asks the fault builds for their points.
func enumerate(ctx context.Context) ([]point, error) {
	var all []point
	for _, name := range []string{"millwrightd", "millwright-server"} {
		out, err := exec.CommandContext(ctx, filepath.Join("bin", cluster.Crash, name), "crash-points").Output()
		if err != nil {
			return nil, fmt.Errorf("list the crash points of %s: %w: run this as make crash, which builds it, in the repository", name, err)
		}
		var some []point
		if err := json.Unmarshal(out, &some); err != nil {
			return nil, fmt.Errorf("read the crash points of %s: %w", name, err)
		}
		all = append(all, some...)
	}
	return all, nil
}

// injury is what a case does to a process.
type injury struct {
	point point
	nth   int    // at which time that it comes by
	mode  string // kill or fail
}

func (i injury) String() string { return fmt.Sprintf("%s %s %d", i.mode, i.point.Name, i.nth) }
