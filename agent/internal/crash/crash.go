//go:build !millwright_crash

package crash

// Point is a place at which a fault build can be killed. Here it is nothing.
func Point(string) {}

// Fault is a place at which a fault build can be killed or made to fail. Here
// it returns nil.
func Fault(string) error { return nil }
