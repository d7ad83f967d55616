// Package gputest checks what is said of GPUs.
package gputest

import (
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// Whole fails the test unless each optional field of m, and of the messages in
// it, is either set or named as unknown with a reason, and what is named is a
// field.
func Whole(t *testing.T, m proto.Message) {
	t.Helper()
	r := m.ProtoReflect()
	unknown := named(t, r)
	fields := r.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if f.HasOptionalKeyword() && r.Has(f) == unknown[f.Name()] {
			t.Errorf("%s.%s: set %v, named as unknown %v", r.Descriptor().Name(), f.Name(), r.Has(f), unknown[f.Name()])
		}
		switch {
		case f.Message() == nil || f.Name() == "unknown" || f.Message().FullName().Parent() != "millwright.gpu.v1":
		case f.IsList():
			for j := range r.Get(f).List().Len() {
				Whole(t, r.Get(f).List().Get(j).Message().Interface())
			}
		case r.Has(f):
			Whole(t, r.Get(f).Message().Interface())
		}
	}
}

func named(t *testing.T, r protoreflect.Message) map[protoreflect.Name]bool {
	t.Helper()
	out := map[protoreflect.Name]bool{}
	f := r.Descriptor().Fields().ByName("unknown")
	if f == nil {
		return out
	}
	for i := range r.Get(f).List().Len() {
		u, ok := r.Get(f).List().Get(i).Message().Interface().(*gpuv1.Unknown)
		if !ok {
			t.Fatalf("%s.unknown is something else", r.Descriptor().Name())
		}
		name := protoreflect.Name(u.GetField())
		if out[name] = true; r.Descriptor().Fields().ByName(name) == nil {
			t.Errorf("%s has no field %s", r.Descriptor().Name(), name)
		}
		if u.GetReason() == gpuv1.UnknownReason_UNKNOWN_REASON_UNSPECIFIED {
			t.Errorf("%s.%s is unknown for no reason", r.Descriptor().Name(), name)
		}
	}
	return out
}
