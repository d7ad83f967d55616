package mig_test

import (
	"errors"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/tasks/mig"
	"github.com/gpuaas/millwright/tasks/tasktest"
)

func good() *migv1.ConfigureSpec {
	return &migv1.ConfigureSpec{Layouts: []*migv1.GpuLayout{{
		Select: &migv1.GpuSelector{Uuids: []string{"GPU-1"}}, Instances: []*migv1.Instances{{Profile: "3g.40gb", Count: 2}},
	}}}
}

// TestValidate breaks a good spec in one way each, and asks for the field.
func TestValidate(t *testing.T) {
	if err := (mig.Configure{}).Validate(good()); err != nil {
		t.Fatalf("a good spec: %v", err)
	}
	for field, spoil := range map[string]func(*migv1.ConfigureSpec, *migv1.GpuLayout){
		"layouts":                             func(s *migv1.ConfigureSpec, _ *migv1.GpuLayout) { s.Layouts = nil },
		"layouts[0].select.all":               func(_ *migv1.ConfigureSpec, l *migv1.GpuLayout) { l.Select = nil },
		"layouts[0].select.uuids[0]":          func(_ *migv1.ConfigureSpec, l *migv1.GpuLayout) { l.Select.Uuids = []string{"1"} },
		"layouts[0].select.pci_bus_ids[0]":    func(_ *migv1.ConfigureSpec, l *migv1.GpuLayout) { l.Select.PciBusIds = []string{"17"} },
		"layouts[0].select.models[0]":         func(_ *migv1.ConfigureSpec, l *migv1.GpuLayout) { l.Select.Models = []string{"*"} },
		"layouts[0].select.pci_device_ids[0]": func(_ *migv1.ConfigureSpec, l *migv1.GpuLayout) { l.Select.PciDeviceIds = []string{"20B2"} },
		"layouts[0].select.indices[1]":        func(_ *migv1.ConfigureSpec, l *migv1.GpuLayout) { l.Select.Indices = []uint32{1, 1} },
		"layouts[0].select.driver_indices[0]": func(_ *migv1.ConfigureSpec, l *migv1.GpuLayout) { l.Select.DriverIndices = []uint32{256} },
		"layouts[0].select.driver_indices": func(_ *migv1.ConfigureSpec, l *migv1.GpuLayout) {
			l.Select.DriverIndices, l.Select.Indices = []uint32{1}, []uint32{1}
		},
		"layouts[0].instances":            func(_ *migv1.ConfigureSpec, l *migv1.GpuLayout) { l.Off = true },
		"layouts[0].instances[0].profile": func(_ *migv1.ConfigureSpec, l *migv1.GpuLayout) { l.Instances[0].Profile = "half" },
		"layouts[0].instances[0].count":   func(_ *migv1.ConfigureSpec, l *migv1.GpuLayout) { l.Instances[0].Count = 65 },
		"layouts[0].instances[0].start":   func(_ *migv1.ConfigureSpec, l *migv1.GpuLayout) { l.Instances[0].Start = proto.Uint32(0) },
		"only_own":                        func(s *migv1.ConfigureSpec, _ *migv1.GpuLayout) { s.OnlyOwn = true },
	} {
		s := good()
		spoil(s, s.GetLayouts()[0])
		var ps tasks.Problems
		if err := (mig.Configure{}).Validate(s); !errors.As(err, &ps) || !slices.ContainsFunc(ps, func(p tasks.Problem) bool { return p.Field == field }) {
			t.Errorf("%s: %v", field, err)
		}
	}
}

// TestRevision: only what a node of the release before does not know asks for
// another revision, also in a list.
func TestRevision(t *testing.T) {
	k, err := all.Registry().Kind("mig.configure")
	if err != nil {
		t.Fatal(err)
	}
	second, skips := good(), good()
	second.Layouts = append(second.Layouts, &migv1.GpuLayout{Select: &migv1.GpuSelector{DriverIndices: []uint32{1}}, Off: true})
	skips.SkipAbsent = true
	for want, specs := range map[uint32][]*migv1.ConfigureSpec{1: {good()}, 2: {second, skips}} {
		for _, s := range specs {
			if got := k.Needs(s); got != want {
				t.Errorf("%v needs revision %d, want %d", s, got, want)
			}
		}
	}
	b, err := proto.Marshal(second)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := k.DecodeSpec(1, b); err == nil {
		t.Error("a field of revision 2 is taken in a task of revision 1")
	}
}

func FuzzConfigure(f *testing.F) {
	tasktest.FuzzValidate(f, all.Registry(), "mig.configure", proto.Message(good()))
}
