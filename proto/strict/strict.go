// Package strict refuses messages that are not understood whole.
package strict

import (
	"fmt"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Check returns an error when m, or a message in it, holds an unknown field or
// an undefined enum number. What was signed must be understood whole.
func Check(m proto.Message) error {
	return check(m.ProtoReflect(), "")
}

func check(m protoreflect.Message, path string) error {
	if len(m.GetUnknown()) > 0 {
		return fmt.Errorf("%s: unknown field", at(path, m))
	}
	var err error
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		p := fd.JSONName()
		if path != "" {
			p = path + "." + p
		}
		switch {
		case fd.IsMap():
			v.Map().Range(func(k protoreflect.MapKey, e protoreflect.Value) bool {
				err = checkValue(fd.MapValue(), e, fmt.Sprintf("%s[%v]", p, k))
				return err == nil
			})
		case fd.IsList():
			for i := range v.List().Len() {
				if err = checkValue(fd, v.List().Get(i), fmt.Sprintf("%s[%d]", p, i)); err != nil {
					break
				}
			}
		default:
			err = checkValue(fd, v, p)
		}
		return err == nil
	})
	return err
}

func checkValue(fd protoreflect.FieldDescriptor, v protoreflect.Value, path string) error {
	switch fd.Kind() {
	case protoreflect.MessageKind, protoreflect.GroupKind:
		return check(v.Message(), path)
	case protoreflect.EnumKind:
		if fd.Enum().Values().ByNumber(v.Enum()) == nil {
			return fmt.Errorf("%s: undefined number %d of enum %s", path, v.Enum(), fd.Enum().FullName())
		}
	}
	return nil
}

func at(path string, m protoreflect.Message) string {
	if path == "" {
		return string(m.Descriptor().FullName())
	}
	return path
}
