package specfile

import (
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/reflect/protoreflect"
)

const noAlias = "is an alias; write the value out"

// message fills m from a mapping. It reports whether there was no mistake.
func (d *Document) message(n *yaml.Node, m protoreflect.Message, path string, depth int) bool {
	if _, named := d.lines[path]; !named {
		d.lines[path] = n.Line
	}
	if depth > maxDepth {
		d.add(n, path, "", fmt.Sprintf("is nested deeper than %d messages", maxDepth))
		return false
	}
	ok := true
	given := map[protoreflect.Name]*yaml.Node{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		fd := find(m.Descriptor(), key)
		if fd == nil {
			d.add(key, join(path, key.Value), "", "unknown field; "+known(m.Descriptor()))
			ok = false
			continue
		}
		at := join(path, string(fd.Name()))
		if !d.once(key, fd, at, given) {
			ok = false
			continue
		}
		d.lines[at] = key.Line
		if !d.field(value, m, fd, at, depth) {
			ok = false
			if one := fd.ContainingOneof(); one != nil {
				d.silent[join(path, string(one.Name()))] = true
			}
		}
	}
	return ok
}

func find(md protoreflect.MessageDescriptor, key *yaml.Node) protoreflect.FieldDescriptor {
	if key.Kind != yaml.ScalarNode {
		return nil
	}
	if fd := md.Fields().ByName(protoreflect.Name(key.Value)); fd != nil {
		return fd
	}
	return md.Fields().ByJSONName(key.Value)
}

// once refuses a field that was given before, or another one of its choice.
func (d *Document) once(key *yaml.Node, fd protoreflect.FieldDescriptor, at string, given map[protoreflect.Name]*yaml.Node) bool {
	if first := given[fd.Name()]; first != nil {
		d.add(key, at, "", fmt.Sprintf("is given twice; it stands in line %d already", first.Line))
		return false
	}
	given[fd.Name()] = key
	one := fd.ContainingOneof()
	if one == nil || one.IsSynthetic() {
		return true
	}
	for i := range one.Fields().Len() {
		other := one.Fields().Get(i)
		if first := given[other.Name()]; first != nil && other != fd {
			d.add(key, at, "", fmt.Sprintf("excludes %s, which line %d gives; keep one of them", other.Name(), first.Line))
			return false
		}
	}
	return true
}

func (d *Document) field(n *yaml.Node, m protoreflect.Message, fd protoreflect.FieldDescriptor, at string, depth int) bool {
	switch {
	case n.Kind == yaml.AliasNode:
		d.add(n, at, excerpt(n), noAlias)
		return false
	case n.Kind == yaml.ScalarNode && n.Tag == "!!null":
		d.add(n, at, "", "has no value; give one, in quotation marks if it is a text, or leave the field out")
		return false
	case fd.IsMap():
		return d.mapping(n, m, fd, at, depth)
	case fd.IsList():
		return d.list(n, m, fd, at, depth)
	}
	v, ok := d.value(n, m.NewField(fd), fd, at, depth)
	if v.IsValid() {
		m.Set(fd, v)
	}
	return ok
}

func (d *Document) list(n *yaml.Node, m protoreflect.Message, fd protoreflect.FieldDescriptor, at string, depth int) bool {
	if n.Kind != yaml.SequenceNode {
		d.add(n, at, excerpt(n), "must be a list: [a, b], or one value a line, each after a dash")
		return false
	}
	ok := true
	list := m.Mutable(fd).List()
	for i, item := range n.Content {
		p := fmt.Sprintf("%s[%d]", at, i)
		d.lines[p] = item.Line
		v := list.NewElement()
		if d.absent(item, p) {
			ok = false
		} else if got, good := d.value(item, v, fd, p, depth); got.IsValid() {
			v, ok = got, ok && good
		} else {
			ok = false
		}
		// An element that can't be read keeps its place, so that the indexes of
		// those after it stay what a person counts.
		list.Append(v)
	}
	return ok
}

func (d *Document) mapping(n *yaml.Node, m protoreflect.Message, fd protoreflect.FieldDescriptor, at string, depth int) bool {
	if n.Kind != yaml.MappingNode {
		d.add(n, at, excerpt(n), "must be a mapping of key: value")
		return false
	}
	ok := true
	entries := m.Mutable(fd).Map()
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, item := n.Content[i], n.Content[i+1]
		p := fmt.Sprintf("%s[%q]", at, key.Value)
		d.lines[p] = key.Line
		k, good := d.value(key, protoreflect.Value{}, fd.MapKey(), p, depth)
		if !good || d.absent(item, p) {
			ok = false
			continue
		}
		if entries.Has(k.MapKey()) {
			d.add(key, p, "", "is given twice")
			ok = false
			continue
		}
		v, good := d.value(item, entries.NewValue(), fd.MapValue(), p, depth)
		if v.IsValid() {
			entries.Set(k.MapKey(), v)
		}
		ok = ok && good
	}
	return ok
}

// absent refuses an element that is no value.
func (d *Document) absent(n *yaml.Node, at string) bool {
	switch {
	case n.Kind == yaml.AliasNode:
		d.add(n, at, excerpt(n), noAlias)
	case n.Kind == yaml.ScalarNode && n.Tag == "!!null":
		d.add(n, at, "", "has no value; put a text in quotation marks, or take the element out")
	default:
		return false
	}
	return true
}

// value returns one value. into is an empty value of a message field. The
// returned value is not valid when nothing could be read.
func (d *Document) value(n *yaml.Node, into protoreflect.Value, fd protoreflect.FieldDescriptor, at string, depth int) (protoreflect.Value, bool) {
	if fd.Message() != nil && !wellKnown(fd.Message()) {
		if n.Kind != yaml.MappingNode {
			d.add(n, at, excerpt(n), "must be a mapping of fields; "+known(fd.Message()))
			return protoreflect.Value{}, false
		}
		return into, d.message(n, into.Message(), at, depth+1)
	}
	if n.Kind != yaml.ScalarNode {
		d.add(n, at, excerpt(n), "must be "+wanted(fd))
		return protoreflect.Value{}, false
	}
	v, ok := scalar(n, fd)
	if !ok {
		d.add(n, at, excerpt(n), "must be "+wanted(fd))
		return protoreflect.Value{}, false
	}
	return v, true
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return strings.Join([]string{path, name}, ".")
}
