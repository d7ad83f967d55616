package testbed

import (
	"context"
	_ "embed"
	"fmt"
	"strings"
)

// SlurmNode is the name of the node that runs Slurm's controller.
const SlurmNode = "slurm"

//go:embed slurm.sh
var slurmScript string

// serveSlurm makes the node a site's own controller: munge with a key of its own
// and slurmctld. Nodes join as dynamic ones; slurm.conf names n5, with two fake GPUs,
// and n4, with more of them than gres.conf has devices.
func (n *Node) serveSlurm(ctx context.Context) error {
	if _, err := n.Exec(ctx, "sh", "-c", slurmScript); err != nil {
		return err
	}
	err := poll(ctx, pollInterval, func() (bool, error) {
		res, err := n.Exec(ctx, "scontrol", "ping")
		return err == nil && strings.Contains(string(res.Stdout), " is UP"), nil
	})
	if err != nil {
		return fmt.Errorf("node %s: wait until slurmctld answers: %w", n.name, err)
	}
	return nil
}
