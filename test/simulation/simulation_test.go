package simulation

import (
	"flag"
	"os"
	"testing"
)

var (
	seeds = flag.Int("seeds", 200, "how many schedules to play")
	from  = flag.Uint64("from", 1, "the first seed")
	seed  = flag.Uint64("seed", 0, "play this one alone, and show its history")
)

func shm(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "millwright-simulation-")
	if err != nil {
		dir = t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func TestSchedules(t *testing.T) {
	tp := newTemplate(t, shm(t))
	if *seed != 0 {
		out := play(t, tp, *seed, func(s string) { t.Log(s) })
		t.Logf("%+v", out)
		return
	}
	for i := range *seeds {
		s := *from + uint64(i)
		out := play(t, tp, s, nil)
		for _, b := range out.broken {
			t.Errorf("seed %d: %s", s, b)
		}
	}
}
