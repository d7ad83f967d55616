package tasks_test

import (
	"bytes"
	"testing"

	secretv1 "github.com/gpuaas/millwright/proto/millwright/secret/v1"
	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks"
)

// TestSecretDigests: a leaf says of secrets what its spec does, no more and no
// less.
func TestSecretDigests(t *testing.T) {
	salt, sum := bytes.Repeat([]byte{1}, tasks.SaltBytes), bytes.Repeat([]byte{2}, tasks.DigestBytes)
	spec := &secretv1.PlaceSpec{Secret: &taskv1.SecretRef{Name: "a", Salt: salt, Sha256: sum}}
	want, err := tasks.SecretDigests(spec)
	if err != nil || len(want) != 1 || want[0].GetReference() != "a" || !bytes.Equal(want[0].GetSha256(), sum) || !bytes.Equal(want[0].GetSalt(), salt) {
		t.Fatalf("%v, %v", want, err)
	}
	if err := tasks.CheckSecretDigests(spec, &taskv1.TaskLeaf{SecretDigests: want}); err != nil {
		t.Error(err)
	}
	if err := tasks.CheckSecretDigests(&secretv1.RemoveSpec{}, &taskv1.TaskLeaf{}); err != nil {
		t.Error(err)
	}
	other := &taskv1.SecretDigest{Reference: "a", Salt: salt, Sha256: bytes.Repeat([]byte{3}, tasks.DigestBytes)}
	for name, leaf := range map[string]*taskv1.TaskLeaf{
		"none": {}, "another": {SecretDigests: []*taskv1.SecretDigest{other}}, "twice": {SecretDigests: append(want, want...)},
		"one more": {SecretDigests: append(want, &taskv1.SecretDigest{Reference: "b", Salt: salt, Sha256: sum})},
	} {
		if tasks.CheckSecretDigests(spec, leaf) == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
