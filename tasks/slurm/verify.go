package slurm

import (
	"context"
	"errors"
	"fmt"
	"strings"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// gpuName is how Slurm calls GPUs among its resources.
const gpuName = "gpu"

// closed are what srun says of a partition that is not for the one who asks: it
// says nothing about the node.
var closed = []string{
	"User's group not permitted to use this partition",
	"Invalid account or account/partition combination specified",
	"Access/permission denied",
	"No partition specified or system default partition",
}

func verifyMember(ctx context.Context, h host.Prober, spec *slurmv1.JoinSpec) error {
	s, err := lookFor(ctx, h, spec)
	if err != nil {
		return err
	}
	m := wanted(spec, s)
	if len(s.packages.Differences) > 0 {
		return fmt.Errorf("%s: %w", firstDifference(s.packages.Differences), tasks.ErrNotSatisfied)
	}
	if s.key.ref != nil {
		if err := step.SecretInPlace(ctx, h, keyFile(s.key.ref)); err != nil {
			return err
		}
	}
	if err := step.CheckMunge(ctx, h); err != nil {
		return err
	}
	if !s.answered {
		if err := step.CheckController(ctx, h, spec.GetControllers()); err != nil {
			return err
		}
		return s.silence
	}
	if diffs := s.differences(ctx, h, m); len(diffs) > 0 {
		return fmt.Errorf("%s (differences in all: %d): %w", firstDifference(diffs), len(diffs), tasks.ErrNotSatisfied)
	}
	if err := step.AwaitSlurmNode(ctx, h, s.start(m)); err != nil {
		return err
	}
	return probeJob(ctx, h, s, spec)
}

// probeJob runs a job where nothing stands against it: on a node that is full or
// drained it would wait.
func probeJob(ctx context.Context, h host.Prober, s *survey, spec *slurmv1.JoinSpec) error {
	ref := host.SlurmRef{Node: s.machine.HostName, Servers: spec.GetControllers()}
	n, err := h.SlurmNode(ctx, ref)
	if err != nil {
		return err
	}
	if n.Drained() || len(n.Jobs) > 0 || len(n.Partitions) == 0 {
		return nil
	}
	list := spec.GetDynamic().GetGres()
	if spec.GetStatic() != nil {
		list = spec.GetStatic().GetGres()
	}
	gres, want := "", 0
	for _, g := range list {
		if gres == "" || g.GetName() == gpuName {
			gres = g.GetName() + ":1"
		}
		if g.GetName() == gpuName {
			want = 1 // what else there is need not be a device
		}
	}
	if s.gpus != "" {
		gres, want = gpuName+":1", 1
	}
	got, err := h.ProbeSlurmJob(ctx, ref, gres)
	if err != nil {
		for _, c := range closed {
			if errors.Is(err, host.ErrSlurm) && strings.Contains(err.Error(), c) {
				return nil
			}
		}
		return err
	}
	if got < want {
		return fmt.Errorf("a job on node %s asked for %s and was given no device, as when no File= of the controller's gres.conf names it: %w", n.Name, gres, tasks.ErrNotSatisfied)
	}
	return nil
}

func memberResult(ctx context.Context, h host.Prober, controllers []string) (*slurmv1.JoinResult, error) {
	s, err := look(ctx, h, controllers, tasks.Plan{})
	if err != nil {
		return nil, err
	}
	if !s.answered {
		return nil, s.silence
	}
	return &slurmv1.JoinResult{
		Node: s.node.Name, State: strings.Join(s.node.States, "+"), Gres: s.node.Gres, Version: s.node.Version,
		Partitions: s.node.Partitions, Address: s.node.Address,
	}, nil
}
