package envelope_test

import (
	"crypto/ed25519"
	"errors"
	"slices"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/millwright/pki/envelope"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

func newKey(t testing.TB) *envelope.Key {
	t.Helper()
	k, err := envelope.GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func ring(keys ...*envelope.Key) func(string) (ed25519.PublicKey, bool) {
	return func(id string) (ed25519.PublicKey, bool) {
		for _, k := range keys {
			if k.KeyID() == id {
				return k.Public(), true
			}
		}
		return nil, false
	}
}

// TestPreAuth holds the signed bytes against the example in DSSE's
// specification.
func TestPreAuth(t *testing.T) {
	k := newKey(t)
	env, err := envelope.Sign("http://example.com/HelloWorld", []byte("hello world"), k)
	if err != nil {
		t.Fatal(err)
	}
	message := []byte("DSSEv1 29 http://example.com/HelloWorld 11 hello world")
	if !ed25519.Verify(k.Public(), message, env.GetSignatures()[0].GetSignature()) {
		t.Error("the signature is not over DSSE's encoding")
	}
}

func TestVerify(t *testing.T) {
	a, b, stranger := newKey(t), newKey(t), newKey(t)
	env, err := envelope.Sign(envelope.TaskSetType, []byte("payload"), a, b)
	if err != nil {
		t.Fatal(err)
	}
	payload, ids, err := envelope.Verify(env, envelope.TaskSetType, ring(a, b))
	if err != nil || string(payload) != "payload" || !slices.Equal(ids, []string{a.KeyID(), b.KeyID()}) {
		t.Fatalf("got %q, %v, %v", payload, ids, err)
	}
	other, err := envelope.Sign(envelope.TaskSetType, []byte("other"), stranger)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		edit func(*taskv1.Envelope)
		want error
	}{
		{"other payload", func(e *taskv1.Envelope) { e.Payload = []byte("Payload") }, envelope.ErrSignature},
		{"other type", func(e *taskv1.Envelope) { e.PayloadType = envelope.TrustRootType }, envelope.ErrMalformed},
		{"no type", func(e *taskv1.Envelope) { e.PayloadType = "" }, envelope.ErrMalformed},
		{"no payload", func(e *taskv1.Envelope) { e.Payload = nil }, envelope.ErrMalformed},
		{"huge payload", func(e *taskv1.Envelope) { e.Payload = make([]byte, envelope.MaxPayload+1) }, envelope.ErrMalformed},
		{"no signature", func(e *taskv1.Envelope) { e.Signatures = nil }, envelope.ErrMalformed},
		{"key twice", func(e *taskv1.Envelope) { e.Signatures[1] = e.Signatures[0] }, envelope.ErrMalformed},
		{"one bad of two", func(e *taskv1.Envelope) { e.Signatures[1].Signature[0] ^= 1 }, envelope.ErrSignature},
		{"short signature", func(e *taskv1.Envelope) { e.Signatures[0].Signature = e.Signatures[0].Signature[1:] }, envelope.ErrMalformed},
		{"ids swapped", func(e *taskv1.Envelope) {
			e.Signatures[0].KeyId, e.Signatures[1].KeyId = e.Signatures[1].KeyId, e.Signatures[0].KeyId
		}, envelope.ErrSignature},
		{"upper-case id", func(e *taskv1.Envelope) { e.Signatures[0].KeyId = "A" + e.Signatures[0].KeyId[1:] }, envelope.ErrMalformed},
		{"unknown key beside", func(e *taskv1.Envelope) { e.Signatures = append(e.Signatures, other.GetSignatures()[0]) }, envelope.ErrUnknownKey},
		{"unknown key beside a bad one", func(e *taskv1.Envelope) {
			e.Signatures = append(e.Signatures, other.GetSignatures()[0])
			e.Signatures[0].Signature[0] ^= 1
		}, envelope.ErrSignature},
		{"too many signatures", func(e *taskv1.Envelope) {
			for range envelope.MaxSignatures {
				e.Signatures = append(e.Signatures, other.GetSignatures()[0])
			}
		}, envelope.ErrMalformed},
		{"unknown field", func(e *taskv1.Envelope) { addUnknown(e) }, envelope.ErrMalformed},
		{"unknown field in a signature", func(e *taskv1.Envelope) { addUnknown(e.Signatures[1]) }, envelope.ErrMalformed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bad := proto.CloneOf(env)
			tt.edit(bad)
			if _, _, err := envelope.Verify(bad, envelope.TaskSetType, ring(a, b)); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
	if _, _, err := envelope.Verify(nil, envelope.TaskSetType, ring(a)); !errors.Is(err, envelope.ErrMalformed) {
		t.Errorf("no envelope: %v", err)
	}
}

func addUnknown(m proto.Message) {
	b := protowire.AppendTag(nil, 1000, protowire.VarintType)
	m.ProtoReflect().SetUnknown(protowire.AppendVarint(b, 1))
}

func TestSignRefuses(t *testing.T) {
	k := newKey(t)
	if _, err := envelope.Sign(envelope.TaskSetType, []byte("x")); !errors.Is(err, envelope.ErrMalformed) {
		t.Errorf("no signer: %v", err)
	}
	if _, err := envelope.Sign(envelope.TaskSetType, []byte("x"), k, k); !errors.Is(err, envelope.ErrMalformed) {
		t.Errorf("one key twice: %v", err)
	}
}

func FuzzDecode(f *testing.F) {
	k := newKey(f)
	env, err := envelope.Sign(envelope.TaskSetType, []byte("payload"), k)
	if err != nil {
		f.Fatal(err)
	}
	b, err := proto.Marshal(env)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		env, err := envelope.Decode(b)
		if err != nil {
			if !errors.Is(err, envelope.ErrMalformed) {
				t.Errorf("%v is not ErrMalformed", err)
			}
			return
		}
		payload, _, err := envelope.Verify(env, envelope.TaskSetType, ring(k))
		if err == nil && string(payload) != "payload" {
			t.Errorf("%q was never signed", payload)
		}
	})
}
