// Package pki is who is who: the layout of Millwright's SPIFFE ids, the strict
// check of the certificates that carry them, the sources of a program's own
// certificate, and the TLS configurations made from them.
//
// Every id is spiffe://<trust-domain>/<role>/<name>, with the role one of node,
// operator, controller and server. There is one path by which a peer is
// verified, whatever issued its certificate: a bounded chain to a CA of the own
// trust domain, then [StrictLeaf], in VerifyConnection, which also runs where a
// TLS session is resumed.
package pki
