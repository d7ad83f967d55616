package formats_test

import (
	"os"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
)

// TestBaseline asks that the generated code still has every field, number and
// value of proto/baseline.binpb. `make check` asks buf, which knows more rules;
// this one needs no tool, and runs in `make test`.
func TestBaseline(t *testing.T) {
	b, err := os.ReadFile("../../proto/baseline.binpb")
	if err != nil {
		t.Fatal(err)
	}
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(b, &set); err != nil {
		t.Fatal(err)
	}
	frozen, err := protodesc.NewFiles(&set)
	if err != nil {
		t.Fatal(err)
	}
	files := 0
	frozen.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		if f.Package().Parent().Parent() == "millwright" {
			files++
			baselineMessages(t, f.Messages())
			baselineEnums(t, f.Enums())
			for i := range f.Services().Len() {
				baselineService(t, f.Services().Get(i))
			}
		}
		return true
	})
	if files < 38 {
		t.Errorf("the baseline has %d files of the project, want at least 38", files)
	}
}

// now finds what has the name of d today.
func now[D protoreflect.Descriptor](t *testing.T, d D) (D, bool) {
	t.Helper()
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(d.FullName())
	if err != nil {
		t.Errorf("%s is gone: %v", d.FullName(), err)
		return d, false
	}
	same, ok := found.(D)
	if !ok {
		t.Errorf("%s is something else now", d.FullName())
	}
	return same, ok
}

func baselineMessages(t *testing.T, all protoreflect.MessageDescriptors) {
	for i := range all.Len() {
		m := all.Get(i)
		today, ok := now(t, m)
		if !ok {
			continue
		}
		for j := range m.Fields().Len() {
			was := m.Fields().Get(j)
			is := today.Fields().ByNumber(was.Number())
			switch {
			case is == nil:
				t.Errorf("%s = %d is gone", was.FullName(), was.Number())
			case shape(is) != shape(was):
				t.Errorf("%s = %d was %+v and is %+v", was.FullName(), was.Number(), shape(was), shape(is))
			}
		}
		baselineMessages(t, m.Messages())
		baselineEnums(t, m.Enums())
	}
}

// fieldShape is what bytes and JSON of a field depend on.
type fieldShape struct {
	name, json  string
	kind        protoreflect.Kind
	cardinality protoreflect.Cardinality
	presence    bool
	of          protoreflect.FullName
}

func shape(f protoreflect.FieldDescriptor) fieldShape {
	s := fieldShape{name: string(f.Name()), json: f.JSONName(), kind: f.Kind(), cardinality: f.Cardinality(), presence: f.HasPresence()}
	switch {
	case f.Message() != nil:
		s.of = f.Message().FullName()
	case f.Enum() != nil:
		s.of = f.Enum().FullName()
	}
	return s
}

func baselineEnums(t *testing.T, all protoreflect.EnumDescriptors) {
	for i := range all.Len() {
		today, ok := now(t, all.Get(i))
		if !ok {
			continue
		}
		for j := range all.Get(i).Values().Len() {
			was := all.Get(i).Values().Get(j)
			if is := today.Values().ByNumber(was.Number()); is == nil || is.Name() != was.Name() {
				t.Errorf("%s = %d is %v now", was.FullName(), was.Number(), is)
			}
		}
	}
}

func baselineService(t *testing.T, s protoreflect.ServiceDescriptor) {
	for i := range s.Methods().Len() {
		was := s.Methods().Get(i)
		is, ok := now(t, was)
		if ok && (is.Input().FullName() != was.Input().FullName() || is.Output().FullName() != was.Output().FullName() ||
			is.IsStreamingClient() != was.IsStreamingClient() || is.IsStreamingServer() != was.IsStreamingServer()) {
			t.Errorf("%s has another form now", was.FullName())
		}
	}
}
