// Package boltstore keeps the control plane's store in one bbolt file.
//
// Writes are grouped: one writer takes all decisions that wait, runs them one
// after the other in a single transaction and makes them durable together. A
// decision reads before it writes, and what it writes is encoded and checked
// before the first byte of it goes in, so that it cannot fail half way and take
// the others with it.
package boltstore

// The schema, version 1. Numbers are 8 bytes, big endian; 0 is one zero byte;
// values are protos of millwright.server.v1 where nothing else is said.
//
//	meta
//	  version                          number
//	  generation                       number: of the log
//	  cluster                          ClusterRow
//	log        INDEX                   bytes of millwright.audit.v1.LogEntry
//	events     INDEX                   millwright.task.v1.TaskEvent, its node_event left out
//	history    TASK_ID 0 INDEX         empty
//	frames     NODE 0 JOURNAL 0 SEQ    INDEX
//	tasks      TASK_ID                 TaskRow
//	created    CREATE_INDEX            TASK_ID
//	by_node    NODE 0 CREATE_INDEX     TASK_ID
//	queued     NODE 0 CREATE_INDEX     TASK_ID: in state queued
//	sent       NODE 0 CREATE_INDEX     TASK_ID: with the node, not ended
//	due        NOT_AFTER TASK_ID       empty: in state queued; not_after in nanoseconds
//	nodes      NODE                    NodeRow
//	journals   NODE 0 JOURNAL          JournalRow
//	seen       NODE                    SeenRow
//	requests   CALLER 0 REQUEST        RequestRow
//	tokens     TOKEN_SHA256            TokenRow
//	envelopes  PAYLOAD_SHA256          millwright.task.v1.Envelope
//
// Added since, and made in a file of an earlier release when it is opened; that
// release reads the file as before:
//
//	health     NODE 0 KEY 0            HealthRow
//	changes    NODE 0 INDEX            empty: log entries with a change of a condition
//	trimmed    NODE                    the newest INDEX that was taken out of changes by age or number
const schemaVersion = 1

var (
	bucketMeta      = []byte("meta")
	bucketLog       = []byte("log")
	bucketEvents    = []byte("events")
	bucketHistory   = []byte("history")
	bucketFrames    = []byte("frames")
	bucketTasks     = []byte("tasks")
	bucketCreated   = []byte("created")
	bucketByNode    = []byte("by_node")
	bucketQueued    = []byte("queued")
	bucketSent      = []byte("sent")
	bucketDue       = []byte("due")
	bucketNodes     = []byte("nodes")
	bucketJournals  = []byte("journals")
	bucketSeen      = []byte("seen")
	bucketRequests  = []byte("requests")
	bucketTokens    = []byte("tokens")
	bucketEnvelopes = []byte("envelopes")
	bucketHealth    = []byte("health")
	bucketChanges   = []byte("changes")
	bucketTrimmed   = []byte("trimmed")

	keyVersion    = []byte("version")
	keyGeneration = []byte("generation")
	keyCluster    = []byte("cluster")
)

// addedBuckets are those that files of earlier releases lack.
func addedBuckets() [][]byte { return [][]byte{bucketHealth, bucketChanges, bucketTrimmed} }

// firstBuckets are those that every file has.
func firstBuckets() [][]byte {
	return [][]byte{
		bucketMeta, bucketLog, bucketEvents, bucketHistory, bucketFrames, bucketTasks,
		bucketCreated, bucketByNode, bucketQueued, bucketSent, bucketDue, bucketNodes,
		bucketJournals, bucketSeen, bucketRequests, bucketTokens, bucketEnvelopes,
	}
}
