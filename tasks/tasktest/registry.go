package tasktest

import (
	"errors"
	"fmt"
	"regexp"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/strict"
	"github.com/gpuaas/millwright/tasks"
	"github.com/gpuaas/millwright/tasks/tasktest/fakehost"
)

// Secrets walks the spec of every kind, and what it holds, and returns each
// field whose name says that it may hold a secret and which is not marked
// debug_redact.
func Secrets(reg *tasks.Registry) []string {
	var bad []string
	for _, k := range reg.Kinds() {
		walk(k.NewSpec().ProtoReflect().Descriptor(), k.Kind, map[protoreflect.FullName]bool{}, &bad)
	}
	return bad
}

func walk(md protoreflect.MessageDescriptor, path string, seen map[protoreflect.FullName]bool, bad *[]string) {
	if seen[md.FullName()] {
		return
	}
	seen[md.FullName()] = true
	for i := range md.Fields().Len() {
		fd := md.Fields().Get(i)
		if fd.Message() != nil && fd.Message().FullName() == reference {
			continue // a name and a digest
		}
		if !Marked(fd) {
			*bad = append(*bad, path+"."+string(fd.Name()))
		}
		if fd.Message() != nil {
			walk(fd.Message(), path+"."+string(fd.Name()), seen, bad)
		}
	}
}

// reference is what names a secret and holds none.
var reference = (&taskv1.SecretRef{}).ProtoReflect().Descriptor().FullName()

// Marked reports whether a field may be printed: its name does not say that it
// may hold a secret, or it is marked debug_redact.
func Marked(fd protoreflect.FieldDescriptor) bool {
	telling := regexp.MustCompile(`(^|_)(secret|password|passwd|passphrase|token|credential|credentials|private_key|api_key|munge_key)(_|$)`)
	if !telling.MatchString(string(fd.Name())) {
		return true
	}
	o, ok := fd.Options().(*descriptorpb.FieldOptions)
	return ok && o.GetDebugRedact()
}

// FuzzValidate feeds a kind with arbitrary specs: nothing panics, and what
// Validate accepts can be planned, twice the same. It is the body of a fuzz
// target, whose seeds are added here.
func FuzzValidate(f *testing.F, reg *tasks.Registry, kind string, seeds ...proto.Message) {
	f.Helper()
	k, err := reg.Kind(kind)
	if err != nil {
		f.Fatal(err)
	}
	for _, s := range append(seeds, k.NewSpec()) {
		b, err := proto.Marshal(s)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		spec := k.NewSpec()
		if proto.Unmarshal(b, spec) != nil || strict.Check(spec) != nil {
			return
		}
		if k.Validate(spec) != nil {
			return
		}
		if err := planTwice(t, reg, k, spec); err != nil {
			t.Error(err)
		}
	})
}

func planTwice(t *testing.T, reg *tasks.Registry, k *tasks.Kind, spec proto.Message) error {
	k.Locks(spec)
	k.Intent(spec)
	if k.Deadline(spec) <= 0 {
		return fmt.Errorf("deadline %v of %v", k.Deadline(spec), spec)
	}
	h := fakehost.New().Hosts(nil).Prober()
	one, err1 := reg.Plan(t.Context(), h, k, spec)
	two, err2 := reg.Plan(t.Context(), h, k, spec)
	if fmt.Sprint(err1) != fmt.Sprint(err2) || !proto.Equal(one, two) {
		return fmt.Errorf("plans of %v differ: %v and %v: %w", spec, one, two, errors.Join(err1, err2))
	}
	return nil
}
