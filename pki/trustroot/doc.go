// Package trustroot is which keys may authorise what in a cluster, and the
// judgement of a task set by them.
//
// A trust root is a chain of signed versions. The genesis names the cluster:
// the cluster's id is the SHA-256 over its payload, and whoever pins that id
// knows the genesis. Each later version is a whole root that is signed by the
// recovery keys of the one before it. A version never goes back, and a key that
// was removed never comes back.
package trustroot
