// Package packagetest has two kinds that do nothing but install and remove
// packages, so that the package steps can be put to the whole suite: no kind of
// the product does only that (slurm.join has them before other steps).
package packagetest

import (
	"context"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

// Registry returns a registry with test.install and test.remove.
func Registry() *tasks.Registry {
	r := tasks.NewRegistry()
	step.Register(r)
	info := func(kind string) tasks.Info {
		return tasks.Info{Kind: kind, Revision: 1, Class: tasks.State, Summary: "a kind for tests"}
	}
	tasks.Add(r, info("test.install"), install{})
	tasks.Add(r, info("test.remove"), remove{})
	return r
}

var locks = []tasks.Lock{{Name: "packages"}}

// install takes the arguments of the step for its spec: the packages that are
// wanted, without what they need.
type install struct{}

func (install) Validate(*taskv1.PackageInstallStep) error { return nil }

func (install) Locks(*taskv1.PackageInstallStep) []tasks.Lock { return locks }

func (install) Plan(ctx context.Context, h host.Reader, s *taskv1.PackageInstallStep) (tasks.Plan, error) {
	held, files := map[string]bool{}, map[string]*taskv1.PackageFile{}
	for _, n := range s.GetHold() {
		held[n] = true
	}
	for i, f := range s.GetFiles() {
		files[s.GetPackages()[i].GetName()] = f
	}
	var wants []step.PackageWant
	for _, p := range s.GetPackages() {
		f := files[p.GetName()]
		wants = append(wants, step.PackageWant{
			Name: p.GetName(), Version: p.GetVersion(), Hold: held[p.GetName()], File: f.GetPath(), SHA256: f.GetSha256(),
		})
	}
	return step.PlanPackages(ctx, h, wants)
}

// Verify asks for each package by itself, and not for a plan.
func (install) Verify(ctx context.Context, h host.Prober, s *taskv1.PackageInstallStep) error {
	return step.InstallPackages(s).Verify(ctx, h)
}

func (install) Result(context.Context, host.Prober, *taskv1.PackageInstallStep, [][]byte) (proto.Message, error) {
	return nil, nil
}

// remove removes those packages of its spec that Millwright brought.
type remove struct{}

func (remove) Validate(*taskv1.PackageRemoveStep) error { return nil }

func (remove) Locks(*taskv1.PackageRemoveStep) []tasks.Lock { return locks }

func (remove) Plan(ctx context.Context, h host.Reader, s *taskv1.PackageRemoveStep) (tasks.Plan, error) {
	names := make([]string, 0, len(s.GetPackages()))
	for _, p := range s.GetPackages() {
		names = append(names, p.GetName())
	}
	return step.PlanRemoval(ctx, h, names, s.GetFiles(), s.GetPurge())
}

func (remove) Verify(ctx context.Context, h host.Prober, s *taskv1.PackageRemoveStep) error {
	p, err := remove{}.Plan(ctx, h, s)
	if err == nil && len(p.Steps) > 0 {
		err = tasks.ErrNotSatisfied
	}
	return err
}

func (remove) Result(context.Context, host.Prober, *taskv1.PackageRemoveStep, [][]byte) (proto.Message, error) {
	return nil, nil
}
