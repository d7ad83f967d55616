// Package door shows who is let in by a whole server, over its real port: with
// which certificate, with which token, to which RPC, and to whose data.
package door
