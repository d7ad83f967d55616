package slurm

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/gpuaas/millwright/agent/internal/crash"
	"github.com/gpuaas/millwright/tasks/host"
)

// DrainSlurmNode implements host.SlurmChanger.
func (c *Client) DrainSlurmNode(ctx context.Context, ref host.SlurmRef, owner, text string) error {
	n, err := c.known(ctx, ref)
	if err != nil {
		return err
	}
	if n.DrainedBy(owner) {
		return nil
	}
	if n.Drained() || n.Reason != "" && (n.Is("DOWN") || n.Is("FAIL")) && !host.SlurmOwned(n.Reason, owner) {
		return fmt.Errorf("drain node %s: it is %s for another reason, %q: %w", n.Name, strings.Join(n.States, "+"), n.Reason, host.ErrNotOurs)
	}
	reason := owner
	if text != "" {
		reason += ": " + text
	}
	return c.update(ctx, ref, "drain", "update", "nodename="+n.Name, "state=drain", "reason="+reason)
}

// ResumeSlurmNode implements host.SlurmChanger.
func (c *Client) ResumeSlurmNode(ctx context.Context, ref host.SlurmRef, owner string) error {
	n, err := c.known(ctx, ref)
	if err != nil || !n.Drained() {
		return err
	}
	if !n.DrainedBy(owner) {
		return fmt.Errorf("resume node %s: it is %s for another reason, %q: %w", n.Name, strings.Join(n.States, "+"), n.Reason, host.ErrNotOurs)
	}
	// undrain ends the drain and nothing else: a node that is down stays so.
	return c.update(ctx, ref, "resume", "update", "nodename="+n.Name, "state=undrain")
}

// ReviveSlurmNode implements host.SlurmChanger. The controller keeps the reason of
// a drain when it sets the node down.
func (c *Client) ReviveSlurmNode(ctx context.Context, ref host.SlurmRef, owner string) error {
	n, err := c.known(ctx, ref)
	if err != nil {
		return err
	}
	if !n.DrainedBy(owner) || !n.Is("DOWN") {
		return c.ResumeSlurmNode(ctx, ref, owner)
	}
	return c.update(ctx, ref, "revive", "update", "nodename="+n.Name, "state=resume")
}

// DeleteSlurmNode implements host.SlurmChanger.
func (c *Client) DeleteSlurmNode(ctx context.Context, ref host.SlurmRef) error {
	n, err := c.SlurmNode(ctx, ref)
	if err != nil || !n.Known {
		return err
	}
	if !n.Is("DYNAMIC_NORM") && !n.Is("DYNAMIC_FUTURE") {
		return fmt.Errorf("remove node %s from Slurm: it stands in the controller's slurm.conf and is not dynamic: %w", n.Name, host.ErrNotOurs)
	}
	err = c.update(ctx, ref, "remove", "delete", "nodename="+n.Name)
	var exit *exitError
	if errors.As(err, &exit) && unknown(exit.words, n.Name) {
		return nil
	}
	return err
}

func (c *Client) known(ctx context.Context, ref host.SlurmRef) (host.SlurmNode, error) {
	n, err := c.SlurmNode(ctx, ref)
	if err == nil && !n.Known {
		err = fmt.Errorf("node %s: the controller does not know it: %w", n.Name, host.ErrSlurm)
	}
	return n, err
}

func (c *Client) update(ctx context.Context, ref host.SlurmRef, what string, args ...string) error {
	crash.Point("host.slurm_change.before")
	_, err := c.run(ctx, c.servers(ref.Servers), nil, append([]string{"scontrol"}, args...)...)
	crash.Point("host.slurm_change.after")
	if err != nil {
		return fmt.Errorf("%s node in Slurm: %w", what, err)
	}
	return nil
}
