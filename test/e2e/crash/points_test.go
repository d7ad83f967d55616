package crash

// either stands for a number that is 0 or 1, because the point does not say how
// far the task or a message was when the process died.
const either = -1

// What RESUMED says the journal knew.
const (
	notBegun   = "step not begun"
	begun      = "step begun, its outcome not recorded"
	applied    = "step applied, not verified"
	allDone    = "all steps verified"
	toUndo     = "step to be undone"
	inUndo     = "step being undone"
	undone     = "no step left to undo"
	anyFinding = ""
)

// expectation is what the history of a task has to tell.
type expectation struct {
	// requeued is how often the task went back to the queue, since the node
	// had not accepted it.
	requeued int
	// resumed is how often the agent found the task in its journal, with a
	// plan and without an end; found is what it then knew of the step.
	resumed  int
	found    string
	rebooted bool
	// held says that the outcome cannot be known. It is settled by hand.
	held bool
	// failed is the reason of a task that fails; empty: how the kind ends.
	failed string
	// runs are the numbers of runs that are right; nil: exactly 1.
	runs []int
}

// agentPoint is a place at which the agent, or a shim, is killed.
type agentPoint struct {
	name string
	// mount and command are what is expected of each kind; nil where the kind
	// does not come by.
	mount, command *expectation
	// failing is what is expected of a command that exits with 7, and broken of
	// a mount whose last step fails.
	failing, broken *expectation
	// provoke kills the agent by hand first, while the command runs.
	provoke bool
	// shim says that the process is the shim: the agent lives on.
	shim bool
}

// notAccepted: the node knew nothing of the task, and it is sent again.
func notAccepted() *expectation { return &expectation{requeued: 1} }

// planned: no plan was durable, so the task begins as if nothing had been.
func planned() *expectation { return &expectation{} }

// resumed: the plan was durable and the end was not.
func resumed(found string) *expectation { return &expectation{resumed: 1, found: found} }

// somewhere: the server's word may come before or after the plan or the end.
func somewhere() *expectation { return &expectation{resumed: either, found: anyFinding} }

// unknown: the program was started, or may have been, and no result is durable.
func unknown(runs ...int) *expectation { return &expectation{held: true, runs: runs} }

func both(name string, e func() *expectation) agentPoint {
	return agentPoint{name: name, mount: e(), command: e()}
}

func onMount(name string, e *expectation) agentPoint { return agentPoint{name: name, mount: e} }

// onFailure is for tasks that turn to undo. A command has one step to undo.
func onFailure(name, foundFailing, foundBroken string) agentPoint {
	return agentPoint{name: name, failing: resumed(foundFailing), broken: resumed(foundBroken)}
}

func inShim(name string, e *expectation) agentPoint {
	return agentPoint{name: name, command: e, shim: true}
}

// agentPoints are in the order in which a task comes by. A mount has the steps
// directory, reload, file and mount; a command has one.
func agentPoints() []agentPoint {
	inStep := func(found string) func() *expectation {
		return func() *expectation { return resumed(found) }
	}
	return []agentPoint{
		both("session.assignment.received", notAccepted),
		both("executor.accept.before", notAccepted),
		// Any write of the journal may be the one, also one before the task came.
		both("state.commit.before", func() *expectation { return &expectation{requeued: either} }),
		both("state.commit.written", func() *expectation { return &expectation{requeued: either} }),
		both("executor.accept.committed", planned),
		both("session.answer.ready", somewhere),
		both("session.events.sent", somewhere),
		both("session.ack.received", somewhere),
		both("executor.ack.before", somewhere),
		both("executor.ack.committed", somewhere),
		both("executor.plan.made", planned),
		both("executor.plan.committed", inStep(notBegun)),
		both("executor.step.observed", inStep(begun)),
		both("executor.step.apply", inStep(begun)),
		onMount("host.mkdir.before", resumed(begun)),
		onMount("host.mkdir.after", resumed(begun)),
		onMount("host.write.before", resumed(begun)),
		onMount("host.write.after", resumed(begun)),
		onMount("host.unit.enable.before", resumed(begun)),
		onMount("host.unit.enable.after", resumed(begun)),
		onMount("host.unit.start.before", resumed(begun)),
		onMount("host.unit.start.after", resumed(begun)),
		{name: "host.command.start.before", command: resumed(begun)},
		{name: "host.command.start.after", command: resumed(begun)},
		// Killed while the command runs, and again when it was found.
		{name: "executor.resume", command: &expectation{resumed: 2, found: begun}, provoke: true},
		{name: "executor.step.changed", mount: resumed(begun), command: resumed(begun), failing: resumed(begun)},
		both("executor.step.applied", inStep(applied)),
		{name: "executor.step.verified", mount: resumed(notBegun), command: resumed(allDone)},
		both("executor.verify.begun", inStep(allDone)),
		{name: "executor.finish.before", mount: resumed(allDone), command: resumed(allDone), failing: resumed(undone), broken: resumed(undone)},
		{name: "executor.finish.committed", mount: planned(), command: planned(), failing: planned(), broken: planned()},
		onFailure("executor.undo.turned", toUndo, toUndo),
		onFailure("executor.undo.step", inUndo, inUndo),
		onFailure("executor.undo.changed", inUndo, inUndo),
		onFailure("executor.undo.undone", undone, toUndo),

		// Nothing was started, and nothing ever will be under this record.
		inShim("shim.marker.before", &expectation{failed: "COMMAND_NOT_STARTED", runs: []int{0}}),
		inShim("shim.marker", unknown(0)),
		inShim("shim.started", unknown(0, 1)),
		inShim("shim.exited", unknown(1)),
		inShim("shim.result.before", unknown(1)),
		{name: "shim.result", command: &expectation{}, failing: &expectation{}, shim: true},
	}
}

// serverPoint is a place at which the server is killed.
type serverPoint struct {
	name string
	// mount and command are what is expected of each kind; nil: not tried.
	mount, command *expectation
	// provoke kills the agent by hand first, while the command runs.
	provoke bool
}

func serverPoints() []serverPoint {
	twice := func(name string, requeued int) serverPoint {
		return serverPoint{name: name, mount: &expectation{requeued: requeued}, command: &expectation{requeued: requeued}}
	}
	return []serverPoint{
		twice("server.create.committed", either), // the assignment may be on its way already
		twice("server.assign.committed", 1),
		twice("server.assign.sent", either), // what was sent may not have left the machine
		twice("server.events.before-commit", 0),
		twice("server.events.committed", 0),
		twice("server.ack.sent", 0),
		{name: "server.hello.committed", command: resumed(begun), provoke: true},
		{name: "server.output.stored", command: &expectation{}},
	}
}
