// Package crash names the points at which a test may kill the process, or make
// a change of the host fail. [Registry] has them all. In a release build
// [Point] and [Fault] do nothing and are inlined away, and nothing of the
// registry is linked; a build with the tag millwright_crash looks at each point
// into the directory that its environment names:
//
//	arm         the name of a point: the process is killed there, once
//	arm-NAME    "kill N" or "fail N": killed, or failed, the Nth time
//	trace       where it is there, each point adds its name as a line
//	hit-NAME    written as proof before the process dies or the call fails
package crash

// Program is the process that comes by a point.
type Program string

// The programs of a node.
const (
	Agent Program = "agent"
	Shim  Program = "shim"
)

// Spot says what a death at a point may do to a task. A model judges by it what
// the outcome may be.
type Spot string

// The spots.
const (
	// Apart: the point says nothing about how far the task is.
	Apart Spot = "apart"
	// Unaccepted: the node does not know the task yet; it is sent again.
	Unaccepted Spot = "unaccepted"
	// Within: the task is durable and goes on from what the journal says.
	Within Spot = "within"
	// Before and After a change of the host. The call can be made to fail there.
	Before Spot = "before"
	After  Spot = "after"
	// Unstarted: the shim has no marker, so the program never starts.
	Unstarted Spot = "unstarted"
	// Unknown: the marker is durable and the result is not.
	Unknown Spot = "unknown"
	// Recorded: the result is durable.
	Recorded Spot = "recorded"
	// Joining: the host is not a node yet, or its certificate is being renewed.
	Joining Spot = "joining"
)

// Info is one point.
type Info struct {
	Name    string  `json:"name"`
	Program Program `json:"program"`
	Spot    Spot    `json:"spot"`
	What    string  `json:"what"` // where it is, in words
}
