package container_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	containerv1 "github.com/gpuaas/millwright/proto/millwright/container/v1"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/tasks/container"
	"github.com/gpuaas/millwright/tasks/tasktest"
)

func good() *containerv1.RunSpec {
	return &containerv1.RunSpec{
		Name: "web-1", Argv: []string{"/app"}, Environment: []string{"A=b"}, User: "1000:1000",
		Image: &containerv1.Image{
			Digest: "sha256:" + strings.Repeat("a", 64), Source: &containerv1.Image_OciArchive{OciArchive: "/opt/a.tar"},
		},
		Mounts: []*containerv1.BindMount{{Source: "/srv/a", Target: "/a"}},
	}
}

// TestValidate breaks a good spec in one way each, and asks for the field.
func TestValidate(t *testing.T) {
	if err := (container.Run{}).Validate(good()); err != nil {
		t.Fatalf("a good spec: %v", err)
	}
	for field, spoil := range map[string]func(*containerv1.RunSpec){
		"name":                   func(s *containerv1.RunSpec) { s.Name = "Web" },
		"image.digest":           func(s *containerv1.RunSpec) { s.Image.Digest = "latest" },
		"image.source":           func(s *containerv1.RunSpec) { s.Image.Source = nil },
		"image.oci_archive":      func(s *containerv1.RunSpec) { s.Image.Source = &containerv1.Image_OciArchive{OciArchive: "a.tar"} },
		"argv[0]":                func(s *containerv1.RunSpec) { s.Argv = []string{""} },
		"environment[0]":         func(s *containerv1.RunSpec) { s.Environment = []string{"A"} },
		"environment[1]":         func(s *containerv1.RunSpec) { s.Environment = []string{"A=1", "A=2"} },
		"working_directory":      func(s *containerv1.RunSpec) { s.WorkingDirectory = "x" },
		"user":                   func(s *containerv1.RunSpec) { s.User = "root" },
		"mounts[0].source":       func(s *containerv1.RunSpec) { s.Mounts[0].Source = "/" },
		"mounts[0].target":       func(s *containerv1.RunSpec) { s.Mounts[0].Target = "/proc/x" },
		"resources.memory_bytes": func(s *containerv1.RunSpec) { s.Resources = &containerv1.Resources{MemoryBytes: 1} },
		"resources.cpu_millis":   func(s *containerv1.RunSpec) { s.Resources = &containerv1.Resources{CpuMillis: 1} },
		"devices[0]":             func(s *containerv1.RunSpec) { s.Devices = []string{"nvidia.com/gpu=0"} },
		"devices[1]": func(s *containerv1.RunSpec) {
			s.Devices = []string{"millwright.dev/gpu=MIG-1", "millwright.dev/gpu=MIG-1"}
		},
		"stop_grace": func(s *containerv1.RunSpec) { s.StopGrace = durationpb.New(time.Hour) },
	} {
		s := good()
		spoil(s)
		var problems tasks.Problems
		if err := (container.Run{}).Validate(s); !errors.As(err, &problems) || len(problems) != 1 || problems[0].Field != field {
			t.Errorf("spoiled %s: %v", field, err)
		}
	}
	for _, dir := range []string{"/var/lib/millwright", "/var/lib", "/run", "/etc", "/var/lib/millwright/agent"} {
		s := good()
		s.Mounts[0].Source = dir
		if (container.Run{}).Validate(s) == nil {
			t.Errorf("a container may see %s", dir)
		}
	}
}

func FuzzRun(f *testing.F) {
	tasktest.FuzzValidate(f, all.Registry(), "container.run", proto.Message(good()))
}

func FuzzStop(f *testing.F) {
	tasktest.FuzzValidate(f, all.Registry(), "container.stop", &containerv1.StopSpec{Name: "web"})
}
