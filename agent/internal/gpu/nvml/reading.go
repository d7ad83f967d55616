//go:build cgo

package nvml

import (
	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

// reading fills one message: each value is set, or named with the reason why it
// is not.
type reading struct {
	l       *Library
	unknown []*gpuv1.Unknown
}

// get reads one value by one function.
func get[T any](r *reading, field string, to **T, name string, fn func() (T, gonvml.Return)) {
	v, ret := call(r.l, name, fn)
	put(r, field, to, v, name, ret)
}

// put takes a value that was read, or the reason.
func put[T any](r *reading, field string, to **T, v T, name string, ret gonvml.Return) {
	if ret != gonvml.SUCCESS {
		r.miss(field, name, ret)
		return
	}
	*to = &v
}

// miss names a value that is not known.
func (r *reading) miss(field, name string, ret gonvml.Return) {
	u := &gpuv1.Unknown{Field: field, Reason: reason(ret), Code: int32(ret), Function: "nvml" + name}
	if ret == gonvml.ERROR_FUNCTION_NOT_FOUND && !r.l.has[name] {
		u.Code = 0 // it was not asked
	}
	r.unknown = append(r.unknown, u)
}

// missAll names every optional value of m.
func (r *reading) missAll(m proto.Message, name string, ret gonvml.Return, but ...string) {
	skip := map[string]bool{}
	for _, b := range but {
		skip[b] = true
	}
	fields := m.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		if f := fields.Get(i); optional(f) && !skip[string(f.Name())] {
			r.miss(string(f.Name()), name, ret)
		}
	}
}

// optional is whether a field can be unknown.
func optional(f protoreflect.FieldDescriptor) bool { return f.HasOptionalKeyword() }

func reason(ret gonvml.Return) gpuv1.UnknownReason {
	switch ret {
	case gonvml.ERROR_NOT_SUPPORTED, gonvml.ERROR_NO_DATA, gonvml.ERROR_VGPU_ECC_NOT_SUPPORTED:
		return gpuv1.UnknownReason_UNKNOWN_REASON_NOT_SUPPORTED
	case gonvml.ERROR_FUNCTION_NOT_FOUND, gonvml.ERROR_ARGUMENT_VERSION_MISMATCH:
		return gpuv1.UnknownReason_UNKNOWN_REASON_SYMBOL_MISSING
	case gonvml.ERROR_NO_PERMISSION:
		return gpuv1.UnknownReason_UNKNOWN_REASON_NO_PERMISSION
	case gonvml.ERROR_GPU_IS_LOST, gonvml.ERROR_GPU_NOT_FOUND:
		return gpuv1.UnknownReason_UNKNOWN_REASON_GPU_LOST
	case gonvml.ERROR_RESET_REQUIRED:
		return gpuv1.UnknownReason_UNKNOWN_REASON_RESET_REQUIRED
	default:
		return gpuv1.UnknownReason_UNKNOWN_REASON_ERROR
	}
}

// u32 turns what go-nvml gives as int into what it is.
func u32(n int, ret gonvml.Return) (uint32, gonvml.Return) { return uint32(n), ret }

// text turns a C string into Go's.
func text(c []int8) string {
	b := make([]byte, 0, len(c))
	for _, x := range c {
		if x == 0 {
			break
		}
		b = append(b, byte(x))
	}
	return string(b)
}
