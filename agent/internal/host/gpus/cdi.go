package gpus

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/millwright/agent/internal/crash"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
	"github.com/gpuaas/millwright/tasks/host"
)

const (
	cdiVersion = "0.6.0" // the first with annotations
	// annotGone are the devices that were in the specification and are no more.
	annotGone = host.CDIKind + ".gone"
	// mostGone bounds what is said of them.
	mostGone = 64
	// ctkTimeout bounds NVIDIA's generator.
	ctkTimeout = time.Minute
)

// errSpec is a specification that is not what it should be.
var errSpec = errors.New("not a usable CDI specification")

// spec is a CDI specification. Edits that NVIDIA's generator writes are carried
// as they are.
type spec struct {
	Version     string            `json:"cdiVersion"`
	Kind        string            `json:"kind"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Devices     []device          `json:"devices"`
	Edits       json.RawMessage   `json:"containerEdits,omitempty"`
}

type device struct {
	Name  string          `json:"name"`
	Edits json.RawMessage `json:"containerEdits"`
}

// edits are the parts of a device's edits that are known here.
type edits struct {
	Nodes []node   `json:"deviceNodes,omitempty"`
	Env   []string `json:"env,omitempty"`
}

type node struct {
	Path string `json:"path"`
}

// wanted is what containers can have now: device names and their nodes, of which the
// first is the GPU's own, and whose those are.
func (s *Set) wanted(ctx context.Context) (out map[string][]string, whose map[string]string, err error) {
	looked, err := s.look(ctx, &gpuv1.ChildLook{Whole: true})
	if err != nil {
		return nil, nil, err
	}
	caps, err := s.capabilities()
	if err != nil {
		return nil, nil, err
	}
	out, whose = map[string][]string{}, map[string]string{}
	for _, l := range looked {
		if l.GetProblem() != nil {
			continue // one that is lost is nothing that a container can have
		}
		st, err := state(l)
		if errors.Is(err, host.ErrGPULost) || errors.Is(err, host.ErrGPUUnknown) {
			continue // so is one that is lost and still has a name
		}
		if err != nil {
			return nil, nil, fmt.Errorf("GPU %s: %w", l.GetGpu().GetUuid(), err)
		}
		own := filepath.Join(s.cfg.Dev, fmt.Sprintf("nvidia%d", st.Minor))
		whose[own] = st.UUID
		if !st.Enabled {
			out[st.UUID] = []string{own}
		}
		for _, i := range st.Instances {
			for _, c := range i.Compute {
				if c.UUID == "" {
					return nil, nil, fmt.Errorf("GPU %s: the driver does not tell the UUID of a MIG device", st.UUID)
				}
				nodes := []string{own}
				right := fmt.Sprintf("gpu%d/gi%d/", st.Minor, i.ID)
				for _, name := range []string{right + "access", right + fmt.Sprintf("ci%d/access", c.ID)} {
					if number, ok := caps[name]; ok {
						nodes = append(nodes, s.capNode(number))
					}
				}
				out[c.UUID] = nodes
			}
		}
	}
	return out, whose, nil
}

// read reads the specification; nil: there is none.
func (s *Set) read(ctx context.Context) (*spec, error) {
	f, err := s.cfg.Files.ReadFile(ctx, s.cfg.CDI)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	out := &spec{}
	if err := json.Unmarshal(f.Data, out); err != nil {
		return nil, fmt.Errorf("read %s: %w: %w", s.cfg.CDI, errSpec, err)
	}
	return out, nil
}

func full(name string) string { return host.CDIKind + "=" + name }

// CDI implements host.CDIReader. A file that cannot be read has no devices, and
// is replaced by the next WriteCDI.
func (s *Set) CDI(ctx context.Context) (host.CDISpec, error) {
	want, whose, err := s.wanted(ctx)
	if err != nil {
		return host.CDISpec{}, fmt.Errorf("compare the CDI specification with the GPUs: %w", err)
	}
	have, err := s.read(ctx)
	if err != nil && !errors.Is(err, errSpec) {
		return host.CDISpec{}, fmt.Errorf("read the CDI specification: %w", err)
	}
	out := host.CDISpec{Current: have != nil && s.says(have, want)}
	if !out.Current {
		out.Stale = stale(have, want, whose)
	}
	if have != nil {
		for _, d := range have.Devices {
			out.Devices = append(out.Devices, full(d.Name))
		}
	}
	slices.Sort(out.Devices)
	return out, nil
}

// says is whether a specification has what is wanted, with the same nodes, which
// the driver numbers anew.
func (s *Set) says(have *spec, want map[string][]string) bool {
	for _, d := range have.Devices {
		nodes, err := nodesIn(d)
		if err != nil {
			return false
		}
		for _, n := range want[d.Name] {
			if !slices.Contains(nodes, n) {
				return false
			}
		}
		if want[d.Name] == nil {
			return false
		}
	}
	return len(have.Devices) == len(want)
}

// stale are the GPUs of which a specification, nil where there is none, has other
// devices than are wanted.
func stale(have *spec, want map[string][]string, whose map[string]string) []string {
	found := map[string]bool{}
	named := map[string]bool{}
	if have != nil {
		for _, d := range have.Devices {
			nodes, err := nodesIn(d)
			lacks := func(n string) bool { return !slices.Contains(nodes, n) }
			if named[d.Name] = err == nil && want[d.Name] != nil && !slices.ContainsFunc(want[d.Name], lacks); named[d.Name] {
				continue
			}
			for _, n := range nodes {
				found[whose[n]] = true
			}
		}
	}
	for name, nodes := range want {
		if !named[name] {
			found[whose[nodes[0]]] = true
		}
	}
	delete(found, "") // of nobody who is there
	return slices.Sorted(maps.Keys(found))
}

func nodesIn(d device) ([]string, error) {
	var e edits
	if err := json.Unmarshal(d.Edits, &e); err != nil {
		return nil, err
	}
	var out []string
	for _, n := range e.Nodes {
		out = append(out, n.Path)
	}
	return out, nil
}

// ResolveCDI implements host.CDIReader.
func (s *Set) ResolveCDI(ctx context.Context, name string) ([]string, error) {
	fail := func(words string, err error) error { return fmt.Errorf("find device %s: %s%w", name, words, err) }
	have, err := s.read(ctx)
	switch {
	case err != nil:
		return nil, fail("", err)
	case have == nil:
		return nil, fail("there is no CDI specification at "+s.cfg.CDI+": ", host.ErrGPUUnknown)
	}
	short := strings.TrimPrefix(name, host.CDIKind+"=")
	i := slices.IndexFunc(have.Devices, func(d device) bool { return d.Name == short })
	switch {
	case i < 0 && slices.Contains(strings.Split(have.Annotations[annotGone], ","), short):
		return nil, fail("it is gone since a change of the GPUs: ", host.ErrGPUUnknown)
	case i < 0 || short == name:
		return nil, fail("the CDI specification does not have it: ", host.ErrGPUUnknown)
	}
	want, _, err := s.wanted(ctx)
	if err != nil {
		return nil, fail("", err)
	}
	if want[short] == nil {
		return nil, fail("the CDI specification still has it, and the driver does not: ", host.ErrGPUUnknown)
	}
	return nodesIn(have.Devices[i])
}

// CDIEdits returns what the specification wants to be done to a container that is
// to have devices: what all need, and then each device's. One that is not there, or
// not any more, is [host.ErrGPUUnknown] with what became of it.
func (s *Set) CDIEdits(ctx context.Context, names []string) ([]json.RawMessage, error) {
	for _, name := range names {
		if _, err := s.ResolveCDI(ctx, name); err != nil {
			return nil, err
		}
	}
	have, err := s.read(ctx)
	if err != nil || have == nil {
		return nil, errors.Join(err, fmt.Errorf("read %s: %w", s.cfg.CDI, host.ErrGPUUnknown))
	}
	var out []json.RawMessage
	if len(have.Edits) > 0 {
		out = append(out, have.Edits)
	}
	for _, name := range names {
		for _, d := range have.Devices {
			if full(d.Name) == name {
				out = append(out, d.Edits)
			}
		}
	}
	return out, nil
}

// WriteCDI implements host.GPUWriter.
func (s *Set) WriteCDI(ctx context.Context) error {
	if err := s.publish(ctx); err != nil {
		return fmt.Errorf("write the CDI specification: %w", err)
	}
	return nil
}

// publish writes what the driver has. Two at once would write over each other what
// the other one has not seen.
func (s *Set) publish(ctx context.Context) error {
	select {
	case s.writing <- struct{}{}:
		defer func() { <-s.writing }()
	case <-ctx.Done():
		return fmt.Errorf("wait for another one: %w", context.Cause(ctx))
	}
	want, _, err := s.wanted(ctx)
	if err != nil {
		return err
	}
	if err := s.makeNodes(ctx, want); err != nil {
		return err
	}
	old, err := s.read(ctx)
	if err != nil && !errors.Is(err, errSpec) {
		return err
	}
	now, err := s.generate(ctx, want)
	if err != nil {
		return err
	}
	now.Annotations = gone(old, want)
	b, err := json.MarshalIndent(now, "", "  ")
	if err != nil {
		return err
	}
	if err := s.cfg.Files.MakeDir(ctx, filepath.Dir(s.cfg.CDI), 0o755); err != nil {
		return err
	}
	crash.Point("host.cdi.before")
	if err := s.cfg.Files.WriteFile(ctx, s.cfg.CDI, host.File{Data: append(b, '\n'), Mode: 0o644}); err != nil {
		return err
	}
	crash.Point("host.cdi.after")
	return nil
}

// gone remembers the devices that were, the newest last, so that who asks for one
// is told.
func gone(old *spec, want map[string][]string) map[string]string {
	if old == nil {
		return nil
	}
	var names []string
	if said := old.Annotations[annotGone]; said != "" {
		names = strings.Split(said, ",")
	}
	for _, d := range old.Devices {
		names = append(names, d.Name)
	}
	names = slices.DeleteFunc(names, func(n string) bool { return want[n] != nil })
	if names = names[max(0, len(names)-mostGone):]; len(names) == 0 {
		return nil
	}
	return map[string]string{annotGone: strings.Join(names, ",")}
}
