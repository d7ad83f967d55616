//go:build !millwright_crash

package command

// crashEnvironment is what a shim needs to be killed by a test: nothing, in a
// release build.
func crashEnvironment() []string { return nil }
