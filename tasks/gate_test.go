package tasks_test

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	slurmv1 "github.com/gpuaas/millwright/proto/millwright/slurm/v1"
	systemv1 "github.com/gpuaas/millwright/proto/millwright/system/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/host"
	"github.com/gpuaas/millwright/tasks/step"
	"github.com/gpuaas/millwright/tasks/system"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// manager is a workload manager that knows the node, under its own name for it.
type manager struct {
	name    string
	jobs    int
	silent  bool
	unknown bool
	owner   *string
}

func (m manager) Ask(_ context.Context, _ host.Reader, owner string, d tasks.Disturbance) (*tasks.Gate, error) {
	*m.owner = owner
	switch {
	case m.silent:
		return nil, fmt.Errorf("%s says nothing of a node that a task %s: %w", m.name, d.What, tasks.ErrPrecondition)
	case m.unknown:
		return nil, nil
	}
	return &tasks.Gate{
		Before:   step.AskSlurm(&slurmv1.SlurmAskStep{Node: m.name, Owner: owner, Reason: d.What, WaitForJobs: durationpb.New(d.Wait)}),
		After:    step.ReturnSlurm(&slurmv1.SlurmReturnStep{Node: m.name, Owner: owner, Rebooted: d.Reboots}),
		InTheWay: &taskv1.InTheWay{Manager: m.name, Work: make([]*taskv1.RunningWork, m.jobs)},
	}, nil
}

func planned(t *testing.T, spec *systemv1.RebootSpec, managers ...manager) (*taskv1.Plan, string, error) {
	t.Helper()
	r := tasks.NewRegistry()
	step.Register(r)
	tasks.Add(r, system.RebootInfo(), system.Reboot{})
	var owner string
	for _, m := range managers {
		m.owner = &owner
		r.AddAsker(m)
	}
	k, err := r.Kind("system.reboot")
	if err != nil {
		t.Fatal(err)
	}
	p, err := r.Plan(t.Context(), fakehost.New().Hosts(nil).Prober(), k, spec)
	return p, owner, err
}

// TestTwoManagers: each is asked in its turn and given the node back in the
// opposite one; those that do not have the node add nothing.
func TestTwoManagers(t *testing.T) {
	p, _, err := planned(t, &systemv1.RebootSpec{}, manager{name: "one", jobs: 1}, manager{name: "none", unknown: true}, manager{name: "two"})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	var wait time.Duration
	for _, s := range p.GetSteps() {
		word := s.GetType()
		for _, name := range []string{"one", "none", "two"} {
			if strings.Contains(s.GetTitle(), "node "+name) {
				word += " " + name
			}
		}
		got = append(got, fmt.Sprint(word, " ", s.GetGate()))
		wait += s.GetWaitMost().AsDuration()
	}
	want := []string{"slurm.ask one true", "slurm.ask two true", "node.reboot false", "slurm.return two true", "slurm.return one true"}
	if !slices.Equal(got, want) {
		t.Errorf("steps %q, want %q", got, want)
	}
	if wait != 2*tasks.DefaultJobWait+20*time.Minute {
		t.Errorf("they may wait %v", wait)
	}
	if impact := p.GetImpact(); !slices.Equal(impact, []taskv1.Impact{taskv1.Impact_IMPACT_DRAIN, taskv1.Impact_IMPACT_REBOOT}) {
		t.Errorf("impact %v", impact)
	}
	outs := [][]byte{{1}, {2}, {3}, {4}, {5}}
	if own := tasks.OwnOuts(p, outs); len(own) != 1 || own[0][0] != 3 {
		t.Errorf("the kind's own outs are %v", own)
	}
}

// TestWhoIsInTheWayIsNoPartOfThePlan: a job that ends does not make another plan.
func TestWhoIsInTheWayIsNoPartOfThePlan(t *testing.T) {
	busy, _, err := planned(t, &systemv1.RebootSpec{}, manager{name: "one", jobs: 2})
	if err != nil {
		t.Fatal(err)
	}
	idle, _, err := planned(t, &systemv1.RebootSpec{}, manager{name: "one"})
	if err != nil {
		t.Fatal(err)
	}
	a, digestA, errA := tasks.MarshalPlan(busy)
	b, digestB, errB := tasks.MarshalPlan(idle)
	if errA != nil || errB != nil || !bytes.Equal(a, b) || !bytes.Equal(digestA, digestB) {
		t.Errorf("two plans: %x and %x (%v, %v)", digestA, digestB, errA, errB)
	}
	if len(busy.GetInTheWay()[0].GetWork()) != 2 || strings.Contains(string(a), "InTheWay") {
		t.Errorf("in the way: %v", busy.GetInTheWay())
	}
	var back taskv1.Plan
	if err := proto.Unmarshal(a, &back); err != nil || len(back.GetInTheWay()) != 0 {
		t.Errorf("the bytes have %v (%v)", back.GetInTheWay(), err)
	}
}

// TestSilentManager: nothing is planned when one of them does not say.
func TestSilentManager(t *testing.T) {
	p, _, err := planned(t, &systemv1.RebootSpec{}, manager{name: "one"}, manager{name: "two", silent: true})
	if err == nil || p != nil || !strings.Contains(err.Error(), "a node that a task reboots the node") {
		t.Errorf("planned %v, %v", p, err)
	}
}

// TestOwnerTag: the same for the same spec, and another for another.
func TestOwnerTag(t *testing.T) {
	_, one, _ := planned(t, &systemv1.RebootSpec{Reason: "a"}, manager{name: "n"})
	_, same, _ := planned(t, &systemv1.RebootSpec{Reason: "a"}, manager{name: "n"})
	_, other, _ := planned(t, &systemv1.RebootSpec{Reason: "b"}, manager{name: "n"})
	if one != same || one == other || !strings.HasPrefix(one, "mw:system.reboot-") || len(one) != len("mw:system.reboot-")+8 {
		t.Errorf("tags %q, %q, %q", one, same, other)
	}
}

// TestJobWait: unset is an hour, what is set counts, and nonsense is refused.
func TestJobWait(t *testing.T) {
	if tasks.JobWait(nil) != time.Hour || tasks.JobWait(durationpb.New(0)) != 0 {
		t.Error("misread")
	}
	for d, ok := range map[*durationpb.Duration]bool{
		nil: true, durationpb.New(0): true, durationpb.New(tasks.MaxJobWait): true,
		durationpb.New(tasks.MaxJobWait + 1): false, durationpb.New(-1): false, {Seconds: 1, Nanos: -1}: false,
	} {
		var p tasks.Problems
		if tasks.CheckJobWait(&p, d); (p.Err() == nil) != ok {
			t.Errorf("%v: %v", d, p.Err())
		}
	}
}
