package ctl

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// The forms of output.
const (
	formatTable = "table"
	formatJSON  = "json"
	formatName  = "name"
)

// printJSON writes m as one indented document.
func (a *app) printJSON(m proto.Message) error {
	b, err := a.marshal(m)
	if err != nil {
		return err
	}
	var out bytes.Buffer
	if err := json.Indent(&out, b, "", "  "); err != nil {
		return fmt.Errorf("format output: %w", err)
	}
	out.WriteByte('\n')
	return a.write(out.Bytes())
}

// printJSONLine writes m on one line.
func (a *app) printJSONLine(m proto.Message) error {
	b, err := a.marshal(m)
	if err != nil {
		return err
	}
	var out bytes.Buffer
	if err := json.Compact(&out, b); err != nil {
		return fmt.Errorf("format output: %w", err)
	}
	out.WriteByte('\n')
	return a.write(out.Bytes())
}

// marshal returns the protojson of m. Specs and results of types that a newer
// server has are left out, and named on standard error.
func (a *app) marshal(m proto.Message) ([]byte, error) {
	m = proto.Clone(m)
	for _, name := range dropUnknown(m.ProtoReflect()) {
		a.remark("warning: this millctl does not know the type %s and leaves it out; use a newer one", name)
	}
	b, err := protojson.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("format output: %w", err)
	}
	return b, nil
}

// dropUnknown empties each Any in m whose type is not known, and names the
// types.
func dropUnknown(m protoreflect.Message) []string {
	if a, ok := m.Interface().(*anypb.Any); ok {
		if _, err := protoregistry.GlobalTypes.FindMessageByURL(a.GetTypeUrl()); err != nil && a.GetTypeUrl() != "" {
			name := a.GetTypeUrl()
			proto.Reset(a)
			return []string{name}
		}
		return nil
	}
	var names []string
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.Message() == nil || fd.IsMap():
		case fd.IsList():
			for i := range v.List().Len() {
				names = append(names, dropUnknown(v.List().Get(i).Message())...)
			}
		default:
			names = append(names, dropUnknown(v.Message())...)
		}
		return true
	})
	return names
}

func (a *app) write(b []byte) error {
	if _, err := a.out.Write(b); err != nil {
		return fmt.Errorf("write output: %w", err)
	}
	return nil
}

// table writes rows in columns; the first row is the head.
func table(w io.Writer, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		cells := make([]string, len(row))
		for i, c := range row {
			if cells[i] = printable(c); c == "" {
				cells[i] = "-"
			}
		}
		fmt.Fprintln(tw, strings.Join(cells, "\t"))
	}
	if err := tw.Flush(); err != nil {
		return fmt.Errorf("write output: %w", err)
	}
	return nil
}

// printable keeps text from a node or another person from steering the
// terminal, and on one line.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return ' '
		case !unicode.IsPrint(r):
			return unicode.ReplacementChar
		}
		return r
	}, s)
}

// stamp is a time as people read it, or "" for none.
func stamp(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	return t.AsTime().Local().Format(time.RFC3339)
}

// took is the time between two stamps, or "" when one is missing.
func took(from, to *timestamppb.Timestamp) string {
	if from == nil || to == nil {
		return ""
	}
	return to.AsTime().Sub(from.AsTime()).Round(time.Millisecond).String()
}

// word is the value of an enum as people read it: succeeded for
// TASK_STATE_SUCCEEDED.
func word(e protoreflect.Enum) string {
	v := e.Descriptor().Values().ByNumber(e.Number())
	if v == nil {
		return fmt.Sprintf("unknown (%d)", e.Number())
	}
	return strings.ToLower(strings.TrimPrefix(string(v.Name()), enumPrefix(e.Descriptor())))
}

func enumPrefix(ed protoreflect.EnumDescriptor) string {
	return strings.TrimSuffix(string(ed.Values().ByNumber(0).Name()), "UNSPECIFIED")
}

// enumFlag reads a word back.
func enumFlag(flag, s string, ed protoreflect.EnumDescriptor) (protoreflect.EnumNumber, error) {
	var words []string
	for i := range ed.Values().Len() {
		v := ed.Values().Get(i)
		if v.Number() == 0 {
			continue
		}
		w := strings.ToLower(strings.TrimPrefix(string(v.Name()), enumPrefix(ed)))
		if strings.ReplaceAll(strings.ToLower(s), "-", "_") == w {
			return v.Number(), nil
		}
		words = append(words, w)
	}
	return 0, usagef("--%s: %q: must be one of %s", flag, s, strings.Join(words, ", "))
}
