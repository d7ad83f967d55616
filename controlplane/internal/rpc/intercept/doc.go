// Package intercept stands before every RPC of the server. One table lists each
// RPC with who may call it, how often, and what is recorded of it; what is not
// in the table is denied. Each call passes, in this order: recover, log,
// identity, authorize, limit, audit.
package intercept
