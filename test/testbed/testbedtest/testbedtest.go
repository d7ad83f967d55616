// Package testbedtest gives tests real nodes.
package testbedtest

import (
	"bytes"
	"context"
	"fmt"
	"hash/fnv"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/gpuaas/millwright/test/testbed"
)

// downTimeout bounds the cleaning up after a test.
const downTimeout = time.Minute

// Up makes a testbed for the test, under a name that no other test has, and
// takes it away when the test ends. When the test has failed by then, it logs
// the end of every node's journal first. Name, Owned and Log of cfg are set
// here.
//
// Nodes need root. Without it the test is skipped, but fails where CI=true.
func Up(t testing.TB, cfg testbed.Config) *testbed.Testbed {
	t.Helper()
	NeedRoot(t)
	cfg.Name, cfg.Owned, cfg.Log = Name(t), true, Log(t)
	tb, err := testbed.Up(t.Context(), cfg)
	if err != nil {
		t.Fatalf("testbed: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), downTimeout)
		defer cancel()
		if t.Failed() {
			logJournals(ctx, t, tb)
		}
		if err := tb.Down(ctx); err != nil {
			t.Errorf("testbed: %v", err)
		}
	})
	return tb
}

// NeedRoot skips the test without root, and fails it where CI=true: a suite
// that is required must not pass by not running.
func NeedRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("CI") == "true" {
		t.Fatal("this test boots nodes and needs root")
	}
	t.Skip("this test boots nodes and needs root: run it as root")
}

// Name returns a testbed name that belongs to the test and this process alone.
func Name(t testing.TB) string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(t.Name()))
	return fmt.Sprintf("t%d-%08x", os.Getpid(), h.Sum32())
}

// Log returns a logger that writes to the test's log.
func Log(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), nil))
}

// Exec runs a command in the node, fails the test unless it exits with 0, and
// returns what it wrote to its standard output.
func Exec(t testing.TB, n *testbed.Node, argv ...string) string {
	t.Helper()
	res, err := n.Exec(t.Context(), argv...)
	if err != nil {
		t.Fatal(err)
	}
	return string(res.Stdout)
}

func logJournals(ctx context.Context, t testing.TB, tb *testbed.Testbed) {
	for _, n := range tb.Nodes() {
		var b bytes.Buffer
		if err := n.Logs(ctx, &b, "--lines=200"); err != nil {
			t.Logf("journal of %s: %v", n.Name(), err)
		}
		t.Logf("end of the journal of %s:\n%s", n.Name(), b.String())
	}
}
