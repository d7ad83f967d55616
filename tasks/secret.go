package tasks

import (
	"bytes"
	"cmp"
	"fmt"
	"regexp"
	"slices"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
)

const (
	// SaltBytes is the length of the salt of a secret's digest.
	SaltBytes = 16
	// DigestBytes is the length of a secret's digest.
	DigestBytes = 32
	// maxSecrets is how many secrets a spec may name.
	maxSecrets = 64
)

var secretName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)

// SecretName reports whether a text can be the name of a secret.
func SecretName(s string) bool { return secretName.MatchString(s) }

// CheckSecret adds what is wrong with a reference to a secret.
func CheckSecret(p *Problems, field string, ref *taskv1.SecretRef) {
	switch {
	case ref == nil || ref.GetName() == "":
		p.Add(field+".name", "", "is required: give the name of a secret, as in millctl secret list")
	case !SecretName(ref.GetName()):
		p.Add(field+".name", ref.GetName(), "must be lower-case letters, digits, - . and _ , at most 63 bytes, and begin with a letter or digit")
	case len(ref.GetSalt()) != SaltBytes || len(ref.GetSha256()) != DigestBytes:
		p.Add(field, ref.GetName(), "has no digest of its value: millctl fills salt and sha256 in when the secret was put from here, or with --secret "+ref.GetName()+"=FILE")
	}
}

// SecretRefs returns the references in a spec, in the order of its fields. The
// messages are those of the spec itself.
func SecretRefs(spec proto.Message) []*taskv1.SecretRef {
	var out []*taskv1.SecretRef
	walkSecrets(spec.ProtoReflect(), &out)
	return out
}

func walkSecrets(m protoreflect.Message, out *[]*taskv1.SecretRef) {
	if ref, ok := m.Interface().(*taskv1.SecretRef); ok {
		*out = append(*out, ref)
		return
	}
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if f.Message() == nil || f.IsMap() || !m.Has(f) {
			continue
		}
		if !f.IsList() {
			walkSecrets(m.Get(f).Message(), out)
			continue
		}
		list := m.Get(f).List()
		for j := range list.Len() {
			walkSecrets(list.Get(j).Message(), out)
		}
	}
}

// SecretDigests returns what a leaf has to say of the secrets in its spec: one
// digest for each name, sorted. A name with two digests is an error.
func SecretDigests(spec proto.Message) ([]*taskv1.SecretDigest, error) {
	var out []*taskv1.SecretDigest
	for _, ref := range SecretRefs(spec) {
		i, found := slices.BinarySearchFunc(out, ref.GetName(), func(d *taskv1.SecretDigest, name string) int {
			return cmp.Compare(d.GetReference(), name)
		})
		if found {
			if !bytes.Equal(out[i].GetSha256(), ref.GetSha256()) || !bytes.Equal(out[i].GetSalt(), ref.GetSalt()) {
				return nil, fmt.Errorf("secret %s is named twice with different digests", ref.GetName())
			}
			continue
		}
		out = slices.Insert(out, i, &taskv1.SecretDigest{Reference: ref.GetName(), Salt: ref.GetSalt(), Sha256: ref.GetSha256()})
	}
	if len(out) > maxSecrets {
		return nil, fmt.Errorf("%d secrets are named, and there may be %d", len(out), maxSecrets)
	}
	return out, nil
}

// CheckSecretDigests returns an error unless a leaf says of secrets just what
// its spec does.
func CheckSecretDigests(spec proto.Message, leaf *taskv1.TaskLeaf) error {
	want, err := SecretDigests(spec)
	if err != nil {
		return err
	}
	same := slices.EqualFunc(want, leaf.GetSecretDigests(), func(a, b *taskv1.SecretDigest) bool {
		return a.GetReference() == b.GetReference() && bytes.Equal(a.GetSalt(), b.GetSalt()) && bytes.Equal(a.GetSha256(), b.GetSha256())
	})
	if !same {
		return fmt.Errorf("secret_digests of the leaf are not those of its spec: sign one digest for each secret that the spec names, sorted by name")
	}
	return nil
}
