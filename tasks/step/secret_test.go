package step_test

import (
	"crypto/sha256"
	"errors"
	"io/fs"
	"testing"

	taskv1 "github.com/gpuaas/millwright/proto/millwright/task/v1"
	"github.com/gpuaas/millwright/tasks/step"
)

// TestSecretIsThere applies a step again, as after a crash, when the value can no
// longer be had: what was written counts as written, and its undo takes it away.
func TestSecretIsThere(t *testing.T) {
	n, h := node(t, "dir /etc/app\nsecret key value\n")
	salt := []byte("0123456789abcdef")
	sum := sha256.Sum256(append(append([]byte(nil), salt...), "value"...))
	s := step.WriteSecret(&taskv1.SecretWriteStep{
		Path: "/etc/app/key", Mode: 0o400, User: "root", Group: "root", Secret: &taskv1.SecretRef{Name: "key", Salt: salt, Sha256: sum[:]},
	})
	if _, err := s.Apply(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	do(t, n, "nosecrets\n")
	if _, err := s.Apply(t.Context(), h); err != nil {
		t.Errorf("applied again: %v", err)
	}
	if err := s.Undo(t.Context(), h, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Lstat(t.Context(), "/etc/app/key"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("after the undo: %v, want nothing there", err)
	}
	if _, err := s.Apply(t.Context(), h); err == nil {
		t.Error("a value that cannot be had was written")
	}
}
