package mig

import (
	"fmt"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/gpu/selector"
	"github.com/gpuaas/millwright/tasks/mig/profile"
)

const (
	maxLayouts = 64
	maxOfOne   = 64
)

// Validate implements [tasks.Task].
func (Configure) Validate(s *migv1.ConfigureSpec) error {
	var p tasks.Problems
	if n := len(s.GetLayouts()); n == 0 || n > maxLayouts {
		p.Add("layouts", "", fmt.Sprintf("must be 1 to %d: say which GPUs are to have what", maxLayouts))
	}
	for i, l := range s.GetLayouts() {
		validateLayout(&p, fmt.Sprintf("layouts[%d].", i), l)
	}
	tasks.CheckJobWait(&p, s.GetWaitForJobs())
	if s.GetOnlyOwn() {
		p.Add("only_own", "true", "is the node's own, when it restores: leave it out")
	}
	return p.Err()
}

func validateLayout(p *tasks.Problems, at string, l *migv1.GpuLayout) {
	selector.Validate(p, at+"select.", l.GetSelect())
	said := 0
	for _, b := range []bool{len(l.GetInstances()) > 0, l.GetEmpty(), l.GetOff()} {
		if b {
			said++
		}
	}
	if said != 1 {
		p.Add(at+"instances", "", "say exactly one of instances, empty (MIG on, and no instance) and off")
	}
	for j, in := range l.GetInstances() {
		field := fmt.Sprintf("%sinstances[%d].", at, j)
		if _, err := profile.Parse(in.GetProfile()); err != nil {
			p.Add(field+"profile", in.GetProfile(), err.Error())
		}
		if in.GetCount() > maxOfOne {
			p.Add(field+"count", fmt.Sprint(in.GetCount()), fmt.Sprintf("must be at most %d", maxOfOne))
		}
		if in.Start != nil && in.GetCount() > 1 {
			p.Add(field+"start", fmt.Sprint(in.GetStart()), "is the place of one instance: give each its own entry")
		}
		if in.Start != nil && in.GetStart() > 31 {
			p.Add(field+"start", fmt.Sprint(in.GetStart()), "must be a memory slice, at most 31")
		}
	}
}
