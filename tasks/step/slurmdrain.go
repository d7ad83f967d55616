package step

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
)

type drainSlurm struct{ args *slurmv1.SlurmDrainStep }

// DrainSlurm returns the step that drains a node in Slurm, or ends such a drain,
// under the tag of an owner. A drain of somebody else fails it. When it is undone
// its own drain ends, or is there again.
func DrainSlurm(args *slurmv1.SlurmDrainStep) tasks.Step { return drainSlurm{args} }

func (s drainSlurm) Args() proto.Message { return s.args }

// Timeout implements [tasks.Limiter].
func (s drainSlurm) Timeout() time.Duration {
	return s.args.GetWaitForJobs().AsDuration() + slurmTime
}

func (s drainSlurm) Title() string {
	if s.args.GetResume() {
		return fmt.Sprintf("end the drain %s of node %s", s.args.GetOwner(), s.args.GetNode())
	}
	t := fmt.Sprintf("drain node %s as %s", s.args.GetNode(), s.args.GetOwner())
	if w := s.args.GetWaitForJobs().AsDuration(); w > 0 {
		t += fmt.Sprintf(", and wait %v at most for its jobs", w)
	}
	return t
}

func (s drainSlurm) ref() host.SlurmRef { return slurmRef(s.args.GetNode(), s.args.GetControllers()) }

func (s drainSlurm) Observe(ctx context.Context, h host.Reader) ([]byte, error) {
	n, err := h.SlurmNode(ctx, s.ref())
	if err != nil {
		return nil, err
	}
	o := &slurmv1.SlurmDrainObserved{Drained: n.DrainedBy(s.args.GetOwner())}
	if o.GetDrained() {
		o.Reason = strings.TrimPrefix(strings.TrimPrefix(n.Reason, s.args.GetOwner()), ": ")
	}
	return encode(o)
}

func (s drainSlurm) Apply(ctx context.Context, h host.Host) ([]byte, error) {
	if s.args.GetResume() {
		return nil, notOurs(h.ResumeSlurmNode(ctx, s.ref(), s.args.GetOwner()))
	}
	if err := h.DrainSlurmNode(ctx, s.ref(), s.args.GetOwner(), s.args.GetReason()); err != nil {
		return nil, notOurs(err)
	}
	return nil, s.wait(ctx, h)
}

func notOurs(err error) error {
	if errors.Is(err, host.ErrNotOurs) {
		return &tasks.ReasonError{Reason: tasks.ReasonSlurmForeignDrain, Err: err}
	}
	return err
}

// wait waits for the jobs of the node. A controller that does not answer is
// asked again: no answer is not "no jobs".
func (s drainSlurm) wait(ctx context.Context, h host.Host) error {
	limit := s.args.GetWaitForJobs().AsDuration()
	if limit == 0 && !s.args.GetEmpty() {
		return nil
	}
	var last error
	gone, err := waitFor(ctx, limit, func() (bool, error) {
		last = slurmIdle(ctx, h, s.ref())
		return last == nil, nil
	})
	switch {
	case gone || err != nil:
		return err
	default:
		return &tasks.ReasonError{Reason: tasks.ReasonSlurmJobs, Err: fmt.Errorf("after %v: %w", limit, last)}
	}
}

// slurmIdle returns nil when the controller says that no job is on the node.
func slurmIdle(ctx context.Context, h host.Reader, ref host.SlurmRef) error {
	n, err := h.SlurmNode(ctx, ref)
	if err != nil {
		return err
	}
	if len(n.Jobs) > 0 {
		return fmt.Errorf("node %s has %s: %w", n.Name, SlurmJobs(n.Jobs), host.ErrBusy)
	}
	if n.Is("COMPLETING") {
		return fmt.Errorf("a job is completing on node %s: %w", n.Name, host.ErrBusy)
	}
	return nil
}

// SlurmJobs names jobs, a few of them one by one.
func SlurmJobs(jobs []host.SlurmJob) string {
	const most = 5
	var names []string
	for _, j := range jobs[:min(len(jobs), most)] {
		until := ""
		if !j.End.IsZero() {
			until = ", until " + j.End.UTC().Format(time.RFC3339) + " at most"
		}
		names = append(names, fmt.Sprintf("%s of %s (%s%s)", j.ID, j.User, strings.ToLower(j.State), until))
	}
	s := "job " + strings.Join(names, ", ")
	if len(jobs) > most {
		s += fmt.Sprintf(" and %d more", len(jobs)-most)
	}
	return s
}

func (s drainSlurm) Verify(ctx context.Context, h host.Prober) error {
	n, err := h.SlurmNode(ctx, s.ref())
	switch {
	case err != nil:
		return err
	case s.args.GetResume() && n.DrainedBy(s.args.GetOwner()), !s.args.GetResume() && !n.DrainedBy(s.args.GetOwner()):
		return fmt.Errorf("node %s is %s, reason %q: %w", n.Name, strings.Join(n.States, "+"), n.Reason, tasks.ErrNotSatisfied)
	}
	return nil
}

func (s drainSlurm) Undo(ctx context.Context, h host.Host, before []byte) error {
	var was slurmv1.SlurmDrainObserved
	if err := decode(before, &was); err != nil {
		return err
	}
	var err error
	if was.GetDrained() {
		err = h.DrainSlurmNode(ctx, s.ref(), s.args.GetOwner(), was.GetReason())
	} else {
		err = h.ResumeSlurmNode(ctx, s.ref(), s.args.GetOwner())
	}
	if errors.Is(err, host.ErrNotOurs) {
		return nil // somebody else has drained it since, and that stands
	}
	return err
}

// slurmGres finds what a controller itself says of resources, as in gres/gpu count
// reported lower than configured. A person's words may have the same letters, as
// progress has.
var slurmGres = regexp.MustCompile(`(^|\W)gres/\S+ count `)

// slurmsOwn finds the reasons for which a controller itself drains a node that
// registers with another description than it has.
var slurmsOwn = regexp.MustCompile(`^(gres/\S+ |Low (RealMemory|CPUs|TmpDisk|socket))`)

// ForeignDrain reports whether a node is drained by somebody who would not find
// that drain again if the controller forgot the node: by neither the controller
// nor one of the owners.
func ForeignDrain(n host.SlurmNode, owners ...string) bool {
	return n.Drained() && !slurmsOwn.MatchString(n.Reason) && !slices.ContainsFunc(owners, n.DrainedBy)
}
