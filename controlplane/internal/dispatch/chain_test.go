package dispatch_test

import (
	"encoding/hex"
	"testing"

	"github.com/gpuaas/millwright/controlplane/internal/dispatch"
)

// The hashes are those of the event chain in test/formats/testdata/v0/vectors.
func TestFirstPrevHash(t *testing.T) {
	for _, tc := range []struct{ previous, want string }{
		{"", "b1e987dbc649789517d10cc01499801d2faab7980340cd58487895cd0793fe2f"},
		{"6f0f7d2c-29a1-4e5e-8c57-7f4a1c0b9a01", "d002d34b32254daa000540a3a86aae2af3fc68f55eb1e15f541f25c138bb2adf"},
	} {
		if got := hex.EncodeToString(dispatch.FirstPrevHash("gpu-001", 1, tc.previous)); got != tc.want {
			t.Errorf("FirstPrevHash(gpu-001, 1, %q) = %s, want %s", tc.previous, got, tc.want)
		}
	}
}
