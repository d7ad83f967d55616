// Package state is the agent's durable memory: the journal of its tasks, the
// frames that the control plane has not yet acknowledged, the task ids it has
// seen, and the intents it restores by itself. It is the only package of the
// agent that touches bbolt.
//
// # On disk
//
// All records are protobuf messages of millwright.agent.v1 unless the drawing
// says otherwise; numbers are big endian.
//
//	state.db (0600)
//	├── meta
//	│   ├── version            schema version, in decimal
//	│   ├── journal            JournalMeta
//	│   ├── head               seq of the last frame, 8 bytes, and its SHA-256
//	│   ├── acked              seq of the last acknowledged frame, 8 bytes
//	│   ├── boot               boot id in which the intents were last seen to
//	│   ├── forgotten          unix second up to which seen ids were forgotten, 8 bytes
//	│   ├── health/<key>       millwright.health.v1.HealthEdge: the last that was told of a condition
//	│   └── health-cursor      sequence of the kernel's log that was read, 8 bytes, and its boot id
//	├── tasks    <task id>                    TaskRecord
//	├── open     <task id>                    state, 1 byte: tasks that have not ended
//	├── order    <accept seq>                 task id: for lists, the newest first
//	├── steps    <task id> / <step, 4 bytes>  StepRecord
//	├── seen     <task id>                    SeenRecord
//	├── forget   <unix second> <task id>      empty: seen ids by when they are forgotten
//	├── intents  <key>                        IntentRecord
//	├── frames   <seq>                        the frame, as it is hashed and sent
//	├── closing  <seq of the last event>      task id: ended, and not yet acknowledged
//	└── outputs  <task id> / <step, 4 bytes>  empty: commands whose output is not all uploaded
//
//	state.mark (0600)
//	└── two slots of 512 bytes, written in turn: CRC-32C, length, JournalMark
//
// # Commits
//
// [Store.Update] commits in groups: callers that arrive while a commit is under
// way share the next one, and each returns only once its own change is durable.
// A closure's writes are kept aside until it returns, so that one that fails
// changes nothing and spoils no other. There is no goroutine: the first caller
// in line commits for those behind it.
//
// # The mark
//
// bbolt can lose its last commit without an error when a meta page is damaged,
// and opens an empty file as a fresh database. Therefore each commit also
// rewrites a high-water mark in a file of its own, before its callers are told.
// A state file that is missing or older than its mark is not taken for a first
// start: a new journal begins, with a floor below which nothing is carried out,
// and the old file, if there is one, is set aside and never deleted.
//
// # A full disk
//
// Behind its last page the file has blocks that the disk has given already, for the
// last steps and results of what runs. [Store.Room] defers new tasks long before.
//
// # Damage
//
// A damaged page can make bbolt run in circles, ask for any amount of memory, or
// fault in a goroutine of its own. So a file is looked at by another process, with
// a limit of time and memory, before it is opened: first by a reader of pages that
// trusts none of them, then by bbolt.
//
// That takes the longer the more history there is. So the mark also describes the
// file as its agent left it: inode, size, the time at which the kernel saw it
// changed, the sum of the pages that note the free ones. A file that is still that
// one, and that was found whole before, is only glanced at: the two meta pages, the
// tasks that have not ended with their steps, the intents, the frames to be sent.
// After a boot this holds when the agent had closed the file, and in the same boot
// also when it was killed, once: until all of the file has been looked at again, the
// next kill makes the next start look at all of it, so that a page that ends its
// reader makes no loop. [Store.Scrub] does that look beside the work. [CheckCopy] and [RepairCopy] do the same with a
// copy, for a person. What was repaired is for reading: the mark does not let an
// agent go on from a file that lacks what was told.
package state
