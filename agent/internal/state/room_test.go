package state_test

import (
	"math"
	"strings"
	"testing"

	"github.com/gpuaas/millwright/agent/internal/state"
)

// TestRoom wants the disk of the state to be judged before it is full, with an
// error that counts as a full disk and names the directory.
func TestRoom(t *testing.T) {
	cfg := config(t.TempDir(), &fakeClock{now: t0})
	cfg.Reserve = 1
	s := open(t, cfg)
	if err := s.Room(); err != nil {
		t.Errorf("Room with a byte in reserve = %v, want none", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	cfg.Reserve = math.MaxUint64
	if err := open(t, cfg).Room(); !state.DiskFull(err) || !strings.Contains(err.Error(), cfg.Dir) {
		t.Errorf("Room on a disk that is smaller than the reserve = %v, want that %s is full", err, cfg.Dir)
	}
}
