package slurm

import (
	"context"
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// Resume is the kind slurm.resume.
type Resume struct{}

var (
	_ tasks.Task[*slurmv1.ResumeSpec]     = Resume{}
	_ tasks.Intender[*slurmv1.ResumeSpec] = Resume{}
)

// ResumeInfo describes slurm.resume.
func ResumeInfo() tasks.Info {
	return tasks.Info{
		Kind: "slurm.resume", Revision: 1, Class: tasks.State,
		Summary: "end the drain that slurm.drain made",
	}
}

// Validate implements [tasks.Task].
func (Resume) Validate(*slurmv1.ResumeSpec) error { return nil }

// Locks implements [tasks.Task].
func (Resume) Locks(*slurmv1.ResumeSpec) []tasks.Lock { return lock() }

// Intent implements [tasks.Intender].
func (Resume) Intent(*slurmv1.ResumeSpec) (string, tasks.IntentChange) {
	return drainKey, tasks.IntentRemove
}

// Plan implements [tasks.Task].
func (Resume) Plan(ctx context.Context, h host.Reader, _ *slurmv1.ResumeSpec) (tasks.Plan, error) {
	s, err := ask(ctx, h)
	if err != nil || !s.node.Drained() {
		return tasks.Plan{}, err
	}
	if !s.node.DrainedBy(ownerDrain) {
		return tasks.Plan{}, unfit("node %s was drained by somebody else, and stays so: %q", s.node.Name, s.node.Reason)
	}
	return tasks.Plan{
		Differences: []tasks.Difference{{Subject: "node " + s.node.Name + " in Slurm", Have: strings.Join(s.node.States, "+"), Want: "without DRAIN"}},
		Steps: []tasks.Step{step.DrainSlurm(&slurmv1.SlurmDrainStep{
			Node: s.machine.HostName, Controllers: s.controllers(), Owner: ownerDrain, Resume: true,
		})},
	}, nil
}

// Verify implements [tasks.Task].
func (Resume) Verify(ctx context.Context, h host.Prober, _ *slurmv1.ResumeSpec) error {
	s, err := ask(ctx, h)
	if err == nil && s.node.Drained() {
		err = fmt.Errorf("node %s is %s, reason %q: %w", s.node.Name, strings.Join(s.node.States, "+"), s.node.Reason, tasks.ErrNotSatisfied)
	}
	return err
}

// Result implements [tasks.Task].
func (Resume) Result(ctx context.Context, h host.Prober, _ *slurmv1.ResumeSpec, _ [][]byte) (proto.Message, error) {
	return drainResult(ctx, h)
}
