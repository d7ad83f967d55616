// Package envelope signs and verifies what nodes carry out. It is public so
// that programs which create tasks can sign them.
//
// An envelope is DSSE: Ed25519 signatures over the payload's type and exact
// bytes. Its payload is a task set, which names its task leaves by an RFC 6962
// Merkle root, so that one signature covers any number of nodes and each node
// gets its own leaf with an inclusion proof.
//
// To sign, fill in leaves and call [SignTaskSet]. To decide whether a node may
// believe an envelope takes the cluster's keys: see package trustroot.
package envelope
