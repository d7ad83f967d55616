//go:build race

package tasktest_test

// eachCase is how many cases of a kind's suite the race detector sees: one of
// so many. Without it all are run, in a suite of their own.
const eachCase = 8
