package mig

import (
	"fmt"
	"regexp"
	"slices"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/mig/profile"
)

const (
	maxLayouts  = 64
	maxOfOne    = 64
	maxModel    = 100
	noModelText = "must be 1 to 100 letters, digits, blanks and -._ such as H100: see nvidia-smi -L"
)

var (
	uuidForm  = regexp.MustCompile(`^GPU-[0-9a-zA-Z-]{1,60}$`)
	pciForm   = regexp.MustCompile(`^([0-9a-fA-F]{4}([0-9a-fA-F]{4})?:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]$`)
	modelForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9 ._-]*$`)
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
	ValidateSelector(p, at+"select.", l.GetSelect())
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

// ValidateSelector reports what is wrong with a selector.
func ValidateSelector(p *tasks.Problems, at string, s *migv1.GpuSelector) {
	other := len(s.GetUuids()) + len(s.GetPciBusIds()) + len(s.GetModels()) + len(s.GetPciDeviceIds()) + len(s.GetIndices())
	switch {
	case !s.GetAll() && other == 0:
		p.Add(at+"all", "", "say which GPUs: uuids, pci_bus_ids, models, pci_device_ids or indices, or all: true")
	case s.GetAll() && len(s.GetUuids())+len(s.GetPciBusIds()) > 0:
		p.Add(at+"all", "true", "leave it out beside uuids and pci_bus_ids, which name GPUs one by one")
	}
	each(p, at+"uuids", s.GetUuids(), "must be a GPU's UUID such as GPU-1b2c...: see nvidia-smi -L", uuidForm.MatchString)
	each(p, at+"pci_bus_ids", s.GetPciBusIds(), "must be a PCI address such as 0000:17:00.0", pciForm.MatchString)
	each(p, at+"models", s.GetModels(), noModelText, func(m string) bool { return len(m) <= maxModel && modelForm.MatchString(m) })
	each(p, at+"pci_device_ids", s.GetPciDeviceIds(), "must be a device and a vendor id in hexadecimal such as 0x20B210DE", func(id string) bool {
		_, err := deviceID(id)
		return err == nil
	})
	for i, n := range s.GetIndices() {
		if n > 255 || slices.Contains(s.GetIndices()[:i], n) {
			p.Add(fmt.Sprintf("%sindices[%d]", at, i), fmt.Sprint(n), "must be at most 255, and stand there once")
		}
	}
}

func each(p *tasks.Problems, field string, list []string, rule string, ok func(string) bool) {
	for i, v := range list {
		if !ok(v) || slices.Contains(list[:i], v) {
			p.Add(fmt.Sprintf("%s[%d]", field, i), v, rule+", and stand there once")
		}
	}
}
