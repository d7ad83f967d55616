package selector

import (
	"fmt"
	"regexp"
	"slices"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks"
)

const (
	maxModel    = 100
	noModelText = "must be 1 to 100 letters, digits, blanks and -._ such as H100: see nvidia-smi -L"
)

var (
	uuidForm  = regexp.MustCompile(`^GPU-[0-9a-zA-Z-]{1,60}$`)
	pciForm   = regexp.MustCompile(`^([0-9a-fA-F]{4}([0-9a-fA-F]{4})?:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]$`)
	modelForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9 ._-]*$`)
)

// Validate reports what is wrong with a selector.
func Validate(p *tasks.Problems, at string, s *migv1.GpuSelector) {
	other := len(s.GetUuids()) + len(s.GetPciBusIds()) + len(s.GetModels()) + len(s.GetPciDeviceIds()) + len(s.GetIndices()) + len(s.GetDriverIndices())
	switch {
	case !s.GetAll() && other == 0:
		p.Add(at+"all", "", "say which GPUs: uuids, pci_bus_ids, models, pci_device_ids, indices or driver_indices, or all: true")
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
	indices(p, at+"indices", s.GetIndices())
	indices(p, at+"driver_indices", s.GetDriverIndices())
	if len(s.GetIndices()) > 0 && len(s.GetDriverIndices()) > 0 {
		p.Add(at+"driver_indices", "", "excludes indices, which are counted otherwise: keep one of them")
	}
}

func indices(p *tasks.Problems, field string, list []uint32) {
	for i, n := range list {
		if n > 255 || slices.Contains(list[:i], n) {
			p.Add(fmt.Sprintf("%s[%d]", field, i), fmt.Sprint(n), "must be at most 255, and stand there once")
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
