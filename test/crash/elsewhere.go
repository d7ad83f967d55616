package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// elsewhere are points that no story can come by, and what is shown of them by
// other tests, which do not kill the real agent there. A point that is reached
// after all must be taken off the list.
type elsewhere struct {
	points string // how their names begin
	why    string
	shown  []shown
}

// shown is a test, and what it shows.
type shown struct{ file, test, what string }

func unreached() []elsewhere {
	return []elsewhere{
		{"host.disk.", "nodes of these stories have no disks of their own", []shown{
			{"agent/internal/executor/tasktest_test.go", "TestKinds", "the executor killed, and each call failing, around each change; the node is in memory"},
			{"agent/internal/host/disks/disks_test.go", "TestLoopDisk", "a real loop device is wiped and formatted"},
			{"test/e2e/storage_scratch/storage_scratch_test.go", "TestScratch", "the real agent makes scratch of a loop disk of a node"},
		}},
		{"host.array.", "the kernel of the machines that test has no md", []shown{
			{"agent/internal/executor/tasktest_test.go", "TestKinds", "the executor killed, and each call failing, around each change; the node is in memory"},
			{"agent/internal/host/disks/array_test.go", "TestArray", "what mdadm is asked; mdadm is a stand-in"},
		}},
	}
}

// excused returns the entry that a point is in; nil: a story must come by it.
func excused(name string) *elsewhere {
	for _, e := range unreached() {
		if strings.HasPrefix(name, e.points) {
			return &e
		}
	}
	return nil
}

// checkElsewhere asks that each entry is of points that there are, and names
// tests that there are.
func checkElsewhere(root string, list []elsewhere, points []point) error {
	for _, e := range list {
		if !slices.ContainsFunc(points, func(p point) bool { return strings.HasPrefix(p.Name, e.points) }) {
			return fmt.Errorf("points that are shown elsewhere: there is none that begins with %s", e.points)
		}
		if e.why == "" || len(e.shown) == 0 {
			return fmt.Errorf("points that are shown elsewhere: %s has no reason or no test", e.points)
		}
		for _, s := range e.shown {
			b, err := os.ReadFile(filepath.Join(root, s.file))
			if err != nil {
				return fmt.Errorf("test that shows %s: %w", e.points, err)
			}
			if !strings.Contains(string(b), "\nfunc "+s.test+"(t *testing.T) {") {
				return fmt.Errorf("test that shows %s: %s has no %s", e.points, s.file, s.test)
			}
		}
	}
	return nil
}
