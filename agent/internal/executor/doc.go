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
// The points at which a fault build can be killed are in package crash.
package executor
