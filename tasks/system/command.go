// Package system has the kind system.command: one program, run once.
package system

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
)

const (
	defaultTimeout = time.Hour
	minTimeout     = time.Second
	maxTimeout     = 24 * time.Hour
	// deadlineGrace is how much longer the task may take than its command.
	deadlineGrace = 5 * time.Minute
	maxStopGrace  = 10 * time.Minute
	// maxLinks is where the kernel, too, gives up following symbolic links.
	maxLinks = 40
)

// Command is the kind system.command.
type Command struct{}

var (
	_ tasks.Task[*systemv1.CommandSpec]      = Command{}
	_ tasks.Deadliner[*systemv1.CommandSpec] = Command{}
)

// CommandInfo describes system.command.
func CommandInfo() tasks.Info {
	return tasks.Info{
		Kind: "system.command", Revision: 2, Class: tasks.Action,
		Since:   map[protoreflect.Name]uint32{"stop_grace": 2},
		Summary: "run one program once, without a shell",
	}
}

// Locks implements [tasks.Task]. What a command changes is not known. It shares
// one lock with all other commands, so that only what needs the whole node waits
// for its end.
func (Command) Locks(*systemv1.CommandSpec) []tasks.Lock {
	return []tasks.Lock{{Name: "command", Shared: true}}
}

// Deadline implements [tasks.Deadliner].
func (Command) Deadline(s *systemv1.CommandSpec) time.Duration { return timeout(s) + deadlineGrace }

func timeout(s *systemv1.CommandSpec) time.Duration {
	if s.GetTimeout() == nil {
		return defaultTimeout
	}
	return s.GetTimeout().AsDuration()
}

// Plan implements [tasks.Task]. It refuses a program, user or working directory
// that the node does not have.
func (Command) Plan(ctx context.Context, h host.Reader, s *systemv1.CommandSpec) (tasks.Plan, error) {
	if err := checkProgram(ctx, h, s.GetArgv()[0]); err != nil {
		return tasks.Plan{}, err
	}
	if dir := s.GetWorkingDirectory(); dir != "" {
		info, err := follow(ctx, h, dir)
		if err != nil {
			return tasks.Plan{}, unfitOr(err, "working directory %s does not exist: make it, or name another", dir)
		}
		if !info.Mode.IsDir() {
			return tasks.Plan{}, unfit("working directory %s is not a directory: name one", dir)
		}
	}
	if user := s.GetUser(); user != "" {
		known, err := h.UserExists(ctx, user)
		if err != nil {
			return tasks.Plan{}, err
		}
		if !known {
			return tasks.Plan{}, unfit("user %s does not exist on the node: make it, or name another", user)
		}
	}
	args := &taskv1.CommandStep{
		Argv: s.GetArgv(), WorkingDirectory: s.GetWorkingDirectory(), User: s.GetUser(),
		Timeout: durationpb.New(timeout(s)), SuccessExitCodes: slices.Sorted(slices.Values(s.GetSuccessExitCodes())),
	}
	if s.GetStopGrace() != nil {
		args.StopGrace = s.GetStopGrace()
	}
	for _, e := range s.GetEnvironment() {
		args.Environment = append(args.Environment, e.GetName()+"="+e.GetValue())
	}
	return tasks.Plan{Steps: []tasks.Step{step.RunCommand(args)}}, nil
}

func checkProgram(ctx context.Context, h host.Reader, program string) error {
	info, err := follow(ctx, h, program)
	switch {
	case err != nil:
		return unfitOr(err, "program %s does not exist: install it, or correct argv[0]", program)
	case !info.Mode.IsRegular():
		return unfit("program %s is not a file: correct argv[0]", program)
	case info.Mode.Perm()&0o111 == 0:
		return unfit("program %s is not executable (mode %#o): correct its mode, or argv[0]", program, info.Mode.Perm())
	}
	return nil
}

// follow describes the file that a path leads to.
func follow(ctx context.Context, h host.Reader, p string) (host.FileInfo, error) {
	for range maxLinks {
		info, err := h.Lstat(ctx, p)
		if err != nil || info.Mode&fs.ModeSymlink == 0 {
			return info, err
		}
		if path.IsAbs(info.Target) {
			p = path.Clean(info.Target)
		} else {
			p = path.Join(path.Dir(p), info.Target)
		}
	}
	return host.FileInfo{}, unfit("%s: more than %d symbolic links", p, maxLinks)
}

// unfitOr refuses the task when err says that something is missing.
func unfitOr(err error, format string, args ...any) error {
	if errors.Is(err, fs.ErrNotExist) {
		return unfit(format, args...)
	}
	return err
}

func unfit(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), tasks.ErrPrecondition)
}

// Verify implements [tasks.Task]: the effect of a command cannot be observed.
func (Command) Verify(context.Context, host.Prober, *systemv1.CommandSpec) error { return nil }

// Result implements [tasks.Task].
func (Command) Result(_ context.Context, _ host.Prober, _ *systemv1.CommandSpec, outs [][]byte) (proto.Message, error) {
	if len(outs) != 1 {
		return nil, fmt.Errorf("result of a command: %d outcomes, want 1", len(outs))
	}
	var o taskv1.CommandOutcome
	if err := proto.Unmarshal(outs[0], &o); err != nil {
		return nil, fmt.Errorf("decode outcome of the command: %w", err)
	}
	return &systemv1.CommandResult{Outcome: &o}, nil
}
