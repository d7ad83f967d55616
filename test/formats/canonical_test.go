package formats_test

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// canonical is the canonical serialisation of proto/README.md, written down
// without the library's own.
func canonical(m protoreflect.Message) []byte {
	byNumber := map[protoreflect.FieldNumber]protoreflect.FieldDescriptor{}
	last := protoreflect.FieldNumber(0)
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		byNumber[fd.Number()], last = fd, max(last, fd.Number())
	}
	var out []byte
	for n := protoreflect.FieldNumber(1); n <= last; n++ {
		fd := byNumber[n]
		switch {
		case fd == nil || !m.Has(fd):
		case !fd.IsList():
			out = appendField(out, fd, m.Get(fd))
		case wireType(fd) == protowire.VarintType:
			var packed []byte
			for i := range m.Get(fd).List().Len() {
				packed = protowire.AppendVarint(packed, number(m.Get(fd).List().Get(i)))
			}
			out = protowire.AppendBytes(protowire.AppendTag(out, n, protowire.BytesType), packed)
		default:
			for i := range m.Get(fd).List().Len() {
				out = appendField(out, fd, m.Get(fd).List().Get(i))
			}
		}
	}
	return out
}

func appendField(out []byte, fd protoreflect.FieldDescriptor, v protoreflect.Value) []byte {
	out = protowire.AppendTag(out, fd.Number(), wireType(fd))
	switch x := v.Interface().(type) {
	case string:
		return protowire.AppendString(out, x)
	case []byte:
		return protowire.AppendBytes(out, x)
	case protoreflect.Message:
		return protowire.AppendBytes(out, canonical(x))
	}
	return protowire.AppendVarint(out, number(v))
}

func wireType(fd protoreflect.FieldDescriptor) protowire.Type {
	switch fd.Kind() {
	case protoreflect.StringKind, protoreflect.BytesKind, protoreflect.MessageKind:
		return protowire.BytesType
	case protoreflect.BoolKind, protoreflect.EnumKind, protoreflect.Int32Kind, protoreflect.Int64Kind,
		protoreflect.Uint32Kind, protoreflect.Uint64Kind:
		return protowire.VarintType
	}
	panic("the formats have no field of kind " + fd.Kind().String())
}

// number is a value as its varint: signed ones are extended to 64 bits.
func number(v protoreflect.Value) uint64 {
	switch x := v.Interface().(type) {
	case bool:
		return protowire.EncodeBool(x)
	case protoreflect.EnumNumber:
		return uint64(int64(x))
	case int32:
		return uint64(int64(x))
	case int64:
		return uint64(x)
	case uint32:
		return uint64(x)
	}
	return v.Uint()
}

// TestCanonical asks that what is hashed by its meaning, a plan with the
// arguments of its steps, has the same bytes in every language. Serialisers
// disagree about the place of a oneof: such a message must have none, and
// elsewhere bytes are hashed as they were made.
func TestCanonical(t *testing.T) {
	byMeaning := 0
	for _, d := range messages() {
		in := d.ParentFile().Path()
		strict := in == "millwright/task/v1/plan.proto" ||
			(in == "millwright/task/v1/step.proto" || in == "millwright/task/v1/package.proto") && strings.HasSuffix(string(d.Name()), "Step")
		if hasOneof(d, nil) {
			if strict {
				t.Errorf("%s has a oneof, and plans are hashed", d.FullName())
			}
			continue
		}
		if strict {
			byMeaning++
		}
		files, err := filepath.Glob(filepath.Join("testdata", "v*", string(d.FullName())+".*.binpb"))
		if err != nil || len(files) == 0 {
			t.Errorf("%s has no fixture (%v)", d.FullName(), err)
		}
		for _, file := range files {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			m := newMessage(t, d).Interface()
			if err := proto.Unmarshal(b, m); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if want := canonical(m.ProtoReflect()); !bytes.Equal(b, want) {
				t.Errorf("%s is not the canonical serialisation of what it means", file)
			}
		}
	}
	if byMeaning < 9 {
		t.Errorf("%d messages of plans and steps were looked at", byMeaning)
	}
}

// hasOneof reports whether a message, or one in it, has a oneof.
func hasOneof(d protoreflect.MessageDescriptor, above []protoreflect.FullName) bool {
	if slices.Contains(above, d.FullName()) {
		return false
	}
	for i := range d.Oneofs().Len() {
		if !d.Oneofs().Get(i).IsSynthetic() {
			return true
		}
	}
	for i := range d.Fields().Len() {
		if m := d.Fields().Get(i).Message(); m != nil && hasOneof(m, append(above, d.FullName())) {
			return true
		}
	}
	return false
}
