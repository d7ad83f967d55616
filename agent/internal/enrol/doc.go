// Package enrol gives the node its identity: it joins with a bundle, keeps what
// it got in files, and renews the certificate while it is good.
//
// The directory holds key.pem (made first, before anyone is asked, so that a
// lost answer can be asked for again with the same key), ca.pem, svid.pem,
// trust.json (the chain of trust roots) and node.json. node.json is written
// last: with it the node has joined.
package enrol
