// Package script runs millctl by transcripts: testdata/*.txtar, which a person
// can read. Each runs the real program in an empty directory, against a server
// of its own behind real TLS.
package script
