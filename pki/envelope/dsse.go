package envelope

import (
	"crypto/ed25519"
	"errors"
	"fmt"
	"strconv"

	"google.golang.org/protobuf/proto"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/proto/strict"
)

// The payload types of envelopes.
const (
	// TaskSetType is the payload type of a task set.
	TaskSetType = "application/vnd.millwright.taskset.v1+proto"
	// TrustRootType is the payload type of a version of the trust root.
	TrustRootType = "application/vnd.millwright.trustroot.v1+proto"
)

// Limits of an envelope, checked before anything is computed over it.
const (
	// MaxPayload is the largest payload, in bytes.
	MaxPayload = 256 << 10
	// MaxSignatures is the largest number of signatures.
	MaxSignatures = 16
)

var (
	// ErrMalformed is wrapped by the error about an envelope, task set or leaf
	// that breaks a rule of its form.
	ErrMalformed = errors.New("malformed")
	// ErrUnknownKey is wrapped by the error about a signature of a key that
	// the verifier does not know.
	ErrUnknownKey = errors.New("unknown key")
	// ErrSignature is wrapped by the error about a signature that does not
	// verify.
	ErrSignature = errors.New("signature does not verify")
	// ErrProof is wrapped by the error about a leaf that is not in its set.
	ErrProof = errors.New("leaf is not in the signed set")
)

// A Signer signs with one Ed25519 key. [Key] is one.
type Signer interface {
	// KeyID is the id of the key, as [KeyID] computes it.
	KeyID() string
	// SignMessage returns the 64-byte Ed25519 signature over message.
	SignMessage(message []byte) ([]byte, error)
}

// Sign returns the envelope over payload with one signature of each signer, in
// the order of the signers. There must be a signer, and no key may sign twice.
func Sign(payloadType string, payload []byte, signers ...Signer) (*taskv1.Envelope, error) {
	env := &taskv1.Envelope{PayloadType: payloadType, Payload: payload}
	message := preAuth(payloadType, payload)
	for _, s := range signers {
		sig, err := s.SignMessage(message)
		if err != nil {
			return nil, fmt.Errorf("sign with key %s: %w", s.KeyID(), err)
		}
		env.Signatures = append(env.Signatures, &taskv1.Signature{KeyId: s.KeyID(), Signature: sig})
	}
	if err := checkForm(env, payloadType); err != nil {
		return nil, err
	}
	return env, nil
}

// Verify checks the form of env, then every one of its signatures with the key
// that lookup returns for its id, and returns the verified payload and the ids
// of the keys in the order of the signatures. Use the returned payload and not
// the envelope's. It says nothing about what the keys may sign.
//
// The error wraps [ErrMalformed], [ErrSignature] or [ErrUnknownKey]. Signatures
// of known keys are checked first: with ErrUnknownKey, those of all keys that
// are known do verify.
func Verify(env *taskv1.Envelope, payloadType string, lookup func(keyID string) (ed25519.PublicKey, bool)) (payload []byte, keyIDs []string, err error) {
	if err := checkForm(env, payloadType); err != nil {
		return nil, nil, err
	}
	payload = env.GetPayload()
	message := preAuth(payloadType, payload)
	var unknown error
	for _, s := range env.GetSignatures() {
		pub, ok := lookup(s.GetKeyId())
		switch {
		case !ok:
			unknown = fmt.Errorf("key %q: %w", s.GetKeyId(), ErrUnknownKey)
		case len(pub) != ed25519.PublicKeySize || !ed25519.Verify(pub, message, s.GetSignature()):
			return nil, nil, fmt.Errorf("key %s: %w", s.GetKeyId(), ErrSignature)
		}
		keyIDs = append(keyIDs, s.GetKeyId())
	}
	if unknown != nil {
		return nil, nil, unknown
	}
	return payload, keyIDs, nil
}

// Decode returns the envelope in its serialised form b. Unknown fields are
// refused, as are forms that [Verify] would refuse before it looks at a
// signature. The error wraps [ErrMalformed].
func Decode(b []byte) (*taskv1.Envelope, error) {
	env := new(taskv1.Envelope)
	if err := unmarshal(b, env); err != nil {
		return nil, err
	}
	if err := checkForm(env, env.GetPayloadType()); err != nil {
		return nil, err
	}
	return env, nil
}

func checkForm(env *taskv1.Envelope, payloadType string) error {
	if env == nil {
		return fmt.Errorf("%w: envelope is missing", ErrMalformed)
	}
	if err := strict.Check(env); err != nil {
		return fmt.Errorf("%w: envelope: %w", ErrMalformed, err)
	}
	if got := env.GetPayloadType(); got != payloadType || got == "" {
		return fmt.Errorf("%w: payload type %q: want %q", ErrMalformed, got, payloadType)
	}
	if n := len(env.GetPayload()); n == 0 || n > MaxPayload {
		return fmt.Errorf("%w: payload has %d bytes: 1 to %d are allowed", ErrMalformed, n, MaxPayload)
	}
	if n := len(env.GetSignatures()); n == 0 || n > MaxSignatures {
		return fmt.Errorf("%w: %d signatures: 1 to %d are allowed", ErrMalformed, n, MaxSignatures)
	}
	seen := make(map[string]bool, len(env.GetSignatures()))
	for i, s := range env.GetSignatures() {
		switch {
		case !isKeyID(s.GetKeyId()):
			return fmt.Errorf("%w: signatures[%d]: key id %q is not %d lower-case hexadecimal digits", ErrMalformed, i, s.GetKeyId(), keyIDLen)
		case len(s.GetSignature()) != ed25519.SignatureSize:
			return fmt.Errorf("%w: signatures[%d]: %d bytes: want %d", ErrMalformed, i, len(s.GetSignature()), ed25519.SignatureSize)
		case seen[s.GetKeyId()]:
			return fmt.Errorf("%w: signatures[%d]: key %s signed twice", ErrMalformed, i, s.GetKeyId())
		}
		seen[s.GetKeyId()] = true
	}
	return nil
}

// preAuth is DSSE's pre-authentication encoding.
func preAuth(payloadType string, payload []byte) []byte {
	b := make([]byte, 0, len(payload)+len(payloadType)+32)
	b = append(b, "DSSEv1 "...)
	b = strconv.AppendInt(b, int64(len(payloadType)), 10)
	b = append(b, ' ')
	b = append(b, payloadType...)
	b = append(b, ' ')
	b = strconv.AppendInt(b, int64(len(payload)), 10)
	b = append(b, ' ')
	return append(b, payload...)
}

// unmarshal decodes b into m and refuses what m's type does not name.
func unmarshal(b []byte, m proto.Message) error {
	if err := strict.Unmarshal(b, m); err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return nil
}
