package executor_test

import (
	"testing"

	"github.com/gpuaas/millwright/tasks/tasktest"
	"github.com/gpuaas/millwright/tasks/tasktest/packagetest"
)

// TestPackageSteps puts the package steps to the suite with the real executor:
// no kind of the product has them alone.
func TestPackageSteps(t *testing.T) {
	cases, err := tasktest.Load(packagetest.Registry(), "../../../tasks/tasktest/packagetest/testdata")
	if err != nil {
		t.Fatal(err)
	}
	tasktest.Run(t, newRunner, packagetest.Registry(), cases)
}
