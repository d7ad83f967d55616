package fakehost

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuaas/millwright/tasks/host"
)

// container is one in the fake runtime.
type container struct {
	host.Container
	foreign bool
	run     int // of all runs on the node; 0: it does not run
	state   string
	ending  ending
}

// ending is how a container ends.
type ending struct {
	code int
	oom  bool
}

// archiveMark begins the content of a file that is an OCI archive; the digests of
// its images follow.
const archiveMark = "OCI "

func (n *Node) containerStatus(name string) host.ContainerStatus {
	c, ok := n.containers[name]
	if !ok {
		return host.ContainerStatus{}
	}
	if c.foreign {
		return host.ContainerStatus{Exists: true}
	}
	st := host.ContainerStatus{
		Exists: true, Ours: true, Running: c.run > 0, State: c.state,
		Record: bytes.Clone(c.Record), Image: c.Image,
	}
	switch c.state {
	case "running":
		st.Process, st.PID = fmt.Sprint("run ", c.run), 1000+c.run
		st.ControlGroup = "/millwright.slice/millwright-container-" + name + ".scope"
	case "stopped":
		st.ExitCode, st.OOMKilled, st.LastLines = c.ending.code, c.ending.oom, []string{"last words of " + name}
	}
	return st
}

func (n *Node) imageStatus(digest string) host.ImageStatus {
	st := host.ImageStatus{Present: n.images[digest]}
	for _, name := range slices.Sorted(maps.Keys(n.containers)) {
		if c := n.containers[name]; !c.foreign && c.Image == digest {
			st.Users = append(st.Users, name)
		}
	}
	return st
}

func (n *Node) imageArchive(p string) ([]string, error) {
	f, err := n.readFile(p)
	if err != nil {
		return nil, err
	}
	list, ok := strings.CutPrefix(string(f.Data), archiveMark)
	if !ok {
		return nil, fmt.Errorf("image archive %s: no OCI layout: %w", p, fs.ErrInvalid)
	}
	return slices.Sorted(slices.Values(strings.Fields(list))), nil
}

func (n *Node) importImage(archive, digest string) error {
	if n.images[digest] {
		return nil
	}
	digests, err := n.imageArchive(archive)
	if err != nil {
		return err
	}
	if !slices.Contains(digests, digest) {
		return fmt.Errorf("image archive %s does not hold %s: %w", archive, digest, fs.ErrNotExist)
	}
	n.images[digest] = true
	return nil
}

func (n *Node) removeImage(digest string) {
	if len(n.imageStatus(digest).Users) == 0 {
		delete(n.images, digest)
	}
}

func (n *Node) createContainer(c host.Container) error {
	old, ok := n.containers[c.Name]
	switch {
	case ok && old.foreign:
		return fmt.Errorf("create container %s: %w", c.Name, host.ErrNotOurs)
	case ok && !bytes.Equal(old.Record, c.Record):
		return fmt.Errorf("create container %s: %w", c.Name, fs.ErrExist)
	case ok:
		return nil
	case !n.images[c.Image]:
		return fmt.Errorf("create container %s: image %s: %w", c.Name, c.Image, fs.ErrNotExist)
	}
	for _, d := range c.Devices {
		if _, err := n.resolveCDI(d); err != nil {
			return fmt.Errorf("create container %s: %w", c.Name, err)
		}
	}
	n.containers[c.Name] = &container{Container: c}
	return nil
}

func (n *Node) startContainer(name string) error {
	c, ok := n.containers[name]
	switch {
	case !ok:
		return fmt.Errorf("start container %s: %w", name, fs.ErrNotExist)
	case c.foreign:
		return fmt.Errorf("start container %s: %w", name, host.ErrNotOurs)
	case c.run > 0:
		return nil
	}
	n.containerRuns++
	c.run, c.state = n.containerRuns, "running"
	if end, ok := n.endings[strings.Join(c.Argv, " ")]; ok {
		c.run, c.state, c.ending = 0, "stopped", end
	}
	return nil
}

// RestartContainers starts the containers that do not run, as the agent does
// when it sees to its intents after a boot.
func (n *Node) RestartContainers() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(n.containers)) {
		if !n.containers[name].foreign {
			_ = n.startContainer(name) // it is there and ours
		}
	}
}

func (n *Node) removeContainer(name string) error {
	c, ok := n.containers[name]
	if ok && c.foreign {
		return fmt.Errorf("remove container %s: %w", name, host.ErrNotOurs)
	}
	delete(n.containers, name)
	return nil
}

// doContainer carries out the verbs of a script that are about containers.
func (n *Node) doContainer(verb string, a []string) error {
	switch verb {
	case "archive":
		return n.doFile("file", []string{a[0], "0644", archiveMark + strings.Join(a[1:], " ")})
	case "foreign":
		n.containers[a[0]] = &container{foreign: true}
	case "ends":
		how, value, _ := strings.Cut(a[0], "=")
		code, err := strconv.Atoi(value)
		if how == "oom" {
			code, err = 137, nil
		}
		n.endings[strings.Join(a[1:], " ")] = ending{code, how == "oom"}
		return err
	case "die":
		c, ok := n.containers[a[0]]
		if !ok || c.run == 0 {
			return fmt.Errorf("container %s does not run", a[0])
		}
		c.run, c.state, c.ending = 0, "stopped", ending{code: 1}
	}
	return nil
}

// dumpContainers describes images and containers.
func (n *Node) dumpContainers() []string {
	var lines []string
	for _, d := range slices.Sorted(maps.Keys(n.images)) {
		lines = append(lines, "image "+d)
	}
	for _, name := range slices.Sorted(maps.Keys(n.containers)) {
		c := n.containers[name]
		switch {
		case c.foreign:
			lines = append(lines, "container "+name+" foreign")
		case c.run > 0:
			lines = append(lines, fmt.Sprintf("container %s running %s %x", name, c.Image, sha256.Sum256(c.Record)))
		default:
			lines = append(lines, fmt.Sprintf("container %s not running %s %x", name, c.Image, sha256.Sum256(c.Record)))
		}
	}
	return lines
}

func (v *view) Container(ctx context.Context, name string) (host.ContainerStatus, error) {
	return call(ctx, v, Op{Name: "Container", Object: name}, func() (host.ContainerStatus, error) { return v.n.containerStatus(name), nil })
}

func (v *view) ProbeContainer(ctx context.Context, name string) (host.ContainerStatus, error) {
	return call(ctx, v, Op{Name: "ProbeContainer", Object: name}, func() (host.ContainerStatus, error) { return v.n.containerStatus(name), nil })
}

func (v *view) Image(ctx context.Context, digest string) (host.ImageStatus, error) {
	return call(ctx, v, Op{Name: "Image", Object: digest}, func() (host.ImageStatus, error) { return v.n.imageStatus(digest), nil })
}

func (v *view) ImageArchive(ctx context.Context, path string) ([]string, error) {
	return call(ctx, v, Op{Name: "ImageArchive", Object: path}, func() ([]string, error) { return v.n.imageArchive(path) })
}

func (v *view) ImportImage(ctx context.Context, archive, digest string) error {
	return change(ctx, v, "ImportImage", digest, func() error { return v.n.importImage(archive, digest) })
}

func (v *view) RemoveImage(ctx context.Context, digest string) error {
	return change(ctx, v, "RemoveImage", digest, func() error { v.n.removeImage(digest); return nil })
}

func (v *view) CreateContainer(ctx context.Context, c host.Container) error {
	return change(ctx, v, "CreateContainer", c.Name, func() error { return v.n.createContainer(c) })
}

func (v *view) StartContainer(ctx context.Context, name string) error {
	return change(ctx, v, "StartContainer", name, func() error { return v.n.startContainer(name) })
}

func (v *view) RemoveContainer(ctx context.Context, name string) error {
	return change(ctx, v, "RemoveContainer", name, func() error { return v.n.removeContainer(name) })
}
