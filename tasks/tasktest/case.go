package tasktest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/rogpeppe/go-internal/txtar"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// Case is one spec on one node. It is read from a txtar file whose comment
// begins with the line
//
//	kind: storage.mount
//
// and may have the lines
//
//	unrestorable: why an undo cannot bring back the state before
//	deep: why every failure is tried with every crash
//
// The files of the archive are
//
//	before              changes to a fresh node, as fakehost.Node.Do reads them
//	earlier/KIND.json   specs that were carried out on it, in this order
//	drift               changes made afterwards
//	spec.json           the spec
//	plan                golden: the plan, or
//	refused             golden: why the plan was refused
//	outcome             golden: how the task ended
//	after               golden: the node afterwards
type Case struct {
	// Name is the file's name without .txtar.
	Name string
	// Kind and Spec are what is carried out.
	Kind string
	Spec proto.Message

	file         string
	archive      *txtar.Archive
	unrestorable bool
	deep         bool
}

// Load reads the cases of a directory.
func Load(reg *tasks.Registry, dir string) ([]Case, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.txtar"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("no cases in %s", dir)
	}
	cases := make([]Case, 0, len(files))
	for _, f := range files {
		c, err := load(reg, f)
		if err != nil {
			return nil, fmt.Errorf("case %s: %w", f, err)
		}
		cases = append(cases, c)
	}
	return cases, nil
}

func load(reg *tasks.Registry, file string) (Case, error) {
	a, err := txtar.ParseFile(file)
	if err != nil {
		return Case{}, err
	}
	c := Case{Name: strings.TrimSuffix(filepath.Base(file), ".txtar"), file: file, archive: a}
	for line := range strings.Lines(string(a.Comment)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch key {
		case "kind":
			c.Kind = value
		case "unrestorable":
			c.unrestorable = true
		case "deep":
			c.deep = true
		}
	}
	c.Spec, err = decodeSpec(reg, c.Kind, c.section("spec.json"))
	return c, err
}

func decodeSpec(reg *tasks.Registry, kind, text string) (proto.Message, error) {
	k, err := reg.Kind(kind)
	if err != nil {
		return nil, err
	}
	spec := k.NewSpec()
	if err := protojson.Unmarshal([]byte(text), spec); err != nil {
		return nil, err
	}
	return spec, k.Validate(spec)
}

// section returns a file of the archive, or nothing.
func (c *Case) section(name string) string {
	for _, f := range c.archive.Files {
		if f.Name == name {
			return string(f.Data)
		}
	}
	return ""
}

func (c *Case) has(name string) bool {
	for _, f := range c.archive.Files {
		if f.Name == name {
			return true
		}
	}
	return false
}

// node makes the node as it is before the task.
func (c *Case) node(ctx context.Context, reg *tasks.Registry) (*fakehost.Node, error) {
	n := fakehost.New()
	if err := n.Do(c.section("before")); err != nil {
		return nil, err
	}
	for _, f := range c.archive.Files {
		kind, ok := strings.CutPrefix(f.Name, "earlier/")
		if !ok {
			continue
		}
		kind = strings.TrimSuffix(kind, ".json")
		if err := settle(ctx, reg, n, kind, string(f.Data)); err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name, err)
		}
	}
	return n, n.Do(c.section("drift"))
}

// settle carries out a spec without any journal.
func settle(ctx context.Context, reg *tasks.Registry, n *fakehost.Node, kind, text string) error {
	spec, err := decodeSpec(reg, kind, text)
	if err != nil {
		return err
	}
	k, err := reg.Kind(kind)
	if err != nil {
		return err
	}
	hosts := n.Hosts(nil)
	plan, err := reg.Plan(ctx, hosts.Prober(), k, spec)
	if err != nil {
		return err
	}
	for i, sealed := range plan.GetSteps() {
		s, err := reg.Open(sealed)
		if err != nil {
			return err
		}
		if _, err := s.Apply(ctx, hosts.ForStep("earlier-"+kind+text, uint32(i))); err != nil {
			return err
		}
		if err := s.Verify(ctx, hosts.Prober()); err != nil {
			return err
		}
	}
	return k.Verify(ctx, hosts.Prober(), spec)
}

// golden compares a section with what was got; with -update it writes it.
func (c *Case) golden(update bool, name, got string) error {
	if !strings.HasSuffix(got, "\n") && got != "" {
		got += "\n"
	}
	if !update {
		if want := c.section(name); !c.has(name) || want != got {
			return fmt.Errorf("%s of %s:\n%s\nwant:\n%s\n(run the test with -update to accept it)", name, c.file, got, want)
		}
		return nil
	}
	found := false
	for i := range c.archive.Files {
		if c.archive.Files[i].Name == name {
			c.archive.Files[i].Data, found = []byte(got), true
		}
	}
	if !found {
		c.archive.Files = append(c.archive.Files, txtar.File{Name: name, Data: []byte(got)})
	}
	return os.WriteFile(c.file, txtar.Format(c.archive), 0o644)
}
