// Package script runs millctl by transcripts, which a person can read. Each runs
// the real program in an empty directory, over real TLS: those in
// testdata/cluster with the real control plane and real agents, those in
// testdata/standin with a stand-in that can also be told to fail.
package script
