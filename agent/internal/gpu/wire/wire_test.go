package wire_test

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/agent/internal/gpu/wire"
	gpuv1 "github.com/gpuaas/millwright/proto/millwright/gpu/v1"
)

func TestFrames(t *testing.T) {
	var b bytes.Buffer
	sent := []*gpuv1.ChildReply{{Id: 1}, {}, {Id: 2, Failure: &gpuv1.ChildFailure{Message: strings.Repeat("x", 100_000)}}}
	for _, m := range sent {
		if err := wire.Write(&b, m); err != nil {
			t.Fatal(err)
		}
	}
	whole := bytes.Clone(b.Bytes())
	for _, m := range sent {
		got := &gpuv1.ChildReply{}
		if err := wire.Read(&b, got); err != nil || !proto.Equal(got, m) {
			t.Errorf("%v, %v", got.GetId(), err)
		}
	}
	if err := wire.Read(&b, &gpuv1.ChildReply{}); err != io.EOF { //nolint:errorlint // it must be io.EOF itself
		t.Errorf("the end: %v", err)
	}
	for _, bad := range [][]byte{whole[:2], whole[:5], {0xff, 0xff, 0xff, 0xff}, {0, 0, 0, 1, 0xff}} {
		if err := wire.Read(bytes.NewReader(bad), &gpuv1.ChildReply{}); err == nil || err == io.EOF { //nolint:errorlint // a frame that is cut off must not be io.EOF itself
			t.Errorf("%x: %v", bad, err)
		}
	}
	if err := wire.Write(&b, &gpuv1.ChildReply{Failure: &gpuv1.ChildFailure{Message: strings.Repeat("x", 5<<20)}}); err == nil {
		t.Error("a frame of 5 MiB was written")
	}
}
