// Package gate is the node's own decision about a task: accept, defer or
// refuse. It is asked when a task is delivered and again before it starts, and
// trusts nothing that the control plane says: signatures, cluster, node, proof,
// window and floor, the kind and its spec, the impact allowed, and the rules of
// the node's own policy file, which only root can change. There is no mode
// without signatures, and without a valid policy file nothing is accepted.
//
// The gate writes nothing, so that what it refuses leaves no trace on the disk.
// Its log lines about refusals are coalesced.
package gate
