// Package text mends the strings of messages.
package text

import (
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Marshal serialises m deterministically. A string in it that is not UTF-8,
// which protobuf refuses, is mended first, in a copy: error texts quote file
// names and what programs said, and what happened must be recorded whatever it
// is called.
func Marshal(m proto.Message) ([]byte, error) {
	opts := proto.MarshalOptions{Deterministic: true}
	b, err := opts.Marshal(m)
	if err == nil {
		return b, nil
	}
	m = proto.Clone(m)
	mend(m.ProtoReflect())
	return opts.Marshal(m)
}

// mend replaces what is not UTF-8 in every string of m by the replacement
// character.
func mend(m protoreflect.Message) {
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.IsMap():
			// The formats have none.
		case fd.IsList():
			l := v.List()
			for i := range l.Len() {
				switch fd.Kind() {
				case protoreflect.StringKind:
					l.Set(i, valid(l.Get(i)))
				case protoreflect.MessageKind:
					mend(l.Get(i).Message())
				}
			}
		case fd.Kind() == protoreflect.StringKind:
			m.Set(fd, valid(v))
		case fd.Kind() == protoreflect.MessageKind:
			mend(v.Message())
		}
		return true
	})
}

func valid(v protoreflect.Value) protoreflect.Value {
	return protoreflect.ValueOfString(strings.ToValidUTF8(v.String(), "\uFFFD"))
}
