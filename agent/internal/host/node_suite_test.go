//go:build millwright_node

package nodehost_test

import (
	"bytes"
	"os"
	"os/exec"
	"testing"

	"github.com/gpuaas/millwright/tasks/host/hosttest"
)

// The real node passes the suite that the node in memory passes.
func TestHostSuite(t *testing.T) {
	needNode(t)
	n := newNode(t, t.TempDir())
	hosttest.Run(t, hosttest.Env{
		ForStep: n.ForStep,
		Prober:  n.Prober,
		Dir:     t.TempDir(),
		Link: func(t testing.TB, target, link string) {
			t.Helper()
			if err := os.Symlink(target, link); err != nil {
				t.Fatal(err)
			}
		},
		Occupy:  occupy,
		Started: started,
		Image:   image,

		Packages: suitePackages(t),
		Slurm:    slurm,
	})
}

// occupy makes a process that works in a directory.
func occupy(t testing.TB, dir string) (pid int, release func()) {
	t.Helper()
	c := exec.Command("/bin/sleep", "1000")
	c.Dir = dir
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	return c.Process.Pid, func() {
		_ = c.Process.Kill() // it may have ended
		_ = c.Wait()         // it was killed
	}
}

// started counts the lines that the runs of a command have left.
func started(t testing.TB, _ []string, file string) int {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(b, []byte("\n"))
}
