package system

import (
	"context"
	"fmt"
	"strings"
	"time"
	"unicode"

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
	defaultReboot = 10 * time.Minute
	minReboot     = 30 * time.Second
	maxReboot     = time.Hour
	maxDelay      = time.Hour
	maxReason     = 200
)

// Reboot is the kind system.reboot.
type Reboot struct{}

var (
	_ tasks.Task[*systemv1.RebootSpec]      = Reboot{}
	_ tasks.Deadliner[*systemv1.RebootSpec] = Reboot{}
)

// RebootInfo describes system.reboot.
func RebootInfo() tasks.Info {
	return tasks.Info{
		Kind: "system.reboot", Revision: 2, Class: tasks.Action,
		Since:      map[protoreflect.Name]uint32{"wait_for_jobs": 2},
		Impact:     []taskv1.Impact{taskv1.Impact_IMPACT_REBOOT},
		PassesHeld: true,
		Summary:    "reboot the node once, when no other task runs",
	}
}

// Validate implements [tasks.Task].
func (Reboot) Validate(s *systemv1.RebootSpec) error {
	var p tasks.Problems
	checkSpan(&p, "delay", s.GetDelay(), 0, maxDelay, "no delay")
	checkSpan(&p, "timeout", s.GetTimeout(), minReboot, maxReboot, defaultReboot.String())
	tasks.CheckJobWait(&p, s.GetWaitForJobs())
	if r := s.GetReason(); len(r) > maxReason || strings.ContainsFunc(r, func(c rune) bool { return !unicode.IsPrint(c) }) {
		p.Add("reason", shorten(r), fmt.Sprintf("must be at most %d bytes of printable text on one line: shorten it", maxReason))
	}
	return p.Err()
}

func checkSpan(p *tasks.Problems, field string, d *durationpb.Duration, least, most time.Duration, without string) {
	if d == nil {
		return
	}
	if err := d.CheckValid(); err != nil || d.AsDuration() < least || d.AsDuration() > most {
		p.Add(field, fmt.Sprintf("%d.%09ds", d.GetSeconds(), d.GetNanos()), fmt.Sprintf("must be from %v to %v: leave it out for %s", least, most, without))
	}
}

// Locks implements [tasks.Task]: all that runs on the node ends first.
func (Reboot) Locks(*systemv1.RebootSpec) []tasks.Lock { return []tasks.Lock{{Name: "node"}} }

// Deadline implements [tasks.Deadliner].
func (Reboot) Deadline(s *systemv1.RebootSpec) time.Duration {
	return s.GetDelay().AsDuration() + span(s) + deadlineGrace
}

func span(s *systemv1.RebootSpec) time.Duration {
	if s.GetTimeout() == nil {
		return defaultReboot
	}
	return s.GetTimeout().AsDuration()
}

// Plan implements [tasks.Task]. The plan names the boot that it ends, so that a
// node that was rebooted meanwhile is not rebooted again.
func (Reboot) Plan(ctx context.Context, h host.Reader, s *systemv1.RebootSpec) (tasks.Plan, error) {
	boot, err := h.BootID(ctx)
	if err != nil {
		return tasks.Plan{}, fmt.Errorf("read boot id: %w", err)
	}
	args := &taskv1.RebootStep{BootId: boot, Reason: s.GetReason(), Timeout: durationpb.New(span(s))}
	if s.GetDelay().AsDuration() > 0 {
		args.Delay = s.GetDelay()
	}
	return tasks.Plan{
		Steps:    []tasks.Step{step.Reboot(args)},
		Disturbs: &tasks.Disturbance{What: "reboots the node", Wait: tasks.JobWait(s.GetWaitForJobs()), Reboots: true},
	}, nil
}

// Verify implements [tasks.Task]: its step has compared the boot ids.
func (Reboot) Verify(context.Context, host.Prober, *systemv1.RebootSpec) error { return nil }

// Result implements [tasks.Task].
func (Reboot) Result(_ context.Context, _ host.Prober, _ *systemv1.RebootSpec, outs [][]byte) (proto.Message, error) {
	if len(outs) != 1 {
		return nil, fmt.Errorf("result of a reboot: %d outs, want 1", len(outs))
	}
	var o taskv1.RebootOutcome
	if err := proto.Unmarshal(outs[0], &o); err != nil {
		return nil, fmt.Errorf("decode outcome of the reboot: %w", err)
	}
	return &systemv1.RebootResult{BootIdBefore: o.GetBootIdBefore(), BootIdAfter: o.GetBootIdAfter()}, nil
}
