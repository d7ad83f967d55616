// Package strict refuses messages that are not understood whole, and bytes that
// could be understood in two ways.
package strict

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Unmarshal decodes b into m. Besides what [Check] refuses it refuses a field
// that is no list and is given twice, and a oneof with two members: parsers
// take the last one of some and merge others, and signed bytes must mean one
// thing to all of them.
func Unmarshal(b []byte, m proto.Message) error {
	if err := proto.Unmarshal(b, m); err != nil {
		return fmt.Errorf("decode %s: %w", m.ProtoReflect().Descriptor().Name(), err)
	}
	if err := Check(m); err != nil {
		return err
	}
	return once(b, m.ProtoReflect().Descriptor(), "")
}

// once refuses what is given twice in the bytes of a message in which nothing
// is unknown.
func once(b []byte, d protoreflect.MessageDescriptor, path string) error {
	seen := map[protoreflect.FullName]bool{}
	for len(b) > 0 {
		number, _, tag := protowire.ConsumeTag(b)
		_, _, n := protowire.ConsumeField(b)
		fd := d.Fields().ByNumber(number)
		if n < 0 || fd == nil {
			return fmt.Errorf("%s: its bytes cannot be read: %w", d.FullName(), protowire.ParseError(n))
		}
		p, name := fd.JSONName(), fd.FullName()
		if path != "" {
			p = path + "." + p
		}
		if o := fd.ContainingOneof(); o != nil {
			name = o.FullName()
		}
		if !fd.IsList() && seen[name] {
			return fmt.Errorf("%s: it is given twice", p)
		}
		seen[name] = true
		if fd.Message() != nil {
			value, _ := protowire.ConsumeBytes(b[tag:n])
			if err := once(value, fd.Message(), p); err != nil {
				return err
			}
		}
		b = b[n:]
	}
	return nil
}

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
