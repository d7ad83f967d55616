package tasktest_test

import (
	"testing"

	"github.com/gpuaas/millwright/tasks/tasktest"
	"github.com/gpuaas/millwright/tasks/tasktest/packagetest"
)

// TestPackageSteps puts the package steps to the suite with the reference
// runner. The agent's executor is put to the same cases by its own test.
func TestPackageSteps(t *testing.T) {
	cases, err := tasktest.Load(packagetest.Registry(), "packagetest/testdata")
	if err != nil {
		t.Fatal(err)
	}
	tasktest.Run(t, newReference(faults{}), packagetest.Registry(), cases)
}
