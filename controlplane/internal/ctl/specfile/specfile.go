// Package specfile reads the spec of a task from YAML or JSON, which is YAML
// too.
//
// It walks the document beside the descriptor of the spec's message, so that
// each mistake is told with its line, its field, the value as it was written,
// the rule and the way out, and all mistakes are told at once. It is strict: an
// unknown key, a key given twice, a key without a value, an alias and a second
// document are mistakes.
//
// Keys are the field names of the message, as they stand in the proto file or
// in lowerCamelCase. Text is taken as it is written, so that a file mode 0755
// and an argument 5 need no quotation marks. Whole numbers are decimal,
// durations are 90s or 1h30m, times are RFC 3339, bytes are base64, and an enum
// value may be written without the name of its type: accept for
// RESOLVE_AS_ACCEPT.
package specfile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuaas/millwright/tasks"
)

// MaxBytes is the largest document that is read.
const MaxBytes = 1 << 20

// maxExcerpt bounds how much of a value a message shows, in bytes.
const maxExcerpt = 80

// maxDepth bounds how deep messages may be nested.
const maxDepth = 32

// Problem is one mistake in a document.
type Problem struct {
	// File is the document's name.
	File string
	// Line is the line of the mistake, from 1; 0 when it is the whole document.
	Line int
	// Problem names the field, the value, the rule and the way out.
	tasks.Problem
}

// Problems is every mistake of one document, by line. It is an error.
type Problems []Problem

// Error lists the mistakes, one a line.
func (p Problems) Error() string {
	lines := make([]string, len(p))
	for i, q := range p {
		var b strings.Builder
		b.WriteString(q.File)
		if q.Line > 0 {
			fmt.Fprintf(&b, ":%d", q.Line)
		}
		if q.Field != "" {
			fmt.Fprintf(&b, ": %s", q.Field)
		}
		if q.Value != "" {
			fmt.Fprintf(&b, ": %q", q.Value)
		}
		fmt.Fprintf(&b, ": %s", q.Rule)
		lines[i] = b.String()
	}
	return strings.Join(lines, "\n")
}

// Document is a spec that was read, with the lines of its fields.
type Document struct {
	file   string
	lines  map[string]int  // by field path
	silent map[string]bool // paths of oneofs whose choice could not be read
	found  Problems
	read   bool // the text has fields: without them none of them is missing
}

// Read fills spec from data. name stands for the document in messages. What can
// be understood is set also when there are mistakes, so that the rest can be
// validated; [Document.Check] tells them all.
func Read(name string, data []byte, spec proto.Message) *Document {
	d := &Document{file: name, lines: map[string]int{}, silent: map[string]bool{}}
	if len(data) > MaxBytes {
		d.add(nil, "", "", fmt.Sprintf("has %d bytes; a spec has at most %d", len(data), MaxBytes))
		return d
	}
	root := d.parse(data)
	if root == nil {
		return d
	}
	if root.Kind != yaml.MappingNode {
		d.add(root, "", excerpt(root), "must be a mapping of fields; "+known(spec.ProtoReflect().Descriptor()))
		return d
	}
	d.read = true
	d.message(root, spec.ProtoReflect(), "", 0)
	return d
}

// Check returns all mistakes of the document as [Problems], or nil. invalid is
// what validating the spec said: its [tasks.Problems] are told with the lines of
// their fields, except those about a field that could not be read in the first
// place. Another error is returned as it is when the document has no mistakes.
func (d *Document) Check(invalid error) error {
	var ps tasks.Problems
	all := slices.Clone(d.found)
	if errors.As(invalid, &ps) {
		for _, p := range ps {
			if !d.unreadable(p.Field) {
				all = append(all, Problem{File: d.file, Line: d.line(p.Field), Problem: p})
			}
		}
	} else if invalid != nil && len(all) == 0 {
		return invalid
	}
	if len(all) == 0 {
		return nil
	}
	slices.SortStableFunc(all, func(a, b Problem) int { return a.Line - b.Line })
	return all
}

// unreadable reports whether the field, or one around it, has a mistake already.
func (d *Document) unreadable(field string) bool {
	return !d.read || d.silent[field] || slices.ContainsFunc(d.found, func(p Problem) bool {
		return p.Field == field || within(field, p.Field) || within(p.Field, field)
	})
}

// line returns the line of a field, or of the nearest one around it.
func (d *Document) line(field string) int {
	for field != "" {
		if n, ok := d.lines[field]; ok {
			return n
		}
		field = field[:max(strings.LastIndexAny(field, ".["), 0)]
	}
	return d.lines[""]
}

// within reports whether the path inner is a part of the field at outer.
func within(inner, outer string) bool {
	return outer != "" && (strings.HasPrefix(inner, outer+".") || strings.HasPrefix(inner, outer+"["))
}

func (d *Document) parse(data []byte) *yaml.Node {
	if json.Valid(data) {
		// JSON may be indented with tabs, which YAML forbids. None can stand
		// inside a JSON string.
		data = bytes.ReplaceAll(data, []byte("\t"), []byte(" "))
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, next yaml.Node
	err := dec.Decode(&doc)
	if errors.Is(err, io.EOF) {
		return &yaml.Node{Kind: yaml.MappingNode}
	}
	if err != nil {
		d.add(nil, "", "", "is not YAML: "+strings.TrimPrefix(err.Error(), "yaml: "))
		return nil
	}
	if err := dec.Decode(&next); !errors.Is(err, io.EOF) {
		d.add(&next, "", "", "holds more than one document; give each its own command")
		return nil
	}
	root := doc.Content[0]
	if root.Kind == yaml.ScalarNode && root.Tag == "!!null" {
		return &yaml.Node{Kind: yaml.MappingNode}
	}
	return root
}

func (d *Document) add(n *yaml.Node, field, value, rule string) {
	p := Problem{File: d.file, Problem: tasks.Problem{Field: field, Value: value, Rule: rule}}
	if n != nil {
		p.Line = n.Line
	}
	d.found = append(d.found, p)
}

// known lists the fields of a message for a person.
func known(md protoreflect.MessageDescriptor) string {
	names := make([]string, md.Fields().Len())
	for i := range names {
		names[i] = string(md.Fields().Get(i).Name())
	}
	slices.Sort(names)
	return "known fields: " + strings.Join(names, ", ")
}

// excerpt is a node's value for a message.
func excerpt(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "{...}"
	case yaml.SequenceNode:
		return "[...]"
	case yaml.AliasNode:
		return "*" + n.Value
	default:
		if len(n.Value) > maxExcerpt {
			return strings.ToValidUTF8(n.Value[:maxExcerpt], "") + "..."
		}
		return n.Value
	}
}
