package containerd

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/oci"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuaas/millwright/tasks/host"
)

// specOptions make the runtime's spec of a container. The image's file system is
// not looked at: the agent may mount nothing.
func specOptions(c host.Container, image ocispec.ImageConfig) ([]oci.SpecOpts, error) {
	user := c.User
	if user == "" {
		user = image.User
	}
	uid, gid, err := parseUser(user)
	if err != nil {
		return nil, err
	}
	args := c.Argv
	if len(args) == 0 {
		args = append(append([]string(nil), image.Entrypoint...), image.Cmd...)
	}
	if len(args) == 0 {
		return nil, fmt.Errorf("container %s: neither the spec nor the image names a program", c.Name)
	}
	opts := []oci.SpecOpts{
		oci.WithEnv(append(append([]string(nil), image.Env...), c.Environment...)),
		func(_ context.Context, _ oci.Client, _ *containers.Container, s *oci.Spec) error {
			fill(s, c, image, args, uid, gid)
			return nil
		},
		oci.WithMounts(bindMounts(c.Mounts)),
	}
	if c.HostNetwork {
		opts = append(opts, oci.WithHostNamespace(specs.NetworkNamespace))
		for file, opt := range map[string]oci.SpecOpts{"/etc/hosts": oci.WithHostHostsFile, "/etc/resolv.conf": oci.WithHostResolvconf} {
			if _, err := os.Stat(file); err == nil {
				opts = append(opts, opt)
			}
		}
	}
	if c.MemoryBytes > 0 {
		opts = append(opts, oci.WithMemoryLimit(c.MemoryBytes))
	}
	if c.CPUMillis > 0 {
		opts = append(opts, oci.WithCPUCFS(int64(c.CPUMillis)*100, 100_000))
	}
	return append(opts, seccomp.WithDefaultProfile()), nil // last: it reads the capabilities
}

func fill(s *oci.Spec, c host.Container, image ocispec.ImageConfig, args []string, uid, gid uint32) {
	s.Root.Readonly = c.ReadOnlyRoot
	s.Process.Args = args
	s.Process.Cwd = "/"
	for _, dir := range []string{image.WorkingDir, c.Dir} {
		if dir != "" {
			s.Process.Cwd = dir
		}
	}
	s.Process.User = specs.User{UID: uid, GID: gid}
	s.Hostname = c.Name
	// A systemd scope of its own, as runc's systemd driver reads it.
	s.Linux.CgroupsPath = "millwright.slice:millwright-container:" + c.Name
	if s.Annotations == nil {
		s.Annotations = map[string]string{}
	}
	// At a shutdown of the node systemd stops the scope.
	s.Annotations["org.systemd.property.TimeoutStopUSec"] = fmt.Sprintf("uint64 %d", max(c.StopGrace, time.Second).Microseconds())
}

// parseUser reads UID or UID:GID. Names would have to be looked up in the image.
func parseUser(s string) (uid, gid uint32, err error) {
	if s == "" || s == "root" {
		return 0, 0, nil
	}
	u, g, both := strings.Cut(s, ":")
	un, err := strconv.ParseUint(u, 10, 31)
	gn := uint64(0)
	if err == nil && both {
		gn, err = strconv.ParseUint(g, 10, 31)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("user %q is no number: give user as UID or UID:GID in the spec", s)
	}
	return uint32(un), uint32(gn), nil
}

func bindMounts(mounts []host.ContainerMount) []specs.Mount {
	var out []specs.Mount
	for _, m := range mounts {
		access := "rw"
		if m.ReadOnly {
			access = "ro"
		}
		out = append(out, specs.Mount{Type: "bind", Source: m.Source, Destination: m.Target, Options: []string{"rbind", "rprivate", access}})
	}
	return out
}
