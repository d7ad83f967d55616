package host

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"
)

// ErrSlurm is wrapped by the error of a question that Slurm did not answer, or
// of a change that it refused. The message has what it said. Nothing may be
// concluded from it: a node whose state is unknown is not drained.
var ErrSlurm = errors.New("no answer from Slurm")

// SlurmRef names a node as Slurm knows it.
type SlurmRef struct {
	// Node is its name; unset: the machine's host name up to the first dot.
	Node string
	// Servers are the controllers, as HOST or HOST:PORT, the primary first. Slurm's
	// programs ask them for their configuration on a machine that has none, as one
	// whose slurmd does not run; unset: there must be one.
	Servers []string
}

// SlurmNode is what a Slurm controller says of a node.
type SlurmNode struct {
	// Name is how Slurm calls it.
	Name string
	// Known is unset for a node that the controller does not have. Nothing else
	// is set then.
	Known bool
	// States are the state and its flags: IDLE, MIXED, ALLOCATED, DOWN, DRAIN,
	// COMPLETING, NOT_RESPONDING, DYNAMIC_NORM ...
	States []string
	// Reason is why it is drained or down, without who said so and when.
	Reason string
	// Gres are its generic resources as Slurm writes them, such as gpu:h100:8, or
	// nothing.
	Gres string
	// Features are its features.
	Features []string
	// Partitions are those that it is in.
	Partitions []string
	// Version is that of its slurmd; unset: it has not registered.
	Version string
	// Address is where the controller reaches it.
	Address string
	// RealMemoryMiB is the memory that jobs can have.
	RealMemoryMiB uint64
	// SlurmdStart is when its slurmd was started, by the second; zero: unknown.
	SlurmdStart time.Time
	// Jobs are those that have not left the node, those that complete included.
	Jobs []SlurmJob
}

// Is reports whether the node has a state or flag.
func (n SlurmNode) Is(state string) bool { return slices.Contains(n.States, state) }

// Drained reports whether no new job is started on the node.
func (n SlurmNode) Drained() bool { return n.Is("DRAIN") }

// DrainedBy reports whether the node is drained by an owner.
func (n SlurmNode) DrainedBy(owner string) bool {
	return n.Drained() && SlurmOwned(n.Reason, owner)
}

// SlurmOwned reports whether a reason carries an owner's tag. Slurm appends to
// a reason what happens to the node later.
func SlurmOwned(reason, owner string) bool {
	rest, ok := strings.CutPrefix(reason, owner)
	return ok && (rest == "" || rest[0] == ':' || rest[0] == ' ')
}

// SlurmJob is a job on a node.
type SlurmJob struct {
	ID, User, State, Name string
	// End is when its time is over; zero: not known, or it has no limit.
	End time.Time
}

// SlurmController is what a controller says of itself.
type SlurmController struct {
	// Name is its host.
	Name string
	// Version is such as 22.05.8.
	Version string
}

// SlurmMachine is what slurmd says of the machine.
type SlurmMachine struct {
	// Version is slurmd's, such as 22.05.8.
	Version string
	// RealMemoryMiB is all the memory that there is.
	RealMemoryMiB uint64
	// HostName is what Slurm calls the machine.
	HostName string
}

// SlurmReader asks Slurm, in child processes with a deadline each. An error that
// wraps [ErrSlurm] has Slurm's own words.
type SlurmReader interface {
	// SlurmNode asks the controller for a node. One that it does not know has
	// Known unset, and no error.
	SlurmNode(ctx context.Context, ref SlurmRef) (SlurmNode, error)
	// SlurmController asks the controller for itself.
	SlurmController(ctx context.Context, servers []string) (SlurmController, error)
	// SlurmMachine asks slurmd, which need not run, for the machine. Without the
	// program it is fs.ErrNotExist.
	SlurmMachine(ctx context.Context) (SlurmMachine, error)
}

// MungeProbe is what a credential that was made and read on the machine says.
type MungeProbe struct {
	// Encoded is when munged made it, by its own clock.
	Encoded time.Time
	// Skew is how much that is ahead of the machine's clock; negative: behind.
	Skew time.Duration
}

// SlurmProber makes bounded checks of Slurm's parts.
type SlurmProber interface {
	// ProbeMunge has munged make a credential and read it.
	ProbeMunge(ctx context.Context) (MungeProbe, error)
	// ProbeSlurmServer connects to a controller's port and says nothing to it.
	ProbeSlurmServer(ctx context.Context, server string) error
	// ProbeSlurmJob runs a job of a moment on a node, with the generic resources
	// asked for, such as gpu:1, and returns how many devices it was given. The
	// job is cancelled when it has not begun in time.
	ProbeSlurmJob(ctx context.Context, ref SlurmRef, gres string) (devices int, err error)
}

// SlurmChanger changes what a controller has of a node. Slurm compares nothing
// before it changes a node, so that an administrator who drains a node at the
// very same moment may be overridden; who calls looks again afterwards.
type SlurmChanger interface {
	// DrainSlurmNode lets no new job start on a node. The reason that Slurm shows
	// is the owner's tag and, after a colon, the text. A node that the owner has
	// drained stays as it is; one that is drained or down for another reason does
	// too, and the error wraps [ErrNotOurs] and names it.
	DrainSlurmNode(ctx context.Context, ref SlurmRef, owner, text string) error
	// ResumeSlurmNode ends a drain of an owner. A node that is not drained stays
	// as it is; for one that is drained for another reason the error wraps
	// [ErrNotOurs] and names it.
	ResumeSlurmNode(ctx context.Context, ref SlurmRef, owner string) error
	// ReviveSlurmNode is ResumeSlurmNode for a node that was rebooted for the owner:
	// one that is down as well, under the same reason, is up again. A controller
	// whose ReturnToService is not 2 has such a node as down.
	ReviveSlurmNode(ctx context.Context, ref SlurmRef, owner string) error
	// DeleteSlurmNode has the controller forget a dynamic node, if it knows it.
	// Its slurmd must not run, since it would not come back by itself.
	DeleteSlurmNode(ctx context.Context, ref SlurmRef) error
}
