// Package crash names the points at which a test may kill the server.
// [Registry] has them all. In a release build [Point] does nothing and is
// inlined away, and nothing of the registry is linked; a build with the tag
// millwright_crash looks at each point into the directory that its environment
// names:
//
//	arm         the name of a point: the process is killed there, once
//	arm-NAME    "kill N": killed there the Nth time
//	trace       where it is there, each point adds its name as a line
//	hit-NAME    written as proof before the process dies
package crash

// Spot says what the server has done when it dies at a point.
type Spot string

// The spots.
const (
	// Before a decision is durable: it was never made.
	Before Spot = "before"
	// Committed: it is durable, and nobody was told.
	Committed Spot = "committed"
	// Message: a message has come, or was handed on to be sent.
	Message Spot = "message"
)

// Info is one point.
type Info struct {
	Name    string `json:"name"`
	Program string `json:"program"` // server
	Spot    Spot   `json:"spot"`
	What    string `json:"what"` // where it is, in words
}
