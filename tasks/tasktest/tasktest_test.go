package tasktest_test

import (
	"flag"
	"testing"

	"github.com/gpuaas/millwright/tasks/all"
	"github.com/gpuaas/millwright/tasks/tasktest"
)

var _ = flag.Bool(tasktest.Update, false, "write golden files")

// dirs hold the cases of all kinds.
var dirs = []string{"../container/testdata", "../gpu/testdata", "../mig/testdata", "../secret/testdata", "../slurm/testdata", "../storage/testdata", "../system/testdata"}

func load(t *testing.T) []tasktest.Case {
	t.Helper()
	var cases []tasktest.Case
	for _, dir := range dirs {
		c, err := tasktest.Load(all.Registry(), dir)
		if err != nil {
			t.Fatal(err)
		}
		cases = append(cases, c...)
	}
	return cases
}

// TestKinds puts all kinds to the suite with the reference runner. The agent's
// executor is put to the same cases by its own test.
func TestKinds(t *testing.T) {
	cases := load(t)
	if eachCase == 1 {
		tasktest.Run(t, newReference(faults{}), all.Registry(), cases)
		return
	}
	var some []tasktest.Case
	for i := 0; i < len(cases); i += eachCase {
		some = append(some, cases[i])
	}
	tasktest.Sample(t, newReference(faults{}), all.Registry(), some)
}

// TestSuiteFindsFaults breaks the runner on purpose: for each fault at least one
// case must give a wrong answer.
func TestSuiteFindsFaults(t *testing.T) {
	for _, tc := range []struct {
		name string
		f    faults
		kind string // whose cases can find it; empty: all
	}{
		{"what undo needs is not durable before apply", faults{observeLate: true}, ""},
		{"a step that failed midway is not undone", faults{skipUnsure: true}, ""},
		{"a command is started again", faults{rerun: true}, "system.command"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, c := range load(t) {
				if tc.kind != "" && c.Kind != tc.kind {
					continue
				}
				if err := tasktest.Check(t.Context(), t, newReference(tc.f), all.Registry(), c); err != nil {
					t.Logf("found by case %s: %v", c.Name, err)
					return
				}
			}
			t.Error("no case found the fault")
		})
	}
}

// TestSecretsAreMarked walks the registry.
func TestSecretsAreMarked(t *testing.T) {
	if bad := tasktest.Secrets(all.Registry()); len(bad) > 0 {
		t.Errorf("fields that may hold a secret and are not marked debug_redact: %v", bad)
	}
}
