package hostile_test

import (
	"fmt"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/gpuaas/millwright/proto/millwright/agent/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/test/hostile"
)

// masks are the ways in which each byte is altered: each of its bits, and all.
var masks = []byte{0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0xff}

// onTheWire is how many of the messages that are none any more are sent: each
// costs a session.
const onTheWire = 2

// TestAlteredAtEveryByte alters envelope and leaf of a signed task at each of
// their bytes, as they are sent, and delivers them under the task's id.
func TestAlteredAtEveryByte(t *testing.T) {
	w := newWorld(t)
	leaf := w.leaf("genuine")
	env, signed := w.one(leaf)
	s := w.s.Next()
	w.settled(s)
	before := w.snapshot()
	envBytes, leafBytes := marshal(t, env), marshal(t, signed)
	tried, broken := 0, 0
	for _, part := range []struct {
		name  string
		bytes []byte
		whole func(altered []byte) ([]byte, []byte)
	}{
		{"envelope", envBytes, func(b []byte) ([]byte, []byte) { return b, leafBytes }},
		{"leaf", leafBytes, func(b []byte) ([]byte, []byte) { return envBytes, b }},
	} {
		for i := range part.bytes {
			for _, mask := range masks {
				altered := append([]byte(nil), part.bytes...)
				altered[i] ^= mask
				id := fmt.Sprintf("%s byte %d ^ %#02x", part.name, i, mask)
				b := assignment(s, id, part.whole)(altered)
				tried++
				if proto.Unmarshal(b, new(agentv1.SessionResponse)) != nil {
					if broken++; broken <= onTheWire {
						s.SendRaw(b)
						s.Ended()
						s = w.s.Next()
					}
					continue
				}
				s.SendRaw(b)
				if a := s.Answer(); a.GetAssignmentId() != id || !refused(a, "") {
					t.Errorf("%s: answer %v, want it refused", id, a)
				}
			}
		}
	}
	t.Logf("%d altered tasks, of which %d were no message any more", tried, broken)
	if want := len(masks) * (len(envBytes) + len(leafBytes)); tried != want || broken > want/4 {
		t.Errorf("%d altered tasks were tried and %d of them judged, want %d and most of them", tried, tried-broken, want)
	}
	w.unchanged(before)
	w.runs(s, env, signed, leaf.GetTaskId(), "genuine")
}

func marshal(t *testing.T, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// assignment returns what makes a SessionResponse from an altered part.
func assignment(s *hostile.Session, id string, whole func([]byte) ([]byte, []byte)) func([]byte) []byte {
	return func(altered []byte) []byte {
		env, leaf := whole(altered)
		var a []byte
		a = protowire.AppendString(protowire.AppendTag(a, 1, protowire.BytesType), id)
		a = protowire.AppendBytes(protowire.AppendTag(a, 2, protowire.BytesType), env)
		a = protowire.AppendBytes(protowire.AppendTag(a, 3, protowire.BytesType), leaf)
		var m []byte
		m = protowire.AppendVarint(protowire.AppendTag(m, 1, protowire.VarintType), s.Epoch)
		return protowire.AppendBytes(protowire.AppendTag(m, 4, protowire.BytesType), a)
	}
}

// TestTruncated cuts envelope and leaf short at each of their bytes.
func TestTruncated(t *testing.T) {
	w := newWorld(t)
	leaf := w.leaf("genuine")
	env, signed := w.one(leaf)
	s := w.s.Next()
	w.settled(s)
	before := w.snapshot()
	for i := range env.GetPayload() {
		short := proto.CloneOf(env)
		short.Payload = short.Payload[:i]
		w.mustRefuse(s, fmt.Sprintf("payload of %d bytes", i), short, signed)
	}
	for i := range signed.GetLeaf() {
		short := proto.CloneOf(signed)
		short.Leaf = short.Leaf[:i]
		w.mustRefuse(s, fmt.Sprintf("leaf of %d bytes", i), env, short)
	}
	w.unchanged(before)
	w.runs(s, env, signed, leaf.GetTaskId(), "genuine")
}

func (w *world) mustRefuse(s *hostile.Session, what string, env *taskv1.Envelope, leaf *taskv1.SignedLeaf) {
	w.t.Helper()
	if a := s.Deliver(what, env, leaf); !refused(a, "") {
		w.t.Errorf("%s: answer %v, want it refused", what, a)
	}
}
