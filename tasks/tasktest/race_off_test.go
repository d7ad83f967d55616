//go:build !race

package tasktest_test

// eachCase of a kind's suite is run.
const eachCase = 1
