package strict_test

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	storagev1 "github.com/gpuaas/millwright/proto/millwright/storage/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/strict"
)

func encode(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestUnmarshal(t *testing.T) {
	leaf := &taskv1.TaskLeaf{
		Node: "n", Mode: taskv1.Mode_MODE_EXECUTE, Cause: &taskv1.Cause{Resource: "r", Generation: 1},
		Labels: []*taskv1.Label{{Key: "a"}, {Key: "b", Value: "x"}}, AllowedImpact: []taskv1.Impact{1, 2},
	}
	root := &taskv1.TrustRoot{Keys: []*taskv1.TrustKey{{Id: "k", NotAfter: &timestamppb.Timestamp{Seconds: 1}}}}
	mount := &storagev1.MountSpec{Source: &storagev1.MountSpec_Bind{Bind: &storagev1.BindSource{Path: "/a"}}}
	field := func(number protowire.Number, value []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), value)
	}
	varint := func(number protowire.Number, v uint64) []byte {
		return protowire.AppendVarint(protowire.AppendTag(nil, number, protowire.VarintType), v)
	}
	for _, tc := range []struct {
		name string
		m    proto.Message
		more []byte
		says string
	}{
		{"as it is", leaf, nil, ""},
		{"one more of a list", leaf, field(12, encode(t, &taskv1.Label{Key: "c"})), ""},
		{"a list in two pieces", leaf, varint(7, 3), ""},
		{"a text twice", leaf, field(2, []byte("n")), "node: it is given twice"},
		{"a number twice", leaf, varint(3, 1), "mode: it is given twice"},
		{"a message twice", leaf, field(13, encode(t, &taskv1.Cause{Epoch: 1})), "cause: it is given twice"},
		{"twice within a message of a list", leaf, field(12, append(field(1, []byte("c")), field(1, []byte("d"))...)), "labels.key: it is given twice"},
		{"twice within a message of a message", root, field(5, field(6, append(varint(1, 1), varint(1, 2)...))), "keys.notAfter.seconds: it is given twice"},
		{"two members of a oneof", mount, field(3, nil), "tmpfs: it is given twice"},
		{"an unknown field", leaf, field(99, nil), "unknown field"},
		{"a known field of another wire type", leaf, varint(2, 1), "unknown field"},
		{"an undefined number", leaf, varint(7, 99), "undefined number 99"},
		{"half a field", leaf, []byte{0x0a}, "decode TaskLeaf"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := strict.Unmarshal(append(encode(t, tc.m), tc.more...), tc.m.ProtoReflect().New().Interface())
			switch {
			case tc.says == "" && err != nil:
				t.Errorf("Unmarshal() = %v", err)
			case tc.says != "" && (err == nil || !strings.Contains(err.Error(), tc.says)):
				t.Errorf("Unmarshal() = %v, want one that says %q", err, tc.says)
			}
		})
	}
}

// FuzzUnmarshal asks that what is taken means the same when it is written again.
func FuzzUnmarshal(f *testing.F) {
	f.Add(encode(f, &taskv1.TaskLeaf{Node: "n", Labels: []*taskv1.Label{{Key: "a"}}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		got := new(taskv1.TaskLeaf)
		if strict.Unmarshal(b, got) != nil {
			return
		}
		again := new(taskv1.TaskLeaf)
		if err := strict.Unmarshal(encode(t, got), again); err != nil || !proto.Equal(got, again) {
			t.Errorf("Unmarshal(%x) = %v, and written again %v (%v)", b, got, again, err)
		}
	})
}
