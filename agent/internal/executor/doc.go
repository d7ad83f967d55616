// Package executor carries tasks out. It is the only caller of steps and the
// only writer of the journal.
//
// # One task
//
// A task is accepted by one transaction that also remembers its id and numbers
// its first event. Then it waits for its time and its locks, is planned while
// they are held, and its plan is frozen. Each step is observed, applied and
// verified, and each of these is durable before the next begins, so that the
// journal is at most one action behind the node. After the last step the whole
// spec is verified, and the last event, the result and the intent are written
// together. A step that fails turns the task to undo: its steps are undone, the
// last first. What cannot be known or undone is held for a person.
//
// # After a crash
//
// What was durable decides. A step that was not begun is observed. One that was
// observed may have been applied: an idempotent one is applied again, one that
// checks first is verified first, a command is found again by the host or its
// outcome is unknown and the task is held, and a reboot is proven by another
// boot id. A step that was applied is verified. After a reboot, steps that were
// applied or verified in an earlier boot are verified again, and applied again
// where the reboot has undone them.
//
// A journal that cannot be written stops a task where it is. It never turns to
// undo for that; it goes on from what is durable once the disk lets it.
//
// # Crash points
//
// Builds with the tag millwright_crash can be killed at these points:
//
//	state.commit.before          in a transaction, before it is written
//	state.commit.written         after it is durable, before the mark is
//	state.commit.marked          after the mark is durable
//	executor.accept.before       before a delivered task is written
//	executor.accept.committed    after it is durable, before it is answered
//	executor.plan.made           after a plan was made, before it is written
//	executor.plan.committed      after it is durable
//	executor.step.observed       after Observe is durable
//	executor.step.apply          before Apply is called
//	executor.step.changed        after Apply returned, before that is written
//	executor.step.applied        after Apply is durable
//	executor.step.verified       after Verify is durable
//	executor.verify.begun        after the final check is announced in the journal
//	executor.finish.before       before the last event is written
//	executor.finish.committed    after it is durable
//	executor.undo.turned         after the turn to undo is durable
//	executor.undo.step           before Undo is called
//	executor.undo.changed        after Undo returned, before that is written
//	executor.undo.undone         after Undo is durable
//	executor.held                after a task was held
//	executor.cancel.committed    after a cancel is durable
//	executor.resume              after a task was found again at start
//	executor.ack.before          before an acknowledgement is written
//	executor.ack.committed       after it is durable
package executor
