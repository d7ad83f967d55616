package step

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

type removePackages struct{ args *taskv1.PackageRemoveStep }

// RemovePackages returns the step that removes packages. A planner names only
// those that Millwright brought: see [host.PackageStatus]. Its undo installs
// them again, and says so when no source or file has them any more.
func RemovePackages(args *taskv1.PackageRemoveStep) tasks.Step { return removePackages{args} }

func (s removePackages) Args() proto.Message { return s.args }

func (s removePackages) Title() string { return "remove " + pinList(s.args.GetPackages()) }

// Timeout implements [tasks.Limiter].
func (s removePackages) Timeout() time.Duration { return packageTime }

func (s removePackages) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	return observePackages(ctx, h, pinNames(s.args.GetPackages()))
}

func (s removePackages) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	if err := sameManager(ctx, h, s.args.GetManager()); err != nil {
		return nil, err
	}
	list, err := h.Packages(ctx, pinNames(s.args.GetPackages()))
	if err != nil {
		return nil, err
	}
	var held, there []string
	for _, p := range list {
		if p.State == "" || p.State == "config-files" && !s.args.GetPurge() {
			continue
		}
		there = append(there, p.Name)
		if p.Held {
			held = append(held, p.Name)
		}
	}
	if len(held) > 0 {
		if err := h.HoldPackages(ctx, held, false); err != nil {
			return nil, packageReason(err)
		}
	}
	if len(there) == 0 {
		return nil, nil
	}
	return nil, packageReason(h.RemovePackages(ctx, there, s.args.GetPurge()))
}

func (s removePackages) Verify(ctx context.Context, h host.Prober) error {
	list, err := h.Packages(ctx, pinNames(s.args.GetPackages()))
	if err != nil {
		return err
	}
	for _, p := range list {
		if p.State == "" || p.State == "config-files" && !s.args.GetPurge() {
			continue
		}
		return fmt.Errorf("package %s is %s: %w", p.Name, DescribePackage(p), tasks.ErrNotSatisfied)
	}
	return nil
}

func (s removePackages) Undo(ctx context.Context, h host.Host, before []byte) error {
	var was taskv1.PackageObserved
	if err := decode(before, &was); err != nil {
		return err
	}
	var again []*taskv1.PackagePin
	for i, p := range was.GetPackages() {
		if p.GetState() == installed {
			again = append(again, s.args.GetPackages()[i])
		}
	}
	if len(again) > 0 {
		err := h.InstallPackages(ctx, packageSet(again, s.args.GetFiles()))
		if errors.Is(err, host.ErrNoPackage) || errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w: %w", err, tasks.ErrIrreversible)
		}
		if err != nil {
			return packageReason(err)
		}
	}
	now, err := h.Packages(ctx, pinNames(s.args.GetPackages()))
	if err != nil {
		return err
	}
	return restoreHolds(ctx, h, was.GetPackages(), now)
}
