package step

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// packageTime is what fetching, unpacking and configuring packages may take.
const packageTime = 30 * time.Minute

// installed is dpkg's word for a package that is there and set up.
const installed = "installed"

type installPackages struct{ args *taskv1.PackageInstallStep }

// InstallPackages returns the step that installs packages in their versions, and
// nothing besides, and holds some. Its undo removes what was not there before
// and ends the holds that were not.
func InstallPackages(args *taskv1.PackageInstallStep) tasks.Step { return installPackages{args} }

func (s installPackages) Args() proto.Message { return s.args }

func (s installPackages) Title() string {
	var parts []string
	if len(s.args.GetPackages()) > 0 {
		parts = append(parts, "install "+pinList(s.args.GetPackages()))
	}
	if len(s.args.GetHold()) > 0 {
		parts = append(parts, "hold "+strings.Join(s.args.GetHold(), ", "))
	}
	return strings.Join(parts, " and ")
}

func pinList(pins []*taskv1.PackagePin) string {
	var out []string
	for _, p := range pins {
		out = append(out, p.GetName()+" "+p.GetVersion())
	}
	return strings.Join(out, ", ")
}

// Timeout implements [tasks.Limiter].
func (s installPackages) Timeout() time.Duration { return packageTime }

// names are all packages that the step touches.
func (s installPackages) names() []string {
	out, seen := pinNames(s.args.GetPackages()), map[string]bool{}
	for _, n := range out {
		seen[n] = true
	}
	for _, n := range s.args.GetHold() {
		if !seen[n] {
			out = append(out, n)
		}
	}
	return out
}

func pinNames(pins []*taskv1.PackagePin) []string {
	out := make([]string, 0, len(pins))
	for _, p := range pins {
		out = append(out, p.GetName())
	}
	return out
}

func (s installPackages) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	return observePackages(ctx, h, s.names())
}

func observePackages(ctx context.Context, h host.Reader, names []string) ([]byte, error) {
	list, err := h.Packages(ctx, names)
	if err != nil {
		return nil, err
	}
	o := &taskv1.PackageObserved{}
	for _, p := range list {
		o.Packages = append(o.Packages, &taskv1.PackageState{Name: p.Name, Version: p.Version, State: p.State, Held: p.Held})
	}
	return encode(o)
}

func (s installPackages) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	if err := sameManager(ctx, h, s.args.GetManager()); err != nil {
		return nil, err
	}
	if len(s.args.GetPackages()) > 0 {
		if err := h.InstallPackages(ctx, packageSet(s.args.GetPackages(), s.args.GetFiles())); err != nil {
			return nil, packageReason(err)
		}
	}
	if len(s.args.GetHold()) == 0 {
		return nil, nil
	}
	return nil, packageReason(h.HoldPackages(ctx, s.args.GetHold(), true))
}

var errOtherManager = errors.New("another package manager")

// sameManager refuses a step that was planned for another package manager: names
// and versions are not the same in both.
func sameManager(ctx context.Context, h host.Reader, planned string) error {
	if planned == "" {
		planned = host.Apt
	}
	have, err := h.PackageManager(ctx)
	if err != nil {
		return err
	}
	if have.Name != planned {
		return fmt.Errorf("change packages: it was planned with %s, and the node has %s now: %w", planned, have.Name, errOtherManager)
	}
	return nil
}

// packageReason gives the failures that a person can do something about a reason
// of their own.
func packageReason(err error) error {
	switch {
	case errors.Is(err, host.ErrPackagesLocked):
		return &tasks.ReasonError{Reason: tasks.ReasonPackagesLocked, Err: err}
	case errors.Is(err, host.ErrOtherPackages):
		return &tasks.ReasonError{Reason: tasks.ReasonOtherPackages, Err: err}
	}
	return err
}

func packageSet(pins []*taskv1.PackagePin, files []*taskv1.PackageFile) host.PackageSet {
	var set host.PackageSet
	for _, p := range pins {
		set.Packages = append(set.Packages, host.Package{Name: p.GetName(), Version: p.GetVersion(), Architecture: p.GetArchitecture()})
	}
	for _, f := range files {
		set.Files = append(set.Files, host.PackageFile{Path: f.GetPath(), SHA256: f.GetSha256()})
	}
	return set
}

func (s installPackages) Verify(ctx context.Context, h host.Prober) error {
	list, err := h.Packages(ctx, s.names())
	if err != nil {
		return err
	}
	for i, p := range s.args.GetPackages() {
		if have := list[i]; have.State != installed || have.Version != p.GetVersion() {
			return fmt.Errorf("package %s is %s, want %s: %w", p.GetName(), DescribePackage(have), p.GetVersion(), tasks.ErrNotSatisfied)
		}
	}
	held := map[string]bool{}
	for _, p := range list {
		held[p.Name] = p.Held
	}
	for _, n := range s.args.GetHold() {
		if !held[n] {
			return fmt.Errorf("package %s is not held: %w", n, tasks.ErrNotSatisfied)
		}
	}
	return nil
}

// DescribePackage says in words what there is of a package.
func DescribePackage(p host.PackageStatus) string {
	switch p.State {
	case "":
		return "not installed"
	case installed:
		return "installed in version " + p.Version
	case "config-files":
		return "removed, with configuration files left"
	}
	return p.State + " in version " + p.Version
}

func (s installPackages) Undo(ctx context.Context, h host.Host, before []byte) error {
	var was taskv1.PackageObserved
	if err := decode(before, &was); err != nil {
		return err
	}
	now, err := h.Packages(ctx, s.names())
	if err != nil {
		return err
	}
	if err := restoreHolds(ctx, h, was.GetPackages(), now); err != nil {
		return err
	}
	// The configuration files that somebody else's package left stay.
	var purge, remove []string
	brought := s.args.GetPackages()
	for i, p := range was.GetPackages()[:min(len(brought), len(was.GetPackages()))] {
		switch {
		case now[i].State == "" || now[i].State == p.GetState() || p.GetState() == installed:
		case p.GetState() == "":
			purge = append(purge, p.GetName())
		default:
			remove = append(remove, p.GetName())
		}
	}
	if len(remove) > 0 { // all at once: one of them may need another
		if err := h.RemovePackages(ctx, slices.Concat(remove, purge), false); err != nil {
			return packageReason(err)
		}
	}
	if len(purge) == 0 {
		return nil
	}
	return packageReason(h.RemovePackages(ctx, purge, true))
}

// restoreHolds ends the holds that were not there, and sets those that were.
func restoreHolds(ctx context.Context, h host.Host, was []*taskv1.PackageState, now []host.PackageStatus) error {
	var end, set []string
	for i, p := range was {
		switch {
		case i >= len(now) || now[i].Held == p.GetHeld() || now[i].State == "":
		case p.GetHeld():
			set = append(set, p.GetName())
		default:
			end = append(end, p.GetName())
		}
	}
	if len(end) > 0 {
		if err := h.HoldPackages(ctx, end, false); err != nil {
			return err
		}
	}
	if len(set) == 0 {
		return nil
	}
	return h.HoldPackages(ctx, set, true)
}
