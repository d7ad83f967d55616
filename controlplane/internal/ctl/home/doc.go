// Package home keeps what an operator owns: the keys, the genesis of the trust
// root, and the contexts, each of which is a server with the certificate by
// which it knows the operator. It is one directory, for one cluster:
//
//	config.yaml       version, the operator's name, the current context
//	genesis.json      the genesis of the trust root
//	signing.pem       the daily key, which signs tasks
//	tls.pem           the key of the operator's certificate
//	recovery.pem      the key that signs updates of the trust root, until it is
//	                  moved offline
//	contexts/*.json   the context files, as they were verified
//
// Directories have mode 0700 and files 0600. Nothing is ever replaced but
// config.yaml and a context of the same name.
package home
