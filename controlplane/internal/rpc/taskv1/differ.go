package taskv1

import (
	"fmt"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// firstDifference returns the path of the first field, by number, in which two
// messages of one type differ, and what it is in each; the path is empty when
// they are equal.
func firstDifference(a, b protoreflect.Message) (path, was, is string) {
	fields := a.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if a.Has(fd) == b.Has(fd) && a.Get(fd).Equal(b.Get(fd)) {
			continue
		}
		name := string(fd.Name())
		if fd.Message() != nil && !fd.IsList() && !fd.IsMap() && a.Has(fd) && b.Has(fd) {
			if deeper, was, is := firstDifference(a.Get(fd).Message(), b.Get(fd).Message()); deeper != "" {
				return name + "." + deeper, was, is
			}
		}
		if fd.IsList() && fd.Message() == nil {
			return listDifference(name, fd, a.Get(fd).List(), b.Get(fd).List())
		}
		return name, show(fd, a), show(fd, b)
	}
	return "", "", ""
}

func listDifference(name string, fd protoreflect.FieldDescriptor, a, b protoreflect.List) (path, was, is string) {
	if a.Len() != b.Len() {
		return name, fmt.Sprintf("%d values", a.Len()), fmt.Sprintf("%d values", b.Len())
	}
	for i := range a.Len() {
		if !a.Get(i).Equal(b.Get(i)) {
			return fmt.Sprintf("%s[%d]", name, i), showValue(fd, a.Get(i)), showValue(fd, b.Get(i))
		}
	}
	return name, "", ""
}

func show(fd protoreflect.FieldDescriptor, m protoreflect.Message) string {
	switch {
	case !m.Has(fd):
		return "nothing"
	case fd.IsList(), fd.IsMap(), fd.Message() != nil:
		return "another value"
	}
	return showValue(fd, m.Get(fd))
}

func showValue(fd protoreflect.FieldDescriptor, v protoreflect.Value) string {
	switch fd.Kind() {
	case protoreflect.BytesKind:
		return fmt.Sprintf("%d bytes", len(v.Bytes()))
	case protoreflect.EnumKind:
		if e := fd.Enum().Values().ByNumber(v.Enum()); e != nil {
			return string(e.Name())
		}
	case protoreflect.StringKind:
		return fmt.Sprintf("%q", clip(v.String()))
	}
	return clip(fmt.Sprint(v.Interface()))
}
