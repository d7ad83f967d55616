//go:build !millwright_crash

// Package crash names the points at which a test may kill the process. In a
// release build [Point] does nothing and is inlined away; a build with the tag
// millwright_crash kills itself at the point that its environment names.
package crash

// Point is a named place in the program, for example journal.step.observed.
func Point(string) {}
