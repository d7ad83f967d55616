//go:build millwright_crash

package command

import "os"

// crashEnvironment hands the crash points of the agent on to the shim.
func crashEnvironment() []string {
	if dir := os.Getenv("MILLWRIGHT_CRASH_DIR"); dir != "" {
		return []string{"MILLWRIGHT_CRASH_DIR=" + dir}
	}
	return nil
}
