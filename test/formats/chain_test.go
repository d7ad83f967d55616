package formats_test

import (
	"fmt"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

// checkJournal follows the chain by the bytes alone.
func (v *vectors) checkJournal(t *testing.T) {
	journal, before := "", []byte(nil)
	changes := 0
	for i, f := range v.Journal.Frames {
		fields := fieldsOf(t, f.Frame)
		id, seq := string(fields[1][0].bytes), fields[2][0].number
		if id != journal {
			opened := fieldsOf(t, fields[10][0].bytes)
			previous := []byte(nil)
			if p := opened[1]; p != nil {
				previous = p[0].bytes
			}
			if string(previous) != journal || seq != 1 {
				t.Errorf("frame %d opens journal %s with seq %d after %q, and the one before is %q", i, id, seq, previous, journal)
			}
			generation := fmt.Sprint(opened[4][0].number)
			before = sum([]byte(v.Journal.Node), []byte{0}, []byte(generation), []byte{0}, previous)
			journal = id
			changes++
		}
		same(t, fmt.Sprintf("prev_hash of frame %d", i), fields[3][0].bytes, before)
		same(t, fmt.Sprintf("prev_hash as listed of frame %d", i), f.PrevHash, before)
		before = sum(f.Frame)
		same(t, fmt.Sprintf("sha256 of frame %d", i), f.SHA256, before)
		if err := proto.Unmarshal(f.Frame, new(taskv1.Event)); err != nil {
			t.Errorf("frame %d: %v", i, err)
		}
	}
	if changes != 2 {
		t.Errorf("%d journals, want 2", changes)
	}
}

func (v *vectors) checkPlan(t *testing.T) {
	plan := new(taskv1.Plan)
	if err := proto.Unmarshal(v.Plan.Plan, plan); err != nil {
		t.Fatal(err)
	}
	same(t, "plan_digest", sum(v.Plan.Plan), v.Plan.Digest)
	same(t, "canonical plan", canonical(plan.ProtoReflect()), v.Plan.Plan)
	b, digest, err := tasks.MarshalPlan(plan)
	if err != nil {
		t.Fatal(err)
	}
	same(t, "MarshalPlan", b, v.Plan.Plan)
	same(t, "digest of MarshalPlan", digest, v.Plan.Digest)
}

// wireValue is a field of a message by its bytes alone: a number or a run of
// bytes.
type wireValue struct {
	number uint64
	bytes  []byte
}

func fieldsOf(t *testing.T, b []byte) map[protowire.Number][]wireValue {
	t.Helper()
	out := map[protowire.Number][]wireValue{}
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		m := protowire.ConsumeFieldValue(number, kind, b[max(n, 0):])
		if n < 0 || m < 0 {
			t.Fatalf("bytes of no message: %x", b)
		}
		var v wireValue
		switch kind {
		case protowire.VarintType:
			v.number, _ = protowire.ConsumeVarint(b[n:])
		case protowire.BytesType:
			v.bytes, _ = protowire.ConsumeBytes(b[n:])
		}
		out[number] = append(out[number], v)
		b = b[n+m:]
	}
	return out
}
