package step

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

// commandGrace is how much longer than its command a step may take: the shim
// has the first word about the command's time.
const commandGrace = time.Minute

type runCommand struct{ args *taskv1.CommandStep }

var (
	_ tasks.CommandStep = runCommand{}
	_ tasks.Limiter     = limited{}
)

// limited is a command with a timeout.
type limited struct{ runCommand }

// Timeout implements [tasks.Limiter].
func (s limited) Timeout() time.Duration {
	return s.args.GetTimeout().AsDuration() + s.args.GetStopGrace().AsDuration() + commandGrace
}

// RunCommand returns the step that runs a program once. Its Apply returns the
// serialised CommandOutcome, and a [tasks.ReasonError] beside it when the
// command did not end as the arguments want.
func RunCommand(args *taskv1.CommandStep) tasks.Step {
	if args.GetTimeout() != nil {
		return limited{runCommand{args}}
	}
	return runCommand{args}
}

func (s runCommand) Args() proto.Message { return s.args }

func (s runCommand) Title() string {
	t := "run"
	for _, a := range s.args.GetArgv() {
		if a == "" || strings.ContainsFunc(a, func(r rune) bool { return r == ' ' || !strconv.IsPrint(r) }) {
			a = strconv.Quote(a)
		}
		t += " " + a
	}
	if r := []rune(t); len(r) > 120 {
		t = string(r[:117]) + "..."
	}
	return t
}

// Observe returns nothing: what a command changes cannot be known.
func (s runCommand) Observe(context.Context, host.Reader) ([]byte, error) { return nil, nil }

func (s runCommand) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	o, err := h.RunCommand(ctx, host.Command{
		Argv: s.args.GetArgv(), Dir: s.args.GetWorkingDirectory(), Environment: s.args.GetEnvironment(),
		User: s.args.GetUser(), Timeout: s.args.GetTimeout().AsDuration(), StopGrace: s.args.GetStopGrace().AsDuration(),
	})
	if errors.Is(err, host.ErrNotStarted) {
		return nil, &tasks.ReasonError{Reason: tasks.ReasonCommandNotStarted, Unchanged: true, Err: err}
	}
	if err != nil {
		return nil, err
	}
	outcome := outcomeProto(o)
	out, err := encode(outcome)
	if err != nil {
		return nil, err
	}
	return out, s.judge(outcome)
}

// judge returns an error unless the command ended as the arguments want.
func (s runCommand) judge(o *taskv1.CommandOutcome) error {
	fail := func(reason, format string, args ...any) error {
		return &tasks.ReasonError{Reason: reason, Command: o, Err: fmt.Errorf(format, args...)}
	}
	name := s.args.GetArgv()[0]
	switch {
	case o.GetTimedOut():
		return fail(tasks.ReasonCommandTimeout, "%s did not end within %v and was stopped", name, s.args.GetTimeout().AsDuration())
	case o.GetOomKilled():
		return fail(tasks.ReasonCommandOOM, "%s was killed because memory ran out", name)
	case o.GetSignal() != 0:
		return fail(tasks.ReasonCommandSignal, "%s was ended by signal %d", name, o.GetSignal())
	case !s.success(o.GetExitCode()):
		return fail(tasks.ReasonCommandExit, "%s exited with code %d; %s counts as success", name, o.GetExitCode(), s.codes())
	}
	return nil
}

func (s runCommand) success(code int32) bool {
	if len(s.args.GetSuccessExitCodes()) == 0 {
		return code == 0
	}
	return slices.Contains(s.args.GetSuccessExitCodes(), code)
}

func (s runCommand) codes() string {
	if len(s.args.GetSuccessExitCodes()) == 0 {
		return "0"
	}
	var out []string
	for _, c := range s.args.GetSuccessExitCodes() {
		out = append(out, fmt.Sprint(c))
	}
	return strings.Join(out, " or ")
}

// Verify returns nil: the effect of a command cannot be observed, and how it
// ended was judged with its outcome.
func (s runCommand) Verify(context.Context, host.Prober) error { return nil }

// Undo returns [tasks.ErrIrreversible].
func (s runCommand) Undo(context.Context, host.Host, []byte) error {
	return fmt.Errorf("command %s: %w", s.args.GetArgv()[0], tasks.ErrIrreversible)
}

// Outcome implements [tasks.CommandStep].
func (s runCommand) Outcome(out []byte) (*taskv1.CommandOutcome, error) {
	var o taskv1.CommandOutcome
	if err := decode(out, &o); err != nil {
		return nil, err
	}
	return &o, nil
}

func outcomeProto(o host.Outcome) *taskv1.CommandOutcome {
	return &taskv1.CommandOutcome{
		ExitCode: int32(o.ExitCode), Signal: int32(o.Signal), InvocationId: o.Invocation, BootId: o.BootID,
		Duration: durationpb.New(o.Duration), TimedOut: o.TimedOut, OomKilled: o.OOMKilled,
		Stdout: outputProto(o.Stdout), Stderr: outputProto(o.Stderr),
	}
}

func outputProto(o host.Output) *taskv1.OutputSummary {
	return &taskv1.OutputSummary{
		TotalBytes: o.Total, HeadBytes: o.Head, TailBytes: o.Tail,
		HeadSha256: o.HeadSHA256, TailSha256: o.TailSHA256, OpenAtEnd: o.OpenAtEnd,
	}
}
