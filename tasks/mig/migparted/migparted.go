// Package migparted reads the configuration files of NVIDIA's mig-parted,
// version v1, and says what a configuration in one asks for as a spec of
// mig.configure.
//
// It is strict: an unknown key, a key given twice, a key without a value, an
// alias and a second document are mistakes, and so is what mig-parted itself
// refuses. All mistakes are told at once, each with its line. A file is read
// where the task is signed: what is signed is the spec, so that a name cannot
// come to mean something else later.
package migparted

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	migv1 "github.com/gpuaas/millwright/proto/millwright/mig/v1"
)

// MaxBytes is the largest file that is read.
const MaxBytes = 1 << 20

// version is the one version of the format.
const version = "v1"

// Problem is one mistake in a file.
type Problem struct {
	// File is the file's name.
	File string
	// Line is the line of the mistake, from 1; 0 when it is the whole file.
	Line int
	// Field is the path of keys to it, such as mig-configs.all-balanced[0].devices.
	Field string
	// Value is what stands there, where that helps.
	Value string
	// Rule says what is wrong and what would be right.
	Rule string
}

// Problems is every mistake of one file, by line. It is an error.
type Problems []Problem

// Error lists the mistakes, one a line.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i, q := range p {
		lines[i] = q.String()
	}
	return strings.Join(lines, "\n")
}

// String is the mistake in one line.
func (p Problem) String() string {
	s := p.File
	if p.Line > 0 {
		s += fmt.Sprintf(":%d", p.Line)
	}
	if p.Field != "" {
		s += ": " + p.Field
	}
	if p.Value != "" {
		s += fmt.Sprintf(": %q", p.Value)
	}
	return s + ": " + p.Rule
}

// ErrNoConfig is what errors wrap that say that a file has no such configuration.
var ErrNoConfig = errors.New("no such configuration")

// File is a file that was read.
type File struct {
	name    string
	configs map[string]*migv1.ConfigureSpec
}

// Read reads a file. name stands for it in messages. An error is [Problems].
func Read(name string, data []byte) (*File, error) {
	r := &reader{file: name}
	f := &File{name: name, configs: map[string]*migv1.ConfigureSpec{}}
	if root := r.parse(data); root != nil {
		f.configs = r.top(root)
	}
	if len(r.found) > 0 {
		slices.SortStableFunc(r.found, func(a, b Problem) int { return a.Line - b.Line })
		return nil, r.found
	}
	return f, nil
}

// Configs are the names of the configurations, sorted.
func (f *File) Configs() []string { return slices.Sorted(maps.Keys(f.configs)) }

// Spec is what a configuration asks for. Without a name it is the only one that
// the file has. Its layouts for GPUs that the node does not have are left out
// there where the file says so by a device-filter.
func (f *File) Spec(config string) (*migv1.ConfigureSpec, error) {
	if config == "" && len(f.configs) == 1 {
		config = f.Configs()[0]
	}
	s := f.configs[config]
	switch {
	case s == nil && config == "":
		return nil, fmt.Errorf("%s has %d configurations: say which of %s: %w", f.name, len(f.configs), strings.Join(f.Configs(), ", "), ErrNoConfig)
	case s == nil:
		return nil, fmt.Errorf("%s has no configuration %q: it has %s: %w", f.name, config, strings.Join(f.Configs(), ", "), ErrNoConfig)
	}
	return s, nil
}

// reader collects the mistakes of one file.
type reader struct {
	file  string
	found Problems
}

func (r *reader) add(n *yaml.Node, field, value, rule string, args ...any) {
	const most = 80
	if len(value) > most {
		value = strings.ToValidUTF8(value[:most], "") + "..."
	}
	p := Problem{File: r.file, Field: field, Value: value, Rule: fmt.Sprintf(rule, args...)}
	if n != nil {
		p.Line = n.Line
	}
	r.found = append(r.found, p)
}

// parse returns the one document of a file.
func (r *reader) parse(data []byte) *yaml.Node {
	if len(data) > MaxBytes {
		r.add(nil, "", "", "has %d bytes; a configuration has at most %d", len(data), MaxBytes)
		return nil
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, next yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		r.add(nil, "", "", "is empty; begin with version: %s", version)
		return nil
	case err != nil:
		r.add(nil, "", "", "is not YAML: %s", strings.TrimPrefix(err.Error(), "yaml: "))
		return nil
	}
	if err := dec.Decode(&next); !errors.Is(err, io.EOF) {
		r.add(&next, "", "", "holds more than one document; keep one")
		return nil
	}
	return doc.Content[0]
}

// value is a key with what it has.
type value struct{ key, node *yaml.Node }

// mapping reads a mapping whose keys are known, or of which any are with none.
func (r *reader) mapping(n *yaml.Node, at string, known ...string) (map[string]value, bool) {
	if !r.is(n, yaml.MappingNode, at, "must be a mapping of key: value") {
		return nil, false
	}
	out := map[string]value{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, node := n.Content[i], n.Content[i+1]
		field := join(at, key.Value)
		first, twice := out[key.Value]
		switch {
		case key.Kind != yaml.ScalarNode || key.Tag == "!!merge":
			r.add(key, at, "", "has a key that is no text; write each key out")
		case len(known) > 0 && !slices.Contains(known, key.Value):
			r.add(key, field, "", "unknown key; known are %s", strings.Join(known, ", "))
		case twice:
			r.add(key, field, "", "is given twice; it stands in line %d already", first.key.Line)
		case node.Kind == yaml.AliasNode:
			r.add(node, field, "*"+node.Value, "is an alias; write the value out")
		case node.Kind == yaml.ScalarNode && node.Tag == "!!null":
			r.add(node, field, "", "has no value")
		default:
			out[key.Value] = value{key, node}
		}
	}
	return out, true
}

// is refuses a node of another kind.
func (r *reader) is(n *yaml.Node, kind yaml.Kind, at, rule string) bool {
	switch n.Kind {
	case kind:
		return true
	case yaml.AliasNode:
		r.add(n, at, "*"+n.Value, "is an alias; write the value out")
	default:
		r.add(n, at, n.Value, "%s", rule)
	}
	return false
}

func join(at, key string) string {
	if at == "" {
		return key
	}
	return at + "." + key
}
