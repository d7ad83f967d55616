// Package alerts holds the alert rules of packaging/prometheus against promtool,
// which is Debian's: it is fetched, and not installed, since its package would
// start a server.
package alerts
